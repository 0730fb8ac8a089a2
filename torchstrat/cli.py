"""The command ``torchstrat``."""

from __future__ import annotations

import sys

_USAGE = """\
usage: torchstrat launch --ps N --workers N [options] SCRIPT [ARGUMENT …]

  launch   run SCRIPT with parameter servers and workers on this machine; torchstrat launch --help says more
"""


def main() -> int:
    """Run one of torchstrat's commands with the words of this process; returns the exit status."""
    words = sys.argv[1:]
    if words[:1] == ["launch"]:
        from torchstrat.launch.launcher import main as launch

        return launch(words[1:])
    if words in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        return 0
    sys.stderr.write(_USAGE)
    sys.stderr.write(f"torchstrat: there is no command {words[0]!r}\n" if words else "torchstrat: no command given\n")
    return 2
