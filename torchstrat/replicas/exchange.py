"""`reduce` and `gather` between processes: every rank learns all components, and then combines them by the same rules
in the same order as one process would, so results are equal to the last bit, and so are errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from torchstrat import reduction
from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.reduction import Axis, ReduceOp
from torchstrat.replicas.agreement import agree, all_equal, code

_LARGE_BYTES = 1 << 20  # above this, adding up on the way beats collecting all components


def gather_components(communicator: Communicator, local: list[Any], axis: int) -> Any:
    """`Strategy.gather` over all ranks' components (a rank may bring none)."""
    call = f"gather(axis={axis})"
    prepare(communicator, call, lambda: [pickle.dumps(_portable(v)) for v in local if not isinstance(v, torch.Tensor)])
    return reduction.gather_components(gather_values(communicator, local, call), axis)


def prepare(
    communicator: Communicator, call: str, make: Callable[[], list[Any]], kind: Callable[[list[Any]], str] | None = None
) -> tuple[list[Any], bool]:
    """Get this rank's part ready and meet the others. When that fails on some ranks, all of them raise.

    Returns the part, and whether all ranks' parts are of the same ``kind``, which must not be empty.
    """
    try:
        part, failure = make(), None
    except Exception as error:
        part, failure = [], error
    own_kind = kind(part) if kind is not None and failure is None else ""
    rows = agree(communicator, call, (float(failure is not None), code(own_kind)))
    if any(row[0] for row in rows):
        _raise_everywhere(communicator, call, failure)
    return part, bool(own_kind) and all_equal(rows)


def require_alike(communicator: Communicator, call: str, kinds: list[tuple[tuple[int, ...], str]]) -> None:
    """Meet the other ranks in ``call``, which needs tensors of these shapes and dtypes on all of them."""
    rows = agree(communicator, call, (code(repr(kinds)),))
    if all_equal(rows):
        return
    each = ", ".join(
        f"{'; '.join(f'{shape} {dtype}' for shape, dtype in other)} on replica {rank}"
        for rank, other in zip(communicator.ranks, communicator.all_gather_object(kinds, call), strict=True)
    )
    raise InvalidArgumentError(
        f"{call} got {each}; shapes and dtypes must be equal (nothing is broadcast). To join tensors of different "
        "length use all_gather. If these are of different calls, one replica has left a call out."
    )


def _raise_everywhere(communicator: Communicator, call: str, failure: Exception | None) -> None:
    said = None if failure is None else (_error_kind(failure), str(failure))
    everyone = communicator.all_gather_object(said, call)
    if failure is not None:
        raise failure
    rank, (kind, text) = next((rank, one) for rank, one in zip(communicator.ranks, everyone, strict=True) if one)
    errors = {one.__name__: one for one in (InvalidArgumentError, WrongTypeError, UnsupportedError)}
    raise errors[kind](f"{call} failed on replica {rank}: {text}")


def _error_kind(failure: Exception) -> str:
    kinds = {TypeError: WrongTypeError, NotImplementedError: UnsupportedError}
    found = next((ours for base, ours in kinds.items() if isinstance(failure, base)), InvalidArgumentError)
    return found.__name__


def gather_values(communicator: Communicator, local: list[Any], call: str) -> list[Any]:
    """The components of all ranks (a rank may bring none), in rank order, on the CPU."""
    agree(communicator, call)
    local = [_portable(value) for value in local]
    metas = communicator.all_gather_object([_meta(value) for value in local], call)
    first = metas[0]
    if not any(metas):
        raise InvalidArgumentError(
            f"{call} got a value without components: no replica took part in the run that it comes from, because none "
            "had rows. Skip batches without rows."
        )
    if len(first) == 1 and first[0] is not None and all(meta == first for meta in metas):
        return communicator.all_gather(local[0], call)
    return [value for values in communicator.all_gather_object(local, call) for value in values]


def _portable(value: Any) -> Any:
    """A tensor on the CPU that takes no more with it than it shows: pickle writes the whole storage under a view."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if value.layout == torch.strided and value.nbytes < value.untyped_storage().nbytes():
        value = value.clone()
    return value


def _meta(value: Any) -> Any:
    """What must be equal for tensors to travel as they are; None: send it as an object."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return tuple(value.shape), value.dtype
    return None


def reduce_values(communicator: Communicator, op: ReduceOp, local: list[Any], axis: Axis) -> Any:
    """`Strategy.reduce` over all ranks' components."""
    call = f"reduce({op.value.lower()}, axis={axis})"
    if axis is None:
        return _reduce_elementwise(communicator, op, local, call)

    # Each rank reduces its own part first; only shares and counts travel.
    def share() -> list[Any]:
        tensors = [reduction.as_tensor(value, "reduce") for value in local]
        return [reduction.sum_and_count(tensor, axis, op) for tensor in tensors]

    pairs, _ = prepare(communicator, call, share)
    shares = gather_values(communicator, [share for share, _ in pairs], call)
    counts = gather_values(communicator, [torch.tensor(count) for _, count in pairs], call)
    total = reduction.combine(ReduceOp.SUM, shares)
    return total / sum(int(count) for count in counts) if op is ReduceOp.MEAN else total


def _reduce_elementwise(communicator: Communicator, op: ReduceOp, local: list[Any], call: str) -> Any:
    tensors, alike = prepare(
        communicator, call, lambda: [reduction.as_tensor(value, "reduce") for value in local], _kind_if_large
    )
    if not alike:
        return reduction.combine(op, gather_values(communicator, tensors, call))
    mean = op is ReduceOp.MEAN
    total = tensors[0].detach().to(reduction.mean_dtype(tensors[0].dtype) if mean else tensors[0].dtype, copy=True)
    total = total.contiguous()
    communicator.all_reduce(total, call).wait()
    return (total / communicator.size if mean else total).cpu()


def _kind_if_large(tensors: list[Any]) -> str:
    if len(tensors) != 1 or tensors[0].layout != torch.strided or tensors[0].nbytes <= _LARGE_BYTES:
        return ""
    (tensor,) = tensors
    return "" if tensor.dtype == torch.bool else f"{tuple(tensor.shape)} {tensor.dtype}"
