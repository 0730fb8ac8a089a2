"""Giving a table more rows, from the coordinator: first the server that gets them, then everybody learns of it.

No function is half-way meanwhile. What waits in the queue, and what runs once more because its worker was lost, finds
the larger table: workers load its new description before their next function.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat._torch_private import DisableTorchFunctionSubclass
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.parameter_server.interrupts import held_back
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.messages import NewRows, VariableSpec
from torchstrat.parameter_server.variables.coordinator_state import CoordinatorState
from torchstrat.parameter_server.variables.initial_values import recipe_by, recipe_of_more
from torchstrat.parameter_server.variables.placement import seed_of_variable
from torchstrat.variables import VariableRegistry

Initialiser = Callable[[torch.Tensor], Any]


def grow(job: Job, registry: VariableRegistry, weight: torch.Tensor, rows: int, init: Initialiser | None) -> None:
    """See `grow_rows`. May be repeated."""
    job.commit()
    spec = job.variables.spec_of(weight)
    if spec is None:
        raise InvalidArgumentError("grow_rows: the table is not one of this strategy's variables.")
    modules = list(_tables_of(registry, weight, spec))
    if rows < spec.shape[0]:
        raise InvalidArgumentError(
            f"grow_rows: {spec.name} has {spec.shape[0]} rows, and tables only grow; got rows={rows}."
        )
    if rows > spec.shape[0]:
        optimizers = [one for one in job.optimizers() if _steps(one, weight)]
        _require_growable(job, spec, optimizers)
        job.catalog.increments(job.catalog.version)  # what cannot be sent is an error now, before anything has changed
        new = _new_rows(job, weight, spec, rows, init)
        with job.cache.alone(f"growing {spec.name}"):
            job.cache.push_written()
            with held_back:  # or the servers would have another table than the coordinator
                _tell(job, new, weight, modules)
            for optimizer in optimizers:
                CoordinatorState.expire(optimizer)


def _tables_of(
    registry: VariableRegistry, weight: torch.Tensor, spec: VariableSpec
) -> Iterator[nn.Embedding | nn.EmbeddingBag]:
    for module in registry.modules():
        for name, parameter in module._parameters.items():
            if parameter is not weight:
                continue
            if name != "weight" or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                raise UnsupportedError(
                    f"grow_rows: {spec.name} is also the {name} of a {type(module).__name__}, which depends on how "
                    "many rows it has. Only weights of nn.Embedding and nn.EmbeddingBag grow."
                )
            yield module


def _steps(optimizer: Optimizer, weight: torch.Tensor) -> bool:
    return any(one is weight for group in optimizer.param_groups for one in group["params"])


def _require_growable(job: Job, spec: VariableSpec, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        kind = job.kinds.of(optimizer)
        if not kind.may_cut_rows:
            raise UnsupportedError(
                f"grow_rows: {spec.name} is stepped by {type(optimizer).__name__}, which looks at {kind.tier.value}, "
                "so what it knows is of as many rows as there are. Step it by an elementwise optimizer, or make the "
                "larger table in a new program and restore the rest with strict=False."
            )
    if job.cache.is_shared(spec.number):
        gc.collect()
        if job.cache.is_shared(spec.number):
            raise InvalidArgumentError(
                f"grow_rows: {spec.name} cannot have more rows while something on the coordinator shows its memory: a "
                "view, .data, a state_dict() that is kept, a NumPy array. It would go on showing the old rows. Let go "
                "of it, or keep a copy: tensor.detach().clone()."
            )


def _tell(job: Job, new: NewRows, weight: torch.Tensor, modules: Sequence[nn.Embedding | nn.EmbeddingBag]) -> None:
    """If a server is lost when that of the new rows has them, the table has grown; the others hold what they held."""
    last, first = new.spec.shards[-1].server, len(weight)
    job.servers.ask("ps.grow", {last: new})
    job.variables.grow(new.spec)
    job.catalog.describe_anew(weight)
    for module in modules:
        module.num_embeddings = new.spec.shape[0]
    others = {shard.server for shard in new.spec.shards} - {last}
    job.servers.ask("ps.grow", dict.fromkeys(others, dataclasses.replace(new, value=None)))
    job.cache.bring_new_rows(new.spec, first)


def _new_rows(job: Job, weight: torch.Tensor, spec: VariableSpec, rows: int, init: Initialiser | None) -> NewRows:
    last = dataclasses.replace(spec.shards[-1], stop=rows)
    grown = dataclasses.replace(spec, shape=(rows, *spec.shape[1:]), shards=(*spec.shards[:-1], last))
    seed = seed_of_variable(job.seed, spec)
    shape = (rows - spec.shape[0], *spec.shape[1:])
    with DisableTorchFunctionSubclass():
        if init is None:
            return NewRows(grown, None, recipe_of_more(weight, spec.name), seed)
        if weight.is_meta:
            return NewRows(grown, None, recipe_by(init, shape, weight, spec.shape[0]), seed)
        with torch.no_grad():
            value = torch.zeros(shape, dtype=spec.dtype, device="cpu")
            made = init(value)
    value = value if made is None else made
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != spec.dtype:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidArgumentError(
            f"grow_rows: init= has to fill the new rows of {spec.name}, {spec.dtype} {shape}, or return them; got "
            f"{found}."
        )
    return NewRows(grown, value.detach().cpu().contiguous())
