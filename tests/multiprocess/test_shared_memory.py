"""Collectives in shared memory between real processes of one host."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import torchstrat as ts
from tests.faults.forked import in_fork
from tests.support.central_storage import mappings, me
from tests.support.replicas import check_processes, run_case
from torchstrat.distributed.collectives.shared_memory import common_memory, lockstep, neighbours
from torchstrat.distributed.collectives.shared_memory.common_memory import CommonMemory, Kind
from torchstrat.distributed.collectives.shared_memory.device_copies import CudaRuntime, DeviceCopies
from torchstrat.distributed.collectives.shared_memory.lockstep import Lockstep
from torchstrat.errors import CommunicationError, UnsupportedError
from torchstrat.testing import Workers, contract

pytestmark = pytest.mark.skipif(lockstep.why_not() is not None, reason=str(lockstep.why_not()))

SECONDS = timedelta(seconds=20)


@contextmanager
def opened(collectives: str = "auto", name: str = "MirroredStrategy", timeout: timedelta = SECONDS) -> Iterator[Any]:
    strategy = getattr(ts, name)(collectives=collectives, timeout=timeout)
    try:
        yield strategy
    finally:
        strategy.close()


def total(strategy: ts.Strategy, value: torch.Tensor) -> torch.Tensor:
    return strategy.reduce("sum", strategy.run(lambda: value))


def of_a_fork(collectives: str) -> tuple[str, float]:
    def all_calls(strategy: ts.Strategy) -> None:
        try:
            total(strategy, torch.ones(()))
        finally:
            strategy.close()

    with opened(collectives) as strategy:
        outcome = in_fork(60, lambda: False, all_calls, strategy)
        return outcome.text, float(total(strategy, torch.ones(())))


@pytest.mark.parametrize("collectives", ["shared_memory", "process_group"])
def test_a_fork_leaves_its_parents_connections_and_memory_alone(collectives: str, two_processes: Workers) -> None:
    for said, then in two_processes.run(of_a_fork, collectives):
        assert "ContextError" in said
        assert "fork of the process of replica" in said
        assert then == 2.0


# -- what is chosen ----------------------------------------------------------------------------------------------------


def describe(collectives: str, name: str = "MirroredStrategy") -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(collectives, name) as strategy:
            return str(strategy.extended.describe())


@pytest.mark.parametrize(
    ("collectives", "name", "how"),
    [
        ("auto", "MirroredStrategy", "shared memory: all 2 processes are on this host"),
        ("auto", "MultiWorkerMirroredStrategy", "shared memory: all 2 processes are on this host"),
        ("auto", "CentralStorageStrategy", "shared memory: all 2 processes are on this host"),
        ("process_group", "MirroredStrategy", "gloo, as was asked for"),
    ],
)
def test_processes_of_one_host_share_memory_by_themselves(
    collectives: str, name: str, how: str, two_processes: Workers
) -> None:
    for told in two_processes.run(describe, collectives, name):
        assert told.endswith(f"communication: {how}")


def on_two_machines(collectives: str) -> str:
    """Containers and hosts that differ are told apart by what they say of themselves."""
    here = neighbours.Place.here()._replace(machine=f"host {me()}")
    with mock.patch.object(neighbours.Place, "here", return_value=here):
        try:
            return describe(collectives)
        except UnsupportedError as error:
            return f"UnsupportedError: {error}"


def test_several_hosts_use_sockets(two_processes: Workers) -> None:
    for told in two_processes.run(on_two_machines, "auto"):
        assert told.endswith("communication: gloo, because the processes run on several hosts")
    for told in two_processes.run(on_two_machines, "shared_memory"):
        assert told.startswith("UnsupportedError: collectives='shared_memory' was asked for, and shared memory cannot")


def without_room() -> tuple[str, list[str]]:
    little = mock.patch.object(common_memory, "available_bytes", return_value=1000)
    with little, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opened() as strategy:
            told = f"{strategy.extended.describe()} {total(strategy, torch.ones(3)).tolist()}"
    return told, [str(one.message) for one in caught]


def test_too_little_memory_is_a_warning_and_sockets(two_processes: Workers) -> None:
    for told, (warned,) in two_processes.run(without_room):
        assert "communication: gloo, because" in told
        assert told.endswith("[2.0, 2.0, 2.0]")
        assert "bytes of shared memory are needed, and 1,000 are left (replica 0)" in warned


# -- what it computes --------------------------------------------------------------------------------------------------


def exchange() -> dict[str, Any]:
    """Tensors and objects that are larger than a block, empty, and of dtypes that are rarely met."""
    with opened() as strategy:
        large = torch.arange(300_000) + me()
        text = np.array(["x" * (10 + me() * 1_200_000)], dtype=object)

        def gathered(value: Any) -> Any:
            return strategy.gather(strategy.run(lambda: value), axis=0)

        with strategy.scope():
            told = ts.Variable(large * (1 - me()))
        return {
            "sum": torch.equal(total(strategy, large), 2 * torch.arange(300_000) + 1),
            "broadcast": torch.equal(told.read_value(), torch.arange(300_000)),
            "gather": torch.equal(gathered(large), torch.cat([torch.arange(300_000), torch.arange(300_000) + 1])),
            "objects": [len(one) for one in gathered(text)],
            "half": total(strategy, torch.ones(3, dtype=torch.float16) * (me() + 1)).tolist(),
            "nothing": tuple(gathered(torch.ones(0, 3)).shape),
            "booleans": gathered(torch.tensor([True, bool(me())])).tolist(),
        }


def test_every_call_exchanges_what_it_promises(two_processes: Workers) -> None:
    expected = {
        **dict.fromkeys(("sum", "broadcast", "gather"), True),
        "objects": [10, 1_200_010],
        "half": [3.0, 3.0, 3.0],
        "nothing": (0, 3),
        "booleans": [True, False, True, True],
    }
    assert two_processes.run(exchange) == [expected] * 2


SOME_CASES = 12
"""Of the training cases, for a quick look; soak has all of them."""


def run_cases(names: list[str], row: str) -> list[contract.Snapshot]:
    return [run_case(name, row) for name in names]


@pytest.mark.deadline(600)
@pytest.mark.parametrize("row", ["mirrored", pytest.param("central_storage", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("processes", "is_whole"),
    [(4, False), pytest.param(4, True, marks=pytest.mark.soak), pytest.param(8, True, marks=pytest.mark.soak)],
)
def test_training_cases_with_more_processes_than_two(processes: int, is_whole: bool, row: str) -> None:
    names = [name for name, case in contract.CASES.items() if not case.needs_compiler]
    names = names if is_whole else names[:: len(names) // SOME_CASES]
    with Workers(processes, timeout_seconds=500) as workers:
        ranks = workers.run(run_cases, names, row)
    for name, snapshots in zip(names, zip(*ranks, strict=True), strict=True):
        check_processes(name, list(snapshots))


def count_meetings(width: int) -> int:
    """Of one training step with a model of two tensors."""
    met: list[Lockstep] = []
    meet = Lockstep.meet
    with opened() as strategy:
        with strategy.scope():
            model = torch.nn.Linear(width, width)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        def counted(self: Lockstep, seconds: float, call: int) -> None:
            met.append(self)
            meet(self, seconds, call)

        strategy.run(step, args=(torch.ones(2, width),))
        with mock.patch.object(Lockstep, "meet", counted):
            strategy.run(step, args=(torch.ones(2, width),))
    return len(met)


def test_small_gradients_need_no_meeting_of_their_own(two_processes: Workers) -> None:
    """One at the end of the backward pass, one before the optimizer's step, and one at the end of the run."""
    assert two_processes.run(count_meetings, 8) == [3, 3]
    assert two_processes.run(count_meetings, 200) == [5, 5]  # two for what is cut into chunks


# -- failures ----------------------------------------------------------------------------------------------------------


def told_by(call: Callable[[], object]) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "nothing was raised"


def leave_early(patience: timedelta) -> tuple[str, str, list[float]]:
    """Rank 1 ends, while rank 0 makes a run, or starts another group of both; then another strategy is made."""
    told = []
    for act in (lambda one: one.run(lambda: None), lambda one: one._engine._world.split()):
        with opened(timeout=patience) as strategy:
            told.append(told_by(lambda act=act, one=strategy: act(one)) if me() == 0 else "")
    with opened(timeout=patience) as strategy:
        return told[0], told[1], total(strategy, torch.ones(1)).tolist()


def test_a_replica_that_closes_is_not_waited_for(two_processes: Workers) -> None:
    """A start that was given up keeps no later strategy from the store either."""
    (in_a_run, in_a_start, first), (_, _, second) = two_processes.run(leave_early, timedelta(seconds=200))
    for told, call in ((in_a_run, "in the end of a run"), (in_a_start, "in the start of a group")):
        assert call in told
        assert "replica 1 closed its strategy" in told
    assert first == second == [2.0]


# -- who may attach ----------------------------------------------------------------------------------------------------

STRANGER = """
import os, socket, sys
if sys.argv[3] != "0":
    os.setuid(int(sys.argv[3]))
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
stranger.connect("\\0" + sys.argv[1])
stranger.settimeout(10)
try:
    socket.send_fds(stranger, [bytes.fromhex(sys.argv[2])], [0])
    sys.exit(len(stranger.recv(1)))
except (BrokenPipeError, ConnectionResetError):
    sys.exit(0)
"""


def attach(knows_the_secret: bool, user: int) -> list[int]:
    """A stranger on this host that has found the socket's name, and comes first: how many bytes it is given."""
    connect = neighbours.Neighbours._connect
    given: list[int] = []

    def with_a_stranger_first(self: Any, name: str, secret: bytes) -> None:
        if me() == 1:
            hello = neighbours._HELLO.pack(secret if knows_the_secret else bytes(32), 1).hex()
            stranger = subprocess.Popen([sys.executable, "-S", "-c", STRANGER, name[1:], hello, str(user)])
            try:
                given.append(stranger.wait(20))  # it is refused before the real one has come
            except subprocess.TimeoutExpired:
                stranger.kill()
                raise
        connect(self, name, secret)

    with mock.patch.object(neighbours.Neighbours, "_connect", with_a_stranger_first):
        with opened("shared_memory"):
            return given


not_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize(
    ("knows_the_secret", "user"), [(False, 0), pytest.param(True, 65534, marks=not_root)], ids=["no secret", "no right"]
)
def test_strangers_get_nothing(knows_the_secret: bool, user: int, two_processes: Workers) -> None:
    """Who does not know the secret, and who knows it and is another user."""
    assert two_processes.run(attach, knows_the_secret, user) == [[], [0]]


# -- nothing is left ---------------------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Open descriptors, and mappings of ours."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), mappings()


OPENINGS = 4


def open_and_close() -> tuple[tuple[int, int], tuple[int, int], int]:
    """What is held before and after, and how many mappings there were meanwhile."""
    with opened():  # sockets of torch.distributed's store are kept
        pass
    before = held()
    for _ in range(OPENINGS):
        with opened() as strategy:
            total(strategy, torch.ones(1))
            meanwhile = held()[1]
    del strategy
    return before, held(), meanwhile


def test_a_closed_strategy_leaves_no_memory_and_no_descriptors(two_processes: Workers) -> None:
    for before, after, meanwhile in two_processes.run(open_and_close):
        # The store's thread closes what the other process has left in its own time: what leaks does so every time.
        assert after[0] - before[0] < OPENINGS
        # What earlier tests have left to torch's compiler lives as long as that does.
        assert after[1] <= before[1] < meanwhile


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_a_gpu_are_complete_when_they_are_waited_for() -> None:
    device = torch.device("cuda", 0)
    copies = DeviceCopies(CudaRuntime(device))
    memory = CommonMemory(common_memory.Segment.allocate(1 << 26))
    [place] = memory.places([Kind((1 << 24,), (1,), torch.float32)])
    copies.pin(memory)
    assert place.written.is_pinned()
    source = torch.zeros(1 << 24, device=device)
    for number in range(1, 6):
        for _ in range(50):  # keep the device behind the host
            source.mul_(1.0)
        source.add_(1.0)
        copies.read([source], [place.written])
        assert bool((place.written == number).all())
        [staged] = copies.to_host([source])
        assert staged.is_pinned()
        assert bool((staged == number).all())
        target = torch.empty_like(source)
        copies.to_device([place.written], [target])
        copies.wait()
        place.written.zero_()
        assert bool((target == number).all())
    copies.close()
    assert not place.written.is_pinned()
