"""What a type checker says of users' programs: results have types, and mistakes are found before anything runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "typed"

# PyTorch's own gap, which is the same in a program without torchstrat: Tensor.backward has no types.
SETTINGS = ["[mypy]", "strict = true", "untyped_calls_exclude = torch"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of all the programs; once, since it reads PyTorch for each run."""
    pytest.importorskip("mypy", reason="of the extra dev")
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mypy.ini").write_text("\n".join(SETTINGS))
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, folder)
    return subprocess.run(
        [sys.executable, "-m", "mypy", *sorted(file.name for file in folder.glob("*.py"))],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    ).stdout


@pytest.mark.parametrize("program", sorted(file.name for file in PROGRAMS.glob("*.py")))
def test_mypy_finds_the_mistakes_and_nothing_else(checked: str, program: str) -> None:
    found = re.findall(rf"^{program}:(\d+): error: .*\[([a-z-]+)\]$", checked, re.MULTILINE)
    lines = (PROGRAMS / program).read_text().splitlines()
    wrong = [(str(number), line.rpartition("  # ")[2]) for number, line in enumerate(lines, 1) if "  # " in line]
    assert found == wrong, checked
    assert program != "mistakes.py" or wrong


@pytest.mark.parametrize("program", ["mirrored.py", "parameter_server.py"])
def test_pyright_finds_nothing(program: str, tmp_path: Path) -> None:
    if (pyright := shutil.which("pyright")) is None:
        pytest.skip("pyright is not installed")
    said = subprocess.run(
        [pyright, "--pythonpath", sys.executable, str(PROGRAMS / program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert said.returncode == 0, said.stdout


def test_what_is_typed_runs() -> None:
    said = subprocess.run(
        [sys.executable, str(PROGRAMS / "mirrored.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert said.returncode == 0, said.stderr
