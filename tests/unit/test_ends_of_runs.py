"""What a run in one process leaves, also where its end or its begin raises: warnings may be errors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import cpus, replica


class Kept(nn.Module):
    total: torch.Tensor
    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.zeros(1))
        self.state, self.other = torch.zeros(1), torch.zeros(1)
        self.plain = [torch.zeros(1)]


@pytest.fixture
def three() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(cpus(3))
    yield made
    made.close()


def _edit_buffer(model: Kept) -> None:
    model.total.add_(1.0 + replica())


def _put_buffer(model: Kept) -> None:
    model.total = model.total + 1.0 + replica()


def _set_state(model: Kept) -> None:
    model.state, model.other = torch.full((1,), float(replica())), model.other + 1.0 + replica()


PLAIN = torch.zeros(1)


def _edit_plain(model: Kept) -> None:
    PLAIN.add_(1.0)


@pytest.mark.parametrize(
    ("change", "raises", "total"),
    [
        (_edit_buffer, (1,), [2.0]),
        (_put_buffer, (1,), [2.0]),
        (_edit_plain, (1,), [0.0]),
        (_set_state, (2,), [0.0]),
    ],
)
def test_a_warning_that_is_an_error_leaves_nothing_half_done(
    three: ts.Strategy, change: Callable[[Kept], None], raises: tuple[int, ...], total: list[float]
) -> None:
    """Where it is raised as the run ends, or as the next one begins, the run after it goes on from there."""
    with three.scope():
        model = Kept()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    def step() -> float:
        change(model)
        (model.weight * (1.0 + replica())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(model.other)

    kind, failed = type(optimizer.state), 0
    for run in (1, 2, 3):
        before = model.total.tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                result = three.run(step)
            except UserWarning:
                failed += 1
                assert run in raises
                assert model.total.tolist() == before
        assert type(optimizer.state) is kind
        model.state = model.state.view(1)  # of what differs between replicas
    assert failed == len(raises)
    assert model.total.tolist() == [2.0 * value for value in total]
    if change is _set_state:
        assert result.values == (2.0, 4.0, 6.0)
    model.weight.grad = torch.ones(1)
    optimizer.step()
    assert set(optimizer.state) == {model.weight}


def test_modules_with_one_tensor_for_a_buffer_share_its_mean(three: ts.Strategy) -> None:
    with three.scope():
        one, other = Kept(), Kept()
        other.total = one.total

    def step() -> None:
        one.total = other.total = one.total + 3.0 * (replica() == 2)

    with pytest.warns(UserWarning, match="is their mean"):
        three.run(step, args=())
    assert one.total is other.total
    assert one.total.tolist() == [1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda value: torch.full((1, 1), value).to_sparse(),
        lambda value: torch.full((1, 1), value).to_sparse_csr(),
        lambda value: torch.nested.nested_tensor([torch.full((1,), value)]),
        lambda value: torch.empty(1, device="meta"),
    ],
    ids=["sparse", "csr", "nested", "meta"],
)
@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:.*beta state")
def test_attributes_may_be_tensors_of_any_kind(three: ts.Strategy, make: Callable[[float], torch.Tensor]) -> None:
    """Each replica finds its own again."""
    with three.scope():
        model = Kept()
        model.other = make(0.0)

    def step() -> object:
        left, model.state = model.state, make(replica() + 1.0)
        if left.is_meta or (left.layout == torch.strided and not left.is_nested):
            return None
        return float((left.to_padded_tensor(0.0) if left.is_nested else left.to_dense()).sum())

    three.run(step)
    expected = None if make(0.0).is_meta else (1.0, 2.0, 3.0)
    for _ in range(2):
        result = three.run(step)
        assert (None if result is None else result.values) == expected


def test_the_end_of_one_thread_s_run_does_not_end_another_s(three: ts.Strategy) -> None:
    count, totals = 0, list[float]()
    is_within, is_over = threading.Event(), threading.Event()

    def counts() -> None:
        nonlocal count
        count += 1

    def meets() -> float:
        is_within.set()
        assert is_over.wait(60)
        context = ts.get_replica_context()
        assert context is not None
        return float(context.all_reduce("sum", torch.ones(())))

    def run() -> None:
        totals.extend(three.local_results(three.run(meets)))

    thread = threading.Thread(target=run)

    def begin_another(*_: object, **__: object) -> None:
        """As the other run tells of the count: it has ended, and has not returned."""
        thread.start()
        assert is_within.wait(60)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = begin_another
        three.run(counts)
    is_over.set()
    thread.join()
    assert totals == [3.0] * 3
