"""Before processes exchange data, they make sure that they are about to exchange the same thing.

Without that, a replica that skipped a call would answer the others' next one. Numbers would be mixed up silently, or
processes would die: gloo ends one that receives a message of another size than it expects.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchstrat.collectives.communicator import Communicator, SumsInPlace
from torchstrat.errors import ReplicaDivergenceError
from torchstrat.tensor_bytes import bytes_of

INPUT = "distribute_dataset"
"""The call that makes a channel for input."""

_WIDTH = 12
_PADDING = (0.0,) * (_WIDTH - 1)


@functools.lru_cache(maxsize=4096)
def code(text: str) -> float:
    """A number for a text that a float64 holds exactly, the same in every process."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little"))


def fingerprint(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Two checksums of the bits and the order of all elements."""
    crc, adler = 0, 1
    for tensor in tensors:
        for part in _parts(tensor.detach()):
            if part.numel():
                data: Any = bytes_of(part.cpu().contiguous()).numpy()
                crc, adler = zlib.crc32(data, crc), zlib.adler32(data, adler)
    return float(crc), float(adler)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.is_quantized:
        return tensor.int_repr(), tensor.dequantize()
    return (tensor.resolve_conj().resolve_neg(),) if tensor.layout == torch.strided else (tensor.to_dense(),)


def agree(communicator: Communicator, call: str, numbers: tuple[float, ...] = ()) -> list[list[float]]:
    """Meet the other ranks in ``call``; the numbers each brought (at most 11), by rank.

    ``call`` must be equal on all ranks, up to the last letter; the count of numbers belongs to the call. Raises
    `ReplicaDivergenceError`, on every rank, when one is in another call, naming what each is doing.
    """
    return _checked(communicator, call, communicator.all_gather_numbers(_header(call, numbers), call), len(numbers))


def agree_and_sum(
    communicator: SumsInPlace, call: str, numbers: tuple[float, ...], tensors: Sequence[torch.Tensor]
) -> tuple[list[list[float]], Callable[[float], None] | None]:
    """The same, and in the same meeting the better part of a sum; see `SumsInPlace.all_gather_numbers_and_sum`."""
    headers, add_up = communicator.all_gather_numbers_and_sum(_header(call, numbers), tensors, call)
    return _checked(communicator, call, headers, len(numbers)), add_up


def _header(call: str, numbers: tuple[float, ...]) -> tuple[float, ...]:
    """All calls send equally many: gloo would end a process that receives more than it expects."""
    assert len(numbers) < _WIDTH
    return (code(call), *numbers, *_PADDING[len(numbers) :])


def _checked(communicator: Communicator, call: str, headers: list[list[float]], count: int) -> list[list[float]]:
    own = headers[communicator.rank][0]
    if [other[0] for other in headers].count(own) != len(headers):
        calls = communicator.all_gather_object(call, call)
        doing = ", ".join(
            f"replica {rank} called {other}" for rank, other in zip(communicator.ranks, calls, strict=True)
        )
        raise ReplicaDivergenceError(
            f"the replicas no longer make the same calls: {doing}. Every replica has to make the same optimizer steps, "
            "backward passes, collectives and merge calls, in the same order; look for a branch that depends on the "
            "replica's data or rank."
        )
    return [other[1 : count + 1] for other in headers]


def all_equal(rows: list[list[float]]) -> bool:
    """Whether all ranks brought the same numbers to `agree`."""
    return rows.count(rows[0]) == len(rows)
