"""Records of applied pushes: exactly once, fencing, bounded memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstrat.errors import CommunicationTimeoutError, FencedError
from torchstrat.parameter_server.messages import COORDINATOR, AppliedPushes
from torchstrat.parameter_server.server.applied import AppliedRecords


def apply(
    records: AppliedRecords, function: int, index: int = 0, incarnation: str = "w", *, fails: bool = False
) -> bool:
    if not records.begin(function, index, incarnation):
        return False
    (records.abandon if fails else records.finish)(function, index, incarnation)
    return True


EVENTS = st.tuples(
    st.sampled_from(["push", "push", "push", "fail", "forget", "back", "fence", "clear"]),
    st.integers(COORDINATOR, 8),
    st.sampled_from([0, 1, 2, 200]),
    st.sampled_from("vw"),
)


@settings(max_examples=200)
@given(st.lists(EVENTS, max_size=40))
def test_against_a_set(events: list[tuple[str, int, int, str]]) -> None:
    """Also that what was loaded is what there was, and is nobody else's; and that fences outlive it."""
    records, applied, fenced, below, following = AppliedRecords("ps 4"), set(), set(), 0, 0
    for what, function, index, incarnation in events:
        if what == "forget":
            records.forget_below(function)
            below, following = max(below, function), max(following, function)
            applied = {one for one in applied if one[0] >= below}
        elif what == "fence":
            records.fence(incarnation)
            fenced.add(incarnation)
        elif what == "back":
            before = records.state()
            apply(records, 300 + index, incarnation="x")
            records.load_state(before)
        elif what == "clear":
            records.clear()
            applied, fenced, below, following = set(), set(), 0, 0
        elif incarnation in fenced or COORDINATOR < function < below:
            says = f"incarnation {incarnation}" if incarnation in fenced else f"finished all functions below {below}"
            with pytest.raises(FencedError, match=f"ps 4 refuses push {index} of function {function}: .*{says}"):
                apply(records, function, index, incarnation)
        else:
            is_new = (function, index) not in applied
            assert apply(records, function, index, incarnation, fails=what == "fail") == is_new
            if function != COORDINATOR:
                following = max(following, function + 1)
                applied |= {(function, index)} if what == "push" else set()
    masks = {function: sum(1 << i for f, i in applied if f == function) for function, _ in applied}
    assert records.state() == AppliedPushes(below, following, masks)
    assert records.next_function == following
    assert records.number_of_functions == len(masks)


def test_a_push_that_ends_after_its_function_was_forgotten_leaves_no_record() -> None:
    records = AppliedRecords()
    assert records.begin(1, 0, "w")
    records.forget_below(2)
    records.finish(1, 0, "w")
    assert records.number_of_functions == 0


def test_fencing_waits_for_pushes_of_that_process_only() -> None:
    records = AppliedRecords("ps 0")
    records.begin(1, 0, "old")
    records.begin(2, 0, "other")
    with pytest.raises(
        CommunicationTimeoutError, match=re.escape("ps 0 was still busy with a push of old after 0.01 s")
    ):
        records.fence("old", timeout_seconds=0.01)
    records.finish(1, 0, "old")
    records.fence("old", timeout_seconds=0.01)
    with pytest.raises(CommunicationTimeoutError):
        records.wait_until_idle(0.01)
    records.abandon(2, 0, "other")
    records.wait_until_idle(0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_a_repetition_waits_for_the_one_that_is_being_applied(fails: bool) -> None:
    records = AppliedRecords()
    assert records.begin(3, 0, "first")
    answers: list[bool] = []
    repetition = threading.Thread(target=lambda: answers.append(records.begin(3, 0, "second")))
    repetition.start()
    repetition.join(timeout=0.05)
    assert not answers
    end: Callable[..., None] = records.abandon if fails else records.finish
    end(3, 0, "first")
    repetition.join(timeout=30)
    assert answers == [fails]


def test_threads_that_repeat_each_other() -> None:
    records, barrier = AppliedRecords(), threading.Barrier(4)
    applied: list[tuple[int, int]] = []
    pushes = [(function, index) for function in range(100) for index in range(3)]

    def main() -> None:
        barrier.wait(timeout=30)
        applied.extend(push for push in pushes if apply(records, *push))

    threads = [threading.Thread(target=main) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
    assert sorted(applied) == pushes
