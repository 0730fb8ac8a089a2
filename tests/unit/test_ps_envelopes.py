"""Requests and replies between processes: each reply belongs to one request, and what does not fit is refused."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

from torchstrat.errors import AuthenticationError
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.wire.envelopes import REFUSAL, Envelopes
from torchstrat.parameter_server.wire.payloads import Packed, pack, unpack
from torchstrat.parameter_server.wire.sealing import Kind, Sealer

SECRET = b"known to all"
WORKER = Peer(Task("worker", 0), "a11ce", "uv://127.0.0.1:1", "here", 1)
SERVER = Peer(Task("ps", 0), "b0b", "uv://127.0.0.1:2", "here", 2)
OTHER = Peer(Task("ps", 1), "ca401", "uv://127.0.0.1:3", "here", 3)


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

    sealed = server.reply(request, Packed(b"applied"))
    assert worker.answer_in(worker.unseal(sealed, []), SERVER, counter, "push").data == b"applied"
    assert (worker.refused, server.refused) == (0, 0)


def test_a_reply_is_no_answer_to_another_request(worker: Envelopes, server: Envelopes) -> None:
    first, sealed = worker.request(SERVER, "push", Packed(b""))
    second, _ = worker.request(SERVER, "push", Packed(b""))
    request = server.request_in(server.unseal(sealed, []))
    assert request is not None
    received = worker.unseal(server.reply(request, Packed(b"")), [])
    for peer, counter in ((SERVER, second), (OTHER, first)):
        with pytest.raises(AuthenticationError, match="answers something else"):
            worker.answer_in(received, peer, counter, "push")
    worker.answer_in(received, SERVER, first, "push")


def test_a_reply_is_no_request_and_a_request_no_reply(worker: Envelopes, server: Envelopes) -> None:
    counter, sealed = worker.request(SERVER, "push", Packed(b""))
    received = server.unseal(sealed, [])
    with pytest.raises(AuthenticationError):
        server.answer_in(received, WORKER, counter, "push")
    request = server.request_in(received)
    assert request is not None
    assert worker.request_in(worker.unseal(server.reply(request, Packed(b"")), [])) is None


def test_nobody_speaks_in_anothers_name(server: Envelopes) -> None:
    introduction, name = pickle.dumps(WORKER), b"push"
    body = len(introduction).to_bytes(2, "big") + len(name).to_bytes(2, "big") + introduction + name
    _, sealed = Sealer(SECRET, "ca401").seal(Kind.REQUEST, "b0b", body)
    assert server.request_in(server.unseal(sealed, [])) is None
    assert server.refused == 1


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xff" * 10, b"\x00\x05\x00\x00" + pickle.dumps(3)])
def test_authentic_nonsense_is_refused(server: Envelopes, body: bytes) -> None:
    _, sealed = Sealer(SECRET, "a11ce").seal(Kind.REQUEST, "b0b", body)
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
