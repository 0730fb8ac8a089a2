"""Worlds of real processes for the multi-worker cases: each world is started once and runs all its cases in order."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

from tests.conformance.harness import Case, load_cases, outcome
from torchstrat.testing.spawn import WorkersError, spawn

DEADLINE_SECONDS = 300


def cases_of(workers: int) -> list[Case]:
    """The cases recorded in a world of that size. Errors come last: they may leave the group unusable."""
    cases = [case for case in load_cases(["multi_worker"]) if case.setup["workers"] == workers]
    return sorted(cases, key=lambda case: '"error"' in json.dumps(case.expect))


def world(workers: int) -> list[dict[str, Any]]:
    """Per worker: case id → the result or the raised exception. Starts the processes at the first call."""
    results = _attempt(workers)
    if isinstance(results, WorkersError):
        raise results
    return results


@cache
def _attempt(workers: int) -> list[dict[str, Any]] | WorkersError:
    """One attempt for all cases: a world that fails once is not started again for each of them."""
    try:
        return spawn(run_cases, workers, (workers,), timeout_seconds=DEADLINE_SECONDS)
    except WorkersError as error:
        return error


def run_cases(workers: int) -> dict[str, Any]:
    """In one worker: the outcomes of all cases, under a strategy that ``TF_CONFIG`` describes."""
    from tests.conformance.areas.multi_worker import IN_WORKER, NO_COUNTERPART, strategy

    meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    cluster = {"worker": [meeting_point] + [f"127.0.0.1:{index}" for index in range(1, workers)]}
    task = {"type": "worker", "index": int(os.environ["RANK"])}
    with strategy({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}) as running:
        return {
            case.id: outcome(lambda case=case: IN_WORKER[case.op](running, case))  # type: ignore[misc]
            for case in cases_of(workers)
            if case.id not in NO_COUNTERPART
        }
