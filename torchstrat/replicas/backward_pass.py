"""What replicas do in the midst of a backward pass, and at its end.

Hooks of the user's own may wait for a gradient: then replicas combine one after the other, in an order that they have
to agree on. Gradients of ``backward(create_graph=True)`` are combined so that a penalty on them can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from torchstrat.core._torch_private import uncompiled
from torchstrat.core.errors import ReplicaDivergenceError, UnsupportedError


class EndOfPass:
    """What a backward pass calls at its end. Nothing but the pass holds it."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @uncompiled
    def __call__(self) -> None:
        self._call()


def nothing() -> object:
    """In the place of a reference to one: there is none."""
    return None


Place = TypeVar("Place", bound=Hashable)


class HookTurns(Generic[Place]):
    """The turns of one pass after the other. Replicas mostly wait at the same gradient; one that a branch has spared
    it waits at a later one, or at the end of the pass, and counts as one without a gradient."""

    def __init__(self) -> None:
        self._missed: dict[int, set[Place]] = {}
        self._had: dict[Place, int] = {}

    def end(self) -> list[tuple[Place, int, list[int]]]:
        """All are at the end of the pass. Returns the gradients that not all have: one replica that has, and those that
        have not. No hook has been called there, so what the hooks have made of it has to be handed over."""
        if not self._missed:
            return []
        missed, self._missed = self._missed, {}
        had, self._had = self._had, {}
        return [(place, had[place], [one for one in missed if place in missed[one]]) for place in had]

    def next(self, places: Mapping[int, Place], replicas: Iterable[int], order: Callable[[], Iterable[Place]]) -> Place:
        """Where those of the ``replicas`` are that are not at the end of the pass → the gradient to combine now.
        Everyone who is elsewhere has to ask again.

        ``order``: all gradients, the first ones the last to be ready, as backward passes mostly have it. If a replica
        turns out to have another order, everyone raises `ReplicaDivergenceError`.
        """
        waiting = set(places.values())
        late = [replica for replica, place in places.items() if place in self._missed.get(replica, ())]
        if late:
            raise ReplicaDivergenceError(
                f"replica {late[0]} comes in its backward pass to a gradient that hooks look at after the others have "
                "been there. A hook on a gradient gets the one of all replicas, so all have to come to such gradients "
                "in the same order; look for a branch that depends on the replica's data or id, or look at gradients "
                "when backward() has returned."
            )
        (chosen,) = waiting if len(waiting) == 1 else [[place for place in order() if place in waiting][-1]]
        for replica in replicas:
            if places.get(replica) != chosen:
                self._missed.setdefault(replica, set()).add(chosen)
                self._had[chosen] = next(one for one, place in places.items() if place == chosen)
        return chosen


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
