"""The safetensors format: named tensors in one file, and no pickle.

Eight bytes with the length of a header (little-endian), the header in JSON, then the numbers of all tensors, one after
another without gaps::

    {"__metadata__": {"format": "pt"}, "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

It is that simple, so it is written and read here, a block at a time and straight from the file's pages; the library of
that name keeps whole files in memory. https://github.com/huggingface/safetensors describes the format.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from torchstrat.checkpoint.items import Versions
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.tensor_bytes import memory_of

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000  # what the format allows
_METADATA = "__metadata__"
_VERSIONS = "torchstrat.versions"


@dataclass(frozen=True)
class Described:
    """A tensor that is to be written. ``blocks()``: all of its numbers in order, as rows or in one piece."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterable[torch.Tensor]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(stream: IO[bytes], tensors: Mapping[str, Described], versions: Mapping[str, Versions]) -> None:
    """Write a whole file. ``versions``: of modules, by the names of objects, such as JSON knows.

    Asks for one tensor's blocks after another. Raises `OSError`, and, before anything is written,
    `InvalidArgumentError` for a dtype that the format does not have.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise InvalidArgumentError(
                f"{name} is of {tensor.dtype}, which safetensors does not have; write a .pt file instead."
            )
    # The widest first: then every tensor begins at a multiple of its own width, as readers need it to map the file.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    about = {"format": "pt"}
    if versions:
        about[_VERSIONS] = json.dumps(versions)
    header: dict[str, object] = {_METADATA: about}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.bytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    packed += b" " * (-len(packed) % 8)
    stream.write(struct.pack("<Q", len(packed)))
    stream.write(packed)
    for tensor in ordered.values():
        for block in tensor.blocks():
            stream.write(memory_of(block.detach().cpu().contiguous()))
            del block  # before the next one is read


def mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, on its pages: nothing is read before it is used. Not to be written to.

    Raises `InvalidArgumentError` naming the file, and the tensor, where it is not what the format says.
    """
    with _errors_of(file):
        header, begin = _header(file)
        described = {name: one for name, one in header.items() if name != _METADATA}
        if not described:
            return {}
        content = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)[begin:]
        return dict(_tensors(file, described, content))


def versions_in(file: Path) -> Mapping[str, Versions]:
    """What `write` was given."""
    with _errors_of(file):
        header, _ = _header(file)
        found: Mapping[str, Versions] = json.loads(header.get(_METADATA, {}).get(_VERSIONS, "{}"))
        return found


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """And where the numbers begin."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length:,} bytes")
        return json.loads(stream.read(length)), 8 + length


@contextlib.contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{file} cannot be read as a safetensors file: {error!r}.") from error


def _tensors(
    file: Path, header: Mapping[str, Mapping[str, list[int]]], content: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in header.items():
        code, shape, (begin, end) = str(one["dtype"]), [int(size) for size in one["shape"]], one["data_offsets"]
        if code not in _DTYPES:
            raise InvalidArgumentError(f"{file}: {name} is of dtype {code}, which this version of torch does not have.")
        dtype = _DTYPES[code]
        if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or end > len(content):
            raise InvalidArgumentError(
                f"{file} is damaged: {name}, {code} {tuple(shape)}, is said to be at bytes {begin:,} to {end:,} of "
                f"{len(content):,}."
            )
        part = content[begin:end]
        if (part.data_ptr() % dtype.itemsize) or part.storage_offset() % dtype.itemsize:
            part = part.clone()  # written by a program that does not align
        yield name, part.view(dtype).reshape(shape)
