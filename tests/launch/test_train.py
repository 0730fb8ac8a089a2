"""``scripts/train.py`` as users start it: alone, in a sweep, under torchrun. Real processes, real data, real files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchstrat.experiments.metrics_file import read_metrics

for module in ("hydra", "sklearn", "tensorboard", "matplotlib", "tqdm"):
    pytest.importorskip(module)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
FORKS = Path(__file__).with_name("train_in_forks.py")
HELD_OUT_DIGITS = 359
DEADLINE_SECONDS = 240  # below that of the test, so that what the processes said is shown


def environment() -> dict[str, str]:
    """That of a user's shell: no launcher's variables, one thread, and this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "HYDRA_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "200"}


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return start([sys.executable, str(TRAIN), *overrides], folder)


def torchrun(
    folder: Path, *overrides: str, processes: int = 2, apart_seconds: float = 0, logs: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """One replica per process. ``logs`` keeps what each rank says apart from what torchrun says about it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    if logs is not None:
        launcher += [f"--log-dir={logs}", "--redirects=3"]
    program = [str(TRAIN)]
    if apart_seconds:  # the launcher starts all at once; on a cluster they come as they come
        wait = f'sleep $(awk "BEGIN {{ print {apart_seconds} * $LOCAL_RANK }}"); exec "$@"'
        launcher.append("--no-python")
        program = ["bash", "-c", wait, "late", sys.executable, str(TRAIN)]
    return start([*launcher, *program, *overrides], folder)


def check(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "parameters_after_step_20.pt", weights_only=True)


def distance(one: Path, other: Path) -> float:
    first, second = parameters(one), parameters(other)
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


RUN_FILES = [
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    ".hydra/overrides.yaml",
    "config.yaml",
    "curves.png",
    "metrics.jsonl",
    "parameters.pt",
]


def assert_complete(run: Path, strategy: str, processes: int, replicas: int, steps: int) -> None:
    """A folder that one run wrote, once, from beginning to end."""
    events = [name for name in files(run) if name.startswith("tensorboard/")]
    assert len(events) <= 1, "more than one process wrote TensorBoard files"
    assert [name for name in files(run) if name not in events] == RUN_FILES
    assert [record["step"] for record in read_metrics(run, "step")] == list(range(1, steps + 1))
    (result,) = read_metrics(run, "result")
    assert (result["strategy"], result["processes"], result["replicas"]) == (strategy, processes, replicas)
    assert {record["rows"] for record in read_metrics(run, "evaluation")} == {HELD_OUT_DIGITS}
    assert f"name: {strategy}" in (run / "config.yaml").read_text()
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_in_one_process(tmp_path):
    finished = train(tmp_path, "experiment=digits_convnet", "epochs=4", "hydra.run.dir=run")
    check(finished)
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


def test_every_run_gets_a_folder_of_its_own(tmp_path):
    for _ in range(2):
        check(train(tmp_path, "debug=smoke", "strategy=mirrored", "name=twice"))
    runs = list((tmp_path / "outputs" / "twice").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert_complete(run, "mirrored", processes=1, replicas=2, steps=5)


def test_the_progress_bar_shows_loss_and_rate(tmp_path):
    finished = train(tmp_path, "debug=smoke", "progress=bar")
    check(finished)
    assert "examples/s=" in finished.stderr
    assert "loss=" in finished.stderr
    assert "5/5" in finished.stderr


@pytest.fixture(scope="module")
def in_process(tmp_path_factory) -> Path:
    """A sweep over strategies in one process: twenty steps each."""
    folder = tmp_path_factory.mktemp("in_process")
    strategies = ["strategy=one_device,mirrored,central_storage,multi_worker_mirrored", "strategy.replicas=2"]
    settings = ["experiment=digits_convnet", "debug=steps", "curves=true", "hydra.sweep.dir=sweep"]
    finished = train(folder, "-m", *strategies, *settings)
    check(finished)
    lines = [line.split() for line in finished.stderr.splitlines()]
    table = lines[lines.index(["run", "accuracy", "loss", "examples/s", "settings"]) :]
    assert [(line[0], line[-1]) for line in table[1:5]] == [
        (f"{job}-{name}", f"strategy={name}")
        for job, name in enumerate(("one_device", "mirrored", "central_storage", "multi_worker_mirrored"))
    ]
    assert "strategy=one_device: strategy.replicas=2 is ignored, it has one" in finished.stderr
    return folder / "sweep"


@pytest.fixture(scope="module")
def per_process(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The same under torchrun with two processes that start two seconds apart."""
    folder = tmp_path_factory.mktemp("per_process")
    strategies = "strategy=mirrored,multi_worker_mirrored,central_storage"
    settings = ["experiment=digits_convnet", "debug=steps", "curves=true", "hydra.sweep.dir=sweep"]
    finished = torchrun(folder, "-m", strategies, *settings, apart_seconds=2)
    check(finished)
    return folder, finished


def test_a_sweep_makes_one_folder_per_job(in_process):
    jobs = ["0-one_device", "1-mirrored", "2-central_storage", "3-multi_worker_mirrored"]
    assert sorted(path.name for path in in_process.iterdir()) == [*jobs, "multirun.yaml", "sweep.png"]
    for job, replicas in zip(jobs, (1, 2, 2, 1), strict=True):
        (snapshot,) = (in_process / job).glob("parameters_after_step_20.pt")
        kept = snapshot.rename(snapshot.with_suffix(".kept"))
        try:
            extra = [name for name in files(in_process / job) if name not in RUN_FILES]
            assert extra == [kept.name]
        finally:
            kept.rename(snapshot)
        assert read_metrics(in_process / job, "result")[0]["replicas"] == replicas


def test_a_sweep_under_torchrun_makes_one_folder_per_job(per_process):
    folder, finished = per_process
    jobs = ["0-mirrored", "1-multi_worker_mirrored", "2-central_storage"]
    assert sorted(path.name for path in (folder / "sweep").iterdir()) == [*jobs, "multirun.yaml", "sweep.png"]
    assert finished.stderr.count("accuracy  loss") == 1, "not one table"
    assert sorted(path.name for path in folder.iterdir()) == ["sweep"], "a rank wrote a folder of its own"
    for job in jobs:
        run = folder / "sweep" / job
        expected = sorted([*RUN_FILES, "parameters_after_step_20.pt"])
        assert files(run) == expected
        (result,) = read_metrics(run, "result")
        assert (result["strategy"], result["processes"], result["replicas"]) == (job.partition("-")[2], 2, 2)
        assert [record["rows"] for record in read_metrics(run, "evaluation")] == [HELD_OUT_DIGITS]
    assert finished.stdout.count("Launching 3 jobs") == 1, "more than one rank announced the sweep"
    reports = [line.partition(":")[0] for line in finished.stderr.splitlines() if ": epoch   1" in line]
    assert reports == ["mirrored ×2", "multi_worker_mirrored ×2", "central_storage ×2"], "not only rank 0 reported"


@pytest.mark.soak  # the sweep with it is above
def test_a_sweep_without_torchruns_agent(tmp_path):
    """The variables set by hand, as schedulers do: rank 0 keeps the store, for the hand-over and for each group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ["debug=smoke", "hydra.sweep.dir=sweep"]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TRAIN), "-m", "strategy=mirrored,central_storage", *settings],
            cwd=tmp_path,
            env={**environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for job, strategy in enumerate(("mirrored", "central_storage")):
        assert_complete(tmp_path / "sweep" / f"{job}-{strategy}", strategy, processes=2, replicas=2, steps=5)


@pytest.mark.parametrize("job", ["1-mirrored", "2-central_storage"])
def test_two_replicas_in_process_equal_one_device(in_process, job):
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
def test_torchrun_equals_in_process(in_process, per_process, job, counterpart):
    assert distance(per_process[0] / "sweep" / job, in_process / counterpart) <= 1e-6


def test_sync_batch_gives_the_numbers_of_one_device_and_batch_does_not(tmp_path):
    common = ["experiment=digits_convnet", "debug=steps"]
    check(train(tmp_path, *common, "model.norm=batch", "hydra.run.dir=one"))
    check(train(tmp_path, "-m", *common, "strategy=mirrored", "model.norm=batch,sync_batch", "hydra.sweep.dir=two"))
    per_replica, synchronised = (distance(tmp_path / "two" / f"{job}-mirrored", tmp_path / "one") for job in range(2))
    assert synchronised <= 1e-4  # running variances included: they are sums of squares of what differs by rounding
    assert per_replica > 1e-3


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.soak), "adamw"])
def test_the_other_optimizers_and_the_mlp(tmp_path, optimizer):
    check(train(tmp_path, "model=mlp", f"optimizer={optimizer}", "strategy=mirrored", "epochs=5", "hydra.run.dir=run"))
    assert read_metrics(tmp_path / "run", "result")[0]["accuracy"] > 0.9


def write_digits(folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savetxt(folder / "digits.csv", np.column_stack([digits.data, digits.target]), fmt="%d", delimiter=",")
    np.savez(folder / "digits.npz", x=digits.images[:, None].astype(np.uint8), y=digits.target)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=csv", "data.path=digits.csv", "model=mlp", "strategy=central_storage"],
        pytest.param(
            ["data=csv", "data.path=digits.csv", "data.image_shape=[1,8,8]", "strategy=mirrored"],
            marks=pytest.mark.soak,
        ),
        ["data=npz", "data.path=digits.npz", "data.workers=1"],
    ],
    ids=["csv-mlp", "csv-convnet", "npz-convnet"],
)
def test_files_of_the_user(tmp_path, overrides):
    write_digits(tmp_path)
    check(train(tmp_path, *overrides, "epochs=4", "hydra.run.dir=run"))
    assert read_metrics(tmp_path / "run", "result")[0]["accuracy"] > 0.85


MISTAKES = {
    "unknown strategy": (
        ["strategy=mirorred"],
        "strategy=mirorred does not exist; choose one of central_storage, mirrored, multi_worker_mirrored, one_device",
    ),
    "missing file": (["data=csv", "data.path=absent.csv", "model=mlp"], "refused its arguments path='absent.csv', "),
    "no file named": (["data=npz"], "data.path has no default; set data.path=…"),
    "malformed file": (
        ["data=csv", "data.path=bad.csv", "model=mlp"],
        "refused its arguments path='bad.csv', test_path=None",
    ),
    "malformed archive": (["data=npz", "data.path=bad.csv"], "data.path=bad.csv is not a NumPy archive"),
    "batch too small": (
        ["strategy=mirrored", "strategy.replicas=4", "data.global_batch=3"],
        "data.global_batch=3 is too small for 4 replicas",
    ),
    "replicas twice": (
        ["strategy=mirrored", "strategy.replicas=2", "strategy.devices=[cpu:0]"],
        "strategy.replicas=2 and strategy.devices=['cpu:0'] were both given",
    ),
    "device twice": (["strategy=mirrored", "strategy.devices=[cpu:0,cpu:0]"], "cpu:0 more than once"),
    "no launcher": (["cluster=torchrun"], "cluster=torchrun, but this process was started without it"),
    "no images": (["data=csv", "data.path=good.csv"], "model=convnet needs images"),
    "no archive": (
        ["data=npz", "data.path=good.csv"],
        "is not a NumPy archive (.npz); for a table of numbers as text use",
    ),
    "no such model": (
        ["model._target_=mine.MyNet"],
        "model._target_=mine.MyNet cannot be imported: ModuleNotFoundError",
    ),
    "unknown setting of a model": (["model.norn=batch"], "Did you mean model.norm?"),
    "unknown setting": (["epoch=3"], "Could not override 'epoch'"),
    "wrong type": (["epochs=many"], "Value 'many' of type 'str' could not be converted to Integer"),
    "sum": (["strategy.gradient_reduce_op=sum"], "belongs to losses that are sums"),
}


def in_forks(folder: Path, runs: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each run."""
    finished = start([sys.executable, str(FORKS), json.dumps(runs)], folder)
    check(finished)
    return [tuple(one) for one in json.loads(finished.stdout)]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "bad.csv").write_text("1,2\nthree,4\n")
    (folder / "good.csv").write_text("1,0\n2,1\n" * 20)
    return dict(zip(MISTAKES, in_forks(folder, [overrides for overrides, _ in MISTAKES.values()]), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistaken, mistake):
    status, said, complained = mistaken[mistake]
    assert status == 1
    assert said == ""
    (line,) = complained.splitlines()
    assert line.startswith("error: ")
    assert MISTAKES[mistake][1] in line


def test_a_mistake_is_one_line_without_a_fork_too(tmp_path):
    overrides, message = MISTAKES["unknown strategy"]
    finished = train(tmp_path, *overrides)
    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (1, "", 1)
    assert message in finished.stderr


def said(logs: Path) -> dict[int, list[str]]:
    """Rank → the lines it printed to stderr."""
    return {int(file.parent.name): file.read_text().splitlines() for file in logs.rglob("stderr.log")}


def test_a_mistake_under_torchrun_is_one_line_on_rank_0(tmp_path):
    finished = torchrun(tmp_path, "-m", "strategy=one_device,mirrored", "data.global_batch=1", logs=tmp_path / "logs")
    assert finished.returncode != 0
    lines = said(tmp_path / "logs")
    assert lines[1] == []
    errors = [line for line in lines[0] if line.startswith("error: ")]
    assert lines[0] == errors
    assert len(errors) == 2, "the sweep went on after a job that failed on every rank"
    assert "OneDeviceStrategy is for one process" in errors[0]
    assert "data.global_batch=1 is too small for 2 replicas" in errors[1]


def test_an_unknown_strategy_under_torchrun_is_one_line_on_rank_0(tmp_path):
    finished = torchrun(tmp_path, "strategy=unknown", logs=tmp_path / "logs")
    assert finished.returncode != 0
    lines = said(tmp_path / "logs")
    assert lines[1] == []
    (line,) = lines[0]
    assert "choose one of central_storage, mirrored, multi_worker_mirrored, one_device" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_replicas_in_process_make_no_sense_under_torchrun(tmp_path):
    finished = torchrun(tmp_path, "strategy=mirrored", "strategy.replicas=2", logs=tmp_path / "logs")
    assert finished.returncode != 0
    assert any("under a launcher each process is one replica" in line for line in said(tmp_path / "logs")[0])


def test_metrics_are_json_lines(in_process):
    for line in (in_process / "1-mirrored" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["event"] in ("step", "evaluation", "result")
