"""Where a random generator of PyTorch's stands, read so that threads cannot lock each other up."""

from __future__ import annotations

import gc
import os
import sys
import threading

import torch

_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""Whether making any object may begin a garbage collection; later Pythons collect between two instructions alone."""

_reading = threading.RLock()  # what is collected may itself read one
# A fork in the meantime would find it held by nobody that there is.
os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)


def state_of(generator: torch.Generator | None = None) -> torch.Tensor:
    """`torch.Generator.get_state`, of the default generator if none is given: a copy, on the CPU.

    PyTorch makes the tensor while it has the generator's lock. If that begins a garbage collection, what is collected
    may let another thread run, and one that asks for the same lock waits for it with the interpreter's own lock in
    hand: neither ever goes on. So nothing is collected meanwhile.
    """
    generator = torch.default_generator if generator is None else generator
    if not _COLLECTS_ANYWHERE:
        return generator.get_state()
    with _reading:
        is_collecting = gc.isenabled()
        try:
            gc.disable()
            return generator.get_state()
        finally:
            if is_collecting:
                gc.enable()
