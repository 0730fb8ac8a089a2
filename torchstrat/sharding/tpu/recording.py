"""One pass of a step while its thread records it: what the lanes see, what they do together, what comes of it.

What replicas do together inside a step, as functions of the tensors of all lanes, with their gradients.

What is minimised is the weighted mean of the replicas' losses: a gradient that comes over from another replica brings
that one's weight. Below, the losses are weighted before anything flows, so it has it already. A replica of weight 0 has
no share in the gradient, neither of its own nor of what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchstrat.core import nest
from torchstrat.core.context import ReplicaContext, StrategyLike, enter
from torchstrat.core.errors import UnsupportedError, WrongTypeError
from torchstrat.core.reachable import Start
from torchstrat.core.reduction import ReduceOp, VariableAggregation, as_tensor, gather_components
from torchstrat.core.values import DistributedValues, PerReplica
from torchstrat.core.variable.storage import Given
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.state import DifferingEdits
from torchstrat.sharding.tpu.backward import LaneBackward, LaneWeights
from torchstrat.sharding.tpu.compilation import describe_inputs
from torchstrat.sharding.tpu.draws import Draws, RandomStream
from torchstrat.sharding.tpu.edits import Edits, OwnLeaves
from torchstrat.sharding.tpu.lane_values import Feeder, Inputs, LaneValues, Pass, Stacked, join_passes
from torchstrat.sharding.tpu.lanes import Lanes
from torchstrat.sharding.tpu.limits import explaining, refused_program
from torchstrat.sharding.tpu.passes import Alone, Passes
from torchstrat.sharding.tpu.rewrites import Rewrites
from torchstrat.sharding.tpu.step_mode import StepMode
from torchstrat.sharding.tpu.variables import ValuesBefore


class NormLayer(Protocol):
    """A layer of batch normalisation."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    momentum: float | None
    eps: float
    track_running_stats: bool


Factors = Callable[[torch.Tensor], torch.Tensor | None]
"""From a gradient ``[lanes, …]`` to the lanes' factors in a shape that broadcasts; None where all are equal."""


class _Kept(Protocol):
    """What the two functions below keep for their gradients."""

    factors: Factors


class _Leave(torch.autograd.Function):
    """Identity; gradients that come back to lanes of weight 0 end there."""

    @staticmethod
    def forward(ctx: _Kept, stacked: torch.Tensor, factors: Factors) -> torch.Tensor:
        ctx.factors = factors
        return stacked.clone()

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _of_counting(gradient, ctx.factors(gradient)), None


class _Arrive(torch.autograd.Function):
    """One tensor to every lane; the lanes' gradients are added, but for those of weight 0."""

    @staticmethod
    def forward(ctx: _Kept, value: torch.Tensor, lanes: int, factors: Factors) -> torch.Tensor:
        ctx.factors = factors
        return value.unsqueeze(0).expand(lanes, *value.shape).clone()

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _of_counting(gradient, ctx.factors(gradient)).sum(dim=0), None, None


def _of_counting(gradient: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return gradient if factors is None else torch.where(factors > 0, gradient, 0.0)


class CrossLanes:
    """Collective operations of one pass. All of it is called outside of the level."""

    def __init__(self, lanes: Lanes, weights: LaneWeights) -> None:
        self._lanes, self._weights = lanes, weights

    def _factors(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._weights.are_equal and self._lanes.all_active:
            return None  # the same number everywhere, and out again
        return self._weights.factors(gradient)

    def arrive(self, value: torch.Tensor) -> torch.Tensor:
        """``[lanes, …]``: what was combined, for each lane."""
        arrived: torch.Tensor = _Arrive.apply(value, self._lanes.count, self._factors)  # type: ignore[no-untyped-call]
        return arrived

    def active(self, stacked: torch.Tensor) -> torch.Tensor:
        """``[active lanes, …]``, on its way to where lanes are combined."""
        if stacked.requires_grad:
            stacked = _Leave.apply(stacked, self._factors)  # type: ignore[no-untyped-call]
        return self.only_active(stacked)

    def only_active(self, stacked: torch.Tensor) -> torch.Tensor:
        """The same for gradients that keep their factors, as those of one global batch do."""
        self._weights.are_crossed |= stacked.requires_grad
        return self.of_active(stacked)

    def of_active(self, stacked: torch.Tensor) -> torch.Tensor:
        """``[active lanes, …]``."""
        if self._lanes.all_active:
            return stacked
        first = self._lanes.active[0]
        if self._lanes.active == tuple(range(first, first + len(self._lanes.active))):
            return stacked[first : first + len(self._lanes.active)]
        return stacked[list(self._lanes.active)]


def all_reduce(op: ReduceOp, active: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum or mean over the replicas of all passes; ``[active lanes, …]`` of each pass."""
    rows = active[0] if len(active) == 1 else torch.cat(list(active))
    if op is ReduceOp.SUM:
        return rows.sum(dim=0, dtype=rows.dtype)
    is_number = rows.is_floating_point() or rows.is_complex()
    return rows.mean(dim=0, dtype=None if is_number else torch.get_default_dtype())


def all_gather(axis: int, replicas: Sequence[Sequence[int]], active: Sequence[torch.Tensor]) -> torch.Tensor:
    """The replicas' tensors joined along ``axis``, in replica order, from ``[active lanes, …]`` of each pass."""
    own = {
        replica: tensor
        for ids, rows in zip(replicas, active, strict=True)
        for replica, tensor in zip(ids, rows.unbind(0), strict=True)
    }
    joined: torch.Tensor = gather_components([own[replica] for replica in sorted(own)], axis, "all_gather")
    return joined


MOST_ENTRIES_TOTALLED = 1024


@dataclass(frozen=True)
class Run:
    """What the passes of one run have in common. ``logical_devices``: of each replica."""

    strategy: StrategyLike
    registry: VariableRegistry
    feeder: Feeder
    stream: RandomStream
    differing: DifferingEdits
    before: ValuesBefore
    device: torch.device
    num_replicas: int
    logical_devices: int


class Recording:
    """Made for one pass of ``run``."""

    def __init__(self, run: Run, weights: LaneWeights, passes: Passes | Alone) -> None:
        self._run, self._registry, self._feeder = run, run.registry, run.feeder
        self._num_replicas, self._passes, self._meet = run.num_replicas, passes, passes.meet
        self.weights, self.lanes = weights, weights.lanes
        self._inputs: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._together = CrossLanes(self.lanes, weights)
        self._rewrites = Rewrites(
            self.mean_over_replicas,
            self.sum_over_replicas,
            self._is_own_statistic,
            on_reading=self._warn_of_statistics,
            logical_devices=run.logical_devices,
        )

    def record(self, fn: Callable[..., object], one: Pass) -> object:
        """Call ``fn`` for the pass's replicas; its result as `run` returns it, if there is no other pass."""
        lanes, run = self.lanes, self._run
        self._known = _known_objects(self._registry, one)
        backward = LaneBackward(self.weights, self._meet, self._registry)
        self._own = own = OwnLeaves(backward, self._known, self._passes.made, several=self._num_replicas > 1)
        self._edits = edits = Edits(own, self._registry, run.differing, self.merged, self._passes.expose)
        draws = Draws(edits, run.stream, self._feeder.share, _Given(fn, one).has)
        mode = StepMode(edits, draws, self._rewrites, run.device, run.before.edits)
        with lanes.entered():
            args, kwargs = nest.map_structure(
                lambda leaf: lanes.hide(leaf.tensor.detach()) if isinstance(leaf, Stacked) else leaf,
                (one.args, one.kwargs),
            )
            self._inputs = {id(leaf): leaf for leaf in nest.leaves((args, kwargs)) if lanes.is_lane_tensor(leaf)}
            context = ReplicaContext(run.strategy, self._replica_id(one))
            with explaining(), enter(run.strategy, context), own.watched(), mode.active():
                returned = fn(*args, **kwargs)
            with lanes.left("run"):
                try:
                    result: object = nest.map_structure(self._collect, returned)
                except RuntimeError as error:  # what the step has made is no tensor of these devices
                    raise refused_program(error) from error
                own.close()
                return result

    def _replica_id(self, one: Pass) -> Any:
        """Each lane's replica; a lane that is nobody's takes part as the first one."""
        if self._num_replicas == 1:
            return 0
        ids = [lane if lane in one.replicas else one.replicas[0] for lane in range(self.lanes.count)]
        return self.lanes.hide(self._feeder.stack([torch.tensor(replica) for replica in ids]))

    def _collect(self, leaf: object) -> object:
        """A result of the step as `run` returns it; what a replica assigns to a `Variable` likewise."""
        if isinstance(leaf, Given):
            value = self._collect(leaf.value)
            ids = self.lanes.active
            own = value.values if isinstance(value, PerReplica) else [value] * len(ids)
            return PerReplica([Given(one) for one in own], replica_ids=ids)
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self._known:
            return leaf
        lanes, stacked = self.lanes, self.lanes.stacked(leaf)
        if self._num_replicas == 1:
            return stacked[lanes.active[0]]
        if lanes.active != tuple(range(self._num_replicas)):
            return PerReplica([stacked[lane] for lane in lanes.active], replica_ids=lanes.active)
        if not lanes.is_lane_tensor(leaf):
            stacked = stacked.clone()
        # Small results are what loops reduce after each step: done here, the sum and the mean cost nothing, and nobody
        # has to wait for them.
        totals: dict[ReduceOp, torch.Tensor] = {}
        # (The compiler has no means of complex numbers; results of that kind are reduced when somebody asks.)
        if stacked.is_floating_point() and stacked[0].numel() <= MOST_ENTRIES_TOTALLED:
            components = stacked[: self._num_replicas]
            totals = {ReduceOp.SUM: components.sum(dim=0), ReduceOp.MEAN: components.mean(dim=0)}
        return LaneValues(stacked, self._num_replicas, totals=totals, is_settled=False)

    # -- what replicas do together ----------------------------------------------------------------------------------

    def all_reduce(self, op: ReduceOp, leaf: object) -> torch.Tensor:
        """See `ReplicaContext.all_reduce`, for one tensor."""
        tensor = as_tensor(leaf, "all_reduce")
        if tensor.dtype == torch.bool:
            raise WrongTypeError(
                "all_reduce cannot combine bool tensors; convert them to an integer or floating dtype first."
            )
        with self.lanes.left("all_reduce"):
            active = self._together.active(self.lanes.stacked(self._feeder.share(tensor)))
            total = self._meet(f"all_reduce({op.value.lower()})", active, _reducing(op))
            return self._for_all(total)

    def _for_all(self, combined: torch.Tensor) -> torch.Tensor:
        """What replicas have combined, for the step's code: one tensor that they share, so that what is made of it
        alone differs no more than it does; with gradients one for each, since these may."""
        if combined.requires_grad:
            return self.lanes.hide(self._together.arrive(combined))
        shared = combined.clone()  # every pass may write to its own
        self._edits.note_made(shared)
        return shared

    def sum_over_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """Added up as on one device with the global batch, gradients too: they flow between replicas as they are."""
        call = "batch normalisation over all replicas"
        with self.lanes.left(call):
            active = self._together.only_active(self.lanes.stacked(tensor))
            total = self._meet(call, active, _reducing(ReduceOp.SUM))
            stacked = total.unsqueeze(0).expand(self.lanes.count, *total.shape).clone()
        return self.lanes.hide(stacked)

    def mean_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """See `merged`, of statistics."""
        return self.merged(value, VariableAggregation.MEAN)

    def _warn_of_statistics(self) -> None:
        if self._num_replicas > 1:
            self._run.differing.report_statistics()

    def _is_own_statistic(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is each replica's own: a deep copy's, which the step has made."""
        if self._num_replicas > 1 and self._edits.is_alone(buffer) and not self._own.is_member(buffer):
            self._edits.make_own("running statistics", buffer)
        return self.lanes.is_lane_tensor(buffer)

    def merged(
        self, value: torch.Tensor, aggregation: VariableAggregation, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What becomes of a buffer that the replicas have changed differently: the mean by their rows, of integers the
        first one's; the first one's; or what it was ``before`` and the sum of their changes. Anything but a lane tensor
        as it is. No gradients."""
        lanes = self.lanes
        if not lanes.is_lane_tensor(value):
            return value
        is_number = value.is_floating_point() or value.is_complex()

        def combine(payloads: dict[int, tuple[torch.Tensor, list[float]]]) -> dict[int, torch.Tensor]:
            parts, shares = zip(*payloads.values(), strict=True)
            rows = torch.cat(parts) if len(parts) > 1 else parts[0]
            if aggregation is VariableAggregation.SUM:
                assert before is not None
                return dict.fromkeys(payloads, before + (rows - before).sum(dim=0))
            if not is_number or aggregation is not VariableAggregation.MEAN:
                return dict.fromkeys(payloads, rows[0])
            everyone = [share for own in shares for share in own]
            if len(set(everyone)) == 1:
                return dict.fromkeys(payloads, rows.mean(dim=0))
            # One without rows may have nan.
            means = [row * share for row, share in zip(rows.unbind(0), everyone, strict=True) if share]
            return dict.fromkeys(payloads, torch.stack(means).sum(dim=0))

        with lanes.left("an edit of a buffer"):
            active = self._together.of_active(lanes.stacked(value).detach())
            return self._meet("an edit of a buffer", (active, self.weights.in_buffers), combine)

    def is_input(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one that the step was given, as it was given."""
        return id(tensor) in self._inputs

    def sync_batch_norm(self, layer: NormLayer, x: torch.Tensor) -> torch.Tensor:
        """``x`` normalised with the statistics of all replicas' rows; the running ones move likewise."""
        mean, var = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
        normalise = self._rewrites.sync_batch_norm
        normalised: torch.Tensor = normalise(x, mean, var, layer.weight, layer.bias, layer.momentum, layer.eps)
        return normalised

    def all_gather(self, leaf: object, axis: int) -> torch.Tensor:
        """See `ReplicaContext.all_gather`, for one tensor."""

        def combine(payloads: dict[int, tuple[tuple[int, ...], torch.Tensor]]) -> dict[int, torch.Tensor]:
            replicas, active = zip(*payloads.values(), strict=True)
            return dict.fromkeys(payloads, all_gather(axis, replicas, active))

        with self.lanes.left("all_gather"):
            tensor = self._feeder.share(as_tensor(leaf, "all_gather"))
            payload = self.lanes.active, self._together.active(self.lanes.stacked(tensor))
            return self._for_all(self._meet(f"all_gather(axis={axis})", payload, combine))

    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """See `ReplicaContext.merge_call`."""

        def combine(payloads: dict[int, tuple[tuple[int, ...], object]]) -> dict[int, object]:
            replicas, merged = zip(*payloads.values(), strict=True)
            merged_args, merged_kwargs = merged[0] if len(merged) == 1 else join_passes(merged, replicas)
            with enter(self._run.strategy, None):
                result = fn(self._run.strategy, *merged_args, **merged_kwargs)
            return {
                index: nest.map_structure(lambda leaf, own=own: self._split(leaf, own), result)
                for index, own in zip(payloads, replicas, strict=True)
            }

        with self.lanes.left("merge_call"):
            own = nest.map_structure(self._collect, (list(args), kwargs))
            split = self._meet("merge_call", (self.lanes.active, own), combine)
        return nest.map_structure(
            lambda leaf: self.lanes.hide(leaf.tensor) if isinstance(leaf, Stacked) else leaf, split
        )

    def _split(self, leaf: object, replicas: tuple[int, ...]) -> object:
        """What a pass gets of a result of `merge_call`."""
        if not isinstance(leaf, DistributedValues):
            return leaf
        passes = Inputs((leaf,), {}, replicas, self._feeder).passes()
        if len(passes) > 1:
            parts = [leaf.component(one.replicas[0]) for one in passes]
            kinds = " and ".join(", ".join(text for _, text in describe_inputs((one,), {})) for one in parts)
            raise UnsupportedError(
                f"merge_call returned components of other dtypes or shapes to replicas with as many rows ({kinds}); on "
                "this strategy what they go on with is one tensor for all of them. Return equal ones: pad them, and "
                "convert them to one dtype."
            )
        return passes[0].args[0]


class _Given:
    """What a step has not made itself."""

    def __init__(self, fn: Callable[..., object], one: Pass) -> None:
        self._fn, self._pass = fn, one
        self._generators: list[torch.Generator] | None = None

    def has(self, generator: torch.Generator) -> bool:
        if self._generators is None:  # looked for when somebody asks
            self._generators = Start(self._fn, nest.leaves((self._pass.args, self._pass.kwargs))).walk().generators
        return any(one is generator for one in self._generators)


def _reducing(op: ReduceOp) -> Callable[[dict[int, torch.Tensor]], dict[int, torch.Tensor]]:
    def combine(payloads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return dict.fromkeys(payloads, all_reduce(op, list(payloads.values())))

    return combine


def _known_objects(registry: VariableRegistry, one: Pass) -> dict[int, torch.Tensor]:
    """What a step may return that is one object for all replicas: variables, and inputs that they share. By id; they
    are kept, so that nothing the step makes can get the id of one."""
    buffers = [slot.tensor for slot in registry.buffer_slots()]
    inputs = [leaf for leaf in nest.leaves((one.args, one.kwargs)) if isinstance(leaf, torch.Tensor)]
    return {id(tensor): tensor for tensor in (*registry.tensors(), *buffers, *inputs) if tensor is not None}
