"""An optimizer's step of a large parameter: by one kernel after the other over the whole of it, and in blocks.

::

    python scripts/bench/optimizer_step.py                      # 12.6 million parameters, 9 rounds
    python scripts/bench/optimizer_step.py --parameters 4000000

On every core a process does the same at the same time, one thread each, for that is how training runs: cores share the
way to memory. Both ways take turns within a round, after something else has filled the caches. Shown are medians over
the rounds and the spread (largest minus smallest, over the median) of the first process, and the median of the ratios
within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from train_step import print_header

from torchstrat.core.optimizers import bare_step, step_in_blocks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}
OTHER_FLOATS = 30_000_000


class StepsWholeError(Exception):
    """The library steps parameters of this size whole."""


def in_blocks(optimizer: torch.optim.Optimizer) -> None:
    if not step_in_blocks(optimizer):
        raise StepsWholeError


WAYS = (bare_step, in_blocks)


def measure(process: int, numel: int, rounds: int, barrier: Any) -> None:
    torch.set_num_threads(1)
    for name, make in OPTIMIZERS.items():
        parameter = torch.nn.Parameter(torch.randn(numel))
        parameter.grad = torch.randn(numel)
        try:
            whole, blocks = measure_both(make([parameter]), rounds, barrier)
        except StepsWholeError:  # on all processes
            line = f"{name:<16}  is stepped whole at this size"
        else:
            line = row(name, whole, blocks)
        if process == 0:
            print(line, flush=True)


def measure_both(optimizer: torch.optim.Optimizer, rounds: int, barrier: Any) -> list[list[float]]:
    """Seconds of each step, for each of `WAYS`."""
    others = torch.zeros(OTHER_FLOATS)
    seconds: dict[Any, list[float]] = {way: [] for way in WAYS}
    for number in range(-1, rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            others.add_(1)
            barrier.wait()
            start = time.perf_counter()
            way(optimizer)
            if number >= 0:  # the first step makes the state
                seconds[way].append(time.perf_counter() - start)
    return list(seconds.values())


def row(name: str, whole: list[float], blocks: list[float]) -> str:
    shown = "".join(
        f"{statistics.median(values) * 1e3:>10.1f}{(max(values) - min(values)) / statistics.median(values):>8.0%}"
        for values in (whole, blocks)
    )
    ratio = statistics.median(b / w for b, w in zip(blocks, whole, strict=True))
    return f"{name:<16}{shown}{ratio:>8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=12_600_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print_header()
    processes = len(os.sched_getaffinity(0))
    print(f"\n{options.parameters:,} parameters on each of {processes} cores, {options.rounds} rounds")
    print(f"{'':<16}{'whole ms':>10}{'spread':>8}{'blocks ms':>10}{'spread':>8}{'ratio':>8}", flush=True)
    barrier = torch.multiprocessing.get_context("spawn").Barrier(processes)
    torch.multiprocessing.spawn(measure, (options.parameters, options.rounds, barrier), nprocs=processes)


if __name__ == "__main__":
    main()
