"""Mixed precision in a step: which functions compute in half precision, where the step is mapped over lanes.

Under ``vmap`` layers are taken apart before autocast sees them, so that it finds none of its functions. Their arguments
are cast here, as autocast itself would cast them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core import nest
from torchstrat.core.errors import ContextError
from torchstrat.core.half_precision import HALF
from torchstrat.sharding.tpu.named_functions import members
from torchstrat.sharding.tpu.places import current_place

_NAMES = (
    *(
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "einsum",
        "matmul",
        "mm",
        "mv",
        "__matmul__",
    ),
    *("__rmatmul__", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "convolution"),
    *("conv_transpose3d", "linear", "bilinear", "scaled_dot_product_attention", "_scaled_dot_product_attention"),
    *("max_pool2d", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "multi_head_attention_forward"),
)
_WIDE_NAMES = (
    *("cdist", "cross_entropy", "binary_cross_entropy_with_logits", "instance_norm", "batch_norm", "trace", "l1_loss"),
    *("log_softmax", "cosine_embedding_loss", "nll_loss", "hinge_embedding_loss"),
)
_ALONE_NAMES = ("dot", "vdot", "mv", "inner", "tensordot", "vecdot")


_LOWER = members(_NAMES, torch, torch.Tensor, F, torch.linalg)
_WIDE = members(_WIDE_NAMES, torch, torch.Tensor, F, torch.linalg)
"""They compute in single precision."""

_ALONE = members(_ALONE_NAMES, torch, torch.Tensor, F, torch.linalg)
"""Autocast leaves them as they are; under ``vmap`` they become products, which it does not."""


def lowered(func: Any, args: Any, kwargs: dict[str, Any], device_type: str) -> tuple[Any, dict[str, Any], bool] | None:
    """The arguments of ``func`` under the autocast that is in force, and whether that stays in force within it; None
    for a function that autocast finds by itself.

    Raises:
        ContextError: it is one of the host, and the step computes on other devices.
    """
    if device_type != "cpu" and torch.is_autocast_enabled("cpu"):
        raise ContextError(
            f'torch.autocast("cpu") in a step whose tensors are on {device_type!r} changes nothing (at '
            f"{current_place()}); write torch.autocast({device_type!r}, …), or torch.autocast(x.device.type, …), which "
            "is right on every strategy."
        )
    if not torch.is_autocast_enabled(device_type):
        return None
    if func in _ALONE:
        return args, kwargs, False
    if func in _WIDE:
        return *_cast(args, kwargs, torch.float32, HALF), True
    if func in _LOWER:
        return *_cast(args, kwargs, torch.get_autocast_dtype(device_type), (*HALF, torch.float32)), True
    return None


def _cast(args: Any, kwargs: Any, dtype: torch.dtype, kinds: tuple[torch.dtype, ...]) -> tuple[Any, dict[str, Any]]:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in kinds else leaf

    cast_args, cast_kwargs = nest.map_structure(cast, (list(args), dict(kwargs)))
    return tuple(cast_args), cast_kwargs
