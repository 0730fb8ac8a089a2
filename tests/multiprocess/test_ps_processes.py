"""Jobs of parameter servers in processes of their own: what they hold, share and leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, Gate
from tests.faults.forked import Forked
from torchstrat.launch import LocalCluster, RestartPolicy

LARGEST_MIB = 70
SETTLING_SECONDS = 20.0
STEPS = 5

is_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted, and memory is read, in /proc")


# The end: nothing is said about connections, and nothing is left.


@is_on_linux
@pytest.mark.deadline(400)
def test_jobs_end_in_order_and_leave_no_threads_behind(tmp_path: Path) -> None:
    with Forked() as process:
        first = process.run(_counts_after_jobs, tmp_path / "stderr")
        last = process.run(_counts_after_jobs, tmp_path / "stderr", first)
    assert "tensorpipe" not in (tmp_path / "stderr").read_text()
    assert last[0] <= first[0]
    assert last[1] <= first[1]


def _counts_after_jobs(_: object, stderr: Path, first: tuple[int, int] | None = None) -> tuple[int, int]:
    """Threads and descriptors, after a cluster with two jobs."""
    if first is None:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    with ts.testing.LocalCluster(workers=1, ps=1) as cluster:
        for _ in range(2):
            strategy = ts.ParameterServerStrategy(cluster.resolver)
            coordinator = ts.ClusterCoordinator(strategy)
            assert coordinator.schedule(lambda: 1).get(timeout=60) == 1
            coordinator.join()
            strategy.close()
    gc.collect()
    return _threads_and_descriptors(first)


def _threads_and_descriptors(first: tuple[int, int] | None = None) -> tuple[int, int]:
    """As soon as they are no more than at first, if ever: what is told to end does so in its own time."""
    until = time.monotonic() + SETTLING_SECONDS
    while True:
        found = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if first is None or (found[0] <= first[0] and found[1] <= first[1]) or time.monotonic() > until:
            return found
        time.sleep(0.05)


STUCK = """
import sys, threading
import torchstrat as ts
from torchstrat.parameter_server.membership import task_server

task_server.GRACE_SECONDS = 0.5
threading.Thread(target=threading.Event().wait).start()
sys.exit(ts.Server({"worker": ["127.0.0.1:0"]}, secret="s" * 32, start=False).run())
"""


def test_a_thread_that_hangs_does_not_hold_a_process_that_was_told_to_end() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stderr=subprocess.PIPE, text=True) as task:
        assert task.stderr is not None
        assert "worker 0 listens on" in task.stderr.readline()
        task.send_signal(signal.SIGTERM)
        assert task.wait(60) == 0


# A table larger than the coordinator may be: 256 MiB on two servers, made on ``device="meta"``.


@is_on_linux
@pytest.mark.deadline(400)
@pytest.mark.usefixtures("clusters_share_a_fork_server")
def test_the_coordinator_never_holds_the_table() -> None:
    with ts.testing.LocalCluster(workers=1, ps=2) as cluster, Forked() as process:
        assert process.run(_train_large_table, cluster.environment_of("chief", 0)) <= LARGEST_MIB


def _train_large_table(_: object, environment: Mapping[str, str]) -> int:
    """MiB that it took at most."""
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    before_all = _peak_mib()
    strategy = ts.ParameterServerStrategy(
        ts.cluster_resolver.TFConfigClusterResolver(), ts.partitioners.FixedShardsPartitioner(4)
    )
    with strategy.scope():
        table = nn.Embedding(1_048_576, 64, device="meta")  # 256 MiB
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    coordinator = ts.ClusterCoordinator(strategy)
    ids = torch.tensor([0, 5, 1_048_575])

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        rows = table(ids)
        rows.sum().backward()
        optimizer.step()
        return rows.detach()

    before, after = (coordinator.schedule(step).get() for _ in range(2))
    assert torch.allclose(before - 1, after), (before, after)
    assert 0.5 < float(before.std()) < 1.5, before
    return _peak_mib() - before_all


def _peak_mib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


# A table that grows while functions train it and their workers are killed: every function counts once.


class Counted(nn.Module):
    """Each function adds 1 to a few rows, and then to the bias, in two pushes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)
        self.out = nn.Linear(1, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=1.0)
        self.second = torch.optim.SGD([self.out.bias], lr=1.0)

    def count(self, ids: list[int], gate: Gate | None, worker: Callable[[], int]) -> int:
        self.zero_grad()
        (-self.table(torch.tensor(ids)).sum()).backward()
        self.optimizer.step()
        if gate is not None:
            gate.pass_through(worker())
        (-self.out.bias.sum()).backward()
        self.second.step()
        return len(self.table.weight)


class Counting:
    """What functions are to have come to. ``rows``: of the table, as the program knows it."""

    def __init__(self, coordinator: ts.ClusterCoordinator, model: Counted, rows: int) -> None:
        self._coordinator, self.model, self.rows = coordinator, model, rows
        self.wanted, self.functions = torch.zeros(rows), 0

    def schedule(self, count: int, gate: Gate | None = None) -> list[ts.RemoteValue[int]]:
        values = []
        for _ in range(count):
            ids = [self.functions % self.rows, self.rows - 1 - self.functions % self.rows]
            self.wanted += torch.bincount(torch.tensor(ids), minlength=self.rows)
            self.functions += 1
            args = (ids, gate, self._coordinator.get_current_worker_index)
            values.append(self._coordinator.schedule(self.model.count, args=args))
        return values

    def grow(self, rows: int) -> None:
        ts.grow_rows(self.model.table, rows)
        self.wanted = nn.functional.pad(self.wanted, (0, rows - self.rows))
        self.rows = rows

    def check(self) -> None:
        self._coordinator.join(PATIENCE_SECONDS)
        assert torch.equal(self.model.table.weight.detach(), self.wanted[:, None].expand(-1, 2))
        assert float(self.model.out.bias.detach()) == self.functions


@pytest.mark.deadline(400)
@pytest.mark.usefixtures("clusters_share_a_fork_server")
@pytest.mark.parametrize("shards", [2, pytest.param(None, marks=pytest.mark.soak)])
def test_a_worker_is_killed_while_a_table_grows(shards: int | None, tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=2, restart=RestartPolicy(quick_seconds=0.0)) as cluster:
        partitioner = None if shards is None else ts.partitioners.FixedShardsPartitioner(shards)
        strategy = ts.ParameterServerStrategy(cluster.resolver, partitioner)
        with strategy.scope():
            model = Counted(10)
        counting = Counting(ts.ClusterCoordinator(strategy), model, 10)
        for round_number in range(4):
            gate = Gate(tmp_path, f"round {round_number}")
            half_way = counting.schedule(1, gate)
            queued = counting.schedule(20)
            worker = gate.wait_until_reached()  # its first push is applied, and its second one is not
            rows = counting.rows
            growing = threading.Thread(target=counting.grow, args=(2 * rows,))
            growing.start()
            cluster.kill("worker", worker)
            growing.join(0.5)
            assert growing.is_alive(), "what was half-way runs again first"
            gate.open()
            growing.join(PATIENCE_SECONDS)
            assert half_way[0].get(timeout=PATIENCE_SECONDS) == rows
            assert queued[-1].get(timeout=PATIENCE_SECONDS) in (rows, 2 * rows)
            assert counting.schedule(20)[-1].get(timeout=PATIENCE_SECONDS) == 2 * rows
        counting.check()

        checkpoint = ts.Checkpoint(model=model)
        checkpoint.save(tmp_path / "saved")
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        counting.schedule(20)
        counting.check()
        assert not any(checkpoint.restore(tmp_path / "saved", only="model.table"))
        assert torch.equal(model.table.weight.detach(), saved["table.weight"])
        assert float(model.out.bias.detach()) == counting.functions == float(saved["out.bias"]) + 20
        strategy.close()


# What PyTorch keeps for a whole process is, on workers and servers, what the coordinator's program has set.


@pytest.fixture
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    # Keeps a product of its coefficients in the default dtype.
    return model, torch.optim.NAdam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, torch.dtype]:
    optimizer.zero_grad()
    loss = model(torch.tensor([[0.1, 0.2, 0.3]])).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach()), torch.ones(1).dtype


@pytest.mark.usefixtures("default_float64", "clusters_share_a_fork_server")
def test_the_default_dtype_of_the_program_is_that_of_workers_and_servers() -> None:
    model, optimizer = built()
    wanted = [step(model, optimizer) for _ in range(STEPS)]
    with ts.testing.LocalCluster(workers=1, ps=1) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            on_servers, its_optimizer = built()
        coordinator = ts.ClusterCoordinator(strategy)
        seen = [coordinator.schedule(step, args=(on_servers, its_optimizer)).get() for _ in range(STEPS)]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(on_servers.state_dict()[name], value, rtol=1e-12, atol=1e-12)

        def sets_another() -> None:
            torch.set_default_dtype(torch.float16)

        coordinator.schedule(sets_another).get()
        torch.set_default_dtype(torch.float32)
        assert coordinator.schedule(lambda: torch.ones(1).dtype).get() is torch.float32
        strategy.close()
    assert [dtype for _, dtype in seen] == [torch.float64] * STEPS
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in wanted], rel=1e-12)


# What functions leave under ``no_sync`` is stepped with on whichever worker, as in a plain loop: tables too.


def made(lr: float = 0.25) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 1))
    return model, torch.optim.Adagrad(model.parameters(), lr=lr)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean()


@pytest.mark.usefixtures("clusters_share_a_fork_server")
def test_gradients_are_accumulated_over_functions_of_two_workers() -> None:
    plain, its_optimizer = made()
    batches = torch.randint(0, 12, (24, 5), generator=torch.Generator().manual_seed(1))
    with contextlib.ExitStack() as leaving:
        cluster = leaving.enter_context(ts.testing.LocalCluster(workers=2, ps=2))
        strategy = ts.ParameterServerStrategy(cluster.resolver, ts.partitioners.FixedShardsPartitioner(2))
        leaving.callback(strategy.close)
        with strategy.scope():
            model, optimizer = made()
        coordinator = ts.ClusterCoordinator(strategy)

        def which() -> int:
            time.sleep(0.01)
            return coordinator.get_current_worker_index()

        there: set[int] = set()
        while len(there) < 2:  # one may have joined long before the other
            there.update(one.get() for one in [coordinator.schedule(which) for _ in range(4)])

        def leave(ids: torch.Tensor) -> int:
            with ts.get_strategy().no_sync():
                loss_of(model, ids).backward()
            time.sleep(0.01)
            return coordinator.get_current_worker_index()

        def steps(ids: torch.Tensor) -> None:
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        workers = set()
        for number, ids in enumerate(batches):
            loss_of(plain, ids).backward()
            if number % 6 == 5:
                its_optimizer.step()
                its_optimizer.zero_grad()
                coordinator.join()
                coordinator.schedule(steps, args=(ids,)).get()
            else:  # several at once, in any order
                workers.add(coordinator.schedule(leave, args=(ids,)))
        assert {value.get() for value in workers} == {0, 1}
        coordinator.join()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
