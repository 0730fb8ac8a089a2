"""Several bodies of code, one thread each, of which exactly one runs at a time.

The bodies take turns at *meetings*: a body that calls `Baton.meet` stops until every other body has called it too. In
between each runs undisturbed, so plain code that shares Python objects needs no locks, and the order is the same in
every run: body 0 up to its first meeting, then body 1, and so on. Nothing here knows about tensors.

Threads are kept from run to run, and one lets another go on through a `Gate`, which is cheap.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import enum
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.core.errors import ReplicaDivergenceError


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
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _dismiss, self._workers)

    def first(self, count: int) -> list[Worker]:
        if self._process != os.getpid():  # a fork, which has none of these threads, and whose gates are its parent's
            self._workers.clear()
            self._process, self._callers_gate = os.getpid(), None
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


Combine = Callable[[dict[int, Any]], dict[int, Any]]
"""From every body's payload, by id, to every body's result. Runs once, while all bodies stand still."""


class ReplicaAborted(BaseException):
    """Ends a body because another one failed. Not an `Exception`, so that user code does not swallow it."""


class _State(enum.Enum):
    NEW = "not started"
    READY = "may go on when its turn comes"
    RUNNING = "holds the baton"
    WAITING = "stands at a meeting"
    ENDED = "returned or raised"


class _Interruption:
    """Lets the calling thread end the body that runs, by an exception set in its thread, at most once in a run.

    The exception may come up at any bytecode, so it is only sent while the thread is in a body's own code, and taken
    back if it has not come up by the time that the thread leaves it: a hand-over must never be torn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = False
        self._called_off = False
        self._sent_to: int | None = None
        self._target: int | None = None  # the thread that is in a body's own code
        self._shields = 0  # of the body that runs

    def start(self) -> bool:
        """On a body's thread: the run begins. False if it has been interrupted before."""
        with self._lock:
            self._started = True
            return not self._called_off

    def send(self) -> bool:
        """On the calling thread: interrupt the run. Whether it has begun, so that its end has to be waited for."""
        with self._lock:
            if not self._started:
                self._called_off = True
                return False
            if self._target is not None and not self._shields:
                self._sent_to = self._target
                _set_exception(self._target)
            else:
                self._called_off = True
            return True

    def enter(self, shields: int) -> None:
        """The thread is now in a body's own code, within as many shields."""
        self._shields = shields
        self._target = threading.get_ident()

    def leave(self) -> int:
        """The thread leaves it. Returns how many shields it is in, for `enter`."""
        with self._lock:
            self._target = None
            if self._sent_to == threading.get_ident():
                _take_back()  # every hand-over looks for the error that it stands for
        shields, self._shields = self._shields, 0
        return shields

    def shield(self) -> None:
        """The body's own code begins something that must not be left half-done."""
        with self._lock:
            if not self._shields and self._sent_to == threading.get_ident():
                _take_back()
            self._shields += 1
            late = self._shields == 1 and self._is_sent
        if late:
            self.unshield()

    def unshield(self) -> None:
        with self._lock:
            self._shields -= 1
            late = not self._shields and self._is_sent
        if late:
            raise ReplicaAborted

    @property
    def _is_sent(self) -> bool:
        return self._called_off or self._sent_to is not None


def _set_exception(thread_id: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(ReplicaAborted))


def _take_back() -> None:
    """What was sent to this thread, and may not have come, comes here: another one in its place.

    To send none in its place would take it back too. But Python 3.11 then believes, for as long as the process lives,
    that one is on its way, and where it is traced (by a debugger, or coverage) the next call never begins.
    """
    try:
        _set_exception(threading.get_ident())
        for _ in range(100):  # at whose end a thread looks for it, each time
            pass
    except ReplicaAborted:
        pass


class Baton:
    """One run of several bodies. ``holder`` is the id of the body that runs now.

    ``on_switch(id)`` is called just before a body gets its turn, on whichever thread hands over; with None before a
    `Combine` runs and, if `run` is not told what to do at the ``end``, when the run is over.
    """

    def __init__(self, ids: Sequence[int], threads: WorkerThreads, on_switch: Callable[[int | None], None]) -> None:
        self._ids = list(ids)
        self._on_switch = on_switch
        self._states = dict.fromkeys(self._ids, _State.NEW)
        # All at once and here: what cannot be made must not be missed in the midst of a run.
        self._workers = dict(zip(self._ids, threads.first(len(self._ids)), strict=True))
        self._callers_gate = threads.callers_gate
        self._calls: dict[int, str] = {}
        self._payloads: dict[int, object] = {}
        self._results: dict[int, object] = {}
        self._combine: Combine | None = None
        self._meetings = 0
        self._returned: dict[int, object] = {}
        self._error: BaseException | None = None
        self._failed: int | None = None
        self._body: Callable[[int], object] | None = None
        self._begin: Callable[[], None] | None = None
        self._end: Callable[[BaseException | None], None] | None = None
        self._interruption = _Interruption()
        self.shield: Callable[[], None] = self._interruption.shield
        """For the body that holds the baton: from here to `unshield` Ctrl-C does not end it. Calls nest."""
        self.unshield: Callable[[], None] = self._interruption.unshield
        """Ends what `shield` began; a Ctrl-C that came in between ends the body now."""
        self.holder: int | None = None
        self.is_begun = False
        self.is_over = False

    # -- the caller's side ------------------------------------------------------------------------------------------

    def run(
        self,
        body: Callable[[int], object],
        begin: Callable[[], None] | None = None,
        end: Callable[[BaseException | None], None] | None = None,
    ) -> dict[int, object]:
        """Run ``body(id)`` for every id; what each returned. The first exception of any body ends all and is raised.

        ``begin()`` is called before the first body, and ``end(error)`` after the last one has ended or where ``begin``
        has raised, both on the bodies' threads: the calling thread, where Ctrl-C arrives, does nothing but wait, so
        neither is ever left half-done.

        A `KeyboardInterrupt` in the calling thread ends every body at its next meeting, or within its Python code (what
        stands between `shield` and `unshield` goes on to its end). If a second one comes before they have ended, it is
        raised at once, and ``is_over`` stays False until they have.
        """
        self._body, self._begin, self._end = body, begin, end
        self.is_begun = True
        try:
            self._workers[self.first].put(self._launch).open()
            self._wait_for_end()
        except BaseException as interruption:  # Ctrl-C, or an exception set from outside
            self._error = self._error or interruption
            if self._interruption.send():
                self._wait_for_end()
            else:
                self.is_over = True
        returned, error = self._returned, self._error
        # What a run has held must go with it: these would form cycles, and its batch wait for the garbage collector.
        self._body = self._begin = self._end = self._combine = self._error = None
        self._calls, self._payloads, self._results, self._returned = {}, {}, {}, {}
        if error is None:
            return returned
        try:
            raise error
        finally:
            del error, returned

    def _wait_for_end(self) -> None:
        while not self.is_over:
            self._callers_gate.wait()

    @property
    def first(self) -> int:
        """The id of the body that always goes first."""
        return self._ids[0]

    @property
    def failed_replica(self) -> int | None:
        """The id of the body whose own code raised, once `run` has failed that way."""
        return self._failed

    # -- the bodies' side -------------------------------------------------------------------------------------------

    def meet(self, call: str, payload: object, combine: Combine) -> Any:
        """Wait for all bodies to come here with the same ``call``, and return this body's result of ``combine``.

        ``combine`` is the first body's. Raises `ReplicaDivergenceError` in all of them if one made another call or
        finished without making this one.
        """
        me = self.holder
        assert me is not None, "meet() is for the body that holds the baton"
        depth = self._interruption.leave()
        if self._error is not None:
            raise ReplicaAborted
        self._calls[me] = call
        self._payloads[me] = payload
        if me == self._ids[0]:
            self._combine = combine
        self._states[me] = _State.WAITING
        gate, own = self._pass_on(), self._workers[me].gate
        if gate is not own:
            gate.open()
        while self._states[me] is not _State.RUNNING:
            own.wait()
        if self._error is not None:
            raise ReplicaAborted
        result = self._results.pop(me)
        self._interruption.enter(depth)
        return result

    # These return the gate of the thread that goes on. Whoever opens it has to wait or end then; that thread may be
    # awake already, and goes on as soon as it sees that it can.

    def _pass_on(self) -> Gate:
        """After the holder stopped or ended: the next body's turn, the meeting, or the end of the run."""
        if self._error is not None:
            return self._unwind()
        for one in self._ids:
            if self._states[one] in (_State.NEW, _State.READY):
                return self._hand_to(one)
        return self._close_meeting()

    def _close_meeting(self) -> Gate:
        waiting = [one for one in self._ids if self._states[one] is _State.WAITING]
        if not waiting:
            return self._finish()
        self.holder = None
        try:
            self._on_switch(None)
            self._check_agreement(waiting)
            assert self._combine is not None
            self._results = self._combine(self._payloads)
        except BaseException as error:
            self._error = self._error or error
            return self._unwind()
        self._meetings += 1
        self._calls, self._payloads = {}, {}
        for one in waiting:
            self._states[one] = _State.READY
        return self._hand_to(waiting[0])

    def _check_agreement(self, waiting: list[int]) -> None:
        ended = [one for one in self._ids if self._states[one] is _State.ENDED]
        if not ended and len(set(self._calls.values())) == 1:
            return
        doing = [
            f"replica {one} {'has finished' if one in ended else f'called {self._calls[one]}'}" for one in self._ids
        ]
        raise ReplicaDivergenceError(
            f"the replicas no longer make the same calls (at joint call {self._meetings + 1} of this run): "
            + ", ".join(doing)
            + ". Every replica has to make the same optimizer steps, backward passes, collectives and merge calls, in "
            "the same order; look for a branch that depends on the replica's data or id."
        )

    def _unwind(self) -> Gate:
        """Wake the bodies that wait, one after the other, so that each ends with `ReplicaAborted`."""
        for one in self._ids:
            if self._states[one] in (_State.WAITING, _State.READY):
                return self._hand_to(one)
        return self._finish()

    def _finish(self) -> Gate:
        self.holder = None
        try:
            if self._end is None:
                self._on_switch(None)
            else:
                self._end(self._error)
        except BaseException as error:
            self._error = self._error or error
        self.is_over = True
        return self._callers_gate

    def _hand_to(self, one: int) -> Gate:
        if self._states[one] is not _State.NEW:
            self._take_turn(one)
            return self._workers[one].gate
        if not self._take_turn(one):
            return self._unwind()
        return self._workers[one].put(lambda: self._main(one))

    def _take_turn(self, one: int) -> bool:
        """Make it the turn of a body. False if that failed and it has not begun yet; then it never does."""
        try:
            self._on_switch(one)
        except BaseException as error:
            self._error = self._error or error
            if self._states[one] is _State.NEW:
                return False
        self.holder = one
        self._states[one] = _State.RUNNING
        return True

    def _launch(self) -> Gate | None:
        if not self._interruption.start():
            return None  # interrupted before anything was done
        try:
            if self._begin is not None:
                self._begin()
        except BaseException as error:
            self._error = self._error or error
        if self._error is not None or not self._take_turn(self.first):
            return self._finish()
        return self._main(self.first)

    def _main(self, me: int) -> Gate:
        error = self._run_body(me)
        if error is not None and not isinstance(error, ReplicaAborted) and self._error is None:
            self._error, self._failed = error, me
        del error
        self._states[me] = _State.ENDED
        return self._pass_on()

    def _run_body(self, me: int) -> BaseException | None:
        assert self._body is not None
        try:
            self._interruption.enter(0)
            try:
                self._returned[me] = self._body(me)
            finally:
                self._interruption.leave()
        except BaseException as error:
            self._interruption.leave()  # again, if the first call was where Ctrl-C arrived
            return error
        return None
