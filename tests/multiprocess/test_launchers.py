"""Processes as srun and mpirun start them, without torchrun and without a resolver: one job, not many of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import torch, torchstrat as ts
strategy = ts.{strategy}
total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(1.0)))
print(strategy.num_replicas_in_sync, strategy.is_chief, float(total))
strategy.close()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }


def mpi(rank: int, port: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize(
    "strategy", ["MultiWorkerMirroredStrategy()", "MirroredStrategy()", "CentralStorageStrategy()"]
)
@pytest.mark.parametrize("launcher", [slurm, mpi])
def test_processes_of_a_launcher_are_one_job(launcher, strategy):
    port = free_port()
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(strategy=strategy)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **launcher(rank, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [task.communicate(timeout=120) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [(answer.split(), errors) for answer, errors in answers] == [
        (["2", "True", "2.0"], ""),
        (["2", "False", "2.0"], ""),
    ]
