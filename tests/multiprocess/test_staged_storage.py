"""Central storage between processes that compute on devices and step in memory that they share on the host."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.multiprocess import test_central_storage as central
from tests.multiprocess.fake_device import on_fake_device
from torchstrat.collectives.shared_memory import common_memory
from torchstrat.collectives.shared_memory.common_memory import CommonMemory, Kind
from torchstrat.collectives.shared_memory.device_copies import CudaRuntime, DeviceCopies
from torchstrat.collectives.shared_memory.segment import Segment
from torchstrat.replicas.central.staged import StagedParameters
from torchstrat.testing import Workers, contract
from torchstrat.testing.spawn import spawn

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(common_memory.why_not() is not None, reason=str(common_memory.why_not())),
]

ROW = contract.TORCHRUN["central_storage"]


# -- a fake device: everything but CUDA itself -------------------------------------------------------------------------


def on_fake(program: Callable[..., Any], *args: Any) -> Any:
    """What a program of `test_central_storage` returns, run on a fake device."""
    with on_fake_device() as devices:
        result = program(*args)
    assert devices
    assert all(device.to_host for device in devices)
    assert all(device.to_device for device in devices)
    return result


def run_case(name: str) -> contract.Snapshot:
    case = contract.CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case.needs_compiler:
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's modules that inductor imports late
        snapshot: contract.Snapshot = on_fake(contract.run_row, case, ROW)
        return snapshot


def _cases() -> list[Any]:
    compiler = [
        pytest.mark.soak,  # a minute each; compiled steps of ranks on CPUs are in test_contract_torchrun
        pytest.mark.deadline(300),
        pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler"),
    ]
    marks = {True: compiler, False: []}
    return [pytest.param(case, id=case.name, marks=marks[case.needs_compiler]) for case in contract.CASES.values()]


@pytest.mark.parametrize("case", _cases())
def test_numbers_of_one_device(case: contract.Case, two_processes: Workers) -> None:
    snapshots = two_processes.run(run_case, case.name, timeout_seconds=240 if case.needs_compiler else 60)
    contract.check_agreement(case, snapshots)
    expected = contract.reference(case, ROW.replicas)
    for snapshot in snapshots:
        contract.check(case, snapshot, expected)


@pytest.mark.parametrize("kind", ["adam", "sgd", "adafactor"])
def test_each_rank_steps_a_share(kind: str, two_processes: Workers) -> None:
    """The state is in memory that all see; the parameters of the program stay where they are."""
    results = two_processes.run(on_fake, central.train_and_look, kind)
    alone = central.Job(kind, plain=True)
    alone.train(3)
    central.assert_same([result[0] for result in results], alone.numbers())
    (_, first, total, lies), (_, second, _, state_lies) = results
    assert first + second == total
    assert max(first, second) <= (0.7 if kind == "adafactor" else 0.55) * total
    assert not any(lies)
    parameters = len(list(alone.model.parameters()))
    assert not any(state_lies[:parameters])
    assert all(state_lies[parameters:])
    assert len(state_lies) > parameters


def test_more_than_two() -> None:
    alone = central.Job(plain=True)
    alone.train(4)
    central.assert_same(spawn(on_fake, 3, (central.train_and_close,), timeout_seconds=100), alone.numbers())


@pytest.mark.parametrize("name", central.EDITS)
def test_edits_count_once_and_are_the_first_ones(name: str, two_processes: Workers) -> None:
    """Also those that no counter of torch's sees."""
    for who, inside in (((0, 1), False), ((0, 1), True), ((0,), True)):
        expected = central.train_with_edit(name, central.NOBODY, inside)
        central.assert_same(two_processes.run(on_fake, central.train_with_edit, name, who, inside), expected)
    central.assert_same(two_processes.run(on_fake, central.train_with_edit, name, (1,), True), central.train_without())


def test_a_group_that_is_added_and_gradients_that_are_missing(two_processes: Workers) -> None:
    central.assert_same(two_processes.run(on_fake, central.add_a_group), central.add_a_group())


@pytest.mark.parametrize("change", ["through_data", "state_is_loaded"])
@pytest.mark.parametrize("idle", [0, 1])
def test_ranks_without_rows(idle: int, change: str, two_processes: Workers) -> None:
    results = two_processes.run(on_fake, central.train_while_some_are_idle, change, idle)
    central.assert_same(results, central.train_while_some_are_idle(change, idle))


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_may_stay_with_their_owner(backwards: int, two_processes: Workers) -> None:
    expected, _ = central.train_with_owners(backwards, torch.float64)
    results = two_processes.run(on_fake, central.train_with_owners, backwards, torch.float64)
    for numbers, _ in results:
        for name, value in numbers.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-12), name
            assert torch.equal(value, results[0][0][name]), name
    assert len({grad for _, grad in results}) == 2, "they were made whole on all ranks"


# -- who writes and reads when -----------------------------------------------------------------------------------------


def step_again_after_an_edit(plain: bool) -> dict[str, torch.Tensor]:
    """Two steps with one gradient. Before the second, the first rank's parameters change, and it is slow to tell."""
    job = central.Job("sgd", plain=plain)

    def step(x: torch.Tensor) -> None:
        job.step(x)
        if plain or central.me() == 0:
            central.through_data(job)
        job.optimizer.step()

    read = StagedParameters.read

    def read_late(self: StagedParameters, tensors: Any) -> None:
        time.sleep(0.2)
        read(self, tensors)

    with mock.patch.object(StagedParameters, "read", read_late):
        job.train(2, step=step)
    return job.close()


def test_a_step_waits_for_what_it_overwrites_and_for_what_it_steps(two_processes: Workers) -> None:
    expected = step_again_after_an_edit(True)
    central.assert_same(two_processes.run(on_fake, step_again_after_an_edit, False), expected)


def train_unpinned() -> tuple[dict[str, torch.Tensor], list[str]]:
    with on_fake_device(refuses=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers = central.train_and_close()
    return numbers, [str(one.message) for one in caught]


def test_where_nothing_can_be_pinned_it_is_said_once(two_processes: Workers) -> None:
    alone = central.Job(plain=True)
    alone.train(4)
    results = two_processes.run(train_unpinned)
    central.assert_same([numbers for numbers, _ in results], alone.numbers())
    for _, told in results:
        [message] = told
        assert "could not be pinned (no more memory can be locked)" in message


def pins() -> list[int]:
    """How much is pinned while a job trains, after one of two models is gone, and when it is closed."""
    with on_fake_device() as devices:
        job = central.Job()
        job.train(1)
        with job.strategy.scope():  # type: ignore[union-attr]
            other = nn.Linear(10, 10)
        [device] = devices
        before = len(device.regions)
        del other
        gc.collect()
        after = len(device.regions)
        job.close()
        return [before, after, len(device.regions)]


def test_memory_is_unpinned_when_it_goes_and_at_the_end(two_processes: Workers) -> None:
    for_gradients = 1
    assert two_processes.run(pins) == [[2 + for_gradients, 1 + for_gradients, 0]] * 2


def train_with_a_rate_on_the_device() -> tuple[dict[str, torch.Tensor], list[bool]]:
    job = central.Job("adam")
    [group] = job.optimizer.param_groups
    group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    job.train(3)
    shares = [job.storage.shares(job.optimizer)]
    group["capturable"] = True  # its kernels are for devices only
    shares.append(job.storage.shares(job.optimizer))
    return job.close(), shares


def test_rates_on_the_device_and_steps_that_have_to_stay_there(two_processes: Workers) -> None:
    alone = central.Job(plain=True)
    alone.train(3)
    results = two_processes.run(on_fake, train_with_a_rate_on_the_device)
    central.assert_same([numbers for numbers, _ in results], alone.numbers())
    assert [shares for _, shares in results] == [[True, False]] * 2


def parameters_counted() -> list[tuple[int, int, int]]:
    with on_fake_device():
        strategy = ts.CentralStorageStrategy(timeout=central.SECONDS)
        model, optimizer = central.make("sgd")
        holdings = strategy.extended.estimate(model, optimizer).holdings
        size = sum(parameter.nbytes for parameter in model.parameters())
        strategy.close()
        return [
            (one.parameters_bytes // size, one.optimizer_state_bytes // size, one.communication_bytes // size)
            for one in holdings
        ]


def test_estimates_count_device_and_host(two_processes: Workers) -> None:
    first = [(1, 0, 0), (1, 1, 1)]  # a copy on the device; on the host all, and the gradients once more
    second = [(1, 0, 0), (0, 0, 1)]
    assert two_processes.run(parameters_counted) == [first + second] * 2


# -- a GPU -------------------------------------------------------------------------------------------------------------


def train_on(device: str | None, kind: str, gradients: str) -> tuple[dict[str, torch.Tensor], str, list[str]]:
    """Clipped steps, if gradients are whole everywhere; parameters are halved between two of them."""
    strategy = None
    if device is not None:
        strategy = ts.CentralStorageStrategy([device], timeout=central.SECONDS, gradients=gradients)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model, optimizer = central.make(kind)
        if device is not None:
            model.to(device)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :24]).backward()
        if gradients == "everywhere":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    for number in range(4):
        if number == 2:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        x = central.batch(number)
        if strategy is None:
            step(x)
        else:
            [shared] = strategy.distribute_dataset([x])
            strategy.run(step, args=(shared,))
    where = [str(value.device) for state in optimizer.state.values() for value in state.values()]
    numbers = {name: value.detach().cpu() for name, value in model.named_parameters()}
    told = ""
    if strategy is not None:
        told = strategy.extended.describe()
        strategy.close()
    return numbers, told, where


def check_results(results: list[Any], kind: str, gradients: str) -> None:
    expected, _, _ = train_on(None, kind, gradients)
    for numbers, told, where in results:
        assert "shared memory: all 2 processes are on this host, and copy between it and their devices" in told
        assert set(where) <= {"cpu"}
        for name, value in numbers.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-9), name
            assert torch.equal(value, results[0][0][name]), name


@pytest.mark.parametrize("gradients", ["everywhere", "owner"])
def test_the_program_of_the_next_test_on_a_fake_device(gradients: str, two_processes: Workers) -> None:
    check_results(two_processes.run(on_fake, train_on, "cpu:0", "adam", gradients), "adam", gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gradients", ["everywhere", "owner"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "adafactor"])
@pytest.mark.deadline(180)
def test_two_processes_on_one_gpu(kind: str, gradients: str) -> None:
    check_results(spawn(train_on, 2, ("cuda:0", kind, gradients), timeout_seconds=150), kind, gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_a_gpu_are_complete_when_they_are_waited_for() -> None:
    device = torch.device("cuda", 0)
    copies = DeviceCopies(CudaRuntime(device))
    [place] = (memory := CommonMemory(Segment.allocate(1 << 26))).places([Kind((1 << 24,), (1,), torch.float32)])
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
