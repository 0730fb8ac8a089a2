"""Every name of torch.distributed.tensor that is not public API, looked up when this file is imported.

The only file to change if a torch release moves one of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from torchstrat.core._torch_private import DisableTorchFunctionSubclass, look_up, raise_on_data_pointer

_spec_module = importlib.import_module("torch.distributed.tensor._dtensor_spec")
_DTensorSpec = look_up("DTensorSpec", _spec_module)
_TensorMeta = look_up("TensorMeta", _spec_module)
look_up("_local_tensor", DTensor)  # type: ignore[arg-type]  # where a DTensor keeps its piece
look_up("_spec", DTensor)  # type: ignore[arg-type]

WithoutSubclasses = DisableTorchFunctionSubclass
"""``with WithoutSubclasses():`` a tensor subclass does not see what is done to it in the block; modes do."""


def make_dtensor(
    kind: type[DTensor], local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> Any:
    """A DTensor of class ``kind`` around this process's piece ``local``, without a graph. Nothing is checked."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = _TensorMeta(torch.Size(shape), stride, local.dtype)
    with WithoutSubclasses():
        made = kind(local, _DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
    raise_on_data_pointer(made)  # it has no memory, and who asks no class would take a null pointer for one
    return made


def local_of(tensor: DTensor) -> torch.Tensor:
    """This process's piece, the tensor itself: no graph, no copy."""
    local: torch.Tensor = tensor._local_tensor
    return local
