"""Which job a process is of, from mappings in place of the environment; and what strategies make of it."""

from __future__ import annotations

import pytest

import torchstrat as ts
from tests.unit.test_cluster import TORCHRUN, tf_config
from torchstrat.cluster_resolver import KubernetesClusterResolver, SlurmClusterResolver, TorchrunClusterResolver
from torchstrat.errors import ClusterConfigError, UnsupportedError
from torchstrat.launcher import launched_job, launched_plan

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "a,b",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        (TORCHRUN, "torchrun", 3, 4),
        (tf_config({"worker": ["a:1", "b:1"]}, "worker", 1), "TF_CONFIG", 1, 2),
        (SLURM, "Slurm (srun)", 1, 2),
        (MPI | MEETING, "mpirun", 2, 4),
        (SLURM | TORCHRUN, "torchrun", 3, 4),
    ],
)
def test_the_job_of_each_launcher(environ, launcher, rank, size):
    job = launched_job(environ)
    assert (job.launcher, job.plan.rank, job.plan.size) == (launcher, rank, size)


def test_a_pod_of_the_training_operator_without_torchrun():
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }
    job = launched_job(environ)
    assert (job.plan.rank, job.plan.size, job.plan.init_method) == (1, 2, "tcp://job-master-0:23456")
    assert isinstance(job.resolver, KubernetesClusterResolver)
    under_torchrun = launched_job(environ | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert isinstance(under_torchrun.resolver, TorchrunClusterResolver)


def test_the_tasks_of_a_step_meet_at_one_port_which_steps_do_not_share():
    ranks = [launched_job(SLURM | {"SLURM_PROCID": rank}).plan for rank in "01"]
    assert ranks[0].init_method == ranks[1].init_method
    assert launched_job(SLURM | {"SLURM_STEP_ID": "1"}).plan.init_method != ranks[0].init_method


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # a batch script, which is one process
        tf_config({"worker": ["a:1", "b:1"], "ps": ["c:1"], "chief": ["d:1"]}, "worker", 1),
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_no_job(environ):
    assert launched_job(environ) is None


def test_mpi_does_not_say_where_ranks_meet():
    with pytest.raises(ClusterConfigError, match=r"MASTER_ADDR.*MASTER_PORT.*TORCHSTRAT_INDEPENDENT=1"):
        launched_job(MPI)


def set_environment(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environ", [TORCHRUN, SLURM, MPI | MEETING, tf_config({"worker": ["a:1", "b:1"]}, "worker", 1)]
)
def test_a_strategy_of_one_process_names_both_remedies(monkeypatch, environ):
    set_environment(monkeypatch, environ)
    remedies = r"MultiWorkerMirroredStrategy.*independent=True.*TORCHSTRAT_INDEPENDENT=1"
    for make in (lambda: ts.OneDeviceStrategy("cpu"), ts.TPUStrategy):
        with pytest.raises(UnsupportedError, match=remedies):
            make()
    ts.OneDeviceStrategy("cpu", independent=True).close()
    monkeypatch.setenv("TORCHSTRAT_INDEPENDENT", "1")
    ts.OneDeviceStrategy("cpu").close()


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, MPI | MEETING])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ts.MirroredStrategy(["cpu:0"], independent=True),
        lambda: ts.CentralStorageStrategy(["cpu:0"], independent=True),
        lambda: ts.MultiWorkerMirroredStrategy(independent=True),
    ],
)
def test_independent_processes_join_nobody(monkeypatch, environ, make):
    set_environment(monkeypatch, environ)
    strategy = make()
    assert strategy.num_replicas_in_sync == 1
    strategy.close()


def test_an_application_sees_what_its_strategies_see(monkeypatch):
    set_environment(monkeypatch, SLURM)
    assert launched_plan().size == 2
    monkeypatch.setenv("TORCHSTRAT_INDEPENDENT", "1")
    assert launched_plan() is None


def test_processes_on_several_hosts_are_called_by_their_launcher(monkeypatch):
    set_environment(monkeypatch, SLURM)
    with pytest.raises(UnsupportedError, match=r"Slurm \(srun\) started 2 .*MultiWorkerMirroredStrategy.*independent"):
        ts.MirroredStrategy()


def test_the_strategy_shows_what_describes_its_job(monkeypatch):
    set_environment(monkeypatch, {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "localhost",
                                  "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"})  # fmt: skip
    strategy = ts.MultiWorkerMirroredStrategy()
    assert isinstance(strategy.cluster_resolver, SlurmClusterResolver)
    strategy.close()
