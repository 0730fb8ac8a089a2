"""Finding replicas that have drifted apart: what `StrategyExtended.check_replicas` does between processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torchstrat.core.communicator import Communicator
from torchstrat.core.errors import InvalidArgumentError, ReplicaDriftError
from torchstrat.distributed.collectives.agreement import agree
from torchstrat.replicas.state_kinds import Belongings, Digest, digests

VARIABLE = "TORCHSTRAT_CHECK"


def compare(communicator: Communicator, state: Belongings, when: str) -> None:
    """All ranks call it. Raises `ReplicaDriftError`, on all of them, naming the first thing that is not equal."""
    call = "check_replicas"
    agree(communicator, call)
    everyone = communicator.all_gather_object(digests(state), call)
    found = first_difference(everyone, communicator.ranks)
    if found is not None:
        raise ReplicaDriftError(
            f"{found}{when}. Replicas have to stay equal between runs: look for what depends on the rank, such as an "
            "edit through .data, a value loaded or drawn on some ranks only, or a scheduler that sees its own loss."
        )


def first_difference(everyone: Sequence[Mapping[str, Digest]], ranks: Sequence[int]) -> str | None:
    """The name of the first thing that differs, and which replicas have what; None if all are alike."""
    for name in dict.fromkeys(name for own in everyone for name in own):
        groups: dict[object, list[int]] = {}
        for rank, own in zip(ranks, everyone, strict=True):
            groups.setdefault(own.get(name), []).append(rank)
        if len(groups) > 1:
            told = (
                "missing" if digest is None else "one" if not place else "another"
                for place, digest in enumerate(groups)
            )
            each = ", ".join(
                f"{word} on replica{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}"
                for word, where in zip(told, groups.values(), strict=True)
            )
            return f"{name} is not the same on all replicas ({each})"
    return None


class PeriodicChecks:
    """``TORCHSTRAT_CHECK=every:100``: look after every 100th run of a strategy."""

    def __init__(self, every: int) -> None:
        self._every, self._runs = every, 0

    @staticmethod
    def from_environment() -> PeriodicChecks | None:
        value = os.environ.get(VARIABLE, "")
        if not value:
            return None
        word, _, count = value.partition(":")
        if word != "every" or not count.isascii() or not count.isdigit() or not int(count):
            raise InvalidArgumentError(f"{VARIABLE}={value!r} is not understood; write every:100, or unset it.")
        return PeriodicChecks(int(count))

    def is_due(self) -> int:
        """Called after each run: its number if it is one to look after, else 0."""
        self._runs += 1
        return 0 if self._runs % self._every else self._runs
