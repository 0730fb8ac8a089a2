"""The strategy's variables that are cut: each process holds its piece of them.

A parameter stays one Python object, which modules, optimizers and the user hold, and stands for three things:

* outside of `run`: a plain parameter of the whole shape on ``meta``, which takes no memory. It has no values to read or
  to change by mistake; ``state_dict()`` and checkpoints put the whole together, and take it apart again. If the piece
  has a gradient, it has one like itself, and where it is set to None there (``zero_grad()``), so is the piece's.
* for the engine and the optimizer, in `run`: a plain leaf, this process's piece. Its gradient is the piece's.
* for the step: by its class (`torchstrat.sharding.dtensor.step`) a `CutTensor`, which autograd leads back to the leaf.

First values of variables that were made on ``meta``: each process draws all of them and keeps its piece.

A module too large for one process is made in the scope with ``torch.device("meta")``: it has shapes and no memory. When
the scope closes, its ``reset_parameters()`` is called, which knows shapes (and so the fan in) of the whole. What it
writes to a parameter is made a few rows at a time, in the order of the whole, so that the numbers are those that one
process would draw, and no process ever holds more than its piece and a few rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrat.core._torch_private import (
    DisableTorchFunction,
    give_hooks,
    hooks_after_accumulation,
    hooks_on_gradient,
    is_accumulator_kept,
    own_parameters,
    share_storage,
    swap_tensor_impl,
    version_of,
)
from torchstrat.core.errors import ContextError, InvalidArgumentError, ReplicaDivergenceError, UnsupportedError
from torchstrat.core.gradients import GradientHook
from torchstrat.core.randomness import state_of
from torchstrat.core.registration_order import reference_of_entry
from torchstrat.core.tensor_classes import WholeValue, class_of_pieces, in_place_of, piece_of, plain_kind, stands_for
from torchstrat.core.variables import VariableRegistry
from torchstrat.distributed.collectives.agreement import agree, all_equal, code
from torchstrat.replicas.exchange import broadcast_tensors
from torchstrat.sharding.dtensor import optimizer_state
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, cut_tensor, enter, leave, local_of, shape_of
from torchstrat.sharding.dtensor.devices import Cut, LogicalDevices
from torchstrat.sharding.dtensor.no_values import Note, without_values
from torchstrat.sharding.dtensor.optimizer_state import WholeCopies
from torchstrat.sharding.grid import Sharding

_STEP_BYTES = 1 << 22
_BLOCK = 16
"""PyTorch draws normal numbers in blocks of so many: rows are drawn in multiples, and so are the same as in one go."""

_aten = torch.ops.aten
_DRAWS = {_aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default}
_EDITS = {
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.mul_.Scalar,
    _aten.add_.Scalar,
    _aten.mul_.Tensor,
    _aten.add_.Tensor,
    _aten.clamp_.default,
    _aten.erfinv_.default,
}
"""What changes elements one by one."""


class Place(NamedTuple):
    piece: torch.Tensor
    cut: Cut


def draw_first_values(module: nn.Module, places: dict[int, Place], devices: LogicalDevices) -> None:
    """Call ``module.reset_parameters()``. ``places``: ``id`` of its parameters on meta → where the values go.

    Raises `InvalidArgumentError` if there is no such method, `UnsupportedError` if it does what is not known in pieces.
    """
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        raise InvalidArgumentError(
            f"a {type(module).__name__} was made on meta and has no reset_parameters() to give its parameters values; "
            "write one, or make the module elsewhere."
        )
    drawing = _InPieces(places, devices)
    with drawing:
        reset()
    missing = [name for name, one in own_parameters(module).items() if id(one) in places.keys() - drawing.written]
    if missing:
        raise InvalidArgumentError(
            f"reset_parameters() of a {type(module).__name__} that was made on meta gave {', '.join(missing)} no value."
        )


class _InPieces(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks before it wraps `__torch_dispatch__` in something that imports its compiler: 75 MB."""
        return False

    def __init__(self, places: dict[int, Place], devices: LogicalDevices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places, self._devices = places, devices
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = self._places.get(id(args[0])) if args else None
        if place is None or func is _aten.detach.default:
            return func(*args, **kwargs)
        if func in _DRAWS:
            self._draw(func, args, kwargs, place)
        elif func in _EDITS:
            func(place.piece, *args[1:], **kwargs)
        else:
            raise UnsupportedError(
                f"{func} of a parameter that was made on meta and is to be cut over logical devices: only "
                "random and constant numbers are known there. Make the module without torch.device('meta')."
            )
        self.written.add(id(args[0]))
        return args[0]

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, object], place: Place) -> None:
        whole, axes = args[0], self._devices.axes
        if whole.ndim == 0:
            func(place.piece, *args[1:], **kwargs)
            return
        rows_axes = axes.axes_of(place.cut, 0)
        first = axes.index_along(self._devices.own, rows_axes) * place.piece.shape[0]
        others = tuple(None if dim == 0 else dim for dim in place.cut)
        steps = list(_steps(whole.shape, place.piece.element_size()))
        most = max((stop - start for start, stop in steps), default=0)
        rows = torch.empty((most, *whole.shape[1:]), dtype=place.piece.dtype, device=place.piece.device)
        for start, stop in steps:
            drawn = rows[: stop - start]
            func(drawn, *args[1:], **kwargs)
            low, high = max(start, first), min(stop, first + place.piece.shape[0])
            if low < high:
                own = self._devices.own_piece(drawn[low - start : high - start], others)
                place.piece[low - first : high - first].copy_(own)


def _steps(shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of whole blocks of elements but the last, which is never the smallest."""
    rows, inner = shape[0], math.prod(shape[1:])
    unit = _BLOCK // math.gcd(_BLOCK, max(1, inner))
    step = max(unit, _STEP_BYTES // max(1, inner * item_bytes) // unit * unit)
    start = 0
    while start < rows:
        stop = rows if rows - start < 2 * step else start + step
        yield start, stop
        start = stop


ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
"""From a parameter's dotted name and shape to how it is cut."""

DRAWING = "the first values of variables that were made on meta"
TAKING = "taking over the initial values of the first logical device"


@dataclass
class CutVariable:
    """One variable. ``other``: what ``tensor`` does not stand for at the moment, its piece or the empty whole."""

    reference: weakref.ref[torch.Tensor]
    sharding: Sharding
    cut: Cut
    shape: tuple[int, ...]
    other: torch.Tensor
    kind: type
    """The class of ``tensor`` where it has values."""
    note: Note
    version: int = 0
    """Of the empty whole, when the last run ended: it must not have been changed since."""
    shown: torch.Tensor | None = None
    """The gradient of the empty whole, since the last run ended; as empty."""
    gradient: torch.Tensor | None = None
    """That of the piece, when the last run ended."""


class CutVariables:
    """The variables of one strategy, and which of them are cut."""

    def __init__(self, registry: VariableRegistry, devices: LogicalDevices, sharding_of: ShardingOf | None) -> None:
        self._registry, self._devices, self._sharding_of = registry, devices, sharding_of
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._planned: dict[int, tuple[weakref.ref[torch.Tensor], Sharding]] = {}
        self._cut: dict[int, CutVariable] = {}
        self._copies = WholeCopies()
        self._is_inside = False

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether variables stand for their pieces."""
        return self._is_inside

    def __len__(self) -> int:
        return len(self._cut)

    def find(self, tensor: torch.Tensor) -> CutVariable | None:
        """None for a tensor that is no variable that is cut."""
        found = self._cut.get(id(tensor))
        return found if found is not None and found.reference() is tensor else None

    def is_variable(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or tensor in self._registry

    def planned(self, tensor: torch.Tensor) -> Sharding:
        """How a variable is cut, or will be when its scope closes."""
        known = self.find(tensor)
        if known is not None:
            return known.sharding
        said = self._planned.get(id(tensor))
        if said is not None and said[0]() is tensor:
            return said[1]
        name = self._registry.outermost_names().get(id(tensor)) if self._sharding_of is not None else None
        if name is None or self._sharding_of is None or self._is_known(tensor):
            return Sharding.replicated(tensor.ndim, self._devices.axes.num_logical_devices)
        return self._sharding_of(name, tuple(tensor.shape))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of it, as a new tensor; all logical devices call it."""
        found = self.find(tensor)
        assert found is not None
        return self._whole_of(found)

    def _whole_of(self, entry: CutVariable) -> torch.Tensor:
        tensor = entry.reference() if self._is_inside else entry.other
        assert tensor is not None
        return self._devices.whole(tensor.detach(), entry.cut, "state_dict()")

    def _is_known(self, tensor: torch.Tensor) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found() is tensor

    # -- taking over ------------------------------------------------------------------------------------------------

    def plan(self, tensor: torch.Tensor, sharding: Sharding) -> None:
        """Cut a variable like ``sharding``: now, or when its scope closes. Not in a run."""
        known = self.find(tensor)
        if known is not None and known.cut != self._devices.axes.cut_of(sharding):
            raise UnsupportedError(
                f"a variable of shape {known.shape} is cut already, like {known.sharding.spec}, and cannot be cut "
                f"again, like {sharding.spec}; say it once, in the scope."
            )
        self._planned[id(tensor)] = weakref.ref(tensor), sharding
        is_cut = self._devices.axes.cut_of(sharding) != self._devices.axes.whole
        if known is None and is_cut and self._is_known(tensor):
            self._cut_up(tensor, sharding)

    def draw(self) -> None:
        """Give variables that were made on meta their first values, in pieces. All logical devices call it, when a
        scope closes, before `take`."""
        found: list[tuple[nn.Module, list[torch.Tensor]]] = []
        for module in {id(one): one for root in self._registry.modules() for one in root.modules()}.values():
            members: list[torch.Tensor | None] = [*own_parameters(module).values()]
            empty = [one for one in members if one is not None and self._has_no_value(one)]
            if empty:
                found.append((module, empty))
        if not found:
            return
        state = self._devices.everyone.broadcast_object(state_of(), 0, DRAWING)
        torch.set_rng_state(state)
        for module, empty in found:
            self._draw_one(module, [one for one in empty if self._has_no_value(one)])

    def _has_no_value(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and not is_lazy(tensor) and self.find(tensor) is None

    def _draw_one(self, module: nn.Module, parameters: list[torch.Tensor]) -> None:
        axes = self._devices.axes
        shardings = [self.planned(one) for one in parameters]
        cuts = [axes.cut_of(sharding) for sharding in shardings]
        pieces = [
            torch.empty(axes.piece_shape(tuple(one.shape), cut), dtype=one.dtype, device=self._devices.device)
            for one, cut in zip(parameters, cuts, strict=True)
        ]
        places = {id(one): Place(piece, cut) for one, piece, cut in zip(parameters, pieces, cuts, strict=True)}
        draw_first_values(module, places, self._devices)
        for one, piece, cut, sharding in zip(parameters, pieces, cuts, shardings, strict=True):
            if cut == axes.whole:
                swap_tensor_impl(one, in_place_of(one, piece))
            else:
                self._note(self._known, one)
                if not hooks_on_gradient(one):  # else the next run refuses it
                    swap_tensor_impl(one, self._piece_like(one, one))
                self._enter(one, sharding, cut, tuple(one.shape), self._piece_like(one, piece))

    def take(self) -> None:
        """Give new variables the values of the replica's first logical device, and cut those that are to be. All
        logical devices call it, between runs."""
        self._copies.settle()
        tensors = self._registry.tensors()
        tensors += [slot.tensor for slot in self._registry.buffer_slots() if slot.tensor is not None]
        unique = {id(tensor): tensor for tensor in tensors if not is_lazy(tensor) and not self._is_known(tensor)}
        new = list(unique.values())
        if not new:
            return
        for tensor in new:
            if tensor.is_meta:
                raise InvalidArgumentError(
                    f"{self._registry.describe(tensor)} is on meta and has no values; make it in the scope. A copy of "
                    "a module whose parameters are cut has none either: copy its state_dict() instead."
                )
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in new]
        if not all_equal(agree(self._devices.everyone, TAKING, (code(repr(shapes)),))):
            raise ReplicaDivergenceError(
                f"the logical devices of a replica have made different variables; here they are {shapes}. All of them "
                "have to run the same program."
            )
        shardings = [self.planned(tensor) for tensor in new]
        cuts = [self._devices.axes.cut_of(sharding) for sharding in shardings]
        broadcast_tensors(self._devices.everyone, [tensor.detach() for tensor in new], 0, TAKING)
        known = self._known
        for tensor, sharding, cut in zip(new, shardings, cuts, strict=True):
            self._note(known, tensor)
            if cut != self._devices.axes.whole:
                self._cut_up(tensor, sharding)

    @staticmethod
    def _note(known: dict[int, weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> None:
        key = id(tensor)

        def forget(reference: object) -> None:
            if known.get(key) is reference:
                del known[key]

        known[key] = weakref.ref(tensor, forget)

    def _cut_up(self, tensor: torch.Tensor, sharding: Sharding) -> None:
        cut = self._devices.axes.cut_of(sharding)
        shape = tuple(tensor.shape)
        self._require_no_hooks(tensor)
        self._require_asking(tensor)
        sharding.tile_shape(shape, 1)  # as many dimensions
        piece = self._piece_like(tensor, self._devices.own_piece(tensor.detach(), cut).clone())
        if tensor.grad is not None:
            piece.grad = self._devices.own_piece(tensor.grad, cut).clone()
        give_hooks(piece, hooks_on_gradient(tensor), hooks_after_accumulation(tensor))
        self._cut_states(tensor, shape, cut)
        empty = self._piece_like(tensor, torch.empty(shape, dtype=tensor.dtype, device="meta"))
        swap_tensor_impl(tensor, empty)  # what it was goes with this name
        self._enter(tensor, sharding, cut, shape, piece)

    def _enter(
        self, tensor: torch.Tensor, sharding: Sharding, cut: Cut, shape: tuple[int, ...], piece: torch.Tensor
    ) -> None:
        """``tensor`` is the empty whole by now."""
        key, entries = id(tensor), self._cut
        kind, version = plain_kind(type(tensor)), version_of(tensor)
        note = Note("a variable", self._devices.device, copy=lambda: self._copy_of(entries[key]))
        entry = CutVariable(reference_of_entry(tensor, entries), sharding, cut, shape, piece, kind, note, version)
        entries[key] = entry
        tensor.__class__ = class_of_pieces(kind)
        without_values(tensor, note)
        value = WholeValue(
            lambda: self._whole_of(entry),
            lambda whole: self._assign(entry, whole),
            lambda piece: optimizer_state.entry_of(piece, cut, self._devices),
        )
        stands_for(tensor, value)

    def _copy_of(self, entry: CutVariable) -> torch.Tensor:
        """Another variable of the same values, outside of a run; each process copies its piece."""
        with DisableTorchFunction():
            tensor = entry.reference()
            assert tensor is not None
            piece = piece_of(entry.kind, entry.other.clone(), requires_grad=entry.other.requires_grad)
            empty = torch.empty(entry.shape, dtype=piece.dtype, device="meta")
            made = piece_of(entry.kind, empty, requires_grad=tensor.requires_grad)
            self._note(self._known, made)
            self._enter(made, entry.sharding, entry.cut, entry.shape, piece)
        return made

    @staticmethod
    def _piece_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return piece_of(type(tensor), value, requires_grad=tensor.requires_grad)

    def _cut_states(self, tensor: torch.Tensor, shape: tuple[int, ...], cut: Cut) -> None:
        """What an optimizer knows of a variable that it has stepped before."""
        for optimizer in self._registry.optimizers():
            state = optimizer.state.get(tensor, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                    state[name] = optimizer_state.cut_entry(value, cut, self._devices)

    # -- in a run ---------------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self) -> Iterator[None]:
        """In this block variables stand for their pieces."""
        found: list[tuple[torch.Tensor, CutVariable]] = []
        with DisableTorchFunction():
            for entry in list(self._cut.values()):
                tensor = entry.reference()
                if tensor is not None:
                    self._require_unchanged(tensor, entry)
                    self._follow_gradient(tensor, entry)
                    found.append((tensor, entry))
        try:
            self._is_inside = True
            for tensor, entry in found:
                tensor.__class__ = class_of_pieces(entry.kind)
                if entry.other.requires_grad != tensor.requires_grad:
                    entry.other.requires_grad_(tensor.requires_grad)
                swap_tensor_impl(tensor, entry.other)
                entry.gradient = None  # a step may forget it, and make another
            yield
        finally:
            self._is_inside = False
            for tensor, entry in found:
                if entry.other.is_meta:  # else interrupted before its turn
                    swap_tensor_impl(tensor, entry.other)
                    if entry.other.requires_grad != tensor.requires_grad:
                        tensor.requires_grad_(entry.other.requires_grad)
                    entry.version = version_of(tensor)
                    self._show_gradient(tensor, entry)
                without_values(tensor, entry.note)

    def _show_gradient(self, tensor: torch.Tensor, entry: CutVariable) -> None:
        entry.gradient = entry.other.grad
        if entry.gradient is None:
            tensor.grad = entry.shown = None
        elif entry.shown is None:
            empty = torch.empty(entry.shape, dtype=entry.gradient.dtype, device="meta")
            tensor.grad = piece_of(torch.Tensor, empty, requires_grad=False)
            note = Note("the gradient of a variable", self._devices.device, zero=lambda: _zero(entry.gradient))
            entry.shown = without_values(tensor.grad, note)

    def _follow_gradient(self, tensor: torch.Tensor, entry: CutVariable) -> None:
        """What has been done to the gradient of the empty whole is to be done to the piece's, or raises."""
        was_left = entry.other.grad is entry.gradient  # else a backward pass outside of a run has made another
        if tensor.grad is entry.shown and (entry.shown is None or version_of(entry.shown) == 0):
            return
        if tensor.grad is not None or not was_left:
            raise ContextError(
                f"the gradient of {self._registry.describe(tensor)} was changed outside of run, where that of a "
                "variable that is cut over logical devices has no values. Change it in strategy.run; "
                "zero_grad() may be called outside, before backward()."
            )
        entry.other.grad = entry.shown = entry.gradient = None

    def _require_no_hooks(self, tensor: torch.Tensor) -> None:
        """But the engine's, which knows pieces."""
        hooks = [*(hooks_on_gradient(tensor) or {}).values()]
        hooks += (hooks_after_accumulation(tensor) or {}).values()
        if any(not isinstance(hook, GradientHook) for hook in hooks):
            raise UnsupportedError(
                f"{self._registry.describe(tensor)} is cut over logical devices and has a hook of its own, which would "
                "see the gradient of a piece. Do what it does in the step, after backward()."
            )

    def _require_asking(self, tensor: torch.Tensor) -> None:
        """What holds the memory itself would go on with the values of before."""
        holder = ""
        scripts = (one for one in self._registry.modules() if isinstance(one, torch.jit.ScriptModule))
        if any(tensor is member for script in scripts for member in own_parameters(script).values()):
            holder = "is in a module of TorchScript (torch.jit)"
        elif is_accumulator_kept(tensor):
            holder = "has its AccumulateGrad node kept by the program, as for a hook there"
        if holder:
            raise UnsupportedError(
                f"{self._registry.describe(tensor)} is to be cut over logical devices and {holder}, which does not ask "
                "for its pieces. Leave it whole (no sharding rule for it), or do without."
            )

    def _require_unchanged(self, tensor: torch.Tensor, entry: CutVariable) -> None:
        self._require_no_hooks(tensor)
        is_as_it_was = (version_of(tensor), tensor.dtype, tuple(tensor.shape)) == (
            entry.version,
            entry.other.dtype,
            entry.shape,
        )
        if not is_as_it_was or not tensor.is_meta:
            raise ContextError(
                f"{self._registry.describe(tensor)} was changed outside of run, where a variable that is cut over "
                "logical devices has no values. Change it in strategy.run, or by load_state_dict or "
                "Checkpoint.restore."
            )

    def stand_ins(self) -> dict[int, CutTensor]:
        """``id`` of a variable → what a step sees of it; with a graph also where the variable requires no gradients,
        which a step may change."""
        made: dict[int, CutTensor] = {}
        with torch.enable_grad(), torch.inference_mode(False):
            for key, entry in self._cut.items():
                tensor = entry.reference()
                if tensor is not None:
                    wants_gradient = tensor.requires_grad
                    if not wants_gradient and (tensor.is_floating_point() or tensor.is_complex()):
                        tensor.requires_grad_(True)
                    one: Any = leave(tensor, self._devices, entry.cut)
                    if not wants_gradient:
                        tensor.requires_grad_(False)
                    one.variable, one.is_value = tensor, True
                    made[key] = one
        return made

    def cut_in(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The optimizer's variables that are cut."""
        return [one for group in optimizer.param_groups for one in group["params"] if self.find(one) is not None]

    # -- states of optimizers ---------------------------------------------------------------------------------------

    def whole_state(self, value: object) -> Any:
        """An entry of an optimizer's state, put together if it is cut."""
        if not isinstance(value, CutTensor):
            return value
        self._copies.settle()
        with _versions_counted():
            whole = self._devices.whole(local_of(value), value.cut, "optimizer.state_dict()")
            self._copies.note(whole, lambda: value)
        return whole

    def cut_state(self, tensor: torch.Tensor, value: object) -> Any:
        """The other way round, for the state of ``tensor``. Where PyTorch has nothing to convert, steps are to change
        ``value`` too."""
        entry = self.find(tensor)
        if entry is None or not isinstance(value, torch.Tensor) or tuple(shape_of(value)) != entry.shape:
            return value
        current = self._copies.current(value)
        dtype = tensor.dtype if tensor.is_floating_point() else value.dtype
        is_kept = (value.dtype, value.device) == (dtype, self._devices.device)
        if is_kept and isinstance(current, optimizer_state.StateEntry) and current.cut == entry.cut:
            return current
        with _versions_counted():
            made = optimizer_state.cut_entry(current, entry.cut, self._devices, dtype)
        if is_kept and (type(value) is torch.Tensor or self._copies.has(value)):
            self._copies.note(value, lambda: made)
        return made

    @contextmanager
    def states_as_pieces(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """In this block entries of its state are pieces, for it to step."""
        optimizer_state.take_states(optimizer, self, self._devices)
        with optimizer_state.as_pieces(optimizer, self, self._devices):
            yield

    def whole_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for ``state_dict()``, outside of a run."""
        self._copies.settle()
        entry = self.find(tensor)
        assert entry is not None
        with _versions_counted():
            whole = self.whole(tensor)
            self._copies.note(whole, lambda: cut_tensor(entry.other.detach(), entry.cut, self._devices))
        return whole

    def load(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Give a variable that is cut the values of ``whole``, outside of a run."""
        entry = self.find(tensor)
        assert entry is not None
        current = self._copies.current(whole)
        is_itself = isinstance(current, CutTensor) and share_storage(local_of(current), entry.other)
        if not is_itself:
            self._assign(entry, current)

    def _assign(self, entry: CutVariable, whole: torch.Tensor) -> None:
        with torch.no_grad():
            entry.other.copy_(enter(whole.detach(), self._devices, entry.cut, ()))


@contextmanager
def _versions_counted() -> Iterator[None]:
    """What is made in this block is no tensor of `torch.inference_mode`, whatever is around it: these tell nobody that
    they have been written to, and no step may change them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _zero(gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        gradient.zero_()
