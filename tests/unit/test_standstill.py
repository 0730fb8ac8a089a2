"""Ranks that wait for each other in different calls, and those that only seem to."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from torchstrat.collectives import standstill
from torchstrat.collectives.failures import FailureBoard, StoreVisits, said_at
from torchstrat.collectives.standstill import Channel, Standstill, StandstillError

BOARD = "board"


class StoppedStore:
    """Answers once it goes on."""

    def __init__(self) -> None:
        self._store, self.goes_on = dist.HashStore(), threading.Event()

    def clone(self) -> StoppedStore:
        return self

    def __getattr__(self, name: str) -> Any:
        assert self.goes_on.wait(60)
        return getattr(self._store, name)


class TakenAwayStore:
    """Somebody always takes away a key after it was found to be there; a ``get`` would wait."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        raise TimeoutError("after five minutes, from a store of torch's")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Rank:
    """One rank of a job, whose threads wait where the test says so."""

    def __init__(self, store: Any, rank: int, size: int, place: str = "waiting/0") -> None:
        self.visits = StoreVisits(store)
        self.rank, self.size = rank, size
        self.view = Standstill(self.visits, rank, size, place)
        self.channels: dict[str, Channel] = {}

    def channel(self, name: str, ranks: tuple[int, ...] = ()) -> Channel:
        if name not in self.channels:
            self.channels[name] = self.view.channel(self, name, ranks or range(self.size), BOARD)
        return self.channels[name]

    def passes(self, name: str) -> None:
        """Makes a call that comes to its end."""
        self.channel(name).count += 1

    def waits(self, name: str, call: str, ranks: tuple[int, ...] = ()) -> Channel:
        channel = self.channel(name, ranks)
        channel.count += 1
        channel.call, channel.number = call, channel.count
        return channel

    def told(self, channel: Channel) -> dict[int, str] | None:
        """What it is told where nobody will come. Looks twice: a wait that has just begun is none yet."""
        try:
            self.view.look(channel)
            channel.noted = (channel.number, 0.0)
            self.view.look(channel)
        except StandstillError as error:
            return {**error.calls, **error.failed}
        return None


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def ranks(store: Any, size: int, place: str = "waiting/0") -> list[Rank]:
    return [Rank(store, rank, size, place) for rank in range(size)]


def test_two_that_wait_on_different_channels_are_told_who_is_in_what(store: Any) -> None:
    first, second = ranks(store, 2)
    data, steps = first.waits("data", "the next batch"), second.waits("steps", "backward()")
    assert first.told(data) is None, "alone so far: the other may be at work"
    assert second.told(steps) == first.told(data) == {0: "the next batch", 1: "backward()"}


def test_who_waits_in_the_same_call_waits_for_somebody_else(store: Any) -> None:
    first, second, _ = ranks(store, 3)
    for one in (first, second) * 2:
        waits = one.channel("steps") if "steps" in one.channels else one.waits("steps", "backward()")
        assert one.told(waits) is None


@pytest.mark.parametrize("left", ["by an earlier group", "of a call that has ended", "by a channel that is gone"])
def test_what_is_left_in_the_store_is_no_wait(store: Any, left: str) -> None:
    """A sweep makes one strategy after the other, whose processes meet at one store; or the other rank has not said
    anything since it waited where this one has come to."""
    first, second = ranks(store, 2)
    assert first.told(first.waits("data", "the next batch")) is None
    if left == "by an earlier group":
        _, second = ranks(store, 2, "waiting/1")
    elif left == "of a call that has ended":
        second.passes("data")
    else:
        user = Rank(store, 1, 2)
        second.view.channel(user, "data", (0, 1), BOARD).count = 1
        del user
    assert second.told(second.waits("steps", "backward()")) is None


def test_three_in_a_circle(store: Any) -> None:
    members = {0: (0, 1), 1: (1, 2), 2: (0, 2)}
    three = ranks(store, 3)
    waits = [one.waits(f"of {members[rank]}", f"call {rank}", members[rank]) for rank, one in enumerate(three)]
    assert [three[rank].told(waits[rank]) for rank in (0, 1)] == [None, None]
    told = [three[rank].told(waits[rank]) for rank in (2, 0, 1)]
    assert told == [{0: "call 0", 1: "call 1", 2: "call 2"}] * 3


def test_another_thread_keeps_nobody_and_may_come(store: Any) -> None:
    """A save in the background waits for its like; the program goes on, and waits for the other's."""
    first, second = ranks(store, 2)
    saving = first.waits("saving", "Checkpoint.save")
    saving.in_background = True
    assert first.told(saving) is None
    assert second.told(second.waits("steps", "backward()")) is None
    blocking = second.waits("another save", "Checkpoint.save")
    first.channel("another save").in_background = True
    assert first.told(first.waits("steps", "backward()")) is None
    assert second.told(blocking) is None


def test_who_has_failed_and_does_not_come_is_not_waited_for(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks(store, 2)
    board = FailureBoard(second.visits, BOARD, 1)
    board.post("raised ValueError: no more")
    steps = first.waits("steps", "backward()")
    assert first.told(steps) is None, "it may go on after its error"
    monkeypatch.setattr(standstill, "_GIVEN_UP_SECONDS", 0.0)
    assert (first.told(steps) or {})[1] == "raised ValueError: no more"
    board.clear()
    assert first.told(first.waits("steps", "SGD.step()")) is None


def test_a_store_that_does_not_answer_says_nothing_until_it_does() -> None:
    store = StoppedStore()
    visits = StoreVisits(store)
    assert visits.visit(lambda found: found.set("key", "late"), None, seconds=0.01) is None
    assert visits.is_gone
    assert visits.visit(lambda found: said_at(found, "key"), "nothing") == "nothing"
    store.goes_on.set()
    deadline = time.monotonic() + 60
    while visits.is_gone and time.monotonic() < deadline:
        time.sleep(0.001)
    assert visits.visit(lambda found: said_at(found, "key"), "nothing") == "late"


def test_what_is_taken_away_while_it_is_asked_for_is_not_waited_for() -> None:
    assert said_at(TakenAwayStore(), "key") is None


def test_a_note_is_heard_also_where_the_store_is_slow_to_answer(store: Any) -> None:
    class SlowStore:
        answers = threading.Event()

        def clone(self) -> Any:
            assert self.answers.wait(60)
            return store

    FailureBoard(StoreVisits(store), BOARD, 0).post("called reduce")
    threading.Timer(0.8, SlowStore.answers.set).start()
    assert FailureBoard(StoreVisits(SlowStore()), BOARD, 1).read([0], seconds=0.3) == {0: "called reduce"}
