"""The benchmark of `prefetch_rows`: its three tables, and rows that are exactly as old as they have to be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "ps_prefetch.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' clocks, as Linux has them")


def bench(*arguments: str) -> tuple[int, str, str]:
    """In a session of its own: what a run that is stuck has started ends with it."""
    command = [sys.executable, str(SCRIPT), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        output, complaints = process.communicate(timeout=780)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output, complaints


def rows_of(output: str, title: str) -> dict[str, list[str]]:
    """Of the table with this title: name → cells."""
    table = re.search(rf"^{title} .*\n((?:\w+ .*\n)+)", output, re.MULTILINE)
    assert table is not None, output
    cells = [line.split() for line in table[1].splitlines()]
    return {name: others for name, *others in cells if name in ("without", "prefetch_rows", "difference")}


@pytest.mark.soak
@pytest.mark.deadline(840)
def test_one_worker_reads_its_own_pushes_and_prefetched_rows_miss_the_last() -> None:
    status, output, complaints = bench("A-sgd", "--small", "--rounds", "1", "--seeds", "2", "--workers", "1")
    assert status == 0, output + complaints
    assert re.search(r"^load [\d. ]+, 512 KB from the other core in [\d.]+ µs", output, re.MULTILINE)
    assert re.search(r"^A: .*SGD, 1 \+ 2: SMALL VARIANT$", output, re.MULTILINE)

    times = {name: [float(cell.rstrip("%")) for cell in cells] for name, cells in rows_of(output, "time").items()}
    assert list(times) == ["without", "prefetch_rows"]
    assert times["without"][4:] == [1.0, 1.0]
    wall, _, cpu, _, wall_ratio, cpu_ratio = times["prefetch_rows"]
    assert wall_ratio == pytest.approx(wall / times["without"][0], abs=0.01)
    assert cpu_ratio == pytest.approx(cpu / times["without"][2], abs=0.01)

    ages = rows_of(output, "rows changed")
    assert ages["without"] == ["0.00%", "0.00%", "-", "-", "80"], "no row at all: else there were figures for a change"
    rows, ids, median, high, lookups = (float(cell.rstrip("%")) for cell in ages["prefetch_rows"])
    assert 0.0 < rows < ids < 100.0, "this worker's own last push, which names the frequent rows"
    assert 0.0 < median < high < 0.1
    assert lookups == 80

    learned = rows_of(output, "mean loss")
    for name in ("without", "prefetch_rows"):
        first, last, *each = (float(cell) for cell in learned[name])
        assert last < first
        assert sum(each) / 2 == pytest.approx(last, abs=1e-4)
    both = zip(learned["prefetch_rows"], learned["without"], strict=True)
    wanted = [float(one) - float(other) for one, other in both]
    assert [float(cell) for cell in learned["difference"]] == pytest.approx(wanted[1:], abs=2e-4)
    assert re.search(r"^standard deviation between seeds: of the difference [\d.]+", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("C",), "C unknown; choose any of A-sgd, A-adagrad"),
        (("--seeds", "1"), "--seeds of at least 2"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(arguments: tuple[str, ...], complaint: str) -> None:
    status, _, complaints = bench(*arguments)
    assert status == 2
    assert complaint in complaints
