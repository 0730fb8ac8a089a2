"""The examples of the README and of docs/, as a reader would save them: one file for ``python`` and ``torchrun``."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def save(what: str, file: Path, page: str = "README.md") -> Path:
    """The Python block of a page that has ``what`` in it, as a file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|\{code-block\} python\n:caption: [^\n]*)\n(.*?)```", text, re.DOTALL)
    (block,) = [block for block in blocks if what in block]
    file.write_text(block, encoding="utf-8")
    return file


@pytest.fixture
def example(tmp_path):
    return save("MirroredStrategy()          #", tmp_path / "train.py")


def test_the_parameter_server_example_trains(tmp_path):
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "torchstrat.launch",
            "--ps",
            "2",
            "--workers",
            "2",
            str(save("create_per_worker_dataset(", tmp_path / "train.py", "docs/tutorials/recommender.md")),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = re.findall(r"^loss ([\d.]+)", finished.stdout, re.MULTILINE)
    assert len(printed) == 1, finished.stdout
    assert float(printed[0]) < 10.0  # 13 for a model that always says 0


@pytest.mark.parametrize(("launch", "replicas"), [("python", 1), ("torchrun", 2)])
def test_the_example_trains(example, launch, replicas):
    finished = subprocess.run(
        [*LAUNCHES[launch], str(example)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = re.findall(r"(\d+) replicas, loss ([\d.]+)", finished.stdout)
    assert [int(number) for number, _ in printed] == [replicas], finished.stdout  # one process speaks for all
    assert float(printed[0][1]) < 2.0  # it starts at about 8


INTERRUPTED = """
import os, runpy, signal, sys
import torchstrat as ts

save = ts.CheckpointManager.save

def save_and_signal(manager, checkpoint, step, **options):
    handle = save(manager, checkpoint, step, **options)
    if step == int(sys.argv[2]):
        handle.result()
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return handle

ts.CheckpointManager.save = save_and_signal
runpy.run_path("train.py", run_name="__main__")
"""


def test_the_checkpoint_example_ends_alike_however_often_it_is_killed(tmp_path):
    def run(folder, *arguments):
        folder.mkdir(exist_ok=True)
        save("PreemptionHandler() as", folder / "train.py", "docs/how_to/checkpoints.md")
        return subprocess.run(
            [sys.executable, *(arguments or ["train.py"])],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    undisturbed = run(tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = run(tmp_path / "disturbed", "-c", INTERRUPTED, "SIGKILL", "200")
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    told = run(tmp_path / "disturbed", "-c", INTERRUPTED, "SIGTERM", "400")
    assert (told.returncode, told.stdout) == (75, ""), told.stderr
    last = run(tmp_path / "disturbed")
    assert last.returncode == 0, last.stderr
    assert last.stdout == undisturbed.stdout
    assert re.fullmatch(r"step 640, loss 0\.\d+\n", last.stdout)
    steps = sorted(path.name for path in (tmp_path / "disturbed" / "checkpoints").glob("step-*"))
    assert steps == ["step-00000401", "step-00000500", "step-00000600"]
