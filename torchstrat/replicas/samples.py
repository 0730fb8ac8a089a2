"""A few bytes of a tensor, by which edits are noticed that no version counter shows."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from torchstrat.piece_kinds import plain_kind

_PROBED = 16  # bytes of each tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Of types. Those that take over dispatch (DTensor, fake tensors) may have no elements of their own; a piece has.
is_memory: Callable[[Any], bool] = functools.lru_cache(1024)(
    lambda kind: plain_kind(kind).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
)


def sample(tensor: torch.Tensor) -> bytes:
    """Some of the bytes of a tensor in host memory, from all over it. Read at its address: through a view it takes ten
    times as long, and every run asks for every tensor."""
    if type(tensor) not in _PLAIN and not is_memory(type(tensor)):
        return b""
    if not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
        return b""
    count, address = tensor.nbytes, tensor.data_ptr()
    if not count or not address:  # its storage may have been given back for the time being
        return b""
    # An odd step meets all bytes of the elements: the high ones of two numbers are often equal.
    sample: bytes = _bytes_at(count).from_address(address)[:: count // _PROBED | 1]
    return sample


@functools.lru_cache(maxsize=4096)
def _bytes_at(count: int) -> Any:
    return ctypes.c_char * count


Trace = tuple[int, int, bytes]


def trace_of(tensor: torch.Tensor) -> Trace:
    """Another one when somebody has changed the tensor, also through ``.data``."""
    return tensor._version, tensor.data_ptr() if tensor.layout == torch.strided else 0, sample(tensor)
