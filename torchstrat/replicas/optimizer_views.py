"""What replicas of one process see of an optimizer's state, which is there once and which only the leader steps.

A step may read and edit it: halve a momentum, replace a moment. The leader's edits are what lasts, so every other
replica edits a copy of its own, made when it first looks, of what was there before the leader's code changed it. Most
steps never look, and cost nothing: the leader's optimizer steps on the state itself.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

_MISSING = object()


class SharedState:
    """The state of one optimizer in one run. ``copy_of`` makes a replica's own copy of an entry."""

    def __init__(self, real: dict[Any, Any], copy_of: Callable[[Any], Any]) -> None:
        self.real = real
        self.copy_of = copy_of
        self.before: dict[Any, Any] = {}
        """Entries that the leader has looked at since its last step, as they were."""
        self.views: list[ReplicaView] = []

    def keep(self, key: Any) -> None:
        if key not in self.before:
            self.before[key] = self.copy_of(self.real[key]) if key in self.real else _MISSING

    @property
    def is_looked_at(self) -> bool:
        """Whether there is any such entry as of `looked_at`."""
        return bool(self.before) or any(view.own for view in self.views)

    def looked_at(self) -> list[tuple[Any, list[Any]]]:
        """Entries that any replica has looked at since the last step, and what each has there, the leader first."""
        keys = {id(key): key for key in [*self.before, *(key for view in self.views for key in view.own)]}
        return [(key, [self.real.get(key), *(view.peek(key) for view in self.views)]) for key in keys.values()]

    def stepped(self) -> None:
        """The optimizer has stepped: everyone sees what the state is now."""
        self.before.clear()
        for view in self.views:
            view.forget()


if TYPE_CHECKING:
    _Mapping = collections.defaultdict[Any, Any]
else:
    # All methods come from the first class, and the second is what `isinstance` asks for. To mypy they are strangers.
    class _Mapping(MutableMapping, collections.defaultdict):
        pass


class _View(_Mapping):
    """Looks like the dictionary that torch's optimizers have, and holds nothing itself."""

    def __init__(self, shared: SharedState) -> None:
        collections.defaultdict.__init__(self, getattr(shared.real, "default_factory", None))
        self.shared = shared

    def __missing__(self, key: Any) -> Any:
        if self.default_factory is None:
            raise KeyError(key)
        self[key] = made = self.default_factory()
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return collections.defaultdict, (self.default_factory, dict(self.items()))

    def copy(self) -> Any:
        return collections.defaultdict(self.default_factory, dict(self.items()))

    __copy__ = copy

    def __repr__(self) -> str:
        return repr(self.copy())


class LeaderView(_View):
    """The state itself, of which is kept what the leader's code looks at, and might edit."""

    def __getitem__(self, key: Any) -> Any:
        self.shared.keep(key)
        return self.shared.real[key] if key in self.shared.real else self.__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.shared.keep(key)
        self.shared.real[key] = value

    def __delitem__(self, key: Any) -> None:
        self.shared.keep(key)
        del self.shared.real[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.shared.real

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shared.real)

    def __len__(self) -> int:
        return len(self.shared.real)


class ReplicaView(_View):
    """Another replica's: copies of the entries that it looks at."""

    def __init__(self, shared: SharedState) -> None:
        super().__init__(shared)
        self.own: dict[Any, Any] = {}
        shared.views.append(self)

    def forget(self) -> None:
        self.own.clear()

    def peek(self, key: Any) -> Any:
        """What it has there; None for nothing."""
        found = self.own[key] if key in self.own else self._theirs(key)
        return None if found is _MISSING else found

    def _theirs(self, key: Any) -> Any:
        before = self.shared.before
        return before[key] if key in before else self.shared.real.get(key, _MISSING)

    def __getitem__(self, key: Any) -> Any:
        own = self.own.get(key)
        if own is None:
            theirs = _MISSING if key in self.own else self._theirs(key)
            if theirs is _MISSING:
                return self.__missing__(key)
            own = self.own[key] = self.shared.copy_of(theirs)
        return own

    def __setitem__(self, key: Any, value: Any) -> None:
        self.own[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self.own[key] = None

    def __contains__(self, key: Any) -> bool:
        return self.own[key] is not None if key in self.own else self._theirs(key) is not _MISSING

    def __iter__(self) -> Iterator[Any]:
        keys = [*self.shared.real, *self.shared.before, *self.own]
        return iter([key for key in {id(key): key for key in keys}.values() if key in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def real_state(state: Any) -> Any:
    """The dictionary behind a view; anything else is its own."""
    while type(state) in (LeaderView, ReplicaView):  # what `isinstance` asks an abstract class takes longer
        state = state.shared.real
    return state
