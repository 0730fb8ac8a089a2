"""A coordinator's captured objects and a worker's copies of them, in one process: two worlds of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchstrat.core.variables import VariableRegistry
from torchstrat.parameter_server.messages import Shard, VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import Catalog, Lifetimes
from torchstrat.parameter_server.serialization.functions import World, pack, pack_result, unpack, unpack_result


class Job:
    """What a strategy does for its catalog: records a scope, and places parameters and buffers."""

    def __init__(self) -> None:
        self.registry = VariableRegistry()
        self.specs: dict[int, tuple[torch.Tensor, VariableSpec]] = {}
        self.lifetimes = Lifetimes()
        self.catalog = Catalog(self.registry, self.spec_of, self.lifetimes)
        self._released: list[Any] = []

    def spec_of(self, tensor: torch.Tensor) -> VariableSpec | None:
        found = self.specs.get(id(tensor))
        return found[1] if found is not None else None

    def place(self, tensor: torch.Tensor, kind: Any = "parameter") -> None:
        if id(tensor) not in self.specs:
            number, shape = len(self.specs), tuple(tensor.shape)
            shards = (Shard(0, 0, shape[0] if shape else 1),)
            self.specs[id(tensor)] = (tensor, VariableSpec(number, f"v{number}", shape, tensor.dtype, kind, shards))

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.registry.open()
        yield
        self.registry.close()
        for tensor in self.registry.tensors():
            self.place(tensor)
        for slot in self.registry.buffer_slots():
            if slot.tensor is not None:
                self.place(slot.tensor, "buffer")

    def forget(self, model: nn.Module) -> None:
        """Let go of a model's tensors, as their owner does once the user has."""
        for tensor in (*model.parameters(), *model.buffers()):
            del self.specs[id(tensor)]

    def world(self, **options: Any) -> World:
        """A worker that has everything there is so far."""
        world = World(make_tensor, **options)
        self.bring_up_to_date(world)
        return world

    def bring_up_to_date(self, world: World) -> None:
        for increment in self.catalog.increments(world.version):
            world.load(increment)
        self._released += self.lifetimes.take_released(0)  # no function is ever under way
        world.release(self._released)

    def send(self, value: Any, world: World, what: str = "fn") -> Any:
        """What a worker gets for ``value``."""
        packed = pack(value, self.catalog, what)
        self.bring_up_to_date(world)
        return unpack(packed, world)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The result of ``fn`` on a fresh worker."""
        world = self.world()
        result = self.send(fn, world)(*self.send(args, world, "args"))
        return unpack_result(pack_result(result, world))


def make_tensor(spec: VariableSpec) -> torch.Tensor:
    """A worker's tensor for a variable, recognisable by its value."""
    value = torch.full(spec.shape, 100 + spec.number, dtype=spec.dtype)
    return nn.Parameter(value) if spec.kind == "parameter" else value
