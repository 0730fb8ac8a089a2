"""What the user typed after ``torchstrat launch``, checked before anything starts."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchstrat.core.commands import parser_with_examples
from torchstrat.launch.fork_server import START_METHODS, StartMethod

USAGE_ERROR = 2
"""The exit status for a command line that cannot be carried out, as argparse has it."""


@dataclass(frozen=True)
class LaunchOptions:
    """A command line that can be carried out. ``command``: the coordinator's program and its arguments.

    ``restarts``: of each worker, server and evaluator, None for any number; ``restart_ps``: whether servers are
    restarted at all.
    """

    ps: int
    workers: int
    command: tuple[str, ...]
    env: dict[str, str]
    restarts: int | None
    restart_ps: bool
    grace_seconds: float
    keep_pages: bool | None = None
    start_method: StartMethod | None = None
    """These two: see `Cluster`."""
    evaluator: bool = False
    evaluator_seconds: float = 120.0
    """What the evaluator has for the checkpoints that are left when the coordinator has ended."""


def parse(arguments: Sequence[str], program: str) -> LaunchOptions:
    """Options from the words after ``program``. Says what is wrong on stderr and exits with `USAGE_ERROR`."""
    parser = _parser(program)
    parsed = parser.parse_args(arguments)
    words = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not words:
        parser.error("there is no SCRIPT to run as the coordinator; write it after the options.")
    try:
        command = coordinator_command(words)
    except ValueError as error:
        parser.error(str(error))
    return LaunchOptions(
        ps=parsed.ps,
        workers=parsed.workers,
        command=command,
        env=dict(parsed.env),
        restarts=parsed.restarts,
        restart_ps=parsed.restart_ps,
        grace_seconds=parsed.grace_seconds,
        keep_pages=parsed.keep_pages,
        start_method=parsed.start_method,
        evaluator=parsed.evaluator,
        evaluator_seconds=parsed.evaluator_seconds,
    )


def coordinator_command(words: Sequence[str]) -> tuple[str, ...]:
    """What is started for SCRIPT and its arguments: Python scripts by this Python, anything else by itself.

    Raises:
        ValueError: there is no such file, or it cannot be executed.
    """
    script, arguments = words[0], words[1:]
    path = Path(script)
    if path.is_dir():
        raise ValueError(f"{script!r} is a folder; name the script in it.")
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"there is no file {script!r} in {str(Path.cwd())!r}.")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{script!r} cannot be read; change its permissions.")
        return (sys.executable, script, *arguments)
    found = shutil.which(script)
    if found is None and path.is_file():
        raise ValueError(
            f"{script!r} is not executable; `chmod +x` it, put its interpreter before it, or let its name end in .py."
        )
    if found is None:
        where = f"in {str(Path.cwd())!r}" if os.sep in script else "on the PATH"
        raise ValueError(f"there is no program {script!r} {where}.")
    return (found, *arguments)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = parser_with_examples(
        program,
        "Run SCRIPT as the coordinator of a cluster on this machine, with parameter servers and workers that are "
        "started again when they end. SCRIPT is a Python file or a program; -- may stand before it. Everything ends "
        "with SCRIPT, whose exit status is the launcher's. A SCRIPT that exits with 75 is run again. SIGTERM and the "
        "like go to SCRIPT alone.",
        (
            f"{program} --ps 2 --workers 2 train_ps.py",
            f"{program} --ps 1 --workers 2 -- python -m package.train --epochs 3",
            f"{program} --ps 2 --workers 4 --evaluator --env OMP_NUM_THREADS=2 train_ps.py",
        ),
        usage=f"{program} --ps N --workers N [options] SCRIPT [ARGUMENT …]",
    )
    parser.add_argument("--ps", type=_at_least_one, required=True, metavar="N", help="parameter servers")
    parser.add_argument("--workers", type=_at_least_one, required=True, metavar="N", help="workers")
    parser.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for workers, servers and the evaluator, not for SCRIPT as coordinator; may be repeated",
    )
    parser.add_argument(
        "--restarts",
        type=_number_of_restarts,
        default=None,
        metavar="N|unlimited",
        help="how often each worker, server and evaluator is started again (unlimited)",
    )
    parser.add_argument(
        "--no-restart-ps",
        dest="restart_ps",
        action="store_false",
        help="leave a parameter server that ended; its variables are gone either way",
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="what workers and servers have to end by themselves when SCRIPT has ended (10)",
    )
    parser.add_argument(
        "--keep-pages",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="workers and servers keep the pages of memory that they have freed: steps are faster, their resident size "
        "stays at its peak (TORCHSTRAT_KEEP_PAGES; they do)",
    )
    parser.add_argument(
        "--start-method",
        choices=START_METHODS,
        default=None,
        help="forkserver: workers and servers are forks of one process, which start in milliseconds; spawn: each is a "
        "program of its own (forkserver, where it can be)",
    )
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="start SCRIPT once more as the evaluator, which watches the checkpoints (TF_CONFIG tells it so)",
    )
    parser.add_argument(
        "--evaluator-seconds",
        type=_seconds,
        default=LaunchOptions.evaluator_seconds,
        metavar="S",
        help="what the evaluator has for the checkpoints that are left when SCRIPT has ended (120)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT …]", help="the coordinator")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1: a cluster needs one of each.")
    return number


def _number_of_restarts(text: str) -> int | None:
    if text == "unlimited":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0, or 'unlimited'.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0.")
    return seconds


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE.")
    return name, value
