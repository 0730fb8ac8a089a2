"""One replica in this process, the others in the other processes of the job.

Parameters, optimizers and modules are the user's own objects on the process's device. Hooks combine gradients while
backward runs (`bucketed_gradients`), the optimizer's step is made equal everywhere or made by the owner
(`process_step`), and everything else that involves the others first agrees with them on what is done (`agreement`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat import nest, reduction
from torchstrat.collectives.communicator import Communicator
from torchstrat.context import ReplicaContext, enter
from torchstrat.data.layout import InputLayout
from torchstrat.devices import torch_device
from torchstrat.gradients import GradientHooks, check_weight, shares
from torchstrat.memory import Copies
from torchstrat.reduction import Axis, ReduceOp
from torchstrat.replicas.agreement import agree
from torchstrat.replicas.bucketed_gradients import BucketedGradients
from torchstrat.replicas.collective_functions import AllGather, AllReduce, differentiable
from torchstrat.replicas.engine import adoption_warning
from torchstrat.replicas.exchange import gather_values, reduce_values
from torchstrat.replicas.idle import IdleReplicas
from torchstrat.replicas.newborn import Newborn, parameters_of
from torchstrat.replicas.process_buffers import ProcessBuffers
from torchstrat.replicas.process_step import OWNER, ProcessStep
from torchstrat.replicas.randomness import ReplicaStreams
from torchstrat.replicas.step_errors import add_replica_note
from torchstrat.replicas.transfer import broadcast_tensors
from torchstrat.replicas.weights import StepWeights
from torchstrat.values import DistributedValues, PerReplica, find_batch_info, select_replica
from torchstrat.variable.assignment import hand_over
from torchstrat.variables import VariableRegistry


class PerProcessReplica:
    """This process's replica; its id is the process's rank.

    ``central``: rank 0 owns parameters and optimizer state, the others keep working copies of the parameters.
    """

    def __init__(
        self, strategy: Any, communicator: Communicator, device: str, gradient_op: ReduceOp, *, central: bool
    ) -> None:
        self._strategy = strategy
        self._world = communicator
        self._communicator = communicator  # of the replicas that take part in the current run
        self._device = device
        self._central = central
        self.registry = VariableRegistry()
        self.gradient_op = gradient_op
        self._gradients = BucketedGradients(gradient_op)
        self._versions: dict[int, int] = {}
        self._hooks = GradientHooks(self._gradients)
        self._streams = ReplicaStreams([torch_device(device)], first_replica=communicator.rank)
        self._context = ReplicaContext(strategy, communicator.rank)
        self._weights: StepWeights | None = None
        self._between_runs = self._make_step(communicator)
        self._watched = weakref.WeakSet[Optimizer]()
        self._known: dict[Any, Any] = {}

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
    def layout(self) -> InputLayout:
        return InputLayout(
            num_replicas=self.num_replicas,
            local_replicas=self.local_replicas,
            devices=(torch_device(self._device),),
            num_workers=self.num_replicas,
            worker_index=self._world.rank,
            always_wrap=True,
            # A channel of its own: input is fetched in the background, while the step talks to the others too.
            communicator=self._world.split(),
        )

    def device_of_replica(self, replica: int) -> str:
        return self._device

    def copies(self) -> list[Copies]:
        """Every rank keeps parameters, gradients and their buckets; under central storage the owner alone has state."""
        return [
            Copies(self._device, 1, 1, 1, 1 if not self._central or rank == OWNER else 0, 1)
            for rank in range(self.num_replicas)
        ]

    def scope_opened(self) -> None:
        self.registry.open()

    def scope_closed(self, *, failed: bool = False) -> None:
        self.registry.close()
        if failed:
            return
        self._take_over_initial_values()
        self._watch_optimizers()
        tensors = [tensor for tensor in self.registry.tensors() if not is_lazy(tensor)]
        self._gradients.begin(tensors, self._world, self.num_replicas, lambda: 1.0)
        self._gradients.end()

    def set_no_sync(self, active: bool) -> None:
        self._gradients.no_sync = active

    def close(self) -> None:
        self._hooks.detach()
        self._world.close()

    # -- variables --------------------------------------------------------------------------------------------------

    def _take_over_initial_values(self) -> None:
        """Rank 0's values for every variable that was not there before. Every rank has created the same ones."""
        tensors = [tensor for tensor in self.registry.tensors() if not is_lazy(tensor)]
        slots = [slot for slot in self.registry.buffer_slots() if slot.tensor is not None]
        found: dict[Any, Any] = {id(tensor): tensor for tensor in tensors}
        found.update({(id(slot.module), slot.name): slot.tensor for slot in slots})
        new = [key for key in found if key not in self._known]
        self._known = dict.fromkeys(found)
        if not new:
            return
        fresh = [found[key] for key in new]
        call = "taking over rank 0's initial values of " + ", ".join(
            f"{count} x {shape}" for shape, count in _count(tuple(tensor.shape) for tensor in fresh).items()
        )
        agree(self._world, call)
        broadcast_tensors(self._world, [tensor.data for tensor in fresh], OWNER, call)
        for tensor in tensors:
            self._versions.setdefault(id(tensor), tensor._version)

    def _take_over_newborn(self, module: nn.Module) -> None:
        """Each rank has drawn first values for itself; make them rank 0's before they are used."""
        parameters = parameters_of(module)
        call = f"the first values of a {type(module).__name__}"
        agree(self._communicator, call)
        broadcast_tensors(self._communicator, [p.data for p in parameters], 0, call)
        self._known.update(dict.fromkeys(id(p) for p in parameters))
        self._hooks.attach(parameters, early=self._gradients.needs_early_hooks)
        self._gradients.add(parameters)

    def _make_step(self, communicator: Communicator) -> ProcessStep:
        return ProcessStep(
            communicator, self._gradients, self._versions, self._gradients.knows, self._mean_loss, central=self._central
        )

    def _watch_optimizers(self) -> None:
        """Under central storage a step outside of a run, too, is the owner's."""
        if not self._central:
            return
        for optimizer in self.registry.optimizers():
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                self._between_runs.watch(optimizer)

    # -- run --------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        batch = find_batch_info((args, kwargs))
        self._weights = weights = StepWeights(range(self.num_replicas), batch)
        adopted = self.registry.adopt(fn, [*nest.leaves(list(args)), *nest.leaves(kwargs)])
        if adopted:
            warnings.warn(adoption_warning(adopted, self._strategy), stacklevel=4)
        self._take_over_initial_values()
        me = self._world.rank
        if not weights.active:
            return PerReplica((), replica_ids=())
        apart = self._gradients.accumulates_apart
        idle = IdleReplicas(self._world, weights.active, self.registry, central=self._central, apart=apart)
        idle.before_run()
        if me in weights.active:
            inputs = select_replica(me, list(args)), select_replica(me, kwargs)
            everyone = len(weights.active) == self.num_replicas
            self._communicator = self._world if everyone else self._world.subgroup(tuple(weights.active))
            try:
                result = self._run_replica(fn, *inputs)
            finally:
                self._communicator = self._world
            wrapped = nest.map_structure(lambda leaf: PerReplica((leaf,), replica_ids=(me,)), result)
        else:
            wrapped = PerReplica((), replica_ids=())
        idle.after_run(with_gradients=not self._gradients.no_sync)
        if len(weights.active) < self.num_replicas:
            hand_over(self._world, self._strategy.extended._live_variables(), weights.active[0])
        return wrapped

    def _run_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        me, weights = self._world.rank, self._weights
        assert weights is not None
        tensors = [tensor for tensor in self.registry.tensors() if not is_lazy(tensor)]
        self._hooks.attach(tensors, early=self._gradients.needs_early_hooks)
        self._gradients.begin(tensors, self._communicator, self.num_replicas, lambda: weights.of(me))
        self._hooks.attach(tensors, early=self._gradients.needs_early_hooks)
        buffers = ProcessBuffers(self.registry)
        step = self._make_step(self._communicator)
        newborn = Newborn(self.registry, self._take_over_newborn)
        self._streams.begin([me])
        self._streams.activate(me)
        try:
            self._between_runs.enabled = False
            with newborn, step, enter(self._strategy, self._context):
                result = fn(*args, **kwargs)
        except Exception as error:
            self._world.report_failure(f"raised {type(error).__name__}: {str(error)[:300]}")
            add_replica_note(error, me, self.num_replicas, weights)
            raise
        finally:
            self._between_runs.enabled = True
            self._gradients.end()
            self._streams.end()
        buffers.merge(self._communicator)
        self._watch_optimizers()
        return result

    def _mean_loss(self, loss: Any) -> Any:
        """The weighted mean (or sum) of the replicas' losses: a closure's value, on which all ranks act alike."""
        assert self._weights is not None
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        rows = agree(self._communicator, "the loss of a closure", (value, self._weights.of(self._world.rank)))
        factors = shares(self.gradient_op, [row[1] for row in rows])
        mean = sum(row[0] * factor for row, factor in zip(rows, factors, strict=True))
        return loss.detach().new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

    # -- what replicas do together ----------------------------------------------------------------------------------

    def set_weight(self, weight: float) -> None:
        assert self._weights is not None
        self._weights.override(self._world.rank, check_weight(weight))

    def own_weight(self) -> float:
        return 1.0 if self._weights is None else self._weights.of(self._world.rank)

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        agree(self._communicator, "merge_call")
        me = self._world.rank

        def wrap(leaf: Any) -> Any:
            return leaf if isinstance(leaf, DistributedValues) else PerReplica((leaf,), replica_ids=(me,))

        with enter(self._strategy, None):
            result = fn(self._strategy, *nest.map_structure(wrap, list(args)), **nest.map_structure(wrap, kwargs))
        return select_replica(me, result)

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        return differentiable(AllReduce, value, self._exchange_all_reduce, op, "all_reduce")

    def _exchange_all_reduce(self, op: ReduceOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        kinds = "; ".join(f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}" for tensor in tensors)
        call = f"all_reduce({op.value.lower()}) of {kinds}"
        agree(self._communicator, call)
        results = []
        for tensor in tensors:
            mean = op is ReduceOp.MEAN
            total = tensor.to(reduction.mean_dtype(tensor.dtype) if mean else tensor.dtype, copy=True).contiguous()
            self._communicator.all_reduce(total, call).wait()
            results.append(total.div_(self._communicator.size) if mean else total)
        return results

    def all_gather(self, value: Any, axis: int) -> Any:
        return differentiable(AllGather, value, self._exchange_all_gather, axis, "all_gather")

    def _exchange_all_gather(
        self, axis: int, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        joined, parts = [], []
        me = self._communicator.rank
        for tensor in tensors:
            components = gather_values(self._communicator, [tensor], f"all_gather(axis={axis})")
            total = reduction.gather_components(components, axis, "all_gather")
            start = sum(component.shape[axis] for component in components[:me])
            joined.append(total.to(tensor.device))
            parts.append((start, tensor.shape[axis]))
        return joined, parts

    # -- cross-replica context --------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        if isinstance(value, DistributedValues):
            return reduce_values(self._world, op, list(value.values), axis)
        if axis is None:
            return reduction.reduce_plain(op, value, axis, self.num_replicas)
        return reduce_values(self._world, op, [value], axis)

    def gather(self, value: Any, axis: int) -> Any:
        if not isinstance(value, DistributedValues):
            return reduction.gather_plain(value, axis)
        components = gather_values(self._world, list(value.values), f"gather(axis={axis})")
        return reduction.gather_components(components, axis)


def _count(shapes: Any) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    return counts
