"""Classes that travelled by value, in a process that has them already."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any


class ClassesHere(pickle.Unpickler):
    """A class of the user's program that is known here stays as it is here.

    cloudpickle would find the same class, and then replace its methods by the copies that travelled, whose closures and
    globals are others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at_home: set[type] = set()

    def find_class(self, module_name: str, name: str) -> Any:
        found = super().find_class(module_name, name)
        if module_name == "cloudpickle.cloudpickle":
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(self._make_class, found)
            if name == "_class_setstate":
                return functools.partial(self._set_state, found)
        return found

    def _make_class(self, make: Callable[..., type], *args: Any) -> type:
        *_, tracker_id, _ = args
        own: type | None = sys.modules["cloudpickle.cloudpickle"]._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
        if own is None:
            return make(*args)
        self._at_home.add(own)
        return own

    def _set_state(self, set_state: Callable[[type, Any], type], made: type, state: Any) -> type:
        return made if made in self._at_home else set_state(made, state)
