"""Exceptions of functions on their way to the coordinator."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from tests.unit.ps_worlds import Job
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


def come_home(error: BaseException) -> BaseException:
    """Through the wire, and by value: `__main__` of pytest has none of the classes."""
    packed = payloads.pack(pack_exception(error, Job().world()))
    return unpack_exception(payloads.unpack(packed))


def test_a_class_of_the_script_comes_back_as_itself(script: Any) -> None:
    with pytest.raises(script.BadShard, match=r"^shard 7: no rows") as caught:
        raise come_home(script.BadShard(7))
    assert str(caught.value) == "shard 7: no rows"
    assert (caught.value.shard, caught.value.reason) == (7, "no rows")
    assert "on the worker" in caught.value.__notes__[0]


def test_what_a_builtin_keeps_in_c_comes_along(script: Any) -> None:
    error = come_home(script.BadFile(3))
    assert isinstance(error, script.BadFile)
    assert (error.errno, error.filename, error.shard) == (2, "shard-3", 3)


class Doubled(Exception):  # noqa: N818  # a name as scripts have them
    """Can be imported everywhere; made again by its arguments it says something else."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bad {name}")


def test_a_class_with_other_arguments_says_what_it_said() -> None:
    error = come_home(Doubled("row"))
    assert type(error) is Doubled
    assert str(error) == "bad row"


def test_tensors_come_along(script: Any) -> None:
    error = come_home(script.BadShard(torch.arange(3)))
    assert isinstance(error, script.BadShard)
    assert error.shard.tolist() == [0, 1, 2]


def test_a_class_that_says_itself_how_it_is_pickled_comes_back_as_itself(script: Any) -> None:
    error = come_home(script.SaysHow(7))
    assert isinstance(error, script.SaysHow)
    assert (str(error), error.args, error.shard) == ("shard 7", ("shard 7",), 7)


def test_attributes_that_cannot_travel_stay_behind(script: Any) -> None:
    error = come_home(script.BadShard(sys.stdout))
    assert isinstance(error, script.BadShard)
    assert (error.reason, hasattr(error, "shard")) == ("no rows", False)
    assert error.__notes__[0].endswith("attributes that could not travel: shard")


def test_what_cannot_travel_arrives_as_text() -> None:
    opened = come_home(ValueError(sys.stdout))
    assert isinstance(opened, FunctionError)
    assert "ValueError: <" in str(opened)


def test_a_function_that_exits_does_not_end_the_coordinator() -> None:
    assert isinstance(come_home(SystemExit(3)), FunctionError)
