"""Any optimizer on the rows of a table, and on whole tensors beside it, in any shards: bit for bit as on one device.

The reference steps the user's optimizer on the whole table with a gradient that is zero elsewhere, and then puts back
what it did to rows, and rows of state, that no gradient touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.parameter_servers import PerTensor, Program, on_servers
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster

ROWS, WIDTH, DECAY, RPROP_LR = 17, 3, 0.9, 0.03
IDS_PER_STEP = (3, 0, 1, 5, 2, 8, 4, 6)


class Slow(PerTensor):
    """Keeps a slow copy of the parameter that follows it: state that begins as the parameter itself."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        slow = self.state[p].setdefault("slow", p.detach().clone())
        p.sub_(grad, alpha=group["lr"])
        slow.lerp_(p, 0.25)
        p.copy_(slow)


class RowSums(PerTensor):
    """Adagrad with one accumulator per row."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(sum=torch.full(p.shape[:1], 0.125, dtype=p.dtype), calls=0)
        state["calls"] += 1
        state["sum"] += grad.square().mean(1)
        p.sub_(grad / state["sum"].sqrt().unsqueeze(1), alpha=group["lr"])


class Noisy(PerTensor):
    """Starts from state that no row can be given later."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p].setdefault("noise", torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape))
        p.sub_(grad)


Make = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """``untouched``: what state is for a row that was never touched where that is not 0; None: the rule for dense
    gradients holds. ``later``: options from the fourth step on."""

    make: Make
    untouched: Mapping[str, Any] | None = field(default_factory=dict)
    rows_only: bool = True
    later: Mapping[str, Any] = field(default_factory=dict)


BY_ROWS: dict[str, Case] = {
    "sgd": Case(partial(torch.optim.SGD, lr=0.1)),
    "sgd weight decay": Case(partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
    "sgd maximize": Case(partial(torch.optim.SGD, lr=0.1, maximize=True)),
    "sgd fused": Case(partial(torch.optim.SGD, lr=0.1, fused=True)),
    "momentum": Case(partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.3)),
    "nesterov": Case(partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)),
    "momentum fused": Case(partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "momentum that is switched on": Case(partial(torch.optim.SGD, lr=0.1), later={"momentum": 0.9}),
    "adagrad": Case(partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01, weight_decay=0.1)),
    "adagrad plain": Case(partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01)),
    "adagrad started": Case(partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.25), {"sum": 0.25}),
    "adam": Case(partial(torch.optim.Adam, lr=0.1, weight_decay=0.1)),
    "amsgrad": Case(partial(torch.optim.Adam, lr=0.1, amsgrad=True)),
    "adam foreach": Case(partial(torch.optim.Adam, lr=0.1, foreach=True)),
    "adam fused": Case(partial(torch.optim.Adam, lr=0.1, fused=True)),
    "adam tensor rate": Case(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1))),
    "adamw": Case(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)),
    "rmsprop": Case(partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1)),
    "rprop": Case(partial(torch.optim.Rprop, lr=RPROP_LR), {"step_size": RPROP_LR * DECAY**2}),
    "adadelta": Case(partial(torch.optim.Adadelta, lr=0.5, weight_decay=0.1)),
    "nadam": Case(partial(torch.optim.NAdam, lr=0.1, weight_decay=0.1)),
    "radam": Case(partial(torch.optim.RAdam, lr=0.1, weight_decay=0.1)),
    "adamax": Case(partial(torch.optim.Adamax, lr=0.1, weight_decay=0.1)),
    "asgd": Case(partial(torch.optim.ASGD, lr=0.1, weight_decay=0.1)),
    "ftrl": Case(partial(ts.Ftrl, lr=0.1, l1=0.01, l2=0.02, l2_shrinkage=0.1, beta=0.1), {"accumulator": 0.1}),
    "state that begins as the parameter": Case(partial(Slow, lr=0.5), {"slow": "the parameter"}),
    "state with one number per row": Case(partial(RowSums, lr=0.5), {"sum": 0.125}),
}
CASES = {
    **BY_ROWS,
    **{
        f"{name}, dense rule": replace(BY_ROWS[name], untouched=None, rows_only=False)
        for name in ("momentum", "adagrad started", "adam", "adamw", "rmsprop")
    },
    "adafactor": Case(partial(torch.optim.Adafactor, lr=0.1), None),
    "muon": Case(partial(torch.optim.Muon, lr=0.1), None),
    "sparse adam": Case(partial(torch.optim.SparseAdam, lr=0.1), None),
    "sparse adam, dense rule": Case(partial(torch.optim.SparseAdam, lr=0.1), None, rows_only=False),
}


class Parts(nn.Module):
    """A table, and a matrix in a parameter group of its own; but SparseAdam has the table alone."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        is_sparse = getattr(make, "func", None) is torch.optim.SparseAdam
        torch.manual_seed(3)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=is_sparse, dtype=torch.float64)
        self.matrix = nn.Parameter(torch.randn(11, WIDTH, dtype=torch.float64), requires_grad=not is_sparse)
        self.optimizer = make([{"params": [one]} for one in self.parameters() if one.requires_grad])

    def step(self, ids: torch.Tensor | None, of_rows: torch.Tensor, of_matrix: torch.Tensor | None) -> None:
        """With these gradients; without ids, of the whole table."""
        self.optimizer.zero_grad()
        rows = self.table.weight if ids is None else self.table(ids)
        loss = (rows * of_rows).sum()
        (loss if of_matrix is None else loss + (self.matrix * of_matrix).sum()).backward()
        self.optimizer.step()


class OneDevice:
    def __init__(self, case: Case) -> None:
        self.parts, self._untouched = Parts(case.make), case.untouched
        self.optimizer = self.parts.optimizer

    def step(self, ids: torch.Tensor | None, *gradients: torch.Tensor | None) -> None:
        table = self.parts.table.weight
        before, state_before = table.detach().clone(), copy.deepcopy(self.optimizer.state.get(table, {}))
        self.parts.step(ids, *gradients)
        if self._untouched is None or ids is None:
            return
        rest = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, ids, False)
        with torch.no_grad():
            table[rest] = before[rest]
        for name, value in self.optimizer.state.get(table, {}).items():
            if isinstance(value, torch.Tensor) and value.shape[:1] == table.shape[:1]:
                first = self._untouched.get(name, 0.0)
                first = before if first == "the parameter" else torch.full_like(value, first)
                value[rest] = state_before.get(name, first)[rest]


def check(case: Case, shards: int, *, whole_from: int = 99, tolerance: float = 0.0) -> None:
    """Raises AssertionError where servers have other values or state than one device. ``whole_from``: from this step on
    the table is used as a whole."""
    reference, generator = OneDevice(case), torch.Generator().manual_seed(5)
    own = [type(reference.optimizer)] if isinstance(reference.optimizer, PerTensor) else []
    with on_servers(lambda: Parts(case.make), shards, rows_only=case.rows_only, elementwise_optimizers=own) as program:
        for number, count in enumerate(IDS_PER_STEP):
            for optimizer in (reference.optimizer, program.made.optimizer):
                for place, group in enumerate(optimizer.param_groups):
                    group.update({"lr": group["lr"] * DECAY ** (1 + place), **(case.later if number >= 3 else {})})
            if number == 5:
                _there_and_back(program, reference)
            is_whole = number >= whole_from
            ids = None if is_whole else torch.randperm(ROWS, generator=generator)[:count]
            of_rows = torch.randn(ROWS if is_whole else count, WIDTH, generator=generator, dtype=torch.float64)
            dense = torch.randn(11, WIDTH, generator=generator, dtype=torch.float64)
            of_matrix = dense if number != 4 else None  # what has no gradient rests
            program.run(Parts.step, program.made, ids, of_rows, of_matrix)
            reference.step(ids, of_rows, of_matrix)
            for found, wanted in ((program.made, reference.parts), (program.made.optimizer, reference.optimizer)):
                torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=tolerance, atol=0.0)


def _there_and_back(program: Program, reference: OneDevice) -> None:
    """A step that is undone: values and state are loaded as they were. PyTorch gives state other dtypes then."""
    reference.optimizer.load_state_dict(reference.optimizer.state_dict())
    parts = program.made
    before = copy.deepcopy((parts.state_dict(), parts.optimizer.state_dict()))
    program.run(Parts.step, parts, torch.tensor([3, 1]), torch.ones(2, WIDTH), torch.ones(11, WIDTH))
    parts.load_state_dict(before[0])
    parts.optimizer.load_state_dict(before[1])


# Of five shards some have no row in a step. Fewer do the same with more rows: in soak.
@pytest.mark.parametrize(
    "shards", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 5]
)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_device(name: str, shards: int) -> None:
    # The fused kernels of the CPU round the last elements of a tensor, which do not fill a vector, another way.
    check(CASES[name], shards, tolerance=1e-13 if "fused" in name else 0.0)


def test_rows_and_whole_gradients_of_one_table_share_its_state() -> None:
    check(BY_ROWS["adam"], 2, whole_from=4)


def test_the_reference_would_notice_a_dense_step() -> None:
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        check(replace(BY_ROWS["momentum"], rows_only=False), 1)


def test_state_whose_beginning_cannot_be_told() -> None:
    says = r"Noisy starts state\['noise'\] with values that are neither.*rows_only=False"
    with on_servers(lambda: Parts(Noisy), 2, rows_only=True, elementwise_optimizers=[Noisy]) as program:
        before = copy.deepcopy(program.made.state_dict())
        with pytest.raises(UnsupportedError, match=says):
            program.run(Parts.step, program.made, torch.tensor([1]), torch.ones(1, WIDTH), torch.ones(11, WIDTH))
        torch.testing.assert_close(program.made.state_dict(), before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_lookups_warn_without_a_partitioner_too(momentum: float) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        says = pytest.warns(UserWarning, match="SGD moves all rows .*sparse=True.*rows_only=False")
        with says if momentum else nullcontext(), strategy.scope():
            table = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=momentum)
        assert optimizer
