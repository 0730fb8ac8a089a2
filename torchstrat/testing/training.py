"""What one training case is: a user's script, taken apart so that any strategy, or none, can run it.

A case is written as its user would write it: `Case.build` makes model, optimizer and helpers and returns a `Training`
whose ``step`` is plain single-device PyTorch that closes over them. `run_case` runs it under a strategy, `one_device`
and its like as a plain loop, and both read the same named numbers off it.

`one_device` is the yardstick of nearly all cases and uses nothing of torchstrat but what a step itself calls, which
outside of any strategy is the identity. The exceptions are below it.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from torchstrat.strategies.strategy import Strategy

Batch = tuple[torch.Tensor, ...]
"""A global batch, or one replica's share of it: tensors of shape (rows, …), split on dim 0."""

Snapshot = dict[str, torch.Tensor]
"""Named CPU tensors that share no memory with the training they were read from."""

Step = Callable[[Batch], torch.Tensor]
"""Takes a batch, returns one detached loss per row (or per token), of shape (rows,)."""

STEPS = 5
EVEN_ROWS = (12,) * STEPS
"""Rows of each global batch: a multiple of every number of replicas in the table."""


def regression(rows: Sequence[int] = EVEN_ROWS, shape: tuple[int, ...] = (6,), outputs: int = 3) -> list[Batch]:
    """Global batches ``(x, y)``: x (rows, \\*shape), y (rows, outputs), in the default dtype.

    Drawn once in float64 by a fixed generator, so they do not depend on torch's seed.
    """
    generator = np.random.default_rng(7)
    return [
        (_tensor(generator.normal(size=(count, *shape))), _tensor(generator.normal(size=(count, outputs))))
        for count in rows
    ]


def _tensor(values: object) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.get_default_dtype())


def classification(
    rows: Sequence[int] = EVEN_ROWS, length: int = 4, vocabulary: int = 12, classes: int = 3
) -> list[Batch]:
    """Global batches ``(ids, label)``: token ids (rows, length) below ``vocabulary``, labels (rows,); both int64."""
    generator = np.random.default_rng(11)
    return [
        (
            torch.from_numpy(generator.integers(0, vocabulary, size=(count, length))),
            torch.from_numpy(generator.integers(0, classes, size=count)),
        )
        for count in rows
    ]


def _nothing(*_: object) -> None:
    """The default of `Training.before` and `Training.after`."""


@dataclass(frozen=True)
class Training:
    """What a training script holds after its scope has closed."""

    step: Step
    """Runs on every replica, on that replica's rows."""
    watch: Mapping[str, Any]
    """What the script's owner looks at in the end, by name: see `read`."""
    accumulate: Step | None = None
    """Runs instead of ``step`` on the steps in ``accumulate_on``."""
    accumulate_on: frozenset[int] = frozenset()
    no_sync: bool = True
    """Whether the accumulating runs are inside ``with strategy.no_sync()``."""
    before: Callable[[int], object] = _nothing
    """Called outside of `run`, before each step, with its index."""
    after: Callable[[int, torch.Tensor], object] = _nothing
    """Called outside of `run`, after each step, with its index and the loss over the global batch (a scalar)."""


@dataclass(frozen=True)
class Case:
    """One row of the table of training cases."""

    name: str
    build: Callable[[], Training]
    batches: Callable[[], list[Batch]] = regression
    tolerance: float = 1e-9
    """Largest difference allowed, relative to the larger of 1 and the expected number."""
    dtype: torch.dtype = torch.float64
    """The default dtype while the case is built and run."""
    gradient_reduce_op: str = "mean"
    expected: Callable[[Case, int], Snapshot | None] | None = None
    """``expected(case, replicas)`` where one device on the global batch is not what is asked for; it returns None
    when no numbers are asked for at all, only that all replicas agree."""
    plain: Callable[[], Training] | None = None
    """What the reference builds, where it cannot be what ``build`` makes."""
    warns: str = ""
    """A regular expression for the beginning of a warning that the step may well come with."""
    needs_compiler: bool = False
    """Needs a C++ compiler, and the seconds it takes."""

    def conditions(self) -> AbstractContextManager[object]:
        """Default dtype and seed, the same for every run of this case; both are put back on leaving."""
        stack = dtype_and_seed(self.dtype, 20)
        if self.warns:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=self.warns)
        return stack


def dtype_and_seed(dtype: torch.dtype, seed: int) -> ExitStack:
    """A default dtype and a seed of torch's generator, from now on; both are put back when the stack is left."""
    stack = ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.enter_context(torch.random.fork_rng(devices=[]))
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    return stack


def read(watch: Mapping[str, object]) -> Snapshot:
    """The numbers of everything in ``watch``.

    Modules give parameters and buffers, optimizers the numbers in their ``param_groups``, schedulers their rates and
    their count, tensors themselves; functions are called and return a number or a tensor.
    """
    numbers: Snapshot = {}
    for name, value in watch.items():
        for key, number in _numbers(value).items():
            numbers[f"{name}.{key}" if key else name] = torch.as_tensor(number).detach().cpu().clone()
    return numbers


def _numbers(value: object) -> dict[str, object]:
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, torch.optim.Optimizer):
        return {
            f"group{index}.{key}": torch.as_tensor(option, dtype=torch.float64)
            for index, group in enumerate(value.param_groups)
            for key, option in group.items()
            if key != "params" and _is_numeric(option)
        }
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return {"rates": torch.tensor(value.get_last_lr()), "count": getattr(value, "last_epoch", 0)}
    return _numbers(value()) if callable(value) else {"": value}


def _is_numeric(option: object) -> bool:
    if isinstance(option, tuple):
        return all(_is_numeric(part) for part in option)
    return isinstance(option, int | float | torch.Tensor)


class Mlp(nn.Sequential):
    """Odd sizes on purpose: nothing about them divides by the number of replicas."""

    first: nn.Linear
    tanh: nn.Tanh
    last: nn.Linear

    def __init__(self, inputs: int = 6, hidden: int = 5, outputs: int = 3) -> None:
        layers = {"first": nn.Linear(inputs, hidden), "tanh": nn.Tanh(), "last": nn.Linear(hidden, outputs)}
        super().__init__(OrderedDict(layers))


def squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) twice → the loss of each row, (rows,)."""
    return (prediction - target).square().mean(dim=-1)


def train_step(
    losses: Callable[..., torch.Tensor],
    *optimizers: torch.optim.Optimizer,
    loss: Callable[[torch.Tensor], torch.Tensor | None] = torch.mean,
    edit: Callable[[], object] | None = None,
) -> Step:
    """The step of a first tutorial: one backward over the ``loss`` of ``losses(*batch)``, then each optimizer steps.

    ``loss`` returns None where it has made the backward passes itself. ``edit`` runs before the optimizers.
    """

    def step(batch: Batch) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = losses(*batch)
        if (whole := loss(found)) is not None:
            whole.backward()
        if edit is not None:
            edit()
        for optimizer in optimizers:
            optimizer.step()
        return found.detach()

    return step


def plain_step(model: Callable[..., torch.Tensor], *optimizers: torch.optim.Optimizer, **options: Any) -> Step:
    """`train_step` of the squared error; ``options`` are its."""
    return train_step(lambda x, y: squared_error(model(x), y), *optimizers, **options)


def plain_training(model: nn.Module, optimizer: torch.optim.Optimizer, **options: object) -> Training:
    return Training(plain_step(model, optimizer, **options), {"model": model, "optimizer": optimizer})


def sgd(*models: nn.Module, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> torch.optim.SGD:
    """Over the parameters of all ``models``."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, **options)


def adam(*models: nn.Module, lr: float = 0.05, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam([parameter for model in models for parameter in model.parameters()], lr=lr, **options)


_Model = TypeVar("_Model", bound=nn.Module)


@torch.no_grad()
def filled(model: _Model) -> _Model:
    """With values that do not depend on a generator, so that what is made in a run has the same on one device."""
    for parameter in model.parameters():
        parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model


class FilledLazyLinear(nn.LazyLinear):
    def reset_parameters(self) -> None:
        if self.in_features != 0 and not self.has_uninitialized_params():
            filled(self)


@torch.no_grad()
def scale(model: nn.Module, by: float = 0.99) -> None:
    """In place."""
    for parameter in model.parameters():
        parameter.mul_(by)


def named(*builds: Callable[[], Training], **options: Any) -> list[Case]:
    """Cases that are called as their functions; ``options`` are `Case`'s."""
    return [Case(build.__name__, build, **options) for build in builds]


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


def run_case(case: Case, strategy: Strategy) -> Snapshot:
    """Train under ``strategy`` and read everything the case watches, outside of `run` and on each local replica.

    What replica ``i`` sees has ``" on replica i"`` behind its name. Collective where the strategy is.
    """
    with case.conditions():
        with strategy.scope():
            training = case.build()
        losses: list[torch.Tensor] = []
        for index, batch in enumerate(strategy.distribute_dataset(case.batches())):
            training.before(index)
            with _synchronization(training, index, strategy):
                result = strategy.run(step_for(training, index), args=(batch,))
            loss = strategy.reduce("mean", result, axis=0)
            training.after(index, loss)
            losses.append(loss)
        snapshot = {**named_losses(losses), **read(training.watch)}
        return snapshot | _seen_by_replicas(training, strategy)


def _synchronization(training: Training, index: int, strategy: Strategy) -> Any:
    return strategy.no_sync() if training.no_sync and index in training.accumulate_on else nullcontext()


def _seen_by_replicas(training: Training, strategy: Strategy) -> Snapshot:
    import torchstrat as ts

    def look() -> tuple[torch.Tensor, Snapshot]:
        context = ts.get_replica_context()
        assert context is not None
        return torch.as_tensor(context.replica_id_in_sync_group), read(training.watch)

    seen: Snapshot = {}
    for replica_id, numbers in strategy.local_results(strategy.run(look)):
        seen.update({f"{name} on replica {int(replica_id)}": number for name, number in numbers.items()})
    return seen


def in_process_replicas(case: Case, replicas: int) -> Snapshot:
    """For what draws random numbers: one process with as many replicas is what every launch has to equal."""
    if replicas == 1:
        return one_device(case, replicas)
    import torchstrat as ts

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
    Afterwards floating buffers are the mean over the replicas, weighted by their rows, integral ones replica 0's.
    The case's watch has to hold ``model`` and ``optimizer``, and its step has to be `plain_step`.
    """
    with case.conditions():
        training = case.build()
        model, optimizer = training.watch["model"], training.watch["optimizer"]
        losses: list[torch.Tensor] = []
        for batch in case.batches():
            optimizer.zero_grad()
            copies: list[nn.Module] = []
            shares: list[float] = []
            replica_losses: list[torch.Tensor] = []
            for x, y in equal_chunks(batch, replicas):
                if len(x) == 0:
                    continue
                copies.append(copy.deepcopy(model))
                shares.append(len(x) / len(batch[0]))
                replica_losses.append(squared_error(copies[-1](x), y))
                (replica_losses[-1].sum() / len(batch[0])).backward()
            _collect(model, copies, shares)
            optimizer.step()
            losses.append(torch.cat(replica_losses).mean(dim=0))
        return {**named_losses(losses), **read(training.watch)}


@torch.no_grad()
def _collect(model: nn.Module, copies: list[nn.Module], shares: list[float]) -> None:
    for name, parameter in model.named_parameters():
        gradients = [replica.get_parameter(name).grad for replica in copies]
        parameter.grad = torch.stack([gradient for gradient in gradients if gradient is not None]).sum(dim=0)
    for name, buffer in model.named_buffers():
        values = torch.stack([replica.get_buffer(name) for replica in copies])
        mean = torch.tensordot(torch.tensor(shares, dtype=torch.float64), values.double(), dims=1)
        buffer.copy_(mean if buffer.is_floating_point() else values[0])
