"""`ts.CheckpointManager`: what it keeps, what it restores, and who may write."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torchstrat as ts
from tests.support.checkpoint_writes import full_disk, held_writes
from tests.support.checkpoints import data_file, flip
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError

MANIFEST, INDEX = "torchstrat.json", ".metadata"


class Job:
    """One number that says which step a checkpoint is of."""

    def __init__(self, manager: ts.CheckpointManager, *steps: int) -> None:
        self.weight = torch.zeros(3)
        self.manager, self.checkpoint = manager, ts.Checkpoint(weight=self.weight)
        self.save(*steps)

    def save(self, *steps: int, asynchronous: bool = False) -> Any:
        handle = None
        for step in steps:
            self.weight.fill_(step)
            handle = self.manager.save(self.checkpoint, step, asynchronous=asynchronous)
        return handle

    def restored(self, step: int | None = None) -> tuple[int | None, float]:
        self.weight.fill_(-1)
        return self.manager.restore(self.checkpoint, step=step), self.weight[0].item()

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.manager.checkpoints]


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != ".writer.lock")


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path / "run" / "checkpoints", max_to_keep=2) as manager:
        job = Job(manager)
        assert (manager.latest, manager.checkpoints, manager.restore(job.checkpoint)) == (None, [], None)
        job.save(1, 2, 30, 4_000_000_000)
        assert visible(manager.directory) == ["step-00000030", "step-4000000000"]
        assert manager.checkpoints == [(step, manager.directory / f"step-{step:08d}") for step in (30, 4_000_000_000)]
        assert manager.latest == manager.directory / "step-4000000000"
        assert job.restored() == (4_000_000_000, 4_000_000_000.0)


@pytest.mark.parametrize(
    ("first", "then", "more", "kept"),
    [
        ({"max_to_keep": 2, "keep_every": 4}, {"max_to_keep": 2, "keep_every": 4}, (), [0, 4, 8, 9, 10]),
        ({"max_to_keep": None}, {"max_to_keep": None}, (11,), list(range(12))),
        ({"max_to_keep": None}, {"max_to_keep": 1, "keep_every": 3}, (11, 12), [0, 3, 6, 9, 12]),
    ],
    ids=["multiples stay", "all", "another number applies to what is there"],
)
def test_how_many_are_kept(first, then, more, kept, tmp_path) -> None:
    with ts.CheckpointManager(tmp_path, **first) as manager:
        Job(manager, *range(11))
    with ts.CheckpointManager(tmp_path, **then) as manager:
        assert Job(manager, *more).steps == kept
    assert visible(tmp_path) == names(*kept)


def test_a_manager_made_with_its_checkpoint(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    with ts.CheckpointManager(checkpoint=ts.Checkpoint(weight=weight), directory=tmp_path) as manager:
        for step in (1, 2):
            weight.fill_(step)
            manager.save(step=step)
        assert (manager.restore(step=1), weight[0].item()) == (1, 1.0)


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("step-00000003", "step-7", ".hidden"):  # the first is half of one
        (tmp_path / name).mkdir()
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        assert Job(manager, 1, 2).steps == [2]
    assert visible(tmp_path) == [".hidden", "notes.txt", "step-00000002", "step-00000003", "step-7"]


# -- what is restored -------------------------------------------------------------------------------------------------


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path, max_to_keep=3) as manager:
        Job(manager, 10, 20, 30)
    flip(data_file(tmp_path / "step-00000030"))
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job = Job(manager)
        with pytest.warns(UserWarning, match=r"step-00000030.*distcp is damaged: its contents .* before it is used"):
            assert job.restored() == (20, 20.0)
        # It must neither count as the newest nor push an intact one out.
        job.save(25)
        assert job.steps == [25]
        assert job.restored() == (25, 25.0)
    assert visible(tmp_path) == ["step-00000025", "step-00000030.aside"]


def test_one_without_metadata_is_passed_over(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        Job(manager, 10, 20, 30)
    for step in (10, 30):
        (tmp_path / f"step-000000{step}" / INDEX).unlink()
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager)
        with pytest.warns(UserWarning, match=r"step-00000030 is no complete .* that of step 20 is used") as warned:
            assert job.restored() == (20, 20.0)
        assert len(warned) == 1, "older ones than the one that is used are nobody's business"
        job.save(30)  # the same step again, which its folder must not keep from being saved
        assert job.steps == [20, 30]
        assert job.restored() == (30, 30.0)
    assert visible(tmp_path) == [*names(10, 20, 30), "step-00000030.aside"]


def test_none_is_usable(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager, 1)
        (tmp_path / "step-00000001" / INDEX).unlink()
        with pytest.warns(UserWarning, match=r"step-00000001 is no complete checkpoint.* there is no other"):
            assert manager.restore(job.checkpoint) is None
        job.save(1, 2)
        assert job.steps == [1, 2]
        for path in (path for _, path in manager.checkpoints):
            flip(data_file(path))
        with (
            pytest.warns(UserWarning, match="is damaged"),
            pytest.raises(InvalidArgumentError, match=r"all checkpoints in .* are damaged.*00000002.*00000001"),
        ):
            job.restored()
        assert job.weight.tolist() == [-1.0] * 3
        assert job.steps == [1, 2]


def test_each_kind_of_damage_is_passed_over_and_named(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager, 1, 2, 3, 4)
        os.truncate(tmp_path / "step-00000004" / INDEX, 20)
        data_file(tmp_path / "step-00000003").unlink()
        (tmp_path / "step-00000002" / MANIFEST).write_text("{")
        with pytest.warns(UserWarning, match="The checkpoint before it is used") as warned:
            assert job.restored() == (1, 1.0)
        named = [str(one.message).split(f"{tmp_path}/")[1][:13] for one in warned]
        assert named == names(4, 3, 2)


def of_a_later_version(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "format": 99}))


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        (4, lambda path: None, r"step-00000002 does not fit .*\n.*weight is .*\(3,\)"),
        (3, of_a_later_version, "format 99"),
    ],
)
def test_what_is_no_damage_is_an_error(rows: int, change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        Job(manager, 1, 2)
        change(tmp_path / "step-00000002")
        with pytest.raises(InvalidArgumentError, match=message):
            manager.restore(ts.Checkpoint(weight=torch.zeros(rows)))


def test_one_that_is_deleted_while_it_is_restored(tmp_path: Path) -> None:
    """A reader beside a writer: it goes on with what is there now."""
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as writer:
        job = Job(writer, 1)
        reader, restore, tried = ts.CheckpointManager(tmp_path), job.checkpoint.restore, []

        def meanwhile(path: Path) -> None:
            tried.append(path.name)
            if len(tried) == 1:
                job.save(2)
            restore(path)

        with mock.patch.object(job.checkpoint, "restore", meanwhile):
            assert reader.restore(job.checkpoint) == 2
        assert tried == names(1, 2)
        assert job.weight[0].item() == 2


# -- going back -------------------------------------------------------------------------------------------------------


def test_going_back_to_an_earlier_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager, 1, 2, 3)
        with pytest.raises(InvalidArgumentError, match=r"step 2 cannot be saved in .* a checkpoint of step 3"):
            job.save(2)
        assert job.restored(step=1) == (1, 1.0)
        assert job.steps == [1, 2, 3]  # nothing happens before there is something new
        with caplog.at_level(logging.WARNING, "torchstrat.checkpoint"):
            job.save(2)
        assert "step-00000003 is no part of this training any more" in caplog.text
        assert job.steps == [1, 2]
        assert job.restored() == (2, 2.0)
        job.save(3)
        assert job.restored(step=1) == (1, 1.0)
        job.save(2)
    aside = [f"{name}.{suffix}" for name in names(2, 3) for suffix in ("aside", "aside-2")]
    assert visible(tmp_path) == sorted([*names(1, 2), *aside])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_after_going_back_leaves_later_ones_where_they_were(
    asynchronous: bool, tmp_path: Path
) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager, 1, 2, 3)
        job.restored(step=1)
        with full_disk(), pytest.raises(InvalidArgumentError):
            job.save(2, asynchronous=asynchronous).result()
        with contextlib.suppress(InvalidArgumentError):
            job.manager.save(ts.Checkpoint(weight=torch.empty(3, device="meta")), 2)
        assert visible(tmp_path) == names(1, 2, 3)
        job.save(2)
        assert job.steps == [1, 2]


def test_a_step_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager)
        with pytest.raises(InvalidArgumentError, match=r"no checkpoint of step 5 in .*; there are none"):
            job.restored(step=5)
        job.save(1)
        flip(data_file(tmp_path / "step-00000001"))
        with pytest.raises(InvalidArgumentError, match="is damaged"):
            job.restored(step=1)


# -- one writer -------------------------------------------------------------------------------------------------------


_HOLDS = """
import os, sys
import torch
import torchstrat as ts
manager = ts.CheckpointManager(sys.argv[1])
if sys.argv[2] == "save":
    manager.save(ts.Checkpoint(weight=torch.zeros(3)), 1)
else:
    manager.claim()
if os.fork() == 0:  # as a data-loading worker: it outlives its parent for a while
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["save", pytest.param("claim", marks=pytest.mark.soak)])  # a save claims
def test_a_killed_writer_holds_nothing(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with ts.CheckpointManager(tmp_path) as manager:
            with pytest.raises(InvalidArgumentError, match=f"by process {holder.pid} on {os.uname().nodename}:"):
                manager.claim()
            holder.kill()
            holder.wait(30)
            os.kill(child, 0)  # there still
            Job(manager, 2)
        holder.stdin.close()


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    with (
        mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")),
        ts.CheckpointManager(tmp_path) as manager,
        pytest.warns(UserWarning, match="cannot be locked .*No locks available.* will not be noticed"),
    ):
        Job(manager, 1)


# -- deletion ---------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    pass


@contextlib.contextmanager
def deletion_fails(error: BaseException, removed: int = 0) -> Iterator[None]:
    """Of what is not kept, after so many of its files."""
    unlink, gone = Path.unlink, []

    def fails(file: Path, **options: Any) -> None:
        if ".deleted-" in file.parent.name:
            if len(gone) == removed:
                raise error
            gone.append(file)
        unlink(file, **options)

    with mock.patch.object(Path, "unlink", fails):
        yield


@pytest.mark.parametrize("removed", [0, 1], ids=["before", "half-way"])
def test_killed_while_it_deletes(removed: int, tmp_path: Path) -> None:
    job = Job(ts.CheckpointManager(tmp_path, max_to_keep=1), 1)
    with deletion_fails(KilledError(), removed), pytest.raises(KilledError):
        job.save(2)
    job.manager.close()
    assert job.steps == [2]
    hidden = [name for name in visible(tmp_path) if name.startswith(".")]
    assert [name[:22] for name in hidden] == [".step-00000001.deleted"]
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as after:
        again = Job(after)
        assert again.restored() == (2, 2.0)
        again.save(3)
    assert visible(tmp_path) == names(3)


def test_an_old_one_that_cannot_be_deleted(tmp_path: Path) -> None:
    refuse = deletion_fails(PermissionError(1, "Operation not permitted"))
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job = Job(manager, 1)
        with refuse, pytest.warns(UserWarning, match="cannot be deleted: .*not permitted"):
            job.save(2)
        assert job.steps == [2]


def test_what_a_killed_save_has_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.writing-0123456789abcdef").mkdir()
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager)
        assert job.restored() == (None, -1.0)
        job.save(1)
    # Killed between the two renames of a file system without an exchange of names: its only copy is aside.
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.replaced")
    with ts.CheckpointManager(tmp_path) as manager:
        job = Job(manager)
        assert manager.latest == tmp_path / "step-00000001"
        assert job.restored() == (1, 1.0)
        job.save(2)
    assert visible(tmp_path) == names(1, 2)


# -- arguments --------------------------------------------------------------------------------------------------------


def closed(directory: Path) -> ts.CheckpointManager:
    manager = ts.CheckpointManager(directory)
    manager.close()
    manager.close()
    return manager


A_CHECKPOINT = ts.Checkpoint(weight=torch.zeros(3))
AT_LEAST_1, GIVE_IT, CLOSED = (
    "must be at least 1",
    r"make the manager with it, Check",
    "called on a CheckpointManager that is",
)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda at: ts.CheckpointManager(at, max_to_keep=0), InvalidArgumentError, f"max_to_keep {AT_LEAST_1}"),
        (lambda at: ts.CheckpointManager(at, keep_every=-1), InvalidArgumentError, f"keep_every {AT_LEAST_1}"),
        (
            lambda at: ts.CheckpointManager(at, keep_every=2.5),
            WrongTypeError,
            r"keep_every must be an int or None; got 2",
        ),
        (lambda at: ts.CheckpointManager(""), InvalidArgumentError, "needs the path of a directory"),
        (lambda at: ts.CheckpointManager(at).save(A_CHECKPOINT, True), WrongTypeError, "step must be an int"),
        (lambda at: ts.CheckpointManager(at).save(A_CHECKPOINT, -3), InvalidArgumentError, "must not be negative"),
        (lambda at: ts.CheckpointManager(at).save(step=1), WrongTypeError, f"save .*{GIVE_IT}"),
        (lambda at: ts.CheckpointManager(at).restore(), WrongTypeError, f"restore .*{GIVE_IT}"),
        (lambda at: closed(at).restore(A_CHECKPOINT), ContextError, f"restore was {CLOSED}"),
        (lambda at: closed(at).claim(), ContextError, f"claim was {CLOSED}"),
    ],
)
def test_calls_that_mean_nothing(call, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        call(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (
        ts.CheckpointManager(tmp_path / "file") as manager,
        pytest.raises(InvalidArgumentError, match=r"no checkpoints can be written to .*file"),
    ):
        Job(manager, 1)


# -- in the background -------------------------------------------------------------------------------------------------


def test_an_old_one_goes_when_the_new_one_is_there(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job = Job(manager, 1)
        with held_writes() as held:
            handle = job.save(2, asynchronous=True)
            held.wait_until_reached()
            assert not handle.done()
            assert job.steps == [1]
            assert handle.path == tmp_path / "step-00000002"
            job.weight.fill_(17)  # the training goes on; 2 was taken before
            held.go_on.set()
            assert job.restored() == (2, 2.0)  # waits
        assert job.steps == [2]
        job.save(3, asynchronous=True)
    assert visible(tmp_path) == names(3)  # close waits, for the deletion too


def test_what_fails_in_the_background_is_raised_by_the_next_call(tmp_path, caplog) -> None:
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job = Job(manager, 1)
        with full_disk(f"*/{MANIFEST}"):
            job.save(2, asynchronous=True)
            with pytest.raises(InvalidArgumentError, match=r"cannot be written to .*step-00000002: .*No space left"):
                job.save(3)
            assert job.steps == [1]  # neither 2 nor 3, and nothing was deleted for them
            job.save(3, asynchronous=True)
            with pytest.warns(UserWarning, match=r"step-00000003 was not saved: .*No space left"):
                assert job.restored() == (1, 1.0)
        job.save(3)
        assert job.steps == [3]
        with full_disk(f"*/{MANIFEST}"):
            job.save(4, asynchronous=True)
            with pytest.raises(InvalidArgumentError, match="No space left"):
                manager.close()
    assert visible(tmp_path) == names(3)
    assert "step-00000004 was not saved" in caplog.text


def test_ctrl_c_while_it_waits_leaves_the_save_to_be_waited_for(tmp_path: Path) -> None:
    result = ts.SaveHandle.result

    def interrupted(handle: ts.SaveHandle) -> Path:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return result(handle)

    manager = ts.CheckpointManager(tmp_path)
    with full_disk(f"*/{MANIFEST}"):
        job = Job(manager)
        job.save(1, asynchronous=True)
        with mock.patch.object(ts.SaveHandle, "result", interrupted), pytest.raises(KeyboardInterrupt):
            job.save(2)
        with pytest.raises(InvalidArgumentError, match="No space left"):
            manager.close()
