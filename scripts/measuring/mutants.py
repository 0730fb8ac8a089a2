"""Change one line at a time and see whether a test fails; called by ``./scripts/mutants``.

The report is written after each mutant, and an interrupted run goes on where it was. Tests are those that
``./scripts/coverage`` has seen on the line. The exit status is not 0 if too few were killed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.measuring.coverings import Coverings
from scripts.measuring.drawing import WEIGHTS, Mutant, draw
from scripts.measuring.parts import ROOT, hash_of, hashes
from scripts.measuring.places import lines_to_cover
from scripts.measuring.pytest_run import PytestRun, copy_of
from scripts.measuring.reports import Report
from scripts.measuring.trials import GONE, Trials, Verdict

DEFAULT_FOLDER = ROOT / "outputs" / "mutants"


def main() -> int:
    options = parse()
    report = open_report(options)
    coverings = Coverings(options.coverage.resolve())
    if not coverings.seconds:
        print(f"{options.coverage} has no finished part; run ./scripts/coverage first.")
        return 2
    print(f"{len(report.mutants)} mutants, {len(report.untried)} to be tried; the report: {report.file}", flush=True)
    if report.untried:
        with copy_of(ROOT) as tree:
            run = PytestRun(tree, options.limit)
            trials = Trials(tree, run, coverings.seconds, options.limit)
            go_on(report, lambda mutant: judge(mutant, coverings, trials))
    print(f"\n{report.summary()}")
    return int(report.share < options.least)


def go_on(report: Report, judge: Callable[[Mutant], Verdict]) -> None:
    """Try what has not been tried."""
    for number in report.untried:
        report.verdicts[number] = verdict = judge(report.mutants[number])
        report.write()
        print(f"{number + 1}/{len(report.mutants)} {report.line(number)} ({verdict.seconds:g} s)", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./scripts/mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument(
        "--weight", action="append", default=[], metavar="PATH=NUMBER", help="of lines of this folder or file, of 1"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATH", help="draw from this folder or file alone"
    )
    parser.add_argument("--repeat", type=Path, metavar="REPORT", help="the mutants of an earlier report, drawn then")
    parser.add_argument("--report", type=Path, help="a JSON file; a table in Markdown is put beside it")
    parser.add_argument("--again", action="store_true", help="do not go on with a report that is there")
    parser.add_argument("--coverage", type=Path, default=ROOT / "outputs" / "coverage")
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS", help="for the tests of one mutant")
    parser.add_argument("--least", type=float, default=85.0, metavar="PERCENT", help="that have to be killed")
    return parser.parse_args()


def open_report(options: argparse.Namespace) -> Report:
    """One that is there and that has the same mutants to try goes on."""
    if options.repeat:
        settings = {"repeats": options.repeat.name}
        name = f"repeat-{options.repeat.stem}"
    else:
        weights = WEIGHTS | {path: float(weight) for path, _, weight in (w.partition("=") for w in options.weight)}
        settings = {"seed": options.seed, "count": options.count, "weights": weights, "only": options.only}
        name = f"seed-{options.seed}"
    file = (options.report or DEFAULT_FOLDER / f"{name}.json").resolve()
    if file.exists() and not options.again:
        report = Report.read(file)
        if report.settings == settings:
            return report
        sys.exit(f"{file} is of {report.settings}, not of {settings}: name another --report, or start --again.")
    mutants = Report.read(options.repeat).mutants if options.repeat else drawn(settings, options)
    report = Report(file, settings, mutants)
    report.write()
    return report


def drawn(settings: dict[str, object], options: argparse.Namespace) -> list[Mutant]:
    only = options.only or ["torchstrat"]
    files = [file for file in hashes() if any(file == one or file.startswith(f"{one.rstrip('/')}/") for one in only)]
    weights = settings["weights"]
    assert isinstance(weights, dict)
    return draw(ROOT, files, seed=options.seed, count=options.count, weights=weights)


def judge(mutant: Mutant, coverings: Coverings, trials: Trials) -> Verdict:
    file = mutant.place.file
    path = trials.tree / file
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    applied = mutant.apply(source)
    if applied is None:
        return Verdict(GONE)
    if coverings.sources.get(file) != hash_of(path.read_bytes()):
        sys.exit(f"{file} has changed since its coverage was measured; run ./scripts/coverage --again.")
    line, mutated = applied
    covering = coverings.of(file, lines_to_cover(source, line))
    return trials.try_out(file, mutated, covering)


if __name__ == "__main__":
    sys.exit(main())
