"""Tables by their memory: who else shows it, and operators that use it without asking the class of any tensor.

`scaling_lookups` has a table's class ask about its uses. What shows the same memory by another tensor
(`torch.Tensor.data`, ``torch.DoubleTensor(table)``, ``tensor.data = table``, DLPack, NumPy), was bound before the run
(``from torch import tensor``), or calls operators from C++, asks nobody.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrat.core._torch_private import DisableTorchFunctionSubclass, Operator, is_compiler_at_work, schema_of
from torchstrat.core.reachable import has_address
from torchstrat.core.tensor_bytes import overlap
from torchstrat.core.tensor_classes import tensors_in


def is_part_of(one: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether they have memory in common, whatever of PyTorch's objects holds it."""
    with DisableTorchFunctionSubclass():
        return has_address(one) and has_address(table) and overlap(one, table)


def aliases_of(tables: Sequence[torch.Tensor], but: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of each table the other tensors that show it, which the program has made by now. ``but``: those of ours."""
    known = {id(one) for one in (*tables, *but)}
    kinds = (torch.Tensor, nn.Parameter)
    found = [one for one in gc.get_objects() if type(one) in kinds and id(one) not in known]
    return [[one for one in found if is_part_of(one, table)] for table in tables]


def is_array(value: object) -> bool:
    """Whether it is NumPy's, which shows a tensor's memory, and tells nobody who reads it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


_READ_ROWS_THEY_HAVE_SCALED = frozenset({"aten::_embedding_bag_per_sample_weights_backward"})
_ASK_FORM = frozenset(
    {
        *(f"aten::{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn")),
        *(f"aten::new_{kind}" for kind in ("zeros", "ones", "empty", "full", "empty_strided")),
        *("aten::is_pinned", "aten::is_same_size", "aten::record_stream"),
    }
)
_LET_THROUGH = _READ_ROWS_THEY_HAVE_SCALED | _ASK_FORM


def _reads_nothing(schema: torch.FunctionSchema) -> bool:
    """Whether an operator asks for no values, or those that are let through, or gives a view of its argument."""
    if schema.name in _LET_THROUGH:
        return True
    aliased = [one.alias_info for one in schema.returns if one.alias_info is not None]
    return bool(aliased) and not any(one.is_write for one in aliased)


class MemoryUses(TorchDispatchMode):
    """``with MemoryUses(hear):`` calls ``hear(tensors, name)`` before operators that use values of tensors. Those of
    compiled functions are heard of where these run as operators."""

    supports_higher_order_operators = True

    def __init__(self, hear: Callable[[list[torch.Tensor], str], None], asks: type) -> None:
        """``asks``: the class that is not to be asked about operators that are heard of here."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._hear, self._asks = hear, asks

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks its subclasses; True would import its compiler at the first operator, 75 MB and two seconds."""
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Else PyTorch's compiler compiles nothing in such a block, and fails where it has to."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same, in the words of PyTorch's later versions."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Container[type], args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        schema = schema_of(func) if isinstance(func, Operator) else None
        tensors = list(tensors_in((args, kwargs)))
        is_heard = not (is_compiler_at_work() or (schema is not None and _reads_nothing(schema)))
        if is_heard:
            self._hear(tensors, str(func) if schema is None else schema.name)
        with DisableTorchFunctionSubclass() if any(isinstance(one, self._asks) for one in tensors) else nullcontext():
            return func(*args, **kwargs)
