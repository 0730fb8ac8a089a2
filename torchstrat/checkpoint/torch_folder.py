"""What torch.distributed.checkpoint wrote, read by torch's own reader.

Also what torchstrat wrote in its first format, or on a machine with another order of bytes; then with checksums.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchstrat.checkpoint.manifest import FileCheck, check_file
from torchstrat.checkpoint.metadata_reading import read_metadata
from torchstrat.checkpoint.pieces import Path, Piece
from torchstrat.checkpoint.reading import INDEX
from torchstrat.core.errors import InvalidArgumentError


@dataclass(frozen=True)
class TorchFolder:
    """``files``: what a manifest says of them, if there is one."""

    folder: Folder
    metadata: Metadata
    files: Mapping[str, FileCheck]
    paths: Mapping[str, Path]

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Of a tensor; None for another value."""
        found = self.metadata.state_dict_metadata[key]
        return tuple(found.size) if isinstance(found, TensorStorageMetadata) else None

    def dtype(self, key: str) -> torch.dtype | None:
        found = self.metadata.state_dict_metadata[key]
        return found.properties.dtype if isinstance(found, TensorStorageMetadata) else None

    def under(self, name: str) -> dict[str, Path]:
        """What belongs to one object of the checkpoint."""
        return {key: path for key, path in self.paths.items() if path[0] == name}

    def place_of(self, piece: Piece) -> Piece:
        return piece

    def read(self, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
        """See `reading.read`. Files that have a checksum are compared with it before they are read."""
        results: list[Any] = []
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

    def _planned(self, number: int, piece: Piece, rows: int | None) -> tuple[Any, list[ReadItem]]:
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


def open_torch_folder(folder: Folder, files: Mapping[str, FileCheck]) -> TorchFolder:
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
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
