"""Runs that end before their end, and go on: real launchers, real signals, kill -9."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.test_train import DEADLINE_SECONDS, TRAIN, check, environment, start
from torchstrat.experiments.metrics_file import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, and processes of /proc")

INTERRUPTED = Path(__file__).with_name("interrupted.py")
QUIET = ("tensorboard=false", "curves=false", "progress=off")
COMMON = ("experiment=digits_convnet", "epochs=2", "cluster.accelerator=cpu", *QUIET)
STEPS_PER_EPOCH = 23
STEPS = 2 * STEPS_PER_EPOCH


def story(run: Path) -> list[dict[str, Any]]:
    """All that a run recorded, but for what clocks said, and on how many processes it was at its end."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in record.items() if "second" not in k and k != "processes"} for record in records]


def assert_the_same_run(one: Path, other: Path) -> None:
    assert story(one) == story(other)
    first, second = (torch.load(run / "parameters.pt", weights_only=True) for run in (one, other))
    for name, value in second.items():
        assert torch.equal(first[name], value), name


def the_run(folder: Path) -> Path:
    """The folder of the last of a name's runs, each of which made its own."""
    return sorted(folder.glob("outputs/digits_convnet/20*/"))[-1]


# ---- torchrun --------------------------------------------------------------------------------------------------------


def torchrun(
    folder: Path, *overrides: str, restarts: int = 0, happens: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Two processes, one replica each. ``happens``: see interrupted.py."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [str(TRAIN)]
    if happens is not None:
        program = [str(INTERRUPTED), json.dumps({**happens, "once": str(folder / "happened")})]
    return start([*launcher, f"--max-restarts={restarts}", *program, "strategy=mirrored", *COMMON, *overrides], folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    check(torchrun(folder, "hydra.run.dir=run"))
    return folder / "run"


def test_torchrun_restarts_who_asks_for_it(tmp_path: Path, undisturbed: Path) -> None:
    """One rank of two is told to end. Both save, and both are started again; nothing was lost."""
    happens = {"step": 30, "rank": 1, "event": "SIGTERM"}
    finished = torchrun(tmp_path, "resume=auto", restarts=1, happens=happens)
    check(finished)
    assert "told to end; saved after step 31 in " in finished.stderr, "the step after, as agreed meanwhile"
    assert "goes on after step 31, from " in finished.stderr
    assert_the_same_run(the_run(tmp_path), undisturbed)


@pytest.mark.soak  # test_readme.py kills the same way, and torchrun's restart is the same as after status 75 below
def test_torchrun_restarts_after_kill_9(tmp_path: Path, undisturbed: Path) -> None:
    happens = {"step": 30, "rank": 1, "event": "SIGKILL"}
    every = ("checkpoint.every_steps=8", "checkpoint.max_to_keep=2")
    finished = torchrun(tmp_path, "resume=auto", *every, restarts=1, happens=happens)
    check(finished)
    assert "goes on after step 24, from " in finished.stderr
    assert_the_same_run(the_run(tmp_path), undisturbed)


@pytest.mark.soak
def test_torchrun_itself_is_told_to_end(tmp_path: Path, undisturbed: Path) -> None:
    """As a scheduler tells it. It hands the signal on, and waits for the save; the next job goes on, here on other
    processes than before: in one."""
    happens = {"step": 12, "rank": 0, "event": "parent SIGTERM"}
    loading = "data.workers=1"  # their processes get the signal too
    ended = torchrun(tmp_path, "resume=auto", loading, "hydra.run.dir=first", restarts=5, happens=happens)
    assert ended.returncode != 0
    saved = re.search(r"told to end; saved after step (\d+) in ", ended.stderr)
    assert saved, ended.stderr
    assert int(saved[1]) in (12, 13)
    assert "goes on" not in ended.stderr, "who is told to end does not start anything again"
    again = [sys.executable, str(TRAIN), "strategy=mirrored", "strategy.replicas=2", *COMMON]
    finished = start([*again, "resume=auto", "hydra.run.dir=second"], tmp_path)
    check(finished)
    assert f"goes on after step {saved[1]}, from " in finished.stderr
    second = tmp_path / "second"
    for one, other in zip(read_metrics(second, "step"), read_metrics(undisturbed, "step"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4), one["step"]


# ---- parameter servers -----------------------------------------------------------------------------------------------


SERVERS = ("strategy=parameter_server", "optimizer.momentum=0", "optimizer.lr=0.2", *COMMON)


def launch(folder: Path, *overrides: str, ps: int, happens: dict[str, Any] | None = None) -> list[str]:
    """``torchstrat launch`` with one worker, so that there is one order of the steps."""
    program = [str(TRAIN)]
    if happens is not None:
        program = [str(INTERRUPTED), json.dumps({"rank": 0, **happens, "once": str(folder / "happened")})]
    launcher = [sys.executable, "-m", "torchstrat.launch", f"--ps={ps}", "--workers=1"]
    return [*launcher, *program, *SERVERS, *overrides]


@pytest.fixture(scope="module")
def undisturbed_on_servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed_on_servers")
    check(start(launch(folder, "hydra.run.dir=run", ps=1), folder))
    return folder / "run"


@pytest.mark.soak
def test_the_launcher_starts_a_coordinator_again_that_asks_for_it(tmp_path: Path, undisturbed_on_servers: Path) -> None:
    """On the same servers and workers, which have not ended."""
    happens = {"step": 30, "event": "SIGTERM"}
    finished = start(launch(tmp_path, "resume=auto", ps=2, happens=happens), tmp_path)
    check(finished)
    assert finished.stderr.count("[torchstrat] SCRIPT exited with status 75: it asks to be run again\n") == 1
    assert "; restarted" not in finished.stderr
    assert_the_same_run(the_run(tmp_path), undisturbed_on_servers)


@pytest.mark.soak  # torchrun hands the same signal on above; servers keep and restore in tests/multiprocess
def test_the_launcher_is_told_to_end_and_the_run_goes_on_on_other_servers(
    tmp_path: Path, undisturbed_on_servers: Path
) -> None:
    """Its servers and workers live until the coordinator has saved what they hold."""
    process = subprocess.Popen(
        launch(tmp_path, "resume=auto", "hydra.run.dir=first", "epochs=100", ps=2),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for_step(tmp_path / "first", STEPS_PER_EPOCH + 1, process)
        for _ in range(2):  # a second one breaks nothing
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, said
    assert "run again" not in said
    saved = re.search(r"told to end; saved after step (\d+) in ", said)
    assert saved, said
    epochs = int(saved[1]) // STEPS_PER_EPOCH + 2
    finished = start(launch(tmp_path, "resume=auto", "hydra.run.dir=second", f"epochs={epochs}", ps=3), tmp_path)
    check(finished)
    assert f"goes on after step {saved[1]}, from " in finished.stderr
    steps = read_metrics(tmp_path / "second", "step")
    assert [step["step"] for step in steps] == list(range(1, epochs * STEPS_PER_EPOCH + 1))
    for one, other in zip(steps[:STEPS], read_metrics(undisturbed_on_servers, "step"), strict=True):
        assert one["loss"] == other["loss"], one["step"]
    assert all(record["finished"] == record["rows"] for record in read_metrics(tmp_path / "second", "ledger"))


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(read_metrics(run, "step")) >= step:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0]}")
