"""Collectives in shared memory between real processes."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torchstrat as ts
from torchstrat.collectives.shared_memory import futex, neighbours, segment
from torchstrat.collectives.shared_memory.lockstep import Lockstep
from torchstrat.errors import CommunicationError, UnsupportedError
from torchstrat.testing import Workers, contract

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(futex.why_not() is not None, reason=str(futex.why_not())),
]

SECONDS = timedelta(seconds=20)


def me() -> int:
    return int(os.environ["RANK"])


def world_of(strategy: Any) -> Any:
    return strategy._engine._world


# -- what is chosen ----------------------------------------------------------------------------------------------------


def describe(collectives: str, strategy_name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = getattr(ts, strategy_name)(collectives=collectives, timeout=SECONDS)
    told: str = strategy.extended.describe()
    strategy.close()
    return told


@pytest.mark.parametrize("name", ["MirroredStrategy", "MultiWorkerMirroredStrategy", "CentralStorageStrategy"])
def test_processes_of_one_host_share_memory_by_themselves(name: str, two_processes: Workers) -> None:
    for told in two_processes.run(describe, "auto", name):
        assert told.endswith("communication: shared memory: all 2 processes are on this host")


def test_it_can_be_turned_off(two_processes: Workers) -> None:
    for told in two_processes.run(describe, "process_group", "MirroredStrategy"):
        assert told.endswith("communication: gloo, as was asked for")


def on_two_machines(collectives: str) -> str:
    """Containers and hosts that differ are told apart by what they say of themselves."""
    here = neighbours.Place.here
    neighbours.Place.here = staticmethod(lambda: here()._replace(machine=f"host {me()}"))  # type: ignore[method-assign]
    try:
        return describe(collectives, "MirroredStrategy")
    except UnsupportedError as error:
        return f"UnsupportedError: {error}"
    finally:
        neighbours.Place.here = staticmethod(here)  # type: ignore[method-assign]


def test_several_hosts_use_sockets(two_processes: Workers) -> None:
    for told in two_processes.run(on_two_machines, "auto"):
        assert told.endswith("communication: gloo, because the processes run on several hosts")
    for told in two_processes.run(on_two_machines, "shared_memory"):
        assert told.startswith("UnsupportedError: collectives='shared_memory' was asked for, and shared memory cannot")


def without_room(collectives: str) -> tuple[str, list[str]]:
    available = segment.available_bytes
    segment.available_bytes = lambda: 1000
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = ts.MirroredStrategy(collectives=collectives, timeout=SECONDS)
            total = strategy.reduce("sum", strategy.run(lambda: torch.ones(3)))
            told = f"{strategy.extended.describe()} {total.tolist()}"
            strategy.close()
        return told, [str(one.message) for one in caught]
    finally:
        segment.available_bytes = available


def test_too_little_memory_is_a_warning_and_sockets(two_processes: Workers) -> None:
    for told, warned in two_processes.run(without_room, "auto"):
        assert "communication: gloo, because" in told
        assert told.endswith("[2.0, 2.0, 2.0]")
        assert len(warned) == 1
        assert "bytes of shared memory are needed, and 1,000 are left (replica 0)" in warned[0]


# -- what it computes --------------------------------------------------------------------------------------------------


def exchange() -> dict[str, Any]:
    strategy = ts.MirroredStrategy(timeout=SECONDS)
    world, rank = world_of(strategy), me()
    large = torch.arange(300_000, dtype=torch.int64) + rank
    summed = large.clone()
    world.all_reduce(summed, "sum").wait()
    told = large * (1 - rank)
    world.broadcast(told, 0, "broadcast")
    half = torch.ones(3, dtype=torch.float16) * (rank + 1)
    world.all_reduce(half, "half").wait()
    found = {
        "sum": torch.equal(summed, 2 * torch.arange(300_000) + 1),
        "broadcast": torch.equal(told, torch.arange(300_000)),
        "gather": [int(one.sum()) for one in world.all_gather(large, "gather")],
        "objects": [len(one) for one in world.all_gather_object("x" * (10 + rank * 1_200_000), "objects")],
        "object": len(world.broadcast_object(["y" * 900_000] if rank else None, 1, "object")[0]),
        "numbers": world.all_gather_numbers((rank, 0.5, float("inf")), "numbers"),
        "half": half.tolist(),
        "nothing": [one.shape for one in world.all_gather(torch.ones(0, 3), "nothing")],
        "booleans": world.all_gather(torch.tensor([True, bool(rank)]), "booleans")[1].tolist(),
    }
    world.barrier("barrier")
    strategy.close()
    return found


def test_every_call_exchanges_what_it_promises(two_processes: Workers) -> None:
    base = sum(range(300_000))
    for found in two_processes.run(exchange):
        assert found == {
            "sum": True,
            "broadcast": True,
            "gather": [base, base + 300_000],
            "objects": [10, 1_200_010],
            "object": 900_000,
            "numbers": [[0.0, 0.5, float("inf")], [1.0, 0.5, float("inf")]],
            "half": [3.0, 3.0, 3.0],
            "nothing": [(0, 3), (0, 3)],
            "booleans": [True, True],
        }


SOME_CASES = 12
"""Of the training cases, for a quick look; soak has all of them."""


def run_cases(names: list[str], strategy_name: str) -> list[contract.Snapshot]:
    row = contract.TORCHRUN[strategy_name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [contract.run_row(contract.CASES[name], row) for name in names]


@pytest.mark.deadline(600)
@pytest.mark.parametrize("strategy_name", ["mirrored", pytest.param("central_storage", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("processes", "is_whole"),
    [(4, False), pytest.param(4, True, marks=pytest.mark.soak), pytest.param(8, True, marks=pytest.mark.soak)],
)
def test_training_cases_with_more_processes_than_two(processes: int, is_whole: bool, strategy_name: str) -> None:
    names = [name for name, case in contract.CASES.items() if not case.needs_compiler]
    names = names if is_whole else names[:: len(names) // SOME_CASES]
    with Workers(processes, timeout_seconds=500) as workers:
        ranks = workers.run(run_cases, names, strategy_name)
    for number, name in enumerate(names):
        case = contract.CASES[name]
        snapshots = [rank[number] for rank in ranks]
        contract.check_agreement(case, snapshots)
        expected = contract.reference(case, processes)
        for snapshot in snapshots:
            contract.check(case, snapshot, expected)


# -- failures ----------------------------------------------------------------------------------------------------------


def leave_early() -> str:
    strategy = ts.MirroredStrategy(timeout=SECONDS)
    if me() == 1:
        strategy.close()
        return ""
    try:
        strategy.run(lambda: None)
    except CommunicationError as error:
        return str(error)
    finally:
        strategy.close()
    return "nothing was raised"


def test_a_replica_that_closes_is_not_waited_for(two_processes: Workers) -> None:
    told, _ = two_processes.run(leave_early)
    assert "in the end of a run" in told
    assert "replica 1 closed its strategy" in told


def two_strategies_of_a_sweep() -> tuple[str, list[float]]:
    """The first one ends on rank 1 alone, while rank 0 starts another group of both."""
    told, patience = "", timedelta(seconds=240)
    first = ts.MirroredStrategy(timeout=patience)
    try:
        if me() == 0:
            world_of(first).split()
    except CommunicationError as error:
        told = str(error)
    finally:
        first.close()
    second = ts.MirroredStrategy(timeout=patience)
    try:
        return told, second.reduce("sum", second.run(lambda: torch.ones(1))).tolist()
    finally:
        second.close()


def test_a_start_that_was_given_up_keeps_no_later_strategy_from_the_store(two_processes: Workers) -> None:
    (told, first), (_, second) = two_processes.run(two_strategies_of_a_sweep)
    assert "in the start of a group" in told
    assert "replica 1 closed its strategy" in told
    assert first == second == [2.0]


# -- who may attach ----------------------------------------------------------------------------------------------------


def attach(key: bytes, rank: int) -> list[int]:
    """A stranger on this host that has found the socket's name: what it is given."""
    found: list[int] = []
    real = neighbours._receive_hello

    def look(connection: socket.socket, expected: bytes) -> Any:
        result = real(connection, expected)
        if result is None:
            found.append(1)
        return result

    connect = neighbours.Neighbours._connect

    def with_a_stranger_first(self: Any, name: str, secret: bytes) -> None:
        if me() == 1:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(name)
            socket.send_fds(stranger, [neighbours._HELLO.pack(key, rank)], [os.pidfd_open(os.getpid())])
            connect(self, name, secret)
            stranger.settimeout(5)
            found.append(len(stranger.recv(1)))
            stranger.close()
        else:
            connect(self, name, secret)

    neighbours.Neighbours._connect = with_a_stranger_first  # type: ignore[method-assign]
    neighbours._receive_hello = look
    try:
        strategy = ts.MirroredStrategy(timeout=SECONDS, collectives="shared_memory")
        strategy.close()
    finally:
        neighbours.Neighbours._connect = connect  # type: ignore[method-assign]
        neighbours._receive_hello = real
    return found


def test_who_does_not_know_the_secret_gets_nothing(two_processes: Workers) -> None:
    refused, given = two_processes.run(attach, b"\0" * 32, 1)
    assert refused == [1]
    assert given == [0]


STRANGER = """
import os, socket, sys
os.setuid(65534)
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
stranger.connect("\\0" + sys.argv[1])
stranger.settimeout(10)
try:
    socket.send_fds(stranger, [bytes.fromhex(sys.argv[2])], [0])
    sys.exit(len(stranger.recv(1)))
except (BrokenPipeError, ConnectionResetError):
    sys.exit(0)
"""


def attach_as_another_user() -> int | None:
    """The same with the right secret, as a user that may do nothing."""
    connect = neighbours.Neighbours._connect
    ends: list[int] = []

    def with_a_stranger_first(self: Any, name: str, secret: bytes) -> None:
        if me() == 1:
            hello = neighbours._HELLO.pack(secret, 1).hex()
            stranger = subprocess.Popen([sys.executable, "-S", "-c", STRANGER, name[1:], hello])
            try:
                ends.append(stranger.wait(20))  # it is refused before the real one has come
            except subprocess.TimeoutExpired:
                stranger.kill()
                raise
        connect(self, name, secret)

    neighbours.Neighbours._connect = with_a_stranger_first  # type: ignore[method-assign]
    try:
        ts.MirroredStrategy(timeout=SECONDS, collectives="shared_memory").close()
    finally:
        neighbours.Neighbours._connect = connect  # type: ignore[method-assign]
    return ends[0] if ends else None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(two_processes: Workers) -> None:
    _, status = two_processes.run(attach_as_another_user)
    assert status == 0


def count_meetings(width: int) -> int:
    """Of one training step with a model of two tensors."""
    strategy = ts.MirroredStrategy(timeout=SECONDS)
    meet = Lockstep.meet
    met = []
    try:
        with strategy.scope():
            model = torch.nn.Linear(width, width)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        def counted(self: Lockstep, seconds: float, call: int) -> None:
            met.append(self)
            meet(self, seconds, call)

        strategy.run(train_step, args=(torch.ones(2, width),))
        with mock.patch.object(Lockstep, "meet", counted):
            strategy.run(train_step, args=(torch.ones(2, width),))
        return len(met)
    finally:
        strategy.close()


def test_small_gradients_need_no_meeting_of_their_own(two_processes: Workers) -> None:
    """One at the end of the backward pass, one before the optimizer's step, and one at the end of the run."""
    assert two_processes.run(count_meetings, 8) == [3, 3]
    assert two_processes.run(count_meetings, 200) == [5, 5]  # two for what is cut into chunks


# -- nothing is left ---------------------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Open descriptors, and mappings of ours."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:torchstrat")


def open_and_close() -> tuple[tuple[int, int], tuple[int, int], int]:
    """What is held before and after, and how many mappings there were meanwhile."""
    ts.MirroredStrategy(timeout=SECONDS).close()  # sockets of torch.distributed's store are kept
    before = held()
    for _ in range(3):
        strategy = ts.MirroredStrategy(timeout=SECONDS)
        strategy.reduce("sum", strategy.run(lambda: torch.ones(1)))
        meanwhile = held()[1]
        strategy.close()
    del strategy
    return before, held(), meanwhile


def test_a_closed_strategy_leaves_no_memory_and_no_descriptors(two_processes: Workers) -> None:
    for before, after, meanwhile in two_processes.run(open_and_close):
        # What earlier tests have left to torch's compiler lives as long as that does.
        assert after[0] <= before[0]
        assert after[1] <= before[1] < meanwhile
