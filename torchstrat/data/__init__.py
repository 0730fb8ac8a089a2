"""Input: global batches to replica batches, over one process or many.

Reading order: `rebatch` (the two rules), `marks`, `containers` and `rows` (what a batch is), `readings` (what shapes do
not tell), `streams` (rules applied to batches), `sources` and `loader` (what can be
read), `autoshard` and `order` (several processes), `prefetch`, `distributed` (what the training loop sees),
`v1_iterators` (the same for programs in the style of TensorFlow 1). Where a pass stands, and how to go on from there:
`position` (what is saved), `draws` (orders that are drawn again), `sequence` and `iterable_loader` (data that is read
again), `standing` and `progress` (which place each step leads to).
"""

from torchstrat.core.engine import InputLayout
from torchstrat.data.distribute import distribute_dataset, distribute_datasets_from_function
from torchstrat.data.distributed import DistributedDataset, DistributedIterator
from torchstrat.data.layout import batch_sizes_for_worker
from torchstrat.data.marks import axis, examples, same, unmarked
from torchstrat.data.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from torchstrat.data.pipeline import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    ArrayDataset,
    Pipeline,
    TextLineDataset,
)
from torchstrat.data.sources import FileSource
from torchstrat.data.spec import PerReplicaSpec, TensorSpec
from torchstrat.data.v1_iterators import InputIterator
from torchstrat.data.worker_signals import outlive_preemption

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
