"""The parameter-server benchmark: contenders compute the same, tables appear, the status says what counts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "parameter_server.py"
WORKERS_SCRIPT = SCRIPT.with_name("ps_workers.py")
DEADLINE_SECONDS = 780

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' clocks, as Linux has them")


def bench(*arguments: str, script: Path = SCRIPT) -> tuple[int, str, str]:
    """In a session of its own: what a run that is stuck has started ends with it."""
    command = [sys.executable, str(script), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        output, complaints = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output, complaints


def rows_of(table: str) -> dict[str, list[float]]:
    """Name → wall clock, spread in percent, CPU, and what follows."""
    found = re.findall(
        r"^(floor|floor_retained|tutorial|torchstrat|torchstrat_rpc) {2,}([\d.% ]+)$", table, re.MULTILINE
    )
    return {name: [float(cell.rstrip("%")) for cell in cells.split()] for name, cells in found}


@pytest.mark.soak
@pytest.mark.deadline(840)
def test_one_round_prints_a_table_per_workload_and_does_not_count():
    status, output, complaints = bench("A-sgd", "C", "--small", "--rounds", "1")
    assert status == 1, output + complaints  # one round says nothing about the noise
    head, trained, called = re.split(r"^(?=[AC]: )", output, flags=re.MULTILINE)
    assert re.search(r"^load [\d. ]+, 512 KB from the other core in [\d.]+ µs", head, re.MULTILINE)
    for name in ("tutorial", "torchstrat"):
        apart = re.search(rf"^{name}, 1 worker: the floor's first 8 losses, at most (\S+) apart", trained, re.MULTILINE)
        assert apart is not None
        assert float(apart[1]) <= 1e-5
    for table in (trained, called):
        rows = rows_of(table)
        assert list(rows) == ["floor", "floor_retained", "tutorial", "torchstrat", "torchstrat_rpc"]
        assert all(wall > 0.0 for name, (wall, *_) in rows.items() if name != "floor" and name != "floor_retained")
        assert "over 1 rounds: this run does NOT count" in table
    assert rows_of(trained)["floor"][3:] == pytest.approx([1.0, rows_of(trained)["floor"][4], 1.0])
    wall, _, cpu, *ratios = rows_of(trained)["torchstrat"]
    floor_wall, _, floor_cpu, *_ = rows_of(trained)["floor"]
    assert ratios[0] == pytest.approx(wall / floor_wall, abs=0.02, rel=0.01)
    assert ratios[2] == pytest.approx(cpu / floor_cpu, abs=0.02, rel=0.01)
    assert re.search(r"^torchstrat: 2 server\(s\) resident \d+ MiB", trained, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nonsense",), "nonsense unknown; choose any of A-sgd, A-adagrad, B-1+1, B-2+2, C, C-one"),
        (("C", "--contenders", "torchstrat"), "--contenders needs it"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(arguments, complaint):
    status, _, complaints = bench(*arguments)
    assert status == 2
    assert complaint in complaints


@pytest.mark.soak
@pytest.mark.deadline(840)
def test_more_workers_make_a_table_and_two_pictures():
    options = ("A-adagrad", "--small", "--rounds", "1", "--workers", "1", "3")
    status, output, complaints = bench(*options, script=WORKERS_SCRIPT)
    assert status == 0, output + complaints
    assert re.search(r"^A: .*Adagrad, workers \+ 2: SMALL VARIANT; \d+ cores$", output, re.MULTILINE)
    rows = re.findall(r"^(floor|torchstrat), (\d) worker\(s\) +([\d.% ]+)$", output, re.MULTILINE)
    found = {(name, int(number)): [float(cell.rstrip("%")) for cell in cells.split()] for name, number, cells in rows}
    assert list(found) == [("floor", 1), ("torchstrat", 1), ("floor", 3), ("torchstrat", 3)]
    assert [cells[0] for cells in found.values()] == [1, 4, 3, 6], "processes"
    of_one, of_three = found["torchstrat", 1], found["torchstrat", 3]
    assert of_three[3] == pytest.approx(of_three[1] / found["floor", 3][1], abs=0.01)
    assert of_three[6] == pytest.approx(of_three[4] / of_one[4], abs=0.02)
    for title, column in (("steps per second", 1), ("CPU ms per step", 4)):
        picture = output.partition(f"\n{title}, all ")[2].partition("\n\n")[0]
        bars = re.findall(r"([░█]*) ([\d.]+)$", picture, re.MULTILINE)
        assert [float(number) for _, number in bars] == pytest.approx([row[column] for row in found.values()], abs=0.06)
        assert max(len(bar) for bar, _ in bars) == 50


class TestStatus:
    """Whether a run counts, from made-up measurements."""

    @pytest.fixture
    def benchmark(self, monkeypatch):
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        import parameter_server

        yield parameter_server
        for name in ("parameter_server", "ps_contenders", "ps_workloads", "train_step"):
            sys.modules.pop(name, None)

    @pytest.mark.parametrize(
        ("walls", "counts"),
        [((1.0, 1.0, 1.09), True), ((1.0, 1.0, 1.11), False), ((1.0, 1.0), False), ((1.0, 1.05, 0.97, 1.0), True)],
    )
    def test_the_floors_spread_and_the_number_of_rounds(self, benchmark, walls, counts):
        def measured(wall: float):
            return benchmark.Measurement(wall, wall, [], server_bytes=0, idle_bytes=0, held_bytes=1)

        results = {"floor": [measured(wall) for wall in walls], "torchstrat": [measured(9.0 * wall) for wall in walls]}
        for name in ("A-sgd", "C"):
            assert benchmark.report(benchmark.WORKLOADS[name], results) is counts

    def test_another_training_than_the_floors_is_refused(self, benchmark, monkeypatch):
        losses = {"floor": [0.7, 0.69], "torchstrat": [0.7, 0.68]}
        monkeypatch.setattr(
            benchmark,
            "measure_once",
            lambda name, _: benchmark.Measurement(1.0, 1.0, losses[name], server_bytes=0, idle_bytes=0, held_bytes=1),
        )
        with pytest.raises(SystemExit, match="torchstrat trains something else than the floor"):
            benchmark.check_losses(["floor", "torchstrat"], ["A-sgd"])
        losses["torchstrat"] = [0.7, 0.69 * (1 + 1e-6)]
        benchmark.check_losses(["floor", "torchstrat"], ["A-sgd"])
