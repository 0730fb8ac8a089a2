"""Which gradient replicas combine next where hooks of the user's own wait for it in the midst of a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from torchstrat.errors import ReplicaDivergenceError

Place = TypeVar("Place", bound=Hashable)


class HookTurns(Generic[Place]):
    """The turns of one pass after the other. Replicas mostly wait at the same gradient; one that a branch has spared
    it waits at a later one, or at the end of the pass, and counts as one without a gradient."""

    def __init__(self) -> None:
        self._missed: dict[int, set[Place]] = {}
        self._had: dict[Place, int] = {}

    def end(self) -> list[tuple[Place, int, list[int]]]:
        """All are at the end of the pass. Returns the gradients that not all have: one replica that has, and those that
        have not. No hook has been called there, so what the hooks have made of it has to be handed over."""
        if not self._missed:
            return []
        missed, self._missed = self._missed, {}
        had, self._had = self._had, {}
        return [(place, had[place], [one for one in missed if place in missed[one]]) for place in had]

    def next(self, places: Mapping[int, Place], replicas: Iterable[int], order: Callable[[], Iterable[Place]]) -> Place:
        """Where those of the ``replicas`` are that are not at the end of the pass → the gradient to combine now.
        Everyone who is elsewhere has to ask again.

        ``order``: all gradients, the first ones the last to be ready, as backward passes mostly have it. If a replica
        turns out to have another order, everyone raises `ReplicaDivergenceError`.
        """
        waiting = set(places.values())
        late = [replica for replica, place in places.items() if place in self._missed.get(replica, ())]
        if late:
            raise ReplicaDivergenceError(
                f"replica {late[0]} comes in its backward pass to a gradient that hooks look at after the others have "
                "been there. A hook on a gradient gets the one of all replicas, so all have to come to such gradients "
                "in the same order; look for a branch that depends on the replica's data or id, or look at gradients "
                "when backward() has returned."
            )
        (chosen,) = waiting if len(waiting) == 1 else [[place for place in order() if place in waiting][-1]]
        for replica in replicas:
            if places.get(replica) != chosen:
                self._missed.setdefault(replica, set()).add(chosen)
                self._had[chosen] = next(one for one, place in places.items() if place == chosen)
        return chosen
