"""What of torchstrat a traceback shows: five frames at most, and everything of the user's program."""

import inspect
import os
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from torchstrat.core import tracebacks
from torchstrat.testing.fake_cluster import FakeCluster

PACKAGE = str(Path(ts.__file__).parent)


class OwnError(Exception):
    pass


def inner(depth: int = 3) -> None:
    if depth:
        inner(depth - 1)
    raise OwnError("of the step")


def step() -> None:
    inner()


def names(error: BaseException, *, ours: bool) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in frames if frame.filename.startswith(PACKAGE) == ours]


def caught(call) -> BaseException:
    """What it raises: with few frames of ours, those of the user's own."""
    with pytest.raises(Exception) as raised:  # every class of exception is meant
        call()
    assert len(names(raised.value, ours=True)) <= tracebacks.MOST_FRAMES or tracebacks.FULL_VARIABLE in os.environ
    return raised.value


@pytest.fixture
def strategy():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    yield strategy
    strategy.close()


def test_an_exception_of_a_step_shows_the_steps_frames_and_five_of_ours(strategy):
    error = caught(lambda: strategy.run(step))
    assert names(error, ours=False)[-5:] == ["step", *["inner"] * 4]
    ours = names(error, ours=True)
    assert len(ours) == tracebacks.MOST_FRAMES
    assert ours[:2] == ["run", "_run_on_engine"]
    assert ours[-1] == "_note_left"  # of thread_state, which calls the step
    # A post-mortem can go to the frames of the step.
    found = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is inner.__code__]
    assert [frame.f_locals["depth"] for frame in found] == [3, 2, 1, 0]


def test_the_innermost_frame_is_where_an_error_of_ours_was_raised(strategy):
    error = caught(lambda: strategy.reduce("mean", torch.ones(()), axis=0))
    assert traceback.extract_tb(error.__traceback__)[-1].filename.endswith("reduction.py")
    assert "reduce" in names(error, ours=True)


def test_calls_within_calls_show_five_together(strategy):
    def asks_for_a_run():
        strategy.run(step)

    assert "asks_for_a_run" in names(caught(lambda: strategy.run(asks_for_a_run)), ours=False)


def test_the_variable_shows_all(strategy, monkeypatch):
    few = len(names(caught(lambda: strategy.run(step)), ours=True))
    monkeypatch.setenv(tracebacks.FULL_VARIABLE, "1")
    assert len(names(caught(lambda: strategy.run(step)), ours=True)) > few
    monkeypatch.setenv(tracebacks.FULL_VARIABLE, "0")
    assert len(names(caught(lambda: strategy.run(step)), ours=True)) == few


def test_reasons_and_notes_stay(strategy):
    def raises_from():
        try:
            step()
        except OwnError as error:
            raise ValueError("of the program") from error

    def calls():
        try:
            strategy.run(raises_from)
        except ValueError as error:
            raise LookupError("of the caller") from error

    error = caught(tracebacks.shortening(calls)).__cause__
    assert isinstance(error, ValueError)
    reason = error.__cause__
    assert isinstance(reason, OwnError)
    assert len(names(reason, ours=True)) <= tracebacks.MOST_FRAMES
    assert names(reason, ours=False)[-4:] == ["inner"] * 4
    if sys.version_info >= (3, 11):
        assert any("replica 0 of 2" in note for note in error.__notes__)


def test_a_traceback_that_somebody_holds_is_as_it_was(strategy, monkeypatch):
    held = []

    def keeps():
        monkeypatch.setenv(tracebacks.FULL_VARIABLE, "1")
        try:
            strategy.run(step)
        except OwnError as error:
            held.append((error.__traceback__, traceback.extract_tb(error.__traceback__)))
            monkeypatch.delenv(tracebacks.FULL_VARIABLE)
            raise

    error = caught(tracebacks.shortening(keeps))
    ((entry, before),) = held
    assert len(traceback.extract_tb(error.__traceback__)) < len(before)
    assert traceback.extract_tb(entry) == before


def test_an_exception_that_is_raised_twice_does_not_grow(strategy):
    def fails():
        yield torch.ones(2)
        raise OwnError("of the data")

    iterator = iter(strategy.distribute_dataset(fails()))
    next(iterator)
    first = caught(lambda: next(iterator))
    again = caught(lambda: next(iterator))
    assert again is first


def test_a_scheduled_function_shows_its_frames_on_the_worker_too():
    def scheduled():
        def within():
            raise KeyError("of the function")

        within()

    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        coordinator = ts.ClusterCoordinator(strategy)
        coordinator.schedule(scheduled)
        error = caught(coordinator.join)
        assert isinstance(error, KeyError)
        if sys.version_info >= (3, 11):
            told = next(note for note in error.__notes__ if note.startswith("on the worker:"))
            shown = re.findall(r'File "([^"]+)", line \d+, in (\w+)', told)
            assert [name for file, name in shown if not file.startswith(PACKAGE)] == ["scheduled", "within"]
            assert 1 <= sum(file.startswith(PACKAGE) for file, _ in shown) <= tracebacks.MOST_FRAMES


def test_signatures_and_docstrings_are_those_of_the_methods():
    assert list(inspect.signature(ts.Strategy.reduce).parameters) == ["self", "reduce_op", "value", "axis", "weighted"]
    assert ts.Strategy.reduce.__doc__ is not None
    assert "devices" in inspect.signature(ts.MirroredStrategy).parameters


def test_the_end_of_an_iteration_passes(strategy):
    assert len(list(strategy.distribute_dataset([torch.ones(2)]))) == 1
