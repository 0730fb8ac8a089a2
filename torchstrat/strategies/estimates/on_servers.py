"""What parameter servers, workers and the coordinator hold and send. Pure: nobody is contacted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core.memory import Holding, state_bytes_for
from torchstrat.parameter_server.variables.cached_parameter import NoServers
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.optimizer_state import Kinds
from torchstrat.parameter_server.variables.placement import Partitioner, Placement
from torchstrat.parameter_server.variables.program_state import CapturedVariables
from torchstrat.strategies.estimates.program import Program
from torchstrat.strategies.estimates.rows import Row

PROCESSES = "a cluster"
_ROW_NUMBER_BYTES = 8


@dataclass
class _Tally:
    """Of one server; or of a worker, which has copies of what it does not read by rows."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    state: int = 0
    sent: int = 0

    def held(self, who: str) -> Holding:
        return Holding(who, self.parameters, self.buffers, self.gradients, self.state, 0)


def rows(program: Program, ps: int, workers: int, partitioner: Partitioner | None, batch: Any) -> Iterator[Row]:
    """Of tables that travel by rows, as many rows as ``batch`` reads; none where there is no batch."""
    variables = CapturedVariables(
        program.registry, Placement(ps, partitioner), Kinds(), CoordinatorCache(NoServers(), timeout_seconds=0)
    )
    variables.place_new()
    forward = program.forward(batch, 1)
    rows_read = {} if forward is None else forward.rows_read
    servers, worker = [_Tally() for _ in range(ps)], _Tally()
    for spec in variables.specs():
        tensor = variables.tensor(spec.number)
        assert tensor is not None
        for number, shard in enumerate(spec.shards):
            server, size = servers[shard.server], spec.shard_bytes(number)
            if spec.kind == "buffer":
                server.buffers += size
                worker.buffers += size
                server.sent += workers * size
                continue
            part = tensor[shard.start : shard.stop] if spec.shape else tensor
            server.parameters += size
            server.state += _state_bytes(program, tensor, part)
            if spec.by_rows:
                # Rows lie anywhere in a table: each shard has its share of those that a step reads.
                read = rows_read.get(id(tensor), 0) * len(part) // max(1, len(tensor))
                values, numbers = read * (size // max(1, len(part))), read * _ROW_NUMBER_BYTES
                worker.sent += values + 2 * numbers  # which rows are asked for, and which the gradients are of
            else:
                values = size
                worker.parameters += size
                worker.sent += size if spec.requires_grad else 0
            worker.gradients += values if spec.requires_grad else 0
            server.sent += workers * values
    activations, elsewhere = (None, None) if forward is None else (forward.saved_bytes, 0)
    for index, server in enumerate(servers):
        holder = f"ps {index}"
        yield Row("parameter_server", PROCESSES, holder, server.held(holder), elsewhere, server.sent)
    yield Row("parameter_server", PROCESSES, "worker", worker.held("worker"), activations, worker.sent, workers)
    coordinator = Holding("coordinator", program.sizes.parameters, program.sizes.buffers, 0, 0, 0)
    yield Row("parameter_server", PROCESSES, "coordinator", coordinator, elsewhere, 0)


def _state_bytes(program: Program, tensor: torch.Tensor, part: torch.Tensor) -> int:
    """Of ``part`` of a parameter, in the optimizers that step it."""
    return sum(
        _made_state_bytes(optimizer, tensor, part)
        if tensor in optimizer.state
        else state_bytes_for(optimizer, group, part)
        for optimizer in program.optimizers
        for group in optimizer.param_groups
        if tensor.requires_grad and any(one is tensor for one in group["params"])
    )


def _made_state_bytes(optimizer: Optimizer, tensor: torch.Tensor, part: torch.Tensor) -> int:
    """Of the state that the constructor has made for the whole parameter, as Adagrad's does in some releases."""
    found = [value for value in optimizer.state[tensor].values() if isinstance(value, torch.Tensor)]
    return sum(
        value[: len(part)].nbytes if value.dim() and value.shape[:1] == tensor.shape[:1] else value.nbytes
        for value in found
    )
