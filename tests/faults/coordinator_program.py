"""A coordinator in a process of its own, which does what it is told line by line and may be killed at any of them.

Started as ``python -m tests.faults.coordinator_program CLUSTER FIRST FOLDER``; each line on stdin is a command with its
arguments, each answer a line on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.faults.counting import Gate, Training
from torchstrat.cluster_resolver import SimpleClusterResolver
from torchstrat.cluster_spec import CHIEF, ClusterSpec


def main(cluster: str, first: str, folder: str) -> None:
    training = Training(
        SimpleClusterResolver(ClusterSpec(json.loads(cluster)), task_type=CHIEF, task_id=0), first=int(first)
    )
    answer("connected")
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "run":
            training.run(int(arguments[0]))
            answer(f"ran to {training.functions}")
        elif command == "hold":
            training.schedule(1, Gate(Path(folder), arguments[0]))
            answer(f"scheduled to {training.functions}")
        elif command == "values":
            values = [vector[: int(arguments[0])].tolist() for vector in training.model.state_dict().values()]
            answer(json.dumps(values))
    training.strategy.close()


def answer(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
