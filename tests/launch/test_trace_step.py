"""``scripts/trace_step.py``: which files a warm step runs, by role."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.deadline(300)


def followed(path: str) -> dict[str, dict[str, list[str]]]:
    """By role: the files, with the functions called in each."""
    command = [sys.executable, str(ROOT / "scripts" / "trace_step.py"), path, "--files"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, list[str]]] = {}
    for line in run.stdout.splitlines()[1:]:
        if row := re.match(rf"{path} +(\w+) +(\d+)", line):
            role, count = row[1], int(row[2])
            found[role] = {"": [str(count)]}
        else:
            file, _, names = line.strip().partition(": ")
            found[role][file] = names.split(", ")
    return found


@pytest.mark.soak  # a tool for who works on the library, as the benchmarks are
def test_a_step_of_replicas_in_one_process() -> None:
    files = followed("in_process")["replica"]
    assert int(files.pop("")[0]) == len(files)
    assert "kept_pages.py" not in " ".join(files), "what has been set up is not set up again"
    for file, name in (("strategies/strategy.py", "Strategy.run"), ("data/distributed.py", "__next__")):
        assert any(name in one for one in files[file]), files[file]


@pytest.mark.soak
def test_a_function_on_parameter_servers() -> None:
    roles = followed("servers")
    assert list(roles) == ["coordinator", "worker", "server", "all"]
    for role, file in (
        ("coordinator", "dispatcher.py"),
        ("worker", "worker/executor.py"),
        ("server", "server/store.py"),
    ):
        own = f"parameter_server/{file}"
        assert [one for one in ("coordinator", "worker", "server") if own in roles[one]] == [role]
    counts = [int(files[""][0]) for files in roles.values()]
    assert max(counts[:3]) < counts[3] < sum(counts[:3])
