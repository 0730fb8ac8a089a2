"""Taking turns: order, meetings, divergence and failures, without any tensor."""

import threading

import pytest

from torchstrat.errors import ReplicaDivergenceError
from torchstrat.replicas.baton import Baton
from torchstrat.replicas.worker_threads import WorkerThreads


@pytest.fixture
def threads():
    pool = WorkerThreads("test")
    yield pool
    pool.close()


def add(payloads):
    total = sum(payloads.values())
    return dict.fromkeys(payloads, total)


def test_bodies_run_one_after_the_other_and_alternate_only_at_meetings(threads):
    log, switches = [], []
    baton = Baton([0, 1, 2], threads, switches.append)

    def body(me):
        log.append(("start", me))
        total = baton.meet("sum", me + 1, add)
        log.append(("end", me))
        return total

    assert baton.run(body) == {0: 6, 1: 6, 2: 6}
    assert log == [("start", 0), ("start", 1), ("start", 2), ("end", 0), ("end", 1), ("end", 2)]
    assert switches == [0, 1, 2, None, 0, 1, 2, None]


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("before_meeting", [True, False])
def test_the_first_exception_ends_all_and_is_raised(threads, culprit, before_meeting):
    baton = Baton([0, 1, 2], threads, lambda _: None)
    unwound = []

    def body(me):
        try:
            if before_meeting and me == culprit:
                raise KeyError("mine")
            baton.meet("sum", 1, add)
            if me == culprit:
                raise KeyError("mine")
            baton.meet("sum", 1, add)
        finally:
            unwound.append(me)

    with pytest.raises(KeyError, match="mine"):
        baton.run(body)
    assert baton.failed_replica == culprit
    assert sorted(unwound) == list(range(culprit + 1) if before_meeting else range(3))


def test_one_that_skips_a_meeting_is_named(threads):
    baton = Baton([0, 1], threads, lambda _: None)
    with pytest.raises(ReplicaDivergenceError, match="replica 0 has finished, replica 1 called optimizer step"):
        baton.run(lambda me: me and baton.meet("optimizer step", None, add))


def test_different_calls_are_named(threads):
    baton = Baton([0, 1], threads, lambda _: None)
    with pytest.raises(ReplicaDivergenceError, match="replica 0 called a, replica 1 called b"):
        baton.run(lambda me: baton.meet("ab"[me], 1, add))


def test_an_error_in_the_meeting_is_raised_even_if_a_body_swallows_exceptions(threads):
    baton = Baton([0, 1], threads, lambda _: None)

    def fail(_):
        raise ValueError("in the middle")

    def body(me):
        try:
            baton.meet("x", 1, fail)
        except Exception:
            return "swallowed"

    with pytest.raises(ValueError, match="in the middle"):
        baton.run(body)


@pytest.mark.parametrize("fail_at", range(4))
def test_an_error_while_switching_does_not_hang(threads, fail_at):
    switches = iter(range(100))

    def on_switch(_):
        if next(switches) == fail_at:
            raise OSError("no memory")

    baton = Baton([0, 1], threads, on_switch)
    with pytest.raises(OSError, match="no memory"):
        baton.run(lambda me: baton.meet("x", 1, add))


def test_threads_are_reused_and_end_on_close():
    pool = WorkerThreads("reused")
    idents = set()
    for _ in range(3):
        Baton([0, 1], pool, lambda _: None).run(lambda _: idents.add(threading.get_ident()))
    assert len(idents) == 2
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reused")]
