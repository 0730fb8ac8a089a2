"""`estimate`: what a program takes under each strategy, before anything is allocated.

Of the synchronous strategies what replicas hold and send, of parameter servers what servers, workers and the
coordinator do. No strategy is made, and nobody is contacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.memory import Copies, Holding, Sizes, copies_in_one_process, copies_in_processes, state_bytes_for
from torchstrat.parameter_server.variables.cached_parameter import NoServers
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.optimizer_state import Kinds
from torchstrat.parameter_server.variables.placement import Partitioner, Placement
from torchstrat.parameter_server.variables.program_state import CapturedVariables
from torchstrat.strategies.estimates.program import Program, optimizer_named
from torchstrat.strategies.estimates.rows import Estimate, Row, joined

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


def rows_on_servers(
    program: Program, ps: int, workers: int, partitioner: Partitioner | None, batch: Any
) -> Iterator[Row]:
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


ONE_PROCESS = "one"
ON_ONE_HOST = "one per replica, one host"
ON_SEVERAL_HOSTS = "one per replica, several hosts"


@dataclass(frozen=True)
class Way:
    """A strategy, and how its job is started."""

    strategy: str
    processes: str
    replicas: int
    copies: Sequence[Copies]
    computes: Sequence[bool]
    """Whether each entry of ``copies`` has a replica; else it is a place that holds variables only."""
    sent: Callable[[Sizes], Sequence[int]]
    """Bytes by entry of ``copies``."""

    def rows(self, program: Program, batch: Any) -> Iterator[Row]:
        forward = program.forward(batch, self.replicas)
        for copies, computes, sent in zip(self.copies, self.computes, self.sent(program.sizes), strict=True):
            activations = None if forward is None else forward.saved_bytes if computes else 0
            kind = copies.device.partition(":")[0]
            holder = kind if self.processes == ONE_PROCESS else f"process ({kind})" if computes else "its host memory"
            yield Row(self.strategy, self.processes, holder, program.sizes.held(copies), activations, sent)


def ways(device: str, replicas: int) -> Iterator[Way]:
    """``device``: "cpu" or "cuda"."""
    first = f"{device}:0"
    yield _in_one_process("one_device", [first])
    if replicas == 1:
        return
    devices = [f"{device}:{number}" for number in range(replicas)]
    yield _in_one_process("mirrored", devices)
    yield _in_processes("mirrored", ON_ONE_HOST, first, replicas, sums_in_place=device == "cpu")
    yield _in_processes("multi_worker_mirrored", ON_SEVERAL_HOSTS, first, replicas)
    yield _in_one_process("central_storage", devices, "cpu:0")
    yield _in_processes("central_storage", ON_ONE_HOST, first, replicas, central=True, shares_memory=True)
    yield _in_processes("central_storage", ON_SEVERAL_HOSTS, first, replicas, central=True)
    on_tpu = [Copies(f"tpu:{number}", 1, 1, 1, 1, 0) for number in range(replicas)]
    yield Way("tpu", ONE_PROCESS, replicas, on_tpu, [True] * replicas, lambda sizes: [_sum(sizes, replicas)] * replicas)


def _in_one_process(strategy: str, devices: Sequence[str], home: str | None = None) -> Way:
    """Gradients go to the first replica, and the combined ones from there to all who have them. Values go to every
    other copy when a run starts, and again after an optimizer's step."""
    copies = copies_in_one_process(devices, home)
    others = len(devices) - 1
    has_home = len(copies) > len(devices)  # apart from the replicas

    def sent(sizes: Sizes) -> list[int]:
        from_others = [sizes.gradients] * others
        if has_home:
            return [2 * len(devices) * sizes.parameters, (others + 1) * sizes.gradients, *from_others]
        return [others * (sizes.gradients + 2 * sizes.parameters), *from_others]

    return Way(strategy, ONE_PROCESS, len(devices), copies, [*[False] * has_home, *[True] * len(devices)], sent)


def _in_processes(
    strategy: str,
    processes: str,
    device: str,
    replicas: int,
    *,
    central: bool = False,
    shares_memory: bool = False,
    sums_in_place: bool = False,
) -> Way:
    is_staged = shares_memory and not device.startswith("cpu")
    copies = copies_in_processes(
        device,
        replicas,
        central=central,
        shares_variables=shares_memory,
        sums_in_place=sums_in_place or shares_memory,
        is_staged=is_staged,
    )

    def sent(sizes: Sizes) -> list[int]:
        if is_staged:  # from the device to host memory, and back
            return [sizes.gradients, sizes.parameters] * replicas
        own = [_sum(sizes, replicas)] * replicas
        if central and not shares_memory:
            own[0] += (replicas - 1) * sizes.parameters
        return own

    computes = [True, False] * replicas if is_staged else [True] * replicas
    return Way(strategy, processes, replicas, copies, computes, sent)


def _sum(sizes: Sizes, replicas: int) -> int:
    return 2 * sizes.gradients * (replicas - 1) // replicas


DEVICES = ("cpu", "cuda")


def estimate(
    build: Callable[[], Any],
    optimizer: str | Callable[[list[torch.Tensor]], Optimizer] | None = None,
    *,
    replicas: int = 2,
    device: str = "cpu",
    ps: int | None = None,
    workers: int | None = None,
    partitioner: Partitioner | None = None,
    batch: Any = None,
) -> Estimate:
    """Say how many bytes each device or process holds and sends under each strategy. Nothing is allocated::

        print(ts.estimate(build_model, "adam", replicas=4, ps=2, workers=4))

    Args:
        build: Makes the model or models, and may make optimizers, and returns them. Called on ``torch.device("meta")``,
            where tensors have no values.
        optimizer: The name of one of torch's optimizers (or "ftrl"), or what makes one of a list of parameters, such as
            ``functools.partial(torch.optim.SGD, momentum=0.9)``. None where ``build`` makes them.
        replicas: Of the synchronous strategies.
        device: What their replicas compute on: "cpu" or "cuda".
        ps, workers: Parameter servers and workers; without them parameter servers are left out.
        partitioner: Of the parameter servers, as `ParameterServerStrategy` takes it.
        batch: An example of a global batch, as the model that ``build`` returns is called with it: a tensor, or a tuple
            of arguments. With it activations are counted, and the rows of tables that travel by rows. Its values do not
            matter.

    **Memory** is what stays between two steps, and with ``batch`` what the forward pass keeps for the backward pass.
    Batches, and what an operator takes while it runs, are not in it. **Sent** are gradients and values of parameters,
    on the best known way: in a sum of n bytes over P processes each sends 2 n (P - 1) / P. Processes of one host pass
    the same bytes through memory that they share. What a step changes in buffers is not in it.

    Raises:
        InvalidArgumentError: ``build`` needs values, makes no parameters, or makes optimizers although ``optimizer`` is
            given; a number is less than 1; the model cannot be called with ``batch``.
    """
    if not callable(build) or isinstance(build, nn.Module):
        raise WrongTypeError(f"build must be a function that makes the model, or its class; got {build!r:.60}.")
    for name, number in {"replicas": replicas, "ps": ps, "workers": workers}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InvalidArgumentError(f"{name}={number!r} must be a whole number of at least 1.")
    if (ps is None) is not (workers is None):
        raise InvalidArgumentError(f"ps={ps} and workers={workers}: give both, or neither to leave them out.")
    if device not in DEVICES:
        raise InvalidArgumentError(f"device={device!r} must be one of {', '.join(map(repr, DEVICES))}.")
    program = Program.built(build, optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer)
    rows = [row for way in ways(device, replicas) for row in way.rows(program, batch)]
    if ps is not None and workers is not None:
        rows += rows_on_servers(program, ps, workers, partitioner, batch)
    classes = dict.fromkeys(type(one).__name__ for one in program.optimizers)
    return Estimate(joined(rows), program.sizes, tuple(classes))
