"""Tensors of the coordinator's program that stand for variables on servers: each asks before it is read or written.

A parameter or buffer that has been placed keeps its object and its memory, and gets a class of its own, which PyTorch
asks before it does anything with the tensor (``__torch_function__``), on any thread. What shows the same memory (views,
``detach()``, ``.data``, the values of ``state_dict()``) asks in the same way. Whether the memory is current, and what a
write means, is the cache's to say: `torchstrat.parameter_server.variables.coordinator_cache`.

Large tables move by the rows alone that a call reads or writes. A tensor that gets more rows stays the same object, for
whoever holds it: a parameter, and its gradient.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F

from torchstrat.core import _functional_private, _torch_private, gradients
from torchstrat.core._functional_private import have_readers_ask
from torchstrat.core._torch_private import DisableTorchFunctionSubclass, sparse_indices, sparse_values
from torchstrat.core.errors import ContextError, UnsupportedError
from torchstrat.core.tensor_bytes import overlap
from torchstrat.core.tensor_classes import NEEDS_NO_VALUES, asking_class, class_behind, tensors_in
from torchstrat.parameter_server.messages import VariableSpec

Moment = tuple[int, int]
"""How many functions have been scheduled, and how many of them had not ended."""


class Functions(Protocol):
    """What has been scheduled."""

    @property
    def next_function(self) -> int:
        """How many there are."""

    @property
    def num_unfinished(self) -> int:
        """How many of them have not ended."""

    def paused(self, timeout_seconds: float, who: str) -> AbstractContextManager[None]:
        """A block in which no function is half-way, and none begins."""


class NoFunctions:
    """Before there is a coordinator that could schedule any."""

    next_function = 0
    num_unfinished = 0

    def paused(self, timeout_seconds: float, who: str) -> AbstractContextManager[None]:
        return nullcontext()


GRAD: types.GetSetDescriptorType = inspect.getattr_static(torch.Tensor, "grad")
DATA: types.GetSetDescriptorType = inspect.getattr_static(torch.Tensor, "data")
"""As the class has them: to read and set what a class that asks has in the places of them."""
_SET: Callable[..., object] = torch.Tensor.set_
_AS_SUBCLASS: Callable[..., object] = torch.Tensor.as_subclass


def give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """``memory``, of any number of rows, takes the place of what ``tensor`` has."""
    with DisableTorchFunctionSubclass():
        DATA.__set__(tensor, memory)


def grow_gradient(parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A gradient that is left is nothing of the new rows: it may still be added to, or set to zero."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        gradient = GRAD.__get__(parameter)
        if gradient is None or tuple(gradient.shape) == shape:
            return
        if gradient.layout == torch.sparse_coo:
            grown = torch.sparse_coo_tensor(
                sparse_indices(gradient),
                sparse_values(gradient),
                shape,
                is_coalesced=gradient.is_coalesced(),
                check_invariants=False,
            )
        else:
            grown = gradient.new_zeros(shape)
            grown[: len(gradient)] = gradient
        DATA.__set__(gradient, grown)


class Holder(Protocol):
    """Whose memory a tensor shows."""

    @property
    def shown(self) -> str:
        """What ``repr`` says instead of the values; empty where these are current."""

    @property
    def is_variable(self) -> bool:
        """Or something that was made of some, and waits for nothing."""

    @property
    def hands_on(self) -> bool:
        """Whether it is asked first, and has the holders of the others make the call."""

    def require_value(self) -> None:
        """Raise where the memory has no value that could be read."""

    def call(self, call: TensorCall) -> object:
        """Its result, when the tensors that it reads are current."""

    def read(self, alias: Alias) -> None:
        """Make the memory current."""


class TensorCall:
    """A call of PyTorch's with tensors that ask among its arguments. ``aliases``: these."""

    __slots__ = ("aliases", "args", "func", "kwargs")

    def __init__(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        found = (_aliases.get(id(one)) for one in tensors_in((args, kwargs)) if isinstance(one, CachedTensor))
        self.aliases = [alias for alias in found if alias is not None]

    def run(self) -> Any:
        with DisableTorchFunctionSubclass():
            return self.func(*self.args, **self.kwargs)

    @property
    def holders(self) -> list[Holder]:
        return list({id(alias.holder): alias.holder for alias in self.aliases}.values())

    @property
    def writes(self) -> bool:
        """Whether it changes a tensor that asks in place, as far as its name says. What does so all the same is seen by
        the tensor's version afterwards, and refused where it was not waited with."""
        return self.writes_to(self.aliases)

    def writes_to(self, aliases: Iterable[Alias]) -> bool:
        """The same, of these."""
        targets = [id(one) for one in tensors_in(_targets(self.func, self.args, self.kwargs))]
        return bool(targets) and any(id(alias.tensor()) in targets for alias in aliases)

    def hand_on(self) -> object:
        """Let who holds the first of them make it. Another thread may just have made them ordinary tensors."""
        return self.aliases[0].holder.call(self) if self.aliases else self.run()

    def shown_by(self, result: object) -> object:
        """What may show the memory of tensors that ask from now on, given what the call returned."""
        return self.args[0] if self.func == _DATA_SET else result

    @property
    def uncounted(self) -> list[Alias]:
        """Those that it changes in place without a trace in a tensor's version."""
        targets = tensors_in(_targets(self.func, self.args, self.kwargs)) if self.func in _BY_NORMS else ()
        return [alias for one in targets if (alias := alias_of(one)) is not None]

    @property
    def hands_out(self) -> bool:
        """Whether the memory may be changed afterwards by code that leaves no trace in a tensor's version."""
        return getattr(self.func, "__name__", "") in _HANDS_OUT or self.func in (DATA.__get__, _DATA_SET, _SET)


def shares_memory(name: str, other: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} shares its memory with {other}, by .data, a view or nn.Parameter(parameter). On parameter servers "
        "each has its own, so that it would not follow the other's steps. To tie them, use one parameter twice "
        "(second.weight = first.weight); to begin with equal values, copy them: .data.clone()."
    )


def shared_buffer(name: str, other: str) -> UnsupportedError:
    return UnsupportedError(
        f"a scheduled function changes {name}, which shares its memory with {other} on the coordinator. On parameter "
        "servers and workers each has its own, so that the other would not follow. Keep one of them, and take the view "
        "of it where it is used; or begin with a copy: .clone()."
    )


def no_longer_one(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"several modules have one tensor as their buffer {name}, and one of them has got another tensor in its place. "
        "On parameter servers they stay one. Change it in place (copy_), put the new one into all of them, or give "
        "each module a .clone() within the scope."
    )


def lost_value(name: str) -> ContextError:
    return ContextError(
        f"{name} was on the parameter servers of a strategy that was closed, and its value could not be read any more. "
        "Call strategy.extended.pull() before, or restore a checkpoint."
    )


class _Copy(Protocol):
    spec: VariableSpec

    def tensor(self) -> torch.Tensor | None: ...


def require_own_memory(call: TensorCall, copies: Iterable[_Copy]) -> None:
    """Before a call that may give a variable other memory: it is not to be that of another one."""
    memory = call.args[1] if call.func in (_DATA_SET, _SET) and len(call.args) > 1 else None
    if not isinstance(memory, torch.Tensor):
        return
    with DisableTorchFunctionSubclass():
        if memory.is_meta or _torch_private.tensors_in_storage(memory) < 2:
            return
        held = [(copy.spec.name, tensor) for copy in copies if (tensor := copy.tensor()) is not None]
        names = {id(tensor): name for name, tensor in held}
        for other, tensor in held if id(call.args[0]) in names else ():
            if tensor is not call.args[0] and not tensor.is_meta and overlap(memory, tensor):
                raise shares_memory(names[id(call.args[0])], other)


class Alias:
    """What is known of one tensor. Not in its ``__dict__``, which is the program's. ``unread``: which reading its
    values are of, until somebody has looked at them; it counts while functions run."""

    __slots__ = ("holder", "tensor", "unread")

    def __init__(self, tensor: torch.Tensor, holder: Holder, unread: int | None) -> None:
        key = id(tensor)
        self.tensor = weakref.ref(tensor, lambda _: _aliases.pop(key, None))
        self.holder, self.unread = holder, unread


_aliases: dict[int, Alias] = {}
"""By the ``id`` of the tensor."""


@_torch_private.uncompiled
def _ask(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """What PyTorch's compiler cannot see through: it leaves the call to Python, which asks each time."""
    if func in gradients.REGISTERS_HOOK and isinstance(args[0], nn.Parameter):
        raise UnsupportedError(
            "a hook was registered on a parameter that lives on parameter servers. It would not run on the workers, "
            "which have parameters of their own. Register it in the function, or change the gradients there between "
            "backward() and step()."
        )
    if func is torch.Tensor.detach and sys._getframe(2).f_code is nn.Parameter.__new__.__code__:
        raise UnsupportedError(
            "nn.Parameter was given a parameter or buffer that lives on parameter servers, to share its memory; on the "
            "servers each has its own. Use the same parameter in both places, or give it a copy: "
            "nn.Parameter(parameter.detach().clone())."
        )
    if func in NEEDS_NO_VALUES:
        with DisableTorchFunctionSubclass():
            misses = func in _OF_GRADIENT and GRAD.__get__(args[0]) is None and (len(args) == 1 or args[1] is None)
            result = func(*args, **kwargs)
        if misses:
            _tell_of_gradient(args[0], sys._getframe(2))
        elif result is True and func == _IS_META:
            _refuse_skipped_initialiser(sys._getframe(2))
        return result
    call = TensorCall(func, args, kwargs)
    for holder in call.holders:
        holder.require_value()
    call.aliases = [alias for alias in call.aliases if alias.holder.is_variable]
    if len(call.aliases) > 1:
        call.aliases.sort(key=lambda alias: not alias.holder.hands_on)
    return call.hand_on()


_OF_GRADIENT = frozenset({GRAD.__get__, GRAD.__set__})
_wanted_gradients: list[Callable[[object], None]] = []
_THEIR_OWN = ("torch", "torchstrat", "copy")


def tell_of_gradients(told: Callable[[object], None]) -> Callable[[], None]:
    """Call ``told`` with each variable whose gradient the program looks for, or clears, and that has none. Returns what
    ends that."""
    _wanted_gradients.append(told)
    return functools.partial(_wanted_gradients.remove, told)


def _tell_of_gradient(parameter: object, caller: FrameType) -> None:
    module = str(caller.f_globals.get("__name__"))
    is_asked = caller.f_code.co_name == "zero_grad" or module == nn.utils.clip_grad.__name__
    if is_asked or module.partition(".")[0] not in _THEIR_OWN:
        for told in list(_wanted_gradients):
            told(parameter)


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property of the class


def _refuse_skipped_initialiser(caller: FrameType) -> None:
    """Functions of ``torch.nn.init`` that cannot work on ``meta`` return without a word where `is_meta` says so."""
    if caller.f_globals is vars(nn.init):
        raise UnsupportedError(
            f"nn.init.{caller.f_code.co_name} was called on a weight that is on meta, so the coordinator has no values "
            "of it. Call it within the `with strategy.scope():` that makes the weight, or use another initialiser."
        )


class CachedTensor:
    """Mixed into the class of a tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return _ask(func, args, kwargs or {})

    def set_(self, *args: object, **kwargs: object) -> object:
        """PyTorch makes this without asking, and the next. Assigning to a weight under a parametrization does it."""
        return _ask(_SET, (self, *args), kwargs)

    def as_subclass(self, *args: object, **kwargs: object) -> object:
        return _ask(_AS_SUBCLASS, (self, *args), kwargs)

    def _read(self) -> torch.Tensor:
        """The current values: an ordinary tensor over the same memory."""
        alias = alias_of(_of(self))
        if alias is not None:
            alias.holder.read(alias)
        with DisableTorchFunctionSubclass():
            return _of(self).detach()

    def __repr__(self, **options: object) -> str:
        """Never waits for a server: debuggers and loggers call it."""
        alias = alias_of(_of(self))
        if alias is not None and alias.holder.shown:
            return alias.holder.shown
        with DisableTorchFunctionSubclass():
            return repr(_torch_private.alias_of(_of(self), class_behind(type(self)), _of(self).requires_grad))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """A copy is an ordinary tensor of the program's own."""
        if id(self) not in memo:
            value = self._read().clone()
            memo[id(self)] = _torch_private.alias_of(value, class_behind(type(self)), _of(self).requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> Any:
        """Files and other processes have the values, in an ordinary tensor."""
        plain = _torch_private.alias_of(self._read(), class_behind(type(self)), _of(self).requires_grad)
        vars(plain).update(vars(self))
        return plain.__reduce_ex__(protocol)


def can_ask(tensor: torch.Tensor) -> bool:
    """Whether its class leaves room: not one that PyTorch asks already, and for another reason."""
    kind = type(tensor)
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__) in _ORDINARY


_ORDINARY = frozenset(
    getattr(each.__torch_function__, "__func__", each.__torch_function__) for each in (torch.Tensor, nn.Parameter)
)


def let_ask(tensor: torch.Tensor, holder: Holder, unread: int | None = None) -> None:
    """From now on ``tensor`` asks ``holder``."""
    kind = asking_class(CachedTensor, type(tensor))
    _aliases[id(tensor)] = Alias(tensor, holder, unread)
    tensor.__class__ = kind


def let_alone(tensor: torch.Tensor) -> None:
    """It is an ordinary tensor again, with the values that it has."""
    if isinstance(tensor, CachedTensor):
        tensor.__class__ = class_behind(type(tensor))
        _aliases.pop(id(tensor), None)


def bring_alone(tensor: object) -> None:
    """Make what ``tensor`` shows current, before code that does not ask reads it. Nothing for other tensors."""
    if isinstance(tensor, CachedTensor):
        tensor._read()  # noqa: SLF001


def ask_before_others_take() -> Callable[[], None]:
    """Transforms of torch.func, TorchScript and what makes tensors of others take hold of them without asking their
    class. What this returns ends it for the last ones."""
    _ask_before_c_takes()
    return have_readers_ask(CachedTensor)


@functools.cache
def _ask_before_c_takes() -> None:
    _torch_private.before_transforms_take(bring_alone)
    _functional_private.before_scripts_use(_bring_all, lambda: bool(_aliases))


def _bring_all(values: list[object]) -> None:
    for tensor in tensors_in(values):
        bring_alone(tensor)
        if isinstance(tensor, CachedTensor) and not _of(tensor).requires_grad:
            _of(tensor).data  # noqa: B018  # hands it out: a norm there writes statistics, without a trace in versions


def alias_of(tensor: torch.Tensor) -> Alias | None:
    """None where it is an ordinary tensor, which another thread may just have made it."""
    return _aliases.get(id(tensor))


def _of(tensor: CachedTensor) -> torch.Tensor:
    return cast(torch.Tensor, tensor)


def aliases_in(result: object, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors in ``result`` that show ``memory`` and do not ask yet."""
    for tensor in tensors_in(result):
        if type(tensor) in (torch.Tensor, nn.Parameter) and _torch_private.share_storage(tensor, memory):
            yield tensor


# -- what a call does -----------------------------------------------------------------------------------------------


def _targets(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """What a call changes in place."""
    name = getattr(func, "__name__", "")
    if func in _MAY_WRITE:
        return _MAY_WRITE[func](*args, **kwargs)
    if name in _IN_PLACE or func == _DATA_SET or (name.endswith("_") and not name.endswith("__")):
        return args[0] if args else kwargs
    return kwargs.get("out")


def _by_norm(input: object, running_mean: object, running_var: object, *rest: object, **kwargs: object) -> object:  # noqa: A002
    is_training = kwargs.get("training", rest[2] if len(rest) > 2 else False)
    return (running_mean, running_var) if is_training else None


def _by_native_norm(
    input: object,  # noqa: A002
    weight: object,
    bias: object,
    running_mean: object,
    running_var: object,
    training: object,
    *_: object,
    **__: object,
) -> object:
    return (running_mean, running_var) if training else None


def _by_instance_norm(
    input: object,  # noqa: A002
    running_mean: object = None,
    running_var: object = None,
    *_: object,
    **__: object,
) -> object:
    return running_mean, running_var


def _by_lookup(
    input: object,  # noqa: A002
    weight: object,
    _: object = None,
    max_norm: object = None,
    *rest: object,
    **kwargs: object,
) -> object:
    return None if max_norm is None else weight


_BY_NORMS: dict[object, Callable[..., object]] = {
    F.batch_norm: _by_norm,
    torch.batch_norm: _by_native_norm,
    torch.native_batch_norm: _by_native_norm,
}
_MAY_WRITE: dict[object, Callable[..., object]] = _BY_NORMS | {
    F.instance_norm: _by_instance_norm,
    F.embedding: _by_lookup,
    F.embedding_bag: _by_lookup,
}
_OPERATORS = "add sub mul truediv floordiv div mod pow and or xor lshift rshift matmul"
_IN_PLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())})
_DATA_SET = DATA.__set__
_HANDS_OUT = frozenset(
    {"numpy", "__array__", "as_subclass", "untyped_storage", "storage", "data_ptr", "__dlpack__", "to_dlpack"}
)
"""By name: a worker in the same process has put others in the place of some. With ``.data`` that is what gives memory
to code that changes it without leaving a trace in ``_version``, or does so itself."""


# -- which rows of a table a call looks at, or assigns -----------------------------------------------------------------


def read_rows(call: TensorCall, table: torch.Tensor) -> torch.Tensor | None:
    """The ids of the rows of ``table`` that a call looks at, sorted and unique; None for one that may look at all.

    ``table[ids]`` and lookups do. Ids that are out of range are the call's own error.
    """
    arguments = [*call.args, *call.kwargs.values()]
    if sum(one is table for one in tensors_in(arguments)) != 1:
        return None
    if call.func is torch.Tensor.__getitem__ and call.args[0] is table:
        index = call.args[1]  # of one number: a view, by which somebody may write
        is_list = isinstance(index, list) and all(type(one) is int for one in index)  # others may be tuples to PyTorch
        ids = torch.as_tensor(index) if is_list or isinstance(index, torch.Tensor) else None
    elif call.func in (F.embedding, F.embedding_bag):
        ids = call.args[0] if call.args else call.kwargs["input"]
    else:
        return None
    if ids is None or ids.dtype not in _OF_IDS or (ids.dim() == 0 and call.func is torch.Tensor.__getitem__):
        return None
    ids = ids.detach().reshape(-1).cpu().to(torch.int64)
    ids = torch.where(ids < 0, ids + len(table), ids) if call.func is torch.Tensor.__getitem__ else ids
    ids = ids[(ids >= 0) & (ids < len(table))]
    return torch.unique(ids)  # type: ignore[no-any-return]


_OF_IDS = (torch.int64, torch.int32)


def given_rows(call: TensorCall, table: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Values, and the ids ``(n,)`` of the rows that get them (None: all rows); None for a call that brings no values.

    ``table[ids] = rows`` and ``table.copy_(values)`` do, and ``copy_`` of a view that is made of whole rows. Raises
    `UnsupportedError` naming the table for parts of rows.
    """
    if call.func is torch.Tensor.__setitem__:
        target, index, value = call.args
        if target is not table:
            raise _not_rows(name)
        ids = _rows_at(index, len(table), name)
    elif call.func is torch.Tensor.copy_:
        target, value = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs["src"]
        ids = None if target is table else _rows_of_view(target, table, name)
    else:
        return None
    value = torch.as_tensor(value, dtype=table.dtype)
    if value.is_meta:
        return None
    row = table.shape[1:]
    shape = (*(table.shape[:1] if ids is None else ids.shape), *row)
    while value.dim() > len(shape) and value.shape[0] == 1:  # PyTorch takes these
        value = value[0]
    value = value.detach().cpu().expand(shape)
    return (value, None) if ids is None else (value.reshape(ids.numel(), *row), ids.reshape(-1))


def _rows_at(index: Any, rows: int, name: str) -> torch.Tensor | None:
    """Of any shape."""
    if isinstance(index, tuple):
        if len(index) != 1 and not all(one is Ellipsis or one == slice(None) for one in index[1:]):
            raise _not_rows(name)
        index = index[0]
    if index is Ellipsis:
        return None
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() > 1:
        raise _not_rows(name)
    found: torch.Tensor = torch.arange(rows)[index]
    return found


def _rows_of_view(view: torch.Tensor, table: torch.Tensor, name: str) -> torch.Tensor:
    elements = math.prod(table.shape[1:])
    first, count = view.storage_offset(), view.numel()
    if not elements or first % elements or count % elements or not view.is_contiguous():
        raise _not_rows(name)
    return torch.arange(first // elements, (first + count) // elements)


def _not_rows(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is on meta, so the coordinator has no values of it, and a part of its rows was written. Write whole "
        "rows (table.weight[ids] = rows), all of it (copy_, load_state_dict, nn.init), or in a scheduled function."
    )
