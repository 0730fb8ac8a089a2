"""The benchmarks of parameter servers: contenders compute the same, tables appear, the status says what counts."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.programs import ROOT

BENCHMARKS = ROOT / "scripts" / "bench"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' clocks, as Linux has them"),
    pytest.mark.deadline(840),
]


def bench(script: str, *arguments: str) -> tuple[int, str, str]:
    """In a session of its own: what a run that is stuck has started ends with it."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--small", "--rounds", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        output, complaints = process.communicate(timeout=780)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output, complaints


def numbers(cells: str) -> list[float]:
    return [float(cell.rstrip("%")) for cell in cells.split()]


def rows_of(table: str) -> dict[str, list[float]]:
    """Name → wall clock, spread in percent, CPU, and what follows."""
    names = "floor|floor_retained|tutorial|torchstrat|torchstrat_rpc"
    return {name: numbers(cells) for name, cells in re.findall(rf"^({names}) {{2,}}([\d.% ]+)$", table, re.MULTILINE)}


@pytest.mark.soak
def test_one_round_prints_a_table_per_workload_and_does_not_count() -> None:
    status, output, complaints = bench("parameter_server.py", "A-sgd", "C")
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


@pytest.mark.soak
def test_more_workers_make_a_table_and_two_pictures() -> None:
    status, output, complaints = bench("ps_workers.py", "A-adagrad", "--workers", "1", "3")
    assert status == 0, output + complaints
    assert re.search(r"^A: .*Adagrad, workers \+ 2: SMALL VARIANT; \d+ cores$", output, re.MULTILINE)
    rows = re.findall(r"^(floor|torchstrat), (\d) worker\(s\) +([\d.% ]+)$", output, re.MULTILINE)
    found = {(name, int(number)): numbers(cells) for name, number, cells in rows}
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


@pytest.mark.soak
def test_one_worker_reads_its_own_pushes_and_prefetched_rows_miss_the_last() -> None:
    status, output, complaints = bench("ps_prefetch.py", "A-sgd", "--seeds", "2", "--workers", "1")
    assert status == 0, output + complaints
    assert re.search(r"^load [\d. ]+, 512 KB from the other core in [\d.]+ µs", output, re.MULTILINE)
    assert re.search(r"^A: .*SGD, 1 \+ 2: SMALL VARIANT$", output, re.MULTILINE)

    def cells(title: str) -> dict[str, str]:
        table = re.search(rf"^{title} .*\n((?:\w+ .*\n)+)", output, re.MULTILINE)
        assert table is not None, output
        rows = [line.split(maxsplit=1) for line in table[1].splitlines()]
        return {name: others for name, others in rows if name in ("without", "prefetch_rows", "difference")}

    times = {name: numbers(row) for name, row in cells("time").items()}
    assert list(times) == ["without", "prefetch_rows"]
    assert times["without"][4:] == [1.0, 1.0]
    wall, _, cpu, _, wall_ratio, cpu_ratio = times["prefetch_rows"]
    assert wall_ratio == pytest.approx(wall / times["without"][0], abs=0.01)
    assert cpu_ratio == pytest.approx(cpu / times["without"][2], abs=0.01)

    ages = cells("rows changed")
    assert ages["without"].split() == ["0.00%", "0.00%", "-", "-", "80"], "none: else there were figures for a change"
    rows, ids, median, high, lookups = numbers(ages["prefetch_rows"])
    assert 0.0 < rows < ids < 100.0, "this worker's own last push, which names the frequent rows"
    assert 0.0 < median < high < 0.1
    assert lookups == 80

    learned = {name: numbers(row) for name, row in cells("mean loss").items()}
    for name in ("without", "prefetch_rows"):
        first, last, *each = learned[name]
        assert last < first
        assert sum(each) / 2 == pytest.approx(last, abs=1e-4)
    wanted = [one - other for one, other in zip(learned["prefetch_rows"], learned["without"], strict=True)]
    assert learned["difference"] == pytest.approx(wanted[1:], abs=2e-4)
    assert re.search(r"^standard deviation between seeds: of the difference [\d.]+", output, re.MULTILINE)


@pytest.mark.soak  # a benchmark, started like the others
def test_a_row_per_number_of_workers_for_each_queue() -> None:
    status, output, complaints = bench("ps_scheduling.py")
    tables = re.findall(r"^(deep queue|two functions per worker)\nworkers .*\n((?:\d+ .*\n)+)largest", output, re.M)
    assert [name for name, _ in tables] == ["deep queue", "two functions per worker"], output + complaints
    for _, rows in tables:
        workers, cpu = zip(*(row.split()[:2] for row in rows.splitlines()), strict=True)
        assert workers == ("2", "4", "8", "16", "32", "64")
        assert all(float(figure) > 0 for figure in cpu)
    limits = re.findall(r"over smallest: ([\d.]+) \(limit 1.2\)", output)
    assert status == int(max(map(float, limits)) > 1.2)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {file.stem for file in BENCHMARKS.glob("*.py")} & (sys.modules.keys() - before):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("parameter_server", ["x"], "x unknown; choose any of A-sgd, A-adagrad, B-1+1, B-2+2, C, C-one"),
        ("parameter_server", ["C", "--contenders", "torchstrat"], "--contenders needs it"),
        ("ps_prefetch", ["C"], "C unknown; choose any of A-sgd, A-adagrad"),
        ("ps_prefetch", ["--seeds", "1"], "--seeds of at least 2"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    name: str, arguments: list[str], complaint: str, script: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        script(name).main()
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("walls", "counts"),
    [((1.0, 1.0, 1.09), True), ((1.0, 1.0, 1.11), False), ((1.0, 1.0), False), ((1.0, 1.05, 0.97, 1.0), True)],
)
def test_the_floors_spread_and_the_number_of_rounds(script: Any, walls: tuple[float, ...], counts: bool) -> None:
    benchmark = script("parameter_server")

    def measured(wall: float) -> Any:
        return benchmark.Measurement(wall, wall, [], peak=0, server_bytes=0, idle_bytes=0, held_bytes=1)

    results = {"floor": [measured(wall) for wall in walls], "torchstrat": [measured(9.0 * wall) for wall in walls]}
    for name in ("A-sgd", "C"):
        assert benchmark.report(benchmark.WORKLOADS[name], results) is counts


def test_another_training_than_the_floors_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, losses = script("parameter_server"), {"floor": [0.7, 0.69], "torchstrat": [0.7, 0.68]}

    def measured(name: str, _: Any) -> Any:
        return benchmark.Measurement(1.0, 1.0, losses[name], peak=0, server_bytes=0, idle_bytes=0, held_bytes=1)

    monkeypatch.setattr(benchmark, "measure_once", measured)
    with pytest.raises(SystemExit, match="torchstrat trains something else than the floor"):
        benchmark.check_losses(["floor", "torchstrat"], ["A-sgd"])
    losses["torchstrat"] = [0.7, 0.69 * (1 + 1e-6)]
    benchmark.check_losses(["floor", "torchstrat"], ["A-sgd"])
