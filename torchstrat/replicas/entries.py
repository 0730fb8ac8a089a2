"""Entries by the `id` of a tensor or module, which go with it: tensors define ``==`` otherwise than by identity."""

from __future__ import annotations

import weakref
from typing import Any


def reference_of_entry(owner: object, entries: dict[int, Any]) -> weakref.ref[Any]:
    """For the ``reference`` of an entry that is made for ``owner``, and is dropped from ``entries`` with it."""
    key = id(owner)

    def forget(reference: weakref.ref[Any]) -> None:
        if key in entries and entries[key].reference is reference:
            del entries[key]

    return weakref.ref(owner, forget)
