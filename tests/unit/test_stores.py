"""The store at which processes meet: one that predecessors have used, and one whose host has gone."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from torchstrat.collectives.default_group import answers
from torchstrat.collectives.fresh_store import fresh_store
from torchstrat.errors import CommunicationTimeoutError

LONG, SOON = timedelta(seconds=30), timedelta(milliseconds=50)


def meet(store: Any, ranks: list[int], size: int = 3) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: fresh_store(store, rank, size, "test", LONG), ranks))


def test_all_find_each_other_and_nothing_of_the_start_before() -> None:
    store = dist.HashStore()
    before = meet(store, [0, 1, 2])
    before[1].set("address", "of a process that is dead")
    assert [one.get("address") for one in before] == [b"of a process that is dead"] * 3
    after = meet(store, [2, 0, 1])
    assert not any(one.check(["address"]) for one in after)
    after[0].set("address", "new")
    assert [one.get("address") for one in after] == [b"new"] * 3


def test_a_start_in_which_some_died_before_they_met_leaves_nothing_that_counts() -> None:
    store = dist.HashStore()
    for rank, missing in ((1, "rank 0"), (0, "rank 1, 2 of 3")):
        with pytest.raises(CommunicationTimeoutError, match=rf"rank {rank} waited 0\.05 s for {missing} to start"):
            fresh_store(store, rank, 3, "test", SOON)
    stores = meet(store, [0, 1, 2])
    stores[0].set("name", "ours")
    assert [one.get("name") for one in stores] == [b"ours"] * 3


def test_a_late_one_is_waited_for_and_not_taken_for_its_predecessor() -> None:
    store = dist.HashStore()
    meet(store, [0, 1], size=2)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(fresh_store(store, 0, 2, "test", LONG)))
    first.start()
    first.join(0.1)
    assert first.is_alive(), "the word of the second's predecessor is still there"
    second = fresh_store(store, 1, 2, "test", LONG)
    first.join()
    second.set("who", "both")
    assert found[0].get("who") == b"both"


def test_one_alone_waits_for_nobody() -> None:
    fresh_store(dist.HashStore(), 0, 1, "test", SOON).set("key", "value")


def test_a_store_whose_host_has_gone_is_not_used_again() -> None:
    """A later job of the same process may find it at the same port."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guest = dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=5))
    assert answers(guest)
    del host
    gc.collect()
    assert not answers(guest)
