"""What is written for people who wait, on a terminal that a test reads."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchstrat as ts
from torchstrat.core import terminal
from torchstrat.testing.fake_cluster import FakeCluster

LONG = 3600.0  # seconds before a line: never in a test


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.written = threading.Event()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


Use = Callable[..., Terminal]


@pytest.fixture
def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Called in a test: between a fixture and it pytest puts a stream of its own there."""

    def use(*, is_terminal: bool = True) -> Terminal:
        made = Terminal(is_terminal)
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return use


# -- waits -------------------------------------------------------------------------------------------------------------


def test_a_wait_says_what_it_is_for_while_it_lasts_and_ends_its_line(use_terminal: Use) -> None:
    screen = use_terminal()
    with terminal.shown("restoring x", after_seconds=0.0):
        assert screen.written.wait(30)
    first, *others = screen.getvalue().split("\r")[1:]
    assert first.startswith("torchstrat: restoring x, 0 s")
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().endswith(" s\n")
    assert others


@pytest.mark.parametrize(
    ("is_terminal", "here", "after_seconds", "starts_one"),
    [(True, True, LONG, True), (False, True, 0.0, False), (True, False, 0.0, False)],
    ids=["a short wait", "no terminal", "another process speaks"],
)
def test_nothing_is_said_and_no_thread_started_that_would_have_nothing_to_say(
    use_terminal: Use, is_terminal: bool, here: bool, after_seconds: float, starts_one: bool
) -> None:
    screen, before = use_terminal(is_terminal=is_terminal), set(threading.enumerate())
    with terminal.shown("restoring x", here=here, after_seconds=after_seconds):
        assert len(set(threading.enumerate()) - before) == starts_one
    assert screen.getvalue() == ""


def test_a_wait_within_a_wait_is_part_of_it(use_terminal: Use) -> None:
    screen = use_terminal()
    with terminal.shown("outer", after_seconds=0.0):
        with terminal.shown("inner", after_seconds=0.0):
            assert screen.written.wait(30)
    assert "inner" not in screen.getvalue()
    screen.written.clear()
    with terminal.shown("later", after_seconds=0.0):
        assert screen.written.wait(30)
    assert "later" in screen.getvalue()


def test_what_the_block_raises_is_raised_and_the_line_is_over(use_terminal: Use) -> None:
    screen = use_terminal()
    with pytest.raises(ValueError, match="no"), terminal.shown("restoring x", after_seconds=0.0):  # noqa: PT012
        assert screen.written.wait(30)
        raise ValueError("no")
    assert screen.getvalue().endswith("\n")


def test_a_terminal_that_is_closed_does_not_disturb_the_wait(use_terminal: Use) -> None:
    screen = use_terminal()
    with terminal.shown("restoring x", after_seconds=0.0):
        assert screen.written.wait(30)
        screen.close()


# -- where it is said --------------------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What was waited for, and whether this process was to say so."""
    seen: list[tuple[str, bool]] = []
    shown = terminal.shown

    def note(what: str, *, here: bool = True, **options: Any) -> Any:
        seen.append((what, here))
        return shown(what, here=here, **options)

    monkeypatch.setattr(terminal, "shown", note)
    return seen


def test_saving_and_restoring_are_waits_and_saving_in_the_background_is_none(waits: Any, tmp_path: Any) -> None:
    checkpoint = ts.Checkpoint(model=nn.Linear(2, 2))
    checkpoint.save(tmp_path / "one")
    checkpoint.restore(tmp_path / "one")
    checkpoint.save(tmp_path / "two", asynchronous=True).result()
    assert waits == [
        (f"saving {tmp_path / 'one'}", True),
        (f"restoring {tmp_path / 'one'}", True),
        (f"saving {tmp_path / 'two'}", False),
    ]


def test_a_coordinator_waits_for_its_servers(waits: Any) -> None:
    with FakeCluster(workers=1, ps=1) as cluster, cluster.strategy().scope():
        pass
    assert waits == [("waiting for the parameter servers", True)]


# -- loops -------------------------------------------------------------------------------------------------------------


def test_a_loop_shows_how_far_it_is_and_gets_every_batch(use_terminal: Use) -> None:
    screen = use_terminal()
    pytest.importorskip("tqdm")
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = strategy.distribute_dataset(DataLoader(torch.arange(10.0), batch_size=4))
    shown = ts.progress(batches, "epoch 1")
    for _ in range(2):  # each loop is a pass of its own
        rows = [int(strategy.reduce("sum", strategy.run(len, args=(batch,)))) for batch in shown]
        assert rows == [4, 4, 2]
    strategy.close()
    assert screen.getvalue().count("epoch 1: 100%") == 2
    assert "3/3" in screen.getvalue()


def test_a_loop_that_is_left_early_leaves_the_terminal_in_order(use_terminal: Use) -> None:
    screen = use_terminal()
    pytest.importorskip("tqdm")
    for element in ts.progress(range(10)):
        if element == 3:
            break
    print("next", file=sys.stderr)
    assert screen.getvalue().endswith("\nnext\n")


def test_elements_without_a_length_are_counted(use_terminal: Use) -> None:
    screen = use_terminal()
    pytest.importorskip("tqdm")
    assert list(ts.progress(number for number in (1, 2, 3))) == [1, 2, 3]
    assert "3it" in screen.getvalue()


def test_nothing_is_shown_without_a_terminal(use_terminal: Use) -> None:
    screen = use_terminal(is_terminal=False)
    assert list(ts.progress(range(3))) == [0, 1, 2]
    assert screen.getvalue() == ""


def test_only_the_chief_shows_a_bar(use_terminal: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal()
    strategy = ts.MirroredStrategy(["cpu:0"])
    monkeypatch.setattr(type(strategy), "is_chief", False)
    distributed = strategy.distribute_dataset(DataLoader(torch.arange(4.0), batch_size=2))
    assert len(list(ts.progress(distributed))) == 2
    assert list(ts.progress(range(3))) == [0, 1, 2]  # whose it is, the strategies of the process say
    strategy.close()
    assert screen.getvalue() == ""


def test_without_tqdm_one_line_names_the_extra(use_terminal: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(terminal, "_is_told", False)
    for _ in range(2):
        assert list(ts.progress(range(3))) == [0, 1, 2]
    line = "torchstrat: there is no progress bar without tqdm: pip install 'torchstrat[progress]'\n"
    assert screen.getvalue() == line
