"""First values of variables that were made on ``meta``: each process draws all of them and keeps its piece.

A module too large for one process is made in the scope with ``torch.device("meta")``: it has shapes and no memory. When
the scope closes, its ``reset_parameters()`` is called, which knows shapes (and so the fan in) of the whole. What it
writes to a parameter is made a few rows at a time, in the order of the whole, so that the numbers are those that one
process would draw, and no process ever holds more than its piece and a few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.dtensor.axes import Cut
from torchstrat.sharding.dtensor.devices import LogicalDevices

_STEP_BYTES = 1 << 22
_BLOCK = 16
"""PyTorch draws normal numbers in blocks of so many: rows are drawn in multiples, and so are the same as in one go."""

_aten = torch.ops.aten
_DRAWS = {_aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default}
_EDITS = {
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.mul_.Scalar,
    _aten.add_.Scalar,
    _aten.mul_.Tensor,
    _aten.add_.Tensor,
    _aten.clamp_.default,
    _aten.erfinv_.default,
}
"""What changes elements one by one."""


class Place(NamedTuple):
    piece: torch.Tensor
    cut: Cut


def draw_first_values(module: nn.Module, places: dict[int, Place], devices: LogicalDevices) -> None:
    """Call ``module.reset_parameters()``. ``places``: ``id`` of its parameters on meta → where the values go.

    Raises `InvalidArgumentError` if there is no such method, `UnsupportedError` if it does what is not known in pieces.
    """
    reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        raise InvalidArgumentError(
            f"a {type(module).__name__} was made on meta and has no reset_parameters() to give its parameters values; "
            "write one, or make the module elsewhere."
        )
    drawing = _InPieces(places, devices)
    with drawing:
        reset()
    missing = [name for name, one in module._parameters.items() if id(one) in places.keys() - drawing.written]
    if missing:
        raise InvalidArgumentError(
            f"reset_parameters() of a {type(module).__name__} that was made on meta gave {', '.join(missing)} no value."
        )


class _InPieces(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks before it wraps `__torch_dispatch__` in something that imports its compiler: 75 MB."""
        return False

    def __init__(self, places: dict[int, Place], devices: LogicalDevices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places, self._devices = places, devices
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = self._places.get(id(args[0])) if args else None
        if place is None or func is _aten.detach.default:
            return func(*args, **kwargs)
        if func in _DRAWS:
            self._draw(func, args, kwargs, place)
        elif func in _EDITS:
            func(place.piece, *args[1:], **kwargs)
        else:
            raise UnsupportedError(
                f"{func} of a parameter that was made on meta and is to be cut over logical devices: only "
                "random and constant numbers are known there. Make the module without torch.device('meta')."
            )
        self.written.add(id(args[0]))
        return args[0]

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Place) -> None:
        whole, axes = args[0], self._devices.axes
        if whole.ndim == 0:
            func(place.piece, *args[1:], **kwargs)
            return
        rows_axes = axes.axes_of(place.cut, 0)
        first = axes.index_along(self._devices.own, rows_axes) * place.piece.shape[0]
        others = tuple(None if dim == 0 else dim for dim in place.cut)
        steps = list(_steps(whole.shape, place.piece.element_size()))
        most = max((stop - start for start, stop in steps), default=0)
        rows = torch.empty((most, *whole.shape[1:]), dtype=place.piece.dtype, device=place.piece.device)
        for start, stop in steps:
            drawn = rows[: stop - start]
            func(drawn, *args[1:], **kwargs)
            low, high = max(start, first), min(stop, first + place.piece.shape[0])
            if low < high:
                own = self._devices.own_piece(drawn[low - start : high - start], others)
                place.piece[low - first : high - first].copy_(own)


def _steps(shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of whole blocks of elements but the last, which is never the smallest."""
    rows, inner = shape[0], math.prod(shape[1:])
    unit = _BLOCK // math.gcd(_BLOCK, max(1, inner))
    step = max(unit, _STEP_BYTES // max(1, inner * item_bytes) // unit * unit)
    start = 0
    while start < rows:
        stop = rows if rows - start < 2 * step else start + step
        yield start, stop
        start = stop
