"""Programs under `CentralStorageStrategy`, one replica per process, or plainly, which come to the same numbers."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.testing.fake_device import on_fake_device, why_no_common_memory

SECONDS = timedelta(seconds=20)
Numbers = dict[str, torch.Tensor]

needs_common_memory = pytest.mark.skipif(why_no_common_memory() is not None, reason=str(why_no_common_memory()))


def me() -> int:
    return int(os.environ.get("RANK", "0"))


def batch(number: int, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 40, generator=generator, dtype=torch.float64)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}
KERNELS = {
    "adam": "torch.optim.adam.adam",
    "sgd": "torch.optim.sgd.sgd",
    "adafactor": "torch.optim._adafactor.adafactor",
}
"""What each of them calls with what it steps."""


def make(kind: str = "adam") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 24)).double()
    return model, OPTIMIZERS[kind](list(model.parameters()))


@contextlib.contextmanager
def before_each_step_of(kind: str, act: Callable[[Any], object]) -> Iterator[None]:
    """``act(parameters)`` right before this process steps its own part of them."""
    module, _, name = KERNELS[kind].rpartition(".")
    kernel = getattr(__import__(module, fromlist=[name]), name)

    def then_step(parameters: Any, *args: Any, **options: Any) -> None:
        act(parameters)
        kernel(parameters, *args, **options)

    with mock.patch(KERNELS[kind], then_step):
        yield


class Job:
    """A strategy with a model and an optimizer in a process of a job; elsewhere the same without the strategy."""

    def __init__(
        self, made: Callable[[], Any] = make, *, devices: list[str] | None = None, gradients: str = "everywhere"
    ) -> None:
        self.strategy: Any = None
        if "RANK" in os.environ:
            self.strategy = ts.CentralStorageStrategy(
                devices, timeout=SECONDS, collectives="shared_memory", gradients=gradients
            )
        self.number = 0
        self.remake(made)

    def made(self, build: Callable[[], Any], seed: int = 5) -> Any:
        """What ``build`` makes in the strategy's scope."""
        torch.manual_seed(seed)
        with self.strategy.scope() if self.strategy is not None else contextlib.nullcontext():
            return build()

    def remake(self, build: Callable[[], Any]) -> None:
        self.model, self.optimizer = self.made(build)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), x[:, :24])

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()

    def train(self, steps: int = 1, step: Callable[[torch.Tensor], Any] | None = None, *, rows: int = 8) -> None:
        for _ in range(steps):
            self.number += 1
            x = batch(self.number, rows)
            if self.strategy is None:
                (step or self.step)(x)
            else:
                [shared] = self.strategy.distribute_dataset([x])
                self.strategy.run(step or self.step, args=(shared,))

    def numbers(self, prefix: str = "") -> Numbers:
        """Parameters and state, copied."""
        found = {prefix + name: value.detach().clone() for name, value in self.model.named_parameters()}
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}{name} of {number}"] = value.detach().to_dense().clone()
        return found

    def close(self) -> Numbers:
        numbers = self.numbers()
        if self.strategy is not None:
            self.strategy.close()
        return numbers


def train_and_close(steps: int = 4, kind: str = "adam") -> Numbers:
    job = Job(lambda: make(kind))
    job.train(steps)
    return job.close()


def assert_same(results: list[Numbers], expected: Numbers, tolerance: float = 1e-12) -> None:
    for rank, numbers in enumerate(results):
        assert numbers.keys() == expected.keys(), f"rank {rank}"
        for name, value in numbers.items():
            assert value.shape == expected[name].shape
            assert torch.allclose(value, expected[name], rtol=0, atol=tolerance), f"{name} on rank {rank}"
            assert torch.equal(value, results[0][name]), f"{name} differs between ranks"


def lies_in_common_memory(tensors: list[torch.Tensor]) -> list[bool]:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped if "memfd:torchstrat" in line]
    return [any(low <= tensor.data_ptr() < high for low, high in ranges) for tensor in tensors]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:torchstrat")


def on_fake(program: Callable[..., Any], *args: Any) -> Any:
    """What a program returns that computes on a fake device: everything but CUDA itself."""
    with on_fake_device() as devices:
        result = program(*args)
    assert devices
    assert all(device.to_host for device in devices)
    assert all(device.to_device for device in devices)
    return result


def recording_warnings(program: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = program()
    return result, [str(one.message) for one in caught]


# -- edits -------------------------------------------------------------------------------------------------------------

HALF = 0.5


def through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.mul_(HALF)


def in_place(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(HALF)


def by_another_tensor(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = parameter.data * HALF


def of_state(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"].mul_(HALF)
        state["step"].add_(3.0)


def of_state_through_data(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"].data.mul_(HALF)


def state_is_cleared(job: Job) -> None:
    job.optimizer.state.clear()


def state_is_loaded(job: Job) -> None:
    state = copy.deepcopy(job.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg_sq"] *= HALF
        entry["step"] += 2
    job.optimizer.load_state_dict(state)


_EDITS = (through_data, in_place, by_another_tensor, of_state, of_state_through_data, state_is_cleared, state_is_loaded)
EDITS: dict[str, Callable[[Job], None]] = {edit.__name__: edit for edit in _EDITS}


def train_with_one_memory_for_two() -> Numbers:
    """Two layers come to have the same elements, and each its own again."""

    def of_equal_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = [nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 24)]
        model = nn.Sequential(*layers).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    job = Job(of_equal_layers)
    first, second = job.model[0].weight, job.model[2].weight  # type: ignore[index]
    job.train()
    second.data = first.data
    job.train(2)
    second.data = second.data.clone()
    job.train(2)
    first.data = second.data = (first.data + second.data) / 2
    job.train(2)
    return job.close()
