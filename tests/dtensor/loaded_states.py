"""Programs that load what ``state_dict()`` has returned, or what they have loaded before, once steps have been made: on
one device these are the tensors that steps change."""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from typing import Any

import torch

import torchstrat as ts
from tests.dtensor import parameter_programs as _parameter_programs  # noqa: F401  # which are in the table, too
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
def state_that_numbers_parameters_otherwise(one: Program) -> None:
    one.train()
    state = copy.deepcopy(one.optimizer.state_dict())
    (group,) = state["param_groups"]
    state["state"] = {-number: entries for number, entries in state["state"].items()}
    group["params"] = [-number for number in group["params"]]
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


@program()
def what_state_dict_has_given_is_written_to(one: Program) -> None:
    state = one.model.state_dict()
    state["0.weight"].mul_(2.0)
    torch.add(state["0.bias"], 1.0, out=state["0.bias"])
    torch._foreach_mul_([state["0.weight"], state["0.bias"]], 0.5)
    state["2.weight"][1].zero_()
    one.train()
    state = one.model.state_dict()
    state["0.weight"].data[0] = 1.0
    state["0.bias"].detach().add_(1.0)
    one.seen += [value.clone() for value in one.model.state_dict().values()]
    state["0.weight"][1] = 2.0
    state["2.weight"][0].zero_()
    one.model.load_state_dict(state)
    state["2.weight"].copy_(torch.ones_like(state["2.weight"]))
    one.optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    one.train()
    one.seen += _sums(one.optimizer)


@program()
def state_of_an_optimizer_from_outside_of_scopes(one: Program) -> None:
    """Loaded before it has made a step, as the optimizer that takes over in training does."""
    one.train()
    first, state = one.optimizer, one.optimizer.state_dict()
    for given in (state, copy.deepcopy(state)):
        one.optimizer = ADAM(one.model.parameters(), lr=0.02)
        one.optimizer.load_state_dict(given)
        one.train()
        one.seen += [*_sums(first), *_sums(one.optimizer)]
        one.optimizer.load_state_dict(one.optimizer.state_dict())
        one.train()
    one.seen += _sums(first)


@program()
def state_in_inference_mode(one: Program) -> None:
    """Taken there, and loaded there, between steps; tensors that were made there, too."""
    one.train()
    with torch.inference_mode():
        state, values = one.optimizer.state_dict(), one.model.state_dict()
        best = copy.deepcopy((state, values))
        one.seen += [value.sum() for value in best[1].values()]
    one.train()
    with torch.inference_mode():
        one.optimizer.load_state_dict(state)
        one.model.load_state_dict(best[1])
    one.train()
    one.seen += _sums(one.optimizer)


@program()
def state_that_copies_load(one: Program) -> None:
    """Deep copies that a later scope makes, and copies of these."""
    target = one.model
    for _ in range(2):
        with one.strategy.scope():
            target = copy.deepcopy(target)
        one.train()
        target.load_state_dict(one.model.state_dict())
        one.train()
        one.seen += [value.clone() for value in target.state_dict().values()]


def write_late(logical: int) -> list[str]:
    """What a program is told that writes to a copy after steps; by a view too, and to an array of it."""
    said = []
    for write in (lambda value: value.mul_(2.0), lambda value: value[0].zero_(), lambda value: value.numpy().fill(1.0)):
        one = Program(logical)
        value = one.model.state_dict()["0.weight"]
        one.train()
        try:
            write(value)
            one.train()
            said.append("")
        except (ts.errors.UnsupportedError, ValueError) as error:
            said.append(str(error))
        one.strategy.close()
    return said


def read_late(logical: int) -> tuple[list[str], bool]:
    """What a copy that is read after steps is warned with, which is read twice; and whether it is of torch's own class
    in files and deep copies."""
    one = Program(logical)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.train()
        taken = one.model.state_dict(), one.optimizer.state_dict()
        copied, file = copy.deepcopy(taken[0]), io.BytesIO()
        torch.save(taken, file)
        one.train()
        one.optimizer.load_state_dict(taken[1])
        one.model.load_state_dict(taken[0])
        one.strategy.reduce("mean", taken[0]["0.weight"].shape[0], axis=None)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert taken[0]["0.weight"].sum().isfinite()
        said += [str(warning.message) for warning in caught]
    file.seek(0)
    plain = torch.load(file, weights_only=True)[0]["0.weight"], copied["0.weight"]
    one.strategy.close()
    return said, all(type(value) is torch.Tensor for value in plain) and torch.equal(*plain)


def run_all(logical: int, names: list[str]) -> Any:
    """A process that is told to call this one has these programs, too."""
    return programs.run_all(logical, names)
