"""Control connections: who gets in, what a stranger learns, and what happens to messages that were tampered with."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from tests.support.ps_meeting import Log, Wire, free_address
from torchstrat.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerUnavailableError,
    VersionMismatchError,
)
from torchstrat.parameter_server.meeting import control, handshake, listener
from torchstrat.parameter_server.meeting.complaints import INTERVAL_SECONDS, LINES_PER_INTERVAL, Complaints
from torchstrat.parameter_server.meeting.control import ControlChannel, connect
from torchstrat.parameter_server.meeting.handshake import Introduction, Side, shake_hands
from torchstrat.parameter_server.meeting.listener import ControlListener
from torchstrat.parameter_server.meeting.secret import derive_key, load_secret, new_secret
from torchstrat.parameter_server.meeting.versions import Versions, local_versions
from torchstrat.parameter_server.membership import SERVER_DEADLINE_SECONDS
from torchstrat.parameter_server.tasks import Task

VERSIONS = Versions("0.1.0", "2.13.0", "3.11")
CHIEF = Introduction(Task("chief", 0), VERSIONS)
WORKER = Introduction(Task("worker", 3), VERSIONS)
KEY = b"k" * 32
SOON = 30.0
OPENING, CLAIM_AND_PROOF, VERDICT_AND_PROOF = handshake._OPENING.size, 64, 33

Attempt = tuple[ControlChannel, Task] | Exception


def opening(nonce: bytes, protocol: int = handshake.PROTOCOL) -> bytes:
    return handshake._OPENING.pack(handshake._MAGIC, protocol, nonce * 32)


def attempt(sock: socket.socket, side: Side, me: Introduction, other: str, within: float) -> Attempt:
    try:
        return shake_hands(sock, side, KEY, me, other=other, timeout_seconds=within)
    except Exception as error:
        sock.close()  # as the callers do
        return error


def as_dialer(sock: socket.socket, within: float = SOON) -> Attempt:
    return attempt(sock, Side.DIALER, CHIEF, "worker 3 at 10.0.0.7:2222", within)


def as_listener(sock: socket.socket, within: float = SOON, me: Introduction = WORKER) -> Attempt:
    return attempt(sock, Side.LISTENER, me, "the process at 10.0.0.1:99", within)


@contextmanager
def meeting(
    *, within: float = SOON, task: Introduction = WORKER, **options: Any
) -> Iterator[tuple[Attempt, Attempt, Wire]]:
    """What became of the dialer, of the listener, and the wire between them; ``options``: of the wire."""
    mine, near = socket.socketpair()
    far, theirs = socket.socketpair()
    with closing(mine), closing(theirs), closing(Wire(near, far, **options)) as wire, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(as_listener, theirs, within, task)
        yield as_dialer(mine, within=within), listening.result(SOON), wire


@contextmanager
def channels(**options: Any) -> Iterator[tuple[ControlChannel, ControlChannel, Wire]]:
    with meeting(**options) as (mine, theirs, wire):
        assert isinstance(mine, tuple), mine
        assert isinstance(theirs, tuple), theirs
        assert (mine[1], theirs[1]) == (WORKER.task, CHIEF.task)
        yield mine[0], theirs[0], wire


# Secrets


def test_a_secret_comes_from_the_argument_then_the_variable_then_the_file(tmp_path) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 40 + "\n")
    file.chmod(0o600)
    variable, in_file = {"TORCHSTRAT_SECRET": "v" * 40}, {"TORCHSTRAT_SECRET_FILE": str(file)}
    assert load_secret({**variable, **in_file}, secret="a" * 40) == b"a" * 40
    assert load_secret(variable) == b"v" * 40
    assert load_secret(in_file) == load_secret({"TORCHSTRAT_SECRET": "f" * 40, **in_file}) == b"f" * 40
    file.chmod(0o440)
    assert load_secret(in_file) == b"f" * 40, "the group may read it"
    assert load_secret({"TORCHSTRAT_SECRET": new_secret()}) != load_secret({"TORCHSTRAT_SECRET": new_secret()})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, r"neither TORCHSTRAT_SECRET nor TORCHSTRAT_SECRET_FILE is set.*torchstrat launch"),
        ({"TORCHSTRAT_SECRET": "", "TORCHSTRAT_SECRET_FILE": ""}, "neither"),
        ({"TORCHSTRAT_SECRET": "hunter2"}, r"TORCHSTRAT_SECRET holds 7 characters, which is too short"),
        ({"TORCHSTRAT_SECRET_FILE": "missing"}, r"'missing' cannot be read: No such file"),
        ({"TORCHSTRAT_SECRET_FILE": "open"}, r"'open' can be read or written by everybody.*mode 0644.*chmod 600 open"),
        ({"TORCHSTRAT_SECRET_FILE": "short"}, r"the file 'short' named by TORCHSTRAT_SECRET_FILE holds 3 characters"),
        ({"TORCHSTRAT_SECRET_FILE": "group", "TORCHSTRAT_SECRET": "x" * 32}, "hold different secrets"),
    ],
)
def test_what_is_wrong_with_a_secret_and_never_the_secret_itself(environ, says, tmp_path, monkeypatch) -> None:
    for name, content, mode in (("open", "y" * 32, 0o644), ("short", "abc", 0o600), ("group", "z" * 32, 0o440)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterConfigError, match=says) as caught:
        load_secret(environ)
    assert not any(part in str(caught.value) for part in ("hunter2", "y" * 32, "x" * 32, "z" * 32))


def test_purposes_have_keys_of_their_own() -> None:
    keys = [
        derive_key(secret * 32, purpose) for secret, purpose in ((b"s", "control"), (b"s", "rpc"), (b"t", "control"))
    ]
    assert keys[0] == derive_key(b"s" * 32, "control")
    assert len(set(keys)) == 3


# The handshake


def test_messages_travel_both_ways_between_those_who_know_the_secret() -> None:
    with channels() as (mine, theirs, _):
        for number in range(50):
            mine.send({"number": number, "text": "ä" * number})
        theirs.send({"from": "the other side"})
        assert [theirs.receive(SOON)["number"] for _ in range(50)] == list(range(50))
        assert mine.receive(SOON) == {"from": "the other side"}


@pytest.mark.parametrize(
    "other",
    [Versions("0.2.0", "2.13.0", "3.11"), Versions("0.1.0", "2.9.0", "3.11"), Versions("0.1.0", "2.13.0", "3.12")],
    ids=["torchstrat", "torch", "python"],
)
def test_other_versions_are_an_error_on_both_sides_that_names_both(other: Versions) -> None:
    with meeting(task=Introduction(WORKER.task, other)) as (mine, theirs, _):
        for error in (mine, theirs):
            assert isinstance(error, VersionMismatchError)
            assert all(part in str(error) for part in ("worker 3", "chief 0", str(VERSIONS), str(other)))


def test_local_versions_leave_out_the_build_and_another_protocol_is_an_error() -> None:
    versions = local_versions()
    assert ("+" in versions.torch, versions.python.count(".")) == (False, 1)
    left, right = socket.socketpair()
    with closing(right):
        right.sendall(opening(b"n", protocol=2))
        error = as_dialer(left)
        assert isinstance(error, VersionMismatchError)
        assert "speaks version 2 of torchstrat's control protocol" in str(error)


def test_the_secret_never_travels_and_nothing_is_said_twice() -> None:
    said = []
    for _ in range(2):
        with channels() as (mine, theirs, wire):
            mine.send({"hello": 1})
            assert theirs.receive(SOON) == {"hello": 1}
            said.append(b"".join(wire.said["dialer"] + wire.said["listener"]))
    assert KEY not in said[0]
    nonces_proofs = {one[start : start + 32] for one in said for start in (20, 52, 84)}
    assert len(nonces_proofs) >= 4


def test_a_stranger_who_connects_gets_random_bytes_only() -> None:
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, closing(left):
        theirs = pool.submit(as_listener, right)
        left.sendall(opening(b"n") + b"x" * 64)
        assert isinstance(theirs.result(SOON), AuthenticationError)
        heard = b""
        while part := left.recv(1000):
            heard += part
    assert len(heard) == OPENING + 1
    assert heard.endswith(handshake._REFUSED)


def test_a_proof_reflected_to_its_sender_proves_nothing() -> None:
    """The stranger answers a dialer with its own words, and relays a dialer's proof as a listener's."""
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, closing(right):
        mine = pool.submit(as_dialer, left)
        right.sendall(right.recv(1000))
        claim_and_proof = right.recv(1000)
        right.sendall(handshake._ACCEPTED + claim_and_proof[32:])
        assert isinstance(mine.result(SOON), AuthenticationError)


def test_a_proof_for_one_listener_is_none_for_another() -> None:
    """A stranger is dialed by an honest process, and shows what it was shown to another one, as that process."""
    left, right = socket.socketpair()
    near, far = socket.socketpair()
    with ThreadPoolExecutor(2) as pool, closing(right), closing(near):
        honest, victim = pool.submit(as_dialer, left), pool.submit(as_listener, far)
        assert right.recv(1000) != b""
        near.sendall(opening(b"m"))
        right.sendall(near.recv(1000))  # the victim's nonce, but the dialer proves itself for its own one
        near.sendall(right.recv(1000))
        assert isinstance(victim.result(SOON), AuthenticationError)
        right.sendall(near.recv(1000))
        assert isinstance(honest.result(SOON), AuthenticationError)


@pytest.mark.parametrize(
    ("who", "where"),
    [
        *[("dialer", where) for where in (OPENING - 1, OPENING, OPENING + CLAIM_AND_PROOF - 1)],
        *[("listener", where) for where in (OPENING - 1, OPENING, OPENING + VERDICT_AND_PROOF - 1)],
    ],
)
def test_a_bit_flipped_in_the_handshake_ends_it(who: str, where: int) -> None:
    """In a nonce, in the claim or the verdict, in a proof."""

    def flip(speaker: str, offset: int, data: bytes) -> list[bytes]:
        changed = bytearray(data)
        if speaker == who and 0 <= where - offset < len(data):
            changed[where - offset] ^= 1
        return [bytes(changed)]

    with meeting(change=flip, within=2.0) as (mine, theirs, _):
        assert isinstance(mine, CommunicationError)
        assert isinstance(theirs, CommunicationError)


# Frames


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]],
        lambda data: [data[:10] + bytes([data[10] ^ 4]) + data[11:]],
        lambda data: [data, data],
        lambda data: [],
    ],
    ids=["payload changed", "mac changed", "repeated", "left out"],
)
def test_a_tampered_frame_ends_the_connection(change: Callable[[bytes], list[bytes]]) -> None:
    armed = [False]

    def tamper(who: str, _offset: int, data: bytes) -> list[bytes]:
        return change(data) if who == "dialer" and armed[0] else [data]

    with channels(change=tamper) as (mine, theirs, wire):
        mine.send({"n": 0})
        assert theirs.receive(SOON) == {"n": 0}
        armed[0], before = True, len(wire.said["dialer"])
        mine.send({"n": 1})
        while len(wire.said["dialer"]) == before:  # it is on its way, alone
            time.sleep(0.001)
        armed[0] = False
        mine.send({"n": 2})
        with pytest.raises(AuthenticationError, match="changed, repeated or left out"):
            receive_until_it_fails(theirs)


def receive_until_it_fails(channel: ControlChannel) -> None:
    while True:
        assert channel.receive(SOON) == {"n": 1}


def test_a_frame_means_nothing_on_another_connection_or_in_the_other_direction() -> None:
    """Each would be the next one there, by its number."""
    with channels() as (mine, theirs, wire):
        mine.send({"run": "this"})
        theirs.receive(SOON)
        recorded = wire.said["dialer"][-1]
        wire.tell("dialer", recorded)
        with pytest.raises(AuthenticationError):
            mine.receive(SOON)
    with channels() as (_, theirs, wire):
        wire.tell("listener", recorded)
        with pytest.raises(AuthenticationError):
            theirs.receive(SOON)


def test_a_frame_that_is_too_large_is_neither_sent_nor_read(monkeypatch) -> None:
    with channels() as (mine, theirs, wire):
        monkeypatch.setattr(control, "MAXIMAL_FRAME_BYTES", 1000)
        with pytest.raises(InvalidArgumentError, match="1000 bytes"):
            mine.send({"text": "x" * 2000})
        wire.tell("listener", struct.pack("!I32s", 2**31, b"m" * 32))
        with pytest.raises(AuthenticationError, match="2147483648 bytes"):
            theirs.receive(SOON)


def test_receiving_waits_no_longer_than_it_is_told_and_not_past_the_end() -> None:
    with channels() as (mine, theirs, _):
        with pytest.raises(CommunicationTimeoutError, match=r"worker 3 at 10\.0\.0\.7:2222 did not answer"):
            mine.receive(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(theirs.receive)
            mine.hang_up()
            with pytest.raises(PeerUnavailableError, match=r"the process at 10\.0\.0\.1:99 is closed"):
                waiting.result(SOON)
        with pytest.raises(PeerUnavailableError):
            mine.send({})


# Dialing


def test_dialing_where_nobody_listens_says_so() -> None:
    with pytest.raises(PeerUnavailableError, match=r"worker 3 at 127.0.0.1:\d+: nothing listens there"):
        connect(free_address(), Task("worker", 3))
    with pytest.raises(PeerUnavailableError, match=r"worker 3 at no\.such\.host\.invalid:1"):
        connect("no.such.host.invalid:1", Task("worker", 3))


def test_a_socket_that_connected_to_itself_is_no_answer(monkeypatch) -> None:
    address = free_address()
    where = ("127.0.0.1", int(address.rpartition(":")[2]))

    def connect_to_itself(_address: Any, _timeout: float) -> socket.socket:
        sock = socket.socket()
        sock.bind(where)
        sock.connect(where)  # a simultaneous open with itself
        return sock

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    with pytest.raises(PeerUnavailableError, match="nothing listens there"):
        connect(address, Task("worker", 3))
    with socket.socket() as afterwards:
        afterwards.bind(where)  # free at once


# Listening


@contextmanager
def listening(log: Log, handshake_seconds: float = SOON, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Who arrives, and who is refused, is in the log."""

    def on_channel(channel: ControlChannel, task: Task) -> None:
        log.add("arrived", task)
        channel.send({"you": str(task)})
        with pytest.raises(PeerUnavailableError):
            channel.receive()

    def on_refused(error: Exception) -> None:
        log.add("refused", type(error))

    port = ControlListener(
        address, KEY, WORKER, on_channel=on_channel, on_refused=on_refused, handshake_seconds=handshake_seconds
    )
    port.start()
    try:
        yield port.address
    finally:
        port.close()
        port.close()


def check_that_it_serves(address: str) -> None:
    with closing(connect(address, Task("worker", 3))) as sock:
        met = as_dialer(sock)
        assert isinstance(met, tuple), met
        assert met[1] == WORKER.task
        assert met[0].receive(SOON) == {"you": "chief 0"}


def test_a_connection_that_does_not_prove_itself_in_time_is_dropped_however_slowly_it_speaks() -> None:
    log = Log()
    with listening(log, handshake_seconds=0.2) as address, closing(connect(address, "slow")) as slow:
        heard = slow.recv(1000)
        check_that_it_serves(address)  # meanwhile
        with suppress(OSError):
            for byte in opening(b"n"):
                slow.sendall(bytes([byte]))
                time.sleep(0.02)  # not an order: the pace that the deadline has to cut short
        log.wait_for("refused", CommunicationTimeoutError)
        assert len(heard) == OPENING
        check_that_it_serves(address)


def test_many_silent_connections_make_room_for_honest_ones(monkeypatch) -> None:
    monkeypatch.setattr(listener, "MAXIMAL_STRANGERS", 4)
    log = Log()
    with listening(log) as address:
        silent = [connect(address, "silent") for _ in range(10)]
        check_that_it_serves(address)
        log.wait_for("refused", times=6)
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("address", ["no.such.host.invalid:1", "192.0.2.1:0"])
def test_a_host_that_is_not_here_names_the_task_and_the_address(address: str) -> None:
    with (
        pytest.raises(ClusterConfigError, match=f"worker 3 cannot listen on {address}"),
        listening(Log(), address=address),
    ):
        pass


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed in /proc")
def test_a_forked_child_keeps_neither_the_port_nor_the_connection() -> None:
    earlier = open_sockets()
    with listening(Log()) as address, closing(connect(address, "worker 3")) as sock:
        met = as_dialer(sock)
        assert isinstance(met, tuple), met
        assert met[0].receive(SOON) == {"you": "chief 0"}
        opened = open_sockets() - earlier
        assert len(opened) >= 3, "it listens, and has both ends"
        child = os.fork()
        if child == 0:  # pragma: no cover
            os._exit(len(open_sockets() & opened))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def open_sockets() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of this very listing
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {target for target in found if target.startswith("socket:")}


def test_complaints_are_few() -> None:
    now, lines = [0.0], []
    complaints = Complaints(lines.append, clock=lambda: now[0])
    for number in range(1000):
        complaints.add(f"stranger {number}")
    assert lines[:LINES_PER_INTERVAL] == [f"stranger {number}" for number in range(LINES_PER_INTERVAL)]
    assert lines[LINES_PER_INTERVAL:] == [f"more of the like is not reported for up to {INTERVAL_SECONDS:g} s."]
    now[0] += INTERVAL_SECONDS + 1
    complaints.add("another")
    assert lines[-1] == "another"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
def test_a_connection_outlives_the_longest_silence_that_a_process_is_allowed() -> None:
    with socket.socket() as near:
        control.keep_alive(near)
        limit = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        idle = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        interval = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
    # The last byte came up to a probe's round before the silence began.
    assert limit > SERVER_DEADLINE_SECONDS + idle + interval
