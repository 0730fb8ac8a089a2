"""Having the next batches ready: read, and copied to the replicas' devices, before they are asked for.

The dataset's own code runs in the thread that asks, as in a PyTorch loop, unless data-loading workers run it or the
user asked for a larger buffer: random draws in a thread of ours would mix with those of the training step, and no run
could be repeated. Copies to an accelerator always run ahead, in the background.
"""

from __future__ import annotations

import enum
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, Generic, TypeGuard, TypeVar

import torch

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.data import marks, rows
from torchstrat.data.streams import END, Step

T = TypeVar("T")
JOIN_SECONDS: Final = 10.0


class Ahead(enum.Enum):
    """What a `Prefetcher` does before it is asked."""

    NOTHING = "nothing"
    COPY = "copy"  # reads in the caller's thread, one element ahead; copies in the background
    READ_AND_COPY = "read and copy"  # both in the background


_Jobs = queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None]


class _Background:
    """One thread that does jobs in order. It refers to nothing but its queue, so that its owner can be collected."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # so that no job comes after the last entry of the queue
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, self._stopped), name="torchstrat-prefetch", daemon=True
        )
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> Future[object]:
        """What it returns; `END` where the thread has been stopped before."""
        future: Future[object] = Future()
        with self._lock:
            if self._stopped.is_set():
                future.set_result(END)
            else:
                self._jobs.put((future, job))
        return future

    def stop(self) -> None:
        """End the thread once the job that it is doing, if any, is done. Idempotent."""
        with self._lock:
            self._stopped.set()
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)


def _work(
    jobs: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None], stopped: threading.Event
) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        try:
            result = END if stopped.is_set() else call()  # somebody may wait for it
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del job, future, call


class Prefetcher(Generic[T]):
    """Elements of ``source`` after ``place``, up to ``depth`` of them made in advance.

    Ends its thread when the source ends or fails, on `close`, and when it is garbage collected.

    Args:
        source: what to read.
        place: what to do with each element, such as a copy to a device.
        depth: elements kept ready, at least 1.
        ahead: what to do in advance.
    """

    def __init__(self, source: Iterator[object], place: Callable[[Any], T], depth: int, ahead: Ahead) -> None:
        self._source: Iterator[object] | None = source
        self._place = place
        self._depth = depth
        self._ahead = ahead
        self._waiting: deque[Future[object]] = deque()
        self._placing: list[Future[object]] = []
        self._background: _Background | None = None
        self._finalizer: Callable[[], object] | None = None

    def next(self) -> T | None:
        """The next element, or None at the end and ever after. Raises what reading or placing it raised."""
        try:
            found = self._next()
        except BaseException:
            self.close()
            raise
        if found is END:
            self.close()
            return None
        return found  # type: ignore[return-value]

    def _next(self) -> object:
        if self._ahead is Ahead.NOTHING:
            element = _pull(self._source)
            return element if element is END else self._place(element)
        self._submit(self._depth)
        try:
            first = self._waiting.popleft()
        except IndexError:  # at the end, or another thread has closed it
            return END
        self._submit(self._depth)
        return first.result()

    def _submit(self, count: int) -> None:
        while self._source is not None and len(self._waiting) < count:
            if self._background is None:
                self._background = _Background()
                self._finalizer = weakref.finalize(self, self._background.stop)
            if self._ahead is Ahead.READ_AND_COPY:
                self._waiting.append(self._background.submit(partial(_pull_and_place, self._source, self._place)))
                continue
            wait(self._placing)  # the source may fill the same memory again
            try:
                element = _pull(self._source)
            except BaseException as error:  # not before the elements that came first have been handed out
                self._source = None
                failed: Future[object] = Future()
                failed.set_exception(error)
                self._waiting.append(failed)
                return
            if element is END:
                self._source = None
                return
            self._placing = [self._background.submit(partial(self._place, element))]
            self._waiting += self._placing

    def close(self) -> None:
        """Stop reading, and end the thread. Idempotent."""
        self._source = None
        self._waiting.clear()
        self._placing.clear()
        if self._finalizer is not None:
            self._finalizer()


def _pull(source: Iterator[object] | None) -> object:
    return END if source is None else next(source, END)


def _pull_and_place(source: Iterator[object], place: Callable[[Any], object]) -> object:
    element = _pull(source)
    return element if element is END else place(element)


class Placement:
    """Copies each replica's batch to its device; on CUDA, on a stream of its own, from pinned memory."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = devices
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def copies(self) -> bool:
        """Whether there is anything to copy for batches that are made on the host."""
        return any(device.type != "cpu" for device in self._devices)

    def place(self, step: Step) -> tuple[Step, tuple[torch.cuda.Event, ...]]:
        """Start the copies. Returns the step with its batches in place, and the events that tell when they are."""
        components, events = [], []
        for component, device in zip(step.components, self._devices, strict=True):
            if device.type == "cuda":
                component, event = self._place_on_cuda(component, device)
                events.append(event)
            else:
                component = to_device(component, device)
            components.append(component)
        return Step(tuple(components), step.rows, step.checksum), tuple(events)

    def _place_on_cuda(self, batch: nest.Nest, device: torch.device) -> tuple[nest.Nest, torch.cuda.Event]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            placed = rows.map_leaves(lambda leaf: _copy_dense(leaf, device), batch)
            event = torch.cuda.Event()
            event.record(stream)
        return placed, event

    def receive(self, placed: tuple[Step, tuple[Any, ...]]) -> Step:
        """Order the current streams after the copies. Call it in the thread that uses the batches."""
        step, events = placed
        remaining = iter(events)
        components = []
        for component, device in zip(step.components, self._devices, strict=True):
            if device.type == "cuda":
                current = torch.cuda.current_stream(device)
                current.wait_event(next(remaining))
                for leaf in rows.all_leaves(component):
                    if _is_dense(leaf) and leaf.device == device:
                        # Its memory belongs to the copying stream: not to be reused while this stream reads it.
                        leaf.record_stream(current)
                component = to_device(component, device)
            components.append(component)
        return Step(tuple(components), step.rows, step.checksum)


def to_device(batch: nest.Nest, device: torch.device) -> nest.Nest:
    """``batch`` on ``device``; itself where all of it is there already.

    Leaves of foreign classes (graphs, tokenizer output) are moved by their own ``to``; of those that have none,
    dataclasses are made anew of what they hold, and others stay.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta and device.type != "meta":
            raise InvalidArgumentError(
                "a batch holds a tensor on the meta device, which has no values to compute with on "
                f"{device}; make the batch of tensors on the CPU."
            )
        if callable(getattr(leaf, "to", None)):
            return leaf.to(device)
        if nest.is_nested(leaf) or not marks.is_container(leaf):
            return leaf
        held = marks.children(leaf)
        return marks.with_children(leaf, held, [to_device(child, device) for child in held])

    return rows.map_leaves(move, batch)


def _is_dense(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _copy_dense(leaf: object, device: torch.device) -> object:
    """Start copying a dense tensor. Anything else is left for `Placement.receive`: its memory cannot be recorded."""
    if not _is_dense(leaf):
        return leaf
    if leaf.device.type == "cpu" and not leaf.is_pinned():
        leaf = leaf.pin_memory()
    return leaf.to(device, non_blocking=True)
