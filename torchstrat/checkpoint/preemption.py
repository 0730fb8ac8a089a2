"""`PreemptionHandler`: told to end, save first, and ask to be run again.

Schedulers take machines back with a signal, and kill after a while what has not ended. A training that hears the signal
ends at a step boundary, saves, and exits with `EXIT_CODE`, so that whoever started it knows that it wants to go on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from torchstrat.core import context
from torchstrat.core.engine import Communicator, Work
from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.distributed.cluster import ProcessPlan

EXIT_CODE: Final = 75
"""EX_TEMPFAIL of <sysexits.h>: not a failure, "run me again". Also on systems whose ``os`` has no such name."""

_END = 0  # of the watchdog; no signal has this number
_TIMEOUT = timedelta(minutes=30)


class PreemptionHandler:
    """Turns SIGTERM into a question that the training loop asks after each step::

        with ts.PreemptionHandler(grace=timedelta(seconds=25)) as preemption:
            while step < steps:
                train(step)
                step += 1
                if preemption.should_stop():
                    manager.save(checkpoint, step)
                    sys.exit(preemption.exit_code)

    ``exit_code`` is 75 and means "run me again": ``torchstrat launch`` does that at once, unless it was itself what was
    told to end; torchrun starts all ranks again after any failure, ``--max-restarts`` times. Told to end itself,
    torchrun hands SIGTERM on to its ranks and kills them after 30 s. It tells all of their processes, and so do other
    schedulers: give a `DataLoader` with workers ``worker_init_fn=ts.data.outlive_preemption``.

    Inside the block the signals do nothing else, however often they come: a second one does not break a save. Outside
    it they do what they did before. A handler in Python that was there before is called as well, once.

    Args:
        grace: from the signal until the end of the block. A process that is still inside then says so and ends at once,
            with ``exit_code``; what it was saving is not there, and the checkpoint before it is. Choose less than what
            the scheduler waits before it kills: Kubernetes and torchrun 30 s unless told otherwise, Slurm its KillWait.
        signals: those that mean it; SIGUSR1 beside SIGTERM where Slurm is asked to warn (``--signal=USR1@60``).
        timeout: for the other processes of the job, in `should_stop`.

    Raises:
        InvalidArgumentError: ``grace`` or ``timeout`` is no time, or a signal cannot be handled.
        ContextError: the block was entered in another thread than the main one, where Python handles no signals.
    """

    exit_code: Final = EXIT_CODE

    def __init__(
        self,
        grace: timedelta = timedelta(seconds=25),
        *,
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        for name, value in (("grace", grace), ("timeout", timeout)):
            if not isinstance(value, timedelta):
                raise WrongTypeError(f"{name}={value!r} must be a timedelta, such as timedelta(seconds=25).")
            if value <= timedelta(0):
                raise InvalidArgumentError(f"{name}={value} must be more than 0.")
        if not isinstance(signals, Iterable):
            raise WrongTypeError(f"signals={signals!r} must be a tuple of signals; write signals=({signals!s},).")
        self._grace = grace
        self._signals = tuple(signals)
        for number in self._signals:
            if number not in {*signal.Signals} - _UNSTOPPABLE:
                raise InvalidArgumentError(
                    f"signals has {number!r}, which is no member of signal.Signals or one for which no process can "
                    "have a handler; write signals=(signal.SIGTERM, signal.SIGUSR1)."
                )
        if not self._signals:
            raise InvalidArgumentError("signals is empty; name at least one, such as signal.SIGTERM.")
        self._timeout = timeout
        self._received: signal.Signals | None = None
        self._stops = False  # agreed on by all processes
        self._agreement: StopAgreement | None = None
        self._watchdog: _Watchdog | None = None
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that came to this process inside the block; others of the job may have got one when it has
        not."""
        return self._received

    def should_stop(self) -> bool:
        """Whether to save and end now. Call it after each step.

        With several processes (torchrun) each one has to call it after the same steps, and all get the same answer,
        also when only one of them got a signal. So that nobody waits, they compare notes while the next step runs: the
        answer is True one call after the signal. Alone, it costs nothing and is True at once. Once True it stays so.

        Raises:
            CommunicationError: another process did not take part; the message names it.
            ContextError: called outside the block, or within a replica.
        """
        if self._watchdog is None:
            raise ContextError("should_stop was called outside the block of `with PreemptionHandler() as …`.")
        if context.get_replica_context() is not None and context.has_strategy():
            raise ContextError("should_stop was called within a replica; call it in the loop around strategy.run.")
        if not self._stops:
            agreement = self._agreed_with()
            told = self._received is not None
            self._stops = told if agreement is None else agreement.next(told)
            if self._stops:
                self._watchdog.saving = True
                self._watchdog.start_clock(self._signals[0])  # where no signal came to this process
        return self._stops

    def _agreed_with(self) -> StopAgreement | None:
        """How this process agrees with the others; None while it knows of none."""
        if self._agreement is None and _num_processes() > 1:
            self._agreement = StopAgreement.of_default_group(self._timeout)
        return self._agreement

    # ---- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                "PreemptionHandler has to be entered in the main thread, the only one in which Python handles signals; "
                f"this is thread {threading.current_thread().name!r}."
            )
        if self._watchdog is not None:
            raise ContextError("this PreemptionHandler is in use; make another one.")
        self._received, self._stops = None, False
        self._watchdog = _Watchdog(self._grace, self._signals)
        _leave_to_children(self._in_forked_child)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._agreement is not None:
                # After an error the others may be anywhere; `SystemExit` is how a block ends that has saved.
                self._agreement.close(wait=error is None or isinstance(error, SystemExit))
        finally:
            self._agreement = None
            self._put_handlers_back()
            if self._watchdog is not None:
                self._watchdog.close()
            self._watchdog = None

    def _put_handlers_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # else somebody has put another one in its place
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two bytecodes of the main thread: no locks, hence no threads and no logging."""
        if self._received is not None or self._watchdog is None:
            return
        self._received = signal.Signals(number)
        self._watchdog.start_clock(number)
        before = self._before.get(self._received)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _in_forked_child(self) -> None:
        """A child that was forked inside the block is another program to whoever signals it."""
        if self._watchdog is not None:
            self._put_handlers_back()
            self._watchdog.leave()
            self._watchdog = None

    def __repr__(self) -> str:
        state = "not in use" if self._watchdog is None else "stopping" if self._stops else "watching"
        return f"<PreemptionHandler of {', '.join(signal.Signals(number).name for number in self._signals)}, {state}>"


class _Watchdog:
    """Ends this process when ``grace`` has passed since a signal.

    It hears of the signal over a socket, and not from the handler alone: Python calls that when the main thread is
    back in the interpreter, and a main thread that waits in a C function for a process that died is not for minutes.
    ``signal.set_wakeup_fd`` writes to the socket at the moment of the signal. There is one such descriptor per process;
    where it is taken (asyncio does) the clock starts with the handler.
    """

    def __init__(self, grace: timedelta, signals: tuple[signal.Signals, ...]) -> None:
        self.saving = False
        """Whether the step boundary has been reached, for the message."""
        self._grace_seconds = grace.total_seconds()
        self._signals = signals
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._has_wakeup = before == -1
        if not self._has_wakeup:
            signal.set_wakeup_fd(before)
        self._thread = threading.Thread(target=self._watch, name="torchstrat-preemption-watchdog", daemon=True)
        self._thread.start()

    def start_clock(self, number: int) -> None:
        """Unless it runs. Takes no lock."""
        self._say(number)

    def close(self) -> None:
        self._leave_wakeup()
        self._say(_END)
        self._thread.join()
        self._ear.close()
        self._mouth.close()

    def leave(self) -> None:
        """In a forked child, where there is no thread and the socket is the parent's."""
        self._leave_wakeup()
        self._ear.close()
        self._mouth.close()

    def _leave_wakeup(self) -> None:
        if self._has_wakeup:
            now = signal.set_wakeup_fd(-1)
            if now != self._mouth.fileno():  # somebody has put another one in its place
                signal.set_wakeup_fd(now)

    def _say(self, number: int) -> None:
        try:
            self._mouth.send(bytes([number]))
        except BlockingIOError:  # full: thousands of signals, of which one was enough; the end is not among them
            if number == _END:
                self._ear.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            self._ear.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            try:
                heard = self._ear.recv(4096)
            except TimeoutError:
                self._end_process()
                return
            if not heard or _END in heard:
                return
            # Other signals than ours come this way too, whenever they have a handler in Python.
            if deadline is None and any(number in heard for number in self._signals):
                deadline = time.monotonic() + self._grace_seconds

    def _end_process(self) -> None:
        names = " or ".join(signal.Signals(number).name for number in self._signals)
        late = "its save had not ended" if self.saving else "it had not reached the end of a step to save after"
        message = (
            f"torchstrat: {self._grace_seconds:g} s after {names}, the grace it had, {late}. The process ends now with "
            f"status {EXIT_CODE}; the newest checkpoint is the one before. Give PreemptionHandler a longer grace, and "
            "the process as long before it is killed, or let it save less or to a faster disk. This is where it was:\n"
        )
        os.write(2, message.encode())  # not sys.stderr: the main thread may hold its lock
        faulthandler.dump_traceback(2)
        os._exit(EXIT_CODE)


def _num_processes() -> int:
    """Of the default process group. Asked without importing torch.distributed for it."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_available() and dist.is_initialized() else 1


_left: set[weakref.WeakMethod[Callable[[], None]]] = set()
_hooked = False


def _leave_to_children(leave: Callable[[], None]) -> None:
    """Let children that are forked from now on have the signals' earlier meanings.

    They inherit handlers and the wakeup descriptor, through which a signal to a child would start the clock of this
    process. A hook cannot be taken back, so there is one for all handlers, set by the first that is used.
    """
    global _hooked
    _left.add(weakref.WeakMethod(leave, _left.discard))
    if not _hooked:
        os.register_at_fork(after_in_child=_in_forked_child)
        _hooked = True


def _in_forked_child() -> None:
    for one in list(_left):
        if (leave := one()) is not None:
            leave()


_UNSTOPPABLE = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}


_WHAT = "the agreement to stop (PreemptionHandler.should_stop)"


class StopAgreement:
    """One question per step: has anybody been told to stop?

    Each question's sum over the processes is started and left to itself while the next step runs; `next` answers with
    the sum of the question before. So the answer comes one step late and nobody waits for it: what is left of the cost
    is that of starting a sum of one number. Asking for the answer at once would put a round trip into every step.

    Args:
        communicator: Nobody else uses it; `close` closes it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._told = torch.zeros(1, dtype=torch.int32)
        self._work: Work | None = None

    @classmethod
    def of_default_group(cls, timeout: timedelta) -> StopAgreement:
        """Between the processes of torch.distributed's default group. Each of them calls it."""
        # Imported here: only where there are several processes.
        from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator

        rank, size = dist.get_rank(), dist.get_world_size()
        plan = ProcessPlan(rank, size, rank, size, None, False, f"rank {rank} of {size}")
        return cls(ProcessGroupCommunicator(plan, "cpu", timeout))

    def next(self, told: bool) -> bool:
        """Whether anybody said ``told`` in the call before this one; the same answer in all processes.

        Collective: every process makes its n-th call after the same step.
        """
        if self._answer():
            return True
        self._told.fill_(int(told))
        self._work = self._communicator.all_reduce(self._told, _WHAT)
        return False

    def close(self, *, wait: bool) -> None:
        """Nothing is under way after it. ``wait``: for the last answer, which all processes have asked for."""
        try:
            if wait:
                self._answer()
        finally:
            self._communicator.close()

    def _answer(self) -> bool:
        if self._work is None:
            return False
        work, self._work = self._work, None
        work.wait()
        return bool(self._told.item())
