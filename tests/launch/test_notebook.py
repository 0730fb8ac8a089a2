"""`ts.launch.Cluster` as a notebook uses it: cells that follow each other in a process without a program file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

import torchstrat as ts
from tests.support.programs import SECONDS, descendants, environment, gone, wait_for
from torchstrat.launch import Cluster, LocalCluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

KERNEL = textwrap.dedent(
    """
    # What a notebook's kernel does: an error ends its cell alone, and `__main__` has no file.
    import code, json, sys, warnings

    warnings.simplefilter("ignore")
    sys.ps1 = ">>> "

    class Kernel(code.InteractiveInterpreter):
        def showtraceback(self):
            super().showtraceback()
            print("raised", type(sys.last_value).__name__)

    kernel = Kernel(globals())
    for number, cell in enumerate(json.loads(sys.argv[1])):
        kernel.runcode(compile(cell, f"<cell {number}>", "exec"))
    """
)

CLUSTER = """
import os, signal, threading, time
from pathlib import Path
import torch, torchstrat as ts
cluster = ts.launch.Cluster(ps=1, workers=1)
strategy = cluster.strategy()
coordinator = ts.ClusterCoordinator(strategy)
print("pids", *(cluster.process(job, 0).pid for job in ("ps", "worker")))
"""

MODEL = """
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.arange(8.0).reshape(2, 4) / 8
def lost(a):
    return a.square().sum()
def step():
    optimizer.zero_grad()
    loss = lost(model(x))
    loss.backward()
    optimizer.step()
    return float(loss.detach())
losses = [coordinator.schedule(step) for _ in range(20)]
coordinator.join()
print("trained", losses[-1].fetch() < losses[0].fetch())
"""


def pids_in(said: str) -> list[int]:
    return [int(pid) for line in re.findall(r"^pids (.*)$", said, re.MULTILINE) for pid in line.split()]


def assert_gone(pids: Iterable[int]) -> None:
    assert pids
    wait_for(lambda: all(map(gone, pids)), "an end of all processes", seconds=20)


def test_one_class_with_three_names() -> None:
    assert ts.launch.Cluster is Cluster is LocalCluster is ts.testing.LocalCluster is ts.testing.Cluster


FAILING = [
    "1 / 0",
    "def lost(a):\n    return 0 * a.sum() + 7",
    "print('the helper is', coordinator.schedule(step).fetch())",
    "class Answer:\n    def of(self):\n        return 1",
    "answer = lambda: Answer().of()\nprint('the class says', coordinator.schedule(answer).fetch())",
    "class Answer:\n    def of(self):\n        return 2",
    "print('the class says', coordinator.schedule(answer).fetch())",
    "def fails():\n    raise ValueError('on the worker')\ncoordinator.schedule(fails)\ncoordinator.join()",
    "print('afterwards', coordinator.schedule(answer).fetch())",
    # of the same cluster: fresh variables, though a cell has failed
    "before = strategy\nstrategy = cluster.strategy()\ncoordinator = ts.ClusterCoordinator(strategy)",
    "with strategy.scope():\n    fresh = torch.nn.Linear(4, 1)",
    "there = coordinator.schedule(lambda: fresh.weight.detach().clone()).fetch()",
    "print('as initialised here', torch.equal(torch.as_tensor(there), fresh.weight.detach()))",
    "def lost(a):\n    return a.square().sum()",
    MODEL,
    "try:\n    ts.ClusterCoordinator(before)\nexcept ts.errors.ContextError as error:\n    print(error)",
]
"""Cells that fail, and functions that are defined again."""

RUN_AGAIN = [
    "first = cluster",
    CLUSTER,
    MODEL,
    "print(first, cluster)\nprint('gone', not Path('/proc', str(first.process('ps', 0).pid)).exists())",
    "try:\n    first.strategy()\nexcept ts.errors.ContextError as error:\n    print(error)",
    "with ts.launch.Cluster(ps=1, workers=1) as inner:\n    inner.strategy()",
    "print(cluster, inner, coordinator.schedule(lambda: 6).fetch())",
]
"""A cell that is run again ends the cluster that it made before, and a ``with`` statement does not."""

INTERRUPTED_START = """
import torchstrat.launch.local_cluster as module
whole = module.ForkServer
def interrupted(*arguments):
    module.ForkServer = whole
    raise KeyboardInterrupt
module.ForkServer = interrupted
cluster = ts.launch.Cluster(ps=1, workers=1)
strategy = cluster.strategy()
"""

INTERRUPTED_MEETING = """
from torchstrat.parameter_server.membership.membership import ClusterMembership
wait_for = ClusterMembership.wait_for
def interrupted(self, *arguments):
    ClusterMembership.wait_for = wait_for
    raise KeyboardInterrupt
ClusterMembership.wait_for = interrupted
with strategy.scope():
    model = torch.nn.Linear(4, 1)
"""

INTERRUPT_IN_JOIN = """
folder = Path({folder!r})
def waits():
    (folder / "runs").touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)
    return "waited"
def interrupt():
    while not (folder / "runs").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
result = coordinator.schedule(waits)
threading.Thread(target=interrupt).start()
coordinator.join()
"""

INTERRUPT_IN_SCHEDULE = """
# In the middle of a call, after the batch was taken from where it waits and before it is sent.
calls = type(coordinator._dispatcher._worker_calls)
send = calls.send_batch
def interrupted(self, *arguments):
    calls.send_batch = send
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
    send(self, *arguments)
calls.send_batch = interrupted
coordinator.schedule(step)
print("the call went on")
"""


LAST = """
with ts.launch.Cluster(ps=1, workers=1) as inner:
    print('alone', ts.ClusterCoordinator(inner.strategy()).schedule(lambda: 7).fetch())
    print("pids", *(inner.process(job, 0).pid for job in ("ps", "worker")))
    print("ready", flush=True)
    threading.Event().wait()
"""


def run_until_it_is_killed(cells: list[str], folder: Path) -> tuple[str, str]:
    """What is printed until "ready". Of all the processes that it names those of the last cluster live until then."""
    out, err, command = folder / "out", folder / "err", [sys.executable, "-c", KERNEL, json.dumps(cells)]
    streams = {"stdout": out.open("w"), "stderr": err.open("w")}
    with subprocess.Popen(command, env=environment(), **streams) as kernel, streams["stdout"], streams["stderr"]:
        try:
            wait_for(
                lambda: "ready\n" in out.read_text() or kernel.poll() is not None,
                "the last cell",
                progress=lambda: (out.read_text(), err.read_text()),
            )
            said, errors = out.read_text(), err.read_text()
            assert said.endswith("ready\n"), said + errors
            *ended, server, worker = pids_in(said)
            assert len({*ended, server, worker}) == 6, "of three cells"
            assert all(map(gone, ended))
            assert not any(map(gone, (server, worker)))
            all_of_it = descendants(kernel.pid)
            assert len(all_of_it) == 4, "with the fork server and the reaper"
        finally:
            kernel.kill()
        kernel.wait(120)
        assert_gone((server, worker, *all_of_it))
    return said, errors


@pytest.mark.deadline(900)  # forty cells, four clusters
def test_one_kernel_to_its_violent_end(tmp_path: Path) -> None:
    """Nothing stays when it is killed."""
    interrupted = [
        INTERRUPTED_START,
        "print(cluster, 'TORCHSTRAT_SECRET' in os.environ)\nstrategy = cluster.strategy()",
        INTERRUPTED_MEETING,
        "coordinator = ts.ClusterCoordinator(strategy)",
        MODEL,
        INTERRUPT_IN_JOIN.format(folder=str(tmp_path)),
        "(folder / 'go on').touch()\nprint('the function has', result.fetch())",
        INTERRUPT_IN_SCHEDULE,
        "coordinator.join(60)\nprint('joined')",
        MODEL,
        "cluster.close()\nprint('handler', signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
        "print(cluster, 'TORCHSTRAT_SECRET' in os.environ)",
    ]
    cells = [CLUSTER, MODEL, *FAILING, *RUN_AGAIN, *interrupted, LAST]
    said, errors = run_until_it_is_killed(cells, tmp_path)
    raised = ["ZeroDivisionError", "ValueError", "ContextError", *["KeyboardInterrupt"] * 4]
    assert re.findall("^raised (.*)$", said, re.MULTILINE) == raised, errors
    assert said.count("trained True") == 5
    left = said
    for one in (
        "the helper is 7.0",
        "the class says 1",
        "the class says 2",
        "afterwards 2",
        "as initialised here True",
        "was closed",
        "Cluster(ps=1, workers=1, closed) Cluster(ps=1, workers=1, running)",
        "gone True",
        "was started before, and is closed; make another Cluster",
        "Cluster(ps=1, workers=1, running) Cluster(ps=1, workers=1, closed) 6",
        "Cluster(ps=1, workers=1, not started) False",
        "the function has waited",
        "joined",
        "handler True",
        "Cluster(ps=1, workers=1, closed) False",
        "alone 7",
    ):
        _, found, left = left.partition(one)
        assert found, f"no {one!r}, or not after the one before it: {said}{errors}"
    assert "the call went on" not in said


@pytest.mark.soak  # the kernel above runs the same cells, and starts in a tenth of the time
def test_a_real_notebook() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    again = "print('again', coordinator.schedule(step).fetch() >= 0)"
    cells = [CLUSTER, MODEL, "1 / 0", "cluster", "strategy", again]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=SECONDS, allow_errors=True, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert [output.ename for output in outputs if output.output_type == "error"] == ["ZeroDivisionError"]
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert shown[0]["text/plain"] == "Cluster(ps=1, workers=1, running)"
    assert "<td>worker 0</td>" in shown[0]["text/html"]
    assert "<td>chief</td>" in shown[1]["text/html"]
    assert "trained True" in said
    assert "again True" in said
    assert_gone(pids_in(said))
