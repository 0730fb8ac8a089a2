"""What `ts.prefetch_rows` saves in workload A, how old the rows are that it brings, and what that does to learning.

::

    python scripts/bench/ps_prefetch.py                             # SGD and Adagrad
    python scripts/bench/ps_prefetch.py A-adagrad --rounds 5 --seeds 5
    python scripts/bench/ps_prefetch.py --small --rounds 1 --seeds 2    # does it work? Its figures mean nothing

Real processes, 2 workers and 2 servers unless ``--workers`` says otherwise; with and without take the same batches.

1. Time: rounds are interleaved, as in ``parameter_server.py``. Each measures both once, in fresh processes; the ratio
   is taken within a round.
2. Age: at each lookup the worker reads the same rows once more, at once and anew, in steps of their own that nobody
   times. A row has changed if the two differ in any bit; by how much is the norm of the difference over that of the
   row, among the rows that have changed. Each different row of a batch counts once under "rows"; under "ids" as often
   as the batch names it, which frequent rows, changed in nearly every step, dominate. The second reading takes a few
   milliseconds, in which the *other* workers push: what "without" shows is that, and the error of the measurement.
3. Learning: the mean loss of the last functions of a run, with and without, from the same first values (another set
   for each seed), at a rate at which the loss falls clearly. Labels are random: what is learned are the rows
   themselves. Two workers never take the same turns twice, so that differences have to be seen beside the spread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from parameter_server import ratio, spread
from ps_contenders import HERE, ROOT, Measurement, measure_once
from ps_torchstrat import Repeated, partitioner_of
from ps_workloads import Batch, Clicks, Workload, from_arguments, train_step
from train_step import print_header

import torchstrat as ts
from torchstrat.launch import LocalCluster

WORKLOADS = ("A-sgd", "A-adagrad")
NAMES = {(): "without", ("prefetch",): "prefetch_rows"}
RATES = {"SGD": 0.3, "Adagrad": 0.0025}  # the rates of the other benchmarks hardly change a loss in so few steps
FUNCTIONS = 200  # of all workers together
LAST = 50  # of these
MEASURED = 40  # after these, to see how old the rows are


@dataclass(frozen=True)
class Run:
    """What one cluster of fresh processes found. ``changes``: of each row of each lookup, how much it had changed
    relative to itself; ``counts``: how often its batch named it. Both ``(rows of all lookups,)``."""

    losses: list[float]
    changes: torch.Tensor
    counts: torch.Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    options = parser.parse_args()
    if unknown := [name for name in options.what if name not in WORKLOADS]:
        parser.error(f"{', '.join(unknown)} unknown; choose any of {', '.join(WORKLOADS)}")
    if min(options.rounds, options.workers) < 1 or options.seeds < 2:
        parser.error("--rounds and --workers need numbers of at least 1, --seeds of at least 2")
    torch.set_num_threads(1)
    print_header()
    for name in options.what or WORKLOADS:
        arguments = [name, *(["small"] if options.small else []), f"workers={options.workers}"]
        print(f"\n{from_arguments(arguments).title}", flush=True)
        print_times(arguments, options.rounds)
        runs: dict[tuple[str, ...], list[Run]] = {change: [] for change in NAMES}
        for seed in range(options.seeds):
            for change in list(NAMES)[:: -1 if seed % 2 else 1]:
                workload = from_arguments([*arguments, *change])
                runs[change].append(run_once(workload, seed))
                print(f"\rseed {seed + 1}/{options.seeds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        print_ages(runs)
        print_learning(runs)
    print(f"\nload at the end {' '.join(f'{value:.2f}' for value in os.getloadavg())}")
    return 0


# ---- time ------------------------------------------------------------------------------------------------------------


def print_times(arguments: list[str], rounds: int) -> None:
    found: dict[tuple[str, ...], list[Measurement]] = {change: [] for change in NAMES}
    for number in range(rounds):
        for change in list(NAMES)[:: -1 if number % 2 else 1]:
            found[change].append(measure_once("torchstrat", [*arguments, *change]))
        print(f"\rround {number + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{'time per step':<16}" + "".join(f"{it:>12}" for it in ("wall ms", "spread", "CPU ms", "spread")), end="")
    print(f"{'wall × without':>17}{'CPU × without':>17}")
    walls = {change: [one.wall for one in measured] for change, measured in found.items()}
    cpus = {change: [one.cpu for one in measured] for change, measured in found.items()}
    for change, name in NAMES.items():
        both = walls[change], cpus[change]
        row = "".join(f"{statistics.median(values) * 1e3:>12.2f}{spread(values):>12.1%}" for values in both)
        print(f"{name:<16}{row}{ratio(walls[change], walls[()]):>17.3f}{ratio(cpus[change], cpus[()]):>17.3f}")


# ---- age and learning ------------------------------------------------------------------------------------------------


def run_once(workload: Workload, seed: int) -> Run:
    """Train, and then look at how old the rows of some more steps are."""
    workload = replace(workload, learning_rate=RATES[workload.optimizer])
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    with LocalCluster(workers=workload.workers, ps=workload.servers, restart=False, env=env) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver, partitioner_of(workload))
        coordinator = ts.ClusterCoordinator(strategy)
        try:
            return train(workload, coordinator, seed)
        finally:
            strategy.close()


def train(workload: Workload, coordinator: ts.ClusterCoordinator, seed: int) -> Run:
    problem = workload.problem
    assert isinstance(problem, Clicks)
    with coordinator.strategy.scope():
        torch.manual_seed(seed)
        model = problem.model()
        optimizer = workload.make_optimizer(model.parameters())

    def batches_of_worker() -> Repeated:
        return Repeated(workload, seed * workload.workers + coordinator.get_current_worker_index())

    def step(batches: Iterator[tuple[Batch, Batch]]) -> torch.Tensor:
        batch, following = next(batches)

        def prefetch() -> None:
            ts.prefetch_rows(model.table, following[0][0])

        return train_step(problem, model, optimizer, batch, prefetch if workload.prefetch else None)

    def measured_step(batches: Iterator[tuple[Batch, Batch]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by hand: `step`, with a second lookup behind the first, for which nothing was asked ahead."""
        ((ids, features), clicked), following = next(batches)
        optimizer.zero_grad()
        used = model.table(ids)
        with torch.no_grad():
            unique, counts = ids.unique(return_counts=True)
            fresh = model.table(unique)
            old = torch.empty_like(fresh)
            old[torch.searchsorted(unique, ids)] = used
        loss = problem.loss(model.from_vectors(used, features), clicked)
        if workload.prefetch:
            ts.prefetch_rows(model.table, following[0][0])
        loss.backward()
        optimizer.step()
        changes = (fresh - old).norm(dim=1) / fresh.norm(dim=1)
        at_least = torch.finfo().tiny  # the norm of a change in the last bit may be rounded to 0
        return torch.where((fresh != old).any(1), changes.clamp_min(at_least), 0.0), counts

    batches = iter(coordinator.create_per_worker_dataset(batches_of_worker))
    trained = [coordinator.schedule(step, args=(batches,)) for _ in range(FUNCTIONS)]
    measured = [coordinator.schedule(measured_step, args=(batches,)) for _ in range(MEASURED)]
    coordinator.join()
    losses = [float(loss) for loss in coordinator.fetch(trained)]
    each = zip(*coordinator.fetch(measured), strict=True)  # of a lookup, as arrays
    changes, counts = (torch.cat([torch.as_tensor(one) for one in ones]) for ones in each)
    return Run(losses, changes, counts)


def print_ages(runs: dict[tuple[str, ...], list[Run]]) -> None:
    print(f"\n{'rows changed':<16}{'rows':>10}{'ids':>10}{'median change':>16}{'95th percentile':>18}{'lookups':>10}")
    for change, name in NAMES.items():
        changes = torch.cat([run.changes for run in runs[change]])
        counts = torch.cat([run.counts for run in runs[change]])
        has_changed = changes > 0
        by_ids = float(counts[has_changed].sum() / counts.sum())
        row = f"{name:<16}{float(has_changed.float().mean()):>10.2%}{by_ids:>10.2%}"
        if has_changed.any():
            median, high = changes[has_changed].quantile(torch.tensor([0.5, 0.95])).tolist()
            row += f"{median:>16.2e}{high:>18.2e}"
        else:
            row += f"{'-':>16}{'-':>18}"
        print(f"{row}{MEASURED * len(runs[change]):>10}")


def print_learning(runs: dict[tuple[str, ...], list[Run]]) -> None:
    ends = {change: [statistics.fmean(run.losses[-LAST:]) for run in found] for change, found in runs.items()}
    print(f"\n{'mean loss':<16}{f'first {LAST}':>12}{f'last {LAST}':>12}{'of each seed':>16}")
    for change, name in NAMES.items():
        first = statistics.fmean(loss for run in runs[change] for loss in run.losses[:LAST])
        each = "  ".join(f"{end:.4f}" for end in ends[change])
        print(f"{name:<16}{first:>12.4f}{statistics.fmean(ends[change]):>12.4f}      {each}")
    with_it = ends["prefetch",]
    differences = [one - other for one, other in zip(with_it, ends[()], strict=True)]
    print(f"{'difference':<16}{'':>12}{statistics.fmean(differences):>+12.4f}", end="      ")
    print("  ".join(f"{one:+.4f}" for one in differences))
    deviations = (statistics.stdev(differences), statistics.stdev(ends[()]))
    print(f"standard deviation between seeds: of the difference {deviations[0]:.4f}, of without {deviations[1]:.4f}")


if __name__ == "__main__":
    sys.exit(main())
