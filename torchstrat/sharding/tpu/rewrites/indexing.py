"""Operations on places of a tensor, and on its memory, as what they mean: torch_xla 2.9 loses their gradients.

`scatter` of a single value is a comparison of places: this compiler ends the process where it cuts such a one.
`embedding_bag` is made of `embedding`, because ``vmap`` would run the original replica by replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.tpu.limits import current_place
from torchstrat.sharding.tpu.rewrites.elementwise import in_place, with_out

Tensor = torch.Tensor


def functions() -> dict[object, Callable[..., object]]:
    """The function of PyTorch → its replacement."""
    found: dict[object, Callable[..., object]] = {}
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
        found[getattr(torch.Tensor, name)] = in_place(replacement)
    found[Tensor.__setitem__] = set_item
    found[torch.linalg.eigh] = eigh
    found[torch.linalg.eigvalsh] = eigvalsh
    found[torch.pdist] = found[F.pdist] = pdist
    found[F.embedding_bag] = embedding_bag
    scatterings: dict[str, Callable[..., Tensor]]
    scatterings = {"scatter": scatter, "scatter_add": scatter_add, "scatter_reduce": scatter_reduce}
    for name, scattering in scatterings.items():
        found[getattr(torch, name)] = found[getattr(Tensor, name)] = scattering
        found[getattr(Tensor, f"{name}_")] = in_place(scattering)
    return found


def set_item(input: Tensor, index: object, value: object) -> None:
    """``input[mask] = value`` without a look at how many elements that are; other indices as they are."""
    if isinstance(index, Tensor) and index.dtype is torch.bool and 0 < index.dim() <= input.dim():
        behind = input.dim() - index.dim()
        if isinstance(value, int | float | complex) or (isinstance(value, Tensor) and value.dim() <= behind):
            input.copy_(torch.where(index.reshape(*index.shape, *[1] * behind), value, input))
            return
    input[index] = value  # type: ignore[index,assignment]


def scatter(input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, **rest: Any) -> Tensor:
    """`torch.scatter`."""
    given = value if src is None else src
    if index.numel() != 1 or rest.get("reduce") is not None:
        return torch.scatter(input, dim, index, given, **rest)
    return torch.where(_place(input, dim, index), _first(given, input), input)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """`torch.scatter_add`."""
    if index.numel() != 1:
        return torch.scatter_add(input, dim, index, src)
    return input + torch.where(_place(input, dim, index), _first(src, input), torch.zeros_like(input))


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`torch.scatter_reduce`."""
    if index.numel() != 1:
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    place, value = _place(input, dim, index), _first(src, input)
    reduced = _REDUCED[reduce](input, value) if include_self else value.expand_as(input)
    return torch.where(place, reduced, input)


_REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "mean": lambda one, other: (one + other) / 2 if one.is_floating_point() else (one + other) // 2,
    "amax": torch.maximum,
    "amin": torch.minimum,
}


def _place(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Of ``x``'s shape: True at the one place of ``index``, which has one entry."""
    here = torch.ones((), dtype=torch.bool, device=x.device)
    for at, size in enumerate(x.shape):
        places = torch.arange(size, device=x.device).reshape(-1, *[1] * (x.dim() - 1 - at))
        here = here & (places == (index.reshape(()) if at == dim % x.dim() else 0))
    return here if x.dim() else here | (index.reshape(()) == 0)


def _first(given: Any, x: Tensor) -> Tensor:
    """The value that goes there."""
    if isinstance(given, Tensor):
        return given.reshape(-1)[:1].reshape(()).to(x.dtype)
    return torch.full((), given, dtype=x.dtype, device=x.device)


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """`torch.select_scatter`."""
    size = input.shape[dim]
    if not -size <= index < size or src.shape != input.select(dim, 0).shape:
        return torch.select_scatter(input, src, dim, index)  # raises
    places = torch.arange(size, device=input.device)
    after = input.dim() - 1 - dim % input.dim()
    return torch.where(places.reshape(-1, *[1] * after) == index % size, src.unsqueeze(dim).to(input.dtype), input)


@with_out
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: complex = 1) -> Tensor:
    """`torch.index_add`. The compiler's own ends the process where there is one place to add to; so do the next."""
    x, at, values = _along(input, dim, index, source)
    return scatter_add(x, dim, at, (values * alpha).to(x.dtype)).reshape(input.shape)


@with_out
def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`torch.index_copy`."""
    x, at, values = _along(input, dim, index, source)
    return scatter(x, dim, at, values).reshape(input.shape)


@with_out
def index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`torch.index_reduce`."""
    x, at, values = _along(input, dim, index, source)
    return scatter_reduce(x, dim, at, values, reduce, include_self=include_self).reshape(input.shape)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`torch.index_fill`."""
    x = input.reshape(1) if input.dim() == 0 else input
    size = x.shape[dim]
    is_filled = (torch.arange(size, device=x.device) == index.reshape(-1, 1) % size).any(dim=0)
    after = x.dim() - 1 - dim % x.dim()
    given = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.where(is_filled.reshape(-1, *[1] * after), given, x).reshape(input.shape)


def take(input: Tensor, index: Tensor) -> Tensor:
    """`torch.take`."""
    return input.reshape(-1).index_select(0, index.reshape(-1) % input.numel()).reshape(index.shape)


def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
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
    wanted = list(x.shape)
    wanted[dim] = index.numel()
    if list(source.shape) != wanted:
        raise InvalidArgumentError(
            f"{index.numel()} places for values of shape {tuple(source.shape)} along dimension {dim} of a tensor of "
            f"shape {tuple(x.shape)}: the values must be of shape {tuple(wanted)}, one for each place."
        )
    after = x.dim() - 1 - dim % x.dim()
    return x, index.long().reshape(-1, *[1] * after).expand(source.shape), source


def roll(input: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """`torch.roll`, which of nothing would end the process."""
    if input.numel() == 0:
        return input.clone()
    return torch.roll(input, shifts) if dims is None else torch.roll(input, shifts, dims)


@with_out
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.cumprod`, which of nothing fails when it is run."""
    return input.to(dtype or input.dtype).clone() if input.numel() == 0 else torch.cumprod(input, dim, dtype=dtype)


@with_out
def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.cumsum`, which of a single number fails when it is run."""
    if input.dim() == 0:
        return torch.cumsum(input.reshape(1), 0, dtype=dtype).reshape(())
    return torch.cumsum(input, dim, dtype=dtype)


def count_nonzero(input: Tensor, dim: Any = None) -> Tensor:
    """`torch.count_nonzero`."""
    counted = input != 0
    return counted.sum() if dim is None else counted.sum(dim)


def norm(
    input: Tensor,
    p: Any = "fro",
    dim: object = None,
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


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: object = None) -> Tensor:
    """`torch.cdist`. ``x1``: ``(…, P, M)``, ``x2``: ``(…, R, M)``."""
    if x1.dim() < 2 or x2.dim() < 2 or x1.shape[-1] != x2.shape[-1] or p < 0:
        return torch.cdist(x1, x2, p)  # raises
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """`torch.nn.functional.pdist`. ``input``: ``(N, M)``."""
    if input.dim() != 2 or p < 0:
        return torch.nn.functional.pdist(input, p)  # raises
    first, second = torch.triu_indices(input.shape[0], input.shape[0], 1, device="cpu").to(input.device)
    return _length(input.index_select(0, first) - input.index_select(0, second), p)


def _length(difference: Tensor, p: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(difference, p, dim=-1)
    return length + (difference * 0).sum(dim=-1) if p == 0 else length  # a gradient of 0 is one


def fill_diagonal_(input: Tensor, fill_value: complex, wrap: bool = False) -> Tensor:
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


def eigh(A: Tensor, UPLO: str = "L", *, out: object = None) -> object:  # noqa: N803 - torch's names
    """`torch.linalg.eigh`, whose ``UPLO`` the compiler does not see."""
    return torch.linalg.eigh(_lower(A, UPLO), out=out)


def eigvalsh(A: Tensor, UPLO: str = "L", *, out: object = None) -> object:  # noqa: N803 - torch's names
    """`torch.linalg.eigvalsh`."""
    return torch.linalg.eigvalsh(_lower(A, UPLO), out=out)


def _lower(matrix: Tensor, which: str) -> Tensor:
    return matrix.mH if which in ("U", "u") else matrix


def as_strided(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
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


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.embedding_bag`. ``input``: ``(bags, ids)``, or ``(ids,)`` with ``offsets`` ``(bags,)``.

    The original is called, one replica after the other, for what does not take apart into plain tensor operations:
    ``max_norm`` (which changes ``weight``), ``scale_grad_by_freq``, ``sparse``, and maxima over bags of any length.
    """
    unusual = max_norm is not None or scale_grad_by_freq or sparse or (mode == "max" and offsets is not None)
    malformed = input.dim() != (2 if offsets is None else 1) or mode not in ("sum", "mean", "max")
    if per_sample_weights is not None:
        malformed = malformed or mode != "sum" or per_sample_weights.shape != input.shape
    if unusual or malformed:  # the latter raises
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input.long(), weight, padding_idx)  # (*input.shape, features)
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    kept = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    if mode == "max":
        largest = rows.masked_fill(~kept.unsqueeze(-1), float("-inf")).max(dim=1).values
        return torch.where(kept.any(dim=1).unsqueeze(-1), largest, 0)
    rows = rows.masked_fill(~kept.unsqueeze(-1), 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(dim=1), kept.sum(dim=1)
    else:
        total, count = _sums(offsets, include_last_offset, rows, kept)
    return total if mode == "sum" else total / count.clamp(min=1).to(total.dtype).unsqueeze(-1)


def _sums(
    offsets: torch.Tensor, include_last: bool, rows: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``(ids, features)`` and ``kept`` ``(ids,)`` summed per bag; a bag ends where the next one starts."""
    position = torch.arange(rows.shape[0], device=rows.device)
    bag = (position.unsqueeze(1) >= offsets).sum(dim=1) - 1
    bags = offsets.shape[0]
    total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
    count = kept.new_zeros(bags, dtype=torch.long).index_add(0, bag, kept.long())
    return (total[:-1], count[:-1]) if include_last else (total, count)
