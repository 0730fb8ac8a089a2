"""What always holds of a `Scheduler`, whatever has happened: for tests, which ask after every event."""

from __future__ import annotations

from torchstrat.parameter_server.scheduler import LARGEST_BATCH, Scheduler
from torchstrat.parameter_server.scheduler_events import takes_functions


def check(scheduler: Scheduler) -> None:
    """Assert it. Takes time in proportion to workers and functions in flight, not to the queue."""
    assert scheduler._first <= scheduler._forgotten <= scheduler._low <= scheduler._next <= scheduler._end
    again, back, flying = set(scheduler._again), set(scheduler._back), set(scheduler._running)
    later = {function for _, function in scheduler._later}
    assert len(again) + len(back) + len(flying) == len(scheduler._again) + len(scheduler._back) + len(
        scheduler._running
    )
    assert len(later) == len(scheduler._later)
    assert later.isdisjoint(again | back | flying)
    again |= later
    assert len(again | back | flying) == len(again) + len(back) + len(flying), "queued twice, or queued and in flight"
    assert again <= scheduler._lost.functions(), "forgotten that it may have been begun"
    assert scheduler._lost.functions() <= again | flying, "not forgotten"
    assert all(scheduler._low <= function < scheduler._next for function in again | back | flying), (
        "below the watermark"
    )
    at_workers = [function for process in scheduler._processes.values() for function in process.functions]
    assert sorted(at_workers) == sorted(flying), "in flight twice, or at no live process"
    for function, batch in scheduler._running.items():
        assert scheduler._processes[batch.process.worker] is batch.process, "in flight at a process that was lost"
        assert function in batch.functions
    for index, process in scheduler._processes.items():
        count = len(process.batches)
        assert process.worker == index
        assert process.incarnation in scheduler._seen
        assert count <= scheduler._room, "more in flight than agreed"
        assert all(0 < len(batch.functions) <= LARGEST_BATCH for batch in process.batches)
        assert count or not process.draining, "drained and not released"
        assert count or not process.stalled, "it has nothing that could keep it"
        assert not process.alone or count == 1, "others beside one that was lost"
        assert process.alone == any(scheduler._lost.times(function) for function in process.functions)
        assert process.stalled or not process.asked, "it does not hold anybody up"
        assert process.stalled == (process in scheduler._stalled)
        levels = [level for level, free in enumerate(scheduler._free) if process in free]
        has_room = takes_functions(process) and not process.alone and count < scheduler._room
        assert levels == ([count] if has_room else []), "wrongly free"
    assert set(scheduler._stalled) <= set(scheduler._processes.values()), "a lost process is asked for functions"
    assert scheduler._busy == sum(bool(process.batches) for process in scheduler._processes.values())
    assert sum(map(len, scheduler._free)) <= len(scheduler._processes), "a lost process is offered functions"
    if scheduler.pending_error is None and not scheduler._servers_lost:
        is_lost = scheduler._sendable() and (scheduler._again or scheduler._later_may_go())
        free = scheduler._free[:1] if is_lost else scheduler._free
        assert not (scheduler._sendable() and any(free)), "a worker idles while functions wait"
        if scheduler._free[0] and len(scheduler._running) > scheduler._busy:
            assert scheduler._awaits_moment, "nobody will notice that functions wait for a slow one"
