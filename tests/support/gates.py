"""Gates that functions on a cluster of threads wait at, so that a test decides when they go on.

In a module of its own: a function that travels takes the functions of its own module along, and locks cannot travel.
"""

from __future__ import annotations

import threading

DEADLINE_SECONDS = 60

_gates: dict[str, threading.Event] = {}
_arrived: dict[str, threading.Semaphore] = {}


def close_gate(name: str) -> threading.Event:
    """Whoever calls `pass_gate` with this name waits from now on, until the event is set."""
    _gates[name], _arrived[name] = threading.Event(), threading.Semaphore(0)
    return _gates[name]


def pass_gate(name: str) -> str:
    _arrived[name].release()
    assert _gates[name].wait(DEADLINE_SECONDS), f"nobody opened the gate {name!r}"
    return "through"


def await_arrivals(name: str, number: int) -> None:
    """Until that many calls of `pass_gate` have begun."""
    for _ in range(number):
        assert _arrived[name].acquire(timeout=DEADLINE_SECONDS)


_runs: list[object] = []


def note_run(what: object) -> object:
    """In a function, wherever it runs: that it ran."""
    _runs.append(what)
    return what


def take_runs() -> list[object]:
    """What `note_run` was called with since the last time."""
    runs = _runs.copy()
    _runs.clear()
    return runs
