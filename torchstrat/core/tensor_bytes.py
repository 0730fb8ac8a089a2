"""Tensors as the bytes that they are in memory."""

from __future__ import annotations

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """``(bytes,)`` uint8 in the memory of a contiguous tensor.

    PyTorch calls a tensor of one element contiguous whatever its strides are, such as a column of one row, and does not
    see it as bytes; so those that ``view(-1)`` has taken along are replaced.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, of any dtype, where they are."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    held = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    held.of = tensor  # type: ignore[attr-defined]  # it stays for as long as the view is used
    return memoryview(held).cast("B")


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape. By value NaN, which programs fill buffers with that
    are not known yet, would be another one each time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_as_integers(one), _as_integers(other))


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors have memory in common. Columns of one matrix have not."""
    if not one.numel() or not other.numel():
        return False
    begins = [one.data_ptr(), other.data_ptr()]
    ends = [begin + extent(t) * t.element_size() for begin, t in zip(begins, (one, other), strict=True)]
    if max(begins) >= min(ends):
        return False
    size = one.element_size()
    if size != other.element_size() or (one.is_contiguous() and other.is_contiguous()):
        return True
    seen = torch.zeros((max(ends) - min(begins)) // size, dtype=torch.bool)
    shown = [
        seen.as_strided(t.shape, t.stride(), (begin - min(begins)) // size)
        for begin, t in zip(begins, (one, other), strict=True)
    ]
    shown[0].fill_(True)
    return bool(shown[1].any())


def shows_part(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether all elements of one dense tensor are elements of another one, which is contiguous."""
    if whole.is_meta or whole.layout is not torch.strided or not whole.is_contiguous() or not view.numel():
        return False
    start = view.data_ptr() - whole.data_ptr()
    return (
        view.dtype == whole.dtype
        and view.device == whole.device
        and start >= 0
        and start + extent(view) * view.element_size() <= whole.nbytes
    )


def extent(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last in memory, with both."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
