"""The processes of a cluster find each other, die, come back, and let nobody in. Real processes, real signals."""

from __future__ import annotations

import json
import random
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from tests.multiprocess.ps_programs import SOON, Program
from torchstrat.cluster_spec import ClusterSpec
from torchstrat.errors import AuthenticationError, CommunicationError, VersionMismatchError
from torchstrat.parameter_server.meeting.control import connect
from torchstrat.parameter_server.meeting.greeting import greet_task
from torchstrat.parameter_server.meeting.handshake import _MAGIC, _OPENING, PROTOCOL, Introduction, Side, shake_hands
from torchstrat.parameter_server.meeting.rendezvous import Rendezvous
from torchstrat.parameter_server.meeting.secret import derive_key
from torchstrat.parameter_server.meeting.versions import local_versions
from torchstrat.parameter_server.tasks import Peer, Task

SECRET, OTHER_SECRET = "s" * 32, "o" * 32
WORKER, SERVER = Task("worker", 0), Task("ps", 0)
COORDINATOR = Peer(Task("chief", 0), "c" * 32, "tcp://127.0.0.1:1", "this host", 1)


def free_address() -> str:
    """Below the range from which the system gives out ports by itself, so that nobody else is given it."""
    for port in random.Random().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return f"127.0.0.1:{port}"
    raise RuntimeError("no free port")


@contextmanager
def coordinating(spec: Mapping[str, Any], secret: str = SECRET) -> Iterator[tuple[Rendezvous, list[tuple[Any, ...]]]]:
    """A coordinator in this process, and what it was told."""
    told: list[tuple[Any, ...]] = []
    rendezvous = Rendezvous(
        ClusterSpec(spec),
        COORDINATOR,
        secret.encode(),
        on_joined=lambda peer, status: told.append(("joined", peer, dict(status), time.monotonic())),
        on_left=lambda peer, reason: told.append(("left", peer, reason, time.monotonic())),
    )
    rendezvous.start()
    try:
        yield rendezvous, told
    finally:
        rendezvous.close(finished=True)


@pytest.mark.parametrize("first", ["tasks", "coordinator"])
def test_they_may_be_started_in_any_order(first: str) -> None:
    spec = {"worker": [free_address()], "ps": [free_address()]}
    if first == "coordinator":
        with coordinating(spec) as (rendezvous, told):
            with (
                Program.task(spec, "worker", secret=SECRET) as worker,
                Program.task(spec, "ps", secret=SECRET) as server,
            ):
                rendezvous.wait_for([WORKER, SERVER], SOON)
                assert {peer.pid for _, peer, *_ in told} == {worker.pid, server.pid}
        return
    with Program.task(spec, "worker", secret=SECRET) as worker, Program.task(spec, "ps", secret=SECRET) as server:
        worker.wait_for_line(f"torchstrat: worker 0 listens on {spec['worker'][0]} (pid {worker.pid})\n")
        server.wait_for_line(f"torchstrat: ps 0 listens on {spec['ps'][0]} (pid {server.pid})\n")
        with coordinating(spec) as (rendezvous, _):
            rendezvous.wait_for([WORKER, SERVER], SOON)
        worker.wait_for("left", True)
        assert worker.is_alive, "it waits for the next job"


def test_a_worker_that_is_killed_and_started_again_is_found_at_once() -> None:
    spec = {"worker": [free_address(), free_address()]}
    with (
        coordinating(spec) as (rendezvous, told),
        Program.task(spec, "worker", 1, secret=SECRET),
        Program.task(spec, "worker", 0, secret=SECRET) as victim,
    ):
        rendezvous.wait_for([WORKER, Task("worker", 1)], SOON)
        killed_at = time.monotonic()
        victim.kill()
        with Program.task(spec, "worker", 0, secret=SECRET) as again:
            again.wait_for_line("worker 0 listens on")
            listened_at = time.monotonic()
            rendezvous.wait_for([WORKER], SOON)
            assert rendezvous.peers[WORKER].pid == again.pid
            noticed_at = next(event[3] for event in told if event[0] == "left")
            joined_at = told[-1][3]
            print(
                f"kill -9 noticed after {1000 * (noticed_at - killed_at):.0f} ms, "
                f"joined {1000 * (joined_at - listened_at):.0f} ms after listening, "
                f"{joined_at - again.started_at:.2f} s after its start"
            )
            assert noticed_at - killed_at < 2.0
            assert joined_at - listened_at < 2.0
            kinds = [(kind, peer.task.index) for kind, peer, *_ in told]
            assert sorted(kinds[:2]) == [("joined", 0), ("joined", 1)]
            assert kinds[2:] == [("left", 0), ("joined", 0)], "the other worker noticed nothing"
            first, second = (peer for kind, peer, *_ in told if kind == "joined" and peer.task == WORKER)
            assert first.incarnation != second.incarnation


def test_a_coordinator_that_is_killed_finds_its_server_as_it_was() -> None:
    spec = {"ps": [free_address()]}
    with Program.task(spec, "ps", secret=SECRET) as server:
        with Program.coordinator(spec, secret=SECRET) as first:
            before = first.wait_for("joined")
            first.wait_for("all are here")
            first.kill()
        server.wait_for("left", False)
        server.wait_for_line("it keeps its state and waits 600 s")
        with Program.coordinator(spec, secret=SECRET) as second:
            assert second.wait_for("joined") == before
            server.wait_for("arrived", second.pid)
            assert second.wait() == 0
        server.wait_for("left", True)
        assert server.is_alive


def test_a_second_coordinator_hears_the_name_of_the_first() -> None:
    spec = {"ps": [free_address()]}
    with Program.task(spec, "ps", secret=SECRET), Program.coordinator(spec, secret=SECRET) as first:
        first.wait_for("joined")
        with coordinating(spec) as (rendezvous, told):
            with pytest.raises(CommunicationError, match=rf"serves another coordinator, chief 0 \(pid {first.pid} on"):
                rendezvous.wait_for([SERVER], SOON)
            assert told == []
            first.kill()
            rendezvous.wait_for([SERVER], SOON)


def test_a_server_that_nobody_comes_back_to_ends_with_a_message() -> None:
    spec = {"ps": [free_address()]}
    with Program.task(spec, "ps", secret=SECRET, orphan_timeout_seconds=0.5) as server:
        with Program.coordinator(spec, secret=SECRET) as coordinator:
            coordinator.wait_for("joined")
            coordinator.kill()
        assert server.wait() == 69
        assert "ps 0 ends (code 69): chief 0 " in server.stderr
        assert "was lost 0.5 s ago, and neither it nor another coordinator has come." in server.stderr
        assert [event[0] for event in server.events] == ["arrived", "left", "closed"]


def test_sigterm_drains_and_ends_with_0() -> None:
    spec = {"worker": [free_address()]}
    with coordinating(spec) as (rendezvous, told):
        with Program.task(spec, "worker", secret=SECRET, drain_timeout_seconds=5.0) as worker:
            rendezvous.wait_for([WORKER], SOON)
            worker.terminate()
            assert worker.wait() == 0
            assert worker.events[-2:] == [["drain", 5.0], ["closed"]]
            assert told[-1][0] == "left"
            assert "SIGTERM" in told[-1][2]


def test_a_thread_that_hangs_does_not_hold_a_process_that_was_told_to_end() -> None:
    spec = {"worker": [free_address()]}
    with Program.task(spec, "worker", secret=SECRET, stuck=True) as worker:
        worker.wait_for_line("worker 0 listens on")
        worker.terminate()
        assert worker.wait() == 0
        assert worker.events[-1] == ["closed"]


def test_a_worker_that_was_stopped_for_too_long_comes_back_as_another_by_itself() -> None:
    spec = {"worker": [free_address()]}
    with coordinating(spec) as (rendezvous, told), Program.task(spec, "worker", secret=SECRET) as worker:
        rendezvous.wait_for([WORKER], SOON)
        before = rendezvous.peers[WORKER]
        worker.stop()
        rendezvous.give_up(before, "it was silent for 3 s")
        worker.go_on()
        worker.wait_for_line("worker 0 starts again: its cluster gave this process")
        worker.wait_for("arrived", 1, times=2)
        rendezvous.wait_for([WORKER], SOON)
        after = rendezvous.peers[WORKER]
        assert after.pid == worker.pid == before.pid
        assert after.incarnation != before.incarnation
        assert told[0][2] != told[-1][2], "its memory is new"


def test_a_wrong_secret_is_named_on_both_sides() -> None:
    spec = {"worker": [free_address()]}
    with Program.task(spec, "worker", secret=OTHER_SECRET) as worker, coordinating(spec) as (rendezvous, told):
        with pytest.raises(AuthenticationError, match=f"worker 0 at {spec['worker'][0]} does not know this cluster's"):
            rendezvous.wait_for([WORKER], SOON)
        worker.wait_for_line("worker 0 refused a connection: the process at 127.0.0.1:")
        worker.wait_for_line("which calls itself chief 0, does not know this cluster's secret")
        assert told == []
        assert worker.events == []


def test_other_versions_are_named_on_both_sides() -> None:
    spec = {"worker": [free_address()]}
    with Program.task(spec, "worker", secret=SECRET, torch="1.0.0") as worker, coordinating(spec) as (rendezvous, _):
        with pytest.raises(VersionMismatchError, match=r"worker 0 .*torch 1\.0\.0.*chief 0"):
            rendezvous.wait_for([WORKER], SOON)
        worker.wait_for_line("torch 1.0.0")
        assert worker.events == []


# The command


def command(*arguments: str, **env: str) -> Program:
    return Program(sys.executable, "-m", "torchstrat.server", *arguments, env=env)


CLUSTER = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--cluster", json.dumps(CLUSTER), "--job", "ps", "--index", "0"], {}, "there is no cluster secret"),
        ([], {"TORCHSTRAT_SECRET": SECRET}, "the tfconfig environment is empty. Give --cluster, --job and --index"),
        (["--cluster", "{"], {"TORCHSTRAT_SECRET": SECRET}, "--cluster '{' holds no cluster"),
        (
            [],
            {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "chief"}}), "TORCHSTRAT_SECRET": SECRET},
            "which task is this? job 'chief', index None",
        ),
    ],
    ids=["no secret", "no cluster", "no json", "no index"],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments, env, says) -> None:
    with command(*arguments, **env) as server:
        assert server.wait() == 2
        assert says in server.stderr
        assert server.stderr.startswith("torchstrat: ")
        assert server.stderr.count("\n") == 1


COORDINATOR_OF_REAL_TASKS = textwrap.dedent(
    """
    import json, sys
    from torchstrat.cluster_spec import ClusterSpec
    from torchstrat.parameter_server.meeting.rendezvous import Rendezvous
    from torchstrat.parameter_server.meeting.secret import load_secret
    from torchstrat.parameter_server.tasks import Task
    from torchstrat.parameter_server.transport import RpcEndpoint

    spec = ClusterSpec(json.loads(sys.argv[1]))
    endpoint = RpcEndpoint(Task("chief", 0), secret=load_secret())
    rendezvous = Rendezvous(
        spec, endpoint.peer, load_secret(), add_peer=endpoint.add_peer,
        on_joined=lambda peer, status: endpoint.watch(peer, lambda peer, reason: None),
        on_left=lambda peer, reason: print(json.dumps(["left", str(peer.task), reason]), flush=True),
    )
    rendezvous.start()
    rendezvous.wait_for([Task("ps", 0), Task("worker", 0)], 90)
    print(json.dumps(["joined", {str(task): peer.pid for task, peer in rendezvous.peers.items()}]), flush=True)
    sys.stdin.read()
    rendezvous.close(finished=True)
    endpoint.close()
    """
)


def test_the_command_runs_both_roles_over_the_real_transport() -> None:
    spec = {"worker": [free_address()], "ps": [free_address()]}
    described = json.dumps({"cluster": spec, "task": {"type": "worker", "index": 0}})
    with (
        command("--exit-when-finished", TF_CONFIG=described, TORCHSTRAT_SECRET=SECRET) as worker,
        command("--cluster", json.dumps(spec), "--job", "ps", "--index", "0", TORCHSTRAT_SECRET=SECRET) as server,
        Program(
            sys.executable, "-c", COORDINATOR_OF_REAL_TASKS, json.dumps(spec), env={"TORCHSTRAT_SECRET": SECRET}
        ) as coordinator,
    ):
        pids = coordinator.wait_for("joined")[1]
        assert pids == {"worker 0": worker.pid, "ps 0": server.pid}
        server.terminate()
        assert server.wait() == 0
        assert "SIGTERM" in coordinator.wait_for("left", "ps 0")[2]
        coordinator.wait()
        assert worker.wait() == 0
        assert "worker 0 ends: the coordinator has finished" in worker.stderr


# Strangers


def send_and_hang_up(address: str, data: bytes) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), SOON) as sock, suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):  # until it has been dealt with
            pass


def test_ten_thousand_random_messages_change_nothing() -> None:
    draw = random.Random(20)
    spec = {"ps": [free_address()]}
    with Program.task(spec, "ps", secret=SECRET) as server, coordinating(spec) as (rendezvous, told):
        rendezvous.wait_for([SERVER], SOON)
        for number in range(10_000):
            noise = draw.randbytes(draw.choice((1, 30, 52, 116, 400)))
            if number % 2:  # past the first check
                noise = _OPENING.pack(_MAGIC, PROTOCOL, draw.randbytes(32)) + noise
            send_and_hang_up(spec["ps"][0], noise)
        assert [event[0] for event in told] == ["joined"], "the coordinator noticed nothing"
        assert [event[0] for event in server.events] == ["arrived"]
        assert len(server.stderr.splitlines()) < 50
    assert "Traceback" not in server.stderr


class Recorder:
    """Stands in front of a task's port and keeps what its coordinator says, message by message."""

    def __init__(self, address: str) -> None:
        self._target = address
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.messages: list[bytes] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        inner, _ = self._listening.accept()
        host, port = self._target.split(":")
        with inner, socket.create_connection((host, int(port))) as outer:
            back = threading.Thread(target=self._pass_back, args=(outer, inner))
            back.start()
            with suppress(OSError):
                while data := inner.recv(1 << 16):
                    self.messages.append(data)
                    outer.sendall(data)
            with suppress(OSError):
                outer.shutdown(socket.SHUT_RDWR)
            back.join()

    @staticmethod
    def _pass_back(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def close(self) -> None:
        self._thread.join()
        self._listening.close()


def recorded_session(address: str, frames: int) -> list[bytes]:
    """What an honest coordinator said to the task at ``address``: opening, proof, and ``frames`` answered messages."""
    with closing(Recorder(address)) as recorder:
        sock = connect(recorder.address, SERVER)
        me = Introduction(COORDINATOR.task, local_versions())
        channel, _ = shake_hands(sock, Side.DIALER, derive_key(SECRET.encode(), "control"), me, other="ps 0")
        greet_task(channel, COORDINATOR, given_up=lambda peer: None, add_peer=None)
        for _ in range(frames):
            channel.send({"type": "ping"})
            assert channel.receive(SOON) == {"type": "pong"}
        channel.close()
    return recorder.messages


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_a_thousand_recorded_messages_are_worth_nothing_again() -> None:
    draw = random.Random(21)
    spec = {"ps": [free_address()]}
    address = spec["ps"][0]

    def replay_everything(messages: list[bytes]) -> None:
        session = b"".join(messages)
        for message in messages:  # alone; after the recorded beginning; both with a bit flipped
            send_and_hang_up(address, message)
            send_and_hang_up(address, messages[0] + messages[1] + message)
            send_and_hang_up(address, flipped(messages[0] + messages[1] + message, draw))
        for _ in range(20):
            send_and_hang_up(address, session)
            send_and_hang_up(address, flipped(session, draw))

    with Program.task(spec, "ps", secret=SECRET) as server:
        server.wait_for_line("ps 0 listens on")
        messages = recorded_session(address, 1000)
        assert len(messages) >= 1000
        server.wait_for("left", False)
        replay_everything(messages)
        assert [event[0] for event in server.events] == ["arrived", "left"]
        server.kill()
    with Program.task(spec, "ps", secret=SECRET) as server:
        server.wait_for_line("ps 0 listens on")
        replay_everything(messages)
        assert server.events == []
        with coordinating(spec) as (rendezvous, _):
            rendezvous.wait_for([SERVER], SOON)
        assert "Traceback" not in server.stderr
