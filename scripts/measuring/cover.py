"""Run tests under coverage and print how much of the package they ran; called by ``./scripts/coverage``."""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage, CoverageData

from scripts.measuring.parts import PACKAGE, ROOT, Part, finished_parts, folders_of_tests, hashes, part_of

DEFAULT_FOLDER = ROOT / "outputs" / "coverage"


@dataclass
class Counts:
    """Of a folder of the package."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        """``summary``: of a file, in coverage's words."""
        self.lines += summary["num_statements"]
        self.lines_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    @property
    def percent(self) -> tuple[float, float]:
        return 100 * self.lines_run / max(self.lines, 1), 100 * self.branches_run / max(self.branches, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./scripts/coverage", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--again", action="store_true", help="also run parts that have finished")
    parser.add_argument("--into", type=Path, default=DEFAULT_FOLDER, help="(default outputs/coverage)")
    parser.add_argument("--before", type=Path, help="totals.json of an earlier run: print both, fail if one fell")
    parser.add_argument("--only", choices=["run", "report"], help="one of the two steps")
    options, pytest_arguments = parser.parse_known_args()
    into = options.into.resolve()
    status = 0
    if options.only != "report":
        wanted = [pytest_arguments] if pytest_arguments else [[folder] for folder in folders_of_tests()]
        status = run([part_of(arguments, into) for arguments in wanted], options.again)
    if options.only != "run":
        status = report(into, options.before) or status
    return status


def run(parts: list[Part], again: bool) -> int:
    """The last exit status that was not 0."""
    status = 0
    for part in parts:
        if part.summary is not None and not again:
            print(f"{' '.join(part.arguments)}: has run, exit status {part.summary['status']}", flush=True)
            status = part.summary["status"] or status
            continue
        print(f"{' '.join(part.arguments)}:", flush=True)
        status = part.run() or status
    return status


def report(into: Path, before: Path | None) -> int:
    """Print the totals of all parts that have finished, and keep them in ``totals.json``."""
    parts = finished_parts(into)
    for part in parts:
        summary = part.summary
        assert summary is not None
        old = "" if summary["sources"] == hashes() else "; THE PACKAGE HAS CHANGED SINCE"
        print(
            f"{part.folder.name}: exit status {summary['status']}, {summary['processes']} processes, "
            f"{summary['seconds']:g} s and {summary['seconds_to_combine']:g} s to combine{old}"
        )
    combine(parts, into / "data")
    totals = {name: counts.percent for name, counts in count(into / "data").items()}
    earlier = json.loads(before.read_text()) if before else {}
    (into / "totals.json").write_text(json.dumps(totals, indent=1))
    print(f"\n{'':32}{'lines':>9}{'branches':>10}{'   before: lines, branches' if before else ''}")
    for name, (lines, branches) in totals.items():
        was = f"{earlier[name][0]:12.2f} %{earlier[name][1]:8.2f} %" if name in earlier else ""
        print(f"{name:32}{lines:7.2f} %{branches:8.2f} %{was}")
    fell = [a < b for a, b in zip(totals["all"], earlier.get("all", (0, 0)), strict=True)]
    return int(any(fell))


def combine(parts: list[Part], file: Path) -> None:
    combined = Coverage(data_file=file, config_file=False)
    combined.combine([str(part.data) for part in parts], keep=True)
    combined.save()


def count(file: Path) -> dict[str, Counts]:
    """Folder → its counts, with files that nothing ran; all of them last."""
    data = CoverageData(str(file))
    data.read()
    data.touch_files([str(f) for f in PACKAGE.rglob("*.py") if str(f) not in data.measured_files()])
    with tempfile.TemporaryDirectory() as folder:
        coverage = Coverage(data_file=file, config_file=False, branch=True)
        coverage.load()
        coverage.json_report(outfile=f"{folder}/report.json", ignore_errors=True)
        files = json.loads(Path(folder, "report.json").read_text())["files"]
    counts: collections.defaultdict[str, Counts] = collections.defaultdict(Counts)
    for name, one in files.items():
        inside = (ROOT / name).relative_to(PACKAGE)
        counts[f"torchstrat/{inside.parts[0]}" if len(inside.parts) > 1 else "torchstrat/*.py"].add(one["summary"])
        counts["all"].add(one["summary"])
    return dict(sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])))


if __name__ == "__main__":
    sys.exit(main())
