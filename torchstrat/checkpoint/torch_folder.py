"""What torch.distributed.checkpoint wrote, read by torch's own reader.

Also what torchstrat wrote in its first format, or on a machine with another order of bytes; then with checksums.

Reading torch.distributed.checkpoint's index, ``.metadata``, which is a pickle, without running what is in it.

A pickle names functions and calls them. An index needs the few classes that describe tensors and places in files, so
only these are found; a file that names anything else, because it is damaged or made to do harm, is refused.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
import pickle
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchstrat.checkpoint.manifest import Entry, FileCheck, check_file
from torchstrat.checkpoint.pieces import KeyPath, Piece, key_of
from torchstrat.checkpoint.reading import INDEX
from torchstrat.core import _torch_private
from torchstrat.core.errors import InvalidArgumentError

_MODULE = described.__name__
_CLASSES: Mapping[tuple[str, str], Any] = {
    **{
        (_MODULE, name): getattr(described, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(described, name)
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _torch_private.class_of_places(),
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("collections", "OrderedDict"): OrderedDict,
}
_KINDS_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def read_metadata(file: Path) -> Metadata:
    """Raises `InvalidArgumentError` naming what is in it that is no index's."""
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
    except Exception as error:  # whatever unpickling raises for bytes that are not what they were
        raise InvalidArgumentError(f"{file} cannot be read as a checkpoint's metadata: {error}") from error
    if not isinstance(found, Metadata):
        raise InvalidArgumentError(f"{file} cannot be read as a checkpoint's metadata: it holds a {type(found)}.")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), _KINDS_OF_TORCH):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath", "WindowsPath"):
            return pathlib.PurePath  # where it was written, on whatever system
        if (module, name) == ("builtins", "getattr"):
            return _member  # how some versions of Python pickle members of an Enum
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no index of torch.distributed.checkpoint has. It is damaged, or was made "
            "to run something; if you trust it, convert it with torch.distributed.checkpoint.format_utils."
        )


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout of tensors")
    return found


def _member(of: Any, name: str) -> object:
    encoding = _CLASSES.get((_MODULE, "_MEM_FORMAT_ENCODING"))
    if encoding is None or of is not encoding:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {of!r}")
    return encoding[name]


@dataclass(frozen=True)
class TorchFolder:
    """``files``: what a manifest says of them, if there is one."""

    folder: Path
    metadata: Metadata
    files: Mapping[str, FileCheck]
    paths: Mapping[str, KeyPath]

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Of a tensor; None for another value."""
        found = self.metadata.state_dict_metadata[key]
        return tuple(found.size) if isinstance(found, TensorStorageMetadata) else None

    def dtype(self, key: str) -> torch.dtype | None:
        found = self.metadata.state_dict_metadata[key]
        return found.properties.dtype if isinstance(found, TensorStorageMetadata) else None

    def under(self, name: str) -> dict[str, KeyPath]:
        """What belongs to one object of the checkpoint."""
        return {key: path for key, path in self.paths.items() if path[0] == name}

    def place_of(self, piece: Piece) -> Piece:
        return piece

    def read(self, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
        """See `reading.read`. Files that have a checksum are compared with it before they are read."""
        results: list[object] = []
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for number, (piece, rows) in enumerate(wanted):
            result, items = self._planned(number, piece, rows)
            results.append(result)
            for item in items:
                by_file[os.fspath(self.metadata.storage_data[item.storage_index].relative_path)].append(item)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, False)
        for name, items in sorted(by_file.items()):
            if name in self.files:
                check_file(self.folder / name, self.files[name])
            for item in items:
                self._read_item(reader, name, item, results)
        return results

    def _planned(self, number: int, piece: Piece, rows: int | None) -> tuple[object, list[ReadItem]]:
        """What takes the value of ``wanted[number]``, and what is to be read into it."""
        described = self.metadata.state_dict_metadata[piece.key]
        if isinstance(described, BytesStorageMetadata):
            index, nowhere = MetadataIndex(piece.key), torch.Size((0,))
            return None, [ReadItem(LoadItemType.BYTE_IO, _place(number), nowhere, index, nowhere, nowhere)]
        size, offsets = described.size, (0,) * len(described.size)
        if rows is not None and piece.shape:
            size, offsets = torch.Size((rows, *size[1:])), piece.offsets()
        chunk = ChunkStorageMetadata(torch.Size(offsets), size)
        items = create_read_items_for_chunk_list(piece.key, described, [chunk])
        if sum(math.prod(item.lengths) for item in items) != math.prod(size):
            raise InvalidArgumentError(f"{self.folder}: rows of {piece.key} are missing in the checkpoint.")
        target = torch.empty(size, dtype=described.properties.dtype, device="cpu")
        return target, [dataclasses.replace(item, dest_index=_place(number)) for item in items]

    def _read_item(self, reader: FileSystemReader, name: str, item: ReadItem, results: list[Any]) -> None:
        try:
            reader.read_data(LoadPlan([item]), _Receiver(results)).wait()
        except Exception as error:  # whatever torch.load raises
            raise InvalidArgumentError(
                f"{item.storage_index.fqn} in {self.folder / name} cannot be read: {type(error).__name__}: {error}"
            ) from error


def open_torch_folder(folder: Path, files: Mapping[str, FileCheck]) -> TorchFolder:
    """``files``: what a manifest says of them; empty without one. Raises `InvalidArgumentError`."""
    metadata = read_metadata(folder / INDEX)
    try:
        paths = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
        paths = {key: paths.get(key) or tuple(key.split(".", 1)) for key in metadata.state_dict_metadata}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{folder / INDEX} cannot be read as a checkpoint's metadata: {error}") from error
    return TorchFolder(folder, metadata, files, paths)


def _place(number: int) -> MetadataIndex:
    return MetadataIndex(str(number))


class _Receiver(LoadPlanner):
    """Takes data in, by the numbers that stand for names in the items' destinations."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._results[int(read_item.dest_index.fqn)] = torch.load(value, map_location="cpu", weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self._results[int(read_item.dest_index.fqn)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    def set_up_planner(
        self, state_dict: object, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan


def packed_metadata(files: Mapping[str, FileCheck]) -> bytes:
    """The content of its file ``.metadata``."""
    found: dict[str, Any] = {}
    places: dict[MetadataIndex, object] = {}
    paths = {}
    for name, check in files.items():
        for offset, entry in check.by_offset():
            key = key_of(entry.path)
            paths[key] = entry.path
            index = MetadataIndex(key)
            if entry.shape is None:
                found[key] = BytesStorageMetadata()
            else:
                chunk = _chunk(entry, entry.shape)
                tensor = found.setdefault(key, _described(entry, entry.shape))
                index = MetadataIndex(key, chunk.offsets, len(tensor.chunks))
                tensor.chunks.append(chunk)
            places[index] = _torch_private.place_in_checkpoint_file(name, offset, entry.bytes)
    return pickle.dumps(
        Metadata(
            state_dict_metadata=found,
            planner_data=paths,
            storage_data=places,
            storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
            version=_torch_private.checkpoint_version(),
        )
    )


def _described(entry: Entry, shape: tuple[int, ...]) -> TensorStorageMetadata:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])


def _chunk(entry: Entry, shape: tuple[int, ...]) -> ChunkStorageMetadata:
    if not shape:
        return ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    inner = shape[1:]
    return ChunkStorageMetadata(torch.Size((entry.first, *[0] * len(inner))), torch.Size((entry.rows, *inner)))
