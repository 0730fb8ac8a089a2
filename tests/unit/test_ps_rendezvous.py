"""A coordinator and its tasks find each other, part, and find each other again. All in one process, on loopback."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import pytest

from tests.support.ps_meeting import (
    OTHER_SECRET,
    SECRET,
    SERVER,
    SOON,
    WORKER,
    Cast,
    Coordinator,
    Log,
    Wire,
    dial,
    flipped,
    free_address,
    new_peer,
    wire_to,
)
from torchstrat.cluster_resolver import ClusterSpec
from torchstrat.distributed.cluster import host_and_port
from torchstrat.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerUnavailableError,
    VersionMismatchError,
)
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.membership import control_channel, handshake, membership, task_host
from torchstrat.parameter_server.membership.cluster_checks import (
    INTERVAL_SECONDS,
    LINES_PER_INTERVAL,
    Complaints,
    check_parameter_server_cluster,
    split_address,
)
from torchstrat.parameter_server.membership.control_channel import ControlChannel, EventThread, connect
from torchstrat.parameter_server.membership.handshake import (
    ControlListener,
    Introduction,
    Side,
    Versions,
    greet_task,
    local_versions,
    shake_hands,
)
from torchstrat.parameter_server.membership.membership import SERVER_DEADLINE_SECONDS
from torchstrat.parameter_server.membership.task_host import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_GIVEN_UP,
    EXIT_REFUSED,
    TaskHost,
)
from torchstrat.parameter_server.transport.auth import derive_key, load_secret, new_secret

EXTRA = Task("worker", 7)
MINE = local_versions()


@pytest.fixture
def cast() -> Iterator[Cast]:
    with Cast() as everybody:
        yield everybody


# Finding each other


@pytest.mark.parametrize("first", ["task", "coordinator"])
def test_they_may_be_started_in_any_order(first: str, cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    if first == "task":
        task, coordinator = cast.task(spec), cast.coordinator(spec)
    else:
        coordinator = cast.coordinator(spec)
        with pytest.raises(CommunicationTimeoutError):
            coordinator.wait_for([WORKER], 0.05)
        task = cast.task(spec)
    coordinator.wait_for([WORKER], SOON)
    assert coordinator.log.wait_for("joined") == ("joined", task.peer, {"holds": ["a table"]})
    assert coordinator.peers == {WORKER: task.peer}
    assert task.address == spec["worker"][0]


def test_each_side_can_be_called_before_the_other_hears_of_it(cast: Cast) -> None:
    """The task knows the coordinator, the coordinator the task, the service is told, then the task has joined."""
    spec, log = {"worker": [free_address()]}, Log()
    task = cast.task(spec)
    task.service.log = log
    coordinator = cast.coordinator(
        spec,
        add_peer=lambda _me, peer: log.add("added", peer),
        on_joined=lambda _me, peer, _status: log.add("joined", peer),
    )
    log.wait_for("joined")
    assert log.kinds() == ["status", "added", "arrived", "joined"]
    assert task.log.kinds()[:2] == ["attach", "endpoint serve"]
    task.log.wait_for("endpoint add_peer", coordinator.me)
    assert log.events[2] == ("arrived", coordinator.me)
    coordinator.close(finished=True)
    log.wait_for("left", True)
    assert task.service.threads == {"MainThread", "worker 0"}, "attached here, then the host's own thread"


def test_a_port_chosen_by_the_system_is_told_to_the_coordinator(cast: Cast) -> None:
    spec = {"worker": ["127.0.0.1:0"], "ps": [free_address()]}
    task, coordinator = cast.task(spec), cast.coordinator(spec)
    with pytest.raises(CommunicationTimeoutError, match="worker 0, which has no address in the cluster, cannot be"):
        coordinator.wait_for([WORKER], 0.05)
    assert task.address is not None
    for _ in range(2):
        coordinator.add_task(WORKER, task.address)
    coordinator.wait_for([WORKER], SOON)
    with pytest.raises(InvalidArgumentError, match=r"worker 0 at .* is part of the cluster"):
        coordinator.add_task(WORKER, "127.0.0.1:1")


def test_who_does_not_come_is_named_with_its_address(cast: Cast) -> None:
    spec = {"worker": [free_address(), free_address()], "ps": [free_address()]}
    cast.task(spec)
    coordinator = cast.coordinator(spec)
    coordinator.wait_for([WORKER], SOON)
    missing = "; ".join(
        f"{task} at {spec[task.job][-1]}: nothing listens there" for task in (Task("worker", 1), SERVER)
    )
    with pytest.raises(
        CommunicationTimeoutError, match=f"2 of 3 tasks did not join within 0.4 s: {re.escape(missing)}"
    ):
        coordinator.wait_for([WORKER, Task("worker", 1), SERVER], 0.4)


OTHER_TORCH = Versions(MINE.torchstrat, "1.0.0", MINE.python)
BOTH_VERSIONS = (
    f"worker 0.*runs .*torch 1.0.0.*chief 0.*runs .*torch {MINE.torch}",
    f"chief 0 .*torch {MINE.torch}.*worker 0 .*torch 1.0.0",
)
NOT_ITS_SECRET = (
    r"worker 0 at \S+ does not know this cluster's secret",
    "worker 0 refused a connection: .*chief 0, does not know",
)
ANSWERS = (r"at \S+, where .* has worker 0, answers ps 0", "looked for worker 0")
WILL_NOT_PASS: dict[str, tuple[Any, ...]] = {
    "another task": ({"task": SERVER}, {}, ClusterConfigError, *ANSWERS),
    "another secret": ({}, {"secret": OTHER_SECRET}, AuthenticationError, *NOT_ITS_SECRET),
    "other versions": ({"versions": OTHER_TORCH}, {}, VersionMismatchError, *BOTH_VERSIONS),
}


@pytest.mark.parametrize("what", WILL_NOT_PASS)
def test_what_will_not_pass_is_an_error_at_once_on_both_sides(cast: Cast, what: str) -> None:
    task_options, coordinator_options, error, says, task_says = WILL_NOT_PASS[what]
    address = free_address()
    task = cast.task({"worker": [address], "ps": [address]}, **task_options)
    coordinator = cast.coordinator({"worker": [address]}, **coordinator_options)
    with pytest.raises(error, match=says) as caught:
        coordinator.wait_for([WORKER], SOON)
    assert task_options.get("versions") or address in str(caught.value)
    assert re.search(task_says, task.said(2))
    assert task.log.of("arrived") == coordinator.log.events == []
    if coordinator_options:
        cast.coordinator({"worker": [address]}).wait_for([WORKER], SOON)


# Parting


def test_a_task_that_is_told_to_end_drains_says_goodbye_and_ends_with_0(cast: Cast) -> None:
    _, task, coordinator = cast.pair(drain_timeout_seconds=7.0)
    task.terminate()
    assert task.join() == EXIT_DONE
    assert coordinator.log.wait_for("left")[2] == "it said good-bye: it was told to end (SIGTERM)"
    assert task.log.events[-3:] == [("drain", 7.0), ("close",), ("endpoint close",)]


def test_a_lost_coordinator_is_waited_for_and_another_is_accepted(cast: Cast) -> None:
    spec, task, first = cast.pair(SERVER, orphan_timeout_seconds=100.0)
    first.die()
    task.log.wait_for("left", False)
    second = cast.coordinator(spec)
    second.wait_for([SERVER], SOON)
    assert second.peers == {SERVER: task.peer}, "the same process"
    assert task._thread._alarm is None, "who comes in time stops the clock"
    assert task.log.of("arrived", "left", "endpoint add_peer", "endpoint remove_peer") == [
        ("endpoint add_peer", first.me),
        ("arrived", first.me),
        ("left", False),
        ("endpoint remove_peer", first.me),
        ("endpoint add_peer", second.me),
        ("arrived", second.me),
    ]


def test_before_the_first_coordinator_and_after_a_goodbye_it_waits_for_ever(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task = cast.task(spec, SERVER, orphan_timeout_seconds=0.0)
    for number in range(3):
        coordinator = cast.coordinator(spec)
        coordinator.wait_for([SERVER], SOON)
        coordinator.close(finished=True)
        task.log.wait_for("left", True, times=number + 1)
    assert task.log.of("close") == []


def test_it_ends_with_its_coordinator_if_it_is_told_to(cast: Cast) -> None:
    _, task, coordinator = cast.pair(SERVER, exit_when_finished=True)
    coordinator.close(finished=True)
    assert task.join() == EXIT_DONE
    assert coordinator.log.kinds() == ["joined"], "the coordinator ended it itself"
    assert task.said(2) == "ps 0 ends: the coordinator has finished."


def test_a_second_coordinator_is_refused_with_the_name_of_the_first(cast, monkeypatch) -> None:
    monkeypatch.setattr(membership, "BUSY_SECONDS", 0.1)
    spec, task, first = cast.pair(SERVER)
    second = cast.coordinator(spec)
    with pytest.raises(
        CommunicationError, match=rf"ps 0 .*refuses: it serves another .*chief 0 \(pid {first.me.pid} on"
    ):
        second.wait_for([SERVER], SOON)
    assert len(task.log.of("arrived")) == 1
    first.close(finished=True)
    second.wait_for([SERVER], SOON)


def greet(address: Any, me: Peer) -> Any:
    """As an honest coordinator does, by hand: the channel, and the task as it introduced itself."""
    sock = dial(address) if isinstance(address, str) else address
    introduction = Introduction(me.task, local_versions())
    channel, _ = shake_hands(sock, Side.DIALER, derive_key(SECRET, "control"), introduction, other="ps 0")
    return channel, greet_task(channel, me, given_up=lambda peer: None, add_peer=None)


def test_a_coordinator_that_dials_again_has_given_up_its_former_connection(cast, monkeypatch) -> None:
    """Both are open here; whether the former one would still answer is not asked."""
    monkeypatch.setattr(TaskHost, "_answers", lambda self, session: pytest.fail("it was asked"))
    spec, task, first = cast.pair(SERVER)
    channel, greeted = greet(spec["ps"][0], first.me)
    assert greeted.peer == task.peer
    first.log.wait_for("left")
    first.die()
    channel.close()


def test_a_coordinator_that_does_not_answer_gives_way_to_another(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped, or cut off without a word, does not."""
    monkeypatch.setattr(task_host, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(membership, "MESSAGE_PING", "not understood")
    spec, task, first = cast.pair(SERVER)
    task.log.wait_for("arrived", cast.coordinator(spec).me)
    assert first.log.wait_for("left")[1] == task.peer


def test_a_process_that_was_given_up_starts_again(cast: Cast) -> None:
    spec, task, coordinator = cast.pair()
    coordinator.give_up(task.peer, "it was silent for 3 s")
    assert task.join() == EXIT_GIVEN_UP
    assert task.log.kinds()[-3:] == ["close", "endpoint close", "restarted"]
    assert "it was silent for 3 s" in task.said(2)
    assert coordinator.log.kinds() == ["joined"], "who gives up a process needs not be told that it is gone"
    again = cast.task(spec)
    assert coordinator.log.wait_for("joined", times=2)[1] == again.peer


@pytest.mark.parametrize("when", ["on_joined", "add_peer", "on_left"])
def test_a_process_may_be_given_up_at_any_moment(cast: Cast, when: str) -> None:
    """Also after its connection broke, before it could be told: it may join no more, however often it is dialed."""
    spec = {"worker": [free_address()]}
    task = cast.task(spec)
    coordinator = cast.coordinator(spec, **{when: lambda me, peer, *_: me.give_up(peer, "not wanted")})
    if when == "on_left":
        coordinator.wait_for([WORKER], SOON)
        task.hang_up()
    assert task.join() == EXIT_GIVEN_UP
    assert coordinator.log.kinds() == (["joined"] if when == "on_left" else [])
    assert coordinator.peers == {}


def test_a_coordinator_that_finishes_while_it_greets_a_task_says_goodbye(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task = cast.task(spec, orphan_timeout_seconds=0.0)
    closed = threading.Event()

    def finish(me: Coordinator, _peer: Peer) -> None:
        threading.Thread(target=me.close, args=(True,)).start()
        assert me._places[WORKER].stop.wait(SOON)
        closed.set()

    coordinator = cast.coordinator(spec, add_peer=finish)
    assert closed.wait(SOON)
    coordinator.close(finished=True)
    assert coordinator.log.events == []
    cast.coordinator(spec).wait_for([WORKER], SOON)
    assert task.log.of("left") in ([], [("left", True)])


def test_a_removed_task_is_let_go_and_not_dialed_again(cast: Cast) -> None:
    spec = {"worker": [free_address(), free_address()]}
    task, other, coordinator = cast.task(spec), cast.task(spec, Task("worker", 1)), cast.coordinator(spec)
    coordinator.wait_for([WORKER, Task("worker", 1)], SOON)
    coordinator.remove_task(WORKER)
    coordinator.remove_task(Task("worker", 9))
    task.log.wait_for("left", True)
    other.die()
    coordinator.log.wait_for("left", other.peer)
    assert coordinator.log.kinds() == ["joined", "joined", "left"]
    coordinator.add_task(WORKER, spec["worker"][0])
    coordinator.wait_for([WORKER], SOON)


def test_the_callbacks_run_one_at_a_time_and_may_close_everything(cast: Cast) -> None:
    spec = {"worker": [free_address() for _ in range(3)]}
    for index in range(3):
        cast.task(spec, Task("worker", index))
    entered: list[Task] = []
    closed = threading.Event()

    def on_joined(me: Coordinator, peer: Peer, _status: Any) -> None:
        entered.append(peer.task)
        count = len(entered)
        threading.Event().wait(0.05)  # an opportunity for another call, which must not come
        assert len(entered) == count
        if count == 3:
            me.close(finished=False)
            closed.set()

    coordinator = cast.coordinator(spec, on_joined=on_joined)
    assert closed.wait(SOON)
    with pytest.raises(CommunicationError, match=f"was closed while waiting for {entered[2]}"):
        coordinator.wait_for(entered[2:], SOON)


# What callbacks and services raise


def test_a_callback_that_raises_is_not_lost(cast: Cast, caplog: pytest.LogCaptureFixture) -> None:
    spec = {"worker": [free_address()]}
    cast.task(spec)

    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    coordinator = cast.coordinator(spec, on_joined=fail)
    with pytest.raises(KeyError, match="a bug"):
        coordinator.wait_for([WORKER], SOON)
    assert "a bug" in caplog.text
    assert coordinator.log.events == [], "what never joined does not leave"


def test_a_service_that_cannot_greet_refuses_the_coordinator_and_says_why(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task = cast.task(spec)
    task.service.failing["arrived"] = KeyError("a bug")
    coordinator = cast.coordinator(spec)
    assert "KeyError: 'a bug'" in task.said(2)
    task.service.failing.clear()
    coordinator.wait_for([WORKER], SOON)


def test_a_service_that_cannot_let_go_ends_the_process(cast: Cast) -> None:
    _, task, coordinator = cast.pair()
    task.service.failing["left"] = KeyError("a bug")
    coordinator.die()
    assert task.join() == EXIT_FAILED
    assert "KeyError: 'a bug'" in task.said(2)
    assert task.log.kinds()[-1] == "endpoint close"


# Tasks that the cluster does not know dial the coordinator


def test_a_worker_with_a_new_index_dials_the_coordinator(cast: Cast) -> None:
    spec = {"chief": [free_address()], "worker": [free_address()]}
    extra = cast.task(spec, EXTRA)
    assert extra.address is None
    assert f"worker 7 dials the coordinator at {spec['chief'][0]}" in extra.said(1)
    coordinator = cast.coordinator(spec)
    coordinator.wait_for([EXTRA], SOON)
    assert coordinator.address == spec["chief"][0]
    twin = cast.task(spec, EXTRA)
    assert f"it is connected to {extra.peer} already" in twin.said(2)
    coordinator.remove_task(EXTRA)
    assert extra.join() == EXIT_DONE
    assert twin.join() == EXIT_REFUSED
    assert "worker 7 was taken out of its cluster" in twin.log.events[-3][1], "before it closed service and endpoint"


@pytest.mark.parametrize(
    ("task", "secret", "says"),
    [
        (EXTRA, OTHER_SECRET, r"worker 7 ends \(code 77\): the coordinator at .* does not know this cluster's"),
        (Task("ps", 7), SECRET, "ps 7 is not in its cluster"),
    ],
    ids=["another secret", "a server"],
)
def test_who_dials_and_is_not_wanted_ends_with_a_message(cast: Cast, task: Task, secret: bytes, says: str) -> None:
    spec = {"chief": [free_address()]}
    coordinator = cast.coordinator(spec)
    extra = cast.task(spec, task, secret=secret)
    assert extra.join() == EXIT_REFUSED
    assert re.search(says, extra.said(2))
    absence = ""
    while secret == OTHER_SECRET and "last refused there" not in absence:  # it writes that down after it has refused
        with pytest.raises(CommunicationTimeoutError, match="worker 7, which has no address") as caught:
            coordinator.wait_for([EXTRA], 0.01)
        absence = str(caught.value)
    assert secret == SECRET or re.search("last refused there: .*worker 7, does not", absence)


def test_a_task_without_any_address_is_an_error(cast: Cast) -> None:
    with pytest.raises(
        ClusterConfigError, match=r"worker 7 is not in the cluster, .*there is no chief that it could dial"
    ):
        cast.task({"ps": [free_address()]}, EXTRA)


def test_a_port_in_use_names_the_task_and_leaves_nothing(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "BIND_SECONDS", 0.05)
    address = free_address()
    cast.task({"worker": [address]})
    with pytest.raises(ClusterConfigError, match=f"worker 0 cannot listen on {address}"):
        cast.task({"worker": [address]})
    with pytest.raises(ClusterConfigError, match=f"chief 0 cannot listen on {address}"):
        cast.coordinator({"chief": [address]})


def test_an_endpoint_that_cannot_be_made_leaves_the_port_free(cast: Cast) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError("no such host")

    spec = {"worker": [free_address()]}
    with pytest.raises(OSError, match="no such host"):
        cast.task(spec, make_endpoint=fail)
    cast.task(spec)


# Strangers


def say_and_hang_up(address: str, data: bytes) -> None:
    with dial(address) as sock, suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):  # until it has been dealt with
            pass


@pytest.mark.parametrize("frames", [100, pytest.param(1_000, marks=pytest.mark.soak)])  # each is replayed three times
def test_recorded_messages_are_worth_nothing_again(cast: Cast, frames: int) -> None:
    draw = random.Random(21)
    spec = {"ps": [free_address()]}
    address = spec["ps"][0]

    def replay_everything() -> None:
        session = b"".join(messages)
        for message in messages:  # alone; after the recorded beginning; both with a bit flipped
            beginning = messages[0] + messages[1] + message
            for said in (message, beginning, flipped(beginning, draw)):
                say_and_hang_up(address, said)
        for _ in range(20):
            say_and_hang_up(address, session)
            say_and_hang_up(address, flipped(session, draw))

    first = cast.task(spec, SERVER)
    with wire_to(address) as (sock, wire):
        channel, _ = greet(sock, new_peer(Task("chief", 0)))
        for _ in range(frames):
            channel.send({"type": "ping"})
            assert channel.receive(SOON) == {"type": "pong"}
        channel.close()
    messages = wire.said["dialer"]
    assert len(messages) >= frames
    first.log.wait_for("left", False)
    replay_everything()
    assert first.log.of("arrived", "left") == [first.log.wait_for("arrived"), ("left", False)]
    first.die()
    second = cast.task(spec, SERVER)
    replay_everything()
    assert second.log.of("arrived", "left") == []
    cast.coordinator(spec).wait_for([SERVER], SOON)


# The host's thread


@pytest.fixture
def ended() -> list[Any]:
    return []


@pytest.fixture
def thread(ended: list[Any]) -> EventThread[str]:
    thread: EventThread[str] = EventThread("worker 0", on_end=ended.append)
    thread.start()
    return thread


def test_a_question_that_ends_the_thread_is_answered(thread: EventThread[str], ended: list[Any]) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with ThreadPoolExecutor(1) as pool, pytest.raises(SystemExit):
        pool.submit(thread.ask, leave).result(SOON)
    thread.join()
    assert [type(outcome) for outcome in ended] == [SystemExit]


def test_a_thread_that_has_ended_answers_nobody(thread: EventThread[str], ended: list[Any]) -> None:
    assert thread.ask(lambda: 6 * 7) == 42
    with pytest.raises(ZeroDivisionError):
        thread.ask(lambda: 1 // 0)
    reached, leave = threading.Event(), threading.Event()
    thread.tell(lambda: reached.set() or (leave.wait(SOON) and "the end"))
    assert reached.wait(SOON)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(thread.ask, lambda: "never asked")
        leave.set()
        with pytest.raises(CommunicationError, match="worker 0 is about to end"):
            late.result(SOON)
    thread.join()
    assert ended == ["the end"]
    with pytest.raises(CommunicationError, match="worker 0 is about to end"):
        thread.ask(lambda: "never asked")


@pytest.mark.parametrize("is_put_off", [False, True])
def test_an_alarm_ends_the_thread_unless_it_is_put_off(thread, ended, is_put_off) -> None:
    def set_alarms() -> None:
        thread.set_alarm(0.0, lambda: "too late")
        if is_put_off:
            thread.set_alarm(None, lambda: "never")

    thread.ask(set_alarms)
    if is_put_off:
        thread.tell(lambda: "told")
    thread.join()
    assert ended == ["told" if is_put_off else "too late"]


# Checks of a cluster


GOOD = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}
NO_CHIEF = {"worker": ["w:1"], "ps": ["p:1"]}


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "says"),
    [
        ({}, None, None, "the cluster is empty"),
        ({"boss": ["b:1"], **GOOD}, None, None, "a job 'boss', which is no role"),
        ({**GOOD, "chief": ["c:1", "c:2"]}, None, None, "2 tasks of type 'chief'"),
        ({**GOOD, "evaluator": ["e:1", "e:2"]}, None, None, "2 tasks of type 'evaluator'"),
        ({"worker": ["w:1"]}, None, None, "no task of type 'ps' to hold the variables"),
        ({"worker": ["w:1"], "ps": []}, None, None, "no task of type 'ps'"),
        ({"ps": ["p:1"]}, None, None, "no task of type 'worker' to run the functions"),
        (GOOD, "boss", 0, "task_type is 'boss', which is no role"),
        (NO_CHIEF, "chief", 0, "task_type is 'chief', but .* need not be in the cluster"),
        (GOOD, "chief", 1, "task 1 of type 'chief', which the cluster lacks"),
        (GOOD, "worker", 2, r"it has \[0, 1\]"),
        ({**GOOD, "worker": ["w"]}, None, None, "worker 0 has address 'w'; write 'host:port'"),
        ({**GOOD, "worker": ["w:99999"]}, None, None, "worker 0 has address 'w:99999'"),
        ({**GOOD, "worker": ["w:x"]}, None, None, "worker 0 has address 'w:x'"),
        ({**GOOD, "worker": [":1"]}, None, None, "worker 0 has address ':1'"),
        ({**GOOD, "worker": ["http://w:1"]}, None, None, "worker 0 has address"),
        ({**GOOD, "worker": ["::1:1"]}, None, None, "worker 0 has address '::1:1'"),
        ({**GOOD, "worker": ["w:1", "p:1"]}, None, None, "worker 1 and ps 0 have the same address 'p:1'"),
        (GOOD, None, None, None),
        (GOOD, "chief", 0, None),
        (GOOD, "worker", 1, None),
        (GOOD, "ps", None, None),
        (GOOD, "evaluator", 0, None),
        (NO_CHIEF, None, None, None),
        ({"worker": {3: "w:1"}, "ps": ["p:1"]}, "worker", 3, None),
        ({"worker": ["127.0.0.1:0", "127.0.0.1:0"], "ps": ["[::1]:0"]}, None, None, None),
    ],
)
def test_a_cluster_is_good_or_one_clear_error(cluster: Any, task_type: Any, task_id: Any, says: str | None) -> None:
    spec = ClusterSpec(cluster)
    with nullcontext() if says is None else pytest.raises(ClusterConfigError, match=says):
        check_parameter_server_cluster(spec, task_type, task_id)


@pytest.mark.parametrize("address", ["host:1", "[::1]:65535", "10.0.0.1:0"])
def test_addresses_are_taken_apart_and_put_together(address: str) -> None:
    assert host_and_port(*split_address(address, "somebody")) == address


# -- control connections: who gets in, what a stranger learns, and what happens to messages that were tampered with ----


VERSIONS = Versions("0.1.0", "2.13.0", "3.11")
CHIEF = Introduction(Task("chief", 0), VERSIONS)
THIRD = Introduction(Task("worker", 3), VERSIONS)
KEY = b"k" * 32
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


def as_listener(sock: socket.socket, within: float = SOON, me: Introduction = THIRD) -> Attempt:
    return attempt(sock, Side.LISTENER, me, "the process at 10.0.0.1:99", within)


@contextmanager
def meeting(
    *, within: float = SOON, task: Introduction = THIRD, **options: Any
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
        assert (mine[1], theirs[1]) == (THIRD.task, CHIEF.task)
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


# The handshake


def test_messages_travel_both_ways_between_those_who_know_the_secret() -> None:
    with channels() as (mine, theirs, _):
        for number in range(50):
            mine.send({"number": number, "text": "ä" * number})
        theirs.send({"from": "the other side"})
        assert [theirs.receive(SOON)["number"] for _ in range(50)] == list(range(50))
        assert mine.receive(SOON) == {"from": "the other side"}


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
        monkeypatch.setattr(control_channel, "MAXIMAL_FRAME_BYTES", 1000)
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
        address, KEY, THIRD, on_channel=on_channel, on_refused=on_refused, handshake_seconds=handshake_seconds
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
        assert met[1] == THIRD.task
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
    monkeypatch.setattr(handshake, "MAXIMAL_STRANGERS", 4)
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
        control_channel.keep_alive(near)
        limit = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        idle = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        interval = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
    # The last byte came up to a probe's round before the silence began.
    assert limit > SERVER_DEADLINE_SECONDS + idle + interval
