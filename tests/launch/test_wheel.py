"""What a user installs: sdist and wheel are built, checked, and used in an empty environment without the repository.

No index is asked: torch and the rest are borrowed from this environment, from which torchstrat itself is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.launch.test_documents import save
from tests.support.programs import ROOT

pytest.importorskip("build", reason="sdist and wheel are built by `build`, of the extra dev")
pytest.importorskip("twine", reason="sdist and wheel are checked by `twine`, of the extra dev")

NOT_OF_THE_PACKAGE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "outputs", "multirun")
BUILT_HERE = ["--no-isolation"]  # with this environment's setuptools


def run(*command: Any, cwd: Path) -> str:
    """Its output, where it succeeds; without the repository on Python's path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [str(word) for word in command]
    finished = subprocess.run(words, cwd=cwd, env=environment, text=True, timeout=380, check=False, **pipes)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def environment(folder: Path) -> Path:
    """An environment with all that this one has, but for torchstrat: path entries in it are not followed."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    borrowed = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder


def install(what: list[Any], into: Path, cwd: Path) -> None:
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", into / "bin" / "python", "install", *offline, *what, cwd=cwd)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without what was made in it, and with nothing that building leaves in the true one."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "torchstrat", ignore=NOT_OF_THE_PACKAGE))


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", *BUILT_HERE, "--outdir", folder, tree, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    folder = environment(tmp_path_factory.mktemp("environment") / "env")
    install([*dist.glob("*.whl")], folder, dist)
    return folder


@pytest.mark.soak  # whether its metadata are well-formed; what the wheel has in it is looked at below
def test_an_index_would_take_them(dist: Path) -> None:
    assert sorted(file.name for file in dist.iterdir()) == [
        f"torchstrat-{ts.__version__}-py3-none-any.whl",
        f"torchstrat-{ts.__version__}.tar.gz",
    ]
    said = run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)
    assert said.count("PASSED") == 2, said


@pytest.mark.soak  # what they import has been found where its configs were, below
def test_a_first_program_and_the_application_train(installed: Path, tmp_path: Path) -> None:
    program = save("MirroredStrategy()          #", tmp_path / "train.py")
    program.write_text(program.read_text() + "print(ts.__file__)\n")
    printed = re.search(r"1 replicas, loss ([\d.]+)\n(\S+)", run(installed / "bin" / "python", program, cwd=tmp_path))
    assert printed is not None
    assert float(printed[1]) < 2.0  # it starts at about 8
    assert Path(printed[2]).is_relative_to(installed)
    run(installed / "bin" / "torchstrat", "train", "debug=smoke", cwd=tmp_path)


def test_the_wheel_has_the_configs_and_the_application_finds_them(installed: Path, tmp_path: Path) -> None:
    (packages,) = installed.glob("lib/python3*/site-packages")
    assert (packages / f"torchstrat-{ts.__version__}.dist-info").is_dir()
    copied = packages / "torchstrat" / "app" / "configs"
    own = {file.relative_to(ROOT / "configs"): file.read_bytes() for file in (ROOT / "configs").rglob("*.yaml")}
    assert {file.relative_to(copied): file.read_bytes() for file in copied.rglob("*.yaml")} == own
    said = run(installed / "bin" / "torchstrat", "train", "debug=smoke", "--cfg", "job", cwd=tmp_path)
    assert "max_steps: 5\n" in said


@pytest.mark.soak  # test_typing.py asks the type checker of programs; new is where it finds the package
def test_a_type_checker_follows_an_editable_install(tree: Path, tmp_path: Path) -> None:
    folder = environment(tmp_path / "env")
    install(["--editable", tree], folder, tmp_path)
    (entry,) = folder.glob("lib/python3*/site-packages/*torchstrat*.pth")
    assert Path(entry.read_text().strip()).samefile(tree), "no plain path entry"
    program = "import torchstrat as ts; ts.MirroredStrategy()"
    python = ["--python-executable", folder / "bin" / "python"]
    said = run(sys.executable, "-m", "mypy", "--strict", *python, "-c", program, cwd=tmp_path)
    assert said.startswith("Success"), said
