"""What a server holds, as plain data with a digest: a coordinator that is started again compares it with its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from torchstrat.parameter_server.messages import VariableSpec


def describe_variable(spec: VariableSpec, held_shards: Iterable[int]) -> dict[str, Any]:
    """``held_shards``: the numbers of the shards on the server that the catalog is of."""
    return {
        "number": spec.number,
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": str(spec.dtype),
        "kind": spec.kind,
        "shards": [[shard.server, shard.start, shard.stop] for shard in spec.shards],
        "requires_grad": spec.requires_grad,
        "by_rows": spec.by_rows,
        "held": sorted(held_shards),
    }


def describe_optimizer(number: int, name: str, groups: Sequence[Sequence[int]], rows_only: bool) -> dict[str, Any]:
    """``name``: module and class. Hyperparameters are no part of it: they come with every step."""
    return {"number": number, "class": name, "groups": [list(group) for group in groups], "rows_only": rows_only}


def make_catalog(variables: Iterable[dict[str, Any]], optimizers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """``{"variables", "optimizers", "digest"}``; equal contents have equal digests, in any process."""
    content: dict[str, Any] = {
        "variables": sorted(variables, key=lambda described: described["number"]),
        "optimizers": sorted(optimizers, key=lambda described: described["number"]),
    }
    packed = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "digest": hashlib.sha256(packed.encode()).hexdigest()}
