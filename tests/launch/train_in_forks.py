"""Runs ``scripts/train.py`` again and again, each time in a fork of a process that has imported what it needs.

``python train_in_forks.py '[["strategy=mirrored"], …]'``, in the folder where the runs are to begin: prints, as
JSON, the exit status, stdout and stderr of each. For runs that are over before they have a strategy: those take no
threads, no process group and nothing else of a process along, and importing takes ten times as long as they do.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "scripts" / "train.py"


def main(runs: list[list[str]]) -> None:
    from torchstrat.experiments import launch, train  # noqa: F401  what scripts/train.py imports

    print(json.dumps([in_fork(overrides) for overrides in runs]))


def in_fork(overrides: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = [str(TRAIN), *overrides]
            status = 1
            try:
                runpy.run_path(str(TRAIN), run_name="__main__")
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(ended), out.read(), err.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
