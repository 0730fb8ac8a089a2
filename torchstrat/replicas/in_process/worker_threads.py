"""Threads that are kept from run to run, and a cheap way for one thread to let another go on."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable

import torch


class Gate:
    """Where a thread waits for something to become true; another makes it true and then calls `open`.

    A pipe, because the kernel takes the reader of a pipe to run where its writer ran, which is about to sleep: 3 µs for
    a hand-over. A lock or a condition wakes the other thread on whichever core is idle, where it first waits for the
    interpreter and then for its memory: 7 to 40 µs.
    """

    _ends: tuple[int, ...] = ()  # until there is a pipe

    def __init__(self) -> None:
        self._ends = self._read, self._write = os.pipe()

    def wait(self) -> None:
        """For one thread at a time. It may come back too often (what an earlier wait did not need is still there), so
        it is to be called until what was waited for is true."""
        os.read(self._read, 1)

    def open(self) -> None:
        os.write(self._write, b"\0")

    def __del__(self) -> None:
        # Not before: whoever can still write must not write to what the number means next.
        for end in self._ends:
            with contextlib.suppress(OSError):
                os.close(end)


Job = Callable[[], Gate | None]
"""Returns the gate to open when the thread holds nothing of the job any more, if any."""


class Worker:
    """A daemon thread that runs one job after the other. Threads are kept because each new one would make its own
    OpenMP team at its first parallel operator."""

    def __init__(self, name: str) -> None:
        self.gate = Gate()
        self._jobs: collections.deque[Job | None] = collections.deque()
        self.thread = threading.Thread(target=_work, args=(self._jobs, self.gate), name=name, daemon=True)
        self.thread.start()

    def put(self, job: Job | None) -> Gate:
        """Have it run ``job`` after those that it was given before, once the returned gate is opened. None ends it."""
        self._jobs.append(job)
        return self.gate


class AutogradBacklog:
    """What backward passes that failed have left in the calling thread's queue.

    PyTorch frees it when the thread is gone, and needs Python for that. If Python is about to end by then, the process
    aborts ("terminate called without an active exception").
    """

    def __init__(self) -> None:
        with torch.enable_grad():
            self._leaf = torch.zeros((), requires_grad=True)
            self._first = self._leaf.neg()

    def drop(self) -> None:
        """Run a pass of the node that this thread has made first. Later ones go before it: those of a pass that is
        over are thrown away."""
        torch.autograd.grad(self._first, self._leaf, retain_graph=True)


def _work(jobs: collections.deque[Job | None], gate: Gate) -> None:
    backlog = AutogradBacklog()
    while True:
        while not jobs:
            gate.wait()
        job = jobs.popleft()
        if job is None:
            backlog.drop()
            return
        then = job()
        del job  # the last job must not keep a finished run alive
        if then is not None:
            then.open()
            del then


def _dismiss(workers: list[Worker]) -> None:
    for worker in workers:
        worker.put(None).open()
    for worker in workers:
        if worker.thread is not threading.current_thread():
            worker.thread.join(timeout=1.0)
    workers.clear()


class WorkerThreads:
    """The threads of one strategy: made on first use, ended by `close` or when the strategy is collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._workers: list[Worker] = []
        self._callers_gate: Gate | None = None
        self._finalizer = weakref.finalize(self, _dismiss, self._workers)

    def first(self, count: int) -> list[Worker]:
        while len(self._workers) < count:
            self._workers.append(Worker(f"{self._name}-{len(self._workers)}"))
        return self._workers[:count]

    @property
    def callers_gate(self) -> Gate:
        """Where the thread that uses these threads waits for them."""
        if self._callers_gate is None:
            self._callers_gate = Gate()
        return self._callers_gate

    def close(self) -> None:
        _dismiss(self._workers)
        self._callers_gate = None
