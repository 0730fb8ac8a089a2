"""Workers, servers and coordinators of a real cluster are killed, stopped and told to end: what is left is exact."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, SIZE, Gate, Training, is_back, start_up_seconds, wait_until
from torchstrat import Checkpoint
from torchstrat.launch import LocalCluster
from torchstrat.launch.restarts import RestartPolicy
from torchstrat.parameter_server.meeting.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, new_secret
from torchstrat.parameter_server.same_host.neighbours import why_not as same_host_is_off
from torchstrat.parameter_server.wire.sockets import address_of, shut_down_connections
from torchstrat.parameter_server.worker import phases
from torchstrat.testing.fault_plan import Fault, FaultPlan

ROOT = Path(__file__).parents[2]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
AT_ONCE = RestartPolicy(first_delay_seconds=0.0)
NEVER = RestartPolicy(limit=0)
BUSY_MACHINE = 20
"""How much slower than idle the machine may be."""
NOTICE_SECONDS = 2.0
BACK_SECONDS = 5.0

pytestmark = pytest.mark.deadline(420)


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@contextmanager
def cluster_with(
    plan: FaultPlan, *, workers: int = 2, ps: int = 2, restart: Any = AT_ONCE, **env: str
) -> Iterator[LocalCluster]:
    with LocalCluster(workers, ps, env={**QUIET, **plan.environment, **env}, restart=restart) as cluster:
        yield cluster


@contextmanager
def training_on(cluster: LocalCluster) -> Iterator[Training]:
    training = Training(cluster.resolver)
    try:
        yield training
    finally:
        training.strategy.close()


# -- workers -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_in_each_phase(plan: FaultPlan) -> None:
    kills = [Fault(phase) for phase in phases.PHASES]
    plan.add("worker", 1, *kills)
    with cluster_with(plan) as cluster, training_on(cluster) as training:
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
        _, _, row = training.run_on(1)
        assert row < sum(worker == 1 for _, worker, _ in ended) + 6

        cluster.kill("worker", 0)  # idle, with nothing to do
        assert {worker for _, worker, _ in training.run()} <= {0, 1}
        training.check_values()
        seconds = start_up_seconds(log)
        print(f"from process start to first function: {', '.join(f'{s:.2f}' for s in seconds)} s")
        assert min(seconds) < BACK_SECONDS * BUSY_MACHINE


def test_the_only_worker_dies_and_its_function_waits_for_the_next(plan: FaultPlan, tmp_path: Path) -> None:
    with cluster_with(plan, workers=1, ps=1) as cluster, training_on(cluster) as training:
        training.run(3)
        gate = Gate(tmp_path, "gate")
        (result,) = training.schedule(1, gate)
        assert gate.wait_until_reached() == 0
        killed = cluster.kill("worker", 0)
        gate.open()
        place, worker, row = result.get(PATIENCE_SECONDS)
        assert (place, worker, int(row)) == (3, 0, 0)  # its data from the start
        assert cluster.process("worker", 0).pid != killed
        training.check_values()


def test_who_dies_as_he_connects_keeps_nobody_from_connecting(plan: FaultPlan) -> None:
    """PyTorch's agents close their listeners at a connection that ends before its hello."""
    with cluster_with(plan, workers=1, ps=2) as cluster, training_on(cluster) as training:
        training.run(3)
        job = training.strategy._job
        for peer in (*job._in_use.values(), job.membership.endpoint.peer):
            socket.create_connection(address_of(peer.url), timeout=PATIENCE_SECONDS).close()
        cluster.kill("worker", 0)
        assert {row for _, _, row in training.run(3)} == {0, 1, 2}  # another process
        training.check_values()


def test_a_worker_that_is_cut_off_from_a_server_comes_back_and_the_server_stays(plan: FaultPlan) -> None:
    with cluster_with(plan, workers=1, ps=2, TORCHSTRAT_SAME_HOST="off") as cluster, training_on(cluster) as training:
        assert {row for _, _, row in training.run(3)} == {0, 1, 2}
        server = training.strategy._job._in_use[1]
        training.coordinator.schedule(shut_down_connections, (server.url,)).get(PATIENCE_SECONDS)
        assert {row for _, _, row in training.run(3)} == {0, 1, 2}  # another process
        training.check_values()
        assert training.strategy._job._in_use[1] == server


def test_a_worker_that_is_killed_in_a_batch_repeats_only_what_was_not_reported(plan: FaultPlan, tmp_path: Path) -> None:
    with cluster_with(plan, workers=1, ps=1) as cluster, training_on(cluster) as training:
        coordinator, dispatcher = training.coordinator, training.coordinator._dispatcher
        gate, log = Gate(tmp_path, "gate"), tmp_path / "log"

        def work(number):
            with log.open("a") as file:
                file.write(f"{number}\n")
            if number == 5:
                gate.pass_through(0)
            return number

        coordinator.fetch([coordinator.schedule(work, (-1,)) for _ in range(20)])
        dispatcher._scheduler._seconds = 0.0  # what is imported and unpickled first took long
        with dispatcher.paused(PATIENCE_SECONDS, "the test"):  # so that they are sent together
            values = [coordinator.schedule(work, (number,)) for number in range(40)]
        assert [value.get(PATIENCE_SECONDS) for value in values[:5]] == list(range(5))
        gate.wait_until_reached()
        assert len(dispatcher._scheduler.functions_at(0)) > 5, "others wait there"
        cluster.kill("worker", 0)
        gate.open()
        assert coordinator.fetch(values) == list(range(40))
        ran = [int(line) for line in log.read_text().split()][20:]
        assert ran == [*range(6), 5, *range(6, 40)]


def test_a_stopped_worker_is_replaced_its_late_push_refused_and_it_comes_back(plan: FaultPlan, tmp_path: Path) -> None:
    with cluster_with(plan) as cluster, training_on(cluster) as training:
        training.refused = refused = tmp_path / "refused"
        training.run_until(lambda: is_back(plan, "worker", 1) and is_back(plan, "worker", 0), "first functions")
        plan.add("worker", 1, Fault(phases.INSIDE, signal_name="SIGSTOP"))
        results = training.schedule(20)
        training.coordinator.join(PATIENCE_SECONDS)
        joined = time.time()
        (stopped,) = plan.fired("worker", 1)
        assert [result.get()[0] for result in results] == list(range(training.functions - 20, training.functions))
        training.check_values()
        print(f"from SIGSTOP to the end of its function elsewhere: {joined - stopped.time:.2f} s")
        assert not refused.exists()

        assert cluster.kill("worker", 1, signal.SIGCONT) == stopped.pid
        wait_until(refused.exists, "the refusal of its late push")
        training.run_until(lambda: len(plan.log("worker", 1)) == 5, "its return")
        events = [line.event for line in plan.log("worker", 1)]
        assert events == ["start", "first function", "fault", "start", "first function"]
        training.run_on(1)
        training.check_values()


def test_sigterm_in_a_function_lets_it_finish(plan: FaultPlan) -> None:
    plan.add("worker", 1, Fault(phases.INSIDE, 3, "SIGTERM"))
    with cluster_with(plan, restart={"worker": NEVER}) as cluster, training_on(cluster) as training:
        ended = training.run_until(lambda: bool(plan.fired("worker", 1)), "SIGTERM")
        assert cluster.process("worker", 1).wait(PATIENCE_SECONDS) == 0
        # The third it finished itself. On a busy machine Python comes to the signal when the fourth has begun.
        assert sum(worker == 1 for _, worker, _ in ended) >= 3
        assert {worker for _, worker, _ in training.run(10)} == {0}
        training.check_values()


def test_workers_join_and_are_removed_while_training(plan: FaultPlan, tmp_path: Path) -> None:
    with cluster_with(plan, workers=1) as cluster, ExitStack() as stack, training_on(cluster) as training:
        training.run()
        cluster_before = json.dumps(cluster.cluster_spec.as_dict())
        index = cluster.add_worker()
        training.coordinator.add_worker(index, cluster.cluster_spec.task_address("worker", index))
        training.run_on(index)
        dialer = subprocess.Popen(  # not in the cluster that it is told of: it dials the chief
            [sys.executable, "-m", "torchstrat.server", "--cluster", cluster_before, "--job", "worker", "--index", "7"],
            env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
        )
        stack.callback(dialer.wait)
        stack.callback(dialer.kill)
        training.run_on(7)
        gate = Gate(tmp_path, "gate")
        while True:  # until one waits at worker 0
            (held,) = training.schedule(1, gate)
            if gate.wait_until_reached() == 0:
                break
            gate.open()
            held.get(PATIENCE_SECONDS)
            gate = Gate(tmp_path, f"gate {training.functions}")
        removal = threading.Thread(target=training.coordinator.remove_worker, args=(0, PATIENCE_SECONDS))
        removal.start()
        with pytest.raises(ts.errors.CommunicationTimeoutError, match="worker 0 was still running"):
            training.coordinator.remove_worker(0, timeout=0.1)
        gate.open()
        removal.join(PATIENCE_SECONDS)
        assert not removal.is_alive()
        assert held.get(PATIENCE_SECONDS)[1] == 0  # it was let finish
        assert {worker for _, worker, _ in training.run(10)} <= {1, 7}
        training.check_values()
        training.strategy.close()
        assert dialer.wait(PATIENCE_SECONDS) == 0


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", ["join", *(pytest.param(one, marks=pytest.mark.soak) for one in ("schedule", "fetch"))]
)
def test_a_killed_server_is_named_and_a_checkpoint_brings_the_job_back(
    plan: FaultPlan, tmp_path: Path, call: str
) -> None:
    with cluster_with(plan) as cluster, training_on(cluster) as training:
        training.run(12)
        checkpoint = Checkpoint(model=training.model, optimizer=training.optimizer)
        checkpoint.save(tmp_path / "checkpoint")
        saved = training.wanted.clone()
        workers = [cluster.process("worker", index).pid for index in range(2)]
        training.run()

        results = training.schedule(500)
        results[3].get(PATIENCE_SECONDS)
        killed = time.monotonic()
        cluster.kill("ps", 1)
        calls = {
            "join": lambda: training.coordinator.join(PATIENCE_SECONDS),
            "fetch": lambda: results[-1].fetch(PATIENCE_SECONDS),
            "schedule": lambda: training.schedule(SIZE),
        }
        with pytest.raises(ts.errors.ParameterServerUnavailable, match="parameter server 1") as caught:
            calls[call]()
        seconds = time.monotonic() - killed
        print(f"from the kill to ParameterServerUnavailable at {call}: {seconds:.2f} s")
        assert seconds < NOTICE_SECONDS * BUSY_MACHINE
        assert str(caught.value.task) == "ps 1"
        assert isinstance(caught.value, RuntimeError)
        if call == "fetch":
            with pytest.raises(ts.errors.ParameterServerUnavailable):
                training.coordinator.join(PATIENCE_SECONDS)

        checkpoint.restore(tmp_path / "checkpoint")
        training.wanted = saved
        training.check_values()
        assert workers == [cluster.process("worker", index).pid for index in range(2)]
        training.run(20)
        training.check_values()


# -- coordinators ------------------------------------------------------------------------------------------------------


class CoordinatorProcess:
    """`coordinator_program`, one command at a time."""

    def __init__(self, cluster: LocalCluster, folder: Path, first: int = 0) -> None:
        arguments = [json.dumps(cluster.cluster_spec.as_dict()), str(first), str(folder)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.coordinator_program", *arguments],
            cwd=ROOT,
            env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def values(self, count: int) -> list[list[float]]:
        values: list[list[float]] = json.loads(self.tell(f"values {count}"))
        return values

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE_SECONDS) == 0

    def __enter__(self) -> CoordinatorProcess:
        assert self._answer() == "connected"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()  # ends when the process does; the test has its own deadline
        assert line, "the coordinator's process has ended"
        return line


def test_a_coordinator_that_is_started_again_goes_on(plan: FaultPlan, tmp_path: Path) -> None:
    with cluster_with(plan) as cluster:
        cluster.wait_until_listening()
        pids = [cluster.process(job, index).pid for job in ("worker", "ps") for index in range(2)]
        with CoordinatorProcess(cluster, tmp_path) as first:
            assert first.tell("run 12") == "ran to 12"
            before = first.values(12)
            assert before == [[1.0] * 9 + [2.0] + [1.0] * 2] * 3
            assert first.tell("hold gate") == "scheduled to 13"
            gate = Gate(tmp_path, "gate")
            gate.wait_until_reached()
            first.kill()

        with CoordinatorProcess(cluster, tmp_path, first=20) as second:
            assert second.values(13) == [[*vector, 0.0] for vector in before]
            # The worker that was held in the first one's function goes on with it. What it pushes is refused, nobody
            # would hear of it; and it is not taken for a push of a function of the second one.
            gate.open()
            assert second.tell("run 30") == "ran to 50"
            wanted = [float(2 if place % 10 == 9 else 1) for place in range(50)]
            wanted[12:20] = [0.0] * 8
            assert second.values(50) == [wanted] * 3
            assert pids == [cluster.process(job, index).pid for job in ("worker", "ps") for index in range(2)]
            second.leave()


def test_without_a_coordinator_they_end_with_a_message(
    plan: FaultPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster_with(plan, workers=1, ps=1, restart=False, TORCHSTRAT_ORPHAN_TIMEOUT="0.5") as cluster:
        with CoordinatorProcess(cluster, tmp_path) as coordinator:
            coordinator.tell("run 2")
        for job in ("ps", "worker"):
            assert cluster.process(job, 0).wait(PATIENCE_SECONDS) == 69
    said = capsys.readouterr().err
    for task in ("ps 0", "worker 0"):
        assert re.search(rf"\[{task}\] torchstrat: {task} ends \(code 69\): chief 0 .* was lost 0.5 s ago", said), said


# -- what was never right ----------------------------------------------------------------------------------------------


def test_another_secret_is_one_error_that_names_the_task(plan: FaultPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(plan, workers=1, ps=1) as cluster:
        cluster.wait_until_listening()
        with monkeypatch.context() as environment:
            environment.setenv(SECRET_VARIABLE, new_secret())
            strategy = ts.ParameterServerStrategy(cluster.resolver)
            with pytest.raises(ts.errors.AuthenticationError, match="ps 0"):
                strategy.scope().__enter__()
            strategy.close()
            environment.delenv(SECRET_VARIABLE)
            environment.delenv(SECRET_FILE_VARIABLE, raising=False)
            with pytest.raises(ts.errors.ClusterConfigError, match=SECRET_VARIABLE):
                ts.ParameterServerStrategy(cluster.resolver).scope().__enter__()
        with training_on(cluster) as training:
            training.run(2)
            training.check_values()


# -- all of it at once -------------------------------------------------------------------------------------------------


def chaos(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "chaos.py"), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.soak  # the same phases are forced one by one above, and the ledger is exact there too
def test_a_small_chaos() -> None:
    drawn = phases.PHASES if same_host_is_off() else (*phases.PHASES, phases.WRITING_GRADIENTS)
    ended = chaos("--kills", str(2 * len(drawn)), "--seed", "3", "--workers", "2")
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost: 0; duplicated: 0; where nothing belongs: 0" in ended.stdout
    assert all(re.search(rf"{phase} 2\b", ended.stdout) for phase in drawn)


@pytest.mark.soak
def test_the_same_chaos_without_the_servers_records_counts_twice() -> None:
    ended = chaos("--kills", "12", "--seed", "3", "--workers", "2", "--without-exactly-once")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"lost: 0; duplicated: [1-9]", ended.stdout), ended.stdout + ended.stderr
    assert "FAILED: values deviate" in ended.stdout
