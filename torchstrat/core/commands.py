"""What torchstrat's commands share: help that ends with calls to copy, and objects that are named MODULE:NAME."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchstrat.core.errors import InvalidArgumentError


def parser_with_examples(
    program: str, description: str, examples: Sequence[str], usage: str | None = None
) -> argparse.ArgumentParser:
    """A parser whose ``--help`` ends with ``examples``, each on a line as it is typed."""
    return argparse.ArgumentParser(
        prog=program,
        usage=usage,
        description=description,
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=_LinesAsTheyAre,
        allow_abbrev=False,
    )


class _LinesAsTheyAre(argparse.HelpFormatter):
    """Wraps paragraphs, as argparse does, and leaves indented lines whole, since people copy them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else super(_LinesAsTheyAre, self)._fill_text(line, width, indent)
            for line in text.splitlines()
        )


def named_object(name: str) -> Any:
    """The object that ``train:build`` names. Modules of the working directory are found, as ``python -m`` finds them.

    Raises `InvalidArgumentError` where the name has another form, or nothing has it.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InvalidArgumentError(f"{name!r} must be MODULE:NAME, such as train:step.")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"{name!r} cannot be loaded from {here}: {error}.") from error
