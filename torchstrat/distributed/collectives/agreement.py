"""Before processes exchange data, they make sure that they are about to exchange the same thing.

Without that, a rank that skipped a call would answer the others' next one. Numbers would be mixed up silently, or
processes would die: gloo ends one that receives a message of another size than it expects. So what ranks send each
other first is equally long, and says which call it belongs to.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from torchstrat.core.engine import Communicator, in_full
from torchstrat.core.errors import NotSendableError, ReplicaDivergenceError
from torchstrat.core.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece

AGREEMENT, OBJECT = 1.0, -1.0
"""Kinds of calls: an agreement, whose numbers are all there is to send, or objects, which follow."""

_WIDTH = 12
_PADDING = (0.0,) * (_WIDTH - 1)


@functools.lru_cache(maxsize=4096)
def code(text: str) -> float:
    """A number for a text that a float64 holds exactly, the same in every process; positive."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little"))


def header(kind: float, call: str, numbers: Sequence[float]) -> tuple[float, ...]:
    """The numbers (at most 11) of a ``call``, behind a number that stands for its kind and its name."""
    assert len(numbers) < _WIDTH
    return (kind * code(call), *numbers, *_PADDING[len(numbers) :])


def is_of(kind: float, first: Sequence[float]) -> bool:
    """Whether a rank's first message is that of a call of this kind."""
    return first[0] * kind > 0


def numbers_in(messages: Sequence[list[float]], count: int) -> list[list[float]]:
    """What each rank gave to `header`."""
    return [first[1 : count + 1] for first in messages]


def length_in(first: Sequence[float]) -> int:
    """Of the object that follows a first message."""
    return int(first[1])


INPUT = "distribute_dataset"
"""The call that makes a channel for input."""


def pickled(value: object, what: str) -> bytes:
    """For the other ranks. Raises `NotSendableError` before they are met."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever a class's own methods raise
        raise NotSendableError(
            f"{in_full(what)} hands what this process has to the others, and a part of that cannot be pickled "
            f"({type(error).__name__}: {error}). What an optimizer or a module keeps, and what a step returns, may be "
            "of any class that lies at the top level of a module."
        ) from error


def fingerprint(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Two checksums of the bits and the order of all elements."""
    if not tensors:  # an empty list: nearly always
        return 0.0, 1.0
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
    call = communicator.named(in_full(call))
    headers = communicator.all_gather_numbers(header(AGREEMENT, call, numbers), call)
    return _checked(communicator, call, headers, len(numbers))


@runtime_checkable
class SumsInPlace(Communicator, Protocol):
    """A `Communicator` that adds gradients up where they lie: collecting them in buckets would only cost copies."""

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        """Replace each tensor (contiguous, in host memory, without a graph) by ``factor`` times its sum over all ranks.
        All ranks pass tensors of equal lengths and dtypes in one order, and get the same bits."""

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        """`all_gather_numbers` that in the same meeting does what `sum_in_place` has to wait for, where ``tensors`` are
        small: the numbers, and a function that makes the sums, times the factor it is given. None where they are not,
        or of several dtypes. It may be called if the numbers tell that all ranks have passed tensors alike, and only
        before the next collective."""

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        """The same for tensors of one dtype, where each rank needs but its own elements of the sum: ``owned`` are for
        each rank pieces of the tensors, which together are all of them. What others own is undefined afterwards."""


def agree_and_sum(
    communicator: SumsInPlace, call: str, numbers: tuple[float, ...], tensors: Sequence[torch.Tensor]
) -> tuple[list[list[float]], Callable[[float], None] | None]:
    """The same, and in the same meeting the better part of a sum; see `SumsInPlace.all_gather_numbers_and_sum`."""
    call = communicator.named(in_full(call))
    headers, add_up = communicator.all_gather_numbers_and_sum(header(AGREEMENT, call, numbers), tensors, call)
    return _checked(communicator, call, headers, len(numbers)), add_up


def _checked(communicator: Communicator, call: str, headers: list[list[float]], count: int) -> list[list[float]]:
    first = headers[0]
    if headers.count(first) == len(headers):  # nearly always
        return [first[1 : count + 1]] * len(headers)
    own = headers[communicator.rank][0]
    if [other[0] for other in headers].count(own) != len(headers):
        is_over = not all(is_of(AGREEMENT, other) for other in headers)  # those in other calls cannot go on
        raise ReplicaDivergenceError(communicator.calls_differ(call, is_over=is_over))
    return numbers_in(headers, count)


def all_equal(rows: list[list[float]]) -> bool:
    """Whether all ranks brought the same numbers to `agree`."""
    return rows.count(rows[0]) == len(rows)
