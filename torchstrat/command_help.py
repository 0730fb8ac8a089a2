"""What ``--help`` of a command prints: its purpose, its arguments, and calls that can be copied."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


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
