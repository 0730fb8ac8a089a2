"""One process of one measurement: ``python contenders.py NAME WORKLOAD``, started by ``train_step.py``.

Every contender trains the same workload with the same plain step; they differ in who averages the gradients. Prints one
JSON object: seconds of wall clock and of CPU (all threads of this process) per step, and the most memory that this
process has had, in bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ps_contenders import peak_bytes
from workloads import WORKLOADS, Workload

Step = Callable[[], Any]


def plain_step(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None] | None = None) -> Any:
    """The user's training step, the same for all."""

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        if backward is None:
            loss.backward()
        else:
            backward(loss)
        optimizer.step()
        return loss.detach()

    return train_step


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)


def own_batch(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    return workload.replica_batch(seed=int(os.environ["RANK"]))


def ddp(workload: Workload, stack: ExitStack) -> Step:
    """DistributedDataParallel as the tutorial has it, on gloo."""
    dist.init_process_group("gloo")
    stack.callback(dist.destroy_process_group)
    model = torch.nn.parallel.DistributedDataParallel(workload.model())
    train_step, batch = plain_step(model, sgd(model)), own_batch(workload)
    return lambda: train_step(batch)


def accelerate(workload: Workload, stack: ExitStack) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    stack.callback(accelerator.end_training)
    model = workload.model()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train_step, batch = plain_step(model, optimizer, accelerator.backward), own_batch(workload)
    return lambda: train_step(batch)


def fabric(workload: Workload, stack: ExitStack) -> Step:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    stack.callback(dist.destroy_process_group)
    model = workload.model()
    model, optimizer = fabric.setup(model, sgd(model))
    train_step, batch = plain_step(model, optimizer, fabric.backward), own_batch(workload)
    return lambda: train_step(batch)


def under_strategy(strategy: Any, workload: Workload, stack: ExitStack, batch: Any, **options: Any) -> Step:
    """The README's loop without its input pipeline: the batch is there already, as it is for the others."""
    stack.callback(strategy.close)
    with strategy.scope():
        model = workload.model()
        optimizer = sgd(model, **options)
    train_step = plain_step(model, optimizer)
    return lambda: strategy.run(train_step, args=(batch,))


def mirrored(workload: Workload, stack: ExitStack) -> Step:
    import torchstrat as ts

    return under_strategy(ts.MirroredStrategy(["cpu:0"]), workload, stack, own_batch(workload))


def central_storage(workload: Workload, stack: ExitStack) -> Step:
    import torchstrat as ts

    return under_strategy(ts.CentralStorageStrategy(["cpu:0"]), workload, stack, own_batch(workload))


def central_storage_at_owner(workload: Workload, stack: ExitStack) -> Step:
    import torchstrat as ts

    strategy = ts.CentralStorageStrategy(["cpu:0"], gradients="owner")
    return under_strategy(strategy, workload, stack, own_batch(workload))


def _both_batches(workload: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [workload.replica_batch(seed) for seed in range(2)]


def loop_in_process(workload: Workload, stack: ExitStack) -> Step:
    """By hand, for one process: both half batches into the same ``.grad``, one fused step."""
    model = workload.model()
    optimizer = sgd(model, fused=True)
    batches = _both_batches(workload)

    def step() -> None:
        optimizer.zero_grad()
        for inputs, targets in batches:
            (F.mse_loss(model(inputs), targets) / len(batches)).backward()
        optimizer.step()

    return step


def _in_process(strategy: Any, workload: Workload, stack: ExitStack) -> Step:
    batches = _both_batches(workload)
    inputs = strategy.distribute_values_from_function(lambda context: batches[context.replica_id_in_sync_group][0])
    targets = strategy.distribute_values_from_function(lambda context: batches[context.replica_id_in_sync_group][1])
    return under_strategy(strategy, workload, stack, (inputs, targets), fused=True)


def mirrored_in_process(workload: Workload, stack: ExitStack) -> Step:
    import torchstrat as ts

    return _in_process(ts.MirroredStrategy(["cpu:0", "cpu:1"]), workload, stack)


def central_storage_in_process(workload: Workload, stack: ExitStack) -> Step:
    import torchstrat as ts

    return _in_process(ts.CentralStorageStrategy(["cpu:0", "cpu:1"]), workload, stack)


def _any_two_replicas() -> Any:
    import torchstrat as ts

    return ts.MirroredStrategy(["cpu:0"] if "RANK" in os.environ else ["cpu:0", "cpu:1"])


def empty_run(workload: Workload, stack: ExitStack) -> Step:
    """``strategy.run`` of a function that does nothing: what a step costs before it does anything."""
    strategy = stack.enter_context(closing(_any_two_replicas()))
    return lambda: strategy.run(_nothing)


def scalar_reduce(workload: Workload, stack: ExitStack) -> Step:
    strategy = stack.enter_context(closing(_any_two_replicas()))
    value = strategy.run(lambda: torch.ones(()))
    return lambda: strategy.reduce("mean", value, axis=None)


def _nothing() -> None:
    pass


CONTENDERS: dict[str, Callable[[Workload, ExitStack], Step]] = {
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "mirrored": mirrored,
    "central_storage": central_storage,
    "central_storage_at_owner": central_storage_at_owner,
    "loop_in_process": loop_in_process,
    "mirrored_in_process": mirrored_in_process,
    "central_storage_in_process": central_storage_in_process,
    "empty_run": empty_run,
    "scalar_reduce": scalar_reduce,
}


def main(name: str, workload: Workload) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with ExitStack() as stack:
        step = CONTENDERS[name](workload, stack)
        for _ in range(workload.warm_up_steps):
            step()
        _barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(workload.steps):
            step()
        own_cpu = time.process_time() - cpu  # before the barrier: waiting for the other is wall clock, not work
        _barrier()
        seconds = time.perf_counter() - wall
        facts = {"wall": seconds / workload.steps, "cpu": own_cpu / workload.steps, "peak": peak_bytes(os.getpid())}
        print(json.dumps(facts), flush=True)
        # All is measured. DDP on gloo now and then aborts while it is taken down (a thread that was not joined).
        os._exit(0)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], WORKLOADS[sys.argv[2]])
