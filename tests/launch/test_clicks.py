"""scripts/examples/clicks from the command line, synchronous and on parameter servers: a project of one's own."""

from __future__ import annotations

import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from tests.launch.test_train import distance, result_of
from tests.support.programs import (
    ROOT,
    SECONDS,
    TRAIN,
    checked,
    descendants,
    free_ports,
    read_metrics,
    scripts,
    train,
    trained,
    wait_for,
)

PROJECT = ROOT / "scripts" / "examples" / "clicks"
CLICKS = ("--config-dir", str(PROJECT / "conf"), "experiment=clicks")
SERVERS = (*CLICKS, "strategy=parameter_server")
CLICK_RATE = 0.3
TRIVIAL_LOSS = -(CLICK_RATE * math.log(CLICK_RATE) + (1 - CLICK_RATE) * math.log(1 - CLICK_RATE))
"""Who always predicts how often is clicked; of the held-out rows, 0.27 to 0.3."""


@pytest.fixture(autouse=True, scope="module")
def importable():
    """As in the project's own folder; runs are in temporary ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])))
        yield


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps under each synchronous strategy."""
    folder = tmp_path_factory.mktemp("clicks")
    trained(folder, "-m", *CLICKS, "strategy=one_device,mirrored,central_storage", "debug=steps", "hydra.sweep.dir=.")
    return folder


@pytest.mark.parametrize("job", ["1-mirrored", "2-central_storage"])
def test_two_replicas_equal_one_device(in_process: Path, job: str) -> None:
    """Sparse gradients of both tables included, and Adagrad's state by row."""
    assert distance(in_process / job, in_process / "0-one_device") <= 1e-5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("data=click_log data.path=bad.tsv", "bad.tsv, line 1: 2 field(s), and 40 with tabs between them"),
        ("data=click_log data.path=absent.tsv", "No such file or directory: 'absent.tsv'"),
        ("model=mlp", "needs input_shape"),
        ("data.rows=5 strategy=parameter_server strategy.workers=9", "training rows for 9 workers"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, overrides: str, message: str) -> None:
    (tmp_path / "bad.tsv").write_text("click\tuser\n")
    ended = train(tmp_path, *CLICKS, *overrides.split())
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()  # above all: no cluster was started
    assert line.startswith("error: ")
    assert message in line


def worker_of(pid: int) -> int:
    """The process that goes by the name of worker 0 among all that was started."""
    names = {child: Path(f"/proc/{child}/comm").read_text().strip() for child in descendants(pid)}
    (found,) = (child for child, name in names.items() if name == "worker 0")
    return found


def test_a_run_learns_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trained, tmp_path, *SERVERS, "hydra.run.dir=.")
        wait_for(lambda: run.done() or read_metrics(tmp_path, "evaluation"), "the first epoch", SECONDS)
        if not run.done():  # it says below why
            os.kill(worker_of(os.getpid()), signal.SIGKILL)
    said = run.result().stdout + run.result().stderr
    assert "no cluster in the environment: starting 2 workers, 2 servers on this machine" in said
    assert "parameter_server (2 workers, 2 servers): loss" in said
    assert "was ended by SIGKILL" in said
    assert [record["epoch"] for record in read_metrics(tmp_path, "evaluation")] == [1, 2, 3]
    steps = [record["step"] for record in read_metrics(tmp_path, "step")]
    assert steps == list(range(1, len(steps) + 1))
    ledgers = read_metrics(tmp_path, "ledger")
    assert [ledger["epoch"] for ledger in ledgers] == [1, 2, 3]
    assert all(ledger["finished"] == ledger["rows"] and ledger["lost"] == 0 for ledger in ledgers)
    result = result_of(tmp_path)
    assert (result["processes"], result["replicas"]) == (5, 2)
    assert result["loss"] < TRIVIAL_LOSS - 0.02
    assert (result["data"], result["accuracy"]) == ("synthetic_clicks", None), "a loss of logits knows no classes"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_in_every_role(in_process: Path, tmp_path: Path) -> None:
    """One worker has the numbers of one device. Both tables are cut over the servers, and travel by rows."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {"worker": addresses[:1], "ps": addresses[1:]}
    tasks = [{"type": job, "index": index} for job, named in cluster.items() for index in range(len(named))]
    runs: list[tuple[list[object], dict[str, str]]] = []
    for number, role in enumerate([*({"task": task} for task in tasks), {}]):
        variables = {"TORCHSTRAT_SECRET": "d" * 32, "TF_CONFIG": json.dumps({"cluster": cluster, **role})}
        words = [TRAIN, *SERVERS, "strategy.min_shard_bytes=1024", "debug=steps", f"hydra.run.dir=role_{number}"]
        runs.append((words, variables))
    ended = [checked(one) for one in scripts(tmp_path, *runs)]
    assert "starting" not in ended[3].stderr
    result = result_of(tmp_path / "role_3")
    assert (result["steps"], result["processes"]) == (20, 4)
    assert distance(tmp_path / "role_3", in_process / "0-one_device") <= 1e-6
