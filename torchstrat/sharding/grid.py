"""Replicas and their logical devices as a grid, how a tensor is cut over it, and that as a table and as boxes of text.

Pure: no device is touched.

The grid's axes are ``replica`` and ``d0``, ``d1``, …: the logical devices of one replica, arranged for one partition.
A tensor split into ``partition_dimensions=(1, 4, 2)`` sees them as a 1 × 4 × 2 block, whose axes ``d0``, ``d1``, ``d2``
lie along its dimensions; another tensor may see the same devices as 8 × 1. Tiles are numbered row-major, so tile ``i``
of a replica is on its logical device ``i`` whatever the partition.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from torchstrat.core.errors import InvalidArgumentError

REPLICA_AXIS = "replica"


def logical_axis(index: int) -> str:
    """The name of axis ``index`` of a replica's logical devices: ``d0``, ``d1``, …"""
    return f"d{index}"


@dataclass(frozen=True)
class DeviceGrid:
    """Which device is which replica's which logical device.

    ``devices[replica][logical]``: a number of the runtime's, each at most once; as many logical devices per replica.
    """

    devices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        flat = [device for replica in self.devices for device in replica]
        if not flat or len({len(replica) for replica in self.devices}) != 1:
            raise InvalidArgumentError(
                "a grid of devices needs at least one replica, and as many logical devices in each; got "
                f"{self.devices}."
            )
        if len(set(flat)) != len(flat):
            raise InvalidArgumentError(f"a device can be in one place only; got {self.devices}.")

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def num_logical_devices(self) -> int:
        return len(self.devices[0])


@dataclass(frozen=True)
class Sharding:
    """How one tensor is cut over the devices of a `DeviceGrid`.

    ``axis_sizes``: the sizes of ``d0``, ``d1``, …, whose product is the number of logical devices.
    ``spec``: for each dimension of the tensor the axes that cut it, the slowest first; none: each device has all of it.
    """

    axis_sizes: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        used = [axis for axes in self.spec for axis in axes]
        if len(set(used)) != len(used):
            raise InvalidArgumentError(f"an axis can cut one dimension only, once; got {self.spec}.")

    @classmethod
    def replicated(cls, rank: int, num_logical_devices: int) -> Sharding:
        """Whole on every device."""
        return cls((num_logical_devices,), ((),) * rank)

    @classmethod
    def split(cls, partition_dimensions: Sequence[int]) -> Sharding:
        """``partition_dimensions[i]`` equal parts along dimension ``i``; their product is the number of devices."""
        sizes = tuple(partition_dimensions)
        spec = tuple((logical_axis(index),) if size > 1 else () for index, size in enumerate(sizes))
        return cls(sizes, spec)

    def stacked(self) -> Sharding:
        """For the tensor of all replicas: a new first dimension, one entry per replica, cut over the replicas."""
        return Sharding(self.axis_sizes, ((REPLICA_AXIS,), *self.spec))

    @property
    def rank(self) -> int:
        return len(self.spec)

    @property
    def is_replicated(self) -> bool:
        return not any(self.spec)

    def parts(self, num_replicas: int) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        return tuple(math.prod(self._size(axis, num_replicas) for axis in axes) for axes in self.spec)

    def tile_shape(self, shape: Sequence[int], num_replicas: int) -> tuple[int, ...]:
        """The shape of the piece on each device of a tensor of ``shape``, which has to divide."""
        return tuple(size // parts for size, parts in zip(shape, self.parts(num_replicas), strict=True))

    def tiles(self, shape: Sequence[int], grid: DeviceGrid) -> dict[int, tuple[slice, ...]]:
        """Device → the part of a tensor of ``shape`` that it holds."""
        if math.prod(self.axis_sizes) != grid.num_logical_devices:
            raise InvalidArgumentError(
                f"axes of sizes {self.axis_sizes} are for {math.prod(self.axis_sizes)} logical devices; a replica of "
                f"this grid has {grid.num_logical_devices}."
            )
        tile = self.tile_shape(shape, grid.num_replicas)
        found: dict[int, tuple[slice, ...]] = {}
        for replica, devices in enumerate(grid.devices):
            for logical, device in enumerate(devices):
                place = self._coordinates(replica, logical)
                slices = []
                for axes, size in zip(self.spec, tile, strict=True):
                    index = 0
                    for axis in axes:
                        index = index * self._size(axis, grid.num_replicas) + place[axis]
                    slices.append(slice(index * size, (index + 1) * size))
                found[device] = tuple(slices)
        return found

    def _size(self, axis: str, num_replicas: int) -> int:
        return num_replicas if axis == REPLICA_AXIS else self.axis_sizes[int(axis[1:])]

    def _coordinates(self, replica: int, logical: int) -> dict[str, int]:
        place = {REPLICA_AXIS: replica}
        for index in reversed(range(len(self.axis_sizes))):
            logical, place[logical_axis(index)] = divmod(logical, self.axis_sizes[index])
        return place


RUNS_SHOWN = 4


@dataclass(frozen=True)
class ShardedEntry:
    """One tensor: its whole shape, how it is cut, and what its elements are."""

    shape: tuple[int, ...]
    sharding: Sharding
    dtype: torch.dtype

    @property
    def total_bytes(self) -> int:
        """Of one whole copy."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """One tensor over a grid, whose pieces are all of one shape.

    The pieces form a table that lies like the tensor: its columns are the parts of the last dimension that is cut, its
    rows the combinations of parts of the others. If only one dimension is cut and it is not the tensor's last, it makes
    the rows, and there is one column.
    """

    entry: ShardedEntry
    grid: DeviceGrid

    @classmethod
    def checked(cls, name: str, entry: ShardedEntry, grid: DeviceGrid) -> Layout:
        """Raise `InvalidArgumentError` unless ``entry`` fits ``grid`` and divides."""
        shape, sharding = entry.shape, entry.sharding
        if math.prod(sharding.axis_sizes) != grid.num_logical_devices:
            raise InvalidArgumentError(
                f"{name} is cut over axes of sizes {sharding.axis_sizes}, which are {math.prod(sharding.axis_sizes)} "
                f"logical devices; the replicas have {grid.num_logical_devices}."
            )
        if sharding.rank != len(shape):
            raise InvalidArgumentError(f"{name} has the shape {shape}, and its sharding has {sharding.rank} entries.")
        parts = sharding.parts(grid.num_replicas)
        if any(size % count for size, count in zip(shape, parts, strict=True)):
            raise InvalidArgumentError(f"{name} has the shape {shape}, which does not divide into {parts} equal parts.")
        return cls(entry, grid)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        return self.entry.sharding.parts(self.grid.num_replicas)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        return self.entry.sharding.tile_shape(self.entry.shape, self.grid.num_replicas)

    @property
    def piece_bytes(self) -> int:
        return math.prod(self.piece_shape) * self.entry.dtype.itemsize

    @property
    def num_pieces(self) -> int:
        return math.prod(self.parts)

    @property
    def copies(self) -> int:
        """How many devices hold each piece."""
        return self.grid.num_replicas * self.grid.num_logical_devices // self.num_pieces

    @property
    def is_cut(self) -> bool:
        return self.num_pieces > 1

    @property
    def is_cut_over_logical_devices(self) -> bool:
        """Whether the logical devices of one replica hold different parts."""
        return any(size > 1 for axis, size in self._used_axes().items() if axis != REPLICA_AXIS)

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, parts in enumerate(self.parts) if parts > 1)

    @property
    def column_dim(self) -> int | None:
        """The dimension whose parts are the table's columns."""
        if not self.cut_dims or (len(self.cut_dims) == 1 and self.cut_dims[0] < len(self.parts) - 1):
            return None
        return self.cut_dims[-1]

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dimensions whose parts are the table's rows."""
        return tuple(dim for dim in self.cut_dims if dim != self.column_dim)

    @cached_property
    def table(self) -> list[list[tuple[int, ...]]]:
        """Row → column → the index of the piece: its part of each of `cut_dims`."""
        rows = itertools.product(*(range(self.parts[dim]) for dim in self.row_dims))
        if self.column_dim is None:
            return [[row] for row in rows]
        return [[(*row, column) for column in range(self.parts[self.column_dim])] for row in rows]

    def row_span(self, index: tuple[int, ...]) -> str:
        """The range of indices of `row_dims` of the row that the piece is in."""
        return ", ".join(self.span(dim, part) for dim, part in zip(self.row_dims, index, strict=False))

    def column_span(self, index: tuple[int, ...]) -> str:
        """The range of indices of `column_dim` of the column that the piece is in."""
        return "" if self.column_dim is None else self.span(self.column_dim, index[-1])

    def row_label(self) -> str:
        return f"dim {', '.join(map(str, self.row_dims))}" if self.row_dims else ""

    def column_label(self) -> str:
        return "" if self.column_dim is None else f"dim {self.column_dim}"

    @cached_property
    def holders(self) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """Part of each of `cut_dims` → the (replica, logical device) pairs that hold it, ascending."""
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        place = {device: at for at, device in self._places().items()}
        # The tensor that has one element per piece is cut like the tensor itself, whose own pieces may be empty.
        for device, slices in self.entry.sharding.tiles(self.parts, self.grid).items():
            index = tuple(slices[dim].start for dim in self.cut_dims)
            found.setdefault(index, []).append(place[device])
        return {index: sorted(places) for index, places in sorted(found.items())}

    def span(self, dim: int, part: int) -> str:
        """``start:stop`` of one part of a dimension."""
        size = self.piece_shape[dim]
        return f"{part * size}:{(part + 1) * size}"

    def spec_text(self) -> str:
        """How it is cut as users write it, with – for what is not: ``(replica, d0, –)``; ``whole``."""
        if not self.is_cut:
            return "whole"
        return shape_text(["·".join(axes) or "–" for axes in self.entry.sharding.spec])

    def axes_text(self) -> str:
        """The sizes of the axes that cut it: ``replica = 2, d0 = 4``."""
        return ", ".join(f"{axis} = {size}" for axis, size in self._used_axes().items())

    def who(self, index: tuple[int, ...]) -> list[str]:
        """Which logical devices hold a piece, after the replicas if not those of all do."""
        replicas = sorted({replica for replica, _ in self.holders[index]})
        logical = sorted({logical for _, logical in self.holders[index]})
        texts = ["every logical" if len(logical) == self.grid.num_logical_devices > 1 else f"logical {runs(logical)}"]
        return texts if len(replicas) == self.grid.num_replicas else [f"replica {runs(replicas)}", *texts]

    def where(self, index: tuple[int, ...], device_names: Sequence[str]) -> str:
        """The names of the devices that hold a piece."""
        return joined_names([device_names[self._places()[at]] for at in self.holders[index]])

    def _used_axes(self) -> dict[str, int]:
        sizes = {logical_axis(index): size for index, size in enumerate(self.entry.sharding.axis_sizes)}
        sizes[REPLICA_AXIS] = self.grid.num_replicas
        return {axis: sizes[axis] for axes in self.entry.sharding.spec for axis in axes}

    def _places(self) -> dict[tuple[int, int], int]:
        return {
            (replica, logical): device
            for replica, devices in enumerate(self.grid.devices)
            for logical, device in enumerate(devices)
        }


def shape_text(items: Sequence[object]) -> str:
    """As Python writes a tuple, without quotes."""
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"


def size_text(size_bytes: int) -> str:
    """``640 B``, ``1.5 MiB``."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size, unit = size_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def runs(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined: ``0–3, 8``; the end is left out where there are many runs."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    texts = [_run(run) for run in found]
    if len(texts) <= RUNS_SHOWN:
        return ", ".join(texts)
    return f"{', '.join(texts[: RUNS_SHOWN - 1])}, … {texts[-1]}"


def _run(run: Sequence[int]) -> str:
    if len(run) < 3:
        return ", ".join(map(str, run))
    return f"{run[0]}–{run[-1]}"


def joined_names(names: Sequence[str]) -> str:
    """Names that differ only in the number they end with as ``TPU:0–3, 8``."""
    split = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    prefixes = {match[1] for match in split if match}
    if len(prefixes) != 1 or None in split:
        return ", ".join(names)
    return prefixes.pop() + runs(sorted(int(match[2]) for match in split if match))


WIDTH = 110
MOST_LINES = 17
MOST_BOX_ROWS = 8
MOST_COLUMNS = 8


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines with columns two spaces apart; those in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def grid_table(grid: DeviceGrid, device_names: Sequence[str]) -> list[str]:
    """A line per replica with the names of its devices, under the numbers of the logical devices."""
    names = [[device_names[device] for device in replica] for replica in grid.devices]
    if grid.num_logical_devices > MOST_COLUMNS:
        rows = [[f"replica {index}", joined_names(devices)] for index, devices in enumerate(names)]
    else:
        header = ["", *(f"logical {index}" for index in range(grid.num_logical_devices))]
        rows = [header, *([f"replica {index}", *devices] for index, devices in enumerate(names))]
    return shortened(table(rows))


def drawing(layout: Layout, device_names: Sequence[str]) -> list[str]:
    """The pieces as boxes, the ranges of indices at their edges; each says who holds it, and on which device.

    A list of the pieces where boxes would be too many or too wide.
    """
    if len(layout.table) <= MOST_BOX_ROWS:
        boxes = _boxes(layout, device_names)
        if max(map(len, boxes)) <= WIDTH:
            return boxes
    rows = [(*(f"dim {dim}" for dim in layout.cut_dims), "held by", "on")]
    for index in layout.holders:
        spans = (layout.span(dim, part) for dim, part in zip(layout.cut_dims, index, strict=True))
        rows.append((*spans, ", ".join(layout.who(index)), layout.where(index, device_names)))
    return shortened(table(rows))


def _boxes(layout: Layout, device_names: Sequence[str]) -> list[str]:
    body = [
        [[", ".join(layout.who(index)), layout.where(index, device_names)] for index in row] for row in layout.table
    ]
    if layout.column_dim is None:
        width = max(len(cell[0]) for (cell,) in body)
        body = [[[f"{cell[0]:<{width}}  {cell[1]}"]] for (cell,) in body]
    return _framed(
        layout.row_label(),
        [layout.row_span(row[0]) for row in layout.table],
        layout.column_label(),
        [layout.column_span(index) for index in layout.table[0]],
        body,
    )


def _framed(
    row_label: str, row_spans: list[str], column_label: str, column_spans: list[str], body: list[list[list[str]]]
) -> list[str]:
    """``body``: row → column → the lines of one box."""
    width = max(len(line) for line in [*column_spans, *(line for row in body for cell in row for line in cell)])
    margin = max(map(len, [row_label, column_label, *row_spans]))

    def rule(label: str, left: str, middle: str, right: str) -> str:
        return f"{label:>{margin}} {left}{middle.join(['─' * (width + 2)] * len(column_spans))}{right}"

    lines = []
    if column_label:
        spans = "   ".join(f"{span:<{width}}" for span in column_spans)
        lines.append(f"{column_label:>{margin}}   {spans}".rstrip())
    for number, (span, row) in enumerate(zip(row_spans, body, strict=True)):
        lines.append(rule("", "├", "┼", "┤") if number else rule(row_label, "┌", "┬", "┐"))
        for line_number, line in enumerate(zip(*row, strict=True)):
            cells = " │ ".join(f"{cell:<{width}}" for cell in line)
            lines.append(f"{'' if line_number else span:>{margin}} │ {cells} │")
    return [*lines, rule("", "└", "┴", "┘")]


def shortened(lines: list[str]) -> list[str]:
    """The first and last lines where there are too many."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 2], f"⋮ {len(lines) - MOST_LINES + 1} more", lines[-1]]
