"""Which mutants are tried: drawn by a seed, in such a way that an edit elsewhere changes nothing.

Each line has a number that is drawn from the seed and from what the line is (`Place`), not from where in the file it
is; those with the highest numbers are taken. So a line that is added is drawn or not, and at most drives one other out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.measuring.operators import Mutation, mutate, mutations
from scripts.measuring.places import Place, places

WEIGHTS = {
    "torchstrat/replicas": 4.0,
    "torchstrat/data": 4.0,
    "torchstrat/checkpoint": 4.0,
    "torchstrat/parameter_server": 4.0,
}
"""A line of these is drawn as often as four others: a wrong number there is what users would not see."""


@dataclass(frozen=True)
class Mutant:
    """A mutation of a place."""

    place: Place
    mutation: Mutation
    mutated: str
    """What the line becomes."""

    def apply(self, source: str) -> tuple[int, str] | None:
        """The line's number and the mutated file; None if the line is gone."""
        for number, place in places(self.place.file, source).items():
            if place == self.place:
                mutated = mutate(source, number, self.mutation)
                return None if mutated is None else (number, mutated)
        return None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Mutant:
        return cls(Place(**record["place"]), Mutation(**record["mutation"]), record["mutated"])


def draw(root: Path, files: list[str], *, seed: int, count: int, weights: Mapping[str, float]) -> list[Mutant]:
    """At most one mutant of a line."""
    drawn: list[Mutant] = []
    sources = {file: (root / file).read_text(encoding="utf-8") for file in files}
    numbered = [
        (_number(seed, place.key) ** (1 / weight), line, place)
        for file, source in sources.items()
        if (weight := weight_of(file, weights)) > 0
        for line, place in places(file, source).items()
    ]
    for _, line, place in sorted(numbered, key=lambda one: (one[0], one[2].key), reverse=True):
        if len(drawn) == count:
            break
        drawn.extend(_mutant(sources[place.file], line, place, seed))
    return drawn


def weight_of(file: str, weights: Mapping[str, float]) -> float:
    """Of the longest name that the file is, or is in; else 1."""
    names = [name for name in weights if file == name or file.startswith(f"{name}/")]
    return weights[max(names, key=len)] if names else 1.0


def _mutant(source: str, line: int, place: Place, seed: int) -> Iterator[Mutant]:
    """One of the line's, if it has any. First the spot on the line: an operator with eleven others that it could be
    is not to be drawn eleven times as often as a number."""
    found = mutations(source, line)
    found.sort(key=lambda one: _number(seed, f"{place.key}\0{one.operator}\0{one.occurrence}"))
    found.sort(key=lambda one: _number(seed, f"{place.key}\0{one.column}"))
    for mutation in found:
        if (mutated := mutate(source, line, mutation)) is not None:
            yield Mutant(place, mutation, _line_of(mutated, source, line))
            return


def _line_of(mutated: str, source: str, line: int) -> str:
    """Empty if it was removed."""
    removed = len(source.splitlines()) - len(mutated.splitlines())
    return "" if removed else mutated.splitlines()[line - 1].strip()


def _number(seed: int, key: str) -> float:
    """Evenly between 0 and 1."""
    return (int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:8], "big") + 1) / (2**64 + 1)
