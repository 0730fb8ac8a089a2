"""What ``./scripts/demo`` makes of its runs. The runs themselves are tested one by one elsewhere."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

for module in ("omegaconf", "matplotlib"):
    pytest.importorskip(module)

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


@pytest.fixture
def demo(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(DEMO.parent))
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    return importlib.import_module("demo")


@pytest.fixture
def outcome(demo):
    """Of a set-up whose parameters are ``apart`` from those of one device."""

    def make(setup, apart=0.0, accuracy=0.99, **result):
        state = {"weight": torch.full((2,), apart, dtype=torch.float64)}
        told = {"strategy": setup.strategy, "processes": 1, "replicas": 1, "logical_devices": 1}
        told |= {"accuracy": accuracy, "loss": 0.1, "examples_per_second": 1000.0, **result}
        return demo.Outcome(setup, told, steps=[], evaluations=[], early=state, final=state)

    return make


def table(demo, capsys, outcomes, baseline, left_out=""):
    """Of the runs: name → line, and all that is printed."""
    demo.print_table(outcomes, baseline, left_out)
    printed = capsys.readouterr().out
    return {line.split()[0]: line for line in printed.splitlines() if line}, printed


def test_what_the_tpu_was_left_out_for_stands_in_the_table(demo, outcome, capsys):
    baseline = outcome(demo.BASELINE)
    rows, printed = table(demo, capsys, [baseline], baseline, "torch_xla does not exist for this machine")
    assert rows["tpu"].split() == ["tpu", "left", "out", *["–"] * 6]
    assert "tpu: left out: torch_xla does not exist for this machine" in printed
    assert demo.judge([baseline], baseline) == []


@pytest.mark.parametrize(
    ("script", "why"),
    [("true", None), ("echo first; echo 'torch_xla is not for this machine' >&2; exit 3", "torch_xla is not for this")],
)
def test_the_tpus_environment_is_made_in_the_background(demo, tmp_path, monkeypatch, script, why):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "_environment.sh").write_text(f'[[ "$TORCHSTRAT_ENV" == tpu ]] || exit 9\n{script}\n')
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    environment = demo.TpuEnvironment(tmp_path / "log.txt")
    try:
        found = environment.why_not()
        assert found is None if why is None else found.startswith(why)
    finally:
        environment.close()


def test_the_time_left_goes_by_how_long_the_set_ups_before_have_taken(demo, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(demo, "SECONDS", {"one": 10, "two": 20})
    progress = demo.Progress(["one", "two"])
    progress.begin("one")
    now[0] += 30.0  # three times as slow
    progress.begin("two")
    progress.end()
    assert capsys.readouterr().err.splitlines() == ["[1/2] one: about 30 s left", "[2/2] two: about 60 s left"]


def test_the_tpus_run_is_started_in_its_own_environment(demo, outcome, tmp_path, monkeypatch):
    programs = {"devices": 8, "replicas": 4, "logical_devices": 2, "compilations": ["run 0", "run 1"]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "programs", **programs}))
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    started = []
    monkeypatch.setattr(demo, "run", lambda *arguments: started.append(arguments) or outcome(demo.TPU))
    found = demo.run_tpu(tmp_path, demo.Progress([demo.TPU.name]))
    ((setup, _, _, environment),) = started
    assert "PJRT_DEVICE" not in environment
    assert found.note.startswith("4 replicas × 2 logical devices on 8 virtual devices; 2 compilations")
    command = setup.command(tmp_path)
    assert command[0] == str(DEMO.parents[1] / ".venv-tpu" / "bin" / "python")
    assert {
        "strategy=tpu",
        *(f"strategy.{name}" for name in ("replicas=4", "logical_devices=2", "virtual_devices=8")),
    } <= {*command}


def test_logical_devices_are_in_the_table_and_numbers_are_judged(demo, outcome, capsys):
    baseline = outcome(demo.BASELINE)
    near = outcome(demo.TPU, apart=1e-6, replicas=4, logical_devices=2)
    rows, printed = table(demo, capsys, [baseline, near], baseline)
    assert "4×2" in rows["tpu"]
    assert "left out" not in printed
    assert demo.judge([baseline, near], baseline) == []
    far = outcome(demo.TPU, apart=1e-3, accuracy=0.5)
    misses = demo.judge([baseline, far], baseline)
    assert [miss.split(":")[0] for miss in misses] == ["tpu", "tpu"]
    assert "accuracy 0.5000 is below" in misses[0]
    assert "1.0e-03 from one_device" in misses[1]


def steps_with(losses):
    return [{"step": number, "loss": loss} for number, loss in enumerate(losses, 1)]


FALLING = [2.0 * 0.9**step for step in range(100)]
FULL = [{"rows": 9, "finished": 9}] * 2


@pytest.mark.parametrize(
    ("steps", "ledgers", "says"),
    [
        (steps_with(FALLING)[:50] + steps_with(FALLING)[49:], FULL, "twice"),
        (steps_with(FALLING)[:50] + steps_with(FALLING)[51:], FULL, "misses"),
        (steps_with(FALLING), FULL[:1], "of 2 epochs"),
        (steps_with(FALLING), [FULL[0], {"rows": 9, "finished": 8}], "8 of 9"),
        (steps_with(FALLING[:50] + FALLING[:50]), FULL, "its loss went from"),
        (steps_with(FALLING[:50]), FULL, "to nan at step 50"),
    ],
)
def test_what_a_run_that_went_on_can_miss(demo, outcome, steps, ledgers, says):
    assert list(demo.broken_promises(steps_with(FALLING), FULL, seam=50, epochs=2)) == []
    (miss,) = demo.broken_promises(steps, ledgers, seam=50, epochs=2)
    assert says in miss
    baseline = outcome(demo.BASELINE)
    resumed = demo.replace(outcome(demo.RESUMED), early={}, misses=(miss,))
    killed = demo.replace(outcome(demo.PARAMETER_SERVERS), early={})
    assert demo.judge([baseline, killed, resumed], baseline) == [f"parameter_server-resumed: {miss}"]
