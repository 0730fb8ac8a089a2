"""Becomes another program, which dies with the process that started this one: ``_child.py PARENT_PID PROGRAM ARGS…``

Linux sends the signal chosen by PR_SET_PDEATHSIG when the thread that forked us ends; the choice survives exec.
Choosing it here, after the fork and in a program of its own, needs no code between fork and exec in a process that has
threads. Elsewhere there is no such thing, and `torchstrat.launch.reaper` is alone with the task.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
CANNOT_RUN = 127  # what a shell answers


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
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
    main()
