"""The command ``torchstrat``: a table of commands, each in a module that is imported when the command is called."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

USAGE_ERROR = 2
"""The exit status for words that name no command, as argparse has it."""

EXTRA_OF = {
    "hydra": "experiments",
    "matplotlib": "experiments",
    "omegaconf": "experiments",
    "sklearn": "experiments",
    "tensorboard": "experiments",
    "torch_xla": "tpu",
    "tqdm": "progress",
}
"""Top-level module → the extra of setup.py that brings it."""


@dataclass(frozen=True)
class Command:
    """One of torchstrat's commands, as its users read of it.

    ``main`` is MODULE:FUNCTION. The function takes the words after the command's name and returns the exit status; its
    module is imported when the command is called.
    """

    arguments: str
    purpose: str
    main: str


COMMANDS = {
    "train": Command(
        "[GROUP=CHOICE …] [KEY=VALUE …]",
        "train a model under any strategy, one run or a sweep",
        "torchstrat.app.train:main",
    ),
    "launch": Command(
        "--ps N --workers N [options] SCRIPT [ARGUMENT …]",
        "run SCRIPT with parameter servers and workers on this machine",
        "torchstrat.launch.launcher:main",
    ),
    "estimate": Command(
        "MODULE:BUILD [--optimizer NAME] [--replicas N] [--ps N --workers N] …",
        "print what a program takes under each strategy, in memory and in traffic",
        "torchstrat.strategies.estimates:main",
    ),
    "explain": Command(
        "MODULE:BUILD --rules MODULE:RULES --logical-devices N …",
        "print which device holds which piece of which parameter under sharding rules",
        "torchstrat.sharding.explain:main",
    ),
    "consolidate": Command(
        "CHECKPOINT FILE",
        "write a checkpoint as one plain state_dict, FILE.pt or FILE.safetensors, that needs no torchstrat",
        "torchstrat.checkpoint.consolidate:main",
    ),
    "verify": Command(
        "MODULE:BUILD MODULE:STEP MODULE:BATCHES [STRATEGY …]",
        "run a program plainly and under each strategy, and print where its numbers begin to differ",
        "torchstrat.testing.compare:main",
    ),
}


def main() -> int:
    """Run one of torchstrat's commands with the words of this process; returns the exit status."""
    name, *words = sys.argv[1:] or [""]
    if name in COMMANDS:
        return _run(name, words)
    if name == "--version":
        sys.stdout.write(f"{_version()}\n")
        return 0
    if name in ("--help", "-h"):
        sys.stdout.write(_usage())
        return 0
    sys.stderr.write(_usage())
    sys.stderr.write(f"torchstrat: there is no command {name!r}\n" if name else "torchstrat: no command given\n")
    return USAGE_ERROR


def _run(name: str, words: Sequence[str]) -> int:
    module, function = COMMANDS[name].main.split(":")
    try:
        run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return run(words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA_OF:
            raise
        install = f"pip install 'torchstrat[{EXTRA_OF[missing]}]'"
        sys.stderr.write(f"torchstrat {name} needs {missing}, which is not installed: {install}\n")
        return 1


def _version() -> str:
    import torch

    import torchstrat

    return f"torchstrat {torchstrat.__version__} (torch {torch.__version__}, Python {platform.python_version()})"


def _usage() -> str:
    column = max(map(len, COMMANDS)) + 2
    calls = [f"torchstrat {name} {command.arguments}" for name, command in COMMANDS.items()]
    purposes = [f"  {name:{column}}{command.purpose}" for name, command in COMMANDS.items()]
    usage = "\n       ".join(calls)
    return "\n".join([f"usage: {usage}", "", *purposes, "", "torchstrat COMMAND --help says more, with examples.", ""])
