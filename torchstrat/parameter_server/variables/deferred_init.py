"""Initial values of variables that exist nowhere but on the servers: recorded on ``meta`` tensors, replayed per shard.

A table larger than the coordinator's memory is made on ``torch.device("meta")``: a tensor with a shape and no storage.
Its initialiser does nothing there. `RecordInitialisers`, active while the strategy's scope is open, notes what would
have been done, and each server does it on its own rows.

What is noted sticks to the tensor's storage, which `nn.Parameter`, ``detach()`` and views share; it lives and dies with
it. Initialisers compute their fan-in from the shape of the whole tensor before they fill it, so their numbers are right
for a shard too. The random values themselves are not those that a CPU tensor would have got: their distribution is.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrat.core._torch_private import schema_of
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.parameter_server.messages import InitialOp
from torchstrat.replicas.thread_state import SCOPE

_DRAWS = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "trunc_normal_",  # of torch.nn.init: some versions of it do nothing on meta, others a chain of operators
        "uniform_",
        "zero_",
    }
)
"""Whatever the tensor was before, after one of these it is new."""

_ADJUSTS = frozenset(
    {
        "abs_",
        "add_",
        "clamp_",
        "clamp_max_",
        "clamp_min_",
        "copysign_",
        "div_",
        "erfinv_",
        "exp_",
        "floor_",
        "log_",
        "mul_",
        "neg_",
        "pow_",
        "reciprocal_",
        "round_",
        "sign_",
        "sqrt_",
        "sub_",
        "tanh_",
        "trunc_",
    }
)
"""Element by element, and with numbers only."""

_FACTORIES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "zeros": ("zero_", ()),
    "zeros_like": ("zero_", ()),
    "new_zeros": ("zero_", ()),
    "ones": ("fill_", (1,)),
    "ones_like": ("fill_", (1,)),
    "new_ones": ("fill_", (1,)),
    "rand": ("uniform_", ()),
    "rand_like": ("uniform_", ()),
    "randn": ("normal_", ()),
    "randn_like": ("normal_", ()),
}
_FACTORIES_OF_VALUE = frozenset({"full", "full_like", "new_full", "scalar_tensor"})
_COPIES = frozenset({"clone", "_to_copy"})

_ATTRIBUTE = "_torchstrat_initialisers"
_MOST_ROWS_AT_ONCE = 64
_MOST_FOLLOWED = 32
_ELEMENTS_PER_BLOCK = 1 << 16


@dataclass
class _Recorded:
    """What has been done to a storage. ``ops``: operator, arguments, keyword arguments, first element and number of
    elements written (None: all). ``obstacle``: what was done that cannot be done again on a shard."""

    ops: list[tuple[str, tuple[object, ...], dict[str, object], tuple[int, int] | None]] = field(default_factory=list)
    obstacle: str | None = None


_DRAWN_IN_PLACE = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "exponential", "log_normal", "cauchy", "geometric", "random", "bernoulli")
)


class RecordInitialisers(TorchDispatchMode):
    """``with RecordInitialisers():`` notes how tensors on ``meta`` are initialised. Everything else is untouched.

    On the thread that enters it. Generators given to initialisers are not used: each shard has a seed of its own.
    """

    shown_as = SCOPE

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks its subclasses; True would import its compiler at the first operator, 75 MB and two seconds."""
        return False

    def __enter__(self) -> RecordInitialisers:
        self._skipped = _NoteSkipped()
        self._skipped.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._skipped.__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        # Drawing on meta does nothing, and torch's way of doing it imports its compiler.
        draws = schema_of(func).name in _DRAWN_IN_PLACE and args[0].is_meta
        result = args[0] if draws else func(*args, **kwargs)
        if schema_of(func).is_mutable:
            _note_written(func, args, kwargs)
        elif isinstance(result, torch.Tensor) and (result.is_meta or _is_copy_of_followed(func, args)):
            _note_made(func, args, kwargs, result)
        return result


def recipe_of(tensor: torch.Tensor, name: str = "a tensor") -> tuple[InitialOp, ...]:
    """How ``tensor``, on ``meta`` and made under `RecordInitialisers`, is to be initialised. ``name`` is for errors.

    Raises `InvalidArgumentError` when nothing has initialised it (``torch.empty``), and `UnsupportedError` for what has
    no meaning on a part of its rows (``orthogonal_``) or was not made of numbers alone.
    """
    if not tensor.is_meta:
        raise InvalidArgumentError(f"{name} is on {tensor.device}, not on meta: it has a value, and needs no recipe.")
    recorded = _recorded(tensor)
    if recorded is not None and recorded.obstacle is not None:
        raise UnsupportedError(
            f"{name}, made on meta, was written by {recorded.obstacle}, which cannot be repeated on a shard of it. "
            "Initialise it with random or constant fillers (normal_, uniform_, trunc_normal_, xavier_…, kaiming_…, "
            "zeros_), or make it on the CPU if it fits the coordinator's memory."
        )
    if recorded is None or not recorded.ops:
        raise InvalidArgumentError(
            f"{name}, made on meta, has no initial value: nothing has filled it within the strategy's scope. Call an "
            "initialiser (nn.init.normal_, reset_parameters(), zeros) on it there; moving a module to meta afterwards "
            "loses its values."
        )
    return tuple(op for noted in recorded.ops for op in _as_ops(noted, tensor, name))


def recipe_of_more(tensor: torch.Tensor, name: str) -> tuple[InitialOp, ...]:
    """How further rows of a table are to be initialised: as its own were, in the scope that has made it.

    Raises `InvalidArgumentError` where that is not known, or no meaning for rows of their own.
    """
    recorded = _recorded(tensor)
    if recorded is None or recorded.obstacle is not None or not recorded.ops:
        how = f"by {recorded.obstacle}" if recorded is not None and recorded.obstacle else "outside of the scope"
        raise InvalidArgumentError(
            f"{name} got its first values {how}, and how new rows are to be initialised cannot be told from that. Say "
            "it: ts.grow_rows(table, rows, init=lambda rows: torch.nn.init.normal_(rows, std=0.01))."
        )
    return tuple(op for noted in recorded.ops for op in _as_ops(noted, tensor, name))


def recipe_by(
    init: Callable[[torch.Tensor], object], shape: Sequence[int], like: torch.Tensor, first: int
) -> tuple[InitialOp, ...]:
    """The recipe of what ``init`` does to ``shape`` rows on ``meta``, which are those from ``first`` on."""
    with RecordInitialisers():  # type: ignore[no-untyped-call]
        rows = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        init(rows)
    recipe = recipe_of(rows, "init=")
    return tuple(op if op.row is None else replace(op, row=op.row + first) for op in recipe)


def carry_initialisers(tensor: torch.Tensor, to: torch.Tensor) -> None:
    """``to`` takes the place of ``tensor``, with more rows."""
    _set(to, _recorded(tensor))


@contextmanager
def repeated_on_servers(tensor: torch.Tensor, name: str) -> Iterator[list[InitialOp]]:
    """A block that changes ``tensor``, on ``meta``, whose values are on servers. The list that it gets has, after it,
    what was done to them; see `repeat`. Raises `UnsupportedError` as `recipe_of` does."""
    before, ops = _recorded(tensor), list[InitialOp]()
    _set(tensor, _Recorded())
    try:
        with RecordInitialisers():  # type: ignore[no-untyped-call]
            yield ops
        recorded = _recorded(tensor)
        assert recorded is not None
        if recorded.obstacle is not None:
            raise UnsupportedError(
                f"{name} is on meta, so the coordinator has no values of it, and {recorded.obstacle} cannot be done "
                "to a shard of it. Fill it with numbers or random values, assign rows (table.weight[ids] = rows), or "
                "change it in a scheduled function."
            )
        ops += [op for noted in recorded.ops for op in _as_ops(noted, tensor, name)]
    finally:
        _set(tensor, before)


def repeat(recipe: Sequence[InitialOp], shard: torch.Tensor, seed: int, start_row: int, total_rows: int) -> None:
    """Do to the rows of a shard, in place, what was done to the whole variable; see `replay`."""
    shard.copy_(replay(recipe, shard.shape, shard.dtype, seed, start_row, total_rows, now=shard))


def replay(
    recipe: Sequence[InitialOp],
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    start_row: int,
    total_rows: int,
    name: str = "a variable",
    now: torch.Tensor | None = None,
) -> torch.Tensor:
    """The initial value of rows ``[start_row, start_row + shape[0])`` of a variable of ``total_rows`` rows, on the CPU.

    Drawn in blocks of rows, each with a generator of its own, seeded with ``seed`` and the number of the block within
    the whole variable: one seed gives the same variable however it is split, and shards never repeat each other.
    ``now``: the values that these rows have, which the recipe goes on from. Raises `InvalidArgumentError` for operators
    that no `RecordInitialisers` has noted.
    """
    for op in recipe:
        if op.name not in _DRAWS and op.name not in _ADJUSTS:
            raise InvalidArgumentError(f"{name} is to be initialised with {op.name!r}, which is no known initialiser.")
    if not shape:
        return _draw_block(
            recipe, torch.empty((), dtype=dtype) if now is None else now.clone(), _block_seed(seed, 0), 0
        )
    result = torch.empty(tuple(shape), dtype=dtype)
    row_elements = max(1, math.prod(shape[1:]))
    rows_per_block = max(1, _ELEMENTS_PER_BLOCK // row_elements)
    stop_row = start_row + shape[0]
    for number in range(start_row // rows_per_block, -(-stop_row // rows_per_block)):
        first, last = number * rows_per_block, min((number + 1) * rows_per_block, total_rows)
        low, high = max(first, start_row), min(last, stop_row)
        block = torch.empty((last - first, *shape[1:]), dtype=dtype)
        if now is not None:
            block[low - first : high - first] = now[low - start_row : high - start_row]
        _draw_block(recipe, block, _block_seed(seed, number), first)
        result[low - start_row : high - start_row] = block[low - first : high - first]
    return result


def _draw_block(recipe: Sequence[InitialOp], block: torch.Tensor, seed: int, first_row: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    for op in recipe:
        target = block
        if op.row is not None:
            if not first_row <= op.row < first_row + len(block):
                continue
            target = block[op.row - first_row]
        random: dict[str, object] = {"generator": generator} if op.name in _DRAWS - {"fill_", "zero_"} else {}
        operator: Callable[..., object] = (
            nn.init.trunc_normal_ if op.name == "trunc_normal_" else getattr(torch.ops.aten, op.name)
        )
        operator(target, *op.args, **op.kwargs, **random)
    return block


def _block_seed(seed: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {block}".encode()).digest()[:8], "big", signed=True)


# -- recording ------------------------------------------------------------------------------------------------------


def _note_made(func: object, args: tuple[object, ...], kwargs: dict[str, object], result: torch.Tensor) -> None:
    """A new tensor: filled by its factory, or computed from one that has a recipe. Views need no note of their own."""
    name = schema_of(func).name.rpartition("::")[2]
    if name in _FACTORIES:
        operator, arguments = _FACTORIES[name]
        _set(result, _Recorded([(operator, arguments, {}, None)]))
    elif name in _FACTORIES_OF_VALUE:
        value = kwargs.get("fill_value", args[-1])
        _set(result, _Recorded([("fill_", (value,), {}, None)]))
    elif args and isinstance(args[0], torch.Tensor) and not _shares_storage(args[0], result):
        source = _recorded(args[0])
        if source is None or args[0].shape != result.shape or not _is_whole(args[0]):
            return
        if name in _COPIES:
            _set(result, _Recorded(list(source.ops), source.obstacle))
        elif f"{name}_" in _ADJUSTS and _are_numbers(args[1:], kwargs):
            _set(result, _Recorded([*source.ops, (f"{name}_", args[1:], kwargs, None)], source.obstacle))


def _note_written(func: object, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
    name = schema_of(func).name.rpartition("::")[2]
    given = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)) | kwargs
    for argument in schema_of(func).arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = given.get(argument.name)
        for tensor in target if isinstance(target, (list, tuple)) else [target]:
            if isinstance(tensor, torch.Tensor) and (tensor.is_meta or _is_followed(tensor, name)):
                own = {key: value for key, value in kwargs.items() if key != "generator"}
                constant = _constant(args[1]) if name == "copy_" else None
                if constant is not None:  # ``table[row] = 0``
                    _note(tensor, "fill_", (constant,), {})
                else:
                    in_place = bool(args) and tensor is args[0]
                    _note(tensor, name if in_place else f"{name}(out=)", args[1:], own)


def _is_followed(tensor: torch.Tensor, name: str) -> bool:
    """Of tensors with values those that may be tables, from where they are filled: more rows may be asked for later."""
    if not _may_be_followed(tensor):
        return False
    return (name in _DRAWS and tensor.dim() == 2 and _is_whole(tensor)) or _recorded(tensor) is not None


def _may_be_followed(tensor: torch.Tensor) -> bool:
    """One that stands for a variable already has another class: what is done to it now is no initialiser."""
    is_plain = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
    return is_plain and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _is_copy_of_followed(func: object, args: tuple[Any, ...]) -> bool:
    is_copy = schema_of(func).name.rpartition("::")[2] in _COPIES and _may_be_followed(args[0])
    return is_copy and _recorded(args[0]) is not None


def _constant(source: torch.Tensor) -> object:
    """The number that every element of a tensor on ``meta`` is, if it was filled with one."""
    recorded = _recorded(source) if source.is_meta else None
    if recorded is None or recorded.obstacle or len(recorded.ops) != 1:
        return None
    name, args, _, elements = recorded.ops[0]
    return {"zero_": (0,), "fill_": args}.get(name, (None,))[0] if elements is None else None


def _note(tensor: torch.Tensor, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    recorded = _recorded(tensor)
    is_whole = _is_whole(tensor)
    if recorded is None or (is_whole and name in _DRAWS):
        recorded = _Recorded()
        _set(tensor, recorded)
    if name not in _DRAWS | _ADJUSTS or not _are_numbers(args, kwargs):
        recorded.obstacle = name
    elif not tensor.is_meta and len(recorded.ops) >= _MOST_FOLLOWED:
        recorded.obstacle = f"more than {_MOST_FOLLOWED} operators"
    elif is_whole:
        recorded.ops.append((name, args, kwargs, None))
    elif tensor.is_contiguous():
        recorded.ops.append((name, args, kwargs, (int(tensor.storage_offset()), tensor.numel())))
    else:
        recorded.obstacle = f"{name} on a part of it that is not made of whole rows"


def _as_ops(
    noted: tuple[str, tuple[object, ...], dict[str, object], tuple[int, int] | None], tensor: torch.Tensor, name: str
) -> list[InitialOp]:
    operator, args, kwargs, elements = noted
    if elements is None:
        return [InitialOp(operator, args, kwargs)]
    first, count = elements
    row_elements = math.prod(tensor.shape[1:])
    if not tensor.dim() or not row_elements or first % row_elements or count % row_elements:
        raise UnsupportedError(
            f"{name}, made on meta, was written by {operator} on a part of it that is not made of whole rows, which "
            "cannot be repeated on a shard of it. Initialise whole rows, or make it on the CPU."
        )
    rows = range(first // row_elements, (first + count) // row_elements)
    if len(rows) > _MOST_ROWS_AT_ONCE:
        raise UnsupportedError(
            f"{name}, made on meta, was written by {operator} on {len(rows)} of its {tensor.shape[0]} rows; at most "
            f"{_MOST_ROWS_AT_ONCE} rows can be treated apart. Initialise all rows alike, or make it on the CPU."
        )
    return [InitialOp(operator, args, kwargs, row) for row in rows]


def _recorded(tensor: torch.Tensor) -> _Recorded | None:
    found: _Recorded | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return found


def _set(tensor: torch.Tensor, recorded: _Recorded | None) -> None:
    # An attribute of the storage: torch keeps its Python object for as long as the storage itself lives.
    setattr(tensor.untyped_storage(), _ATTRIBUTE, recorded)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage() is other.untyped_storage()


def _are_numbers(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    return all(
        value is None or isinstance(value, (bool, int, float, complex, str)) for value in (*args, *kwargs.values())
    )


# -- initialisers that skip meta tensors ----------------------------------------------------------------------------


class _NoteSkipped(TorchFunctionMode):
    """Sees what no operator tells: from some version on, functions of ``torch.nn.init`` that cannot work on ``meta``
    tensors (``trunc_normal_``, ``orthogonal_``, ``sparse_``) return without a word.

    They ask for ``tensor.is_meta`` first, which a function mode sees; who asked stands in the calling frame. Replacing
    the functions instead would miss every ``from torch.nn.init import trunc_normal_``.
    """

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if result is True and func == _ASKS_IS_META:
            caller = sys._getframe(1)
            if caller.f_globals is vars(nn.init):
                _note_skipped(args[0], caller.f_code.co_name, caller.f_locals)
        return result


_ASKS_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property of the class


def _note_skipped(tensor: torch.Tensor, initialiser: str, arguments: Mapping[str, Any]) -> None:
    if "trunc_normal_" in initialiser:
        _note(tensor, "trunc_normal_", tuple(float(arguments[name]) for name in ("mean", "std", "a", "b")), {})
    else:
        _note(tensor, initialiser, (), {})
