"""This process's ways to those of its cluster that run on the same host.

A way is looked for in the background as soon as a peer is known; until it is found, and where there is none, calls go
through RPC. It cannot come later: a process that listens does so from its first moment.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from torchstrat.errors import CommunicationError
from torchstrat.parameter_server.meeting.control import keep_out_of_children, shut_down
from torchstrat.parameter_server.same_host.callee import Callee, Serve
from torchstrat.parameter_server.same_host.caller import Caller
from torchstrat.parameter_server.same_host.channel import Channel
from torchstrat.parameter_server.same_host.greeting import SECONDS, be_greeted, greet, name_of
from torchstrat.parameter_server.same_host.pool import SharedPool
from torchstrat.parameter_server.same_host.process import Process
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.wire.envelopes import Envelopes

SWITCH = "TORCHSTRAT_SAME_HOST"
"""An environment variable: ``off`` for a process that is to use RPC alone."""

_BACKLOG = 128


def why_not() -> str | None:
    """Why this process cannot talk to others of its host through memory; None if it can."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return f"{SWITCH}=off"
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"it needs Linux, and this is {sys.platform}"
    return None


class Neighbours:
    """Thread-safe.

    Args:
        peer: this process.
        serve: answers requests, on the thread of the connection that they came by.
        on_sign: called at every sign of life, with the incarnation of who gave it.
        on_gone: called, on a thread of the connection, when a process that can be called has hung up: it has ended.
    """

    def __init__(
        self,
        peer: Peer,
        envelopes: Envelopes,
        serve: Serve,
        *,
        on_sign: Callable[[str], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.pool = SharedPool()
        self._peer, self._envelopes, self._serve = peer, envelopes, serve
        self._on_sign, self._on_gone = on_sign, on_gone
        self._changed = threading.Condition()
        self._callers: dict[str, Caller | str | None] = {}  # or why not; None: it is being found out
        self._callees: set[Callee] = set()
        self._closed = False
        self._wake_at = math.inf
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep_out_of_children(self._listening)
        self._listening.bind(name_of(peer))
        self._listening.listen(_BACKLOG)
        threading.Thread(target=self._listen, name="torchstrat-same-host", daemon=True).start()
        threading.Thread(target=self._watch_time, name="torchstrat-deadlines", daemon=True).start()

    # -- calling ----------------------------------------------------------------------------------------------------

    def add(self, peer: Peer) -> None:
        """Look for a way to this peer."""
        with self._changed:
            if self._closed or peer.incarnation in self._callers:
                return
            self._callers[peer.incarnation] = None
        threading.Thread(target=self._connect, args=(peer,), name=f"torchstrat-to-{peer.task}", daemon=True).start()

    def remove(self, peer: Peer) -> None:
        with self._changed:
            caller = self._callers.get(peer.incarnation)
            self._callers[peer.incarnation] = "it was removed"
            self._changed.notify_all()
        if isinstance(caller, Caller):
            caller.hang_up()

    def caller(self, incarnation: str) -> Caller | None:
        """The way to a peer, if it was found by now."""
        found = self._callers.get(incarnation)
        return found if isinstance(found, Caller) else None

    def wait_for_way(self, peer: Peer) -> str | None:
        """None if there is one, else why not. Waits until that is known; see `SECONDS`."""
        with self._changed:
            self._changed.wait_for(lambda: self._callers.get(peer.incarnation, "") is not None, 2 * SECONDS)
            found = self._callers.get(peer.incarnation)
        if isinstance(found, Caller):
            return None
        return found or "it is not known yet"

    def will_wait(self, seconds: float) -> None:
        """Somebody waits for an answer so long."""
        due = time.monotonic() + seconds
        if due < self._wake_at:
            with self._changed:
                self._wake_at = min(due, self._wake_at)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            ways: list[Caller | Callee] = [each for each in self._callers.values() if isinstance(each, Caller)]
            ways += self._callees
            self._changed.notify_all()
        shut_down(self._listening)
        self._listening.close()
        for way in ways:
            way.hang_up()
        self.pool.close()

    def _connect(self, peer: Peer) -> None:
        try:
            connection, pid = greet(peer, self._envelopes)
        except (OSError, CommunicationError) as error:
            self._found(peer, str(error))
            return
        channel = Channel(connection, self.pool)
        gone, sign = self._on_gone, self._on_sign
        caller = Caller(
            channel, self.pool, peer, Process(pid), on_broken=lambda: gone(peer), on_sign=lambda: sign(peer.incarnation)
        )
        self._found(peer, caller)

    def _found(self, peer: Peer, found: Caller | str) -> None:
        with self._changed:
            is_wanted = self._callers.get(peer.incarnation) is None and not self._closed
            if is_wanted:
                self._callers[peer.incarnation] = found
                self._changed.notify_all()
        if not is_wanted and isinstance(found, Caller):
            found.hang_up()

    def _watch_time(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._wake_at - time.monotonic()) > 0:
                    self._changed.wait(None if left == math.inf else left)
                if self._closed:
                    return
                callers = [each for each in self._callers.values() if isinstance(each, Caller)]
                self._wake_at = math.inf
            soonest = min((caller.expire(time.monotonic()) for caller in callers), default=math.inf)
            with self._changed:
                self._wake_at = min(self._wake_at, soonest)

    # -- answering --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors: those that are there go on
                continue
            threading.Thread(target=self._greeted, args=(connection,), name="torchstrat-greeting", daemon=True).start()

    def _greeted(self, connection: socket.socket) -> None:
        try:
            sender = be_greeted(connection, self._envelopes)
        except (OSError, CommunicationError):
            connection.close()
            return
        callee: Callee
        sign = self._on_sign

        def end() -> None:
            with self._changed:
                self._callees.discard(callee)

        callee = Callee(Channel(connection), sender, self._serve, on_sign=lambda: sign(sender.incarnation), on_end=end)
        with self._changed:
            if not self._closed:
                self._callees.add(callee)
                callee.start()
                return
        with contextlib.suppress(OSError):
            connection.close()
