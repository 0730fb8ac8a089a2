"""Examples with their labels, split into rows to train on and rows held out.

`Examples` are tables in memory with integer class labels; the rows of `click_logs` stay in their file. Every process
loads the same rows in the same order; which of them a replica gets is the strategy's business. A file that is missing
or malformed is one `InvalidArgumentError` that names the file and the setting.
"""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchstrat.config import ClickLogsConfig, CsvConfig, DataConfig, DigitsConfig, NpzConfig, SyntheticClicksConfig
from torchstrat.data.worker_signals import outlive_preemption
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import click_logs, synthetic_clicks
from torchstrat.experiments.click_logs import ClickExamples
from torchstrat.experiments.files import existing_file

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """Training and held-out rows on the CPU: inputs ``(rows, *input_shape)`` float32, labels ``(rows,)`` int64."""

    train: TensorDataset
    test: TensorDataset
    input_shape: tuple[int, ...]
    classes: int

    def train_loader(self, global_batch: int, seed: int, workers: int) -> DataLoader[Any]:
        """Global batches in an order drawn anew each epoch, the last one as short as it comes: no row is dropped."""
        order = torch.Generator().manual_seed(seed)
        return DataLoader(
            self.train,
            batch_size=global_batch,
            shuffle=True,
            generator=order,
            num_workers=workers,
            worker_init_fn=outlive_preemption,
        )

    def test_loader(self, global_batch: int) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=global_batch)


AnyExamples = Examples | ClickExamples


def load(config: DataConfig) -> AnyExamples:
    """The examples a config asks for. Raises `InvalidArgumentError`; touches no device."""
    for schema, loader in _LOADERS.items():
        if isinstance(config, schema):
            return loader(config)
    raise InvalidArgumentError(f"data.name={config.name} is not known; choose one of {', '.join(_NAMES)}.")


def _load_digits(config: DigitsConfig) -> Examples:
    table = _digits_table()
    images = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16.0  # a pixel counts 0 to 16 dots
    return _split(images, table[:, -1].astype(np.int64), config, "the digits")


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


def _load_csv(config: CsvConfig) -> Examples:
    inputs, labels = _read_csv(config.path, "data.path", config)
    if config.test_path is None:
        return _standardized(*_cut(inputs, labels, config, config.path), standardize=config.standardize, dim=0)
    test_inputs, test_labels = _read_csv(config.test_path, "data.test_path", config)
    if test_inputs.shape[1:] != inputs.shape[1:]:
        raise InvalidArgumentError(
            f"{config.test_path} has {test_inputs.shape[1]} features a line and {config.path} has {inputs.shape[1]}; "
            "give files of one format."
        )
    return _standardized(inputs, labels, test_inputs, test_labels, standardize=config.standardize, dim=0)


def _read_csv(path: str, setting: str, config: CsvConfig) -> tuple[Inputs, Labels]:
    file = existing_file(path, setting)
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        header = int(not all(_is_number(cell) for cell in lines[0].split(config.delimiter))) if lines else 0
        if len(lines) == header:
            raise InvalidArgumentError(f"{setting}={path} has no rows{' below its header' if header else ''}.")
        table = np.loadtxt(lines[header:], delimiter=config.delimiter, ndmin=2, dtype=np.float64)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{setting}={path} is not a table of numbers: {_one_line(error)}") from error
    columns = table.shape[1]
    if columns < 2:
        raise InvalidArgumentError(
            f"{setting}={path} has one column, with {config.delimiter!r} as data.delimiter; a label and at least one "
            "feature are needed."
        )
    if not -columns <= config.label_column < columns:
        raise InvalidArgumentError(
            f"data.label_column={config.label_column} does not exist in {path}, which has {columns} columns."
        )
    inputs = np.delete(table, config.label_column, axis=1).astype(np.float32)
    if config.image_shape is not None:
        needed = math.prod(config.image_shape)
        if needed != inputs.shape[1]:
            raise InvalidArgumentError(
                f"data.image_shape={config.image_shape} needs {needed} numbers a line; {path} has {inputs.shape[1]} "
                "beside the label."
            )
        inputs = inputs.reshape(-1, *config.image_shape)
    return _checked(inputs, table[:, config.label_column], path)


def _load_npz(config: NpzConfig) -> Examples:
    file = existing_file(config.path, "data.path")
    try:
        # Not a pickle: it would run its author's code.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array, not an archive")
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(f"data.path={config.path} is not a NumPy archive: {_one_line(error)}") from error
    inputs, labels = _pair(arrays, config.inputs, config.labels, config.path)
    if f"{config.inputs}_test" not in arrays:
        return _standardized(*_cut(inputs, labels, config, config.path), standardize=config.standardize, dim=None)
    test_inputs, test_labels = _pair(arrays, f"{config.inputs}_test", f"{config.labels}_test", config.path)
    return _standardized(inputs, labels, test_inputs, test_labels, standardize=config.standardize, dim=None)


def _pair(arrays: dict[str, Any], inputs_name: str, labels_name: str, path: str) -> tuple[Inputs, Labels]:
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
    return _checked(inputs, labels, path)


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


def _cut(inputs: Inputs, labels: Labels, config: DataConfig, source: str) -> tuple[Inputs, Labels, Inputs, Labels]:
    """Hold out ``test_fraction`` of the rows, drawn once by ``split_seed`` and equal in every process."""
    rows = len(inputs)
    held_out = round(rows * config.test_fraction)
    if not 0 < held_out < rows:
        raise InvalidArgumentError(
            f"{source} has {rows} rows; data.test_fraction={config.test_fraction} holds out {held_out} of them, and at "
            "least one is needed on either side."
        )
    order = np.random.default_rng(config.split_seed).permutation(rows)
    test, train = order[:held_out], order[held_out:]
    return inputs[train], labels[train], inputs[test], labels[test]


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
        input_shape=tuple(train.shape[1:]),
        classes=max(classes, 2),
    )


def _split(inputs: Inputs, labels: Labels, config: DataConfig, source: str) -> Examples:
    return _standardized(*_cut(inputs, labels, config, source), standardize=False, dim=None)


def _load_synthetic_clicks(config: SyntheticClicksConfig) -> ClickExamples:
    return click_logs.load(synthetic_clicks.as_log(config))


_LOADERS: dict[type[DataConfig], Callable[[Any], AnyExamples]] = {
    DigitsConfig: _load_digits,
    CsvConfig: _load_csv,
    NpzConfig: _load_npz,
    ClickLogsConfig: click_logs.load,
    SyntheticClicksConfig: _load_synthetic_clicks,
}
_NAMES = [schema().name for schema in _LOADERS]
