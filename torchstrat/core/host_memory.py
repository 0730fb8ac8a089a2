"""How many bytes this process can still allocate: what the machine has left, and what its control group allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchstrat.core.errors import InvalidArgumentError

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
