"""The two ways to make a `DistributedDataset`: from one dataset, and from a function that makes one per process.

How the processes of a job share a dataset: which policy applies, and what it leaves to this process.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from torchstrat.core import nest
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.values import misfit, require_callable
from torchstrat.data import spec
from torchstrat.data.distributed import DistributedDataset, Feed, Reading, require_same_files, steps_read_ahead
from torchstrat.data.loader import LoaderSource
from torchstrat.data.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    parse_policy,
    require_options,
)
from torchstrat.data.order import refuse_distributed_sampler
from torchstrat.data.pipeline import UNKNOWN_CARDINALITY
from torchstrat.data.position import FixedSizes, Resume, Saved, StepPerItem, Stream, Terms
from torchstrat.data.sources import Source, make_source, refuse_distributed
from torchstrat.data.streams import bare_steps, element_steps

if TYPE_CHECKING:
    from torchstrat.core.context import StrategyLike

logger = logging.getLogger("torchstrat.data")


def chosen_policy(dataset: object, source: Source, options: InputOptions) -> AutoShardPolicy:
    """The policy of the options, else the one the dataset carries, else AUTO; AUTO replaced by what it means here."""
    policy = options.auto_shard_policy
    carriers = (dataset, dataset.dataset) if isinstance(dataset, DataLoader) else (dataset,)
    for carrier in carriers:
        if policy is None and (carried := getattr(carrier, "auto_shard_policy", None)) is not None:
            policy = parse_policy(carried)
    if policy is None or policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.DATA if source.files is None else AutoShardPolicy.FILE
    return policy


def shard(source: Source, policy: AutoShardPolicy, layout: InputLayout) -> Source:
    """What ``policy`` leaves of ``source`` to this process.

    Raises:
        UnsupportedError: a loader that its sampler shards already.
        InvalidArgumentError: FILE on a dataset that reads no files, or with fewer files than processes.
    """
    if policy is not AutoShardPolicy.OFF and isinstance(source, LoaderSource):
        refuse_distributed_sampler(source.loader)
    worker, workers = layout.worker_index, layout.num_workers
    if workers == 1:
        return source.for_hint(0, 1) if policy is AutoShardPolicy.HINT else source
    if policy is AutoShardPolicy.FILE:
        return source.for_files(worker, workers)
    if policy is AutoShardPolicy.HINT:
        return source.for_hint(worker, workers)
    if policy is AutoShardPolicy.DATA and source.rereads and worker == 0:
        logger.warning(
            "each of the %d processes reads the whole dataset and keeps its own rows, because it cannot be read by "
            "index. A map-style Dataset, or several files under AutoShardPolicy.FILE, are read once.",
            workers,
        )
    if policy is AutoShardPolicy.DATA and worker == 0 and isinstance(source, LoaderSource) and source.reads_whole:
        _warn_of_whole_batches(workers, source.batches_made_by)
    return source


@functools.cache
def _warn_of_whole_batches(workers: int, made_by: str) -> None:
    logger.warning(
        "each of the %d processes reads all rows of every global batch, because %s may look at the whole batch (to pad "
        "it, say). If it does to each row the same whatever the others are, say so with InputOptions(collate="
        '"rows"): then a process reads its own rows only.',
        workers,
        made_by,
    )


def distribute_dataset(
    strategy: StrategyLike, layout: InputLayout, dataset: object, options: InputOptions | None
) -> DistributedDataset:
    """Split the global batches of ``dataset`` over the replicas of ``strategy``.

    Args:
        strategy: in whose scope, or outside of any, the result may be iterated.
        layout: its replicas. With several processes all of them make this call.
        dataset: a `DataLoader` whose batches are global batches; a map-style or iterable `Dataset` of global batches;
            an array, tensor, or tuple or dict of them, whose rows are the elements; or any iterable of global batches.
        options: see `InputOptions`.

    Raises:
        WrongTypeError: ``dataset`` is no dataset.
        InvalidArgumentError: it is None, its elements cannot be split, or the policy does not fit it.
        UnsupportedError: ``InputReplicationMode.PER_REPLICA``, or a dataset that is sharded or distributed already.
    """
    options = require_options(options)
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnsupportedError(
            "InputReplicationMode.PER_REPLICA has no meaning for one dataset that is split over the replicas; use it "
            "with distribute_datasets_from_function, which can call its function for each replica."
        )
    refuse_distributed(dataset)
    whole = make_source(dataset)
    policy = chosen_policy(dataset, whole, options)
    whole.rows_alone = options.collate == "rows"
    source = shard(whole, policy, layout)
    if not layout.bare and layout.num_replicas > 1:
        source.check_splittable()
    one_stream = policy is AutoShardPolicy.DATA or layout.num_workers == 1
    number = 0 if one_stream else layout.worker_index
    source.pipeline = None if one_stream else number

    def terms() -> Terms:
        hinted = policy is AutoShardPolicy.HINT and whole.for_hint(0, 2) is not whole
        splits = hinted or policy is AutoShardPolicy.FILE
        pipelines = 1 if one_stream else layout.num_workers
        return Terms(whole.reads, {number: whole.settings()}, policy, pipelines, splits)

    feed = Feed(
        open=_opener(whole, source, policy, layout, steps_read_ahead(layout, options, source.has_workers)),
        element_spec=lambda: _split_spec(source.element_spec(), layout),
        cardinality=source.cardinality,
        has_workers=source.has_workers,
        exclusive=source.exclusive,
        terms=terms,
        streams={number: source.streams},
        between=lambda: {number: source.between()},
        settle=lambda saved: source.settle(saved.between.get(number, saved.between[0])),
    )
    return DistributedDataset(strategy, layout, options, feed)


def _opener(
    whole: Source, source: Source, policy: AutoShardPolicy, layout: InputLayout, ahead: int
) -> Callable[[Saved | None], Reading]:
    """``source``: what the policy leaves of ``whole`` to this process."""

    def open_bare(saved: Saved | None) -> Reading:
        if saved is not None and saved.pipelines > 1:
            return open_fixed_sizes(saved)
        stream = source.open(None if saved is None else saved.streams[0])
        return Reading(bare_steps(stream.items), _nothing, StepPerItem({0: stream}, saved), 1, agreed=True)

    def open_fixed_sizes(saved: Saved | None) -> Reading:
        worker, workers = layout.worker_index, layout.num_workers
        if layout.peers is not None and policy is AutoShardPolicy.FILE:
            require_same_files(layout.peers, whole.files or ())
        is_cut = layout.num_replicas > 1
        if saved is None:
            source.agree(layout.peers)
            streams, pipelines = {worker: source.open_to_cut() if is_cut else source.open()}, workers
        else:
            pipelines = saved.pipelines
            numbers = range(worker, pipelines, workers)
            parts = {number: _pipeline(whole, source, policy, number, pipelines, workers) for number in numbers}
            streams = {
                number: (part.open_to_cut if is_cut else part.open)(saved.streams[number])
                for number, part in parts.items()
            }
            if pipelines != workers:  # they are not read again: the next pass, which is, is the one after theirs
                source.settle({"passes": saved.streams[0].beginning.get("passes", -1) + 1})
        standing = FixedSizes(streams, source.declared_batch, layout, saved)
        here = _has_to_read_here(layout, [source], streams.values())
        return Reading(standing.steps(), _nothing, standing, pipelines, agreed=False, here=here)

    def open_equal_chunks(saved: Saved | None) -> Reading:
        if saved is None:
            source.agree(layout.peers)
        stream, prepare = source.open_equal_chunks(layout, ahead, None if saved is None else saved.streams[0])
        standing = StepPerItem({0: stream}, saved)
        here = _has_to_read_here(layout, [source], [stream])
        return Reading(stream.items, prepare, standing, 1, agreed=True, compared=source.compared, here=here)

    if layout.bare:
        return open_bare
    return open_equal_chunks if policy is AutoShardPolicy.DATA else open_fixed_sizes


def _has_to_read_here(layout: InputLayout, sources: Iterable[Source], streams: Iterable[Stream[nest.Nest]]) -> bool:
    """Whether no thread may read ahead. Processes that read the same, or share it out by what all draw alike, would
    come to differ where their threads draw between other draws of the program."""
    drawn_alike = layout.peers is not None and any(source.draws for source in sources)
    return drawn_alike or any(stream.here for stream in streams)


def _pipeline(
    whole: Source, source: Source, policy: AutoShardPolicy, number: int, pipelines: int, workers: int
) -> Source:
    """Pipeline ``number`` of as many as there were in the run that is gone on with."""
    if pipelines == workers:
        return source
    if pipelines == 1:
        return whole
    part = (whole.for_files if policy is AutoShardPolicy.FILE else whole.for_hint)(number, pipelines)
    part.pipeline = number
    return part


def distribute_datasets_from_function(
    strategy: StrategyLike,
    layout: InputLayout,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
) -> DistributedDataset:
    """Distribute what ``dataset_fn`` makes: whole elements, one for each replica and step.

    Where there are several processes, what a data set draws while its batches are read is its pipeline's own, though
    all processes are seeded equally: of map-style data sets, in a `DataLoader` or not, and of the functions of
    ``ArrayDataset(…).map`` and its like. It is decided by the seeds, the pass, the batch and ``input_pipeline_id``, and
    leaves the process's streams where they are. What ``dataset_fn`` itself draws, and the order in which a sampler or
    ``shuffle`` draws rows, stay equal, so that shards fit together. So do the draws of an iterable data set of one's
    own, which may shard itself by them: give it a generator that is seeded with ``input_pipeline_id``.

    Args:
        strategy: in whose scope, or outside of any, the result may be iterated.
        layout: its replicas. With several processes all of them make this call.
        dataset_fn: called once per process, with the `InputContext` that tells it which part to make; its dataset's
            elements are replica batches, handed out in turn, neither split nor sharded. With
            ``InputReplicationMode.PER_REPLICA`` it is called for each replica, which then reads all of its dataset.
        options: see `InputOptions`.

    Raises:
        WrongTypeError: ``dataset_fn`` is no function, takes no context, or returns no dataset.
        InvalidArgumentError: ``place_dataset_on_device`` without PER_REPLICA.
        UnsupportedError: PER_REPLICA on a strategy with a single replica.
    """
    options = require_options(options)
    require_callable(dataset_fn, "distribute_datasets_from_function", may_yield=True)
    per_replica = options.replication_mode is InputReplicationMode.PER_REPLICA
    if options.place_dataset_on_device and not per_replica:
        raise InvalidArgumentError(
            "place_dataset_on_device=True needs replication_mode=InputReplicationMode.PER_REPLICA: one dataset for all "
            "replicas of a process has no single device to be placed on."
        )
    if per_replica and layout.per_replica_input == "refused":
        raise UnsupportedError(
            "InputReplicationMode.PER_REPLICA has no meaning on a strategy with a single replica; leave it out."
        )
    _require_context(dataset_fn)
    pipelines = len(layout.local_replicas) if per_replica else 1
    made = [dataset_fn(input_context(layout)) for _ in range(pipelines)]
    for dataset in made:
        refuse_distributed(dataset)
    return hand_out_elements(strategy, layout, [make_source(dataset) for dataset in made], options)


def _require_context(dataset_fn: Callable[[InputContext], object]) -> None:
    if misfit(dataset_fn, None) is not None:
        raise WrongTypeError(
            "distribute_datasets_from_function calls its function with one positional argument, an InputContext, and "
            f"got one of {inspect.signature(dataset_fn)}; write def dataset_fn(context)."
        )


def input_context(layout: InputLayout) -> InputContext:
    """What the function that makes this process's pipeline is told."""
    return InputContext(layout.num_workers, layout.worker_index, layout.num_replicas)


def hand_out_elements(
    strategy: StrategyLike, layout: InputLayout, sources: list[Source], options: InputOptions
) -> DistributedDataset:
    """Distribute whole elements: consecutive ones of a single source, or those of a source for each local replica."""

    pipelines = len(sources) * layout.num_workers
    numbered = dict(enumerate(sources, start=len(sources) * layout.worker_index))
    for number, source in numbered.items():
        source.pipeline = number if layout.num_workers > 1 else None

    def open_pipelines(saved: Saved | None) -> Reading:
        resumes: Mapping[int, Resume] = {} if saved is None else saved.streams
        streams = {number: source.open(resumes.get(number)) for number, source in numbered.items()}
        elements = [stream.items for stream in streams.values()]
        steps = bare_steps(elements[0]) if layout.bare else element_steps(elements, layout)
        here = _has_to_read_here(layout, sources, streams.values())
        return Reading(steps, _nothing, StepPerItem(streams, saved), pipelines, agreed=layout.bare, here=here)

    def terms() -> Terms:
        reads = f"{sources[0].reads} of a function's datasets"
        settings = {number: source.settings() for number, source in numbered.items()}
        return Terms(reads, settings, AutoShardPolicy.OFF, pipelines)

    def settle(saved: Saved) -> None:
        for number, source in numbered.items():
            source.settle(saved.between.get(number, saved.between[0]))

    feed = Feed(
        open=open_pipelines,
        element_spec=lambda: _whole_spec(sources[0].element_spec(), layout),
        cardinality=_steps_of(sources, layout),
        has_workers=any(source.has_workers for source in sources),
        exclusive=any(source.exclusive for source in sources),
        on_demand=any(source.on_demand for source in sources),
        terms=terms,
        streams={number: source.streams for number, source in numbered.items()},
        between=lambda: {number: source.between() for number, source in numbered.items()},
        settle=settle,
    )
    return DistributedDataset(strategy, layout, options, feed)


def _steps_of(sources: list[Source], layout: InputLayout) -> int:
    """Steps of one pass, where this process can know: other processes' pipelines may be longer."""
    if layout.num_workers > 1:
        return UNKNOWN_CARDINALITY
    counts = [source.cardinality for source in sources]
    if min(counts) < 0:
        return min(counts)
    return max(counts) if len(counts) > 1 else -(-counts[0] // len(layout.local_replicas))


def _split_spec(found: nest.Nest, layout: InputLayout) -> nest.Nest:
    """The spec of a replica's share: its rows are fixed where the global batch's are and divide evenly."""
    replicas = layout.num_replicas

    def share(rows: int | None) -> int | None:
        return rows // replicas if rows is not None and rows % replicas == 0 else None

    return found if layout.bare else spec.per_replica(found, share, len(layout.local_replicas))


def _whole_spec(found: nest.Nest, layout: InputLayout) -> nest.Nest:
    """The spec of elements that are handed out whole: at the end of the data some replicas get zero rows."""
    if layout.bare:
        return found
    return spec.per_replica(found, lambda rows: rows if layout.num_replicas == 1 else None, len(layout.local_replicas))


def _nothing(step: int) -> None:
    """No preparation."""
