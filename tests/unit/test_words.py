"""What ranks say about one thing without meeting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from torchstrat.collectives.words import Words


def visit(call: Callable[[], Any], otherwise: Any, seconds: float = 0) -> Any:
    return call()


def words(size: int, ended: Callable[[], list[int]] = list) -> tuple[Any, list[Words]]:
    store = dist.HashStore()
    return store, [Words(store, rank, size, visit, ended) for rank in range(size)]


def test_all_are_heard_whoever_comes_last_and_nothing_stays() -> None:
    store, ranks = words(3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(one.of_all, 60.0) for one in ranks]
        for rank, one in enumerate(ranks):
            one.tell(f"word {rank}")
            one.tell("another")
        assert [one.result() for one in waiting] == [{0: "word 0", 1: "word 1", 2: "word 2"}] * 3
    assert not any(store.check([name]) for name in ("0", "1", "2", "read"))


def test_who_has_ended_without_a_word_is_not_waited_for() -> None:
    _, ranks = words(2, lambda: [1])
    ranks[0].tell("")
    assert ranks[0].of_all(60.0) == {0: ""}


def test_the_time_is_over() -> None:
    _, ranks = words(2)
    ranks[1].tell("here")
    assert ranks[0].of_all(0.0) == {1: "here"}
