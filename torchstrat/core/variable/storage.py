"""What a `Variable` is made of: its kind, its first value, checked and the same on every process, the cells that hold
one tensor each, the edits that assignments make to them, and what the values that replicas assign become.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from torchstrat.core import reduction
from torchstrat.core._torch_private import sparse_count, sparse_indices, sparse_values
from torchstrat.core.devices import canonical, torch_device
from torchstrat.core.engine import ReplicaEngine
from torchstrat.core.errors import InvalidArgumentError, VariableKindError, WrongTypeError
from torchstrat.core.reduction import ReduceOp, VariableAggregation, VariableSynchronization
from torchstrat.core.values import Mirrored, PerReplica
from torchstrat.core.variable.tensor_like import open_tensor


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

    def __deepcopy__(self, memo: dict[int, object]) -> Cell:
        return Cell(self._tensor, self.device, self._place)


class VariableHome:
    """Where the variables of a strategy live: here, in this process, on ``devices``. Others override what differs."""

    is_worker = False
    """Whether another process makes the variables, and functions of this one use them."""

    def __init__(self, placement: VariablePlacement, devices: tuple[str, ...]) -> None:
        self.placement, self.devices = placement, devices
        self.is_closed = False

    @property
    def places(self) -> str:
        """Who holds the variables, for people."""
        return ", ".join(self.devices)

    @property
    def communication(self) -> str | None:
        """How variables are reached, for people; None: as replicas talk, see `ReplicaEngine.communication`."""
        return None

    def make_storage(self, initial: torch.Tensor, device: str, name: str) -> Storage:
        """Where a component of a new `Variable` is kept."""
        return Cell(initial, device)

    def make_sharded(self, initial_value: object, name: object, shape: object, dtype: object, **kind: object) -> object:
        """What to make instead of a `Variable`; None where variables are not split.

        ``kind``: the aggregation and the synchronization."""
        return None

    def made(self, variable: object) -> None:
        """A `Variable` is complete."""

    def place_of(self, variable: object) -> str | None:
        """Where a parameter lives, for `StrategyExtended.device_of`; None where the replicas' devices tell."""
        return None

    def device_named(self, name: str | torch.device) -> str:
        """The canonical form of a destination."""
        return canonical(name)

    def colocating(self, variable: object) -> AbstractContextManager[None]:
        """Variables made in this block live with ``variable``; here all of a strategy's variables live together."""
        return nullcontext()

    def pull(self, modules: list[nn.Module] | None) -> None:
        """Bring values into this process's tensors; here the tensors are the variables."""

    def grow_rows(self, weight: torch.Tensor, rows: int, init: Any) -> bool:
        """Give a table more rows. False where tables do not grow."""
        return False

    def require_comparable(self) -> None:
        """Raise `UnsupportedError` where the replicas' copies of variables differ by design."""


def is_python_value(value: object) -> bool:
    """A number, or a nested list of numbers: no tensor and no array, and so the same wherever it is written."""
    return isinstance(value, bool | int | float | complex | list | tuple)


def to_tensor(value: object, dtype: torch.dtype | None, call: str) -> torch.Tensor:
    """``value`` as a tensor of ``dtype`` (None: its own), detached, on its own device.

    Tensors must have the dtype already. Python numbers, nested lists of them and arrays are converted where that keeps
    their kind: an integer may become floating, a floating number never an integer.
    """
    value = open_tensor(value)
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


def _from_python(value: object, call: str, dtype: torch.dtype | None = None) -> torch.Tensor:
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
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise WrongTypeError(
            f"Variable: shape must be a tuple of sizes, None for any; got {type(shape).__name__} {shape!r:.80}. Write "
            "shape=(3,)."
        )
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


class Given:
    """What one replica passed to an assignment, wrapped so that merging arguments does not open lists in it."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def merge_values(
    aggregation: VariableAggregation, edit: Edit, values: Sequence[object], dtype: torch.dtype
) -> torch.Tensor:
    """In one process, with every replica's value at hand: the one value to write.

    The very same object on all replicas, and equal Python numbers, are one value: a mean is that value, a sum is an
    error, because nobody can tell whether it is to count once or once per replica.
    """
    call, first = edit.value, values[0]
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return to_tensor(first, dtype, call)
    if len(values) == 1:
        return to_tensor(first, dtype, call)
    if all(value is first for value in values) or all(is_python_value(value) and value == first for value in values):
        if aggregation is VariableAggregation.SUM and not (isinstance(first, np.ndarray) and not np.any(first)):
            raise plain_number(call, first) if is_python_value(first) else same_everywhere(call, first)
        return to_tensor(first, dtype, call)
    if aggregation is VariableAggregation.SUM and is_python_value(first):
        raise plain_number(call, first)
    return _reduce(aggregation, call, [to_tensor(value, dtype, call) for value in values])


def exchange_values(
    engine: ReplicaEngine,
    aggregation: VariableAggregation,
    edit: Edit,
    value: object,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """With one replica per process: the same, by collectives that every replica of the run takes part in.

    Whether tensors are one object cannot be seen here, so they always count as each replica's own. ``device`` is the
    replica's: what collectives work on.
    """
    call = edit.value
    tensor = to_tensor(value, dtype, call).to(device)
    if is_python_value(value):
        if aggregation is VariableAggregation.SUM:
            raise plain_number(call, value)
        rows = engine.all_gather(tensor.unsqueeze(0), 0)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA or bool((rows == rows[0]).all()):
            return _detached(rows[0])
        return _reduce(aggregation, call, list(rows))
    if tensor.layout == torch.sparse_coo:
        return _exchange_sparse(engine, aggregation, call, tensor)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return _detached(engine.all_gather(tensor.unsqueeze(0), 0)[0])
    _require_mean_of_floats(aggregation, dtype, call)
    return _detached(engine.all_reduce(ReduceOp.from_variable_aggregation(aggregation), tensor))


def _exchange_sparse(
    engine: ReplicaEngine, aggregation: VariableAggregation, call: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Indices and values travel by themselves: gathers take parts of unequal length."""
    counts = engine.all_gather(torch.tensor([sparse_count(tensor)], device=tensor.device), 0)
    indices = engine.all_gather(sparse_indices(tensor), 1).split(counts.tolist(), dim=1)
    values = engine.all_gather(sparse_values(tensor), 0).split(counts.tolist())
    parts = [
        torch.sparse_coo_tensor(where, what, tensor.shape, check_invariants=False)
        for where, what in zip(indices, values, strict=True)
    ]
    return parts[0] if aggregation is VariableAggregation.ONLY_FIRST_REPLICA else _reduce(aggregation, call, parts)


def _reduce(aggregation: VariableAggregation, call: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    _require_mean_of_floats(aggregation, tensors[0].dtype, call)
    return reduction.combine(ReduceOp.from_variable_aggregation(aggregation), tensors, call)


def _detached(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value
    return tensor.detach()


def _require_mean_of_floats(aggregation: VariableAggregation, dtype: torch.dtype, call: str) -> None:
    if aggregation is VariableAggregation.MEAN:
        require_mean_of_floats(dtype, f"{call} of different values")


def require_mean_of_floats(dtype: torch.dtype, what: str) -> None:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgumentError(
            f"{what} with aggregation MEAN needs a floating dtype, because a mean of integers is none; the variable is "
            f"of {dtype}. Use a floating dtype, or aggregation SUM or ONLY_FIRST_REPLICA."
        )


def same_everywhere(call: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{call} got {value!r:.80} on every replica for a variable with aggregation SUM: adding up a value that is the "
        "same everywhere is ambiguous. Pass a tensor computed by each replica, assign outside of run, or use "
        "aggregation MEAN or ONLY_FIRST_REPLICA."
    )


def plain_number(call: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{call} got {value!r:.80}, a {type(value).__name__} of Python, for a variable with aggregation SUM: whether "
        "it is to count once or once per replica is ambiguous. Pass a tensor computed by each replica, assign outside "
        "of run, or use aggregation MEAN or ONLY_FIRST_REPLICA."
    )


def parse_aggregation(aggregation: object, name: str) -> VariableAggregation:
    return _member("aggregation", aggregation, name, VariableAggregation.NONE, VariableAggregation.SUM)


def parse_synchronization(synchronization: object, name: str) -> VariableSynchronization:
    auto, such_as = VariableSynchronization.AUTO, VariableSynchronization.ON_READ
    return _member("synchronization", synchronization, name, auto, such_as)


Member = TypeVar("Member", bound=enum.Enum)


def _member(argument: str, given: object, name: str, default: Member, such_as: Member) -> Member:
    if given is None:
        return default
    if not isinstance(given, type(default)):
        raise VariableKindError(
            f"Variable {name!r} got {argument}={given!r}; use a member of ts.{type(default).__name__}, such as "
            f"ts.{such_as}."
        )
    return given


def check_mirrored(
    name: str, aggregation: VariableAggregation, synchronization: VariableSynchronization, dtype: torch.dtype
) -> None:
    """What mirrored variables cannot be, whatever the number of replicas."""
    if synchronization is VariableSynchronization.NONE:
        raise InvalidArgumentError(
            f"Variable {name!r}: synchronization NONE has no meaning for mirrored variables; use AUTO, ON_WRITE or "
            "ON_READ."
        )
    if aggregation is VariableAggregation.MEAN:
        require_mean_of_floats(dtype, f"mirrored Variable {name!r}")


def initial_tensor(value: object, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """What the user gave as the first value, as a detached tensor of ``dtype`` (None: its own)."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise WrongTypeError(
            f"Variable {name!r}: dtype must be a torch.dtype; got {type(dtype).__name__} {dtype!r:.80}. Write "
            "dtype=torch.float32."
        )
    if value is None:
        raise InvalidArgumentError(
            f"Variable {name!r} needs an initial_value: a tensor, numbers, or a function that gives one."
        )
    if callable(value):
        value = value()
    if isinstance(value, PerReplica):
        raise WrongTypeError(f"Variable {name!r} got a PerReplica initial value; all replicas start from the same one.")
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise InvalidArgumentError(
            f"Variable {name!r} needs an initial value; got a tensor on meta, which has none. Make it on a device: "
            "torch.zeros(shape)."
        )
    if isinstance(value, torch.Tensor) and dtype is not None:
        value = value.detach().to(dtype)
    return to_tensor(value, dtype, "Variable")


def spans_processes(engine: ReplicaEngine) -> bool:
    return len(engine.local_replicas) < engine.num_replicas


def from_first_replica(engine: ReplicaEngine, local: torch.Tensor) -> torch.Tensor:
    """Replica 0's ``local`` on every process, outside of a replica's code: a sum to which the others bring -0.0,
    which changes no number, 0.0 and -0.0 neither, so that each process handles one copy, not one per replica. In one
    process ``local`` is replica 0's already."""
    if not spans_processes(engine):
        return local
    numbers = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    carrier = numbers.to(torch.uint8) if numbers.dtype == torch.bool else numbers
    replicas = engine.local_replicas
    share = carrier if replicas[0] == 0 else torch.full_like(carrier, -0.0)
    total: torch.Tensor = engine.reduce(ReduceOp.SUM, PerReplica((share,), replica_ids=replicas), None)
    return torch.view_as_complex(total.to(numbers)) if local.is_complex() else total.to(local)
