"""Variables that a partitioner splits over the servers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.clusters import cluster_of, task_of
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference
from torchstrat.partitioners import FixedShardsPartitioner


def custom_partitioner(case: Case) -> list[list[int]]:
    """The shapes of the shards. What the partitioner returns stands in the case as Python: ``returns (2,1) tuple``."""
    [text] = re.findall(r"returns (\(.*\)|\[.*\]|\S+)", case.inputs["partitioner"])
    answer = ast.literal_eval(text)
    strategy = cluster_of(case).strategy(lambda shape, dtype: answer)
    with strategy.scope():
        made: Any = ts.Variable(torch.zeros(case.inputs["shape"]))
    return [list(shard.shape) for shard in made.variables]


def div_sharding(case: Case) -> dict[str, Any]:
    strategy = cluster_of(case).strategy(FixedShardsPartitioner(case.inputs["num_shards"]))
    with strategy.scope():
        made: Any = ts.Variable(torch.arange(case.inputs["rows"]))
    return {
        "sharded": isinstance(made, ts.ShardedVariable),
        "rows": [len(shard.read_value()) for shard in made.variables],
        "first_ids": [int(shard.read_value()[0]) for shard in made.variables],
        "devices": [task_of(strategy.extended.device_of(shard)) for shard in made.variables],
    }


def unnamed(case: Case) -> dict[str, Any]:
    strategy = cluster_of(case).strategy(FixedShardsPartitioner(2))
    with strategy.scope():
        made: Any = ts.Variable(torch.zeros(4, 2))
    return {"name": made.name, "parts": [shard.name for shard in made.variables]}


OPS: dict[str, Callable[[Case], Any]] = {
    "custom_partitioner": custom_partitioner,
    "div_sharding": div_sharding,
    "unnamed": unnamed,
}
DIFFERS: dict[str, Difference] = {
    "ps_partition/unnamed/001": returns(
        20,
        "The same names without ':0', the number of a graph operation's output.",
        {"name": "ShardedVariable", "parts": ["Variable", "Variable"]},
        unnamed,
    ),
}
NO_COUNTERPART: dict[str, str] = {}
