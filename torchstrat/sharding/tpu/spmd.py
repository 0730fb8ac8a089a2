"""What the TPU strategy needs of a compiler runtime, which runs one program on many devices and cuts tensors over them.

torch_xla is behind `torchstrat.sharding.tpu.runtime`, the plain CPU behind `torchstrat.testing.fake_tpu`. A third one
fills this protocol and nothing else; `torchstrat/sharding/tpu/README.md` says what each method has to guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torchstrat.sharding.grid import DeviceGrid, Sharding


class SpmdRuntime(Protocol):
    """One process's view of all devices of a program. Tensors are *global*: whole to Python, cut over the devices.

    Operations on tensors of `device` are recorded; `execute` compiles and runs what was recorded. Not for several
    threads at once, but for `place` and `replicate`.
    """

    @property
    def name(self) -> str:
        """For messages, with the version: ``"torch_xla 2.9.0"``."""

    @property
    def device(self) -> torch.device:
        """Where global tensors are, as PyTorch calls it."""

    @property
    def num_devices(self) -> int:
        """How many devices one program runs on; a program always runs on all of them."""

    @property
    def num_hosts(self) -> int: ...

    def device_attributes(self) -> list[Mapping[str, object]]:
        """For each device, in the order of its number: ``name``, and on TPUs ``coords`` and ``core_on_chip``."""

    def annotate(self, tensor: torch.Tensor, sharding: Sharding, grid: DeviceGrid) -> None:
        """Cut ``tensor`` like that, now if it has a value, else when it is computed. A later annotation of the same
        tensor object replaces an earlier one. The grid holds every device of the runtime."""

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """How ``tensor`` is cut, in the runtime's own words; empty if nothing was said or decided yet."""

    def place(self, parts: Sequence[torch.Tensor], sharding: Sharding, grid: DeviceGrid) -> torch.Tensor:
        """A global tensor made of equal parts on the host, one for each replica of the grid, stacked along a new first
        dimension and cut like ``sharding``, which cuts that dimension over the replicas. May copy in the background,
        from memory of its own. From any thread."""

    def replicate(self, tensor: torch.Tensor, grid: DeviceGrid) -> torch.Tensor:
        """A tensor of the host, whole on every device; otherwise as `place`."""

    def execute(self, *, wait: bool = False) -> None:
        """Run what was recorded. ``wait``: until it has finished."""

    def has_recorded(self) -> bool:
        """Whether there may be something for `execute` to run."""

    def compiles(self) -> int:
        """How many programs have been compiled since the start of the process."""

    def seed(self, value: int) -> None:
        """Start the stream of random numbers of later operations anew."""

    def random_state(self) -> object:
        """Where that stream is, for `restore_random_state`."""

    def restore_random_state(self, state: Any) -> None: ...

    def tracing(self) -> AbstractContextManager[None]:
        """Surrounds the recording of one step."""
