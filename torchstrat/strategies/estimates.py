"""`estimate`: what a program takes under each strategy, before anything is allocated.

Of the synchronous strategies what replicas hold and send, of parameter servers what servers, workers and the
coordinator do. No strategy is made, and nobody is contacted: the program's ``build`` runs on ``torch.device("meta")``,
and a forward pass without values tells what it keeps for the backward pass, and how many rows of tables it reads.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core._torch_private import address_of_storage
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.ftrl import Ftrl
from torchstrat.core.memory import Copies, Holding, Sizes, copies_in_one_process, copies_in_processes, state_bytes_for
from torchstrat.core.terminal import named_object, parser_with_examples
from torchstrat.core.variables import VariableRegistry
from torchstrat.parameter_server.partitioners import MinSizePartitioner
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.optimizer_state import Kinds
from torchstrat.parameter_server.variables.placement import Partitioner, Placement
from torchstrat.parameter_server.variables.program_state import CapturedVariables
from torchstrat.sharding.grid import size_text, table

_TITLES = ("strategy", "processes", "each of", "parameters", "gradients", "optimizer", "other", "activations")
_NUMBERS = tuple(range(3, 10))  # columns that are aligned to the right


@dataclass(frozen=True)
class Row:
    """What each of ``count`` equal holders has and sends under one strategy."""

    strategy: str
    processes: str
    """How the job is started."""
    holder: str
    """A device, a process, or a task of a cluster."""
    memory: Holding
    """Between two steps."""
    activations_bytes: int | None
    """What a forward pass keeps for the backward pass; None where no batch was given."""
    sent_bytes: int
    """To other holders, in one step; on parameter servers in one step of each worker."""
    count: int = 1

    @property
    def total_bytes(self) -> int:
        """At the end of a forward pass, as far as it is known."""
        return self.memory.total_bytes + (self.activations_bytes or 0)

    def cells(self) -> tuple[str, ...]:
        memory = self.memory
        activations = "?" if self.activations_bytes is None else size_text(self.activations_bytes)
        return (
            f"{self.count} × {self.holder}",
            size_text(memory.parameters_bytes),
            size_text(memory.gradients_bytes),
            size_text(memory.optimizer_state_bytes),
            size_text(memory.buffers_bytes + memory.communication_bytes),
            activations,
            size_text(self.total_bytes),
            size_text(self.sent_bytes),
        )


@dataclass(frozen=True, repr=False)
class Estimate:
    """What `ts.estimate` returns: a table, as which it prints."""

    rows: tuple[Row, ...]
    sizes: Sizes
    """Of one copy of everything."""
    optimizers: tuple[str, ...]
    """Their classes."""

    def of(self, strategy: str, processes: str | None = None) -> list[Row]:
        """The rows of one strategy; ``processes``: of one way to start it."""
        return [row for row in self.rows if row.strategy == strategy and processes in (None, row.processes)]

    def __repr__(self) -> str:
        sizes, made = self.sizes, ", ".join(self.optimizers) or "no optimizer"
        heading = (
            f"parameters {size_text(sizes.parameters)}, buffers {size_text(sizes.buffers)}, gradients "
            f"{size_text(sizes.gradients)}, state of {made} {size_text(sizes.optimizer_state)}"
        )
        lines: list[tuple[str, ...]] = [(*_TITLES, "in all", "sent per step")]
        before = ("", "")
        for row in self.rows:
            start = row.strategy, row.processes
            lines.append((*(("", "") if start == before else start), *row.cells()))
            before = start
        return "\n".join([heading, "", *table(lines, right=_NUMBERS)])


def joined(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Equal holders of a strategy as one row, where the first of them was."""
    found: dict[Row, Row] = {}
    for row in rows:
        kind = replace(row, memory=replace(row.memory, device=""), count=0)
        found[kind] = replace(found[kind], count=found[kind].count + row.count) if kind in found else row
    return tuple(found.values())


@dataclass(frozen=True)
class Forward:
    saved_bytes: int
    """Of tensors that the backward pass needs, without parameters, buffers and the batch."""
    rows_read: dict[int, int]
    """``id`` of an embedding's weight → how many of its rows a step reads, at the most."""


def run_without_values(model: nn.Module, batch: object, parts: int) -> Forward:
    """One of ``parts`` equal parts of ``batch``, the larger where they are uneven, through ``model``, which lives on
    ``torch.device("meta")``.

    Args:
        batch: A tensor, or a tuple of the model's arguments. Rows are along dim 0.

    Raises `InvalidArgumentError` where the model cannot be called with it.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    arguments = nest.map_structure(lambda leaf: _part_of(leaf, parts), arguments)
    own = {_key(one) for one in (*model.parameters(), *model.buffers(), *nest.leaves(list(arguments)))}
    kept: dict[object, torch.UntypedStorage] = {}
    rows: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in own:
            kept[_key(tensor)] = tensor.untyped_storage()
        return tensor

    def note_rows(module: Any, called_with: tuple[object, ...]) -> None:
        weight: torch.Tensor = module.weight
        ids = next((one.numel() for one in called_with if isinstance(one, torch.Tensor)), 0)
        rows[id(weight)] = min(rows.get(id(weight), 0) + ids, len(weight))

    handles = [
        module.register_forward_pre_hook(note_rows)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    try:
        with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the model cannot be called with this batch, without values: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return Forward(sum(storage.nbytes() for storage in kept.values()), rows)


def _key(value: object) -> int | None:
    return address_of_storage(value) if isinstance(value, torch.Tensor) else None


def _part_of(leaf: object, parts: int) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (math.ceil(leaf.shape[0] / parts), *leaf.shape[1:]) if leaf.dim() else ()
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


MakeOptimizer = Callable[[list[torch.Tensor]], Optimizer]


class Program:
    """Modules and optimizers in the order in which they were made."""

    def __init__(self, registry: VariableRegistry, made: object, optimizer: Optimizer | None) -> None:
        self.registry = registry
        self.optimizers = registry.optimizers()
        self._made = made, optimizer  # the registry holds nothing
        parameters = registry.tensors()
        buffers = [slot.tensor for slot in registry.buffer_slots() if slot.tensor is not None]
        if any(map(is_lazy, (*parameters, *buffers))):
            raise InvalidArgumentError("build makes lazy layers, whose sizes a first batch decides; give their sizes.")
        self.sizes = Sizes.of(parameters, buffers, self.optimizers)

    @staticmethod
    def built(build: Callable[[], object], make_optimizer: MakeOptimizer | None) -> Program:
        """What ``build`` makes. Raises `InvalidArgumentError` where it needs values, or makes no parameters."""
        registry = VariableRegistry()
        registry.open()
        try:
            with torch.device("meta"):
                made = build()
            optimizer = None if make_optimizer is None else _optimizer(make_optimizer, registry)
        except RuntimeError as error:  # PyTorch's, of an operator that needs values
            raise InvalidArgumentError(
                f"build cannot make its model on torch.device('meta'), where tensors have no values: {error}"
            ) from error
        finally:
            registry.close()
        if not registry.tensors():
            raise InvalidArgumentError(f"build made no parameters; it returned {type(made).__name__} {made!r:.60}.")
        return Program(registry, made, optimizer)

    def forward(self, batch: object, parts: int) -> Forward | None:
        """One of ``parts`` equal parts of ``batch`` through the model; None where there is no batch."""
        if batch is None:
            return None
        model = self._made[0]
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError(
                f"batch is what the model is called with, and build returned {type(model).__name__}, not one module; "
                "leave batch out, or let build return the model alone."
            )
        return run_without_values(model, batch, parts)


def _optimizer(make: MakeOptimizer, registry: VariableRegistry) -> Optimizer:
    if registry.optimizers():
        raise InvalidArgumentError("build makes optimizers of its own; leave optimizer out.")
    made = make([one for one in registry.tensors() if one.requires_grad])
    if not isinstance(made, Optimizer):
        raise WrongTypeError(
            f"optimizer must make a torch.optim.Optimizer; it made {type(made).__name__} {made!r:.60}."
        )
    return made


def optimizer_named(name: str) -> type[Optimizer]:
    """One of torch's optimizers, or `ts.Ftrl`, by its name in letters of any case. `ValueError` lists the names."""
    classes: Mapping[str, type[Optimizer]] = {
        found.__name__.lower(): found
        for found in (*vars(torch.optim).values(), Ftrl)
        if inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
    }
    if name.lower() not in classes:
        raise InvalidArgumentError(f"there is no optimizer {name!r}; there are {', '.join(sorted(classes))}.")
    return classes[name.lower()]


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
    program: Program, ps: int, workers: int, partitioner: Partitioner | None, batch: object
) -> Iterator[Row]:
    """Of tables that travel by rows, as many rows as ``batch`` reads; none where there is no batch."""
    variables = CapturedVariables(
        program.registry, Placement(ps, partitioner), Kinds(), CoordinatorCache(None, lambda: 0, timeout_seconds=0)
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
        if optimizer.state.get(tensor)
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
    build: Callable[[], object],
    optimizer: str | Callable[[list[torch.Tensor]], Optimizer] | None = None,
    *,
    replicas: int = 2,
    device: str = "cpu",
    ps: int | None = None,
    workers: int | None = None,
    partitioner: Partitioner | None = None,
    batch: object = None,
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


def main(words: Sequence[str]) -> int:
    """The command ``torchstrat estimate``: print the table for the program that ``words`` name."""
    parser = parser_with_examples(
        "torchstrat estimate",
        "Print how many bytes each device or process holds and sends under each strategy, before anything is "
        "allocated. The model is made without values. See torchstrat.estimate.",
        (
            "torchstrat estimate train:build_model --optimizer adam --replicas 4",
            "torchstrat estimate train:build_model --optimizer sgd momentum=0.9 --device cuda --batch train:batch",
            "torchstrat estimate train:build_model --optimizer adagrad --ps 2 --workers 4 --max-shards 2",
        ),
    )
    parser.add_argument("build", metavar="MODULE:BUILD", help="makes the model, or models and optimizers")
    parser.add_argument(
        "--optimizer",
        nargs="+",
        metavar=("NAME", "ARGUMENT=VALUE"),
        help="one of torch's optimizers, and what it is made with; where BUILD makes none",
    )
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="of the synchronous strategies (2)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what their replicas compute on (cpu)")
    parser.add_argument("--ps", type=int, metavar="N", help="parameter servers; without them these are left out")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of the parameter servers")
    parser.add_argument(
        "--max-shards",
        type=int,
        metavar="N",
        help="cut large variables over so many parameter servers (MinSizePartitioner)",
    )
    parser.add_argument(
        "--batch",
        metavar="MODULE:BATCH",
        help="a global batch as the model takes it, or a function that makes one; activations are then counted",
    )
    options = parser.parse_args(words)
    try:
        found = estimate(
            named_object(options.build),
            None if options.optimizer is None else _chosen_optimizer(*options.optimizer),
            replicas=options.replicas,
            device=options.device,
            ps=options.ps,
            workers=options.workers,
            partitioner=None if options.max_shards is None else MinSizePartitioner(max_shards=options.max_shards),
            batch=None if options.batch is None else _batch(options.batch),
        )
    except (InvalidArgumentError, WrongTypeError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{found}\n")
    return 0


def _chosen_optimizer(name: str, *arguments: str) -> Any:
    chosen: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            chosen[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise InvalidArgumentError(f"{argument!r} must be ARGUMENT=VALUE, such as momentum=0.9.") from error
    return functools.partial(optimizer_named(name), **chosen)


def _batch(name: str) -> object:
    found = named_object(name)
    return found() if callable(found) else found
