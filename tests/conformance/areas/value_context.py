"""`ValueContext`: how it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.harness import Case, Difference


def text(case: Case) -> dict[str, str]:
    return {"str": str(ts.ValueContext(case.inputs["replica_id"], case.inputs["num_replicas"]))}


OPS: dict[str, Callable[[Case], Any]] = {"str": text}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
