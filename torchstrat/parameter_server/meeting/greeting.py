"""What a coordinator and a task say to each other on a fresh control connection, and afterwards.

::

    coordinator → task    coordinator   its Peer
    task → coordinator    task          its Peer, and the status of its service; or: refused
    coordinator → task    welcome       it can be called by the task from now on; or: refused, fenced
    task → coordinator    ready         it has told its service, and can be called; or: refused

Neither is told of the other before the other can be called, and no call of a new coordinator reaches a service that has
not heard of it. Then the connection stays open. ``goodbye`` from either side is an orderly end, ``fenced`` tells a task
that its process was given up, ``ping`` is answered by ``pong``; a connection that ends without a word is a death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchstrat.errors import CommunicationError, FencedError
from torchstrat.parameter_server.meeting.control import ControlChannel
from torchstrat.parameter_server.tasks import Peer, Task

GREETING_SECONDS = 10.0
"""For each answer while greeting. The other side may be asking its present coordinator whether it is alive."""

MESSAGE_GOODBYE, MESSAGE_FENCED, MESSAGE_PING, MESSAGE_PONG = "goodbye", "fenced", "ping", "pong"

BUSY, REMOVED, MISTAKEN, FAILED = "busy", "removed", "mistaken", "failed"
"""Why a connection is refused: by another process's leave only; because the task was taken out of the cluster; because
the two do not fit, so that trying again is no use; because the service raised."""


class RefusedError(CommunicationError):
    """The other side is of this cluster and does not want this process. ``why``: one of the kinds above."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True)
class Greeted:
    """A task as it introduced itself."""

    peer: Peer
    status: Mapping[str, Any]


def peer_to_plain(peer: Peer) -> dict[str, Any]:
    """As a control message carries it."""
    return {
        "job": peer.task.job,
        "index": peer.task.index,
        "incarnation": peer.incarnation,
        "url": peer.url,
        "host": peer.host,
        "pid": peer.pid,
    }


def peer_from_plain(plain: Mapping[str, Any]) -> Peer:
    """The inverse of `peer_to_plain`."""
    task = Task(str(plain["job"]), int(plain["index"]))
    return Peer(task, str(plain["incarnation"]), str(plain["url"]), str(plain["host"]), int(plain["pid"]))


def greet_task(
    channel: ControlChannel,
    coordinator: Peer,
    *,
    given_up: Callable[[Peer], str | None],
    add_peer: Callable[[Peer], None] | None,
) -> Greeted:
    """The coordinator's side.

    Args:
        given_up: Says why a process was given up, None if it was not.
        add_peer: Makes the task callable here.

    Raises:
        RefusedError: the task does not want this coordinator now.
        FencedError: the task's process was given up; it has been told.
        CommunicationError: the connection broke, or the task does not answer.
    """
    channel.send({"type": "coordinator", "peer": peer_to_plain(coordinator)})
    answer = _expect(channel, "task")
    peer = peer_from_plain(answer["peer"])
    reason = given_up(peer)
    if reason is not None:
        channel.send({"type": MESSAGE_FENCED, "reason": reason})
        raise FencedError(f"{peer} was given up ({reason}); it has been told to start again.")
    if add_peer is not None:
        add_peer(peer)
    channel.send({"type": "welcome"})
    _expect(channel, "ready")
    return Greeted(peer, answer["status"])


def hear_coordinator(channel: ControlChannel) -> Peer:
    """The task's side, first half: who wants to be its coordinator."""
    return peer_from_plain(_expect(channel, "coordinator")["peer"])


def answer_coordinator(channel: ControlChannel, me: Peer, status: Mapping[str, Any]) -> None:
    """The task's side, second half; then the service is told, and `say_ready`.

    Raises:
        FencedError: this process was given up.
        RefusedError: the coordinator does not want this task.
    """
    channel.send({"type": "task", "peer": peer_to_plain(me), "status": dict(status)})
    _expect(channel, "welcome")


def say_ready(channel: ControlChannel) -> None:
    """The service knows its coordinator."""
    channel.send({"type": "ready"})


def say_goodbye(channel: ControlChannel, reason: str) -> None:
    """An orderly end: of the coordinator, which has finished, or of the task, which leaves."""
    channel.send({"type": MESSAGE_GOODBYE, "reason": reason})


def refuse(channel: ControlChannel, why: str, message: str) -> None:
    """Tell the other side why it is not wanted."""
    channel.send({"type": "refused", "why": why, "message": message})


def _expect(channel: ControlChannel, kind: str) -> dict[str, Any]:
    message = channel.receive(GREETING_SECONDS)
    if message["type"] == kind:
        return message
    if message["type"] == MESSAGE_FENCED:
        raise FencedError(message["reason"])
    if message["type"] == MESSAGE_GOODBYE:
        raise RefusedError(f"{channel.name} says good-bye: {message['reason']}", BUSY)
    if message["type"] == "refused":
        raise RefusedError(f"{channel.name} refuses: {message['message']}", message["why"])
    raise CommunicationError(f"{channel.name} said {message['type']!r} where {kind!r} was expected.")
