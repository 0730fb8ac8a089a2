"""What a training step costs beyond the arithmetic: DDP, Mirrored and CentralStorage over a floor.

::

    python scripts/bench/train_step.py                    # the MLP 784-1024-1024-10, global batch 256
    python scripts/bench/train_step.py mlp wide tiny in_process calls --rounds 7

Rules. The floor (``floor.py``) is two processes, each with half the batch and the whole update, that meet at start and
end only. All contenders train the same model with the same optimizer, one thread per process, on data allocated before.
Rounds are interleaved: each measures every contender once, in an order that rotates, so that a machine that slows down
slows all of them. ``…_retained``: with glibc told to keep the pages of freed memory, which torchstrat's strategies tell
it by themselves (``torchstrat/core/kept_pages.py``). Shown are medians over the rounds, the spread (largest minus
smallest, over the median), and ratios taken within a round. Wall clock is the slower process's; CPU is summed over
processes. **A run counts only if the floor's spread is under 10 %**; it says so, and exits with status 1 if not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ps_contenders import RETAINED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LARGEST_SPREAD = 0.10
FEWEST_ROUNDS = 3  # a spread of fewer says nothing
DEADLINE_SECONDS = 300


@dataclass(frozen=True)
class Measurement:
    wall: float
    """Seconds per step, of the slower process."""
    cpu: float
    """CPU seconds per step, all processes together."""
    peak: int
    """The most memory in bytes that each process has had, added up."""


@dataclass(frozen=True)
class Comparison:
    """Contenders measured side by side. The first is what the others are divided by."""

    title: str
    workload: str
    processes: int
    contenders: tuple[str, ...]


def comparisons() -> dict[str, Comparison]:
    others = tuple(name for name, module in (("accelerate", "accelerate"), ("fabric", "lightning")) if _has(module))
    plain = ("floor", "floor_retained", "ddp", "ddp_retained", *others)
    versus_floor = (*plain, "mirrored", "central_storage", "central_storage_at_owner")
    return {
        "mlp": Comparison("MLP 784-1024-1024-10, 2 × 128 rows, 2 processes", "mlp", 2, versus_floor),
        "wide": Comparison("25.2 million parameters, 2 × 32 rows, 2 processes", "wide", 2, versus_floor),
        "tiny": Comparison("Linear(8, 8), 2 processes", "tiny", 2, versus_floor),
        "in_process": Comparison(
            "MLP, 2 replicas in one process",
            "mlp",
            1,
            ("loop_in_process", "mirrored_in_process", "central_storage_in_process"),
        ),
        "calls": Comparison("calls, 2 replicas in one process", "tiny", 1, ("empty_run", "scalar_reduce")),
        "calls_2": Comparison("calls, 2 processes", "tiny", 2, ("empty_run", "scalar_reduce")),
    }


def main() -> int:
    known = comparisons()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["mlp"], help=f"any of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    unknown = [name for name in options.what if name not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)} unknown; choose any of {', '.join(known)}")
    print_header()
    counts = [report(known[name], measure(known[name], options.rounds)) for name in options.what]
    print(f"\nload at the end {_load()}")
    return int(not all(counts))


def print_header() -> None:
    import torch

    probe = subprocess.run(
        [sys.executable, HERE / "core_to_core.py"], capture_output=True, text=True, timeout=60, check=True
    )
    print(f"{datetime.now():%Y-%m-%d %H:%M}  {_processor()}, {os.cpu_count()} cores, {_memory()} of memory")
    print(f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"load {_load()}, 512 KB from the other core in {probe.stdout.strip()} µs, one thread per process")


def measure(comparison: Comparison, rounds: int) -> dict[str, list[Measurement]]:
    results: dict[str, list[Measurement]] = {name: [] for name in comparison.contenders}
    for number in range(rounds):
        turn = number % len(comparison.contenders)
        for name in comparison.contenders[turn:] + comparison.contenders[:turn]:
            results[name].append(measure_once(name, comparison))
        print(f"\r{comparison.title}: round {number + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def measure_once(name: str, comparison: Comparison, root: Path = ROOT) -> Measurement:
    """Start fresh processes, as a launcher would, and read what each prints. ``root``: whose torchstrat they import."""
    plain_name = name.removesuffix("_retained")
    program = [HERE / "floor.py"] if plain_name == "floor" else [HERE / "contenders.py", plain_name]
    extra = RETAINED if name != plain_name else {}
    port = _free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *program, comparison.workload],
            env=environment(rank, comparison.processes, port, root) | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(comparison.processes)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, (_, complaint) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"{name} on {comparison.workload} failed:\n{complaint}")
    records = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    return Measurement(
        max(record["wall"] for record in records),
        sum(record["cpu"] for record in records),
        sum(record["peak"] for record in records),
    )


def environment(rank: int, size: int, port: int, root: Path = ROOT) -> dict[str, str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    if size > 1:
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        variables |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    return variables


def report(comparison: Comparison, results: dict[str, list[Measurement]]) -> bool:
    """Print one table; whether the run counts."""
    base_name = comparison.contenders[0]
    base = results[base_name]
    is_step = base_name in ("floor", "loop_in_process")
    print(f"\n{comparison.title}, {len(base)} rounds")
    columns = f"{'':<28}{'wall ms':>10}{'spread':>9}{'CPU ms':>10}"
    print(columns + (f"{'wall ×':>9}{'CPU ×':>9}{'wall × DDP':>12}" if is_step else ""))
    for name, measurements in results.items():
        walls = [measurement.wall for measurement in measurements]
        cpus = [measurement.cpu for measurement in measurements]
        row = f"{name:<28}{_ms(walls)}{_spread(walls):>9.1%}{_ms(cpus)}"
        if is_step:
            row += f"{_ratio(walls, [entry.wall for entry in base]):>9.2f}"
            row += f"{_ratio(cpus, [entry.cpu for entry in base]):>9.2f}"
        if "ddp" in results:
            row += f"{_ratio(walls, [entry.wall for entry in results['ddp']]):>12.2f}"
        print(row)
    spread = _spread([measurement.wall for measurement in base])
    counts = spread < LARGEST_SPREAD and len(base) >= FEWEST_ROUNDS
    if is_step:
        verdict = "counts" if counts else "does NOT count"
        rule = f"limit {LARGEST_SPREAD:.0%}, at least {FEWEST_ROUNDS} rounds"
        print(f"spread of {base_name} {spread:.1%}: this run {verdict} ({rule})")
    return counts or not is_step


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:>10.3f}"


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def _ratio(values: list[float], base: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _load() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


if __name__ == "__main__":
    sys.exit(main())
