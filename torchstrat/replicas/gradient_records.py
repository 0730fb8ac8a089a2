"""Gradients from backward to step: what one rank has of each, accumulated and not combined, or combined; and a backward
pass as replicas make it.

Hooks of the user's own may wait for a gradient: then replicas combine one after the other, in an order that they have
to agree on. Gradients of ``backward(create_graph=True)`` are combined so that a penalty on them can be differentiated.

The graph tells whether the losses are such that the gradients of replicas combined are that of the global batch
(`LossCheck`). Two common ones are not: a sum, whose gradients would have to be added up, and a mean over labels of
which some are ignored, whose replicas count by their rows and not by their labels. It is looked at in the first run
that has a backward pass, and never after. An embedding that divides gradients by how often an id occurs is as wrong,
whatever the loss is. Modules tell of it.

Not told: a sum that is divided by something, which may be the mean over rows; what a compiled function computed, whose
graph does not say it.
"""

from __future__ import annotations

import enum
import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torchstrat.core._torch_private import SUM_OF_LOSSES, ignored_labels, is_view, reduction_of, uncompiled, version_of
from torchstrat.core.context import StrategyLike, get_replica_context
from torchstrat.core.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.core.gradients import CombinedGradient, Owned, as_dense, is_left_over, is_plain
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.collectives.agreement import fingerprint
from torchstrat.replicas.engine import StepWeights
from torchstrat.replicas.roster import Layout, Roster


class GradientStatus(enum.Enum):
    """What has become of a gradient."""

    COMBINED = enum.auto()
    USED = enum.auto()  # by an optimizer's step
    NEW = enum.auto()  # assigned, or changed since it was used: an optimizer's step combines it


class GradientRecord:
    """What is known of one tensor's gradient on this rank."""

    __slots__ = ("accumulated", "base", "combined", "grown", "lacks", "left", "loose", "reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        self.accumulated = False  # something was added that is not combined yet
        self.base: torch.Tensor | None = None
        """What was there before that, alike on all ranks. Kept where only what is new is combined."""
        self.grown: CombinedGradient | None = None
        """What it then had become, with the base in it. Of sums."""
        self.combined: CombinedGradient | None = None
        self.loose: CombinedGradient | None = None
        """A combined one that hooks have been given, and that has been accumulated nowhere since: what is assigned by
        hand is made of it (``p.grad = torch.autograd.grad(loss, p)``)."""
        self.left: CombinedGradient | None = None
        """As the last run has left it; see `GradientRecords.leave`."""
        self.lacks: bool | None = None
        """Where some ranks have not come to that one, for a branch has spared them it: whether this is one of them."""


def edited_part(variable: str) -> UnsupportedError:
    """What to raise where the program has changed one replica's part of a gradient."""
    return UnsupportedError(
        f"the gradient of {variable} was changed between runs where each replica has a part of its own in it, which a "
        "run under no_sync has left; what was changed is one replica's alone. Change it in a step (Strategy.run), or "
        "leave no_sync before the last run that adds to it. Zeroing it, backward(), clipping and optimizer.step() "
        "need no run."
    )


class NotedGradients:
    """What gradients tensors have at a moment, to tell later which of them somebody has zeroed, removed or replaced:
    code that runs once for all replicas, such as a leader's ``step(closure)``."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = ((id(tensor), tensor.grad) for tensor in tensors)
        self._noted = {key: (grad, 0 if grad is None else version_of(grad)) for key, grad in found}

    def has_changed(self, tensor: torch.Tensor) -> bool:
        grad, (earlier, version) = tensor.grad, self._noted.get(id(tensor), (None, 0))
        return grad is not earlier or (grad is not None and version_of(grad) != version)


class GradientRecords:
    """The records of a run's variables, which last from run to run."""

    def __init__(self, op: ReduceOp) -> None:
        self.op = op
        self._records: dict[int, GradientRecord] = {}
        self._layout: Layout | None = None

    def use(self, roster: Roster) -> None:
        """The variables are these from now on."""
        if self._layout is not roster.layout:
            self._records = {id(tensor): self.of(tensor) for tensor in roster.tensors}
            self._layout = roster.layout

    def current(self, tensor: torch.Tensor) -> GradientRecord:
        """Of a variable of this run."""
        return self._records[id(tensor)]

    def of(self, tensor: torch.Tensor) -> GradientRecord:
        """Of any tensor; a new one, which is not kept, if nothing is known."""
        record = self._records.get(id(tensor))
        return record if record is not None and record.reference() is tensor else GradientRecord(tensor)

    def take_base(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is not this rank's own in a gradient that is accumulated, and to be left out of a sum of all ranks'.

        Raises `UnsupportedError` where nobody can say what that is now: the program has changed the whole of it.
        """
        record = self.of(tensor)
        if not record.accumulated or record.base is None or record.grown is None or tensor.grad is None:
            return record.base if record.accumulated else None
        if not record.grown.is_new(tensor.grad) and bool((record.base != 0).any()):
            raise UnsupportedError(
                f"a gradient of shape {tuple(tensor.shape)} was changed by hand after a backward pass under no_sync "
                "had added to a combined one, and before replicas have combined that: in a sum their parts cannot be "
                "told from what they have in common. Change it where all is combined (after a backward pass outside "
                "of no_sync), or zero it before no_sync begins; means have no such limit."
            )
        return record.base

    def with_parts(self) -> list[torch.Tensor]:
        """Those with something in their gradient that is not combined."""
        found = [record.reference() for record in self._records.values() if record.accumulated]
        return [tensor for tensor in found if tensor is not None]

    def note_combined(self, tensor: torch.Tensor) -> None:
        """Its gradient is from now on the combined one."""
        record = self._records[id(tensor)]
        record.accumulated, record.base = False, None
        record.combined = None if tensor.grad is None else CombinedGradient(tensor.grad)
        record.loose = record.lacks = None

    def note_lacking(self, tensor: torch.Tensor, lacks: bool) -> None:
        """Of a gradient as `note_loose` has it. ``lacks``: this rank has not come to it; on all ranks."""
        self._records[id(tensor)].lacks = lacks

    def had_alone(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of which this rank has a loose gradient, and some ranks lack it."""
        return [tensor for tensor in tensors if self.of(tensor).lacks is False]

    def note_loose(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``gradient`` has been combined, and is handed on."""
        self._records[id(tensor)].loose = None if gradient is None else CombinedGradient(gradient)

    def note_all_combined(self, tensors: Iterable[torch.Tensor]) -> None:
        """The same of several, which all have gradients."""
        records = self._records
        for tensor in tensors:
            record = records[id(tensor)]
            record.accumulated, record.base, record.combined = False, None, CombinedGradient(tensor.grad)  # type: ignore[arg-type]

    # -- between runs -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """A run ends. What is not combined is remembered as it is, to know later what the program has made of it."""
        for record in self._records.values():
            record.left = None
            if (tensor := record.reference()) is None or (gradient := tensor.grad) is None:
                continue
            if record.accumulated or is_left_over(gradient, record.combined, self.op):
                record.left = CombinedGradient(gradient)

    def weigh_parts(self, factor: float) -> None:
        """After a run has ended: ``factor`` for all that is not combined."""
        for tensor in self.with_parts() if factor != 1.0 else ():
            if tensor.grad is not None:
                tensor.grad = tensor.grad * factor if factor else torch.zeros_like(tensor.grad)
        self.leave()

    def look_at_outside(self, tensors: Iterable[torch.Tensor], describe: Callable[[torch.Tensor], str]) -> None:
        """A run begins, or something outside of runs combines what they have left: what has the program made of
        gradients since? Raises `UnsupportedError` where that was a part of one, unless it was zeroed or taken away."""
        for tensor in tensors:
            if (gradient := tensor.grad) is None:
                continue
            record = self.current(tensor)
            is_open = record.accumulated or is_left_over(gradient, record.combined, self.op)
            if not is_open or (record.left is not None and record.left.is_new(gradient)):
                continue
            if record.accumulated and as_dense(gradient).any():
                raise edited_part(describe(tensor))
            self.note_made_outside(tensor, gradient)

    def note_made_outside(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """It is what the program has made outside of runs, the same on all ranks: in a sum it counts once."""
        record = self.of(tensor)
        if self.op is ReduceOp.SUM and record.lacks is None and is_left_over(gradient, record.combined, self.op):
            self._records[id(tensor)] = record
            record.accumulated, record.base, record.loose = False, None, None
            record.combined = CombinedGradient(gradient)

    # -- at an optimizer's step -------------------------------------------------------------------------------------

    def owned(self, tensor: torch.Tensor) -> Owned | None:
        """Who has which elements of its gradient; None if every rank has all, or there is none."""
        combined = self.of(tensor).combined
        return None if combined is None or tensor.grad is None else combined.owned

    def torn(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of these has a gradient that was left with its owners and has been changed or replaced since."""

        def is_left(tensor: torch.Tensor) -> bool:
            combined = self.of(tensor).combined
            return combined is not None and combined.owned is not None and not combined.used

        return bool(self.edited(filter(is_left, tensors)))

    def are_as_combined(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether nothing has happened to any of these gradients since they were combined: the usual case, in which
        there is no need to look closer."""
        records = self._records
        for tensor in tensors:
            if (gradient := tensor.grad) is not None:
                record = records.get(id(tensor))
                if record is None or record.combined is None or not record.combined.is_new(gradient):
                    return False
        return True

    def left_over(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those with a gradient that no backward pass has combined: assigned by hand, or left by ``no_sync``."""

        def is_left(tensor: torch.Tensor) -> bool:
            record = self.of(tensor)
            if record.lacks is not None:
                return True
            if not is_left_over(tensor.grad, record.combined, self.op):
                return False
            return record.loose is None or is_left_over(tensor.grad, record.loose, self.op)

        return [tensor for tensor in tensors if is_left(tensor)]

    def edited(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Combined gradients that the step has changed since (clipped, unscaled, made noisy), or put others in place
        of: those that `left_over` does not report because they count as combined."""
        found = []
        for tensor in tensors:
            combined = self.of(tensor).combined
            if tensor.grad is None or combined is None:
                continue
            is_replaced = not combined.used and not combined.is_in(tensor.grad)
            if is_replaced or combined.is_edited(tensor.grad):
                found.append(tensor.grad)
        return found

    def after_step(self, tensors: Iterable[torch.Tensor]) -> None:
        """An optimizer has used the gradients of ``tensors``; what is assigned to them from now on is new."""
        for tensor in tensors:
            record = self.of(tensor)
            record.loose = record.lacks = None
            if record.combined is not None:
                record.combined.use_up()

    # -- replicas that sit a run out --------------------------------------------------------------------------------

    def status_of(self, tensor: torch.Tensor) -> GradientStatus:
        """That of a gradient with no part that is accumulated and not combined: alike on all ranks of the run."""
        combined = self.of(tensor).combined
        if is_left_over(tensor.grad, combined, self.op):
            return GradientStatus.NEW
        return GradientStatus.USED if combined is not None and combined.used else GradientStatus.COMBINED

    def for_idle(self, roster: Roster) -> dict[str, GradientStatus]:
        """After a run: what has become of the gradients, which ranks without a part in it are to have too."""
        return {name: self.status_of(tensor) for name, tensor in roster.items()}

    def new_in_sum(self, roster: Roster) -> dict[str, tuple[float, float]]:
        """After a run that some ranks have sat out: fingerprints of gradients that are to be summed once more."""
        if self.op is not ReduceOp.SUM:
            return {}
        return {
            name: fingerprint([tensor.grad])
            for name, tensor in roster.items()
            if tensor.grad is not None
            and not self.of(tensor).accumulated
            and self.status_of(tensor) is GradientStatus.NEW
        }

    def settle(self, roster: Roster, found: Sequence[dict[str, tuple[float, float]]]) -> None:
        """``found``: `new_in_sum` of the ranks that ran. What all of these have alike (a gradient that was zeroed in
        place, or scaled, after its step) is combined, so that the others can have the same. What is assigned in its
        place from now on is new, as after that step."""
        for name, tensor in roster.items():
            if name in found[0] and all(one.get(name) == found[0][name] for one in found):
                self.take_over(tensor, tensor.grad, GradientStatus.USED)

    def take_over(self, tensor: torch.Tensor, gradient: torch.Tensor | None, status: GradientStatus) -> None:
        """Make ``gradient`` the one of ``tensor``. One that is a part of a flat buffer stays that. Of a sum, what is
        new is the part of the rank that it comes from: this one has nothing to add."""
        if gradient is not None and status is GradientStatus.NEW and self.op is ReduceOp.SUM:
            gradient = torch.zeros_like(gradient)
        own = tensor.grad
        if gradient is not None and own is not None and is_view(own) and is_plain(own) and is_plain(gradient):
            gradient = own.copy_(gradient)
        tensor.grad = gradient
        self._records[id(tensor)] = record = self.of(tensor)
        record.accumulated, record.base, record.combined, record.loose = False, None, None, None
        record.lacks = None
        if gradient is not None and status is not GradientStatus.NEW:
            record.combined = CombinedGradient(gradient)
            record.combined.used = status is GradientStatus.USED


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
