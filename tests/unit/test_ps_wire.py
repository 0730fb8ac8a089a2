"""Messages between the processes of a cluster: what is not authentic or not new is refused before it is looked at, each
reply belongs to one request, and who is silent for too long is found out. Time is a number here."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchstrat.errors import AuthenticationError, InvalidArgumentError
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.wire.envelopes import REFUSAL, Envelopes
from torchstrat.parameter_server.wire.heartbeat import Beat, Heartbeat, Silence
from torchstrat.parameter_server.wire.payloads import Packed, pack, unpack
from torchstrat.parameter_server.wire.sealing import WINDOW, Kind, ReplayWindow, Sealer

SECRET = b"known to all"
WORKER = Peer(Task("worker", 0), "a11ce", "uv://127.0.0.1:1", "here", 1)
SERVER = Peer(Task("ps", 0), "b0b", "uv://127.0.0.1:2", "here", 2)
OTHER = Peer(Task("ps", 1), "ca401", "uv://127.0.0.1:3", "here", 3)


@pytest.fixture
def alice() -> Sealer:
    return Sealer(SECRET, "a11ce")


@pytest.fixture
def bob() -> Sealer:
    return Sealer(SECRET, "b0b")


# Seals


@given(st.sampled_from(Kind), st.binary(max_size=300), st.integers(0, 3), st.integers(0, 2**63))
@example(Kind.REQUEST, b"x" * 100_000, 2, 0)
def test_an_authentic_message_is_opened(kind: Kind, body: bytes, attachments: int, in_reply_to: int) -> None:
    alice, bob = Sealer(SECRET, "a11ce"), Sealer(SECRET, "b0b")
    for number in range(2):
        counter, sealed = alice.seal(kind, "b0b", body, attachments=attachments, in_reply_to=in_reply_to)
        opened = bob.open(sealed, attachments=attachments)
        assert (opened.kind, opened.sender, opened.body) == (kind, "a11ce", body)
        assert (opened.counter, opened.in_reply_to) == (counter, in_reply_to) == (number, in_reply_to)


def forgeries(sealed: bytes) -> Iterator[bytes]:
    """Every bit flipped, every truncation, extensions and garbage."""
    for position in range(8 * len(sealed)):
        forged = bytearray(sealed)
        forged[position // 8] ^= 1 << position % 8
        yield bytes(forged)
    yield from (sealed[:length] for length in range(len(sealed)))
    yield from (sealed + b"\x00", sealed * 2, b"\x00" + sealed, *(random.Random(n).randbytes(n) for n in range(300)))


def test_what_was_changed_is_noticed_and_uses_up_no_counter(alice: Sealer, bob: Sealer) -> None:
    """Otherwise anybody could make a process refuse its peers."""
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"pay 100")
    for forged in forgeries(sealed):
        with pytest.raises(AuthenticationError, match="not sealed with this cluster's secret"):
            bob.open(forged)
    assert bob.open(sealed).body == b"pay 100"


@pytest.mark.parametrize(
    ("sealer", "opener", "says"),
    [
        (Sealer(b"guessed", "a11ce"), "b0b", "give all processes of the cluster the same secret"),
        (Sealer(SECRET, "a11ce"), "b0b2", "for b0b reached b0b2"),
        (Sealer(SECRET, "a11ce"), "a11ce", "for b0b reached a11ce"),
    ],
    ids=["another secret", "for the process that ran here before", "back to its sender"],
)
def test_an_authentic_message_of_or_for_somebody_else_is_refused(sealer: Sealer, opener: str, says: str) -> None:
    with pytest.raises(AuthenticationError, match=says):
        Sealer(SECRET, opener).open(sealer.seal(Kind.REQUEST, "b0b", b"hello")[1])


def test_lost_and_added_tensors_are_noticed(alice: Sealer, bob: Sealer) -> None:
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"hello", attachments=2)
    for attachments in (0, 1, 3):
        with pytest.raises(AuthenticationError, match=f"came with {attachments} tensors, but was sent with 2"):
            bob.open(sealed, attachments=attachments)
    bob.open(sealed, attachments=2)  # what was refused does not count as seen


def test_reordered_messages_of_several_senders_are_accepted_once(bob: Sealer) -> None:
    senders = [Sealer(SECRET, name) for name in ("a", "c", "d")]
    messages = [sender.seal(kind, "b0b", b"")[1] for sender in senders for kind in Kind for _ in range(100)]
    random.Random(1).shuffle(messages)
    for message in messages:
        bob.open(message)
    for message in messages:
        with pytest.raises(AuthenticationError, match="arrived twice"):
            bob.open(message)


def test_counters_are_kept_for_each_receiver(alice: Sealer) -> None:
    """So that talking much to others does not push the window past a slow message to this one."""
    for _ in range(10):
        alice.seal(Kind.REQUEST, "somebody else", b"")
    assert alice.seal(Kind.REQUEST, "b0b", b"")[0] == 0


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="secret is empty"):
        Sealer(b"", "a11ce")


@given(st.lists(st.integers(0, 200)), st.integers(1, 300))
@example([1099, 999, 1000, 1000], 100)
def test_the_window_accepts_what_is_new_and_not_too_late(counters: list[int], size: int) -> None:
    window, seen, newest = ReplayWindow(size), set[int](), -1
    for counter in counters:
        is_new = counter not in seen and counter > newest - size
        assert window.accept(counter) == is_new
        seen.add(counter)
        newest = max(newest, counter)


def test_the_window_keeps_little() -> None:
    window = ReplayWindow()
    for counter in range(1, 3 * WINDOW):  # 0 never arrives
        assert window.accept(counter)
    assert not window.accept(0)
    assert window.accept(2**64 - 1)
    assert not window.accept(2**64 - 1)
    assert len(pickle.dumps(window)) < WINDOW // 8 + 1_000


# Requests and replies


@pytest.fixture
def worker() -> Envelopes:
    return Envelopes(SECRET, WORKER)


@pytest.fixture
def server() -> Envelopes:
    return Envelopes(SECRET, SERVER)


def test_there_and_back(worker: Envelopes, server: Envelopes) -> None:
    payload = pack({"gradient": torch.ones(2)})
    counter, sealed = worker.request(SERVER, "push", payload)
    request = server.request_in(server.unseal(sealed, payload.tensors))
    assert request is not None
    assert (request.sender, request.method) == (WORKER, "push")
    assert unpack(request.payload)["gradient"].tolist() == [1, 1]
    received = worker.unseal(server.reply(request, Packed(b"applied")), [])
    assert worker.request_in(received) is None, "a reply is no request"
    later, _ = worker.request(SERVER, "push", payload)
    for peer, number in ((SERVER, later), (OTHER, counter)):
        with pytest.raises(AuthenticationError, match="answers something else"):
            worker.answer_in(received, peer, number, "push")
    assert worker.answer_in(received, SERVER, counter, "push").data == b"applied"
    assert (worker.refused, server.refused) == (0, 0)


def test_a_request_is_no_reply(worker: Envelopes, server: Envelopes) -> None:
    counter, sealed = worker.request(SERVER, "push", Packed(b""))
    with pytest.raises(AuthenticationError):
        server.answer_in(server.unseal(sealed, []), WORKER, counter, "push")


def body_of(introduction: bytes, name: bytes = b"push") -> bytes:
    return len(introduction).to_bytes(2, "big") + len(name).to_bytes(2, "big") + introduction + name


@pytest.mark.parametrize(
    ("body", "sender"),
    [
        (body_of(pickle.dumps(WORKER)), "ca401"),  # in another's name
        *[(body, "a11ce") for body in (b"", b"\x00", b"\xff" * 10, body_of(pickle.dumps(3)))],
    ],
)
def test_authentic_lies_and_nonsense_are_refused(server: Envelopes, body: bytes, sender: str) -> None:
    _, sealed = Sealer(SECRET, sender).seal(Kind.REQUEST, "b0b", body)
    assert server.request_in(server.unseal(sealed, [])) is None
    assert server.refused == 1


def test_a_refusal_says_what_to_do(worker: Envelopes) -> None:
    with pytest.raises(AuthenticationError, match=r"worker 0 .* do not trust each other .* the same secret"):
        worker.answer_in(worker.unseal(REFUSAL, []), SERVER, 0, "push")
    assert worker.refused == 0, "the other one has refused"


def test_a_flood_of_garbage_is_counted_and_hardly_logged(server: Envelopes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(1_000):
            assert server.unseal(b"garbage %d" % number, []) is None
    assert server.refused == 1_000
    assert len(caplog.records) == 10
    assert "refused a message (512 so far)" in caplog.records[-1].getMessage()


# Heartbeats


@pytest.fixture
def heartbeat() -> Heartbeat[str]:
    return Heartbeat(interval_seconds=1.0, deadline_seconds=3.0, now=100.0)


def lost(heartbeat: Heartbeat[str], times: Iterable[float], hears: Callable[[float], dict[str, float]] = lambda _: {}):
    """Who is lost, at which of these beats; ``hears``: of whom, and how long after a beat."""
    found = {}
    for time in times:
        beat = heartbeat.beat(time)
        for key, delay in hears(time).items():
            heartbeat.heard(key, time + delay)
        if beat.lost:
            found[time] = beat.lost
    return found


def test_who_is_silent_is_lost_once_past_the_deadline_and_who_answers_is_not(heartbeat: Heartbeat[str]) -> None:
    for key in ("ps", "worker", "other"):
        heartbeat.watch(key, 100.0)
    heartbeat.forget("other")
    heartbeat.heard("other", 100.5)
    assert heartbeat.beat(101.0) == Beat(["ps", "worker"], [])
    assert lost(heartbeat, range(102, 200), lambda _: {"worker": 0.5}) == {104: [Silence("ps", 4.0, 3.0)]}
    assert heartbeat.beat(200.0) == Beat(["worker"], [])


def test_silence_counts_from_the_last_sign_of_life(heartbeat: Heartbeat[str]) -> None:
    heartbeat.watch("ps", 100.0)
    found = lost(heartbeat, range(101, 110), lambda time: {"ps": 0.7} if time == 101 else {})
    assert found == {105: [Silence("ps", pytest.approx(3.3, abs=1e-9), 3.0)]}


def test_who_was_stopped_itself_declares_nobody_dead(heartbeat: Heartbeat[str]) -> None:
    heartbeat.watch("ps", 100.0)
    heartbeat.beat(101.0)
    for time in (10_000.0, 10_001.0):
        assert heartbeat.beat(time) == Beat(["ps"], [])  # asked again, at the first beat after the sleep
    assert heartbeat.beat(10_002.0).lost == [Silence("ps", 4.0, 3.0)]  # and then it really does not answer


def test_a_deadline_of_its_own(heartbeat: Heartbeat[str]) -> None:
    heartbeat.watch("ps", 100.0, deadline_seconds=5.0)
    for deadline in (9.0, None):  # the last one holds
        heartbeat.watch("worker", 100.0, deadline_seconds=deadline)
    assert lost(heartbeat, range(101, 107)) == {
        104: [Silence("worker", 4.0, 3.0)],
        106: [Silence("ps", 6.0, 5.0)],
    }
    heartbeat.watch("ps", 107.0)  # back as another incarnation would be: nothing is left of the old deadline
    assert list(lost(heartbeat, range(107, 112))) == [111]


def test_watching_begins_with_the_whole_deadline(heartbeat: Heartbeat[str]) -> None:
    assert heartbeat.beat(5_000.0) == Beat([], [])
    heartbeat.watch("ps", 5_000.5)
    assert lost(heartbeat, range(5_001, 5_005)) == {5_004: [Silence("ps", 3.5, 3.0)]}


def test_beats_are_due_at_intervals_and_late_ones_at_once(heartbeat: Heartbeat[str]) -> None:
    assert heartbeat.due_in(100.25) == 0.75
    assert heartbeat.due_in(103.0) == 0.0
    heartbeat.beat(103.0)
    assert heartbeat.due_in(103.0) == 1.0
