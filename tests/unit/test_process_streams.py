"""Python's and NumPy's random streams of the process, read where they are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from torchstrat.data.own_draws import OwnDraws
from torchstrat.data.process_streams import NumpyStream, PythonStream


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
