"""What runs in a process, as far as the processes of one cluster have to agree on it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Versions:
    """Of torchstrat, whose messages travel; of torch, whose transport and tensors do; of Python, whose code objects do.

    Only what matters is kept: torch's release without its build (a worker with CUDA and a server without work
    together), and of Python ``major.minor``, within which code objects are compatible.
    """

    torchstrat: str
    torch: str
    python: str

    def __str__(self) -> str:
        return f"torchstrat {self.torchstrat}, torch {self.torch}, Python {self.python}"


def local_versions() -> Versions:
    """This process's."""
    from torchstrat import __version__  # not at import: the package may be importing this module

    return Versions(
        torchstrat=__version__,
        torch=str(torch.__version__).partition("+")[0],
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )
