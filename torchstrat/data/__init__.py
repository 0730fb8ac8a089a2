"""Input: global batches to replica batches, over one process or many.

Reading order: `marks` and `rows` (what a batch is, and the two rules that divide it), `streams` (rules applied to
batches, and what shapes do not tell), `sources` and `loader` (what can be read), `distribute` and `order` (several
processes), `own_draws` and `workers` (random draws), `prefetch`, `distributed` (what the training loop sees),
`v1_iterators` (the same for programs in the style of TensorFlow 1). Where a pass stands, and how to go on from there:
`position` (what is saved), `order` (indices that are drawn again), `sequence` and `loader_batches` (data that is read
again).

Imports from `core`.
"""

from torchstrat.core.engine import InputLayout
from torchstrat.data.distribute import distribute_dataset, distribute_datasets_from_function
from torchstrat.data.distributed import DistributedDataset, DistributedIterator
from torchstrat.data.marks import axis, examples, same, unmarked
from torchstrat.data.options import AutoShardPolicy, FileSource, InputContext, InputOptions, InputReplicationMode
from torchstrat.data.pipeline import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    ArrayDataset,
    Pipeline,
    TextLineDataset,
)
from torchstrat.data.rows import batch_sizes_for_worker
from torchstrat.data.spec import PerReplicaSpec, TensorSpec
from torchstrat.data.v1_iterators import InputIterator
from torchstrat.data.workers import outlive_preemption

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "ArrayDataset",
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "FileSource",
    "InputContext",
    "InputIterator",
    "InputLayout",
    "InputOptions",
    "InputReplicationMode",
    "PerReplicaSpec",
    "Pipeline",
    "TensorSpec",
    "TextLineDataset",
    "axis",
    "batch_sizes_for_worker",
    "distribute_dataset",
    "distribute_datasets_from_function",
    "examples",
    "outlive_preemption",
    "same",
    "unmarked",
]
