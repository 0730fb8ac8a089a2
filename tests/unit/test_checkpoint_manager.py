"""`ts.CheckpointManager`: what it keeps, what it restores, and who may write."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.checkpoints import flip
from torchstrat.checkpoint import disk, finished, manifest, writer_lock
from torchstrat.checkpoint import writing as writing_module
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError


class Job:
    """One number that says which step a checkpoint is of."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3)
        self.checkpoint = ts.Checkpoint(weight=self.weight)

    def save(self, manager: ts.CheckpointManager, step: int, *, asynchronous: bool = False) -> Any:
        self.weight.fill_(step)
        return manager.save(self.checkpoint, step, asynchronous=asynchronous)

    def restored(self, manager: ts.CheckpointManager, **options: Any) -> tuple[int | None, float]:
        self.weight.fill_(-1)
        return manager.restore(self.checkpoint, **options), self.weight[0].item()


def steps(manager: ts.CheckpointManager) -> list[int]:
    return [step for step, _ in manager.checkpoints]


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != writer_lock.NAME)


def damage(directory: Path, step: int) -> None:
    [file] = (directory / f"step-{step:08d}").glob("*.distcp")
    flip(file)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path / "run" / "checkpoints", max_to_keep=2) as manager:
        assert manager.latest is None
        assert manager.checkpoints == []
        assert manager.restore(job.checkpoint) is None
        for step in (1, 2, 30, 4_000_000_000):
            job.save(manager, step)
        assert visible(manager.directory) == ["step-00000030", "step-4000000000"]
        assert manager.checkpoints == [(step, manager.directory / f"step-{step:08d}") for step in (30, 4_000_000_000)]
        assert manager.latest == manager.directory / "step-4000000000"
        assert job.restored(manager) == (4_000_000_000, 4_000_000_000.0)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_manager_made_with_its_checkpoint_as_in_tensorflow(by_name: bool, tmp_path: Path) -> None:
    job = Job()
    if by_name:
        manager = ts.CheckpointManager(checkpoint=job.checkpoint, directory=tmp_path, max_to_keep=2)
    else:
        manager = ts.CheckpointManager(job.checkpoint, tmp_path, max_to_keep=2)
    with manager:
        for step in (1, 2):
            job.weight.fill_(step)
            manager.save(step)
        job.weight.fill_(3)
        manager.save(step=3)
        assert steps(manager) == [2, 3]
        job.weight.zero_()
        assert (manager.restore(), job.weight[0].item()) == (3, 3.0)
        assert (manager.restore(step=2), job.weight[0].item()) == (2, 2.0)
        with pytest.raises(WrongTypeError, match="step must be an int"):
            manager.save()


def test_a_manager_made_without_one_is_given_it(tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        for call in (lambda: manager.save(1), lambda: manager.save(step=1), manager.restore):
            with pytest.raises(WrongTypeError, match=r"make the manager with it, CheckpointManager\(checkpoint"):
                call()
        with pytest.raises(WrongTypeError, match=r"needs a ts\.Checkpoint; got str"):
            manager.save("model", 1)  # type: ignore[arg-type]


def test_multiples_stay(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path, max_to_keep=2, keep_every=4) as manager:
        for step in range(11):
            job.save(manager, step)
        assert steps(manager) == [0, 4, 8, 9, 10]
        assert visible(tmp_path) == [f"step-{step:08d}" for step in (0, 4, 8, 9, 10)]


def test_all_are_kept_where_that_is_asked(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in range(7):
            job.save(manager, step)
        assert steps(manager) == list(range(7))


def test_another_number_to_keep_applies_to_what_is_there(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in range(1, 6):
            job.save(manager, step)
    with ts.CheckpointManager(tmp_path, max_to_keep=1, keep_every=3) as manager:
        job.save(manager, 6)
        job.save(manager, 7)
        assert steps(manager) == [3, 6, 7]


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path, max_to_keep=2) as manager:
        job.save(manager, 1)
        job.save(manager, 2)
        job.weight.fill_(7)
        manager.save(job.checkpoint, 2)
        assert steps(manager) == [1, 2]
        assert job.restored(manager) == (2, 7.0)


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    job = Job()
    (tmp_path / "step-00000003").mkdir()  # half of one
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".hidden").mkdir()
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job.save(manager, 1)
        job.save(manager, 2)
        assert steps(manager) == [2]
    assert visible(tmp_path) == [".hidden", "notes.txt", "step-00000002", "step-00000003", "step-7"]


# -- what is restored -------------------------------------------------------------------------------------------------


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path, max_to_keep=3) as manager:
        for step in (10, 20, 30):
            job.save(manager, step)
    damage(tmp_path, 30)
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        with pytest.warns(UserWarning, match=r"step-00000030.*distcp is damaged: its contents .* before it is used"):
            assert job.restored(manager) == (20, 20.0)
        # It must neither count as the newest nor push an intact one out.
        job.save(manager, 25)
        assert steps(manager) == [25]
        assert job.restored(manager) == (25, 25.0)
    assert visible(tmp_path) == ["step-00000025", "step-00000030.aside"]


def test_one_without_metadata_is_passed_over(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 30):
            job.save(manager, step)
    for step in (10, 30):
        (tmp_path / f"step-000000{step}" / ".metadata").unlink()
    with ts.CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match=r"step-00000030 is no complete .* that of step 20 is used") as warned:
            assert job.restored(manager) == (20, 20.0)
        assert len(warned) == 1, "older ones than the one that is used are nobody's business"
        job.save(manager, 30)  # the same step again, which its folder must not keep from being saved
        assert steps(manager) == [20, 30]
        assert job.restored(manager) == (30, 30.0)
    assert visible(tmp_path) == ["step-00000010", "step-00000020", "step-00000030", "step-00000030.aside"]


def test_none_has_metadata(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        job.save(manager, 1)
        (tmp_path / "step-00000001" / ".metadata").unlink()
        with pytest.warns(UserWarning, match=r"step-00000001 is no complete checkpoint.* there is no other"):
            assert manager.restore(job.checkpoint) is None
        job.save(manager, 1)
        assert steps(manager) == [1]


def test_all_are_damaged(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            job.save(manager, step)
            damage(tmp_path, step)
        with (
            pytest.warns(UserWarning, match="is damaged"),
            pytest.raises(InvalidArgumentError, match=r"all checkpoints in .* are damaged.*00000002.*00000001"),
        ):
            job.restored(manager)
        assert job.weight.tolist() == [-1.0] * 3
        assert steps(manager) == [1, 2]


def test_a_truncated_index_and_a_missing_file(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            job.save(manager, step)
        index = tmp_path / "step-00000004" / ".metadata"
        index.write_bytes(index.read_bytes()[:20])
        [file] = (tmp_path / "step-00000003").glob("*.distcp")
        file.unlink()
        (tmp_path / "step-00000002" / manifest.NAME).write_text("{")
        with pytest.warns(UserWarning, match="The checkpoint before it is used") as warned:
            assert job.restored(manager) == (1, 1.0)
        named = [str(one.message).split(str(tmp_path))[1][:14] for one in warned]
        assert named == ["/step-00000004", "/step-00000003", "/step-00000002"]


def test_one_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            job.save(manager, step)
        with pytest.raises(InvalidArgumentError, match=r"step-00000002 does not fit .*\n.*weight is .*\(3,\)"):
            manager.restore(ts.Checkpoint(weight=torch.zeros(4)))


def test_one_of_a_later_version_is_an_error(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            job.save(manager, step)
        content = json.loads((tmp_path / "step-00000002" / manifest.NAME).read_text())
        (tmp_path / "step-00000002" / manifest.NAME).write_text(json.dumps({**content, "format": 99}))
        with pytest.raises(InvalidArgumentError, match="format 99"):
            job.restored(manager)


def test_one_that_is_deleted_while_it_is_restored(tmp_path: Path) -> None:
    """A reader beside a writer: it goes on with what is there now."""
    job = Job()
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as writer:
        job.save(writer, 1)
        reader, restore, tried = ts.CheckpointManager(tmp_path), job.checkpoint.restore, []

        def meanwhile(path: Path) -> None:
            tried.append(path.name)
            if len(tried) == 1:
                job.save(writer, 2)
            restore(path)

        job.checkpoint.restore = meanwhile  # type: ignore[method-assign, assignment]
        assert reader.restore(job.checkpoint) == 2
        assert tried == ["step-00000001", "step-00000002"]
        assert job.weight[0].item() == 2


# -- going back -------------------------------------------------------------------------------------------------------


def test_going_back_to_an_earlier_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            job.save(manager, step)
        with pytest.raises(InvalidArgumentError, match=r"step 2 cannot be saved in .* a checkpoint of step 3"):
            job.save(manager, 2)
        assert job.restored(manager, step=1) == (1, 1.0)
        assert steps(manager) == [1, 2, 3]  # nothing happens before there is something new
        with caplog.at_level(logging.WARNING, "torchstrat.checkpoint"):
            job.save(manager, 2)
        assert "step-00000003 is no part of this training any more" in caplog.text
        assert steps(manager) == [1, 2]
        assert job.restored(manager) == (2, 2.0)
        job.save(manager, 3)
        assert job.restored(manager, step=1) == (1, 1.0)
        job.save(manager, 2)
    assert visible(tmp_path) == [
        "step-00000001",
        "step-00000002",
        "step-00000002.aside",
        "step-00000002.aside-2",
        "step-00000003.aside",
        "step-00000003.aside-2",
    ]


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    job = Job()
    with ts.CheckpointManager(tmp_path) as manager:
        with pytest.raises(InvalidArgumentError, match=r"no checkpoint of step 5 in .*; there are none"):
            job.restored(manager, step=5)
        job.save(manager, 1)
        with pytest.raises(InvalidArgumentError, match=r"no checkpoint of step 5 in .*; there are \[1\]"):
            job.restored(manager, step=5)
        damage(tmp_path, 1)
        with pytest.raises(InvalidArgumentError, match="is damaged"):
            job.restored(manager, step=1)


# -- one writer -------------------------------------------------------------------------------------------------------


def test_two_managers_of_one_process(tmp_path: Path) -> None:
    job, first, second = Job(), ts.CheckpointManager(tmp_path), ts.CheckpointManager(tmp_path)
    job.save(first, 1)
    with pytest.raises(InvalidArgumentError, match=rf"is being written to by process {os.getpid()} on .* two jobs"):
        job.save(second, 2)
    assert second.latest == first.latest
    assert job.restored(second) == (1, 1.0)  # who reads needs no lock
    first.close()
    job.save(second, 2)
    second.close()


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


@pytest.mark.parametrize("how", ["save", "claim"])
def test_a_killed_writer_holds_nothing(how: str, tmp_path: Path) -> None:
    job = Job()
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
            job.save(manager, 2)
        holder.stdin.close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        ts.CheckpointManager(tmp_path) as manager,
        pytest.warns(UserWarning, match="cannot be locked .*No locks available.* will not be noticed"),
    ):
        Job().save(manager, 1)


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (
        ts.CheckpointManager(tmp_path / "file") as manager,
        pytest.raises(InvalidArgumentError, match=r"no checkpoints can be written to .*file"),
    ):
        Job().save(manager, 1)


# -- deletion ---------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before", "half-way"])
def test_killed_while_it_deletes(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    manager = ts.CheckpointManager(tmp_path, max_to_keep=1)
    job.save(manager, 1)
    remove_tree = disk.remove_tree

    def killed(folder: Path) -> None:
        if ".deleted-" not in folder.name:
            return remove_tree(folder)
        if moment == "half-way":
            (folder / ".metadata").unlink()
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(disk, "remove_tree", killed)
        with pytest.raises(KilledError):
            job.save(manager, 2)
    manager.close()
    assert steps(manager) == [2]
    hidden = [name for name in visible(tmp_path) if name.startswith(".")]
    assert [name[:22] for name in hidden] == [".step-00000001.deleted"]
    with ts.CheckpointManager(tmp_path, max_to_keep=1) as after:
        assert job.restored(after) == (2, 2.0)
        job.save(after, 3)
    assert visible(tmp_path) == ["step-00000003"]


def test_what_a_killed_save_has_left_is_swept(tmp_path: Path) -> None:
    job = Job()
    (tmp_path / ".step-00000009.writing-0123456789abcdef").mkdir()
    with ts.CheckpointManager(tmp_path) as manager:
        assert job.restored(manager) == (None, -1.0)
        job.save(manager, 1)
    # Killed between the two renames of a file system without an exchange of names: its only copy is aside.
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.replaced")
    with ts.CheckpointManager(tmp_path) as manager:
        assert manager.latest == tmp_path / "step-00000001"
        assert job.restored(manager) == (1, 1.0)
        job.save(manager, 2)
    assert visible(tmp_path) == ["step-00000001", "step-00000002"]


def test_an_old_one_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, remove_tree = Job(), disk.remove_tree

    def refuse(folder: Path) -> None:
        if ".deleted-" not in folder.name:
            return remove_tree(folder)
        raise PermissionError(1, "Operation not permitted", str(folder))

    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job.save(manager, 1)
        with monkeypatch.context() as patched:
            patched.setattr(disk, "remove_tree", refuse)
            with pytest.warns(UserWarning, match="cannot be deleted: .*not permitted"):
                job.save(manager, 2)
        assert steps(manager) == [2]


# -- arguments --------------------------------------------------------------------------------------------------------


def test_arguments(tmp_path: Path) -> None:
    for bad in (0, -1):
        with pytest.raises(InvalidArgumentError, match="max_to_keep must be at least 1"):
            ts.CheckpointManager(tmp_path, max_to_keep=bad)
        with pytest.raises(InvalidArgumentError, match="keep_every must be at least 1"):
            ts.CheckpointManager(tmp_path, keep_every=bad)
    with pytest.raises(WrongTypeError, match=r"keep_every must be an int or None; got 2\.5"):
        ts.CheckpointManager(tmp_path, keep_every=2.5)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match="needs the path of a directory"):
        ts.CheckpointManager("")
    with pytest.raises(InvalidArgumentError, match="Mount the store"):
        ts.CheckpointManager("s3://bucket/run")
    manager = ts.CheckpointManager(tmp_path)
    with pytest.raises(WrongTypeError, match="step must be an int"):
        manager.save(Job().checkpoint, True)
    with pytest.raises(InvalidArgumentError, match="must not be negative"):
        manager.save(Job().checkpoint, -3)
    manager.close()
    manager.close()
    for call in (lambda: manager.save(Job().checkpoint, 1), lambda: manager.restore(Job().checkpoint), manager.claim):
        with pytest.raises(ContextError, match="CheckpointManager that is closed"):
            call()
    assert os.listdir(tmp_path) == []


def test_modules_and_optimizers(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    one, two = make(), make()
    with ts.CheckpointManager(tmp_path) as manager:
        manager.save(ts.Checkpoint(**one), 12)
        assert manager.restore(ts.Checkpoint(**two)) == 12
    assert torch.equal(one["model"].weight, two["model"].weight)


# -- in the background -------------------------------------------------------------------------------------------------


def test_an_old_one_goes_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, go, writing = Job(), threading.Event(), threading.Event()
    write_manifest = writing_module.write_manifest

    def slow(*args: Any) -> None:
        writing.set()
        assert go.wait(60)
        write_manifest(*args)

    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job.save(manager, 1)
        monkeypatch.setattr(writing_module, "write_manifest", slow)
        handle = job.save(manager, 2, asynchronous=True)
        assert writing.wait(60)
        assert not handle.done()
        assert steps(manager) == [1]
        assert handle.path == tmp_path / "step-00000002"
        job.weight.fill_(17)  # the training goes on; 2 was taken before
        go.set()
        manager.restore(ts.Checkpoint(weight=torch.zeros(3)))  # waits
        assert steps(manager) == [2]
        assert job.restored(manager) == (2, 2.0)
        job.save(manager, 3, asynchronous=True)
    assert visible(tmp_path) == ["step-00000003"]  # close waits, for the deletion too


def test_what_fails_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with ts.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        job.save(manager, 1)
        with monkeypatch.context() as patched:
            patched.setattr(writing_module, "write_manifest", full)
            job.save(manager, 2, asynchronous=True)
            with pytest.raises(InvalidArgumentError, match=r"cannot be written to .*step-00000002: .*No space left"):
                job.save(manager, 3)
            assert steps(manager) == [1]  # neither 2 nor 3, and nothing was deleted for them
            job.save(manager, 3, asynchronous=True)
            with pytest.warns(UserWarning, match=r"step-00000003 was not saved: .*No space left"):
                assert job.restored(manager) == (1, 1.0)
        job.save(manager, 3)
        assert steps(manager) == [3]
        with monkeypatch.context() as patched:
            patched.setattr(writing_module, "write_manifest", full)
            job.save(manager, 4, asynchronous=True)
            with pytest.raises(InvalidArgumentError, match="No space left"):
                manager.close()
    assert visible(tmp_path) == ["step-00000003"]
    assert "step-00000004 was not saved" in caplog.text


def test_a_launcher_that_was_told_marks_what_has_ended(tmp_path: Path) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(1, 1))
    with finished.told_directories() as mark:
        with ts.CheckpointManager(tmp_path / "a") as manager:
            manager.save(checkpoint, 3)
        assert finished.last_step(tmp_path / "a") is None
        with ts.CheckpointManager(tmp_path / "b") as manager:
            manager.save(checkpoint, 4)
            manager.close(finished=True)
        with ts.CheckpointManager(tmp_path / "empty") as manager:
            manager.claim()
        mark()
    assert [finished.last_step(tmp_path / name) for name in ("a", "b", "empty")] == [3, 4, None]
    with ts.CheckpointManager(tmp_path / "a") as manager:
        manager.save(checkpoint, 5)  # nobody wants to know
    assert finished.last_step(tmp_path / "a") is None
