"""Examples with their labels, split into rows to train on and rows held out.

Every process loads the same rows in the same order; which of them a replica gets is the strategy's business. A file
that is missing or malformed is one `InvalidArgumentError` that names the file and the setting.
"""

from __future__ import annotations

import importlib.util
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

from torchstrat.app import targets
from torchstrat.app.config import require
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.data.workers import outlive_preemption

Array = npt.NDArray[Any]
Rows = tuple[Array, Array]
"""Inputs and labels."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs and labels → the mean over the batch."""


@dataclass(frozen=True)
class Examples:
    """Training and held-out rows, `torch.utils.data.Dataset`s of known length, and what goes with them."""

    train: Any
    test: Any
    facts: Mapping[str, object] = field(default_factory=dict)
    """What a model's constructor may ask for by name: ``input_shape``, ``classes``."""
    loss: Loss = functional.cross_entropy
    """Unless the configuration has one."""
    collate_fn: Callable[[list[Any]], Any] | None = None

    def train_loader(self, global_batch: int, seed: int, workers: int) -> DataLoader[object]:
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

    def test_loader(self, global_batch: int) -> DataLoader[object]:
        return DataLoader(self.test, batch_size=global_batch, collate_fn=self.collate_fn)


def load(call: Mapping[str, object]) -> Examples:
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
            "torch.utils.data.Dataset with a length, training and held out, or torchstrat.app.data.Examples."
        ) from error
    return Examples(train, test, _facts(train) if rows[0] else {})


def _facts(rows: Any) -> dict[str, object]:
    facts: dict[str, object] = {}
    if isinstance(inputs := rows[0][0], torch.Tensor):
        facts["input_shape"] = tuple(inputs.shape)
    if hasattr(rows, "classes"):  # as torchvision's have it
        facts["classes"] = len(rows.classes)
    elif isinstance(rows, TensorDataset) and not rows.tensors[-1].is_floating_point():
        facts["classes"] = int(rows.tensors[-1].max()) + 1
    return facts


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Examples:
    """scikit-learn's 1,797 handwritten digits: grey images ``(1, 8, 8)``, ten classes."""
    table = _digits_table()
    images = table[:, :-1].reshape(-1, 1, 8, 8) / 16.0  # a pixel counts 0 to 16 dots
    return _examples("digits", (images, table[:, -1]), None, None, test_fraction, split_seed)


def _digits_table() -> Array:
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

    def read(file: str) -> Rows:
        lines = [line for line in Path(file).expanduser().read_text("utf-8-sig").splitlines() if line.strip()]
        if lines and not all(map(_is_number, lines[0].split(delimiter))):
            del lines[0]
        require(bool(lines), f"{file} has no rows of numbers.")
        table = np.loadtxt(lines, delimiter=delimiter, ndmin=2)
        columns = table.shape[1]
        require(
            columns > 1 and -columns <= label_column < columns,
            f"{file} has {columns} column(s), with {delimiter!r} as data.delimiter; at least one feature and the label "
            f"are needed, and data.label_column={label_column} has to be there.",
        )
        return np.delete(table, label_column, axis=1), table[:, label_column]

    test = None if test_path is None else read(test_path)
    standard = "features" if standardize else None
    return _examples(path, read(path), test, image_shape, test_fraction, split_seed, standard)


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

    With ``<inputs>_test`` and ``<labels>_test`` in the archive these are the held-out rows. ``image_shape``,
    ``test_fraction`` and ``split_seed``: as for `csv`; ``standardize`` shifts and scales all inputs alike.
    """
    try:
        # Pickles run code.
        with Path(path).expanduser().open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(
            f"data.path={path} is not a NumPy archive (.npz); for a table of numbers as text use data=csv, and "
            f"numpy.savez(file, x=inputs, y=labels) writes an archive of arrays. NumPy says: {error!r}"
        ) from error

    def read(*names: str) -> Rows:
        missing = [name for name in names if name not in arrays]
        there = ", ".join(sorted(arrays)) or "none"
        require(not missing, f"{path} has no array {missing}; it has {there}. Set data.inputs and data.labels.")
        return arrays[names[0]], arrays[names[1]]

    test = read(f"{inputs}_test", f"{labels}_test") if f"{inputs}_test" in arrays else None
    standard = "everything" if standardize else None
    return _examples(path, read(inputs, labels), test, image_shape, test_fraction, split_seed, standard)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _examples(
    source: str,
    train: Rows,
    test: Rows | None,
    image_shape: list[int] | None,
    test_fraction: float,
    split_seed: int,
    standardize: str | None = None,
) -> Examples:
    """``test``: None to draw it from ``train``, equal in every process. ``standardize``: bring ``features``, each, or
    ``everything`` to mean 0, variance 1 over the training rows."""
    train = _checked(source, *train, image_shape)
    if test is not None:
        test = _checked(source, *test, image_shape)
    else:
        require(0.0 < test_fraction < 1.0, f"data.test_fraction={test_fraction} must lie strictly between 0 and 1.")
        rows = len(train[1])
        held_out = round(rows * test_fraction)
        require(
            0 < held_out < rows,
            f"{source} has {rows} rows; data.test_fraction={test_fraction} holds out {held_out} of them, and at "
            "least one is needed on either side.",
        )
        order = np.random.default_rng(split_seed).permutation(rows)
        test, train = ((train[0][part], train[1][part]) for part in (order[:held_out], order[held_out:]))
    shape, test_shape = train[0].shape[1:], test[0].shape[1:]
    require(shape == test_shape, f"training inputs have shape {shape}, held-out inputs {test_shape}; give equal ones.")
    if standardize is not None:
        dim = 0 if standardize == "features" else None
        mean, deviation = train[0].mean(axis=dim), train[0].std(axis=dim)
        scale = np.where(deviation > 0, deviation, 1.0)  # a constant feature carries nothing; keep it finite
        train, test = (((inputs - mean) / scale, labels) for inputs, labels in (train, test))
    sets = [
        TensorDataset(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))
        for inputs, labels in (train, test)
    ]
    classes = int(max(train[1].max(), test[1].max())) + 1
    return Examples(sets[0], sets[1], {"input_shape": tuple(shape), "classes": max(classes, 2)})


def _checked(source: str, inputs: Array, labels: Array, image_shape: list[int] | None) -> Rows:
    """Inputs, finite and of the shape that is asked for, and labels that are classes."""
    inputs = inputs.astype(np.float32)
    require(
        inputs.ndim >= 2 and labels.ndim == 1 and len(inputs) == len(labels),
        f"{source}: inputs have shape {inputs.shape}, labels {labels.shape}; (rows, …) and (rows,) with equal rows are "
        "needed.",
    )
    if image_shape is not None:
        inputs = inputs.reshape(len(inputs), *image_shape)
    bad = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
    if len(bad):
        raise InvalidArgumentError(f"{source}: row {bad[0]} has a value that is not finite; {len(bad)} in all.")
    bad = np.flatnonzero(~(np.isfinite(labels) & (np.floor(labels) == labels) & (labels >= 0)))
    if len(bad):
        raise InvalidArgumentError(
            f"{source}: the label of row {bad[0]} is {labels[bad[0]]}; class labels are the integers 0, 1, 2, …. Is "
            "the right column or array named as the label?"
        )
    return inputs, labels.astype(np.int64)
