"""Checkpoints."""

import errno
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import torchstrat as ts
from tests.mistakes.table import Area, raises, right, warns
from torchstrat.errors import ContextError, InvalidArgumentError, UnsupportedError, WrongTypeError


def flip_a_byte(folder: Path) -> None:
    file = sorted(folder.glob("*.distcp"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def full_disk() -> Any:
    return mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))


class Checkpoints(Area):
    title = "Checkpoints"

    def manager(self) -> ts.CheckpointManager:
        return self.enter_context(ts.CheckpointManager(self.folder / "run"))

    def saved(self, *steps: int) -> tuple[ts.CheckpointManager, ts.Checkpoint]:
        manager, checkpoint = self.manager(), ts.Checkpoint(model=nn.Linear(20, 10))
        for step in steps:
            manager.save(checkpoint, step)
        return manager, checkpoint

    @raises(InvalidArgumentError, "Checkpoint", "objects to save", "model=model")
    def nothing_to_save(self) -> None:
        ts.Checkpoint()

    @raises(WrongTypeError, "got Linear", "by name", "model=model")
    def a_model_without_a_name(self) -> None:
        ts.Checkpoint(nn.Linear(1, 1))

    @raises(WrongTypeError, "the class Linear", "saves objects", r"model = Linear\(…\)")
    def a_class_for_its_object(self) -> None:
        ts.Checkpoint(model=nn.Linear)

    @raises(InvalidArgumentError, "int 3", "state_dict", "a tensor or a ts.Variable")
    def a_number_in_a_checkpoint(self) -> None:
        ts.Checkpoint(step=3).save(self.folder / "a")

    @raises(InvalidArgumentError, "PerReplica", "state_dict", "a tensor or a ts.Variable")
    def results_in_a_checkpoint(self) -> None:
        ts.Checkpoint(loss=self.mirrored().run(lambda: torch.rand(1))).save(self.folder / "a")

    @raises(UnsupportedError, "optimizer, a Several", "state_dict", "each by its name")
    def an_optimizer_with_a_list_for_a_state_dict(self) -> None:
        class Several(torch.optim.SGD):
            def state_dict(self) -> Any:
                return [super().state_dict()]

        model = nn.Linear(1, 1)
        ts.Checkpoint(model=model, optimizer=Several(model.parameters(), 0.1)).save(self.folder / "a")

    @raises(InvalidArgumentError, r"\(1, 2\)", r"\(1, 3\)", "nothing was changed(.|\n)*Give")
    def another_shape(self) -> None:
        ts.Checkpoint(model=nn.Linear(2, 1)).save(self.folder / "a")
        ts.Checkpoint(model=nn.Linear(3, 1)).restore(self.folder / "a")

    @raises(InvalidArgumentError, "model.weight is missing", "does not fit", "under the names")
    def another_name(self) -> None:
        ts.Checkpoint(net=nn.Linear(2, 1)).save(self.folder / "a")
        ts.Checkpoint(model=nn.Linear(2, 1)).restore(self.folder / "a")

    @raises(InvalidArgumentError, "no such folder", "no checkpoint", "Give the path")
    def a_folder_that_is_not_there(self) -> None:
        ts.Checkpoint(model=nn.Linear(2, 1)).restore(self.folder / "a")

    @raises(WrongTypeError, "path of a folder", "got None", r"manager.restore\(checkpoint\)")
    def the_latest_where_there_is_none(self) -> None:
        ts.Checkpoint(model=nn.Linear(2, 1)).restore(self.manager().latest)

    @raises(WrongTypeError, "path of a folder", r"got \(1, ", "pairs of a step and a path")
    def a_step_with_its_path(self) -> None:
        manager, checkpoint = self.saved(1)
        checkpoint.restore(manager.checkpoints[0])

    @raises(InvalidArgumentError, "FOLDER", "metadata is missing", "use an earlier one")
    def an_empty_folder(self) -> None:
        ts.Checkpoint(model=nn.Linear(2, 1)).restore(self.folder)

    @raises(InvalidArgumentError, "is no checkpoint, but a folder that has some", "its newest", "step-00000002")
    def the_folder_of_a_manager(self) -> None:
        manager, checkpoint = self.saved(1, 2)
        checkpoint.restore(manager.directory)

    @raises(InvalidArgumentError, r"distcp is damaged", r"CRC-32 \w+, not", "an earlier checkpoint")
    def a_flipped_byte(self) -> None:
        checkpoint = ts.Checkpoint(model=nn.Linear(20, 10))
        checkpoint.save(self.folder / "a")
        flip_a_byte(self.folder / "a")
        checkpoint.restore(self.folder / "a")

    @warns("step-00000002.*is damaged", "CRC-32", "before it is used")
    def a_damaged_newest_checkpoint(self) -> None:
        manager, checkpoint = self.saved(1, 2)
        flip_a_byte(manager.checkpoints[-1][1])
        assert manager.restore(checkpoint) == 1

    @raises(InvalidArgumentError, "are damaged", "CRC-32", "Bring back a copy")
    def damaged_checkpoints_alone(self) -> None:
        manager, checkpoint = self.saved(1)
        flip_a_byte(manager.checkpoints[-1][1])
        manager.restore(checkpoint)

    @raises(InvalidArgumentError, "step 7", r"there are \[1\]", "Give one of these")
    def a_step_without_a_checkpoint(self) -> None:
        manager, checkpoint = self.saved(1)
        manager.restore(checkpoint, step=7)

    @raises(ContextError, "closed", "CheckpointManager", "make a new one")
    def a_manager_that_is_closed(self) -> None:
        manager = self.manager()
        manager.close()
        manager.save(ts.Checkpoint(model=nn.Linear(1, 1)), 1)

    @raises(InvalidArgumentError, "by process", "two jobs cannot", "directory of its own")
    def two_writers(self) -> None:
        self.saved(1)
        self.saved(2)

    @raises(InvalidArgumentError, "step 3", "step 5", "give a new directory")
    def a_step_before_the_newest(self) -> None:
        self.saved(5, 3)

    @raises(WrongTypeError, "got None", "an int", r"save\(checkpoint, step\)")
    def save_without_a_step(self) -> None:
        self.manager().save(ts.Checkpoint(model=nn.Linear(1, 1)))

    @raises(WrongTypeError, "got Linear", "needs a ts.Checkpoint", "model=model")
    def save_of_a_model(self) -> None:
        self.manager().save(nn.Linear(1, 1), 1)  # type: ignore[arg-type]

    @raises(WrongTypeError, "max_to_keep|Checkpoint", "path|argument", r"\(checkpoint, directory")
    def arguments_of_a_manager_exchanged(self) -> None:
        checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
        ts.CheckpointManager(self.folder, checkpoint, max_to_keep=2)  # type: ignore[call-overload]

    @raises(WrongTypeError, "Linear|multiple", "path|argument", r"\(checkpoint, directory")
    def a_manager_of_a_model(self) -> None:
        ts.CheckpointManager(nn.Linear(1, 1), max_to_keep=2)  # type: ignore[call-overload]

    @raises(WrongTypeError, "missing a", "'directory'", r"\(directory, max")
    def a_manager_without_a_directory(self) -> None:
        ts.CheckpointManager()  # type: ignore[call-overload]

    @raises(WrongTypeError, "max_keep", "unexpected", "max_to_keep=5")
    def an_option_that_a_manager_lacks(self) -> None:
        ts.CheckpointManager(self.folder, max_keep=3)  # type: ignore[call-overload]

    @raises(InvalidArgumentError, "s3://", "path of a directory", "Mount the store")
    def an_object_store(self) -> None:
        ts.CheckpointManager("s3://bucket/run")

    @raises(InvalidArgumentError, "FOLDER", "is no checkpoint", "path of its own")
    def a_folder_with_other_files(self) -> None:
        (self.folder / "mine.txt").write_text("")
        ts.Checkpoint(model=nn.Linear(1, 1)).save(self.folder)

    @raises(ContextError, "in a replica", "Checkpoint.save", "program around")
    def save_within_a_run(self) -> None:
        checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
        self.mirrored().run(lambda: checkpoint.save(self.folder / "a"))

    @raises(InvalidArgumentError, "No space left", "FOLDER", "Free space")
    def a_full_disk(self) -> None:
        manager, checkpoint = self.saved(1)
        try:
            with full_disk():
                manager.save(checkpoint, 2)
        finally:
            assert manager.restore(checkpoint) == 1

    @raises(InvalidArgumentError, "No space left", "FOLDER", "Free space")
    def a_full_disk_behind_an_asynchronous_save(self) -> None:
        manager = ts.CheckpointManager(self.folder / "run")
        with full_disk():
            handle = manager.save(ts.Checkpoint(model=nn.Linear(1, 1)), 1, asynchronous=True)
            while not handle.done():
                pass
        manager.close()

    @right("`CheckpointManager(checkpoint, directory, max_to_keep=2)` works: `save(step)`.")
    def a_manager_in_the_order_of_tensorflow(self) -> None:
        checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
        with ts.CheckpointManager(checkpoint, self.folder / "run", max_to_keep=2) as manager:
            for step in range(3):
                manager.save(step)
            assert [step for step, _path in manager.checkpoints] == [1, 2]
            assert manager.restore() == 2

    @right("`Checkpoint.save`: it appears whole, in place of one that was there.")
    def save_over_an_older_checkpoint(self) -> None:
        checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
        checkpoint.save(self.folder / "a")
        checkpoint.save(self.folder / "a")
        checkpoint.restore(self.folder / "a")
