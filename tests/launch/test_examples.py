"""The programs of scripts/examples, started as their docstrings say, end with the line that is expected of them."""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import COMMAND, PYTHON, ROOT, SECONDS, TORCHRUN, environment

EXAMPLES = ROOT / "scripts" / "examples"

LAST_LINES = {
    "digits": r"97\.\d% of 360 held-out digits are right",
    "gpt": r"Simple is better than complex\.",
    "recommender": r"each of 8192 rows exactly once in each of 5 epochs",
    "gan": r"mean 3\.0 \(real: 3\.0\), spread 0\.5 \(real: 0\.5\)",
    "detection": r"centres are 0\.[01] pixels off",
    "tensor_parallel": r"loss 0\.\d{4}",
    "own_strategy": r"micro_batches: loss (\d\.\d{4}), one_device: loss \1",
}
"""Of every way to start it that its docstring names: where there are several, their last lines are also equal."""

IN_EVERY_RUN = ("own_strategy",)  # test_train.py learns the digits, and test_clicks.py on servers, in forks

PROGRAMS = {"python": PYTHON, "torchrun": TORCHRUN, "torchstrat": COMMAND}


def commands(name: str) -> list[str]:
    """The indented lines of the program's docstring that start a program, as they stand there."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in docstring.splitlines() if line.startswith("    ")]


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start what a shell would in the repository; what it writes goes to ``folder``."""
    program, *words = shlex.split(command.removesuffix("&"))
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*PROGRAMS[program], *words], cwd=folder, env=environment(), text=True, **pipes)


def last_line(running: subprocess.Popen[str]) -> str:
    try:
        out, err = running.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    assert running.returncode == 0, err
    return out.splitlines()[-1]


@pytest.mark.parametrize(
    "name",
    [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.soak) for name in LAST_LINES],
)
def test_an_example_ends_with_the_expected_line_however_it_is_started(name: str, tmp_path: Path) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    lines = {command: last_line(start(command, tmp_path)) for command in commands(name)}
    assert lines
    assert len(set(lines.values())) == 1, lines
    assert all(re.fullmatch(LAST_LINES[name], line) for line in lines.values()), lines


@pytest.mark.soak
def test_evaluation_scores_every_checkpoint_beside_the_training(tmp_path: Path) -> None:
    evaluate, train = (start(command, tmp_path) for command in commands("evaluation"))
    out, err = train.communicate(timeout=SECONDS)
    assert (train.returncode, out) == (0, ""), err
    assert re.fullmatch(r"checkpoint 5: accuracy 0\.9\d\d", last_line(evaluate))


@pytest.mark.soak
@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
def test_resume_ends_alike_whether_it_was_killed_or_not(tmp_path: Path) -> None:
    python, torchrun = commands("resume")
    ends = []
    for folder, command, kill in (
        ("undisturbed", python, False),
        ("python", f"{python} 250", True),
        ("python", python, False),
        ("torchrun", f"{torchrun} 250", True),
        ("torchrun", torchrun, False),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        running = start(command, tmp_path / folder)
        if kill:
            assert running.communicate(timeout=SECONDS)[0] == ""
            assert running.returncode == -signal.SIGKILL if folder == "python" else running.returncode != 0
        else:
            ends.append(last_line(running))
    assert all(re.fullmatch(r"step 384: loss 0\.\d{6}", end) for end in ends)
    assert ends[0] == ends[1]


def test_resume_that_is_told_to_end_in_its_last_step_is_done(tmp_path: Path) -> None:
    program = (EXAMPLES / "resume.py").read_text(encoding="utf-8")
    program = program.replace("STEPS = 384", "STEPS = 64").replace("signal.SIGKILL", "signal.SIGTERM")
    (tmp_path / "resume.py").write_text(program, encoding="utf-8")
    assert re.fullmatch(r"step 64: loss 0\.\d{6}", last_line(start("python resume.py 64", tmp_path)))


@pytest.mark.soak  # test_notebook.py runs the like in every run
def test_the_notebook_trains_when_its_cells_run_in_order(tmp_path: Path) -> None:
    """As a script, which needs nothing that is not installed. The cells have no magic and no display."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells), encoding="utf-8")
    assert last_line(start(f"python {script}", tmp_path)) == "loss 0.0"


def test_examples_are_short_and_all_of_them_are_tried() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert {program.stem for program in programs} == {*LAST_LINES, "evaluation", "resume"}
    too_long = [program.name for program in programs if len(program.read_text(encoding="utf-8").splitlines()) > 80]
    assert not too_long
