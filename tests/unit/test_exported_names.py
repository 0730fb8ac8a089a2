"""Every public name resolves, says what it is, and is listed once, in order."""

from __future__ import annotations

import enum
import inspect
import types

import pytest

import torchstrat as ts


def test_the_list_is_sorted_and_complete() -> None:
    assert ts.__all__ == sorted(set(ts.__all__))
    unlisted = {
        name
        for name, value in vars(ts).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in ts.__all__
    }
    assert not unlisted, "imported into the package and not exported"


@pytest.mark.parametrize("name", ts.__all__)
def test_every_name_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(ts, name)
    inherited = [getattr(base, "__doc__", None) for base in getattr(value, "__mro__", ())[1:]]
    assert value.__doc__
    assert value.__doc__ not in inherited


@pytest.mark.parametrize("name", [name for name in ts.__all__ if inspect.isclass(getattr(ts, name))])
def test_every_public_method_has_a_docstring(name: str) -> None:
    cls = getattr(ts, name)
    if issubclass(cls, enum.Enum):
        return
    for member, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(function) or function.__name__ == "<lambda>":
            continue
        assert inspect.getdoc(getattr(cls, member)), f"{name}.{member} has no docstring"


def test_strategies_answer_to_both_spellings() -> None:
    for name in ("distribute_dataset", "distribute_datasets_from_function", "local_results"):
        assert callable(getattr(ts.Strategy, name))
        assert callable(getattr(ts.Strategy, f"experimental_{name}"))
