"""What shapes alone do not tell about a batch: found out from the collate function, or told in an error or a warning.

A row is along dim 0 of every leaf, or the program says so with a mark. Whoever is about to cut a batch asks here first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from torchstrat import nest
from torchstrat.data import rows, spec
from torchstrat.data.containers import children, is_container, names
from torchstrat.data.marks import Along, Examples, Marked, Same
from torchstrat.errors import InvalidArgumentError

MARKS = (
    "ts.data.axis(x, 1) where its rows are along dim 1, ts.data.same(x) where every replica gets all of it, "
    "ts.data.examples(list) for a list with an entry for each row"
)


class CollateReading:
    """Whether what a collate function makes of ``n`` examples has one row for each, in every leaf, and may be cut.

    Equal numbers alone do not say so: a batch of time-first sequences may have as many steps as rows, and a list of
    images as many channels. Where another dimension or a list has that number too, a part of the examples is collated,
    to see what becomes fewer; once, for the answer is the function's. Random streams are put back.
    """

    def __init__(self, collate: Callable[[list[Any]], nest.Nest]) -> None:
        self._collate = collate
        self.is_torchs = collate is default_collate
        self._settled = self.is_torchs

    def may_cut(self, whole: nest.Nest, examples: list[Any]) -> bool:
        """Of ``whole``, which was made of the ``examples``."""
        count = len(examples)
        if not _has_rows(whole, count):
            return False
        if self._settled or count < 2:
            return True
        doubtful = _first_doubtful(whole, count)
        if doubtful is None:
            self._settled = True
            return True
        return self._try_parts(whole, examples, doubtful)

    def _try_parts(self, whole: nest.Nest, examples: list[Any], doubtful: str) -> bool:
        count = len(examples)
        few = min(2, count - 1)
        for some in (examples[:few], examples[-few:], examples[1:], examples[:-1]):
            try:
                with spec.undisturbed_randomness():
                    part = rows.to_tensors(self._collate([copied(example) for example in some]))
            except Exception:  # it takes whole batches only
                break
            answer = _follows(whole, part, count, len(some))
            if answer is not None:
                self._settled = answer
                return answer
        self._settled = True
        warnings.warn(
            f"a collate function made {doubtful} of {count} examples, and of fewer of them it did not show where the "
            f"rows are: it is cut along dim 0. Mark what it makes: ts.data.axis(x, 0) if that is right, {MARKS}.",
            stacklevel=2,
        )
        return True


def copied(example: Any) -> Any:
    """An example to collate once more: some collate functions take its entries out."""
    if type(example) is dict:
        return {key: copied(value) for key, value in example.items()}
    return [copied(value) for value in example] if type(example) is list else example


def _has_rows(batch: nest.Nest, count: int) -> bool:
    try:
        return rows.common_rows(batch) == count
    except (TypeError, ValueError):  # leaves without rows
        return False


def _first_doubtful(batch: nest.Nest, count: int) -> str | None:
    """The first leaf or list of a batch that ``count`` may mean something else in, in words."""
    for path, value in _parts(batch):
        if isinstance(value, Marked):
            continue
        if isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == count:
            if rows.is_row_list(value) and all(isinstance(row, str | bytes) for row in value):
                continue
            return f"{path}, a {type(value).__name__} of {count},"
        if isinstance(value, torch.Tensor) and not value.is_nested and count in value.shape[1:]:
            return f"{path}, a tensor of shape {tuple(value.shape)},"
    return None


def _follows(whole: nest.Nest, part: nest.Nest, count: int, fewer: int) -> bool | None:
    """Whether each leaf's rows became ``fewer`` with the examples; None: another size that was ``count`` did, too."""
    if rows.is_row_list(whole) and rows.is_row_list(part):
        return len(part) == fewer
    if is_container(whole):
        if type(whole) is not type(part) or len(children(whole)) != len(children(part)):
            return False
        pairs = zip(children(whole), children(part), strict=True)
        answers = [_follows(one, other, count, fewer) for one, other in pairs]
        return False if False in answers else None if None in answers else True
    if whole is None or isinstance(whole, Same):
        return True
    if not _has_rows(part, fewer):
        return False
    if not isinstance(whole, torch.Tensor) or whole.is_nested:
        return True
    if not isinstance(part, torch.Tensor) or part.ndim != whole.ndim:
        return False
    moved = any(size == count and now == fewer for size, now in zip(whole.shape[1:], part.shape[1:], strict=True))
    return None if moved else True


def require_aligned(batch: nest.Nest) -> int:
    """The rows of a batch, of which all leaves have the same number.

    Raises:
        InvalidArgumentError: they do not.
    """
    count = rows.common_rows(batch)
    if count is None:
        rows.count_rows(batch)  # raises, where there are none
        raise InvalidArgumentError(
            f"the leaves of a batch have different numbers of rows: {differing(batch)}. Rows are along dim 0 of "
            f"every leaf, or the program says so: {MARKS}."
        )
    return count


def differing(batch: nest.Nest) -> str:
    """The leaves of a batch that have different numbers of rows, in words: one for each number."""
    first: dict[int, str] = {}
    for path, value in _parts(batch):
        if isinstance(value, Along | Examples) or rows.is_array(value) or rows.is_row_list(value):
            first.setdefault(rows.length(value), path)
    return ", ".join(f"{path} has {number}" for number, path in first.items())


def tell_of_lists(batch: nest.Nest) -> None:
    """Warn of the first list that holds columns by the rule, and looks as if it may hold examples."""
    for path, value in _parts(batch):
        if not isinstance(value, list) or rows.is_row_list(value) or not _may_be_examples(value):
            continue
        count = rows.count_rows(value)
        warnings.warn(
            f"{path} is a list of {len(value)} tensors of {count} rows each, and is read as columns: each is cut along "
            "dim 0. If it has an entry for each row, mark it: ts.data.examples(list). If it has columns, hand out a "
            "tuple, or say so: ts.data.axis(list, 0).",
            stacklevel=3,
        )
        return


def _may_be_examples(columns: list[Any]) -> bool:
    """Pairs of columns are usual, and columns of several kinds; examples are alike, and images have three dims."""
    if len(columns) < 2 or not all(isinstance(one, torch.Tensor) and one.ndim > 1 for one in columns):
        return False
    if len({(one.dtype, one.ndim, one.size(0)) for one in columns}) > 1 or any(one.is_nested for one in columns):
        return False
    return columns[0].size(0) == len(columns) or (len(columns) > 2 and columns[0].ndim > 2)


def _parts(batch: nest.Nest, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Every container, column and leaf of a batch, with where it is."""
    yield path, batch
    if not is_container(batch) or rows.is_row_list(batch):
        return
    if nest.is_nested(batch):
        for key, child in nest.children(batch):
            yield from _parts(child, f"{path}[{key!r}]")
        return
    for name, child in zip(names(batch), children(batch), strict=True):
        yield from _parts(child, f"{path}.{name}")
