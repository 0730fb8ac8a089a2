"""A topology as bytes: the wire format of Protocol Buffers, with TensorFlow's numbers for the fields.

::

    message TopologyProto {
      repeated int32 mesh_shape = 1;
      int32 num_tasks = 2;
      int32 num_tpu_devices_per_task = 3;
      repeated int32 device_coordinates = 4;   // tasks × devices per task × 4, flat
    }

So either side reads what the other wrote. Fields of other numbers (the hardware's features) are skipped. The format is
described at https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

MESH_SHAPE, NUM_TASKS, DEVICES_PER_TASK, COORDINATES = 1, 2, 3, 4
VARINT, FIXED_64_BITS, LENGTH_DELIMITED, FIXED_32_BITS = 0, 1, 2, 5
FIXED_SIZES = {FIXED_64_BITS: 8, FIXED_32_BITS: 4}
VARINT_BYTES = 10
"""The longest varint that the format allows: 64 bits, 7 in a byte."""


@dataclass(frozen=True)
class TopologyFields:
    """The fields as they stand in the bytes, unchecked; those that do not occur are empty or 0."""

    mesh_shape: list[int]
    num_tasks: int
    num_tpus_per_task: int
    device_coordinates: list[int]


def encode(fields: TopologyFields) -> bytes:
    """``fields`` as bytes. All numbers have to be non-negative."""
    return b"".join(
        (
            _packed(MESH_SHAPE, fields.mesh_shape),
            _varint(NUM_TASKS << 3 | VARINT) + _varint(fields.num_tasks),
            _varint(DEVICES_PER_TASK << 3 | VARINT) + _varint(fields.num_tpus_per_task),
            _packed(COORDINATES, fields.device_coordinates),
        )
    )


def decode(data: bytes) -> TopologyFields:
    """The fields that ``data`` holds.

    Raises:
        WrongTypeError: ``data`` is not bytes.
        InvalidArgumentError: ``data`` is not in the format, or ends too early.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WrongTypeError(f"serialized must be the bytes of a topology; got {type(data).__name__} {data!r:.200}.")
    data = bytes(data)
    try:
        found: dict[int, list[int]] = {MESH_SHAPE: [], NUM_TASKS: [0], DEVICES_PER_TASK: [0], COORDINATES: []}
        for number, value in _values(data):
            if number in found:
                found[number].append(value)
    except _MalformedError as error:
        raise InvalidArgumentError(
            f"serialized is not a topology: {error}, in {len(data)} bytes that begin with {data[:16]!r}. Pass what "
            "Topology.serialized() returned."
        ) from None
    # Of a field that is no list, the last value counts.
    return TopologyFields(found[MESH_SHAPE], found[NUM_TASKS][-1], found[DEVICES_PER_TASK][-1], found[COORDINATES])


class _MalformedError(Exception):
    """The bytes are not in the format; the message says where and why."""


def _values(data: bytes) -> Iterator[tuple[int, int]]:
    """The integers in ``data`` with the numbers of their fields. Lists may come packed, or value by value."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _read_varint(data, position)
            yield number, _signed(value)
            continue
        if kind == LENGTH_DELIMITED:
            size, position = _read_varint(data, position)
        elif kind in FIXED_SIZES:
            size = FIXED_SIZES[kind]
        else:
            raise _MalformedError(f"byte {position - 1} begins a field of unknown kind {kind}")
        content, position = data[position : position + size], position + size
        if position > len(data):
            raise _MalformedError(f"field {number} ends {position - len(data)} bytes after the end")
        if number in (MESH_SHAPE, COORDINATES) and kind == LENGTH_DELIMITED:
            yield from ((number, value) for value in _unpacked(content))


def _unpacked(content: bytes) -> Iterator[int]:
    position = 0
    while position < len(content):
        value, position = _read_varint(content, position)
        yield _signed(value)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position after it: 7 bits per byte, lowest first, the top bit says more."""
    value = 0
    for shift, byte in enumerate(data[position : position + VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    raise _MalformedError(f"the number at byte {position} does not end")


def _signed(value: int) -> int:
    """Negative numbers are stored in two's complement of 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _packed(number: int, values: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, values))
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(content)) + content
