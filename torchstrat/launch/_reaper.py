"""The two nets of `torchstrat.launch.fork_server`, as a program that needs the standard library only.

``_reaper.py`` kills process groups when the process that started it is gone, however it ended; ``_reaper.py PARENT_PID
PROGRAM ARGS…`` becomes another program, which dies with the process that started it.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
CANNOT_RUN = 127  # what a shell answers


def kill_what_stays_behind() -> None:
    """Read ``+GROUP`` and ``-GROUP`` lines from standard input. The writing end is held by the launcher alone, so that
    the end of the input is the end of the launcher; groups that were not taken back by then are killed."""
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


def become(parent: int, program: list[str]) -> None:
    """Linux sends the signal chosen by PR_SET_PDEATHSIG when the thread that forked us ends; the choice survives exec.
    Choosing it here, after the fork and in a program of its own, needs no code between fork and exec in a process that
    has threads. Elsewhere there is no such thing, and the other net is alone with the task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it could be asked for
        sys.exit(CANNOT_RUN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of this program
    # Python ignores these two when it starts, and what is ignored stays so over exec.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"torchstrat launch: cannot run {program[0]!r}: {error.strerror}\n")
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        kill_what_stays_behind()
    else:
        become(int(sys.argv[1]), sys.argv[2:])
