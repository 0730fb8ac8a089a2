"""Processes as srun and mpirun start them, without torchrun and without a resolver: one job, not many of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import free_ports, scripts

PROGRAM = """
import torch, torchstrat as ts
for make in (ts.MultiWorkerMirroredStrategy, ts.MirroredStrategy, ts.CentralStorageStrategy):
    strategy = make()
    total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(1.0)))
    print(strategy.num_replicas_in_sync, strategy.is_chief, float(total))
    strategy.close()
"""
SLURM = {
    "SLURM_JOB_ID": "{port}",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
PMI = {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "2"}
MPI = {**PMI, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}


@pytest.mark.parametrize("launcher", [SLURM, MPI], ids=["slurm", "mpi"])
def test_processes_of_a_launcher_are_one_job(launcher: dict[str, str], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = [{name: value.format(rank=rank, port=port) for name, value in launcher.items()} for rank in range(2)]
    ended = scripts(tmp_path, *(([tmp_path / "program.py"], of_rank) for of_rank in variables))
    assert [one.stdout for one in ended] == ["2 True 2.0\n" * 3, "2 False 2.0\n" * 3], ended
