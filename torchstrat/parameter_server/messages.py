"""What workers and the coordinator tell the servers. Everything here is pickled; tensors travel beside the pickle.

Of a checkpoint the coordinator knows names, servers hold values; neither sends the other a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from torchstrat.checkpoint.pieces import KeyPath, Piece

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import WrittenPart

EditOp = Literal["assign", "move", "add", "sub", "mul", "div", "min", "max", "renorm"]

Token = tuple[Any, ...]
"""What a captured object is called between processes: a small tuple of strings and numbers."""

ShardKey = tuple[int, int]
"""(number of the variable, number of its shard)"""

COORDINATOR = -1
"""In place of a function's id: what the coordinator itself does. It is never repeated, hence always applied."""


@dataclass(frozen=True)
class Shard:
    """Rows ``[start, stop)`` of a variable's first dimension, on server number ``server``. A scalar has one row."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class VariableSpec:
    """One variable of the job. ``shards`` are in order of rows and cover all of them.

    ``kind``: a trained ``parameter``, a module's ``buffer``, or a `ts.Variable` (``variable``). ``by_rows``: workers
    look rows up instead of holding a copy, as long as the step uses it as an embedding table only.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["parameter", "buffer", "variable"]
    shards: tuple[Shard, ...]
    requires_grad: bool = True
    by_rows: bool = False

    def shard_shape(self, number: int) -> tuple[int, ...]:
        shard = self.shards[number]
        return (shard.stop - shard.start, *self.shape[1:]) if self.shape else ()

    def shard_bytes(self, number: int) -> int:
        return math.prod(self.shard_shape(number)) * self.dtype.itemsize


@dataclass(frozen=True)
class InitialOp:
    """One recorded initialiser: an in-place operator by its name in torch.ops.aten (``normal_``, ``uniform_``, …), and
    its arguments after the tensor. ``row`` restricts it to one row of the whole variable (the padding index)."""

    name: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    row: int | None = None


@dataclass(frozen=True)
class NewShard:
    """A shard to create: with ``value``, or by replaying ``recipe`` under ``seed`` (then ``value`` is None).
    ``whole_for``: the class of an optimizer because of which the variable is not cut."""

    spec: VariableSpec
    shard: int
    value: torch.Tensor | None
    recipe: tuple[InitialOp, ...] = ()
    seed: int = 0
    whole_for: str = ""


@dataclass(frozen=True)
class NewRows:
    """A table gets more rows, behind those that it has: ``spec`` is what it is then. Those rows are ``value``, or what
    ``recipe`` makes of them under ``seed``. The last shard has them, and only its server has to know what they are."""

    spec: VariableSpec
    value: torch.Tensor | None = None
    recipe: tuple[InitialOp, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class RepeatedOps:
    """What was done on the coordinator to a variable of which it has no values, to be done to a shard of it.
    ``seed``: for what is drawn."""

    key: ShardKey
    recipe: tuple[InitialOp, ...]
    seed: int


@dataclass(frozen=True)
class NewOptimizer:
    """An optimizer of the job. ``blob``: what `pack_optimizer` makes of it. One entry in ``groups`` per parameter
    group: the numbers of its variables, in order. ``wraps``: the numbers of optimizers in it; None: not of the job."""

    number: int
    blob: bytes
    groups: tuple[tuple[int, ...], ...]
    rows_only: bool = True
    wraps: tuple[int | None, ...] = ()


class Gone(Enum):
    """In place of a value: there is none any more."""

    GONE = "gone"


class Reader(Enum):
    """Of what steps of an optimizer have set."""

    AT_REST = "the program, when every function has ended"
    PROGRAM = "the program"
    FUNCTION = "a function, after a step of its own"


class SetAttribute(NamedTuple):
    """On the coordinator. ``moment``: nanoseconds of its clock. What is set later is set, be it the same value again
    after steps have changed it; and a coordinator that was started again goes on where the last one was. ``value``:
    `Gone.GONE` where it was deleted."""

    moment: int
    value: object


SetAttributes: TypeAlias = Mapping[str | tuple[int, str], SetAttribute]
"""What the program has set on a module or an optimizer since that was sent, or on a variable at all, by name; on one of
its classes, by the class's place among them (``__mro__``) and name."""


@dataclass(frozen=True)
class Wrapped:
    """Of the optimizers that an optimizer of a class of the program's own wraps, in order: ``places`` as in
    `groups_with_wrapped`, ``options`` of the groups that only they have, and ``attributes`` by wrapped one."""

    places: tuple[tuple[int, ...], ...]
    options: tuple[Mapping[str, object], ...]
    attributes: tuple[SetAttributes, ...]


@dataclass(frozen=True)
class OptimizerStep:
    """One ``optimizer.step()`` on the shards of one server. Variables that got no gradient are left out.

    ``options``: the hyperparameters of each parameter group, in force at this step (everything in the group but
    ``params``). ``dense``: gradients of whole shards. ``rows``: (local row ids ``(n,)`` int64, sorted and unique;
    gradients ``(n, …)``) of tables. ``attributes``: what the program has set on an optimizer of a class of its own, by
    name with the moment at which it was set, and ``tags`` on its variables, by their numbers. ``wrapped``: None of an
    optimizer that wraps none. ``reuses``: a gradient is the tensor that an earlier step has had, changed in place.
    ``keeps_result``: the function reads what the step returns.
    """

    optimizer: int
    options: tuple[Mapping[str, object], ...]
    dense: tuple[tuple[ShardKey, torch.Tensor], ...] = ()
    rows: tuple[tuple[ShardKey, torch.Tensor, torch.Tensor], ...] = ()
    attributes: SetAttributes = field(default_factory=dict)
    tags: Mapping[int, SetAttributes] = field(default_factory=dict)
    wrapped: Wrapped | None = None
    reuses: bool = False
    keeps_result: bool = False


@dataclass(frozen=True)
class Accumulation:
    """Gradients that a function leaves for the next step of any, to be added to what others have left: ``dense`` and
    ``rows`` as in `OptimizerStep`. ``discards``: variables of which the function has set the gradients to nothing; what
    others had left of these goes first, before the push's own steps."""

    dense: tuple[tuple[ShardKey, torch.Tensor], ...] = ()
    rows: tuple[tuple[ShardKey, torch.Tensor, torch.Tensor], ...] = ()
    discards: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardEdit:
    """A change of a shard that no optimizer makes. ``value`` broadcasts to the shard, except for scatter edits.

    ``rows``: local row ids ``(n,)``, with ``value`` of shape ``(n, …)``; None edits the whole shard. Repeated rows
    accumulate for add, sub, mul, div, min and max. ``base``: what the shard was when ``value`` was worked out. Where it
    is something else by now, ``assign`` is a conflict, which is noted, and ``move`` adds the difference of the two.
    ``renorm``: ``value`` is a norm that rows are to have at the most, and its order, in float64.
    """

    key: ShardKey
    op: EditOp
    value: torch.Tensor
    rows: torch.Tensor | None = None
    base: torch.Tensor | None = None


@dataclass(frozen=True)
class Push:
    """Everything that one worker's step changes on one server; applied whole, exactly once. Steps take what functions
    have accumulated of their optimizers' variables.

    (``function``, ``index``) names it: ``index`` counts the pushes of one run of the function. A server that has
    applied it already applies nothing and answers the same. ``wants``: the shards whose values the answer brings, read
    after the change. ``incarnation``: the worker's, so that pushes of a process that was given up can be refused.
    ``servers``: all that get a part of it that changes something by itself.
    """

    function: int
    index: int
    incarnation: str
    steps: tuple[OptimizerStep, ...] = ()
    edits: tuple[ShardEdit, ...] = ()
    accumulation: Accumulation | None = None
    wants: tuple[ShardKey, ...] = ()
    servers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PushReply:
    """``values``: of the shards that the push wanted, in that order. ``applied``: False for a repetition."""

    values: tuple[torch.Tensor, ...]
    applied: bool


@dataclass(frozen=True)
class Dropped:
    """Numbers of what the coordinator's program has dropped."""

    variables: tuple[int, ...] = ()
    optimizers: tuple[int, ...] = ()


def dropped_among(tokens: Iterable[Token]) -> Dropped:
    """Those of these tokens that servers know. (Schedulers have numbers among optimizers', which they do not.)"""
    tokens = list(tokens)
    return Dropped(
        tuple(token[1] for token in tokens if token[0] in ("parameter", "buffer", "variable")),
        tuple(token[1] for token in tokens if token[0] == "helper"),
    )


@dataclass(frozen=True)
class RowsRequest:
    """Rows of one shard: local ids ``(n,)`` int64."""

    key: ShardKey
    ids: torch.Tensor


StateOfShard = dict[str, Any]
"""An optimizer's state of one shard, as the optimizer keeps it: name → tensor (of the shard's shape, or a scalar) or
Python value."""


@dataclass(frozen=True)
class AppliedPushes:
    """A server's records of applied pushes. ``masks``: function → an integer with bit ``i`` set where push ``i`` was
    applied. Functions below ``below`` are finished and have no record; none has reached ``next_function``."""

    below: int
    next_function: int
    masks: Mapping[int, int]


@dataclass(frozen=True)
class CutReport:
    """A server has marked what it holds at this moment. ``with_state``: (optimizer, shard) of all state that it has.
    ``applied``: the records of applied pushes at the same moment."""

    with_state: frozenset[tuple[int, ShardKey]]
    applied: AppliedPushes


@dataclass(frozen=True)
class ShardPiece:
    """A shard, and what rows of a checkpoint's tensor it is."""

    key: ShardKey
    piece: Piece


@dataclass(frozen=True)
class StatePiece:
    """An optimizer's state of a shard; its entries lie under ``piece.path``. ``cut``: other shards hold other rows."""

    optimizer: int
    key: ShardKey
    piece: Piece
    cut: bool


@dataclass(frozen=True)
class WriteOrder:
    """Write these shards and states, as they were when ``token`` was marked, as file ``number`` into ``folder``.

    ``fills``: states that this server does not have, because no step has touched the shard yet, while other servers
    have them for their shards: write what they are before the first step.
    """

    folder: str
    number: int
    token: str = ""
    values: tuple[ShardPiece, ...] = ()
    states: tuple[StatePiece, ...] = ()
    fills: tuple[StatePiece, ...] = ()


@dataclass(frozen=True)
class WriteReport:
    """``whole``: entries of the state of cut variables that are not cut themselves (``step``), with their paths; all
    shards of a variable have them, and one is to be written. ``copied_bytes``: what pushes had to copy meanwhile."""

    part: WrittenPart
    whole: tuple[tuple[KeyPath, object], ...]
    copied_bytes: int


@dataclass(frozen=True)
class StateEntry:
    """One entry of an optimizer's state of a shard, to be read: ``rows`` of ``piece``; None: all of it."""

    optimizer: int
    key: ShardKey
    name: str
    piece: Piece
    rows: int | None


@dataclass(frozen=True)
class ReadOrder:
    """Read these, and hold them ready under ``token`` until they are adopted.

    ``stepped``: (optimizer, variable) whose states are replaced, also where there is nothing to read for them.
    """

    folder: str
    token: str
    values: tuple[ShardPiece, ...] = ()
    states: tuple[StateEntry, ...] = ()
    stepped: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AdoptOrder:
    """Take over what was read under ``token``. ``next_function``: functions below have ended."""

    token: str
    next_function: int
