"""What a replica of one process that makes members of a module tells the others, whose code will find these made.

Members (parameters, buffers, children) are made once, for all. What their maker sets beside them (``self.is_built =
True``, ``self.width = 3``) the others' code then takes for set.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from torch import nn

from torchstrat.core.errors import ReplicaDivergenceError

SHARED = frozenset(vars(nn.Module())) - {"training"}
"""Names of attributes in which all replicas have the same dictionaries."""


class NumberOfMaker(NamedTuple):
    """What the maker of a member has made of another number, which ``replica`` had there. It was told the new one, but
    for a whole number raised by 1, which was taken for a count that each replica makes."""

    owner: type
    attributes: dict[str, Any]
    maker: int
    replica: int
    name: str
    before: Any
    value: Any
    is_told: bool

    def refuse_other_meaning(self) -> None:
        """A number that the other replica has changed once more, from what it was told, counts twice, and one that it
        has not counted was set in making."""
        now = self.attributes.get(self.name)
        if type(now) is not type(self.value):
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


def _is_same_change(before: Any, value: Any, now: Any) -> bool:
    """Whether ``value`` became ``now`` as ``before`` became ``value``: by the same amount, or the same factor."""
    is_close = functools.partial(math.isclose, rel_tol=1e-9)
    return value != before and (is_close(value - before, now - value) or is_close(value * value, before * now))


def tell(others: dict[str, Any], own: dict[str, Any], *, is_maker: bool) -> list[tuple[str, Any, Any, bool]]:
    """Give another replica what one has set: all that is new or has become a member, and other plain values. Numbers
    only of what has made members, and not what it has counted: the other one lowers rates and counts, too. Returns
    the last fields of `NumberOfMaker`."""
    numbers: list[tuple[str, Any, Any, bool]] = []
    for name, value in own.items():
        if name in SHARED or others.get(name, own) is value:
            continue
        if name in others and type(value) in (int, float):
            is_count = type(value) is type(others[name]) is int and value == others[name] + 1
            if is_maker and type(others[name]) in (int, float):
                numbers.append((name, others[name], value, not is_count))
            if is_count or not is_maker:
                continue
        if name not in others or isinstance(value, bool | int | float | str | type(None)):
            others[name] = value
    members = [own.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")]
    for name in [name for name in others if name not in own and any(name in kind for kind in members)]:
        del others[name]  # ``self.weight = None``, which a parameter has taken the place of
    return numbers
