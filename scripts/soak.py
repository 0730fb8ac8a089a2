"""Repeat tests: until one fails, or to count failures; called by ``./scripts/soak`` and ``./scripts/test --repeat``.

Each round is a pytest of its own, so that a round that hangs or dies takes no other along. Tests that are marked as
soak are part of it. Exits non-zero if any test failed in any round.
"""

import argparse
import collections
import contextlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

DEFAULT_TESTS = ["tests/multiprocess", "tests/launch", "tests/faults"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="./scripts/soak", allow_abbrev=False)
    parser.add_argument("--repeat", type=int, metavar="ROUNDS", help="this often, at most: the first failure ends it")
    parser.add_argument("--count", action="store_true", help="to the end (as without --repeat, for 20 rounds)")
    parser.add_argument("--busy", type=int, default=0, metavar="CORES", help="how many cores to keep busy meanwhile")
    options, pytest_arguments = parser.parse_known_args()
    if options.repeat is not None and options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: at least one round is needed")
    rounds, to_the_end = options.repeat or 20, options.count or options.repeat is None
    if pytest_arguments[:1] == ["faults"]:
        pytest_arguments[:1] = ["tests/faults"]
        options.busy = max(options.busy, 1)
    if pytest_arguments[:1] in (["matrix"], ["programs"], ["docs"]):  # all of them, once
        pytest_arguments[:1] = [f"tests/{pytest_arguments[0]}"]
        rounds = options.repeat or 1
    with busy_cores(options.busy):
        return soak(rounds, pytest_arguments or DEFAULT_TESTS, to_the_end)


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Processes that do nothing but compute, each enough for one core."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def soak(rounds: int, tests: list[str], to_the_end: bool) -> int:
    """Run the rounds, print what came of them; the exit status. ``to_the_end``: also after a failure."""
    failures: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        outcomes = run_round(tests)
        counts = collections.Counter(outcomes.values())
        totals.update(counts)
        failures.update(name for name, outcome in outcomes.items() if outcome == "failed")
        print(f"round {number}/{rounds}: {show(counts)} in {time.perf_counter() - began:.0f} s", flush=True)
        if failures and not to_the_end:
            break
    ended = f"ended by a failure in round {number} of {rounds}" if failures and not to_the_end else f"{rounds} rounds"
    print(f"\n{ended}: {show(totals)}")
    for name, count in failures.most_common():
        print(f"  {count}/{number}  {name}")
    return int(bool(failures) or not totals["passed"])


def run_round(pytest_arguments: list[str]) -> dict[str, str]:
    """Test name → passed, failed or skipped. A pytest that ends without a report is one failure of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        pytest = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", f"--junit-xml={file}", *pytest_arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        outcomes = read_report(file) if file.exists() else {}
    if pytest.returncode not in (0, 1) or not outcomes:
        outcomes[f"pytest itself (exit status {pytest.returncode})"] = "failed"
    if "failed" in outcomes.values():
        print(pytest.stdout)
    return outcomes


def read_report(file: Path) -> dict[str, str]:
    outcomes = {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcomes[name] = "failed"
        elif outcomes.get(name) != "failed":  # an error in tear-down is a second entry of the same test
            outcomes[name] = "skipped" if "skipped" in kinds else "passed"
    return outcomes


def show(counts: "collections.Counter[str]") -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind]) or "no tests"


if __name__ == "__main__":
    sys.exit(main())
