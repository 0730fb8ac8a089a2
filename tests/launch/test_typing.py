"""What a type checker says of users' programs: results have types, and mistakes are found before anything runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import PYTHON, ROOT, checked, run, scripts

PROGRAMS = Path(__file__).parent / "typed"
UNNAMED = ("_dynamo", "_export", "_functorch", "_inductor", "ao", "distributed", "export", "fx", "jit", "onnx")
"""Of PyTorch, what these programs do not name: to read it takes half of the time."""


@pytest.mark.soak  # reads all of PyTorch; scripts/check has the package's own types
def test_mypy_finds_the_mistakes_and_nothing_else(tmp_path: Path) -> None:
    """Of all the programs at once, since it reads PyTorch for each run."""
    pytest.importorskip("mypy", reason="of the extra dev")
    # PyTorch's own gap, which is the same in a program without torchstrat: Tensor.backward has no types.
    settings = ["[mypy]", "strict = true", "untyped_calls_exclude = torch"]
    settings += [f"[mypy-{','.join(f'torch.{part}.*' for part in UNNAMED)},sympy.*]", "follow_imports = skip"]
    (tmp_path / "mypy.ini").write_text("\n".join(settings))
    wrong = []
    for program in sorted(PROGRAMS.glob("*.py")):
        shutil.copy(program, tmp_path)
        lines = enumerate(program.read_text().splitlines(), 1)
        wrong += [(program.name, str(number), line.rpartition("  # ")[2]) for number, line in lines if "  # " in line]
    cache = ROOT / ".mypy_cache" / "programs"  # of what it has read of PyTorch, the longest part
    mypy = [*PYTHON, "-m", "mypy", "--cache-dir", cache, *sorted(file.name for file in tmp_path.glob("*.py"))]
    said = run(*mypy, cwd=tmp_path, seconds=380, MYPYPATH=str(ROOT)).stdout
    assert re.findall(r"^(\w+\.py):(\d+): error: .*\[([a-z-]+)\]$", said, re.MULTILINE) == wrong, said
    assert {program for program, *_ in wrong} == {"mistakes.py"}


@pytest.mark.parametrize("program", ["mirrored.py", "parameter_server.py"])
def test_pyright_finds_nothing(program: str, tmp_path: Path) -> None:
    if (pyright := shutil.which("pyright")) is None:
        pytest.skip("pyright is not installed")
    checked(run(pyright, "--pythonpath", *PYTHON, PROGRAMS / program, cwd=tmp_path, seconds=380))


def test_what_is_typed_runs(tmp_path: Path) -> None:
    checked(*scripts(tmp_path, ([PROGRAMS / "mirrored.py"], {})))
