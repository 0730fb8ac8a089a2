"""Writing: to variables that are cut, as averages of weights do it, and to their gradients.

Nothing else may be written to: a piece may be a view of a tensor that the program has whole, and of that each process
would change another part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core.operands import tensors_in
from torchstrat.sharding.dtensor._torch_dtensor import local_of
from torchstrat.sharding.dtensor.cut_tensor import CutTensor, requires_grad
from torchstrat.sharding.dtensor.operators.elementwise import BINARY, UNARY, aligned
from torchstrat.sharding.dtensor.operators.rules import Call, functions_called, rule, shape_of

_DATA: Any = torch.Tensor.data
_ELEMENTWISE = [one for name in (*UNARY, *BINARY, "copy", "zero", "fill") for one in functions_called(f"{name}_")]
_OPERATORS = [getattr(torch.Tensor, f"__i{name}__") for name in ("add", "sub", "mul", "truediv", "pow")]
_OF_LISTS = {
    getattr(torch, f"_foreach_{name}_"): getattr(torch.Tensor, f"{name}_")
    for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "neg", "abs", "sqrt", "pow", "copy", "zero")
    if hasattr(torch, f"_foreach_{name}_")
}


@rule(*_ELEMENTWISE, *_OPERATORS)
def in_place(call: Call, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The same function on the piece, and on pieces of the other arguments that go with it."""
    _require_writable(call, target, [*tensors_in((args, kwargs))])
    assert isinstance(target, CutTensor)
    shape, cut = shape_of(target), target._cut

    def piece(value: Any) -> Any:
        return aligned(call, value, shape, cut) if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        call.function(local_of(target), *map(piece, args), **{name: piece(one) for name, one in kwargs.items()})
    return target


def _require_writable(call: Call, target: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    if not isinstance(target, CutTensor):
        raise call.refused("would write it to one that is not; use what replicate_to_logical_devices returns")
    if not (target._is_gradient or target._is_value):
        raise call.refused("would change it in place; write the result to a new tensor")
    if torch.is_grad_enabled() and any(requires_grad(one) for one in (target, *others)):
        raise call.refused("would change a variable as a part of what is differentiated; do it under torch.no_grad()")


@rule(*_OF_LISTS)
def in_place_of_lists(call: Call, targets: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``args``: lists as long as ``targets``, or one number or tensor for all of them."""
    function = _OF_LISTS[call.function]
    of_one = Call(function, call.devices)
    for index, target in enumerate(targets):
        own = [one[index] if isinstance(one, list | tuple) else one for one in args]
        if any(isinstance(one, CutTensor) for one in (target, *own)):
            in_place(of_one, target, *own, **kwargs)
        else:
            function(target, *own, **kwargs)
    return list(targets)


@rule(_DATA.__set__)
def set_data(call: Call, target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        in_place(Call(torch.Tensor.copy_, call.devices), target, value)
