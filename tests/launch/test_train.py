"""``scripts/train.py`` as users start it: alone, in a sweep, in several processes. Real data, real files.

All are forks, which have imported what these import. What starts programs is in test_wheel.py and test_examples.py.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.programs import TRAIN, checked, ranks, read_metrics, train, trained

for module in ("hydra", "sklearn", "tensorboard", "matplotlib", "tqdm"):
    pytest.importorskip(module)

HELD_OUT_DIGITS = 359
RUN_FILES = [
    *(".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"),
    *("config.yaml", "curves.png", "metrics.jsonl", "parameters.pt"),
]
SNAPSHOT = "parameters_after_step_20.pt"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def result_of(run: Path) -> dict[str, Any]:
    (result,) = read_metrics(run, "result")
    return result


def distance(one: Path, other: Path) -> float:
    first, second = (torch.load(folder / SNAPSHOT, weights_only=True) for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def assert_complete(run: Path, strategy: str, processes: int, replicas: int, steps: int) -> None:
    """A folder that one run wrote, once, from beginning to end."""
    events = [name for name in files(run) if name.startswith("tensorboard/")]
    assert len(events) <= 1, "more than one process wrote TensorBoard files"
    assert [name for name in files(run) if name not in (*events, SNAPSHOT)] == RUN_FILES
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {record["event"] for record in records} == {"step", "evaluation", "result"}
    assert [record["step"] for record in read_metrics(run, "step")] == list(range(1, steps + 1))
    result = result_of(run)
    assert (result["strategy"], result["processes"], result["replicas"]) == (strategy, processes, replicas)
    assert {record["rows"] for record in read_metrics(run, "evaluation")} == {HELD_OUT_DIGITS}
    assert f"name: {strategy}" in (run / "config.yaml").read_text()
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_in_one_process(tmp_path: Path) -> None:
    finished = trained(tmp_path, "experiment=digits_convnet", "epochs=4", "hydra.run.dir=run")
    run = tmp_path / "run"
    assert_complete(run, "one_device", processes=1, replicas=1, steps=4 * 23)
    assert len(files(run / "tensorboard")) == 1
    evaluations = read_metrics(run, "evaluation")
    assert [record["epoch"] for record in evaluations] == [1, 2, 3, 4]
    assert evaluations[-1]["accuracy"] > 0.9
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert all(record["examples_per_second"] > 0 for record in read_metrics(run, "step"))
    assert "epoch   4" in finished.stderr
    assert "examples/s" in finished.stderr


def test_every_run_gets_a_folder_of_its_own_and_the_progress_bar_shows_loss_and_rate(tmp_path: Path) -> None:
    for _ in range(2):
        finished = trained(tmp_path, "debug=smoke", "strategy=mirrored", "name=twice", "progress=bar")
        for shown in ("examples/s=", "loss=", "5/5"):
            assert shown in finished.stderr
    runs = list((tmp_path / "outputs" / "twice").iterdir())
    assert len(runs) == 2
    for one in runs:
        assert_complete(one, "mirrored", processes=1, replicas=2, steps=5)


SWEEP = ("experiment=digits_convnet", "debug=steps", "curves=true", "hydra.sweep.dir=sweep")


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over strategies in one process: twenty steps each."""
    folder = tmp_path_factory.mktemp("in_process")
    names = ("one_device", "mirrored", "central_storage", "multi_worker_mirrored")
    finished = trained(folder, "-m", f"strategy={','.join(names)}", "strategy.replicas=2", *SWEEP)
    lines = [line.split() for line in finished.stderr.splitlines()]
    table = lines[lines.index(["run", "accuracy", "loss", "examples/s", "settings"]) :]
    assert [(line[0], line[-1]) for line in table[1:5]] == [
        (f"{job}-{name}", f"strategy={name}") for job, name in enumerate(names)
    ]
    assert "strategy=one_device: strategy.replicas=2 is ignored, it has one" in finished.stderr
    return folder / "sweep"


@pytest.fixture(scope="module")
def per_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """The same with two processes. A launcher starts all at once; on a cluster they come as they come."""
    folder, late = tmp_path_factory.mktemp("per_process"), tmp_path_factory.mktemp("late") / "late.py"
    late.write_text(
        "import os, runpy, time\n"
        "time.sleep(2 * int(os.environ['RANK']))\n"
        f"runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
    )
    strategies = "strategy=mirrored,multi_worker_mirrored,central_storage"
    return folder, [checked(rank) for rank in ranks(folder, "-m", strategies, *SWEEP, program=late)]


def assert_a_folder_per_job(sweep: Path, jobs: dict[str, int], processes: int) -> None:
    assert sorted(path.name for path in sweep.iterdir()) == [*jobs, "multirun.yaml", "sweep.png"]
    for job, replicas in jobs.items():
        assert files(sweep / job) == sorted([*RUN_FILES, SNAPSHOT])
        assert_complete(sweep / job, job.partition("-")[2], processes, replicas, steps=20)


def test_a_sweep_makes_one_folder_per_job(in_process: Path) -> None:
    jobs = {"0-one_device": 1, "1-mirrored": 2, "2-central_storage": 2, "3-multi_worker_mirrored": 1}
    assert_a_folder_per_job(in_process, jobs, processes=1)


def test_a_sweep_in_two_processes_makes_one_folder_per_job(per_process: Any) -> None:
    folder, (first, second) = per_process
    jobs = {"0-mirrored": 2, "1-multi_worker_mirrored": 2, "2-central_storage": 2}
    assert_a_folder_per_job(folder / "sweep", jobs, processes=2)
    assert (second.stdout, second.stderr) == ("", ""), "more than one rank announced the sweep"
    assert first.stderr.count("accuracy  loss") == 1, "not one table"
    assert sorted(path.name for path in folder.iterdir()) == ["sweep"], "a rank wrote a folder of its own"
    assert first.stdout.count("Launching 3 jobs") == 1
    reports = [line.partition(":")[0] for line in first.stderr.splitlines() if ": epoch   1" in line]
    assert reports == ["mirrored ×2", "multi_worker_mirrored ×2", "central_storage ×2"]


@pytest.mark.parametrize("job", ["1-mirrored", "2-central_storage"])
def test_two_replicas_in_process_equal_one_device(in_process: Path, job: str) -> None:
    """Gradients are summed in another order; twenty float32 steps later rounding is all that differs."""
    assert distance(in_process / job, in_process / "0-one_device") <= 1e-5


@pytest.mark.parametrize(
    ("job", "counterpart"),
    [
        ("0-mirrored", "1-mirrored"),
        ("1-multi_worker_mirrored", "1-mirrored"),
        ("2-central_storage", "2-central_storage"),
    ],
)
def test_two_processes_equal_two_replicas_in_process(
    in_process: Path, per_process: Any, job: str, counterpart: str
) -> None:
    assert distance(per_process[0] / "sweep" / job, in_process / counterpart) <= 1e-6


def test_sync_batch_gives_the_numbers_of_one_device_and_batch_does_not(tmp_path: Path) -> None:
    common = ("experiment=digits_convnet", "debug=steps")
    trained(tmp_path, *common, "model.norm=batch", "hydra.run.dir=one")
    trained(tmp_path, "-m", *common, "strategy=mirrored", "model.norm=batch,sync_batch", "hydra.sweep.dir=two")
    per_replica, synchronised = (distance(tmp_path / "two" / f"{job}-mirrored", tmp_path / "one") for job in range(2))
    assert synchronised <= 1e-4  # running variances included: they are sums of squares of what differs by rounding
    assert per_replica > 1e-3


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as files of the user's own."""
    from sklearn.datasets import load_digits

    folder, rows = tmp_path_factory.mktemp("digits"), load_digits()
    np.savetxt(folder / "digits.csv", np.column_stack([rows.data, rows.target]), fmt="%d", delimiter=",")
    np.savez(folder / "digits.npz", x=rows.images[:, None].astype(np.uint8), y=rows.target)
    return folder


@pytest.mark.parametrize(
    ("settings", "accuracy"),
    [
        ("model=mlp optimizer=adamw strategy=mirrored epochs=5", 0.9),
        pytest.param("model=mlp optimizer=adam strategy=mirrored epochs=5", 0.9, marks=pytest.mark.soak),
        ("data=csv data.path=digits.csv model=mlp strategy=central_storage epochs=4", 0.85),
        pytest.param(
            "data=csv data.path=digits.csv data.image_shape=[1,8,8] strategy=mirrored epochs=4",
            0.85,
            marks=pytest.mark.soak,
        ),
        ("data=npz data.path=digits.npz data.workers=1 epochs=4", 0.85),
    ],
)
def test_other_models_optimizers_and_files(digits: Path, tmp_path: Path, settings: str, accuracy: float) -> None:
    trained(digits, *settings.split(), f"hydra.run.dir={tmp_path}")
    assert result_of(tmp_path)["accuracy"] > accuracy


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "strategy=mirorred",
            "strategy=mirorred does not exist; choose one of central_storage, local_sgd, mirrored, multi_worker_mir",
        ),
        ("data=csv data.path=absent.csv model=mlp", "refused its arguments path='absent.csv', "),
        ("data=csv data.path=bad.csv model=mlp", "refused its arguments path='bad.csv', test_path=None"),
        (
            "strategy=mirrored strategy.replicas=4 data.global_batch=3",
            "data.global_batch=3 is too small for 4 replicas",
        ),
        ("strategy=mirrored strategy.devices=[cpu:0,cpu:0]", "cpu:0 more than once"),
        ("cluster=torchrun", "cluster=torchrun, but this process was started without it"),
        ("data=csv data.path=good.csv", "model=convnet needs images"),
        ("epochs=many", "Value 'many' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_mistake_is_one_line(overrides: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("1,2\nthree,4\n")
    (tmp_path / "good.csv").write_text("1,0\n2,1\n" * 20)
    ended = train(tmp_path, *overrides.split())
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        # The sweep goes on after a job that failed on every rank.
        (
            ("-m", "strategy=one_device,mirrored", "data.global_batch=1"),
            ("OneDeviceStrategy is for one process", "data.global_batch=1 is too small for 2 replicas"),
        ),
        (("strategy=unknown",), ("choose one of central_storage, local_sgd, mirrored, multi_worker_mirrored, one_d",)),
        (("strategy=mirrored", "strategy.replicas=2"), ("under a launcher each process is one replica",)),
    ],
)
def test_a_mistake_of_several_processes_is_one_line_on_rank_0(overrides: Any, messages: Any, tmp_path: Path) -> None:
    first, second = ranks(tmp_path, *overrides)
    assert first.returncode == second.returncode == 1
    assert second.stderr == ""
    lines = first.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert [message in line for message, line in zip(messages, lines, strict=True)] == [True] * len(messages)
    assert [path.name for path in tmp_path.iterdir() if overrides == ("strategy=unknown",)] == []
