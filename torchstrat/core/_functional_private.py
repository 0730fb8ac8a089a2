"""The names of torch.nn.functional that are not public API, looked up when this file is imported.

A lookup with ``max_norm`` is heard of by them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchstrat.core._torch_private import is_compiler_at_work, look_up, uncompiled

_functional = importlib.import_module("torch.nn.functional")
_RENORM = "_no_grad_embedding_renorm_"
_scale_rows = look_up(_RENORM, _functional)
_lookup_hooks: dict[int, Callable[[torch.Tensor, float, float], None]] = {}
_compiled_lookups: list[None] = []
"""Something, where such a lookup has been compiled while there were no hooks."""
_resets: list[None] = []
_MOST_RESETS = 8  # a program that goes on compiling lookups between runs would else compile everything for each of them


def watch_scaling_lookups() -> None:
    """Have `put_lookup_hook` work, also in functions that are compiled from now on. For good, in the whole process."""
    if vars(_functional)[_RENORM] is _scale_rows_and_tell:
        return
    vars(_functional)[_RENORM] = _scale_rows_and_tell
    look_up("_register_builtin", importlib.import_module("torch.jit._builtins"))(
        _scale_rows_and_tell, f"aten::{_RENORM}"
    )
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None and look_up("counters", compiler)["frames"]:  # which may have been such lookups
        torch.compiler.reset()


def put_lookup_hook(key: int, hook: Callable[[torch.Tensor, float, float], None]) -> None:
    """Call ``hook(table, max_norm, norm_type)`` when a lookup of `torch.nn.functional` has scaled rows of a table, and
    before it reads them. A compiled function leaves such lookups to Python while there are hooks; what has been
    compiled with one is compiled anew."""
    _lookup_hooks[key] = hook
    if _compiled_lookups:
        _compiled_lookups.clear()
        _resets.append(None)
        torch.compiler.reset()


def remove_lookup_hook(key: int) -> None:
    _lookup_hooks.pop(key, None)


@uncompiled  # else it is compiled by itself where PyTorch has given up on who calls it
def _scale_rows_and_tell(weight: torch.Tensor, input: torch.Tensor, max_norm: float, norm_type: float) -> Any:  # noqa: A002
    if is_compiler_at_work():
        if _lookup_hooks or len(_resets) >= _MOST_RESETS:
            raise NotImplementedError("a lookup with max_norm on several replicas, which Python has to see")
        _compiled_lookups.append(None)
    result = _scale_rows(weight, input, max_norm, norm_type)
    if _lookup_hooks:
        _tell_of_lookup(weight, max_norm, norm_type)
    return result


@uncompiled
def _tell_of_lookup(table: torch.Tensor, max_norm: float, norm_type: float) -> None:
    for hook in tuple(_lookup_hooks.values()):
        hook(table, max_norm, norm_type)
