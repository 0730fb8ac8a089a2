"""A parameter whose values are on their way: what waits for them, what does not, and who is never let wait."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchstrat.errors import PeerUnavailableError
from torchstrat.parameter_server.worker import arrivals
from torchstrat.parameter_server.worker.arrivals import Arrivals, ArrivingParameter, worth_waiting_for
from torchstrat.parameter_server.worker.watched_parameter import WatchedParameter

SIDE = 512  # 1 MiB
RIGHT, WRONG = 2.0, -1.0


class Values:
    """In the place of `ValuesToCome`: writes when it is asked for."""

    def __init__(self, parameter: WatchedParameter, error: Exception | None = None) -> None:
        self._memory, self._error = parameter.memory, error
        self.fetched = 0

    def fetch(self, keys: Sequence[Any]) -> None:
        self.fetched += 1
        if self._error is not None:
            raise self._error
        self._memory.fill_(RIGHT)


class Late:
    """One parameter that is on its way."""

    def __init__(self, error: Exception | None = None) -> None:
        self.settled: list[tuple[int, bool]] = []
        self.arrivals = Arrivals(lambda number, is_here: self.settled.append((number, is_here)))
        self.parameter = WatchedParameter(torch.full((SIDE, SIDE), WRONG), True)
        self.values = Values(self.parameter, error)
        self.arrivals.add(7, self.parameter, self.values, [(7, 0)])  # type: ignore[arg-type]

    @property
    def has_waited(self) -> bool:
        return self.values.fetched > 0


@pytest.fixture
def late() -> Iterator[Late]:
    late = Late()
    yield late
    late.arrivals.settle()


@pytest.fixture(autouse=True)
def without_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "_compiles", False)


ASKED = {
    "shape": lambda p: p.shape == (SIDE, SIDE) and p.size(0) == SIDE and p.dim() == p.ndim == 2,
    "kind": lambda p: p.dtype == torch.float32 and p.device.type == "cpu" and p.is_leaf and p.is_contiguous(),
    "size": lambda p: p.numel() == SIDE * SIDE and p.nbytes == 4 * SIDE * SIDE and p.element_size() == 4,
    "autograd": lambda p: p.requires_grad and p.grad is None and p.grad_fn is None,
    "class": lambda p: isinstance(p, nn.Parameter) and isinstance(p, WatchedParameter),
    "hash": lambda p: p in {p},
    "zero_grad": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad() is None,
    "freeze": lambda p: p.requires_grad_(False) is p,
}


@pytest.mark.parametrize("what", ASKED)
def test_what_needs_no_values_does_not_wait(late: Late, what: str) -> None:
    assert ASKED[what](late.parameter)
    assert not late.has_waited
    assert type(late.parameter) is ArrivingParameter


def _written_to(p: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return p.add_(0.0)


def _in_a_thread(p: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(torch.mul, p, 1).result()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1


def _in_a_fork(p: torch.Tensor) -> torch.Tensor:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert type(p) is WatchedParameter, "the child would wait for ever"
    return p


def _functional_call(p: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(nn.Linear(SIDE, SIDE, bias=False), {"weight": p}, torch.eye(SIDE)).t()


USED: dict[str, Callable[[Any], Any]] = {
    "operator": lambda p: p + 0,
    "function": lambda p: F.linear(torch.eye(SIDE), p).t(),
    "list": lambda p: torch.cat([p[:1], p[1:]]),
    "nested": lambda p: torch.stack((p, p))[0],
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "keyword": lambda p: torch.mul(input=torch.ones(1), other=p),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "transposed": lambda p: p.T.T,
    "written to": _written_to,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "array": lambda p: torch.from_numpy(p.requires_grad_(False).__array__()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.requires_grad_(False))),
    "deepcopy": lambda p: copy.deepcopy(p),
    "another thread": _in_a_thread,
    "autograd.Function": Once.apply,
    "func.grad": lambda p: torch.func.grad(lambda w: (w.square() / 2).sum())(p),
    "func.vmap": lambda p: torch.func.vmap(lambda row: row * 1)(p),
    "func.functional_call": _functional_call,
    "func.functionalize": lambda p: torch.func.functionalize(lambda w: w * 1)(p),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(lambda w: w * 1, p, use_reentrant=False),
    "torch.ops": lambda p: torch.ops.aten.mul(p, 1),
    "fork": _in_a_fork,
}


@pytest.mark.parametrize("how", USED)
def test_what_needs_values_waits_for_them(late: Late, how: str) -> None:
    found = USED[how](late.parameter)
    assert late.values.fetched == 1
    assert late.settled == [(7, True)]
    assert type(late.parameter) is WatchedParameter
    assert torch.equal(found.detach(), torch.full((SIDE, SIDE), RIGHT))


def test_gradients_are_those_of_the_values_and_once_they_are_here_nobody_asks(late: Late) -> None:
    x = torch.randn(3, SIDE, requires_grad=True)
    F.linear(x, late.parameter).sum().backward()
    assert torch.equal(x.grad, torch.full((3, SIDE), RIGHT * SIDE))
    assert late.parameter.grad is not None
    assert 7 not in late.arrivals
    late.arrivals.wait(7)
    assert late.values.fetched == 1
    assert not arrivals._on_their_way


def test_what_a_coordinator_has_sent_goes_as_a_whole() -> None:
    late = Late()
    parameter = late.parameter
    del late
    gc.collect()
    assert not arrivals._on_their_way
    assert (parameter * 0).sum() == 0, "nobody is waited for who is not there"


def test_who_waits_for_a_server_that_is_gone_is_told_and_who_does_not_use_it_is_not() -> None:
    late = Late(PeerUnavailableError("ps 0 is gone", None))
    with pytest.raises(PeerUnavailableError, match="ps 0 is gone"):
        late.parameter + 1
    assert late.settled == [(7, False)]
    assert type(late.parameter) is WatchedParameter
    unused = Late(PeerUnavailableError("ps 0 is gone", None))
    unused.arrivals.settle()
    assert unused.settled == [(7, False)]


def parameter() -> WatchedParameter:
    return WatchedParameter(torch.zeros(SIDE, SIDE), True)


def test_who_may_be_late() -> None:
    torch.compiler.disable(print)  # as a worker does when it starts: the compiler is imported
    some, mine = Arrivals(lambda number, is_here: None), parameter()
    assert some.may_be_late(mine)
    for look in (lambda: mine.detach()[3], lambda: mine.detach().numpy()):
        shows = look()
        assert not some.may_be_late(mine), "what shows its memory does not ask"
        del shows
    saved = (mine * mine).sum()  # autograd keeps it for the way back
    assert some.may_be_late(mine), "autograd has saved the parameter itself"
    del saved
    assert some.may_be_late(mine)
    assert not some.may_be_late(WatchedParameter(torch.zeros(SIDE, SIDE).t()[1:], True))


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.disable(print)
    assert Arrivals(lambda number, is_here: None).may_be_late(parameter())
    monkeypatch.setenv(arrivals.SWITCH, "off")
    assert not Arrivals(lambda number, is_here: None).may_be_late(parameter())


def test_only_large_parameters_of_torchs_own_modules_that_do_not_choose_by_their_class() -> None:
    class Own(nn.Module):
        def __init__(self, shared: nn.Parameter | None = None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(SIDE, SIDE)) if shared is None else shared

    linear, tied, recurrent = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE), nn.LSTM(SIDE, SIDE)
    layer = nn.TransformerEncoderLayer(SIDE, 2, SIDE, batch_first=True)
    choosing = (nn.TransformerEncoder(layer, 1), nn.MultiheadAttention(SIDE, 2))
    model = nn.Sequential(linear, nn.LayerNorm(SIDE), Own(), tied, Own(tied.weight), *choosing, recurrent)
    wanted = (linear.weight, recurrent.weight_ih_l0, recurrent.weight_hh_l0)
    assert worth_waiting_for(model.modules()) == {*map(id, wanted)}


@pytest.mark.deadline(180)
def test_before_the_compiler_looks_everything_is_here_and_nothing_is_late_afterwards(late: Late) -> None:
    torch.compiler.disable(print)
    assert late.arrivals.may_be_late(parameter())
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(type(late.parameter))
        return graph

    compiled = torch.compile(lambda x: F.linear(x, late.parameter), backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.eye(SIDE)), torch.full((SIDE, SIDE), RIGHT))
    assert seen == [WatchedParameter]
    assert late.settled == [(7, True)]
    assert not late.arrivals.may_be_late(parameter())
