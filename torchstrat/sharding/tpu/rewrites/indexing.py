"""Operations on places of a tensor, and on its memory, as what they mean: torch_xla 2.9 loses their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.tpu.places import current_place
from torchstrat.sharding.tpu.rewrites.scattering import scatter, scatter_add, scatter_reduce

Tensor = torch.Tensor


def functions() -> dict[Any, Callable[..., Any]]:
    """The function of PyTorch → its replacement."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, replacement in (
        ("select_scatter", select_scatter),
        ("index_add", index_add),
        ("index_copy", index_copy),
        ("index_fill", index_fill),
        ("index_reduce", index_reduce),
        ("take", take),
        ("put", put),
        ("roll", roll),
        ("cumprod", cumprod),
        ("cumsum", cumsum),
        ("count_nonzero", count_nonzero),
        ("norm", norm),
        ("cdist", cdist),
        ("as_strided", as_strided),
        ("as_strided_copy", as_strided),
    ):
        for owner in (torch, torch.Tensor):
            if hasattr(owner, name):
                found[getattr(owner, name)] = replacement
    found[torch.Tensor.fill_diagonal_] = fill_diagonal_
    for name, replacement in (
        ("index_add_", index_add),
        ("index_copy_", index_copy),
        ("index_fill_", index_fill),
        ("index_reduce_", index_reduce),
        ("put_", put),
        ("cumsum_", cumsum),
    ):
        found[getattr(torch.Tensor, name)] = _in_place(replacement)
    found[torch.linalg.eigh] = eigh
    found[torch.linalg.eigvalsh] = eigvalsh
    found[torch.pdist] = found[torch.nn.functional.pdist] = pdist
    return found


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:  # noqa: A002 - torch's name
    """`torch.select_scatter`."""
    size = input.shape[dim]
    if not -size <= index < size or src.shape != input.select(dim, 0).shape:
        return torch.select_scatter(input, src, dim, index)  # raises
    places = torch.arange(size, device=input.device)
    after = input.dim() - 1 - dim % input.dim()
    return torch.where(places.reshape(-1, *[1] * after) == index % size, src.unsqueeze(dim).to(input.dtype), input)


def index_add(
    input: Tensor,  # noqa: A002 - torch's name
    dim: int,
    index: Tensor,
    source: Tensor,
    *,
    alpha: complex = 1,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.index_add`. The compiler's own ends the process where there is one place to add to; so do the next."""
    x, at, values = _along(input, dim, index, source)
    result = scatter_add(x, dim, at, (values * alpha).to(x.dtype)).reshape(input.shape)
    return result if out is None else out.copy_(result)


def index_copy(
    input: Tensor,  # noqa: A002 - torch's name
    dim: int,
    index: Tensor,
    source: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.index_copy`."""
    x, at, values = _along(input, dim, index, source)
    result = scatter(x, dim, at, values).reshape(input.shape)
    return result if out is None else out.copy_(result)


def index_reduce(
    input: Tensor,  # noqa: A002 - torch's name
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.index_reduce`."""
    x, at, values = _along(input, dim, index, source)
    result = scatter_reduce(x, dim, at, values, reduce, include_self=include_self).reshape(input.shape)
    return result if out is None else out.copy_(result)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:  # noqa: A002 - torch's name
    """`torch.index_fill`."""
    x = input.reshape(1) if input.dim() == 0 else input
    size = x.shape[dim]
    is_filled = (torch.arange(size, device=x.device) == index.reshape(-1, 1) % size).any(dim=0)
    after = x.dim() - 1 - dim % x.dim()
    given = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.where(is_filled.reshape(-1, *[1] * after), given, x).reshape(input.shape)


def take(input: Tensor, index: Tensor) -> Tensor:  # noqa: A002 - torch's name
    """`torch.take`."""
    return input.reshape(-1).index_select(0, index.reshape(-1) % input.numel()).reshape(index.shape)


def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.put`."""
    if index.numel() == 0:
        return input.clone()
    flat, at, values = input.reshape(-1), index.reshape(-1) % input.numel(), source.reshape(-1)
    result = scatter_add(flat, 0, at, values) if accumulate else scatter(flat, 0, at, values)
    return result.reshape(input.shape)


def _along(x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `scatter` wants: of one number of dimensions, the places as many as the values."""
    if x.dim() == 0:
        x = x.reshape(1)
    if source.dim() == 0:
        source = source.reshape([1] * x.dim())
    if index.numel() != source.shape[dim] or source.dim() != x.dim():
        raise InvalidArgumentError(
            f"{index.numel()} places for values of shape {tuple(source.shape)} along dimension {dim} of a tensor of "
            f"shape {tuple(x.shape)}: there must be one place for each, and as many dimensions."
        )
    after = x.dim() - 1 - dim % x.dim()
    return x, index.long().reshape(-1, *[1] * after).expand(source.shape), source


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def stored(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - torch's name
        return input.copy_(function(input.clone(), *args, **kwargs))

    return stored


def roll(input: Tensor, shifts: Any, dims: Any = None) -> Tensor:  # noqa: A002 - torch's name
    """`torch.roll`, which of nothing would end the process."""
    if input.numel() == 0:
        return input.clone()
    return torch.roll(input, shifts) if dims is None else torch.roll(input, shifts, dims)


def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:  # noqa: A002
    """`torch.cumprod`, which of nothing fails when it is run."""
    result = input.to(dtype or input.dtype).clone() if input.numel() == 0 else torch.cumprod(input, dim, dtype=dtype)
    return result if out is None else out.copy_(result)


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:  # noqa: A002
    """`torch.cumsum`, which of a single number fails when it is run."""
    if input.dim() == 0:
        result = torch.cumsum(input.reshape(1), 0, dtype=dtype).reshape(())
    else:
        result = torch.cumsum(input, dim, dtype=dtype)
    return result if out is None else out.copy_(result)


def count_nonzero(input: Tensor, dim: Any = None) -> Tensor:  # noqa: A002 - torch's name
    """`torch.count_nonzero`."""
    counted = input != 0
    return counted.sum() if dim is None else counted.sum(dim)


def norm(
    input: Tensor,  # noqa: A002 - torch's name
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """`torch.norm`: of vectors but for the nuclear one."""
    if p == "nuc":
        raise UnsupportedError(
            f"the nuclear norm in a step (at {current_place()}): this strategy's compiler has no singular values."
        )
    order = 2.0 if p in (None, "fro") else float(p)
    result = torch.linalg.vector_norm(input, order, dim, keepdim, dtype=dtype)
    return result if out is None else out.copy_(result)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """`torch.cdist`. ``x1``: ``(…, P, M)``, ``x2``: ``(…, R, M)``."""
    if x1.dim() < 2 or x2.dim() < 2 or x1.shape[-1] != x2.shape[-1] or p < 0:
        return torch.cdist(x1, x2, p)  # raises
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.pdist`. ``input``: ``(N, M)``."""
    if input.dim() != 2 or p < 0:
        return torch.nn.functional.pdist(input, p)  # raises
    first, second = torch.triu_indices(input.shape[0], input.shape[0], 1, device="cpu").to(input.device)
    return _length(input.index_select(0, first) - input.index_select(0, second), p)


def _length(difference: Tensor, p: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(difference, p, dim=-1)
    return length + (difference * 0).sum(dim=-1) if p == 0 else length  # a gradient of 0 is one


def fill_diagonal_(input: Tensor, fill_value: complex, wrap: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.Tensor.fill_diagonal_`."""
    if input.dim() < 2 or (input.dim() > 2 and len(set(input.shape)) > 1):
        return input.fill_diagonal_(fill_value, wrap)  # raises
    rows, columns = input.shape[0], input.shape[-1]
    if input.dim() == 2:
        row, column = torch.arange(rows, device=input.device), torch.arange(columns, device=input.device)
        places = (row.unsqueeze(1) % (columns + 1) if wrap and rows > columns else row.unsqueeze(1)) == column
    else:
        steps = [torch.arange(rows, device=input.device).reshape(-1, *[1] * after) for after in range(input.dim())]
        places = torch.ones(input.shape, dtype=torch.bool, device=input.device)
        for one in steps[1:]:
            places = places & (one == steps[0])
    return input.copy_(torch.where(places, torch.full((), fill_value, dtype=input.dtype, device=input.device), input))


def eigh(A: Tensor, UPLO: str = "L", *, out: Any = None) -> Any:  # noqa: N803 - torch's names
    """`torch.linalg.eigh`, whose ``UPLO`` the compiler does not see."""
    return torch.linalg.eigh(_lower(A, UPLO), out=out)


def eigvalsh(A: Tensor, UPLO: str = "L", *, out: Any = None) -> Any:  # noqa: N803 - torch's names
    """`torch.linalg.eigvalsh`."""
    return torch.linalg.eigvalsh(_lower(A, UPLO), out=out)


def _lower(matrix: Tensor, which: str) -> Tensor:
    return matrix.mH if which in ("U", "u") else matrix


def as_strided(
    input: Tensor,  # noqa: A002 - torch's name
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    """`torch.as_strided` of a tensor that lies in memory as its shape says, which `Layouts` sees to."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for own, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(own, dtype=torch.int64, device="cpu") * step
    places = places + (storage_offset or 0)
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < input.numel():
        raise UnsupportedError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {storage_offset or 0}) reads outside of a tensor of "
            f"{input.numel()} values, at {current_place()}; on this strategy a tensor has no memory but its own."
        )
    return input.reshape(-1).index_select(0, places.reshape(-1).to(input.device)).reshape(tuple(size))


__all__ = ["functions"]
