"""How fast, and in how much memory, what is on parameter servers goes to the disk and comes back.

::

    python scripts/bench/checkpoint.py                              # 1 GB on 2 servers
    python scripts/bench/checkpoint.py --directory /mnt/disk --rounds 7
    python scripts/bench/checkpoint.py --megabytes 64 --rounds 1    # does it work? Its figures mean nothing

Rules. A table and its Adagrad state, half of the bytes each, lie on servers in processes of their own. A round does in
this order: ``dd`` writes as many bytes into the same directory with ``conv=fsync``; a blocking save; an asynchronous
save while functions train, one after another; ``dd`` reads the checkpoint's files; a restore, whose values are looked
at. Before each, the system has written back everything; before the two that read, its page cache is dropped, where
``/proc/sys/vm/drop_caches`` may be written. Shown are medians over the rounds, the spread (largest minus smallest, over
the median), and ratios taken within a round. The training's pause is what the first function after ``save`` returned
takes longer than usual, and the call itself. Memory is the state and what the servers need beyond it for the time of
the operation: their high-water mark (VmHWM) less what was resident before. One save and one restore go before all
rounds: processes import what they need for that once. **A run counts only if the spread of dd's writing is under 10 %,
over at least 3 rounds.** The exit status is 1 if it does not, or if a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from ps_contenders import peak_bytes, resident_bytes
from torch import nn
from train_step import FEWEST_ROUNDS, LARGEST_SPREAD, print_header

import torchstrat as ts
from torchstrat.launch import LocalCluster

SERVERS = 2
WIDTH = 128
IDS = 256
USUAL_FUNCTIONS = 50
LEAST_OF_DD = 0.7
MOST_OF_PAUSE = 0.1
MOST_OF_MEMORY = 1.15
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Training:
    """A table of ``state_bytes`` with its optimizer's state, on servers; one worker trains it."""

    def __init__(self, cluster: LocalCluster, state_bytes: int) -> None:
        shards = ts.partitioners.FixedShardsPartitioner(SERVERS)
        self.strategy = ts.ParameterServerStrategy(cluster.resolver, shards)
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.servers = [cluster.process("ps", index).pid for index in range(SERVERS)]
        rows = state_bytes // (2 * 4 * WIDTH)
        with self.strategy.scope():
            table = nn.Embedding(rows, WIDTH, sparse=True, device="meta")  # no copy on the coordinator
            optimizer = torch.optim.Adagrad(table.parameters(), lr=0.01)
        self.state_bytes = rows * 2 * 4 * WIDTH
        self.checkpoint = ts.Checkpoint(table=table, optimizer=optimizer)
        ids = torch.arange(IDS) * (rows // IDS)  # of both servers

        def step() -> None:
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            optimizer.step()

        def look() -> torch.Tensor:
            return table(ids).detach()

        self._step, self._look = step, look

    def train(self) -> float:
        """One function, from its scheduling to its end: seconds."""
        began = time.perf_counter()
        self.coordinator.schedule(self._step).get()
        return time.perf_counter() - began

    def rows(self) -> torch.Tensor:
        found: torch.Tensor = self.coordinator.schedule(self._look).get()
        return found

    @contextlib.contextmanager
    def memory(self, into: list[float]) -> Iterator[None]:
        """The most that the servers together need in this block, over the state."""
        before = sum(map(resident_bytes, self.servers))
        for pid in self.servers:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the mark is what is resident now
        yield
        into.append(1 + (sum(map(peak_bytes, self.servers)) - before) / self.state_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured; by default a temporary one")
    options = parser.parse_args()
    print_header()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        disk = shutil.disk_usage(folder)
        print(f"{folder} on {file_system_of(folder)}, {disk.free >> 30} GB free; page cache {cache_note()}")
        with LocalCluster(workers=1, ps=SERVERS, restart=False) as cluster:
            cluster.wait_until_listening()
            training = Training(cluster, options.megabytes << 20)
            for _ in range(USUAL_FUNCTIONS):
                training.train()
            training.checkpoint.save(Path(folder) / "first")
            training.checkpoint.restore(Path(folder) / "first")
            shutil.rmtree(Path(folder) / "first")
            resident = sum(map(resident_bytes, training.servers))
            print(
                f"resident on the servers: {resident >> 20} MB, of which {training.state_bytes >> 20} MB are the state"
            )
            results: dict[str, list[float]] = defaultdict(list)
            for number in range(options.rounds):
                measure(training, Path(folder), results)
                print(f"\rround {number + 1}/{options.rounds}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            training.strategy.close()
    fine = report(results, training.state_bytes)
    print(f"load at the end {' '.join(f'{value:.2f}' for value in os.getloadavg())}")
    return int(not fine)


def measure(training: Training, folder: Path, results: dict[str, list[float]]) -> None:
    """One round."""
    megabytes = training.state_bytes >> 20
    blocking, in_background = folder / "blocking", folder / "background"
    dd = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={megabytes}", "conv=fsync"]
    results["dd writes"].append(seconds_of(lambda: run(dd)))
    (folder / "dd").unlink()
    with training.memory(results["memory, save"]):
        results["save"].append(seconds_of(lambda: training.checkpoint.save(blocking)))
    saved = training.rows()
    shutil.rmtree(in_background, ignore_errors=True)
    save_in_background(training, in_background, results)
    shutil.rmtree(in_background)
    assert not torch.equal(training.rows(), saved), "functions did not change what they were to change"
    files = sorted(blocking.glob("*.distcp"))
    read = [["dd", f"if={file}", "of=/dev/null", "bs=1M"] for file in files]
    results["dd reads"].append(seconds_of(lambda: [run(one) for one in read], drop=True))
    with training.memory(results["memory, restore"]):
        results["restore"].append(seconds_of(lambda: training.checkpoint.restore(blocking), drop=True))
    assert torch.equal(training.rows(), saved), "what was restored is not what was saved"
    shutil.rmtree(blocking)


def save_in_background(training: Training, path: Path, results: dict[str, list[float]]) -> None:
    """Save while functions train, one after another."""
    usual = statistics.median(training.train() for _ in range(USUAL_FUNCTIONS))
    os.sync()
    with training.memory(results["memory, asynchronous save"]):
        began = time.perf_counter()
        handle = training.checkpoint.save(path, asynchronous=True)
        training.train()
        results["pause, asynchronous save"].append(time.perf_counter() - began - usual)
        functions = []
        while not handle.done():
            functions.append(training.train())
        handle.result()
        results["asynchronous save"].append(time.perf_counter() - began)
    results["function, usual"].append(usual)
    if functions:
        results["function, meanwhile"].append(statistics.median(functions))
        results["slowest function, meanwhile"].append(max(functions))


def seconds_of(call: Callable[[], object], drop: bool = False) -> float:
    os.sync()
    if drop and may_drop_caches():
        DROP_CACHES.write_text("3")
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def may_drop_caches() -> bool:
    return os.access(DROP_CACHES, os.W_OK)


def cache_note() -> str:
    return "dropped before reading" if may_drop_caches() else "NOT dropped: reading is from memory"


def file_system_of(folder: str) -> str:
    found = subprocess.run(["df", "--output=fstype,source", folder], check=True, capture_output=True, text=True)
    return " ".join(found.stdout.splitlines()[1].split())


def report(results: dict[str, list[float]], state_bytes: int) -> bool:
    """Print the tables; whether the run counts and no limit is missed."""
    print(f"\n{state_bytes / 2**20:,.0f} MB on {SERVERS} servers\n{'':<30}{'seconds':>10}{'spread':>9}{'MB/s':>9}")
    for name in ("dd writes", "save", "asynchronous save", "dd reads", "restore"):
        median = statistics.median(results[name])
        print(f"{name:<30}{median:>10.3f}{spread(results[name]):>9.1%}{state_bytes / 2**20 / median:>9.0f}")
    for name in ("pause, asynchronous save", "function, usual", "function, meanwhile", "slowest function, meanwhile"):
        if results[name]:
            print(f"{name:<30}{statistics.median(results[name]):>10.4f}{spread(results[name]):>9.1%}")
    print()
    fine = [
        limit("save, over dd's writing", ratios(results, "dd writes", "save"), "at least", LEAST_OF_DD),
        limit("restore, over dd's reading", ratios(results, "dd reads", "restore"), "at least", LEAST_OF_DD),
        limit("pause, over a save", ratios(results, "pause, asynchronous save", "save"), "at most", MOST_OF_PAUSE),
    ]
    for name in ("memory, save", "memory, asynchronous save", "memory, restore"):
        fine.append(limit(f"{name}, over the state", results[name], "at most", MOST_OF_MEMORY))
    rounds, noise = len(results["dd writes"]), spread(results["dd writes"])
    counts = noise < LARGEST_SPREAD and rounds >= FEWEST_ROUNDS
    rule = f"limit {LARGEST_SPREAD:.0%}, at least {FEWEST_ROUNDS} rounds"
    print(
        f"spread of dd {noise:.1%} over {rounds} rounds: this run {'counts' if counts else 'does NOT count'} ({rule})"
    )
    return counts and all(fine)


def limit(name: str, values: list[float], kind: str, bound: float) -> bool:
    median = statistics.median(values)
    fine = median >= bound if kind == "at least" else median <= bound
    text = f"{name:<42}{median:>7.3f} ({min(values):.3f} to {max(values):.3f}), {kind} {bound}"
    print(f"{text}: {'met' if fine else 'MISSED'}")
    return fine


def ratios(results: dict[str, list[float]], above: str, below: str) -> list[float]:
    """Within each round."""
    return [one / other for one, other in zip(results[above], results[below], strict=True)]


def spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


if __name__ == "__main__":
    sys.exit(main())
