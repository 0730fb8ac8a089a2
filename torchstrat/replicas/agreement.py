"""Before processes exchange data, they make sure that they are about to exchange the same thing.

Without that, a replica that skipped a call would answer the others' next one, and numbers would be mixed up silently.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch

from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import ReplicaDivergenceError


def _code(call: str) -> float:
    """A number for a call that a float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little"))


def fingerprint(tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Sum and sum of squares of all elements, in float64: equal for equal tensors on equal machines."""
    total = squares = 0.0
    for tensor in tensors:
        values = tensor.detach()
        if values.layout == torch.sparse_coo:
            values = values.coalesce().values()
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values.to(torch.float64)
        total += float(values.sum())
        squares += float((values * values).sum())
    return total, squares


def same_bits(one: float, other: float) -> bool:
    return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))


def agree(communicator: Communicator, call: str, numbers: tuple[float, ...] = ()) -> list[list[float]]:
    """Meet the other ranks in ``call``; the numbers each brought, by rank.

    ``call`` must be equal on all ranks, up to the last letter; the count of numbers belongs to the call. Raises
    `ReplicaDivergenceError`, on every rank, when one is in another call, naming what each is doing.
    """
    width = 8
    assert len(numbers) < width
    header = torch.zeros(width, dtype=torch.float64)
    header[0] = _code(call)
    for index, number in enumerate(numbers, start=1):
        header[index] = number
    headers = communicator.all_gather(header, call)
    if any(float(other[0]) != float(header[0]) for other in headers):
        calls = communicator.all_gather_object(call, call)
        doing = ", ".join(
            f"replica {rank} called {other}" for rank, other in zip(communicator.ranks, calls, strict=True)
        )
        raise ReplicaDivergenceError(
            f"the replicas no longer make the same calls: {doing}. Every replica has to make the same optimizer steps, "
            "backward passes, collectives and merge calls, in the same order; look for a branch that depends on the "
            "replica's data or rank."
        )
    return [[float(value) for value in other[1 : len(numbers) + 1]] for other in headers]
