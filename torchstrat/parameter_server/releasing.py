"""`ClusterCoordinator.release`: to drop what the program still has, unless something else needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.known_worker import Work
from torchstrat.parameter_server.leases.dataset import LeasedDataset
from torchstrat.parameter_server.per_worker import PerWorkerIterator, PerWorkerValues
from torchstrat.reachable import HELPER_TYPES
from torchstrat.variable.variable import Variable
from torchstrat.variables import VariableRegistry

_MOST_HOLDERS = 5


def release(objects: Sequence[Any], job: Job, registry: VariableRegistry, works: Mapping[int, Work]) -> None:
    """Drop the objects with their parts. ``works``: the functions that have no outcome yet.

    Raises `InvalidArgumentError` naming what still needs them; nothing is dropped then. `WrongTypeError` for an object
    that is none that lives on servers or workers.
    """
    going = {id(part): part for value in objects for part in _parts_of(value)}
    for value in objects:
        known = value._reader if isinstance(value, LeasedDataset) else value
        if job.catalog.token_of(known) is None:
            raise InvalidArgumentError(f"{value!r:.80} is not on this strategy's servers or workers (any more).")
    holders = [*_functions(works, going), *_others(job, registry, going)]
    if holders:
        more = f" and {len(holders) - _MOST_HOLDERS} more" if len(holders) > _MOST_HOLDERS else ""
        raise InvalidArgumentError(
            f"{', '.join(_name_of(value) for value in objects)}: still needed by {', '.join(holders[:_MOST_HOLDERS])}"
            f"{more}. Release these with it, or wait for the functions with coordinator.join()."
        )
    registry.let_go(going.values())
    job.let_go(list(going.values()))


def _parts_of(value: Any) -> Iterator[Any]:
    """What goes with it, itself included."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            yield from (module, *module._parameters.values(), *module._buffers.values())
            yield from (shard for shard in vars(module).values() if isinstance(shard, Variable))
    elif isinstance(value, LeasedDataset):
        yield value._reader
    elif isinstance(value, (torch.Tensor, Variable, PerWorkerValues, *HELPER_TYPES)):
        yield value
    else:
        raise WrongTypeError(
            "release takes modules, optimizers, variables, and per-worker or leased datasets, iterators and "
            f"resources; got {type(value).__name__} {value!r:.80}."
        )


def _needs(value: Any) -> Iterator[Any]:
    """What a function that refers to ``value`` may use, and what it cannot be without."""
    yield value
    if isinstance(value, nn.Module):
        yield from _parts_of(value)
    elif isinstance(value, Optimizer):
        yield from (tensor for group in value.param_groups for tensor in group["params"])
    elif isinstance(value, PerWorkerIterator):
        yield value._dataset
    elif isinstance(value, HELPER_TYPES):
        yield getattr(value, "optimizer", None)


def _is_needed(values: Iterable[Any], going: Mapping[int, Any]) -> bool:
    return any(id(need) in going for value in values for need in _needs(value))


def _functions(works: Mapping[int, Work], going: Mapping[int, Any]) -> Iterator[str]:
    for number, work in works.items():
        if _is_needed((*work.packed_code.alive, *work.arguments.alive), going):
            yield f"function {number} ({work.value._name}), which has not ended"


def _others(job: Job, registry: VariableRegistry, going: Mapping[int, Any]) -> Iterator[str]:
    for value in (*registry.modules(), *registry.helpers(), *job.catalog.registered()):
        builder = value._resource.builder if isinstance(value, PerWorkerValues) else None
        if id(value) not in going and _is_needed((value, *getattr(builder, "alive", ())), going):
            yield _name_of(value)


def _name_of(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, PerWorkerValues | Variable) else f"a {type(value).__name__}"
