"""Numbers, strings and tuples that a program sets on classes of its modules and optimizers (``MyOptimizer.factor = 2``)
after the first object of the class was sent.

They travel with what is set on the objects themselves, under the place of the class among its bases and the name, and
are set on the same class of the other process, until its job ends.
"""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping

from torchstrat.parameter_server.messages import Gone, SetAttribute, SetAttributes
from torchstrat.parameter_server.serialization.closure_walk import is_installed, is_library
from torchstrat.parameter_server.serialization.plain import is_fixed

# -- on the coordinator -----------------------------------------------------------------------------------------------


class _Known:
    """A class, and what it had when it was looked at last."""

    def __init__(self, kind: type) -> None:
        self.kind = weakref.ref(kind)
        self._values = _fixed_members(kind)
        self.set: dict[str, SetAttribute] = {}
        self.size = -1
        self.values_of: Callable[[Mapping[str, object]], tuple[object, ...]] | None = None
        self._last: tuple[object, ...] = ()
        self._changes = 0

    def changes(self, members: Mapping[str, object]) -> int:
        """Another number when an attribute was set since, added or deleted. ``members``: of the class."""
        try:
            values = self.values_of(members) if self.values_of is not None and len(members) == self.size else None
        except KeyError:  # one was deleted, and another one set
            values = None
        if values is None:
            values = self._learn(members)
        if len(values) != len(self._last) or not all(map(operator.is_, values, self._last)):
            self._last = values
            self._changes += 1
        return self._changes

    def _learn(self, members: Mapping[str, object]) -> tuple[object, ...]:
        names = [name for name, value in members.items() if not name.startswith("__") and _is_data(value)]
        self.size = len(members)
        self.values_of = operator.itemgetter("__module__", *names) if names else None  # of two at least: a tuple
        return () if self.values_of is None else self.values_of(members)

    def look(self) -> None:
        kind = self.kind()
        now = {} if kind is None else _fixed_members(kind)
        for name in self._values.keys() | now.keys():
            value = now.get(name, Gone.GONE)
            if name not in self._values or self._values[name] != value:
                self.set[name] = SetAttribute(time.time_ns(), value)
        self._values = now


def _is_data(value: object) -> bool:
    return not callable(value) and not hasattr(type(value), "__get__")


def _fixed_members(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if is_fixed(value) and not name.startswith("__")}


_NOTHING: Mapping[str, object] = {}
_known: dict[int, _Known] = {}
"""By the ``id`` of the class. Of the process: another job's workers are to have what was set in this one."""


def note(owner: object) -> None:
    """It is sent now."""
    for kind in type(owner).__mro__:
        if id(kind) not in _known and not is_library(kind.__module__) and not is_installed(kind.__module__):
            _known[id(kind)] = _Known(kind)
            weakref.finalize(kind, _known.pop, id(kind), None).atexit = False


def marks() -> list[int]:
    """Equal ones: nothing was set on any class. Every call of `schedule` asks."""
    found = []
    for one in list(_known.values()):
        members = getattr(one.kind(), "__dict__", _NOTHING)
        # Most classes have none.
        if one.values_of is not None or len(members) != one.size:
            found.append(one.changes(members))
    return found


def look() -> None:
    """What `set_on` says is that of now."""
    for one in list(_known.values()):
        one.look()


def set_on(owner: object) -> SetAttributes:
    """What was set on its classes since they were sent first."""
    return {
        (place, name): one
        for place, kind in enumerate(type(owner).__mro__)
        if (known := _known.get(id(kind))) is not None
        for name, one in known.set.items()
    }


# -- on workers and servers -------------------------------------------------------------------------------------------


_taken: MutableMapping[type, dict[str, tuple[int, object]]] = weakref.WeakKeyDictionary()
"""When what was set here was set on the coordinator, and what there was before."""


def put(owner: object, attributes: SetAttributes) -> Iterator[tuple[str, SetAttribute]]:
    """Set what was set on the classes of ``owner``; gives the rest, which is its own."""
    for key, one in attributes.items():
        if isinstance(key, str):
            yield key, one
            continue
        place, name = key
        kind = type(owner).__mro__[place]
        if id(kind) in _known:
            continue  # a coordinator is in this process, and it is the program's class
        taken = _taken.setdefault(kind, {})
        moment, before = taken.get(name, (0, vars(kind).get(name, Gone.GONE)))
        if moment < one.moment:
            taken[name] = one.moment, before
            _set(kind, name, one.value)


def put_back() -> None:
    """Another job begins, whose program may have set nothing."""
    for kind, taken in list(_taken.items()):
        for name, (_, before) in taken.items():
            _set(kind, name, before)
    _taken.clear()


def _set(kind: type, name: str, value: object) -> None:
    if value is not Gone.GONE:
        setattr(kind, name, value)
    elif name in vars(kind):
        delattr(kind, name)
