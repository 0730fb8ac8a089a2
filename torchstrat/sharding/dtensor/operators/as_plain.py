"""What plain PyTorch says of a call by the shapes of the whole tensors, asked before a piece is computed with.

A rule sees pieces, and an operand that happens to have the shape of a piece, or that broadcasts to one, would be taken
where plain PyTorch raises. So the first call of every kind (function, shapes, dtypes, options) is made on tensors of
the whole shapes without values, which raises what plain PyTorch raises; and what the rule returns has to have the
shapes and dtypes that this returned.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from torchstrat.core._torch_private import DisableTorchFunction, is_any_autocast_enabled
from torchstrat.core.operands import tensors_in
from torchstrat.sharding.dtensor._torch_dtensor import WithoutSubclasses

_MOST = 1 << 14
_known: set[Hashable] = set()
"""Kinds of calls that plain PyTorch accepts."""

Outline = list[tuple[torch.Size, torch.dtype | None]]
"""Shapes and dtypes of the tensors that a call returns; None: whatever autocast makes of it."""


class AsPlain:
    """One call, before a rule is asked."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._expected: Outline | None = None
        self._kind: Hashable = None
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            return  # nothing that could not fit
        with WithoutSubclasses():
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

    def check(self, result: Any) -> str:
        """What is wrong with what the rule returned; empty if nothing is."""
        if self._expected is None:
            return ""
        with WithoutSubclasses():
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


def _kind_of(value: Any) -> Hashable:
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


def _on_meta(value: Any, is_autocast: bool) -> Any:
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


def _outline(result: Any, is_autocast: bool) -> Outline:
    return [
        (one.shape, None if is_autocast and one.dtype.is_floating_point else one.dtype) for one in tensors_in(result)
    ]
