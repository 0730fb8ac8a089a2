"""What a step may call that means something else when it runs for all replicas at once.

Memory: how a tensor lies there is nothing that a step may ask. On the devices each is whole and in the order of its
shape.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import ParamSpec

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from torchstrat.core._torch_private import DisableTorchFunction, is_any_autocast_enabled, swap_tensor_impl
from torchstrat.core.errors import ContextError, TorchstratError, UnsupportedError
from torchstrat.core.optimizers import Tier, tier_of
from torchstrat.core.tensor_classes import getter, setter
from torchstrat.replicas.optimizer_step import closure_of, is_running, with_closure
from torchstrat.sharding.tpu.backward import Tensors
from torchstrat.sharding.tpu.draws import Draws, is_draw
from torchstrat.sharding.tpu.edits import Edits, edits_of_each, is_edit, written
from torchstrat.sharding.tpu.lanes import Arguments, Function, Options, TensorSet, steps_own_tensors
from torchstrat.sharding.tpu.limits import current_place, instead_of_read, named, require_possible
from torchstrat.sharding.tpu.number_kinds import Pairs, is_any_complex, lowered, members, of_complex
from torchstrat.sharding.tpu.rewrites import Rewrites

_REARRANGING_NAMES = """
    t T mT H mH transpose permute movedim moveaxis swapaxes swapdims adjoint expand expand_as broadcast_to
    unfold narrow select diagonal chunk split tensor_split unbind hsplit vsplit dsplit flip channel_shuffle
    pixel_shuffle broadcast_tensors __getitem__ rot90 take_along_dim real imag unsafe_chunk unsafe_split einsum
"""
_REARRANGE = members(_REARRANGING_NAMES, torch, torch.Tensor)
"""Results of which plain PyTorch may not keep in the order of their shape, or as a part of something larger."""

_ORDER = members("contiguous", torch, torch.Tensor)
_READS_MEMORY = members("as_strided as_strided_ as_strided_copy as_strided_scatter", torch, torch.Tensor)
_CHANGES_MEMORY = members("as_strided_ resize_ resize_as_ set_ as_strided_scatter", torch, torch.Tensor)


class Layouts:
    """Which tensors of one step plain PyTorch may keep in another order than the devices do."""

    def __init__(self) -> None:
        self._others = TensorSet()

    def require_known(self, func: object, args: Arguments) -> None:
        """Raises `UnsupportedError` where ``func`` looks at memory that is not known."""
        if func not in _READS_MEMORY and func not in _CHANGES_MEMORY:
            return
        name = getattr(func, "__name__", str(func))
        if func in _CHANGES_MEMORY:
            raise UnsupportedError(
                f"{name} in a step changes how a tensor lies in memory (at {current_place()}), of which there is none "
                "on this strategy: make another tensor with reshape, as_strided or torch.empty."
            )
        if args and args[0] in self._others:
            raise UnsupportedError(
                f"{name} in a step reads a tensor by its place in memory (at {current_place()}), and this one has been "
                f"transposed, expanded or cut out of another. Call it on tensor.contiguous(), with strides to match."
            )

    def note(self, func: object, args: Arguments, result: object) -> None:
        """``func(*args)`` was ``result``."""
        if func in _ORDER or not (func in _REARRANGE or (self._others and any(one in self._others for one in args))):
            return
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, torch.Tensor):
                self._others.add(one)


_READS = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.__bool__: "bool(tensor), as in `if tensor:`",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__index__: "using a tensor as an index",
    torch.Tensor.__array__: "making an array of a tensor",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.__format__: "formatting a tensor",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
    torch.Tensor.equal: ".equal()",
    torch.Tensor.allclose: ".allclose()",
}
"""What needs a value that does not exist yet: the step is recorded first, and runs when it has returned."""

_DYNAMIC = {
    torch.nonzero: "torch.nonzero",
    torch.Tensor.nonzero: "torch.nonzero",
    torch.masked_select: "torch.masked_select",
    torch.Tensor.masked_select: "torch.masked_select",
    torch.unique: "torch.unique",
    torch.Tensor.unique: "torch.unique",
}
"""Results whose shape depends on values."""

_FACTORIES = members(
    "arange empty eye full linspace logspace ones rand randint randn randperm scalar_tensor tensor zeros", torch
)

_INDEX_TYPES = (torch.int32, torch.int64)
_DATA_GET = getter("data")
_NO_USES = {
    *(torch.Tensor.requires_grad_, torch.Tensor.detach, torch.Tensor.__deepcopy__, torch.Tensor.backward),
    *(setter("data"), setter("grad")),
    *(
        one.__get__
        for name, one in inspect.getmembers(torch.Tensor, inspect.isgetsetdescriptor)
        if name not in ("T", "mT", "H", "mH", "real", "imag")
    ),
}
"""What a step may ask of a leaf without being differentiated for it."""


class RecordedMode(TorchFunctionMode):
    """Active while a step is recorded, on its thread: refuses what needs a value before there is one.

    ``device``: where tensors go that the step makes without naming a device; an optimizer's own numbers stay where
    PyTorch puts them. ``edits``: told of each tensor that a call is about to change, or shows under another name.
    """

    def __init__(
        self,
        device: torch.device,
        find_rewrite: Callable[[object], Callable[..., object] | None],
        edits: Callable[[torch.Tensor], object],
    ) -> None:
        super().__init__()
        self._device, self._find_rewrite, self._told_of_edits = device, find_rewrite, edits
        self._layouts, self._pairs = Layouts(), Pairs(_REARRANGE)

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # Tensors of that mode have no versions, which mapping over lanes and annotations ask for.
            with torch.inference_mode(False), torch.no_grad():
                return self._guarded(func, args, kwargs)
        return self._guarded(func, args, kwargs)

    def _guarded(self, func: Function, args: Arguments, kwargs: Options) -> object:
        if is_any_autocast_enabled():
            as_plainly = lowered(func, args, kwargs, self._device.type)
            if as_plainly is not None:
                args, kwargs, is_enabled = as_plainly
                if not is_enabled:
                    with torch.autocast(self._device.type, enabled=False):
                        return self._guarded(func, args, kwargs)
        each = edits_of_each(func, args, kwargs)
        if each is not None:
            for edit in each:
                self._guarded(*edit)
            return args[0]
        self._layouts.require_known(func, args)
        for tensor in written(func, args, kwargs):
            self._told_of_edits(tensor)
        if is_any_complex(args):
            func = of_complex(func)
        if self._pairs.made and is_edit(func) and args:
            self._pairs.require_unedited(args[0])
        try:
            result = self.call(func, args, kwargs)
        except TorchstratError:
            raise
        except (RuntimeError, NotImplementedError, IndexError, ValueError, AttributeError, TypeError) as error:
            reason = named(error, func, args, kwargs, self._device)
            if reason is error:
                raise
            raise reason from error
        self._layouts.note(func, args, result)
        self._pairs.note(func, args, result)
        return result

    def call(self, func: Function, args: Arguments, kwargs: Options) -> object:
        """What a function of PyTorch is in a step."""
        rewrite = self._find_rewrite(func)
        if rewrite is not None:
            return rewrite(*args, **kwargs)
        if func in _READS and args and self.is_pending(args[0]):
            raise _hidden_read(_READS[func])
        if func is torch.Tensor.to and self.is_pending(args[0]) and self._names_host(args[1:], kwargs):
            raise _hidden_read(".to('cpu')")
        if func in _DYNAMIC and args and self.is_pending(args[0]):
            raise _dynamic_shape(_DYNAMIC[func])
        if func in _FACTORIES and kwargs.get("device") is None and _steps.current() is None:
            kwargs["device"] = self._device
        return func(*args, **kwargs)

    def is_pending(self, value: object) -> bool:
        """Whether there is no value before the step has been run. (The fake of the tests computes on the CPU.)"""
        return isinstance(value, torch.Tensor) and value.device.type == self._device.type != "cpu"

    def _names_host(self, args: Arguments, kwargs: Mapping[str, object]) -> bool:
        """Whether ``tensor.to(*args, **kwargs)`` goes to the CPU."""
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, torch.Tensor):
            target = target.device
        if target == self._device:
            return False  # `labels.to(logits.device)`, also where a fake of the tests computes on the CPU
        return isinstance(target, str | torch.device) and torch.device(target).type == "cpu"

    @contextmanager
    def active(self) -> Iterator[None]:
        """The mode, and what a mode cannot see."""
        try:
            with self:
                yield
        finally:
            _steps.calls.clear()  # the step may have ended within an optimizer's


class StepMode(RecordedMode):
    """The same for a step that runs for all replicas at once, where some calls mean something else."""

    def __init__(
        self,
        edits: Edits,
        draws: Draws,
        rewrites: Rewrites,
        device: torch.device,
        told_of_edits: Callable[[torch.Tensor], object],
    ) -> None:
        super().__init__(device, rewrites.find, told_of_edits)
        self._edits, self._draws, self._own, self._lanes = edits, draws, edits.own, edits.lanes
        backward = self._backward = edits.backward
        self._handlers: dict[object, Callable[..., object]] = {
            torch.Tensor.backward: self._tensor_backward,
            torch.autograd.grad: backward.grad,
            torch.Tensor.register_hook: backward.register_hook,
            torch.Tensor.requires_grad_: self._requires_grad_,
            torch.Tensor.retain_grad: self._retain_grad,
            getter("grad"): self._grad,
            setter("grad"): edits.set_gradient,
            getter("requires_grad"): self._requires_grad,
            torch.Tensor.__getitem__: self._get_item,
            torch.Tensor.detach_: self._detach_,
            getter("data"): self._data,
            setter("data"): self._set_data,
            torch.Tensor.__deepcopy__: self._deepcopy,
        }

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if _steps.calls and _steps.current() and func not in _READS:
            return func(*args, **kwargs)  # a hundred calls that mean what they say
        result = super().__torch_function__(func, types, args, kwargs)
        self._lanes.notes.add(result)
        return result

    def call(self, func: Function, args: Arguments, kwargs: Options) -> object:
        if torch.is_grad_enabled() and func not in _NO_USES:
            self._own.take_up(args, kwargs)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if is_draw(func):
            plainly = super().call
            result = self._draws.call(func, args, kwargs, lambda: plainly(func, args, kwargs))
        elif args and is_edit(func) and isinstance(args[0], torch.Tensor):
            return self._edits.edit(func, self._find_rewrite(func) or func, args[0], args[1:], kwargs)
        else:
            result = super().call(func, args, kwargs)
        if kwargs.get("requires_grad") and isinstance(result, torch.Tensor):
            return self._own_leaf(result)
        self._edits.note_result(func, args, result)
        return result

    def _own_leaf(self, made: torch.Tensor) -> torch.Tensor:
        """A leaf that the step makes is each replica's own, from its values on: so are gradients and steps of it."""
        if not self._lanes.is_at_level:
            return made
        with self._lanes.left("a tensor that takes gradients"):
            if self._lanes.is_lane_tensor(made):  # mapping has made it without
                self._lanes.behind(made).requires_grad_()
                return made
            return self._lanes.hide(self._lanes.stacked(made.detach()).clone().requires_grad_())

    def is_pending(self, value: object) -> bool:
        return self._lanes.is_lane_tensor(value) or super().is_pending(value)

    def _tensor_backward(
        self,
        tensor: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensors | None = None,
    ) -> None:
        self._backward.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def _requires_grad_(self, tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if self._lanes.is_inside_transform:
            return tensor.requires_grad_(requires_grad)
        if requires_grad and self._edits.is_alone(tensor):
            self._edits.make_own(torch.Tensor.requires_grad_, tensor)
        with self._lanes.left("requires_grad_"):
            self._lanes.behind(tensor).requires_grad_(requires_grad)
        return tensor

    def _retain_grad(self, tensor: torch.Tensor) -> None:
        if not self._lanes.is_lane_tensor(tensor) or self._lanes.behind(tensor).is_leaf:
            return  # it has its gradient anyway
        raise UnsupportedError(
            f"retain_grad in a step (at {current_place()}): what the replicas compute is one tensor for all of them, "
            "which keeps no gradient of each. Take it by a hook: kept = []; tensor.register_hook(kept.append)."
        )

    def _get_item(self, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if (
            isinstance(index, torch.Tensor)
            and self._lanes.is_lane_tensor(index)
            and index.ndim == 0
            and index.dtype in _INDEX_TYPES
        ):
            # ``table[replica_id]``: PyTorch takes a single integer for a number that it can look at.
            return tensor.index_select(0, index.reshape(1)).squeeze(0)
        taken = tensor[index]
        self._edits.note_result(torch.Tensor.__getitem__, (tensor,), taken)
        return taken

    def _data(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._lanes.is_lane_tensor(tensor):
            return tensor.detach()
        self._edits.expose(tensor)
        data = tensor.data
        self._edits.note_result(_DATA_GET, (tensor,), data)
        return data

    def _set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        if self._lanes.is_lane_tensor(tensor) or self._lanes.is_lane_tensor(data):
            self._own.set_data(tensor, data)
            return
        self._edits.expose(tensor)
        tensor.data = data

    def _detach_(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._lanes.is_lane_tensor(tensor):
            return tensor.detach_()
        swap_tensor_impl(tensor, tensor.detach())
        return tensor

    def _requires_grad(self, tensor: torch.Tensor) -> bool:
        return self._lanes.behind(tensor).requires_grad

    def _grad(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._own.gradient_of(tensor) if self._lanes.is_lane_tensor(tensor) else tensor.grad

    def _deepcopy(self, tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
        """As `copy.deepcopy` of a tensor that is no parameter."""
        if id(tensor) in memo or not (self._lanes.is_lane_tensor(tensor) or tensor.requires_grad):
            copied: torch.Tensor = tensor.__deepcopy__(memo)
            self._edits.note_result(torch.Tensor.__deepcopy__, (tensor,), copied)
            return copied
        copied = tensor.detach().clone()
        memo[id(tensor)] = copied
        return self._own_leaf(copied) if self._requires_grad(tensor) else copied

    @contextmanager
    def active(self) -> Iterator[None]:
        """The mode, and what a mode cannot see: ``torch.autograd.backward``."""
        before, _steps.before = _steps.before, self._before_step
        try:
            with _backward_calls(self._backward.backward), super().active():
                yield
        finally:
            _steps.before = before

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        with DisableTorchFunction():
            self._own.before_step(optimizer)
        if steps_own_tensors(optimizer):
            self._own.note_step_of(optimizer)
            self._edits.registry.note_step_of(optimizer)


class _OptimizerSteps(threading.local):
    """The steps that this thread is in."""

    def __init__(self) -> None:
        self.calls: list[tuple[FrameType, bool]] = []
        """Of `current`; those of steps that have raised, where the program went on, are passed over."""
        self.before: Callable[[torch.optim.Optimizer], None] | None = None
        """Called with every optimizer that is about to step."""

    def current(self) -> bool | None:
        """Whether the innermost step works on variables and gradients only, which all replicas share, and not in a
        closure of the user's; None outside of steps."""
        while self.calls:
            frame, is_plain = self.calls[-1]
            if is_running(frame):
                return is_plain
            self.calls.pop()
        return None

    def end(self, ended: FrameType) -> None:
        """Nothing, for a step of another thread's that had begun before anybody watched."""
        frames = [frame for frame, _ in self.calls]
        if ended in frames:
            del self.calls[frames.index(ended) :]

    def outside(self, closure: Callable[[], object]) -> object:
        """Code of the user's, which a step calls."""
        frame = sys._getframe()
        self.calls.append((frame, False))
        try:
            return closure()
        finally:
            self.end(frame)


_steps = _OptimizerSteps()


@contextmanager
def optimizers_watched(stepped: Callable[[], object]) -> Iterator[None]:
    """In this block every `StepMode` knows when an optimizer steps on its thread; ``stepped`` is called after each."""

    def enter(
        optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: Options
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        require_possible(optimizer)
        if _steps.before is not None:
            _steps.before(optimizer)
        closure = closure_of(args, kwargs)
        # What others do with a closure's loss, which differs from lane to lane, is not known.
        is_plain = closure is None or tier_of(optimizer) is not Tier.ALL
        _steps.calls.append((sys._getframe(1), is_plain and not steps_own_tensors(optimizer)))
        return closure and with_closure(optimizer, partial(_steps.outside, closure), args, kwargs)

    def leave(*_: object) -> None:
        _steps.end(sys._getframe(1))
        stepped()

    handles = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Parameters = ParamSpec("Parameters")


class _Redirect(threading.local):
    target: Callable[..., None] | None = None


_redirect = _Redirect()
_original_backward = torch.autograd.backward


def _redirected(original: Callable[Parameters, None]) -> Callable[Parameters, None]:
    def backward(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        target = _redirect.target
        if target is None:
            original(*args, **kwargs)
            return
        _redirect.target = None  # it calls torch's own
        try:
            target(*args, **kwargs)
        finally:
            _redirect.target = target

    return backward


@contextmanager
def _backward_calls(target: Callable[..., None]) -> Iterator[None]:
    """In this block and thread ``torch.autograd.backward`` is ``target``. The name stays redirected once it has been;
    a call from anywhere else finds torch's own behind it."""
    if torch.autograd.backward is _original_backward:
        torch.autograd.backward = _redirected(_original_backward)
    before, _redirect.target = _redirect.target, target
    try:
        yield
    finally:
        _redirect.target = before


def _hidden_read(what: str) -> ContextError:
    return ContextError(
        f"{what} in a step needs a value that is not there yet: on this strategy a step is recorded for all replicas, "
        f"compiled, and run when it has returned. It is at {current_place()}. {instead_of_read()}"
    )


def _dynamic_shape(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} in a step gives a result whose shape depends on values, which a compiled step cannot have (at "
        f"{current_place()}). Keep the shape and mask: torch.where(condition, value, 0)."
    )
