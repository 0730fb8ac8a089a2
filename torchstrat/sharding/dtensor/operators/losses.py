"""Losses: cross entropy, whose classes or examples are cut, and those that compare element by element.

Softmax and its logarithm, also over a dimension that is cut: then maxima and sums are put together.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchstrat.core.reduction import widen
from torchstrat.sharding.dtensor.cut_tensors import shape_of
from torchstrat.sharding.dtensor.operators.contraction import agree_on_labels, cut_by_labels
from torchstrat.sharding.dtensor.operators.elementwise import over_elements
from torchstrat.sharding.dtensor.operators.reductions import axes_within, cut_after, mean, total
from torchstrat.sharding.dtensor.operators.rules import Call, Dims, dims_of, one_dim, rule


@rule("softmax", "log_softmax")
def softmax(
    call: Call,
    input: torch.Tensor,
    dim: int | None = None,
    *args: object,
    dtype: torch.dtype | None = None,
    **_: object,
) -> torch.Tensor:
    if dim is None:
        raise call.refused("needs its dim")
    dtype = next((one for one in args if isinstance(one, torch.dtype)), dtype)
    place = one_dim(dim, len(shape_of(input)))
    local = call.open(input)
    if dtype is not None:
        local = local.to(dtype)
    is_log = call.name == "log_softmax"
    axes = call.axes_of(input, place)
    if not axes:
        plain = torch.log_softmax(local, place) if is_log else torch.softmax(local, place)
        return call.leave(plain, call.cut(input))
    kind, local = torch.softmax(local.new_zeros(1), 0).dtype, widen(local)  # as autocast has it
    shifted = local - call.largest(local.detach().amax(place, keepdim=True), axes)
    powers = shifted.exp()
    sums = call.total(powers.sum(place, keepdim=True), axes)
    return call.leave((shifted - sums.log() if is_log else powers / sums).to(kind), call.cut(input))


@rule("softmin")
def softmin(call: Call, input: torch.Tensor, dim: int | None = None, **kwargs: torch.dtype | None) -> torch.Tensor:
    return softmax(Call(torch.softmax, call.devices), call.leave(-call.open(input), call.cut(input)), dim, **kwargs)


@rule("logsumexp")
def logsumexp(call: Call, input: torch.Tensor, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    if not axes:
        return call.leave(torch.logsumexp(local, dims, keepdim), cut)
    kind, local = local.dtype, widen(local)
    highest = call.largest(local.detach().amax(dims, keepdim=True), axes)
    highest = torch.where(highest.isinf(), 0, highest)
    sums = call.added_up((local - highest).exp().sum(dims, keepdim=True), axes)
    found = (sums.log() + highest).to(kind)
    return call.leave(found if keepdim else found.squeeze(dims), cut)


CLASSES = "classes"


@rule("cross_entropy")
def cross_entropy(
    call: Call,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``input``: logits ``(classes)`` or ``(batch, classes, …)``; ``target``: indices ``(batch, …)`` or probabilities
    like ``input``."""
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        raise call.refused("takes reduction='mean', 'sum' or 'none'")
    shape = shape_of(input)
    class_dim = 0 if len(shape) == 1 else 1
    of_input = [CLASSES if dim == class_dim else f"example {dim}" for dim in range(len(shape))]
    examples = [label for label in of_input if label != CLASSES]
    by_index = not target.is_floating_point()
    of_target = examples if by_index else of_input
    wanted_shape = [size for dim, size in enumerate(shape) if dim != class_dim or not by_index]
    if list(shape_of(target)) != wanted_shape:  # PyTorch looks at the values for that
        raise call.refused(
            f"of shape {tuple(shape)} needs targets of {tuple(wanted_shape)}, not {tuple(shape_of(target))}"
        )
    chosen = agree_on_labels(call, (input, target), (of_input, of_target))
    varying = [axis for axis, label in enumerate(chosen) if label is not None]
    class_axes = [axis for axis in varying if chosen[axis] == CLASSES]
    logits = call.enter(input, cut_by_labels(chosen, of_input), varying)
    kind = _loss_kind(logits)
    logits = widen(logits)
    wanted = call.enter(target, cut_by_labels(chosen, of_target), varying)
    weights = torch.ones(shape[class_dim], dtype=logits.dtype, device=logits.device)
    if weight is not None:
        if by_index and weight.requires_grad:
            raise call.refused("with indices as targets has no gradient for weights of classes; use weight.detach()")
        weights = call.enter(weight, call.devices.axes.whole, varying)
    own_weights = call.devices.own_part(weights, class_axes, 0) if class_axes else weights
    along_classes = own_weights.view([-1 if dim == class_dim else 1 for dim in range(len(shape))])

    logs = _log_probabilities(call, logits, class_dim, class_axes)
    counted = torch.ones((), dtype=logits.dtype, device=logits.device)
    if by_index:
        is_counted = wanted != ignore_index
        _require_classes(wanted[is_counted], shape[class_dim])
        counted = torch.where(is_counted, weights[torch.where(is_counted, wanted, 0)], 0)
        first = call.devices.axes.index_along(call.devices.own, class_axes) * logits.shape[class_dim]
        own = is_counted & (wanted >= first) & (wanted < first + logits.shape[class_dim])
        picked = logs.gather(class_dim, torch.where(own, wanted - first, 0).unsqueeze(class_dim)).squeeze(class_dim)
        losses = torch.where(own, -picked * counted, 0)
        if label_smoothing:
            spread_out = -(logs * along_classes).sum(class_dim) / shape[class_dim]
            losses = (1 - label_smoothing) * losses + label_smoothing * torch.where(is_counted, spread_out, 0)
    else:
        smooth = wanted * (1 - label_smoothing) + label_smoothing / shape[class_dim]
        losses = -(smooth * logs * along_classes).sum(class_dim)

    if reduction == "none":
        return call.leave(call.added_up(losses, class_axes).to(kind), cut_by_labels(chosen, examples))
    summed = call.added_up(losses.sum(), varying)
    if reduction == "sum":
        return summed.to(kind)
    if not by_index:
        return (summed / (shape.numel() // shape[class_dim])).to(kind)
    example_axes = [axis for axis in varying if axis not in class_axes]
    count = counted.sum()
    return (summed / (call.devices.summed(count, example_axes) if example_axes else count)).to(kind)


def _loss_kind(logits: torch.Tensor) -> torch.dtype:
    """What autocast makes of a loss of these."""
    target = torch.zeros(1, dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits.new_zeros(1, 1), target).dtype


def _log_probabilities(call: Call, logits: torch.Tensor, dim: int, axes: list[int]) -> torch.Tensor:
    if not axes:
        return torch.log_softmax(logits, dim)
    shifted = logits - call.largest(logits.detach().amax(dim, keepdim=True), axes)
    return shifted - call.total(shifted.exp().sum(dim, keepdim=True), axes).log()


def _require_classes(wanted: torch.Tensor, classes: int) -> None:
    if wanted.numel() and not bool(((wanted >= 0) & (wanted < classes)).all()):
        raise IndexError(f"cross_entropy: a target is outside of the {classes} classes")


# Not l1_loss: PyTorch leaves its weights out where it tells of the call.
@rule(
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
)
def by_elements(
    call: Call, input: torch.Tensor, target: torch.Tensor, *args: object, reduction: str = "mean", **kwargs: object
) -> torch.Tensor:
    if args or kwargs.pop("size_average", None) is not None or kwargs.pop("reduce", None) is not None:
        raise call.refused("takes its options by name, and reduction='mean', 'sum' or 'none'")
    if kwargs.get("weight") is not None and call.name != "binary_cross_entropy_with_logits":
        raise call.refused("takes no weights; weigh the losses of reduction='none'")
    if shape_of(input) != shape_of(target):
        raise call.refused(f"needs two equal shapes, not {tuple(shape_of(input))} and {tuple(shape_of(target))}")
    losses = over_elements(call, (input, target), {**kwargs, "reduction": "none"})
    return losses if reduction == "none" else {"sum": total, "mean": mean}[reduction](call, losses)
