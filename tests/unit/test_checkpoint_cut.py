"""A server's cut: what a checkpoint gets is the state at one moment, whatever is pushed while it is read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import same
from tests.support.server_stores import add_edit, add_optimizer, held_by, make_spec, make_store, new_shards, push_of
from torchstrat.errors import InvalidArgumentError, TorchstratError
from torchstrat.parameter_server.messages import (
    AdoptOrder,
    AppliedPushes,
    Dropped,
    NewOptimizer,
    NewRows,
    OptimizerStep,
    ReadOrder,
    ShardEdit,
    WriteOrder,
)
from torchstrat.parameter_server.server.service import CheckpointShards
from torchstrat.parameter_server.server.shard_optimizer import pack_optimizer
from torchstrat.parameter_server.server.snapshot import FrozenRows, VariableCut
from torchstrat.parameter_server.server.store import VariableStore

ROWS = 9
SHAPES = {0: (ROWS, 3), 1: (7,), 2: (), 3: (ROWS, 2)}
"""Variables; optimizer 0 steps the first three, optimizer 1 the last."""

OPTIMIZERS: list[Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
]
SPARSE = lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1)  # noqa: E731


@cache
def packed(kind: int | None) -> tuple[bytes, tuple[dict[str, Any], ...]]:
    optimizer = (SPARSE if kind is None else OPTIMIZERS[kind])([torch.nn.Parameter(torch.zeros(2, 2))])
    options = tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    return pack_optimizer(optimizer), options


class Server:
    """A store under random pushes. ``kinds``: of optimizers 0 and 1."""

    def __init__(self, kinds: tuple[int | None, int | None], rows_only: bool) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.store = make_store(*(self.values(shape) for shape in SHAPES.values()))
        self.kinds = kinds
        for number, groups in enumerate((((0, 1, 2),), ((3,),))):
            self.store.add_optimizer(NewOptimizer(number, packed(kinds[number])[0], groups, rows_only))
        self.functions = itertools.count()

    def values(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self.random) + 0.5

    def change(self, what: str, ids: list[int]) -> None:
        rows = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        if what == "edit rows":  # in any order, some twice
            some = torch.tensor(ids, dtype=torch.int64)
            edit = ShardEdit((0, 0), "add", self.values((len(some), 3)), some)
            self.push(edits=(edit,))
        elif what == "edit":
            self.push(edits=(add_edit(1, 1.5, torch.zeros(7)), add_edit(2, 0.5, torch.zeros(()))))
        elif what == "assign":
            self.push(edits=(ShardEdit((3, 0), "assign", self.values(SHAPES[3])),))
        elif what == "restore":
            new = Restored([self.values(SHAPES[0]), self.values(SHAPES[1])])
            self.store.overwrite(
                [(0, 0), (1, 0)], [], [(1, number) for number in range(len(SHAPES))], AppliedPushes(0, 0, {}), new
            )
        elif what == "load state":
            self.store.load_optimizer_state(0, self.store.optimizer_state(0))
        elif what == "create":
            number = len(self.store.catalog()["variables"])
            self.store.create(new_shards(make_spec(number, torch.zeros(3)), torch.zeros(3)))
        else:
            self.step(what, rows)

    def step(self, what: str, rows: torch.Tensor) -> None:
        optimizer = 1 if what == "step rows of 3" else 0
        dense: dict[str, tuple[int, ...]] = {"step": (0, 1, 2), "step 1": (1,)}
        table = {"step rows": (0,), "step rows of 3": (3,), "step rows and 1": (0,)}.get(what, ())
        of_rows = tuple(((n, 0), rows, self.values((len(rows), SHAPES[n][1]))) for n in table)
        whole = (1,) if what == "step rows and 1" else dense.get(what, ())
        gradients = tuple(((number, 0), self.values(SHAPES[number])) for number in whole)
        options = packed(self.kinds[optimizer])[1]
        self.push(steps=(OptimizerStep(optimizer, options, gradients, of_rows),))

    def push(self, **parts: Any) -> None:
        self.store.push(push_of(function=next(self.functions), **parts))


class Restored(NamedTuple):
    """A checkpoint that is to take the place of what is there: a `Prepared`."""

    values: list[torch.Tensor]

    def fits(self, number: int, tensor: torch.Tensor) -> bool:
        return tensor.shape == self.values[number].shape

    def take(self, into: Sequence[torch.Tensor | None]) -> list[Any]:
        return [there.copy_(new) for there, new in zip(into, self.values, strict=True) if there is not None]

    def close(self) -> None: ...


class Reader:
    """Reads a cut in blocks, a source at a time or several in turn, and compares it with what it should be.

    What it is of is known by (shard of a variable,) and by (shard of a variable, optimizer, name of a state's entry).
    """

    def __init__(self, server: Server) -> None:
        before = held_by(server.store)
        self.cut = server.store.begin_cut("token")
        self.applied = before.applied
        self.expected: dict[Any, Any] = {(shard,): value for shard, value in before.values.items()}
        for optimizer, states in before.states.items():
            for shard, state in states.items():
                self.expected |= {(shard, optimizer, name): value for name, value in state.items()}
        self.held: dict[Any, Any] = {}
        for number, variable in self.cut.variables.items():
            self.held |= {((number, shard),): value for shard, value in variable.values.items()}
            for (optimizer, shard), state in variable.states.items():
                self.held |= {((number, shard), optimizer, name): value for name, value in state.items()}
        frozen = [key for key, value in self.held.items() if isinstance(value, FrozenRows)]
        self.sources = {key: server.store.rows_of(self.cut, *key) for key in frozen}
        self.read: dict[Any, list[torch.Tensor]] = {key: [] for key in frozen}

    def read_block(self, number: int, rows: int) -> bool:
        """Of one of those that are not read yet; False: all are."""
        at = {key: sum(map(len, blocks)) for key, blocks in self.read.items()}
        unfinished = [key for key, source in self.sources.items() if at[key] < source.shape[0]]
        if unfinished:
            key = unfinished[number % len(unfinished)]
            stop = min(at[key] + rows, self.sources[key].shape[0])
            self.read[key].append(self.sources[key].rows(at[key], stop))
        return bool(unfinished)

    def finish(self) -> bool:
        """Whether all is as it was when the cut was made."""
        while self.read_block(0, 4):
            pass
        found = {**self.held, **{key: torch.cat(blocks) for key, blocks in self.read.items()}}
        assert found.keys() == self.expected.keys()
        return self.cut.applied == self.applied and same(found, self.expected)


@pytest.mark.parametrize("read_first", [0, 4, ROWS])
@pytest.mark.parametrize("kind", [0, 2, 3])
def test_a_table_that_gets_more_rows_is_what_it_was(kind: int, read_first: int) -> None:
    server = Server((kind, None), rows_only=True)
    server.change("step rows", [1, 3])
    reader = Reader(server)
    for key in reader.sources:
        reader.read[key].append(reader.sources[key].rows(0, min(read_first, reader.sources[key].shape[0])))
    spec = make_spec(0, torch.zeros(SHAPES[0]))
    grown = replace(spec, shape=(ROWS + 3, 3), shards=(replace(spec.shards[0], stop=ROWS + 3),))
    server.store.grow(NewRows(grown, server.values((3, 3))))
    for what, ids in (("step rows", [0, 5, ROWS + 2]), ("edit rows", [ROWS, 2, 2]), ("edit", []), ("step rows", [8])):
        server.change(what, ids)
    assert reader.finish()
    assert server.store.shard_rows((0, 0)) == ROWS + 3


CHANGES = [
    *("step", "step 1", "step rows", "step rows", "step rows and 1", "step rows of 3"),
    *("edit", "edit rows", "assign", "restore", "load state", "create"),
]
row_ids = st.lists(st.integers(0, ROWS - 1), max_size=6)
changes = st.tuples(st.just("change"), st.sampled_from(CHANGES), row_ids)
reads = st.tuples(st.just("read"), st.integers(0, 30), st.integers(1, 5))


def play(server: Server, before: list[Any], during: list[Any]) -> Reader:
    for _, what, ids in before:
        server.change(what, ids)
    reader = Reader(server)
    for act, first, second in during:
        if act == "change":
            server.change(first, second)
        else:
            reader.read_block(first, second)
    return reader


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.integers(0, len(OPTIMIZERS) - 1),
    rows_only=st.booleans(),
    before=st.lists(changes, max_size=4),
    during=st.lists(changes | reads, max_size=12),
)
def test_a_cut_is_of_one_moment(kind: int, rows_only: bool, before: list[Any], during: list[Any]) -> None:
    reader = play(Server((kind, None), rows_only), before, during)
    assert reader.finish()


BEFORE = [("change", "step", []), ("change", "step rows of 3", [1, 2])]


@pytest.mark.parametrize("what", [change for change in CHANGES if change not in ("load state", "create")])
def test_the_control_without_saving_first_it_is_not(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [("change", what, [1, 2])]
    assert play(Server((1, None), True), BEFORE, changed).finish()
    monkeypatch.setattr(VariableCut, "before_value", lambda *_: None)
    monkeypatch.setattr(VariableCut, "before_state", lambda *_: None)
    with monkeypatch.context() as blind:
        blind.setattr(VariableCut, "check", lambda _: None)
        assert not play(Server((1, None), True), BEFORE, changed).finish()
    # Who forgets to say so is found out, but for fused kernels: the cut fails, and is not wrong.
    with pytest.raises(TorchstratError, match=r"was changed past HeldShards\.changing"):
        play(Server((0, None), True), BEFORE, changed).finish()


def big_table(rows: int = 1000) -> tuple[VariableStore, torch.optim.Optimizer]:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    store = make_store(torch.rand(rows, 8), torch.rand(10))
    add_optimizer(store, optimizer, [[0, 1]])
    return store, optimizer


def row_step(optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> OptimizerStep:
    options = tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    return OptimizerStep(0, options, rows=(((0, 0), ids, torch.ones(len(ids), 8)),))


def test_only_what_changes_is_copied_and_once() -> None:
    store, optimizer = big_table()
    store.push(push_of(steps=(row_step(optimizer, torch.arange(3)),)))
    cut = store.begin_cut("token")
    assert cut.copied_bytes == 0
    row = 8 * 4
    for _ in range(5):
        store.push(push_of(steps=(row_step(optimizer, torch.tensor([4, 5, 900])),)))
    assert cut.copied_bytes == 3 * 2 * row  # of the table, and of the accumulator
    store.rows_of(cut, (0, 0)).rows(0, 600)
    store.push(push_of(steps=(row_step(optimizer, torch.tensor([7, 8])),)))
    assert cut.copied_bytes == 3 * 2 * row + 2 * row  # of the table, these were read already
    store.push(push_of(edits=(add_edit(0, 1.0, torch.zeros(1000, 8)),)))
    assert cut.copied_bytes == 3 * 2 * row + 2 * row + 400 * row  # what is left
    store.push(push_of(edits=(add_edit(0, 1.0, torch.zeros(1000, 8)),)))
    assert cut.copied_bytes == 3 * 2 * row + 2 * row + 400 * row
    store.end_cut("token")
    store.push(push_of(edits=(add_edit(1, 1.0, torch.zeros(10)),)))
    assert cut.copied_bytes == 3 * 2 * row + 2 * row + 400 * row


ENDS = [
    pytest.param(lambda store: store.begin_cut("another"), "another one was begun", id="another"),
    pytest.param(lambda store: store.end_cut("token"), "it was ended", id="ended"),
    pytest.param(lambda store: store.end_cut(), "it was ended", id="coordinator lost"),
    pytest.param(lambda store: store.reset(), "the job has ended", id="reset"),
]


@pytest.mark.parametrize(("end", "message"), ENDS)
def test_a_cut_that_nobody_wants_any_more(end: Callable[[VariableStore], object], message: str) -> None:
    store, _ = big_table()
    cut = store.begin_cut("token")
    rows = store.rows_of(cut, (0, 0))
    rows.rows(0, 10)
    held = dict(store._variables)
    end(store)
    with pytest.raises(TorchstratError, match=message):
        rows.rows(10, 20)
    with pytest.raises(InvalidArgumentError, match="has not begun the checkpoint"):
        store.cut("token")
    assert all(variable.cut is None or variable.cut.cut is not cut for variable in held.values())


def test_the_end_of_an_earlier_cut_ends_no_later_one() -> None:
    store, _ = big_table()
    store.begin_cut("early")
    late = store.begin_cut("late")
    store.end_cut("early")
    assert store.cut("late") is late
    assert store.rows_of(late, (0, 0)).rows(0, 5).shape == (5, 8)


def test_no_cut_in_the_middle_of_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push of two variables is in a cut whole or not at all; the cut waits for it."""
    store = make_store(torch.zeros(8), torch.zeros(8))
    from torchstrat.parameter_server.server import store as module

    reached, go_on, cuts_made = threading.Event(), threading.Event(), []
    apply = module.apply_edit

    def slowly(edit: ShardEdit, shards: Any) -> None:
        apply(edit, shards)
        reached.set()
        assert go_on.wait(timeout=30)

    monkeypatch.setattr(module, "apply_edit", slowly)
    edits = (add_edit(0, 1.0, torch.zeros(8)), add_edit(1, 1.0, torch.zeros(8)))
    pusher = threading.Thread(target=store.push, args=(push_of(function=5, edits=edits),))
    cutter = threading.Thread(target=lambda: cuts_made.append(store.begin_cut("token")))
    pusher.start()
    assert reached.wait(timeout=30)
    cutter.start()
    cutter.join(timeout=0.05)
    assert not cuts_made
    go_on.set()
    pusher.join(timeout=30)
    cutter.join(timeout=30)
    [cut] = cuts_made
    assert cut.applied.masks == {5: 1}
    assert all(torch.equal(store.rows_of(cut, (number, 0)).rows(0, 8), torch.ones(8)) for number in (0, 1))


def test_readers_and_pushers_at_once() -> None:
    """Many threads change rows while a cut is read; every block is as it was."""
    store, optimizer = big_table(4000)
    store.push(push_of(steps=(row_step(optimizer, torch.arange(4000)),)))
    expected = held_by(store)
    cut = store.begin_cut("token")
    stop = threading.Event()
    all_have_pushed = threading.Barrier(4)

    def pusher(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def push() -> None:
            ids = torch.randperm(4000, generator=random)[:50].sort().values
            store.push(push_of(steps=(row_step(optimizer, ids),)))

        push()
        all_have_pushed.wait(timeout=60)
        while not stop.is_set():
            push()

    threads = [threading.Thread(target=pusher, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        all_have_pushed.wait(timeout=60)  # all that there is to read may be read sooner than a thread begins
        table = torch.cat([store.rows_of(cut, (0, 0)).rows(first, first + 100) for first in range(0, 4000, 100)])
        source = store.rows_of(cut, (0, 0), 0, "sum")
        state = torch.cat([source.rows(first, first + 100) for first in range(0, 4000, 100)])
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
    assert cut.copied_bytes > 0
    assert torch.equal(table, expected.values[0, 0])
    assert torch.equal(state, expected.states[0][0, 0]["sum"])
    assert not torch.equal(store.read([(0, 0)])[0], table)


def test_a_path_that_a_server_cannot_see(tmp_path: Path) -> None:
    shards, path = CheckpointShards(VariableStore("ps 3 on another machine")), str(tmp_path / "elsewhere")
    for call in (lambda: shards.write(WriteOrder(path, 1)), lambda: shards.read(ReadOrder(path, "token"))):
        with pytest.raises(InvalidArgumentError, match=r"ps 3 on another machine does not see .*elsewhere"):
            call()
    with pytest.raises(InvalidArgumentError, match="ps 3 on another machine has not read the checkpoint"):
        shards.adopt(AdoptOrder("token", 0))


def test_a_checkpoint_that_is_written_keeps_what_was_marked() -> None:
    store = make_store(torch.zeros(4), torch.ones(4))
    cut = store.begin_cut("token")
    store.release(Dropped((1,)))
    assert torch.equal(store.rows_of(cut, (1, 0)).rows(0, 4), torch.ones(4))
    assert len(store.catalog()["variables"]) == 2
    store.end_cut("token")
    assert len(store.catalog()["variables"]) == 1
    store.release(Dropped((1, 7), (3,)))  # gone already, or never here
    assert torch.equal(store.read([(0, 0)])[0], torch.zeros(4))
