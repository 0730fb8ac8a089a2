"""The command ``torchstrat``: a table of commands, each in a module of its own that is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
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
    """A row of the table. ``run``: module and function, which takes the words after the command and returns the exit
    status; ``example``: a line of which everything but the names works as it is."""

    summary: str
    run: str
    example: str


COMMANDS = {
    "launch": Command(
        "run a script with parameter servers and workers on this machine",
        "torchstrat.launch.launcher:main",
        "torchstrat launch --ps 2 --workers 2 train.py",
    ),
    "consolidate": Command(
        "write a checkpoint as one plain state_dict, which needs no torchstrat",
        "torchstrat.cli:consolidate",
        "torchstrat consolidate checkpoints/step-00000100 model.safetensors",
    ),
    "verify": Command(
        "run a program plainly and under each strategy, and print where its numbers begin to differ",
        "torchstrat.testing.verify:main",
        "torchstrat verify train:build train:step train:batches mirrored",
    ),
}


def main() -> int:
    """Run one of torchstrat's commands with the words of this process; returns the exit status."""
    words = sys.argv[1:]
    if words[:1] and words[0] in COMMANDS:
        return _run(words[0], words[1:])
    if words == ["--version"]:
        sys.stdout.write(f"{_version()}\n")
        return 0
    if words in (["--help"], ["-h"]):
        sys.stdout.write(_usage())
        return 0
    sys.stderr.write(_usage())
    sys.stderr.write(f"torchstrat: there is no command {words[0]!r}\n" if words else "torchstrat: no command given\n")
    return USAGE_ERROR


def _run(name: str, words: list[str]) -> int:
    module, _, function = COMMANDS[name].run.partition(":")
    try:
        status: int = getattr(importlib.import_module(module), function)(words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA_OF:
            raise
        install = f"pip install 'torchstrat[{EXTRA_OF[missing]}]'"
        sys.stderr.write(f"torchstrat {name} needs {missing}, which is not installed: {install}\n")
        return 1
    return status


def consolidate(words: list[str]) -> int:
    """``torchstrat consolidate``: see `torchstrat.consolidate`. Prints the file that it has written."""
    parser = argparse.ArgumentParser(
        prog="torchstrat consolidate",
        description="Write a checkpoint as one plain state_dict that needs no torchstrat: model, optimizers and what "
        "else was saved, with whole tensors.",
        epilog=f"example: {COMMANDS['consolidate'].example}",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that a Checkpoint has written")
    parser.add_argument("file", metavar="FILE", help="ends in .pt or .safetensors, which says the format")
    options = parser.parse_args(words)
    from torchstrat.checkpoint import consolidate as write
    from torchstrat.errors import TorchstratError

    try:
        sys.stdout.write(f"{write(options.checkpoint, options.file)}\n")
    except TorchstratError as error:
        sys.stderr.write(f"torchstrat consolidate: {error}\n")
        return 1
    return 0


def _version() -> str:
    import torch

    import torchstrat

    return f"torchstrat {torchstrat.__version__} (torch {torch.__version__}, Python {platform.python_version()})"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name:{width}}  {command.summary}\n" for name, command in COMMANDS.items())
    examples = "".join(f"  {command.example}\n" for command in COMMANDS.values())
    return (
        "usage: torchstrat COMMAND [ARGUMENT …]\n"
        "       torchstrat COMMAND --help\n"
        "       torchstrat --version\n"
        f"\ncommands:\n{commands}\nexamples:\n{examples}"
    )
