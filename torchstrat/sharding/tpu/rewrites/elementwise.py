"""Elementwise functions, activations and losses that torch_xla 2.9 gets wrong, or that ``vmap`` has no rule for.

It keeps constants in single precision and shifts signs away; its gradients of the ELU family are others; and ``prelu``
fails under ``vmap``, as cells of recurrent layers do.

In losses a class index picks its entry by comparing it with the numbers of all classes. ``gather`` would have every
device collect all classes where they are cut over devices, and its gradient is a scatter, which TPUs are slow at; a
comparison is fused into the sum over the classes and cut like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.reduction import widen

Tensor = torch.Tensor
_TENSOR: Any = torch.Tensor


def functions() -> dict[Any, Callable[..., Tensor]]:
    """The function of PyTorch → its replacement."""
    found: dict[object, Callable[..., Tensor]] = {}
    for name, base in (("log2", 2.0), ("log10", 10.0)):
        plain, stored = _logarithm(math.log(base)), getattr(Tensor, f"{name}_")
        found |= {getattr(torch, name): plain, getattr(Tensor, name): plain, stored: in_place(plain)}
    for owner in (torch, Tensor):
        found[owner.logit] = logit
    found[torch.special.logit] = logit
    found[torch.threshold] = threshold
    found[torch.threshold_] = in_place(threshold)
    for name in ("pow", "float_power", "hypot", "cumprod"):  # whose gradients need what was there
        found[getattr(Tensor, f"{name}_")] = in_place(getattr(torch, name))
    found[_TENSOR.__ipow__] = in_place(torch.pow)
    for shift in (torch.bitwise_right_shift, Tensor.bitwise_right_shift, _TENSOR.__rshift__):
        found[shift] = right_shift
    for shift in (Tensor.bitwise_right_shift_, _TENSOR.__irshift__):
        found[shift] = in_place(right_shift)
    found[_TENSOR.__rrshift__] = lambda by, other: right_shift(torch.as_tensor(other, device=by.device), by)
    found[Tensor.logit_] = in_place(logit)
    return {**found, **_ACTIVATIONS}


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In place of a copy: the gradient needs what was there."""

    def stored(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        return input.copy_(function(input.clone(), *args, **kwargs))

    return stored


def with_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, which also takes ``out=``."""

    def stored(*args: object, out: Tensor | None = None, **kwargs: object) -> Tensor:
        result = function(*args, **kwargs)
        return result if out is None else out.copy_(result)

    return stored


def as_number(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _logarithm(divisor: float) -> Callable[..., Tensor]:
    @with_out
    def logarithm(input: Tensor) -> Tensor:
        x = as_number(input)
        return (torch.log(widen(x)) / divisor).to(x.dtype)

    return logarithm


@with_out
def right_shift(input: object, other: Any) -> Tensor:
    """`torch.bitwise_right_shift`; this compiler shifts the sign away."""
    x = input if isinstance(input, Tensor) else torch.as_tensor(input, device=other.device)
    if x.is_floating_point():
        return torch.bitwise_right_shift(x, other)
    return torch.where(x < 0, ~torch.bitwise_right_shift(~x, other), torch.bitwise_right_shift(x, other))


@with_out
def logit(input: Tensor, eps: float | None = None) -> Tensor:
    """`torch.logit`. Outside of ``[eps, 1 - eps]`` there is no gradient."""
    x = as_number(input)
    wide = widen(x)
    if eps is not None:
        wide = wide.clamp(min=eps, max=1.0 - eps)
    return (torch.log(wide) - torch.log(1.0 - wide)).to(x.dtype)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.relu`. The compiler refuses the original's gradient of several losses at once, which
    `torch.autograd.grad` of each replica's own is."""
    return _store(input, inplace, lambda x: x.masked_fill(x <= 0, 0))  # NaN stays, and passes gradients on


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.hardsigmoid`."""
    x = input.clone() if inplace else input
    result = (widen(x).add(3.0).clamp(min=0.0, max=6.0) / 6.0).to(x.dtype)
    # At the corners the original has no gradient, and that of clamp is 1.
    inside = (x > -3.0) & (x < 3.0)
    result = torch.where(inside, result, result.detach())
    return input.copy_(result) if inplace else result


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.hardswish`."""
    x = input.clone() if inplace else input
    wide = widen(x)
    result = torch.where(wide <= -3.0, 0.0 * wide, torch.where(wide < 3.0, wide * (wide + 3.0) / 6.0, wide)).to(x.dtype)
    return input.copy_(result) if inplace else result


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.threshold`."""
    x = input.clone() if inplace else input
    result = torch.where(x <= threshold, torch.full((), value, dtype=x.dtype, device=x.device), x)  # NaN stays
    return input.copy_(result) if inplace else result


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """`torch.nn.functional.gelu`."""
    x = widen(input)
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return (0.5 * x * (1.0 + torch.tanh(inner))).to(input.dtype)
    if approximate != "none":
        return F.gelu(input, approximate=approximate)  # raises
    return (0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))).to(input.dtype)


_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.elu`."""
    return _store(input, inplace, lambda x: _elu(x, alpha, 1.0, 1.0))


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.celu`."""
    return _store(input, inplace, lambda x: _elu(x, alpha, 1.0, 1.0 / alpha))


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.selu`."""
    return _store(input, inplace, lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE, 1.0))


def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.rrelu`."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slope = lower + (upper - lower) * torch.rand_like(input)
    return _store(input, inplace, lambda x: torch.where(x < 0, slope * x, x))


def gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """`torch.nn.functional.gumbel_softmax`."""
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    places = torch.arange(soft.shape[dim], device=soft.device)
    after = soft.dim() - 1 - dim % soft.dim()
    chosen = places.reshape(-1, *[1] * after) == soft.argmax(dim, keepdim=True)
    return chosen.to(soft.dtype) - soft.detach() + soft


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.prelu`. ``weight``: one slope, or ``(channels,)`` for an input ``(rows, channels, …)``."""
    if weight.numel() != 1 and (input.dim() < 2 or weight.shape != (input.shape[1],)):
        return torch.prelu(input, weight)  # raises
    slope = weight.reshape(()) if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slope * input)


_ACTIVATIONS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), partial(relu, inplace=True)),
    F.hardsigmoid: hardsigmoid,
    F.hardswish: hardswish,
    F.threshold: threshold,
    F.gelu: gelu,
    F.gumbel_softmax: gumbel_softmax,
    F.elu: elu,
    F.elu_: partial(elu, inplace=True),
    **dict.fromkeys((F.celu, torch.celu), celu),
    torch.celu_: partial(celu, inplace=True),
    **dict.fromkeys((F.selu, torch.selu), selu),
    torch.selu_: partial(selu, inplace=True),
    **dict.fromkeys((F.rrelu, torch.rrelu), rrelu),
    torch.rrelu_: partial(rrelu, inplace=True),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), prelu),
}


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    positive = wide > 0
    # Filled, since the gradient of a branch that is not taken is multiplied by 0, and may not be infinite. Not clamped:
    # at 0 itself clamp's gradient is 1 up to torch 2.13 and 0 in 2.15; the original's is that of the negative branch.
    negative = (scale * alpha) * torch.expm1(wide.masked_fill(positive, 0) * input_scale)
    return torch.where(positive, scale * wide, negative).to(x.dtype)


def _store(x: Tensor, inplace: bool, function: Callable[[Tensor], Tensor]) -> Tensor:
    return in_place(function)(x) if inplace else function(x)


# -- cells of recurrent layers -------------------------------------------------------------------------------------


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch.lstm_cell`, of `torch.nn.LSTMCell`. ``input``: ``(rows, inputs)``, ``hx``: two of ``(rows, hidden)``."""
    hidden, cell = hx
    gates = F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)
    into, forget, new, out = gates.chunk(4, dim=-1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """`torch.gru_cell`, of `torch.nn.GRUCell`. ``input``: ``(rows, inputs)``, ``hx``: ``(rows, hidden)``."""
    from_input = F.linear(input, w_ih, b_ih).chunk(3, dim=-1)
    from_hidden = F.linear(hx, w_hh, b_hh).chunk(3, dim=-1)
    reset, keep = ((ours + theirs).sigmoid() for ours, theirs in zip(from_input[:2], from_hidden[:2], strict=True))
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    return new + keep * (hx - new)


def rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """`torch.rnn_tanh_cell` or `torch.rnn_relu_cell`, of `torch.nn.RNNCell`."""

    def cell(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


# -- losses --------------------------------------------------------------------------------------------------------


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`. ``input``: ``(classes,)`` or ``(rows, classes, …)`` logits.

    ``target``: class indices, without the dimension of the classes, or probabilities of the shape of ``input``. An
    index that is no class makes the loss NaN: the number is not known yet when the step is recorded.
    """
    if input.shape == target.shape or not 0.0 <= label_smoothing <= 1.0:  # has no operation of the wrong kind; raises
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing=label_smoothing
        )
    reduction = _reduction(size_average, reduce, reduction)
    dim = _class_dim(input)
    log_probabilities = F.log_softmax(input, dim)
    loss = nll_loss(log_probabilities, target, weight, None, ignore_index, None, reduction)
    if label_smoothing == 0.0:
        return loss
    ignored = target == ignore_index
    even = -(log_probabilities if weight is None else log_probabilities * _along(weight, dim, input)).sum(dim)
    even = even.masked_fill(ignored, 0)
    if reduction == "sum":
        even = even.sum()
    elif reduction == "mean":
        even = even.sum() / _total_weight(_is_class(target, input, dim), ignored, weight, input)
    return (1 - label_smoothing) * loss + label_smoothing / input.shape[dim] * even


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.nll_loss`. ``input``: ``(classes,)`` or ``(rows, classes, …)`` log-probabilities.

    ``target``: class indices, without the dimension of the classes. An index that is no class makes the loss NaN.
    """
    reduction = _reduction(size_average, reduce, reduction)
    dim = _class_dim(input)
    _check_target(input, target, weight, dim)
    chosen, ignored = _is_class(target, input, dim), target == ignore_index
    scores = input if weight is None else input * _along(weight, dim, input)
    # Not a product with 0 and 1: an impossible class has the log-probability -inf.
    loss = -torch.where(chosen, scores, 0).sum(dim)
    known = (target >= 0) & (target < input.shape[dim])
    loss = torch.where(known, loss, float("nan")).masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / _total_weight(chosen, ignored, weight, input)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """`torch.nn.functional.smooth_l1_loss`, whose gradient for ``target`` has the wrong sign in torch_xla 2.9."""
    if input.shape != target.shape or beta <= 0:
        return F.smooth_l1_loss(input, target, size_average, reduce, reduction, beta)  # warns, raises or is l1_loss
    distance = (input - target).abs()
    loss = torch.where(distance < beta, distance.square() * (0.5 / beta), distance - 0.5 * beta)
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """`torch.nn.functional.kl_div`. ``input``: log-probabilities, ``target``: probabilities or their logarithms."""
    per_row = reduction == "batchmean" and size_average is None and reduce is None
    reduction = "sum" if per_row else _reduction(size_average, reduce, reduction)
    if log_target:
        loss = target.exp() * (target - input)
    else:
        loss = torch.xlogy(target, target) - target * input
    return loss.sum() / input.shape[0] if per_row else _reduced(loss, reduction)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, which looks for negative variances; here they make the loss NaN."""
    reduction = _reduction(None, None, reduction)
    spread = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if spread.shape == input.shape[:-1]:
        spread = spread.unsqueeze(-1)
    elif spread.dim() != input.dim() or any(
        own not in (1, wanted) for own, wanted in zip(spread.shape, input.shape, strict=True)
    ):
        raise InvalidArgumentError(
            f"var has shape {tuple(spread.shape)}; an input of shape {tuple(input.shape)} needs the same shape, or one "
            "with a dimension of 1 or without the last dimension."
        )
    clamped = spread + (spread.clamp(min=eps) - spread).detach()  # the gradient passes the clamp, as in the original
    loss = 0.5 * (torch.log(clamped) + (input - target).square() / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(torch.where(spread < 0, float("nan"), loss), reduction)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The first two are what older programs say instead of the third."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum"):
        raise InvalidArgumentError(f"reduction={reduction!r} is none of 'none', 'mean' and 'sum'.")
    return reduction


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _class_dim(scores: Tensor) -> int:
    return 0 if scores.dim() == 1 else 1


def _along(per_class: Tensor, dim: int, scores: Tensor) -> Tensor:
    """``(classes,)`` in the rank of ``scores``, with the classes at ``dim``."""
    return per_class.reshape(-1, *[1] * (scores.dim() - dim - 1))


def _is_class(target: Tensor, scores: Tensor, dim: int) -> Tensor:
    """True where an entry of ``scores`` is that of its target's class."""
    classes = torch.arange(scores.shape[dim], device=scores.device)
    return target.unsqueeze(dim) == _along(classes, dim, scores)


def _total_weight(chosen: Tensor, ignored: Tensor, weight: Tensor | None, scores: Tensor) -> Tensor:
    """What a mean over the targets divides by."""
    if weight is None:
        return (~ignored).sum().to(scores.dtype)
    dim = _class_dim(scores)
    return torch.where(chosen & ~ignored.unsqueeze(dim), _along(weight, dim, scores), 0).sum()


def _check_target(scores: Tensor, target: Tensor, weight: Tensor | None, dim: int) -> None:
    wanted = (*scores.shape[:dim], *scores.shape[dim + 1 :])
    if scores.dim() == 0 or target.shape != wanted:
        raise InvalidArgumentError(
            f"target has shape {tuple(target.shape)}; scores of shape {tuple(scores.shape)} with the classes in "
            f"dimension {dim} need a target of shape {tuple(wanted)}."
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise InvalidArgumentError(f"target holds class indices and must be an integer tensor; got {target.dtype}.")
    if weight is not None and weight.shape != (scores.shape[dim],):
        raise InvalidArgumentError(
            f"weight has shape {tuple(weight.shape)}; it needs one value for each of the {scores.shape[dim]} classes."
        )
