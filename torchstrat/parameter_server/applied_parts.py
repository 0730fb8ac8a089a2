"""What servers remember of a push, so that a function that runs again is seen to make other changes than before.

A function whose worker was lost makes its pushes once more, under the same names, and a server that has applied its
part of one drops that. If the function decides by what it reads, the second run may change other variables under the
same name: some would be changed by the first run, others by the second. So a run that is no first one asks all servers
what they have of it, before its first push, and is refused where it differs. First runs ask nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch

from torchstrat.errors import RepeatedFunctionError
from torchstrat.parameter_server.messages import Accumulation, EditOp, OptimizerStep, ShardEdit, ShardKey

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
    made: list[Any] = []
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
                "end."
            )
