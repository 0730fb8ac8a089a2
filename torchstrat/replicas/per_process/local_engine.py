"""One replica in this process, and the others in other processes, each stepping variables of its own.

Nobody is met in a run but where the step itself asks for it, and where a round ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core._torch_private import after_step, before_step, own_buffer
from torchstrat.core.context import StrategyLike
from torchstrat.core.engine import Communicator, MakesRounds
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.core.memory import Copies, local_copies
from torchstrat.core.optimizers import load_in_place, state_dict_of
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import PerReplica
from torchstrat.core.variables import Members, VariableRegistry
from torchstrat.distributed.collectives.agreement import agree, all_equal, code
from torchstrat.replicas.engine import StepWeights, add_replica_note, inputs_of
from torchstrat.replicas.exchange import broadcast_tensors
from torchstrat.replicas.optimizer_step import put_hooks, remove_hooks
from torchstrat.replicas.per_process.edits import ParameterEdits, ProcessBuffers
from torchstrat.replicas.per_process.engine import PerProcessReplica
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.state import Trace, leave_graph, trace, trace_of
from torchstrat.replicas.update_policies import (
    LocalRounds,
    LocalUpdate,
    OwnValues,
    ReplicaRounds,
    put_values,
    refuse_check,
    refuse_merge_call,
    require_rows_for_all,
)

OUTSIDE = "the start of a run (taking over what rank 0's program has changed between runs)"


class LocalProcessReplica(PerProcessReplica):
    """This process's replica; its id is the process's rank."""

    def __init__(
        self, strategy: StrategyLike, communicator: Communicator, device: str, policy: LocalUpdate, communication: str
    ) -> None:
        super().__init__(strategy, communicator, device, ReduceOp.MEAN, central=False, communication=communication)
        self._edits = _Unwatched(self.registry.modules)
        self._rounds = LocalRounds(policy, communicator.rank, self.registry.helpers)
        self._outside = _OutsideChanges(self.registry)
        self._step_hooks = before_step(lambda *_: None), after_step(lambda one, *_: self._rounds.note_step(one))
        self._buffers: ProcessBuffers | None = None  # as they were when the round began

    def check_replicas(self, when: str) -> None:
        raise refuse_check()

    def copies(self) -> list[Copies]:
        return local_copies([self._device] * self.num_replicas)

    @property
    def replica_states(self) -> ReplicaRounds:
        rounds = {self._world.rank: self._rounds}
        optimizers = self.registry.optimizers
        return ReplicaRounds(self._streams, rounds, self.num_replicas, optimizers, self._read_own, self._write_own)

    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        raise refuse_merge_call()

    # -- a run ------------------------------------------------------------------------------------------------------

    def _run(self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Any:
        outside = self._outside.find()
        weights, members, roster = self._begin_run(fn, args, kwargs)
        require_rows_for_all(weights.active, self.num_replicas)
        if not weights.active:
            return PerReplica((), replica_ids=(), weights=weights)
        self._outside.level(self._world, outside)
        try:
            result = self._run_replica(roster, members, fn, args, kwargs)
            self._keep()
        finally:  # what a run that raises has changed is its own, too
            self._outside.note(self._rosters.now())
        me = self._world.rank
        return nest.map_structure(lambda leaf: PerReplica((leaf,), replica_ids=(me,), weights=weights), result)

    def _run_replica(
        self,
        roster: Roster,
        members: Members,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: dict[str, object],
    ) -> object:
        me, weights = self._world.rank, self._weights
        assert weights is not None
        if self._buffers is None:
            equal = StepWeights(range(self.num_replicas))  # of a round, whose runs may each have others
            self._buffers = ProcessBuffers(self.registry, members, self._torch_device, equal)
        self._rounds.begin_run()
        self._rounds.look_at(roster)
        self._streams.begin([me])
        self._newborn.begin(members.modules, has_lazy=len(roster.tensors) < len(members.tensors))
        put_hooks(self._hook_key, self._step_hooks, lambda _: None)
        try:
            own_args, own_kwargs = inputs_of(me, args, kwargs)
            with self._entering:
                result = fn(*own_args, **own_kwargs)
        except BaseException as error:
            self._report(error)
            if isinstance(error, Exception):
                add_replica_note(error, me, self.num_replicas, weights)
            raise
        finally:
            remove_hooks(self._hook_key)
            self._newborn.end()
            self._streams.end()
        roster = self._rosters.now()
        leave_graph(roster.tensors)
        try:
            has_ended = self._rounds.end_run(self._world, roster)
        except BaseException:
            self._rounds.undo_run()
            raise
        if has_ended:
            self._become_alike()
        return result

    def _watch_newborn(self, parameters: list[torch.Tensor]) -> None:
        """Their gradients are this replica's own."""

    def _expect(self, parameter: nn.Parameter) -> None:
        """Likewise."""

    def _become_alike(self) -> None:
        """All but parameters and optimizers' state, as at the end of every run of other strategies."""
        if self._buffers is not None:
            self._weights = StepWeights(range(self.num_replicas))
            self._bring_together(self._buffers)
        self._buffers = None

    @property
    def rounds(self) -> MakesRounds | None:
        return self

    def _keep(self) -> None:
        """What has come up in a run has the first rank's values already, and by now been changed."""
        members = self.registry.members()
        roster = self._rosters.now(members)
        state = self._what_is_there(members, roster)
        if state != self._taken_over:
            self._known = {name: weakref.ref(owner) for name, (owner, _) in self._owned_values(roster).items()}
            self._taken_over = state

    def end_round(self) -> None:
        """End the round now, between runs. Every process calls it."""
        self._world.forget_failure()
        self._outside.level(self._world, self._outside.find())
        try:
            self._rounds.end(self._world, self._rosters.now())
            self._become_alike()
            self._keep()
        finally:
            self._outside.note(self._rosters.now())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _read_own(self, replica: int) -> OwnValues:
        buffers = {name: slot.tensor for name, slot in self.registry.named_buffer_slots().items()}
        return OwnValues(
            dict(self._rosters.now().items()),
            {name: tensor for name, tensor in buffers.items() if tensor is not None},
            [dict(one.state) for one in self.registry.optimizers()],
        )

    def _write_own(self, own: dict[int, OwnValues]) -> None:
        roster = self._rosters.now()
        put_values(self.registry, roster, own[self._world.rank])
        self._buffers = None
        self._outside.note(roster)


class _Unwatched(ParameterEdits):
    """Parameters that replicas are meant to change differently."""

    def summary(self, roster: Roster) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0


class _OutsideChanges:
    """What the program changes between runs, in the midst of a round, is everyone's: the first rank's, as in one
    process, where the program sees nothing else."""

    def __init__(self, registry: VariableRegistry) -> None:
        self._registry = registry
        self._tensors: list[tuple[weakref.ref[torch.Tensor], Trace]] = []
        self._buffers: list[tuple[weakref.ref[nn.Module], str, weakref.ref[torch.Tensor], Trace]] = []
        self._states: weakref.WeakKeyDictionary[Optimizer, tuple[object, object]] = weakref.WeakKeyDictionary()

    def note(self, roster: Roster) -> None:
        """A run has ended."""
        self._tensors = [(weakref.ref(tensor), trace_of(tensor)) for tensor in roster.tensors]
        found = [(slot, slot.tensor) for slot in self._registry.buffer_slots()]
        self._buffers = [
            (weakref.ref(slot.module), slot.name, weakref.ref(one), trace_of(one))
            for slot, one in found
            if one is not None
        ]
        self._states.clear()
        self._states.update({one: (one.state, trace(one.state)) for one in self._registry.optimizers()})

    def find(self) -> tuple[list[torch.Tensor], list[Optimizer]]:
        """What has changed since. Before new variables are taken over: these may share memory with known ones."""
        tensors = [(reference(), noted) for reference, noted in self._tensors]
        changed = [tensor for tensor, noted in tensors if tensor is not None and noted != trace_of(tensor)]
        for module, name, reference, noted in self._buffers:
            owner = module()
            now = None if owner is None else own_buffer(owner, name)
            if now is not None and (reference() is not now or noted != trace_of(now)):
                changed.append(now)
        return changed, [one for one in self._registry.optimizers() if self._is_edited(one)]

    def _is_edited(self, optimizer: Optimizer) -> bool:
        state, noted = self._states.get(optimizer, (None, None))
        return state is not None and (state is not optimizer.state or noted != trace(state))

    def level(self, communicator: Communicator, found: tuple[list[torch.Tensor], list[Optimizer]]) -> None:
        """A run begins. All ranks call it; they meet if there is anything."""
        changed, edited = found
        if not (changed or edited):
            return
        kinds = code(repr([(tuple(one.shape), str(one.dtype)) for one in changed]))
        if not all_equal(agree(communicator, OUTSIDE, (kinds, float(len(edited))))):
            shapes = [tuple(one.shape) for one in changed]
            raise ReplicaDivergenceError(
                "the program has not changed the same on all ranks between two runs of a round: on replica "
                f"{communicator.rank} tensors of shapes {shapes}, and the state of {len(edited)} optimizers. Do it on "
                "every rank (rank 0's values count), or let what one rank alone does wait for strategy.end_round()."
            )
        broadcast_tensors(communicator, changed, 0, OUTSIDE)
        for optimizer in edited:
            state = communicator.broadcast_object(state_dict_of(optimizer), 0, OUTSIDE)
            if communicator.rank != 0:
                load_in_place(optimizer, state)
