"""Programs that load what ``state_dict()`` has returned, or what they have loaded before, once steps have been made: on
one device these are the tensors that steps change."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from tests.dtensor import programs
from tests.dtensor.programs import ADAM, Program, program


def _sums(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value.double().sum() for entries in optimizer.state.values() for value in entries.values()]


def _state_is_loaded_again(one: Program, *, given: bool, dtype: torch.dtype = torch.float64) -> None:
    """``given``: it has been loaded before, and not come from the optimizer. Others of ``dtype`` are converted."""
    one.train()
    state: Any = one.optimizer.state_dict()
    if given:
        state = copy.deepcopy(state)
        for entries in state["state"].values():
            entries |= {name: value.to(dtype) for name, value in entries.items() if name != "step"}
    first = one.optimizer
    with one.strategy.scope():
        second = ADAM(one.model.parameters(), lr=0.02)
    for one.optimizer in (first, second, first):
        one.optimizer.load_state_dict(state)
        one.train()
        one.seen += [*_sums(first), *_sums(second)]
    entries = state["state"][0]
    entries["exp_avg"] = torch.ones_like(entries["exp_avg"])
    one.optimizer.load_state_dict(state)
    one.train()
    one.seen += _sums(one.optimizer)


program("state_that_was_given")(partial(_state_is_loaded_again, given=True))
program("state_that_was_given_and_converted")(partial(_state_is_loaded_again, given=True, dtype=torch.float32))
program("state_of_an_optimizer")(partial(_state_is_loaded_again, given=False))


@program()
def state_that_is_edited_and_loaded(one: Program) -> None:
    one.train()
    state = one.optimizer.state_dict()
    for _ in range(2):
        state["state"][0]["exp_avg"].mul_(0.5)
        one.optimizer.load_state_dict(state)
        one.seen += _sums(one.optimizer)
    one.train()


@program()
def parameters_that_are_loaded_again(one: Program) -> None:
    state = one.model.state_dict()
    one.train()
    one.model.load_state_dict(state)
    one.seen += [value.clone() for value in one.model.state_dict().values()]
    state = one.model.state_dict()
    state["0.weight"].mul_(2.0)
    one.model.load_state_dict(state)
    one.train()


def run_all(logical: int, names: list[str]) -> Any:
    """A process that is told to call this one has these programs, too."""
    return programs.run_all(logical, names)
