"""Messages between the processes of a cluster: what is not authentic or not new is refused before it is looked at, each
reply belongs to one request, and who is silent for too long is found out. Time is a number here."""

from __future__ import annotations

import logging
import os
import pickle
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchstrat.errors import AuthenticationError, InvalidArgumentError
from torchstrat.parameter_server.interface import Handler, Peer, Task
from torchstrat.parameter_server.same_host.channel import DTYPE_NUMBERS, Channel
from torchstrat.parameter_server.same_host.channel import Request as SharedRequest
from torchstrat.parameter_server.same_host.connection import Callee, Caller, Process
from torchstrat.parameter_server.same_host.pool import SharedPool
from torchstrat.parameter_server.transport.auth import WINDOW, Kind, ReplayWindow, Sealer
from torchstrat.parameter_server.transport.failure_detector import Beat, Heartbeat, Silence
from torchstrat.parameter_server.transport.requests import (
    REFUSAL,
    Answerer,
    Envelopes,
    Packed,
    pack,
    pack_request,
    result_of,
    unpack,
)

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

EVENTS = st.tuples(
    st.sampled_from(["watch", "hear", "forget", "beat", "beat", "beat"]),
    st.sampled_from(["ps", "worker"]),
    st.sampled_from([0.0, 0.25, 1.0, 1.0, 1.0, 10_000.0]),  # it was stopped for so long
    st.sampled_from([None, 2.0, 5.0]),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=30))
@example([("watch", "ps", 0.0, None), *[("beat", "ps", 1.0, None)] * 5])
@example([("watch", "ps", 0.0, 5.0), ("watch", "ps", 0.0, None), *[("beat", "ps", 1.0, None)] * 5])
@example([("watch", "ps", 0.0, None), ("beat", "ps", 1.0, None), *[("beat", "ps", 10_000.0, None)] * 4])
def test_who_is_silent_for_longer_than_its_deadline_is_lost_by_a_clock_that_stops_with_this_process(events) -> None:
    now, last_beat, lived = 100.0, 100.0, 0.0
    heartbeat: Heartbeat[str] = Heartbeat(interval_seconds=1.0, deadline_seconds=3.0, now=now)
    signs: dict[str, float] = {}
    deadlines: dict[str, float] = {}
    for what, key, seconds, deadline in events:
        now += seconds
        here = lived + min(now - last_beat, 1.0)
        if what == "watch":  # again: the last deadline holds
            heartbeat.watch(key, now, deadline)
            signs.setdefault(key, here)
            deadlines[key] = deadline or 3.0
        elif what == "hear":
            heartbeat.heard(key, now)
            signs |= {key: here} if key in signs else {}
        elif what == "forget":
            heartbeat.forget(key)
            signs.pop(key, None)
        else:
            lived, last_beat = here, now
            lost = [Silence(one, here - then, deadlines[one]) for one, then in signs.items()]
            lost = [one for one in lost if one.seconds > one.deadline_seconds]
            signs = {one: then for one, then in signs.items() if one not in [silence.key for silence in lost]}
            assert heartbeat.beat(now) == Beat(list(signs), lost)
        assert heartbeat.due_in(now) == max(0.0, last_beat + 1.0 - now)


# Values as one pickle with the tensors beside it


@dataclass(frozen=True)
class Message:
    name: str
    values: tuple[torch.Tensor, ...]


def travel(value: Any) -> Any:
    return unpack(pack(value))


def test_tensors_anywhere_travel_beside_the_pickle_which_alone_is_no_value() -> None:
    message = Message("push", (torch.arange(1000), torch.ones(3, 4)))
    packed = pack({"a": [message, 3]})
    assert len(packed.tensors) == 2
    assert len(packed.data) < 500
    arrived = unpack(packed)["a"][0]
    assert arrived.name == "push"
    assert all(torch.equal(there, here) for there, here in zip(arrived.values, message.values, strict=True))
    with pytest.raises(pickle.UnpicklingError, match="beside this pickle"):
        pickle.loads(packed.data)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 5), torch.ones(4, 5).t(), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ids=["plain", "transposed", "channels_last"],
)
def test_a_tensor_that_owns_its_storage_is_not_copied_to_be_sent(tensor: torch.Tensor) -> None:
    (sent,) = pack(tensor).tensors
    assert sent.data_ptr() == tensor.data_ptr()
    assert sent.stride() == tensor.stride()


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(10.0)[2:4],
        torch.arange(10.0)[1:],
        torch.arange(10.0)[::2],
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0)[3],
        torch.arange(10.0)[:0],
    ],
    ids=["small", "large", "strided", "columns", "expanded", "scalar", "empty"],
)
def test_a_view_brings_what_it_shows_and_no_more(view: torch.Tensor) -> None:
    (sent,) = pack(view).tensors
    assert sent.untyped_storage().nbytes() == view.numel() * view.itemsize
    assert torch.equal(sent, view)


def test_history_stays_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for value in (parameter, parameter * 2):
        arrived = travel(value)
        assert type(arrived) is torch.Tensor
        assert not arrived.requires_grad
        assert arrived.grad_fn is None
        assert torch.equal(arrived, value)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    for value in (torch.tensor([[0, 1], [1, 0]]).to(dtype), torch.tensor(1).to(dtype)):
        arrived = travel(value)
        assert arrived.dtype == dtype
        assert arrived.tolist() == value.tolist()


def test_lazily_conjugated_and_negated_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = pack(value.conj()).tensors[0]
    assert torch.equal(conjugate, torch.tensor([1 - 2j, 3 + 4j]))
    assert not conjugate.is_conj()
    assert torch.equal(pack(value.conj().imag).tensors[0], torch.tensor([-2.0, 4.0]))


def test_tensors_without_plain_memory_travel_inside_or_in_parts() -> None:
    assert travel(torch.empty(3, 4, device="meta")).shape == (3, 4)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    assert [row.shape[0] for row in travel(jagged).unbind()] == [2, 1]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    assert len(pack(sparse).tensors) == 2
    arrived = travel(sparse)
    assert not arrived.is_coalesced(), "its repeated rows stay"
    assert torch.equal(arrived.to_dense(), sparse.to_dense())


def test_one_tensor_twice_is_one_and_two_of_one_storage_are_two() -> None:
    value = torch.ones(2)
    packed = pack([value, value])
    assert len(packed.tensors) == 1
    first, second = unpack(packed)
    assert first is second
    first, second = pack([value, value.detach(), torch.empty(0), torch.empty(0)]).tensors[:2]
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(Exception, match="lambda"):
        pack(lambda: None)


# -- in memory that is shared ------------------------------------------------------------------------------------------


def test_an_answer_may_have_more_tensors_than_a_message_holds() -> None:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer, pool, ended = Peer(Task("ps", 0), "a", ""), SharedPool(), threading.Event()
    answerer = Answerer(peer)
    answerer.serve({"count": Handler(lambda _, number: [torch.full((1,) * 40, n) for n in range(number)])})
    Callee(Channel(its), peer, answerer.answer, on_sign=lambda: None, on_end=ended.set).start()
    caller = Caller(Channel(mine, pool), pool, peer, Process(os.getpid()), on_broken=lambda: None, on_sign=lambda: None)
    found: Future[Packed] = Future()
    assert caller.call("count", pack_request(2_000, "count"), 200.0, lambda answer: found.set_result(answer()))
    assert [int(one) for one in result_of(found.result(200))] == list(range(2_000))
    caller.hang_up()
    assert ended.wait(20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_cannot_be_taken_in_ends_the_connection() -> None:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = threading.Event()
    peer = Peer(Task("worker", 0), "a", "")
    Callee(Channel(its), peer, lambda *_: None, on_sign=lambda: None, on_end=ended.set).start()
    channel = Channel(mine)
    in_no_memory_that_it_has = 7, 0, (1000,), DTYPE_NUMBERS[torch.float32]
    channel.send(SharedRequest(0, "read", b"", (in_no_memory_that_it_has,), ()))
    assert ended.wait(20)
    assert channel.receive() is None
    channel.close()
