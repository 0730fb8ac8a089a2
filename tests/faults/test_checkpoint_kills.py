"""A save that ends half-way leaves the old checkpoint or the new one, whatever ended it, and wherever.

Processes are killed before each change they make. A lost power supply is played on a disk that forgets what was not
synced. Each check is seen to fail where what it is about is taken away.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import disk_log
from tests.faults.disk_log import Change, ForgetfulDisk, Tree, changes_of, killed_before
from tests.faults.forked import in_fork
from tests.support.checkpoints import Held
from torchstrat import Checkpoint
from torchstrat.checkpoint import files
from torchstrat.errors import InvalidArgumentError

NAME = "saved"
OLD, NEW, NONE = "old", "new", "none"
MINUTE = 60.0

Around = Callable[[], AbstractContextManager[Any]]


def state(which: str) -> tuple[torch.Tensor, Held]:
    fill = {OLD: 1.0, NEW: 2.0, NONE: 0.0}[which]
    return torch.full((64, 20), fill), Held({"which": which, "more": torch.full((3,), fill)})


def save(path: Path, which: str, *around: Around) -> None:
    table, held = state(which)
    with contextlib.ExitStack() as stack:
        for one in around:
            stack.enter_context(one())
        Checkpoint(table=table, held=held).save(path)


def what_is_at(path: Path) -> str:
    """Which of the two states `restore` gives; anything else is an error."""
    table, held = state(NONE)
    try:
        Checkpoint(table=table, held=held).restore(path)
    except InvalidArgumentError as error:
        if "there is no checkpoint at" in str(error):
            return NONE
        raise
    which = str(held.state["which"])
    wanted_table, wanted = state(which)
    assert torch.equal(table, wanted_table)
    assert torch.equal(held.state["more"], wanted.state["more"])
    return which


def outcome_of(folder: Path) -> str:
    """What `restore` says of what is in a folder."""
    try:
        return what_is_at(folder / NAME)
    except InvalidArgumentError as error:
        return f"refused: {error}"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of many blocks, each of which is written in several parts."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(files, "STEP_BYTES", 1024)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    save(folder / NAME, OLD)
    return folder


SETTINGS: dict[str, tuple[bool, Around]] = {
    "first": (False, contextlib.nullcontext),
    "exchange": (True, contextlib.nullcontext),
    "two renames": (True, disk_log.no_exchange),
}
"""Whether there is an old one, and how the new one takes its place."""


def prepared(setting: str, old: Path, folder: Path) -> Around:
    with_old, around = SETTINGS[setting]
    if with_old:
        shutil.copytree(old, folder)
    else:
        folder.mkdir()
    return around


# -- killed -----------------------------------------------------------------------------------------------------------


def test_killed_before_every_change(old: Path, tmp_path: Path) -> None:
    killed: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for setting, (has_old, _) in SETTINGS.items():
        around = prepared(setting, old, tmp_path / setting)
        changes = changes_of(partial(save, tmp_path / setting / NAME, NEW, around))
        for number, half in moments(changes, setting):
            folder = tmp_path / f"{setting} {number} {half}"
            prepared(setting, old, folder)
            save_and_die(folder / NAME, number, half, around)
            outcome = what_is_at(folder / NAME)
            assert outcome in (OLD if has_old else NONE, NEW), changes[number]
            if changes[number].step != "shard write":  # there, one is like the other
                save(folder / NAME, NEW)
                assert [entry.name for entry in folder.iterdir()] == [NAME], "what is left of the killed one"
                assert what_is_at(folder / NAME) == NEW
            shutil.rmtree(folder)
            killed[step_of(changes, number)] += 1
            found[outcome] += 1
    assert sum(killed.values()) >= 50
    for step in ("shard write", "fsync", "manifest", "rename", "deletion"):
        assert killed[step] >= 5, killed
    assert set(found) == {OLD, NEW, NONE}


def save_and_die(path: Path, number: int, half: bool, around: Around) -> None:
    died = in_fork(MINUTE, lambda: False, killed_before, number, half, partial(save, path, NEW, around))
    assert died.how == "SIGKILL", died


def moments(changes: list[Change], setting: str) -> list[tuple[int, bool]]:
    """(number of the change, whether half of it is made): each one from the first write on, but for most of the writes
    that are like others."""
    first = next(number for number, change in enumerate(changes) if change.kind == "write")
    found = []
    for number, change in list(enumerate(changes))[first:]:
        if change.step == "shard write" and (setting != "exchange" or number % 4):
            continue
        found += [(number, False)] + ([(number, True)] if change.kind == "write" else [])
    return found


def step_of(changes: list[Change], number: int) -> str:
    """What a kill before this change is in the middle of: right after a rename nothing has made it lasting yet."""
    return "rename" if changes[number - 1].step == "rename" else changes[number].step


def test_control_without_the_rename_a_kill_leaves_half(old: Path, tmp_path: Path) -> None:
    outcomes = []
    for number in range(0, 20, 4):
        folder = tmp_path / str(number)
        shutil.copytree(old, folder)
        save_and_die(folder / NAME, number, False, disk_log.no_rename)
        outcomes.append(outcome_of(folder))
    assert any(outcome not in (OLD, NEW) for outcome in outcomes), outcomes


# -- the power fails --------------------------------------------------------------------------------------------------


def problems_after_power_failures(setting: str, old: Path, folder: Path, around: Around) -> list[str]:
    """Play a save, and let the power fail before each of its changes and after the last: what is wrong then?"""
    of_setting = prepared(setting, old, folder)
    disk = ForgetfulDisk(folder)
    changes = changes_of(partial(save, folder / NAME, NEW, of_setting, around))
    problems = []
    known: dict[Any, str] = {}
    for number in range(len(changes) + 1):
        for tree in disk.after_power_failures({NAME, f".{NAME}.replaced"}):
            key = frozen(tree)
            if key not in known:
                shutil.rmtree(folder.parent / "found", ignore_errors=True)
                written(tree, folder.parent / "found")
                known[key] = outcome_of(folder.parent / "found")
            outcome = known[key]
            allowed = {NEW} if number == len(changes) else {OLD if SETTINGS[setting][0] else NONE, NEW}
            if outcome not in allowed:
                where = f"before {changes[number]}" if number < len(changes) else "after the save has returned"
                problems.append(f"{where}: {outcome}")
        if number < len(changes):
            disk.apply(changes[number])
    return problems


def frozen(tree: Tree) -> Any:
    return tuple((name, found if isinstance(found, bytes) else frozen(found)) for name, found in sorted(tree.items()))


def written(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, found in tree.items():
        if isinstance(found, bytes):
            (folder / name).write_bytes(found)
        else:
            written(found, folder / name)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_power_failure_leaves_the_old_or_the_new_one(setting: str, old: Path, tmp_path: Path) -> None:
    assert problems_after_power_failures(setting, old, tmp_path / "played", contextlib.nullcontext) == []


CONTROLS: dict[str, Around] = {
    "names in the new folder are not synced": lambda: disk_log.no_sync_folder(lambda path: path.name != "played"),
    "the new folder's name is not synced": lambda: disk_log.no_sync_folder(lambda path: path.name == "played"),
    "files are not synced": disk_log.no_sync_of_files,
    "there is no rename": disk_log.no_rename,
}


@pytest.mark.parametrize("setting", ["exchange", "two renames"])
@pytest.mark.parametrize("control", CONTROLS)
def test_controls_the_check_sees_what_is_missing(control: str, setting: str, old: Path, tmp_path: Path) -> None:
    assert problems_after_power_failures(setting, old, tmp_path / "played", CONTROLS[control]) != []


@pytest.mark.parametrize("top_is_synced", [True, False])
def test_new_folders_above_it_last_as_well(top_is_synced: bool, tmp_path: Path) -> None:
    top = tmp_path / "played"
    top.mkdir()
    disk = ForgetfulDisk(top)
    around = contextlib.nullcontext if top_is_synced else partial(disk_log.no_sync_folder, lambda path: path == top)
    for change in changes_of(partial(save, top / "runs" / "today" / NAME, NEW, around)):
        disk.apply(change)
    outcomes = set()
    for number, tree in enumerate(disk.after_power_failures({"runs"})):
        written(tree, tmp_path / str(number))
        outcomes.add(outcome_of(tmp_path / str(number) / "runs" / "today"))
    assert outcomes == ({NEW} if top_is_synced else {NEW, NONE})
