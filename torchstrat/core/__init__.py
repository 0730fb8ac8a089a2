"""What every backend shares, and what needs no other process: errors, nests, values, contexts, reductions, `Variable`.

Also what a step is found to touch (`reachable`, `gradients`), the one classification of optimizers
(`optimizers`), what a program takes in memory (`memory`), and the private names of PyTorch (`_torch_private`).
All other folders import from here.

Imports from no other folder.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__version__ = "0.1.0"
"""What processes of one cluster compare, and checkpoints and reports name."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A block of imports without garbage collection. The collector is afterwards as it was before; what exists then
    counts as old, without having been walked over.

    Modules are made of hundreds of thousands of objects, and all of them stay. Python's collector, which looks at what
    has been made lately each time that there is more of it, walks over them again and again: a fifth of the time that
    torch and this package take to import, a third of what torch's compiler takes. Each process of a job pays that at
    its start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                # Both do no more than to hang lists into one another: from all generations to what is never looked at,
                # and from there to the oldest one.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
