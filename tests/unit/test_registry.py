"""Strategies by name, torchstrat's own and a program's."""

from __future__ import annotations

import pytest

import torchstrat as ts
from torchstrat import registry
from torchstrat.errors import InvalidArgumentError, WrongTypeError


class Own(ts.Strategy):
    def __init__(self, parts: int = 2) -> None:
        self.parts = parts


class Other(ts.Strategy):
    def __init__(self) -> None: ...


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


def test_a_registered_strategy_is_found_and_made_by_its_name() -> None:
    registry.register("own", Own)
    assert registry.names()[-1] == "own"
    assert registry.get("own") is Own
    made = registry.create("own", parts=3)
    assert isinstance(made, Own)
    assert made.parts == 3


def test_a_cell_that_runs_again_replaces_its_strategy() -> None:
    registry.register("own", Own)
    registry.register("own", Other)
    assert registry.get("own") is Other
    assert registry.names().count("own") == 1


def test_names_that_are_taken_and_what_is_no_strategy_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'mirrored' is torchstrat's own MirroredStrategy"):
        registry.register("mirrored", Own)
    with pytest.raises(WrongTypeError, match=r"register\('own', …\) needs a class derived from ts.Strategy; got 3"):
        registry.register("own", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="unknown strategy 'own'; there are one_device, "):
        registry.get("own")


def test_a_strategy_that_hands_keywords_on_gets_them() -> None:
    class HandsOn(Own):
        def __init__(self, **options: int) -> None:
            super().__init__(**options)

    registry.register("hands_on", HandsOn)
    made = registry.create("hands_on", parts=3)
    assert isinstance(made, HandsOn)
    assert made.parts == 3
