"""Records of applied pushes: exactly once, fencing, bounded memory."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstrat.errors import CommunicationTimeoutError, FencedError
from torchstrat.parameter_server.messages import COORDINATOR, AppliedPushes
from torchstrat.parameter_server.server.applied import AppliedRecords


def apply(records: AppliedRecords, function: int, index: int = 0, incarnation: str = "w") -> bool:
    if not records.begin(function, index, incarnation):
        return False
    records.finish(function, index, incarnation)
    return True


def test_each_push_is_applied_once():
    records = AppliedRecords()
    assert [apply(records, 5, index) for index in (0, 1, 0, 200, 1, 200)] == [True, True, False, True, False, False]
    assert apply(records, 6)
    assert records.next_function == 7


def test_what_the_coordinator_does_is_not_recorded():
    records = AppliedRecords()
    assert [apply(records, COORDINATOR) for _ in range(3)] == [True] * 3
    assert records.state() == AppliedPushes(0, 0, {})


def test_an_abandoned_push_may_come_again():
    records = AppliedRecords()
    assert records.begin(1, 0, "w")
    records.abandon(1, 0, "w")
    assert apply(records, 1)


def test_finished_functions_are_forgotten_and_refused():
    records = AppliedRecords("ps 4")
    for function in range(10):
        apply(records, function)
    records.forget_below(8)
    records.forget_below(3)  # late, and without effect
    assert records.number_of_functions == 2
    assert not apply(records, 8)
    with pytest.raises(FencedError, match=r"ps 4 refuses push 1 of function 7: .* finished all functions below 8"):
        apply(records, 7, 1)
    assert records.state().masks == {8: 1, 9: 1}


def test_a_push_that_ends_after_its_function_was_forgotten_leaves_no_record():
    records = AppliedRecords()
    assert records.begin(1, 0, "w")
    records.forget_below(2)
    records.finish(1, 0, "w")
    assert records.number_of_functions == 0


def test_a_fenced_process_is_refused_and_others_are_not():
    records = AppliedRecords()
    records.fence("old")
    with pytest.raises(FencedError, match="incarnation old"):
        apply(records, 1, incarnation="old")
    with pytest.raises(FencedError):
        apply(records, COORDINATOR, incarnation="old")
    assert apply(records, 1, incarnation="new")
    records.load_state(AppliedPushes(0, 0, {}))
    with pytest.raises(FencedError):
        apply(records, 1, incarnation="old")
    records.clear()
    assert apply(records, 1, incarnation="old")


def test_fencing_waits_for_pushes_of_that_process_only():
    records = AppliedRecords("ps 0")
    records.begin(1, 0, "old")
    records.begin(2, 0, "other")
    with pytest.raises(CommunicationTimeoutError, match=r"ps 0 was still busy with a push of old after 0\.01 s"):
        records.fence("old", timeout_seconds=0.01)
    records.finish(1, 0, "old")
    records.fence("old", timeout_seconds=0.01)
    with pytest.raises(CommunicationTimeoutError):
        records.wait_until_idle(0.01)
    records.abandon(2, 0, "other")
    records.wait_until_idle(0.01)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_repetition_waits_for_the_one_that_is_being_applied(ends_well):
    records = AppliedRecords()
    assert records.begin(3, 0, "first")
    answers: list[bool] = []
    repetition = threading.Thread(target=lambda: answers.append(records.begin(3, 0, "second")))
    repetition.start()
    repetition.join(timeout=0.05)
    assert not answers
    (records.finish if ends_well else records.abandon)(3, 0, "first")
    repetition.join(timeout=30)
    assert answers == [not ends_well]


def test_records_survive_a_round_trip():
    records, other = AppliedRecords(), AppliedRecords()
    for function, index in ((4, 0), (4, 3), (9, 1)):
        apply(records, function, index)
    records.forget_below(4)
    other.load_state(records.state())
    assert not apply(other, 4, 3)
    assert apply(other, 4, 2)
    assert records.state().masks == {4: 0b1001, 9: 0b10}, "what the other does is its own"
    with pytest.raises(FencedError):
        apply(other, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "forget"]), st.integers(0, 12), st.integers(0, 3)), max_size=60))
def test_against_a_set(events):
    records, applied, below = AppliedRecords(), set(), 0
    for what, function, index in events:
        if what == "forget":
            below = max(below, function)
            records.forget_below(function)
        elif function < below:
            with pytest.raises(FencedError):
                apply(records, function, index)
        else:
            assert apply(records, function, index) == ((function, index) not in applied)
            applied.add((function, index))
    assert records.number_of_functions == len({function for function, _ in applied if function >= below})


def test_threads_that_repeat_each_other():
    records = AppliedRecords()
    applied: list[tuple[int, int]] = []
    barrier = threading.Barrier(4)

    def main() -> None:
        barrier.wait(timeout=30)
        for function in range(100):
            for index in range(3):
                if apply(records, function, index):
                    applied.append((function, index))

    threads = [threading.Thread(target=main) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
    assert sorted(applied) == [(function, index) for function in range(100) for index in range(3)]
