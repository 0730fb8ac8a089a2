"""Memory of the steps that a process makes on the CPU: taken in huge pages, and kept from step to step.

A step frees and allocates its gradients again. By itself glibc gives large blocks back to the kernel, which clears each
of their pages of 4 KiB when it is touched again: 100 MB of gradients cost a core 40 ms, at every step. In huge pages of
2 MiB (PyTorch asks for them where ``THP_MEM_ALLOC_ENABLE`` is 1, Linux gives them) it is 15 ms, and nothing where the
pages are kept (`kept_pages`). Keeping is only right together with those: PyTorch then lets its large blocks begin at
whole pages, and they fit again into the holes that they leave. Otherwise small leftovers get in between, and the
process grows by its largest gradient.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import torch

from torchstrat.core.kept_pages import give_back_pages, is_wanted, keep_pages

_logger = logging.getLogger("torchstrat.memory")

_VARIABLE = "THP_MEM_ALLOC_ENABLE"  # PyTorch's, which looks at it once, when it first makes a tensor
_LARGE_BYTES = 4 << 20  # is 2 MiB or more
_SETTLING_RUNS = 3
"""Whose temporary memory (first values, state that is made, parts that are put together) is not that of later ones."""


class StepPages:
    """Of this process, whose replica is on ``device``. To be made before it has threads.

    Does nothing on other devices than the CPU, nor where the program has made tensors before, or its user has set
    ``THP_MEM_ALLOC_ENABLE=0``, or Linux has no huge pages; the logger ``torchstrat.memory`` says so (INFO).
    ``TORCHSTRAT_KEEP_PAGES=0``: huge ones, but not kept. Raises `ClusterConfigError` where that is neither 0 nor 1.
    """

    def __init__(self, device: str) -> None:
        self._runs_to_settle = 0
        wants_kept = is_wanted(None, os.environ)
        if not device.startswith("cpu"):
            return
        reason = _why_no_huge_pages()
        if reason is not None:
            _logger.info("steps do not take huge pages: %s.", reason)
        elif wants_kept:
            keep_pages()

    def variables_changed(self) -> None:
        """There are new ones, or other ones than before."""
        self._runs_to_settle = _SETTLING_RUNS

    def end_of_run(self) -> None:
        if self._runs_to_settle:
            self._runs_to_settle -= 1
            give_back_pages()


def _why_no_huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str | None:
    """Ask PyTorch to take them; None if it does."""
    os.environ.setdefault(_VARIABLE, "1")
    if os.environ[_VARIABLE] != "1":
        return f"{_VARIABLE}={os.environ[_VARIABLE]}"
    try:
        if "[never]" in setting.read_text():
            return f"{setting} says never"
    except OSError:
        return "only Linux has them"
    probes = [torch.empty(_LARGE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(3)]
    if any(probe.data_ptr() % mmap.PAGESIZE for probe in probes):
        return (
            "the program had made tensors before the strategy; make the strategy first, or start the program with "
            f"{_VARIABLE}=1"
        )
    return None
