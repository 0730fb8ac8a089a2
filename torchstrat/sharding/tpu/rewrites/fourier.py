"""`torch.fft` by products with matrices of cosines and sines.

torch_xla 2.9 loses what surrounds its own transforms: values of an inverse transform of what was computed, and
gradients of all of them. Products are right, and short enough transforms are what a matrix unit does best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.tpu.limits import current_place, refuse
from torchstrat.sharding.tpu.rewrites.elementwise import as_number

_FRAMES = "Cut the signal with x.unfold(-1, length, hop), multiply with the window and use torch.fft."
LONGEST = 4096
"""Of transforms: the matrices have the square of it."""

Tensor = torch.Tensor
Function = Callable[..., Tensor]


def transforms() -> dict[Any, Function]:
    """The function of `torch.fft` → its replacement."""
    own = torch.fft
    return {
        own.fft: _one(_complex(-1.0)),
        own.ifft: _one(_complex(1.0)),
        own.rfft: _one(_rfft),
        own.irfft: _one(_irfft),
        own.hfft: _one(_hfft),
        own.ihfft: _one(_ihfft),
        own.fft2: _several(_complex(-1.0), _complex(-1.0), planes=True),
        own.ifft2: _several(_complex(1.0), _complex(1.0), planes=True),
        own.rfft2: _several(_complex(-1.0), _rfft, planes=True),
        own.irfft2: _several(_complex(1.0), _irfft, planes=True, last_first=False),
        own.hfft2: _several(_complex(-1.0), _hfft, planes=True, last_first=False),
        own.ihfft2: _several(_complex(1.0), _ihfft, planes=True),
        own.fftn: _several(_complex(-1.0), _complex(-1.0)),
        own.ifftn: _several(_complex(1.0), _complex(1.0)),
        own.rfftn: _several(_complex(-1.0), _rfft),
        own.irfftn: _several(_complex(1.0), _irfft, last_first=False),
        own.hfftn: _several(_complex(-1.0), _hfft, last_first=False),
        own.ihfftn: _several(_complex(1.0), _ihfft),
        **dict.fromkeys((torch.stft, Tensor.stft), refuse("stft", _FRAMES)),
        **dict.fromkeys((torch.istft, Tensor.istft), refuse("istft", _FRAMES)),
    }


_Along = Callable[[Tensor, int | None, int, str | None], Tensor]
"""``(input, n, dim, norm)``: one transform along one dimension."""


def _one(along: _Along) -> Function:
    def transform(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
        return along(as_number(input), n, dim, norm)

    return transform


def _several(others: _Along, last: _Along, *, planes: bool = False, last_first: bool = True) -> Function:
    """Along several dimensions. ``last``: along the last one; ``last_first``: before the others."""

    def transform(
        input: Tensor,
        s: Sequence[int] | int | None = None,
        dim: Sequence[int] | int | None = (-2, -1) if planes else None,
        norm: str | None = None,
    ) -> Tensor:
        x = as_number(input)
        sizes = None if s is None else [s] if isinstance(s, int) else list(s)
        if dim is None:
            dims = list(range(x.dim())) if sizes is None else list(range(x.dim() - len(sizes), x.dim()))
        else:
            dims = [dim] if isinstance(dim, int) else list(dim)
        given = [None] * len(dims) if sizes is None else [None if one == -1 else one for one in sizes]
        lengths: list[int | None] = list(given)
        steps = [(others, length, at) for length, at in zip(lengths[:-1], dims[:-1], strict=True)]
        final = (last, lengths[-1], dims[-1])
        for along, length, at in [final, *steps] if last_first else [*steps, final]:
            x = along(x, length, at, norm)
        return x

    return transform


def _factor(norm: str | None, n: int, *, is_forward: bool) -> float:
    if norm not in (None, "backward", "ortho", "forward"):
        raise InvalidArgumentError(f"norm={norm!r} is none of 'forward', 'backward' and 'ortho'.")
    if norm == "ortho":
        return 1.0 / math.sqrt(n)
    return 1.0 / n if (norm == "forward") == is_forward else 1.0


def _fitted(x: Tensor, n: int, dim: int) -> Tensor:
    """``[…, n]``: cut or filled up with zeros along ``dim``, which is the last then."""
    x = x.movedim(dim, -1)
    if x.shape[-1] >= n:
        return x[..., :n]
    return torch.cat([x, torch.zeros((*x.shape[:-1], n - x.shape[-1]), dtype=x.dtype, device=x.device)], dim=-1)


def _waves(rows: int, columns: int, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``2 π row column / n``, each ``[rows, columns]``."""
    if n < 1:
        raise InvalidArgumentError(f"a transform of {n} values; there must be at least one.")
    if n > LONGEST:
        raise UnsupportedError(
            f"a Fourier transform of {n} values in a step: on this strategy it is a product with a matrix, and "
            f"{LONGEST} values are the most. It is at {current_place()}. Transform shorter pieces, or outside of the "
            "step."
        )
    row, column = torch.arange(rows, device=like.device), torch.arange(columns, device=like.device)
    # Of whole turns nothing is left: products of large numbers would lose the digits that count.
    part = (row.unsqueeze(1) * column) % n
    angle = part.to(like.dtype) * (2.0 * math.pi / n)
    # Of half turns it is 0, and sin(π) is not: optimizers that go by signs would step by what is no gradient.
    sine = torch.where(2 * part % n == 0, torch.zeros_like(angle), torch.sin(angle))
    return torch.cos(angle), sine


def _parts(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return (x.real, x.resolve_conj().imag) if x.is_complex() else (x, None)


def _complex(sign: float) -> _Along:
    def along(x: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
        length = x.shape[dim] if n is None else n
        re, im = _parts(x)
        scale = _factor(norm, length, is_forward=sign < 0)
        re = _fitted(re, length, dim)
        cosine, sine = _waves(length, length, length, re)
        sine = sine * sign
        out_re, out_im = re @ cosine, re @ sine
        if im is not None:
            im = _fitted(im, length, dim)
            out_re, out_im = out_re - im @ sine, out_im + im @ cosine
        return torch.complex((out_re * scale).contiguous(), (out_im * scale).contiguous()).movedim(-1, dim)

    return along


def _half(x: Tensor, n: int | None, dim: int, sign: float, scale_of: Callable[[int], float]) -> Tensor:
    """Of real values, the half of the result that determines the rest."""
    if x.is_complex():
        raise InvalidArgumentError(f"this transform is of real values; got {x.dtype}.")
    length = x.shape[dim] if n is None else n
    x = _fitted(x, length, dim)
    cosine, sine = _waves(length, length // 2 + 1, length, x)
    scale = scale_of(length)
    return torch.complex(x @ cosine * scale, x @ (sine * sign) * scale).movedim(-1, dim)


def _rfft(x: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
    return _half(x, n, dim, -1.0, lambda length: _factor(norm, length, is_forward=True))


def _ihfft(x: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
    return _half(x, n, dim, 1.0, lambda length: _factor(norm, length, is_forward=False))


def _real(x: Tensor, n: int | None, dim: int, sign: float, scale_of: Callable[[int], float]) -> Tensor:
    """Real values from the half that determines them."""
    length = 2 * (x.shape[dim] - 1) if n is None else n
    re, im = _parts(x)
    half = length // 2 + 1
    re = _fitted(re, half, dim)
    cosine, sine = _waves(half, length, length, re)
    twice = torch.full((half, 1), 2.0, dtype=re.dtype, device=re.device)
    position = torch.arange(half, device=re.device).unsqueeze(1)
    alone = (position == 0) | (2 * position == length)
    times = torch.where(alone, torch.ones_like(twice), twice) * scale_of(length)
    result = re @ (cosine * times)
    if im is not None:
        ends = torch.where(alone, torch.zeros_like(twice), times)
        result = result - _fitted(im, half, dim) @ (sine * ends * sign)
    return result.movedim(-1, dim)


def _irfft(x: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
    return _real(x, n, dim, 1.0, lambda length: _factor(norm, length, is_forward=False))


def _hfft(x: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
    return _real(x, n, dim, -1.0, lambda length: _factor(norm, length, is_forward=True))
