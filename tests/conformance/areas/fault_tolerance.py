"""Workers that are lost while functions run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.clusters import cluster_of, counter_of
from tests.conformance.harness import Case, Difference, outcome
from torchstrat.errors import CommunicationTimeoutError


def others_continue(case: Case) -> dict[str, Any]:
    cluster = cluster_of(case)
    coordinator = ts.ClusterCoordinator(cluster.strategy())
    counter, increment = counter_of(coordinator)
    cluster.kill_worker(1)
    for _ in range(20):
        coordinator.schedule(increment)
    waited = outcome(lambda: coordinator.join(timeout=20))
    before = counter.read_value().item()
    cluster.start_worker(1)
    joined = outcome(coordinator.join)
    return {
        "join_done_within_20s": not isinstance(waited, CommunicationTimeoutError),
        "counter_before_restart": before,
        "join": joined,
        "counter_after": counter.read_value().item(),
    }


OPS: dict[str, Callable[[Case], Any]] = {"worker_gone_others_continue": others_continue}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
