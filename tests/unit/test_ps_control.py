"""Control connections: who gets in, what a stranger learns, and what happens to messages that were tampered with."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from torchstrat.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerUnavailableError,
    TorchstratError,
    VersionMismatchError,
)
from torchstrat.parameter_server.meeting import control, handshake, listener
from torchstrat.parameter_server.meeting.complaints import INTERVAL_SECONDS, LINES_PER_INTERVAL, Complaints
from torchstrat.parameter_server.meeting.control import ControlChannel, connect, local_host_towards
from torchstrat.parameter_server.meeting.handshake import Introduction, Side, shake_hands
from torchstrat.parameter_server.meeting.listener import ControlListener
from torchstrat.parameter_server.meeting.secret import derive_key, load_secret, new_secret
from torchstrat.parameter_server.meeting.versions import Versions, local_versions
from torchstrat.parameter_server.membership import SERVER_DEADLINE_SECONDS
from torchstrat.parameter_server.tasks import Task

VERSIONS = Versions("0.1.0", "2.13.0", "3.11")
CHIEF = Introduction(Task("chief", 0), VERSIONS)
WORKER = Introduction(Task("worker", 3), VERSIONS)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SOON = 30.0
OPENING, CLAIM_AND_PROOF, VERDICT_AND_PROOF = handshake._OPENING.size, 64, 33

Attempt = tuple[ControlChannel, Task] | Exception


def attempt(sock: socket.socket, side: Side, key: bytes, me: Introduction, other: str, within: float = SOON) -> Attempt:
    try:
        return shake_hands(sock, side, key, me, other=other, timeout_seconds=within)
    except Exception as error:
        sock.close()  # as the callers do
        return error


def both(dialer_key: bytes, listener_key: bytes, dialer: Introduction, task: Introduction) -> tuple[Attempt, Attempt]:
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(attempt, right, Side.LISTENER, listener_key, task, "the process at 10.0.0.1:99")
        mine = attempt(left, Side.DIALER, dialer_key, dialer, "worker 3 at 10.0.0.7:2222")
        return mine, theirs.result(SOON)


@contextmanager
def channels() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    mine, theirs = both(KEY, KEY, CHIEF, WORKER)
    assert isinstance(mine, tuple), mine
    assert isinstance(theirs, tuple), theirs
    assert (mine[1], theirs[1]) == (WORKER.task, CHIEF.task)
    with closing(mine[0]), closing(theirs[0]):
        yield mine[0], theirs[0]


# Secrets


def test_a_secret_comes_from_the_argument_then_the_variable_then_the_file(tmp_path) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 40 + "\n")
    file.chmod(0o600)
    assert load_secret({"TORCHSTRAT_SECRET": "v" * 40}, secret="a" * 40) == b"a" * 40
    assert load_secret({"TORCHSTRAT_SECRET": "v" * 40}) == b"v" * 40
    assert load_secret({"TORCHSTRAT_SECRET_FILE": str(file)}) == b"f" * 40
    assert load_secret({"TORCHSTRAT_SECRET": "f" * 40, "TORCHSTRAT_SECRET_FILE": str(file)}) == b"f" * 40
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


def test_the_group_may_read_the_file(tmp_path) -> None:
    file = tmp_path / "secret"
    file.write_text("g" * 32)
    file.chmod(0o440)
    assert load_secret({"TORCHSTRAT_SECRET_FILE": str(file)}) == b"g" * 32


def test_purposes_have_keys_of_their_own() -> None:
    assert derive_key(b"s" * 32, "control") == derive_key(b"s" * 32, "control")
    assert len({derive_key(b"s" * 32, "control"), derive_key(b"s" * 32, "rpc"), derive_key(b"t" * 32, "control")}) == 3


# The handshake


def test_messages_travel_both_ways_between_those_who_know_the_secret() -> None:
    with channels() as (mine, theirs):
        for number in range(50):
            mine.send({"number": number, "text": "ä" * number})
        theirs.send({"from": "the other side"})
        assert [theirs.receive(SOON)["number"] for _ in range(50)] == list(range(50))
        assert mine.receive(SOON) == {"from": "the other side"}


def test_a_wrong_secret_is_an_error_on_both_sides_that_names_the_other() -> None:
    mine, theirs = both(KEY, OTHER_KEY, CHIEF, WORKER)
    assert isinstance(mine, AuthenticationError)
    assert isinstance(theirs, AuthenticationError)
    assert "worker 3 at 10.0.0.7:2222 does not know this cluster's secret" in str(mine)
    assert "the process at 10.0.0.1:99, which calls itself chief 0, does not know this cluster's secret" in str(theirs)
    assert "TORCHSTRAT_SECRET" in str(mine)


@pytest.mark.parametrize(
    "other",
    [
        Versions("0.2.0", "2.13.0", "3.11"),
        Versions("0.1.0", "2.9.0", "3.11"),
        Versions("0.1.0", "2.13.0", "3.12"),
    ],
    ids=["torchstrat", "torch", "python"],
)
def test_other_versions_are_an_error_on_both_sides_that_names_both(other: Versions) -> None:
    for error in both(KEY, KEY, CHIEF, Introduction(WORKER.task, other)):
        assert isinstance(error, VersionMismatchError)
        for part in ("worker 3", "chief 0", str(VERSIONS), str(other)):
            assert part in str(error)


def test_another_protocol_version_is_an_error_on_both_sides(monkeypatch) -> None:
    left, right = socket.socketpair()
    with closing(left), closing(right):
        right.sendall(handshake._OPENING.pack(handshake._MAGIC, 2, b"n" * 32))
        with pytest.raises(VersionMismatchError, match="speaks version 2 of torchstrat's control protocol"):
            shake_hands(left, Side.DIALER, KEY, CHIEF, other="worker 3")


def test_local_versions_leave_out_the_build() -> None:
    versions = local_versions()
    assert "+" not in versions.torch
    assert versions.python.count(".") == 1


class Tap:
    """Stands between two processes, keeps what each says, and may change it.

    ``change(who, offset, data)``: what to pass on of the ``data`` that starts at that byte of what ``who`` says.
    """

    def __init__(self, change: Callable[[str, int, bytes], list[bytes]] | None = None) -> None:
        self.dialer, near = socket.socketpair()
        far, self.listener = socket.socketpair()
        self.said: dict[str, bytes] = {"dialer": b"", "listener": b""}
        self._change = change or (lambda who, offset, data: [data])
        self._ends = (near, far)
        self._threads = [
            threading.Thread(target=self._pass_on, args=("dialer", near, far)),
            threading.Thread(target=self._pass_on, args=("listener", far, near)),
        ]
        for thread in self._threads:
            thread.start()

    def tell_listener(self, data: bytes) -> None:
        """Say something that the dialer did not."""
        self._ends[1].sendall(data)

    def _pass_on(self, who: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                offset = len(self.said[who])
                self.said[who] += data
                for part in self._change(who, offset, data):
                    sink.sendall(part)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (*self._ends, self.dialer, self.listener):
            control.shut_down(end)
        for thread in self._threads:
            thread.join()
        for end in (*self._ends, self.dialer, self.listener):
            end.close()


def through(tap: Tap, talk: Callable[[ControlChannel, ControlChannel], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(attempt, tap.listener, Side.LISTENER, KEY, WORKER, "the dialer")
        mine = attempt(tap.dialer, Side.DIALER, KEY, CHIEF, "the listener")
        listening = theirs.result(SOON)
    assert isinstance(mine, tuple), mine
    assert isinstance(listening, tuple), listening
    talk(mine[0], listening[0])


def test_the_secret_never_travels_and_nothing_is_said_twice() -> None:
    def say_hello(mine: ControlChannel, theirs: ControlChannel) -> None:
        mine.send({"hello": 1})
        assert theirs.receive(SOON) == {"hello": 1}

    said = []
    for _ in range(2):
        with closing(Tap()) as tap:
            through(tap, say_hello)
        said.append(tap.said["dialer"] + tap.said["listener"])
    assert KEY not in said[0]
    nonces_proofs = {one[start : start + 32] for one in said for start in (20, 52, 84)}
    assert len(nonces_proofs) >= 4


def test_a_stranger_who_connects_gets_random_bytes_only() -> None:
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, closing(left):
        theirs = pool.submit(attempt, right, Side.LISTENER, KEY, WORKER, "a stranger")
        left.sendall(handshake._OPENING.pack(handshake._MAGIC, handshake.PROTOCOL, b"n" * 32) + b"x" * 64)
        assert isinstance(theirs.result(SOON), AuthenticationError)
        heard = b""
        while part := left.recv(1000):
            heard += part
    assert len(heard) == handshake._OPENING.size + 1
    assert heard.endswith(handshake._REFUSED)


def test_a_proof_reflected_to_its_sender_proves_nothing() -> None:
    """The stranger answers a dialer with its own words, and relays a dialer's proof as a listener's."""
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, closing(right):
        mine = pool.submit(attempt, left, Side.DIALER, KEY, CHIEF, "a mirror")
        opening = right.recv(1000)
        right.sendall(opening)
        claim_and_proof = right.recv(1000)
        right.sendall(handshake._ACCEPTED + claim_and_proof[32:])
        assert isinstance(mine.result(SOON), AuthenticationError)


def test_a_proof_for_one_listener_is_none_for_another() -> None:
    """A stranger is dialed by an honest process, and shows what it was shown to another one, as that process."""
    left, right = socket.socketpair()
    near, far = socket.socketpair()
    with ThreadPoolExecutor(2) as pool, closing(right), closing(near):
        honest = pool.submit(attempt, left, Side.DIALER, KEY, CHIEF, "a stranger")
        victim = pool.submit(attempt, far, Side.LISTENER, KEY, WORKER, "a stranger")
        opening = right.recv(1000)
        near.sendall(handshake._OPENING.pack(handshake._MAGIC, handshake.PROTOCOL, b"m" * 32))
        right.sendall(near.recv(1000))  # the victim's nonce, but the dialer proves itself for its own one
        near.sendall(right.recv(1000))
        assert opening != b""
        assert isinstance(victim.result(SOON), AuthenticationError)
        right.sendall(near.recv(1000))
        assert isinstance(honest.result(SOON), AuthenticationError)


@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("dialer", OPENING - 1),
        ("dialer", OPENING),
        ("dialer", OPENING + CLAIM_AND_PROOF - 1),
        ("listener", OPENING - 1),
        ("listener", OPENING),
        ("listener", OPENING + VERDICT_AND_PROOF - 1),
    ],
)
def test_a_bit_flipped_in_the_handshake_ends_it(who: str, where: int) -> None:
    """In a nonce, in the claim or the verdict, in a proof."""

    def flip(speaker: str, offset: int, data: bytes) -> list[bytes]:
        if speaker != who or not 0 <= where - offset < len(data):
            return [data]
        changed = bytearray(data)
        changed[where - offset] ^= 1
        return [bytes(changed)]

    with closing(Tap(flip)) as tap, ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(attempt, tap.listener, Side.LISTENER, KEY, WORKER, "the dialer", 2.0)
        mine = attempt(tap.dialer, Side.DIALER, KEY, CHIEF, "the listener", 2.0)
        assert isinstance(mine, CommunicationError)
        assert isinstance(theirs.result(SOON), CommunicationError)


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
    armed = threading.Event()

    def tamper(who: str, _offset: int, data: bytes) -> list[bytes]:
        if who == "dialer" and armed.is_set():
            armed.clear()
            return change(data)
        return [data]

    def talk(mine: ControlChannel, theirs: ControlChannel) -> None:
        mine.send({"n": 0})
        assert theirs.receive(SOON) == {"n": 0}
        armed.set()
        mine.send({"n": 1})
        while armed.is_set():
            time.sleep(0.001)
        mine.send({"n": 2})
        errors = []
        while not errors:
            try:
                assert theirs.receive(SOON) == {"n": 1}
            except AuthenticationError as error:
                errors.append(str(error))
        assert "changed, repeated or left out" in errors[0]

    with closing(Tap(tamper)) as tap:
        through(tap, talk)


def test_frames_of_one_connection_mean_nothing_on_another() -> None:
    recorded = b""

    def record(mine: ControlChannel, theirs: ControlChannel) -> None:
        mine.send({"run": "this"})
        theirs.receive(SOON)

    with closing(Tap()) as tap:
        through(tap, record)
        recorded = tap.said["dialer"][OPENING + CLAIM_AND_PROOF :]

    with closing(Tap()) as tap:

        def replay(mine: ControlChannel, theirs: ControlChannel) -> None:
            tap.tell_listener(recorded)
            with pytest.raises(AuthenticationError):
                theirs.receive(SOON)

        through(tap, replay)


def test_the_two_directions_have_different_keys() -> None:
    with channels() as (mine, theirs):
        assert mine._keys.sending == theirs._keys.receiving
        assert mine._keys.sending != mine._keys.receiving


def test_a_frame_that_is_too_large_is_neither_sent_nor_read(monkeypatch) -> None:
    with channels() as (mine, theirs):
        monkeypatch.setattr(control, "MAXIMAL_FRAME_BYTES", 1000)
        with pytest.raises(InvalidArgumentError, match="1000 bytes"):
            mine.send({"text": "x" * 2000})
        mine._sock.sendall(struct.pack("!I32s", 2**31, b"m" * 32))
        with pytest.raises(AuthenticationError, match="2147483648 bytes"):
            theirs.receive(SOON)


def test_receiving_waits_no_longer_than_it_is_told() -> None:
    with channels() as (mine, _):
        with pytest.raises(CommunicationTimeoutError, match=r"worker 3 at 10\.0\.0\.7:2222 did not answer"):
            mine.receive(0.01)


def test_a_connection_that_ends_is_noticed_by_whoever_receives() -> None:
    with channels() as (mine, theirs):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(theirs.receive)
            mine.hang_up()
            with pytest.raises(PeerUnavailableError, match=r"the process at 10\.0\.0\.1:99 is closed"):
                waiting.result(SOON)
        with pytest.raises(PeerUnavailableError):
            mine.send({})


# Dialing


def free_port() -> int:
    """Below the range from which the system gives out ports by itself, so that nobody else is given it."""
    for port in random.Random().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port")


def test_dialing_where_nobody_listens_says_so() -> None:
    with pytest.raises(PeerUnavailableError, match=r"worker 3 at 127.0.0.1:\d+: nothing listens there"):
        connect(f"127.0.0.1:{free_port()}", Task("worker", 3))
    with pytest.raises(PeerUnavailableError, match=r"worker 3 at no\.such\.host\.invalid:1"):
        connect("no.such.host.invalid:1", Task("worker", 3))


def test_a_socket_that_connected_to_itself_is_no_answer(monkeypatch) -> None:
    port = free_port()

    def connect_to_itself(_address: Any, _timeout: float) -> socket.socket:
        sock = socket.socket()
        sock.bind(("127.0.0.1", port))
        sock.connect(("127.0.0.1", port))  # a simultaneous open with itself
        return sock

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    with pytest.raises(PeerUnavailableError, match="nothing listens there"):
        connect(f"127.0.0.1:{port}", Task("worker", 3))
    with socket.socket() as afterwards:
        afterwards.bind(("127.0.0.1", port))  # free at once


def test_the_interface_towards_a_host() -> None:
    assert local_host_towards("127.0.0.1", 80) == "127.0.0.1"


# Listening


class Guests:
    """What a listener was asked for."""

    def __init__(self) -> None:
        self.refused: list[TorchstratError] = []
        self.arrived: list[Task] = []
        self.changed = threading.Condition()

    def on_channel(self, channel: ControlChannel, task: Task) -> None:
        with self.changed:
            self.arrived.append(task)
            self.changed.notify_all()
        channel.send({"you": str(task)})
        with pytest.raises(PeerUnavailableError):
            channel.receive()

    def on_refused(self, error: TorchstratError) -> None:
        with self.changed:
            self.refused.append(error)
            self.changed.notify_all()

    def wait_for_refusals(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.refused) >= count, SOON), self.refused


@contextmanager
def listening(guests: Guests, handshake_seconds: float = SOON, address: str = "127.0.0.1:0") -> Iterator[str]:
    port = ControlListener(
        address,
        KEY,
        WORKER,
        on_channel=guests.on_channel,
        on_refused=guests.on_refused,
        handshake_seconds=handshake_seconds,
    )
    port.start()
    try:
        yield port.address
    finally:
        port.close()
        port.close()


def check_that_it_serves(address: str) -> None:
    with closing(connect(address, Task("worker", 3))) as sock:
        channel, task = shake_hands(sock, Side.DIALER, KEY, CHIEF, other="worker 3", timeout_seconds=SOON)
        assert task == WORKER.task
        assert channel.receive(SOON) == {"you": "chief 0"}


def test_strangers_of_all_kinds_hold_up_nobody() -> None:
    guests = Guests()
    with listening(guests) as address, closing(connect(address, "silent")), closing(connect(address, "slow")) as slow:
        slow.sendall(handshake._MAGIC[:3])
        check_that_it_serves(address)
        assert guests.arrived == [CHIEF.task]


def test_a_connection_that_does_not_prove_itself_in_time_is_dropped_however_slowly_it_speaks() -> None:
    guests = Guests()
    with listening(guests, handshake_seconds=0.2) as address, closing(connect(address, "slow")) as slow:
        heard = slow.recv(1000)
        try:
            for byte in handshake._OPENING.pack(handshake._MAGIC, handshake.PROTOCOL, b"n" * 32):
                slow.sendall(bytes([byte]))
                time.sleep(0.02)  # not an order: the pace that the deadline has to cut short
        except OSError:
            pass
        guests.wait_for_refusals(1)
        assert isinstance(guests.refused[0], CommunicationTimeoutError)
        assert len(heard) == handshake._OPENING.size
        check_that_it_serves(address)


def test_many_silent_connections_make_room_for_honest_ones(monkeypatch) -> None:
    monkeypatch.setattr(listener, "MAXIMAL_STRANGERS", 4)
    guests = Guests()
    with listening(guests) as address:
        silent = [connect(address, "silent") for _ in range(10)]
        check_that_it_serves(address)
        guests.wait_for_refusals(6)
        for sock in silent:
            sock.close()


def test_random_messages_crash_nothing_and_open_nothing() -> None:
    draw = random.Random(7)
    guests = Guests()
    with listening(guests) as address:
        host, port = address.split(":")
        for number in range(100):
            with socket.create_connection((host, int(port)), SOON) as sock:
                noise = draw.randbytes(draw.choice((1, 7, 52, 116, 200)))
                if number % 3 == 0:  # past the first check
                    noise = handshake._OPENING.pack(handshake._MAGIC, handshake.PROTOCOL, draw.randbytes(32)) + noise
                sock.sendall(noise)
        guests.wait_for_refusals(100)
        assert guests.arrived == []
        check_that_it_serves(address)


def test_a_port_in_use_names_the_task_and_the_address(monkeypatch) -> None:
    monkeypatch.setattr(listener, "BIND_SECONDS", 0.05)
    guests = Guests()
    with listening(guests) as address:
        with pytest.raises(ClusterConfigError, match=f"worker 3 cannot listen on {address}: another process uses"):
            with listening(guests, address=address):
                pass
    with listening(guests, address=address):
        silent = connect(address, "silent")
        assert silent.recv(1000)
    with closing(silent):  # the listener ended that connection, and the port remembers it: free at once all the same
        assert silent.recv(1000) == b""
    with listening(guests, address=address):
        check_that_it_serves(address)


@pytest.mark.parametrize("address", ["no.such.host.invalid:1", "192.0.2.1:0"])
def test_a_host_that_is_not_here_names_the_task_and_the_address(address: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"worker 3 cannot listen on {address}"):
        with listening(Guests(), address=address):
            pass


def test_a_forked_child_keeps_neither_the_port_nor_the_connection() -> None:
    guests = Guests()
    reader, writer = os.pipe()
    with listening(guests) as address, closing(connect(address, "worker 3")) as sock:
        channel, _ = shake_hands(sock, Side.DIALER, KEY, CHIEF, other="worker 3", timeout_seconds=SOON)
        before = channel.receive(SOON)
        inherited = [sock.fileno(), *(open_socket.fileno() for open_socket in control._open_sockets)]
        child = os.fork()
        if child == 0:  # pragma: no cover
            still_open = 0
            for descriptor in inherited:
                try:
                    os.fstat(descriptor)
                    still_open += 1
                except OSError:
                    pass
            os.write(writer, bytes([still_open]))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 1) == b"\0"
        assert before == {"you": "chief 0"}
    os.close(reader)
    os.close(writer)


def test_complaints_are_few() -> None:
    now, lines = [0.0], []
    complaints = Complaints(lines.append, clock=lambda: now[0])
    for number in range(1000):
        complaints.add(f"stranger {number}")
    assert lines[:LINES_PER_INTERVAL] == [f"stranger {number}" for number in range(LINES_PER_INTERVAL)]
    assert len(lines) == LINES_PER_INTERVAL + 1
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
