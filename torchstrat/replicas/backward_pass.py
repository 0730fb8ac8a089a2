"""A backward pass as replicas make it: what its graph tells of the step before, what they do in its midst, and at its
end.

Hooks of the user's own may wait for a gradient: then replicas combine one after the other, in an order that they have
to agree on. Gradients of ``backward(create_graph=True)`` are combined so that a penalty on them can be differentiated.

The graph tells whether the losses are such that the gradients of replicas combined are that of the global batch. Two
common ones are not: a sum, whose gradients would have to be added up, and a mean over labels of which some are ignored,
whose replicas count by their rows and not by their labels. It is looked at in the first run that has a backward pass,
and never after. An embedding that divides gradients by how often an id occurs is as wrong, whatever the loss is.
Modules tell of it.

Not told: a sum that is divided by something, which may be the mean over rows; what a compiled function computed, whose
graph does not say it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torchstrat.core._torch_private import SUM_OF_LOSSES, ignored_labels, reduction_of, uncompiled
from torchstrat.core.context import StrategyLike, get_replica_context
from torchstrat.core.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.core.reduction import ReduceOp
from torchstrat.replicas.engine import StepWeights


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
    exchange: Exchange, gradients: Sequence[torch.Tensor], bases: Sequence[torch.Tensor | None], which: str = ""
) -> list[torch.Tensor]:
    """The combined gradients, each with its graph. ``bases``: what each of ``gradients`` holds that is combined.
    ``which`` they are, where ranks may come to others of the same shapes."""
    if any(gradient.layout != torch.strided for gradient in gradients):
        raise UnsupportedError(
            "backward(create_graph=True) made a sparse gradient, and replicas cannot combine those with their graphs; "
            "use sparse=False in embeddings, or torch.autograd.grad and all_reduce for what is differentiated twice."
        )
    call = f"{WITH_GRAPHS}, of shapes {[tuple(gradient.shape) for gradient in gradients]}{which}"
    with torch.enable_grad():
        parts = [one if base is None else one - base for one, base in zip(gradients, bases, strict=True)]
        combined = _combine(exchange, call, parts)
        return [one if base is None else one + base for one, base in zip(combined, bases, strict=True)]


def has_graph(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.requires_grad


_NOTHING = nullcontext()
_ADDING = frozenset({"AddBackward0", "SubBackward0", "NegBackward0"})
_SCALING = frozenset({"DivBackward0", "MulBackward1"})  # as for several backward passes a step, or smoothed labels
_MOST_NODES = 32

_SUM = (
    "the step minimises the sum of a loss over its rows (reduction='sum'), and the strategy averages gradients over "
    "replicas, so that they are those of one device divided by the number of replicas. Build the strategy with "
    "gradient_reduce_op='sum', or divide the loss: ts.global_mean(loss, rows) is the mean over the global batch."
)
_IGNORED = (
    "the step minimises a mean over labels of which some are ignored (ignore_index), and the rows of a replica differ "
    "in how many count. Gradients are weighted by rows, so they are not those of one device. Use ts.global_mean(loss "
    "with reduction='sum', number of labels that count), or call get_replica_context().set_weight(that number)."
)
_FREQUENCIES = (
    "an embedding with scale_grad_by_freq=True divides the gradient of an id by how often it occurs in one replica's "
    "rows, so gradients are not those of one device, where it is how often it occurs in the global batch. Leave the "
    "option out."
)


class LossCheck:
    """Of one strategy. ``modules()``: all that it takes care of."""

    def __init__(
        self, strategy: StrategyLike, op: ReduceOp, num_replicas: int, modules: Callable[[], Iterable[nn.Module]]
    ) -> None:
        self._strategy, self._modules = strategy, modules
        self._is_sum = op is ReduceOp.SUM
        self._is_over = num_replicas == 1
        self._found: set[str] = set()

    def around(self, weights: StepWeights) -> AbstractContextManager[None]:
        """Around a run: look at its backward passes, and warn when it has ended well."""
        return _NOTHING if self._is_over else self._looking(weights)

    @contextmanager
    def _looking(self, weights: StepWeights) -> Iterator[None]:
        def look(roots: object, replica: int) -> None:
            if not isinstance(roots, torch.Tensor) or roots.grad_fn is None:
                return
            self._is_over = True
            if not self._is_sum:
                self._found |= set(_findings(roots.grad_fn, weights.rows_of(replica)))
            if any(getattr(module, "scale_grad_by_freq", False) for module in self._modules()):
                self._found.add(_FREQUENCIES)

        with backward_calls(self._strategy, look):
            yield
        if self._found and not weights.are_said:
            for message in sorted(self._found):
                warnings.warn(message, stacklevel=7)
        self._found.clear()


def _findings(root: Any, rows: int | None) -> Iterator[str]:
    """``rows``: of this replica, where they are known."""
    nodes, seen = [(root, False)], 0
    while nodes and seen < _MOST_NODES:
        node, is_scaled = nodes.pop()
        seen += 1
        if reduction_of(node) == SUM_OF_LOSSES and not is_scaled:
            yield _SUM
        if _differ_in_labels(ignored_labels(node), rows):
            yield _IGNORED
        is_scaling = node.name() in _SCALING
        if is_scaling or node.name() in _ADDING:
            nodes += [(child, is_scaled or is_scaling) for child, _ in node.next_functions if child is not None]


def _differ_in_labels(ignored: torch.Tensor | None, rows: int | None) -> bool:
    """Whether rows have different numbers of labels. Where each has as many (shifted texts), rows count right."""
    if ignored is None or not rows or ignored.numel() % rows or not bool(ignored.any()):
        return False
    counts = ignored.reshape(rows, -1).sum(dim=1)
    return bool((counts != counts[0]).any())


@contextmanager
def backward_calls(strategy: StrategyLike, look: Callable[[Any, int], None]) -> Iterator[None]:
    """In this block ``look`` sees what is differentiated on which replica of ``strategy``; `torch.Tensor.backward` goes
    through the same name."""
    found = torch.autograd.backward

    @functools.wraps(found)
    def backward(*args: Any, **kwargs: Any) -> Any:
        replica = get_replica_context()
        if replica is not None and replica.strategy is strategy:
            look(args[0] if args else kwargs.get("tensors"), replica.replica_id_in_sync_group)
        return found(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        if torch.autograd.backward is backward:
            torch.autograd.backward = found
