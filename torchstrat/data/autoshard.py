"""How the processes of a job share a dataset: which policy applies, and what it leaves to this process."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch.utils.data import DataLoader

from torchstrat.data.layout import InputLayout
from torchstrat.data.loader import LoaderSource
from torchstrat.data.options import AutoShardPolicy, InputOptions, parse_policy
from torchstrat.data.order import refuse_distributed_sampler
from torchstrat.data.sources import Source

logger = logging.getLogger("torchstrat.data")


def chosen_policy(dataset: Any, source: Source, options: InputOptions) -> AutoShardPolicy:
    """The policy of the options, else the one the dataset carries, else AUTO; AUTO replaced by what it means here."""
    policy = options.auto_shard_policy
    carriers = (dataset, dataset.dataset) if isinstance(dataset, DataLoader) else (dataset,)
    for carrier in carriers:
        if policy is None and (carried := getattr(carrier, "auto_shard_policy", None)) is not None:
            policy = parse_policy(carried)
    if policy is None or policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.FILE if source.reads_files else AutoShardPolicy.DATA
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
