"""Gradients of ``backward(create_graph=True)``, combined so that a penalty on them can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.errors import UnsupportedError

Exchange = Callable[[str, Sequence[torch.Tensor]], list[torch.Tensor]]
"""The weighted sums of all replicas' tensors, which every replica has to ask for under the same name."""

WITH_GRAPHS = "backward(create_graph=True) (combining gradients that have graphs)"


class _Combine(torch.autograd.Function):
    """Combines; backward combines the incoming gradients with the same weights.

    What replica s makes of the combined gradient G = Σ wᵣ gᵣ counts with its weight too, so gᵣ has an influence of
    wᵣ · Σ wₛ fₛ'(G) on the whole; the factor wᵣ comes when the gradients of that backward pass are combined in turn.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, call: str, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return tuple(exchange(call, [gradient.detach() for gradient in gradients]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        call = f"a backward pass through combined gradients ({places} of {len(gradients)})"
        combined = iter(_combine(ctx.exchange, call, [one for one in gradients if one is not None]))
        return None, None, *(None if gradient is None else next(combined) for gradient in gradients)


def _combine(exchange: Exchange, call: str, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not gradients:
        return ()
    combined: tuple[torch.Tensor, ...] = _Combine.apply(exchange, call, *gradients)  # type: ignore[no-untyped-call]
    return combined


def combine_with_graphs(
    exchange: Exchange, gradients: Sequence[torch.Tensor], bases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The combined gradients, each with its graph. ``bases``: what each of ``gradients`` holds that is combined."""
    if any(gradient.layout != torch.strided for gradient in gradients):
        raise UnsupportedError(
            "backward(create_graph=True) made a sparse gradient, and replicas cannot combine those with their graphs; "
            "use sparse=False in embeddings, or torch.autograd.grad and all_reduce for what is differentiated twice."
        )
    call = f"{WITH_GRAPHS}, of shapes {[tuple(gradient.shape) for gradient in gradients]}"
    with torch.enable_grad():
        parts = [one if base is None else one - base for one, base in zip(gradients, bases, strict=True)]
        combined = _combine(exchange, call, parts)
        return [one if base is None else one + base for one, base in zip(combined, bases, strict=True)]


def has_graph(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.requires_grad
