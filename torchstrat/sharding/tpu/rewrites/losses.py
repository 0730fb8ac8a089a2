"""Losses without the operations that ``vmap`` runs replica by replica, or that torch_xla differentiates wrongly.

A class index picks its entry by comparing it with the numbers of all classes. ``gather`` would have every device
collect all classes where they are cut over devices, and its gradient is a scatter, which TPUs are slow at; a comparison
is fused into the sum over the classes and cut like it.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from torchstrat.core.errors import InvalidArgumentError


def cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
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
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
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
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> torch.Tensor:
    """`torch.nn.functional.smooth_l1_loss`, whose gradient for ``target`` has the wrong sign in torch_xla 2.9."""
    if input.shape != target.shape or beta <= 0:
        return F.smooth_l1_loss(input, target, size_average, reduce, reduction, beta)  # warns, raises or is l1_loss
    distance = (input - target).abs()
    loss = torch.where(distance < beta, distance.square() * (0.5 / beta), distance - 0.5 * beta)
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def kl_div(
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.kl_div`. ``input``: log-probabilities, ``target``: probabilities or their logarithms."""
    per_row = reduction == "batchmean" and size_average is None and reduce is None
    reduction = "sum" if per_row else _reduction(size_average, reduce, reduction)
    if log_target:
        loss = target.exp() * (target - input)
    else:
        loss = torch.xlogy(target, target) - target * input
    return loss.sum() / input.shape[0] if per_row else _reduced(loss, reduction)


def gaussian_nll_loss(
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, which looks for negative variances; here they make the loss NaN."""
    reduction = _reduction(None, None, reduction)
    spread = var if isinstance(var, torch.Tensor) else torch.full_like(input, var)
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


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _class_dim(scores: torch.Tensor) -> int:
    return 0 if scores.dim() == 1 else 1


def _along(per_class: torch.Tensor, dim: int, scores: torch.Tensor) -> torch.Tensor:
    """``(classes,)`` in the rank of ``scores``, with the classes at ``dim``."""
    return per_class.reshape(-1, *[1] * (scores.dim() - dim - 1))


def _is_class(target: torch.Tensor, scores: torch.Tensor, dim: int) -> torch.Tensor:
    """True where an entry of ``scores`` is that of its target's class."""
    classes = torch.arange(scores.shape[dim], device=scores.device)
    return target.unsqueeze(dim) == _along(classes, dim, scores)


def _total_weight(
    chosen: torch.Tensor, ignored: torch.Tensor, weight: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    """What a mean over the targets divides by."""
    if weight is None:
        return (~ignored).sum().to(scores.dtype)
    dim = _class_dim(scores)
    return torch.where(chosen & ~ignored.unsqueeze(dim), _along(weight, dim, scores), 0).sum()


def _check_target(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, dim: int) -> None:
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
