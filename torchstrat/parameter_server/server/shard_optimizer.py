"""The user's own optimizer class, stepping tensors that are handed to it, or a few rows of a table.

An optimizer is sent to the servers pickled by value where the class lives in the user's script, so that servers need
not import it. Not the object as it is: ``Optimizer.__getstate__`` leaves out what a class of the user's keeps beside
groups and defaults.

The optimizer object itself stays on the coordinator. A server gets its class, its attributes and its hyperparameters,
and makes a stand-in of the same class for each step, with ``param_groups`` and ``state`` of that step alone: so pushes
to different variables step at the same time, and the hyperparameters are those in force where the step was called.

Step hooks (`Optimizer.register_step_pre_hook` and the like) run where the user calls ``optimizer.step()``, on the
worker, and not again on the servers; an ``optimizer.step`` that a learning rate scheduler has wrapped is the worker's
too.

Of a table, rows that a step does not touch stay as they are, in every respect. The rows and the rows of their state
are gathered, the optimizer steps on them as if they were a whole parameter, and the result is copied back: the cost
follows the number of rows, not the size of the table. Weight decay, momentum and running averages of the other rows
wait until they are touched, which is SparseAdam's rule. State that does not go by rows (``step``, NAdam's product of
momenta) is one per shard and advances at every step, also at one without any row.

The first step of a shard lets the optimizer itself make the state of the rows it touches. What the other rows' state
is, before their first touch, is found out on small stand-ins of the table; see `learn_state`.
"""

from __future__ import annotations

import collections
import copy
import copyreg
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.checkpoint import optimizer_item
from torchstrat.core._torch_private import optimizers_without_compiler, step_without_compiler
from torchstrat.core.errors import InvalidArgumentError, NotSendableError, UnsupportedError
from torchstrat.core.optimizers import (
    Gradients,
    Kind,
    Tier,
    hyperparameters,
    is_listed,
    kind_of,
    stand_in_of,
    step_in_blocks,
)
from torchstrat.parameter_server.messages import SetAttributes, StateOfShard
from torchstrat.parameter_server.variables.attributes import put
from torchstrat.parameter_server.variables.edits import put_rows

Options = Mapping[str, Any]
"""The hyperparameters of a parameter group: everything in it but ``params``."""

Parts = tuple[type[Optimizer], dict[str, object], tuple[dict[str, object], ...]]
"""Of an optimizer without parameters and state: its class, its attributes, the hyperparameters of its groups."""

_NOT_SENT = {"state", "param_groups", "step"}
"""``step`` as an attribute of the object is a wrapper (of a scheduler, of a scope), not the class's own method."""


def check_supported(cls: type[Optimizer], options: Sequence[Options]) -> None:
    """Raise `UnsupportedError` for what cannot be stepped on a server, whatever the gradients."""
    if _needs_closure(cls):
        raise UnsupportedError(
            f"{cls.__name__}.step needs a closure that evaluates the model, and parameter servers have no model: they "
            "only get gradients. Use an optimizer whose step() takes none, or a synchronous strategy such as "
            "MirroredStrategy."
        )
    for number, group in enumerate(options):
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise UnsupportedError(
                    f"{cls.__name__} has {flag}=True in parameter group {number}; its steps are made on parameter "
                    f"servers, where nothing is captured or differentiated. Use {flag}=False."
                )


def _look_for_closure(cls: type[Optimizer]) -> bool:
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# Every push asks, and looking takes 0.1 ms.
_needs_closure: Callable[[object], bool] = functools.lru_cache(maxsize=256)(_look_for_closure)


def pack_optimizer(optimizer: Optimizer, kind: Kind | None = None) -> bytes:
    """What `NewOptimizer.blob` carries. ``kind``: None is what is listed of its class.

    Before all else the kind itself, for `unpack_kind`. Of an optimizer that may be stepped in parts: class, attributes
    and hyperparameters; no parameters, no state, no hooks. Of any other the object itself, also without hooks; its
    parameters are references.

    Raises `UnsupportedError` for what cannot be stepped on a server, and `NotSendableError` where an attribute cannot
    be pickled, or one of an optimizer in parts holds parameters.
    """
    # cloudpickle is loaded when it is needed
    from torchstrat.parameter_server.serialization.pickler import ValuePickler

    cls, attributes, options = parts_of(optimizer)
    check_supported(cls, options)
    kind = kind or kind_of(optimizer)
    is_whole = kind.tier is Tier.ALL
    own = dict(_places_of(optimizer))
    tensors = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}

    class OptimizerPickler(ValuePickler):
        def persistent_id(self, found: object) -> tuple[object, ...] | None:
            if type(found) is int and found in own:
                self._require_whole("ids of parameters")
                return "id", tensors[found]
            if not isinstance(found, torch.Tensor):
                return None
            if id(found) in own:
                self._require_whole("parameters")
                return (*own[id(found)], found.requires_grad)
            if found.is_meta:
                raise NotSendableError(
                    f"{cls.__name__} keeps a tensor of shape {tuple(found.shape)} on the meta device, which it has "
                    "made of a parameter without values. Make its parameters on the CPU."
                )
            return None

        def _require_whole(self, what: str) -> None:
            if not is_whole:
                raise NotSendableError(
                    f"{cls.__name__} keeps {what} in an attribute of its own, beside param_groups. On "
                    "parameter servers an optimizer only sees the shards that a step changes; look parameters up "
                    "in self.param_groups, or leave the class out of elementwise_optimizers."
                )

        def reducer_override(self, value: object) -> object:
            return _reduce_whole(value) if isinstance(value, Optimizer) else super().reducer_override(value)

    def pickled(value: object) -> bytes:
        buffer = io.BytesIO()
        OptimizerPickler(buffer, protocol=5).dump(value)
        return buffer.getvalue()

    try:
        tags = {} if is_listed(cls) else _tags_of(optimizer)
        packed = pickled((optimizer, tags) if is_whole else (cls, attributes, options, tags))
        return pickle.dumps((kind, packed))
    except NotSendableError:
        raise
    except Exception as error:
        named = {f"self.{name}": value for name, value in attributes.items()}
        named |= {f"self.param_groups[{n}]": group for n, group in enumerate(options)}
        culprit = next((name for name, value in named.items() if not _succeeds(pickled, value)), "the class itself")
        raise NotSendableError(
            f"the optimizer {cls.__name__} cannot be sent to the parameter servers: {culprit} cannot be pickled "
            f"({error}). Keep such objects out of the optimizer, or make them where they are used."
        ) from error


def unpack_kind(blob: bytes) -> tuple[Kind, bytes]:
    """The kind, and the optimizer's own pickle."""
    kind, packed = pickle.loads(blob)
    return kind, packed


def _places_of(optimizer: Optimizer) -> Iterator[tuple[int, tuple[int, int]]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            yield id(tensor), (number, place)


def _tags_of(optimizer: Optimizer) -> dict[tuple[int, int], dict[str, object]]:
    """What the program has set on parameters, by their places: optimizers of some packages look at it in a step."""
    return {
        (number, place): dict(vars(tensor))
        for number, group in enumerate(optimizer.param_groups)
        for place, tensor in enumerate(group["params"])
        if vars(tensor)
    }


def _reduce_whole(optimizer: Optimizer) -> object:
    """With everything that is set on it, also of one that another one holds; without hooks."""
    attributes = {name: value for name, value in _without_hooks(optimizer).items() if name != "step"}
    state: Any = attributes.get("state")
    if getattr(state, "keeper", None) is not None:  # the servers have it, or a checkpoint that is to be restored
        others = {key: value for key, value in dict.items(state) if not isinstance(key, torch.Tensor)}
        attributes["state"] = collections.defaultdict(dict, others)
    return copyreg.__newobj__, (type(optimizer),), attributes, None, None, _set_attributes  # type: ignore[attr-defined]


def _set_attributes(optimizer: Optimizer, attributes: dict[str, object]) -> None:
    vars(optimizer).update(attributes)


def _without_hooks(optimizer: Optimizer) -> dict[str, object]:
    return {
        name: collections.OrderedDict() if name.endswith("_hooks") else value for name, value in vars(optimizer).items()
    }


def _succeeds(act: Callable[[object], object], value: object) -> bool:
    try:
        act(value)
    except Exception:
        return False
    return True


def parts_of(optimizer: Optimizer) -> Parts:
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentError(f"need a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    attributes = {name: value for name, value in _without_hooks(optimizer).items() if name not in _NOT_SENT}
    options = tuple(map(hyperparameters, optimizer.param_groups))
    return type(optimizer), attributes, options


@contextmanager
def unpickling() -> Iterator[None]:
    """Around the reading of what `pack_optimizer` made."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"a server cannot import {error.name!r}, where the class of an optimizer is defined. Install it there, "
            f"or have it sent: cloudpickle.register_pickle_by_value({error.name}) on the coordinator."
        ) from error


class ShardOptimizer:
    """An optimizer class with its attributes, and the hyperparameters its groups had when it was packed.

    Immutable, hence shared by threads.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        attributes: Mapping[str, Any],
        options: Sequence[Options],
        *,
        needs_sparse: bool = False,
        tags: Mapping[tuple[int, int], Mapping[str, object]] | None = None,
    ) -> None:
        self.cls = cls
        self.options = tuple(options)
        self.attributes = dict(attributes)
        check_supported(cls, self.options)
        self._constructor_makes_state = self._find_whether_constructor_makes_state()
        self._step = step_without_compiler(cls.step)  # hooks run on the worker
        self.has_returned = False  # anything, by a step
        self.needs_sparse = needs_sparse
        """Whether it steps on sparse gradients alone, as SparseAdam does."""
        self.tags = tags or {}
        """What the program has set on parameters, by group and place in it."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> ShardOptimizer:
        """From an optimizer in this process, which stays as it is."""
        return cls(*parts_of(optimizer), needs_sparse=kind_of(optimizer).gradients is Gradients.SPARSE)

    @classmethod
    def from_bytes(cls, packed: bytes, *, needs_sparse: bool = False) -> ShardOptimizer:
        """From what `pack_optimizer` made, behind the kind. The bytes must come from a peer that is trusted: they are
        unpickled."""
        with unpickling():
            *parts, tags = pickle.loads(packed)
        return cls(*parts, needs_sparse=needs_sparse, tags=tags)

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def initial_state(self, options: Options, parameter: torch.Tensor) -> StateOfShard:
        """The state a parameter has before its first step: empty, or what the class's constructor puts there."""
        if not self._constructor_makes_state:
            return {}
        state: StateOfShard = self._construct(options, parameter).state.get(parameter, {})
        return state

    def step(
        self,
        options: Sequence[Options],
        parameters: Sequence[Sequence[torch.Tensor]],
        states: Mapping[torch.Tensor, StateOfShard],
        attributes: SetAttributes | None = None,
    ) -> dict[torch.Tensor, StateOfShard]:
        """One step of ``parameters`` (leaves with ``.grad``, a list per group), in place.

        ``states``: what is known of each before; its dictionaries are used as they are. ``attributes``: what the
        program has set on it since it was packed. Returns the states after the
        step, for the parameters that have any. If the optimizer raises, parameters and states may be half-stepped.
        """
        stand_in = self.stand_in(options, parameters, states)
        if attributes:
            vars(stand_in).update({name: value for name, (_, value) in put(stand_in, attributes)})
        if not step_in_blocks(stand_in, self.call_step):
            self.call_step(stand_in)
        state = stand_in.state
        return {parameter: state[parameter] for group in parameters for parameter in group if parameter in state}

    def call_step(self, stand_in: Optimizer) -> None:
        """Its ``step``, without importing torch's compiler for that."""
        with torch.set_grad_enabled(bool(self.attributes.get("defaults", {}).get("differentiable"))):
            if self._step(stand_in) is not None:
                self.has_returned = True

    def stand_in(
        self,
        options: Sequence[Options],
        parameters: Sequence[Sequence[torch.Tensor]],
        states: Mapping[torch.Tensor, StateOfShard],
    ) -> Optimizer:
        """An optimizer of the class, over these parameters and states. Its constructor does not run."""
        state: dict[torch.Tensor, StateOfShard] = collections.defaultdict(dict)
        state.update(states)
        groups = [{**own, "params": list(tensors)} for own, tensors in zip(options, parameters, strict=True)]
        return stand_in_of(self.cls, self.attributes, groups, state)

    def _find_whether_constructor_makes_state(self) -> bool:
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        try:
            return bool(self._construct(self.options[0], parameter).state)
        except Exception:  # its constructor needs more than its defaults say: then it is taken to make no state
            return False

    def _construct(self, options: Options, parameter: torch.Tensor) -> Optimizer:
        """Built anew by the class's constructor, from what it keeps in ``defaults``."""
        accepted = inspect.signature(self.cls.__init__).parameters
        defaults = {name: value for name, value in self.attributes.get("defaults", {}).items() if name in accepted}
        with optimizers_without_compiler():
            return self.cls([{**options, "params": [parameter]}], **defaults)


def sparse_rows(ids: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    """A coalesced sparse gradient. ``ids``: ``(n,)``, sorted and unique; ``values``: ``(n, …)``."""
    return torch.sparse_coo_tensor(
        ids.unsqueeze(0), values, (rows, *values.shape[1:]), is_coalesced=True, check_invariants=False
    )


@dataclass(frozen=True)
class RowState:
    """An entry of an optimizer's state with one row per row of the table.

    ``fill``: what every element of an untouched row is; None where it is a copy of the row of the table itself.
    ``shape`` is a row's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | complex | None

    def bytes_for(self, rows: int) -> int:
        return rows * torch.Size(self.shape).numel() * self.dtype.itemsize

    def allocate(self, table: torch.Tensor) -> torch.Tensor:
        if self.fill is None:
            return table.detach().clone()
        shape = (table.shape[0], *self.shape)
        if self.fill == 0:
            return torch.zeros(shape, dtype=self.dtype)  # pages that no row has touched take no memory
        return torch.full(shape, self.fill, dtype=self.dtype)


def in_own_memory(value: object) -> object:
    """A part of a state whose tensors nobody else has: those that were sent are lent, and those that are here change in
    place. Also in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is list or type(value) is tuple:
        return type(value)(map(in_own_memory, value))
    return {key: in_own_memory(one) for key, one in value.items()} if type(value) is dict else copy.deepcopy(value)


def gather_state(state: StateOfShard, ids: torch.Tensor, row_state: Mapping[str, RowState]) -> StateOfShard:
    """The state of these rows: what goes by rows is copied out, the rest is the shard's own."""
    return {
        name: value.index_select(0, ids) if name in row_state and isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def scatter_state(
    state: StateOfShard,
    of_rows: StateOfShard,
    ids: torch.Tensor,
    table: torch.Tensor,
    row_state: Mapping[str, RowState],
) -> None:
    """Put the state of these rows back, in place. ``table``: the whole shard, before this step where it matters."""
    for name, value in of_rows.items():
        entry = row_state.get(name)
        if entry is None or not isinstance(value, torch.Tensor):
            state[name] = value
            continue
        if not isinstance(state.get(name), torch.Tensor):
            state[name] = entry.allocate(table)
        put_rows(state[name], ids, value)
    for name in [name for name in state if name not in of_rows]:
        del state[name]


def learn_state(optimizer: ShardOptimizer, options: Options, group: int, like: torch.Tensor) -> dict[str, RowState]:
    """Which entries of the state go by rows, and what they are for a row that was never touched.

    Three steps on stand-ins of a table like ``like``: of three rows of zeros without gradient, and twice of five random
    rows with different gradients; what is in the state the moment an entry is first written is kept.

    - An entry that has three rows for the first and five for the others goes by rows.
    - If both gradients give the same, it was made before any arithmetic (``zeros_like``, ``full_like``, a copy of the
      parameter), and that is its initial value.
    - Otherwise it came out of the arithmetic (SGD's first momentum is the gradient): then zeros and no gradient tell.

    Raises `UnsupportedError` where neither gives one number, or a copy of the parameter.
    """
    generator = torch.Generator().manual_seed(0)
    shape = like.shape[1:]
    random, first, second = (
        torch.rand((5, *shape), generator=generator, dtype=torch.float64).add_(0.5).to(like.dtype) for _ in range(3)
    )
    still = like.new_zeros((3, *shape))
    zeros = _first_values(optimizer, options, group, still, still)
    one = _first_values(optimizer, options, group, random, first)
    other = _first_values(optimizer, options, group, random, second)
    learned = {}
    for name, value in one.items():
        quiet = zeros.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(quiet, torch.Tensor) and value.dim()):
            continue
        if value.shape[0] != 5 or quiet.shape[0] != 3 or value.shape[1:] != quiet.shape[1:]:
            continue
        if value.shape == random.shape and torch.equal(value, random) and torch.equal(other[name], random):
            fill = None
        else:
            fill = _the_one_value(value if torch.equal(value, other[name]) else quiet, optimizer, name)
        learned[name] = RowState(tuple(value.shape[1:]), value.dtype, fill)
    return learned


def _untouched_rows(optimizer: Optimizer, group: int, rows: torch.Tensor) -> dict[str, object]:
    shard_optimizer = ShardOptimizer.of(optimizer)
    learned = learn_state(shard_optimizer, shard_optimizer.options[group], group, rows)
    return {name: entry.allocate(rows) for name, entry in learned.items()}


optimizer_item.untouched_rows = _untouched_rows


def _the_one_value(tensor: torch.Tensor, optimizer: ShardOptimizer, name: str) -> float | complex:
    if tensor.numel() == 0:
        return 0.0
    value = tensor.flatten()[0]
    if not bool((tensor == value).all()):
        raise UnsupportedError(
            f"{optimizer.name} starts state[{name!r}] with values that are neither one number nor a copy of the "
            "parameter, so what it would be for rows that no step has touched cannot be told. Use rows_only=False for "
            "this optimizer, which applies its dense rule."
        )
    number: float | complex = value.item()
    return number


def _first_values(
    optimizer: ShardOptimizer, options: Options, group: int, values: torch.Tensor, gradient: torch.Tensor
) -> StateOfShard:
    """The entries of the state as they were when a step on a fresh parameter first wrote them."""
    parameter = torch.nn.Parameter(values.clone())
    parameter.grad = gradient.clone()
    if optimizer.needs_sparse:
        parameter.grad = sparse_rows(torch.arange(len(gradient)), gradient.clone(), len(gradient))
    state = _Remembering(optimizer.initial_state(options, parameter))
    groups: list[list[torch.Tensor]] = [[] for _ in optimizer.options]
    groups[group] = [parameter]
    every = [options if number == group else own for number, own in enumerate(optimizer.options)]
    after = optimizer.step(every, groups, {parameter: state})
    return {**after.get(parameter, {}), **state.first}


class _Remembering(dict[str, object]):
    """A state that keeps a copy of what each entry was first set to, before the step goes on to change it in place."""

    def __init__(self, initial: Mapping[str, object]) -> None:
        super().__init__(initial)
        self.first: StateOfShard = {}
        for name, value in initial.items():
            self._remember(name, value)

    def __setitem__(self, name: str, value: object) -> None:
        self._remember(name, value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: object = None) -> object:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: object, **kwargs: object) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def _remember(self, name: str, value: object) -> None:
        if name not in self.first:
            self.first[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
