"""A variable as one server holds it: its shards, their state, and the lock that both are behind.

`HeldShards` is the one way to change any of it. While a checkpoint is being written, it first saves what the checkpoint
still needs; see `torchstrat.parameter_server.server.snapshot`.

What a server holds is described as plain data with a digest: a coordinator that is started again compares it with its
own. Changes that no optimizer makes are a variable's ``assign*`` and ``scatter_*``, and modules' buffers: `check_edit`
raises for whatever `apply_edit` could not do, so that a push is applied whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.tensor_bytes import is_same
from torchstrat.parameter_server.interface import AnswerMemory
from torchstrat.parameter_server.messages import EditOp, ShardEdit, ShardKey, StateOfShard, VariableSpec
from torchstrat.parameter_server.server.shard_optimizer import RowState
from torchstrat.parameter_server.server.snapshot import Cut, VariableCut
from torchstrat.parameter_server.variables import edits


def describe_variable(spec: VariableSpec, held_shards: Iterable[int]) -> dict[str, object]:
    """``held_shards``: the numbers of the shards on the server that the catalog is of."""
    return {
        "number": spec.number,
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": str(spec.dtype),
        "kind": spec.kind,
        "shards": [[shard.server, shard.start, shard.stop] for shard in spec.shards],
        "requires_grad": spec.requires_grad,
        "by_rows": spec.by_rows,
        "held": sorted(held_shards),
    }


def describe_optimizer(number: int, name: str, groups: Sequence[Sequence[int]], rows_only: bool) -> dict[str, object]:
    """``name``: module and class. Hyperparameters are no part of it: they come with every step."""
    return {"number": number, "class": name, "groups": [list(group) for group in groups], "rows_only": rows_only}


def make_catalog(variables: Iterable[dict[str, object]], optimizers: Iterable[dict[str, object]]) -> dict[str, object]:
    """``{"variables", "optimizers", "digest"}``; equal contents have equal digests, in any process."""
    content: dict[str, object] = {
        "variables": sorted(variables, key=_number_of),
        "optimizers": sorted(optimizers, key=_number_of),
    }
    packed = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "digest": hashlib.sha256(packed.encode()).hexdigest()}


def _number_of(described: Mapping[str, object]) -> int:
    number = described["number"]
    assert isinstance(number, int)
    return number


Gradient = tuple[torch.Tensor | None, torch.Tensor]
"""Of a shard: (ids ``(n,)`` int64, sorted and unique; rows ``(n, …)``), or (None, of the whole shard)."""


@dataclass(eq=False)
class HeldVariable:
    """``lock`` guards everything below it. ``shards``: number of the shard → its rows, on the CPU.

    ``states``: (optimizer, shard) → state. ``row_states``: which entries of that go by rows, once rows were stepped.
    ``gradients``: by shard, what functions have left of them for the next step. ``cut``: of a checkpoint that is being
    written. ``is_dropped``: it was given up while somebody waited for the lock.
    ``changes``: how often a value of it has changed. ``seen``: that number, by incarnation of the process that was
    given the values then.
    """

    spec: VariableSpec
    lock: threading.Lock = field(default_factory=threading.Lock)
    shards: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[int, int], StateOfShard] = field(default_factory=dict)
    row_states: dict[tuple[int, int], dict[str, RowState]] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    cut: VariableCut | None = None
    is_dropped: bool = False
    changes: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Of values and optimizer state."""
        tensors = [*self.shards.values(), *(v for state in self.states.values() for v in state.values())]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def name_of(self, shard: int) -> str:
        return self.spec.name if len(self.spec.shards) == 1 else f"{self.spec.name}/part_{shard}"


class HeldShards:
    """The variables a call has locked, looked up by shard. ``owner``: the server, for error messages; ``writer``: the
    incarnation of the worker on whose behalf they change, else empty.

    What `tensor` and `state` give is for reading. Who changes a shard or a state, in place or by another, says so
    before, by the method that does it or hands it out to be changed.
    """

    def __init__(self, variables: Mapping[int, HeldVariable], owner: str, writer: str = "") -> None:
        self._variables = variables
        self.owner = owner
        self.writer = writer

    def require(self, key: ShardKey) -> None:
        """Raise `InvalidArgumentError` where the shard is not here."""
        self._variable(key)

    def _variable(self, key: ShardKey) -> HeldVariable:
        variable = self._variables.get(key[0])
        if variable is None:
            raise InvalidArgumentError(
                f"{self.owner} holds no variable number {key[0]}. It holds what the coordinator has created on it "
                "since it started; after a restart, restore a checkpoint."
            )
        if key[1] not in variable.shards:
            raise InvalidArgumentError(
                f"{self.owner} holds no shard {key[1]} of {variable.spec.name!r}; it holds {sorted(variable.shards)}."
            )
        return variable

    # -- reading ----------------------------------------------------------------------------------------------------

    def tensor(self, key: ShardKey) -> torch.Tensor:
        return self._variable(key).shards[key[1]]

    def state(self, key: ShardKey, optimizer: int) -> Mapping[str, object] | None:
        """None before the first step."""
        return self._variable(key).states.get((optimizer, key[1]))

    def row_state(self, key: ShardKey, optimizer: int) -> dict[str, RowState] | None:
        """Which entries of the state go by rows; None until `learn_rows`."""
        return self._variable(key).row_states.get((optimizer, key[1]))

    def held_keys(self) -> Iterator[ShardKey]:
        for number, variable in self._variables.items():
            for shard in variable.shards:
                yield number, shard

    def states_of(self, optimizer: int) -> Iterator[tuple[ShardKey, StateOfShard]]:
        """Of the shards that have any."""
        for number, variable in self._variables.items():
            for (of, shard), state in variable.states.items():
                if of == optimizer:
                    yield (number, shard), state

    def is_parameter(self, key: ShardKey) -> bool:
        return self._variable(key).spec.kind == "parameter"

    def is_known(self, key: ShardKey) -> bool:
        """Whether the writer has seen the variable as it is."""
        variable = self._variable(key)
        return variable.seen.get(self.writer) == variable.changes

    def give(self, key: ShardKey, reader: str) -> torch.Tensor:
        """A shard for this process, which gets all shards of the variable that are here."""
        variable = self._variable(key)
        variable.seen[reader] = variable.changes
        return variable.shards[key[1]]

    @property
    def gradients(self) -> dict[ShardKey, Gradient]:
        """What functions have left for steps."""
        variables = self._variables.items()
        return {(n, shard): gradient for n, variable in variables for shard, gradient in variable.gradients.items()}

    @property
    def total_bytes(self) -> int:
        """Of values and optimizer state."""
        return sum(variable.total_bytes for variable in self._variables.values())

    def name(self, key: ShardKey) -> str:
        """For error messages: the variable and the part of it, and where it is."""
        return f"{self._variable(key).name_of(key[1])!r} on {self.owner}"

    # -- changing ---------------------------------------------------------------------------------------------------

    def add(self, key: ShardKey, value: torch.Tensor) -> None:
        """A shard that is new; no checkpoint that is being written knows it."""
        variable = self._variables[key[0]]
        assert key[1] not in variable.shards
        variable.shards[key[1]] = value

    def replace(self, key: ShardKey, value: torch.Tensor, states: Mapping[tuple[int, int], StateOfShard]) -> None:
        """Another tensor in the place of a shard, and others in that of entries of its state, by (optimizer, shard)."""
        variable = self._variable(key)
        if variable.cut is not None:
            variable.cut.replaced(key[1], states)
        variable.shards[key[1]] = value
        for slot, entries in states.items():
            variable.states[slot] = {**variable.states[slot], **entries}

    def changing(self, key: ShardKey, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A shard, whose ``rows`` (``(n,)`` int64; None: all) the caller is about to change in place."""
        variable = self._variable(key)
        if variable.cut is not None:
            variable.cut.before_value(key[1], rows)
        variable.changes += 1
        return variable.shards[key[1]]

    def changing_state(
        self, key: ShardKey, optimizer: int, rows: torch.Tensor | None = None, by_rows: Iterable[str] = ()
    ) -> StateOfShard | None:
        """The state of a shard, whose tensors the caller is about to change in place: of the entries ``by_rows`` only
        these ``rows``. The dictionary is the server's own. None before the first step."""
        variable, slot = self._variable(key), (optimizer, key[1])
        if variable.cut is not None:
            variable.cut.before_state(slot, rows, by_rows)
        return variable.states.get(slot)

    def put_state(self, key: ShardKey, optimizer: int, state: StateOfShard | None) -> None:
        """Another state in the place of the one that is there, whose tensors stay as they are. None: no state."""
        variable, slot = self._variable(key), (optimizer, key[1])
        if state is None:
            variable.states.pop(slot, None)
        else:
            variable.states[slot] = state

    def put_gradient(self, key: ShardKey, gradient: Gradient) -> None:
        self._variable(key).gradients[key[1]] = gradient

    def drop_gradients(self, numbers: Iterable[int]) -> None:
        """What functions have left of these variables for steps, as far as they are here."""
        for number in numbers:
            if number in self._variables:
                self._variables[number].gradients.clear()

    def learn_rows(self, key: ShardKey, optimizer: int, learned: Mapping[str, RowState]) -> None:
        self._variable(key).row_states.setdefault((optimizer, key[1]), {}).update(learned)

    def drop(self, numbers: Collection[int] | None = None) -> None:
        """These variables (None: all) are given up; who waits for their locks finds nothing any more. What is marked of
        them in a checkpoint that is being written stays as it is, for nobody changes it."""
        for number, variable in self._variables.items():
            if numbers is None or number in numbers:
                variable.is_dropped, variable.cut = True, None

    def drop_states(self, optimizers: Collection[int]) -> None:
        """The state that these optimizers have."""
        for variable in self._variables.values():
            for slot in {slot for slot in (*variable.states, *variable.row_states) if slot[0] in optimizers}:
                variable.states.pop(slot, None)
                variable.row_states.pop(slot, None)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def mark(self, cut: Cut) -> None:
        """Everything, as it is now, is in the cut."""
        for number, variable in self._variables.items():
            names = {shard: f"{variable.name_of(shard)!r} on {self.owner}" for shard in variable.shards}
            variable.cut = cut.variables[number] = VariableCut(cut, variable.shards, variable.states, names)

    def unmark(self, cut: Cut) -> None:
        for variable in self._variables.values():
            if variable.cut is not None and variable.cut.cut is cut:
                variable.cut = None

    def check_changes(self) -> None:
        """Called when the caller has changed what it wanted to, before the locks are released."""
        for variable in self._variables.values():
            if variable.cut is not None:
                variable.cut.check()


def check_rows(ids: torch.Tensor, rows: int, name: str, *, sorted_and_unique: bool) -> None:
    """Local row ids: ``(n,)`` int64 in [0, rows). ``name``: the shard, for the error."""
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidArgumentError(f"row ids of {name} must be an int64 tensor of one dimension; got {found}.")
    if ids.numel() == 0:
        return
    low, high = (int(ids[0]), int(ids[-1])) if sorted_and_unique else (int(ids.min()), int(ids.max()))
    if sorted_and_unique and not bool((ids[1:] > ids[:-1]).all()):
        raise InvalidArgumentError(f"row ids of {name} must be sorted and unique, so that each row is stepped once.")
    if low < 0 or high >= rows:
        raise InvalidArgumentError(
            f"row ids of {name} must be in [0, {rows}); got ids from {low} to {high}. Ids are local to the shard."
        )


_OPS = get_args(EditOp)


def check_edit(edit: ShardEdit, shards: HeldShards) -> None:
    shard, name = shards.tensor(edit.key), shards.name(edit.key)
    if edit.op not in _OPS:
        raise InvalidArgumentError(f"{edit.op!r} is no edit of {name}; there are {', '.join(_OPS)}.")
    if (
        not isinstance(edit.value, torch.Tensor)
        or edit.value.layout != torch.strided
        or edit.value.device.type != "cpu"
    ):
        raise InvalidArgumentError(f"the value of an edit of {name} must be a dense tensor on the CPU.")
    if not torch.can_cast(edit.value.dtype, shard.dtype):
        raise InvalidArgumentError(f"{name} is {shard.dtype}; {edit.op} with {edit.value.dtype} would lose its value.")
    if edit.base is not None and (edit.base.shape != shard.shape or edit.rows is not None):
        raise InvalidArgumentError(f"{edit.op} of {name}: a base has to be of the whole shard, {tuple(shard.shape)}.")
    if shard.dtype == torch.bool and edit.op != "assign":
        raise InvalidArgumentError(f"{name} is {shard.dtype}, which can only be assigned; got {edit.op}.")
    if shard.is_complex() and edit.op in ("min", "max"):
        raise InvalidArgumentError(f"{name} is {shard.dtype}, which has no order; got {edit.op}.")
    if edit.op == "renorm" and (edit.rows is None or shard.dim() != 2):
        raise InvalidArgumentError(f"{edit.op} of {name} is for rows of a table.")
    if edit.rows is None:
        target = tuple(shard.shape)
    else:
        if shard.dim() == 0:
            raise InvalidArgumentError(f"{name} is a scalar and has no rows to {edit.op}.")
        check_rows(edit.rows, shard.shape[0], name, sorted_and_unique=False)
        target = (2,) if edit.op == "renorm" else (edit.rows.shape[0], *shard.shape[1:])
    try:
        fits = torch.broadcast_shapes(edit.value.shape, target) == target
    except RuntimeError:
        fits = False
    if not fits or (edit.rows is not None and tuple(edit.value.shape) != target):
        how = "broadcast to" if edit.rows is None else "have"
        raise InvalidArgumentError(
            f"{edit.op} of {name}: the value has shape {tuple(edit.value.shape)}, but must {how} {target}."
        )


def apply_edit(edit: ShardEdit, shards: HeldShards) -> bool:
    """Whether there was no conflict: with what another writer has changed meanwhile."""
    op = edit.op
    value = edit.value if op == "renorm" else edit.value.to(shards.tensor(edit.key).dtype)
    if shards.writer and op == "assign" and edit.rows is None and shards.is_parameter(edit.key):
        return _write_parameter(edit.key, value, shards)
    shard = shards.changing(edit.key, edit.rows)
    is_untouched = edit.base is None or is_same(edit.base, shard)
    if op == "move":
        op, value = ("assign", value) if is_untouched or edit.base is None else ("add", value - edit.base)
        is_untouched = True
    edits.apply_edit(shard, op, value, edit.rows)
    return is_untouched


def _write_parameter(key: ShardKey, value: torch.Tensor, shards: HeldShards) -> bool:
    """A function has written to a parameter by hand, or at least counted as if: see `apply_edit`."""
    is_fine = is_same(value, shards.tensor(key))
    if not is_fine:
        is_fine = shards.is_known(key)
        shards.changing(key).copy_(value)
    shards.give(key, shards.writer)  # it has what it has written
    return is_fine


_TELL_EVERY_BYTES = 4 << 20
"""Copying as much takes a millisecond; who is told of it, 0.05."""


class AnswerCopies:
    """The copies of ``count`` tensors that an answer consists of. Whoever waits for much is told as they are made."""

    def __init__(self, memory: AnswerMemory, count: int) -> None:
        self._memory, self._count = memory, count
        self._made: dict[int, torch.Tensor] = {}
        self._first_missing = 0
        self._left = self._untold = 0

    def begin(self, size: int) -> None:
        """All that is left to do is to copy ``size`` bytes."""
        self._left = size
        if size >= _TELL_EVERY_BYTES:
            self._memory.written(0)

    def add(self, place: int, tensor: torch.Tensor) -> None:
        """Number ``place`` of the answer is a copy of ``tensor``."""
        self._made[place] = self._memory.empty(place, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        while self._first_missing in self._made:
            self._first_missing += 1
        self._left -= tensor.nbytes
        self._untold += tensor.nbytes
        if self._untold >= _TELL_EVERY_BYTES and self._left > 0:  # otherwise the answer tells
            self._memory.written(self._first_missing)
            self._untold = 0

    def values(self) -> list[torch.Tensor]:
        return [self._made[place] for place in range(self._count)]
