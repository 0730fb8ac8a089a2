"""Central storage between real processes of one host: variables and optimizer state once, seen by all of them.

What is asked "on the host" and "on a device" holds also where ranks compute on devices, and step in memory that they
share on the host.
"""

from __future__ import annotations

import copy
import gc
import io
import mmap
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.support.central_storage import (
    EDITS,
    SECONDS,
    Job,
    Numbers,
    assert_same,
    batch,
    before_each_step_of,
    lies_in_common_memory,
    make,
    mappings,
    me,
    needs_common_memory,
    on_fake,
    recording_warnings,
    train_and_close,
    train_with_one_memory_for_two,
)
from tests.support.replicas import COMPILER, EVERY_LINE, check_processes, run_case
from torchstrat.errors import CommunicationError, InvalidArgumentError
from torchstrat.testing import Workers, contract
from torchstrat.testing.fake_device import on_fake_device, shares_steps
from torchstrat.testing.spawn import WorkersError, spawn

pytestmark = needs_common_memory

Run = Callable[..., list[Any]]
PLACES = ("on the host", "on a device")


@pytest.fixture(params=PLACES)
def is_on_device(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "on a device")


@pytest.fixture
def run(is_on_device: bool, two_processes: Workers) -> Run:
    """What each of two ranks returns."""
    return lambda program, *args: two_processes.run(*([on_fake] if is_on_device else []), program, *args)


# -- once, and whole everywhere ----------------------------------------------------------------------------------------


def train_and_look(kind: str) -> tuple[Numbers, int, list[bool], list[bool]]:
    """Also how many elements this rank has stepped, and which parameters and which state lie in common memory."""
    job = Job(lambda: make(kind))
    job.train(2)
    stepped: list[int] = []
    with before_each_step_of(kind, lambda parts: stepped.append(sum(part.numel() for part in parts))):
        job.train(1)
    state = job.optimizer.state_dict()["state"] if me() == 1 else {}  # by one rank alone: reading is no collective
    lies = lies_in_common_memory(list(job.model.parameters()))
    state_lies = lies_in_common_memory([value for entry in state.values() for value in entry.values()])
    return job.close(), sum(stepped), lies, state_lies


@pytest.mark.parametrize("kind", ["adam", "sgd", "adafactor"])
def test_each_rank_steps_a_share_and_sees_all(kind: str, run: Run, is_on_device: bool) -> None:
    results = run(train_and_look, kind)
    assert_same([result[0] for result in results], train_and_close(3, kind))
    (_, first, lies, _), (_, second, _, state_lies) = results
    total = sum(parameter.numel() for parameter in make()[0].parameters())
    assert first + second == total
    assert max(first, second) <= (0.7 if kind == "adafactor" else 0.55) * total
    assert lies == [not is_on_device] * 4  # on a device the program's parameters stay where they are
    assert state_lies
    assert all(state_lies)


# Where ranks compute is seen with two of them, and four share as three do.
MORE = [
    pytest.param(ranks, place, marks=[] if (ranks, place) == (3, "on the host") else pytest.mark.soak)
    for ranks in (3, 4)
    for place in PLACES
]


@pytest.mark.parametrize(("ranks", "is_on_device"), MORE, indirect=["is_on_device"])
def test_more_than_two(ranks: int, is_on_device: bool) -> None:
    program = [on_fake, train_and_close] if is_on_device else [train_and_close]
    assert_same(spawn(program[0], ranks, tuple(program[1:]), timeout_seconds=100), train_and_close())


# -- edits -------------------------------------------------------------------------------------------------------------


def train_with_edit(name: str, who: tuple[int, ...], inside: bool) -> Numbers:
    job = Job()
    job.train(2)

    def edit() -> None:
        if job.strategy is None or me() in who:
            EDITS[name](job)

    def step(x: torch.Tensor) -> None:
        loss = job.loss(x)
        job.optimizer.zero_grad()
        loss.backward()
        edit()
        job.optimizer.step()

    if not inside:
        edit()
    job.train(1, step if inside else None)
    job.train(1)
    return job.close()


def train_while_some_are_idle(change: str, idle: int) -> Numbers:
    """State is made, and changed, while a rank has no rows; all are looked at right after such a run, too."""
    job = Job()

    def train_alone() -> None:
        job.number += 1
        x = batch(job.number, 3)
        if job.strategy is None:
            job.step(x)
            return
        own = [x[:0] if me() == idle else x]
        [shared] = job.strategy.distribute_datasets_from_function(lambda _: own)
        results = job.strategy.run(lambda x: job.step(x) or torch.ones(1), args=(shared,))
        assert len(job.strategy.local_results(results)) == (me() != idle)

    train_alone()
    first = job.numbers("first ")
    job.train(1)
    EDITS[change](job)
    train_alone()
    second = job.numbers("second ")
    job.train(1)
    train_alone()
    return job.close() | first | second


def train_sparse_momentum() -> Numbers:
    """State that is sparse itself. Each rank steps one of the tables, and rank 0 alone has rows once."""

    def tables_and_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
        tables = nn.ModuleList([nn.Embedding(rows, 24, sparse=True).double() for rows in (60, 50)])
        return tables, torch.optim.SGD(tables.parameters(), lr=0.5, momentum=0.9)

    job = Job(tables_and_sgd)

    def step(x: torch.Tensor) -> None:
        job.optimizer.zero_grad()
        rows = (x[:, 0].abs() * 20).long().clamp(max=49)
        torch.stack([(table(rows) - 1).square().mean() for table in job.model.children()]).sum().backward()
        job.optimizer.step()

    numbers: Numbers = {}
    for rows in (8, 8, 8, 1, 8):
        job.train(1, step, rows=rows)
        numbers |= job.numbers(f"after {job.number}: ")
    return job.close() | numbers


def train_from_a_snapshot_twice() -> Numbers:
    """PyTorch does not copy what it loads: steps change the snapshot, and what another optimizer has of the same."""
    job = Job()
    job.train(1)
    saved = copy.deepcopy(job.optimizer.state_dict())
    numbers: Numbers = {}
    for rows in (8, 1):
        job.optimizer.load_state_dict(saved)
        job.train(1, rows=rows)
        numbers |= job.numbers(f"after {job.number}: ")
    return job.close() | numbers


def train_what_is_shown_elsewhere() -> Numbers:
    """A step reads a weight by a tensor, and by an array, that show it since before the first run."""

    def of_shown_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 24), nn.Linear(24, 24)).double()
        first, second = model[0].weight, model[1].weight

        def scale(model: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor:
            return result * shown.norm() * float((array**2).sum())

        shown, array = first.data[:20], second.detach().numpy()
        model.register_forward_hook(scale)
        return model, torch.optim.SGD(model.parameters(), lr=0.001)

    job = Job(of_shown_layers)
    job.train(3)
    return job.close()


WHO = {"between runs": ((0, 1), False), "in a run": ((0, 1), True), "in a run, by the first alone": ((0,), True)}
PROGRAMS: dict[str, tuple[Callable[..., Numbers], tuple[Any, ...]]] = {
    **{f"{edit} {when}": (train_with_edit, (edit, *who)) for edit in EDITS for when, who in WHO.items()},
    # The first of those with rows steps for all.
    **{f"{edit}, {idle} idle": (train_while_some_are_idle, (edit, idle)) for idle in (0, 1) for edit in EDITS},
}
CELLS = [
    # Every edit is made in both places always, and everything in both in soak.
    pytest.param(place, name, id=f"{name}, {place}", marks=[] if turn == number % 2 else pytest.mark.soak)
    for number, name in enumerate(PROGRAMS)
    for turn, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("is_on_device", "name"), CELLS, indirect=["is_on_device"])
def test_it_is_as_in_a_plain_program(name: str, run: Run) -> None:
    """Edits count once, also those that no counter of torch's sees."""
    program, args = PROGRAMS[name]
    assert_same(run(program, *args), program(*args))


def test_what_was_loaded_follows_the_steps(two_processes: Workers) -> None:
    assert_same(two_processes.run(train_from_a_snapshot_twice), train_from_a_snapshot_twice())


def test_what_shows_a_parameter_since_before_it_was_common(two_processes: Workers) -> None:
    assert_same(two_processes.run(train_what_is_shown_elsewhere), train_what_is_shown_elsewhere())


def test_state_that_is_sparse(two_processes: Workers) -> None:
    assert_same(two_processes.run(train_sparse_momentum), train_sparse_momentum())


def test_parameters_that_have_one_memory(two_processes: Workers) -> None:
    assert_same(two_processes.run(train_with_one_memory_for_two), train_with_one_memory_for_two())


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_another_rank_alone_are_undone(name: str, run: Run) -> None:
    assert_same(run(train_with_edit, name, (1,), True), train_and_close())


# -- who writes when ---------------------------------------------------------------------------------------------------


def look_around_a_step(slow: int) -> tuple[bool, bool]:
    """Whether nothing changes while one rank still reads, and everything has changed when the others go on."""
    job = Job(lambda: make("sgd"))
    job.train(1)
    seen: list[torch.Tensor] = []

    def look() -> None:
        seen.append(torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()]))

    def step(x: torch.Tensor) -> None:
        job.optimizer.zero_grad()
        job.loss(x).backward()
        look()
        if me() == slow:
            time.sleep(0.3)
        look()
        job.optimizer.step()
        look()
        time.sleep(0.4)
        look()

    with before_each_step_of("sgd", lambda _: time.sleep(0.3 if me() == slow else 0.0)):
        job.train(1, step)
    job.close()
    before, still, after, later = seen
    return torch.equal(before, still) and not torch.equal(before, after), torch.equal(after, later)


@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_writes_while_another_reads(slow: int, two_processes: Workers) -> None:
    assert two_processes.run(look_around_a_step, slow) == [(True, True), (True, True)]


def step_again_after_an_edit() -> Numbers:
    """Two steps with one gradient. Before the second, the first rank's parameters change, and it is slow to tell."""
    with on_fake_device(seconds=0.05 if me() == 0 else 0.0):
        job = Job(lambda: make("sgd"))

        def step(x: torch.Tensor) -> None:
            job.step(x)
            if me() == 0:
                EDITS["through_data"](job)
            job.optimizer.step()

        job.train(2, step)
        return job.close()


def test_a_step_waits_for_what_it_overwrites_and_for_what_it_steps(two_processes: Workers) -> None:
    assert_same(two_processes.run(step_again_after_an_edit), step_again_after_an_edit())


# -- gradients that stay with their owner ------------------------------------------------------------------------------


class Wide(nn.Module):
    """More than what is added up on every rank anyway, of two dtypes, with a part that is not always used."""

    def __init__(self, second: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(40, 300).double()
        self.second = nn.Linear(300, 100).to(second)
        self.sometimes = nn.Linear(300, 100).double()
        self.table = nn.Embedding(50, 24, sparse=True).double()

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        hidden = self.first(x).tanh()
        out = self.second(hidden.to(self.second.weight.dtype)).double()[:, :24]
        if use:
            out = out + self.sometimes(hidden)[:, :24]
        y: torch.Tensor = out + self.table((x[:, 0].abs() * 20).long().clamp(max=49))
        return y


def train_with_owners(backwards: int, second: torch.dtype) -> tuple[Numbers, float]:
    """Uneven batches, ranks without rows, two optimizers, several backward passes; and what is in ``.grad`` then."""

    def wide_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Wide(second)
        return model, torch.optim.Adam([*model.first.parameters(), *model.sometimes.parameters()], lr=0.01)

    job = Job(wide_and_adam, gradients="owner")
    others = [*job.model.second.parameters(), *job.model.table.parameters()]
    sgd = job.made(lambda: torch.optim.SGD(others, lr=0.05, momentum=0.9))

    def step(x: torch.Tensor) -> None:
        number = job.number - 1
        if number != 2:
            job.optimizer.zero_grad()
            sgd.zero_grad(set_to_none=number % 2 == 0)
        for _ in range(backwards):
            F.mse_loss(job.model(x, number in (1, 4)), x[:, :24]).backward()
        job.optimizer.step()
        sgd.step()

    for rows in (8, 6, 7, 1, 5, 8):
        job.train(1, step, rows=rows)
    grad = float(job.model.first.weight.grad.abs().sum())
    numbers = {name: value.detach().clone() for name, value in job.model.named_parameters()}
    job.close()
    return numbers, grad


@pytest.mark.parametrize("second", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_may_stay_with_their_owner(backwards: int, second: torch.dtype, run: Run) -> None:
    results = run(train_with_owners, backwards, second)
    expected, _ = train_with_owners(backwards, second)
    assert_same([numbers for numbers, _ in results], expected, 1e-12 if second == torch.float64 else 1e-5)
    assert len({grad for _, grad in results}) == 2, "they were made whole on all ranks"


def change_with_owners(how: str) -> str:
    def wide_linear() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(40, 300).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    job = Job(wide_linear, gradients="owner")

    def step(x: torch.Tensor) -> None:
        job.optimizer.zero_grad()
        job.model(x).square().mean().backward()
        if how == "replace":
            job.model.weight.grad = job.model.weight.grad * 0.5
        elif me() == 1:
            nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)
        job.optimizer.step()

    try:
        job.train(1, step)
    except InvalidArgumentError as error:
        return str(error)
    finally:
        job.strategy.close()
    return "nothing was raised"


@pytest.mark.parametrize("how", ["clip", "replace"])
def test_they_cannot_be_changed_there(how: str, two_processes: Workers) -> None:
    for told in two_processes.run(change_with_owners, how):
        assert "with gradients='owner' no rank has all of any of them" in told
        assert "SGD.step() (optimizer 0)" in told


# -- what a program may rely on ----------------------------------------------------------------------------------------


class Inherited(torch.optim.Adam):
    """No optimizer of torch's own: rank 0 steps it."""


def train_with_hooks(own_class: bool) -> Numbers:
    """Hooks of one optimizer: one changes gradients and parameters before its step, one parameters after it."""
    job = Job()
    if own_class:
        job.optimizer = job.made(lambda: Inherited(job.model.parameters(), lr=0.01))

    def before(*_: Any) -> None:
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(0.9)
                parameter.grad = parameter.grad * 1.0

    averages = [parameter.detach().clone() for parameter in job.model.parameters()]

    def after(*_: Any) -> None:
        with torch.no_grad():
            for parameter, average in zip(job.model.parameters(), averages, strict=True):
                average.mul_(0.5).add_(parameter, alpha=0.5)
                parameter.clamp_(-0.1, 0.1)

    job.optimizer.register_step_pre_hook(before)
    job.optimizer.register_step_post_hook(after)
    job.train(4)
    numbers = {name: value.detach().clone() for name, value in job.model.named_parameters()}
    job.close()
    return numbers | {f"average {number}": average for number, average in enumerate(averages)}


@pytest.mark.parametrize("own_class", [False, True], ids=["steps that are shared out", "steps of rank 0 alone"])
def test_hooks_of_an_optimizer_see_whole_steps(own_class: bool, two_processes: Workers) -> None:
    """Where rank 0 alone steps, its hooks alone are called."""
    first, second = two_processes.run(train_with_hooks, own_class)
    expected = train_with_hooks(own_class)
    assert_same([first], expected)
    names = [name for name in expected if not own_class or not name.startswith("average")]
    assert_same(
        [{name: one[name] for name in names} for one in (first, second)], {name: expected[name] for name in names}
    )


def use_like_any_other() -> tuple[int, bool, str, list[bool]]:
    """The size of a parameter that is saved, whether a copy stays, what a late backward pass says, and whether
    gradients are gone once the program lets go of them."""
    job = Job()
    job.train(1)
    saved = io.BytesIO()
    torch.save(job.model[0].bias, saved)
    copied = copy.deepcopy(job.model)
    before = [parameter.detach().clone() for parameter in copied.parameters()]
    held = job.model(batch(1))
    job.train(1)
    with pytest.raises(RuntimeError) as told:
        held.sum().backward()  # of what has been stepped since
    stays = all(map(torch.equal, before, copied.parameters()))
    gradients = [weakref.ref(parameter.grad) for parameter in job.model.parameters()]
    job.optimizer.zero_grad()
    gone = [gradient() is None for gradient in gradients]
    job.close()
    return len(saved.getvalue()), stays, str(told.value), gone


def test_parameters_are_ordinary_ones(two_processes: Workers) -> None:
    for size, stays, told, gone in two_processes.run(use_like_any_other):
        assert size < 64 * 8 + 3000, "a saved tensor takes no others along"
        assert stays, "a copy is not stepped"
        assert "modified by an inplace operation" in told
        assert gone == [True] * 4


def train_again_and_again() -> list[int]:
    """Mappings of ours that are left after each strategy, and after everything."""
    counts = []
    for _ in range(2):
        train_and_close(2)
        gc.collect()
        counts.append(mappings())
    return counts


def test_nothing_is_left(two_processes: Workers) -> None:
    assert two_processes.run(train_again_and_again) == [[0, 0]] * 2


def use_after_closing() -> Numbers:
    job = Job()
    job.train(2)
    job.strategy.close()
    job.strategy = None
    if me() == 1:
        job.train(1)
    else:
        time.sleep(0.5)
    return job.numbers()


def test_after_closing_everything_is_the_process_s_own(two_processes: Workers) -> None:
    still, moved = two_processes.run(use_after_closing)
    assert_same([still], train_and_close(2))
    assert_same([moved], train_and_close(3))


# -- where it cannot be had --------------------------------------------------------------------------------------------


def without_private_pages() -> tuple[Numbers, bool, list[str]]:
    with mock.patch.object(mmap, "MAP_PRIVATE", mmap.MAP_SHARED if me() == 1 else mmap.MAP_PRIVATE):
        job, told = recording_warnings(Job)
    job.train(3)
    has_state = bool(job.optimizer.state)
    numbers = {name: value.detach().clone() for name, value in job.model.named_parameters()}
    job.close()
    return numbers, has_state, told


def test_without_private_pages_the_owner_steps_alone(two_processes: Workers) -> None:
    results = two_processes.run(without_private_pages)
    expected = {name: value for name, value in train_and_close(3).items() if " of " not in name}
    assert_same([numbers for numbers, _, _ in results], expected)
    assert [has_state for _, has_state, _ in results] == [True, False]
    for _, _, (message,) in results:
        assert message.startswith("every process keeps parameters of its own, because of the kernel does not tell")
        assert "; rank 0 alone has the optimizer's state" in message


def without_room() -> tuple[Numbers, list[str]]:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    job = Job()
    with mock.patch.object(mmap, "mmap", refuse if me() == 1 else mmap.mmap):
        _, told = recording_warnings(lambda: job.remake(make))
    job.train(3)
    return job.close(), told


def test_without_room_for_parameters_each_keeps_its_own(two_processes: Workers) -> None:
    results = two_processes.run(without_room)
    assert_same([numbers for numbers, _ in results], train_and_close(3))
    for _, (message,) in results:
        assert message.startswith("every process keeps parameters of its own: No space left on device (replica 1)")


# -- a process that dies -----------------------------------------------------------------------------------------------


def die_in_a_step(victim: int, told: Path) -> None:
    job = Job()
    job.train(2)
    with before_each_step_of("adam", lambda _: me() != victim or os.kill(os.getpid(), signal.SIGKILL)):
        try:
            job.train(1)
        except CommunicationError as error:
            told.write_text(str(error))
            raise


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_its_step_is_named(victim: int, tmp_path: Path) -> None:
    told, before = tmp_path / "told", set(os.listdir("/dev/shm"))
    with pytest.raises(WorkersError):
        spawn(die_in_a_step, 2, (victim, told), timeout_seconds=60)
    assert f"nothing was heard from replica {victim}" in told.read_text()
    assert "Adam.step() (optimizer 0): the end of the step" in told.read_text()
    assert set(os.listdir("/dev/shm")) <= before


# -- ranks on devices --------------------------------------------------------------------------------------------------

ROW = "central_storage"


# test_contract_torchrun has what is compiled, and what goes through every line, of ranks on CPUs; half of it is here.
ALWAYS = [name for name in contract.CASES if name in EVERY_LINE and name != "compiled"][::2]


def _marks(case: contract.Case) -> list[Any]:
    if case.needs_compiler:
        return [pytest.mark.soak, *COMPILER]
    return [] if case.name in ALWAYS else [pytest.mark.soak]


@pytest.mark.parametrize("name", [pytest.param(case.name, marks=_marks(case)) for case in contract.CASES.values()])
def test_training_cases_on_a_device(name: str, two_processes: Workers) -> None:
    check_processes(name, two_processes.run(on_fake, run_case, name, ROW, timeout_seconds=240))


def train_unpinned() -> tuple[Numbers, list[str]]:
    with on_fake_device(refuses=True):
        return recording_warnings(train_and_close)


def test_where_nothing_can_be_pinned_it_is_said_once(two_processes: Workers) -> None:
    results = two_processes.run(train_unpinned)
    assert_same([numbers for numbers, _ in results], train_and_close())
    for _, (message,) in results:
        assert "could not be pinned (no more memory can be locked)" in message


def pins() -> list[int]:
    """How much is pinned while a job trains, after one of two models is gone, and when it is closed."""
    with on_fake_device() as devices:
        job = Job()
        job.train(1)
        other = job.made(lambda: nn.Linear(10, 10))
        [device] = devices
        found = [len(device.regions)]
        del other
        gc.collect()
        found.append(len(device.regions))
        job.close()
        return [*found, len(device.regions)]


def test_memory_is_unpinned_when_it_goes_and_at_the_end(two_processes: Workers) -> None:
    for_gradients = 1
    assert two_processes.run(pins) == [[2 + for_gradients, 1 + for_gradients, 0]] * 2


def train_with_a_rate_on_the_device() -> tuple[Numbers, list[bool]]:
    """And whether its steps are shared out on the host, before and after its kernels are for devices only."""
    job = Job()
    [group] = job.optimizer.param_groups
    group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    job.train(3)
    shared = [shares_steps(job.strategy, job.optimizer)]
    group["capturable"] = True
    shared.append(shares_steps(job.strategy, job.optimizer))
    return job.close(), shared


def test_rates_on_the_device_and_steps_that_have_to_stay_there(two_processes: Workers) -> None:
    results = two_processes.run(on_fake, train_with_a_rate_on_the_device)
    assert_same([numbers for numbers, _ in results], train_and_close(3))
    assert [shared for _, shared in results] == [[True, False]] * 2


def parameters_counted() -> list[tuple[int, int, int]]:
    with on_fake_device():
        strategy = ts.CentralStorageStrategy(timeout=SECONDS)
        model, optimizer = make("sgd")
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


def train_on(device: str, kind: str, gradients: str) -> tuple[Numbers, str, list[str]]:
    """Clipped steps, if gradients are whole everywhere; parameters are halved between two of them."""
    job = Job(lambda: make(kind), devices=[device], gradients=gradients)
    if job.strategy is not None:
        job.model.to(device)

    def step(x: torch.Tensor) -> None:
        job.optimizer.zero_grad()
        job.loss(x).backward()
        if gradients == "everywhere":
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.05)
        job.optimizer.step()

    job.train(2, step)
    EDITS["through_data"](job)
    job.train(2, step)
    where = [str(value.device) for state in job.optimizer.state.values() for value in state.values()]
    numbers = {name: value.detach().cpu() for name, value in job.model.named_parameters()}
    told = job.strategy.extended.describe() if job.strategy is not None else ""
    job.close()
    return numbers, told, where


def check_trained_on(results: list[Any], kind: str, gradients: str) -> None:
    expected, _, _ = train_on("", kind, gradients)
    assert_same([numbers for numbers, _, _ in results], expected, 1e-9)
    for _, told, where in results:
        assert "shared memory: all 2 processes are on this host, and copy between it and their devices" in told
        assert set(where) <= {"cpu"}


@pytest.mark.parametrize("gradients", ["everywhere", "owner"])
def test_the_program_of_the_next_test_on_a_fake_device(gradients: str, two_processes: Workers) -> None:
    check_trained_on(two_processes.run(on_fake, train_on, "cpu:0", "adam", gradients), "adam", gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gradients", ["everywhere", "owner"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "adafactor"])
@pytest.mark.deadline(180)
def test_two_processes_on_one_gpu(kind: str, gradients: str) -> None:
    check_trained_on(spawn(train_on, 2, ("cuda:0", kind, gradients), timeout_seconds=150), kind, gradients)
