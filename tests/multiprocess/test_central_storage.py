"""Central storage between real processes of one host: variables and optimizer state once, seen by all of them."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.collectives.shared_memory import common_memory, neighbours
from torchstrat.errors import CommunicationError
from torchstrat.replicas.central import storage as storage_module
from torchstrat.testing import Workers
from torchstrat.testing.spawn import WorkersError, spawn

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(common_memory.why_not() is not None, reason=str(common_memory.why_not())),
]

SECONDS = timedelta(seconds=20)
ROWS = 8


def me() -> int:
    return int(os.environ.get("RANK", "0"))


def make(kind: str = "adam") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 24)).double()
    parameters = list(model.parameters())
    optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adam": lambda: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=0.05),
    }
    return model, optimizers[kind]()


def batch(number: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 40, generator=generator, dtype=torch.float64)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :24])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Job:
    """A strategy with a model and an optimizer, or neither the strategy: what one process makes of the same batches."""

    def __init__(self, kind: str = "adam", *, plain: bool = False) -> None:
        self.strategy = None
        if not plain:
            self.strategy = ts.CentralStorageStrategy(timeout=SECONDS, collectives="shared_memory")
        if self.strategy is None:
            self.model, self.optimizer = make(kind)
        else:
            with self.strategy.scope():
                self.model, self.optimizer = make(kind)
        self.step = step_of(self.model, self.optimizer)
        self.number = 0

    def train(self, steps: int = 1, rows: int = ROWS, step: Callable[[torch.Tensor], Any] | None = None) -> None:
        for _ in range(steps):
            self.number += 1
            x = batch(self.number, rows)
            if self.strategy is None:
                (step or self.step)(x)
            else:
                [shared] = self.strategy.distribute_dataset([x])
                self.strategy.run(step or self.step, args=(shared,))

    @property
    def storage(self) -> storage_module.CentralStorage:
        found: storage_module.CentralStorage = self.strategy._engine._storage  # type: ignore[union-attr]
        return found

    def numbers(self) -> dict[str, torch.Tensor]:
        """Parameters and state, copied."""
        found = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{name} of {number}"] = value.detach().clone()
        return found

    def close(self) -> dict[str, torch.Tensor]:
        numbers = self.numbers()
        if self.strategy is not None:
            self.strategy.close()
        return numbers


def assert_same(results: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    for rank, numbers in enumerate(results):
        assert numbers.keys() == expected.keys(), f"rank {rank}"
        for name, value in numbers.items():
            assert value.shape == expected[name].shape
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-12), f"{name} on rank {rank}"
            assert torch.equal(value, results[0][name]), f"{name} differs between ranks"


# -- once, and whole everywhere ----------------------------------------------------------------------------------------


def train_and_look(kind: str) -> tuple[dict[str, torch.Tensor], int, int, list[bool]]:
    job = Job(kind)
    job.train(3)
    state = job.optimizer.state_dict()["state"] if me() == 1 else {}  # by one rank alone: reading is no collective
    tensors = [*job.model.parameters(), *(v for entry in state.values() for v in entry.values())]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped if "memfd:torchstrat" in line]
    lies = [any(low <= tensor.data_ptr() < high for low, high in ranges) for tensor in tensors]
    pieces = job.storage._prepared[job.optimizer].twin._pieces.values()
    stepped = sum(piece.leaf.numel() for each in pieces for piece in each)
    total = sum(parameter.numel() for parameter in job.model.parameters())
    return job.close(), stepped, total, lies


@pytest.mark.parametrize("kind", ["adam", "sgd", "adafactor"])
def test_each_rank_steps_a_share_and_sees_all(kind: str, two_processes: Workers) -> None:
    results = two_processes.run(train_and_look, kind)
    alone = Job(kind, plain=True)
    alone.train(3)
    assert_same([result[0] for result in results], alone.numbers())
    (_, first, total, lies), (_, second, _, state_lies) = results
    assert first + second == total
    assert max(first, second) <= (0.7 if kind == "adafactor" else 0.55) * total
    assert all(lies)
    assert all(state_lies)


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_more_than_two(ranks: int) -> None:
    alone = Job(plain=True)
    alone.train(4)
    assert_same(spawn(train_and_close, ranks, timeout_seconds=100), alone.numbers())


def train_and_close() -> dict[str, torch.Tensor]:
    job = Job()
    for _ in range(4):
        job.train(1)
    return job.close()


# -- edits -------------------------------------------------------------------------------------------------------------

HALF = 0.5
NOBODY = (-1,)  # one process without a strategy


def through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.mul_(HALF)


def in_place(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(HALF)


def by_another_tensor(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = parameter.data * HALF


def of_state(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"].mul_(HALF)
        state["step"].add_(3.0)


def of_state_through_data(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"].data.mul_(HALF)


def state_is_cleared(job: Job) -> None:
    job.optimizer.state.clear()


def state_is_loaded(job: Job) -> None:
    state = copy.deepcopy(job.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg_sq"] *= HALF
        entry["step"] += 2
    job.optimizer.load_state_dict(state)


_EDITS = (
    through_data,
    in_place,
    by_another_tensor,
    of_state,
    of_state_through_data,
    state_is_cleared,
    state_is_loaded,
)
EDITS: dict[str, Callable[[Job], None]] = {edit.__name__: edit for edit in _EDITS}


def train_with_edit(name: str, who: tuple[int, ...], inside: bool) -> dict[str, torch.Tensor]:
    job = Job(plain=who == NOBODY)
    job.train(2)

    def edit() -> None:
        if job.strategy is None or me() in who:
            EDITS[name](job)

    if inside:

        def step(x: torch.Tensor) -> None:
            loss = F.mse_loss(job.model(x), x[:, :24])
            job.optimizer.zero_grad()
            loss.backward()
            edit()
            job.optimizer.step()

        job.train(1, step=step)
    else:
        edit()
        job.train(1)
    job.train(1)
    return job.close()


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("inside", [False, True], ids=["between runs", "in a run"])
def test_edits_on_all_ranks_count_once(name: str, inside: bool, two_processes: Workers) -> None:
    expected = train_with_edit(name, NOBODY, inside)
    assert_same(two_processes.run(train_with_edit, name, (0, 1), inside), expected)


def train_without() -> dict[str, torch.Tensor]:
    job = Job(plain=True)
    job.train(4)
    return job.numbers()


@pytest.mark.parametrize("name", EDITS)
def test_edits_on_one_rank_are_the_first_ones(name: str, two_processes: Workers) -> None:
    assert_same(two_processes.run(train_with_edit, name, (0,), True), train_with_edit(name, NOBODY, True))
    assert_same(two_processes.run(train_with_edit, name, (1,), True), train_without())


def add_a_group() -> dict[str, torch.Tensor]:
    job = Job(plain="RANK" not in os.environ)
    torch.manual_seed(9)
    with job.strategy.scope() if job.strategy is not None else warnings.catch_warnings():
        head = nn.Linear(24, 24).double()
    job.train(2)
    job.optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.1})

    def step(x: torch.Tensor) -> None:
        job.optimizer.zero_grad()
        F.mse_loss(head(job.model(x)), x[:, :24]).backward()
        job.optimizer.step()

    job.train(2, step=step)
    job.train(2)  # the head has no gradient: its state waits
    job.train(1, step=step)
    return job.close() | {"head": head.weight.detach().clone()}


def test_a_group_that_is_added_and_gradients_that_are_missing(two_processes: Workers) -> None:
    assert_same(two_processes.run(add_a_group), add_a_group())


def train_while_some_are_idle(change: str, idle: int) -> dict[str, torch.Tensor]:
    """State is made, and changed, while a rank has no rows; all are looked at right after such a run, too."""
    job = Job(plain="RANK" not in os.environ)

    def train_alone() -> None:
        job.number += 1
        x = batch(job.number, 3)
        if job.strategy is None:
            job.step(x)
            return
        own = [x[:0] if me() == idle else x]
        [shared] = job.strategy.distribute_datasets_from_function(lambda _: own)
        assert len(job.strategy.local_results(job.strategy.run(job.step, args=(shared,)))) == (me() != idle)

    train_alone()
    first = {f"first {name}": value for name, value in job.numbers().items()}
    job.train(1)
    EDITS[change](job)
    train_alone()
    second = {f"second {name}": value for name, value in job.numbers().items()}
    job.train(1)
    train_alone()
    return job.close() | first | second


@pytest.mark.parametrize("change", EDITS)
@pytest.mark.parametrize("idle", [0, 1])
def test_ranks_without_rows(idle: int, change: str, two_processes: Workers) -> None:
    """The first of those with rows steps for all."""
    results = two_processes.run(train_while_some_are_idle, change, idle)
    assert_same(results, train_while_some_are_idle(change, idle))


def train_sparse_momentum() -> dict[str, torch.Tensor]:
    """State that is sparse itself. Each rank steps one of the tables, and rank 0 alone has rows once."""
    strategy = ts.CentralStorageStrategy(timeout=SECONDS) if "RANK" in os.environ else None
    torch.manual_seed(3)
    with strategy.scope() if strategy is not None else warnings.catch_warnings():
        tables = [nn.Embedding(rows, 24, sparse=True).double() for rows in (60, 50)]
        optimizer = torch.optim.SGD([table.weight for table in tables], lr=0.5, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        rows = (x[:, 0].abs() * 20).long().clamp(max=49)
        sum(((table(rows) - 1).square().mean() for table in tables), start=torch.zeros(())).backward()
        optimizer.step()

    numbers = {}
    for number, rows in enumerate((8, 8, 8, 1, 8)):
        x = batch(number, rows)
        if strategy is None:
            step(x)
        else:
            [shared] = strategy.distribute_dataset([x])
            strategy.run(step, args=(shared,))
        for table in tables:
            name = f"{table.num_embeddings} after {number}"
            numbers[name] = table.weight.detach().clone()
            numbers[f"momentum of {name}"] = optimizer.state[table.weight]["momentum_buffer"].to_dense().clone()
    if strategy is not None:
        strategy.close()
    return numbers


def test_state_that_is_sparse(two_processes: Workers) -> None:
    assert_same(two_processes.run(train_sparse_momentum), train_sparse_momentum())


# -- who writes when ---------------------------------------------------------------------------------------------------


def look_around_a_step(slow: int) -> tuple[bool, bool]:
    """Whether nothing changes while one rank still reads, and everything has changed when the others go on."""
    job = Job("sgd")
    job.train(1)
    begin = storage_module.CentralStorage.begin_step

    def begin_late(self: Any, *args: Any) -> Any:
        own = begin(self, *args)
        time.sleep(0.3)
        return own

    if me() == slow:
        storage_module.CentralStorage.begin_step = begin_late  # type: ignore[method-assign]
    seen: list[torch.Tensor] = []

    def flat() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()])

    def step(x: torch.Tensor) -> None:
        job.optimizer.zero_grad()
        F.mse_loss(job.model(x), x[:, :24]).backward()
        seen.append(flat())
        if me() == slow:
            time.sleep(0.3)
        seen.append(flat())
        job.optimizer.step()
        seen.append(flat())
        time.sleep(0.4)
        seen.append(flat())

    try:
        job.train(1, step=step)
    finally:
        storage_module.CentralStorage.begin_step = begin  # type: ignore[method-assign]
    job.close()
    before, still, after, later = seen
    return torch.equal(before, still) and not torch.equal(before, after), torch.equal(after, later)


@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_writes_while_another_reads(slow: int, two_processes: Workers) -> None:
    assert two_processes.run(look_around_a_step, slow) == [(True, True), (True, True)]


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


def train_with_owners(backwards: int, second: torch.dtype) -> tuple[dict[str, torch.Tensor], float]:
    """Uneven batches, ranks without rows, two optimizers, several backward passes; and what is in ``.grad`` then."""
    strategy = None if "RANK" not in os.environ else ts.CentralStorageStrategy(timeout=SECONDS, gradients="owner")
    torch.manual_seed(3)
    with strategy.scope() if strategy is not None else warnings.catch_warnings():
        model = Wide(second)
        adam = torch.optim.Adam([*model.first.parameters(), *model.sometimes.parameters()], lr=0.01)
        sgd = torch.optim.SGD([*model.second.parameters(), *model.table.parameters()], lr=0.05, momentum=0.9)

    def step_for(number: int) -> Callable[[torch.Tensor], None]:
        def step(x: torch.Tensor) -> None:
            if number != 2:
                adam.zero_grad()
                sgd.zero_grad(set_to_none=number % 2 == 0)
            for _ in range(backwards):
                F.mse_loss(model(x, number in (1, 4)), x[:, :24]).backward()
            adam.step()
            sgd.step()

        return step

    for number, rows in enumerate((8, 6, 7, 1, 5, 8)):
        x = batch(number, rows)
        if strategy is None:
            step_for(number)(x)
        else:
            [shared] = strategy.distribute_dataset([x])
            strategy.run(step_for(number), args=(shared,))
    assert model.first.weight.grad is not None
    grad = model.first.weight.grad.clone()
    numbers = {name: value.detach().clone() for name, value in model.named_parameters()}
    if strategy is not None:
        strategy.close()
    return numbers, float(grad.abs().sum())


@pytest.mark.parametrize("second", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_may_stay_with_their_owner(backwards: int, second: torch.dtype, two_processes: Workers) -> None:
    expected, _ = train_with_owners(backwards, second)
    results = two_processes.run(train_with_owners, backwards, second)
    for numbers, _ in results:
        for name, value in numbers.items():
            tolerance = 1e-12 if second == torch.float64 else 1e-5
            assert torch.allclose(value, expected[name], rtol=0, atol=tolerance), name
            assert torch.equal(value, results[0][0][name]), name
    assert len({grad for _, grad in results}) == 2, "they were made whole on all ranks"


def clip_with_owners(how: str) -> str:
    strategy = ts.CentralStorageStrategy(timeout=SECONDS, gradients="owner")
    with strategy.scope():
        model = nn.Linear(40, 300).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if how == "replace":
            assert model.weight.grad is not None
            model.weight.grad = model.weight.grad * 0.5
        elif me() == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    try:
        strategy.run(step, args=(batch(1),))
    except ts.errors.InvalidArgumentError as error:
        return str(error)
    finally:
        strategy.close()
    return "nothing was raised"


@pytest.mark.parametrize("how", ["clip", "replace"])
def test_they_cannot_be_changed_there(how: str, two_processes: Workers) -> None:
    for told in two_processes.run(clip_with_owners, how):
        assert "with gradients='owner' no rank has all of any of them" in told
        assert "SGD.step() (optimizer 0)" in told


# -- what a program may rely on ----------------------------------------------------------------------------------------


class Inherited(torch.optim.Adam):
    """No optimizer of torch's own: rank 0 steps it."""


def train_with_hooks(own_class: bool) -> dict[str, torch.Tensor]:
    """Hooks of one optimizer: one changes gradients and parameters before its step, one parameters after it."""
    job = Job(plain="RANK" not in os.environ)
    if own_class:
        with job.strategy.scope() if job.strategy is not None else warnings.catch_warnings():
            job.optimizer = Inherited(job.model.parameters(), lr=0.01)
        job.step = step_of(job.model, job.optimizer)

    def before(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(0.9)
                assert parameter.grad is not None
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
    if not own_class or me() == 0:
        numbers |= {f"average {number}": average for number, average in enumerate(averages)}
    job.close()
    return numbers


def test_hooks_of_an_optimizer_see_whole_steps(two_processes: Workers) -> None:
    assert_same(two_processes.run(train_with_hooks, False), train_with_hooks(False))


def test_hooks_of_an_optimizer_that_is_stepped_at_once(two_processes: Workers) -> None:
    expected = train_with_hooks(True)
    first, second = two_processes.run(train_with_hooks, True)
    assert_same([first], expected)
    assert_same([second], {name: expected[name] for name in second})


def hold_gradients() -> list[bool]:
    """Whether gradients are gone once the program lets go of them."""
    job = Job()
    job.train(1)
    gradients = [weakref.ref(parameter.grad) for parameter in job.model.parameters()]
    job.optimizer.zero_grad()
    gone = [gradient() is None for gradient in gradients]
    job.close()
    return gone


def test_gradients_are_not_held(two_processes: Workers) -> None:
    for gone in two_processes.run(hold_gradients):
        assert all(gone)


def save_and_copy() -> tuple[int, int, bool, str]:
    job = Job()
    job.train(1)
    saved = io.BytesIO()
    torch.save(job.model[0].bias, saved)  # type: ignore[index]
    copied = copy.deepcopy(job.model)
    before = [parameter.detach().clone() for parameter in copied.parameters()]
    held = job.model(batch(1))
    job.train(1)
    try:
        held.sum().backward()  # of what has been stepped since
        told = "nothing was raised"
    except RuntimeError as error:
        told = str(error)
    is_own = all(torch.equal(one, other) for one, other in zip(before, copied.parameters(), strict=True))
    job.close()
    return len(saved.getvalue()), 64 * 8, is_own, told


def test_parameters_are_ordinary_ones(two_processes: Workers) -> None:
    for size, content, is_own, told in two_processes.run(save_and_copy):
        assert size < content + 3000, "a saved tensor takes no others along"
        assert is_own, "a copy is not stepped"
        assert "modified by an inplace operation" in told


def train_again_and_again() -> list[int]:
    """Mappings of ours that are left after each strategy, and after everything."""
    counts = []
    for _ in range(2):
        job = Job()
        job.train(2)
        job.close()
        del job
        gc.collect()
        counts.append(Path("/proc/self/maps").read_text().count("memfd:torchstrat"))
    return counts


def test_nothing_is_left(two_processes: Workers) -> None:
    for counts in two_processes.run(train_again_and_again):
        assert counts == [0, 0]


def use_after_closing() -> tuple[dict[str, torch.Tensor], bool]:
    job = Job()
    job.train(2)
    job.strategy.close()  # type: ignore[union-attr]
    job.strategy = None
    if me() == 1:
        job.train(1)
        return job.numbers(), True
    time.sleep(0.5)
    return job.numbers(), False


def test_after_closing_everything_is_the_process_s_own(two_processes: Workers) -> None:
    (still, _), (moved, _) = two_processes.run(use_after_closing)
    alone = Job(plain=True)
    alone.train(2)
    assert_same([still], alone.numbers())
    alone.train(1)
    assert_same([moved], alone.numbers())


# -- where it cannot be had --------------------------------------------------------------------------------------------


def without_private_pages() -> tuple[dict[str, torch.Tensor], list[str], bool]:
    real = storage_module.why_not
    if me() == 1:
        storage_module.why_not = lambda: "this is a test"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job = Job()
    finally:
        storage_module.why_not = real
    job.train(3)
    has_state = bool(job.optimizer.state)
    numbers = {name: value.detach().clone() for name, value in job.model.named_parameters()}
    job.close()
    return numbers, [str(one.message) for one in caught], has_state


def test_without_private_pages_the_owner_steps_alone(two_processes: Workers) -> None:
    alone = Job(plain=True)
    alone.train(3)
    expected = {name: value.detach() for name, value in alone.model.named_parameters()}
    results = two_processes.run(without_private_pages)
    assert_same([numbers for numbers, _, _ in results], expected)
    assert [has_state for _, _, has_state in results] == [True, False]
    for _, messages, _ in results:
        [message] = messages
        assert message.startswith("every process keeps parameters of its own, because of this is a test; rank 0 alone")


def without_room() -> tuple[list[str], dict[str, torch.Tensor]]:
    share = neighbours.Neighbours._share

    def refuse(self: Any, size: int, **options: Any) -> Any:
        segment = share(self, size, **options)
        if me() == 1 and size < 1 << 20:
            segment.close()
            raise OSError(28, "No space left on device")
        return segment

    neighbours.Neighbours._share = refuse  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job = Job()
    finally:
        neighbours.Neighbours._share = share  # type: ignore[method-assign]
    job.train(3)
    return [str(one.message) for one in caught], job.close()


def test_without_room_for_parameters_each_keeps_its_own(two_processes: Workers) -> None:
    alone = Job(plain=True)
    alone.train(3)
    results = two_processes.run(without_room)
    assert_same([numbers for _, numbers in results], alone.numbers())
    for messages, _ in results:
        assert len(messages) == 1
        assert messages[0].startswith("every process keeps parameters of its own: No space left on device (replica 1)")


# -- a process that dies -----------------------------------------------------------------------------------------------


def die_in_a_step(victim: int) -> str:
    job = Job()
    job.train(2)
    if me() == victim:
        begin = storage_module.CentralStorage.begin_step

        def begin_and_die(self: Any, *args: Any) -> Any:
            begin(self, *args)
            os.kill(os.getpid(), signal.SIGKILL)

        storage_module.CentralStorage.begin_step = begin_and_die  # type: ignore[method-assign]
    try:
        job.train(1)
    except CommunicationError as error:
        Path(os.environ["TOLD"]).write_text(str(error))
        raise
    return "nothing was raised"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_its_step_is_named(victim: int, tmp_path: Path) -> None:
    told = tmp_path / "told"
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(WorkersError):
        spawn(die_in_a_step, 2, (victim,), timeout_seconds=60, env={"TOLD": str(told)})
    assert f"nothing was heard from replica {victim}" in told.read_text()
    assert "Adam.step() (optimizer 0): the end of the step" in told.read_text()
    assert set(os.listdir("/dev/shm")) <= before
