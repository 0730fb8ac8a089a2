"""Gradient scalers of the coordinator's program that functions have been sent: who asks one here for its scale is told.

Each worker has a scaler of its own, which goes by what its functions meet. The numbers of a step do not depend on the
scale; but that of the coordinator's object is the one with which it was sent, and what is loaded into it later goes
nowhere.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

_untold: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""Those that were sent, until it was said of them."""
_known: weakref.WeakSet[GradScaler] = weakref.WeakSet()


def note(value: object) -> None:
    """A function is sent with a reference to it."""
    if isinstance(value, GradScaler) and value.is_enabled() and value not in _known:
        _known.add(value)
        _untold.add(value)
        _tell()


@functools.cache
def _tell() -> None:
    for name in ("get_scale", "state_dict", "load_state_dict", "update"):
        setattr(GradScaler, name, _telling(name))


def _telling(name: str) -> Callable[..., object]:
    method: Callable[..., object] = getattr(GradScaler, name)

    @functools.wraps(method)
    def told(self: GradScaler, *args: Any, **kwargs: Any) -> object:
        is_own_code = sys._getframe(1).f_globals is GradScaler.__getstate__.__globals__  # it is being sent
        if self in _untold and not is_own_code:
            _untold.discard(self)
            warnings.warn(
                f"GradScaler.{name}() was called on the coordinator, and scheduled functions use this scaler. Each "
                "worker has one of its own, which goes on from the scale that it was sent with; the coordinator's "
                "stays as it is, also in checkpoints, and what is loaded or set here is not sent. Return "
                "scaler.get_scale() from the function, and set the scale before the first function is scheduled. (This "
                "is said once.)",
                stacklevel=2,
            )
        return method(self, *args, **kwargs)

    return told
