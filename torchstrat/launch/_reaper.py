"""Kills process groups when the process that started this one is gone, however it ended.

Reads ``+GROUP`` and ``-GROUP`` lines from standard input. The writing end is held by the launcher alone, so that the
end of the input is the end of the launcher; groups that were not taken back by then are killed.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # they are meant for the launcher
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended by itself
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
