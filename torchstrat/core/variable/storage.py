"""What a `Variable` is made of: cells that hold one tensor each, and the edits that assignments make to them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torchstrat.core.devices import torch_device
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.values import Mirrored


class VariablePlacement(enum.Enum):
    """How many components a strategy gives its variables."""

    ONE = "one"
    """An ordinary variable: there is one replica."""
    CENTRAL = "central"
    """One component for all replicas of the process, on the parameter device."""
    MIRRORED = "mirrored"
    """A component per replica, on the replica's device."""


class Edit(enum.Enum):
    """An assignment, by the name of the method that makes it."""

    ASSIGN = "assign"
    ADD = "assign_add"
    SUB = "assign_sub"
    SCATTER_ADD = "scatter_add"

    def in_place(self, current: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self is Edit.ASSIGN:
            return current.copy_(value) if current.shape == value.shape else value.clone()
        return current.sub_(value) if self is Edit.SUB else current.add_(value)

    def anew(self, current: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self is Edit.ASSIGN:
            return value.clone()
        return current - value if self is Edit.SUB else current + value


class Storage(Protocol):
    """Where one component is kept. `Cell` keeps it in this process; parameter servers have their own."""

    @property
    def device(self) -> str:
        """Where the component lives, for `StrategyExtended.device_of`."""

    @property
    def value_device(self) -> torch.device:
        """Where a value that is read here lives."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def lend(self) -> torch.Tensor:
        """The current value to compute with; whoever gets it must not write to it."""

    def copy(self) -> torch.Tensor:
        """The current value as a tensor of the caller's own."""

    def write(self, edit: Edit, value: torch.Tensor) -> None:
        """``value``: of this component's dtype and, but for broadcasting in sums, of its shape; any device."""


class Cell:
    """One component: a tensor and the canonical device it lives on.

    A tensor that was lent out may be part of somebody's autograd graph or have views. The next edit leaves it as it is
    and makes a new one; as long as nothing was lent, edits are made in place.
    """

    __slots__ = ("_lent", "_place", "_tensor", "device")

    def __init__(self, tensor: torch.Tensor, device: str, place: torch.device | None = None) -> None:
        """``place``: what PyTorch knows ``device`` as, where that does not follow from the name."""
        self._place = torch_device(device) if place is None else place
        with torch.inference_mode(False), torch.no_grad():
            self._tensor = tensor.detach().to(self._place, copy=True)
        self._lent = False
        self.device = device

    def lend(self) -> torch.Tensor:
        self._lent = True
        return self._tensor

    @property
    def value_device(self) -> torch.device:
        return self._place

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def copy(self) -> torch.Tensor:
        return self._tensor.clone()

    def write(self, edit: Edit, value: torch.Tensor) -> None:
        # Inference mode would make tensors that no later code outside of it may edit.
        with torch.inference_mode(False), torch.no_grad():
            value = value.to(self._tensor.device)
            self._tensor = edit.anew(self._tensor, value) if self._lent else edit.in_place(self._tensor, value)
        self._lent = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Cell:
        return Cell(self._tensor, self.device, self._place)


def is_python_value(value: Any) -> bool:
    """A number, or a nested list of numbers: no tensor and no array, and so the same wherever it is written."""
    return isinstance(value, bool | int | float | complex | list | tuple)


def to_tensor(value: Any, dtype: torch.dtype | None, call: str) -> torch.Tensor:
    """``value`` as a tensor of ``dtype`` (None: its own), detached, on its own device.

    Tensors must have the dtype already. Python numbers, nested lists of them and arrays are converted where that keeps
    their kind: an integer may become floating, a floating number never an integer.
    """
    current = getattr(value, "_lend", None)
    if current is not None:
        value = current()
    if isinstance(value, Mirrored):
        value = value.values[0]
    if isinstance(value, torch.Tensor):
        if dtype is not None and value.dtype != dtype:
            raise InvalidArgumentError(
                f"{call} got a tensor of {value.dtype} for a variable of {dtype}; convert it with .to({dtype}) first."
            )
        return value.detach()
    tensor = _from_python(value, call)
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if not torch.can_cast(tensor.dtype, dtype):
        raise WrongTypeError(f"{call} got {value!r:.80}, which a variable of {dtype} cannot hold; use a wider dtype.")
    # From the value again: a Python float is more exact than the default dtype it was first read as.
    return _from_python(value, call, dtype)


def _from_python(value: Any, call: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value)).to(dtype)
    if is_python_value(value):
        try:
            return torch.tensor(value, dtype=dtype, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(f"{call} cannot make a tensor of {value!r:.80}: {error}.") from None
    raise WrongTypeError(f"{call} needs a tensor, an array or numbers; got {type(value).__name__} {value!r:.80}.")


DeclaredShape = tuple[int | None, ...] | None


def parse_shape(shape: Sequence[int | None] | None, initial: torch.Tensor) -> DeclaredShape:
    """The shape that all values of a variable have to fit; None entries fit any size. It must fit the initial value."""
    if shape is None:
        return tuple(initial.shape)
    declared = tuple(None if size is None else int(size) for size in shape)
    if not fits(tuple(initial.shape), declared):
        raise InvalidArgumentError(
            f"Variable got shape={declared} and an initial value of shape {tuple(initial.shape)}; these must agree."
        )
    return declared


def fits(shape: tuple[int, ...], declared: DeclaredShape) -> bool:
    if declared is None:
        return True
    return len(shape) == len(declared) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, declared, strict=True)
    )


def check_edit(edit: Edit, value: torch.Tensor, shape: torch.Size, declared: DeclaredShape) -> None:
    """Whether ``value`` can be assigned to, or added to, a component of ``shape``."""
    given = tuple(value.shape)
    if edit is Edit.SCATTER_ADD:
        if value.layout != torch.sparse_coo:
            raise WrongTypeError(
                f"scatter_add needs a sparse COO tensor of the variable's shape; got layout {value.layout}. "
                "Build one with torch.sparse_coo_tensor(indices, values, shape), or use assign_add."
            )
        if given != tuple(shape):
            raise InvalidArgumentError(f"scatter_add got shape {given} for a variable of shape {tuple(shape)}.")
        return
    if value.layout != torch.strided:
        raise WrongTypeError(f"{edit.value} needs a dense tensor; got layout {value.layout}. Use scatter_add.")
    if edit is Edit.ASSIGN:
        if not fits(given, declared):
            raise InvalidArgumentError(f"assign got shape {given} for a variable of shape {declared}.")
        return
    try:
        broadcast = torch.broadcast_shapes(given, shape)
    except RuntimeError:
        broadcast = None
    if broadcast != shape:
        raise InvalidArgumentError(
            f"{edit.value} got shape {given}, which does not broadcast to the variable's shape {tuple(shape)}."
        )
