"""Training with replicas of several processes, and the same by hand in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import torchstrat as ts
from torchstrat.app.models import ConvNet, Mlp, RowTransformer

STEPS = 6
"""Of whole batches; after them comes one of a single row, in which other replicas than the first have nothing to do."""
ROWS = 8
"""Of the global batch."""
CLASSES = 4
TIMEOUT = timedelta(seconds=240)

State = dict[str, torch.Tensor]
Build = Callable[[], nn.Module]


class Outcome(NamedTuple):
    losses: list[float]
    initial: State
    state: State
    """After `STEPS` steps, whole."""
    last: State
    """After the step of a single row."""
    optimizer: dict[str, Any]
    sent_bytes: list[int]
    """To other logical devices, by step."""
    kinds: dict[str, str]
    """Parameter → the class of what the step saw."""


KINDS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "mlp": (Mlp, (6,), {"hidden": [16, 12, 8], "tensor_parallel": True}),
    "mlp with Ftrl": (Mlp, (6,), {"hidden": [16, 12, 8], "tensor_parallel": True}),
    "transformer": (RowTransformer, (1, 4, 6), {"width": 16, "heads": 4, "blocks": 1, "tensor_parallel": True}),
    "convnet": (ConvNet, (1, 16, 8), {"channels": [4, 8, 8], "groups": 2, "spatially_parallel": True}),
}


def build(kind: str) -> nn.Module:
    model, shape, settings = KINDS[kind]
    return model(shape, CLASSES, **settings)  # type: ignore[no-any-return]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind.endswith("Ftrl"):
        return ts.Ftrl(model.parameters(), lr=0.5, initial_accumulator_value=1.0, l2=0.01)
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def rows_of(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(STEPS * ROWS + 1, *KINDS[kind][1], generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs.flatten(1)[:, :CLASSES].argmax(1)


def batches_of(kind: str, dtype: torch.dtype) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows_of(kind, dtype)), batch_size=ROWS)


def make_strategy(kind: str, logical: int, **options: Any) -> Any:
    model, _, settings = KINDS.get(kind, (None, (), {}))
    rules = model.sharding_rules(["d0"], **settings) if hasattr(model, "sharding_rules") else None
    options = {"sharding_rules": rules, "timeout": TIMEOUT} | options
    return ts.MirroredStrategy(logical_devices_per_replica=logical, **options)


def train(kind: str, logical: int, dtype_name: str) -> Outcome:
    """What each process does."""
    warnings.simplefilter("error")
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(2)
    strategy = make_strategy(kind, logical)
    try:
        with strategy.scope():
            model = build(kind).to(dtype)
            optimizer = make_optimizer(kind, model)
        initial = copied(model.state_dict())
        kinds: dict[str, str] = {}

        def step(batch: Any) -> torch.Tensor:
            inputs, targets = batch
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            kinds.update({name: type(parameter.detach()).__name__ for name, parameter in model.named_parameters()})
            return loss.detach()

        losses, sent = [], []
        for batch in strategy.distribute_dataset(batches_of(kind, dtype)):
            strategy.extended.logical_traffic.clear()
            losses.append(float(strategy.reduce("mean", strategy.run(step, args=(batch,)))))
            sent.append(strategy.extended.logical_traffic.total_bytes)
            if len(sent) == STEPS:
                state = copied(model.state_dict())
        return Outcome(losses, initial, state, copied(model.state_dict()), optimizer.state_dict(), sent, kinds)
    finally:
        strategy.close()


def train_all(kinds: list[str], logical: int, dtype_names: list[str]) -> dict[tuple[str, str], Outcome]:
    return {(kind, dtype): train(kind, logical, dtype) for kind in kinds for dtype in dtype_names}


def train_by_hand(kind: str, initial: State, replicas: int) -> tuple[list[float], State, State]:
    """Plain PyTorch: each replica's rows through one model, one after the other, from the same buffers."""
    dtype = next(value.dtype for value in initial.values() if value.is_floating_point())
    model = build(kind).to(dtype)
    model.load_state_dict(initial)
    optimizer = make_optimizer(kind, model)
    losses = []
    for inputs, targets in batches_of(kind, dtype):
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after: dict[str, list[torch.Tensor]] = {name: [] for name in before}
        total = 0.0
        parts = list(zip(inputs.chunk(replicas), targets.chunk(replicas), strict=True))
        for rows, wanted in parts:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            loss = functional.cross_entropy(model(rows), wanted) / len(parts)
            loss.backward()
            total += float(loss.detach())
            for name, buffer in model.named_buffers():
                after[name].append(buffer.clone())
        for name, buffer in model.named_buffers():
            mean = torch.stack(after[name]).mean(0) if buffer.is_floating_point() else after[name][0]
            buffer.copy_(mean)
        optimizer.step()
        losses.append(total)
        if len(losses) == STEPS:
            state = copied(model.state_dict())
    return losses, state, model.state_dict()


def copied(state: Any) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def distance(state: State, expected: State) -> float:
    """The largest difference of a tensor, relative to it, both by their norms.

    Not by elements: where a gradient is almost zero, Adam makes a step of what rounding has left of it.
    """
    assert state.keys() == expected.keys()
    return max(
        float((state[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-3))
        for name, value in expected.items()
    )
