"""Checkpoints."""

import errno
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import torchstrat as ts
from tests.mistakes.table import Area, Place
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError

area = Area("Checkpoints")


def flip_a_byte(folder: Path) -> None:
    file = sorted(folder.glob("*.distcp"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def manager_of(place: Place, *args: object) -> ts.CheckpointManager:
    return place.enter(ts.CheckpointManager(place.folder / "run", *args))  # type: ignore[arg-type]


@area.raises(
    "nothing to save", InvalidArgumentError, given="Checkpoint", needed="objects to save", change="model=model"
)
def _(place: Place) -> None:
    ts.Checkpoint()


@area.raises("a model without a name", WrongTypeError, given="got Linear", needed="by name", change="model=model")
def _(place: Place) -> None:
    ts.Checkpoint(nn.Linear(1, 1))


@area.raises(
    "a number in a checkpoint",
    InvalidArgumentError,
    given="int 3",
    needed="state_dict",
    change="a tensor or a ts.Variable",
)
def _(place: Place) -> None:
    ts.Checkpoint(step=3).save(place.folder / "a")


@area.raises(
    "results in a checkpoint",
    InvalidArgumentError,
    given="PerReplica",
    needed="state_dict",
    change="a tensor or a ts.Variable",
)
def _(place: Place) -> None:
    ts.Checkpoint(loss=place.mirrored().run(lambda: torch.rand(1))).save(place.folder / "a")


@area.raises(
    "another shape",
    InvalidArgumentError,
    given=r"\(1, 2\)",
    needed=r"\(1, 3\)",
    change="nothing was changed(.|\n)*Give",
)
def _(place: Place) -> None:
    ts.Checkpoint(model=nn.Linear(2, 1)).save(place.folder / "a")
    ts.Checkpoint(model=nn.Linear(3, 1)).restore(place.folder / "a")


@area.raises(
    "another name",
    InvalidArgumentError,
    given="model.weight is missing",
    needed="does not fit",
    change="under the names",
)
def _(place: Place) -> None:
    ts.Checkpoint(net=nn.Linear(2, 1)).save(place.folder / "a")
    ts.Checkpoint(model=nn.Linear(2, 1)).restore(place.folder / "a")


@area.raises(
    "a folder that is not there",
    InvalidArgumentError,
    given="no such folder",
    needed="no checkpoint",
    change="Give the path",
)
def _(place: Place) -> None:
    ts.Checkpoint(model=nn.Linear(2, 1)).restore(place.folder / "a")


@area.raises(
    "an empty folder", InvalidArgumentError, given="FOLDER", needed="metadata is missing", change="use an earlier one"
)
def _(place: Place) -> None:
    ts.Checkpoint(model=nn.Linear(2, 1)).restore(place.folder)


@area.raises(
    "a flipped byte",
    InvalidArgumentError,
    given=r"distcp is damaged",
    needed=r"CRC-32 \w+, not",
    change="an earlier checkpoint",
)
def _(place: Place) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(20, 10))
    checkpoint.save(place.folder / "a")
    flip_a_byte(place.folder / "a")
    checkpoint.restore(place.folder / "a")


@area.warns(
    "a damaged newest checkpoint", given="step-00000002.*is damaged", needed="CRC-32", change="before it is used"
)
def _(place: Place) -> None:
    manager, checkpoint = manager_of(place), ts.Checkpoint(model=nn.Linear(20, 10))
    for step in (1, 2):
        manager.save(checkpoint, step)
    flip_a_byte(manager.checkpoints[-1][1])
    assert manager.restore(checkpoint) == 1


@area.raises(
    "damaged checkpoints alone",
    InvalidArgumentError,
    given="are damaged",
    needed="CRC-32",
    change="Bring back a copy",
)
def _(place: Place) -> None:
    manager, checkpoint = manager_of(place), ts.Checkpoint(model=nn.Linear(20, 10))
    manager.save(checkpoint, 1)
    flip_a_byte(manager.checkpoints[-1][1])
    manager.restore(checkpoint)


@area.raises(
    "a step without a checkpoint",
    InvalidArgumentError,
    given="step 7",
    needed=r"there are \[1\]",
    change="Give one of these",
)
def _(place: Place) -> None:
    manager, checkpoint = manager_of(place), ts.Checkpoint(model=nn.Linear(2, 1))
    manager.save(checkpoint, 1)
    manager.restore(checkpoint, step=7)


@area.raises(
    "a manager that is closed", ContextError, given="closed", needed="CheckpointManager", change="make a new one"
)
def _(place: Place) -> None:
    manager = manager_of(place)
    manager.close()
    manager.save(ts.Checkpoint(model=nn.Linear(1, 1)), 1)


@area.raises(
    "two writers", InvalidArgumentError, given="by process", needed="two jobs cannot", change="directory of its own"
)
def _(place: Place) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
    manager_of(place).save(checkpoint, 1)
    manager_of(place).save(checkpoint, 2)


@area.raises(
    "a step before the newest", InvalidArgumentError, given="step 3", needed="step 5", change="give a new directory"
)
def _(place: Place) -> None:
    manager, checkpoint = manager_of(place), ts.Checkpoint(model=nn.Linear(1, 1))
    manager.save(checkpoint, 5)
    manager.save(checkpoint, 3)


@area.raises(
    "save without a step", WrongTypeError, given="got None", needed="an int", change=r"save\(checkpoint, step\)"
)
def _(place: Place) -> None:
    manager_of(place).save(ts.Checkpoint(model=nn.Linear(1, 1)))


@area.raises(
    "save of a model", WrongTypeError, given="got Linear", needed="needs a ts.Checkpoint", change="model=model"
)
def _(place: Place) -> None:
    manager_of(place).save(nn.Linear(1, 1), 1)  # type: ignore[arg-type]


@area.raises(
    "a manager's arguments exchanged",
    WrongTypeError,
    given="max_to_keep|Checkpoint",
    needed="path|argument",
    change=r"\(checkpoint, directory",
)
def _(place: Place) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
    ts.CheckpointManager(place.folder, checkpoint, max_to_keep=2)  # type: ignore[call-overload]


@area.raises(
    "a manager of a model",
    WrongTypeError,
    given="Linear|multiple",
    needed="path|argument",
    change=r"\(checkpoint, directory",
)
def _(place: Place) -> None:
    ts.CheckpointManager(nn.Linear(1, 1), max_to_keep=2)  # type: ignore[call-overload]


@area.raises(
    "a manager without a directory", WrongTypeError, given="missing a", needed="'directory'", change=r"\(directory, max"
)
def _(place: Place) -> None:
    ts.CheckpointManager()  # type: ignore[call-overload]


@area.raises(
    "an option that a manager lacks", WrongTypeError, given="max_keep", needed="unexpected", change="max_to_keep=5"
)
def _(place: Place) -> None:
    ts.CheckpointManager(place.folder, max_keep=3)  # type: ignore[call-overload]


@area.raises(
    "an object store", InvalidArgumentError, given="s3://", needed="path of a directory", change="Mount the store"
)
def _(place: Place) -> None:
    ts.CheckpointManager("s3://bucket/run")


@area.raises(
    "a folder that is something else's",
    InvalidArgumentError,
    given="FOLDER",
    needed="is no checkpoint",
    change="path of its own",
)
def _(place: Place) -> None:
    (place.folder / "mine.txt").write_text("")
    ts.Checkpoint(model=nn.Linear(1, 1)).save(place.folder)


@area.raises("save within a run", ContextError, given="in a replica", needed="Checkpoint.save", change="program around")
def _(place: Place) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
    place.mirrored().run(lambda: checkpoint.save(place.folder / "a"))


def full_disk() -> mock._patch:  # type: ignore[type-arg]
    from torchstrat.checkpoint import disk

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return mock.patch.object(disk.os, "fsync", refuse)


@area.raises("a full disk", InvalidArgumentError, given="No space left", needed="FOLDER", change="Free space")
def _(place: Place) -> None:
    manager, checkpoint = manager_of(place), ts.Checkpoint(model=nn.Linear(1, 1))
    manager.save(checkpoint, 1)
    try:
        with full_disk():
            manager.save(checkpoint, 2)
    finally:
        assert manager.restore(checkpoint) == 1


@area.raises(
    "a full disk, behind an asynchronous save",
    InvalidArgumentError,
    given="No space left",
    needed="FOLDER",
    change="Free space",
)
def _(place: Place) -> None:
    manager = ts.CheckpointManager(place.folder / "run")
    with full_disk():
        handle = manager.save(ts.Checkpoint(model=nn.Linear(1, 1)), 1, asynchronous=True)
        while not handle.done():
            pass
    manager.close()


@area.right(
    "a manager in TensorFlow's order", "`CheckpointManager(checkpoint, directory, max_to_keep=2)` works: `save(step)`."
)
def _(place: Place) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
    with ts.CheckpointManager(checkpoint, place.folder / "run", max_to_keep=2) as manager:
        for step in range(3):
            manager.save(step)
        assert [step for step, _path in manager.checkpoints] == [1, 2]
        assert manager.restore() == 2


@area.right("save over an older checkpoint", "`Checkpoint.save`: it appears whole, in place of one that was there.")
def _(place: Place) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
    checkpoint.save(place.folder / "a")
    checkpoint.save(place.folder / "a")
    checkpoint.restore(place.folder / "a")
