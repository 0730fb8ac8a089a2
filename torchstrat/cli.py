"""The command ``torchstrat``."""

from __future__ import annotations

import sys

_USAGE = """\
usage: torchstrat launch --ps N --workers N [options] SCRIPT [ARGUMENT …]
       torchstrat consolidate CHECKPOINT FILE
       torchstrat verify MODULE:BUILD MODULE:STEP MODULE:BATCHES [STRATEGY …]

  launch       run SCRIPT with parameter servers and workers on this machine; torchstrat launch --help says more
  consolidate  write a checkpoint as one plain state_dict, FILE.pt or FILE.safetensors, that needs no torchstrat
  verify       run a program plainly and under each strategy, and print where its numbers begin to differ
"""


def main() -> int:
    """Run one of torchstrat's commands with the words of this process; returns the exit status."""
    words = sys.argv[1:]
    if words[:1] == ["launch"]:
        from torchstrat.launch.launcher import main as launch

        return launch(words[1:])
    if words[:1] == ["consolidate"]:
        return _consolidate(words[1:])
    if words[:1] == ["verify"]:
        from torchstrat.testing.verify import main as verify

        return verify(words[1:])
    if words in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        return 0
    sys.stderr.write(_USAGE)
    sys.stderr.write(f"torchstrat: there is no command {words[0]!r}\n" if words else "torchstrat: no command given\n")
    return 2


def _consolidate(words: list[str]) -> int:
    if len(words) != 2 or words[0].startswith("-"):
        wants_help = words in (["--help"], ["-h"])
        (sys.stdout if wants_help else sys.stderr).write(_USAGE)
        return 0 if wants_help else 2
    from torchstrat.checkpoint.consolidate import consolidate
    from torchstrat.errors import TorchstratError

    try:
        sys.stdout.write(f"{consolidate(*words)}\n")
    except TorchstratError as error:
        sys.stderr.write(f"torchstrat consolidate: {error}\n")
        return 1
    return 0
