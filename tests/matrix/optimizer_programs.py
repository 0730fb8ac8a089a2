"""What the cells of the table of optimizers train, plainly and on parameter servers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import torchstrat as ts
from tests.matrix.table import assert_close

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
Step = Callable[[torch.Tensor], Any]
STEPS = 6
_SECONDS = 60.0


class Program(NamedTuple):
    """How a column trains. ``at_once``: its functions run in any order, with gradients that do not depend on values."""

    tables: bool = False
    sparse: bool = False
    shards: int | None = None
    rows_only: bool | None = True
    at_once: bool = False
    clips: bool = False
    later: bool = False
    """The optimizer is made in a second scope."""
    named: bool = False
    """Its class is named in ``elementwise_optimizers``."""
    back: Literal["", "state_dict", "checkpoint"] = ""
    """How model and optimizer go back to where they were half-way, before they train on."""


class Tables(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(12, 4, sparse=sparse, dtype=torch.float64)
        self.second = nn.Embedding(7, 3, sparse=sparse, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(ids).sum(1)[:, :3] * self.second(ids % 7).mean(1)


def build_model(program: Program) -> nn.Module:
    torch.manual_seed(3)
    if program.tables:
        return Tables(program.sparse)
    layers = nn.Linear(4, 6, bias=False, dtype=torch.float64), nn.Linear(6, 3, bias=False, dtype=torch.float64)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def batches(program: Program) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if program.tables:
        return list(torch.randint(0, 9, (STEPS, 5, 2), generator=generator))  # rows 9 to 11 have no gradient ever
    return list(torch.randn(STEPS, 5, 4, generator=generator, dtype=torch.float64))


def train(program: Program, parts: Mapping[str, Any], batches: list[torch.Tensor], step: Step) -> list[torch.Tensor]:
    """``step`` takes a batch, and returns its loss. ``parts``: model and optimizer."""
    if not program.back:
        return [step(batch) for batch in batches]
    half = len(batches) // 2
    losses = [step(batch) for batch in batches[:half]]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ts.Checkpoint(**parts)
        states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        if program.back == "checkpoint":
            checkpoint.save(f"{folder}/half")
        losses += [step(batch) for batch in batches[half:]]
        if program.back == "checkpoint":
            checkpoint.restore(f"{folder}/half")
        else:
            for name, part in parts.items():
                part.load_state_dict(states[name])
    return losses + [step(batch) for batch in batches[:2]]


def step_of(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if program.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        return loss.detach()

    def constant(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.25 + place)
        optimizer.step()
        return torch.zeros(())

    return constant if program.at_once else train


def plain(program: Program, make: Make) -> dict[str, torch.Tensor]:
    """The losses, and what became of the parameters."""
    model = build_model(program)
    optimizer = make(model.parameters())
    step = step_of(program, model, optimizer)
    losses = train(program, {"model": model, "optimizer": optimizer}, batches(program), step)
    return _numbers(losses, model.state_dict())


def on_servers(program: Program, make: Make, new_strategy: Callable[..., Any]) -> dict[str, torch.Tensor]:
    partitioner = None if program.shards is None else ts.partitioners.FixedShardsPartitioner(program.shards)
    options: dict[str, Any] = {}
    if program.named:
        options["elementwise_optimizers"] = [type(make([nn.Parameter(torch.ones(2, 2))]))]
    if program.rows_only is not None:
        options["rows_only"] = program.rows_only
    strategy = new_strategy(partitioner, **options)
    try:
        with strategy.scope():
            model = build_model(program)
            optimizer = None if program.later else make(model.parameters())
        with strategy.scope() if program.later else nullcontext():
            optimizer = optimizer or make(model.parameters())
        coordinator = ts.ClusterCoordinator(strategy)
        step = step_of(program, model, optimizer)

        def schedule(batch: torch.Tensor) -> torch.Tensor:
            value = coordinator.schedule(step, args=(batch,))
            return value if program.at_once else value.get(timeout=_SECONDS)

        losses = train(program, {"model": model, "optimizer": optimizer}, batches(program), schedule)
        losses = [loss.get(timeout=_SECONDS) for loss in losses] if program.at_once else losses
        return _numbers(losses, {name: value.clone() for name, value in model.state_dict().items()})
    finally:
        strategy.close()


def _numbers(losses: list[torch.Tensor], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**{f"loss {index}": loss for index, loss in enumerate(losses)}, **state}


def check(program: Program, make: Make, new_strategy: Callable[..., Any]) -> None:
    """Raises AssertionError where servers come to other numbers than one device."""
    assert_close(on_servers(program, make, new_strategy), plain(program, make))


def check_rows_stay(program: Program, make: Make, new_strategy: Callable[..., Any]) -> None:
    """Rows without a gradient have not moved, and the others have."""
    before, after = build_model(program).state_dict(), on_servers(program, make, new_strategy)
    moved = (after["first.weight"] != before["first.weight"]).any(1).nonzero().flatten().tolist()
    named = torch.cat([batch.flatten() for batch in batches(program)]).unique().tolist()
    assert moved == named, f"rows {named} have gradients, and {moved} have moved"
