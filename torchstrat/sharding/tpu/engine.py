"""Replicas and their logical devices as one compiled program. See `lanes` for how a step runs for all of them.

With the annotations that cut tensors over a replica's logical devices, forward and backward, and the step that sees the
global batch as one, for models that cannot be mapped over replicas.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch

from torchstrat.core import context, nest, reduction
from torchstrat.core.context import ReplicaContext, RunOptions, StrategyLike, enter
from torchstrat.core.engine import InputLayout, ReplicaEngine
from torchstrat.core.errors import ContextError, UnsupportedError
from torchstrat.core.gradients import shares
from torchstrat.core.memory import Copies
from torchstrat.core.reduction import Axis, ReduceOp
from torchstrat.core.values import DistributedValues, PerReplica, batches_among
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.engine import StepWeights, adoption_warning, regroup
from torchstrat.replicas.in_process.baton import WorkerThreads
from torchstrat.replicas.state import DifferingEdits
from torchstrat.sharding.annotations import Assignments
from torchstrat.sharding.grid import DeviceGrid, ShardedEntry, Sharding
from torchstrat.sharding.tpu import lane_values
from torchstrat.sharding.tpu.backward import LaneWeights
from torchstrat.sharding.tpu.compilation import OF_SOME_REPLICAS, CompilationLog, Signature, describe_inputs
from torchstrat.sharding.tpu.draws import Drawing, RandomStream, drawn_on, is_draw, is_fill, target_of
from torchstrat.sharding.tpu.lane_values import (
    Feeder,
    Inputs,
    LanePlacement,
    LaneValues,
    Pass,
    Stacked,
    WholePlacement,
    global_inputs,
)
from torchstrat.sharding.tpu.lanes import Arguments, Function, Lanes, Options
from torchstrat.sharding.tpu.limits import refused_program, require_python
from torchstrat.sharding.tpu.passes import Alone, Passes
from torchstrat.sharding.tpu.recording import NormLayer, Recording, Run
from torchstrat.sharding.tpu.rewrites import Rewrites
from torchstrat.sharding.tpu.spmd import SpmdRuntime
from torchstrat.sharding.tpu.step_mode import RecordedMode, optimizers_watched
from torchstrat.sharding.tpu.variables import DeviceVariables, ShardingOf, ValuesBefore


class _Kept(Protocol):
    annotate: Callable[[torch.Tensor], None]


class _Cut(torch.autograd.Function):
    """A copy that is cut, and whose gradient is cut the same way.

    A copy, because a tensor that is cut already cannot be cut otherwise, and chains of annotations may."""

    @staticmethod
    def forward(ctx: _Kept, tensor: torch.Tensor, annotate: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.annotate = annotate
        # Not clone(): of an input of the program that is the input itself, which has been cut already.
        cut = torch.cat([tensor.unsqueeze(0)]).squeeze(0)
        annotate(cut)
        return cut

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Cut.apply(gradient, ctx.annotate), None  # type: ignore[no-untyped-call]


class Annotations:
    """What was said about tensors of one strategy."""

    def __init__(self, runtime: SpmdRuntime, grid: DeviceGrid, variables: DeviceVariables) -> None:
        self._runtime, self._grid, self._variables = runtime, grid, variables
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], ShardedEntry]] = {}
        self.assignments = Assignments(
            "a compiled program runs on all logical devices at once and cannot keep a tensor to one of them"
        )

    def cut(self, tensor: torch.Tensor, sharding: Sharding, lanes: Lanes | None) -> torch.Tensor:
        """``tensor`` cut like ``sharding``. ``lanes``: of the pass that is recorded, if one is."""
        if lanes is not None and lanes.is_lane_tensor(tensor):
            with lanes.left("a logical device annotation"):
                stacked = self._cut(lanes.stacked(tensor), sharding.stacked())
            cut = lanes.hide(stacked)
            self._remember(cut, ShardedEntry(tuple(stacked.shape), sharding.stacked(), cut.dtype))
            return cut
        if self._variables.is_variable(tensor):
            self._variables.shard(tensor, sharding)
            return tensor
        if tensor.device != self._runtime.device:
            tensor = tensor.to(self._runtime.device)
        with nullcontext() if lanes is None else lanes.left("a logical device annotation"):
            cut = self._cut(tensor, sharding)
        self._remember(cut, ShardedEntry(tuple(cut.shape), sharding, cut.dtype))
        return cut

    def _cut(self, tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        def annotate(one: torch.Tensor) -> None:
            self._runtime.annotate(one, sharding, self._grid)

        cut: torch.Tensor = _Cut.apply(tensor, annotate)  # type: ignore[no-untyped-call]
        return cut

    def _remember(self, tensor: torch.Tensor, entry: ShardedEntry) -> None:
        key, entries = id(tensor), self._entries
        entries[key] = weakref.ref(tensor, lambda _: entries.pop(key, None)), entry

    def entry_of(self, tensor: torch.Tensor) -> ShardedEntry | None:
        """How a variable or an annotated tensor is cut; None for a tensor about which nothing was said."""
        if self._variables.is_variable(tensor):
            return ShardedEntry(tuple(tensor.shape), self._variables.planned(tensor), tensor.dtype)
        found = self._entries.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]


_LAYERS = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
"""They run as they are where nothing is mapped."""


class _GlobalMode(RecordedMode):
    """For a step that sees the global batch as one: with random numbers that are one device's."""

    def __init__(self, run: Run) -> None:
        rewrites = Rewrites(lambda tensor: tensor, logical_devices=run.logical_devices)
        find = lambda func: None if func in _LAYERS else rewrites.find(func)  # noqa: E731
        super().__init__(run.device, find, run.before.edits)
        self._stream = run.stream

    def call(self, func: Function, args: Arguments, kwargs: Options) -> object:
        if is_draw(func):
            self._stream.seeded_in_step()
            generator = kwargs.get("generator")
            if isinstance(generator, torch.Generator):
                return self._drawn(func, args, kwargs, generator)
        return super().call(func, args, kwargs)

    def _drawn(self, func: Drawing, args: Arguments, kwargs: Options, generator: torch.Generator) -> torch.Tensor:
        drawn = drawn_on(func, args, kwargs, generator.device).detach().to(self._device)
        if not is_fill(func):
            return drawn.requires_grad_(bool(kwargs.get("requires_grad")))
        with torch.no_grad():
            return target_of(args, kwargs).copy_(drawn)


class _Recordings(threading.local):
    current: Recording | None = None


class SpmdReplicas(ReplicaEngine):
    """The replicas of ``grid``, which are its first ``num_replicas`` rows; what lies behind are lanes without one."""

    def __init__(
        self,
        strategy: StrategyLike,
        runtime: SpmdRuntime,
        grid: DeviceGrid,
        num_replicas: int,
        gradient_op: ReduceOp,
        sharding_of: ShardingOf | None,
        max_different_graphs: int,
    ) -> None:
        self._strategy, self._runtime, self._grid = strategy, runtime, grid
        self._num_replicas = num_replicas
        self.gradient_op = gradient_op
        self.registry = VariableRegistry(self._is_current)
        self._differing = DifferingEdits(self.registry.describe)
        self._variables = DeviceVariables(self.registry, runtime, grid, sharding_of)
        self.annotations = Annotations(runtime, grid, self._variables)
        self.log = CompilationLog(max_different_graphs, runtime.compiles)
        self._feeder = Feeder(runtime, grid)
        self._stream = RandomStream(runtime)
        self._recordings = _Recordings()
        self._threads = WorkerThreads(f"torchstrat-{type(strategy).__name__}")
        self._entry = threading.Lock()
        self._closed = False
        self._weights = StepWeights(())

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    @property
    def local_replicas(self) -> tuple[int, ...]:
        return tuple(range(self._num_replicas))

    @property
    def communication(self) -> str:
        return "collectives that XLA compiles into the step"

    @property
    def layout(self) -> InputLayout:
        several = self._num_replicas > 1
        return InputLayout(
            num_replicas=self._num_replicas,
            local_replicas=self.local_replicas,
            devices=(self._runtime.device,) * self._num_replicas,
            placement=LanePlacement(self._feeder) if several else WholePlacement(self._feeder, self._runtime.device),
            join=lane_values.join if several else None,
        )

    def device_of_replica(self, replica: int) -> str:
        return f"{self._runtime.device.type}:{self._runtime.device.index or 0}"

    @property
    def replica_states(self) -> RandomStream:
        return self._stream

    def copies(self) -> list[Copies]:
        """Every device holds what is not cut; what is cut takes less."""
        kind = self._runtime.device.type
        return [Copies(f"{kind}:{device}", 1, 1, 1, 1, 0) for row in self._grid.devices for device in row]

    def _is_current(self) -> bool:
        return context.get_strategy() is self._strategy

    def scope_opened(self) -> None:
        self._require_open()
        self.registry.open()

    def scope_closed(self, *, failed: bool = False) -> None:
        self.registry.close()
        if not failed:
            self._variables.take()

    def check_replicas(self, when: str) -> None:
        """There is one program, and one value of each variable."""

    def set_no_sync(self, active: bool) -> None:
        """Gradients are combined by the compiled program where they are added up: the sums are the same."""

    def close(self) -> None:
        self._closed = True
        self._threads.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ContextError(f"{self._strategy!r} has been closed.")

    # -- run --------------------------------------------------------------------------------------------------------

    def run(
        self, fn: Callable[..., object], args: Arguments, kwargs: Options, options: RunOptions | None = None
    ) -> object:
        self._require_open()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # the same numbers; see `RecordedMode`
                return self.run(fn, args, kwargs, options)
        options = RunOptions() if options is None else options
        if options.xla_options is not None:
            raise UnsupportedError(
                f"xla_options={options.xla_options!r:.80}: torch_xla has no options for a single program; set "
                "XLA_FLAGS before the program starts."
            )
        weights = StepWeights(range(self._num_replicas), batches_among(nest.flatten((args, kwargs))))
        with self._exclusively():
            adopted = self.registry.adopt(fn, [*nest.leaves(list(args)), *nest.leaves(kwargs)])
            if adopted:
                warnings.warn(adoption_warning(adopted, self._strategy), stacklevel=5)
            if not weights.active:
                return PerReplica((), weights=weights)
            self._variables.take()
            if options.global_view:
                inputs = global_inputs(args, kwargs, weights.active, self._feeder)
                signature = _signature(fn, [Pass((), *inputs)])
                record = partial(_record_global, fn, *inputs)
            else:
                passes = Inputs(args, kwargs, weights.active, self._feeder).passes()
                signature = _signature(fn, passes)
                record = partial(self._record_all, fn, passes, weights)
            if not options.enable_dynamic_batch_size:
                self.log.require_same_shapes(signature)
            self._weights = weights
            result = self._run(signature, record)
        for leaf in nest.leaves(result):
            if isinstance(leaf, PerReplica):
                leaf.weights = weights
        return result

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if not self._entry.acquire(blocking=False):
            raise ContextError(
                f"run of {self._strategy!r} was called while another run of it goes on, in another thread. One "
                "strategy makes one run at a time."
            )
        try:
            yield
        finally:
            self._entry.release()

    def _run(self, signature: Signature, record: Callable[[Run], object]) -> object:
        self.log.admit(signature)
        if self._runtime.has_recorded():
            # What the loop has done since the last run is no part of the step's program. Otherwise nothing is done:
            # it would wait for the program that still runs, and recording goes on beside it.
            self._runtime.execute()
        run = Run(
            self._strategy,
            self.registry,
            self._feeder,
            self._stream,
            self._differing,
            ValuesBefore(self.registry, several=self._num_replicas > 1),
            self._runtime.device,
            self._num_replicas,
            self._grid.num_logical_devices,
        )
        self._stream.begin()
        try:
            with self._runtime.tracing(), optimizers_watched(run.before.stepped):
                result = record(run)
        except BaseException:
            run.before.put_back()
            raise
        finally:
            self._stream.end()
            run.before.forget()  # what is alive when the program runs would be a result of it
        self._variables.take()
        self._variables.keep_shardings()
        try:
            self.log.execute(signature, self._runtime.execute)
        except (RuntimeError, ValueError) as error:
            raise refused_program(error) from error
        for leaf in nest.leaves(result):
            if isinstance(leaf, LaneValues):
                leaf.is_settled = True
        return result

    def _record_all(self, fn: Callable[..., object], passes: Sequence[Pass], weights: StepWeights, run: Run) -> object:
        require_python(self.registry.modules())
        all_weights: list[LaneWeights] = []
        replicas = [replica for one in passes for replica in one.replicas]
        counts = weights.in_buffers(replicas, [weights.of(replica) for replica in replicas])
        in_buffers = dict(zip(replicas, shares(ReduceOp.MEAN, counts), strict=True))
        for one in passes:
            lanes = Lanes(self._grid.num_replicas, one.replicas)
            rows = [weights.of(replica) for replica in one.replicas]
            require = partial(weights.of_gradients, self.gradient_op, one.replicas[0])
            own = [in_buffers[replica] for replica in one.replicas]
            LaneWeights(lanes, self.gradient_op, rows, all_weights, own, require)
        if len(passes) == 1:
            result = self._record(fn, passes[0], Recording(run, all_weights[0], Alone()))
            run.before.require_buffers()
            if len(passes[0].replicas) > 1 or self._num_replicas == 1:
                return result
            return regroup({passes[0].replicas[0]: result}, is_all=False)  # its numbers are its own, as everywhere
        together = Passes(self.registry, len(passes), self._threads)

        def body(index: int) -> object:
            return self._record(fn, passes[index], Recording(run, all_weights[index], together))

        results = together.run(body)
        run.before.require_buffers()
        return lane_values.join_passes(results, [one.replicas for one in passes])

    def _record(self, fn: Callable[..., object], one: Pass, recording: Recording) -> object:
        self._recordings.current = recording
        try:
            return recording.record(fn, one)
        finally:
            self._recordings.current = None

    # -- in a step --------------------------------------------------------------------------------------------------

    def _recording(self, call: str) -> Recording:
        """The pass that this thread records."""
        if self._recordings.current is None:
            raise ContextError(
                f"{call} was called where no step runs replica by replica: with global_view=True a step sees all "
                "replicas' rows already, and needs no collectives."
            )
        return self._recordings.current

    def cut(self, tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        """``tensor`` of a replica, cut over its logical devices, and its gradient with it."""
        recording = self._recordings.current
        if recording is not None and recording.is_input(tensor):
            self._feeder.remember_cut(recording.lanes.behind(tensor), sharding.stacked())
        return self.annotations.cut(tensor, sharding, None if recording is None else recording.lanes)

    def all_reduce(self, op: ReduceOp, value: object) -> object:
        recording = self._recording("all_reduce")
        reduced: object = nest.map_by_keys(lambda leaf: recording.all_reduce(op, leaf), value)
        return reduced

    def all_gather(self, value: object, axis: int) -> object:
        recording = self._recording("all_gather")
        gathered: object = nest.map_by_keys(lambda leaf: recording.all_gather(leaf, axis), value)
        return gathered

    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: Options) -> object:
        return self._recording("merge_call").merge_call(fn, args, kwargs)

    def set_weight(self, weight: float | torch.Tensor) -> None:
        recording = self._recordings.current
        if recording is None:
            return
        recording.weights.give(weight)
        for replica in recording.lanes.active:
            if isinstance(weight, torch.Tensor):
                self._weights.hide(replica)  # a number of the program that is being recorded
            else:
                self._weights.override(replica, float(weight))

    def relative_weight(self) -> float:
        raise ContextError(
            "relative_weight is the weight of one replica; a step of this strategy runs for all at once."
        )

    def span_replicas(self) -> None:
        """Lanes tell of it themselves."""

    def sync_batch_norm(self, layer: NormLayer, x: torch.Tensor) -> torch.Tensor:
        if layer.momentum is None:
            raise UnsupportedError(
                "momentum=None counts batches on the host, which a recorded step cannot; give the layer a momentum."
            )
        if layer.num_batches_tracked is not None and layer.track_running_stats:
            layer.num_batches_tracked.add_(1)
        return self._recording("batch normalisation over all replicas").sync_batch_norm(layer, x)

    # -- cross-replica context --------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, value: object, axis: Axis) -> object:
        if not isinstance(value, DistributedValues):
            return reduction.reduce_plain(op, value, axis, self._num_replicas)
        if isinstance(value, LaneValues) and axis is None and op in value.totals:
            return value.totals[op]
        return reduction.reduce_components(op, self._looked_at(value), axis)

    def weighted_mean(self, value: object) -> object:
        if not isinstance(value, PerReplica):
            return reduction.weighted_mean_of(value, self._num_replicas)
        weights = reduction.require_known(value.known_weights())
        return reduction.weighted_mean(self._looked_at(value), weights)

    def gather(self, value: object, axis: int) -> object:
        if isinstance(value, DistributedValues):
            return reduction.gather_components(self._looked_at(value), axis)
        return reduction.gather_plain(value, axis)

    def _looked_at(self, value: DistributedValues[object]) -> list[object]:
        """The components of a value, on the host: on the devices, each combination would be a program of its own."""
        if self._recordings.current is not None:
            return list(value.values)
        return [one.cpu() if isinstance(one, torch.Tensor) else one for one in value.values]


def _record_global(fn: Callable[..., object], args: Arguments, kwargs: Options, run: Run) -> object:
    """Call ``fn`` once, on tensors of the global batch; what it returned."""
    with enter(run.strategy, ReplicaContext(run.strategy, 0)), _GlobalMode(run).active():
        return fn(*args, **kwargs)


def _signature(fn: Callable[..., object], passes: Sequence[Pass]) -> Signature:
    inner = inspect.unwrap(fn)  # torch.no_grad() makes a wrapper of one place for all functions
    code = getattr(inner, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    name = getattr(inner, "__qualname__", type(inner).__name__)
    inputs: list[tuple[str, str]] = []
    for one in passes:
        whose = "" if len(passes) == 1 else f"{OF_SOME_REPLICAS}{', '.join(map(str, one.replicas))}]: "
        inputs += [(whose + path, text) for path, text in describe_inputs(*_of_a_lane(one))]
    return Signature(f"{name}{place}", tuple(inputs), tuple(replica for one in passes for replica in one.replicas))


def _of_a_lane(one: Pass) -> tuple[list[object], dict[str, object]]:
    def show(leaf: object) -> object:
        return (
            torch.empty(leaf.tensor.shape[1:], dtype=leaf.tensor.dtype, device="meta")
            if isinstance(leaf, Stacked)
            else leaf
        )

    shown: tuple[list[object], dict[str, object]] = nest.map_structure(show, (one.args, one.kwargs))
    return shown
