"""Sleep until a number in shared memory changes: Linux's futex(2), which Python has no name for."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_SYSCALL_NUMBER = 202  # of futex on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str | None:
    """What this machine lacks for waiting in shared memory; None if nothing.

    Python cannot order memory accesses. x86-64 keeps stores in order for whoever reads them, which is all that is
    needed; other processors do not.
    """
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it needs a processor that keeps the order of stores (x86-64), and this is {platform.machine()}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        return f"this Python was built without os.{' and os.'.join(missing)}"
    return None


if why_not() is None:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
        ctypes.c_void_p,
        ctypes.c_uint32,
    )


def wait(address: int, expected: int, milliseconds: int) -> bool:
    """Sleep while the uint32 at ``address`` is ``expected``, until somebody calls `wake`; False once the time is over.

    May return early without a reason, as futex(2) may.
    """
    timeout = _Timespec(milliseconds // 1000, milliseconds % 1000 * 1_000_000)
    if _syscall(_SYSCALL_NUMBER, address, _WAIT, expected, ctypes.byref(timeout), None, 0) == 0:
        return True
    return ctypes.get_errno() != errno.ETIMEDOUT


def wake(address: int) -> None:
    """Let everybody go on who sleeps in `wait` for the number at ``address``."""
    _syscall(_SYSCALL_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)
