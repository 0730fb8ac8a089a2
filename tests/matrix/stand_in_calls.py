"""One call with stand-ins for tensors, compared with the same call on the tensors themselves.

A stand-in is right where everything that a program can see of the call is as with plain tensors: what is returned, what
the arguments hold afterwards, and the gradients. It may refuse; then nothing was computed, and the error is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.matrix.tensor_operations import Operation, Sample, copied
from torchstrat.errors import TorchstratError

StandIn = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor that has a graph to what stands in for it."""

_ABOUT_THE_OBJECT = frozenset(
    ("__repr__", "__format__", "__hash__", "__reduce_ex__", "__deepcopy__", "_cdata", "_backward_hooks", "data_ptr")
)
"""What tells of the object and not of its values; a stand-in is another object."""


@dataclass
class Seen:
    """What a program sees of one call."""

    values: Mapping[str, Any]
    error: Exception | None = None


def call_plainly(operation: Operation, sample: Sample) -> Seen:
    return _call(operation, sample, lambda tensor: tensor.clone(), lambda tensor: tensor, _is_first)


def call_with(
    operation: Operation,
    sample: Sample,
    stand_in: StandIn,
    whole: Callable[[torch.Tensor], torch.Tensor],
    *,
    everywhere: bool = False,
    around: Callable[[Callable[[], Any]], Any] = lambda call: call(),
) -> Seen:
    """``everywhere``: for every argument that is a tensor, not the first alone. ``around``: calls what it is given, and
    returns what that does."""
    return _call(operation, sample, stand_in, whole, (lambda path: True) if everywhere else _is_first, around)


def complaint(operation: Operation, seen: Seen, wanted: Seen) -> str:
    """What is wrong with a call on stand-ins; empty if nothing is, or if it was refused."""
    if seen.error is not None:
        if isinstance(seen.error, TorchstratError) or wanted.error is not None:
            return ""
        return f"raised {type(seen.error).__name__}: {str(seen.error)[:200]}"
    if wanted.error is not None:
        return f"returned, where plain torch raises {type(wanted.error).__name__}: {str(wanted.error)[:200]}"
    if operation.name in _ABOUT_THE_OBJECT:
        return ""
    missing = wanted.values.keys() ^ seen.values.keys()
    if missing:
        return f"{sorted(missing)} are not on both sides"
    return next(
        (text for name in wanted.values if (text := _differs(name, seen.values[name], wanted.values[name]))), ""
    )


def _is_first(path: Sequence[Any]) -> bool:
    return path[:2] == ["args", 0]


def _call(
    operation: Operation,
    sample: Sample,
    stand_in: StandIn,
    whole: Callable[[torch.Tensor], torch.Tensor],
    is_chosen: Callable[[Sequence[Any]], bool],
    around: Callable[[Callable[[], Any]], Any] = lambda call: call(),
) -> Seen:
    leaves: dict[str, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}

    def replaced(value: Any, path: list[Any]) -> Any:
        if isinstance(value, torch.Tensor):
            value = copied(value)
            if not is_chosen(path):
                return value
            name = "argument " + " ".join(map(str, path[1:]))
            differentiable = value.is_floating_point() or value.is_complex()
            leaves[name] = value.requires_grad_() if differentiable and value.layout == torch.strided else value
            given[name] = stand_in(value)
            return given[name]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[replaced(one, [*path, index]) for index, one in enumerate(value)])
        if isinstance(value, list | tuple):
            return type(value)(replaced(one, [*path, index]) for index, one in enumerate(value))
        if isinstance(value, dict):
            return {key: replaced(one, [*path, key]) for key, one in value.items()}
        return value

    args, kwargs = replaced(sample.args, ["args"]), replaced(dict(sample.kwargs), ["kwargs"])
    torch.manual_seed(7)
    try:
        returned = around(lambda: operation(*args, **kwargs))
        values = _values(returned, given, whole)
        _backward(values)
    except Exception as error:
        return Seen({}, error)
    found = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    found |= {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
    found["the next random number"] = float(torch.rand(()))
    return Seen(found)


def _values(
    returned: Any, given: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    flat, _ = pytree.tree_flatten(returned)
    results = {f"result {index}": one for index, one in enumerate(flat)}
    return {name: whole(one) if isinstance(one, torch.Tensor) else one for name, one in {**results, **given}.items()}


def _backward(values: Mapping[str, Any]) -> None:
    """From all results together, each with weights of its own."""
    generator = torch.Generator().manual_seed(3)
    total: Any = 0.0
    for one in values.values():
        if isinstance(one, torch.Tensor) and one.requires_grad and one.grad_fn is not None:
            weights = torch.rand(one.shape, dtype=torch.float64, generator=generator) + 0.5
            dense = one.to_dense() if one.layout != torch.strided else one
            real = torch.view_as_real(dense).sum(-1) if dense.is_complex() else dense
            total = total + (real * weights).sum()
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()


_TOLERANCES = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def _differs(name: str, seen: Any, wanted: Any) -> str:
    if isinstance(wanted, torch.Tensor) and isinstance(seen, torch.Tensor):
        if seen.shape != wanted.shape or seen.dtype != wanted.dtype:
            return f"{name} is {seen.dtype} {tuple(seen.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
        tolerance = _TOLERANCES.get(wanted.dtype, 1e-9)
        try:
            torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return f"{name}: {error}"
        return ""
    if type(seen) is not type(wanted):
        return f"{name} is {seen!r:.80}, not {wanted!r:.80}"
    if isinstance(wanted, int | float | complex | str | torch.dtype | torch.Size | torch.device) and seen != wanted:
        return "" if wanted != wanted else f"{name} is {seen!r:.80}, not {wanted!r:.80}"
    return ""
