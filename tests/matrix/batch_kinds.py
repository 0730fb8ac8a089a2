"""The kinds of batches that the table of batches asks about: how one is made of examples, and what a step reads off it.

Every example is ``(x, y)``: a tensor of features, or of steps of features, and a number. There are as many rows in a
full batch as features, so that shapes alone tell of few kinds where the rows are.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence

import torchstrat as ts
from tests.matrix.table import RIGHT, Expected, documented, refused
from torchstrat.errors import ContextError, InvalidArgumentError, UnsupportedError, WrongTypeError

ROWS = 5
"""Of a full batch, and features of each row."""
COUNTS = (ROWS, ROWS, 3)
Example = tuple[torch.Tensor, torch.Tensor]
Scores = tuple[torch.Tensor, torch.Tensor]
"""A prediction for each row, and what it should be."""


class Kind(NamedTuple):
    collate: Callable[[Any], Any]
    scores: Callable[[nn.Module, Any], Scores]
    steps: tuple[int, ...] = ()
    """Lengths of the examples, in turn; none: an example is a row of features."""
    alone: Expected | None = RIGHT
    """What comes of it where only the batches are seen, and not the examples; None: nobody could tell, and the README
    says how to."""
    whole: bool = True
    """Whether the batch of all replicas can be cut; else each replica's examples are collated by themselves."""
    of_dicts: bool = False
    """Whether an example is a dict of lists of numbers."""
    on_tpu: Expected | None = None
    """What comes of it where a step is recorded once for all replicas, and others get it right."""


class Scaled(dict[str, Any]):
    """Its constructor takes one dict, and it has an attribute."""

    def __init__(self, content: Mapping[str, Any], scale: float = 1.0) -> None:
        super().__init__({name: content[name] for name in content.keys()})  # noqa: SIM118 - it is no pairs
        self.scale = scale


class Encoding(collections.UserDict[str, Any]):
    """As tokenizers return them."""

    def __init__(self, data: Mapping[str, Any] | None = None, scale: float = 1.0) -> None:
        super().__init__(data)
        self.scale = scale


class Sharing(MutableMapping[str, Any]):
    """Its copies have the dict in which it keeps its entries."""

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Pair(tuple[Any, ...]):
    """Its constructor takes two values."""

    def __new__(cls, x: Any, y: Any) -> Pair:
        return super().__new__(cls, (x, y))

    def __getnewargs__(self) -> tuple[Any, ...]:  # else no data-loading worker could hand one over
        return tuple(self)


class Columns(list[Any]):
    scale = 1.0


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    """What it computes of its fields is that of its own rows."""

    x: torch.Tensor
    y: torch.Tensor
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.x)


@dataclass
class Halved:
    """Making one of another's fields would change them once more."""

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x / 2


def _columns(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*examples, strict=True)
    return torch.stack(xs), torch.stack(ys)


def _plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, scale: Any = 1.0) -> Scores:
    return model(x).squeeze(-1) * scale, y


def _named(extra: Callable[[Sequence[Example]], dict[str, Any]]) -> Callable[[Sequence[Example]], dict[str, Any]]:
    return lambda examples: dict(zip("xy", _columns(examples), strict=True)) | extra(examples)


def _scaled(batch: Any, scale: float) -> Any:
    batch.scale = scale
    return batch


def _record_scores(model: nn.Module, batch: Record) -> Scores:
    assert batch.count == len(batch.x), "it counts other rows than its own"
    return _plain(model, batch.x, batch.y)


def _mean_of(model: nn.Module, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([model(one).mean() for one in sequences])


def _lists(examples: Sequence[Example]) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """As in detection: the targets of each example are a dict of tensors of its own."""
    return [x for x, _ in examples], [{"y": y.repeat(len(x))} for x, y in examples]


def _list_scores(model: nn.Module, batch: Any) -> Scores:
    return _mean_of(model, batch[0]), torch.stack([target["y"].mean() for target in batch[1]])


def _images(examples: Sequence[Example]) -> tuple[list[torch.Tensor], torch.Tensor]:
    return [x for x, _ in examples], torch.stack([y for _, y in examples])


def _time_first(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*examples, strict=True)
    return pad_sequence(list(xs)), torch.stack(ys)


def _time_first_scores(model: nn.Module, batch: Any) -> Scores:
    """Of the steps that are no padding, so that it does not matter how far a batch is padded."""
    x, y = batch
    mask = x.abs().sum(-1) > 0
    return (model(x).squeeze(-1) * mask).sum(0) / mask.sum(0), y


def _packed(examples: Sequence[Example]) -> tuple[PackedSequence, torch.Tensor]:
    xs, ys = zip(*examples, strict=True)
    return pack_sequence(list(xs), enforce_sorted=False), torch.stack(ys)


def _packed_scores(model: nn.Module, batch: Any) -> Scores:
    return _time_first_scores(model, (pad_packed_sequence(batch[0])[0], batch[1]))


def _nested(layout: torch.layout) -> Callable[[Sequence[Example]], tuple[torch.Tensor, torch.Tensor]]:
    return lambda examples: (
        torch.nested.nested_tensor([x for x, _ in examples], layout=layout),
        torch.stack([y for _, y in examples]),
    )


def _nested_scores(model: nn.Module, batch: Any) -> Scores:
    return _mean_of(model, batch[0].unbind()), batch[1]


def _sparse(layout: torch.layout) -> Callable[[Sequence[Example]], tuple[torch.Tensor, torch.Tensor]]:
    def collate(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = _columns(examples)
        return x.relu().to_sparse(layout=layout), y

    return collate


def _dense_scores(model: nn.Module, batch: Any) -> Scores:
    return _plain(model, batch[0].to_dense(), batch[1])


def _bags(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    xs, ys = zip(*examples, strict=True)
    ends = torch.tensor([len(x) for x in xs]).cumsum(0)
    return {"values": torch.cat(xs), "offsets": ends - ends.new_tensor([len(x) for x in xs]), "y": torch.stack(ys)}


def _bag_scores(model: nn.Module, batch: Any) -> Scores:
    assert batch["offsets"][0] == 0
    return _mean_of(model, batch["values"].tensor_split(batch["offsets"][1:])), batch["y"]


def _names(examples: Sequence[Example]) -> dict[str, Any]:
    return {"name": ["large" if float(y) > 0 else "small" for _, y in examples]}


def _named_scores(model: nn.Module, batch: Any) -> Scores:
    scale = torch.tensor([{"small": 1.0, "large": 2.0}[name] for name in batch["name"]], dtype=torch.float64)
    return _plain(model, batch["x"], batch["y"], scale)


def _mask(size: int) -> torch.Tensor:
    return torch.ones(size, ROWS, dtype=torch.float64).tril()


def _mask_scores(model: nn.Module, batch: Any) -> Scores:
    assert len(batch["mask"]) > 4, "it is not whole"
    return _plain(model, batch["x"] * batch["mask"].mean(0), batch["y"])


def _popping(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As collate functions for rows of dicts do, it takes entries out of them."""
    labels = [one.pop("y") for one in examples]
    return {"x": torch.tensor([one["x"] for one in examples], dtype=torch.float64), "y": torch.stack(labels)}


def _by_name(scale: Callable[[Any], Any] = lambda batch: 1.0) -> Callable[[nn.Module, Any], Scores]:
    return lambda model, batch: _plain(model, batch["x"], batch["y"], scale(batch))


def _in_order(scale: Callable[[Any], Any] = lambda batch: 1.0) -> Callable[[nn.Module, Any], Scores]:
    return lambda model, batch: _plain(model, batch[0], batch[1], scale(batch))


_scale = lambda batch: batch.scale  # noqa: E731
RAGGED, LONG, AS_ROWS = (3, 6, 2, 4, 1), (6, 3), (ROWS, 3)
"""Lengths: of no two batches alike; with one of 6 in each batch; as many steps as rows."""

NOT_CUT = refused(WrongTypeError, "cannot be split over replicas.*ts.data.same", "without examples, it must be marked")
NO_OBJECTS = refused(UnsupportedError, "has to be tensors or numbers; got", "an object is one for all replicas")
NOT_DENSE = refused(UnsupportedError, "(nested|of layout).*dense tensors", "all replicas' parts are one tensor")
READ = refused(ContextError, "needs a value that is not there yet", "the step reads lengths, to take rows apart")
NO_ROWS = refused(
    InvalidArgumentError,
    r"different numbers of rows: batch.*ts\.data\.(axis|examples)",
    "its leaves have no rows alike",
)

KINDS: Mapping[str, Kind] = {
    "tuple": Kind(_columns, _in_order()),
    "dict": Kind(_named(lambda _: {}), _by_name()),
    "dict subclass": Kind(
        lambda examples: Scaled(dict(zip("xy", _columns(examples), strict=True)), 2.0), _by_name(_scale)
    ),
    "BatchEncoding-like": Kind(
        lambda examples: Encoding(dict(zip("xy", _columns(examples), strict=True)), 2.0), _by_name(_scale)
    ),
    "mapping that shares its entries with a copy": Kind(
        lambda examples: Sharing(**dict(zip("xy", _columns(examples), strict=True))), _by_name()
    ),
    "named tuple": Kind(lambda examples: Named(*_columns(examples)), _in_order()),
    "tuple with a constructor of its own": Kind(
        lambda examples: _scaled(Pair(*_columns(examples)), 2.0), _in_order(_scale)
    ),
    "list subclass": Kind(lambda examples: _scaled(Columns(_columns(examples)), 2.0), _in_order(_scale)),
    "dataclass": Kind(lambda examples: Record(*_columns(examples)), _record_scores, on_tpu=NO_OBJECTS),
    "dataclass whose __post_init__ changes its fields": Kind(
        lambda examples: Halved(*_columns(examples)),
        lambda model, batch: _plain(model, batch.x, batch.y),
        alone=refused(WrongTypeError, "Halved cannot be split.*__post_init__.*x", "it cannot be made of other rows"),
        whole=False,
        on_tpu=NO_OBJECTS,
    ),
    "OmegaConf": Kind(
        _named(lambda _: {"config": OmegaConf.create({"scale": 2.0, "later": "???"})}),
        _by_name(lambda batch: batch["config"].scale),
        alone=NOT_CUT,
        whole=False,
    ),
    "OmegaConf, marked": Kind(
        _named(lambda _: {"config": ts.data.same(OmegaConf.create({"scale": 2.0, "later": "???"}))}),
        _by_name(lambda batch: batch["config"].scale),
    ),
    "rows of dicts": Kind(_popping, _by_name(), of_dicts=True),
    "list of examples": Kind(_lists, _list_scores, RAGGED, NO_ROWS),
    "list of examples, marked": Kind(
        lambda examples: tuple(ts.data.examples(column) for column in _lists(examples)), _list_scores, RAGGED
    ),
    "list of as many examples as channels": Kind(
        _images,
        lambda model, batch: (_mean_of(model, batch[0]), batch[1]),
        (ROWS,),
        documented(
            "by the rule a list has columns", r"batch\[0\] is a list of 5 tensors of 5 rows.*ts\.data\.examples"
        ),
    ),
    "time first": Kind(_time_first, _time_first_scores, LONG, NO_ROWS),
    "time first, as many steps as rows": Kind(_time_first, _time_first_scores, AS_ROWS, None),
    "time first, marked": Kind(
        lambda examples: (ts.data.axis(_time_first(examples)[0], 1), _time_first(examples)[1]),
        _time_first_scores,
        AS_ROWS,
    ),
    "packed": Kind(
        _packed,
        _packed_scores,
        RAGGED,
        refused(InvalidArgumentError, "PackedSequence.*padded tensors", "its rows are interleaved"),
        whole=False,
        on_tpu=READ,
    ),
    "nested, jagged": Kind(_nested(torch.jagged), _nested_scores, RAGGED, on_tpu=NOT_DENSE),
    "nested, strided": Kind(_nested(torch.strided), _nested_scores, RAGGED, on_tpu=NOT_DENSE),
    "sparse": Kind(_sparse(torch.sparse_coo), _dense_scores),
    "sparse, compressed": Kind(_sparse(torch.sparse_csr), _dense_scores, on_tpu=NOT_DENSE),
    "offsets": Kind(_bags, _bag_scores, RAGGED, NO_ROWS, whole=False, on_tpu=READ),
    "strings": Kind(_named(_names), _named_scores),
    "None": Kind(_named(lambda _: {"mask": None}), _by_name(lambda batch: 1.0 if batch["mask"] is None else 0.0)),
    "numbers": Kind(_named(lambda _: {"scale": 2.0}), _by_name(lambda batch: batch["scale"]), (), NOT_CUT, whole=False),
    "numbers, marked": Kind(_named(lambda _: {"scale": ts.data.same(2.0)}), _by_name(lambda batch: batch["scale"])),
    "mask": Kind(_named(lambda _: {"mask": _mask(6)}), _mask_scores, (), NO_ROWS, whole=False),
    "mask, as many positions as rows": Kind(
        _named(lambda _: {"mask": _mask(ROWS)}), _mask_scores, (), None, whole=False
    ),
    "mask, marked": Kind(_named(lambda _: {"mask": ts.data.same(_mask(ROWS))}), _mask_scores),
}


def examples_of(kind: Kind) -> list[Example]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(sum(COUNTS)):
        shape = (kind.steps[number % len(kind.steps)], ROWS) if kind.steps else (ROWS,)
        made.append((torch.randn(shape, generator=draw).double(), torch.randn((), generator=draw).double()))
    return made
