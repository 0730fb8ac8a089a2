"""Workers, servers and coordinators of a real cluster are killed, stopped and told to end: what is left is exact."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.faults.counting import (
    PATIENCE_SECONDS,
    QUIET,
    Gate,
    Training,
    cluster_with,
    is_back,
)
from tests.faults.forked import Forked
from torchstrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from torchstrat.launch import LocalCluster, RestartPolicy
from torchstrat.testing.fault_plan import Fault, FaultPlan, Line, phases

ROOT = Path(__file__).parents[2]
BUSY_MACHINE = 20
"""How much slower than idle the machine may be."""
BACK_SECONDS = 5.0

pytestmark = [pytest.mark.deadline(420), pytest.mark.usefixtures("clusters_share_a_fork_server")]


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def secrets() -> dict[str, str]:
    """What a fork is not given: its server was started before."""
    return {name: value for name, value in os.environ.items() if name.startswith("TORCHSTRAT_")}


# -- workers -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_in_each_phase(plan: FaultPlan) -> None:
    """Where it shares memory with the servers: also while it writes gradients, of a first vector and a later one."""
    with cluster_with(plan) as cluster, Training(cluster.resolver) as training:
        kills = [Fault(phase) for phase in phases.PHASES]
        if "shared memory with ps 0, 1" in training.strategy.extended.describe():
            kills += [Fault(phases.WRITING_GRADIENTS, count) for count in (1, 2, 5)]
        plan.add("worker", 1, *kills)
        ended = training.run_until(
            lambda: len(plan.fired("worker", 1)) == len(kills) and is_back(plan, "worker", 1), "the kills", 300
        )
        log = plan.log("worker", 1)
        assert [line.fault for line in plan.fired("worker", 1)] == kills
        assert len({line.pid for line in log if line.event == "start"}) == len(kills) + 1
        assert {worker for _, worker, _ in ended} == {0, 1}
        training.check_values()

        # Its data start again with each process; those of the other go on.
        rows = [row for _, worker, row in ended if worker == 0]
        assert sorted(rows) == list(range(len(rows)))
        assert training.run_on(1) < sum(worker == 1 for _, worker, _ in ended) + 6

        cluster.kill("worker", 0)  # idle, with nothing to do
        assert {worker for _, worker, _ in training.run()} <= {0, 1}
        training.check_values()
        seconds = start_up_seconds(log)
        print(f"from process start to first function: {', '.join(f'{s:.2f}' for s in seconds)} s")
        assert min(seconds) < BACK_SECONDS * BUSY_MACHINE


def start_up_seconds(log: list[Line]) -> list[float]:
    """From the start of each process that came to a function to that function."""
    started = {line.pid: line.time for line in log if line.event == "start"}
    return [line.time - started[line.pid] for line in log if line.event == "first function"]


def test_a_stopped_worker_is_replaced_and_it_comes_back(plan: FaultPlan) -> None:
    """What it pushes late is refused: tests/unit/test_ps_failures.py forces that order."""
    with cluster_with(plan) as cluster, Training(cluster.resolver) as training:
        training.run_until(lambda: is_back(plan, "worker", 1) and is_back(plan, "worker", 0), "first functions")
        plan.add("worker", 1, Fault(phases.INSIDE, signal_name="SIGSTOP"))
        results = training.schedule(20)
        training.coordinator.join(PATIENCE_SECONDS)
        joined = time.time()
        (stopped,) = plan.fired("worker", 1)
        assert [result.get()[0] for result in results] == list(range(training.functions - 20, training.functions))
        training.check_values()
        print(f"from SIGSTOP to the end of its function elsewhere: {joined - stopped.time:.2f} s")

        assert cluster.kill("worker", 1, signal.SIGCONT) == stopped.pid
        training.run_until(lambda: len(plan.log("worker", 1)) == 5, "its return")
        log = plan.log("worker", 1)
        assert [line.event for line in log] == ["start", "first function", "fault", "start", "first function"]
        assert {line.pid for line in log} == {stopped.pid}
        training.run_on(1)
        training.check_values()


def test_sigterm_in_a_function_lets_it_finish(plan: FaultPlan) -> None:
    plan.add("worker", 1, Fault(phases.INSIDE, 3, "SIGTERM"))
    never = {"worker": RestartPolicy(limit=0)}
    with cluster_with(plan, restart=never) as cluster, Training(cluster.resolver) as training:
        ended = training.run_until(lambda: bool(plan.fired("worker", 1)), "SIGTERM")
        assert cluster.process("worker", 1).wait(PATIENCE_SECONDS) == 0
        # The third it finished itself. On a busy machine Python comes to the signal when the fourth has begun.
        assert sum(worker == 1 for _, worker, _ in ended) >= 3
        assert {worker for _, worker, _ in training.run(10)} == {0}
        training.check_values()


def be_worker(_: object, cluster: Mapping[str, Any], index: int, environment: Mapping[str, str]) -> Any:
    """As ``python -m torchstrat.server``; its exit status."""
    os.environ.update(environment)
    sys.argv[1:] = ["--cluster", json.dumps(cluster), "--job", "worker", "--index", str(index)]
    with pytest.raises(SystemExit) as end:
        runpy.run_module("torchstrat.server", run_name="__main__")
    return end.value.code


@contextmanager
def dialing(cluster: Mapping[str, Any], index: int) -> Iterator[Forked]:
    """A worker that is not in the cluster that it is told of: it dials the chief."""
    with Forked() as process:
        process.start(be_worker, cluster, index, {**QUIET, **secrets()})
        yield process


def test_workers_join_and_are_removed_while_training(plan: FaultPlan) -> None:
    """Removing one that is at work: tests/unit/test_ps_batches.py."""
    with cluster_with(plan, workers=1) as cluster, Training(cluster.resolver) as training:
        training.run()
        before = cluster.cluster_spec.as_dict()
        index = cluster.add_worker()
        training.coordinator.add_worker(index, cluster.cluster_spec.task_address("worker", index))
        training.run_on(index)
        with dialing(before, 7) as dialer:
            training.run_on(7)
            results = training.schedule(20)
            training.coordinator.remove_worker(0, PATIENCE_SECONDS)
            assert len(training.coordinator.fetch(results)) == 20
            assert {worker for _, worker, _ in training.run(10)} <= {1, 7}
            training.coordinator.add_worker(0, cluster.cluster_spec.task_address("worker", 0))
            training.run_on(0)
            training.check_values()
            training.strategy.close()
            assert dialer.result() == 0


# -- coordinators ------------------------------------------------------------------------------------------------------


def coordinator_of(cluster: LocalCluster, first: int = 0) -> Forked:
    """A coordinator in a process of its own, which does what it is told and may be killed meanwhile."""
    return Forked(make_training, cluster.cluster_spec.as_dict(), first, secrets())


def make_training(cluster: Mapping[str, Any], first: int, environment: Mapping[str, str]) -> Training:
    os.environ.update(environment)
    return Training(SimpleClusterResolver(ClusterSpec(cluster), task_type="chief", task_id=0), first=first)


def run_to(training: Training, count: int) -> int:
    training.run(count)
    return training.functions


def hold_one(training: Training, folder: Path) -> None:
    training.schedule(1, Gate(folder, "gate"))


def values_of(training: Training, count: int) -> list[list[float]]:
    return [vector[:count].tolist() for vector in training.model.state_dict().values()]


def close(training: Training) -> None:
    training.strategy.close()


def test_a_coordinator_that_is_started_again_goes_on(plan: FaultPlan, tmp_path: Path) -> None:
    with cluster_with(plan) as cluster:
        cluster.wait_until_listening()
        pids = [cluster.process(job, index).pid for job in ("worker", "ps") for index in range(2)]
        with coordinator_of(cluster) as first:
            assert first.run(run_to, 12) == 12
            before = first.run(values_of, 12)
            assert before == [[1.0] * 9 + [2.0] + [1.0] * 2] * 3
            first.run(hold_one, tmp_path)
            gate = Gate(tmp_path, "gate")
            gate.wait_until_reached()
            first.kill()

        with coordinator_of(cluster, first=20) as second:
            assert second.run(values_of, 13) == [[*vector, 0.0] for vector in before]
            # The worker that was held in the first one's function goes on with it. What it pushes is refused, nobody
            # would hear of it; and it is not taken for a push of a function of the second one.
            gate.open()
            assert second.run(run_to, 30) == 50
            wanted = [float(2 if place % 10 == 9 else 1) for place in range(50)]
            wanted[12:20] = [0.0] * 8
            assert second.run(values_of, 50) == [wanted] * 3
            assert pids == [cluster.process(job, index).pid for job in ("worker", "ps") for index in range(2)]
            second.run(close)


def save(training: Training, path: Path) -> None:
    ts.Checkpoint(model=training.model, optimizer=training.optimizer).save(path)


def restore(training: Training, path: Path) -> None:
    ts.Checkpoint(model=training.model, optimizer=training.optimizer).restore(path)


def steps_of_a_new_model(training: Training, width: int) -> float:
    """One, from zero."""
    with training.strategy.scope():
        training.later = model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(width))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    def step() -> float:
        optimizer.zero_grad()
        (-model[0].sum()).backward()
        optimizer.step()
        return float(model[0].detach()[0])

    return float(training.coordinator.schedule(step).get(PATIENCE_SECONDS))


@pytest.mark.parametrize("width", [3, 4])
def test_what_a_coordinator_has_left_is_not_what_is_made_after_a_restore(
    width: int, plan: FaultPlan, tmp_path: Path
) -> None:
    """It has the same number: with 3 elements it would go on as that, with 4 it would be refused."""
    with cluster_with(plan) as cluster:
        with coordinator_of(cluster) as first:
            first.run(run_to, 2)
            first.run(save, tmp_path / "saved")
            assert first.run(steps_of_a_new_model, 3) == 1.0
            first.kill()
        with coordinator_of(cluster, first=2) as second:
            second.run(restore, tmp_path / "saved")
            assert second.run(steps_of_a_new_model, width) == 1.0
            assert second.run(values_of, 3) == [[1.0, 1.0, 0.0]] * 3
            second.run(close)


def test_without_a_coordinator_they_end_with_a_message(plan: FaultPlan, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster_with(plan, workers=1, ps=1, restart=False, TORCHSTRAT_ORPHAN_TIMEOUT="0.5") as cluster:
        with coordinator_of(cluster) as coordinator:
            coordinator.run(run_to, 2)
        for job in ("ps", "worker"):
            assert cluster.process(job, 0).wait(PATIENCE_SECONDS) == 69
    said = capfd.readouterr().err
    for task in ("ps 0", "worker 0"):
        assert re.search(rf"\[{task}\] torchstrat: {task} ends \(code 69\): chief 0 .* was lost 0.5 s ago", said), said


# -- what was never right ----------------------------------------------------------------------------------------------


def test_another_secret_is_one_error_that_names_the_task(plan: FaultPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(plan, workers=1, ps=1) as cluster:
        cluster.wait_until_listening()
        with monkeypatch.context() as environment:
            environment.setenv("TORCHSTRAT_SECRET", "another secret, long enough for the check")
            strategy = ts.ParameterServerStrategy(cluster.resolver)
            with pytest.raises(ts.errors.AuthenticationError, match="ps 0"):
                strategy.scope().__enter__()
            strategy.close()
            environment.delenv("TORCHSTRAT_SECRET")
            environment.delenv("TORCHSTRAT_SECRET_FILE", raising=False)
            with pytest.raises(ts.errors.ClusterConfigError, match="TORCHSTRAT_SECRET"):
                ts.ParameterServerStrategy(cluster.resolver).scope().__enter__()
        with Training(cluster.resolver) as training:
            training.run(2)
            training.check_values()


# -- all of it at once -------------------------------------------------------------------------------------------------


def chaos(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--seed", "3", "--workers", "2", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.soak  # the same phases are forced one by one above, and the ledger is exact there too
def test_a_small_chaos() -> None:
    shared = hasattr(os, "memfd_create") and os.environ.get("TORCHSTRAT_SAME_HOST") != "off"
    drawn = (*phases.PHASES, phases.WRITING_GRADIENTS) if shared else phases.PHASES
    ended = chaos("--roles", "worker", "--kills", str(2 * len(drawn)))
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost: 0; duplicated: 0; where nothing belongs: 0" in ended.stdout
    assert all(re.search(rf"{phase} 2\b", ended.stdout) for phase in drawn)


@pytest.mark.soak
@pytest.mark.deadline(900)
def test_a_small_chaos_of_all_roles() -> None:
    ended = chaos("--kills", "40")
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost: 0; duplicated: 0; where nothing belongs: 0" in ended.stdout


@pytest.mark.soak
def test_the_same_chaos_without_the_servers_records_counts_twice() -> None:
    ended = chaos("--roles", "worker", "--kills", "12", "--without-exactly-once")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"lost: 0; duplicated: [1-9]", ended.stdout), ended.stdout + ended.stderr
    assert "FAILED: values deviate" in ended.stdout
