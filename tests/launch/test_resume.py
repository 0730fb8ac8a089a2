"""Runs that end before their end, and go on: real launchers, real signals, kill -9."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import (
    LAUNCH,
    SECONDS,
    TORCHRUN,
    TRAIN,
    checked,
    ranks,
    read_metrics,
    run,
    started,
    succeed,
    trained,
    wait_for,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, and processes of /proc")

INTERRUPTED = Path(__file__).with_name("interrupted.py")
QUIET = ("tensorboard=false", "curves=false", "progress=off")
COMMON = ("experiment=digits_convnet", "epochs=2", "cluster.accelerator=cpu", *QUIET)
MIRRORED = ("strategy=mirrored", *COMMON)
SERVERS = ("strategy=parameter_server", "optimizer.momentum=0", "optimizer.lr=0.2", *COMMON)
STEPS_PER_EPOCH = 23
STEPS = 2 * STEPS_PER_EPOCH


def program(folder: Path, happens: dict[str, Any] | None) -> list[str]:
    """``happens``: see interrupted.py."""
    return (
        [str(INTERRUPTED), json.dumps({"rank": 0, **happens, "once": str(folder / "happened")})]
        if happens
        else [str(TRAIN)]
    )


def torchrun(folder: Path, *overrides: str, restarts: int, happens: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Two processes, one replica each."""
    launcher = [*TORCHRUN, "--nproc-per-node=2", f"--max-restarts={restarts}"]
    return run(*launcher, *program(folder, happens), *MIRRORED, "resume=auto", *overrides, cwd=folder)


def launch(folder: Path, *overrides: str, ps: int, happens: dict[str, Any] | None = None) -> list[str]:
    """``torchstrat launch`` with one worker, so that there is one order of the steps."""
    return [*LAUNCH, f"--ps={ps}", "--workers=1", *program(folder, happens), *SERVERS, *overrides]


def story(run: Path) -> list[dict[str, Any]]:
    """All that a run recorded, but for what clocks said, and on how many processes it was at its end."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in record.items() if "second" not in k and k != "processes"} for record in records]


def assert_went_on_to_the_same(folder: Path, undisturbed: Path) -> None:
    """The last of a name's runs, each of which made its own folder."""
    last = sorted(folder.glob("outputs/digits_convnet/20*/"))[-1]
    assert story(last) == story(undisturbed)
    first, second = (torch.load(run / "parameters.pt", weights_only=True) for run in (last, undisturbed))
    for name, value in second.items():
        assert torch.equal(first[name], value), name


def saved_step(said: str) -> int:
    saved = re.search(r"told to end; saved after step (\d+) in ", said)
    assert saved, said
    return int(saved[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    for rank in ranks(folder, *MIRRORED, "hydra.run.dir=run"):
        checked(rank)
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed_on_servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed_on_servers")
    succeed(*launch(folder, "hydra.run.dir=run", ps=1), cwd=folder)
    return folder / "run"


HAPPENS = {"step": 30, "rank": 1, "event": "SIGTERM"}


def test_ranks_that_are_started_again_after_one_was_told_to_end(tmp_path: Path, undisturbed: Path) -> None:
    """Both save, and end in the way that asks for it; nothing was lost."""
    _, plan = program(tmp_path, HAPPENS)
    first, second = (ranks(tmp_path, plan, *MIRRORED, "resume=auto", program=INTERRUPTED) for _ in range(2))
    assert [rank.returncode for rank in first] == [75, 75], [rank.stderr for rank in first]
    assert saved_step(first[0].stderr) == 31, "the step after, as agreed meanwhile"
    assert "goes on after step 31, from " in checked(second[0]).stderr
    checked(second[1])
    assert_went_on_to_the_same(tmp_path, undisturbed)


@pytest.mark.soak  # the same without torchrun, which starts again whatever ends with another status than 0
def test_torchrun_restarts_who_asks_for_it(tmp_path: Path, undisturbed: Path) -> None:
    finished = checked(torchrun(tmp_path, restarts=1, happens=HAPPENS))
    assert saved_step(finished.stderr) == 31
    assert "goes on after step 31, from " in finished.stderr
    assert_went_on_to_the_same(tmp_path, undisturbed)


@pytest.mark.soak  # test_documents.py kills the same way, and torchrun's restart is the same as after status 75 above
def test_torchrun_restarts_after_kill_9(tmp_path: Path, undisturbed: Path) -> None:
    every = ("checkpoint.every_steps=8", "checkpoint.max_to_keep=2")
    finished = checked(torchrun(tmp_path, *every, restarts=1, happens={"step": 30, "rank": 1, "event": "SIGKILL"}))
    assert "goes on after step 24, from " in finished.stderr
    assert_went_on_to_the_same(tmp_path, undisturbed)


@pytest.mark.soak
def test_torchrun_itself_is_told_to_end(tmp_path: Path, undisturbed: Path) -> None:
    """As a scheduler tells it. It hands the signal on, and waits for the save; the next job goes on, here on other
    processes than before: in one."""
    happens = {"step": 12, "event": "parent SIGTERM"}
    loading = "data.workers=1"  # their processes get the signal too
    ended = torchrun(tmp_path, loading, "hydra.run.dir=first", restarts=5, happens=happens)
    assert ended.returncode != 0
    saved = saved_step(ended.stderr)
    assert saved in (12, 13)
    assert "goes on" not in ended.stderr, "who is told to end does not start anything again"
    finished = trained(tmp_path, *MIRRORED, "strategy.replicas=2", "resume=auto", "hydra.run.dir=second")
    assert f"goes on after step {saved}, from " in finished.stderr
    both = (read_metrics(run, "step") for run in (tmp_path / "second", undisturbed))
    for one, other in zip(*both, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4), one["step"]


@pytest.mark.soak
def test_the_launcher_starts_a_coordinator_again_that_asks_for_it(tmp_path: Path, undisturbed_on_servers: Path) -> None:
    """On the same servers and workers, which have not ended."""
    happens = {"step": 30, "event": "SIGTERM"}
    finished = succeed(*launch(tmp_path, "resume=auto", ps=2, happens=happens), cwd=tmp_path)
    assert finished.stderr.count("[torchstrat] SCRIPT exited with status 75: it asks to be run again\n") == 1
    assert "; restarted" not in finished.stderr
    assert_went_on_to_the_same(tmp_path, undisturbed_on_servers)


@pytest.mark.soak  # torchrun hands the same signal on above; servers keep and restore in tests/multiprocess
def test_the_launcher_is_told_to_end_and_the_run_goes_on_on_other_servers(
    tmp_path: Path, undisturbed_on_servers: Path
) -> None:
    """Its servers and workers live until the coordinator has saved what they hold."""
    first, second = tmp_path / "first", tmp_path / "second"
    with started(*launch(tmp_path, "resume=auto", "hydra.run.dir=first", "epochs=100", ps=2), cwd=tmp_path) as process:
        wait_for(lambda: len(read_metrics(first, "step")) > STEPS_PER_EPOCH or process.poll() is not None, "a step")
        for _ in range(2):  # a second one breaks nothing
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, said
    assert "run again" not in said
    saved = saved_step(said)
    epochs = saved // STEPS_PER_EPOCH + 2
    command = launch(tmp_path, "resume=auto", "hydra.run.dir=second", f"epochs={epochs}", ps=3)
    assert f"goes on after step {saved}, from " in succeed(*command, cwd=tmp_path).stderr
    steps = read_metrics(second, "step")
    assert [step["step"] for step in steps] == list(range(1, epochs * STEPS_PER_EPOCH + 1))
    for one, other in zip(steps[:STEPS], read_metrics(undisturbed_on_servers, "step"), strict=True):
        assert one["loss"] == other["loss"], one["step"]
    assert all(record["finished"] == record["rows"] for record in read_metrics(second, "ledger"))
