"""Memory pages of steps, kept: a fresh gradient then costs no page faults.

By itself glibc gives large blocks back to the kernel when they are freed, and the next block of that size gets new
pages, each of which the kernel clears when it is touched first. A training step frees and allocates its gradients
again: 67 MB of them cost 32 ms of a core at every step, on workers, on servers and wherever else a step runs.

**What it trades**: a process that keeps its pages stays, in resident memory, as large as it has ever been. What was
freed is used again by the same process, and by nobody else on the machine. A server gives back what is left over from
creating variables and from checkpoints, once each (`give_back_pages`).

Two ways, and one place for their numbers. A process that is started by torchstrat gets variables of the environment
(`environment_that_keeps_pages`), which malloc reads before anything else runs. A process that was started by hand, or
by torchrun (`StepPages`), sets the same by ``mallopt`` (`keep_pages`), which is as good only while it has no other
threads: see there. What the user has set, by ``MALLOC_…`` or ``GLIBC_TUNABLES``, is left as it is. C libraries other
than glibc are left alone.

`StepPages` is for the steps that a replica makes on the CPU in a process of its own: taken in huge pages of 2 MiB
(PyTorch asks for them where ``THP_MEM_ALLOC_ENABLE`` is 1, Linux gives them), 100 MB of gradients cost a core 15 ms and
not 40, and nothing where the pages are kept. Keeping is only right together with those: PyTorch then lets its large
blocks begin at whole pages, and they fit again into the holes that they leave. Otherwise small leftovers get in
between, and the process grows by its largest gradient.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from torchstrat.core.errors import ClusterConfigError

logger = logging.getLogger("torchstrat.memory")

KEEP_PAGES_VARIABLE = "TORCHSTRAT_KEEP_PAGES"
"""``1`` or ``0``: what holds for a task where neither its program nor its command line says it, and for processes of
torchrun's in which a strategy has a replica on the CPU."""

Version = tuple[int, int]


class Libc(Protocol):
    """What is needed of a C library."""

    def mallopt(self, parameter: int, value: int, /) -> int:
        """``mallopt(3)``: 1, or 0 where it refuses."""

    def malloc_trim(self, pad: int, /) -> int:
        """``malloc_trim(3)``: gives back all pages that are free, but for ``pad`` bytes."""


@dataclass(frozen=True)
class _Setting:
    variable: str
    tunable: str
    """Its name in ``GLIBC_TUNABLES``."""
    parameter: int
    """Its number in ``<malloc.h>``."""
    value: int


# A thread's own arena is made of heaps of 64 MiB: larger blocks never fit, and are mapped and unmapped each time.
_ONE_ARENA = _Setting("MALLOC_ARENA_MAX", "glibc.malloc.arena_max", -8, 1)
_NEVER_TRIM = _Setting("MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", -1, (2 << 30) - 1)  # the largest int
_SELDOM_MAP = _Setting("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold", -3, 1 << 30)
_NEVER_MAP = _Setting("MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max", -4, 0)

_LARGE_THRESHOLDS_SINCE: Version = (2, 36)
"""Before, a mapping threshold above 32 MiB is refused; beside a trimming threshold every block of 128 KiB would then be
mapped, which is slower than saying nothing. There the blocks above 1 GiB are kept, too."""


def _settings(version: Version) -> tuple[_Setting, ...]:
    return _ONE_ARENA, _SELDOM_MAP if version >= _LARGE_THRESHOLDS_SINCE else _NEVER_MAP, _NEVER_TRIM


def glibc_version() -> Version | None:
    """Of the C library that this process uses; None where that is another one."""
    name = "CS_GNU_LIBC_VERSION"
    said = os.confstr(name) if name in getattr(os, "confstr_names", {}) else None
    found = re.match(r"glibc (\d+)\.(\d+)", said or "")
    return None if found is None else (int(found[1]), int(found[2]))


def is_wanted(keep: bool | None, environ: Mapping[str, str]) -> bool:
    """Whether pages are to be kept: what was said, else what ``TORCHSTRAT_KEEP_PAGES`` says, else yes.

    Raises:
        ClusterConfigError: the variable is neither 0 nor 1.
    """
    if keep is not None:
        return keep
    said = environ.get(KEEP_PAGES_VARIABLE) or "1"
    if said not in ("0", "1"):
        raise ClusterConfigError(
            f"{KEEP_PAGES_VARIABLE}={said!r}: set it to 1, so that tasks keep the pages of memory that they free, "
            "to 0, so that they give them back, or not at all (1)."
        )
    return said == "1"


def environment_that_keeps_pages(version: Version | None) -> dict[str, str]:
    """Variables with which a program starts that is to keep its pages. Let those that the user has set come after them.

    Args:
        version: What `glibc_version` says of the machine that the program runs on.
    """
    return {} if version is None else {setting.variable: str(setting.value) for setting in _settings(version)}


_keeping_libc: Libc | None = None


def keep_pages(
    libc: Libc | None = None, version: Version | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Let this process keep its pages from now on. There is no way back.

    To be called before the process has started threads. Afterwards, as measured with blocks of 64 MiB: the main thread
    keeps its pages all the same, but a thread that has an arena of its own stays with it and faults for every block as
    before (blocks that fit into its heaps, such as of 16 MiB, are kept), and each thread that starts later gets one of
    the arenas that are there, by turns.

    Args:
        libc, version, environ: In place of those of this process, for tests.
    """
    version = glibc_version() if version is None else version
    if version is None:
        logger.debug("pages of freed memory are not kept: that is done by mallopt, and the C library is not glibc.")
        return
    global _keeping_libc
    libc = _keeping_libc = cast(Libc, ctypes.CDLL(None)) if libc is None else libc
    environ = os.environ if environ is None else environ
    for setting in _settings(version):
        if setting.variable in environ or f"{setting.tunable}=" in environ.get("GLIBC_TUNABLES", ""):
            logger.debug("%s is what the environment says.", setting.variable)
        elif libc.mallopt(setting.parameter, setting.value):
            logger.debug("%s is %d from now on.", setting.variable, setting.value)
        else:
            logger.debug("glibc %d.%d refuses %s=%d.", *version, setting.variable, setting.value)


def give_back_pages() -> None:
    """Give back what is free at this moment, after work that took much more memory than the steps do. What is allocated
    next gets new pages, once.

    Takes the time of some page faults, during which no thread allocates: 15 to 30 ms for 100 MiB. Does nothing in a
    process in which `keep_pages` was not called.
    """
    if _keeping_libc is not None:
        _keeping_libc.malloc_trim(0)


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
            logger.info("steps do not take huge pages: %s.", reason)
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
