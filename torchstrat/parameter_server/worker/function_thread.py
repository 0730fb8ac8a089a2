"""The one thread on which a worker runs functions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class FunctionThread(Executor):
    """Runs what is submitted, in this order, on one thread that starts with the first of it.

    Unlike `ThreadPoolExecutor` it can run the next work *within* the present one, for work that arrived too early.
    Python waits for the thread at its end, so `shutdown` has to be called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises `RuntimeError` after `shutdown`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} has been shut down")
            self._works.put((future, fn, args, kwargs))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name)
                self._thread.start()
        return future

    def run_next(self) -> bool:
        """In submitted work: wait for the next one and run it. False if there will be none, since this is the end."""
        work = self._works.get()
        if work is None:
            self._works.put(None)  # for the loop, or a run_next further out
            return False
        future, fn, args, kwargs = work
        if future.set_running_or_notify_cancel():
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # the work's, whatever it is; the thread is not its to end
                future.set_exception(error)
            else:
                future.set_result(result)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                if cancel_futures:
                    self._cancel_all()
                self._works.put(None)
            thread = self._thread
        if wait and thread is not None:
            thread.join()

    def _cancel_all(self) -> None:
        while True:
            try:
                work = self._works.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                work[0].cancel()
                work[0].set_running_or_notify_cancel()

    def _loop(self) -> None:
        while self.run_next():
            pass
