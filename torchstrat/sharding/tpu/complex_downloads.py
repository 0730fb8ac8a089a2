"""Double-precision complex numbers on their way from torch_xla's devices to the host.

torch_xla 2.9 copies their real parts and leaves out the imaginary ones, in each of the operations by which a value
reaches the host. They travel as pairs of real numbers here, whoever asks: `.cpu()`, ``state_dict``, ``torch.save``,
printing and checkpoints all end in these operations.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch

_WIDE = torch.complex128


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """On the host. The operation that copies: below autograd these devices have no views."""
    pairs: torch.Tensor = torch.ops.aten.view_as_real_copy.default(tensor)
    return pairs.cpu()


@lru_cache(maxsize=1)
def mend_complex_downloads() -> torch.library.Library:
    """For the whole process, and once; for all other types the operations are what they were."""
    library = torch.library.Library("aten", "IMPL")
    to_copy, local_scalar, copy = (
        torch.library.get_kernel(f"aten::{name}", "XLA") for name in ("_to_copy", "_local_scalar_dense", "copy_")
    )

    def mended_to_copy(keys: Any, tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
        if tensor.dtype is _WIDE and device is not None and device.type == "cpu":
            return torch.view_as_complex(_pairs(tensor)).to(_WIDE if dtype is None else dtype)
        return to_copy.call_boxed(keys, tensor, dtype=dtype, device=device, **rest)

    def mended_local_scalar(keys: Any, tensor: torch.Tensor) -> Any:
        if tensor.dtype is _WIDE:
            return complex(*_pairs(tensor).flatten().tolist())
        return local_scalar.call_boxed(keys, tensor)

    def mended_copy(keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if source.dtype is _WIDE and source.device.type == "xla" and target.device.type == "cpu":
            return target.copy_(torch.view_as_complex(_pairs(source)))
        return copy.call_boxed(keys, target, source, non_blocking)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced, which is the point
        library.impl("_to_copy", mended_to_copy, "XLA", with_keyset=True)
        library.impl("_local_scalar_dense", mended_local_scalar, "XLA", with_keyset=True)
        library.impl("copy_", mended_copy, "XLA", with_keyset=True)
    return library


__all__ = ["mend_complex_downloads"]
