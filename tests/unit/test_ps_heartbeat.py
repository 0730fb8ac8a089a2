"""Who counts as silent, and for how long: time is a number here."""

from __future__ import annotations

from torchstrat.parameter_server.wire.heartbeat import Beat, Heartbeat, Silence


def make() -> Heartbeat[str]:
    return Heartbeat(interval_seconds=1.0, deadline_seconds=3.0, now=100.0)


def test_who_answers_is_not_lost() -> None:
    heartbeat = make()
    heartbeat.watch("ps", 100.0)
    for second in range(101, 200):
        assert heartbeat.beat(second) == Beat(["ps"], [])
        heartbeat.heard("ps", second + 0.5)


def test_who_is_silent_is_lost_once_past_the_deadline() -> None:
    heartbeat = make()
    heartbeat.watch("ps", 100.0)
    heartbeat.watch("worker", 100.0)
    for second in (101.0, 102.0, 103.0):
        assert heartbeat.beat(second) == Beat(["ps", "worker"], [])
        heartbeat.heard("worker", second)
    assert heartbeat.beat(104.0) == Beat(["worker"], [Silence("ps", 4.0, 3.0)])
    assert heartbeat.beat(105.0) == Beat(["worker"], [])


def test_silence_counts_from_the_last_sign_of_life() -> None:
    heartbeat = make()
    heartbeat.watch("ps", 100.0)
    heartbeat.beat(101.0)
    heartbeat.heard("ps", 101.7)
    for second in (102.0, 103.0, 104.0):
        assert heartbeat.beat(second).lost == []
    (silence,) = heartbeat.beat(105.0).lost
    assert abs(silence.seconds - 3.3) < 1e-9


def test_who_was_stopped_itself_declares_nobody_dead() -> None:
    heartbeat = make()
    heartbeat.watch("ps", 100.0)
    heartbeat.beat(101.0)
    assert heartbeat.beat(10_000.0) == Beat(["ps"], [])  # asked again, at the first beat after the sleep
    assert heartbeat.beat(10_001.0) == Beat(["ps"], [])
    assert heartbeat.beat(10_002.0).lost == [Silence("ps", 4.0, 3.0)]  # and then it really does not answer


def test_a_deadline_of_its_own() -> None:
    heartbeat = make()
    heartbeat.watch("ps", 100.0, deadline_seconds=5.0)
    heartbeat.watch("worker", 100.0)
    lost = {second: heartbeat.beat(100.0 + second).lost for second in range(1, 7)}
    assert {second: found for second, found in lost.items() if found} == {
        4: [Silence("worker", 4.0, 3.0)],
        6: [Silence("ps", 6.0, 5.0)],
    }
    heartbeat.watch("ps", 107.0)  # back as another incarnation would be: nothing is left of the old deadline
    lost = {second: heartbeat.beat(107.0 + second).lost for second in range(5)}
    assert [second for second, found in lost.items() if found] == [4]


def test_watching_begins_with_the_whole_deadline() -> None:
    heartbeat = make()
    assert heartbeat.beat(5_000.0) == Beat([], [])
    heartbeat.watch("ps", 5_000.5)
    assert [heartbeat.beat(5_000.0 + second).lost for second in (1, 2, 3)] == [[], [], []]
    assert heartbeat.beat(5_004.0).lost == [Silence("ps", 3.5, 3.0)]


def test_who_is_forgotten_is_neither_asked_nor_lost() -> None:
    heartbeat = make()
    heartbeat.watch("ps", 100.0)
    heartbeat.forget("ps")
    heartbeat.heard("ps", 100.5)
    for second in range(101, 110):
        assert heartbeat.beat(second) == Beat([], [])


def test_beats_are_due_at_intervals_and_late_ones_at_once() -> None:
    heartbeat = make()
    assert heartbeat.due_in(100.25) == 0.75
    assert heartbeat.due_in(103.0) == 0.0
    heartbeat.beat(103.0)
    assert heartbeat.due_in(103.0) == 1.0
