"""What the coordinator tells servers to write to a checkpoint, and to read from one. Plain picklable data.

The coordinator knows names, servers hold values; neither sends the other a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchstrat.checkpoint.pieces import Path, Piece
from torchstrat.parameter_server.messages import ShardKey

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import WrittenPart


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
    whole: tuple[tuple[Path, Any], ...]
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
