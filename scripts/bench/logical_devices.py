"""What logical devices cost over tensor parallelism written by hand with PyTorch's ``parallelize_module``.

::

    python scripts/bench/logical_devices.py                    # an MLP over 2 processes
    python scripts/bench/logical_devices.py --processes 4 --rounds 9

Rules. One replica of as many logical devices as there are processes. All contenders run in the same processes, on the
same numbers and batches, with the same optimizer; their losses are compared before anything is timed. Rounds are
interleaved in an order that rotates; a round is a number of steps between two barriers. Shown are medians over the
rounds of the slowest process, the spread (largest minus smallest, over the median), and ratios taken within a round.
``by hand`` talks through gloo, so ``gloo`` is the one to compare it with; ``auto`` is what a user gets on one host.
**Wanted: gloo at most 1.10 × by hand**, in a run that counts: one where the spread by hand is under 10 %. Exits with
status 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WIDTHS, ROWS = (512, 4096, 512, 4096, 16), 64
MOST_OVER_BY_HAND, LARGEST_SPREAD, FEWEST_ROUNDS = 1.10, 0.10, 3
WARM_UP_STEPS, STEPS_OF_A_ROUND = 3, 10
RULES = {
    "*[04].weight": ("d0", None),
    "*[04].bias": ("d0",),
    "*[26].weight": (None, "d0"),
}

Step = Callable[[], torch.Tensor]


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(ROWS, WIDTHS[0], generator=generator), torch.randint(WIDTHS[-1], (ROWS,), generator=generator)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def by_hand(processes: int) -> tuple[Step, Callable[[], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_model()
    mesh = init_device_mesh("cpu", (processes,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    step, (inputs, targets) = plain_step(model, sgd(model)), batch()
    return lambda: step(inputs, targets), lambda: None


def by_strategy(processes: int, collectives: str) -> tuple[Step, Callable[[], None]]:
    import torchstrat as ts

    strategy = ts.MirroredStrategy(logical_devices_per_replica=processes, sharding_rules=RULES, collectives=collectives)
    with strategy.scope():
        model = make_model()
        optimizer = sgd(model)
    step, arguments = plain_step(model, optimizer), batch()

    def run() -> torch.Tensor:
        (loss,) = strategy.local_results(strategy.run(step, args=arguments))
        return loss  # type: ignore[no-any-return]

    return run, strategy.close


def measure(processes: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """What each process does: losses, and seconds per step by round."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    made = {
        "by hand": by_hand(processes),
        "gloo": by_strategy(processes, "process_group"),
        "auto": by_strategy(processes, "auto"),
    }
    try:
        losses = {name: [float(step()) for _ in range(WARM_UP_STEPS)] for name, (step, _) in made.items()}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        names = list(made)
        for number in range(rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                step = made[name][0]
                dist.barrier()
                began = time.perf_counter()
                for _ in range(STEPS_OF_A_ROUND):
                    step()
                dist.barrier()
                seconds[name].append((time.perf_counter() - began) / STEPS_OF_A_ROUND)
        return losses, seconds
    finally:
        for _, close in made.values():
            close()
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    from train_step import _load, print_header  # this folder's

    from torchstrat.testing import Workers

    print_header()
    with Workers(options.processes, timeout_seconds=900) as workers:
        of_ranks = workers.run(measure, options.processes, options.rounds)
    losses = of_ranks[0][0]
    for name, found in losses.items():
        if any(abs(one - other) > 1e-4 for one, other in zip(found, losses["by hand"], strict=True)):
            print(f"losses differ: {name} {found}, by hand {losses['by hand']}")
            return 1
    slowest = {name: [max(of[1][name][n] for of in of_ranks) for n in range(options.rounds)] for name in losses}
    widths = "-".join(map(str, WIDTHS))
    print(f"\nMLP {widths}, {ROWS} rows, 1 replica of {options.processes} logical devices, {options.rounds} rounds")
    print(f"{'':>10} {'ms':>10} {'spread':>8} {'× by hand':>10}")
    ratios = {}
    for name, each in slowest.items():
        middle = statistics.median(each)
        ratios[name] = statistics.median(one / other for one, other in zip(each, slowest["by hand"], strict=True))
        print(f"{name:>10} {middle * 1e3:>10.2f} {_spread(each):>8.1%} {ratios[name]:>10.2f}")
    print(f"load at the end {_load()}")
    counts = _spread(slowest["by hand"]) < LARGEST_SPREAD and options.rounds >= FEWEST_ROUNDS
    if not counts:
        print(f"spread by hand {_spread(slowest['by hand']):.1%}: this run does NOT count (limit {LARGEST_SPREAD:.0%})")
    return int(not counts or ratios["gloo"] > MOST_OVER_BY_HAND)


def _spread(each: list[float]) -> float:
    return (max(each) - min(each)) / statistics.median(each)


if __name__ == "__main__":
    sys.exit(main())
