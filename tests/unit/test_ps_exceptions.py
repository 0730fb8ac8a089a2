"""Exceptions of functions on their way to the coordinator."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ps_worlds import Job
from torchstrat.errors import FunctionError
from torchstrat.parameter_server.travel.exceptions import pack_exception, unpack_exception
from torchstrat.parameter_server.wire import payloads

_SCRIPT = """
class BadShard(Exception):
    def __init__(self, shard, reason="no rows"):
        super().__init__(f"shard {shard}: {reason}")
        self.shard, self.reason = shard, reason

class SaysHow(Exception):
    def __init__(self, shard):
        super().__init__(f"shard {shard}")
        self.shard = shard

    def __reduce__(self):
        return SaysHow, (self.shard,)

class BadFile(OSError):
    def __init__(self, shard):
        super().__init__(2, "no such shard", f"shard-{shard}")
        self.shard = shard
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that only this process has."""
    module = types.ModuleType("only_here")
    exec(_SCRIPT, vars(module))
    for kind in (module.BadShard, module.SaysHow, module.BadFile):
        kind.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module


class Doubled(Exception):  # noqa: N818  # a name as scripts have them
    """Can be imported everywhere; made again by its arguments it says something else."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bad {name}")


def come_home(error: BaseException) -> Any:
    """Through the wire, and by value: `__main__` of pytest has none of the classes."""
    packed = payloads.pack(pack_exception(error, Job().world()))
    return unpack_exception(payloads.unpack(packed))


COME_HOME: dict[str, tuple[Callable[[Any], Exception], dict[str, Any]]] = {
    "a class of the script": (
        lambda script: script.BadShard(7),
        {"args": ("shard 7: no rows",), "shard": 7, "reason": "no rows"},
    ),
    "what a builtin keeps in C": (
        lambda script: script.BadFile(3),
        {"errno": 2, "filename": "shard-3", "shard": 3},
    ),
    "a class that is made by other arguments": (lambda script: Doubled("row"), {"args": ("bad row",)}),
    "a class that says itself how it is pickled": (
        lambda script: script.SaysHow(7),
        {"args": ("shard 7",), "shard": 7},
    ),
}


@pytest.mark.parametrize("name", COME_HOME)
def test_what_a_function_raises_comes_back_as_itself(script: Any, name: str) -> None:
    make, wanted = COME_HOME[name]
    sent = make(script)
    error = come_home(sent)
    assert type(error) is type(sent)
    assert str(error) == str(sent)
    assert {key: getattr(error, key) for key in wanted} == wanted
    assert "on the worker" in error.__notes__[0]


def test_tensors_come_along(script: Any) -> None:
    error = come_home(script.BadShard(torch.arange(3)))
    assert isinstance(error, script.BadShard)
    assert error.shard.tolist() == [0, 1, 2]


def test_attributes_that_cannot_travel_stay_behind(script: Any) -> None:
    error = come_home(script.BadShard(sys.stdout))
    assert isinstance(error, script.BadShard)
    assert (error.reason, hasattr(error, "shard")) == ("no rows", False)
    assert error.__notes__[0].endswith("attributes that could not travel: shard")


@pytest.mark.parametrize(("error", "text"), [(ValueError(sys.stdout), "ValueError: <"), (SystemExit(3), "SystemExit")])
def test_what_cannot_travel_or_would_end_the_coordinator_arrives_as_text(error: BaseException, text: str) -> None:
    found = come_home(error)
    assert isinstance(found, FunctionError)
    assert text in str(found)
