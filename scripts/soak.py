"""Repeat tests and count failures; called by ``./scripts/soak``, which sets the environment up.

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="./scripts/soak")
    parser.add_argument("-n", dest="rounds", type=int, default=20, help="how many rounds (default 20)")
    parser.add_argument("--busy", type=int, default=0, metavar="CORES", help="how many cores to keep busy meanwhile")
    options, pytest_arguments = parser.parse_known_args()
    if pytest_arguments[:1] == ["faults"]:
        pytest_arguments[:1] = ["tests/faults"]
        options.busy = max(options.busy, 1)
    if pytest_arguments[:1] in (["matrix"], ["programs"], ["docs"]):  # all of them, once
        pytest_arguments[:1] = [f"tests/{pytest_arguments[0]}"]
        options.rounds = 1
    with busy_cores(options.busy):
        return soak(options.rounds, pytest_arguments or DEFAULT_TESTS)


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


def soak(rounds: int, tests: list[str]) -> int:
    """Run the rounds, print what came of them; the exit status."""
    failures: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        outcomes = run_round(tests)
        counts = collections.Counter(outcomes.values())
        totals.update(counts)
        failures.update(name for name, outcome in outcomes.items() if outcome == "failed")
        print(f"round {number}/{rounds}: {show(counts)} in {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n{rounds} rounds: {show(totals)}")
    for name, count in failures.most_common():
        print(f"  {count}/{rounds}  {name}")
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
