"""Members of modules that replicas of one process make, or put in each other's place, in a step.

Members (parameters, buffers, children) are made once, for all. What their maker sets beside them (``self.is_built =
True``, ``self.width = 3``) the others' code then takes for set. Where replicas put a member in another one's place (a
new head), each finds there what was there before, and from then on its own.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from torchstrat.core._torch_private import own_children, own_parameters
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.replicas.roster import refill

SHARED = frozenset(vars(nn.Module())) - {"training"}
"""Names of attributes in which all replicas have the same dictionaries."""


_IN_A_ROW = nn.Sequential, nn.ModuleList, nn.ParameterList

_Number = tuple[str, float, float, bool]


class NumberOfMaker(NamedTuple):
    """What the maker of a member has made of another number, which ``replica`` had there. It was told the new one, but
    for a whole number raised by 1, which was taken for a count that each replica makes."""

    owner: type
    attributes: dict[str, object]
    maker: int
    replica: int
    name: str
    before: float
    value: float
    is_told: bool

    def refuse_other_meaning(self) -> None:
        """A number that the other replica has changed once more, from what it was told, counts twice, and one that it
        has not counted was set in making."""
        now = self.attributes.get(self.name)
        if not isinstance(now, int | float) or type(now) is not type(self.value):
            return
        if self.is_told and _is_same_change(self.before, self.value, now):
            became = f"found the number as it was then, and has changed it once more, to {now!r}"
        elif not self.is_told and now == self.before:
            became = "was left to count by itself, and has not"
        else:
            return
        raise ReplicaDivergenceError(
            f"replica {self.maker} has changed {self.name!r} of {self.owner.__name__} from {self.before!r} to "
            f"{self.value!r} in the run in which it made a member of it, so that replica {self.replica} {became}. "
            "Make the member within `with strategy.scope()`, or set the number in another module or run."
        )


def _is_same_change(before: float, value: float, now: float) -> bool:
    """Whether ``value`` became ``now`` as ``before`` became ``value``: by the same amount, or the same factor."""
    is_close = functools.partial(math.isclose, rel_tol=1e-9)
    return value != before and (is_close(value - before, now - value) or is_close(value * value, before * now))


def _number_in(value: object) -> float | None:
    return value if isinstance(value, int | float) and type(value) in (int, float) else None


def tell(others: dict[str, object], own: dict[str, Any], *, is_maker: bool) -> list[_Number]:
    """Give another replica what one has set: all that is new or has become a member, and other plain values. Numbers
    only of what has made members, and not what it has counted: the other one lowers rates and counts, too. Returns
    the last fields of `NumberOfMaker`."""
    numbers: list[_Number] = []
    for name, value in own.items():
        if name in SHARED or others.get(name, own) is value:
            continue
        if name in others and type(value) in (int, float):
            before = _number_in(others[name])
            is_count = type(value) is type(before) is int and value == before + 1
            if is_maker and before is not None:
                numbers.append((name, before, value, not is_count))
            if is_count or not is_maker:
                continue
        if name not in others or isinstance(value, bool | int | float | str | type(None)):
            others[name] = value
    members = [own.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")]
    for name in [name for name in others if name not in own and any(name in kind for kind in members)]:
        del others[name]  # ``self.weight = None``, which a parameter has taken the place of
    return numbers


def what_is_replaced(module: nn.Module, name: str, member: object) -> object:
    """The child or parameter in the place of which ``member`` is about to be set. None: it takes nobody's."""
    members = own_parameters(module) if isinstance(member, torch.Tensor) else own_children(module)
    before = dict(members.items()).get(name)
    return None if before is member or isinstance(module, torch.jit.ScriptModule) else before


class _Place(NamedTuple):
    """Of a child or a parameter."""

    module: nn.Module
    name: str
    before: object
    """What was there when the run began."""
    own: dict[int, object]
    """What replicas have put there."""

    @property
    def table(self) -> dict[str, Any]:
        return own_parameters(self.module) if isinstance(self.before, torch.Tensor) else own_children(self.module)


class _Row(NamedTuple):
    """Of a container whose members have numbers: one that is put in, or taken out, moves those behind it."""

    module: nn.Module
    name: str
    """Of its dictionary of members."""
    table: dict[str, object]
    """Common to all replicas."""
    before: dict[str, object]
    own: dict[int, dict[str, object]]

    def park(self, replica: int, now: dict[str, object]) -> None:
        self.own[replica] = dict(now)
        vars(self.module)[self.name] = self.table  # ``del layers[1]`` has put another dictionary in its place
        refill(self.table, self.before)

    def change(self) -> str:
        """What the first of them did, for an error."""
        for own in self.own.values():
            if list(own) == list(self.before):
                name = next(name for name, one in self.before.items() if own[name] is not one)
                return _put_in_place(self.before[name], self.module, name)
        return f"put members into a {type(self.module).__name__}, or took some out"


def _name_of_row(module: nn.Module) -> str:
    return "_parameters" if isinstance(module, nn.ParameterList) else "_modules"


def _put_in_place(before: object, module: nn.Module, name: str) -> str:
    return f"put another {type(before).__name__} in the place of {type(module).__name__}.{name}"


def _require_all(replicas: list[int], did: Iterable[int], what: str) -> None:
    """Or none of them."""
    did = list(did)
    missing = [one for one in replicas if one not in did]
    if did and missing:
        raise ReplicaDivergenceError(
            f"{', '.join(f'replica {one}' for one in did)} {what}, and "
            f"{', '.join(f'replica {one}' for one in missing)} did not. Every replica's code has to do so, or none: "
            "decide by what is the same for all, such as an argument of the step or an attribute of a module, or do it "
            "between runs."
        )


class ReplacedMembers:
    """Children and parameters in whose place replicas put others in a run (a new head), and containers with numbers to
    which they add layers or take some from. The dictionaries are common to all: each replica finds there what was there
    before, and from then on its own; what is left is the leader's."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], _Place] = {}
        self._made: dict[tuple[int, str], tuple[int, object]] = {}  # by whom, where there was none
        self._rows: list[_Row] = []

    def begin(self, modules: Iterable[object]) -> None:
        """A run of several replicas begins, which have these."""
        self.forget()
        for one in modules:
            if isinstance(one, _IN_A_ROW):
                name = _name_of_row(one)
                table = vars(one)[name]
                self._rows.append(_Row(one, name, table, dict(table), {}))

    def note(self, module: nn.Module, name: str, member: object, replica: int) -> bool:
        """``replica``, whose turn it is, is about to set that. Whether it takes another one's place."""
        key = id(module), name
        if key in self._places:
            return True
        before = what_is_replaced(module, name, member)
        if before is None:
            self._made[key] = replica, member
            return False
        maker, made = self._made.get(key, (replica, None))
        own = {maker: made} if made is before and maker != replica else {}
        self._places[key] = _Place(module, name, before, own)
        return True

    def park(self, replica: int) -> None:
        for row in self._rows:  # many: a call for each would be most of this turn's time
            now, before = vars(row.module)[row.name], row.before
            is_as_before = len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
            if now is not row.table or not is_as_before or replica in row.own:
                row.park(replica, now)
        for place in self._places.values():
            now = place.table.get(place.name)
            if now is not place.before:
                place.own[replica] = now
                place.table[place.name] = place.before

    def install(self, replica: int) -> None:
        for row in self._rows:
            if replica in row.own:
                refill(row.table, row.own[replica])
        for place in self._places.values():
            if replica in place.own:
                place.table[place.name] = place.own[replica]

    def of_leader(self, leader: int) -> dict[int, object]:
        """By the ``id`` of what a replica has put somewhere, what the leader has put there, which lasts."""
        places = [place.own for place in self._places.values() if leader in place.own]
        return {id(member): own[leader] for own in places for member in own.values()}

    def grown(self) -> nn.Module | None:
        """A container with numbers into which replicas have put something new."""
        for row in self._rows:
            known = set(map(id, row.before.values()))
            if any(id(one) not in known for own in row.own.values() for one in own.values()):
                return row.module
        return None

    def refuse_of_some(self, replicas: list[int]) -> None:
        for row in self._rows:
            if row.own:
                _require_all(replicas, row.own, row.change())
        for place in self._places.values():
            _require_all(replicas, place.own, _put_in_place(place.before, place.module, place.name))

    def forget(self) -> None:
        self._places, self._made, self._rows = {}, {}, []
