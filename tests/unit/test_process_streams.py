"""The random streams of the process, read where they are: Python's, NumPy's and PyTorch's."""

from __future__ import annotations

import gc
import random
import sys
import threading
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch

import torchstrat as ts
from torchstrat.checkpoint.job_state import process_of
from torchstrat.core.randomness import state_of
from torchstrat.data.own_draws import Continuing, NumpyStream, OwnDraws, PythonStream, process_stands


def drawn() -> list[Any]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3).tolist(), np.random.rand(), random.randrange(10)]


@pytest.mark.parametrize("gausses", [0, 1])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_what_was_put_aside_goes_on(gausses: int, others: int) -> None:
    def begin() -> None:
        random.seed(1)
        np.random.seed(2)
        for _ in range(gausses):
            random.gauss(0, 1)
            np.random.randn()

    begin()
    expected = [drawn(), drawn(), drawn()]
    begin()
    draws = OwnDraws((1, 2), [])
    found = []
    for _ in range(3):
        draws.enter(0, 0)
        np.random.randn(others)
        for _ in range(others):
            random.gauss(0, 1)
        draws.leave()
        found.append(drawn())
    assert found == expected


class Unseedable(random.Random):
    """A data set's own generator, which cannot be put anywhere from when ``fails``."""

    fails = False

    def seed(self, *seed: Any) -> None:
        if self.fails:
            raise KeyboardInterrupt
        super().seed(*seed)

    def setstate(self, state: Any) -> None:
        if self.fails:
            raise KeyboardInterrupt
        super().setstate(state)


@pytest.mark.parametrize("read_before", [0, 1])
def test_streams_that_cannot_be_put_in_place_leave_the_process_its_own(read_before: int) -> None:
    own = Unseedable()
    items = Continuing(iter(range(3)), OwnDraws((1, 2), [own]), 0, 0)
    assert [next(items) for _ in range(read_before)] == [*range(read_before)]
    before = process_stands()
    own.fails = True
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert process_stands() == before


def test_half_a_pair_that_is_used_up_meanwhile() -> None:
    np.random.seed(2)
    np.random.randn()
    stream = NumpyStream()
    stream.state()
    np.random.randn()
    state = stream.state()
    expected = np.random.randn(3).tolist()
    stream.put(state)
    assert np.random.randn(3).tolist() == expected


def test_half_a_pair_that_a_program_puts_back_behind_the_same_words() -> None:
    np.random.seed(2)
    np.random.randn()
    waiting = np.random.get_state()
    expected = np.random.randn(3).tolist()
    np.random.set_state(waiting)
    np.random.randn()
    draws = OwnDraws((1, 2), [])
    for before in (lambda: None, lambda: np.random.set_state(waiting)):
        before()
        draws.enter(0, 0)
        draws.leave()
    assert np.random.randn(3).tolist() == expected


def test_both_are_found() -> None:
    numpy = NumpyStream()
    numpy.state()
    assert PythonStream()._address
    assert numpy._address


def test_another_bit_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        drawn, own = [], []
        for enters in (False, True):
            np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
            draws = OwnDraws((1, 2), [])
            for _ in range(2 if enters else 0):
                draws.enter(0, 0)
                own.append(np.random.randn())
                draws.leave()
            drawn.append(np.random.randn(4).tolist())
        assert drawn[0] == drawn[1]
        assert own[0] == own[1]
        assert own[0] not in drawn[0]
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_where_the_words_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyStream, "_look", lambda *_: 0)
    monkeypatch.setattr(PythonStream, "__init__", lambda self: setattr(self, "_address", 0))
    test_what_was_put_aside_goes_on(1, 1)


# -- where PyTorch's generators stand: no thread waits for one while another has it and waits for the interpreter ---


class Watched:
    """A generator that notes whether its state may begin a garbage collection."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[bool] = []
        self._error = error

    def get_state(self) -> Any:
        self.seen.append(gc.isenabled())
        if self._error is not None:
            raise self._error
        return torch.zeros(1)


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Any:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python collects between instructions alone")
@pytest.mark.parametrize("error", [None, RuntimeError("no state")])
def test_nothing_is_collected_while_it_is_read(collects: bool, error: Exception | None) -> None:
    watched = Watched(error)
    with nullcontext() if error is None else pytest.raises(RuntimeError, match="no state"):
        state_of(cast(torch.Generator, watched))
    assert watched.seen == [False]
    assert gc.isenabled() == collects, "as it was before"


def test_a_collection_that_lets_another_thread_read_it() -> None:
    """Which locked up both for good, with the interpreter."""
    others: list[threading.Thread] = []
    is_reading = False

    def collecting(phase: str, _: Any) -> None:
        if phase == "start" and is_reading and not others:
            others.append(threading.Thread(target=state_of))
            others[0].start()
            others[0].join(0.5)

    gc.callbacks.append(collecting)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            is_reading = True
            state = state_of()
            is_reading = False
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)
    for other in others:
        other.join()
    assert torch.equal(state, torch.get_rng_state())


def test_of_which_generator() -> None:
    own = torch.Generator().manual_seed(3)
    assert torch.equal(state_of(own), own.get_state())
    assert torch.equal(state_of(), torch.default_generator.get_state())


def test_a_process_that_no_checkpoint_has() -> None:
    """It goes on as all others, if these stood alike; draws do not see the mark that runs leave in PyTorch's state."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    torch.manual_seed(3)
    first = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": {}}
    strategy.run(lambda: None)
    marked = first | {"torch": torch.get_rng_state()}
    other = first | {"python": random.Random(4).getstate()}
    assert not torch.equal(first["torch"], marked["torch"])
    assert process_of(2, {"process_0": first, "process_1": marked, "strategy_0": {}}) is first
    assert process_of(1, {"process_0": first, "process_1": other}) is other
    assert process_of(1, {}) == {}
    with pytest.warns(UserWarning, match="random numbers of 2 processes, .* and none of rank 2"):
        assert process_of(2, {"process_0": first, "process_1": other}) == {}
    strategy.close()
