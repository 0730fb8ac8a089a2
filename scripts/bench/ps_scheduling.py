"""What the coordinator itself costs per scheduled function, for 2 to 64 workers that take no time.

::

    python scripts/bench/ps_scheduling.py
    python scripts/bench/ps_scheduling.py --small --rounds 1    # does it work? Its figures mean nothing

The dispatcher is the real one; its workers are a few lines in this process, which answer every batch at once with None
for each function, and say that it took 20 µs. Measured is this process's CPU from handing a function to the dispatcher
to the result in its `RemoteValue`: the scheduler, making and pickling batches, unpickling reports. What
`ClusterCoordinator.schedule` does before (pickling the function), and the transport, are not in it. Two queues: a deep
one, from which batches are large, and one of two functions per worker, as a training loop keeps them, whose batches
hold one.

Rounds are interleaved. Shown are the medians, their spread (largest minus smallest, over the median), and the largest
over the smallest number of workers: **it has to stay flat, within 20 %**; exits with status 1 if it does not.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from train_step import print_header

from torchstrat.parameter_server.dispatch import Batch, Report
from torchstrat.parameter_server.dispatcher import Dispatcher
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.remote_value import RemoteValue, ResourceTable
from torchstrat.parameter_server.scheduler import LARGEST_BATCH
from torchstrat.parameter_server.serialization.captured_objects import Lifetimes
from torchstrat.parameter_server.serialization.functions import Packed, unpack_result
from torchstrat.parameter_server.transport.requests import pack, unpack
from torchstrat.parameter_server.worker_sessions import Work

WORKERS = (2, 4, 8, 16, 32, 64)
DEEP = 40_000
FUNCTIONS = 60_000  # in each measurement
FLAT = 1.2
FUNCTION_SECONDS = 20e-6

Make = Callable[[int], Work]


class InMemory:
    """What the dispatcher needs of a job, its catalog, servers, membership and endpoint; and the workers."""

    first_function = 0
    version = 0

    def __init__(self) -> None:
        self.catalog = self.servers = self.membership = self.endpoint = self
        self.lifetimes = Lifetimes()
        self.sent: deque[tuple[Batch, Future[Any]]] = deque()
        self.on_outcomes: Any = None

    def server_peers(self) -> Mapping[int, Peer]:
        return {}

    def increments(self, since: int, *, new: bool) -> tuple[Any, ...]:
        return ()

    def call(self, peer: Peer, method: str, payload: Any, *, timeout_seconds: float) -> Future[Any]:
        future: Future[Any] = Future()
        packed = pack(payload)
        if method == "worker.run":
            self.sent.append((payload, future))
        else:  # a recall; everything has begun
            future.set_result(())
        assert packed.data
        return future

    def answer(self) -> int:
        """Run the oldest batch; how many functions it had."""
        batch, future = self.sent.popleft()
        functions = tuple(function for function, *_ in batch.functions)
        nothing = (None,) * len(functions)
        future.set_result(unpack(pack(Report(functions, nothing, FUNCTION_SECONDS * len(functions)))))
        return len(functions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    options = parser.parse_args()
    deep, functions = (500, 500) if options.small else (DEEP, FUNCTIONS)
    print_header()
    queues: dict[str, Callable[[int], int]] = {
        "deep queue": lambda workers: deep + 2 * LARGEST_BATCH * workers,  # beside what the workers have
        "two functions per worker": lambda workers: 2 * workers,
    }
    seconds: dict[tuple[str, int], list[float]] = {(name, workers): [] for name in queues for workers in WORKERS}
    for _ in range(options.rounds):
        for name, workers in seconds:
            seconds[name, workers].append(measure(workers, queues[name](workers), functions))
    flat = True
    for name in queues:
        print(f"\n{name}\n{'workers':<10}{'CPU µs':>10}{'spread':>10}")
        medians = [statistics.median(seconds[name, workers]) for workers in WORKERS]
        for workers, median in zip(WORKERS, medians, strict=True):
            values = seconds[name, workers]
            print(f"{workers:<10}{median * 1e6:>10.2f}{(max(values) - min(values)) / median:>10.0%}")
        ratio = max(medians) / min(medians)
        flat &= ratio <= FLAT
        print(f"largest over smallest: {ratio:.2f} (limit {FLAT})", flush=True)
    return int(not flat)


def measure(workers: int, queue: int, functions: int) -> float:
    """CPU seconds per function, in a queue that is kept at this length."""
    # As a coordinator does when it begins. Otherwise it is chance in which measurements the garbage collector goes
    # through all that was imported: a third of the time of those that it falls into.
    gc.collect()
    job = InMemory()
    dispatcher = Dispatcher(job, ResourceTable(), unpack_result, queue_size=2 * queue, name="dispatcher")  # type: ignore[arg-type]
    for index in range(workers):
        dispatcher.worker_joined(Peer(Task("worker", index), f"incarnation {index}", "", "here", 0))
    code = Packed(b"the function")
    digest, arguments = code.digest, Packed(b"()")
    options: dict[int, Any] = {}

    def make(number: int) -> Work:
        value = RemoteValue(number, "nothing", dispatcher.where)
        return Work(digest, code, arguments, options, options, number, value)

    def run(count: int) -> None:
        done = 0
        while done < count:
            answered = job.answer()
            done += answered
            for _ in itertools.repeat(None, answered):
                dispatcher.submit(make)

    for _ in range(queue):
        dispatcher.submit(make)
    run(2 * LARGEST_BATCH * workers)  # until batches have the size that they keep
    began = time.process_time()
    run(functions)
    seconds = time.process_time() - began
    dispatcher.close()
    return seconds / functions


if __name__ == "__main__":
    sys.exit(main())
