"""One call with stand-ins for tensors, compared with the same call on the tensors themselves.

A stand-in is right where everything that a program can see of the call is as with plain tensors: what is returned, what
the arguments hold afterwards, the gradients, and the next random number. It may refuse; then the error is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tests.matrix.tensor_operations import Operation, Sample, copied
from torchstrat.errors import TorchstratError

_ABOUT_THE_OBJECT = frozenset(
    ("__repr__", "__format__", "__hash__", "__reduce_ex__", "__deepcopy__", "_cdata", "_grad_fn", "data_ptr")
)
"""What tells of the object and not of its values; a stand-in is another object."""


class Seen(NamedTuple):
    """What a program sees of one call."""

    values: Mapping[str, Any]
    error: Exception | None = None


@dataclass(frozen=True)
class Caller:
    """How a call is made, with stand-ins or without.

    ``stand_in``: from a leaf to what the call gets for it. ``whole``: from a tensor of the call's to all of its values.
    ``gradient``: of the leaf and what stands in for it. ``around``: calls what it is given, and returns what that does.
    ``everywhere``: all arguments that are tensors are leaves with stand-ins, and not the first alone. ``twice``: to
    compare second derivatives.
    """

    stand_in: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] = lambda leaf, given: leaf.grad
    around: Callable[[Callable[[], Any]], Any] = lambda call: call()
    everywhere: bool = False
    twice: bool = False
    is_leaf: bool = False
    """The call gets the leaf itself: what becomes of it is no part of the graph."""

    def call(self, operation: Operation, sample: Sample) -> Seen:
        leaves: dict[str, torch.Tensor] = {}
        given: dict[str, torch.Tensor] = {}

        def replaced(value: Any, path: list[Any]) -> Any:
            if isinstance(value, torch.Tensor):
                value = copied(value)
                if not self.everywhere and path[:2] != ["args", 0]:
                    return value
                name = "argument " + " ".join(map(str, path[1:]))
                differentiable = value.is_floating_point() or value.is_complex()
                leaves[name] = value.requires_grad_() if differentiable and value.layout == torch.strided else value
                given[name] = self.stand_in(value)
                return given[name]
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*[replaced(one, [*path, index]) for index, one in enumerate(value)])
            if isinstance(value, list | tuple):
                return type(value)(replaced(one, [*path, index]) for index, one in enumerate(value))
            if isinstance(value, dict):
                return {key: replaced(one, [*path, key]) for key, one in value.items()}
            return value

        args, kwargs = replaced(sample.args, ["args"]), replaced(dict(sample.kwargs), ["kwargs"])
        torch.default_generator.manual_seed(7)  # torch.manual_seed notes down all frames, for devices not there
        try:
            returned = self.around(lambda: operation(*args, **kwargs))
            if returned is NotImplemented:
                raise TypeError(f"{operation.key} is not implemented for these")
            flat, _ = pytree.tree_flatten(returned)
            found: dict[str, Any] = {f"result {index}": one for index, one in enumerate(flat)} | given
            found = {name: self.whole(one) if isinstance(one, torch.Tensor) else one for name, one in found.items()}
            if self.is_leaf:
                found |= {name: found[name].detach() for name in given}
            _backward(found, [leaf for leaf in leaves.values() if leaf.requires_grad] if self.twice else [])
            gradients = {
                f"gradient of {name}": self.gradient(leaf, given[name])
                for name, leaf in leaves.items()
                if leaf.requires_grad
            }
        except Exception as error:
            return Seen({}, error)
        found["the next random number"] = float(torch.rand(()))
        return Seen({**found, **gradients})


def complaint(operation: Operation, seen: Seen, wanted: Seen, tolerance: float = 1e-9) -> str:
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
    found = (_differs(name, seen.values[name], one, tolerance) for name, one in wanted.values.items())
    return next(filter(None, found), "")


def _backward(values: Mapping[str, Any], leaves_of_two: Sequence[torch.Tensor]) -> None:
    """From all results together, each with weights of its own."""
    generator = torch.Generator().manual_seed(3)

    def weighed(tensors: Sequence[torch.Tensor | None]) -> Any:
        total: Any = 0.0
        for one in tensors:
            if one is not None and one.requires_grad:
                weights = torch.rand(one.shape, dtype=torch.float64, generator=generator) + 0.5
                dense = one.to_dense() if one.layout != torch.strided else one
                real = torch.view_as_real(dense).sum(-1) if dense.is_complex() else dense
                total = total + (real * weights).sum()
        return total

    total = weighed([one for one in values.values() if isinstance(one, torch.Tensor)])
    if leaves_of_two and isinstance(total, torch.Tensor):
        total = weighed(torch.autograd.grad(total, leaves_of_two, create_graph=True, allow_unused=True))
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()


_TOLERANCES = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def _differs(name: str, seen: Any, wanted: Any, tolerance: float) -> str:
    if isinstance(wanted, torch.Tensor) and isinstance(seen, torch.Tensor):
        if seen.shape != wanted.shape or seen.dtype != wanted.dtype:
            return f"{name} is {seen.dtype} {tuple(seen.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
        allowed = max(tolerance, _TOLERANCES.get(wanted.dtype, 0.0))
        try:
            torch.testing.assert_close(seen.detach(), wanted.detach(), rtol=allowed, atol=allowed, equal_nan=True)
        except AssertionError as error:
            return f"{name}: {error}"
        return ""
    if wanted is None and name.startswith("gradient") and isinstance(seen, torch.Tensor) and not seen.any():
        return ""  # a second derivative of 0, of which PyTorch may or may not know that it is
    if isinstance(wanted, torch.Tensor) != isinstance(seen, torch.Tensor) or (wanted is None) != (seen is None):
        return f"{name} is {seen!r:.80}, not {wanted!r:.80}"
    comparable = int | float | complex | str | torch.dtype | torch.Size | torch.device | torch.layout
    if isinstance(wanted, comparable) and seen != wanted and wanted == wanted:  # NaN is not
        return f"{name} is {seen!r:.80}, not {wanted!r:.80}"
    return ""
