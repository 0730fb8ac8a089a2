"""What a function sees of an optimizer of a class of the program's own: what steps have set on it.

They are made on a parameter server. As long as a function runs, an optimizer that it reaches, and its parameter groups,
have classes that ask the server when something is read that a step may have set: once between two steps, and of all of
it. Before the next step this is taken out again: the objects of this worker have what the coordinator has put there,
and what the function itself has. What ``step()`` returns is asked for where the function's code does not drop it.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import groups_with_wrapped, wrapped_among, wrapped_by
from torchstrat.core.tensor_classes import asking_class, class_behind
from torchstrat.parameter_server.messages import Gone, Reader, VariableSpec
from torchstrat.parameter_server.serialization.plain import are_equal
from torchstrat.parameter_server.variables.attributes import mark_of, of_every_optimizer
from torchstrat.parameter_server.variables.program_state import options_of
from torchstrat.parameter_server.variables.remote_access import VariableAccess

_ABSENT = object()
_ASKED_BY_TORCH = frozenset({"_step_supports_amp_scaling", "grad_scale", "found_inf"})
"""Attributes that gradient scalers look for; no step sets them."""


class StepGroup(dict[str, Any]):
    """A parameter group that can ask; see `_AskingGroup`. As any dictionary until then."""

    __slots__ = ("read",)
    read: Callable[[], None]

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


class _AskingGroup(StepGroup):
    __slots__ = ()

    def __repr__(self) -> str:
        self.read()
        return dict.__repr__(self)


def _reading(name: str) -> Callable[..., object]:
    method = getattr(dict, name)

    def read(self: _AskingGroup, *args: object, **kwargs: object) -> object:
        if args != ("params",):  # which no step changes, and which every step's loop takes
            self.read()
        return method(self, *args, **kwargs)

    return read


for _name in (
    *("__getitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__", "__or__", "__ror__"),
    *("get", "keys", "values", "items", "copy", "pop", "popitem", "setdefault"),
):
    setattr(_AskingGroup, _name, _reading(_name))


class _AskingOptimizer:
    """Mixed into the class of an optimizer."""

    def __getattribute__(self, name: str) -> Any:
        kind = _asked(self, name)
        return kind.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        kind = _asked(self, name)  # what comes later would take its place
        kind.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        kind = _asked(self, name)
        kind.__delattr__(self, name)


def _asked(optimizer: object, name: str) -> Any:
    """What came is here. The class of it, without the one that asks."""
    if asks := _asks.get(id(optimizer)):
        asks.reads(name)
        return asks.kind
    kind = type(optimizer)
    return class_behind(kind) if issubclass(kind, _AskingOptimizer) else kind


class _Asks:
    """Of one optimizer object. ``lost``: attributes that steps have changed, and that cannot come."""

    def __init__(self, optimizer: Optimizer, read: Callable[[], None]) -> None:
        self.optimizer, self.kind, self.read = optimizer, type(optimizer), read
        self.lost: set[str] = set()
        groups = optimizer.param_groups
        self._leaves = of_every_optimizer() | _ASKED_BY_TORCH
        if not all(isinstance(group, StepGroup) for group in groups):  # the function has made others
            self._leaves -= {"param_groups"}
        _asks[id(optimizer)] = self
        optimizer.__class__ = asking_class(_AskingOptimizer, self.kind)

    def reads(self, name: str) -> None:
        if name != "__dict__" and (name in self._leaves or name.startswith("__") or _is_code(self.kind, name)):
            return
        self.read()
        if name in self.lost:
            raise UnsupportedError(
                f"a scheduled function reads attribute {name!r} of {self.kind.__name__} after steps, which have "
                "changed it. They are made on a parameter server. Numbers, strings, tensors, and lists and "
                "dictionaries of such come from there; this is something else. Let the step keep what is to be read "
                "in an attribute of such, or in optimizer.state."
            )

    def end(self) -> None:
        _asks.pop(id(self.optimizer), None)
        self.optimizer.__class__ = self.kind


_asks: dict[int, _Asks] = {}
"""By the ``id`` of the optimizer, which they keep."""


def _is_code(kind: type, name: str) -> bool:
    """Whether it is a method, or a property, which asks itself for what it reads."""
    value = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return callable(value) or hasattr(type(value), "__get__")


class SteppedOptimizers:
    """Those of one function. ``specs_of``: the variables of an optimizer; ``number_of``: the number of an optimizer."""

    def __init__(
        self,
        access: VariableAccess,
        specs_of: Callable[[Optimizer], dict[torch.Tensor, VariableSpec]],
        number_of: Callable[[Optimizer], int | None],
    ) -> None:
        self._access, self._specs_of, self._number_of = access, specs_of, number_of
        self._asking: list[_Asks] = []
        self._groups: list[StepGroup] = []
        self._came: list[tuple[dict[str, Any], str, object, object, object]] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """A function begins that reaches these, or has stepped one. What several have is the first one's."""
        wrapped = wrapped_among(optimizers) if len(optimizers) > 1 else ()
        for one in optimizers:
            if id(one) not in wrapped:
                self._begin(one)

    def _begin(self, optimizer: Optimizer) -> None:
        members = [one for one in (optimizer, *wrapped_by(optimizer)) if id(one) not in _asks]
        groups = groups_with_wrapped(optimizer)[0]
        read = functools.cache(functools.partial(self._bring, optimizer))
        for group in groups:
            if type(group) is StepGroup:
                group.read = read
                group.__class__ = _AskingGroup
                self._groups.append(group)
        self._asking += [_Asks(one, read) for one in members]

    def end(self) -> None:
        """Before the next step, and at the function's end: nothing asks any more, and what has come goes."""
        self._ask_no_more(with_lost=True)
        for members, name, value, mark, before in reversed(self._came):
            if members.get(name, _ABSENT) is value and mark_of(value) == mark:
                if before is _ABSENT:
                    del members[name]
                else:
                    members[name] = before
        self._came.clear()

    def _ask_no_more(self, *, with_lost: bool = False) -> None:
        for group in self._groups:
            group.__class__ = StepGroup
        self._groups.clear()
        kept = [one for one in self._asking if one.lost and not with_lost]
        for one in self._asking:
            if one not in kept:
                one.end()
        self._asking = kept

    def _bring(self, optimizer: Optimizer) -> None:
        asking = {id(one.optimizer): one for one in self._asking}
        self._ask_no_more()
        number, (options, places) = self._number_of(optimizer), options_of(optimizer)
        for groups, attributes in self._ask(
            optimizer, "ps.optimizer_options", number, options, places, Reader.FUNCTION
        ):
            for group, new in zip(groups_with_wrapped(optimizer)[0], groups, strict=False):
                self._put(group, new)
            for one, new in zip((optimizer, *wrapped_by(optimizer)), attributes, strict=False):
                lost = {name for name, value in new.items() if value is Gone.GONE}
                self._put(vars(one), {name: value for name, value in new.items() if name not in lost})
                if lost:
                    again = _Asks(one, lambda: None)
                    again.lost = lost
                    self._asking.append(again)
                    asking[id(one)].lost = lost  # of the reading that is under way

    def _put(self, members: dict[str, Any], new: dict[str, object]) -> None:
        for name, value in new.items():
            before = members.get(name, _ABSENT)
            if not are_equal(before, value):
                self._came.append((members, name, value, mark_of(value), before))
                members[name] = value

    def _ask(self, optimizer: Optimizer, method: str, *what: object) -> Iterable[Any]:
        """Answers of the servers of its variables: of one, if its steps may set anything."""
        servers = {shard.server for spec in self._specs_of(optimizer).values() for shard in spec.shards}
        return self._access.servers.ask(method, dict.fromkeys(servers, what)).values()

    def result_of(self, optimizer: Optimizer) -> object:
        """What the step has returned that the last push has made."""
        found = self._ask(optimizer, "ps.step_result", *self._access.last_push)
        result = next((one for one in found if one is not None), None)
        if isinstance(result, UnsupportedError):
            raise result
        return result


# -- whether a result is read -----------------------------------------------------------------------------------------

_BETWEEN = ("torch", "torchstrat")
"""Packages whose code hands on what a step returns: wrappers around it, gradient scalers, schedulers."""


def reads_result() -> bool:
    """Whether the code that has called ``step()``, of which this is called, does anything with what it returns."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    return frame is None or frame.f_lasti not in _drops(frame.f_code)


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in _BETWEEN and not module.startswith("torchstrat.testing")


@functools.lru_cache(256)
def _drops(code: CodeType) -> frozenset[int]:
    """Where in the code something is called whose result is dropped at once."""
    instructions = list(dis.get_instructions(code))
    calls = [
        range(call.offset, after.offset)  # with what the interpreter keeps behind the call
        for call, after in itertools.pairwise(instructions)
        if "CALL" in call.opname and after.opname == "POP_TOP"
    ]
    return frozenset(itertools.chain(*calls))
