"""How much more is trained with more workers: workload A on 2 servers, with 1, 2, 4 and 8 workers.

::

    python scripts/bench/ps_workers.py
    python scripts/bench/ps_workers.py A-adagrad --workers 1 2 4 8 16 --rounds 5
    python scripts/bench/ps_workers.py --small --rounds 1        # does it work? Its figures mean nothing

Each number of workers makes the same steps in total, as its own processes, and so does the floor: as many processes
that hold everything themselves and never talk (see ``parameter_server.py`` for the rules of both). Rounds are
interleaved; shown are medians. **With more processes than cores the throughput can only tell that nothing is lost: the
figure is then the CPU per step**, summed over all processes, which stays flat where workers do not get into each
other's way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

from parameter_server import ratio, spread
from ps_contenders import Measurement, measure_once
from ps_workloads import WORKLOADS, from_arguments
from train_step import print_header

CONTENDERS = ("floor", "torchstrat")
WIDTH = 50
MARKS = {"floor": "░", "torchstrat": "█"}
Results = dict[tuple[str, int], list[Measurement]]


def main() -> int:
    trained = [name for name, workload in WORKLOADS.items() if workload.problem is not None]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=trained, default="A-sgd", help="%(default)s")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    options = parser.parse_args()
    if min(*options.workers, options.rounds) < 1:
        parser.error("--workers and --rounds need numbers of at least 1")
    arguments = [options.what, *(["small"] if options.small else [])]
    print_header()
    workload = from_arguments(arguments)
    print(f"\n{workload.title.replace(f'{workload.workers} + ', 'workers + ')}; {os.cpu_count()} cores")
    results = measure(arguments, options.workers, options.rounds)
    print_table(results, workload.servers)
    print_picture("steps per second, all workers together", results, throughput)
    print_picture("CPU ms per step, all processes together", results, cpu_milliseconds)
    print(f"\nload at the end {' '.join(f'{value:.2f}' for value in os.getloadavg())}")
    return 0


def measure(arguments: list[str], workers: list[int], rounds: int) -> Results:
    keys = [(name, number) for number in workers for name in CONTENDERS]
    results: Results = {key: [] for key in keys}
    for turn in range(rounds):
        first = turn % len(keys)
        for name, number in keys[first:] + keys[:first]:
            results[name, number].append(measure_once(name, [*arguments, f"workers={number}"]))
            print(f"\rround {turn + 1}/{rounds}: {name}, {number} worker(s)   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def throughput(workers: int, measured: Measurement) -> float:
    """Steps per second of all workers; the slower ones decide."""
    return workers / measured.wall


def cpu_milliseconds(workers: int, measured: Measurement) -> float:
    """Of one worker's step, all processes together. What was measured is a step of every worker."""
    return measured.cpu * 1e3 / workers


def print_table(results: Results, servers: int) -> None:
    """``of the floor``: ratios within a round, their median."""
    columns = ("processes", "steps/s", "spread", "of the floor", "CPU ms/step", "of the floor", "of the first")
    print(f"{'':<24}" + "".join(f"{column:>14}" for column in columns))
    first = next(number for _, number in results)
    for (name, number), measured in results.items():
        floor = results["floor", number]
        rates = [throughput(number, one) for one in measured]
        cpus = [cpu_milliseconds(number, one) for one in measured]
        processes = number + (servers + 1 if name == "torchstrat" else 0)  # and the coordinator
        cells = (
            f"{processes}",
            f"{statistics.median(rates):.2f}",
            f"{spread(rates):.0%}",
            f"{ratio(rates, [throughput(number, one) for one in floor]):.2f}",
            f"{statistics.median(cpus):.1f}",
            f"{ratio(cpus, [cpu_milliseconds(number, one) for one in floor]):.2f}",
            f"{ratio(cpus, [cpu_milliseconds(first, one) for one in results[name, first]]):.2f}",
        )
        print(f"{name + f', {number} worker(s)':<24}" + "".join(f"{cell:>14}" for cell in cells))


def print_picture(title: str, results: Results, value: Callable[[int, Measurement], float]) -> None:
    """A bar for each row of the table."""
    medians = {key: statistics.median(value(key[1], one) for one in measured) for key, measured in results.items()}
    largest = max(medians.values())
    print(f"\n{title}: {', '.join(f'{mark} {name}' for name, mark in MARKS.items())}")
    for (name, number), median in medians.items():
        label = f"{number} worker(s)" if name == CONTENDERS[0] else ""
        print(f"{label:>12} {MARKS[name] * round(WIDTH * median / largest)} {median:.1f}")


if __name__ == "__main__":
    sys.exit(main())
