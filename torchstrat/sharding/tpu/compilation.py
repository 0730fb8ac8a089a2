"""How often a step is compiled, and why again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from torchstrat.core import nest, terminal
from torchstrat.core.errors import InvalidArgumentError

logger = logging.getLogger("torchstrat.tpu")

DEFAULT_MAX_DIFFERENT_GRAPHS = 16
SETTLING_COMPILES = 2
"""The first step makes gradients and optimizer state, later ones find them: two programs for one signature."""

OF_SOME_REPLICAS = "replicas ["
"""How the names of inputs begin where replicas have different numbers of rows."""

Shapes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Signature:
    """What a compiled program depends on, as far as it can be told beforehand.

    ``step``: the function's name and place; ``inputs``: name → dtype and shape of each input of a replica; ``rows``:
    how many replicas have inputs of that shape, if not all have.
    """

    step: str
    inputs: Shapes
    active: tuple[int, ...]

    def difference_to(self, other: Signature) -> str:
        """What is new in this one."""
        if self.step != other.step:
            return f"a step that was not run before, {self.step}"
        before, now = dict(other.inputs), dict(self.inputs)
        if any(name.startswith(OF_SOME_REPLICAS) for name in {*before, *now}) and not set(before) & set(now):
            return "; ".join(f"{name} is {text} now" for name, text in now.items())
        changes = [
            f"{name} is {now.get(name, 'absent')} now, it was {before.get(name, 'absent')}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if self.active != other.active:
            changes.append(f"replicas {list(self.active)} take part now, it was {list(other.active)}")
        return "; ".join(changes)


@dataclass(frozen=True)
class Compilation:
    """One compiled program of a step. ``run``: the number of the run, from 0; ``reason``: in words."""

    run: int
    signature: Signature
    reason: str


class CompilationLog:
    """The programs that a strategy's steps were compiled to.

    Args:
        most: how many different signatures (see `Signature`) are accepted.
        count: compilations of the runtime so far.
    """

    def __init__(self, most: int, count: Callable[[], int]) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidArgumentError(f"max_different_graphs must be an int of at least 1; got {most!r}.")
        self._most, self._count = most, count
        self._seen: dict[Signature, int] = {}
        self._first_of_step: set[Signature] = set()
        self._last: Signature | None = None
        self._run = 0
        self.entries: list[Compilation] = []

    def admit(self, signature: Signature) -> None:
        """Before anything is recorded.

        Raises:
            InvalidArgumentError: this would be one signature too many.
        """
        if signature in self._seen or len(self._seen) < self._most:
            return
        assert self._last is not None
        raise InvalidArgumentError(
            f"this run would be compiled again, and {len(self._seen)} different programs have been "
            f"(max_different_graphs={self._most}): {signature.difference_to(self._last)}. Every new shape costs a "
            "compilation: pad inputs to a few sizes, set drop_last=True on the loader, or allow more."
        )

    def require_same_shapes(self, signature: Signature) -> None:
        """For ``RunOptions(enable_dynamic_batch_size=False)``: the step has had no other inputs.

        Raises:
            InvalidArgumentError: it has.
        """
        others = [seen for seen in self._seen if seen.step == signature.step and seen != signature]
        if others:
            raise InvalidArgumentError(
                f"the options of this run do not allow its inputs to change: {signature.difference_to(others[-1])}. "
                "Set drop_last=True on the loader, pad, or leave enable_dynamic_batch_size at its default."
            )

    def execute(self, signature: Signature, run: Callable[[], None]) -> None:
        """Let the recorded step run, and write down what was compiled for it."""
        if not any(seen.step == signature.step for seen in self._seen):
            self._first_of_step.add(signature)
        before, times = self._count(), self._seen.get(signature, 0)
        with terminal.shown(f"compiling {signature.step}", here=times < SETTLING_COMPILES):
            run()
        compiled = self._count() - before
        if compiled:
            reason = self._reason(signature, times)
            self.entries.append(Compilation(self._run, signature, reason))
            expected = signature in self._first_of_step and times < SETTLING_COMPILES
            (logger.info if expected else logger.warning)("run %d was compiled: %s", self._run, reason)
        self._seen[signature] = times + bool(compiled)
        self._last, self._run = signature, self._run + 1

    def _reason(self, signature: Signature, times: int) -> str:
        if not self._seen:
            return "it is the first"
        if times == 0:
            assert self._last is not None
            return self._nearest(signature)
        if signature in self._first_of_step and times < SETTLING_COMPILES:
            return "the first run made gradients and optimizer state, which now are inputs"
        return (
            "shapes are as before, so something else in the program changed: a Python number or branch in the step, "
            "train() or eval(), requires_grad, or what the loop did with tensors of the devices between two runs"
        )

    def _nearest(self, signature: Signature) -> str:
        same_step = [seen for seen in self._seen if seen.step == signature.step]
        assert self._last is not None
        return signature.difference_to(same_step[-1] if same_step else self._last)


def describe_inputs(args: Iterable[object], kwargs: Mapping[str, object]) -> Shapes:
    """Name → dtype and shape of every tensor in a replica's arguments; of a number its type, since a program has it as
    an input; of anything else its value."""
    named = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
    found: list[tuple[str, str]] = []
    for name, value in named:
        for path, leaf in _paths(name, value):
            found.append((path, _described(leaf)))
    return tuple(found)


def _described(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__ if type(leaf) in (int, float, complex) else f"{leaf!r:.60}"


def _paths(name: str, value: object) -> list[tuple[str, object]]:
    if not nest.is_nested(value):
        return [(name, value)]
    return [pair for key, child in nest.children(value) for pair in _paths(f"{name}[{key!r}]", child)]
