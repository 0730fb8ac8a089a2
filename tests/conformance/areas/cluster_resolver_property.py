"""`Strategy.cluster_resolver` of the strategies that need none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference, make_strategy


def single_worker(_: Case) -> dict[str, Any]:
    kinds = ("mirrored", "central", "one_device", "default")
    return {kind: make_strategy({"strategy": kind}).cluster_resolver is None for kind in kinds}


OPS: dict[str, Callable[[Case], Any]] = {"single_worker": single_worker}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
