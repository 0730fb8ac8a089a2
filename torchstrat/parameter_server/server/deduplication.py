"""Which pushes were applied, so that a function that runs again changes nothing twice.

A push is named by its function's id and its own index within one run of the function. Per function one integer holds a
bit per applied push; functions below the watermark are finished for good, and their records are gone. The records of
unfinished functions alone are kept, so memory is bounded by how far the coordinator lets the queue of its workers run
ahead of its slowest function, not by the length of the training.

Servers remember of a push what shows that a function that runs again makes other changes than before. A function whose
worker was lost makes its pushes once more, under the same names, and a server that has applied its part of one drops
that. If the function decides by what it reads, the second run may change other variables under the same name: some
would be changed by the first run, others by the second. So a run that is no first one asks all servers what they have
of it, before its first push, and is refused where it differs. First runs ask nobody.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch

from torchstrat.core.errors import CommunicationTimeoutError, FencedError, RepeatedFunctionError
from torchstrat.parameter_server.messages import (
    COORDINATOR,
    Accumulation,
    AppliedPushes,
    EditOp,
    OptimizerStep,
    ShardEdit,
    ShardKey,
)

# Which of these two it is depends on who else works, and may be the other when the function runs again.
_OPERATIONS = {name: number for number, name in enumerate(get_args(EditOp))} | {"move": 0, "assign": 0}
_MOST_NAMES = 3
_PRIME = 1_000_003
_LEFT = -2
"""In the place of an optimizer's number: gradients that are left for later steps."""


class AppliedPart(NamedTuple):
    """The part of a push that one server has applied.

    ``servers``: all that got parts that change something by themselves. ``what``: equal for changes of the same kind to
    the same shards. ``rows``: equal for the same rows of tables. ``some``: numbers of the first variables of it;
    ``names``, where somebody asks.
    """

    servers: tuple[int, ...]
    what: int
    rows: int
    some: tuple[int, ...]
    names: tuple[str, ...] = ()


def part_of(
    servers: tuple[int, ...],
    steps: Sequence[OptimizerStep] = (),
    edits: Sequence[ShardEdit] = (),
    accumulation: Accumulation | None = None,
) -> AppliedPart:
    """Every push pays for this: microseconds, where to apply it takes hundreds. Which gradients a push sets to nothing
    is no part of it: that is left out as long as nobody is known to have left any."""
    made: list[object] = []
    keys: list[ShardKey] = []
    rows = 0
    sent: list[tuple[int, OptimizerStep | Accumulation]] = [(step.optimizer, step) for step in steps]
    if accumulation is not None and (accumulation.dense or accumulation.rows):
        sent.append((_LEFT, accumulation))
    for number, gradients in sent:
        dense, of_tables = [key for key, _ in gradients.dense], [key for key, _, _ in gradients.rows]
        made += (number, *dense, -1, *of_tables)
        keys += dense or of_tables
        for _, ids, _ in gradients.rows:
            rows = rows * _PRIME + _digest(ids)
    for edit in edits:
        made += (_OPERATIONS[edit.op], edit.key, edit.rows is not None)
        keys.append(edit.key)
        if edit.rows is not None:
            rows = rows * _PRIME + _digest(edit.rows)
    # Whole numbers alone have the same hash in every process.
    return AppliedPart(servers, hash(tuple(made)), rows, tuple([number for number, _ in keys[:_MOST_NAMES]]))


def _digest(ids: torch.Tensor) -> int:
    """Of row numbers: their sum and number, which batches do not share by chance, and which cost next to nothing."""
    return int(ids.sum()) * _PRIME + len(ids)


class EarlierRuns:
    """Of the function that runs again. ``applied``: server → push → what it has applied of it."""

    def __init__(self, function: int, applied: Mapping[int, Mapping[int, AppliedPart]]) -> None:
        self._function = function
        self._applied = applied

    def check(self, index: int, parts: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise `RepeatedFunctionError` where push ``index`` is to make other changes than the one that servers have.

        ``parts``: by server, those that change something by themselves. One that changes nothing is fine: then what the
        earlier run has changed counts. Other rows are, where all of the earlier push was applied: another worker reads
        other data, and what it sends is dropped.
        """
        earlier = {server: pushes[index] for server, pushes in self._applied.items() if index in pushes}
        if not earlier or not parts:
            return
        then = next(iter(earlier.values())).servers
        is_whole = earlier.keys() >= set(then)
        differs = set(then) != parts.keys()
        for server, part in earlier.items():
            if not differs and server in parts:
                now = part_of(then, **parts[server])
                differs = now.what != part.what or (not is_whole and now.rows != part.rows)
        if differs:
            names = ", ".join(dict.fromkeys(name for part in earlier.values() for name in part.names))
            where = ", ".join(map(str, sorted(earlier)))
            raise RepeatedFunctionError(
                f"function {self._function} runs again, because its worker was lost, and makes other changes than "
                f"before: its push {index} has changed {names} on ps {where}, and is now "
                "one of other variables, of another kind, or of other rows. What was changed stays as it is. Let the "
                "function decide by its arguments, and not by values that it changes itself; or make one change at its "
                "end. The functions that were queued behind it are cancelled."
            )


class AppliedRecords:
    """Thread-safe. A push is applied between `begin` and `finish` (or `abandon`, if it could not be).

    ``owner``: the server, for error messages.
    """

    def __init__(self, owner: str = "this server") -> None:
        self.owner = owner
        self._changed = threading.Condition()
        self._masks: dict[int, int] = {}
        self._parts: dict[int, dict[int, AppliedPart]] = {}  # of the same functions
        self._results: dict[int, dict[int, object]] = {}  # of the same, what steps have returned
        self._below = 0
        self._next_function = 0
        self._fenced: set[str] = set()
        self._under_way: dict[tuple[int, int], str] = {}
        self._by_incarnation: Counter[str] = Counter()

    def begin(self, function: int, index: int, incarnation: str) -> bool:
        """Whether the push is to be applied now; False if it was applied before.

        Waits for a repetition of the same push that is being applied by another thread: only its end tells. Raises
        `FencedError` when the worker was given up, or the function is finished and forgotten.
        """
        with self._changed:
            while True:
                self._refuse_fenced(function, index, incarnation)
                if self.is_applied(function, index):
                    return False
                if (function, index) not in self._under_way or function == COORDINATOR:
                    break
                self._wait_for_end(
                    lambda: (function, index) not in self._under_way, f"push {index} of function {function}"
                )
            if function != COORDINATOR:
                self._under_way[function, index] = incarnation
                self._next_function = max(self._next_function, function + 1)
            self._by_incarnation[incarnation] += 1
            return True

    def finish(
        self, function: int, index: int, incarnation: str, part: AppliedPart | None = None, result: object = None
    ) -> None:
        """The push is applied; from now on its repetitions are dropped. ``part``: what it has changed. ``result``: what
        its step has returned, where its function reads that."""
        with self._changed:
            if function != COORDINATOR and function >= self._below:
                self._masks[function] = self._masks.get(function, 0) | (1 << index)
                if part is not None:
                    self._parts.setdefault(function, {})[index] = part
                if result is not None:
                    self._results.setdefault(function, {})[index] = result
            self._end(function, index, incarnation)

    def abandon(self, function: int, index: int, incarnation: str) -> None:
        """The push was not applied; a repetition may be."""
        with self._changed:
            self._end(function, index, incarnation)

    def fence(self, incarnation: str, timeout_seconds: float = 60.0) -> None:
        """Refuse this process's pushes from now on. When this returns, none of them is being applied any more."""
        with self._changed:
            self._fenced.add(incarnation)
            self._wait_for_end(
                lambda: self._by_incarnation[incarnation] == 0, f"a push of {incarnation}", timeout_seconds
            )

    def forget_below(self, function: int) -> None:
        """Functions below this id are finished: drop their records, refuse what a late repetition pushes."""
        with self._changed:
            self._below = max(self._below, function)
            self._next_function = max(self._next_function, function)
            for old in [known for known in self._masks if known < self._below]:
                del self._masks[old]
                self._parts.pop(old, None)
                self._results.pop(old, None)

    def parts_of(self, function: int) -> dict[int, AppliedPart]:
        """By push: what the pushes of a function that is not finished have changed here."""
        with self._changed:
            return dict(self._parts.get(function, {}))

    def result_of(self, function: int, index: int) -> object:
        """What the step of a push has returned, where its function reads that."""
        with self._changed:
            return self._results.get(function, {}).get(index)

    def wait_until_idle(self, timeout_seconds: float) -> None:
        """Wait until no push is being applied."""
        with self._changed:
            self._wait_for_end(lambda: self._by_incarnation.total() == 0, "the pushes under way", timeout_seconds)

    @property
    def next_function(self) -> int:
        """An id that no function pushed under so far has reached: where another coordinator may begin to count."""
        with self._changed:
            return self._next_function

    def state(self) -> AppliedPushes:
        with self._changed:
            return AppliedPushes(self._below, self._next_function, dict(self._masks))

    def load_state(self, state: AppliedPushes) -> None:
        """Replace the records. Who is fenced stays fenced."""
        with self._changed:
            self._below, self._next_function = state.below, state.next_function
            self._masks = dict(state.masks)
            self._parts.clear()
            self._results.clear()
            self._changed.notify_all()

    def clear(self) -> None:
        """As new: the next coordinator counts its functions from zero."""
        with self._changed:
            self._masks.clear()
            self._parts.clear()
            self._results.clear()
            self._fenced.clear()
            self._below = self._next_function = 0
            self._changed.notify_all()

    def is_applied(self, function: int, index: int) -> bool:
        return function != COORDINATOR and bool(self._masks.get(function, 0) >> index & 1)

    def _refuse_fenced(self, function: int, index: int, incarnation: str) -> None:
        if incarnation in self._fenced:
            raise FencedError(
                f"{self.owner} refuses push {index} of function {function}: the process that sent it (incarnation "
                f"{incarnation}) was given up by the coordinator, and its function runs elsewhere."
            )
        if COORDINATOR < function < self._below:
            raise FencedError(
                f"{self.owner} refuses push {index} of function {function}: the coordinator has finished all functions "
                f"below {self._below}. The process that sent it was given up, or went on after its function had ended."
            )

    def _end(self, function: int, index: int, incarnation: str) -> None:
        self._under_way.pop((function, index), None)
        self._by_incarnation[incarnation] -= 1
        if not self._by_incarnation[incarnation]:
            del self._by_incarnation[incarnation]
        self._changed.notify_all()

    def _wait_for_end(self, is_over: Callable[[], bool], what: str, timeout_seconds: float = 60.0) -> None:
        if not self._changed.wait_for(is_over, timeout_seconds):
            raise CommunicationTimeoutError(f"{self.owner} was still busy with {what} after {timeout_seconds:g} s.")
