"""The columns of the table of round trips: ways from a program under a strategy to a file and back."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import torchstrat as ts
from tests.matrix import places
from tests.matrix.on_servers import PROCESSES
from tests.matrix.round_trip_rows import Objects
from torchstrat.partitioners import FixedShardsPartitioner
from torchstrat.testing.fake_cluster import FakeCluster

ON_SERVERS, IN_SHARDS = "parameter servers", "parameter servers, 2 shards"
SERVERS = (ON_SERVERS, IN_SHARDS, PROCESSES)

# -- strategies -------------------------------------------------------------------------------------------------------

_shared: list[Any] = []
"""In a process: the strategy of logical devices, which cells share."""


def leave() -> None:
    while _shared:
        _shared.pop().close()


@contextlib.contextmanager
def opened(place: str) -> Iterator[Any]:
    """The strategy of a place."""
    if place in (ON_SERVERS, IN_SHARDS):
        partitioner = FixedShardsPartitioner(2) if place == IN_SHARDS else None
        with FakeCluster(workers=1, ps=2) as cluster:
            yield cluster.strategy(partitioner)
    elif place == places.LOGICAL_DEVICES:
        if not _shared:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _shared.append(ts.MirroredStrategy(logical_devices_per_replica=2, timeout=timedelta(seconds=100)))
        yield _shared[0]
    else:
        with places.opened(place) as strategy:
            yield strategy


def made(strategy: Any, make: Callable[[bool], Objects]) -> Objects:
    """Untrained objects in the scope of a strategy; parameters of two rows are cut where it can cut."""
    with strategy.scope():
        objects = make(False)
        if _shared and strategy is _shared[0]:
            parameters = [
                one for value in objects.values() if isinstance(value, nn.Module) for one in value.parameters()
            ]
            for one in parameters:
                if one.dim() and one.shape[0] == 2:
                    strategy.split_to_logical_devices(one, [2, *[1] * (one.dim() - 1)])
    return objects


# -- ways -------------------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """The objects of a row, trained and not; under the strategy of a place, or plain."""

    trained: Objects
    fresh: Objects
    plain: Callable[[bool], Objects]
    in_file: Callable[[dict[str, Any]], dict[str, Any]]
    """What becomes of the states of plain objects on their way to a file."""
    folder: Path
    """Of the cell, the same one for all processes."""
    place: str = "one_device"
    close: Callable[[], None] = lambda: None
    """Its strategy."""


class Found(NamedTuple):
    """Of an object, at the end."""

    state: Any
    parameters: int | None = None
    """How many a module has, each counted once."""


def copied(state: Any) -> Any:
    """deepcopy() does not take all kinds of tensors."""
    packed = io.BytesIO()
    torch.save(state, packed)
    packed.seek(0)
    return torch.load(packed, weights_only=False)


def found_of(objects: Objects) -> dict[str, Found]:
    return {
        name: Found(copied(value.state_dict()), len([*value.parameters()]) if isinstance(value, nn.Module) else None)
        for name, value in objects.items()
    }


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _by_first(call: Callable[[], object]) -> None:
    """Call it in one process, and raise in all what it raises."""
    told: list[Exception | None] = [None]
    if _is_first():
        try:
            call()
        except Exception as error:
            told = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(told, 0)
    if told[0] is not None:
        raise told[0]


def _checkpoint(program: Program, *, asynchronous: bool = False) -> dict[str, Found]:
    saving = ts.Checkpoint(**program.trained).save(program.folder / "saved", asynchronous=asynchronous)
    if asynchronous:
        saving.result(60)
    ts.Checkpoint(**program.fresh).restore(program.folder / "saved")
    return found_of(program.fresh)


def _to(kind: str, program: Program) -> dict[str, Found]:
    """Saved here and restored under another strategy."""
    ts.Checkpoint(**program.trained).save(program.folder / "saved")
    program.close()
    place = f"torchrun {kind}" if program.place in places.TORCHRUN else f"{kind} x2"
    with opened(ON_SERVERS if kind == ON_SERVERS else place) as strategy:
        fresh = made(strategy, program.plain)
        ts.Checkpoint(**fresh).restore(program.folder / "saved")
        return found_of(fresh)


def _to_plain(program: Program) -> dict[str, Found]:
    ts.Checkpoint(**program.trained).save(program.folder / "saved")
    fresh = program.plain(False)
    ts.Checkpoint(**fresh).restore(program.folder / "saved")
    return found_of(fresh)


def _from_plain(program: Program) -> dict[str, Found]:
    ts.Checkpoint(**program.plain(True)).save(program.folder / "saved")
    ts.Checkpoint(**program.fresh).restore(program.folder / "saved")
    return found_of(program.fresh)


def _consolidate(program: Program) -> dict[str, Found]:
    file = program.folder / "all.pt"
    ts.Checkpoint(**program.trained).save(program.folder / "saved")
    _by_first(lambda: ts.consolidate(program.folder / "saved", file))
    fresh = program.plain(False)
    for name, state in torch.load(file, weights_only=True).items():
        fresh[name].load_state_dict(state)
    return found_of(fresh)


def _safetensors(program: Program) -> dict[str, Found]:
    file = program.folder / "all.safetensors"
    ts.Checkpoint(**program.trained).save(program.folder / "saved")
    _by_first(lambda: ts.consolidate(program.folder / "saved", file))
    ts.Checkpoint(**program.fresh).restore(file)
    return found_of(program.fresh)


def _written_plainly(program: Program) -> Path:
    file = program.folder / "plain.pt"
    states = {name: value.state_dict() for name, value in program.plain(True).items()}
    _by_first(lambda: torch.save(program.in_file(states), file))
    return file


def _plain_file_in(program: Program) -> dict[str, Found]:
    ts.Checkpoint(**program.fresh).restore(_written_plainly(program))
    return found_of(program.fresh)


def _loaded(program: Program) -> dict[str, Found]:
    for name, state in torch.load(_written_plainly(program), weights_only=False).items():
        program.fresh[name].load_state_dict(state)
    return found_of(program.fresh)


def _plain_file_out(program: Program) -> dict[str, Found]:
    states = {name: value.state_dict() for name, value in program.trained.items()}
    _by_first(lambda: torch.save(states, program.folder / "out.pt"))
    fresh = program.plain(False)
    for name, state in torch.load(program.folder / "out.pt", weights_only=False).items():
        fresh[name].load_state_dict(state)
    return found_of(fresh)


def _whole_model(program: Program) -> dict[str, Found]:
    _by_first(lambda: torch.save(program.trained["model"], program.folder / "model.pt"))
    return found_of({"model": torch.load(program.folder / "model.pt", weights_only=False)})


def _export(program: Program) -> dict[str, Found]:
    exported = torch.export.export(program.trained["model"], (torch.ones(2, 2),))
    fresh = program.plain(False)
    fresh["model"].load_state_dict(exported.state_dict, strict=False)
    return found_of(fresh)


COLUMNS: Mapping[str, Callable[[Program], dict[str, Found]]] = {
    "checkpoint": _checkpoint,
    "checkpoint, asynchronous": partial(_checkpoint, asynchronous=True),
    "checkpoint to plain": _to_plain,
    "checkpoint from plain": _from_plain,
    "checkpoint to mirrored": partial(_to, "mirrored"),
    "checkpoint to central_storage": partial(_to, "central_storage"),
    "checkpoint to servers": partial(_to, ON_SERVERS),
    "consolidate": _consolidate,
    "safetensors": _safetensors,
    "plain file in": _plain_file_in,
    "plain file, load_state_dict": _loaded,
    "plain file out": _plain_file_out,
    "torch.save(model)": _whole_model,
    "torch.export": _export,
}
WITHOUT_US = ("plain file out", "torch.save(model)", "torch.export")
"""Those that have no torchstrat in them: the judge is the same way without a strategy."""
OF_MODULES = ("torch.save(model)", "torch.export")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as own:
        chosen = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(chosen, 0)
        yield Path(chosen[0])
        if dist.is_initialized():
            dist.barrier()
