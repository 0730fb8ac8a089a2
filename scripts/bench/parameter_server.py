"""What training with variables on parameter servers costs over training with everything at hand.

::

    python scripts/bench/parameter_server.py                        # all workloads
    python scripts/bench/parameter_server.py A-sgd C --rounds 7
    python scripts/bench/parameter_server.py A-sgd C --small --rounds 1    # does it work? Its figures mean nothing

Rules. The floor (``ps_floor.py``) is one process per worker that holds the whole model and its optimizer's state, and
never talks; it runs twice, as it is and with malloc told to keep the pages of freed blocks. ``ps_tutorial.py`` is a
parameter server as tutorials write it on torch.distributed.rpc, ``ps_torchstrat.py`` is this library, as it is and
without shared memory, all with real processes. All train the same model from the same values with the same optimizer,
one thread per process, on batches allocated before; first one worker of each shows that it has the floor's losses.
Rounds are interleaved: each measures every contender once, in fresh processes, in an order that rotates. Shown are
medians over the rounds, the spread (largest minus smallest, over the median), and ratios taken within a round. Wall
clock is the slower worker's per step, after a warm-up; CPU is summed over all processes. **A run counts only if the
floor's spread is under 10 %, over at least 3 rounds**; it says so, and exits with status 1 if not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from ps_contenders import CONTENDERS, Measurement, measure_once
from ps_workloads import WORKLOADS, Workload, from_arguments
from train_step import FEWEST_ROUNDS, LARGEST_SPREAD, print_header

CHECK_STEPS = 8
CHECK_TOLERANCE = 1e-5
"""Relative. A step's sums are taken in other orders (rows of a table, parts of a layer), which float32 shows at 1e-6 or
less. Updates left out or made twice show at 1e-2, those of the table alone at 3e-5 in the fifth loss, and growing."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    options = parser.parse_args()
    unknown = [name for name in options.what if name not in WORKLOADS]
    if unknown:
        parser.error(f"{', '.join(unknown)} unknown; choose any of {', '.join(WORKLOADS)}")
    if "floor" not in options.contenders:
        parser.error("the floor is what the others are divided by; --contenders needs it")
    print_header()
    counts = []
    for name in options.what or WORKLOADS:
        arguments = [name, "small"] if options.small else [name]
        workload = from_arguments(arguments)
        print(f"\n{workload.title}")
        if workload.problem is not None:
            check_losses(options.contenders, arguments)
        counts.append(report(workload, measure(options.contenders, arguments, options.rounds)))
    print(f"\nload at the end {' '.join(f'{value:.2f}' for value in os.getloadavg())}")
    return int(not all(counts))


def check_losses(contenders: list[str], arguments: list[str]) -> None:
    """Raises `SystemExit` if a contender with one worker does not have the floor's first losses."""
    check = [*arguments, f"check={CHECK_STEPS}"]
    wanted = measure_once("floor", check).losses
    for name in contenders:
        if CONTENDERS[name][0] != "floor":
            losses = measure_once(name, check).losses
            apart = max(abs(loss - other) / abs(other) for loss, other in zip(losses, wanted, strict=True))
            print(f"{name}, 1 worker: the floor's first {CHECK_STEPS} losses, at most {apart:.1e} apart", flush=True)
            if not apart <= CHECK_TOLERANCE:
                raise SystemExit(f"{name} trains something else than the floor: losses {losses}, the floor's {wanted}")


def measure(contenders: list[str], arguments: list[str], rounds: int) -> dict[str, list[Measurement]]:
    results: dict[str, list[Measurement]] = {name: [] for name in contenders}
    for number in range(rounds):
        turn = number % len(contenders)
        for name in contenders[turn:] + contenders[:turn]:
            results[name].append(measure_once(name, arguments))
        print(f"\r{' '.join(arguments)}: round {number + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def report(workload: Workload, results: dict[str, list[Measurement]]) -> bool:
    """Print one table; whether the run counts."""
    is_training = workload.problem is not None
    unit, scale = ("ms", 1e3) if is_training else ("µs", 1e6)
    bases = [name for name in ("floor", "floor_retained") if name in results] if is_training else []
    header = f"{'':<22}{'wall ' + unit:>12}{'spread':>9}{'CPU ' + unit:>12}"
    print(header + "".join(f"{f'wall × {name}':>23}" for name in bases) + (f"{'CPU × floor':>13}" if bases else ""))
    for name, measurements in results.items():
        walls, cpus = _walls(measurements), [one.cpu for one in measurements]
        row = f"{name:<22}{statistics.median(walls) * scale:>12.3f}{spread(walls):>9.1%}"
        row += f"{statistics.median(cpus) * scale:>12.3f}"
        row += "".join(f"{ratio(walls, _walls(results[base])):>23.2f}" for base in bases)
        if bases:
            row += f"{ratio(cpus, [one.cpu for one in results['floor']]):>13.2f}"
        print(row)
    if is_training:
        _report_memory(workload, results)
    floor = results["floor"]
    counts = spread(_walls(floor)) < LARGEST_SPREAD and len(floor) >= FEWEST_ROUNDS
    verdict = "counts" if counts else "does NOT count"
    rule = f"limit {LARGEST_SPREAD:.0%}, at least {FEWEST_ROUNDS} rounds"
    noise = f"spread of floor {spread(_walls(floor)):.1%} over {len(floor)} rounds"
    print(f"{noise}: this run {verdict} ({rule})", flush=True)
    return counts


def _report_memory(workload: Workload, results: dict[str, list[Measurement]]) -> None:
    """Of all servers together, against what they have to hold."""
    held = results["floor"][0].held_bytes
    for name, measurements in results.items():
        if any(one.server_bytes for one in measurements):
            resident = statistics.median(one.server_bytes for one in measurements)
            own = statistics.median(one.idle_bytes for one in measurements)
            text = f"{name}: {workload.servers} server(s) resident {_mib(resident)}, {resident / held:.2f} × the "
            text += f"{_mib(held)} of variables and {workload.optimizer} state"
            if own:
                text += f"; without the {_mib(own)} that they have before they hold anything: "
                text += f"{(resident - own) / held:.2f} ×"
            print(text)


def spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def ratio(values: list[float], base: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def _walls(measurements: list[Measurement]) -> list[float]:
    return [one.wall for one in measurements]


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
