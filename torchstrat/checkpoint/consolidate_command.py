"""The command ``torchstrat consolidate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchstrat.checkpoint.consolidate import consolidate
from torchstrat.core.commands import parser_with_examples
from torchstrat.core.errors import TorchstratError


def main(words: Sequence[str]) -> int:
    """Write the checkpoint that ``words`` name as one plain file, and print the file's path."""
    parser = parser_with_examples(
        "torchstrat consolidate",
        "Write a checkpoint as one plain state_dict that needs no torchstrat. See torchstrat.consolidate.",
        (
            "torchstrat consolidate checkpoints/step-00000600 model.pt",
            "torchstrat consolidate checkpoints/step-00000600 model.safetensors",
        ),
        usage="torchstrat consolidate CHECKPOINT FILE",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder")
    parser.add_argument("file", metavar="FILE", help="whose name ends in .pt, .pth, .bin or .safetensors")
    options = parser.parse_args(words)
    try:
        sys.stdout.write(f"{consolidate(options.checkpoint, options.file)}\n")
    except TorchstratError as error:
        sys.stderr.write(f"torchstrat consolidate: {error}\n")
        return 1
    return 0
