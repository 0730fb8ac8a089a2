"""Examples with their labels, split into rows to train on and rows held out.

Every process loads the same rows in the same order; which of them a replica gets is the strategy's business. A file
that is missing or malformed is one `InvalidArgumentError` that names the file and the setting.
"""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from torchstrat.config import require
from torchstrat.data.worker_signals import outlive_preemption
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import targets

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs and labels → the mean over the batch."""


@dataclass(frozen=True)
class Examples:
    """Training and held-out rows, `torch.utils.data.Dataset`s of known length, and what goes with them."""

    train: Any
    test: Any
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a model's constructor may ask for by name: ``input_shape``, ``classes``."""
    loss: Loss = functional.cross_entropy
    """Unless the configuration has one."""
    collate_fn: Callable[[list[Any]], Any] | None = None

    def train_loader(self, global_batch: int, seed: int, workers: int) -> DataLoader[Any]:
        """Global batches in an order drawn anew each epoch, the last one as short as it comes: no row is dropped."""
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            self.train,
            batch_size=global_batch,
            sampler=RandomSampler(self.train, generator=generator),
            generator=generator,
            num_workers=workers,
            worker_init_fn=outlive_preemption,
            collate_fn=self.collate_fn,
        )

    def test_loader(self, global_batch: int) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=global_batch, collate_fn=self.collate_fn)


def load(call: Mapping[str, Any]) -> Examples:
    """The examples that a configuration asks for. Raises `InvalidArgumentError`; touches no device."""
    made = targets.make("data", call)
    if isinstance(made, Examples):
        return made
    try:
        train, test = made
        rows = len(train), len(test)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"data._target_={call['_target_']} returned {type(made).__name__}; return a pair of "
            "torch.utils.data.Dataset with a length, training and held out, or torchstrat.experiments.data.Examples."
        ) from error
    return Examples(train, test, _facts(train) if rows[0] else {})


def _facts(rows: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if isinstance(inputs := rows[0][0], torch.Tensor):
        facts["input_shape"] = tuple(inputs.shape)
    if hasattr(rows, "classes"):  # as torchvision's have it
        facts["classes"] = len(rows.classes)
    elif isinstance(rows, TensorDataset) and not rows.tensors[-1].is_floating_point():
        facts["classes"] = int(rows.tensors[-1].max()) + 1
    return facts


class _Rows(NamedTuple):
    """Of one file, or of one part of it."""

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Examples:
    """scikit-learn's 1,797 handwritten digits: grey images ``(1, 8, 8)``, ten classes."""
    table = _digits_table()
    images = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16.0  # a pixel counts 0 to 16 dots
    return _examples(*_cut(_Rows(images, table[:, -1].astype(np.int64)), test_fraction, split_seed, "the digits"))


def _digits_table() -> npt.NDArray[np.float64]:
    """``(1797, 65)``: the pixels of an image, and its label, as scikit-learn carries them."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():  # to import it would bring SciPy, which takes each process two seconds
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # optional

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def csv(
    path: str,
    test_path: str | None = None,
    label_column: int = -1,
    delimiter: str = ",",
    image_shape: list[int] | None = None,
    standardize: bool = True,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Examples:
    """A text file of numbers, one example a line; a first line that is not numbers is taken as a header.

    Args:
        test_path: A second file with the held-out rows, instead of ``test_fraction``.
        label_column: The column of the integer class label, counted from 0; negative counts from the end.
        image_shape: ``[channels, height, width]`` of a line's numbers, for models that want images.
        standardize: Shift and scale each feature to mean 0, variance 1 over the training rows.
        test_fraction: Share of the rows held out, drawn once by ``split_seed``.
    """

    def read(name: str, setting: str) -> _Rows:
        table = _read_table(name, setting, delimiter)
        require(
            -table.shape[1] <= label_column < table.shape[1],
            f"data.label_column={label_column} does not exist in {name}, which has {table.shape[1]} columns.",
        )
        return _rows(np.delete(table, label_column, axis=1), table[:, label_column], image_shape, name)

    rows = read(path, "data.path")
    parts = (
        _cut(rows, test_fraction, split_seed, path) if test_path is None else (rows, read(test_path, "data.test_path"))
    )
    return _examples(*parts, standardize="features" if standardize else None)


def npz(
    path: str,
    inputs: str = "x",
    labels: str = "y",
    image_shape: list[int] | None = None,
    standardize: bool = True,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Examples:
    """A NumPy archive with the arrays ``inputs`` ``(rows, …)`` and ``labels`` ``(rows,)``.

    With ``<inputs>_test`` and ``<labels>_test`` in the archive these are the held-out rows.

    Args:
        image_shape: ``[channels, height, width]`` of a row's numbers, for models that want images.
        standardize: Shift and scale all inputs by the mean and deviation of the training rows.
        test_fraction: Share of the rows held out, drawn once by ``split_seed``.
    """
    arrays = _read_archive(path)

    def read(suffix: str) -> _Rows:
        x, y = (_numbers(arrays, f"{name}{suffix}", path) for name in (inputs, labels))
        require(
            x.ndim >= 2 and y.ndim == 1 and len(x) == len(y),
            f"{path}: {inputs + suffix!r} has shape {x.shape} and {labels + suffix!r} {y.shape}; (rows, …) and (rows,) "
            "with equal rows are needed.",
        )
        return _rows(x, y, image_shape, path)

    has_test = f"{inputs}_test" in arrays
    parts = (read(""), read("_test")) if has_test else _cut(read(""), test_fraction, split_seed, path)
    return _examples(*parts, standardize="everything" if standardize else None)


def _existing_file(path: str, setting: str) -> Path:
    file = Path(path).expanduser()
    found = "is a folder" if file.is_dir() else "does not exist"
    require(file.is_file(), f"{setting}={path} {found} (looked in {file.resolve().parent}); name a file.")
    return file


def _read_table(path: str, setting: str, delimiter: str) -> npt.NDArray[np.float64]:
    file = _existing_file(path, setting)
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines and not all(map(_is_number, lines[0].split(delimiter))):
            del lines[0]
        require(bool(lines), f"{setting}={path} has no rows of numbers.")
        table = np.loadtxt(lines, delimiter=delimiter, ndmin=2, dtype=np.float64)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{setting}={path} is not a table of numbers: {_one_line(error)}") from error
    require(
        table.shape[1] > 1,
        f"{setting}={path} has one column, with {delimiter!r} as data.delimiter; a label and at least one feature are "
        "needed.",
    )
    return table


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_archive(path: str) -> dict[str, npt.NDArray[Any]]:
    file = _existing_file(path, "data.path")
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:  # pickles run code
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(
            f"data.path={path} is not a NumPy archive (.npz); for a table of numbers as text use data=csv, and "
            f"numpy.savez(file, x=inputs, y=labels) writes an archive of arrays. NumPy says: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _numbers(arrays: dict[str, npt.NDArray[Any]], name: str, path: str) -> npt.NDArray[Any]:
    names = ", ".join(sorted(arrays)) or "none"
    require(name in arrays, f"{path} has no array {name!r}; it has {names}. Set data.inputs and data.labels.")
    kind = arrays[name].dtype
    require(np.issubdtype(kind, np.number), f"array {name!r} of {path} has dtype {kind}; numbers are needed.")
    return arrays[name]


def _rows(inputs: npt.NDArray[Any], labels: npt.NDArray[Any], image_shape: list[int] | None, path: str) -> _Rows:
    """Checked: inputs are finite and have the shape that is asked for, labels are classes."""
    if image_shape is not None:
        needed, there = math.prod(image_shape), math.prod(inputs.shape[1:])
        require(
            needed == there and min(image_shape) > 0,
            f"data.image_shape={[*image_shape]} needs {needed} numbers a row; {path} has {there} beside the label.",
        )
        inputs = inputs.reshape(-1, *image_shape)
    bad = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
    if len(bad):
        raise InvalidArgumentError(f"{path}: row {bad[0]} has a value that is not finite; {len(bad)} in all.")
    bad = np.flatnonzero(~(np.isfinite(labels) & (np.floor(labels) == labels) & (labels >= 0)))
    if len(bad):
        raise InvalidArgumentError(
            f"{path}: the label of row {bad[0]} is {labels[bad[0]]}; class labels are the integers 0, 1, 2, …. "
            "Is the right column or array named as the label?"
        )
    return _Rows(inputs.astype(np.float32), labels.astype(np.int64))


def _cut(rows: _Rows, test_fraction: float, split_seed: int, source: str) -> tuple[_Rows, _Rows]:
    """Hold out ``test_fraction`` of the rows, drawn once by ``split_seed`` and equal in every process."""
    require(0.0 < test_fraction < 1.0, f"data.test_fraction={test_fraction} must lie strictly between 0 and 1.")
    count = len(rows.labels)
    held_out = round(count * test_fraction)
    require(
        0 < held_out < count,
        f"{source} has {count} rows; data.test_fraction={test_fraction} holds out {held_out} of them, and at least one "
        "is needed on either side.",
    )
    order = np.random.default_rng(split_seed).permutation(count)
    test, train = order[:held_out], order[held_out:]
    return _Rows(rows.inputs[train], rows.labels[train]), _Rows(rows.inputs[test], rows.labels[test])


def _examples(train: _Rows, test: _Rows, standardize: str | None = None) -> Examples:
    """``standardize``: bring ``features``, each, or ``everything`` to mean 0, variance 1 over the training rows."""
    shape, test_shape = train.inputs.shape[1:], test.inputs.shape[1:]
    require(shape == test_shape, f"training inputs have shape {shape}, held-out inputs {test_shape}; give equal ones.")
    parts = [train.inputs, test.inputs]
    if standardize is not None:
        dim = 0 if standardize == "features" else None
        mean, deviation = train.inputs.mean(axis=dim), train.inputs.std(axis=dim)
        scale = np.where(deviation > 0, deviation, 1.0)  # a constant feature carries nothing; keep it finite
        parts = [((part - mean) / scale).astype(np.float32) for part in parts]
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    sets = [
        TensorDataset(torch.from_numpy(part), torch.from_numpy(rows.labels))
        for part, rows in zip(parts, (train, test), strict=True)
    ]
    return Examples(sets[0], sets[1], {"input_shape": tuple(shape), "classes": max(classes, 2)})
