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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from torchstrat.config import require
from torchstrat.data.worker_signals import outlive_preemption
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import targets

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
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


def existing_file(path: str, setting: str) -> Path:
    """The file at ``path``, which ``setting`` names. Raises `InvalidArgumentError` when there is none."""
    file = Path(path).expanduser()
    found = "is a folder" if file.is_dir() else "does not exist"
    require(file.is_file(), f"{setting}={path} {found} (looked in {file.resolve().parent}); name a file.")
    return file


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Examples:
    """scikit-learn's 1,797 handwritten digits: grey images ``(1, 8, 8)``, ten classes."""
    table = _digits_table()
    images = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16.0  # a pixel counts 0 to 16 dots
    parts = _cut(images, table[:, -1].astype(np.int64), test_fraction, split_seed, "the digits")
    return _standardized(*parts, standardize=False, dim=None)


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
    inputs, labels = _read_csv(path, "data.path", label_column, delimiter, image_shape)
    if test_path is None:
        parts = _cut(inputs, labels, test_fraction, split_seed, path)
        return _standardized(*parts, standardize=standardize, dim=0)
    test_inputs, test_labels = _read_csv(test_path, "data.test_path", label_column, delimiter, image_shape)
    require(
        test_inputs.shape[1:] == inputs.shape[1:],
        f"{test_path} has {test_inputs.shape[1]} features a line and {path} has {inputs.shape[1]}; give files of one "
        "format.",
    )
    return _standardized(inputs, labels, test_inputs, test_labels, standardize=standardize, dim=0)


def _read_csv(
    path: str, setting: str, label_column: int, delimiter: str, image_shape: list[int] | None
) -> tuple[Inputs, Labels]:
    file = existing_file(path, setting)
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        header = int(not all(_is_number(cell) for cell in lines[0].split(delimiter))) if lines else 0
        require(len(lines) > header, f"{setting}={path} has no rows{' below its header' if header else ''}.")
        table = np.loadtxt(lines[header:], delimiter=delimiter, ndmin=2, dtype=np.float64)
    except InvalidArgumentError:
        raise
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InvalidArgumentError(f"{setting}={path} is not a table of numbers: {_one_line(error)}") from error
    columns = table.shape[1]
    require(
        columns > 1,
        f"{setting}={path} has one column, with {delimiter!r} as data.delimiter; a label and at least one feature are "
        "needed.",
    )
    require(
        -columns <= label_column < columns,
        f"data.label_column={label_column} does not exist in {path}, which has {columns} columns.",
    )
    inputs = np.delete(table, label_column, axis=1).astype(np.float32)
    return _checked(_as_images(inputs, image_shape, path), table[:, label_column], path)


def _as_images(inputs: Inputs, image_shape: list[int] | None, path: str) -> Inputs:
    if image_shape is None:
        return inputs
    needed, there = math.prod(image_shape), math.prod(inputs.shape[1:])
    require(
        needed == there and min(image_shape) > 0,
        f"data.image_shape={[*image_shape]} needs {needed} numbers a row; {path} has {there} beside the label.",
    )
    return inputs.reshape(-1, *image_shape)


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
    arrays = _read_npz(path)
    train = _pair(arrays, inputs, labels, image_shape, path)
    if f"{inputs}_test" not in arrays:
        return _standardized(*_cut(*train, test_fraction, split_seed, path), standardize=standardize, dim=None)
    test = _pair(arrays, f"{inputs}_test", f"{labels}_test", image_shape, path)
    return _standardized(*train, *test, standardize=standardize, dim=None)


def _read_npz(path: str) -> dict[str, Any]:
    file = existing_file(path, "data.path")
    with file.open("rb") as stream:
        begins_with = stream.read(6)
    if begins_with == b"\x93NUMPY":
        raise InvalidArgumentError(
            f"data.path={path} is not a NumPy archive: it holds a single array; write both with "
            "numpy.savez(file, x=inputs, y=labels)."
        )
    require(
        begins_with.startswith(b"PK"),
        f"data.path={path} is not a NumPy archive (.npz); for a table of numbers as text use data=csv, and "
        "numpy.savez(file, x=inputs, y=labels) writes an archive.",
    )
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:  # pickles run code
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(f"data.path={path} is not a NumPy archive: {_one_line(error)}") from error


def _pair(
    arrays: dict[str, Any], inputs_name: str, labels_name: str, image_shape: list[int] | None, path: str
) -> tuple[Inputs, Labels]:
    for name in (inputs_name, labels_name):
        if name not in arrays:
            raise InvalidArgumentError(
                f"{path} has no array {name!r}; it has {', '.join(sorted(arrays)) or 'none'}. Set data.inputs and "
                "data.labels."
            )
        if not np.issubdtype(arrays[name].dtype, np.number):
            raise InvalidArgumentError(f"array {name!r} of {path} has dtype {arrays[name].dtype}; numbers are needed.")
    inputs, labels = arrays[inputs_name].astype(np.float32), arrays[labels_name]
    if inputs.ndim < 2 or labels.ndim != 1 or len(inputs) != len(labels):
        raise InvalidArgumentError(
            f"{path}: {inputs_name!r} has shape {inputs.shape} and {labels_name!r} {labels.shape}; (rows, …) and "
            "(rows,) with equal rows are needed."
        )
    return _checked(_as_images(inputs, image_shape, path), labels, path)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _checked(inputs: Inputs, labels: npt.NDArray[Any], path: str) -> tuple[Inputs, Labels]:
    bad_rows = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
    if len(bad_rows):
        raise InvalidArgumentError(f"{path}: row {bad_rows[0]} has a value that is not finite; {len(bad_rows)} in all.")
    whole = np.isfinite(labels) & (np.floor(labels) == labels) & (labels >= 0)
    if not whole.all():
        row = int(np.flatnonzero(~whole)[0])
        raise InvalidArgumentError(
            f"{path}: the label of row {row} is {labels[row]}; class labels are the integers 0, 1, 2, …. "
            "Is the right column or array named as the label?"
        )
    return inputs, labels.astype(np.int64)


def _cut(
    inputs: Inputs, labels: Labels, test_fraction: float, split_seed: int, source: str
) -> tuple[Inputs, Labels, Inputs, Labels]:
    """Hold out ``test_fraction`` of the rows, drawn once by ``split_seed`` and equal in every process."""
    require_fraction(test_fraction)
    rows = len(inputs)
    held_out = round(rows * test_fraction)
    require(
        0 < held_out < rows,
        f"{source} has {rows} rows; data.test_fraction={test_fraction} holds out {held_out} of them, and at least one "
        "is needed on either side.",
    )
    order = np.random.default_rng(split_seed).permutation(rows)
    test, train = order[:held_out], order[held_out:]
    return inputs[train], labels[train], inputs[test], labels[test]


def require_fraction(test_fraction: float) -> None:
    require(0.0 < test_fraction < 1.0, f"data.test_fraction={test_fraction} must lie strictly between 0 and 1.")


def _standardized(
    train: Inputs, train_labels: Labels, test: Inputs, test_labels: Labels, *, standardize: bool, dim: int | None
) -> Examples:
    """Bring all rows to mean 0, variance 1 as measured over dim ``dim`` (None: everything) of the training rows."""
    if train.shape[1:] != test.shape[1:]:
        raise InvalidArgumentError(
            f"training inputs have shape {train.shape[1:]} and held-out inputs {test.shape[1:]}; they must be equal."
        )
    if standardize:
        mean, deviation = train.mean(axis=dim), train.std(axis=dim)
        scale = np.where(deviation > 0, deviation, 1.0)  # a constant feature carries nothing; keep it finite
        train, test = ((part - mean) / scale for part in (train, test))
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    return Examples(
        train=TensorDataset(torch.from_numpy(train.astype(np.float32)), torch.from_numpy(train_labels)),
        test=TensorDataset(torch.from_numpy(test.astype(np.float32)), torch.from_numpy(test_labels)),
        facts={"input_shape": tuple(train.shape[1:]), "classes": max(classes, 2)},
    )
