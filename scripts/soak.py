"""Tests that are marked as soak, a part after the other; or any tests again and again, until one fails.

Called by ``./scripts/soak`` and ``./scripts/test --repeat``. Each part, and each round, is a pytest of its own, so that
one that hangs or dies takes no other along. Exits non-zero if a test failed in any.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "outputs" / "soak"
PYTEST = (sys.executable, "-m", "pytest")


class Part(NamedTuple):
    """Of what is marked as soak."""

    pytest_arguments: Sequence[str]
    adds: str
    """What ``./scripts/test`` does not show."""
    pytest: Sequence[str] = PYTEST


def _of_tables(name: str, what: str) -> tuple[str, Part]:
    chosen = f"test_cell and {name}:" if name != "state" else "test_cell and state: and not ps_state:"
    return f"table-{name}", Part(["tests/matrix/test_tables.py", "-k", chosen], f"every cell of {what}")


PARTS = dict(
    [
        ("unit", Part(["tests/unit"], "other numbers of replicas and shards, more histories; the tests' own tools")),
        ("multiprocess", Part(["tests/multiprocess"], "other numbers of processes, compilers, operators one by one")),
        (
            "launch",
            Part(["tests/launch"], "further configurations, examples, launches and benchmarks under real launchers"),
        ),
        ("faults", Part(["tests/faults"], "further moments at which a process is killed, and several kills")),
        ("docs", Part(["tests/docs"], "every page's examples")),
        # In an environment of its own, which this script finds.
        ("tpu", Part(["tests/tpu"], "further programs for torch_xla", [str(ROOT / "scripts" / "test")])),
        ("programs", Part(["tests/programs"], "programs in the idiom of other libraries; needs the extra programs")),
        _of_tables("optimizers", "optimizers on parameter servers"),
        _of_tables("gradients", "backward passes, hooks and optimizers"),
        _of_tables("stand_ins", "operations on what is cut"),
        _of_tables("losses", "losses and uneven rows"),
        _of_tables("scaled_tables", "tables whose lookups scale rows"),
        _of_tables("state", "what a step may touch"),
        _of_tables("ps_state", "what a function on parameter servers may touch"),
        _of_tables("ps_writes", "every way to write to a variable on parameter servers"),
        _of_tables("ps_objects", "what a program hangs on modules and optimizers on parameter servers"),
        _of_tables("ps_buffers", "buffers that are one tensor or change places"),
        _of_tables("round_trips", "what is saved and loaded"),
        _of_tables("batches", "what a batch may be"),
        _of_tables("lifetimes", "what has to go when it is dropped"),
        _of_tables("one_rank_alone", "calls that one rank makes alone"),
        _of_tables("made_in_steps", "what steps themselves make"),
        _of_tables("held", "what modules hold under other names"),
        ("planted", Part(["tests/matrix/test_tables.py", "-k", "planted"], "that the tables notice planted faults")),
        ("random", Part(["tests/matrix/test_generated.py"], "2,000 random programs under every strategy")),
    ]
)
"""By name, which is also that of the files in outputs/soak."""

OTHERS = "--matrix (every Python and PyTorch), ./scripts/chaos (300 kills of all roles), ./scripts/mutants"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="./scripts/soak", allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="the parts, what each adds, how long it took")
    parser.add_argument("--again", action="store_true", help="also parts that have passed with these files")
    parser.add_argument("--repeat", type=int, metavar="ROUNDS", help="tests this often: the first failure ends it")
    parser.add_argument("--count", action="store_true", help="with --repeat: to the end")
    parser.add_argument("--busy", type=int, default=0, metavar="CORES", help="how many cores to keep busy meanwhile")
    options, rest = parser.parse_known_args()
    if options.repeat is not None:
        if options.repeat < 1:
            parser.error(f"--repeat {options.repeat}: at least one round is needed")
        with busy_cores(options.busy):
            return soak(options.repeat, rest, options.count)
    if unknown := [name for name in rest if name not in PARTS]:
        parser.error(
            f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}. For tests: --repeat 20 PATH"
        )
    if options.list:
        for name, part in PARTS.items():
            kept = kept_of(name)
            print(f"{name:22} {part.adds}{f' ({shown(kept)})' if kept else ''}")
        print(f"Not in it: {OTHERS}")
        return 0
    with busy_cores(options.busy):
        return max([run_part(name, PARTS[name], options.again) for name in rest or PARTS])


def run_part(name: str, part: Part, again: bool) -> int:
    """Unless it has passed with the files that there are; the exit status."""
    tree, kept = hash_of_files(), kept_of(name)
    if kept and kept["tree"] == tree and kept["passed"] and not again:
        print(f"{name}: has run, {shown(kept)}", flush=True)
        return 0
    print(f"{name}: started", flush=True)
    began = time.perf_counter()
    outcomes = run_round(["-m", "soak", *part.pytest_arguments], part.pytest)
    counts = collections.Counter(outcomes.values())
    kept = {
        "tree": tree,
        "passed": bool(counts["passed"]) and not counts["failed"],
        "counts": show(counts),
        "seconds": round(time.perf_counter() - began),
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(kept, indent=1))
    print(f"{name}: {shown(kept)}", flush=True)
    return int(not kept["passed"])


def kept_of(name: str) -> dict[str, Any] | None:
    """What came of a part when it last ran."""
    file = KEPT / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None  # type: ignore[no-any-return]


def shown(kept: dict[str, Any]) -> str:
    return f"{kept['counts']} in {kept['seconds'] // 60} min {kept['seconds'] % 60} s"


def hash_of_files() -> str:
    """Of the package, its tests and what both read."""
    found = hashlib.sha256()
    for folder in ("torchstrat", "tests", "configs", "scripts", "docs"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


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


def run_round(pytest_arguments: Sequence[str], command: Sequence[str] = PYTEST) -> dict[str, str]:
    """Test name → passed, failed or skipped. A pytest that ends without a report is one failure of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        pytest = subprocess.run(
            [*command, "-q", "-m", "", f"--junit-xml={file}", *pytest_arguments],  # of two -m the last one counts
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
