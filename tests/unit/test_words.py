"""What ranks say about one thing without meeting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit.data_ranks import WordsPlace
from torchstrat.collectives.shared_memory.lockstep import PeersMissingError
from torchstrat.collectives.words import Words


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


def test_who_has_ended_without_a_word_is_not_waited_for() -> None:
    _, ranks = words(2, ended=lambda: [1])
    ranks[0].tell("")
    with pytest.raises(PeersMissingError) as missing:
        ranks[0].of_all()
    assert missing.value.ended == (1,)


def test_who_does_not_come_in_time_is_named() -> None:
    _, ranks = words(2, seconds=0.0)
    ranks[1].tell("here")
    with pytest.raises(PeersMissingError) as missing:
        ranks[0].of_all()
    assert missing.value.late == (0,)


def test_a_store_that_does_not_answer_for_a_while_is_asked_again() -> None:
    store = dist.HashStore()
    ranks = [Words(OftenAway(store), rank, 2, 60.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for rank, one in enumerate(ranks):
            one.tell(f"word {rank}")
        assert list(pool.map(Words.of_all, ranks)) == [{0: "word 0", 1: "word 1"}] * 2
