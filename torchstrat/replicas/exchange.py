"""`reduce` and `gather` between processes: every rank learns all components, and then combines them by the same rules
in the same order as one process would, so results are equal to the last bit."""

from __future__ import annotations

from typing import Any

import torch

from torchstrat import reduction
from torchstrat.collectives.communicator import Communicator
from torchstrat.reduction import Axis, ReduceOp
from torchstrat.replicas.agreement import agree

_LARGE_BYTES = 1 << 20  # above this, adding up on the way beats collecting all components


def gather_values(communicator: Communicator, local: list[Any], call: str) -> list[Any]:
    """The components of all ranks (a rank may bring none), in rank order, on the CPU."""
    agree(communicator, call)
    local = [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in local]
    metas = communicator.all_gather_object([_meta(value) for value in local], call)
    first = metas[0]
    if len(first) == 1 and first[0] is not None and all(meta == first for meta in metas):
        return communicator.all_gather(local[0].contiguous(), call)
    return [value for values in communicator.all_gather_object(local, call) for value in values]


def _meta(value: Any) -> Any:
    """What must be equal for tensors to travel as they are; None: send it as an object."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return tuple(value.shape), value.dtype
    return None


def reduce_values(communicator: Communicator, op: ReduceOp, local: list[Any], axis: Axis) -> Any:
    """`Strategy.reduce` over all ranks' components."""
    call = f"reduce({op.value.lower()}, axis={axis})"
    if axis is None:
        return _reduce_elementwise(communicator, op, local, call)
    # Each rank reduces its own part first; only shares and counts travel.
    tensors = [reduction.as_tensor(value, "reduce") for value in local]
    pairs = [reduction.sum_and_count(tensor, axis, op) for tensor in tensors]
    shares = gather_values(communicator, [share for share, _ in pairs], call)
    counts = gather_values(communicator, [torch.tensor(count) for _, count in pairs], call)
    total = reduction.combine(ReduceOp.SUM, shares)
    return total / sum(int(count) for count in counts) if op is ReduceOp.MEAN else total


def _reduce_elementwise(communicator: Communicator, op: ReduceOp, local: list[Any], call: str) -> Any:
    tensors = [reduction.as_tensor(value, "reduce") for value in local]
    large = len(tensors) == 1 and tensors[0].layout == torch.strided and tensors[0].nbytes > _LARGE_BYTES
    kind = f"{tuple(tensors[0].shape)} {tensors[0].dtype}" if large else "small"
    votes = agree(communicator, call, (float(large),))
    if not all(vote[0] for vote in votes):
        return reduction.combine(op, gather_values(communicator, tensors, call))
    agree(communicator, f"{call} of {kind}")
    mean = op is ReduceOp.MEAN
    total = tensors[0].detach().to(reduction.mean_dtype(tensors[0].dtype) if mean else tensors[0].dtype, copy=True)
    total = total.contiguous()
    communicator.all_reduce(total, call).wait()
    return (total / communicator.size if mean else total).cpu()
