"""Every name of torch that is not public API, in one place, looked up when this file is imported.

If a torch release moves one of them, the import fails here with an error that names torch's version, and this is the
only file to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _look_up(path: str) -> Any:
    found: Any = torch
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ImportError(
                f"torchstrat needs torch.{path}, which torch {torch.__version__} does not have. "
                "torchstrat supports torch 2.9 and later; please report the version above."
            ) from None
    return found


_engine = _look_up("autograd.Variable._execution_engine")


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that is now running ends, before ``backward()`` returns.

    Only valid inside a hook of that pass; nested (reentrant) passes each have their own end.
    """
    _engine.queue_callback(callback)


function_mode_stack: Callable[[], list[Any]] = _look_up("overrides._get_current_function_mode_stack")
dispatch_mode_stack: Callable[[], list[Any]] = _look_up("utils._python_dispatch._get_current_dispatch_mode_stack")

# Fused multi-tensor arithmetic: what the optimizers themselves run on.
foreach_add_: Callable[..., None] = _look_up("_foreach_add_")
foreach_mul_: Callable[..., None] = _look_up("_foreach_mul_")
foreach_copy_: Callable[..., None] = _look_up("_foreach_copy_")
