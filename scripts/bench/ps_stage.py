"""How a contender's process and the benchmark talk: JSON lines out, a line in to go on.

The benchmark holds all processes of a contender at the start until the last is ready, and at the end until it has read
their CPU clocks and memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def ready(**facts: Any) -> None:
    """Warmed up. Returns when all processes are."""
    _say({"ready": facts})


def finished(*, wall: float, **facts: Any) -> None:
    """``wall``: seconds per step of this worker. Returns when the clocks have been read."""
    _say({"finished": {"wall": wall, **facts}})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        sys.exit("the benchmark has ended")
