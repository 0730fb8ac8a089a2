"""The names of functorch that are not public API, looked up when this file is imported.

`torch.vmap` returns only when its function does; a training step calls ``backward`` in the middle, on the tensors of
all replicas. That needs the level of the mapping itself: to enter it, to see through it, to step out of it for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch._functorch.pyfunctorch  # torch itself does not import it

from torchstrat.core._torch_private import look_up

push_level: Callable[[int, str], int] = look_up("_C._functorch._vmap_increment_nesting")
"""``(size, randomness) → level``."""
pop_level: Callable[[], int] = look_up("_C._functorch._vmap_decrement_nesting")
add_batch_dim: Callable[[torch.Tensor, int, int], torch.Tensor] = look_up("_C._functorch._add_batch_dim")
"""``(tensor, dim, level)``: hides a dimension from the code that runs at ``level``."""
unwrapped: Callable[[torch.Tensor], torch.Tensor] = look_up("_C._functorch.get_unwrapped")
batch_dim_of: Callable[[torch.Tensor], int] = look_up("_C._functorch.maybe_get_bdim")
is_batched: Callable[[torch.Tensor], bool] = look_up("_C._functorch.is_batchedtensor")

leave_levels: Callable[[], AbstractContextManager[list[object]]] = look_up(
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack"
)
"""``with leave_levels() as levels:`` is outside of all mappings and gradients that are active on this thread."""
return_to_levels: Callable[[list[object]], AbstractContextManager[None]] = look_up(
    "_functorch.pyfunctorch.temporarily_restore_interpreter_stack"
)
"""``with return_to_levels(levels):`` is inside of them again, in a `leave_levels` block or in another thread."""

interpreters: Callable[[], list[object] | None] = look_up("_C._functorch.get_interpreter_stack")
"""The levels that are active on this thread, innermost last; None where there is none."""
