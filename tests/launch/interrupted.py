"""``scripts/train.py``, to which something happens after one of its steps. Once, however often it is started.

::

    interrupted.py '{"step": 12, "rank": 1, "event": "SIGKILL", "once": "happened"}' strategy=mirrored …

``event``: a signal for this process, or for its parent (``parent SIGTERM``), after which the process waits until its
own has arrived. ``once``: a file that says that it has happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torchstrat import PreemptionHandler
from torchstrat.app import launch, train
from torchstrat.app.report import FolderReport, Report


def main() -> int:
    plan = json.loads(sys.argv.pop(1))
    if int(os.environ.get("RANK", "0")) == plan["rank"]:
        arrange(plan["step"], plan["event"], Path(plan["once"]))
    return launch.main(train.train)


def arrange(step: int, event: str, once: Path) -> None:
    has_come: list[Any] = []  # not an Event: its lock may be held where a signal's handler would take it
    hear = PreemptionHandler._on_signal

    def on_signal(handler: PreemptionHandler, *arguments: Any) -> None:
        hear(handler, *arguments)
        has_come.append(arguments)

    def happen() -> None:
        once.touch()
        receiver, _, name = event.rpartition(" ")
        os.kill(os.getppid() if receiver == "parent" else os.getpid(), getattr(signal, name))
        until = time.monotonic() + 60
        while not has_come:
            assert time.monotonic() < until, "the signal did not come through"
            time.sleep(0.01)

    def observed(tell: Any) -> Any:
        def and_then(self: Any, event: str, **values: Any) -> None:
            tell(self, event, **values)
            if event == "step" and values["step"] == step and not once.exists():
                happen()

        return and_then

    PreemptionHandler._on_signal = on_signal  # type: ignore[method-assign]
    for kind in (FolderReport, Report):
        kind.tell = observed(kind.tell)  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
