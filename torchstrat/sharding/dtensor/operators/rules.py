"""The table of operators that know what to do with a `CutTensor`, and what a rule of one works with.

What plain PyTorch says of a call by the shapes of the whole tensors, asked before a piece is computed with.

A rule sees pieces, and an operand that happens to have the shape of a piece, or that broadcasts to one, would be taken
where plain PyTorch raises. So the first call of every kind (function, shapes, dtypes, options) is made on tensors of
the whole shapes without values, which raises what plain PyTorch raises; and what the rule returns has to have the
shapes and dtypes that this returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import functional

from torchstrat.core._torch_private import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    Operator,
    is_any_autocast_enabled,
    is_inside_transform,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_classes import getter, properties, setter, tensors_in
from torchstrat.sharding.dtensor import cut_tensors
from torchstrat.sharding.dtensor.cut_tensors import STAND_IN, CutTensor, as_given, local_of, refused, shape_of
from torchstrat.sharding.dtensor.devices import Cut, LogicalDevices
from torchstrat.sharding.dtensor.no_values import METADATA

_MOST = 1 << 14
_known: set[Hashable] = set()
"""Kinds of calls that plain PyTorch accepts."""

Outline = list[tuple[torch.Size, torch.dtype | None]]
"""Shapes and dtypes of the tensors that a call returns; None: whatever autocast makes of it."""


class AsPlain:
    """One call, before a rule is asked."""

    def __init__(self, function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> None:
        self._expected: Outline | None = None
        self._kind: Hashable = None
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            return  # nothing that could not fit
        with DisableTorchFunctionSubclass():
            is_autocast = is_any_autocast_enabled()
            self._kind = (function, is_autocast, _kind_of(args), _kind_of(kwargs))
            if self._is_known():
                return
            meta_args, meta_kwargs = _on_meta(args, is_autocast), _on_meta(kwargs, is_autocast)
        with torch.no_grad(), DisableTorchFunction():
            try:
                result = function(*meta_args, **meta_kwargs)
            except NotImplementedError:  # of this function nothing is known without values
                return
            except RuntimeError as error:
                if "meta tensor" in str(error):  # a number is given as a tensor
                    return
                raise
        self._expected = _outline(result, is_autocast)

    def _is_known(self) -> bool:
        try:
            return self._kind in _known
        except TypeError:  # an argument that is no key
            self._kind = None
            return False

    def check(self, result: object) -> str:
        """What is wrong with what the rule returned; empty if nothing is."""
        if self._expected is None:
            return ""
        with DisableTorchFunctionSubclass():
            found = _outline(result, False)
        if len(found) != len(self._expected):
            return f"makes {len(found)} tensors of it instead of {len(self._expected)}"
        for (shape, dtype), (wanted, wanted_dtype) in zip(found, self._expected, strict=True):
            if shape != wanted or wanted_dtype not in (None, dtype):
                return f"makes {dtype} {tuple(shape)} of it instead of {wanted_dtype or dtype} {tuple(wanted)}"
        if self._kind is not None:
            if len(_known) >= _MOST:
                _known.clear()
            _known.add(self._kind)
        return ""


def _kind_of(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, float | complex):
        return type(value), ()  # a number that is another one in every step
    if isinstance(value, list | tuple):
        return type(value), *[_kind_of(one) for one in value]
    if isinstance(value, dict):
        return tuple([(name, _kind_of(one)) for name, one in value.items()])
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return type(value), value  # 1 and True are equal


def _on_meta(value: object, is_autocast: bool) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = torch.float32 if is_autocast and value.dtype.is_floating_point else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="meta")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_on_meta(one, is_autocast) for one in value])
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(one, is_autocast) for one in value)
    if isinstance(value, dict):
        return {name: _on_meta(one, is_autocast) for name, one in value.items()}
    return value


def _outline(result: object, is_autocast: bool) -> Outline:
    return [
        (one.shape, None if is_autocast and one.dtype.is_floating_point else one.dtype) for one in tensors_in(result)
    ]


Rule = Callable[..., Any]

_rules: dict[object, Rule] = {}
_names: dict[str, None] = {}

AnyRule = TypeVar("AnyRule", bound=Rule)
Label = TypeVar("Label", bound=Hashable)


def functions_called(name: str) -> list[object]:
    """What PyTorch calls ``name``: ``torch.name``, the method of tensors, ``torch.nn.functional.name``."""
    places = (torch, torch.Tensor, functional)
    return [getattr(place, name) for place in places if callable(getattr(place, name, None))]


def rule(*operators: object) -> Callable[[AnyRule], AnyRule]:
    """Register a rule for functions, or for all that PyTorch calls by a name. It is called as
    ``rule(call, *args, **kwargs)``."""

    def register(function: AnyRule) -> AnyRule:
        for operator in operators:
            _names[operator if isinstance(operator, str) else name_of(operator)] = None
            found = functions_called(operator) if isinstance(operator, str) else [operator]
            assert found, operator
            for one in found:
                _rules[one] = function
        return function

    return register


def operators() -> list[str]:
    """The names of all operators with a rule."""
    return list(_names)


class Call:
    """One call of an operator with at least one `CutTensor` among its arguments."""

    def __init__(self, function: Any, devices: LogicalDevices) -> None:
        self.function, self.devices = function, devices

    @property
    def name(self) -> str:
        return name_of(self.function)

    def cut(self, tensor: torch.Tensor) -> Cut:
        return cut_tensors.cut_of(tensor, self.devices)

    def axes_of(self, tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
        """The axes that cut dimension ``dim`` of ``tensor``."""
        return self.devices.axes.axes_of(self.cut(tensor), dim)

    def enter(self, tensor: torch.Tensor, wanted: Cut, varying: Iterable[int]) -> torch.Tensor:
        """See `cut_tensors.enter`."""
        return cut_tensors.enter(tensor, self.devices, wanted, tuple(varying))

    def open(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece as it is."""
        return self.enter(tensor, self.cut(tensor), ())

    def leave(self, local: torch.Tensor, cut: Cut) -> torch.Tensor:
        return cut_tensors.leave(local, self.devices, cut)

    def added_up(self, part: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return cut_tensors.added_up(part, self.devices, axes)

    def total(self, part: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """The sum over ``axes``, for use in a computation that varies along them."""
        return cut_tensors.spread(cut_tensors.added_up(part, self.devices, axes), self.devices, axes)

    def largest(self, part: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """The elementwise maximum over ``axes``, without a gradient."""
        with torch.no_grad():
            return self.devices.largest(part, axes) if axes else part.detach()

    def fitting(self, chosen: Sequence[Label | None], sizes: Mapping[Label, int]) -> list[Label | None]:
        """``chosen``: for each axis what it is to cut, of these sizes. An axis that does not divide what other tensors
        have had cut along other axes cuts nothing."""
        parts: dict[Label, int] = {}
        found: list[Label | None] = []
        for size, label in zip(self.devices.axes.sizes, chosen, strict=True):
            if label is not None and sizes[label] % (parts.get(label, 1) * size):
                label = None
            if label is not None:
                parts[label] = parts.get(label, 1) * size
            found.append(label)
        return found

    def refused(self, why: str) -> UnsupportedError:
        return refused(self.name, why)


Dims = int | Sequence[int] | None


def name_of(function: object) -> str:
    name: str = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    return f"Tensor.{getattr(owner, '__name__', '')}" if name in ("__get__", "__set__") else name


def dims_of(dim: Dims, rank: int) -> tuple[int, ...]:
    """Dimensions as PyTorch takes them, from 0; None and ``()`` are all of them."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted(one_dim(one, rank) for one in dims)) if dims else tuple(range(rank))


def one_dim(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} of a tensor of {rank} dimensions")
    return dim + rank if dim < 0 else dim


# -- calling -------------------------------------------------------------------------------------------------------

_GRADIENT_GET, _GRADIENT_SET = getter("grad"), setter("grad")
_SAYS_WHAT_IS_TRAINED = {torch.Tensor.requires_grad_, setter("requires_grad")}
_OF_LEAVES = {*properties("is_leaf", "grad_fn", "requires_grad"), torch.Tensor.retain_grad, *_SAYS_WHAT_IS_TRAINED}
"""What is the variable's own, a leaf's; its stand-in is made of it."""


def apply(
    function: Callable[..., object], types: Sequence[type], args: Sequence[object], kwargs: dict[str, object]
) -> object:
    """What ``function`` is on tensors of which some are cut, of classes ``types``.

    Raises `UnsupportedError` if nobody knows.
    """
    if len(types) > 1 or types[0] is not CutTensor:
        args, kwargs = with_stand_ins(args), with_stand_ins(kwargs)
    if function in METADATA:
        return _of_the_tensor(function, args, kwargs)
    found = _rules.get(function)
    if found is None:
        return _without_rule(function, args, kwargs)
    if kwargs.get("out") is not None:
        raise refused(name_of(function), "cannot write to out=; use what it returns")
    first = next((one for one in tensors_in((args, kwargs)) if isinstance(one, CutTensor)), None)
    if first is None:
        raise refused(name_of(function))
    if is_inside_transform():
        raise refused(name_of(function), "in a transform of torch.func (vmap, grad, jacrev …)")
    call = Call(function, first.devices)
    as_plain = AsPlain(function, args, kwargs)
    call.devices.doing = call.name
    try:
        result = found(call, *args, **kwargs)
    except TypeError as error:
        try:
            inspect.signature(found).bind(call, *args, **kwargs)
        except TypeError as of_arguments:
            raise call.refused(f"is not known with these arguments ({of_arguments})") from error
        raise
    finally:
        call.devices.doing = ""
    if difference := as_plain.check(result):
        raise call.refused(difference)
    return _as_given(result)


CutTensor.apply = apply


def with_stand_ins(value: object) -> Any:
    """``value`` with a variable that is cut, wherever it is in there, as what a step sees of it."""
    if isinstance(value, torch.Tensor):
        stand_in = value.__dict__.get(STAND_IN)
        return value if stand_in is None else stand_in
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(with_stand_ins, value))
    if isinstance(value, list | tuple):
        return type(value)(map(with_stand_ins, value))
    if isinstance(value, dict):
        return {name: with_stand_ins(one) for name, one in value.items()}
    if isinstance(value, slice):
        return slice(*map(with_stand_ins, (value.start, value.stop, value.step)))
    return value


def _as_given(result: object) -> object:
    """``result``, which may be an argument, as the object that the program has given."""
    if isinstance(result, CutTensor):
        return as_given(result)
    return list(map(_as_given, result)) if isinstance(result, list) else result


def _of_the_tensor(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> object:
    """What is asked and said without a look at elements."""
    first = args[0] if args else None
    if isinstance(first, CutTensor) and first.variable is not None:
        if function is torch.Tensor.register_hook:
            raise refused("register_hook", "as a parameter would last for this run only; see its grad after backward()")
        if function in _OF_LEAVES:
            args = (first.variable, *args[1:])
    elif function in _SAYS_WHAT_IS_TRAINED:
        raise refused(name_of(function), "is known of parameters; say it of others before they are cut, or detach them")
    with DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _without_rule(function: object, args: Sequence[object], kwargs: dict[str, object]) -> object:
    first = args[0] if args else None
    if function == _GRADIENT_GET and isinstance(first, CutTensor):
        return first.gradient()
    if function == _GRADIENT_SET and isinstance(first, CutTensor) and first.variable is not None:
        with DisableTorchFunctionSubclass():
            first.variable.grad = None if args[1] is None else _as_piece(first, args[1])
        return None
    if function is torch.autograd.backward and not any(isinstance(one, CutTensor) for one in tensors_in(args)):
        _backward_to(args, kwargs)
        return None
    name = name_of(function)
    if isinstance(function, Operator):
        raise refused(name, cut_tensors.BELOW_FUNCTIONS)
    if (name.startswith("__i") and name.endswith("__")) or (name.endswith("_") and not name.endswith("__")):
        raise refused(name, "would change it in place; write the result to a new tensor")
    raise refused(name)


def _backward_to(args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Of losses that are whole, for inputs of which some are cut."""
    given = {name: _as_given(list(value) if isinstance(value, tuple) else value) for name, value in kwargs.items()}
    if any(isinstance(one, CutTensor) for one in tensors_in(given)):
        raise refused(
            "backward(inputs=…)", "that is no parameter; call its retain_grad() before, and backward() without it"
        )
    backward: Callable[..., None] = torch.autograd.backward
    with DisableTorchFunctionSubclass():
        backward(*args, **given)


def _as_piece(tensor: CutTensor, gradient: object) -> torch.Tensor:
    """This process's piece of a gradient that ``tensor`` is given, whole or cut in whatever way."""
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of {type(gradient).__name__}")
    if shape_of(gradient) != shape_of(tensor):
        raise refused(
            "Tensor.grad",
            f"of shape {tuple(shape_of(tensor))} was given a gradient of shape {tuple(shape_of(gradient))}",
        )
    if isinstance(gradient, CutTensor) and gradient.cut == tensor.cut:
        return local_of(gradient)
    return cut_tensors.enter(gradient.detach(), tensor.devices, tensor.cut, ()).clone()
