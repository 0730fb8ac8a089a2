"""Imports without garbage collection.

Modules are made of hundreds of thousands of objects, and all of them stay. Python's collector, which looks at what has
been made lately each time that there is more of it, walks over them again and again: a fifth of the time that torch and
this package take to import, a third of what torch's compiler takes. Each process of a job pays that at its start.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A block of imports. The collector is afterwards as it was before; what exists then counts as old, without having
    been walked over."""
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
