"""What one training case is: a user's script, taken apart so that any strategy, or none, can run it.

A case is written as its user would write it: `Case.build` makes model, optimizer and helpers and returns a `Training`
whose ``step`` is plain single-device PyTorch that closes over them. `torchstrat.testing.contract` runs it under a
strategy, `torchstrat.testing.references` as a plain loop, and both read the same named numbers off it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
"""A global batch, or one replica's share of it: tensors of shape (rows, …), split on dim 0."""

Snapshot = dict[str, torch.Tensor]
"""Named CPU tensors that share no memory with the training they were read from."""

Step = Callable[[Batch], torch.Tensor]
"""Takes a batch, returns one detached loss per row (or per token), of shape (rows,)."""

STEPS = 5
EVEN_ROWS = (8,) * STEPS
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


def _tensor(values: Any) -> torch.Tensor:
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


def _nothing_before(step_index: int) -> None:
    """The default of `Training.before`."""


def _nothing_after(step_index: int, loss: torch.Tensor) -> None:
    """The default of `Training.after`."""


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
    before: Callable[[int], None] = _nothing_before
    """Called outside of `run`, before each step, with its index."""
    after: Callable[[int, torch.Tensor], None] = _nothing_after
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

    def conditions(self) -> AbstractContextManager[Any]:
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


def read(watch: Mapping[str, Any]) -> Snapshot:
    """The numbers of everything in ``watch``.

    Modules give parameters and buffers, optimizers the numbers in their ``param_groups``, schedulers their rates and
    their count, tensors themselves; functions are called and return a number or a tensor.
    """
    numbers: Snapshot = {}
    for name, value in watch.items():
        for key, number in _numbers(value).items():
            numbers[f"{name}.{key}" if key else name] = torch.as_tensor(number).detach().cpu().clone()
    return numbers


def _numbers(value: Any) -> dict[str, Any]:
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
        return {"rates": torch.tensor(value.get_last_lr()), "count": value.last_epoch}
    if isinstance(value, torch.Tensor):
        return {"": value}
    return {"": value()}


def _is_numeric(option: Any) -> bool:
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


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of a first tutorial: a mean loss, one backward, one step."""

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return step


def plain_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    return Training(plain_step(model, optimizer), {"model": model, "optimizer": optimizer})
