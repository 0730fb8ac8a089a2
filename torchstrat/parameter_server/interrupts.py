"""Ctrl-C between two calls of the coordinator's bookkeeping, and not in the middle of one.

`KeyboardInterrupt` comes between any two bytecodes of the main thread. A call that was left half-way would have taken a
batch from where it waits and not sent it, so that `join` of the next cell of a notebook waits for ever. It is held back
until the call is complete; a second one is not, for a server may not answer.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

# Without the search for an enum, which takes longer than all else here: it is asked in every `schedule`.
_current_handler = getattr(signal, "_signal", signal).getsignal


class _HeldBack:
    """``with held_back:`` on any thread, also within another. Takes the place of Python's own handler alone: who has
    set another one decides."""

    def __init__(self) -> None:
        self._depth = 0  # of the main thread; no other is interrupted
        self._has_come = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0 and _current_handler(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)  # IPython puts Python's own back for every cell
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth = max(self._depth - 1, 0)  # a second interrupt may have come in the middle of `let_through`
            if self._depth == 0:
                self.raise_what_has_come()

    def raise_what_has_come(self) -> None:
        if self._has_come:
            self._has_come = False
            raise KeyboardInterrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._depth and not self._has_come:
            self._has_come = True
        else:
            self._has_come = False
            signal.default_int_handler(number, frame)

    def let_through(self) -> _LetThrough:
        """For what waits in such a block."""
        return _LetThrough(self)

    def put_back(self) -> None:
        """Python's own handler is the one again, as other libraries expect where nobody has set any."""
        if threading.current_thread() is threading.main_thread() and _current_handler(signal.SIGINT) == (
            self._on_interrupt
        ):
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _LetThrough:
    def __init__(self, held_back: _HeldBack) -> None:
        self._held_back = held_back
        self._depth = 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._held_back.raise_what_has_come()
            self._depth, self._held_back._depth = self._held_back._depth, 0

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._held_back._depth = self._depth


held_back = _HeldBack()
