"""What the numbers of a training case have to be: plain PyTorch loops on one device.

`one_device` is the yardstick of nearly all cases and uses nothing of torchstrat but what a step itself calls, which
outside of any strategy is the identity. The exceptions are below it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from torchstrat.testing.training import Batch, Case, Snapshot, Step, Training, read, squared_error


def reference(case: Case, replicas: int) -> Snapshot | None:
    """The numbers ``case`` has to give on ``replicas`` replicas; None if they only have to agree."""
    return (case.expected or one_device)(case, replicas)


def one_device(case: Case, replicas: int) -> Snapshot:
    """The plain loop over global batches; the number of replicas does not matter."""
    with case.conditions():
        training = (case.plain or case.build)()
        losses: list[torch.Tensor] = []
        for index, batch in enumerate(case.batches()):
            training.before(index)
            loss = step_for(training, index)(batch).mean(dim=0)
            training.after(index, loss)
            losses.append(loss)
        return {**named_losses(losses), **read(training.watch)}


def step_for(training: Training, index: int) -> Step:
    if training.accumulate is not None and index in training.accumulate_on:
        return training.accumulate
    return training.step


def named_losses(losses: list[torch.Tensor]) -> Snapshot:
    return {f"loss[{index}]": loss.detach().cpu().clone() for index, loss in enumerate(losses)}


def no_numbers(case: Case, replicas: int) -> None:
    """For what differs between replicas by design until it is applied: all of them have to agree afterwards."""


def in_process_replicas(case: Case, replicas: int) -> Snapshot:
    """For what draws random numbers: one process with as many replicas is what every launch has to equal."""
    if replicas == 1:
        return one_device(case, replicas)
    import torchstrat as ts
    from torchstrat.testing.contract import run_case

    strategy = ts.MirroredStrategy(devices=[f"cpu:{index}" for index in range(replicas)])
    try:
        numbers = run_case(replace(case, expected=None), strategy)
    finally:
        strategy.close()
    return {name: number for name, number in numbers.items() if " on replica " not in name}


def equal_chunks(batch: Batch, replicas: int) -> Iterator[Batch]:
    """How a global batch is split: ceil(rows / replicas) rows each until none are left, then empty tensors."""
    rows = len(batch[0])
    chunk = max(1, -(-rows // replicas))
    for index in range(replicas):
        yield tuple(tensor[index * chunk : (index + 1) * chunk] for tensor in batch)


def replicas_by_hand(case: Case, replicas: int) -> Snapshot:
    """Data parallelism written out: for models whose forward looks at the whole batch, as BatchNorm does.

    Every replica has its own copy of the model and its own statistics in a step. Gradients are averaged by rows.
    Afterwards floating buffers are the mean over the replicas that had rows, integral ones replica 0's.
    The case's watch has to hold ``model`` and ``optimizer``, and its step has to be `plain_step`.
    """
    with case.conditions():
        training = case.build()
        model, optimizer = training.watch["model"], training.watch["optimizer"]
        losses: list[torch.Tensor] = []
        for batch in case.batches():
            optimizer.zero_grad()
            copies: list[nn.Module] = []
            replica_losses: list[torch.Tensor] = []
            for x, y in equal_chunks(batch, replicas):
                if len(x) == 0:
                    continue
                copies.append(copy.deepcopy(model))
                replica_losses.append(squared_error(copies[-1](x), y))
                (replica_losses[-1].sum() / len(batch[0])).backward()
            _collect(model, copies)
            optimizer.step()
            losses.append(torch.cat(replica_losses).mean(dim=0))
        return {**named_losses(losses), **read(training.watch)}


@torch.no_grad()
def _collect(model: nn.Module, copies: list[nn.Module]) -> None:
    for name, parameter in model.named_parameters():
        gradients = [replica.get_parameter(name).grad for replica in copies]
        parameter.grad = torch.stack([gradient for gradient in gradients if gradient is not None]).sum(dim=0)
    for name, buffer in model.named_buffers():
        values = torch.stack([replica.get_buffer(name) for replica in copies])
        buffer.copy_(values.mean(dim=0) if buffer.is_floating_point() else values[0])
