"""Gradient hooks: when a gradient has been accumulated, what a step's own hooks are called after, and the arithmetic.

Gradients are combined when a backward pass ends, not when the optimizer steps, so that clipping, `GradScaler` and
whatever else a step does to ``.grad`` sees the combined gradient on every replica, as under `DistributedDataParallel`.
A gradient that hooks of the user's own look at is combined before they do: one that clips, or steps and frees, acts on
the gradient of one device.

Hooks that a step registers itself are seen when they come: what has to be called before them is put there. In one
process such a hook belongs to the replica that has registered it, as it does between processes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from torchstrat.core._torch_private import (
    DisableTorchFunction,
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    hooks_after_accumulation,
    hooks_on_gradient,
    uncompiled,
    version_of,
)
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tensor_bytes import extent


class GradientSink(Protocol):
    """Who is told about gradients: an engine."""

    def before_accumulation(
        self, tensor: torch.Tensor, gradient: torch.Tensor, is_watched: bool
    ) -> torch.Tensor | None:
        """``gradient`` is about to be added to ``tensor.grad``. A returned tensor takes its place.

        ``is_watched``: hooks of the user's own are called with it before it is.
        """

    def after_accumulation(self, tensor: torch.Tensor, is_watched: bool) -> None:
        """``tensor.grad`` now holds what this pass contributed. ``is_watched``: hooks of the user's own come next."""


class GradientHooks:
    """Hooks on leaf tensors, before all others. They stay on the tensors and do nothing outside of a run."""

    def __init__(self, sink: GradientSink, turn: Callable[[], int | None] = lambda: None) -> None:
        """``turn``: the replica whose code runs now, where several share the tensors."""
        self._sink = weakref.ref(sink)
        self._own: dict[int, _Own] = {}
        self._all_hooked: tuple[object, bool, int] = (None, False, 0)
        self.turn = turn
        weakref.finalize(self, _detach, self._own).atexit = False  # tensors may outlive the strategy, and meet others
        watch_registrations(self)

    def knows(self, tensor: torch.Tensor) -> bool:
        own = self._own.get(id(tensor))
        return own is not None and own.reference() is tensor

    def notice(self, tensor: torch.Tensor) -> None:
        """The step has registered a hook of its own."""
        self.attach([tensor], early=False)

    def attach_to_run(self, tensors: Sequence[torch.Tensor], layout: object, *, early: bool) -> None:
        """`attach`, at the beginning of every run. ``layout`` is the same object as long as the ``tensors`` are the
        same: where that, and all hooks, are as they were, there is nothing to do."""
        if self._all_hooked == (layout, early, hooks_registered):
            return
        self.attach(tensors, early=early)
        if all(map(self.knows, tensors)):
            self._all_hooked = layout, early, hooks_registered

    def attach(self, tensors: Iterable[torch.Tensor], *, early: bool) -> None:
        """Hook each tensor that may have a gradient, once; ``early`` adds the hook before accumulation, as do hooks of
        the user's own there.

        Frozen ones too: a step may unfreeze them before its backward pass, as GANs do.
        """
        for tensor in tensors:
            own = self._own.get(id(tensor))
            before = hooks_on_gradient(tensor)
            is_early = early or _has_users(before)
            if own is None or (is_early and own.early is None):
                if not _may_require_grad(tensor):
                    continue
                own = self._hook(tensor, own, early=is_early)
                before = hooks_on_gradient(tensor)
            after = hooks_after_accumulation(tensor)
            if after and len(after) > 1:
                _put_first(after, own.late)
            if before and len(before) > 1:
                _put_first(before, own.early)

    def _hook(self, tensor: torch.Tensor, own: _Own | None, *, early: bool) -> _Own:
        frozen = not tensor.requires_grad
        if frozen:
            tensor.requires_grad_(True)  # torch hooks no others
        if own is None:
            everyone, key = self._own, id(tensor)
            reference = weakref.ref(tensor, lambda _: everyone.pop(key, None))
            own = everyone[key] = _Own(reference, untold_post_accumulate_grad_hook(tensor, _Late(self._sink)))
        if early:
            own.early = untold_hook(tensor, _Early(self._sink, weakref.ref(tensor)))
        if frozen:
            tensor.requires_grad_(False)
        return own

    def detach(self) -> None:
        _detach(self._own)
        self._all_hooked = None, False, 0


def _detach(hooked: dict[int, _Own]) -> None:
    for own in list(hooked.values()):
        for handle in (own.early, own.late):
            if handle is not None:
                handle.remove()
    hooked.clear()


class _Own:
    """The handles of the hooks on one tensor."""

    __slots__ = ("early", "late", "reference")

    def __init__(self, reference: weakref.ref[torch.Tensor], late: RemovableHandle) -> None:
        self.reference, self.late = reference, late
        self.early: RemovableHandle | None = None


def _put_first(hooks: dict[int, object], handle: RemovableHandle | None) -> None:
    """Have the hook of ``handle`` called before the others, some of which may have been there before it."""
    if handle is None or handle.id not in hooks or next(iter(hooks)) == handle.id:
        return
    own, others = hooks[handle.id], [item for item in hooks.items() if item[0] != handle.id]
    hooks.clear()  # torch goes by the order of insertion, which an OrderedDict's `move_to_end` leaves as it is
    hooks[handle.id] = own
    hooks.update(others)


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether hooks of the user's own look at the gradient of a tensor that is hooked."""
    return _has_users(hooks_on_gradient(tensor)) or _has_users(hooks_after_accumulation(tensor))


def _has_users(hooks: dict[int, object] | None) -> bool:
    """Whether some are not a strategy's. Of another strategy over the same tensors, too: one that was dropped without
    `close` has its hooks until it is collected, which may be between two replicas' turns."""
    return hooks is not None and any(not isinstance(hook, GradientHook) for hook in hooks.values())


def _has_others(hooks: dict[int, object] | None) -> bool:
    """`_has_users`, for a hook that is one of them: alone for nearly every gradient."""
    return hooks is not None and len(hooks) > 1 and _has_users(hooks)


def _may_require_grad(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.is_leaf and not is_lazy(tensor) and not tensor.is_inference()


class GradientHook:
    """Copies of a tensor share its hooks' objects; a deep copy of the model must not deep-copy a strategy along."""

    def __deepcopy__(self, memo: object) -> GradientHook:
        return self


class _Late(GradientHook):
    def __init__(self, sink: weakref.ref[GradientSink]) -> None:
        self._sink = sink

    @uncompiled
    def __call__(self, tensor: torch.Tensor) -> None:
        sink = self._sink()
        if sink is None:
            return
        with DisableTorchFunction():
            if tensor.requires_grad:  # else frozen since the forward pass: PyTorch calls, and has accumulated nothing
                sink.after_accumulation(tensor, _has_others(hooks_after_accumulation(tensor)))


class _Early(GradientHook):
    def __init__(self, sink: weakref.ref[GradientSink], tensor: weakref.ref[torch.Tensor]) -> None:
        self._sink, self._tensor = sink, tensor

    @uncompiled
    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        sink, tensor = self._sink(), self._tensor()
        if sink is None or tensor is None:
            return None
        with DisableTorchFunction():
            return sink.before_accumulation(tensor, gradient, _has_others(hooks_on_gradient(tensor)))


# -- what has been combined ----------------------------------------------------------------------------------------


Owned = Sequence[tuple[int, int, int]]
"""Which rank owns which elements of a tensor: ``(rank, start, stop)``, which together are all of them."""


class CombinedGradient:
    """Remembers which tensor a combined gradient is, to tell it from one that the step assigned by hand."""

    __slots__ = ("_gradient", "owned", "used", "version")

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = weakref.ref(gradient)
        self.version = version_of(gradient)
        self.used = False
        self.owned: Owned | None = None
        """Who has which elements of it combined; None if every rank has all."""

    def use_up(self) -> None:
        """An optimizer has stepped with it. A later change is no edit of it but a new gradient in its place."""
        gradient = self._gradient()
        if gradient is not None:
            self.version = version_of(gradient)
        self.used = True

    def is_in(self, gradient: torch.Tensor) -> bool:
        return self._gradient() is gradient

    def is_new(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is this one, neither changed nor used since."""
        return not self.used and self._gradient() is gradient and version_of(gradient) == self.version

    def is_edited(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is this one, changed in place since (clipped, unscaled, made noisy)."""
        return self.is_in(gradient) and version_of(gradient) != self.version


def is_left_over(gradient: torch.Tensor | None, combined: CombinedGradient | None, op: ReduceOp) -> bool:
    """Whether a gradient that an optimizer is about to use still has to be combined."""
    if gradient is None:
        return False
    if combined is None:
        return True
    if combined.used:
        return not combined.is_in(gradient) or combined.is_edited(gradient)
    # Combined by this step's backward pass, then perhaps replaced by something made of it (``p.grad = p.grad * 0.5``).
    # The mean of equal gradients is the same again; a sum would count them n times.
    return op is ReduceOp.MEAN and not combined.is_in(gradient)


# -- weights --------------------------------------------------------------------------------------------------------


def check_weight(weight: Any) -> float:
    if not hasattr(weight, "__float__"):
        raise WrongTypeError(f"set_weight needs a number; got {type(weight).__name__} {weight!r:.80}. Write len(x).")
    value = float(weight)
    if not 0 <= value < float("inf"):
        raise InvalidArgumentError(
            f"set_weight needs a finite number that is not negative (tokens, rows, unmasked elements); got {weight!r}."
        )
    return value


def shares(op: ReduceOp, weights: Sequence[float]) -> list[float]:
    """The factor of each replica's gradient in the combined one. Where all are of weight 0 they count alike."""
    if op is ReduceOp.SUM:
        return [1.0] * len(weights)
    if weights.count(weights[0]) == len(weights):
        return [1.0 / len(weights)] * len(weights)
    total = sum(weights)
    return [weight / total for weight in weights]


# -- arithmetic -----------------------------------------------------------------------------------------------------


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def is_plain(gradient: torch.Tensor | None) -> bool:
    """Dense and outside of any graph: may be overwritten where it lies."""
    return (
        gradient is not None
        and gradient.layout == torch.strided
        and not gradient.requires_grad
        and not (0 in gradient.stride() and repeats_elements(gradient))
    )


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether it is expanded: some of its elements are one in memory."""
    return any(not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def share_memory(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether some of these, all dense, may have elements in common, as PyTorch lets gradients of ``a + b`` have: what
    is done to one of them in place is done to another."""
    sizes = {one.data_ptr(): one.nbytes if one.is_contiguous() else _span(one) for one in gradients}
    end = 0
    for start in sorted(sizes):
        if start < end:
            return True
        end = start + sizes[start]
    return len(sizes) < len(gradients)


def _span(tensor: torch.Tensor) -> int:
    """How many bytes lie between the first and the last in memory, with both."""
    return extent(tensor) * tensor.element_size()


def combine_in_place(columns: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    """``columns[replica][i]``: the replicas' gradients of tensor i, plain and on one device. All become the same
    factor · Σ columns[replica][i]; each stays a tensor of its own."""
    first, others = list(columns[0]), [list(column) for column in columns[1:]]
    with torch.no_grad():
        for other in others:
            foreach_add_(first, other)
        if factor != 1.0:
            foreach_mul_(first, factor)
        for other in others:
            foreach_copy_(other, first)


class Watcher(Protocol):
    """Who is told."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it has hooks of its own there."""

    def turn(self) -> int | None:
        """The replica whose code runs now, where several share the tensor."""

    def notice(self, tensor: torch.Tensor) -> None:
        """A hook has been registered there."""


Register = Callable[..., RemovableHandle]
"""Of a tensor and a hook."""

register_hook: Register = torch.Tensor.register_hook
register_post_accumulate_grad_hook: Register = torch.Tensor.register_post_accumulate_grad_hook
"""PyTorch's own."""

_watching = weakref.WeakSet[Any]()

hooks_registered = 0
"""How many, since anybody watches. As long as it is the same no tensor has another hook than before, so
that a step need not look at every tensor again."""


def watch_registrations(watcher: Watcher) -> None:
    """Tell ``watcher`` of hooks that are registered, from now on, as long as it lives."""
    if torch.Tensor.register_hook is register_hook:
        torch.Tensor.register_hook = told_hook  # type: ignore[method-assign]
        torch.Tensor.register_post_accumulate_grad_hook = told_post_accumulate_grad_hook  # type: ignore[method-assign]
    _watching.add(watcher)


def _counting(register: Register) -> Register:
    def counted(tensor: torch.Tensor, hook: Callable[..., object]) -> RemovableHandle:
        global hooks_registered
        hooks_registered += 1
        return register(tensor, hook)

    return counted


untold_hook, untold_post_accumulate_grad_hook = map(_counting, (register_hook, register_post_accumulate_grad_hook))
"""For hooks of a strategy's own."""


def _telling(register: Register, counted: Register) -> Register:
    @functools.wraps(register)
    def told(tensor: torch.Tensor, hook: Callable[..., object]) -> RemovableHandle:
        watchers = [one for one in tuple(_watching) if one.knows(tensor)]
        for watcher in watchers:
            hook = _for_one(watcher, hook)
        handle = counted(tensor, hook)
        for watcher in watchers:
            watcher.notice(tensor)
        return handle

    return told


def _for_one(watcher: Watcher, hook: Callable[..., object]) -> Callable[..., object]:
    replica = watcher.turn()
    if replica is None:
        return hook
    told = weakref.ref(watcher)

    @functools.wraps(hook, assigned=(), updated=())
    def of_one(value: object) -> object:
        of = told()
        now = None if of is None else of.turn()
        # Outside of runs what is there is the first replica's.
        return hook(value) if now == replica or (now is None and replica == 0) else None

    return of_one


told_hook = _telling(register_hook, untold_hook)
told_post_accumulate_grad_hook = _telling(register_post_accumulate_grad_hook, untold_post_accumulate_grad_hook)
"""What is in the place of PyTorch's own once anybody watches."""

REGISTERS_HOOK = frozenset(
    {register_hook, register_post_accumulate_grad_hook, told_hook, told_post_accumulate_grad_hook}
)
"""What a class of tensors may be asked about where a hook is registered on one."""
