"""A worker's own parts: the queue of batches, the thread of functions, and outcomes on their way."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.errors import (
    CommunicationError,
    ContextError,
    NotSendableError,
    PeerUnavailableError,
)
from torchstrat.parameter_server.dispatch import Batch, Report
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.messages import Shard, VariableSpec
from torchstrat.parameter_server.variables.edits import put_rows
from torchstrat.parameter_server.worker import stand_ins, table_rows
from torchstrat.parameter_server.worker.executor import Outcomes
from torchstrat.parameter_server.worker.stand_ins import (
    Arrivals,
    PendingParameter,
    WatchedParameter,
    resume,
    suspend,
    worth_waiting_for,
)
from torchstrat.parameter_server.worker.stepped_optimizers import SteppedOptimizers
from torchstrat.parameter_server.worker.table_rows import ROWS_PER_ID, TableRows, UniqueIds
from torchstrat.parameter_server.worker.worker import BatchQueue, FunctionThread, FunctionWorker
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.fake_network import FakeNetwork

DEADLINE_SECONDS = 60
CHIEF = Peer(Task("chief", 0), "c", "", "here", 0)


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_what_has_not_begun_is_given_once() -> None:
    queue = BatchQueue()
    queue.begin([1, 2, 3, 4])
    assert queue.take(1)
    assert queue.recall(((0, (1, 3, 4)),)) == (3, 4), "1 has begun"
    assert queue.recall(((0, (1, 3, 4)),)) == ()
    assert [queue.take(function) for function in (2, 3, 4)] == [True, False, False]
    queue.end()
    assert queue.recall(((0, (1, 2, 3)),)) == (), "the batch is over"


def test_a_recall_may_come_before_its_batch_and_a_function_again_in_a_later_one() -> None:
    queue = BatchQueue()
    assert queue.recall(((1, (5, 6)), (0, (2,)))) == (5, 6, 2)
    assert queue.recall(((1, (5, 7)),)) == (7,)
    queue.begin([1, 2, 3])
    assert queue.take_rest() == (1, 3)
    queue.end()
    queue.begin([4, 5, 6, 7, 8])
    assert queue.take_rest() == (4, 8)
    assert not queue.take(4)
    queue.end()
    queue.begin([2, 6])
    assert queue.recall(((1, (6,)), (2, (2,)))) == (2,)
    assert queue.take_rest() == (6,)


# -- the thread --------------------------------------------------------------------------------------------------------


def test_work_within_work() -> None:
    thread, order, begun = FunctionThread("test"), list[str](), threading.Event()

    def early() -> str:
        begun.set()
        assert thread.run_next()
        order.append("early")
        return "early"

    first = thread.submit(early)
    assert begun.wait(DEADLINE_SECONDS)
    second = thread.submit(order.append, "late")
    assert first.result(DEADLINE_SECONDS) == "early"
    assert second.done()
    assert order == ["late", "early"]
    assert isinstance(thread.submit(dict, 1).exception(DEADLINE_SECONDS), TypeError)
    thread.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        thread.submit(early)


def test_at_the_end_nothing_is_left_waiting() -> None:
    thread, begun, go_on = FunctionThread("test"), threading.Event(), threading.Event()

    def waits() -> bool:
        begun.set()
        go_on.wait(DEADLINE_SECONDS)
        return thread.run_next()

    first = thread.submit(waits)
    assert begun.wait(DEADLINE_SECONDS)
    second = thread.submit(waits)
    thread.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    assert first.result(DEADLINE_SECONDS) is False
    assert second.cancelled()
    thread.shutdown()


# -- outcomes ----------------------------------------------------------------------------------------------------------


class Coordinator:
    """Notes what is reported to it. Results that are functions cannot be sent."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.came = threading.Semaphore(0)

    def call(self, to: Peer, method: str, payload: Report, *, timeout_seconds: float) -> Future[Any]:
        assert (to, method) == (CHIEF, "coordinator.outcomes")
        future: Future[Any] = Future()
        if any(callable(result) for result in payload.results):
            future.set_exception(NotSendableError("no functions"))
            return future
        self.reports.append(payload)
        self.came.release()
        future.set_result(None)
        return future


def test_outcomes_are_reported_once_the_oldest_has_waited_and_those_that_cannot_be_sent_as_errors() -> None:
    coordinator, now = Coordinator(), [0.0]
    outcomes = Outcomes(lambda: coordinator, clock=lambda: now[0])  # type: ignore[arg-type, return-value]
    before = set(threading.enumerate())
    outcomes.add(CHIEF, 1, None, 0.5, is_last=True)
    assert outcomes.rest() == Report((1,), (None,), 0.5)
    assert not set(threading.enumerate()) - before, "a batch of one needs no thread"
    outcomes.add(CHIEF, 2, "two", 0.5, is_last=False)
    outcomes.add(CHIEF, 3, lambda: 3, 0.25, is_last=False)
    now[0] = 1.0
    assert coordinator.came.acquire(timeout=DEADLINE_SECONDS)
    outcomes.add(CHIEF, 4, "four", 0.25, is_last=False)
    now[0] = 2.0
    assert coordinator.came.acquire(timeout=DEADLINE_SECONDS)
    sent, later = coordinator.reports
    assert (sent.finished, sent.results, sent.seconds) == ((2,), ("two",), 0.75)
    assert [function for function, _ in sent.ended] == [3]
    assert later == Report((4,), ("four",), 0.25)
    assert outcomes.rest(stops=3) == Report(stops=3)
    outcomes.close()
    outcomes.join()


def test_each_outcome_is_in_one_report() -> None:
    coordinator = Coordinator()
    outcomes = Outcomes(lambda: coordinator)  # type: ignore[arg-type, return-value]
    for function in range(20_000):
        outcomes.add(CHIEF, function, None, 0.0, is_last=False)
    last = outcomes.rest()
    outcomes.close()
    outcomes.join()
    reported = [function for report in (*coordinator.reports, last) for function in report.finished]
    assert reported == list(range(20_000))


# -- batches that arrive in another order ------------------------------------------------------------------------------


def test_batches_are_begun_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    is_here = threading.Event()
    queue_of, run_batch = FunctionWorker._queue_of, FunctionWorker._run_batch

    def note_arrival(worker: FunctionWorker, sender: Peer) -> BatchQueue:
        is_here.set()
        return queue_of(worker, sender)

    def note_order(worker: FunctionWorker, session: Any, queue: BatchQueue, batch: Batch) -> Report:
        order.append(batch.number)
        return run_batch(worker, session, queue, batch)

    monkeypatch.setattr(FunctionWorker, "_queue_of", note_arrival)
    monkeypatch.setattr(FunctionWorker, "_run_batch", note_order)
    with FakeNetwork() as network:
        chief, mine = network.endpoint(Task("chief", 0)), network.endpoint(Task("worker", 0))
        worker = FunctionWorker(0)
        worker.attach(mine)
        mine.serve(worker.handlers())
        chief.add_peer(mine.peer)
        mine.add_peer(chief.peer)
        worker.coordinator_arrived(chief.peer)

        def run(number: int, *functions: Any) -> Future[Any]:
            return chief.call(mine.peer, "worker.run", Batch(number, 0, False, functions))

        second = run(1, (1, 0, None, 0))
        assert is_here.wait(DEADLINE_SECONDS)
        first = run(0)
        assert first.result(DEADLINE_SECONDS) == second.result(DEADLINE_SECONDS) == Report()
        assert order == [0, 1]
        assert run(0).result(DEADLINE_SECONDS) == Report()
        early = run(7)
        worker.close()
        with pytest.raises(CommunicationError):
            early.result(DEADLINE_SECONDS)
        worker.join()


# -- rows of tables: unique ids by marks are those of torch.unique; what waits until a lookup comes; rows as bytes -----


def table(rows: int) -> VariableSpec:
    return VariableSpec(0, "table", (rows, 2), torch.float32, "parameter", (Shard(0, 0, rows),), True, True)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(0, 299), max_size=40)), min_size=1, max_size=6),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_batches_of_several_tables(batches: list[tuple[int, list[int]]], dtype: torch.dtype) -> None:
    one = UniqueIds()
    for rows, numbers in batches:
        ids = torch.tensor([number % rows for number in numbers], dtype=dtype)
        unique, places = one.of(table(rows), ids)
        wanted, wanted_places = torch.unique(ids, return_inverse=True)
        assert unique.dtype == places.dtype == torch.int64
        assert unique.tolist() == wanted.tolist()
        assert places.tolist() == wanted_places.tolist()


def test_any_shape_and_inference_mode() -> None:
    one, ids = UniqueIds(), torch.tensor([[5, 3, 5], [0, 3, 9]])
    with torch.inference_mode():
        one.of(table(10), ids)
    unique, places = one.of(table(10), ids[:, ::2])
    assert unique.tolist() == [0, 5, 9]
    assert places.tolist() == [[1, 1], [0, 2]]
    unique, places = one.of(table(10), torch.tensor(7))
    assert (unique.tolist(), places.item()) == ([7], 0)


def test_a_table_much_larger_than_the_batch_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(table_rows.np, "flatnonzero", lambda marks: sizes.append(len(marks)) or marks.nonzero()[0])
    one, ids = UniqueIds(), torch.tensor([3, 1, 3])
    for rows in (3 * ROWS_PER_ID, 3 * ROWS_PER_ID + 1, 10**12):
        assert one.of(table(rows), ids)[0].tolist() == [1, 3]
    assert sizes == [3 * ROWS_PER_ID]


@pytest.mark.parametrize("rows", [10, 10_000])
@pytest.mark.parametrize("wrong", [-1, -10_001, 10_000, 2**40])
def test_an_id_out_of_range_leaves_nothing_marked(rows: int, wrong: int) -> None:
    one = UniqueIds()
    says = rf"id {wrong} is not in table table, which has rows 0 to {rows - 1}"
    with pytest.raises(IndexError, match=says):
        one.of(table(rows), torch.tensor([1, wrong, 2]))
    assert one.of(table(rows), torch.tensor([4, 4, 2]))[0].tolist() == [2, 4]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8, torch.int16])
def test_ids_that_pytorch_refuses_are_refused(dtype: torch.dtype) -> None:
    ids = torch.ones(4, dtype=dtype)
    with pytest.raises(RuntimeError, match="scalar types: Long, Int"):
        F.embedding(ids, torch.zeros(4, 2))
    with pytest.raises(TypeError, match=rf"table are {dtype}; .*int64 or .*int32 is needed.*ids.long\(\)"):
        UniqueIds().of(table(4), ids)


class Access:
    """Answers for rows whenever it is told to; counts what was asked."""

    def __init__(self) -> None:
        self.peers: dict[int, str] = {0: "one"}
        self.servers = SimpleNamespace(peers=lambda: dict(self.peers))
        self.started: list[list[int]] = []

    def start_reading_rows(self, spec: VariableSpec, ids: torch.Tensor) -> Any:
        self.started.append(ids.tolist())
        answer: Future[torch.Tensor] = Future()
        answer.set_result(ids.float()[:, None].expand(-1, 2).clone())
        return SimpleNamespace(wait=answer.result)

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        return self.start_reading_rows(spec, ids).wait()


def test_what_was_asked_for_first_makes_room() -> None:
    access = Access()
    rows = TableRows(access, limit_bytes=5 * 2 * 4)  # type: ignore[arg-type]

    def asks_again(*ids: int) -> bool:
        before = len(access.started)
        rows.read(table(24), torch.tensor(ids))
        return len(access.started) > before

    def prefetch(*ids: int) -> None:
        rows.prefetch(table(24), torch.tensor(ids, dtype=torch.int64))

    for ids in ([1, 2], [3, 4], [5, 6]):
        prefetch(*ids)
    prefetch(*range(6))  # what can never fit throws nothing out, and is not asked for
    prefetch()
    assert access.started == [[1, 2], [3, 4], [5, 6]]
    assert [asks_again(5, 6), asks_again(1, 2), asks_again(3, 4)] == [False, True, False]
    prefetch(1, 2)
    prefetch(*range(7, 12))
    assert [asks_again(1, 2), asks_again(*range(7, 12))] == [True, False]


def test_rows_of_servers_that_were_replaced_are_not_taken() -> None:
    access = Access()
    rows, ids = TableRows(access), torch.tensor([1, 2])  # type: ignore[arg-type]
    rows.prefetch(table(24), ids)
    access.peers = {0: "another"}
    assert rows.read(table(24), ids).values[:, 0].tolist() == [1.0, 2.0]
    assert access.started == [[1, 2], [1, 2]]
    access.peers = {0: "one"}
    rows.read(table(24), ids)
    assert len(access.started) == 3, "they are gone for good"


# -- written as runs of bytes: what `index_copy_` writes, to the last bit ----------------------------------------------

IDS = torch.tensor([0, 3, 4, 10])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 5).to(dtype)


def require_same_as_index_copy(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    expected = table.detach().clone().index_copy_(0, ids, rows.detach())
    is_counted = not table.is_inference()
    version = table._version if is_counted else -1
    put_rows(table, ids, rows)
    assert torch.equal(table, expected)
    assert table.grad_fn is None
    assert not is_counted or table._version > version or not len(ids), "who looks at the counter has to see a change"


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [(), (1,), (7,), (2, 3), (0,)], ids=str)
def test_rows(row: tuple[int, ...], dtype: torch.dtype) -> None:
    require_same_as_index_copy(filled((11, *row), dtype), IDS, filled((4, *row), dtype, 2))


def test_bits_that_are_no_numbers_are_kept() -> None:
    table = torch.zeros(3, 2)
    put_rows(table, torch.tensor([1]), torch.tensor([[float("nan"), -0.0]]))
    assert table[1, 0].isnan()
    assert table[1, 1].signbit()


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode])
def test_other_layouts_parameters_and_no_rows(around: type[contextlib.AbstractContextManager[None]]) -> None:
    with around():
        require_same_as_index_copy(filled((5, 11)).t(), IDS, torch.ones(4, 5))
        require_same_as_index_copy(filled((22, 5))[::2], IDS, torch.ones(4, 5))
        require_same_as_index_copy(filled((11, 5)), IDS, filled((5, 4), seed=2).t())
        require_same_as_index_copy(filled((13, 5))[2:], IDS, torch.ones(1, 5).expand(4, 5))
        require_same_as_index_copy(torch.nn.Parameter(filled((11, 2))), IDS, torch.nn.Parameter(torch.ones(4, 2)))
        require_same_as_index_copy(filled((11, 2)), IDS[:0], torch.zeros(0, 2))
        require_same_as_index_copy(torch.zeros(0, 2), IDS[:0], torch.zeros(0, 2))


@pytest.mark.parametrize("rows", [torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 4), torch.ones(2, 2)])
def test_rows_that_do_not_fit_change_nothing(rows: torch.Tensor) -> None:
    table = torch.zeros(11, 2)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        put_rows(table, IDS, rows)
    with pytest.raises(IndexError):
        put_rows(table, torch.tensor([0, 11]), torch.ones(2, 2))
    assert not table.any()


# -- a parameter whose values are on their way: what waits for them, what does not, and who is never let wait ----------


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
        self.arrivals = Arrivals(self._settled)
        self.parameter = WatchedParameter(torch.full((SIDE, SIDE), WRONG), True)
        self.values = Values(self.parameter, error)
        self.arrivals.add(7, self.values, [(7, 0)])  # type: ignore[arg-type]
        suspend(self.parameter, weakref.ref(self), 7)

    def _settled(self, number: int, is_here: bool) -> None:
        self.settled.append((number, is_here))
        if is_here:
            resume(self.parameter)

    def bring(self, number: int) -> None:
        self.arrivals.wait(number)

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
    monkeypatch.setattr(Arrivals, "compiles", False)


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
    assert type(late.parameter) is PendingParameter


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
    assert type(late.parameter) is WatchedParameter


def test_what_a_coordinator_has_sent_goes_as_a_whole() -> None:
    late = Late()
    parameter = late.parameter
    del late
    gc.collect()
    with pytest.raises(ContextError, match="after the coordinator that had sent it was gone"):
        parameter * 0


def test_who_waits_for_a_server_that_is_gone_is_told_and_who_does_not_use_it_is_not() -> None:
    late = Late(PeerUnavailableError("ps 0 is gone", None))
    with pytest.raises(PeerUnavailableError, match="ps 0 is gone"):
        late.parameter + 1
    assert late.settled == [(7, False)]
    assert type(late.parameter) is PendingParameter, "whoever uses it next will ask for it again"
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
    monkeypatch.setenv(stand_ins.SWITCH, "off")
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
    torch.compiler.reset()  # forgets what is registered with the compiler
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(type(late.parameter))
        return graph

    compiled = torch.compile(lambda x: F.linear(x, late.parameter), backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.eye(SIDE)), torch.full((SIDE, SIDE), RIGHT))
    assert seen == [WatchedParameter]
    assert late.settled == [(7, True)]
    assert not late.arrivals.may_be_late(parameter())


# -- optimizers of the program's own ----------------------------------------------------------------------------------


class Halving(torch.optim.Optimizer):
    """Any class that is not PyTorch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


def test_what_no_function_reads_of_an_optimizer_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> object:
        raise AssertionError("a server was asked")

    monkeypatch.setattr(SteppedOptimizers, "_ask", ask)
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = nn.Linear(2, 2)
            optimizer = Halving(model.parameters(), {"lr": 0.1})

        def train() -> int:
            for _ in range(3):
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.ones_like(p)
                optimizer.step()
            return 1

        assert ts.ClusterCoordinator(strategy).schedule(train).get(DEADLINE_SECONDS) == 1
