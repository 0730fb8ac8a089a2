"""What ranks say about one thing without meeting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from torchstrat.collectives.shared_memory.lockstep import PeersMissingError
from torchstrat.collectives.words import Words


class WordsPlace:
    """Where nobody waits for words in vain."""

    def __init__(self, store: Any, ended: Callable[[], list[int]] = list) -> None:
        self._store, self.ended = store, ended

    def visit(self, call: Callable[[Any], Any], otherwise: Any) -> Any:
        return call(self._store)

    def told(self) -> None: ...

    def look(self) -> None: ...

    def wait(self, listen: Callable[[], dict[int, str]]) -> dict[int, str]:
        return listen()


def words(size: int, seconds: float = 60.0, ended: Callable[[], list[int]] = list) -> tuple[Any, list[Words]]:
    store = dist.HashStore()
    return store, [Words(WordsPlace(store, ended), rank, size, seconds) for rank in range(size)]


class OftenAway(WordsPlace):
    """Of three visits two find nobody."""

    visits = 0

    def visit(self, call: Callable[[Any], Any], otherwise: Any) -> Any:
        self.visits += 1
        return super().visit(call, otherwise) if self.visits % 3 == 0 else otherwise


def test_all_are_heard_whoever_comes_last_and_nothing_stays() -> None:
    store, ranks = words(3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(one.of_all) for one in ranks]
        for rank, one in enumerate(ranks):
            one.tell(f"word {rank}")
            one.tell("another")
        assert [one.result() for one in waiting] == [{0: "word 0", 1: "word 1", 2: "word 2"}] * 3
    assert not any(store.check([name]) for name in ("0", "1", "2", "read"))


@pytest.mark.parametrize(
    ("settings", "teller", "ended", "late"), [({"ended": lambda: [1]}, 0, (1,), ()), ({"seconds": 0.0}, 1, (), (0,))]
)
def test_who_has_ended_without_a_word_or_does_not_come_in_time_is_named(settings, teller, ended, late) -> None:
    _, ranks = words(2, **settings)
    ranks[teller].tell("here")
    with pytest.raises(PeersMissingError) as missing:
        ranks[0].of_all()
    assert (missing.value.ended, missing.value.late) == (ended, late)


def test_a_store_that_does_not_answer_for_a_while_is_asked_again() -> None:
    store = dist.HashStore()
    ranks = [Words(OftenAway(store), rank, 2, 60.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for rank, one in enumerate(ranks):
            one.tell(f"word {rank}")
        assert list(pool.map(Words.of_all, ranks)) == [{0: "word 0", 1: "word 1"}] * 2
