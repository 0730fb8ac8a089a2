"""Memory in bytes: what a model and its optimizer will take under a strategy, before anything is allocated, and what
this process can still allocate by what the machine has left and what its control group allows.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core.devices import torch_device
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.optimizers import bare_step, stand_in_of, wrapped_by


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


def copies_in_one_process(devices: Sequence[str], parameter_device: str | None) -> list[Copies]:
    """The first replica works on the central variables where these are on its device; the others on copies.

    ``parameter_device``: of central storage; None where each device holds variables.
    """
    shared = parameter_device is None or torch_device(parameter_device) == torch_device(devices[0])
    holders = [] if parameter_device is None or shared else [Copies(parameter_device, 1, 1, 1, 1, 0)]
    is_alone = len(devices) == 1 and shared
    for replica, device in enumerate(devices):
        first = shared and replica == 0
        buffers = 2 if first and not is_alone else 1
        holders.append(Copies(device, 1, buffers, 1, 1 if first else 0, 0))
    return holders


def local_copies(devices: Sequence[str]) -> list[Copies]:
    """Every replica has, and steps, its own; nothing of gradients travels."""
    return [Copies(device, 1, 1, 1, 1, 0) for device in devices]


def copies_in_processes(
    device: str, processes: int, *, central: bool, shares_variables: bool, sums_in_place: bool, is_staged: bool = False
) -> list[Copies]:
    """Every process keeps parameters, gradients and the buckets they travel in; under central storage its owner, the
    first one, alone has state.

    Args:
        shares_variables: central variables lie in memory that the processes share; they are counted as the owner's.
        sums_in_place: gradients are added up where they lie, so there are no buckets.
        is_staged: processes on devices whose central variables lie in host memory; gradients are there once more.
    """
    holders = []
    for rank in range(processes):
        owns = 1 if rank == 0 else 0
        if is_staged:
            holders += [Copies(device, 1, 1, 1, 0, 0), Copies("cpu:0", owns, 0, 0, owns, 1)]
        else:
            parameters = owns if shares_variables else 1
            holders.append(Copies(device, parameters, 1, 1, owns if central else 1, 0 if sums_in_place else 1))
    return holders


@dataclass(frozen=True)
class Sizes:
    """Bytes of one copy of everything that a program keeps from step to step."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int

    @staticmethod
    def of(
        parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]
    ) -> Sizes:
        """They may live on ``torch.device("meta")``; nothing is allocated."""
        everyone = list(parameters)
        return Sizes(
            sum(one.nbytes for one in everyone),
            sum(one.nbytes for one in buffers),
            sum(one.nbytes for one in everyone if one.requires_grad),
            sum(map(optimizer_state_bytes, optimizers)),
        )

    def held(self, copies: Copies) -> Holding:
        return Holding(
            device=copies.device,
            parameters_bytes=copies.parameters * self.parameters,
            buffers_bytes=copies.buffers * self.buffers,
            gradients_bytes=copies.gradients * self.gradients,
            optimizer_state_bytes=copies.optimizer_state * self.optimizer_state,
            communication_bytes=copies.communication * self.gradients,
        )


def estimate(model: nn.Module, optimizer: Optimizer | None, copies: list[Copies]) -> MemoryEstimate:
    """Bytes for each entry of ``copies``. The model may live on ``torch.device("meta")``; nothing is allocated."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"estimate needs an nn.Module; got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise WrongTypeError(
            f"estimate needs an optimizer over the model's parameters, or None; got {type(optimizer).__name__} "
            f"{optimizer!r:.80}. Write torch.optim.Adam(model.parameters())."
        )
    sizes = Sizes.of(model.parameters(), model.buffers(), [] if optimizer is None else [optimizer])
    return MemoryEstimate(tuple(map(sizes.held, copies)))


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of state after the first step, found by a step of the same class on tensors without storage (``meta``).

    An optimizer that cannot step on such tensors steps on tiny real ones, whose dimensions have different prime sizes:
    these tell which dimension of a parameter each dimension of its state follows. Existing state is counted as it is.
    """
    return sum(
        sum(one.nbytes for one in _state_tensors(optimizer.state[parameter]))
        if optimizer.state.get(parameter)  # to look for an entry makes an empty one
        else state_bytes_for(optimizer, group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def state_bytes_for(optimizer: Optimizer, group: dict[str, object], like: torch.Tensor) -> int:
    """Of a parameter like ``like``, which may be a part of one, in ``group`` of ``optimizer``. Of one that wraps others
    what these make: its step would step them, and with them the program's own parameters.

    Raises `UnsupportedError` where a step alone does not work, as of LBFGS, which needs a closure.
    """
    if inner := [one for one in wrapped_by(optimizer) if not any(wrapped_by(one))]:
        found = [(one, own) for one in inner for own in _groups_like(one, group)[:1]]
        return sum(state_bytes_for(one, own, like) for one, own in found)
    try:
        return sum(one.nbytes for one in _trial(optimizer, group, torch.empty_like(like, device="meta")))
    except Exception:  # any class of the user's own; what a step on meta tensors can raise is not known
        pass
    try:
        return _scaled_bytes(optimizer, group, like)
    except Exception as error:
        raise UnsupportedError(
            f"an estimate of what {type(optimizer).__name__} keeps needs a step of it on a parameter of its own, which "
            f"raises {type(error).__name__}: {error}. Leave the optimizer out of the estimate, and add what it keeps."
        ) from error


def _groups_like(optimizer: Optimizer, group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of its groups that have parameters of ``group``."""
    wanted = {id(one) for one in group["params"]}
    return [own for own in optimizer.param_groups if any(id(one) in wanted for one in own["params"])]


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def _scaled_bytes(optimizer: Optimizer, group: dict[str, object], parameter: torch.Tensor) -> int:
    tiny = torch.zeros(_PRIMES[: parameter.dim()], dtype=parameter.dtype)
    real_size = dict(zip(_PRIMES, parameter.shape, strict=False))
    return sum(
        math.prod(real_size.get(size, size) for size in value.shape) * value.element_size()
        for value in _trial(optimizer, group, tiny)
    )


def _trial(optimizer: Optimizer, group: dict[str, object], like: torch.Tensor) -> list[torch.Tensor]:
    """The state tensors that one step on a parameter like ``like`` makes; ``optimizer`` itself is untouched."""
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = torch.ones_like(parameter)
    # The multi-tensor and fused kernels need storage; the state they make is the same.
    settings: dict[str, object] = dict.fromkeys((name for name in ("foreach", "fused") if name in group), False)
    groups: list[dict[str, object]] = [{**group, **settings, "params": [parameter]}]
    trial = stand_in_of(type(optimizer), vars(optimizer), groups)
    bare_step(trial)  # its own attribute may be a scheduler's, which steps the optimizer that it was made for
    return _state_tensors(trial.state[parameter])


def _state_tensors(state: dict[str, object]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, control_groups: Path = CONTROL_GROUPS) -> int | None:
    """The smaller of ``MemAvailable`` and what is left under the limits of this process's control group and those
    around it. None where neither is known (no Linux)."""
    known = [*_machine(proc), *_control_group_v2(proc, control_groups), *_control_group_v1(proc, control_groups)]
    return max(0, min(known)) if known else None


def check_fits(needed_bytes: int, what: str, advice: str) -> None:
    """Raise `InvalidArgumentError` before an allocation that this machine cannot serve, and that would end in a kill
    without a message. ``what`` names what it is for, ``advice`` what to change (a sentence)."""
    free = available_bytes() if needed_bytes else None  # a dozen files are read: plain SGD asks for nothing, each step
    if free is not None and needed_bytes > free:
        raise InvalidArgumentError(
            f"{what} needs {needed_bytes:,} bytes ({_gib(needed_bytes)}), and this machine has {free:,} ({_gib(free)}) "
            f"left. {advice} Nothing was allocated."
        )


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.2f} GiB"


def _machine(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _control_group_v2(proc: Path, control_groups: Path) -> Iterator[int]:
    for line in _lines(proc / "self" / "cgroup"):
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            for folder in _upwards(control_groups, path):
                yield from _left(folder, "memory.max", "memory.current", "inactive_file")


def _control_group_v1(proc: Path, control_groups: Path) -> Iterator[int]:
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for folder in _upwards(control_groups / "memory", path):
                yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group's folder and those around it. Inside a container the path is the host's, and only the root is there."""
    folder = root / path.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _left(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
    if limit is not None and usage is not None:
        # Cached files count as used until somebody needs the memory.
        cached = sum(
            int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(f"{reclaimable} ")
        )
        yield limit - usage + cached


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # "max" means no limit


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
