"""A job of parameter servers as ``srun`` starts it: every task has the step's variables, and all run at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROLES = {"chief": 1, "ps": 1, "worker": 2}

CHIEF = """
import json, os, sys
import torch
import torchstrat as ts

resolver = ts.cluster_resolver.SlurmClusterResolver(jobs=json.loads(sys.argv[1]), port_base=int(sys.argv[2]))
strategy = ts.ParameterServerStrategy(resolver)
with strategy.scope():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
coordinator = ts.ClusterCoordinator(strategy)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return os.environ["SLURM_PROCID"]

before = model.state_dict()["bias"].clone()
ranks = {coordinator.schedule(step).get(timeout=60) for _ in range(3)}
assert torch.allclose(before - model.state_dict()["bias"], torch.tensor([0.3]))
assert ranks <= {"2", "3"}, ranks
strategy.close()
print("done")
"""


@pytest.mark.deadline(150)
def test_a_step_of_four_tasks(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(CHIEF)
    tasks = sum(ROLES.values())
    port = _free_ports(tasks)
    words = {
        0: [str(program), json.dumps(ROLES), str(port)],
        1: ["-m", "torchstrat.server", "--resolver", "slurm", "--jobs", json.dumps(ROLES), "--port", str(port)],
    }
    with ExitStack() as running:
        started = []
        for rank in range(tasks):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHSTRAT_SECRET": "of this test only, 32 characters or more",
                "SLURM_JOB_ID": "7",
                "SLURM_PROCID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_TASKS_PER_NODE": str(tasks),
                "SLURM_STEP_NUM_TASKS": str(tasks),
            }
            arguments = [*words[min(rank, 1)], *(["--exit-when-finished"] if rank else [])]
            process = subprocess.Popen(
                [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.callback(process.kill)
            started.append(process)
        ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
    assert [code for _, _, code in ended] == [0] * tasks, ended
    assert "done" in ended[0][0]
    assert "ps 0 listens on" in ended[1][1]
    assert "worker 1 listens on" in ended[3][1]


def _free_ports(count: int) -> int:
    """The first of as many ports in a row that nobody listens on."""
    while True:
        with ExitStack() as taken:
            first = taken.enter_context(socket.create_server(("localhost", 0)))
            port: int = first.getsockname()[1]
            try:
                for number in range(port + 1, port + count):
                    taken.enter_context(socket.create_server(("localhost", number)))
            except (OSError, OverflowError):
                continue
            return port
