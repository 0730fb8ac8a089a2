"""The programs of the README, of docs/ and of MIGRATION.md, as a reader would save and start them."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.migration import losses, program
from tests.support.programs import LAUNCH, ROOT, TORCHRUN, checked, scripts, succeed


def save(what: str, file: Path, page: str = "README.md") -> Path:
    """The Python block of a page that has ``what`` in it, as a file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|\{code-block\} python\n:caption: [^\n]*)\n(.*?)```", text, re.DOTALL)
    (block,) = [block for block in blocks if what in block]
    file.write_text(block, encoding="utf-8")
    return file


# Of docs/quickstart.md both run in every test run: it is nearly the same program.
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_example_of_the_readme_trains(tmp_path: Path, replicas: int) -> None:
    example = save("MirroredStrategy()          #", tmp_path / "train.py")
    if replicas == 1:
        finished = checked(*scripts(tmp_path, ([example], {})))
    else:
        finished = succeed(*TORCHRUN, "--nproc-per-node=2", example)
    printed = re.findall(r"(\d+) replicas, loss ([\d.]+)", finished.stdout)
    assert [int(number) for number, _ in printed] == [replicas], finished  # one process speaks for all
    assert float(printed[0][1]) < 2.0  # it starts at about 8


@pytest.mark.soak  # test_examples.py launches the like in every run, and tests/unit the guide's on a cluster of threads
@pytest.mark.parametrize("document", ["tutorial", "migration guide"])
def test_the_parameter_server_programs_train(tmp_path: Path, document: str) -> None:
    if document == "tutorial":
        save("create_per_worker_dataset(", tmp_path / "train.py", "docs/tutorials/recommender.md")
    else:
        (tmp_path / "train.py").write_text(program("ps"), encoding="utf-8")
    found = losses(succeed(*LAUNCH, "--ps=2", "--workers=2", tmp_path / "train.py").stdout)
    assert len(found) == (1 if document == "tutorial" else 4)
    assert found[-1] < (10.0 if document == "tutorial" else found[0] / 2)  # 13 for a model that always says 0


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


def test_the_checkpoint_example_ends_alike_however_often_it_is_killed(tmp_path: Path) -> None:
    def run(where: str, *words: str) -> tuple[int, str]:
        folder = tmp_path / where
        folder.mkdir(exist_ok=True)
        save("PreemptionHandler() as", folder / "train.py", "docs/how_to/checkpoints.md")
        (folder / "interrupted.py").write_text(INTERRUPTED)
        (finished,) = scripts(folder, ([folder / ("interrupted.py" if words else "train.py"), *words], {}))
        return finished.returncode, finished.stdout

    status, printed = run("undisturbed")
    assert status == 0
    assert re.fullmatch(r"step 640, loss 0\.\d+\n", printed)
    assert run("disturbed", "SIGKILL", "200") == (-signal.SIGKILL, "")
    assert run("disturbed", "SIGTERM", "400") == (75, "")
    assert run("disturbed") == (0, printed)
    steps = sorted(path.name for path in (tmp_path / "disturbed" / "checkpoints").glob("step-*"))
    assert steps == ["step-00000401", "step-00000500", "step-00000600"]
