"""Parameter-server clusters for the recorded cases, and what the functions scheduled on them wait for.

A cluster's tasks are threads of this process, so a case starts and ends its own in milliseconds, and module globals are
shared with the functions: this is how a case holds a function back until it has looked at the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.harness import Case, opened
from tests.support.gates import DEADLINE_SECONDS
from torchstrat.testing.fake_cluster import FakeCluster

_meetings: dict[str, threading.Barrier] = {}


def cluster_of(case: Case) -> FakeCluster:
    """As many workers and servers as the case was recorded with. It ends with the case."""
    cluster = FakeCluster(workers=case.setup["workers"], ps=case.setup["ps"])
    opened(cluster)
    return cluster


def coordinated(case: Case, partitioner: Any = None) -> ts.ClusterCoordinator:
    return ts.ClusterCoordinator(cluster_of(case).strategy(partitioner))


def counter_of(coordinator: ts.ClusterCoordinator) -> tuple[ts.Variable, Callable[[], None]]:
    """A variable that is 0, and a function that adds 1 to it."""
    with coordinator.strategy.scope():
        counter = ts.Variable(0.0, name="counter")

    def increment() -> None:
        counter.assign_add(1.0)

    return counter, increment


def one() -> torch.Tensor:
    return torch.tensor(1.0)


class InvalidArgumentError(Exception):
    """Of the scheduled function; TensorFlow's class of that name is an operation's."""


def bad() -> None:
    raise InvalidArgumentError("this function fails")


def call_meeting(name: str, parties: int) -> threading.Barrier:
    """Let that many threads `meet`, so that each function runs on a worker of its own."""
    _meetings[name] = threading.Barrier(parties)
    return _meetings[name]


def meet(name: str) -> None:
    _meetings[name].wait(DEADLINE_SECONDS)


def task_of(place: str) -> str:
    """``"task:2"`` for the third server, ``"ps:2"``: the part of TensorFlow's device name that says which one."""
    job, _, index = place.partition(":")
    assert job == "ps", f"{place} is no server"
    return f"task:{index}"
