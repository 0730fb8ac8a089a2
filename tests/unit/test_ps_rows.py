"""Any optimizer on the rows of a table that a push touches, against plain PyTorch on the whole table.

The reference steps the user's optimizer on the whole table with a gradient that is zero elsewhere, and then puts back
what it did to rows, and rows of state, that no gradient touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.ps_server_helpers import (
    BY_ROWS,
    add_optimizer,
    dense_step,
    make_spec,
    make_store,
    options_of,
    push_of,
    split_rows,
    whole,
)
from torchstrat import Ftrl, host_memory
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.parameter_server.messages import OptimizerStep, StateOfShard
from torchstrat.parameter_server.server.fast_steps import fast_step_of
from torchstrat.parameter_server.server.store import VariableStore

ROWS, WIDTH, STEPS = 17, 3, 8
ZEROS: dict[str, float] = {}
RPROP_LR = 0.03
DECAY = 0.9

CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, float]]] = {
    # name → (optimizer, what state is for a row that was never touched where that is not 0)
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), ZEROS),
    "sgd weight decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), ZEROS),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.3), ZEROS),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), ZEROS),
    "sgd fused": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), ZEROS),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1), ZEROS),
    "adagrad plain": (lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01), ZEROS),
    "adagrad started": (lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25), {"sum": 0.25}),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), ZEROS),
    "amsgrad": (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), ZEROS),
    "adam foreach": (lambda p: torch.optim.Adam(p, lr=0.1, foreach=True), ZEROS),
    "adam fused": (lambda p: torch.optim.Adam(p, lr=0.1, fused=True), ZEROS),
    "adam tensor rate": (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), ZEROS),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1), ZEROS),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1), ZEROS),
    "rprop": (lambda p: torch.optim.Rprop(p, lr=RPROP_LR), {"step_size": RPROP_LR * DECAY}),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.1), ZEROS),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1), ZEROS),
    "radam": (lambda p: torch.optim.RAdam(p, lr=0.1, weight_decay=0.1), ZEROS),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.1, weight_decay=0.1), ZEROS),
    "asgd": (lambda p: torch.optim.ASGD(p, lr=0.1, weight_decay=0.1), ZEROS),
    "ftrl": (lambda p: Ftrl(p, lr=0.1, l1=0.01, l2=0.02, l2_shrinkage=0.1, beta=0.1), {"accumulator": 0.1}),
}


class RowsOnly:
    """A plain optimizer on a whole table, of which only the touched rows are allowed to change."""

    def __init__(self, optimizer: torch.optim.Optimizer, untouched: dict[str, float]) -> None:
        self.optimizer = optimizer
        self.table: torch.nn.Parameter = optimizer.param_groups[0]["params"][0]
        self._untouched = untouched

    def step(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        before = self.table.detach().clone()
        state_before = {k: v.clone() for k, v in self.state.items() if isinstance(v, torch.Tensor)}
        self.table.grad = torch.zeros_like(self.table).index_copy_(0, ids, gradient)
        self.optimizer.step()
        rest = torch.ones(len(before), dtype=torch.bool)
        rest[ids] = False
        with torch.no_grad():
            self.table[rest] = before[rest]
        for name, value in self.state.items():
            if isinstance(value, torch.Tensor) and value.shape == self.table.shape:
                old = state_before.get(name, torch.full_like(value, self._untouched.get(name, 0.0)))
                value[rest] = old[rest]

    @property
    def state(self) -> StateOfShard:
        return self.optimizer.state.get(self.table, {})


def random_rows(generator: torch.Generator, step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted unique ids, none at all in one step, and their gradients."""
    count = 0 if step == 1 else int(torch.randint(1, rows // 2, (), generator=generator))
    ids = torch.randperm(rows, generator=generator)[:count].sort().values
    return ids, torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def push_rows(
    store: VariableStore, optimizer: torch.optim.Optimizer, shards: int, step: int, ids: torch.Tensor, gradient: Any
) -> None:
    spec = make_spec(0, torch.empty(ROWS, WIDTH, dtype=torch.float64), shards)
    rows = split_rows(spec, ids, gradient)
    store.push(push_of(function=step, steps=(OptimizerStep(0, options_of(optimizer), rows=rows),)))


def compare(store: VariableStore, shards: int, table: torch.Tensor, state: StateOfShard, tolerance: float) -> None:
    torch.testing.assert_close(whole(store, shards=shards), table.detach(), rtol=tolerance, atol=0.0)
    states = store.optimizer_state(0)
    spec = make_spec(0, table, shards)
    for name, value in state.items():
        for number, shard in enumerate(spec.shards):
            expected = value
            if isinstance(value, torch.Tensor) and value.shape == table.shape:
                expected = value[shard.start : shard.stop]
            torch.testing.assert_close(states[0, number][name], expected, rtol=tolerance, atol=0.0, msg=name)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_only_the_touched_rows_step(name, shards):
    make, untouched = CASES[name]
    generator = torch.Generator().manual_seed(5)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
    reference = RowsOnly(make([table]), untouched)
    store = make_store(table.detach(), shards=shards)
    add_optimizer(store, reference.optimizer, [[0]])
    tolerance = 1e-13 if "fused" in name else 0.0  # see the tests of dense shards
    for step in range(STEPS):
        for group in reference.optimizer.param_groups:
            group["lr"] = group["lr"] * DECAY
        ids, gradient = random_rows(generator, step)
        push_rows(store, reference.optimizer, shards, step, ids, gradient.clone())
        reference.step(ids, gradient)
        compare(store, shards, table, reference.state, tolerance)


@pytest.mark.parametrize("name", ["sgd", "adagrad plain"])
def test_what_tables_are_trained_with_most_makes_no_optimizer(name, monkeypatch):
    table = torch.nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    optimizer = CASES[name][0]([table])
    store = make_store(table.detach())
    add_optimizer(store, optimizer, [[0]])
    ids, gradient = torch.tensor([1, 2]), torch.ones(2, WIDTH, dtype=torch.float64)
    push_rows(store, optimizer, 1, 0, ids, gradient)  # may make the state
    monkeypatch.setattr("torchstrat.parameter_server.server.shard_optimizer.ShardOptimizer.step", None)
    push_rows(store, optimizer, 1, 1, ids, gradient)
    assert bool((whole(store)[ids] < 1).all())
    derived = type("Mine", (type(optimizer),), {})
    assert fast_step_of(derived) is None


def test_plain_sgd_on_whole_shards_makes_no_optimizer(monkeypatch):
    start = torch.linspace(-3, 3, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    own = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([own], lr=0.3)
    store = make_store(start)
    add_optimizer(store, optimizer, [[0]])
    monkeypatch.setattr("torchstrat.parameter_server.server.shard_optimizer.ShardOptimizer.step", None)
    own.grad = start.sin()
    optimizer.step()
    store.push(push_of(steps=(dense_step(optimizer, v0=own.grad),)))
    assert torch.equal(whole(store), own.detach())


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "maximize", "fused"])
def test_what_is_more_than_plain_sgd_is_stepped_by_the_optimizer(name):
    start = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    own = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([own], lr=0.3, **{name: True if name in ("maximize", "fused") else 0.5})
    store = make_store(start)
    add_optimizer(store, optimizer, [[0]])
    for _ in range(2):
        own.grad = torch.full_like(start, 0.25)
        optimizer.step()
        store.push(push_of(steps=(dense_step(optimizer, v0=own.grad),)))
    torch.testing.assert_close(whole(store), own.detach(), rtol=1e-13 if name == "fused" else 0.0, atol=0.0)


def test_the_reference_would_notice_a_dense_step():
    make, untouched = CASES["momentum"]
    table = torch.nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    reference = RowsOnly(make([table]), untouched)
    store = make_store(table.detach())
    add_optimizer(store, reference.optimizer, [[0]], rows_only=False)
    ids, gradient = torch.tensor([1, 2]), torch.ones(2, WIDTH, dtype=torch.float64)
    push_rows(store, reference.optimizer, 1, 0, ids, gradient)
    reference.step(ids, gradient)
    with pytest.raises(AssertionError):
        compare(store, 1, table, reference.state, 0.0)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("rows_only", [True, False])
def test_sparse_adam_is_torchs_own(shards, rows_only):
    generator = torch.Generator().manual_seed(5)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.SparseAdam([table], lr=0.1)
    store = make_store(table.detach(), shards=shards)
    add_optimizer(store, optimizer, [[0]], rows_only=rows_only)
    for step in range(STEPS):
        ids, gradient = random_rows(generator, step)
        push_rows(store, optimizer, shards, step, ids, gradient.clone())
        table.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), gradient, table.shape, check_invariants=False)
        optimizer.step()
        compare(store, shards, table, optimizer.state[table], 0.0)
    dense = (((0, 0), store.read([(0, 0)])[0]),)
    with pytest.raises(UnsupportedError, match="steps on sparse gradients alone, and that of 'v0"):
        store.push(push_of(steps=(OptimizerStep(0, options_of(optimizer), dense=dense),)))


@pytest.mark.parametrize("name", ["momentum", "adagrad started", "adam", "adamw", "rmsprop"])
def test_the_dense_rule_on_request(name):
    generator = torch.Generator().manual_seed(5)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
    optimizer = CASES[name][0]([table])
    store = make_store(table.detach(), shards=2)
    add_optimizer(store, optimizer, [[0]], rows_only=False)
    for step in range(STEPS):
        ids, gradient = random_rows(generator, step)
        push_rows(store, optimizer, 2, step, ids, gradient.clone())
        table.grad = torch.zeros_like(table).index_copy_(0, ids, gradient)
        optimizer.step()
        compare(store, 2, table, optimizer.state[table], 0.0)


def test_an_optimizer_of_whole_tensors_gets_a_dense_gradient():
    table = torch.nn.Parameter(torch.rand(ROWS, WIDTH, dtype=torch.float64))
    optimizer = torch.optim.Adafactor([table], lr=0.1)
    store = make_store(table.detach())
    add_optimizer(store, optimizer, [[0]])
    generator = torch.Generator().manual_seed(5)
    for step in range(3):
        ids, gradient = random_rows(generator, step)
        push_rows(store, optimizer, 1, step, ids, gradient.clone())
        table.grad = torch.zeros_like(table).index_copy_(0, ids, gradient)
        optimizer.step()
        compare(store, 1, table, optimizer.state[table], 0.0)


def test_dense_and_row_gradients_step_together():
    table, weight = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [table], "lr": 0.25}], lr=1.0)
    store = make_store(table.detach(), weight.detach())
    add_optimizer(store, optimizer, [[1], [0]])
    step = OptimizerStep(
        0,
        options_of(optimizer),
        dense=(((1, 0), torch.ones(3)),),
        rows=(((0, 0), torch.tensor([1, 3]), torch.ones(2, 2)),),
    )
    store.push(push_of(steps=(step,)))
    assert whole(store, 1).tolist() == [0.5, 0.5, 0.5]
    assert whole(store, 0)[:, 0].tolist() == [1.0, 0.75, 1.0, 0.75]


def test_rows_and_whole_gradients_of_one_table_share_its_state():
    generator = torch.Generator().manual_seed(5)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
    reference = RowsOnly(torch.optim.Adam([table], lr=0.1), ZEROS)
    store = make_store(table.detach())
    add_optimizer(store, reference.optimizer, [[0]])
    everything = torch.arange(ROWS)
    for step in range(6):
        ids, gradient = random_rows(generator, step + 2)
        if step % 2 == 0:
            ids, gradient = everything, torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
            dense = OptimizerStep(0, options_of(reference.optimizer), dense=(((0, 0), gradient.clone()),))
            store.push(push_of(steps=(dense,)))
        else:
            push_rows(store, reference.optimizer, 1, step, ids, gradient.clone())
        reference.step(ids, gradient)
        compare(store, 1, table, reference.state, 0.0)


def test_momentum_that_a_scheduler_switches_on():
    generator = torch.Generator().manual_seed(5)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
    reference = RowsOnly(torch.optim.SGD([table], lr=0.1), ZEROS)
    store = make_store(table.detach())
    add_optimizer(store, reference.optimizer, [[0]])
    for step in range(6):
        reference.optimizer.param_groups[0]["momentum"] = 0.9 if step >= 3 else 0.0
        ids, gradient = random_rows(generator, step)
        push_rows(store, reference.optimizer, 1, step, ids, gradient.clone())
        reference.step(ids, gradient)
        compare(store, 1, table, reference.state, 0.0)


def test_state_that_was_loaded_goes_on():
    generator = torch.Generator().manual_seed(5)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
    reference = RowsOnly(torch.optim.Adam([table], lr=0.1), ZEROS)
    store = make_store(table.detach())
    add_optimizer(store, reference.optimizer, [[0]])
    for step in range(6):
        ids, gradient = random_rows(generator, step)
        push_rows(store, reference.optimizer, 1, step, ids, gradient.clone())
        reference.step(ids, gradient)
        if step == 2:
            other = make_store(whole(store))
            add_optimizer(other, reference.optimizer, [[0]])
            other.load_optimizer_state(0, store.optimizer_state(0))
            store = other
    compare(store, 1, table, reference.state, 0.0)


# -- classes of the user's own ---------------------------------------------------------------------------------------


class Slow(torch.optim.Optimizer):
    """Keeps a slow copy of the parameter that follows it: state that begins as the parameter itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    p.sub_(p.grad, alpha=group["lr"])
                    slow.lerp_(p, 0.25)
                    p.copy_(slow)


class RowWise(torch.optim.Optimizer):
    """Adagrad with one accumulator per row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(sum=torch.full(p.shape[:1], 0.125, dtype=p.dtype), calls=0)
                    state["calls"] += 1
                    state["sum"] += p.grad.square().mean(1)
                    p.sub_(p.grad / state["sum"].sqrt().unsqueeze(1), alpha=group["lr"])


class Noisy(torch.optim.Optimizer):
    """Starts from random state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("noise", torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape))
                    p.sub_(p.grad)


def test_state_that_begins_as_the_parameter():
    start = torch.arange(8.0).reshape(4, 2)
    optimizer = Slow([torch.nn.Parameter(start.clone())])
    store = make_store(start)
    add_optimizer(store, optimizer, [[0]], BY_ROWS)
    table, slow = start.clone(), start.clone()
    for ids in ([1], [1, 2], [3]):
        rows, gradient = torch.tensor(ids), torch.ones(len(ids), 2)
        step = OptimizerStep(0, options_of(optimizer), rows=(((0, 0), rows, gradient),))
        store.push(push_of(steps=(step,)))
        slow[rows] = slow[rows].lerp(table[rows] - 0.5 * gradient, 0.25)
        table[rows] = slow[rows]
    assert torch.equal(whole(store), table)
    assert torch.equal(store.optimizer_state(0)[0, 0]["slow"], slow)


@pytest.mark.parametrize("rows_in_push", [1, 2, 3, 5])
def test_state_with_one_number_per_row(rows_in_push):
    """Also with as many rows as there are in the stand-ins that its state is learned on."""
    start = torch.rand(6, 2)
    optimizer = RowWise([torch.nn.Parameter(start.clone())])
    store = make_store(start)
    add_optimizer(store, optimizer, [[0]], BY_ROWS)
    rows, gradient = torch.arange(rows_in_push), torch.rand(rows_in_push, 2)
    for _ in range(2):
        step = OptimizerStep(0, options_of(optimizer), rows=(((0, 0), rows, gradient.clone()),))
        store.push(push_of(steps=(step,)))
    sums = torch.full((6,), 0.125)
    for _ in range(2):
        sums[rows] += gradient.square().mean(1)
        start[rows] -= 0.5 * (gradient / sums[rows].sqrt().unsqueeze(1))
    torch.testing.assert_close(whole(store), start)
    torch.testing.assert_close(store.optimizer_state(0)[0, 0]["sum"], sums)
    assert store.optimizer_state(0)[0, 0]["calls"] == 2


def test_state_whose_beginning_cannot_be_told():
    optimizer = Noisy([torch.nn.Parameter(torch.zeros(4, 2))])
    store = make_store(torch.zeros(4, 2))
    rows = (((0, 0), torch.tensor([1]), torch.ones(1, 2)),)
    add_optimizer(store, optimizer, [[0]], BY_ROWS)
    with pytest.raises(
        UnsupportedError, match=r"Noisy starts state\['noise'\] with values that are neither.*rows_only=False"
    ):
        store.push(push_of(steps=(OptimizerStep(0, options_of(optimizer), rows=rows),)))
    assert torch.equal(whole(store), torch.zeros(4, 2))


# -- cost ------------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Notes every operator that makes or fills a tensor of more elements than ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.limit:
                self.seen.add(func._schema.name)
        return result


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam", "rmsprop", "rprop", "ftrl"])
def test_a_push_costs_what_its_rows_cost(name):
    optimizer = CASES[name][0]([torch.nn.Parameter(torch.zeros(1))])
    store = make_store(torch.zeros(5000, 4))
    add_optimizer(store, optimizer, [[0]], BY_ROWS)
    rows = (((0, 0), torch.tensor([7, 4000]), torch.ones(2, 4)),)
    step = OptimizerStep(0, options_of(optimizer), rows=rows)
    with LargestTensor(1000) as first:
        store.push(push_of(steps=(step,)))
    assert {"aten::zeros", "aten::full"} & first.seen, "the control: the first push makes state for all rows"
    with LargestTensor(1000) as later:
        store.push(push_of(steps=(step,)))
    assert later.seen <= {"aten::view", "aten::as_strided", "aten::detach", "aten::alias"}, (
        "what takes memory or time of its own"
    )


def test_state_that_does_not_fit_is_told_before_anything_changes(monkeypatch):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    store = make_store(torch.zeros(100, 4))
    add_optimizer(store, optimizer, [[0]], BY_ROWS)
    step = OptimizerStep(0, options_of(optimizer), rows=(((0, 0), torch.tensor([7]), torch.ones(1, 4)),))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3000)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"state of torch.optim.adam.Adam for 'v0' on ps 0 needs 3,200"):
            store.push(push_of(steps=(step,)))
    assert torch.equal(whole(store), torch.zeros(100, 4))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4000)
    store.push(push_of(steps=(step,)))
    assert whole(store).count_nonzero() == 4


@pytest.fixture(autouse=True)
def no_grad_is_left_alone() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
