"""scripts/examples/clicks from the command line, synchronous and on parameter servers: a project of one's own."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from tests.launch import test_train
from tests.launch.test_train import ROOT, TRAIN, check, distance
from torchstrat.experiments.metrics_file import read_metrics

PROJECT = ROOT / "scripts" / "examples" / "clicks"
EXPERIMENT = ["--config-dir", str(PROJECT / "conf"), "experiment=clicks"]
CLICK_RATE = 0.3
TRIVIAL_LOSS = -(CLICK_RATE * math.log(CLICK_RATE) + (1 - CLICK_RATE) * math.log(1 - CLICK_RATE))
"""Who always predicts how often is clicked; of the held-out rows, 0.27 to 0.3."""


@pytest.fixture(autouse=True, scope="module")
def importable():
    """As in the project's own folder; runs are in temporary ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])))
        yield


def train(folder, *overrides):
    return test_train.train(folder, *EXPERIMENT[:2], *overrides, EXPERIMENT[2])


def result_of(run: Path) -> dict:
    (result,) = read_metrics(run, "result")
    return result


@pytest.fixture(scope="module")
def in_process(tmp_path_factory) -> Path:
    """Twenty steps under each synchronous strategy."""
    folder = tmp_path_factory.mktemp("clicks")
    check(train(folder, "-m", "strategy=one_device,mirrored,central_storage", "debug=steps", "hydra.sweep.dir=sweep"))
    return folder


def test_a_run_learns(in_process):
    finished = train(in_process, "hydra.run.dir=run")
    check(finished)
    result = result_of(in_process / "run")
    assert result["loss"] < TRIVIAL_LOSS - 0.02
    assert (result["data"], result["accuracy"]) == ("synthetic_clicks", None), "a loss of logits knows no classes"
    assert (in_process / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("job", ["1-mirrored", "2-central_storage"])
def test_two_replicas_equal_one_device(in_process, job):
    """Sparse gradients of both tables included, and Adagrad's state by row."""
    assert distance(in_process / "sweep" / job, in_process / "sweep" / "0-one_device") <= 1e-5


MISTAKES = {
    "bad.tsv, line 1: 2 field(s), and 40 with tabs between them": ["data=click_log", "data.path=bad.tsv"],
    "No such file or directory: 'absent.tsv'": ["data=click_log", "data.path=absent.tsv"],
    "needs input_shape": ["model=mlp"],
    "training rows for 9 workers": ["data.rows=5", "strategy=parameter_server", "strategy.workers=9"],
}


def test_a_mistake_is_one_line(tmp_path):
    (tmp_path / "bad.tsv").write_text("click\tuser\n")
    ended = test_train.in_forks(tmp_path, [[*EXPERIMENT, *overrides] for overrides in MISTAKES.values()])
    for message, (status, _, complained) in zip(MISTAKES, ended, strict=True):
        assert status == 1
        (line,) = complained.splitlines()  # above all: no cluster was started
        assert line.startswith("error: ")
        assert message in line


class TestParameterServer:
    @pytest.mark.soak  # so does the run in which a worker is killed
    def test_it_starts_a_cluster_by_itself_and_learns_what_one_device_learns(self, in_process):
        settings = ["strategy=parameter_server", "hydra.run.dir=servers"]
        finished = train(in_process, *settings)
        check(finished)
        result = result_of(in_process / "servers")
        assert (result["processes"], result["replicas"]) == (5, 2)
        assert result["loss"] < TRIVIAL_LOSS - 0.02
        assert "no cluster in the environment: starting 2 workers, 2 servers on this machine" in finished.stderr
        assert "parameter_server (2 workers, 2 servers): loss" in finished.stderr

    def test_one_worker_equals_one_device(self, in_process):
        """Both tables are cut over the servers, and travel by rows."""
        cut = ["strategy=parameter_server", "strategy.workers=1", "strategy.min_shard_bytes=1024"]
        check(train(in_process, "debug=steps", *cut, "hydra.run.dir=one_worker"))
        assert distance(in_process / "one_worker", in_process / "sweep" / "0-one_device") <= 1e-6

    def test_a_killed_worker_is_replaced(self, in_process):
        command = [sys.executable, str(TRAIN), *EXPERIMENT, "strategy=parameter_server", "epochs=4"]
        run = subprocess.Popen(
            [*command, "hydra.run.dir=killed"],
            cwd=in_process,
            env=test_train.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        said = []
        try:
            for line in run.stderr:
                said.append(line)
                if "epoch   1" in line:
                    # One that a busy machine has kept from answering was replaced before.
                    pids = re.findall(r"worker 0 listens on .*\(pid (\d+)\)", "".join(said))
                    os.kill(int(pids[-1]), signal.SIGKILL)
        finally:
            if run.poll() is None and "epoch   4" not in "".join(said):
                run.terminate()
            status = run.wait(60)
            run.stderr.close()
        assert status == 0, "".join(said)
        assert any("was ended by SIGKILL" in line for line in said)
        assert [record["epoch"] for record in read_metrics(in_process / "killed", "evaluation")] == [1, 2, 3, 4]
        steps = [record["step"] for record in read_metrics(in_process / "killed", "step")]
        assert steps == list(range(1, len(steps) + 1))
        ledgers = read_metrics(in_process / "killed", "ledger")
        assert [ledger["epoch"] for ledger in ledgers] == [1, 2, 3, 4]
        assert all(ledger["finished"] == ledger["rows"] and ledger["lost"] == 0 for ledger in ledgers)
        assert result_of(in_process / "killed")["loss"] < TRIVIAL_LOSS - 0.02

    @pytest.mark.soak  # test_readme.py and test_migration.py launch programs this way, too
    def test_torchstrat_launch(self, in_process):
        launcher = [sys.executable, "-m", "torchstrat.launch", "--ps", "1", "--workers", "3"]
        settings = [*EXPERIMENT, "strategy=parameter_server", "debug=smoke", "hydra.run.dir=launched"]
        finished = subprocess.run(
            [*launcher, str(TRAIN), *settings],
            cwd=in_process,
            env=test_train.environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        check(finished)
        assert result_of(in_process / "launched")["processes"] == 5
        assert "starting" not in finished.stderr

    def test_the_same_command_in_every_role(self, in_process, free_ports):
        cluster = {"worker": free_ports[:1], "ps": free_ports[1:]}
        settings = [*EXPERIMENT, "strategy=parameter_server", "debug=smoke"]
        roles = [{"task": {"type": "worker", "index": 0}}, {"task": {"type": "ps", "index": 0}}, {}]
        processes = [
            subprocess.Popen(
                [sys.executable, str(TRAIN), *settings, f"hydra.run.dir=role_{number}"],
                cwd=in_process,
                env={
                    **test_train.environment(),
                    "TORCHSTRAT_SECRET": "d" * 32,
                    "TF_CONFIG": json.dumps({"cluster": cluster, **role}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, role in enumerate(roles)
        ]
        try:
            outputs = [process.communicate(timeout=180)[0] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        assert [process.returncode for process in processes] == [0, 0, 0], outputs
        assert result_of(in_process / "role_2")["steps"] == 5


@pytest.fixture
def free_ports():
    from torchstrat.launch.ports import ReservedPort

    reserved = [ReservedPort() for _ in range(2)]
    yield [port.address for port in reserved]
    for port in reserved:
        port.close()
