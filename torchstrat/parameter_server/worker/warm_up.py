"""What PyTorch imports at an optimizer's first step (its compiler, about a second), imported ahead of it.

In a thread, while a process that has just started waits for its coordinator. And torchstrat's own code must not be
compiled where it is called in the middle of a compiled training step: `uncompiled` needs that same import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from torchstrat.core._importing import without_collection

_lock = threading.Lock()
_thread: threading.Thread | None = None
_is_done = False


def begin() -> None:
    """Start importing, once per process."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_import, name="torchstrat-warm-up", daemon=True)
            _thread.start()


def wait() -> None:
    """Until it is done; it is not waited for where `begin` was not called."""
    if _thread is not None and not _is_done:
        _thread.join()


def uncompiled(function: Callable[..., object]) -> Callable[..., object]:
    """``function`` as one that ``torch.compile`` leaves alone. Waits for the import."""
    wait()
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def _import() -> None:
    global _is_done
    with without_collection():
        torch.compiler.disable(_import)
    _is_done = True  # every function asks
