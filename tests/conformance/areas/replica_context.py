"""`ReplicaContext`: what a replica knows of itself, and the context outside of any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.merge_call import context, merge
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, make_strategy


def attributes(case: Case) -> list[list[Any]]:
    found: list[list[Any]] = []

    def step() -> None:
        current = context()
        kind = type(current.replica_id_in_sync_group).__name__
        found.append([kind, current.num_replicas_in_sync, list(current.devices)])

    make_strategy(case.setup).run(step)
    return found


def merge_without_strategy(_: Case) -> Any:
    assert not ts.has_strategy()
    return merge(lambda _, value: value * 2, torch.tensor(2.0))


OPS: dict[str, Callable[[Case], Any]] = {
    "attributes": attributes,
    "merge_call_default": merge_without_strategy,
}


def _plain(replicas: int) -> Difference:
    """Number 13 for the id; with it number 20, the spelling of devices."""
    expect = [["int", replicas, [f"cpu:{replica}"]] for replica in range(replicas)]
    return returns(13, "The id is a Python int, and devices have PyTorch's names.", expect, attributes)


DIFFERS: dict[str, Difference] = {
    "replica_context/attributes/001": _plain(2),
    "replica_context/attributes/002": _plain(2),
    "replica_context/attributes/004": _plain(1),
}
NO_COUNTERPART: dict[str, str] = {}
