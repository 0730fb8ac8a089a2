"""What a replica's thread takes over from the thread that called `run`: torch keeps these settings per thread."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch

from torchstrat._torch_private import dispatch_mode_stack, function_mode_stack

_AUTOCAST_DEVICES = ("cpu", "cuda")


class ThreadState:
    """Taken on construction, on the calling thread: gradient and inference mode, autocast, function and dispatch modes
    (the default device is one), the CUDA stream, and context variables."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]
        self._function_modes = function_mode_stack()
        self._dispatch_modes = dispatch_mode_stack()
        self._context = contextvars.copy_context()
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._streams = [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())] if has_cuda else []

    def call(self, device: torch.device, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` on this thread as if it were the other one, with ``device`` as the current CUDA device."""
        return self._context.copy().run(self._call, device, fn)

    def _call(self, device: torch.device, fn: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self._streams[device.index or 0] if self._streams else None))
            for mode in (*self._function_modes, *self._dispatch_modes):
                stack.enter_context(mode)
            for device_type, dtype in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            stack.enter_context(torch.inference_mode(self._inference))
            if not self._inference:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            return fn()
