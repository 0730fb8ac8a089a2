"""A step that sees the global batch as one: for models that cannot be mapped over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchstrat.core.context import ReplicaContext, enter
from torchstrat.sharding.tpu.draws import is_draw, is_fill, on_host
from torchstrat.sharding.tpu.random_stream import RandomStream
from torchstrat.sharding.tpu.rewrites import Rewrites
from torchstrat.sharding.tpu.step_mode import RecordedMode

_LAYERS = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
"""They run as they are where nothing is mapped."""


def record_global_view(
    strategy: Any,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    device: torch.device,
    logical_devices: int,
    stream: RandomStream,
) -> Any:
    """Call ``fn`` once, on tensors of the global batch; what it returned."""
    rewrites = Rewrites(_itself, logical_devices=logical_devices)

    def find(func: Any) -> Callable[..., Any] | None:
        return None if func in _LAYERS else rewrites.find(func)

    with enter(strategy, ReplicaContext(strategy, 0)), _GlobalMode(device, find, stream).active():
        return fn(*args, **kwargs)


class _GlobalMode(RecordedMode):
    """With random numbers that are one device's."""

    def __init__(self, device: torch.device, find: Callable[[Any], Any], stream: RandomStream) -> None:
        super().__init__(device, find)
        self._stream = stream

    def _call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_draw(func):
            self._stream.seeded_in_step()
            if kwargs.get("generator") is not None:
                return self._drawn(func, args, kwargs)
        return super()._call(func, types, args, kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        drawn: torch.Tensor = on_host(func, args, kwargs).detach().to(self._device)
        if not is_fill(func):
            return drawn.requires_grad_(bool(kwargs.get("requires_grad")))
        with torch.no_grad():
            target: torch.Tensor = args[0] if args else kwargs["tensor"]
            return target.copy_(drawn)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
