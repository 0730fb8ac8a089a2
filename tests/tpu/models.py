"""What the files here train, and plain PyTorch doing the same: one replica after the other, in a loop.

Nothing of torchstrat is in the reference. A replica's batch norm sees the replica's rows alone, so its running
statistics start each step from the same values on all replicas, and go on from the mean of what they came to, weighted
by rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import torchstrat as ts

Batch = tuple[torch.Tensor, ...]
Annotation = Callable[[torch.Tensor], torch.Tensor]

COMPUTATION_SHAPES = {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (1, 2, 1, 2), 8: (2, 2, 1, 2)}
"""Logical devices of a replica → the box of cores that it takes of the mesh of eight virtual devices (2, 2, 1, 2)."""


def make_strategy(replicas: int, logical_devices: int, **options: Any) -> ts.TPUStrategy:
    """``replicas × logical_devices`` of the eight virtual devices; the rest is idle."""
    topology = ts.tpu.initialize_tpu_system(virtual_devices=8)
    assignment = ts.tpu.DeviceAssignment.build(
        topology, computation_shape=COMPUTATION_SHAPES[logical_devices], num_replicas=replicas
    )
    return ts.TPUStrategy(device_assignment=assignment, **options)


# --- models -----------------------------------------------------------------------------------------------------------


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """No annotation."""
    return tensor


class ConvNet(nn.Module):
    """Two convolutions with batch norm, on images ``[rows, in_channels, height, width]``.

    Made so that plain PyTorch's own rounding errors stay small, which Adam makes into steps: no biases before a batch
    norm, which takes them out again, and tanh, since a ReLU near 0 turns a rounding error into another gradient.
    ``split``: what is said of every activation that has a height and a width.
    """

    def __init__(self, in_channels: int, channels: int, classes: int, split: Annotation = unchanged) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)
        self.split = split

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.split(images)
        x = self.split(torch.tanh(self.norm1(self.conv1(x))))
        x = self.split(torch.tanh(self.norm2(self.conv2(x))))
        return self.head(x.mean(dim=(2, 3)))


class Mlp(nn.Module):
    """``[rows, features]`` through a hidden layer with layer norm, which can be cut over logical devices."""

    def __init__(self, features: int, hidden: int, classes: int, split: Annotation = unchanged) -> None:
        super().__init__()
        self.linear1 = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.linear2 = nn.Linear(hidden, classes)
        self.split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.split(self.linear1(x))
        x = self.split(torch.relu(self.norm(x)))
        return self.linear2(x)


MLP_RULES: Mapping[str, Sequence[Any]] = {
    "linear1.weight": ("d0", None),
    "linear1.bias": ("d0",),
    "norm.*": ("d0",),
    "linear2.weight": (None, "d0"),
}
"""The hidden layer of `Mlp` cut over the logical devices."""


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """What ``make`` makes of the same random numbers each time."""
    torch.manual_seed(seed)
    return make()


def dataset(steps: Sequence[int], shape: Sequence[int], classes: int, seed: int = 1) -> list[Batch]:
    """A global batch ``(inputs [rows, *shape], labels [rows])`` for each number of rows in ``steps``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, *shape, generator=generator),
            torch.randint(0, classes, (rows,), generator=generator),
        )
        for rows in steps
    ]


def classification_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def weighted_backward(model: nn.Module, batch: Batch, rows: Sequence[int], loss_of: Callable[..., Any]) -> torch.Tensor:
    """Add the gradient of all replicas' losses, each of which counts as much as its rows; the losses, in order."""
    before = copy.deepcopy(dict(model.named_buffers()))
    after: list[dict[str, torch.Tensor]] = []
    losses = []
    for chunk in zip(*(part.split(list(filter(None, rows))) for part in batch), strict=True):
        _set_buffers(model, before)
        loss = loss_of(model, *chunk)
        (loss * len(chunk[0]) / sum(rows)).backward()
        losses.append(loss.detach())
        after.append(copy.deepcopy(dict(model.named_buffers())))
    shares = torch.tensor(list(filter(None, rows))) / sum(rows)
    _set_buffers(model, {name: _merged([one[name] for one in after], shares) for name in before})
    return torch.stack(losses)


def _merged(values: list[torch.Tensor], shares: torch.Tensor) -> torch.Tensor:
    return torch.tensordot(shares, torch.stack(values), dims=1) if values[0].is_floating_point() else values[0]


@torch.no_grad()
def _set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def stacked(strategy: ts.TPUStrategy, result: Any) -> torch.Tensor:
    """What each replica has, on the host."""
    return torch.stack([value.cpu() for value in strategy.local_results(result)])


# --- both -------------------------------------------------------------------------------------------------------------


class Pair:
    """A model with its optimizer on a strategy, and the same in plain PyTorch; they are trained side by side.

    ``build``: of what is said of activations, the model. ``before_step``: what is done to its gradients, and gives a
    number that is compared too; ``after_step``: what the loop does with an optimizer, of which each is made anew.
    """

    def __init__(
        self,
        strategy: ts.TPUStrategy,
        build: Callable[[Annotation], nn.Module],
        annotation: Annotation = unchanged,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
        before_step: Callable[[nn.Module], torch.Tensor] = lambda _: torch.zeros(()),
        after_step: Callable[[torch.optim.Optimizer], Callable[[], object]] = lambda _: lambda: None,
    ) -> None:
        self.strategy, self.before_step = strategy, before_step
        with strategy.scope():
            self.model = seeded(lambda: build(annotation))
            self.optimizer = optimizer(self.model)
        self.plain = seeded(lambda: build(unchanged))
        self.plain_optimizer = optimizer(self.plain)
        self._after = [after_step(one) for one in (self.optimizer, self.plain_optimizer)]
        self.step = _step_of(self.model, self.optimizer, before_step)

    def train(self, batches: Sequence[Batch], **options: Any) -> list[list[int]]:
        """Every number of each step has to be the same, and the state at the end; each replica's rows, by step."""
        rows, run_options = [], ts.RunOptions(**options)
        for distributed, batch in zip(self.strategy.distribute_dataset(batches), batches, strict=True):
            results = self.strategy.run(self.step, args=(distributed,), options=run_options)
            losses, numbers, counts = (stacked(self.strategy, result) for result in results)
            rows.append(counts.tolist())
            self.plain_optimizer.zero_grad()
            require_same_losses(losses, weighted_backward(self.plain, batch, rows[-1], classification_loss))
            wanted = self.before_step(self.plain)
            self.plain_optimizer.step()
            for after in self._after:
                after()
            torch.testing.assert_close(numbers, wanted.expand(len(numbers)), rtol=1e-5, atol=0)
        require_same_state(self.model, self.plain)
        return rows


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, before_step: Callable[[nn.Module], Any]) -> Any:
    """From which the plain model cannot be reached."""

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = classification_loss(model, *batch)
        loss.backward()
        number = before_step(model)
        optimizer.step()
        return loss.detach(), number, torch.full((), len(batch[0]))

    return step


# --- comparison -------------------------------------------------------------------------------------------------------

LOSS_TOLERANCE = 1e-6
PARAMETER_TOLERANCE = 1e-5


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of two entries, relative to the largest entry; for tensors of one shape and dtype."""
    got, wanted = got.detach().cpu(), wanted.detach().cpu()
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert torch.isfinite(wanted.double()).all()
    scale = wanted.double().abs().max().clamp_min(1e-6)
    return float((got.double() - wanted.double()).abs().max() / scale)


def require_same_losses(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = relative_error(got, wanted)
    assert error <= LOSS_TOLERANCE, f"losses differ by {error:.2e}"


def require_same_state(got: nn.Module, wanted: nn.Module) -> None:
    """Parameters and buffers."""
    ours, theirs = got.state_dict(), wanted.state_dict()
    assert list(ours) == list(theirs)
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= PARAMETER_TOLERANCE, f"{worst} differs by {errors[worst]:.2e}; all: {errors}"
