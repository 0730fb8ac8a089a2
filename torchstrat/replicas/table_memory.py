"""The memory of tables of which lookups with ``max_norm`` scale rows, in place, while a step goes forward: which rows
have been scaled, and what else shows or uses that memory.

Each replica scales the rows of its own ids. A single device would have scaled all of these, so all of them count: a row
that another replica has scaled down is taken from there, where other edits of parameters are the first replica's. Such
a row is known by what it is, the same one times a number below 1: `torch.nn.functional.embedding` may have been called
by anybody's module, and there may be no copy left of what was there before.

`scaling_lookups` has a table's class ask about its uses. What shows the same memory by another tensor
(`torch.Tensor.data`, ``torch.DoubleTensor(table)``, ``tensor.data = table``, DLPack, NumPy), or calls operators from
C++, asks nobody: operators are heard of, and compared by the memory of their arguments.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    Operator,
    is_compiler_at_work,
    own_parameters,
    schema_of,
)
from torchstrat.core.engine import Communicator
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.reachable import has_address
from torchstrat.core.tensor_bytes import overlap
from torchstrat.core.tensor_classes import tensors_in
from torchstrat.replicas.exchange import broadcast_tensors
from torchstrat.replicas.state import TensorSlot

Rows = tuple[int, torch.Tensor, torch.Tensor]
"""The number of a table, which of its rows, and what they are."""

LOOKED_UP = ""
UNSEEN = "whatever it was"
"""Of what this replica has not known to be a table, and so has not seen what it has used it for."""
Uses = Mapping[int, str]
"""The number of a table → what this replica has used it for where it has not `LOOKED_UP` rows."""


class UsesOfTables(Protocol):
    """What the step has done with tables that scale rows on this replica, since rows were last brought together."""

    def possible(self) -> list[torch.Tensor]:
        """When a run begins: what is a table, or may turn out to be one in it."""

    def of(self, key: int) -> str | None:
        """With the one of this ``id``: what `Uses` has, `UNSEEN` among it; None: nothing."""

    def hear_of(self, key: int) -> None:
        """A replica has looked rows up in the one of this ``id``: it is one from the next run on."""

    def refused(self, key: int, by: str) -> UnsupportedError:
        """What there is to say of a use where another replica has looked rows up."""


def scaling_tables(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """torch's tables that scale rows."""
    return [one for one in modules if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None]


def renormed_weights(modules: Iterable[nn.Module]) -> set[int]:
    """``id`` of the weights of `scaling_tables`."""
    return {id(own_parameters(module).get("weight")) for module in scaling_tables(modules)}


def may_be_table(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.is_floating_point() and tensor.layout == torch.strided


def scaled_rows(first: torch.Tensor, other: torch.Tensor, *, is_known: bool) -> torch.Tensor:
    """The numbers of the rows, all (rows, width), that ``other`` has times a number between 0 and 1.

    ``is_known``: to be a table that scales rows. Else it may be any matrix that a replica's own code has scaled, of
    which every row is another one, by one number; and one of width 1 could not be told from noise.
    """
    (rows,) = (first != other).any(dim=1).nonzero(as_tuple=True)
    if not len(rows) or not (is_known or first.shape[1] > 1):
        return rows[:0]
    whole, part = first[rows].double(), other[rows].double()
    norms, shrunk = whole.norm(dim=1), part.norm(dim=1)
    scales, tolerance = shrunk / norms, 8 * torch.finfo(first.dtype).eps
    if not is_known and len(rows) == len(first) and float(scales.max() - scales.min()) <= tolerance:
        return rows[:0]
    off = (part - scales[:, None] * whole).abs().amax(dim=1)
    return rows[(shrunk < norms) & (shrunk > 0) & (off <= tolerance * norms)]


def uses_of(uses: UsesOfTables | None, keys: Mapping[int, int]) -> Uses:
    """``keys``: the numbers of tables → their ``id``."""
    if uses is None:
        return {}
    found = ((number, uses.of(key)) for number, key in keys.items())
    return {number: use for number, use in found if use is not None}


def require_lookups_alone(uses: UsesOfTables | None, keys: Mapping[int, int], everyone: Iterable[Uses]) -> None:
    """``everyone``: what each rank has found. Raises on all of them alike where one has used what another has looked
    rows up in."""
    told = [item for one in everyone for item in one.items() if item[0] in keys]
    if uses is None or not told:
        return
    looked_up = {number for number, use in told if use == LOOKED_UP}
    for number in looked_up:
        uses.hear_of(keys[number])
    for number, use in told:
        if use != LOOKED_UP and number in looked_up:
            raise uses.refused(keys[number], use)


def level(
    communicator: Communicator, tensors: Sequence[torch.Tensor], known: Container[int], call: str, own_uses: Uses
) -> tuple[set[int], list[Uses]]:
    """Overwrite ``tensors`` with the first rank's, but for rows that others have scaled; the numbers of the tensors
    that have such rows, and all ranks' uses. All ranks call it, with the same ones in one order. ``known``: the numbers
    of those that are known to be tables that scale rows."""
    own = {number: tensor.clone() for number, tensor in enumerate(tensors) if may_be_table(tensor)}
    broadcast_tensors(communicator, tensors, 0, call)
    if not own:
        return set(), []
    mine: list[Rows] = []
    for number, before in own.items():
        rows = scaled_rows(tensors[number], before, is_known=number in known)
        if len(rows) or len(scaled_rows(before, tensors[number], is_known=number in known)):  # or the first rank's own
            mine.append((number, rows.cpu(), before[rows].cpu()))
    everyone = communicator.all_gather_object((mine, own_uses), call)
    put_rows(dict(enumerate(tensors)), [rows for rows, _ in everyone])
    return {number for rows, _ in everyone for number, _, _ in rows}, [uses for _, uses in everyone]


def put_rows(tensors: Mapping[int, torch.Tensor], everyone: Iterable[Sequence[Rows]]) -> None:
    """``tensors``: those that there are here, by number. Where several replicas have scaled a row they have scaled it
    alike. One that stands here scaled further is kept: the rows that come may have been told from what was there before
    edits that all have made."""
    for told in everyone:
        for number, rows, values in told:
            if (tensor := tensors.get(number)) is None:
                continue
            rows, values = rows.to(tensor.device), values.to(tensor.device)
            smaller = values.double().norm(dim=1) < tensor[rows].double().norm(dim=1)
            tensor[rows[smaller]] = values[smaller]


def has_scaled_rows(slot: TensorSlot, replicas: list[int]) -> bool:
    """Whether one replica has what another has but for some rows, which it has scaled."""
    editors = [replica for replica in replicas if slot.is_edited(replica)]
    if not editors or not may_be_table(slot.tensor):
        return False
    first = slot.data[replicas[0]]
    others = [slot.data[replica].to(first.device) for replica in replicas[1:]]
    pairs = [pair for one in others if one.shape == first.shape for pair in ((first, one), (one, first))]
    return any(len(scaled_rows(*pair, is_known=False)) for pair in pairs)


def rows_scaled_by_others(
    slot: TensorSlot, replicas: list[int], modules: Callable[[], Iterable[nn.Module]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Which rows of the first one's component, and the component from which each is to be taken."""
    mine, editors = slot.data[replicas[0]], [replica for replica in replicas[1:] if slot.is_edited(replica)]
    is_known = bool(editors) and id(slot.tensor) in renormed_weights(modules())
    for replica in editors:
        theirs = slot.data[replica].to(mine.device)
        if theirs.shape == mine.shape and len(rows := scaled_rows(mine, theirs, is_known=is_known)):
            yield rows, theirs


# -- who else shows it, and operators that use it ---------------------------------------------------------------------


def is_part_of(one: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether they have memory in common, whatever of PyTorch's objects holds it."""
    with DisableTorchFunctionSubclass():
        try:
            return has_address(one) and has_address(table) and overlap(one, table)
        except RuntimeError:  # it has none: PyTorch's compiler traces with it
            return False


def aliases_of(tables: Sequence[torch.Tensor], but: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of each table the other tensors that show it, which the program has made by now. ``but``: those of ours."""
    known = {id(one) for one in (*tables, *but)}
    kinds = (torch.Tensor, nn.Parameter)
    found = [one for one in gc.get_objects() if type(one) in kinds and id(one) not in known]
    return [[one for one in found if is_part_of(one, table)] for table in tables]


def shows_memory(value: object) -> bool:
    """Whether it has a tensor's memory for NumPy or DLPack, and tells nobody who reads it."""
    return isinstance(value, np.ndarray) or type(value).__name__ == "PyCapsule"


def shows(array: np.ndarray[Any, Any], table: torch.Tensor) -> bool:
    """Whether ``array`` has memory in common with ``table``."""
    with DisableTorchFunctionSubclass():
        if not table.is_cpu or table.layout != torch.strided:
            return False
        memory = torch.empty(0, dtype=torch.uint8).set_(table.untyped_storage()).numpy()
        begin = table.storage_offset() * table.element_size()
        return np.may_share_memory(array, memory[begin : begin + table.nbytes] if table.is_contiguous() else memory)


def arrays_of(table: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    """Those that show it, which the program has by now. Python's collector knows who holds them."""
    running = [value for frame, _ in traceback.walk_stack(None) for value in frame.f_locals.values()]
    held = (*running, *gc.get_referents(*gc.get_objects()))
    return [one for one in held if issubclass(type(one), np.ndarray) and shows(one, table)]  # no proxies


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
