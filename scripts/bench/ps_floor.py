"""One worker of the floor: holds everything itself, and never talks. ``python ps_floor.py INDEX WORKLOAD …``

No training with variables elsewhere can be faster on the same cores without doing less: the same forward and backward
pass, the same optimizer over all of the model, nothing sent. Where calls are measured, the floor is the same number of
calls in a loop, and only tells how quiet the machine is.
"""

from __future__ import annotations

import itertools
import sys
import time

import ps_stage
import torch
from ps_workloads import Workload, do_nothing, from_arguments, train_step

CALLS_FOR_ONE = 1_000  # so that a loop of empty calls takes long enough to be timed


def main(index: int, workload: Workload) -> None:
    torch.set_num_threads(1)
    if workload.problem is None:
        call(workload)
    else:
        train(index, workload)


def train(index: int, workload: Workload) -> None:
    problem = workload.problem
    assert problem is not None
    model, optimizer = workload.make()
    batches = itertools.cycle(workload.batches(index))
    for _ in range(workload.warm_up_steps):
        train_step(problem, model, optimizer, next(batches))
    ps_stage.ready()
    began = time.perf_counter()
    losses = [train_step(problem, model, optimizer, next(batches)) for _ in range(workload.steps)]
    wall = (time.perf_counter() - began) / workload.steps
    tensors = [*model.parameters(), *(tensor for state in optimizer.state.values() for tensor in state.values())]
    held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    ps_stage.finished(wall=wall, losses=[float(loss) for loss in losses], held_bytes=held_bytes)


def call(workload: Workload) -> None:
    ps_stage.ready()
    began = time.perf_counter()
    for _ in range(workload.steps * CALLS_FOR_ONE):
        do_nothing()
    wall = (time.perf_counter() - began) / workload.steps / CALLS_FOR_ONE
    ps_stage.finished(wall=wall, repeated=CALLS_FOR_ONE)


if __name__ == "__main__":
    main(int(sys.argv[1]), from_arguments(sys.argv[2:]))
