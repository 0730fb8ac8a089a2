"""The evaluator as real processes: killed at each moment; started, restarted and ended by ``torchstrat launch``."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.support.launchers import Launched, launching  # noqa: F401
from tests.support.programs import LAUNCH, SECONDS, TRAIN, fork, gone, succeed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def lines(log_dir: Path) -> list[dict[str, Any]]:
    file = log_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def assert_evaluated(log_dir: Path, *steps: int) -> None:
    found = [(line["step"], line["metrics"]["weight"]) for line in lines(log_dir)]
    assert found == [(step, float(step)) for step in steps]


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


def evaluate(checkpoints: Path, log_dir: Path, moment: str) -> None:
    """In a fork that may die at that moment of step 2."""
    restore, write, fsync = ts.Checkpoint.restore, os.write, os.fsync
    at_2: list[bool] = []

    def happens(now: str) -> None:
        if at_2 and now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def restored(self: ts.Checkpoint, path: Path) -> None:
        at_2.extend([True] * (path.name == "step-00000002"))
        happens("restore")
        restore(self, path)
        happens("restored")

    def written(descriptor: int, data: bytes) -> int:
        happens("no line")
        if at_2 and moment == "half a line":
            write(descriptor, data[: len(data) // 2])
        happens("half a line")
        count = write(descriptor, data)
        happens("line")
        return count

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        happens("noted")

    ts.Checkpoint.restore, os.write, os.fsync = restored, written, synced  # type: ignore[method-assign,assignment]
    ts.SidecarEvaluator(
        lambda: torch.nn.Linear(3, 1),
        [torch.ones(4, 3)],
        checkpoints,
        evaluate_fn=lambda model, batches: {"weight": model.weight.mean()},
        log_dir=log_dir,
        tensorboard=False,
        on_evaluation=lambda evaluation, model: happens("evaluation"),
    ).start()


@pytest.mark.parametrize("moment", ["restore", "restored", "no line", "half a line", "line", "noted", "evaluation"])
def test_killed_at_each_moment_and_started_again(tmp_path: Path, moment: str) -> None:
    """Nothing is evaluated twice, nothing is left out, and no line is broken."""
    model = torch.nn.Linear(3, 1)
    with ts.CheckpointManager(tmp_path / "checkpoints") as manager:
        for step in (1, 2, 3):
            torch.nn.init.constant_(model.weight, step)
            manager.save(ts.Checkpoint(model=model), step)
        manager.close(finished=True)
    for happens, status in ((moment, -signal.SIGKILL), ("nothing", 0)):
        process = fork(evaluate, tmp_path / "checkpoints", tmp_path / "log", happens)
        process.join(SECONDS)
        assert process.exitcode == status
    assert_evaluated(tmp_path / "log", 1, 2, 3)


# ---- torchstrat launch -----------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    # A program that branches on its role. As the coordinator it does what its argument says.
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    import torchstrat as ts

    what, top = sys.argv[1], Path(sys.argv[2])
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    metrics = top / "evaluation" / "metrics.jsonl"

    def save(step):
        torch.nn.init.constant_(model.weight, step)
        manager.save(ts.Checkpoint(model=model), step)

    def wait_for(happens):
        while not happens():
            time.sleep(0.02)

    evaluated = lambda: len(metrics.read_text().splitlines()) if metrics.exists() else 0

    class Clock:
        # Looks again and again; or, so that only SIGTERM can make it do so, once.
        now = staticmethod(time.monotonic)

        def wait(self, seconds, unless):
            if what == "fails" and evaluated():
                (top / "waits").touch()
                seconds = 3600
            unless.wait(seconds)

    if task == {"type": "evaluator", "index": 0}:
        (top / "pids").open("a").write(f"{os.getpid()} {'TORCHSTRAT_SECRET' in os.environ}\\n")
        if what == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (top / "ready").touch()
            while True:
                time.sleep(1)
        print("evaluating")
        ts.SidecarEvaluator(
            lambda: torch.nn.Linear(3, 1),
            [torch.ones(4, 3)],
            top / "checkpoints",
            evaluate_fn=lambda model, batches: {"weight": model.weight.mean()},
            log_dir=top / "evaluation",
            tensorboard=False,
            poll_seconds=0.05,
            clock=Clock(),
            max_evaluations=1 if what == "one" else None,
        ).start()
        sys.exit(0)

    model, manager = torch.nn.Linear(3, 1), ts.CheckpointManager(top / "checkpoints")
    save(1)
    if what == "stubborn":
        wait_for((top / "ready").exists)
        sys.exit(0)
    wait_for(lambda: evaluated() == 1)
    if what == "killed":
        os.kill(int((top / "pids").read_text().split()[0]), signal.SIGKILL)
        save(2)
        wait_for(lambda: evaluated() == 2)
    if what == "fails":
        wait_for((top / "waits").exists)
    save(3)
    if what == "fails":
        sys.exit(7)
    manager.close(finished=what == "one")
    """
)


@pytest.fixture
def launch(launching: Callable[..., Launched]) -> Callable[..., Launched]:  # noqa: F811
    return lambda what, *options: launching(SCRIPT, what, "--workers", "1", "--evaluator", *options)


def evaluators(launched: Launched) -> list[int]:
    words = [line.split() for line in (launched.folder / "pids").read_text().splitlines()]
    assert all(has_secret == "False" for _, has_secret in words), "it is no member of the cluster"
    return [int(pid) for pid, _ in words]


def test_it_is_started_again_when_it_is_killed_and_ends_with_the_training(launch: Any, tmp_path: Path) -> None:
    """The program closes its manager without an end mark, and ends well: then the launcher leaves one."""
    launched = launch("killed", "--evaluator-seconds", str(SECONDS))
    launched.ends_with(0)
    assert_evaluated(tmp_path / "evaluation", 1, 2, 3)
    first, second = evaluators(launched)
    assert first != second
    assert gone(first)
    assert gone(second)
    assert f"evaluator 0 (pid {first}) was ended by SIGKILL" in launched.err
    assert launched.out.count("[evaluator 0] evaluating") == 2
    assert json.loads((tmp_path / "checkpoints" / "finished.json").read_text()) == {"step": 3}
    assert "did not end" not in launched.err


@pytest.mark.soak
def test_after_a_training_that_failed_it_evaluates_what_is_left(launch: Any, tmp_path: Path) -> None:
    """There is no end mark; it is told by SIGTERM."""
    launched = launch("fails")
    launched.ends_with(7)
    assert_evaluated(tmp_path / "evaluation", 1, 3)
    assert "did not end" not in launched.err


@pytest.mark.soak  # another two interpreters, for an end like that of the one above
def test_one_that_has_nothing_more_to_do_is_not_started_again(launch: Any, tmp_path: Path) -> None:
    launched = launch("one", "--evaluator-seconds", "20")
    launched.ends_with(0)
    assert_evaluated(tmp_path / "evaluation", 1)
    assert len(evaluators(launched)) == 1
    assert "evaluator 0 (pid" not in launched.err


@pytest.mark.soak
def test_one_that_does_not_end_is_killed(launch: Any) -> None:
    launched = launch("stubborn", "--evaluator-seconds", "0.2")
    launched.ends_with(0)
    (pid,) = evaluators(launched)
    assert gone(pid)
    assert "evaluator 0 did not end in time; killed (--evaluator-seconds)" in launched.err


# ---- scripts/train.py ------------------------------------------------------------------------------------------------


@pytest.mark.soak  # the same evaluator as beside the other runs here
def test_a_run_on_parameter_servers_and_its_evaluator(tmp_path: Path) -> None:
    """Every checkpoint that the run keeps is evaluated once, by the same command in another role."""
    for module in ("hydra", "sklearn"):
        pytest.importorskip(module)
    settings = ["strategy=parameter_server", "name=beside", "epochs=2", "checkpoint.every_steps=10", "curves=false"]
    command = [*LAUNCH, "--ps=2", "--workers=2", "--evaluator", TRAIN, *settings]
    finished = succeed(*command, "tensorboard=false", "hydra.run.dir=run", cwd=tmp_path)
    checkpoints = tmp_path / "outputs" / "beside" / "checkpoints"
    results = lines(checkpoints / "evaluation")
    kept = sorted(folder.name for folder in checkpoints.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (10, 20, 30, 40, 46)]
    evaluated = [line["checkpoint"] for line in results]
    assert evaluated == sorted(set(evaluated)), "once each, in order"
    assert set(kept) <= set(evaluated), "also one that has been deleted since may have been evaluated"
    own = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert own["event"] == "result"
    assert results[-1]["metrics"] == pytest.approx({"loss": own["loss"], "accuracy": own["accuracy"]}, rel=1e-5)
    assert "evaluator 0 did not end" not in finished.stderr
