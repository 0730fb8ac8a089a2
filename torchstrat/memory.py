"""How many bytes a model and its optimizer will take under a strategy, before anything is allocated."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.errors import InvalidArgumentError
from torchstrat.stand_ins import bare_step, stand_in_of


@dataclass(frozen=True)
class Copies:
    """How often one holder (a replica, or the place of the central variables) keeps each kind of state."""

    device: str
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    communication: int
    """Of the gradients, in flight between processes."""


@dataclass(frozen=True)
class Holding:
    """Bytes that one replica (or the place of the central variables) keeps on its device between two steps."""

    device: str
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    communication_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes
            + self.buffers_bytes
            + self.gradients_bytes
            + self.optimizer_state_bytes
            + self.communication_bytes
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """What `StrategyExtended.estimate` returns: the state between two steps, without activations and batches.

    ``holdings`` has an entry per holder, over all processes; virtual devices ``cpu:i`` are memory of their host.
    """

    holdings: tuple[Holding, ...]

    @property
    def per_device_bytes(self) -> dict[str, int]:
        """Bytes by device. Under several processes, devices of one name (every rank's ``cpu:0``) are added up."""
        totals: dict[str, int] = collections.defaultdict(int)
        for holding in self.holdings:
            totals[holding.device] += holding.total_bytes
        return dict(totals)

    @property
    def host_bytes(self) -> int:
        """Bytes in main memory, over all processes."""
        return sum(holding.total_bytes for holding in self.holdings if holding.device.startswith("cpu"))

    @property
    def total_bytes(self) -> int:
        return sum(holding.total_bytes for holding in self.holdings)

    def __str__(self) -> str:
        mib = 1 << 20
        rows = []
        for one in self.holdings:
            parts = {
                "parameters": one.parameters_bytes,
                "buffers": one.buffers_bytes,
                "gradients": one.gradients_bytes,
                "optimizer": one.optimizer_state_bytes,
                "communication": one.communication_bytes,
            }
            shown = ", ".join(f"{name} {size / mib:,.1f}" for name, size in parts.items())
            rows.append(f"{one.device}: {one.total_bytes / mib:,.1f} MiB ({shown})")
        return "\n".join([*rows, f"host: {self.host_bytes / mib:,.1f} MiB"])


def estimate(model: nn.Module, optimizer: Optimizer | None, copies: list[Copies]) -> MemoryEstimate:
    """Bytes for each entry of ``copies``. The model may live on ``torch.device("meta")``; nothing is allocated."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"estimate needs an nn.Module; got {type(model).__name__}.")
    parameters = list(model.parameters())
    parameter_bytes = sum(map(_bytes, parameters))
    buffer_bytes = sum(map(_bytes, model.buffers()))
    gradient_bytes = sum(_bytes(parameter) for parameter in parameters if parameter.requires_grad)
    state_bytes = 0 if optimizer is None else optimizer_state_bytes(optimizer)
    return MemoryEstimate(
        tuple(
            Holding(
                device=one.device,
                parameters_bytes=one.parameters * parameter_bytes,
                buffers_bytes=one.buffers * buffer_bytes,
                gradients_bytes=one.gradients * gradient_bytes,
                optimizer_state_bytes=one.optimizer_state * state_bytes,
                communication_bytes=one.communication * gradient_bytes,
            )
            for one in copies
        )
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of state after the first step, found by a step of the same class on tensors without storage (``meta``).

    An optimizer that cannot step on such tensors steps on tiny real ones, whose dimensions have different prime sizes:
    these tell which dimension of a parameter each dimension of its state follows. Existing state is counted as it is.
    """
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if parameter in optimizer.state:
                total += sum(_bytes(value) for value in _state_tensors(optimizer.state[parameter]))
                continue
            try:
                state = _trial(optimizer, group, torch.empty_like(parameter, device="meta"))
                total += sum(map(_bytes, state))
            except Exception:  # any class of the user's own; what a step on meta tensors can raise is not known
                total += _scaled_bytes(optimizer, group, parameter)
    return total


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def _scaled_bytes(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    tiny = torch.zeros(_PRIMES[: parameter.dim()], dtype=parameter.dtype)
    real_size = dict(zip(_PRIMES, parameter.shape, strict=False))
    return sum(
        math.prod(real_size.get(size, size) for size in value.shape) * value.element_size()
        for value in _trial(optimizer, group, tiny)
    )


def _trial(optimizer: Optimizer, group: dict[str, Any], like: torch.Tensor) -> list[torch.Tensor]:
    """The state tensors that one step on a parameter like ``like`` makes; ``optimizer`` itself is untouched."""
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = torch.ones_like(parameter)
    # The multi-tensor and fused kernels need storage; the state they make is the same.
    settings: dict[str, Any] = dict.fromkeys((name for name in ("foreach", "fused") if name in group), False)
    groups: list[dict[str, Any]] = [{**group, **settings, "params": [parameter]}]
    trial = stand_in_of(type(optimizer), vars(optimizer), groups)
    bare_step(trial)  # its own attribute may be a scheduler's, which steps the optimizer that it was made for
    return _state_tensors(trial.state[parameter])


def _state_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]
