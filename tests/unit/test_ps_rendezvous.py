"""A coordinator and its tasks find each other, part, and find each other again. All in one process, on loopback."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
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
    dial,
    flipped,
    free_address,
    new_peer,
    wire_to,
)
from torchstrat.cluster_resolver import ClusterSpec
from torchstrat.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    VersionMismatchError,
)
from torchstrat.parameter_server.meeting import listener, rendezvous, task_host
from torchstrat.parameter_server.meeting.cluster_checks import (
    check_parameter_server_cluster,
    join_address,
    split_address,
)
from torchstrat.parameter_server.meeting.event_thread import EventThread
from torchstrat.parameter_server.meeting.greeting import greet_task
from torchstrat.parameter_server.meeting.handshake import _MAGIC, _OPENING, PROTOCOL, Introduction, Side, shake_hands
from torchstrat.parameter_server.meeting.secret import derive_key
from torchstrat.parameter_server.meeting.task_host import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_GIVEN_UP,
    EXIT_REFUSED,
    TaskHost,
)
from torchstrat.parameter_server.meeting.versions import Versions, local_versions
from torchstrat.parameter_server.tasks import Peer, Task

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


@pytest.mark.parametrize(
    ("task_options", "coordinator_options", "error", "says", "task_says"),
    [
        (
            {"task": SERVER},
            {},
            ClusterConfigError,
            r"at \S+, where .* has worker 0, answers ps 0",
            "looked for worker 0",
        ),
        (
            {},
            {"secret": OTHER_SECRET},
            AuthenticationError,
            r"worker 0 at \S+ does not know this cluster's secret",
            "worker 0 refused a connection: .*chief 0, does not know",
        ),
        (
            {"versions": Versions(MINE.torchstrat, "1.0.0", MINE.python)},
            {},
            VersionMismatchError,
            f"worker 0.*runs .*torch 1.0.0.*chief 0.*runs .*torch {MINE.torch}",
            f"chief 0 .*torch {MINE.torch}.*worker 0 .*torch 1.0.0",
        ),
    ],
    ids=["another task", "another secret", "other versions"],
)
def test_what_will_not_pass_is_an_error_at_once_on_both_sides(
    cast: Cast, task_options: Any, coordinator_options: Any, error: type[Exception], says: str, task_says: str
) -> None:
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


def test_a_task_that_starts_again_joins_as_another_peer(cast: Cast) -> None:
    spec, first, coordinator = cast.pair()
    first.die()
    assert coordinator.log.wait_for("left")[1] == first.peer
    assert coordinator.peers == {}
    second = cast.task(spec)
    assert coordinator.log.wait_for("joined", times=2)[1] == second.peer != first.peer
    assert coordinator.log.kinds() == ["joined", "left", "joined"]


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


def test_a_second_coordinator_is_refused_with_the_name_of_the_first(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "BUSY_SECONDS", 0.1)
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


def test_a_coordinator_that_dials_again_has_given_up_its_former_connection(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(rendezvous, "MESSAGE_PING", "not understood")
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


def test_a_connection_that_breaks_while_both_live_is_made_again(cast: Cast) -> None:
    _, task, coordinator = cast.pair(SERVER)
    task.hang_up()
    assert coordinator.log.wait_for("joined", times=2)[1] == coordinator.log.wait_for("left")[1] == task.peer


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
    monkeypatch.setattr(listener, "BIND_SECONDS", 0.05)
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


@pytest.mark.parametrize("messages", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])  # the more, the rarer
def test_random_messages_change_nothing(cast: Cast, messages: int) -> None:
    draw = random.Random(20)
    spec, task, coordinator = cast.pair(SERVER)
    for number in range(messages):
        noise = draw.randbytes(draw.choice((1, 30, 52, 116, 400)))
        if number % 2:  # past the first check
            noise = _OPENING.pack(_MAGIC, PROTOCOL, draw.randbytes(32)) + noise
        say_and_hang_up(spec["ps"][0], noise)
    assert coordinator.log.kinds() == ["joined"]
    assert len(task.log.of("arrived")) == 1
    assert len(task.log.of("said")) < 50
    assert task.log.of("left", "close") == []


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
def test_an_alarm_ends_the_thread_unless_it_is_put_off(
    thread: EventThread[str], ended: list[Any], is_put_off: bool
) -> None:
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
    assert join_address(*split_address(address, "somebody")) == address
