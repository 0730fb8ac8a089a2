"""Checkpoints of real parameter servers while functions run: one moment across servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstrat import Checkpoint
from torchstrat.launch import LocalCluster

pytestmark = pytest.mark.deadline(400)

ROOT = Path(__file__).resolve().parents[2]
SAVES = 6
SIZE = 300_000

STREAM = textwrap.dedent(
    """
    import contextlib, json, sys, threading, time
    import torch
    import torchstrat as ts
    from torchstrat.parameter_server.dispatcher import Dispatcher

    SIZE, SAVES = 300_000, 6
    folder, pauses_functions = sys.argv[1], sys.argv[2] == "with the pause"
    strategy = ts.ParameterServerStrategy(ts.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        first = ts.Variable(torch.zeros(SIZE), name="first")
        second = ts.Variable(torch.zeros(SIZE), name="second")
        table = torch.nn.Embedding(50_000, 8)
        optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    coordinator = ts.ClusterCoordinator(strategy)
    checkpoint = ts.Checkpoint(first=first, second=second, table=table, optimizer=optimizer)
    pauses, paused = [], Dispatcher.paused

    @contextlib.contextmanager
    def timed(self, *args):
        began = time.monotonic()
        with paused(self, *args) if pauses_functions else contextlib.nullcontext():
            yield
        pauses.append(time.monotonic() - began)

    Dispatcher.paused = timed

    def add(seed):
        first.assign_add(torch.ones(SIZE))
        ids = torch.randint(50_000, (2_000,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()
        second.assign_add(torch.ones(SIZE))

    stop, scheduled = threading.Event(), 0

    def stream():
        global scheduled
        while not stop.is_set():
            for _ in range(4):
                coordinator.schedule(add, args=(scheduled,))
                scheduled += 1
            while not stop.is_set() and coordinator._dispatcher.num_unfinished > 4:
                time.sleep(0.002)

    thread = threading.Thread(target=stream)
    thread.start()
    seconds, handle = [], None
    try:
        for number in range(SAVES):
            began = time.monotonic()
            handle = checkpoint.save(f"{folder}/step-{number}", asynchronous=number % 2 == 1)
            seconds.append(time.monotonic() - began)
    finally:
        stop.set()
        thread.join()
    coordinator.join(timeout=120)
    handle.result(120)
    ends = [float(first.read_value()[0]), float(second.read_value()[0])]
    print(json.dumps({"scheduled": scheduled, "ends": ends, "pauses": pauses, "seconds": seconds}))
    """
)


def run(program: str, tmp_path: Path, *args: str, env: dict[str, str] | None = None) -> str:
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, str(script), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def saved_pairs(folder: Path) -> list[tuple[float, float]]:
    """(first, second) in each checkpoint, after a look that each is one value throughout."""
    pairs = []
    for number in range(SAVES):
        values = {"first": torch.full((SIZE,), -1.0), "second": torch.full((SIZE,), -1.0)}
        Checkpoint(**values).restore(folder / f"step-{number}")
        assert all(bool((value == value[0]).all()) for value in values.values()), "a torn variable"
        pairs.append((float(values["first"][0]), float(values["second"][0])))
    return pairs


@pytest.mark.soak  # with threads for processes, and each moment forced: tests/unit/test_checkpoint_cut.py
def test_variables_on_two_servers_are_of_one_moment(tmp_path: Path) -> None:
    """Every function adds 1 to a variable on each server. So they are equal whenever no function is half-way."""
    told: dict[str, Any] = {}
    with LocalCluster(workers=2, ps=2) as cluster:
        for how in ("with the pause", "without"):
            folder = tmp_path / how
            env = cluster.environment_of("chief", 0)
            told[how] = json.loads(run(STREAM, tmp_path, str(folder), how, env=env).splitlines()[-1])
    for one in told.values():
        assert one["ends"] == [one["scheduled"]] * 2, "a function was lost, or ran twice"
    pairs = saved_pairs(tmp_path / "with the pause")
    assert all(first == second for first, second in pairs)
    assert len(set(pairs)) == SAVES, "functions went on between saves"
    torn = saved_pairs(tmp_path / "without")
    assert any(first != second for first, second in torn), "the control"
    pauses = ", ".join(f"{1e3 * pause:.0f}" for pause in told["with the pause"]["pauses"])
    print(f"dispatching paused for {pauses} ms; saves took {told['with the pause']['seconds']}")
