"""`RunOptions`: its defaults, its two spellings, and what `run` takes for one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import torchstrat as ts
from torchstrat.errors import WrongTypeError
from torchstrat.testing.fake_tpu import fake_tpu_strategy

FIELDS = ("enable_dynamic_batch_size", "bucketizing_dynamic_shape", "xla_options")


def values(options: ts.RunOptions) -> tuple[Any, ...]:
    long = tuple(getattr(options, f"experimental_{name}") for name in FIELDS)
    assert long == tuple(getattr(options, name) for name in FIELDS) == tuple(options)
    return long


def test_defaults() -> None:
    assert values(ts.RunOptions()) == (True, False, None)


def test_in_order() -> None:
    assert values(ts.RunOptions(False, True, "options")) == (False, True, "options")


@pytest.mark.parametrize("prefix", ["", "experimental_"])
def test_by_name(prefix: str) -> None:
    assert values(ts.RunOptions(**{f"{prefix}enable_dynamic_batch_size": False})) == (False, False, None)
    assert values(ts.RunOptions(**{f"{prefix}bucketizing_dynamic_shape": True})) == (True, True, None)
    assert values(ts.RunOptions(**{f"{prefix}xla_options": {"a": 1}})) == (True, False, {"a": 1})


@pytest.mark.parametrize("name", FIELDS)
def test_both_spellings_at_once(name: str) -> None:
    with pytest.raises(WrongTypeError, match=f"both {name} and experimental_{name}"):
        ts.RunOptions(**{name: True, f"experimental_{name}": True})


def test_it_is_an_immutable_tuple() -> None:
    options = ts.RunOptions(False, True)
    assert options == ts.RunOptions(enable_dynamic_batch_size=False, bucketizing_dynamic_shape=True)
    for name in (*FIELDS, *(f"experimental_{name}" for name in FIELDS)):
        with pytest.raises(AttributeError):
            setattr(options, name, None)


def test_copies_are_equal() -> None:
    options = ts.RunOptions(False, True, {"a": 1})
    for other in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert type(other) is ts.RunOptions
        assert values(other) == values(options)


@pytest.mark.parametrize("make", [lambda: ts.OneDeviceStrategy("cpu"), fake_tpu_strategy])
@pytest.mark.parametrize("options", [(True, False, None), {"xla_options": None}, "dynamic", True])
def test_run_takes_nothing_else(make: Any, options: Any) -> None:
    strategy = make()
    with pytest.raises(WrongTypeError, match=r"options must be a ts\.RunOptions or None"):
        strategy.run(lambda: None, options=options)
    strategy.close()


@pytest.mark.parametrize("make", [lambda: ts.OneDeviceStrategy("cpu"), fake_tpu_strategy])
@pytest.mark.parametrize("options", [None, ts.RunOptions(), ts.RunOptions(enable_dynamic_batch_size=False)])
def test_run_takes_it(make: Any, options: ts.RunOptions | None) -> None:
    strategy = make()
    assert strategy.run(lambda: None, options=options) is None
    strategy.close()
