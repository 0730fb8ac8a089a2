"""The index of a checkpoint as torch.distributed.checkpoint has it, so that torch reads it without torchstrat."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchstrat.checkpoint.manifest import Entry, FileCheck
from torchstrat.checkpoint.pieces import key_of
from torchstrat.core import _torch_private


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
