"""Functions of images and signals: convolutions in groups, pooling with unusual borders, interpolation, `torch.fft`.

Convolutions are rewritten for replicas of several logical devices only: where the rows are cut over some of the devices
and kept whole on the others, XLA's SPMD partitioner (torch_xla 2.9) sums the weight gradient of a convolution in groups
over all devices, and it comes out as many times too large as there are devices with the same rows. Without groups it is
right, and so it is without logical devices.

Average pooling with unusual borders, and its opposite for maxima, torch_xla 2.9 gets wrong or ends with. Interpolation
goes by the factor asked for, as PyTorch does (the compiler's own by the ratio of the sizes): linear, bilinear and
trilinear by products with each dimension's weights in the precision asked for, and of the nearest pixel.

Fourier transforms are products with matrices of cosines and sines. torch_xla 2.9 loses what surrounds its own: values
of an inverse transform of what was computed, and gradients of all of them. Products are right, and short enough
transforms are what a matrix unit does best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core._torch_private import unpooled_size
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.reduction import widen
from torchstrat.sharding.tpu.limits import current_place, refuse
from torchstrat.sharding.tpu.rewrites.elementwise import as_number

Tensor = torch.Tensor
Sizes = int | Sequence[int]


def convolutions() -> dict[object, Callable[..., Tensor]]:
    """The function of PyTorch → its replacement for replicas of several logical devices."""
    return {
        **{function: partial(_convolution, spatial) for spatial, function in _CONVOLUTIONS.items()},
        **{function: partial(_transposed_convolution, spatial) for spatial, function in _TRANSPOSED.items()},
    }


def functions() -> dict[object, Callable[..., object]]:
    """The function of PyTorch → its replacement."""
    average: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
    unpool: tuple[object, ...] = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
    return {
        **{function: partial(_average, function, spatial) for spatial, function in enumerate(average, 1)},
        torch.avg_pool1d: partial(_average, F.avg_pool1d, 1),
        **{function: partial(_unpool, spatial) for spatial, function in enumerate(unpool, 1)},
        F.interpolate: interpolate,
        F.upsample: upsample,
        F.upsample_bilinear: upsample_bilinear,
    }


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def _convolution(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """``input``: ``([rows,] channels, …)``, ``weight``: ``(outputs, channels / groups, …)``.

    A sum over the places of the kernel, of the input moved to there times the weights of that place.
    """
    if groups == 1 or not _fits(spatial, input, weight, bias, groups):  # the latter raises
        return _CONVOLUTIONS[spatial](input, weight, bias, stride, padding, dilation, groups)
    if input.dim() == spatial + 1:
        whole = input.unsqueeze(0)
        return _convolution(spatial, whole, weight, bias, stride, padding, dilation, groups).squeeze(0)
    kernel = weight.shape[2:]
    strides, dilations = _per_dim(stride, spatial), _per_dim(dilation, spatial)
    reach = [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]
    padded = F.pad(input, _margins(padding, reach))
    outputs = [(size - far - 1) // s + 1 for size, far, s in zip(padded.shape[2:], reach, strides, strict=True)]
    wide = torch.float32 if input.dtype in (torch.bfloat16, torch.float16) else input.dtype
    x = padded.to(wide).unflatten(1, (groups, -1))
    w = weight.to(wide).unflatten(0, (groups, -1))  # (groups, outputs / groups, channels / groups, *kernel)
    y: Tensor | None = None
    for place in itertools.product(*map(range, kernel)):
        window: list[object] = [Ellipsis]
        for at, d, s, size in zip(place, dilations, strides, outputs, strict=True):
            window.append(slice(at * d, at * d + (size - 1) * s + 1, s))
        here: tuple[object, ...] = (*[slice(None)] * 3, *place)
        term = torch.einsum("ngc...,goc->ngo...", x[tuple(window)], w[here])
        y = term if y is None else y + term
    assert y is not None
    y = y.flatten(1, 2)
    return (y if bias is None else y + bias.to(wide).reshape(-1, *[1] * spatial)).to(input.dtype)


def _transposed_convolution(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """``input``: ``([rows,] channels, …)``, ``weight``: ``(channels, outputs / groups, …)``. Group by group."""
    original = _TRANSPOSED[spatial]
    if groups == 1 or weight.shape[0] % groups or input.shape[-spatial - 1] != weight.shape[0]:  # the latter raise
        return original(input, weight, bias, stride, padding, output_padding, groups, dilation)
    inputs, weights = input.chunk(groups, dim=-spatial - 1), weight.chunk(groups, dim=0)
    biases: Any = [None] * groups if bias is None else bias.chunk(groups)
    parts = [
        original(x, w, b, stride, padding, output_padding, 1, dilation)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    ]
    return torch.cat(parts, dim=-spatial - 1)


def _fits(spatial: int, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> bool:
    return (
        x.dim() in (spatial + 1, spatial + 2)
        and weight.dim() == spatial + 2
        and groups > 0
        and weight.shape[0] % groups == 0
        and x.shape[-spatial - 1] == weight.shape[1] * groups
        and (bias is None or bias.shape == (weight.shape[0],))
    )


def _per_dim(sizes: Sizes, spatial: int) -> list[int]:
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return given * spatial if len(given) == 1 else given


def _margins(padding: Sizes | str, reach: list[int]) -> list[int]:
    """What `torch.nn.functional.pad` is given: before and after, from the last dimension to the first."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        before = [far // 2 for far in reach]
        after = [far - own for far, own in zip(reach, before, strict=True)]
    else:
        assert not isinstance(padding, str)
        before = after = _per_dim(padding, len(reach))
    pairs = list(zip(before, after, strict=True))
    return [margin for pair in reversed(pairs) for margin in pair]


def _average(
    original: Callable[..., Tensor],
    spatial: int,
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """A sum over the places of the kernel. With usual borders the original, which is right."""
    rest = () if divisor_override is None else (divisor_override,)
    kernel, margins = _per_dim(kernel_size, spatial), _per_dim(padding, spatial)
    strides = kernel if stride is None or stride == () else _per_dim(stride, spatial)
    sizes = input.shape[-spatial:]
    usual = not ceil_mode and divisor_override is None and (count_include_pad or not any(margins))
    malformed = input.dim() not in (spatial + 1, spatial + 2) or any(
        2 * m > k for m, k in zip(margins, kernel, strict=True)
    )
    if usual or malformed or divisor_override == 0:  # the latter raise
        return original(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *rest)
    outputs, pads, counts = [], [], []
    for size, k, s, m in zip(sizes, kernel, strides, margins, strict=True):
        steps = (size + 2 * m - k) / s
        many = (math.ceil(steps) if ceil_mode else math.floor(steps)) + 1
        if ceil_mode and (many - 1) * s >= size + m:
            many -= 1  # the last one would begin behind the margin
        outputs.append(many)
        pads.append((m, max(0, (many - 1) * s + k - size - m)))
        starts = [at * s - m for at in range(many)]
        whole = [min(start + k, size + m) - start for start in starts]
        inside = [min(start + k, size) - max(start, 0) for start in starts]
        counts.append(whole if count_include_pad else inside)
    padded = F.pad(widen(input), [one for pair in reversed(pads) for one in pair])
    total: Tensor | None = None
    for place in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(at, at + (many - 1) * s + 1, s) for at, many, s in zip(place, outputs, strides, strict=True)
        )
        places: tuple[Any, ...] = (Ellipsis, *window)
        here = padded[places]
        total = here if total is None else total + here
    assert total is not None
    if divisor_override is not None:
        return (total / divisor_override).to(input.dtype)
    for dim, own in enumerate(counts):
        shape = [-1 if at == dim else 1 for at in range(spatial)]
        total = total / torch.tensor(own, dtype=total.dtype).to(total.device).reshape(shape)
    return total.to(input.dtype)


def _unpool(
    spatial: int,
    input: Tensor,
    indices: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """A comparison of places for each value, whose gradient is a sum."""
    kernel, margins = _per_dim(kernel_size, spatial), _per_dim(padding, spatial)
    strides = kernel if stride is None else _per_dim(stride, spatial)
    sizes = unpooled_size(input, kernel, strides, margins, output_size)
    values, at = input.flatten(-spatial), indices.flatten(-spatial)
    places = torch.arange(math.prod(sizes), device=input.device)
    chosen = at.unsqueeze(-1) == places
    # Of equal places the last value is kept, as on the host.
    order = torch.arange(1, at.shape[-1] + 1, device=input.device).unsqueeze(-1)
    last = (chosen * order).amax(dim=-2, keepdim=True)
    kept = chosen & (order == last)
    spread = values.unsqueeze(-1)
    result = torch.where(kept, spread.detach(), 0).sum(dim=-2)
    # Every value has the gradient of its place, whether it is seen there or not.
    through = torch.where(chosen, spread - spread.detach(), 0).sum(dim=-2)
    unpooled: Tensor = (result + through).unflatten(-1, list(sizes))
    return unpooled


_LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}
"""Modes and the number of dimensions that they are for."""


def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`torch.nn.functional.interpolate`."""
    rank = input.dim() - 2
    is_plain = align_corners is None if mode == "nearest" else _LINEAR.get(mode) == rank
    is_ours = is_plain and not antialias
    if not is_ours or (size is None) == (scale_factor is None) or (size is not None and recompute_scale_factor):
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    factors: list[float | None] = [None] * rank
    if scale_factor is None:
        assert size is not None
        sizes = [size] * rank if isinstance(size, int) else list(size)
    else:
        given = [scale_factor] * rank if isinstance(scale_factor, int | float) else list(scale_factor)
        sizes = [math.floor(float(own * factor)) for own, factor in zip(input.shape[2:], given, strict=True)]
        factors = list(given) if not recompute_scale_factor else factors
    if mode == "nearest":
        is_small = rank == 2 and sum(sizes) <= _SMALL_IMAGE
        for dim, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 2):
            input = _nearest(input, dim, wanted, factor, is_small)  # noqa: A001
        return input
    if not input.is_floating_point():
        refuse(
            f"interpolate of {input.dtype}", f"Write F.interpolate(x.float(), …, mode={mode!r}).round().to(x.dtype)."
        )()
    x = widen(input)
    for dim, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        weights = _weights(int(input.shape[dim]), wanted, factor, bool(align_corners)).to(x.dtype).to(x.device)
        x = (x.movedim(dim, -1) @ weights.t()).movedim(-1, dim)
    return x.to(input.dtype)


def upsample_bilinear(
    input: Tensor, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None
) -> Tensor:
    """`torch.nn.functional.upsample_bilinear`."""
    return interpolate(input, size, scale_factor, mode="bilinear", align_corners=True)


def upsample(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """`torch.nn.functional.upsample`."""
    return interpolate(input, size, scale_factor, mode, align_corners)


def _weights(inputs: int, outputs: int, factor: float | None, align_corners: bool) -> Tensor:
    """``[outputs, inputs]``, on the host in double precision."""
    if inputs == outputs:  # whatever the factor is
        return torch.eye(inputs, dtype=torch.float64, device="cpu")
    weights = [[0.0] * inputs for _ in range(outputs)]
    if align_corners:
        step = (inputs - 1) / (outputs - 1) if outputs > 1 else 0.0
    else:
        step = 1.0 / factor if factor else inputs / outputs
    for place, row in enumerate(weights):
        at = step * place if align_corners else max(0.0, step * (place + 0.5) - 0.5)
        low = min(int(at), inputs - 1)
        high = min(low + 1, inputs - 1)
        share = min(max(at - low, 0.0), 1.0)
        row[low] += 1.0 - share
        row[high] += share
    return torch.tensor(weights, dtype=torch.float64, device="cpu").reshape(outputs, inputs)


_SMALL_IMAGE = 128
"""Rows and columns of an image for which PyTorch has code of its own."""


def _nearest(x: Tensor, dim: int, outputs: int, factor: float | None, is_small: bool) -> Tensor:
    """Along one dimension."""
    inputs = int(x.shape[dim])
    places, places_of_gradient = _nearest_places(inputs, outputs, factor)
    through = x.index_select(dim, places_of_gradient.to(x.device))
    if is_small or torch.equal(places, places_of_gradient):
        return through
    return x.detach().index_select(dim, places.to(x.device)) + (through - through.detach())


def _nearest_places(inputs: int, outputs: int, factor: float | None) -> tuple[Tensor, Tensor]:
    """Which pixel each one takes, on the host, in the single precision in which PyTorch computes it; and which one it
    hands its gradient to: there PyTorch goes by the sizes if one is the other or twice as much, in small images always.
    """
    places = torch.arange(outputs, device="cpu")
    step = 1.0 / factor if factor else inputs / outputs
    at = places.to(torch.float32) * torch.tensor(step, dtype=torch.float32, device="cpu")
    looked_up = at.floor().long().clamp(max=inputs - 1)
    if outputs in (inputs, 2 * inputs):
        return looked_up, places // (outputs // inputs)
    return looked_up, looked_up


_FRAMES = "Cut the signal with x.unfold(-1, length, hop), multiply with the window and use torch.fft."
LONGEST = 4096
"""Of transforms: the matrices have the square of it."""

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
