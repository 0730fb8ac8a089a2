"""Values on the wire: one pickle, and beside it the tensors that were anywhere inside the value.

Tensors are sent from where they lie, without a copy: a value must not change until its call is answered. They arrive in
memory of the receiver's own, on the CPU, without their history (``requires_grad`` is False), and only the elements that
the tensor shows: a view brings neither the rest of its storage nor an alias of it. One tensor that is in a value twice
is one tensor again; two tensors that share memory no longer do.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SENT_AS_THEY_ARE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Packed:
    """A pickled value and its tensors, in the order in which the pickle refers to them."""

    data: bytes
    tensors: list[torch.Tensor] = field(default_factory=list)


def pack(value: Any) -> Packed:
    """Raises whatever pickling raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return Packed(buffer.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> Any:
    """The value; its tensors are those of ``packed``. Raises whatever unpickling raises."""
    return _Unpickler(io.BytesIO(packed.data), packed.tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad:
            value = value.detach()
        if type(value) not in _PLAIN or value.layout != torch.strided or value.is_quantized or value.is_meta:
            # Sparse tensors refer to plain ones, which come here again; the others pickle themselves.
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        tensor = _sendable(value)
        if tensor.dtype not in _SENT_AS_THEY_ARE:
            # The wire knows the dtypes of TorchScript only.
            return _with_dtype, (tensor.view(_CARRIERS[tensor.itemsize]), tensor.dtype)
        # The wire would bring shared storage once, for both.
        storage = tensor.untyped_storage().data_ptr()
        self.tensors.append(tensor.clone() if storage in self._storages else tensor)
        self._storages.add(storage)
        return _attached, (len(self.tensors) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _attached.__name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _attached(index: int) -> torch.Tensor:
    """Stands for a tensor beside the pickle; `_Unpickler` knows which."""
    raise pickle.UnpicklingError(f"tensor {index} travelled beside this pickle; read it with unpack().")


def _with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
        # The wire ships the whole storage of a large view. A view of less is copied; so is an expanded tensor.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor
