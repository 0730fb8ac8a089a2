"""Which state there is in a program, and for each kind of it: what an edit on several replicas means.

The one list: `check_replicas` compares by it what has to be equal, the table of state (tests/matrix) has its rows, and
a page of the docs is made from it.

"The first replica" is the first that takes part in a run; in one process the user's own objects are its.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.core.engine import Communicator
from torchstrat.core.errors import InvalidArgumentError, ReplicaDriftError
from torchstrat.core.optimizers import own_state
from torchstrat.core.tensor_classes import memory_of
from torchstrat.core.variables import VariableRegistry
from torchstrat.distributed.collectives.agreement import agree, fingerprint

Digest = tuple[Any, ...]


class Belongings(NamedTuple):
    """What of a strategy's state is read. ``has_state``: whether this process has all of an optimizer's state."""

    registry: VariableRegistry
    has_state: Callable[[Optimizer], bool]


class StateKind(NamedTuple):
    """``read``: names and digests of what has to be equal on all replicas between runs; None if nothing has to be.
    ``local``: the rule where replicas step variables of their own; None: the same."""

    name: str
    rule: str
    read: Callable[[Belongings], Iterable[tuple[str, Digest]]] | None = None
    local: str | None = None


def _named_parameters(state: Belongings) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names that the program has for them. Those of two models (``0.weight``) are told apart by the module."""
    named = state.registry.named_tensors()
    outermost = state.registry.outermost_names()
    names = {name: outermost.get(id(tensor), name) for name, tensor in named.items()}
    counts = Counter(names.values())
    for name, tensor in named.items():
        yield names[name] if counts[names[name]] == 1 else f"{names[name]} ({name})", tensor


def _parameters(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for name, tensor in _named_parameters(state):
        yield f"parameter {name}", _digest(tensor)


def _requires_grad(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for name, tensor in _named_parameters(state):
        yield f"requires_grad of {name}", (tensor.requires_grad,)


def _buffers(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for name, slot in state.registry.named_buffer_slots().items():
        if not state.registry.buffer_rules.keeps_own(slot.module, slot.name):
            yield f"buffer {slot.name} of {type(slot.module).__name__} ({name})", _digest(slot.tensor)


def _optimizer_state(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for number, optimizer in enumerate(state.registry.optimizers()):
        if state.has_state(optimizer):
            for place, tensor in _stepped(optimizer):
                for name, value in (own_state(optimizer).get(tensor) or {}).items():
                    yield f"state {name} of parameter {place} of {_called(optimizer, number)}", _digest(value)


def _hyperparameters(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for number, optimizer in enumerate(state.registry.optimizers()):
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and state.has_state(optimizer):
                    yield f"{name} of group {place} of {_called(optimizer, number)}", _digest(value)


def _helpers(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for number, helper in enumerate(state.registry.helpers()):
        if not isinstance(helper, Optimizer) and hasattr(helper, "state_dict"):
            for name, value in helper.state_dict().items():
                yield f"{name} of {_called(helper, number)}", _digest(value)


def _modes(state: Belongings) -> Iterator[tuple[str, Digest]]:
    for number, module in enumerate(state.registry.modules()):
        yield f"training mode of {type(module).__name__} (module {number})", (module.training,)


KINDS = (
    StateKind(
        "parameter",
        "edits in place take effect once: what all make alike, and else the first replica's; a row that a lookup with "
        "max_norm scales counts on whichever replica; afterwards equal everywhere",
        _parameters,
        "each replica's own until `LocalUpdate.end_round` brings them together; a change between runs is everyone's",
    ),
    StateKind(
        "gradient",
        "combined when a backward pass ends; until then, and under no_sync, each replica's own",
        local="each replica's own",
    ),
    StateKind(
        "buffer",
        "as `set_aggregation` says; else, where replicas differ, floating ones of modules that train are averaged and "
        "all others are the first replica's (`buffer_rules`), with a warning for those that are not torch's statistics",
        _buffers,
        "the same, when a round ends; until then each replica's own",
    ),
    StateKind(
        "optimizer state",
        "the optimizer's alone to step; edits take effect once, and are the first replica's where they differ",
        _optimizer_state,
        "each replica's own, from round to round; a change between runs is everyone's",
    ),
    StateKind(
        "hyperparameter",
        "of a group, also of tensors: the first replica's before each step",
        _hyperparameters,
        "the first replica's when a round ends",
    ),
    StateKind(
        "scheduler and scaler",
        "each replica's code steps or updates its own, and the first one's is what lasts",
        _helpers,
        "each replica's own until a round ends, and then the first one's",
    ),
    StateKind(
        "training mode",
        "each replica's own within a run; the first one's is what lasts",
        _modes,
        "the same, at the latest when a round ends",
    ),
    StateKind(
        "requires_grad",
        "each replica's own within a run; the first one's is what lasts",
        _requires_grad,
        "the same, at the latest when a round ends",
    ),
    StateKind(
        "attribute",
        "plain attributes of modules, containers and plain tensors among them: each replica's own, from run to run; "
        "code outside of runs sees the first one's, and what it sets is everyone's",
    ),
    StateKind(
        "settings of the thread",
        "gradient mode, autocast, context variables, what the step reaches of `threading.local`: each replica begins "
        "with the calling thread's, and the first one's is what lasts; under torchrun each process's own, and without "
        "what is set in runs that it has no rows in",
    ),
    StateKind(
        "plain tensor outside of modules",
        "in a closure, a list, an object of the program's own: shared by the replicas of one process, each of which "
        "changes it, with a warning; under torchrun each process's own, and without what is done "
        "in runs that it has no rows in",
    ),
    StateKind(
        "module made in a step",
        "kept or made anew by every step, its parameters are variables from its first forward pass on: the first "
        "replica's values, combined gradients (`Newborn`)",
    ),
    StateKind(
        "leaf tensor made in a step",
        "in no module, or in a deep copy, with its optimizer: each replica's own, for its rows, while the run lasts; "
        "an optimizer with which another replica or a later run goes on is refused (`VariableRegistry.note_step_of`)",
    ),
    StateKind("memory", "what shares storage with any of these is found when a step is first run, and changes with it"),
    StateKind("random numbers", "a stream for each replica, the same in one process and in several"),
)


def digests(state: Belongings) -> dict[str, Digest]:
    """By name, in one order on all replicas."""
    return {name: digest for kind in KINDS if kind.read is not None for name, digest in kind.read(state)}


def _stepped(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    return enumerate(tensor for group in optimizer.param_groups for tensor in group["params"])


def _called(helper: object, number: int) -> str:
    return f"{type(helper).__name__} {number}"


def _digest(value: object) -> Digest:
    value = memory_of(value)
    if isinstance(value, torch.Tensor):
        has_values = not value.is_meta and not torch.nn.parameter.is_lazy(value)
        shape = tuple(value.shape) if has_values else ()
        return (shape, str(value.dtype), *(fingerprint([value]) if has_values else ()))
    if isinstance(value, bool | int | float | complex | str | type(None)):
        return (repr(value),)
    if isinstance(value, list | tuple):
        return tuple(_digest(one) for one in value)
    if isinstance(value, dict):
        return tuple((str(key), _digest(one)) for key, one in value.items())
    return (type(value).__name__,)


VARIABLE = "TORCHSTRAT_CHECK"


def compare(communicator: Communicator, state: Belongings, when: str) -> None:
    """All ranks call it. Raises `ReplicaDriftError`, on all of them, naming the first thing that is not equal."""
    call = "check_replicas"
    agree(communicator, call)
    everyone = communicator.all_gather_object(digests(state), call)
    found = first_difference(everyone, communicator.ranks)
    if found is not None:
        raise ReplicaDriftError(
            f"{found}{when}. Replicas have to stay equal between runs: look for what depends on the rank, such as an "
            "edit through .data, a value loaded or drawn on some ranks only, or a scheduler that sees its own loss."
        )


def first_difference(everyone: Sequence[Mapping[str, Digest]], ranks: Sequence[int]) -> str | None:
    """The name of the first thing that differs, and which replicas have what; None if all are alike."""
    for name in dict.fromkeys(name for own in everyone for name in own):
        groups: dict[object, list[int]] = {}
        for rank, own in zip(ranks, everyone, strict=True):
            groups.setdefault(own.get(name), []).append(rank)
        if len(groups) > 1:
            told = (
                "missing" if digest is None else "one" if not place else "another"
                for place, digest in enumerate(groups)
            )
            each = ", ".join(
                f"{word} on replica{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}"
                for word, where in zip(told, groups.values(), strict=True)
            )
            return f"{name} is not the same on all replicas ({each})"
    return None


class PeriodicChecks:
    """``TORCHSTRAT_CHECK=every:100``: look after every 100th run of a strategy."""

    def __init__(self, every: int) -> None:
        self._every, self._runs = every, 0

    @staticmethod
    def from_environment() -> PeriodicChecks | None:
        value = os.environ.get(VARIABLE, "")
        if not value:
            return None
        word, _, count = value.partition(":")
        if word != "every" or not count.isascii() or not count.isdigit() or not int(count):
            raise InvalidArgumentError(f"{VARIABLE}={value!r} is not understood; write every:100, or unset it.")
        return PeriodicChecks(int(count))

    def is_due(self) -> int:
        """Called after each run: its number if it is one to look after, else 0."""
        self._runs += 1
        return 0 if self._runs % self._every else self._runs
