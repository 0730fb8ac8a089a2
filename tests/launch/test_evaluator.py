"""The evaluator as real processes: killed at each moment; started, restarted and ended by ``torchstrat launch``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_launcher import ROLE, Forker, gone, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 240.0  # below that of the test, so that what the processes said is shown


def lines(log_dir: Path) -> list[dict[str, Any]]:
    file = log_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# ---- kill -9 ---------------------------------------------------------------------------------------------------------

MOMENTS = ("restore", "restored", "evaluation", "drawn", "half a line", "line", "noted")

KILLED = textwrap.dedent(
    """
    # Evaluators that are killed: forks of this process, which has imported torch once and has no threads. The first
    # one dies at the given moment of step 2; what it leaves is for a second one, which nothing happens to.
    import os, signal, sys
    from pathlib import Path
    import torch
    import torchstrat as ts
    from torchstrat.checkpoint.finished import mark_finished
    from torchstrat.evaluation import journal

    inputs = torch.ones(4, 3)
    top = Path(sys.argv[1])
    checkpoints = top / "checkpoints"
    for step in (1, 2, 3):
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, step)
        ts.Checkpoint(model=model).save(checkpoints / f"step-{step:08d}")
    mark_finished(checkpoints, 3)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def arrange(moment):
        writes, restore, write, fsync, draw = [], ts.Checkpoint.restore, os.write, os.fsync, journal.Journal._draw
        at_2 = []

        def restored(self, path):
            if path.name == "step-00000002":
                at_2.append(True)
                if moment == "restore":
                    die()
            restore(self, path)
            if at_2 and moment == "restored":
                die()

        def written(descriptor, data):
            if at_2 and moment == "half a line":
                write(descriptor, data[: len(data) // 2])
                die()
            count = write(descriptor, data)
            if at_2 and moment == "line":
                die()
            return count

        def synced(descriptor):
            fsync(descriptor)
            if at_2 and moment == "noted":
                die()

        def drawn(self, evaluation):
            draw(self, evaluation)
            if at_2 and moment == "drawn":
                die()

        ts.Checkpoint.restore, os.write, os.fsync, journal.Journal._draw = restored, written, synced, drawn
        return lambda evaluation, model: die() if at_2 and moment == "evaluation" else None

    def evaluate(log_dir, moment):
        on_evaluation = arrange(moment)
        ts.SidecarEvaluator(
            lambda: torch.nn.Linear(3, 1),
            [inputs],
            checkpoints,
            evaluate_fn=lambda model, batches: {"weight": model.weight.mean()},
            log_dir=log_dir,
            tensorboard=False,
            on_evaluation=on_evaluation,
        ).start()

    for moment in sys.argv[2:]:
        for happens in (moment, None):
            child = os.fork()
            if not child:
                evaluate(top / moment.replace(" ", "_"), happens)
                os._exit(0)
            print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":", flush=True)
    """
)


def test_killed_at_each_moment_and_started_again(tmp_path: Path) -> None:
    """Nothing is evaluated twice, nothing is left out, and no line is broken."""
    finished = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *MOMENTS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    ends = [line.rpartition(":") for line in finished.stdout.splitlines()]
    assert [(moment, int(status)) for moment, _, status in ends] == [
        (moment, status) for moment in MOMENTS for status in (-signal.SIGKILL, 0)
    ], finished.stderr
    for moment in MOMENTS:
        results = [(line["step"], line["metrics"]["weight"]) for line in lines(tmp_path / moment.replace(" ", "_"))]
        assert results == [(1, 1.0), (2, 2.0), (3, 3.0)], moment


# ---- torchstrat launch -----------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    # A program that branches on its role. As the coordinator it does what its argument says.
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    import torchstrat as ts
    from torchstrat.checkpoint.finished import mark_finished

    what, top = sys.argv[1], Path(sys.argv[2])
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    metrics = top / "evaluation" / "metrics.jsonl"

    def save(step):
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, step)
        ts.Checkpoint(model=model).save(top / "checkpoints" / f"step-{step:08d}")

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

    save(1)
    if what == "stubborn":
        wait_for((top / "ready").exists)
        sys.exit(0)
    wait_for(lambda: evaluated() == 1)
    if what == "killed":
        os.kill(int((top / "pids").read_text().split()[0]), signal.SIGKILL)
        save(2)
        wait_for(lambda: evaluated() == 2)
    if what == "closes":
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, 3)
        with ts.CheckpointManager(top / "checkpoints") as manager:
            manager.save(ts.Checkpoint(model=model), 3)
        sys.exit(0)
    if what == "fails":
        wait_for((top / "waits").exists)
        save(3)
        sys.exit(7)
    save(3)
    mark_finished(top / "checkpoints", 3)
    """
)


class Launched:
    """A launcher with one evaluator, and files for what it says."""

    def __init__(self, forker: Forker, folder: Path, what: str, *options: str) -> None:
        self.forker, self.folder = forker, folder
        (folder / "role.py").write_text(ROLE)
        (folder / "script.py").write_text(SCRIPT)
        for name in ("out", "err"):
            (folder / name).touch()
        self.status: int | None = None
        words = ["--ps", "1", "--workers", "1", "--evaluator", *options, str(folder / "script.py"), what, str(folder)]
        self.pid = forker.ask(
            {
                "words": words,
                "role": [sys.executable, str(folder / "role.py")],
                "terminal": None,
                "environment": forker.environment,
                "out": str(folder / "out"),
                "err": str(folder / "err"),
            }
        )

    def said(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    def wait(self) -> int:
        if self.status is None:
            wait_for(lambda: gone(self.pid), "an end of the launcher", DEADLINE_SECONDS)
            self.status = self.forker.ask({"wait for": self.pid})
        return self.status

    def evaluators(self) -> list[int]:
        words = [line.split() for line in (self.folder / "pids").read_text().splitlines()]
        assert all(has_secret == "False" for _, has_secret in words), "it is no member of the cluster"
        return [int(pid) for pid, _ in words]

    def end(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGTERM)
            self.wait()


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    started = Forker()
    yield started
    started.close()


@pytest.fixture
def launch(forker: Forker, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(what: str, *options: str) -> Launched:
        launched.append(Launched(forker, tmp_path, what, *options))
        return launched[-1]

    yield start
    for each in launched:
        each.end()


def assert_evaluated(folder: Path, *steps: int) -> None:
    found = [(line["step"], line["metrics"]["weight"]) for line in lines(folder / "evaluation")]
    assert found == [(step, float(step)) for step in steps]


def test_it_is_started_again_when_it_is_killed_and_ends_with_the_training(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch("killed")
    assert launched.wait() == 0, launched.said()
    assert_evaluated(tmp_path, 1, 2, 3)
    first, second = launched.evaluators()
    assert first != second
    assert gone(first)
    assert gone(second)
    said = launched.said()
    assert f"evaluator 0 (pid {first}) was ended by SIGKILL" in said
    assert said.count("[evaluator 0] evaluating") == 2
    assert "did not end" not in said


@pytest.mark.soak
def test_after_a_training_that_failed_it_evaluates_what_is_left(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """There is no end mark; it is told by SIGTERM."""
    launched = launch("fails")
    assert launched.wait() == 7, launched.said()
    assert_evaluated(tmp_path, 1, 3)
    assert "did not end" not in launched.said()


def test_one_that_has_nothing_more_to_do_is_not_started_again(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch("one", "--evaluator-seconds", "20")
    assert launched.wait() == 0, launched.said()
    assert_evaluated(tmp_path, 1)
    assert len(launched.evaluators()) == 1
    assert "evaluator 0 (pid" not in launched.said()


def test_a_program_that_closes_its_manager_and_ends_well_leaves_the_end_mark(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch("closes", "--evaluator-seconds", str(DEADLINE_SECONDS))
    assert launched.wait() == 0, launched.said()
    assert_evaluated(tmp_path, 1, 3)
    assert json.loads((tmp_path / "checkpoints" / "finished.json").read_text()) == {"step": 3}


@pytest.mark.soak
def test_one_that_does_not_end_is_killed(launch: Callable[..., Launched]) -> None:
    launched = launch("stubborn", "--evaluator-seconds", "0.2")
    assert launched.wait() == 0, launched.said()
    (pid,) = launched.evaluators()
    assert gone(pid)
    assert "evaluator 0 did not end in time; killed (--evaluator-seconds)" in launched.said()


# ---- scripts/train.py ------------------------------------------------------------------------------------------------


@pytest.mark.soak  # the same evaluator as beside the other runs here
def test_a_run_on_parameter_servers_and_its_evaluator(tmp_path: Path) -> None:
    """Every checkpoint that the run keeps is evaluated once, by the same command in another role."""
    for module in ("hydra", "sklearn"):
        pytest.importorskip(module)
    settings = ["strategy=parameter_server", "name=beside", "epochs=2", "checkpoint.every_steps=10", "curves=false"]
    launcher = [sys.executable, "-m", "torchstrat.launch", "--ps", "2", "--workers", "2", "--evaluator"]
    finished = subprocess.run(
        [*launcher, str(ROOT / "scripts" / "train.py"), *settings, "tensorboard=false", "hydra.run.dir=run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
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
