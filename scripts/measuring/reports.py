"""What came of the mutants: JSON, to go on with or to repeat, and the same as a table."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from scripts.measuring.drawing import Mutant
from scripts.measuring.trials import GONE, KILLED, TIMED_OUT, Verdict


class Report:
    """Mutants, each with its verdict once it has been tried. ``settings``: what they were drawn by."""

    def __init__(
        self,
        file: Path,
        settings: dict[str, Any],
        mutants: list[Mutant],
        verdicts: list[Verdict | None] | None = None,
    ) -> None:
        self.file, self.settings, self.mutants = file, settings, mutants
        self.verdicts: list[Verdict | None] = verdicts or [None] * len(mutants)

    @classmethod
    def read(cls, file: Path) -> Report:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = content["mutants"]
        verdicts = [None if row["verdict"] is None else Verdict(**row["verdict"]) for row in rows]
        return cls(file, content["settings"], [Mutant.from_json(row) for row in rows], verdicts)

    def write(self) -> None:
        """Whole or not at all: it may be interrupted."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {**mutant.as_json(), "verdict": None if verdict is None else dataclasses.asdict(verdict)}
            for mutant, verdict in zip(self.mutants, self.verdicts, strict=True)
        ]
        self._replace(self.file, json.dumps({"settings": self.settings, "mutants": rows}, indent=1))
        self._replace(self.file.with_suffix(".md"), self.table())

    @staticmethod
    def _replace(file: Path, text: str) -> None:
        new = file.with_name(f"{file.name}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, file)

    @property
    def untried(self) -> list[int]:
        return [number for number, verdict in enumerate(self.verdicts) if verdict is None]

    @property
    def counted(self) -> list[Verdict]:
        """Of those that were tried: without lines that are gone."""
        return [verdict for verdict in self.verdicts if verdict is not None and verdict.outcome != GONE]

    @property
    def share(self) -> float:
        """Killed, in percent."""
        killed = [verdict for verdict in self.counted if verdict.outcome in (KILLED, TIMED_OUT)]
        return 100 * len(killed) / max(len(self.counted), 1)

    def line(self, number: int) -> str:
        mutant, verdict = self.mutants[number], self.verdicts[number]
        outcome = "not tried" if verdict is None else verdict.outcome
        becomes = mutant.mutated or "(removed)"
        return f"{outcome}: {mutant.place.file} {mutant.place.inside}: {mutant.place.text}  →  {becomes}"

    def summary(self) -> str:
        outcomes = [verdict.outcome for verdict in self.verdicts if verdict is not None]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
        return f"{self.share:.1f} % of {len(self.counted)} killed ({counts})"

    def table(self) -> str:
        lines = [self.summary(), "", "| # | where | line | becomes | outcome | by | tests |", f"|{'---|' * 7}"]
        for number, (mutant, verdict) in enumerate(zip(self.mutants, self.verdicts, strict=True), 1):
            outcome, by, tests = ("not tried", "", "")
            if verdict is not None:
                outcome, by, tests = verdict.outcome, verdict.by, f"{verdict.tests} of {verdict.covering}"
            where = f"{mutant.place.file} {mutant.place.inside}".strip()
            cells = [str(number), where, _code(mutant.place.text), _code(mutant.mutated), outcome, _code(by), tests]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, ""])


def _code(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in text else f"`{escaped}`" if text else ""
