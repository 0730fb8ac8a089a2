"""Waiting: the line on the terminal that says for what, and a port that somebody is to listen on."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

AFTER_SECONDS = 3.0
_EVERY_SECONDS = 1.0
_LOOK_SECONDS = 0.02

_speaking = threading.Lock()
"""One line at a time: what is waited for within a wait belongs to it."""


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody reads ``stream`` as it is written."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no stream at all (pythonw), or closed
        return False


@contextlib.contextmanager
def shown(what: str, *, here: bool = True, after_seconds: float = AFTER_SECONDS) -> Iterator[None]:
    """Say on standard error what the block waits for, once it has waited for a few seconds, and for how long.

    Nothing happens where standard error is no terminal, or where another wait is shown already.

    Args:
        what: such as "restoring checkpoints/step-00000100".
        here: whether this process speaks for the job.
    """
    stream = sys.stderr
    if not (here and is_terminal(stream) and _speaking.acquire(blocking=False)):
        yield
        return
    ended = threading.Event()
    line = threading.Thread(
        target=_tell, args=(stream, what, ended, after_seconds), name="torchstrat-waiting", daemon=True
    )
    line.start()
    try:
        yield
    finally:
        ended.set()
        line.join()
        _speaking.release()


def _tell(stream: TextIO, what: str, ended: threading.Event, after_seconds: float) -> None:
    began, told = time.monotonic(), False
    with contextlib.suppress(OSError, ValueError):  # the terminal has gone: the wait goes on without
        while not ended.wait(_EVERY_SECONDS if told else after_seconds):
            stream.write(f"\rtorchstrat: {what}, {time.monotonic() - began:.0f} s")
            stream.flush()
            told = True
        if told:
            stream.write(f"\rtorchstrat: {what}, {time.monotonic() - began:.0f} s\n")
            stream.flush()


def is_listening(address: str, timeout_seconds: float = 1.0) -> bool:
    """Whether somebody accepts connections at ``host:port``. The connection is closed without a word."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
    except OSError:
        return False
    return True


def wait_for_listener(address: str, seconds: float) -> None:
    """Until somebody listens at ``host:port``.

    Raises:
        TimeoutError: nobody does, after ``seconds``.
    """
    until = time.monotonic() + seconds
    while not is_listening(address, max(0.1, min(5.0, until - time.monotonic()))):
        if time.monotonic() > until:
            raise TimeoutError(f"nobody listens at {address}")
        time.sleep(_LOOK_SECONDS)
