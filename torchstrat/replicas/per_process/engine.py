"""One replica in this process, the others in the other processes of the job.

Parameters, optimizers and modules are the user's own objects on the process's device. Hooks combine gradients while
backward runs (`gradient_synchronizer`), the optimizer's step is made as a step policy says (`optimizer_step`,
`step_policies`), and everything else that involves the others first agrees with them on what is done (`agreement`).
"""

from __future__ import annotations

import collections
import sys
import warnings
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core import nest, reduction
from torchstrat.core._torch_private import new_hook_key, own_buffers
from torchstrat.core.context import ReplicaContext, StrategyLike, enter
from torchstrat.core.devices import torch_device
from torchstrat.core.engine import Communicator, InputLayout, ReplicaEngine, ReplicaStates
from torchstrat.core.errors import CommunicationError
from torchstrat.core.gradients import GradientHooks, Owned, check_weight, shares
from torchstrat.core.kept_pages import StepPages
from torchstrat.core.memory import Copies, copies_in_processes
from torchstrat.core.optimizers import is_seen_to_step, wrapped_among
from torchstrat.core.randomness import ReplicaStreams
from torchstrat.core.reduction import Axis, ReduceOp
from torchstrat.core.values import DistributedValues, PerReplica, batches_among, select_replica
from torchstrat.core.variable.variable import hand_over
from torchstrat.core.variables import Members, VariableRegistry
from torchstrat.distributed.collectives.agreement import INPUT, SumsInPlace, agree, all_equal
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.replicas import exchange, optimizer_state
from torchstrat.replicas.central.state import tensors_of
from torchstrat.replicas.central.storage import CentralStorage
from torchstrat.replicas.engine import StepCounts, StepWeights, add_note, add_replica_note, adoption_warning, inputs_of
from torchstrat.replicas.exchange import AllGather, AllReduce, broadcast_tensors, differentiable
from torchstrat.replicas.gradient_records import LossCheck
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.optimizer_step import OptimizerStep, StepsOutside, left_gradients, put_hooks, remove_hooks
from torchstrat.replicas.per_process.edits import ParameterEdits, ProcessBuffers, level_plain, plain_digest
from torchstrat.replicas.per_process.idle import IdleReplicas
from torchstrat.replicas.per_process.step_policies import OWNER, PrimarySteps, ReplicatedSteps, ShardedSteps
from torchstrat.replicas.roster import Newborn, Roster, Rosters, parameters_of
from torchstrat.replicas.scaling_lookups import ScalingLookups
from torchstrat.replicas.state import DifferingEdits
from torchstrat.replicas.state_kinds import Belongings, compare
from torchstrat.replicas.table_memory import renormed_weights

END_OF_RUN = "the end of a run (bringing buffers and edited parameters together)"


class PerProcessReplica(ReplicaEngine):
    """This process's replica; its id is the process's rank.

    ``central``: parameters and optimizer state exist once, in memory that the ranks share. Where they have none, rank 0
    owns both, and the others keep working copies of the parameters. ``keeps_gradients``: in such memory, gradients are
    combined only where they are stepped. ``copies``: of a device, where the shared memory is on the host. ``pages``: of
    what steps allocate.
    """

    _has_step_context = False

    def __init__(
        self,
        strategy: StrategyLike,
        communicator: Communicator,
        device: str,
        gradient_op: ReduceOp,
        *,
        central: bool,
        communication: str,
        keeps_gradients: bool = False,
        copies: DeviceCopies | None = None,
        pages: StepPages | None = None,
    ) -> None:
        self._strategy = strategy
        self._pages = pages
        self._world = communicator
        self._is_closed = False
        self._communicator = communicator  # of the replicas that take part in the current run
        self._device = device
        self._torch_device = torch_device(device)
        self._central = central
        self._communication = communication
        self.registry = VariableRegistry()
        self.gradient_op = gradient_op
        self._storage = CentralStorage.of(communicator, copies) if central else None
        inner = tuple if self._storage is None else self._storage.parameters.tensors
        self._lookups = ScalingLookups(strategy, communicator.size, self.registry, inner)
        if self._storage is not None:
            self._storage.uses = self._lookups
            self._storage.tables = lambda: renormed_weights(self.registry.modules())
            self._storage.wrapped = self._find_wrapped
        self._is_staged = copies is not None
        self._owned: tuple[object, dict[int, Owned]] = ((), {})
        self._wrapped: tuple[int, frozenset[int]] = (-1, frozenset())
        self._rosters = Rosters(self.registry)
        owners = self._owners_of if keeps_gradients and self._storage is not None else None
        self._gradients = GradientSynchronizer(gradient_op, owners, rosters=self._rosters)
        self._edits = ParameterEdits(self.registry.modules, self._lookups)
        self._differing = DifferingEdits(self.registry.describe)
        self._hooks = GradientHooks(self._gradients)
        self._newborn = Newborn(self.registry, self._take_over_newborn, on_new=self._take_over_member)
        self._streams = ReplicaStreams([self._torch_device], first_replica=communicator.rank)
        self._entering = enter(strategy, ReplicaContext(strategy, communicator.rank))
        self._weights: StepWeights | None = None
        self._losses = LossCheck(strategy, gradient_op, communicator.size, self.registry.modules)
        self._counts = StepCounts()
        self._hook_key = new_hook_key()
        self._known: dict[str, weakref.ref[object]] = {}
        self._taken_over: tuple[object, ...] = ()  # what stays equal as long as there is nothing new
        owns = not central or communicator.rank == OWNER
        self._policy, self._outside_policy = self._make_policy(), self._make_policy()
        self._step = OptimizerStep(
            self._policy, self._gradients, self._lookups, gradient_op, self.registry.note_step_of
        )
        self._outside_step = OptimizerStep(self._outside_policy, self._gradients, self._lookups, gradient_op)
        left = left_gradients(self._gradients, self._rosters, communicator)
        self._steps_outside = StepsOutside(
            self._outside_step, self._begin_outside, self._gradients.end, self._is_of_owner, left, owns=owns
        )
        self._gradients.before_adding_outside = self._steps_outside.combine

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        return self._world.size

    @property
    def local_replicas(self) -> tuple[int, ...]:
        return (self._world.rank,)

    @property
    def is_chief(self) -> bool:
        return self._world.rank == 0

    @property
    def communication(self) -> str:
        return self._communication

    @property
    def everyone(self) -> Communicator | None:
        return None if self._is_closed else self._world

    @property
    def layout(self) -> InputLayout:
        agree(self._world, INPUT)
        return InputLayout(
            num_replicas=self.num_replicas,
            local_replicas=self.local_replicas,
            devices=(self._torch_device,),
            num_workers=self.num_replicas,
            worker_index=self._world.rank,
            always_wrap=True,
            # A channel of its own: input is fetched in the background, while the step talks to the others too.
            communicator=self._world.split(),
        )

    def device_of_replica(self, replica: int) -> str:
        return self._device

    @property
    def replica_states(self) -> ReplicaStates:
        return self._streams

    def copies(self) -> list[Copies]:
        return copies_in_processes(
            self._device,
            self.num_replicas,
            central=self._central,
            shares_variables=self._storage is not None,
            sums_in_place=isinstance(self._world, SumsInPlace),
            is_staged=self._storage is not None and self._is_staged,
        )

    def scope_opened(self) -> None:
        self.registry.open()

    def scope_closed(self, *, failed: bool = False) -> None:
        self.registry.close()
        if failed:
            if (error := sys.exc_info()[1]) is not None:
                self._report(error, " in strategy.scope()")
            return
        self._world.forget_failure()
        self._take_over_initial_values(self.registry.members())
        self._watch_optimizers()

    def set_no_sync(self, active: bool) -> None:
        self._gradients.set_no_sync(active)

    def check_replicas(self, when: str) -> None:
        compare(self._world, Belongings(self.registry, lambda one: not self._is_of_owner(one)), when)

    def close(self) -> None:
        if (error := sys.exc_info()[1]) is not None:  # the program is on its way out, by way of a finally
            self._report(error)
        self._hooks.detach()
        self._steps_outside.stop()
        self._is_closed = True
        self._world.close()

    def _report(self, error: BaseException, where: str = "") -> None:
        """Tell the others why this rank stops. That it could not reach them they know by themselves."""
        if not isinstance(error, CommunicationError):
            self._world.report_failure(f"raised {type(error).__name__}{where}: {str(error)[:300]}")

    # -- variables --------------------------------------------------------------------------------------------------

    def _take_over_initial_values(self, members: Members) -> Roster:
        """Rank 0's values for every variable that was not there before. Every rank has created the same ones."""
        roster = self._rosters.now(members)
        moved_out = [] if self._storage is None else self._storage.moved_out(roster.items())
        state = self._what_is_there(members, roster)
        if state != self._taken_over or moved_out:
            self._take_over(roster, moved_out)
            self._taken_over = state
            if self._pages is not None:
                self._pages.variables_changed()
        return roster

    def _what_is_there(self, members: Members, roster: Roster) -> tuple[object, ...]:
        return roster.layout, members.changes, [(id(s.module), s.name, s.has_values) for s in members.buffer_slots]

    def _owned_values(self, roster: Roster) -> dict[str, tuple[object, torch.Tensor]]:
        """Parameters and buffers by name, and what has to be there for the name to mean the same."""
        found: dict[str, tuple[Any, torch.Tensor]] = {name: (tensor, tensor) for name, tensor in roster.items()}
        for name, slot in self.registry.named_buffer_slots().items():
            if slot.tensor is not None and slot.has_values:
                found[f"buffer {name}"] = (slot.module, slot.tensor)
        return found

    def _take_over(self, roster: Roster, moved_out: Container[str]) -> None:
        """``moved_out``: names of variables that have been in common memory."""
        found = self._owned_values(roster)
        fresh = {n: t for n, (owner, t) in found.items() if n not in self._known or self._known[n]() is not owner}
        if fresh or moved_out:
            shapes = collections.Counter(tuple(tensor.shape) for tensor in fresh.values())
            listed = ", ".join(f"{n} x {shape}" for shape, n in shapes.items())
            call = f"taking over rank 0's initial values of {listed}"
            agree(self._world, call)
            moved = set()
            if self._storage is not None:
                among = [name for name in roster.names if name in fresh or name in moved_out]
                moved = self._storage.move_in(dict(roster.items()), among, self.registry.optimizers(), call)
            broadcast_tensors(self._world, [t for name, t in fresh.items() if name not in moved], OWNER, call)
        self._known = {name: weakref.ref(owner) for name, (owner, _) in found.items()}  # unless that was refused

    def _take_over_newborn(self, module: nn.Module) -> None:
        """Each rank has drawn first values for itself; make them the first rank's before they are used."""
        buffers = [buffer for buffer in own_buffers(module).values() if buffer is not None]
        values = [*parameters_of(module), *buffers]
        place = self.registry.number_of(module)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in values)
        call = f"the first values of a {type(module).__name__} (module {place}, shapes {shapes})"
        agree(self._communicator, call)
        broadcast_tensors(self._communicator, values, 0, call)
        self._watch_newborn(parameters_of(module))

    def _watch_newborn(self, parameters: list[torch.Tensor]) -> None:
        self._hooks.attach(parameters, early=self._gradients.needs_early_hooks)
        if not self._gradients.is_in_pass:  # else an optimizer's step catches up with them
            self._gradients.use(self._rosters.now())
        self._edits.note(parameters)

    def _take_over_member(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """A step is about to give a module that was there a new buffer or parameter: it gets the first rank's value, as
        the replicas of one process find the one that the first of them has made."""
        if value.is_inference() or value.is_meta or is_lazy(value):
            return
        kind_of = "parameter" if isinstance(value, nn.Parameter) else "buffer"
        call = f"the first value of {kind_of} {name!r} of module {self.registry.number_of(module)}"
        agree(self._communicator, call)
        kind = self._communicator.broadcast_object((value.shape, value.dtype), 0, call)
        if kind != (value.shape, value.dtype):
            value.data = torch.empty(kind[0], dtype=kind[1], device=value.device)
        broadcast_tensors(self._communicator, [value.data], 0, call)
        if isinstance(value, nn.Parameter):
            self._expect(value)

    def _expect(self, parameter: nn.Parameter) -> None:
        self._hooks.attach([parameter], early=self._gradients.needs_early_hooks)
        self._gradients.expect(parameter)

    def _make_policy(self) -> ReplicatedSteps:
        if not self._central:
            return ReplicatedSteps(self._gradients, self._edits, self._differing)
        if self._storage is None:
            return PrimarySteps(self._gradients, self._edits, self._differing)
        return ShardedSteps(self._gradients, self._edits, self._differing, self._storage)

    def _is_of_owner(self, optimizer: Optimizer) -> bool:
        """Whether the owner alone has the optimizer's state. All have that of a wrapper whose steps are not seen."""
        return self._central and is_seen_to_step(optimizer) and not self.shares_steps(optimizer)

    def shares_steps(self, optimizer: Optimizer) -> bool:
        """Whether the processes share out this optimizer's steps, in memory of the host."""
        return self._storage is not None and self._storage.shares(optimizer)

    def _find_wrapped(self) -> frozenset[int]:
        if self._wrapped[0] != self.registry.changes:
            self._wrapped = (self.registry.changes, wrapped_among(self.registry.optimizers()))
        return self._wrapped[1]

    def _owners_of(self, tensor: torch.Tensor) -> Owned | None:
        return self._owned[1].get(id(tensor))

    def _find_owners(self) -> None:
        if self._storage is not None and self._gradients.leaves_with_owners:
            optimizers = self.registry.optimizers()
            key = *(tuple(map(id, tensors_of(one))) for one in optimizers), self._storage.state.generation
            if self._owned[0] != key:
                self._owned = (key, self._storage.owners(optimizers))

    def _watch_optimizers(self) -> None:
        """Under central storage steps outside of runs are the owner's; anywhere they combine what runs have left."""
        if self._central or self._gradients.pending:
            self._steps_outside.watch(self.registry.optimizers())
        if self._gradients.pending:
            roster = self._rosters.now()
            self._hooks.attach_to_run(roster.tensors, roster.layout, early=True)

    def _begin_outside(self) -> bool:
        if not (self._central or self._gradients.pending):
            return False
        self._find_owners()
        self._weights = StepWeights(range(self.num_replicas))
        self._gradients.begin(self._rosters.now(), self._world, lambda: 1.0)
        self._outside_policy.begin(self._world)
        self._outside_step.begin(self._world, self._weights, self._world.rank)
        return True

    # -- run --------------------------------------------------------------------------------------------------------

    def _begin_run(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
    ) -> tuple[StepWeights, Members, Roster]:
        leaves = nest.flatten((args, kwargs)) if args or kwargs else []
        self._weights = weights = StepWeights(range(self.num_replicas), batches_among(leaves) if leaves else ())
        self._world.forget_failure()
        if adopted := self.registry.adopt(fn, leaves):
            warnings.warn(adoption_warning(adopted, self._strategy), stacklevel=6)
        members = self.registry.members()
        return weights, members, self._take_over_initial_values(members)

    def run(self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Any:
        try:
            return self._run(fn, args, kwargs)
        except BaseException:
            self._world.leave_run()
            raise

    def _run(self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Any:
        weights, members, roster = self._begin_run(fn, args, kwargs)
        if not weights.active:
            return PerReplica((), replica_ids=(), weights=weights)
        self._policy.before_run(self._world, self.registry.optimizers(), roster)
        if len(weights.active) == self.num_replicas:
            result = self._run_replica(roster, members, fn, args, kwargs)
        else:
            result = self._run_without_idle(weights, roster, members, fn, args, kwargs)
        self._gradients.pending |= self._gradients.no_sync
        self._watch_optimizers()
        if self._pages is not None:
            self._pages.end_of_run()
        return result

    def _run_without_idle(
        self, weights: StepWeights, roster: Roster, members: Members, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> object:
        idle = IdleReplicas(
            self._world,
            weights.active,
            self.registry,
            self._rosters,
            self._gradients,
            self._steps_outside.keeping_state,
            self._torch_device,
            self._is_of_owner,
            self._storage,
            self._counts,
        )
        idle.before_run(fn, args, kwargs)
        if self._gradients.pending:
            self._gradients.combine_parts(roster, self._world, is_all=True)
        result = None
        group = self._world.subgroup(tuple(weights.active))
        if self._world.rank in weights.active:
            self._communicator = group
            try:
                result = self._run_replica(roster, members, fn, args, kwargs)
                if self._gradients.pending or self._gradients.no_sync:
                    own = weights.of(self._world.rank)
                    self._gradients.combine_parts(self._rosters.now(), group, own, is_all=False)
                idle.settle_gradients(group)
            finally:
                self._communicator = self._world
        result = idle.after_run(result, weights)
        hand_over(self._world, dict(self.registry.variables.numbered()), weights.active[0])
        self._edits.begin(self._rosters.now().tensors)
        return result

    def _begin_replica(self, roster: Roster, members: Members, weights: StepWeights) -> ProcessBuffers:
        me = self._world.rank
        self._find_owners()
        weight = partial(weights.of_gradients, self.gradient_op, me)
        self._gradients.begin(roster, self._communicator, weight, is_all=self._communicator is self._world)
        self._hooks.attach_to_run(roster.tensors, roster.layout, early=self._gradients.needs_early_hooks)
        self._edits.begin(roster.tensors)
        self._edits.state.begin(self._policy.watched(members.helpers))
        buffers = ProcessBuffers(self.registry, members, self._torch_device, weights)
        self._policy.begin(self._communicator)
        self._step.begin(self._communicator, weights, me)
        self._streams.begin([me])
        self._newborn.begin(members.modules, has_lazy=len(roster.tensors) < len(members.tensors))
        put_hooks(self._hook_key, self._step.hooks, self._gradients.before_clipping)
        self._lookups.begin([me])
        self._lookups.switch(me)
        return buffers

    def _run_replica(self, roster: Roster, members: Members, fn: Callable[..., Any], args: Any, kwargs: Any) -> object:
        me, weights, buffers = self._world.rank, self._weights, None
        assert weights is not None
        self._steps_outside.pause()
        try:
            buffers = self._begin_replica(roster, members, weights)
            own_args, own_kwargs = inputs_of(me, args, kwargs)
            losses = self._lookups.around(self._losses.around(weights))
            if isinstance(losses, nullcontext) and not self._has_step_context:
                with self._entering:  # nearly always; entering what does nothing takes its time, too
                    result = fn(*own_args, **own_kwargs)
            else:
                with losses, self._entering, self._around_step():
                    result = fn(*own_args, **own_kwargs)
        except BaseException as error:
            self._report(error)
            self._lookups.end()
            if buffers is not None:  # else the step has not begun
                self._undo(error, roster, buffers)
                if isinstance(error, Exception):
                    add_replica_note(error, me, self.num_replicas, weights)
            raise
        finally:
            remove_hooks(self._hook_key)
            self._lookups.end()
            self._step.end()
            self._policy.end()
            self._edits.state.end()
            self._newborn.end()
            self._steps_outside.resume()
            self._gradients.end()
            self._streams.end()
        try:
            self._bring_together(buffers)
        except BaseException as error:  # another rank has failed after its last exchange with this one
            self._undo(error, roster, buffers)
            raise
        finally:
            self._edits.state.forget()
        return nest.map_structure(lambda leaf: PerReplica((leaf,), replica_ids=(me,), weights=weights), result)

    def _around_step(self) -> AbstractContextManager[None]:
        """What the step function is called in, where there is anything (``_has_step_context``)."""
        return nullcontext()

    def _undo(self, error: BaseException, roster: Roster, buffers: ProcessBuffers) -> None:
        """Variables become what they were after the last optimizer step, buffers what they were before the run."""
        buffers.restore()
        own = roster.tensors
        if self._storage is not None:
            self._storage.follow()
            self._storage.drop_edits()
            own = [tensor for tensor in own if tensor not in self._storage.parameters]
        with torch.no_grad():
            lost = self._edits.undo(own)
        if lost:
            names = ", ".join(map(self.registry.describe, lost[:3]))
            add_note(
                error,
                f"The step had changed {names} in place before, for the first time, and that could not be undone on "
                f"replica {self._world.rank}.",
            )

    def _bring_together(self, buffers: ProcessBuffers) -> None:
        """The end of a run: what replicas have changed differently becomes the same."""
        assert self._weights is not None
        members = self.registry.members()
        roster, optimizers = self._rosters.now(members), [one for one in members.helpers if isinstance(one, Optimizer)]
        # By places: one rank may have changed in one optimizer what another has in the next.
        settings = sum(place * optimizer_state.digest(one) for place, one in enumerate(optimizers, 1))
        state = sum(place * self._policy.state_digest(one) for place, one in enumerate(optimizers, 1))
        plain = plain_digest(members)
        numbers = (*self._edits.summary(roster), settings, *buffers.summary(members.buffer_slots), plain, state)
        own = (self._weights.of(self._world.rank), float(self._gradients.leaves_parts))
        rows = agree(self._communicator, END_OF_RUN, (*own, *numbers))
        buffers.look_at_counts(members.buffer_slots, self._weights.rows_of(self._world.rank))
        if not all_equal(rows) or own[1] or buffers.sums:
            self._level_at_end(rows, roster, optimizers, buffers)
        rules = self.registry.buffer_rules
        for name, slot in self.registry.named_buffer_slots().items() if rules else ():
            if rules.keeps_own(slot.module, slot.name):
                self._known[f"buffer {name}"] = weakref.ref(slot.module)  # not to be overwritten as a new one

    def _level_at_end(
        self, rows: list[list[float]], roster: Roster, optimizers: list[Optimizer], buffers: ProcessBuffers
    ) -> None:
        """``rows``: what each rank has brought, which differs, or has parts of gradients or sums of buffers in it."""
        weights, parts = [row[0] for row in rows], [row[1] for row in rows]
        if not all_equal([row[-2:-1] for row in rows]):
            self._differing.report_frozen(level_plain(self._communicator, self.registry, 0, END_OF_RUN))
        states, rows = [row[-1:] for row in rows], [row[1:-2] for row in rows]
        if any(parts):
            self._gradients.weigh_parts(shares(self.gradient_op, weights)[self._communicator.rank])
        differ = not all_equal([row[1:] for row in rows])
        are_moved = differ and not all_equal([row[1:4] for row in rows])
        if self._central and (are_moved or not all_equal(states)):
            self._policy.refuse_moves_by_state(optimizers, END_OF_RUN)
        if are_moved:
            self._differing.report(self._edits.make_equal(self._communicator, roster, END_OF_RUN))
        if differ and not all_equal([row[4:5] for row in rows]):
            for optimizer in optimizers:
                found = optimizer_state.level(self._communicator, optimizer, END_OF_RUN)
                self._differing.report_settings(optimizer, found)
        for optimizer in [] if all_equal(states) else optimizers:
            if not self._central or self.shares_steps(optimizer):
                self._policy.level_state(optimizer, END_OF_RUN)
        if buffers.sums or (differ and not all_equal([row[5:] for row in rows])):
            buffers.merge(self._communicator, weights, END_OF_RUN)

    # -- what replicas do together ----------------------------------------------------------------------------------

    def set_weight(self, weight: float) -> None:
        value = check_weight(weight)
        if self._weights is not None:  # before the first run there is nothing to weigh
            self._weights.override(self._world.rank, value)

    def relative_weight(self) -> float:
        return 1.0 if self._weights is None else self._weights.relative(self._world.rank)

    def span_replicas(self) -> None:
        if self._weights is not None:
            self._weights.span_replicas()

    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        agree(self._communicator, "merge_call")
        me = self._world.rank

        def wrap(leaf: object) -> object:
            if isinstance(leaf, DistributedValues):
                return leaf
            return PerReplica((leaf,), replica_ids=(me,), weights=self._weights)

        with enter(self._strategy, None), self._streams.of_the_user():
            result = fn(self._strategy, *nest.map_structure(wrap, list(args)), **nest.map_structure(wrap, kwargs))
        return select_replica(me, result)

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        return differentiable(AllReduce, value, self.exchange_all_reduce, op, "all_reduce")

    def exchange_all_reduce(self, op: ReduceOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return exchange.reduce_in_step(self._communicator, op, tensors)

    def all_gather(self, value: object, axis: int) -> Any:
        return differentiable(AllGather, value, self._exchange_all_gather, axis, "all_gather")

    def _exchange_all_gather(self, axis: int, tensors: list[torch.Tensor]) -> exchange.Gathered:
        return exchange.gather_in_step(self._communicator, axis, tensors)

    # -- cross-replica context --------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, value: object, axis: Axis) -> Any:
        if isinstance(value, DistributedValues):
            return exchange.reduce_values(self._communicator, op, list(value.values), axis)
        if axis is None and self.num_replicas > 1 and reduction.is_python_number(value):
            return exchange.reduce_number(self._communicator, op, value)
        if axis is None:
            return reduction.reduce_plain(op, value, axis, self.num_replicas)
        return exchange.reduce_values(self._communicator, op, [value], axis)

    def weighted_mean(self, value: object) -> object:
        if isinstance(value, PerReplica):
            return exchange.weighted_mean(self._communicator, list(value.values), value.known_weights())
        if self.num_replicas > 1 and reduction.is_python_number(value):
            return exchange.reduce_number(self._communicator, ReduceOp.MEAN, value, must_be_equal=True)
        return reduction.weighted_mean_of(value, self.num_replicas)

    def gather(self, value: object, axis: int) -> Any:
        if not isinstance(value, DistributedValues):
            return reduction.gather_plain(value, axis)
        return exchange.gather_components(self._communicator, list(value.values), axis)
