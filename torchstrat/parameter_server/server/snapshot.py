"""What a server held at one moment, read block by block while pushes go on: copies are made when, and of what, changes.

A cut marks every shard and every entry of optimizer state, which copies nothing. Afterwards two sides work on each
tensor, both behind its variable's lock: whoever writes the checkpoint takes rows (`FrozenRows.take`), and a push that
is about to change rows which were not taken yet saves them first (`FrozenRows.before_change`). So a cut costs the
memory of what changes before it is written, and each row is copied once for that, however often it changes.

This is copy on write as file systems and databases do it for snapshots, by rows instead of pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchstrat.core._torch_private import version_of
from torchstrat.core.errors import InvalidArgumentError, TorchstratError
from torchstrat.core.memory import check_fits
from torchstrat.parameter_server.messages import AppliedPushes, CutReport, StateOfShard

MORE_SERVERS = "Use more parameter servers with a variable_partitioner, or machines with more memory."


def advice_for_whole(optimizer: str) -> str:
    """For a variable that is not cut because of an optimizer of that class."""
    return (
        f"{optimizer} steps it, and may look at all of it, so it is on one server, whole. If {optimizer} treats each "
        f"element by itself, say so: ParameterServerStrategy(…, elementwise_optimizers=[{optimizer}])."
    )


_CHECKED_BYTES = 16 << 20
"""Copies of this size and more are made after a look at what memory is left."""


class FrozenRows:
    """The rows of one tensor as they are when this is made. Not thread-safe: the caller holds the variable's lock.

    Args:
        live: ``(rows, …)``, which goes on changing in place after `before_change` was told.
        name: for errors.
    """

    def __init__(self, live: torch.Tensor, name: str) -> None:
        self.shape, self.dtype = tuple(live.shape), live.dtype
        self.name = name
        self._live: torch.Tensor | None = live.detach()
        self._taken = 0  # rows before this one are no more needed
        self._is_saved: torch.Tensor | None = None  # (rows,) bool; made when rows are saved first
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # sorted row ids, and these rows as they were
        self._rest: torch.Tensor | None = None  # all rows from `_rest_start` on; then `live` is not needed any more
        self._rest_start = 0
        self._version = version_of(live)
        self._is_announced = False
        self._is_left = False

    # -- for those who change it -------------------------------------------------------------------------------------

    def before_change(self, rows: torch.Tensor | None) -> int:
        """Save what would be lost. Returns how many bytes that took.

        ``rows``: ``(n,)`` int64, in any order, may repeat; None for all.
        """
        self._is_announced = True
        if self._is_left or self._live is None or self._taken >= self.shape[0]:
            return 0
        if rows is None:
            needed = self._live[self._taken :].nbytes
            if needed >= _CHECKED_BYTES:
                what = f"a copy of {self.name}, made because it changes while a checkpoint is written,"
                check_fits(needed, what, MORE_SERVERS)
            self._rest = self._copy(self._taken, self.shape[0])
            self._rest_start = self._taken
            self._live, self._is_saved = None, None
            self._saved.clear()
            return self._rest.nbytes
        if self._is_saved is None:
            self._is_saved = torch.zeros(self.shape[0], dtype=torch.bool)
        ids = rows[(rows >= self._taken) & ~self._is_saved[rows]]
        if not bool((ids[1:] > ids[:-1]).all()):
            ids = torch.unique(ids)
        if not ids.numel():
            return 0
        saved = self._live.index_select(0, ids)
        self._is_saved[ids] = True
        self._saved.append((ids, saved))
        return saved.nbytes

    def leave(self) -> None:
        """Nobody changes it any more: another tensor has taken its place."""
        self._is_left = True

    def unannounced_change(self) -> bool:
        """Whether the tensor has changed since the last call without `before_change`, as far as torch counts changes
        (a few fused kernels do not). A net under those who add a way to change variables."""
        if self._live is None:
            return False
        version, before = version_of(self._live), self._version
        announced, self._is_announced = self._is_announced, False
        self._version = version
        return version != before and not announced

    # -- for who writes it -------------------------------------------------------------------------------------------

    def take(self, first: int, stop: int) -> torch.Tensor:
        """A copy of rows ``[first, stop)``, which nobody changes. Each row may be taken once; in ascending order, those
        that were taken are not saved any more."""
        assert first >= self._taken, f"rows {first} to {stop} of {self.name} were taken before"
        block = self._copy(first, stop)
        if first == self._taken:
            self._taken = stop
            self._saved = [saved for saved in self._saved if int(saved[0][-1]) >= stop]
        return block

    def look(self) -> torch.Tensor:
        """A copy of all rows, which leaves them to be taken."""
        return self._copy(0, self.shape[0])

    def _copy(self, first: int, stop: int) -> torch.Tensor:
        if self._rest is not None:
            return self._rest[first - self._rest_start : stop - self._rest_start]
        assert self._live is not None
        block = self._live[first:stop].clone(memory_format=torch.contiguous_format)
        for ids, rows in self._saved:
            low, high = torch.searchsorted(ids, torch.tensor([first, stop])).tolist()
            block.index_copy_(0, ids[low:high] - first, rows[low:high])
        return block


class VariableCut:
    """One variable in a cut. Not thread-safe: everything of it is behind the variable's lock.

    ``values``: by shard. ``states``: (optimizer, shard) → name → rows; what has no rows (``step``) is a copy.
    """

    def __init__(
        self,
        cut: Cut,
        shards: Mapping[int, torch.Tensor],
        states: Mapping[tuple[int, int], StateOfShard],
        names: Mapping[int, str],
    ) -> None:
        self.cut = cut
        self.copied_bytes = 0
        self.values = {shard: _frozen(value, names[shard]) for shard, value in shards.items()}
        self.states = {
            (optimizer, shard): {
                name: _frozen(value, f"state[{name!r}] of {names[shard]}") for name, value in state.items()
            }
            for (optimizer, shard), state in states.items()
        }

    def before_value(self, shard: int, rows: torch.Tensor | None) -> None:
        """Somebody is about to change a shard: some of its rows, or (None) all."""
        self._save([self.values.get(shard)], rows)

    def before_state(self, slot: tuple[int, int], rows: torch.Tensor | None, by_rows: Iterable[str]) -> None:
        """Somebody is about to change the state ``(optimizer, shard)``: these rows of the entries ``by_rows``, and
        whatever of the others."""
        state = self.states.get(slot, {})
        names = set(by_rows) if rows is not None else set()
        self._save([entry for name, entry in state.items() if name in names], rows)
        self._save([entry for name, entry in state.items() if name not in names], None)

    def _save(self, entries: Iterable[object], rows: torch.Tensor | None) -> None:
        for entry in entries:
            if isinstance(entry, FrozenRows) and self.cut.error is None:
                try:
                    self.copied_bytes += entry.before_change(rows)
                except (InvalidArgumentError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's allocator
                    # Training goes before: the checkpoint is given up, the push is not.
                    self.cut.fail(str(error))

    def replaced(self, shard: int, entries: Mapping[tuple[int, int], Collection[str]]) -> None:
        """Another tensor takes the place of a shard, and of these entries of its state: what is here stays as it is."""
        left = [self.values.get(shard)]
        left += [self.states.get(slot, {}).get(name) for slot, names in entries.items() for name in names]
        for entry in left:
            if isinstance(entry, FrozenRows):
                entry.leave()

    def check(self) -> None:
        """After a change, the lock still held."""
        for entry in (*self.values.values(), *(one for state in self.states.values() for one in state.values())):
            if isinstance(entry, FrozenRows) and entry.unannounced_change():
                self.cut.fail(f"{entry.name} was changed past HeldShards.changing; this is a bug of torchstrat.")


class Cut:
    """Everything that a server held at one moment. ``owner``: the server, for errors.

    ``applied``: the records of applied pushes at that moment. ``copied_bytes``: what pushes had to save so far, not the
    small entries that were copied at once.
    """

    def __init__(self, token: str, owner: str, applied: AppliedPushes) -> None:
        self.token = token
        self.owner = owner
        self.applied = applied
        self.variables: dict[int, VariableCut] = {}
        self.error: str | None = None

    @property
    def copied_bytes(self) -> int:
        return sum(variable.copied_bytes for variable in self.variables.values())

    def fail(self, reason: str) -> None:
        """Give it up. Who still reads it learns why."""
        self.error = self.error or reason

    def require(self) -> None:
        if self.error is not None:
            raise TorchstratError(f"{self.owner} gave up a checkpoint that was being written: {self.error}")

    def report(self) -> CutReport:
        with_state = frozenset(
            (optimizer, (number, shard))
            for number, variable in self.variables.items()
            for (optimizer, shard), state in variable.states.items()
            if state
        )
        return CutReport(with_state, self.applied)


class CutRows:
    """Rows of a tensor in a cut, for who writes them: block by block, each once, in ascending order.

    ``shape`` and ``dtype`` are those of the tensor, ``(rows, …)``. ``locked()``: behind the lock of its variable.
    """

    def __init__(
        self, locked: Callable[[], AbstractContextManager[object]], variable: VariableCut, entry: FrozenRows
    ) -> None:
        self._locked, self._variable, self._entry = locked, variable, entry
        self.shape, self.dtype = torch.Size(entry.shape), entry.dtype

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """``[first, stop)`` as they were; a tensor of its own. Raises `TorchstratError` where the cut was given up."""
        return self._read(lambda: self._entry.take(first, stop))

    def look(self) -> torch.Tensor:
        """All rows, which can still be read after this."""
        return self._read(self._entry.look)

    def _read(self, act: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Behind the lock: a push that failed to save something says so before it goes on to change it.
        with self._locked():
            self._variable.cut.require()
            return act()


def _frozen(value: object, name: str) -> Any:
    """`FrozenRows` of a tensor that has rows; a copy of anything else, which is small."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.layout != torch.strided or value.dim() == 0 or value.numel() == 0:
        return value.detach().clone()
    return FrozenRows(value, name)
