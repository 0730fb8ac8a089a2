"""The command ``torchstrat verify``: `compare` for a program that is named by its module."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchstrat.core.commands import named_object, parser_with_examples
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.testing.compare import STRATEGIES, compare


def main(words: Sequence[str]) -> int:
    """Print a line for each strategy; 0 if all of them give the plain numbers or refuse the program by name."""
    parser = parser_with_examples(
        "torchstrat verify",
        "Run a program plainly and under each strategy, and print the first variable, step and line that differ. See "
        "torchstrat.testing.compare.",
        (
            "torchstrat verify train:build train:step train:batches",
            "torchstrat verify train:build train:step train:batches mirrored central_storage",
        ),
    )
    parser.add_argument("build", metavar="MODULE:BUILD", help="makes modules and optimizers, and returns them")
    parser.add_argument("step", metavar="MODULE:STEP", help="step(program, batch), on what BUILD returned")
    parser.add_argument("batches", metavar="MODULE:BATCHES", help="global batches, or a function that makes them")
    parser.add_argument("strategies", metavar="STRATEGY", nargs="*", help=f"of: {', '.join(STRATEGIES)}; none: all")
    options = parser.parse_args(words)
    try:
        build, step, batches = (named_object(name) for name in (options.build, options.step, options.batches))
        comparison = compare(build, step, batches, options.strategies or STRATEGIES)
    except InvalidArgumentError as error:
        parser.error(str(error))
    sys.stdout.write(f"{comparison}\n")
    return 0 if comparison.is_right else 1
