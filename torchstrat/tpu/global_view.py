"""A step that sees the global batch as one: for models that cannot be mapped over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchstrat.context import ReplicaContext, enter
from torchstrat.tpu.rewrites import Rewrites
from torchstrat.tpu.step_mode import RecordedMode

_LAYERS = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
"""They run as they are where nothing is mapped."""


def record_global_view(
    strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, logical_devices: int
) -> Any:
    """Call ``fn`` once, on tensors of the global batch; what it returned."""
    rewrites = Rewrites(_itself, logical_devices=logical_devices)

    def find(func: Any) -> Callable[..., Any] | None:
        return None if func in _LAYERS else rewrites.find(func)

    with enter(strategy, ReplicaContext(strategy, 0)), RecordedMode(device, find).active():
        return fn(*args, **kwargs)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
