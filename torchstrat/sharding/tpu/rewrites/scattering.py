"""`scatter` of a single value, by a comparison of places: this compiler ends the process where it cuts such a one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def functions() -> dict[Any, Callable[..., Any]]:
    """The function of PyTorch → its replacement."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, replacement in (("scatter", scatter), ("scatter_add", scatter_add), ("scatter_reduce", scatter_reduce)):
        found[getattr(torch, name)] = found[getattr(Tensor, name)] = replacement
        found[getattr(Tensor, f"{name}_")] = _in_place(replacement)
    return found


def scatter(input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, **rest: Any) -> Tensor:  # noqa: A002
    """`torch.scatter`."""
    given = value if src is None else src
    if index.numel() != 1 or rest.get("reduce") is not None:
        return torch.scatter(input, dim, index, given, **rest)
    return torch.where(_place(input, dim, index), _first(given, input), input)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002 - torch's name
    """`torch.scatter_add`."""
    if index.numel() != 1:
        return torch.scatter_add(input, dim, index, src)
    return input + torch.where(_place(input, dim, index), _first(src, input), torch.zeros_like(input))


def scatter_reduce(
    input: Tensor,  # noqa: A002 - torch's name
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
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


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def stored(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - torch's name
        return input.copy_(function(input.clone(), *args, **kwargs))

    return stored


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
