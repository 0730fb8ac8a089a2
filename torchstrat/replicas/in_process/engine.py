"""Several replicas in this process: threads that take turns, over components that take each other's place.

The replicas run one after the other and alternate only where they need each other: at the end of a backward pass, at an
optimizer's step, in `all_reduce`, `all_gather` and `merge_call`. Plain training steps therefore need no change, and the
order of everything is the same in every run. See `baton`, `components`, `gradients` and `steps`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import context, nest, reduction
from torchstrat.core._torch_private import new_hook_key
from torchstrat.core.context import ReplicaContext, StrategyLike, enter, wraps_values
from torchstrat.core.devices import canonical, torch_device
from torchstrat.core.engine import InputLayout, MakesRounds, ReplicaEngine, ReplicaStates
from torchstrat.core.errors import ContextError
from torchstrat.core.gradients import check_weight
from torchstrat.core.memory import Copies, copies_in_one_process, local_copies
from torchstrat.core.optimizers import stepped_by
from torchstrat.core.reduction import Axis, ReduceOp
from torchstrat.core.values import DistributedValues, PerReplica, batches_among, select_replica
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.engine import StepCounts, StepWeights, add_replica_note, adoption_warning, inputs_of, regroup
from torchstrat.replicas.exchange import AllGather, AllReduce, differentiable
from torchstrat.replicas.gradient_records import LossCheck
from torchstrat.replicas.in_process.baton import Baton, WorkerThreads
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.in_process.gradients import InProcessGradients
from torchstrat.replicas.in_process.steps import InProcessSteps, LocalComponents, LocalSteps
from torchstrat.replicas.optimizer_step import LeftGradients, StepsOutside
from torchstrat.replicas.roster import Newborn, parameters_of
from torchstrat.replicas.scaling_lookups import ScalingLookups
from torchstrat.replicas.state import (
    DifferingEdits,
    data_edited_differently,
    edited_differently,
    state_edited_differently,
)
from torchstrat.replicas.thread_state import OwnSettings, ProcessSettings, ThreadState
from torchstrat.replicas.update_policies import (
    LocalRounds,
    LocalUpdate,
    OwnValues,
    ReplicaRounds,
    refuse_check,
    refuse_merge_call,
    require_rows_for_all,
)


class InProcessReplicas(ReplicaEngine):
    """One or more replicas on ``devices`` (canonical strings; ``cpu:i`` are virtual replicas of one CPU).

    ``parameter_device``: where the central variables live, or None for "with the first replica". ``local``: every
    replica steps variables of its own, in rounds.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        devices: tuple[str, ...],
        parameter_device: torch.device | None = None,
        gradient_op: ReduceOp = ReduceOp.MEAN,
        local: LocalUpdate | None = None,
    ) -> None:
        self._strategy = strategy
        self._devices = devices
        self._torch_devices = tuple(torch_device(device) for device in devices)
        self._home = parameter_device
        self.registry = VariableRegistry(self._is_current)
        self.registry.looks_for_flat = len(devices) > 1
        self.gradient_op = gradient_op
        helpers = self.registry.helpers
        self._rounds = [] if local is None else [LocalRounds(local, one, helpers) for one in range(len(devices))]
        self._ends_round: list[bool] = []  # of the replicas of the run that goes on
        self._local = None if local is None else LocalComponents(self.registry, self._torch_devices)
        self._components = self._local or Components(self.registry, self._torch_devices, parameter_device)
        self._process_settings = ProcessSettings()
        self._gradients = InProcessGradients(
            self._components, self.registry, gradient_op, len(devices), combines=local is None
        )
        self._newborn = Newborn(self.registry, self._welcome, self._note_use, self._expect)
        self._threads = WorkerThreads(f"torchstrat-{type(strategy).__name__}")
        self._differing = DifferingEdits(self.registry.describe)
        self._lookups = ScalingLookups(
            strategy,
            len(devices) if local is None else 1,
            self.registry,
            lambda: (one for slot in self._components.slots() for one in slot.tensors),
        )
        self._steps: InProcessSteps | LocalSteps
        if local is not None:
            self._steps = LocalSteps(self._rounds, self._components, new_hook_key())
        else:
            self._steps = InProcessSteps(
                self._components,
                self._gradients,
                self._differing,
                self._lookups,
                self._is_current,
                gradient_op,
                new_hook_key(),
            )
        self._steps_outside = StepsOutside(
            self,
            lambda: self._gradients.is_pending,
            lambda: None,
            lambda _: False,
            LeftGradients(lambda: self.registry.tensors() if self._gradients.is_pending else (), self._combine_left),
            owns=True,
        )
        self._gradients.before_adding_outside = self._steps_outside.combine
        self._entry = threading.Lock()
        self._has_begun = False  # a run, so that there is something to end
        self._baton: Baton | None = None
        self._weights: StepWeights | None = None
        self._losses = LossCheck(strategy, gradient_op, len(devices), self.registry.modules)
        self._counts = StepCounts()
        self._entering = [enter(strategy, ReplicaContext(strategy, replica)) for replica in range(len(devices))]
        at_home = parameter_device in (None, self._torch_devices[0])
        self._runs_plainly = len(devices) == 1 and at_home and local is None

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        return len(self._devices)

    @property
    def local_replicas(self) -> tuple[int, ...]:
        return tuple(range(len(self._devices)))

    @property
    def communication(self) -> str:
        return "within this process"

    @property
    def layout(self) -> InputLayout:
        return InputLayout(
            num_replicas=self.num_replicas,
            local_replicas=self.local_replicas,
            devices=self._torch_devices,
            per_replica_input="honoured" if wraps_values(self._strategy) else "refused",
        )

    def device_of_replica(self, replica: int) -> str:
        return self._devices[replica]

    @property
    def replica_states(self) -> ReplicaStates:
        streams, optimizers = self._components.streams, self.registry.optimizers
        if not self._rounds:
            return streams
        rounds = dict(enumerate(self._rounds))
        return ReplicaRounds(streams, rounds, self.num_replicas, optimizers, self._read_own, self._write_own)

    def _read_own(self, replica: int) -> OwnValues:
        assert self._local is not None
        return self._local.own_values(replica, self._gradients.roster_of(0))

    def _write_own(self, own: dict[int, OwnValues]) -> None:
        assert self._local is not None
        self._local.put_own_values(own, self._gradients.roster_of(0))

    def copies(self) -> list[Copies]:
        if self._rounds:
            return local_copies(self._devices)
        return copies_in_one_process(self._devices, None if self._home is None else canonical(self._home))

    def scope_opened(self) -> None:
        self.registry.open()

    def scope_closed(self, *, failed: bool = False) -> None:
        self.registry.close()

    def set_no_sync(self, active: bool) -> None:
        self._gradients.set_no_sync(active)

    def check_replicas(self, when: str) -> None:
        """Between runs all replicas of a process have the same objects."""
        if self._rounds:
            raise refuse_check()

    @property
    def rounds(self) -> MakesRounds | None:
        return self if self._rounds else None

    def end_round(self) -> None:
        """End the round of local steps now: bring the replicas together, between runs."""
        self._between_runs(StepWeights(range(self.num_replicas)), self._end_round_of_replica)

    def close(self) -> None:
        self._gradients.hooks.detach()
        self._steps_outside.stop()
        self._threads.close()

    # -- run --------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Any:
        leaves = [*nest.leaves(list(args)), *nest.leaves(kwargs)] if args or kwargs else []
        weights = StepWeights(range(self.num_replicas), batches_among(leaves) if leaves else ())
        if self._runs_plainly:
            self._weights = weights
            return self._run_plainly(fn, args, kwargs)
        if self._rounds:
            require_rows_for_all(weights.active, self.num_replicas)
        # Resolved before anything runs: a value without a component for some replica must change nothing.
        inputs = {r: inputs_of(r, args, kwargs) if args or kwargs else ([], {}) for r in weights.active}
        if self._gradients.is_pending and 0 < len(weights.active) < self.num_replicas:
            self._combine_left()
        baton = Baton(weights.active, self._threads, self._switch)
        self._enter_run(baton)
        try:
            self._weights = weights
            adopted = self.registry.adopt(fn, leaves)
            if adopted:
                warnings.warn(adoption_warning(adopted, self._strategy), stacklevel=4)
            if not weights.active:
                return PerReplica((), weights=weights)
            if len(inputs) > 1:
                self._counts.begin(self.registry.objects, self.registry.reached)
            results = self._run_replicas(baton, weights, fn, inputs)
            if self._gradients.is_pending:
                if len(weights.active) < self.num_replicas:
                    self._between_runs(weights, self._gradients.combine_parts)
                self._steps_outside.watch(self.registry.optimizers())
            self._counts.warn_of_shared(len(inputs))
            return regroup(results, weights, is_all=len(results) == self.num_replicas)
        finally:
            self._counts.begin(())
            self.registry.reached = ()  # nothing of the program's is to live on here
            self._leave_run(baton)

    def _enter_run(self, baton: Baton) -> None:
        with self._entry:
            if self._baton is not None and not self._baton.is_over:
                raise ContextError(
                    f"run of {self._strategy!r} was called while another run of it goes on: in a merge_call, in "
                    "another thread, or after an interruption that its replicas did not react to. One strategy makes "
                    "one run at a time; make a second strategy for what has to overlap."
                )
            self._baton = baton

    def _leave_run(self, baton: Baton) -> None:
        """Also one that has failed before it began. Where Ctrl-C has left it going on, its end does this. Another
        thread may have entered one since."""
        with self._entry:
            if self._baton is baton and (baton.is_over or not baton.is_begun):
                self._baton = None

    def _run_plainly(self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> object:
        """One replica on the device of the variables: the caller's thread, the user's objects as they are."""
        with self._entering[0]:
            own_args, own_kwargs = inputs_of(0, args, kwargs)
            return fn(*own_args, **own_kwargs)

    def _run_replicas(
        self, baton: Baton, weights: StepWeights, fn: Callable[..., object], inputs: dict[int, Any]
    ) -> dict[int, object]:
        state: ThreadState
        first = weights.active[0]

        def body(replica: int) -> object:
            replica_args, replica_kwargs = inputs[replica]
            if self._rounds:
                self._rounds[replica].look_at(self._gradients.roster_of(replica))
            with self._entering[replica]:
                call = partial(fn, *replica_args, **replica_kwargs)
                result = state.call(self._torch_devices[replica], call, lasts=replica == first)
                if self._rounds:
                    self._end_run_of_replica(replica)
                return result

        try:
            # It looks for programs to which combining gradients does something else than they mean.
            with nullcontext() if self._rounds else self._lookups.around(self._losses.around(weights)):
                state = ThreadState(self.registry.thread_locals())
                results = baton.run(
                    body,
                    begin=lambda: self._begin(baton, weights),
                    end=lambda error: self._end(weights, failed=error is not None),
                )
        except Exception as error:
            if baton.failed_replica is not None:
                add_replica_note(error, baton.failed_replica, self.num_replicas, weights)
            raise
        state.hand_back()
        return results

    # An optimizer's step outside of runs, where these have left gradients uncombined: see `StepsOutside`.

    def _combine_left(self) -> None:
        self._between_runs(StepWeights(range(self.num_replicas)), self._gradients.combine_parts)

    def is_part_of_another(self) -> bool:
        return self._baton is not None

    def before_last(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        left_over = partial(self._gradients.catch_up, stepped_by(optimizer))
        self._between_runs(StepWeights(range(self.num_replicas)), left_over)

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._gradients.after_step(stepped_by(optimizer))

    def _end_run_of_replica(self, replica: int) -> None:
        with OwnSettings():
            ends = self._rounds[replica].end_run(self._gradients.communicator, self._gradients.roster_of(replica))
            self._ends_round.append(ends)

    def _end_round_of_replica(self) -> None:
        assert self._baton is not None
        assert self._baton.holder is not None
        replica = self._baton.holder
        with OwnSettings():
            self._rounds[replica].end(self._gradients.communicator, self._gradients.roster_of(replica))
            self._ends_round.append(True)

    def _between_runs(self, weights: StepWeights, combine: Callable[[], None]) -> None:
        """Each replica of ``weights`` does something together with the others, between runs."""
        baton = Baton(weights.active, self._threads, self._switch)
        self._enter_run(baton)
        try:
            self._run_replicas(baton, weights, combine, {replica: ([], {}) for replica in weights.active})
        finally:
            self._leave_run(baton)

    def _begin(self, baton: Baton, weights: StepWeights) -> None:
        replicas = weights.active
        with OwnSettings():
            members = self.registry.members()
            if self._gradients.is_pending:
                self._gradients.refuse_edited_parts()
            self._has_begun = True
            self._components.begin(replicas, members)
            self._gradients.begin(baton, weights, members)
        self._ends_round = []
        for rounds in self._rounds:
            rounds.begin_run()
        self.registry.on_copy = self._components.note_copy
        self._newborn.begin(members.modules, has_lazy=self._components.has_lazy)
        self._steps.begin(baton, weights)
        self._lookups.begin(replicas)
        self._process_settings.begin(replicas)
        self._components.streams.begin(replicas)  # last: what fails before leaves the user's generator as it was

    def _end(self, weights: StepWeights, *, failed: bool) -> None:
        """Of a run that may have begun in part, where something in `_begin` has raised."""
        has_begun, self._has_begun = self._has_begun, False
        if not has_begun:
            self._baton = None
            return
        self._process_settings.end()
        refused = self._lookups.end()
        with OwnSettings():
            try:
                self._components.activate(None)
                if not failed:
                    self._components.buffers.refuse_edits_of_viewed()
                    self._components.refuse_changes_of_made(at_end=True)
                    if refused is not None:
                        raise refused
                if not failed and len(weights.active) > 1 and (not self._rounds or any(self._ends_round)):
                    self._report_differing(weights.active)
            except BaseException:
                failed = True
                raise
            finally:
                self._steps.end()
                self._newborn.end()
                self.registry.on_copy = None
                try:
                    self._gradients.end(None if failed else weights.values())
                    if self._local is not None:
                        for rounds in self._rounds if failed else ():
                            rounds.undo_run()
                        self._local.end_apart(is_end=any(self._ends_round) and not failed)
                    else:
                        rows = [weights.rows_of(replica) for replica in weights.active]
                        counts = weights.in_buffers(weights.active, weights.values())
                        self._components.end(None if failed else counts, rows)
                finally:
                    self._baton = None

    def _report_differing(self, replicas: list[int]) -> None:
        if not self._differing.is_told_of_settings:
            for helper, (first, *others) in self._components.helpers.settings():
                for groups in others:
                    self._differing.report_settings(helper, optimizer_state.differing(first, groups))
        if self._differing.is_told or self._rounds:
            return
        slots = self._components.slots()
        if self._components.has_edits:
            self._differing.report(edited_differently(self._components.unmerged(slots), replicas))
        states = state_edited_differently(self._components.helpers.states())
        self._differing.report(data_edited_differently(slots, replicas, self._gradients.combined_of), state=states)

    def _is_current(self) -> bool:
        """Whether the calling thread is in this strategy's scope or runs one of its replicas."""
        return context.get_strategy() is self._strategy

    def _switch(self, replica: int | None) -> None:
        self._gradients.switch(replica)
        if replica is not None:  # what is done while all stand still draws nothing, and sets nothing
            self._components.streams.activate(replica)
            self._process_settings.activate(replica)
        if not self._components.has_nothing_to_swap(replica):
            with OwnSettings():
                self._components.activate(replica)
        self._lookups.switch(replica)

    # -- what comes into being during a run ---------------------------------------------------------------------------

    def _welcome(self, module: nn.Module) -> None:
        """A module whose variables have just got their values: from now on they are variables like the others."""
        baton = self._baton
        if baton is None or not self._is_current():
            return
        baton.shield()
        self._components.made_members(module)
        with OwnSettings():
            self._give_first_values(module)
            self._components.register_module(module)
            self._attach(parameters_of(module))
        baton.unshield()

    def _give_first_values(self, module: nn.Module) -> None:
        """Those that the first replica's code has drawn for the module that it has made in this one's place."""
        assert self._baton is not None
        replica = self._baton.holder
        if replica is None:
            return
        for own, first in self._gradients.twins.pair(module, replica):
            slot = self._components.slot_of(first)
            if slot is not None and replica in slot.data:
                own.data.copy_(slot.data[replica])

    def _attach(self, tensors: list[torch.Tensor]) -> None:
        slots = [self._components.slot_of(tensor) for tensor in tensors]
        self._gradients.attach([slot.tensor for slot in slots if slot is not None and not slot.is_copy])

    def _note_use(self, module: nn.Module) -> None:
        if self._baton is not None and self._is_current():
            self._components.note_use(module)
            if self._baton.holder is not None:
                self._gradients.twins.note_use(module, self._baton.holder)

    def _expect(self, module: nn.Module, name: str, member: torch.Tensor | nn.Module) -> None:
        """A replica's code is about to register a parameter, a buffer or a child."""
        self._components.expect_member(module, name, member)
        if isinstance(member, nn.Parameter):
            self._gradients.attach([member])

    # -- what replicas do together ----------------------------------------------------------------------------------

    def _meet(self, call: str, payload: object, combine: Callable[[dict[int, Any]], dict[int, Any]]) -> Any:
        """Meet the other replicas; with a single replica that runs plainly, just combine."""
        if self._baton is None:
            return combine({0: payload})[0]
        return self._baton.meet(call, payload, combine)

    def set_weight(self, weight: float) -> None:
        value = check_weight(weight)
        holder = self._baton.holder if self._baton is not None else 0
        if self._weights is not None and holder is not None:  # outside of any run there is nothing to weigh
            self._weights.override(holder, value)

    def relative_weight(self) -> float:
        holder = self._baton.holder if self._baton is not None else 0
        return 1.0 if self._weights is None or holder is None else self._weights.relative(holder)

    def span_replicas(self) -> None:
        if self._weights is not None:
            self._weights.span_replicas()

    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if self._rounds:
            raise refuse_merge_call()

        def combine(payloads: dict[int, Any]) -> dict[int, object]:
            is_all = len(payloads) == self.num_replicas
            merged_args = regroup({r: payload[0] for r, payload in payloads.items()}, self._weights, is_all=is_all)
            merged_kwargs = regroup({r: payload[1] for r, payload in payloads.items()}, self._weights, is_all=is_all)
            if self._baton is not None:
                with OwnSettings():
                    self._components.install_central()
                gradients = self._gradients.central()
            with enter(self._strategy, None), self._components.streams.of_the_user():
                result = fn(self._strategy, *merged_args, **merged_kwargs)
            if self._baton is not None:
                with OwnSettings():
                    self._gradients.spread_central(gradients)
                    self._components.spread_central()
            return {replica: select_replica(replica, result) for replica in payloads}

        return self._meet("merge_call", (args, kwargs), combine)

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        return differentiable(AllReduce, value, self.exchange_all_reduce, op, "all_reduce")

    def exchange_all_reduce(self, op: ReduceOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        def combine(payloads: dict[int, list[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
            totals = [
                reduction.combine(op, list(column), "all_reduce") for column in zip(*payloads.values(), strict=True)
            ]
            return {r: [total.to(self._torch_devices[r], copy=True) for total in totals] for r in payloads}

        return self._meet(f"all_reduce({op.value.lower()}) of {len(tensors)} tensors", tensors, combine)  # type: ignore[no-any-return]

    def all_gather(self, value: object, axis: int) -> Any:
        return differentiable(AllGather, value, self._exchange_all_gather, axis, "all_gather")

    def _exchange_all_gather(
        self, axis: int, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        def combine(payloads: dict[int, list[torch.Tensor]]) -> dict[int, Any]:
            results: dict[int, Any] = {replica: ([], []) for replica in payloads}
            for column in zip(*payloads.values(), strict=True):
                joined = reduction.gather_components(list(column), axis, "all_gather")
                start = 0
                for replica, own in zip(payloads, column, strict=True):
                    results[replica][0].append(joined.to(self._torch_devices[replica], copy=True))
                    results[replica][1].append((start, own.shape[axis]))
                    start += own.shape[axis]
            return results

        return self._meet(f"all_gather(axis={axis}) of {len(tensors)} tensors", tensors, combine)  # type: ignore[no-any-return]

    # -- cross-replica context --------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, value: object, axis: Axis) -> Any:
        if isinstance(value, DistributedValues):
            return reduction.reduce_components(op, value.values, axis)
        return reduction.reduce_plain(op, value, axis, self.num_replicas)

    def weighted_mean(self, value: object) -> object:
        return reduction.weighted_mean_of(value, self.num_replicas)

    def gather(self, value: object, axis: int) -> Any:
        if isinstance(value, DistributedValues):
            return reduction.gather_components(value.values, axis)
        return reduction.gather_plain(value, axis)
