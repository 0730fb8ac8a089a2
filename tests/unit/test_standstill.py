"""Ranks that wait for each other in different calls, and those that only seem to; the store at which they meet."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.programs import wait_for
from torchstrat.distributed.collectives import notes
from torchstrat.distributed.collectives.default_group import answers, fresh_store
from torchstrat.distributed.collectives.notes import (
    Channel,
    FailureBoard,
    Standstill,
    StandstillError,
    StoredWords,
    StoreVisits,
    note_of,
    said_at,
)
from torchstrat.distributed.collectives.shared_memory.lockstep import PeersMissingError
from torchstrat.errors import CommunicationTimeoutError

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


def test_a_wait_that_is_over_is_taken_back(store: Any) -> None:
    """Who has come to hundreds of passes over the data since does not know any more that it came to that one, too."""
    first, second = ranks(store, 2)
    early = first.waits("pass 0", "the end of a pass")
    assert first.told(early) is None
    for number in range(200):
        user = Rank(store, 1, 2)
        second.view.channel(user, f"pass {number}", (0, 1), BOARD).count = 1
        del user  # and with it the channel
    first.view.over(early)
    late = second.waits("pass 200", "the end of a pass")
    assert second.told(late) is None
    assert first.told(first.waits("steps", "backward()")) == second.told(late), "they no longer look"


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
    monkeypatch.setattr(notes, "_GIVEN_UP_SECONDS", 0.0)
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
    wait_for(lambda: not visits.is_gone, "an answer of the store")
    assert visits.visit(lambda found: said_at(found, "key"), "nothing") == "late"


def test_what_is_taken_away_while_it_is_asked_for_is_not_waited_for() -> None:
    assert said_at(TakenAwayStore(), "key") is None


class SlowStore:
    """Is reached once it answers."""

    def __init__(self, store: Any) -> None:
        self._store, self.answers = store, threading.Event()

    def clone(self) -> Any:
        assert self.answers.wait(60)
        return self._store


def test_a_note_is_heard_also_where_the_store_is_slow_to_answer(store: Any) -> None:
    slow = SlowStore(store)
    FailureBoard(StoreVisits(store), BOARD, 0).post("called reduce")
    threading.Timer(0.8, slow.answers.set).start()
    assert FailureBoard(StoreVisits(slow), BOARD, 1).read([0], seconds=0.3) == {0: "called reduce"}


@pytest.mark.parametrize("takes_back", [False, True])
def test_a_note_is_left_once_the_store_answers_again(takes_back: bool, store: Any) -> None:
    slow = SlowStore(store)
    visits = StoreVisits(slow)
    assert visits.visit(lambda _: "found", "nothing", seconds=0.01) == "nothing"
    board = FailureBoard(visits, BOARD, 1)
    board.post("raised ValueError: no more")
    if takes_back:
        board.clear()
    slow.answers.set()
    wait_for(lambda: not visits.is_gone, "an answer of the store")
    assert note_of(store, BOARD, 1) == (None if takes_back else "raised ValueError: no more")


# -- the store at which processes meet: one that predecessors have used, and one whose host has gone -------------------


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


# -- what ranks say about one thing without meeting --------------------------------------------------------------------


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


def words(size: int, seconds: float = 60.0, ended: Callable[[], list[int]] = list) -> tuple[Any, list[StoredWords]]:
    store = dist.HashStore()
    return store, [StoredWords(WordsPlace(store, ended), rank, size, seconds) for rank in range(size)]


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
    ranks = [StoredWords(OftenAway(store), rank, 2, 60.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for rank, one in enumerate(ranks):
            one.tell(f"word {rank}")
        assert list(pool.map(StoredWords.of_all, ranks)) == [{0: "word 0", 1: "word 1"}] * 2
