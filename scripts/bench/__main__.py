"""What a change of torchstrat costs: two checkouts measured side by side, and the old one against itself.

::

    git worktree add ../before main
    python scripts/bench --against ../before                          # all of it
    python scripts/bench --against v0.3 mlp tiny in_process --rounds 9

``--against``: the folder of another checkout, or a revision of this one, which is then taken out into a temporary
folder. The programs are those of this checkout; only the library differs. Rounds are interleaved: each measures every
contender with the old library, with the old one once more, and with this one, in an order that rotates, in fresh
processes. Ratios are taken within a round, and their medians and extremes shown. What the old one shows against itself
is the noise: a ratio within these extremes says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ps_contenders
import train_step

ROOT = Path(__file__).resolve().parents[2]


class Cost(NamedTuple):
    """Seconds per step, or per call; the most memory in bytes of each process, added up."""

    wall: float
    cpu: float
    memory: float


@dataclass(frozen=True)
class Subject:
    """One program that is measured with either library."""

    name: str
    measure: Callable[[Path], Cost]


def main() -> int:
    subjects = all_subjects()
    parser = argparse.ArgumentParser(prog="python scripts/bench", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(subjects)}; all where none is named")
    parser.add_argument("--against", required=True, metavar="CHECKOUT", help="a folder, or a revision of this checkout")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if unknown := [name for name in options.what if name not in subjects]:
        parser.error(f"{', '.join(unknown)} unknown; choose any of {', '.join(subjects)}")
    with checkout(options.against) as old:
        train_step.print_header()
        print(f"old: {described(old)}\nnew: {described(ROOT)}")
        for name in options.what or subjects:
            for subject in subjects[name]:
                report(f"{name}, {subject.name}", measure(subject, old, options.rounds))
    return 0


def all_subjects() -> dict[str, list[Subject]]:
    per_process = ("mirrored", "central_storage")
    in_process = ("mirrored_in_process", "central_storage_in_process")
    servers = {"table": "A-sgd", "adagrad": "A-adagrad", "dense": "B-1+1", "dense_2": "B-2+2"}
    servers |= {"functions": "C", "fetch": "C-one"}
    found = {name: [_step(name, one) for one in per_process] for name in ("mlp", "wide", "tiny")}
    found["in_process"] = [_step("in_process", one) for one in in_process]
    found["calls"] = [_step("calls", "empty_run")]
    for name, workload in servers.items():
        found[name] = [_on_servers(workload, "torchstrat")]
        found[f"{name}_rpc"] = [_on_servers(workload, "torchstrat_rpc")]
    return found


def _step(comparison: str, contender: str) -> Subject:
    def measure(root: Path) -> Cost:
        one = train_step.measure_once(contender, train_step.comparisons()[comparison], root)
        return Cost(one.wall, one.cpu, one.peak)

    return Subject(contender, measure)


def _on_servers(workload: str, contender: str) -> Subject:
    """``…_rpc``: without shared memory."""

    def measure(root: Path) -> Cost:
        one = ps_contenders.measure_once(contender, [workload], root)
        return Cost(one.wall, one.cpu, one.peak)

    return Subject(f"{contender} {workload}", measure)


@contextlib.contextmanager
def checkout(named: str) -> Iterator[Path]:
    """The folder of the old library. Raises `SystemExit` where there is none, or Python would import another."""
    with contextlib.ExitStack() as stack:
        folder = Path(named).resolve()
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            archive = _git("archive", "--format=tar", named, cwd=ROOT)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
        for root in (folder, ROOT):
            found = Path(_imported(root))
            if root not in found.parents:
                raise SystemExit(
                    f"{root} has no torchstrat to import: Python found {found}. Name the top of a checkout."
                )
        yield folder


def _imported(root: Path) -> str:
    command = [sys.executable, "-c", "import torchstrat; print(torchstrat.__file__)"]
    environment = train_step.environment(0, 1, 0, root)
    # Not in a checkout: Python looks into the current folder first.
    run = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def _git(*arguments: str, cwd: Path) -> bytes:
    run = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=False)
    if run.returncode:
        raise SystemExit(f"neither a folder nor a revision: {arguments[-1]}. git says: {run.stderr.decode().strip()}")
    return run.stdout


def described(root: Path) -> str:
    """A revision, where the folder is a checkout of git's."""
    command = ["git", "log", "-1", "--format=%h %s"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return f"{root}  {run.stdout.strip()}" if run.returncode == 0 else str(root)


def measure(subject: Subject, old: Path, rounds: int) -> dict[str, list[Cost]]:
    sides = [("old", old), ("old again", old), ("new", ROOT)]
    costs: dict[str, list[Cost]] = {name: [] for name, _ in sides}
    for number in range(rounds):
        turn = number % len(sides)
        for name, root in sides[turn:] + sides[:turn]:
            costs[name].append(subject.measure(root))
        print(f"\r{subject.name}: round {number + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return costs


def report(title: str, costs: dict[str, list[Cost]]) -> None:
    print(f"\n{title}, {len(costs['old'])} rounds")
    columns = "".join(f"{f'{kind} × old':>14}{'from':>8}{'to':>7}" for kind in Cost._fields)
    print(f"{'':<12}{'wall ms':>10}{'CPU ms':>10}{'MiB':>8}{columns}")
    for name, measured in costs.items():
        wall, cpu, memory = map(statistics.median, zip(*measured, strict=True))
        row = f"{name:<12}{wall * 1e3:>10.3f}{cpu * 1e3:>10.3f}{memory / 2**20:>8.0f}"
        if name != "old":
            for kind, base in zip(zip(*measured, strict=True), zip(*costs["old"], strict=True), strict=True):
                ratios = [value / other for value, other in zip(kind, base, strict=True)]
                row += f"{statistics.median(ratios):>14.3f}{min(ratios):>8.3f}{max(ratios):>7.3f}"
        print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
