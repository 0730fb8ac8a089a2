"""Settings that torch and Python keep per thread, handed on to replicas' threads and back, and put aside for the
engine's own work; and what blocks of a step set for the whole process, swapped with the replicas' turns."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchstrat.core._torch_private import (
    DisableTorchFunction,
    count_dispatch_modes,
    count_function_modes,
    dispatch_mode_stack,
    function_mode_stack,
    global_module_hooks,
    is_any_autocast_enabled,
    parametrization_cache,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    saved_tensor_hooks,
    set_by_blocks,
    set_grad_enabled,
    uncompiled,
)

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class PlainSettings(NamedTuple):
    """Gradient and inference mode, and autocast: what can be sent to another process."""

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    autocast_cache: bool = True

    @staticmethod
    def here() -> PlainSettings:
        """Those of the calling thread."""
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if not is_any_autocast_enabled():
            return AS_A_THREAD_BEGINS if grad and not inference else PlainSettings(grad, inference)
        return PlainSettings(grad, inference, _autocast_dtypes(), torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """On this thread, where none of it is set."""
        with contextlib.ExitStack() as stack:
            for device_type, dtype in self.autocast:
                entered = torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache)
                stack.enter_context(entered)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            elif not self.grad:
                stack.enter_context(torch.no_grad())
            yield

    def leave(self) -> None:
        """Set what functions set for what comes after them: no inference mode, which is there for blocks alone."""
        torch.set_grad_enabled(self.grad)
        for device in {device for device, _ in (*_autocast_dtypes(), *self.autocast)}:
            torch.set_autocast_enabled(device, device in dict(self.autocast))
        for device, dtype in self.autocast:
            torch.set_autocast_dtype(device, dtype)


AS_A_THREAD_BEGINS = PlainSettings()


SCOPE = "strategy.scope()"
"""What a mode says it is (``shown_as``) that a scope has entered, and not the program."""


def what_sees_operators() -> str:
    """What the program has set on this thread to see, or to change, what operators do, and cannot be sent: a name for
    it, or nothing. A default device, which is a mode as well, is left out."""
    modes = function_mode_stack() if count_function_modes() else []
    modes = [mode for mode in modes if type(mode).__module__ != "torch.utils._device"]  # imported when there is one
    modes += dispatch_mode_stack() if count_dispatch_modes() else []
    if modes:
        return getattr(modes[-1], "shown_as", f"{type(modes[-1]).__name__}()")
    return "" if saved_tensor_hooks() is None else "torch.autograd.graph.saved_tensors_hooks(…)"


class _Left(NamedTuple):
    """What a program's function has left behind it on its thread."""

    settings: PlainSettings
    context: contextvars.Context
    locals: list[dict[str, object]]


class ThreadState:
    """Taken on construction, on the calling thread: gradient and inference mode, autocast, function and dispatch modes
    (the default device is one), hooks on saved tensors, the number of threads for operators, CUDA streams, context
    variables, and ``apart``: the program's objects that have other attributes on each thread."""

    def __init__(self, apart: Sequence[threading.local] = ()) -> None:
        self._locals = [(one, dict(vars(one))) for one in apart]
        self._left: _Left | None = None
        self._settings = PlainSettings.here()
        self._function_modes = function_mode_stack() if count_function_modes() else []
        self._dispatch_modes = dispatch_mode_stack() if count_dispatch_modes() else []
        self._saved_tensor_hooks = saved_tensor_hooks()
        self._threads = torch.get_num_threads()
        self._context = contextvars.copy_context()
        has_cuda = torch.cuda.is_initialized()
        self._streams = [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())] if has_cuda else []
        self._is_plain = self._settings == AS_A_THREAD_BEGINS and not (
            self._function_modes or self._dispatch_modes or self._saved_tensor_hooks is not None
        )

    def call(self, device: torch.device, fn: Callable[[], Any], *, lasts: bool = False) -> Any:
        """Run ``fn`` on this thread as if it were the other one, with ``device`` as the current CUDA device.

        ``lasts``: `hand_back` is to give the other one what ``fn`` leaves.
        """
        context = self._context.copy()
        for one, values in self._locals:
            _give(one, values)
        return context.run(self._call, device, partial(self._note_left, fn, context) if lasts else fn)

    def _note_left(self, fn: Callable[[], object], context: contextvars.Context) -> object:
        result = fn()
        self._left = _Left(PlainSettings.here(), context, [dict(vars(one)) for one, _ in self._locals])
        return result

    def hand_back(self) -> None:
        """On the thread of the construction: what a step sets there counts behind it, as on one device."""
        left, self._left = self._left, None
        if left is None:
            return
        if left.settings != self._settings:
            left.settings.leave()
        for variable, value in left.context.items():
            if self._context.get(variable, _Left) is not value:
                variable.set(value)
        for (one, _), values in zip(self._locals, left.locals, strict=True):
            _give(one, values)

    def _call(self, device: torch.device, fn: Callable[[], object]) -> object:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._is_plain and device.type != "cuda" and not count_function_modes() and not count_dispatch_modes():
            try:
                return fn()  # nothing to set
            finally:
                leave_plain()
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self._streams[device.index or 0] if self._streams else None))
            stack.enter_context(self._settings.in_force())
            if self._saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensor_hooks))
            stack.enter_context(_modes(self._function_modes, self._dispatch_modes))
            return fn()


def _give(one: threading.local, values: dict[str, object]) -> None:
    own = vars(one)
    own.clear()
    own.update(values)


def _autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def _modes(function_modes: list[object], dispatch_modes: list[object]) -> Iterator[None]:
    """Exactly these modes, as they are: entering a mode again may reset it (torch's FLOP counter does), and a device's
    mode keeps what it replaced in a global. Modes that the block leaves behind go with it."""
    before = function_mode_stack(), dispatch_mode_stack()
    _set_modes(function_modes, dispatch_modes)
    try:
        yield
    finally:
        _set_modes(*before)


def _set_modes(function_modes: list[object], dispatch_modes: list[object]) -> None:
    for _ in range(len(function_mode_stack())):
        pop_function_mode()
    for _ in range(count_dispatch_modes()):
        pop_dispatch_mode()
    for mode in function_modes:
        push_function_mode(mode)
    for mode in dispatch_modes:
        push_dispatch_mode(mode)


def leave_plain() -> str:
    """Put back on this thread, where nothing was set, what a program's function has set and left behind it, so that the
    next one does not depend on it; what that was."""
    left = []
    if not torch.is_grad_enabled():
        left.append("gradients off (torch.set_grad_enabled)")
        torch.set_grad_enabled(True)
    if is_any_autocast_enabled():
        left.append("autocast on (torch.set_autocast_enabled)")
        for device, _ in _autocast_dtypes():
            torch.set_autocast_enabled(device, False)
    if count_function_modes() or count_dispatch_modes():
        left.append("a mode for all functions (torch.set_default_device is one)")
        torch.set_default_device(None)  # knows its own mode
        _set_modes([], [])
    return ", ".join(left)


class OwnSettings:
    """``with OwnSettings():`` around the engine's work in the midst of user code: no gradients, no inference mode (its
    tensors would refuse to take part in training later), no modes that look at or change what the engine does."""

    __slots__ = ("_dispatch_modes", "_grad", "_guard", "_inference")

    @uncompiled  # hooks of modules come to it in compiled functions, too
    def __enter__(self) -> None:
        self._guard = DisableTorchFunction()
        self._guard.__enter__()
        self._dispatch_modes = dispatch_mode_stack() if count_dispatch_modes() else []
        for _ in self._dispatch_modes:
            pop_dispatch_mode()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        if self._grad:
            set_grad_enabled(False)

    @uncompiled
    def __exit__(self, *_: object) -> None:
        if self._grad:
            set_grad_enabled(True)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        for mode in self._dispatch_modes:
            push_dispatch_mode(mode)
        self._guard.__exit__(None, None, None)


_WARNINGS = tuple(name for name in ("filters", "showwarning", "_showwarnmsg_impl") if hasattr(warnings, name))
_NAMES = (*((module, (name,)) for module, name in set_by_blocks), (warnings, _WARNINGS))
_GETTERS = [(module, operator.attrgetter(*names)) for module, names in _NAMES]  # every turn asks
_CACHE_OWNER, _CACHE_NAME = parametrization_cache


class _ProcessState(NamedTuple):
    attributes: list[Any]
    """As of `_NAMES`."""
    cache: dict[object, object]
    hooks: list[dict[int, Any]] | None
    """Of all modules; None for none."""


def _read_process() -> _ProcessState:
    attributes = [get(module) for module, get in _GETTERS]
    hooks = [dict(each) for each in global_module_hooks] if any(global_module_hooks) else None
    return _ProcessState(attributes, getattr(_CACHE_OWNER, _CACHE_NAME), hooks)


def _exchange(now: _ProcessState, wanted: _ProcessState) -> None:
    setattr(_CACHE_OWNER, _CACHE_NAME, wanted.cache)
    if now.hooks != wanted.hooks:
        for hooks, each in zip(global_module_hooks, wanted.hooks or [{}] * len(global_module_hooks), strict=True):
            hooks.clear()
            hooks.update(each)
    if now.attributes == wanted.attributes and wanted.attributes[-1][0] is warnings.filters:
        return
    for (module, names), values in zip(_NAMES, wanted.attributes, strict=True):
        for name, value in zip(names, values if len(names) > 1 else (values,), strict=True):
            setattr(module, name, value)
    with warnings.catch_warnings():  # it has Python forget what the other filters have let through
        pass


class ProcessSettings:
    """Of the replicas of one process. After a run they are as the first replica has left them.

    A replica may stand at a meeting in the midst of ``with parametrize.cached():`` or
    ``with warnings.catch_warnings():``. What PyTorch and Python keep for such a block is a global, so the next replica
    would be in it as well, leave it in another order, and find what the first one has cached.
    """

    def __init__(self) -> None:
        self._states: dict[int, _ProcessState] = {}
        self._current: int | None = None

    def begin(self, replicas: Sequence[int]) -> None:
        """A run begins; the first of its replicas is active."""
        outside = _read_process()
        # What was cached outside is the first replica's to use; others have variables of their own.
        self._states = {one: _ProcessState(outside.attributes, {}, outside.hooks) for one in replicas}
        self._states[replicas[0]] = outside
        self._current = replicas[0]

    def activate(self, replica: int) -> None:
        if self._current is not None and replica != self._current:
            self._states[self._current] = now = _read_process()
            _exchange(now, self._states[replica])
            self._current = replica

    def end(self) -> None:
        """The run is over, or has failed."""
        if self._states:
            self.activate(next(iter(self._states)))
        self._states, self._current = {}, None
