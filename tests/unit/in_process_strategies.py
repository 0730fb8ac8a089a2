"""Strategies with several replicas in this process, for tests that compare them with a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import torchstrat as ts
from torchstrat.replicas.in_process import InProcessReplicas


def _cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def _apart(count: int) -> Callable[..., Any]:
    """Central storage whose variables live on a device that no replica computes on.

    The code that carries values between the two never asks what kind of device it is, only whether it is the same
    one; to torch ``cpu`` and ``cpu:0`` are different names, and tensors can go from one to the other.
    """

    def make(**options: Any) -> Any:
        strategy = ts.CentralStorageStrategy(_cpus(count), "cpu:0", **options)
        engine = strategy._engine
        assert isinstance(engine, InProcessReplicas)
        elsewhere = torch.device("cpu", 0)
        assert elsewhere != torch.device("cpu")
        engine._home = engine._components._parameter_device = elsewhere
        engine._runs_plainly = False
        return strategy

    return make


STRATEGIES: dict[str, tuple[int, Callable[..., Any]]] = {
    **{
        f"mirrored x{count}": (count, lambda count=count, **options: ts.MirroredStrategy(_cpus(count), **options))
        for count in (1, 2, 3, 4)
    },
    "central x2": (2, lambda **options: ts.CentralStorageStrategy(_cpus(2), "cpu:2", **options)),
    "central x3": (3, lambda **options: ts.CentralStorageStrategy(_cpus(3), **options)),
    **{f"apart x{count}": (count, _apart(count)) for count in (1, 2, 3)},
}
"""Name → (replicas, how to make one). "apart" keeps the variables on a device of their own."""


@contextmanager
def opened(name: str, **options: Any) -> Iterator[Any]:
    """The strategy of that name, closed at the end."""
    strategy = STRATEGIES[name][1](**options)
    try:
        yield strategy
    finally:
        strategy.close()
