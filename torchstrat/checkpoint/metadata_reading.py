"""Reading torch.distributed.checkpoint's index, ``.metadata``, which is a pickle, without running what is in it.

A pickle names functions and calls them. An index needs the few classes that describe tensors and places in files, so
only these are found; a file that names anything else, because it is damaged or made to do harm, is refused.
"""

from __future__ import annotations

import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.metadata import Metadata

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


def read_metadata(file: File) -> Metadata:
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


def _member(of: Any, name: str) -> Any:
    encoding = _CLASSES.get((_MODULE, "_MEM_FORMAT_ENCODING"))
    if encoding is None or of is not encoding:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {of!r}")
    return encoding[name]
