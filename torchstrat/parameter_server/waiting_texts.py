"""What people are told of functions that they wait for. ``present``: the indices of the workers that are there."""

from __future__ import annotations

from collections.abc import Sequence

from torchstrat.parameter_server.scheduler import Scheduler


def where(scheduler: Scheduler, present: Sequence[int], function: int) -> str:
    """What a function waits for."""
    worker = scheduler.worker_of(function)
    if worker is not None:
        first = scheduler.functions_at(worker)[0]
        if function == first:
            return f"it runs on worker {worker}"
        return f"it waits on worker {worker}, behind function {first}"
    if not present:
        return "it waits for a worker, and none has joined"
    return f"it waits for one of workers {list(present)}"


def waiting_for(scheduler: Scheduler, present: Sequence[int], seconds: float | None, who: str) -> str:
    """What ``who`` has waited for in vain."""
    running = []
    for worker in present:
        if functions := scheduler.functions_at(worker):
            first, behind = functions[0], functions[1:]
            running.append(
                f"function {first} on worker {worker}" + (f" (with {len(behind)} behind it)" if behind else "")
            )
    return (
        f"{who} waited {seconds} s: {', '.join(running) if running else 'nothing'} is running, {scheduler.queued} "
        f"functions are queued, workers {list(present)} are there. Give it more time, or look at those workers."
    )
