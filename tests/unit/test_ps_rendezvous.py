"""A coordinator and its tasks find each other, part, and find each other again. All in one process, on loopback."""

from __future__ import annotations

import itertools
import random
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from torchstrat.cluster_spec import ClusterSpec
from torchstrat.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    VersionMismatchError,
)
from torchstrat.parameter_server.meeting import listener, task_host
from torchstrat.parameter_server.meeting.cluster_checks import (
    check_parameter_server_cluster,
    join_address,
    split_address,
)
from torchstrat.parameter_server.meeting.control import connect
from torchstrat.parameter_server.meeting.event_thread import EventThread
from torchstrat.parameter_server.meeting.greeting import greet_task
from torchstrat.parameter_server.meeting.handshake import Introduction, Side, shake_hands
from torchstrat.parameter_server.meeting.rendezvous import Rendezvous
from torchstrat.parameter_server.meeting.secret import derive_key
from torchstrat.parameter_server.meeting.task_host import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_GIVEN_UP,
    EXIT_ORPHANED,
    EXIT_REFUSED,
    TaskHost,
)
from torchstrat.parameter_server.meeting.versions import Versions, local_versions
from torchstrat.parameter_server.tasks import Peer, Task

SOON = 30.0
SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
WORKER, SERVER = Task("worker", 0), Task("ps", 0)
_incarnations = itertools.count()


def free_port() -> int:
    """Below the range from which the system gives out ports by itself, so that nobody else is given it."""
    for port in random.Random().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port")


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def new_peer(task: Task) -> Peer:
    number = next(_incarnations)
    return Peer(task, f"{number:032x}", f"tcp://127.0.0.1:{number}", "here", number)


class Log:
    """What happened, in order; for tests to wait for."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()

    def add(self, *event: Any) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, *beginning: Any, times: int = 1) -> tuple[Any, ...]:
        """The event that begins like this, for the ``times``-th time."""

        def found() -> list[tuple[Any, ...]]:
            return [event for event in self.events if event[: len(beginning)] == beginning]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= times, SOON), (beginning, self.events)
            return found()[times - 1]

    def kinds(self) -> list[str]:
        return [event[0] for event in self.events]


class StandInEndpoint:
    """Knows its peers, and that is all."""

    def __init__(self, task: Task, *, secret: bytes, host: str, log: Log) -> None:
        self.peer, self.host, self._log = new_peer(task), host, log
        assert secret

    def serve(self, handlers: Mapping[str, Any]) -> None:
        self._log.add("serve", *handlers)

    def add_peer(self, peer: Peer) -> None:
        self._log.add("add_peer", peer)

    def remove_peer(self, peer: Peer) -> None:
        self._log.add("remove_peer", peer)

    def close(self) -> None:
        self._log.add("endpoint closed")


@dataclass
class StandInService:
    """Writes down what the host asks of it, and on which thread."""

    log: Log
    threads: set[str] = field(default_factory=set)
    failing: dict[str, Exception] = field(default_factory=dict)

    def _note(self, *event: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.log.add(*event)
        if event[0] in self.failing:
            raise self.failing[event[0]]

    def handlers(self) -> Mapping[str, Any]:
        return {"answer": None}

    def attach(self, endpoint: Any) -> None:
        self.log.add("attach")

    def status(self) -> Mapping[str, Any]:
        self._note("status")
        return {"holds": ["a table"]}

    def coordinator_arrived(self, coordinator: Peer) -> None:
        self._note("arrived", coordinator)

    def coordinator_left(self, *, finished: bool) -> None:
        self._note("left", finished)

    def drain(self, timeout_seconds: float) -> None:
        self._note("drain", timeout_seconds)

    def close(self) -> None:
        self._note("closed")


class Cast:
    """Starts coordinators and tasks, and ends them all."""

    def __init__(self) -> None:
        self._hosts: list[TaskHost] = []
        self._rendezvous: list[Rendezvous] = []

    def task(self, spec: Mapping[str, Any], task: Task = WORKER, **options: Any) -> StandIn:
        log = Log()
        service = StandInService(log)
        host = TaskHost(
            ClusterSpec(spec),
            task,
            options.pop("secret", SECRET),
            service,  # type: ignore[arg-type]
            make_endpoint=lambda *args, **kwargs: StandInEndpoint(*args, **kwargs, log=log),
            say=lambda line: log.add("said", line),
            restart=lambda: log.add("restarted"),
            **options,
        )
        host.start()
        self._hosts.append(host)
        return StandIn(host, service, log)

    def coordinator(self, spec: Mapping[str, Any], **options: Any) -> Coordinator:
        log, me = Log(), new_peer(Task("chief", 0))
        rendezvous = Rendezvous(
            ClusterSpec(spec),
            me,
            options.pop("secret", SECRET),
            on_joined=options.pop("on_joined", lambda peer, status: log.add("joined", peer, status)),
            on_left=options.pop("on_left", lambda peer, reason: log.add("left", peer, reason)),
            **options,
        )
        self._rendezvous.append(rendezvous)
        rendezvous.start()
        return Coordinator(rendezvous, me, log)

    def close(self) -> None:
        for rendezvous in self._rendezvous:
            rendezvous.close(finished=True)
        for host in self._hosts:
            host.stop()
            host.join()


@dataclass
class StandIn:
    host: TaskHost
    service: StandInService
    log: Log

    def die(self) -> None:
        """End without a word, as kill -9 does: the connection breaks, the port is free."""
        self.host._ending = True
        if self.host._session is not None:
            self.host._session.channel.hang_up()
        self.host.stop()
        self.host.join()


@dataclass
class Coordinator:
    rendezvous: Rendezvous
    me: Peer
    log: Log

    def die(self) -> None:
        self.rendezvous.close(finished=False)


def said(task: StandIn, times: int) -> str:
    """The line of that number; the first says where the task listens."""
    return str(task.log.wait_for("said", times=times)[1])


@pytest.fixture
def cast() -> Iterator[Cast]:
    everybody = Cast()
    try:
        yield everybody
    finally:
        everybody.close()


# Finding each other


@pytest.mark.parametrize("first", ["task", "coordinator"])
def test_they_may_be_started_in_any_order(first: str, cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    if first == "task":
        task, coordinator = cast.task(spec), cast.coordinator(spec)
    else:
        coordinator = cast.coordinator(spec)
        with pytest.raises(CommunicationTimeoutError):
            coordinator.rendezvous.wait_for([WORKER], 0.05)
        task = cast.task(spec)
    coordinator.rendezvous.wait_for([WORKER], SOON)
    _, peer, status = coordinator.log.wait_for("joined")
    assert peer == task.host.peer
    assert status == {"holds": ["a table"]}
    assert coordinator.rendezvous.peers == {WORKER: peer}
    assert task.host.address == spec["worker"][0]


def test_each_side_can_be_called_before_the_other_hears_of_it(cast: Cast) -> None:
    """The task knows the coordinator, the coordinator the task, the service is told, then the task has joined."""
    spec, log = {"worker": [free_address()]}, Log()
    task = cast.task(spec)
    task.service.log = log
    coordinator = cast.coordinator(
        spec,
        add_peer=lambda peer: log.add("added", peer),
        on_joined=lambda peer, status: log.add("joined", peer),
    )
    log.wait_for("joined")
    assert log.kinds() == ["status", "added", "arrived", "joined"]
    assert task.log.kinds()[:2] == ["attach", "serve"]
    task.log.wait_for("add_peer", coordinator.me)
    assert log.events[2] == ("arrived", coordinator.me)
    coordinator.rendezvous.close(finished=True)
    log.wait_for("left", True)
    assert task.service.threads == {"worker 0"}, "the host's own thread"


def test_a_port_chosen_by_the_system_is_told_to_the_coordinator(cast: Cast) -> None:
    spec = {"worker": ["127.0.0.1:0"], "ps": [free_address()]}
    task, coordinator = cast.task(spec), cast.coordinator(spec)
    with pytest.raises(CommunicationTimeoutError, match="worker 0, which has no address in the cluster, cannot be"):
        coordinator.rendezvous.wait_for([WORKER], 0.05)
    assert task.host.address is not None
    coordinator.rendezvous.add_task(WORKER, task.host.address)
    coordinator.rendezvous.add_task(WORKER, task.host.address)
    coordinator.rendezvous.wait_for([WORKER], SOON)
    with pytest.raises(InvalidArgumentError, match=r"worker 0 at .* is part of the cluster"):
        coordinator.rendezvous.add_task(WORKER, "127.0.0.1:1")


def test_who_does_not_come_is_named_with_its_address(cast: Cast) -> None:
    spec = {"worker": [free_address(), free_address()], "ps": [free_address()]}
    cast.task(spec)
    coordinator = cast.coordinator(spec)
    coordinator.rendezvous.wait_for([WORKER], SOON)
    missing = f"worker 1 at {spec['worker'][1]}: nothing listens there; ps 0 at {spec['ps'][0]}: nothing listens there"
    with pytest.raises(
        CommunicationTimeoutError, match=rf"2 of 3 tasks did not join within 0.4 s: {re.escape(missing)}"
    ):
        coordinator.rendezvous.wait_for([WORKER, Task("worker", 1), SERVER], 0.4)


def test_the_wrong_task_at_an_address_is_an_error_at_once(cast: Cast) -> None:
    address = free_address()
    task = cast.task({"ps": [address]}, SERVER)
    coordinator = cast.coordinator({"worker": [address]})
    with pytest.raises(ClusterConfigError, match=f"at {address}, where .* has worker 0, answers ps 0"):
        coordinator.rendezvous.wait_for([WORKER], SOON)
    assert "looked for worker 0" in said(task, 2)


def test_a_wrong_secret_is_an_error_at_once_and_the_task_says_who(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task, coordinator = cast.task(spec), cast.coordinator(spec, secret=OTHER_SECRET)
    with pytest.raises(
        AuthenticationError, match=f"worker 0 at {spec['worker'][0]} does not know this cluster's secret"
    ):
        coordinator.rendezvous.wait_for([WORKER], SOON)
    assert re.search("worker 0 refused .*chief 0, does not know", said(task, 2))
    assert "arrived" not in task.log.kinds()
    honest = cast.coordinator(spec)
    honest.rendezvous.wait_for([WORKER], SOON)


def test_other_versions_are_an_error_on_both_sides(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    mine = local_versions()
    task = cast.task(spec, versions=Versions(mine.torchstrat, "1.0.0", mine.python))
    coordinator = cast.coordinator(spec)
    with pytest.raises(VersionMismatchError, match=f"worker 0.*runs .*torch 1.0.0.*chief 0.*runs .*torch {mine.torch}"):
        coordinator.rendezvous.wait_for([WORKER], SOON)
    assert re.search(f"chief 0 .*torch {mine.torch}.*worker 0 .*torch 1.0.0", said(task, 2))


# Parting


def test_a_task_that_starts_again_joins_as_another_peer(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    first, coordinator = cast.task(spec), cast.coordinator(spec)
    _, peer, _ = coordinator.log.wait_for("joined")
    first.die()
    assert coordinator.log.wait_for("left")[1] == peer
    assert coordinator.rendezvous.peers == {}
    second = cast.task(spec)
    assert coordinator.log.wait_for("joined", times=2)[1] == second.host.peer != peer
    assert coordinator.log.kinds() == ["joined", "left", "joined"]


def test_a_task_that_is_told_to_end_drains_says_goodbye_and_ends_with_0(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task, coordinator = cast.task(spec, drain_timeout_seconds=7.0), cast.coordinator(spec)
    coordinator.rendezvous.wait_for([WORKER], SOON)
    task.host.terminate()
    assert task.host.join() == EXIT_DONE
    _, _, reason = coordinator.log.wait_for("left")
    assert reason == "it said good-bye: it was told to end (SIGTERM)"
    assert [event for event in task.log.events if event[0] in ("drain", "closed", "endpoint closed")] == [
        ("drain", 7.0),
        ("closed",),
        ("endpoint closed",),
    ]


def test_a_lost_coordinator_is_waited_for_and_another_is_accepted(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task, first = cast.task(spec, SERVER), cast.coordinator(spec)
    first.rendezvous.wait_for([SERVER], SOON)
    first.die()
    task.log.wait_for("left", False)
    second = cast.coordinator(spec)
    second.rendezvous.wait_for([SERVER], SOON)
    assert second.rendezvous.peers == {SERVER: task.host.peer}, "the same process"
    assert [event for event in task.log.events if event[0] in ("arrived", "left", "add_peer", "remove_peer")] == [
        ("add_peer", first.me),
        ("arrived", first.me),
        ("left", False),
        ("remove_peer", first.me),
        ("add_peer", second.me),
        ("arrived", second.me),
    ]


def test_nobody_comes_for_too_long_and_the_task_ends(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task, coordinator = cast.task(spec, SERVER, orphan_timeout_seconds=0.2), cast.coordinator(spec)
    coordinator.rendezvous.wait_for([SERVER], SOON)
    coordinator.die()
    assert task.host.join() == EXIT_ORPHANED
    assert re.search(r"ps 0 has lost chief 0.*keeps its state and waits 0.2 s", said(task, 2))
    assert re.search(r"ps 0 ends \(code 69\): chief 0 .* was lost 0.2 s ago", said(task, 3))
    assert task.log.kinds()[-2:] == ["closed", "endpoint closed"]


def test_a_coordinator_that_comes_in_time_stops_the_clock(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task, first = cast.task(spec, SERVER, orphan_timeout_seconds=100.0), cast.coordinator(spec)
    first.rendezvous.wait_for([SERVER], SOON)
    first.die()
    task.log.wait_for("left", False)
    cast.coordinator(spec).rendezvous.wait_for([SERVER], SOON)
    assert task.host._thread._alarm is None


def test_before_the_first_coordinator_and_after_a_goodbye_it_waits_for_ever(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task = cast.task(spec, SERVER, orphan_timeout_seconds=0.0)
    for number in range(3):
        coordinator = cast.coordinator(spec)
        coordinator.rendezvous.wait_for([SERVER], SOON)
        coordinator.rendezvous.close(finished=True)
        task.log.wait_for("left", True, times=number + 1)
    assert task.host._thread._thread.is_alive()


def test_it_ends_with_its_coordinator_if_it_is_told_to(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task, coordinator = cast.task(spec, SERVER, exit_when_finished=True), cast.coordinator(spec)
    coordinator.rendezvous.wait_for([SERVER], SOON)
    coordinator.rendezvous.close(finished=True)
    assert task.host.join() == EXIT_DONE
    assert "left" not in coordinator.log.kinds(), "the coordinator ended it itself"


def test_a_second_coordinator_is_refused_with_the_name_of_the_first(cast: Cast, monkeypatch) -> None:
    monkeypatch.setattr("torchstrat.parameter_server.meeting.rendezvous.BUSY_SECONDS", 0.1)
    spec = {"ps": [free_address()]}
    task, first = cast.task(spec, SERVER), cast.coordinator(spec)
    first.rendezvous.wait_for([SERVER], SOON)
    second = cast.coordinator(spec)
    with pytest.raises(
        CommunicationError, match=rf"ps 0 .*refuses: it serves another .*chief 0 \(pid {first.me.pid} on"
    ):
        second.rendezvous.wait_for([SERVER], SOON)
    assert task.log.kinds().count("arrived") == 1
    first.rendezvous.close(finished=True)
    second.rendezvous.wait_for([SERVER], SOON)


def test_a_coordinator_that_dials_again_has_given_up_its_former_connection(cast: Cast, monkeypatch) -> None:
    """Both are open here; whether the former one would still answer is not asked."""
    monkeypatch.setattr(TaskHost, "_answers", lambda self, session: pytest.fail("it was asked"))
    spec = {"ps": [free_address()]}
    task, first = cast.task(spec, SERVER), cast.coordinator(spec)
    first.rendezvous.wait_for([SERVER], SOON)
    sock = connect(spec["ps"][0], SERVER)
    me = Introduction(first.me.task, local_versions())
    channel, _ = shake_hands(sock, Side.DIALER, derive_key(SECRET, "control"), me, other="ps 0")
    greeted = greet_task(channel, first.me, given_up=lambda peer: None, add_peer=None)
    assert greeted.peer == task.host.peer
    first.log.wait_for("left")
    first.die()
    channel.close()


def test_a_coordinator_that_does_not_answer_gives_way_to_another(cast: Cast, monkeypatch) -> None:
    """As one that is stopped, or cut off without a word, does not."""
    monkeypatch.setattr(task_host, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr("torchstrat.parameter_server.meeting.rendezvous.MESSAGE_PING", "not understood")
    spec = {"ps": [free_address()]}
    task, first = cast.task(spec, SERVER), cast.coordinator(spec)
    first.rendezvous.wait_for([SERVER], SOON)
    second = cast.coordinator(spec)
    task.log.wait_for("arrived", second.me)
    assert first.log.wait_for("left")[1] == task.host.peer


def test_a_process_that_was_given_up_starts_again(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task, coordinator = cast.task(spec), cast.coordinator(spec)
    _, peer, _ = coordinator.log.wait_for("joined")
    coordinator.rendezvous.give_up(peer, "it was silent for 3 s")
    assert task.host.join() == EXIT_GIVEN_UP
    assert task.log.kinds()[-3:] == ["closed", "endpoint closed", "restarted"]
    assert "it was silent for 3 s" in said(task, 2)
    assert coordinator.log.kinds() == ["joined"], "who gives up a process needs not be told that it is gone"
    again = cast.task(spec)
    assert coordinator.log.wait_for("joined", times=2)[1] == again.host.peer


def test_a_process_that_was_given_up_is_told_when_it_comes_back(cast: Cast) -> None:
    """The connection broke before it could be told: it may join no more, however often it is dialed."""
    spec = {"worker": [free_address()]}
    task = cast.task(spec)
    given_up = threading.Event()
    coordinator: list[Rendezvous] = []

    def give_up(peer: Peer, reason: str) -> None:
        coordinator[0].give_up(peer, "its connection was lost")
        given_up.set()

    coordinator.append(cast.coordinator(spec, on_left=give_up).rendezvous)
    coordinator[0].wait_for([WORKER], SOON)
    session = task.host._session
    assert session is not None
    session.channel.hang_up()
    assert given_up.wait(SOON)
    assert task.host.join() == EXIT_GIVEN_UP
    assert coordinator[0].peers == {}


def test_a_process_may_be_given_up_as_it_joins(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task = cast.task(spec)
    started: list[Rendezvous] = []
    ready = threading.Event()

    def give_up(peer: Peer, _status: Mapping[str, Any]) -> None:
        assert ready.wait(SOON)
        started[0].give_up(peer, "not wanted")

    started.append(cast.coordinator(spec, on_joined=give_up).rendezvous)
    ready.set()
    assert task.host.join() == EXIT_GIVEN_UP


def test_a_process_may_be_given_up_while_it_is_greeted(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task = cast.task(spec)
    started: list[Rendezvous] = []
    ready = threading.Event()

    def give_up(peer: Peer) -> None:
        assert ready.wait(SOON)
        started[0].give_up(peer, "not wanted")

    coordinator = cast.coordinator(spec, add_peer=give_up)
    started.append(coordinator.rendezvous)
    ready.set()
    assert task.host.join() == EXIT_GIVEN_UP
    assert coordinator.log.events == []


def test_a_coordinator_that_finishes_while_it_greets_a_task_says_goodbye(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task = cast.task(spec, orphan_timeout_seconds=0.0)
    started: list[Rendezvous] = []
    ready, closed = threading.Event(), threading.Event()

    def finish(_peer: Peer) -> None:
        assert ready.wait(SOON)
        closing = threading.Thread(target=started[0].close, args=(True,))
        closing.start()
        assert started[0]._places[WORKER].stop.wait(SOON)
        closed.set()

    coordinator = cast.coordinator(spec, add_peer=finish)
    started.append(coordinator.rendezvous)
    ready.set()
    assert closed.wait(SOON)
    coordinator.rendezvous.close(finished=True)
    assert coordinator.log.events == []
    second = cast.coordinator(spec)
    second.rendezvous.wait_for([WORKER], SOON)
    assert "left" not in task.log.kinds() or task.log.wait_for("left") == ("left", True)


def test_a_connection_that_breaks_while_both_live_is_made_again(cast: Cast) -> None:
    spec = {"ps": [free_address()]}
    task, coordinator = cast.task(spec, SERVER), cast.coordinator(spec)
    coordinator.rendezvous.wait_for([SERVER], SOON)
    session = task.host._session
    assert session is not None
    session.channel.hang_up()
    assert coordinator.log.wait_for("joined", times=2)[1] == coordinator.log.wait_for("left")[1] == task.host.peer


def test_a_removed_task_is_let_go_and_not_dialed_again(cast: Cast) -> None:
    spec = {"worker": [free_address(), free_address()]}
    task, other, coordinator = cast.task(spec), cast.task(spec, Task("worker", 1)), cast.coordinator(spec)
    coordinator.rendezvous.wait_for([WORKER, Task("worker", 1)], SOON)
    coordinator.rendezvous.remove_task(WORKER)
    coordinator.rendezvous.remove_task(Task("worker", 9))
    task.log.wait_for("left", True)
    other.die()
    coordinator.log.wait_for("left", other.host.peer)
    assert coordinator.log.kinds() == ["joined", "joined", "left"]
    assert spec["worker"][0] is not None
    coordinator.rendezvous.add_task(WORKER, spec["worker"][0])
    coordinator.rendezvous.wait_for([WORKER], SOON)


def test_the_callbacks_run_one_at_a_time_and_may_close_everything(cast: Cast) -> None:
    spec = {"worker": [free_address() for _ in range(3)]}
    for index in range(3):
        cast.task(spec, Task("worker", index))
    entered: list[int] = []
    calls = Log()
    started: list[Rendezvous] = []
    ready = threading.Event()

    def on_joined(peer: Peer, _status: Mapping[str, Any]) -> None:
        assert ready.wait(SOON)
        entered.append(peer.task.index)
        count = len(entered)
        threading.Event().wait(0.05)  # an opportunity for another call, which must not come
        assert len(entered) == count
        if count == 3:
            started[0].close(finished=False)
        calls.add("joined", count, peer.task)

    started.append(cast.coordinator(spec, on_joined=on_joined).rendezvous)
    ready.set()
    last = calls.wait_for("joined", 3)[2]
    with pytest.raises(CommunicationError, match=f"was closed while waiting for {last}"):
        started[0].wait_for([last], SOON)


def test_a_callback_that_raises_is_not_lost(cast: Cast, caplog) -> None:
    spec = {"worker": [free_address()]}
    cast.task(spec)

    def fail(_peer: Peer, _status: Mapping[str, Any]) -> None:
        raise KeyError("a bug")

    coordinator = cast.coordinator(spec, on_joined=fail)
    with pytest.raises(KeyError, match="a bug"):
        coordinator.rendezvous.wait_for([WORKER], SOON)
    assert "a bug" in caplog.text
    assert coordinator.log.events == [], "what never joined does not leave"


# What a service raises


def test_a_service_that_cannot_greet_refuses_the_coordinator_and_says_why(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task = cast.task(spec)
    task.service.failing["arrived"] = KeyError("a bug")
    coordinator = cast.coordinator(spec)
    assert "KeyError: 'a bug'" in said(task, 2)
    task.service.failing.clear()
    coordinator.rendezvous.wait_for([WORKER], SOON)


def test_a_service_that_cannot_let_go_ends_the_process(cast: Cast) -> None:
    spec = {"worker": [free_address()]}
    task, coordinator = cast.task(spec), cast.coordinator(spec)
    coordinator.rendezvous.wait_for([WORKER], SOON)
    task.service.failing["left"] = KeyError("a bug")
    coordinator.die()
    assert task.host.join() == EXIT_FAILED
    assert "KeyError: 'a bug'" in said(task, 2)
    assert task.log.kinds()[-1] == "endpoint closed"


# Tasks that the cluster does not know dial the coordinator


def test_a_worker_with_a_new_index_dials_the_coordinator(cast: Cast) -> None:
    spec = {"chief": [free_address()], "worker": [free_address()]}
    extra = cast.task(spec, Task("worker", 7))
    assert extra.host.address is None
    assert f"worker 7 dials the coordinator at {spec['chief'][0]}" in said(extra, 1)
    coordinator = cast.coordinator(spec)
    coordinator.rendezvous.wait_for([Task("worker", 7)], SOON)
    assert coordinator.rendezvous.address == spec["chief"][0]
    twin = cast.task(spec, Task("worker", 7))
    assert f"it is connected to {extra.host.peer} already" in said(twin, 2)
    coordinator.rendezvous.remove_task(Task("worker", 7))
    assert extra.host.join() == EXIT_DONE
    assert twin.host.join() == EXIT_REFUSED
    assert "worker 7 was taken out of its cluster" in twin.log.events[-3][1], "before it closed service and endpoint"


def test_a_worker_that_dials_with_another_secret_ends_with_a_message(cast: Cast, monkeypatch) -> None:
    spec = {"chief": [free_address()]}
    refusals, refused = Log(), Rendezvous._refused
    monkeypatch.setattr(Rendezvous, "_refused", lambda self, error: (refused(self, error), refusals.add("refused")))
    coordinator = cast.coordinator(spec)
    extra = cast.task(spec, Task("worker", 7), secret=OTHER_SECRET)
    assert extra.host.join() == EXIT_REFUSED
    assert re.search(r"worker 7 ends \(code 77\): the coordinator at .* does not know this cluster's", said(extra, 2))
    refusals.wait_for("refused")
    with pytest.raises(
        CommunicationTimeoutError, match=r"worker 7, which has no .*last refused there: .*worker 7, does not"
    ):
        coordinator.rendezvous.wait_for([Task("worker", 7)], 0.05)


def test_a_server_that_the_cluster_does_not_know_is_refused(cast: Cast) -> None:
    spec = {"chief": [free_address()]}
    cast.coordinator(spec)
    extra = cast.task(spec, Task("ps", 7))
    assert extra.host.join() == EXIT_REFUSED
    assert "ps 7 is not in its cluster" in said(extra, 2)


def test_a_task_without_any_address_is_an_error(cast: Cast) -> None:
    with pytest.raises(
        ClusterConfigError, match=r"worker 7 is not in the cluster, .*there is no chief that it could dial"
    ):
        cast.task({"ps": [free_address()]}, Task("worker", 7))


def test_a_port_in_use_names_the_task_and_leaves_nothing(cast: Cast, monkeypatch) -> None:
    monkeypatch.setattr(listener, "BIND_SECONDS", 0.05)
    spec = {"worker": [free_address()]}
    cast.task(spec)
    with pytest.raises(ClusterConfigError, match=f"worker 0 cannot listen on {spec['worker'][0]}"):
        cast.task(spec)
    chief = {"chief": [spec["worker"][0]]}
    with pytest.raises(ClusterConfigError, match=f"chief 0 cannot listen on {spec['worker'][0]}"):
        cast.coordinator(chief)


def test_an_endpoint_that_cannot_be_made_leaves_the_port_free(cast: Cast) -> None:
    spec = {"worker": [free_address()]}

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError("no such host")

    host = TaskHost(ClusterSpec(spec), WORKER, SECRET, StandInService(Log()), make_endpoint=fail)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no such host"):
        host.start()
    cast.task(spec)


# The host's thread


def test_a_thread_that_has_ended_answers_nobody() -> None:
    ended: list[Any] = []
    thread: EventThread[str] = EventThread("worker 0", on_end=ended.append)
    thread.start()
    assert thread.ask(lambda: 6 * 7) == 42
    with pytest.raises(ZeroDivisionError):
        thread.ask(lambda: 1 // 0)
    reached, leave = threading.Event(), threading.Event()

    def wait_and_end() -> str:
        reached.set()
        assert leave.wait(SOON)
        return "the end"

    thread.tell(wait_and_end)
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


def test_an_alarm_ends_the_thread_unless_it_is_put_off() -> None:
    ended: list[Any] = []
    thread: EventThread[str] = EventThread("worker 0", on_end=ended.append)
    thread.start()
    thread.ask(lambda: thread.set_alarm(0.0, lambda: "too late"))
    thread.join()
    assert ended == ["too late"]
    thread = EventThread("worker 0", on_end=ended.append)
    thread.start()
    thread.ask(lambda: (thread.set_alarm(0.0, lambda: "too late"), thread.set_alarm(None, lambda: "never")))
    thread.tell(lambda: "told")
    thread.join()
    assert ended == ["too late", "told"]


# Checks of a cluster


GOOD = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}


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
        ({"worker": ["w:1"], "ps": ["p:1"]}, "chief", 0, "task_type is 'chief', but .* need not be in the cluster"),
        (GOOD, "chief", 1, "task 1 of type 'chief', which the cluster lacks"),
        (GOOD, "worker", 2, r"it has \[0, 1\]"),
        ({**GOOD, "worker": ["w"]}, None, None, "worker 0 has address 'w'; write 'host:port'"),
        ({**GOOD, "worker": ["w:99999"]}, None, None, "worker 0 has address 'w:99999'"),
        ({**GOOD, "worker": ["w:x"]}, None, None, "worker 0 has address 'w:x'"),
        ({**GOOD, "worker": [":1"]}, None, None, "worker 0 has address ':1'"),
        ({**GOOD, "worker": ["http://w:1"]}, None, None, "worker 0 has address"),
        ({**GOOD, "worker": ["::1:1"]}, None, None, "worker 0 has address '::1:1'"),
        ({**GOOD, "worker": ["w:1", "p:1"]}, None, None, "worker 1 and ps 0 have the same address 'p:1'"),
    ],
)
def test_a_malformed_cluster_is_one_clear_error(cluster, task_type, task_id, says) -> None:
    with pytest.raises(ClusterConfigError, match=says):
        check_parameter_server_cluster(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id"),
    [
        (GOOD, None, None),
        (GOOD, "chief", 0),
        (GOOD, "worker", 1),
        (GOOD, "ps", None),
        ({"worker": ["w:1"], "ps": ["p:1"]}, None, None),
        ({"worker": {3: "w:1"}, "ps": ["p:1"]}, "worker", 3),
        (GOOD, "evaluator", 0),
        ({"worker": ["127.0.0.1:0", "127.0.0.1:0"], "ps": ["[::1]:0"]}, None, None),
    ],
)
def test_a_good_cluster_passes(cluster, task_type, task_id) -> None:
    check_parameter_server_cluster(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize("address", ["host:1", "[::1]:65535", "10.0.0.1:0"])
def test_addresses_are_taken_apart_and_put_together(address: str) -> None:
    assert join_address(*split_address(address, "somebody")) == address
