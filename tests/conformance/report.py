"""``python -m tests.conformance.report [AREA ...]``: how many recorded cases pass, differ, mean nothing here, fail.

Prints one line per area, then the ids of all that did not simply pass. Exits with 1 when a case failed.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from typing import get_args

from tests.conformance.harness import RULES, load_cases
from tests.conformance.verdicts import AREAS, Kind, Verdict, judge, load_adapter

REASON_CHARACTERS = 400
KINDS: tuple[Kind, ...] = get_args(Kind)


def _describe(name: str, verdict: Verdict) -> str:
    number = "" if verdict.number is None else f" ({verdict.number}, {RULES[verdict.number]})"
    reason = verdict.reason if verdict.error is None else str(verdict.error) or repr(verdict.error)
    line = textwrap.shorten(reason.removeprefix(f"{name}: "), REASON_CHARACTERS)
    return f"  {verdict.kind}{number}: {name}" + (f": {line}" if line else "")


def main(areas: list[str]) -> int:
    """Print the table for ``areas`` and return the exit status."""
    verdicts = {case.id: (case.area, judge(case)) for case in load_cases(areas)}
    print(f"{'area':28}" + "".join(f"{kind:>16}" for kind in KINDS))
    for area in [*areas, "all"]:
        counts = Counter(verdict.kind for of, verdict in verdicts.values() if area in (of, "all"))
        print(f"{area:28}" + "".join(f"{counts[kind]:16}" for kind in KINDS))
    for name, (_, verdict) in verdicts.items():
        if verdict.kind != "passed":
            print(_describe(name, verdict))
    for area in areas:
        for field, reason in load_adapter(area).fields_without_counterpart.items():
            print(f"  field without counterpart: {area}.{field}: {reason}")
    return int(any(verdict.kind == "failed" for _, verdict in verdicts.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[*AREAS, []], help="all of them by default")
    sys.exit(main(parser.parse_args().areas or list(AREAS)))
