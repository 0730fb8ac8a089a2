"""Functions of torch by their names, for lists of what is done with them; what this version lacks is left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def members(names: Iterable[str], *owners: Any) -> frozenset[Any]:
    """What the ``owners`` (`torch`, `torch.Tensor` …) have under these names: functions, and for properties what gets
    their value."""
    found: set[Any] = set()
    for name in names:
        for owner in owners:
            member: Any = getattr(owner, name, None)
            if callable(member):
                found.add(member)
            elif hasattr(member, "__get__"):
                found.add(member.__get__)
    return frozenset(found)
