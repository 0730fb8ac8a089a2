"""What one parameter server holds, behind locks: variables, optimizers and their state, and which pushes were applied.

Threads. Each variable has a lock; a call that needs several takes them in order of the variables' numbers, so pushes to
different variables run at the same time and nothing deadlocks. ``_structure`` guards the tables of what exists; it may
be taken while holding variables' locks, never the other way round. ``_creating`` comes before both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.core.errors import CommunicationTimeoutError, InvalidArgumentError, TorchstratError
from torchstrat.core.memory import check_fits
from torchstrat.core.optimizers import Places
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.interface import FRESH, AnswerMemory
from torchstrat.parameter_server.messages import (
    COORDINATOR,
    AppliedPushes,
    Dropped,
    NewOptimizer,
    NewRows,
    NewShard,
    Push,
    PushReply,
    Reader,
    RepeatedOps,
    RowsRequest,
    ShardKey,
    StateOfShard,
)
from torchstrat.parameter_server.server.deduplication import AppliedPart, AppliedRecords, part_of
from torchstrat.parameter_server.server.live_optimizer import StepsHaveSet
from torchstrat.parameter_server.server.optimizer_step import (
    HeldOptimizer,
    accumulate,
    add_rows,
    check_accumulation,
    with_accumulated,
)
from torchstrat.parameter_server.server.shard_optimizer import RowState, in_own_memory
from torchstrat.parameter_server.server.shards import (
    AnswerCopies,
    HeldShards,
    HeldVariable,
    apply_edit,
    check_edit,
    check_rows,
    describe_variable,
    make_catalog,
)
from torchstrat.parameter_server.server.snapshot import MORE_SERVERS, Cut, CutRows, FrozenRows, advice_for_whole
from torchstrat.parameter_server.variables.deferred_init import repeat, replay

if TYPE_CHECKING:
    from torchstrat.checkpoint.reading import Prepared

_LOCK_TIMEOUT_SECONDS = 300.0
"""Of every wait for a variable: waits are for other pushes' arithmetic, which waits for nothing itself."""

_ANOTHER_PROGRAM = (
    "Another program than before needs servers without variables: end the earlier job, or restart the servers."
)


class VariableStore:
    """Thread-safe. ``owner`` says in error messages which server this is."""

    def __init__(self, owner: str = "this server") -> None:
        self._owner = owner
        self._structure = threading.Lock()
        self._creating = threading.Lock()
        self._variables: dict[int, HeldVariable] = {}
        self._optimizers: dict[int, HeldOptimizer] = {}
        self._cut: Cut | None = None
        self._dropped_later: list[Dropped] = []
        self._applied = AppliedRecords(owner)
        self._conflicts: set[int] = set()
        self._accumulating: set[int] = set()  # variables of which functions have left gradients, or had

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
                with self._locked([variable.spec.number]) as held:
                    held.add((variable.spec.number, shard.shard), value)

    def grow(self, new: NewRows) -> None:
        """Let a table have more rows, whose optimizer state is that of rows which no step has touched. Again is fine.

        Raises, before anything changes, where there is no room for them, or the state of new rows cannot be told.
        """
        number = new.spec.number
        with self._creating, self._locked([number]) as shards:
            variable = self._variables.get(number)
            if variable is None or variable.spec == new.spec:  # one that was started again makes it whole
                return
            last = (number, len(new.spec.shards) - 1)
            if last[1] in variable.shards:
                add_rows(new, last, variable, shards, self._optimizer)
            variable.spec = new.spec

    def repeat(self, orders: Sequence[RepeatedOps]) -> None:
        """Do to shards what was done on the coordinator to the variable without its values."""
        for order in orders:
            with self._locked([order.key[0]]) as shards:
                spec = self._variables[order.key[0]].spec
                shard = spec.shards[order.key[1]]
                rows = spec.shape[0] if spec.shape else 1
                repeat(order.recipe, shards.changing(order.key), order.seed, shard.start, rows)

    def add_optimizer(self, new: NewOptimizer) -> None:
        """Make an optimizer known. Again is fine, also with more variables and groups after those it had: all its
        state stays. Raises `InvalidArgumentError` for another class, or variables in other places."""
        held = HeldOptimizer(new)
        with self._structure:
            known = self._optimizers.get(new.number)
            is_fine = known is None or held.continues(known)
            if is_fine:
                if known is not None:
                    held.take_over(known)
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
                cut, self._cut = self._cut, None
                self._dropped_later.clear()
                self._conflicts.clear()
                self._accumulating.clear()
            if cut is not None:
                cut.fail("the job has ended, or begun anew")
            shards.drop()
            self._applied.clear()

    def release(self, dropped: Dropped) -> None:
        """Let go of variables with their state, and of optimizers with the state that they have of others. Those that
        are not here are gone already. Waits for nothing: while a checkpoint is written, it happens at its end."""
        with self._creating:
            with self._structure:
                if self._cut is not None:  # what is marked is written first, and what a step needs to begin with
                    self._dropped_later.append(dropped)
                    return
                held = [self._optimizers[number] for number in dropped.optimizers if number in self._optimizers]
            stepped = {number for optimizer in held for group in optimizer.groups for number in group}
            with self._locked(stepped.union(dropped.variables)) as shards:
                with self._structure:
                    for number in dropped.variables:
                        self._variables.pop(number, None)
                    for optimizer in held:
                        del self._optimizers[optimizer.number]
                shards.drop(dropped.variables)
                shards.drop_states(dropped.optimizers)

    @property
    def total_bytes(self) -> int:
        """Of values and optimizer state."""
        with self._locked(self._numbers()) as shards:
            return shards.total_bytes

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[ShardKey], memory: AnswerMemory = FRESH, reader: str = "") -> list[torch.Tensor]:
        """Copies of whole shards, none of them torn: each is its variable's value between two pushes. ``reader``: the
        incarnation of who asks."""
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key[0], []).append(place)
        copies = AnswerCopies(memory, len(keys))
        copies.begin(self._size_of(keys))
        for number, of_variable in places.items():
            with self._locked([number]) as shards:
                for place in of_variable:
                    copies.add(place, shards.give(keys[place], reader))
        return copies.values()

    def _size_of(self, keys: Sequence[ShardKey]) -> int:
        """Raises for shards that are not here, before anybody is told anything."""
        with self._structure:
            variables = {key[0]: self._variables[key[0]] for key in keys if key[0] in self._variables}
        shards = HeldShards(variables, self.owner)
        return sum(shards.tensor(key).nbytes for key in keys)

    def read_rows(self, requests: Sequence[RowsRequest], memory: AnswerMemory = FRESH) -> list[torch.Tensor]:
        """Copies of rows, ``(n, …)`` per request, in the order asked for; ids may repeat."""
        rows: dict[int, torch.Tensor] = {}
        for number in sorted({request.key[0] for request in requests}):
            with self._locked([number]) as shards:
                for place, request in enumerate(requests):
                    if request.key[0] == number:
                        rows[place] = self._rows(shards, request, memory, place)
        return [rows[place] for place in range(len(requests))]

    @staticmethod
    def _rows(shards: HeldShards, request: RowsRequest, memory: AnswerMemory, place: int) -> torch.Tensor:
        table = shards.tensor(request.key)
        if table.dim() == 0:
            raise InvalidArgumentError(f"{shards.name(request.key)} is a scalar and has no rows to read.")
        check_rows(request.ids, table.shape[0], shards.name(request.key), sorted_and_unique=False)
        rows = memory.empty(place, (len(request.ids), *table.shape[1:]), table.dtype)
        return torch.index_select(table, 0, request.ids, out=rows)

    # -- pushes -----------------------------------------------------------------------------------------------------

    def push(self, push: Push, memory: AnswerMemory = FRESH) -> PushReply:
        """Apply it whole, exactly once: edits first, in order, then the optimizers' steps, in order, which take what
        functions have left for them; then what it leaves for later ones.

        An invalid push (an unknown shard, a wrong shape or dtype, ids out of range) raises and changes nothing. The
        reply's values are of one moment, right after the change. Raises `FencedError` for a process that was given up
        or a function that is finished.

        An optimizer of the user's own that raises in the middle of its arithmetic leaves the variables of that step
        half-stepped; the error says so, and the push counts as not applied.
        """
        writer = "" if push.function == COORDINATOR else push.incarnation
        with self._locked(self._numbers_of(push), writer) as shards:
            if self._applied.begin(push.function, push.index, push.incarnation):
                try:
                    result, part = self._apply(push, shards), None
                    if push.servers or push.steps:
                        part = part_of(push.servers, push.steps, push.edits, push.accumulation)
                except BaseException:
                    self._applied.abandon(push.function, push.index, push.incarnation)
                    raise
                applied = True
                self._applied.finish(push.function, push.index, push.incarnation, part, result)
            else:
                applied = False
            phases.reached(phases.APPLIED)
            copies = AnswerCopies(memory, len(push.wants))
            copies.begin(sum(shards.tensor(key).nbytes for key in push.wants))
            for place, key in enumerate(push.wants):
                copies.add(place, shards.give(key, push.incarnation))
                phases.reached(phases.WRITING_VALUES)
            return PushReply(tuple(copies.values()), applied)

    def _apply(self, push: Push, shards: HeldShards) -> object:
        """What a step has returned, where the function reads that."""
        optimizers = [self._optimizer(step.optimizer) for step in push.steps]
        for key in push.wants:
            shards.require(key)
        for edit in push.edits:
            check_edit(edit, shards)
        left, steps = push.accumulation, push.steps
        if left is not None:
            check_accumulation(left, shards)
        gone: set[int] = set() if left is None else set(left.discards)
        for optimizer, step in zip(optimizers, steps, strict=True):
            optimizer.check(step, shards)
        if self._accumulating:
            steps = ()
            for optimizer, step in zip(optimizers, push.steps, strict=True):
                steps += (with_accumulated(step, optimizer.variables - gone, shards),)
                optimizer.check(steps[-1], shards)
                gone |= optimizer.variables
        for edit in push.edits:
            if not apply_edit(edit, shards):
                self._conflicts.add(edit.key[0])
        results = [optimizer.make(step, shards) for optimizer, step in zip(optimizers, steps, strict=True)]
        if gone:
            shards.drop_gradients(gone)
        if left is not None:
            accumulate(left, shards)
            self._accumulating.update(number for number, _ in shards.gradients)
        return next((found for found in results if found is not None), None)

    def drop_gradients(self) -> None:
        """What functions have left for steps."""
        with self._locked(self._numbers()) as shards:
            shards.drop_gradients(number for number, _ in shards.gradients)

    def left_gradients(self, numbers: Iterable[int]) -> set[int]:
        """Those of these variables of which functions have left gradients for steps."""
        with self._locked(self._accumulating.intersection(numbers)) as shards:
            return {number for number, _ in shards.gradients}

    def take_conflicts(self) -> tuple[int, ...]:
        """Variables of which one writer's value has replaced another's, which it had not seen; each time asked for
        once."""
        found, self._conflicts = self._conflicts, set()
        return tuple(sorted(found))

    def result_of(self, function: int, index: int) -> object:
        """See `AppliedRecords.result_of`."""
        return self._applied.result_of(function, index)

    def applied_parts(self, function: int) -> dict[int, AppliedPart]:
        """By push: what was applied here of the pushes of a function that has not ended, with variables' names."""
        parts = self._applied.parts_of(function)
        with self._structure:
            known = {number: variable.spec.name for number, variable in self._variables.items()} if parts else {}
        return {
            index: part._replace(names=tuple(known[number] for number in part.some if number in known))
            for index, part in parts.items()
        }

    def fence(self, incarnation: str) -> None:
        """Refuse the pushes of a process from now on; when this returns, none of them is being applied any more."""
        self._applied.fence(incarnation)
        with self._structure:
            for variable in self._variables.values():
                variable.seen.pop(incarnation, None)

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
                shards.require(key)
            found = _states_of(optimizer, shards)
        return found if keys is None else {key: found[key] for key in keys if key in found}

    def load_optimizer_state(self, optimizer: int, states: Mapping[ShardKey, StateOfShard]) -> None:
        """Replace the state of these shards, an empty one by none; others keep theirs. All or none."""
        self._optimizer(optimizer)
        with self._locked(key[0] for key in states) as shards:
            for key in states:
                shards.require(key)
            for key, state in states.items():
                shards.put_state(key, optimizer, _copy(state) or None)

    def optimizer_options(
        self, optimizer: int, options: Sequence[Mapping[str, object]], places: Places, reader: Reader
    ) -> StepsHaveSet:
        """What steps have set here, and ``options`` of the program's have not; of most optimizers nothing. Options and
        ``places`` as in `groups_with_wrapped`."""
        held = self._optimizer(optimizer)
        with self._locked(held.reaches):
            return held.hand_out_options(options, places, reader)

    def load_optimizer_options(self, optimizer: int, options: Sequence[Mapping[str, object]], places: Places) -> None:
        """Replace what is in the groups of an optimizer whose steps set it."""
        held = self._optimizer(optimizer)
        with self._locked(held.reaches):
            held.load_options(options, places)

    def untouched_entries(self, optimizer: int, key: ShardKey) -> dict[str, RowState]:
        """What an optimizer's state of a shard is before any step: the entries that go by rows. Changes nothing."""
        held = self._optimizer(optimizer)
        group = next(number for number, variables in enumerate(held.groups) if key[0] in variables)
        with self._locked([key[0]]) as shards:
            return held.untouched_state(group, shards.tensor(key))

    def shard_rows(self, key: ShardKey) -> int:
        with self._locked([key[0]]) as shards:
            return len(shards.tensor(key))

    def overwrite(
        self,
        values: Sequence[ShardKey],
        entries: Sequence[tuple[int, ShardKey, str]],
        stepped: Iterable[tuple[int, int]],
        applied: AppliedPushes,
        new: Prepared,
    ) -> None:
        """Put other values, state and records in the place of those that are here, in one cut, and in their memory.
        Gradients that functions have left of the variables go.

        Args:
            values: shards; others keep their values.
            entries: (optimizer, shard, name) of state.
            stepped: (optimizer, variable) whose state is replaced: ``entries`` have all of it.
            new: what they become: first the values, then the entries, in this order.

        Raises `InvalidArgumentError`, before anything changes, for shards and optimizers that are not here, and for
        other shapes or dtypes; `TorchstratError` where ``new`` cannot be read any more.
        """
        replaced: dict[int, list[int]] = {}
        for optimizer, variable in stepped:
            self._optimizer(optimizer)
            replaced.setdefault(variable, []).append(optimizer)
        with self._locked(self._numbers()) as shards:
            for number, key in enumerate(values):
                if not new.fits(number, shards.tensor(key)):
                    raise InvalidArgumentError(f"the value that was read for {shards.name(key)} does not fit it.")
            for _, key, _ in entries:
                shards.require(key)
            shards.drop_gradients([number for number, _ in values])
            into: list[torch.Tensor | None] = [shards.changing(key) for key in values]
            for number, (optimizer, key, name) in enumerate(entries, len(values)):
                entry = (shards.changing_state(key, optimizer) or {}).get(name)
                is_usable = isinstance(entry, torch.Tensor) and new.fits(number, entry)
                into.append(entry if is_usable else None)
            try:
                found = new.take(into)
            except InvalidArgumentError as error:
                raise TorchstratError(
                    f"{self.owner} holds a mixture of a checkpoint and of what was there before: {error} Restore this "
                    "checkpoint again, or another."
                ) from error
            states: dict[tuple[int, ShardKey], dict[str, object]] = {}
            for (optimizer, key, name), value in zip(entries, found[len(values) :], strict=True):
                states.setdefault((optimizer, key), {})[name] = value
            for key in shards.held_keys():
                for optimizer in replaced.get(key[0], ()):
                    shards.put_state(key, optimizer, states.get((optimizer, key)))
            self._applied.load_state(applied)

    # -- cuts: checkpoints that are written while pushes go on -------------------------------------------------------

    def begin_cut(self, token: str) -> Cut:
        """Everything as it is at one moment between two pushes, under the name ``token``: values, state and records.

        Takes no copy and little time; pushes wait only for that. What they change from now on, and `CutRows` have not
        read yet, they copy before. An earlier cut is given up: whoever wanted it is gone.
        """
        with self._locked(self._numbers()) as shards:
            cut = Cut(token, self.owner, self._applied.state())
            shards.mark(cut)
            with self._structure:
                earlier, self._cut = self._cut, cut
        if earlier is not None:
            earlier.fail("another one was begun")
        return cut

    def cut(self, token: str) -> Cut:
        """Raises `TorchstratError` where it was given up, and `InvalidArgumentError` where there was none."""
        with self._structure:
            cut = self._cut
        if cut is None or cut.token != token:
            raise InvalidArgumentError(
                f"{self.owner} has not begun the checkpoint that it is to write, or has given it up; save again."
            )
        cut.require()
        return cut

    def rows_of(self, cut: Cut, key: ShardKey, optimizer: int | None = None, name: str = "") -> CutRows:
        """A shard in the cut, or an entry of its state, that `FrozenRows` stand for."""
        variable = cut.variables[key[0]]
        entry = variable.values[key[1]] if optimizer is None else variable.states[optimizer, key[1]][name]
        assert isinstance(entry, FrozenRows)
        return CutRows(lambda: self._locked([key[0]]), variable, entry)

    def end_cut(self, token: str | None = None) -> None:
        """It was written, or will not be: pushes copy nothing for it any more. Does nothing for another cut than
        ``token``; None for whichever there is."""
        with self._structure:
            cut = self._cut
            if cut is None or token not in (None, cut.token):
                return
            self._cut = None
            dropped, self._dropped_later = self._dropped_later, []
        cut.fail("it was ended")
        with self._locked(self._numbers()) as shards:
            shards.unmark(cut)
        for each in dropped:
            self.release(each)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        with self._structure:
            return list(self._variables)

    @contextlib.contextmanager
    def _locked(self, numbers: Iterable[int], writer: str = "") -> Iterator[HeldShards]:
        """The variables of these numbers that exist, locked; numbers of others are left out. See `HeldShards`."""
        with self._structure:
            wanted = [self._variables[number] for number in sorted(set(numbers)) if number in self._variables]
        with contextlib.ExitStack() as locks:
            for variable in wanted:
                if not variable.lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
                    raise CommunicationTimeoutError(
                        f"{self.owner}: {variable.spec.name!r} was being changed by other pushes for "
                        f"{_LOCK_TIMEOUT_SECONDS:g} s."
                    )
                locks.callback(variable.lock.release)
            shards = HeldShards({one.spec.number: one for one in wanted if not one.is_dropped}, self.owner, writer)
            try:
                yield shards
            finally:
                shards.check_changes()

    def _optimizer(self, number: int) -> HeldOptimizer:
        with self._structure:
            if number not in self._optimizers:
                raise InvalidArgumentError(
                    f"{self.owner} knows no optimizer {number}; it knows {sorted(self._optimizers)}."
                )
            return self._optimizers[number]

    def _numbers_of(self, push: Push) -> set[int]:
        """The variables that a push reads or changes."""
        numbers = {key[0] for key in push.wants} | {edit.key[0] for edit in push.edits}
        for step in push.steps:
            numbers |= {key[0] for key, _ in step.dense} | {key[0] for key, _, _ in step.rows}
            optimizer = self._optimizers.get(step.optimizer)
            if optimizer is not None:
                numbers |= optimizer.reaches
                if self._accumulating:
                    numbers |= self._accumulating & optimizer.variables
        if (left := push.accumulation) is not None:
            numbers |= {key[0] for key, _ in left.dense} | {key[0] for key, _, _ in left.rows} | {*left.discards}
        return numbers

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
            size = one.spec.shard_bytes(one.shard)
            needed += size
            before = f" after {needed - size:,} bytes for others" if needed > size else ""
            what = f"{one.spec.name!r} (shard {one.shard} on {self.owner}: {size:,} bytes{before})"
            check_fits(needed, what, advice_for_whole(one.whole_for) if one.whole_for else MORE_SERVERS)

    def _initial_value(self, new: NewShard) -> torch.Tensor:
        spec, shape = new.spec, new.spec.shard_shape(new.shard)
        if new.value is None:
            shard = spec.shards[new.shard]
            return replay(new.recipe, shape, spec.dtype, new.seed, shard.start, spec.shards[-1].stop, spec.name)
        _check_value(new.value, torch.empty(shape, dtype=spec.dtype, device="meta"), f"{spec.name!r} on {self.owner}")
        # A copy of its own: what came by message may be a view of something larger, or of somebody's live variable.
        return new.value.detach().clone(memory_format=torch.contiguous_format)


def _check_value(value: torch.Tensor, like: torch.Tensor, name: str) -> None:
    if tuple(value.shape) != tuple(like.shape) or value.dtype != like.dtype or value.layout != torch.strided:
        raise InvalidArgumentError(
            f"the value of {name} must be {like.dtype} of shape {tuple(like.shape)}; got {value.dtype} of shape "
            f"{tuple(value.shape)}."
        )


def _copy(state: StateOfShard) -> StateOfShard:
    return {name: in_own_memory(value) for name, value in state.items()}


def _states_of(optimizer: int, shards: HeldShards) -> dict[ShardKey, StateOfShard]:
    return {key: _copy(state) for key, state in shards.states_of(optimizer)}
