"""The fake TPU, and a `MirroredStrategy` of as many replicas to compare it with: one program gives the same on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import torchstrat as ts
from torchstrat.testing.fake_tpu import batch_of_replicas, fake_tpu_strategy

Program = Callable[[ts.Strategy], Any]
"""Makes its variables in the scope, runs its steps, and returns a nest of what is to be compared."""


@contextmanager
def fake_tpu(replicas: int = 2, logical_devices: int = 1, **options: Any) -> Iterator[ts.TPUStrategy]:
    strategy = fake_tpu_strategy(replicas, logical_devices, **options)
    try:
        yield strategy
    finally:
        strategy.close()


@contextmanager
def mirrored(replicas: int = 2, **options: Any) -> Iterator[ts.Strategy]:
    strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)], **options)
    try:
        yield strategy
    finally:
        strategy.close()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value.values()]
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list | tuple) else [value]


def numbers(program: Program, strategy: ts.Strategy) -> list[tuple[Any, ...]]:
    """Of each leaf that ``program`` returned, what the replicas have, copied. It computes in double precision."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = leaves(program(strategy))
    finally:
        torch.set_default_dtype(before)
    return [
        tuple(one.detach().clone() if isinstance(one, torch.Tensor) else one for one in strategy.local_results(leaf))
        for leaf in found
    ]


def assert_as_mirrored(program: Program, replicas: int = 2, **options: Any) -> None:
    """``options``: of both strategies."""
    with mirrored(replicas, **options) as strategy:
        expected = numbers(program, strategy)
    with fake_tpu(replicas, **options) as strategy:
        found = numbers(program, strategy)
    assert expected
    for index, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-9, msg=lambda text: f"leaf {index}: {text}")  # noqa: B023


def rows_of(counts: Sequence[int], columns: int = 3, seed: int = 1) -> ts.PerReplica:
    """A batch in double precision, as an input pipeline hands it out, whose replicas have ``counts`` rows."""
    generator = torch.Generator().manual_seed(seed)
    return batch_of_replicas(
        [torch.randn(count, columns, dtype=torch.float64, generator=generator) for count in counts]
    )


def own(*values: Any) -> ts.PerReplica:
    """A tensor of each replica's own for each of the values."""
    return ts.PerReplica([torch.as_tensor(value) for value in values])


def seen(value: ts.PerReplica) -> list[Any]:
    """What each replica has, as lists and numbers."""
    return [one.tolist() for one in value.values]


def here() -> Any:
    """The context of the running replica."""
    context = ts.get_replica_context()
    assert context is not None
    return context


class Doubled(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2
