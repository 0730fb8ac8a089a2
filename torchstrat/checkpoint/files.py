"""Pieces of tensors, and other values, in the files of torch.distributed.checkpoint; no process group involved.

Every process that holds something writes a file of its own into the checkpoint's folder (`write_part`); one of them
then writes the metadata over all of it (`write_metadata`). Whoever reads takes the metadata and reads what it needs,
whoever wrote it and however it was cut (`read`). Python values are pickled, so a checkpoint is to be trusted like code.

Rows are cut into blocks of about `BLOCK_BYTES`: torch reads a block whole even where it needs a few rows of it, so a
block bounds the memory that reading takes beyond what is read.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from torchstrat.checkpoint.manifest import FileCheck, check_file, checked
from torchstrat.checkpoint.pieces import Path, Piece, key_of
from torchstrat.errors import InvalidArgumentError

BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class WrittenPart:
    """What one process has written: torch's plan and results, and what its files look like."""

    plan: SavePlan
    results: Sequence[WriteResult]
    files: Mapping[str, FileCheck]


def write_part(
    folder: Folder,
    number: int,
    tensors: Sequence[tuple[Piece, torch.Tensor]],
    values: Sequence[tuple[Path, Any]] = (),
) -> WrittenPart:
    """Write a file, which no other part of the checkpoint has the ``number`` of, into ``folder``, which is there.

    The file is on the disk when this returns, but for its name: see `manifest.sync_folder`. Raises `OSError`.
    """
    items: list[WriteItem] = []
    data: dict[MetadataIndex, Any] = {}
    paths: dict[str, Path] = {}
    for piece, tensor in tensors:
        paths[piece.key] = piece.path
        for first, block in _blocks(tensor.detach()):
            index = MetadataIndex(piece.key, piece.offsets(first))
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets(first)), block.size())
            properties = TensorProperties(dtype=tensor.dtype)
            written = TensorWriteData(chunk, properties, torch.Size(piece.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
            data[index] = block
    for path, value in values:
        index = MetadataIndex(key_of(path))
        paths[index.fqn] = path
        items.append(WriteItem(index, WriteItemType.BYTE_IO))
        data[index] = value
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    # The writer names files after the place of their plan in the global plan.
    plan = writer.prepare_global_plan([*(SavePlan([]) for _ in range(number)), SavePlan(items, planner_data=paths)])[-1]
    # What torch 2.9's own writer calls warns of itself. Not catch_warnings: that is not for several threads.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
    results = writer.write_data(plan, _Writing(data)).value() if items else []
    names = {result.storage_data.relative_path for result in results}
    return WrittenPart(plan, results, {name: checked(folder / name) for name in sorted(names)})


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows)."""
    if tensor.dim() == 0 or tensor.nbytes <= BLOCK_BYTES:
        yield 0, tensor
        return
    rows = max(1, BLOCK_BYTES * tensor.shape[0] // tensor.nbytes)
    for first in range(0, tensor.shape[0], rows):
        yield first, tensor[first : first + rows]


def write_metadata(folder: Folder, parts: Sequence[WrittenPart]) -> None:
    """Write what torch.distributed.checkpoint needs to read all of ``parts``.

    Raises `InvalidArgumentError` where the parts together do not make whole tensors.
    """
    planner = DefaultSavePlanner()
    try:
        _, metadata = planner.create_global_plan([part.plan for part in parts])
    except ValueError as error:
        raise InvalidArgumentError(f"what was written does not add up to whole tensors: {error}") from error
    writer = FileSystemWriter(folder)
    writer.finish(metadata, [list(part.results) for part in parts])


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is there to be read. ``paths``: what is in it, by key."""

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


def open_stored(folder: Folder, files: Mapping[str, FileCheck]) -> Stored:
    """``files``: what the checkpoint's manifest says of them; empty without one. Raises `InvalidArgumentError`."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
        paths = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
        paths = {key: paths.get(key) or tuple(key.split(".", 1)) for key in metadata.state_dict_metadata}
    except Exception as error:  # whatever unpickling raises for bytes that are not what they were
        raise InvalidArgumentError(
            f"{folder / '.metadata'} cannot be read as a checkpoint's metadata: {error}"
        ) from error
    return Stored(folder, metadata, files, paths)


def read(stored: Stored, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
    """The values of ``wanted``: pieces, each with its number of rows (None: the whole tensor, or another value).

    Tensors are new, on the CPU, of the stored dtype. Every file that is read is first compared with the manifest.

    Raises:
        InvalidArgumentError: a file is missing, or not what was written; the stored chunks have a gap.
    """
    results: list[Any] = []
    items: list[ReadItem] = []
    for number, (piece, rows) in enumerate(wanted):
        described = stored.metadata.state_dict_metadata[piece.key]
        if isinstance(described, BytesStorageMetadata):
            results.append(None)
            index = MetadataIndex(piece.key)
            nowhere = torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, _place(number), nowhere, index, nowhere, nowhere))
            continue
        size, offsets = described.size, (0,) * len(described.size)
        if rows is not None and piece.shape:
            size, offsets = torch.Size((rows, *size[1:])), piece.offsets()
        results.append(torch.empty(size, dtype=described.properties.dtype))
        chunk = ChunkStorageMetadata(torch.Size(offsets), size)
        found = create_read_items_for_chunk_list(piece.key, described, [chunk])
        if sum(math.prod(item.lengths) for item in found) != math.prod(size):
            raise InvalidArgumentError(f"{stored.folder}: rows of {piece.key} are missing in the checkpoint.")
        items += [dataclasses.replace(item, dest_index=_place(number)) for item in found]
    _check_files(stored, items)
    reader = FileSystemReader(stored.folder)
    reader.set_up_storage_reader(stored.metadata, False)
    try:
        reader.read_data(LoadPlan(items), _Reading(results)).wait()
    except Exception as error:  # of files without a manifest: whatever torch.load raises
        raise InvalidArgumentError(f"{stored.folder} cannot be read: {type(error).__name__}: {error}") from error
    return results


def _place(number: int) -> MetadataIndex:
    return MetadataIndex(str(number))


def _check_files(stored: Stored, items: Sequence[ReadItem]) -> None:
    names = {os.fspath(stored.metadata.storage_data[item.storage_index].relative_path) for item in items}
    for name in sorted(names & stored.files.keys()):
        check_file(stored.folder / name, stored.files[name])


class _Writing(SavePlanner):
    """Hands out data; there is nothing to plan."""

    def __init__(self, data: Mapping[MetadataIndex, Any]) -> None:
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._data[write_item.index]
        if write_item.type != WriteItemType.BYTE_IO:
            block: torch.Tensor = value
            return block
        packed = io.BytesIO()
        torch.save(value, packed)
        return packed

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


class _Reading(LoadPlanner):
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
