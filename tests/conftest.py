"""What holds for every test: a marker by its folder, a deadline, and nothing left behind.

A test that leaves a thread, a child process or a changed environment variable fails, even if it passed: the next test
would be the one to suffer. Whatever it left is ended or put back first, so that only one test is blamed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest

from tests.child_processes import children_of
from tests.patience import Patience

# A busy machine makes any example slow, once; what really hangs meets the test's deadline.
hypothesis.settings.register_profile("torchstrat", deadline=None)
hypothesis.settings.load_profile("torchstrat")

TESTS = Path(__file__).parent

DEADLINE_SECONDS = {
    "unit": 60,  # a unit test takes a quarter of a second; the rest is `import torch` on a busy machine
    "conformance": 120,
    "matrix": 240,
    "programs": 300,  # the first program of a library waits for three processes to import it
    "multiprocess": 240,
    "faults": 240,
    "launch": 420,
    "tpu": 240,  # compiling a few programs for eight virtual devices takes a minute on a busy core
}
HARD_STOP_AFTER_SECONDS = 60
"""Given to a test past its deadline to unwind. After that it hangs where no Python exception reaches it."""

GRACE_SECONDS = 10.0
"""For threads and processes that are on their way out when the test returns. (A thread that had a call to a server when
the connection ended looks for some seconds less whether that process has ended, too.)"""


_stderr = 2
"""What pytest was started with. During a test another file, its capture's, is in this place: a hard stop loses it."""


def pytest_configure() -> None:
    global _stderr
    _stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ else 2
    # Of whatever compiles: a pool of compilers takes longer to start than what it compiles here, and outlives a test.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # A shell starts background jobs with Ctrl-C ignored, and processes hand that down: tests that interrupt programs
    # would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = _folder(item)
        if folder in DEADLINE_SECONDS:
            item.add_marker(getattr(pytest.mark, folder))


def pytest_collection_finish() -> None:
    """What exists now stays: half a second of each collection of garbage would go into looking at it again."""
    gc.freeze()
    if torch := sys.modules.get("torch"):
        # Each `torch.manual_seed` keeps the stack, as text, for accelerators that have not been used: most of its time.
        for kind in (torch.cuda, torch.xpu):
            kind.traceback = types.SimpleNamespace(**{**vars(traceback), "format_stack": list})


def _folder(item: pytest.Item) -> str:
    relative = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else item.path
    return relative.parts[0]


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that takes too long, showing where every thread was; end pytest if not even that helps. On a machine
    that is busy with others it may take longer."""
    marker = request.node.get_closest_marker("deadline")
    seconds = marker.args[0] if marker else DEADLINE_SECONDS.get(_folder(request.node), 240)

    patience = Patience(seconds)

    def on_alarm(_signal: int, _frame: FrameType | None) -> None:
        left = patience.left()
        if left > 0:
            watch(left)
            return
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        pytest.fail(f"over its deadline of {seconds} s; the threads' stacks are on stderr", pytrace=True)

    def watch(left: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, left)
        faulthandler.dump_traceback_later(left + HARD_STOP_AFTER_SECONDS, exit=True, file=_stderr)

    before = signal.signal(signal.SIGALRM, on_alarm)
    watch(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def nothing_left_behind(deadline: None) -> Iterator[None]:
    """Fail a test that leaks threads, child processes or changes to the environment or the working directory."""
    threads, processes = set(threading.enumerate()), _all_children()
    environment, folder = dict(os.environ), os.getcwd()
    yield
    problems = [
        *_leaked("thread", lambda: _new_threads(threads), end=lambda _thread: None),
        *_leaked("child process", lambda: _new_processes(processes), end=_kill),
        *_changed_environment(environment),
    ]
    if os.getcwd() != folder:
        problems.append(f"working directory left at {os.getcwd()}")
        os.chdir(folder)
    if problems:
        pytest.fail("the test left behind: " + "; ".join(problems), pytrace=False)


def _leaked(kind: str, find: Callable[[], Any], end: Callable[[Any], None]) -> list[str]:
    until = time.monotonic() + GRACE_SECONDS
    while (found := find()) and time.monotonic() < until:
        time.sleep(0.02)
    for leak in found:
        end(leak)
    return [f"{kind} {leak}" for leak in found]


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before
        # A thread that C++ made (autograd's workers live as long as the process) and that once ran Python.
        and not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(("tqdm", "TMonitor"))  # tqdm keeps its single one for the next use
        and type(thread).__name__ != "TMonitor"
    ]


def _new_processes(before: set[int]) -> list[tuple[int, str]]:
    """Process ids, and commands, of those that have not ended.

    By their ids alone: one that was about to become another program then (exec) had no command yet, or its parent's.
    """
    new = []
    for pid in _all_children() - before:
        folder = Path("/proc", str(pid))
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            command = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it ended in between
            continue
        # One tracker and one fork server per process, started by multiprocessing at first use and kept on purpose.
        is_kept = "resource_tracker" in command or pid == _fork_server()
        if state != "Z" and not is_kept:
            new.append((pid, command))
    return new


def _all_children() -> set[int]:
    """Of this process and of its fork server."""
    fork_server = _fork_server()
    return children_of(os.getpid()) | (set() if fork_server is None else children_of(fork_server))


def _fork_server() -> int | None:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined,no-any-return]


def _kill(child: tuple[int, str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child[0], signal.SIGKILL)


_KEPT_BY_LIBRARIES = (
    *("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_", "COLUMNS", "LINES"),
    "XLA_USE_SPMD",  # where torch_xla keeps the setting itself: a process that loses it is no longer in SPMD
)
"""Prefixes of variables that pytest, torch.compile, OpenMP and torch_xla set for themselves, once per process."""


def _changed_environment(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    changed = [
        name
        for name in (sorted(before.keys() | now.keys()) if now != before else ())
        if before.get(name) != now.get(name) and not name.startswith(_KEPT_BY_LIBRARIES)
    ]
    problems = [f"environment {name}={now.get(name)!r} (was {before.get(name)!r})" for name in changed]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return problems
