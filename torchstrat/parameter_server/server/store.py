"""What one parameter server holds, behind locks: variables, optimizers and their state, and which pushes were applied.

Threads. Each variable has a lock; a call that needs several takes them in order of the variables' numbers, so pushes to
different variables run at the same time and nothing deadlocks. ``_structure`` guards the tables of what exists; it may
be taken while holding variables' locks, never the other way round. ``_creating`` comes before both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError
from torchstrat.parameter_server.messages import (
    NewOptimizer,
    NewShard,
    Push,
    PushReply,
    RowsRequest,
    ShardKey,
    Snapshot,
    StateOfShard,
)
from torchstrat.parameter_server.server.applied import AppliedRecords
from torchstrat.parameter_server.server.catalog import describe_variable, make_catalog
from torchstrat.parameter_server.server.edits import apply_edit, check_edit
from torchstrat.parameter_server.server.held import HeldShards, HeldVariable, check_rows
from torchstrat.parameter_server.server.host_memory import check_fits
from torchstrat.parameter_server.server.row_optimizer import learn_state
from torchstrat.parameter_server.server.steps import HeldOptimizer
from torchstrat.parameter_server.variables.initial_values import replay

_ANOTHER_PROGRAM = (
    "Another program than before needs servers without variables: end the earlier job, or restart the servers."
)


class VariableStore:
    """Thread-safe. ``owner`` says in error messages which server this is.

    ``lock_timeout_seconds`` bounds every wait for a variable; waits are for other pushes' arithmetic, which waits for
    nothing itself.
    """

    def __init__(self, owner: str = "this server", lock_timeout_seconds: float = 300.0) -> None:
        self._owner = owner
        self._lock_timeout_seconds = lock_timeout_seconds
        self._structure = threading.Lock()
        self._creating = threading.Lock()
        self._variables: dict[int, HeldVariable] = {}
        self._optimizers: dict[int, HeldOptimizer] = {}
        self._applied = AppliedRecords(owner)

    @property
    def owner(self) -> str:
        return self._owner

    @owner.setter
    def owner(self, owner: str) -> None:
        self._owner = self._applied.owner = owner

    # -- what exists ------------------------------------------------------------------------------------------------

    def create(self, shards: Sequence[NewShard]) -> None:
        """Make these shards, all or none. One that exists already, under an equal spec, keeps its value.

        Raises `InvalidArgumentError` for another spec under a number that is taken, a value that does not fit its spec,
        and, before anything is allocated, for more bytes than this machine has left.
        """
        with self._creating:
            new = [shard for shard in shards if self._is_new(shard)]
            self._check_room(new)
            made = [(shard, self._initial_value(shard)) for shard in new]
            for shard, value in made:
                with self._structure:
                    variable = self._variables.setdefault(shard.spec.number, HeldVariable(shard.spec))
                with self._locked([variable.spec.number]):
                    variable.shards[shard.shard] = value

    def add_optimizer(self, new: NewOptimizer) -> None:
        """Make an optimizer known. Again is fine, also with more variables and groups after those it had: all its
        state stays. Raises `InvalidArgumentError` for another class, or variables in other places."""
        held = HeldOptimizer(new)
        with self._structure:
            known = self._optimizers.get(new.number)
            is_fine = known is None or held.continues(known)
            if is_fine:
                self._optimizers[new.number] = held
        if known is not None and not is_fine:
            raise InvalidArgumentError(
                f"{self.owner} has optimizer {new.number} as {known.description}, and is told that it is "
                f"{held.description}. {_ANOTHER_PROGRAM}"
            )

    def catalog(self) -> dict[str, Any]:
        """Plain data: ``variables``, ``optimizers``, a ``digest`` over both, and ``next_function``, from which a
        coordinator that is started again can number its functions."""
        with self._structure:
            variables = [describe_variable(one.spec, one.shards) for one in self._variables.values()]
            optimizers = [one.description for one in self._optimizers.values()]
        return {**make_catalog(variables, optimizers), "next_function": self._applied.next_function}

    def reset(self) -> None:
        """Forget everything, as if just started."""
        with self._creating, self._locked(self._numbers()) as shards:
            with self._structure:
                self._variables.clear()
                self._optimizers.clear()
            for variable in shards:
                variable.is_dropped = True
            self._applied.clear()

    @property
    def number_of_variables(self) -> int:
        return len(self._numbers())

    @property
    def total_bytes(self) -> int:
        """Of values and optimizer state."""
        with self._locked(self._numbers()) as shards:
            return sum(variable.total_bytes for variable in shards)

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[ShardKey]) -> list[torch.Tensor]:
        """Copies of whole shards, none of them torn: each is its variable's value between two pushes."""
        values: dict[ShardKey, torch.Tensor] = {}
        for number in sorted({key[0] for key in keys}):
            with self._locked([number]) as shards:
                values.update({key: shards.tensor(key).clone() for key in keys if key[0] == number})
        return [values[key] for key in keys]

    def read_rows(self, requests: Sequence[RowsRequest]) -> list[torch.Tensor]:
        """Copies of rows, ``(n, …)`` per request, in the order asked for; ids may repeat."""
        rows: dict[int, torch.Tensor] = {}
        for number in sorted({request.key[0] for request in requests}):
            with self._locked([number]) as shards:
                for place, request in enumerate(requests):
                    if request.key[0] == number:
                        rows[place] = self._rows(shards, request)
        return [rows[place] for place in range(len(requests))]

    @staticmethod
    def _rows(shards: HeldShards, request: RowsRequest) -> torch.Tensor:
        table = shards.tensor(request.key)
        if table.dim() == 0:
            raise InvalidArgumentError(f"{shards.name(request.key)} is a scalar and has no rows to read.")
        check_rows(request.ids, table.shape[0], shards.name(request.key), sorted_and_unique=False)
        return table.index_select(0, request.ids)

    # -- pushes -----------------------------------------------------------------------------------------------------

    def push(self, push: Push) -> PushReply:
        """Apply it whole, exactly once: edits first, in order, then the optimizers' steps, in order.

        An invalid push (an unknown shard, a wrong shape or dtype, ids out of range) raises and changes nothing. The
        reply's values are of one moment, right after the change. Raises `FencedError` for a process that was given up
        or a function that is finished.

        An optimizer of the user's own that raises in the middle of its arithmetic leaves the variables of that step
        half-stepped; the error says so, and the push counts as not applied.
        """
        with self._locked(_numbers_of(push)) as shards:
            if self._applied.begin(push.function, push.index, push.incarnation):
                applied = False
                try:
                    self._apply(push, shards)
                    applied = True
                finally:
                    end = self._applied.finish if applied else self._applied.abandon
                    end(push.function, push.index, push.incarnation)
            else:
                applied = False
            return PushReply(tuple(shards.tensor(key).clone() for key in push.wants), applied)

    def _apply(self, push: Push, shards: HeldShards) -> None:
        optimizers = [self._optimizer(step.optimizer) for step in push.steps]
        for key in push.wants:
            shards.variable(key)
        for edit in push.edits:
            check_edit(edit, shards)
        for optimizer, step in zip(optimizers, push.steps, strict=True):
            optimizer.check(step, shards)
        for edit in push.edits:
            apply_edit(edit, shards)
        for optimizer, step in zip(optimizers, push.steps, strict=True):
            optimizer.make(step, shards)

    def fence(self, incarnation: str) -> None:
        """Refuse the pushes of a process from now on; when this returns, none of them is being applied any more."""
        self._applied.fence(incarnation)

    def forget_below(self, function: int) -> None:
        """Functions with smaller ids are finished: drop their records, refuse what they push from now on."""
        self._applied.forget_below(function)

    def wait_until_idle(self, timeout_seconds: float) -> None:
        """Wait until no push is being applied. Raises `CommunicationTimeoutError`."""
        self._applied.wait_until_idle(timeout_seconds)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: int, keys: Sequence[ShardKey] | None = None) -> dict[ShardKey, StateOfShard]:
        """Copies of the state of these shards (None: of all), leaving out those that have none yet."""
        self._optimizer(optimizer)
        numbers = self._numbers() if keys is None else [key[0] for key in keys]
        with self._locked(numbers) as shards:
            for key in keys or ():
                shards.variable(key)
            found = _states_of(optimizer, shards)
        return found if keys is None else {key: found[key] for key in keys if key in found}

    def load_optimizer_state(self, optimizer: int, states: Mapping[ShardKey, StateOfShard]) -> None:
        """Replace the state of these shards; others keep theirs. All or none."""
        self._optimizer(optimizer)
        with self._locked(key[0] for key in states) as shards:
            for key in states:
                shards.variable(key)
            for key, state in states.items():
                _put_state(shards.variable(key), optimizer, key[1], state)

    def untouched_state(self, optimizer: int, key: ShardKey) -> StateOfShard:
        """What an optimizer's state of a shard is before any step: of the entries that go by rows. Changes nothing."""
        held = self._optimizer(optimizer)
        group = next(number for number, variables in enumerate(held.groups) if key[0] in variables)
        with self._locked([key[0]]) as shards:
            table = shards.tensor(key)
            learned = learn_state(held.optimizer, held.optimizer.options[group], group, table)
            return {name: entry.allocate(table) for name, entry in learned.items()}

    def shard_rows(self, key: ShardKey) -> int:
        with self._locked([key[0]]) as shards:
            return len(shards.tensor(key))

    def snapshot(self) -> Snapshot:
        """Values, state and records at one moment: every push is in it whole or not at all.

        Pushes wait while the copies are made. Raises, before it copies, where they would not fit in memory.
        """
        with self._locked(self._numbers()) as shards:
            needed = sum(variable.total_bytes for variable in shards)
            check_fits(needed, f"a snapshot of what {self.owner} holds")
            with self._structure:
                optimizers = list(self._optimizers)
            return Snapshot(
                values={
                    (variable.spec.number, shard): value.clone()
                    for variable in shards
                    for shard, value in variable.shards.items()
                },
                states={optimizer: _states_of(optimizer, shards) for optimizer in optimizers},
                applied=self._applied.state(),
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Put values, state and records back, in one cut.

        Shards that the snapshot does not name keep their values; an optimizer that it names has, after this, the state
        given there and no other. ``applied=None`` clears the records. Raises, before anything changes, for shards
        and optimizers that are not here, and for other shapes or dtypes.
        """
        for optimizer in snapshot.states:
            self._optimizer(optimizer)
        with self._locked(self._numbers()) as shards:
            for key, value in snapshot.values.items():
                _check_value(value, shards.tensor(key), shards.name(key))
            for key in (key for states in snapshot.states.values() for key in states):
                shards.variable(key)
            for key, value in snapshot.values.items():
                shards.tensor(key).copy_(value)
            for optimizer, states in snapshot.states.items():
                for variable in shards:
                    for shard in variable.shards:
                        _put_state(variable, optimizer, shard, states.get((variable.spec.number, shard)))
            if snapshot.applied is None:
                self._applied.forget_functions()
            else:
                self._applied.load_state(snapshot.applied)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        with self._structure:
            return list(self._variables)

    @contextlib.contextmanager
    def _locked(self, numbers: Iterable[int]) -> Iterator[HeldShards]:
        """The variables of these numbers that exist, locked; numbers of others are left out."""
        with self._structure:
            wanted = [self._variables[number] for number in sorted(set(numbers)) if number in self._variables]
        with contextlib.ExitStack() as locks:
            for variable in wanted:
                if not variable.lock.acquire(timeout=self._lock_timeout_seconds):
                    raise CommunicationTimeoutError(
                        f"{self.owner}: {variable.spec.name!r} was being changed by other pushes for "
                        f"{self._lock_timeout_seconds:g} s."
                    )
                locks.callback(variable.lock.release)
            yield HeldShards({one.spec.number: one for one in wanted if not one.is_dropped}, self.owner)

    def _optimizer(self, number: int) -> HeldOptimizer:
        with self._structure:
            if number not in self._optimizers:
                raise InvalidArgumentError(
                    f"{self.owner} knows no optimizer {number}; it knows {sorted(self._optimizers)}."
                )
            return self._optimizers[number]

    def _is_new(self, new: NewShard) -> bool:
        if not 0 <= new.shard < len(new.spec.shards):
            raise InvalidArgumentError(f"{new.spec.name!r} has {len(new.spec.shards)} shards; got shard {new.shard}.")
        with self._structure:
            known = self._variables.get(new.spec.number)
        if known is None:
            return True
        if known.spec != new.spec:
            raise InvalidArgumentError(
                f"{self.owner} has variable {new.spec.number} as {known.spec}, and is told to create {new.spec}. "
                f"{_ANOTHER_PROGRAM}"
            )
        return new.shard not in known.shards

    def _check_room(self, new: Sequence[NewShard]) -> None:
        needed = 0
        for one in new:
            size = torch.Size(one.spec.shard_shape(one.shard)).numel() * one.spec.dtype.itemsize
            needed += size
            before = f" after {needed - size:,} bytes for others" if needed > size else ""
            check_fits(needed, f"{one.spec.name!r} (shard {one.shard} on {self.owner}: {size:,} bytes{before})")

    def _initial_value(self, new: NewShard) -> torch.Tensor:
        spec, shape = new.spec, new.spec.shard_shape(new.shard)
        if new.value is None:
            shard = spec.shards[new.shard]
            return replay(new.recipe, shape, spec.dtype, new.seed, shard.start, spec.shards[-1].stop, spec.name)
        _check_value(new.value, torch.empty(shape, dtype=spec.dtype, device="meta"), f"{spec.name!r} on {self.owner}")
        # A copy of its own: what came by message may be a view of something larger, or of somebody's live variable.
        return new.value.detach().clone(memory_format=torch.contiguous_format)


def _numbers_of(push: Push) -> set[int]:
    numbers = {key[0] for key in push.wants} | {edit.key[0] for edit in push.edits}
    for step in push.steps:
        numbers |= {key[0] for key, _ in step.dense} | {key[0] for key, _, _ in step.rows}
    return numbers


def _check_value(value: torch.Tensor, like: torch.Tensor, name: str) -> None:
    if tuple(value.shape) != tuple(like.shape) or value.dtype != like.dtype or value.layout != torch.strided:
        raise InvalidArgumentError(
            f"the value of {name} must be {like.dtype} of shape {tuple(like.shape)}; got {value.dtype} of shape "
            f"{tuple(value.shape)}."
        )


def _copy(state: StateOfShard) -> StateOfShard:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _states_of(optimizer: int, shards: HeldShards) -> dict[ShardKey, StateOfShard]:
    return {
        (variable.spec.number, shard): _copy(state)
        for variable in shards
        for (number, shard), state in variable.states.items()
        if number == optimizer
    }


def _put_state(variable: HeldVariable, optimizer: int, shard: int, state: StateOfShard | None) -> None:
    if state is None:
        variable.states.pop((optimizer, shard), None)
    else:
        variable.states[optimizer, shard] = _copy(state)
