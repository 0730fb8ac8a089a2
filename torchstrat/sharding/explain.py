"""Which device holds which piece of which tensor, as text and as a picture. Pure: computed, not asked of a device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchstrat.core import notebook_html
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.sharding.grid import DeviceGrid
from torchstrat.sharding.layout import Layout, ShardedEntry, joined_names, runs, shape_text, size_text
from torchstrat.sharding.text import drawing, grid_table, table

DRAWINGS_SHOWN = 12


@dataclass(frozen=True)
class Group:
    """Tensors of one shape, dtype and sharding whose names differ only in numbers: the same weight of equal layers."""

    names: tuple[str, ...]
    layout: Layout

    @property
    def label(self) -> str:
        """``layers.{0–11}.linear1.weight``."""
        columns = list(zip(*(name.split(".") for name in self.names), strict=True))
        choices = [sorted(set(column), key=lambda part: (len(part), part)) for column in columns]
        if set(itertools.product(*choices)) != {tuple(name.split(".")) for name in self.names}:
            return f"{self.names[0]} and {len(self.names) - 1} more"
        parts = [own[0] if len(own) == 1 else f"{{{runs([int(part) for part in own])}}}" for own in choices]
        return ".".join(parts)

    @property
    def bytes_per_device(self) -> int:
        """Of all its tensors together."""
        return self.layout.piece_bytes * len(self.names)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain_tensors` found. ``print`` it, or `save_png`."""

    layouts: Mapping[str, Layout]
    grid: DeviceGrid
    device_names: Sequence[str]

    @property
    def bytes_per_device(self) -> int:
        """What each device of the grid holds of all tensors; every one holds as much."""
        return sum(layout.piece_bytes for layout in self.layouts.values())

    @property
    def total_bytes(self) -> int:
        """Of one whole copy of all tensors."""
        return sum(layout.entry.total_bytes for layout in self.layouts.values())

    @property
    def whole_bytes(self) -> int:
        """What each device holds of tensors that all logical devices of its replica hold alike."""
        return sum(own.piece_bytes for own in self.layouts.values() if not own.is_cut_over_logical_devices)

    @cached_property
    def groups(self) -> list[Group]:
        """The tensors, alike ones of equal layers together, in the order of their first."""
        found: dict[tuple[str, ShardedEntry], list[str]] = {}
        for name, layout in self.layouts.items():
            template = ".".join("#" if part.isdecimal() else part for part in name.split("."))
            found.setdefault((template, layout.entry), []).append(name)
        return [Group(tuple(names), self.layouts[names[0]]) for names in found.values()]

    @cached_property
    def drawings(self) -> list[tuple[str, Layout]]:
        """One layout of each shape and sharding that is cut, with the names of the tensors that have it."""
        found: dict[tuple[object, ...], list[Group]] = {}
        for group in self.groups:
            if group.layout.is_cut:
                found.setdefault((group.layout.entry.shape, group.layout.entry.sharding), []).append(group)
        return [(_some(own.label for own in groups), groups[0].layout) for groups in found.values()]

    def totals(self) -> str:
        """One sentence: the bytes of each device."""
        share = f" ({self.bytes_per_device / self.total_bytes:.0%})" if self.total_bytes else ""
        text = f"each device holds {size_text(self.bytes_per_device)} of {size_text(self.total_bytes)}{share}"
        if self.grid.num_logical_devices > 1 and self.whole_bytes:
            text += f", {size_text(self.whole_bytes)} of it in tensors that are not cut over logical devices"
        return text

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw it: the pieces of each kind of tensor, and what fills a device. Needs matplotlib.

        Raises `ModuleNotFoundError` with the command that installs it, where it is missing.
        """
        from torchstrat.sharding.picture import save_png  # matplotlib is optional

        save_png(self, path)

    def __str__(self) -> str:
        tensors = table(self._rows(), right=(5, 6, 7))
        return "\n".join([*self._devices(), "", *tensors, *self._drawn(), "", f"In all, {self.totals()}."])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        drawn = "\n".join([*self._devices(), *self._drawn()])
        return notebook_html.table(f"In all, {self.totals()}.", header, rows) + notebook_html.preformatted(drawn)

    def _devices(self) -> list[str]:
        replicas, logical = self.grid.num_replicas, self.grid.num_logical_devices
        heading = f"{_count(replicas, 'replica')} × {_count(logical, 'logical device')}"
        lines = [heading, *(f"  {line}" for line in grid_table(self.grid, self.device_names))]
        used = {device for devices in self.grid.devices for device in devices}
        idle = [name for device, name in enumerate(self.device_names) if device not in used]
        return [*lines, f"  not used: {joined_names(idle)}"] if idle else lines

    def _rows(self) -> list[tuple[str, ...]]:
        """A line of headings, and one for each group of tensors."""
        rows: list[tuple[str, ...]] = [("tensor", "dtype", "shape", "cut", "piece", "pieces", "copies", "per device")]
        for group in self.groups:
            layout, entry = group.layout, group.layout.entry
            times = f"{len(group.names)} × " if len(group.names) > 1 else ""
            rows.append(
                (
                    group.label,
                    str(entry.dtype).removeprefix("torch."),
                    shape_text(entry.shape),
                    layout.spec_text(),
                    shape_text(layout.piece_shape),
                    str(layout.num_pieces),
                    str(layout.copies),
                    f"{times}{size_text(layout.piece_bytes)}",
                )
            )
        return rows

    def _drawn(self) -> list[str]:
        lines: list[str] = []
        for names, layout in self.drawings[:DRAWINGS_SHOWN]:
            heading = f"{names}: {shape_text(layout.entry.shape)} cut {layout.spec_text()}, {layout.axes_text()}"
            lines += ["", heading, *(f"  {line}" for line in drawing(layout, self.device_names))]
        left_out = len(self.drawings) - DRAWINGS_SHOWN
        return [*lines, "", f"… and {_count(left_out, 'more layout')} not drawn."] if left_out > 0 else lines


def explain_tensors(entries: Mapping[str, ShardedEntry], grid: DeviceGrid, device_names: Sequence[str]) -> Explanation:
    """Work out where the pieces of tensors are.

    Args:
        entries: name → shape of the whole tensor, its sharding, its dtype.
        grid: the devices of each replica.
        device_names: the name of each of the runtime's devices, by number; those outside ``grid`` are shown as unused.

    Raises `InvalidArgumentError` for a tensor that does not divide as its sharding says or does not fit the grid, and
    if a device has no name.
    """
    last = max(device for devices in grid.devices for device in devices)
    if last >= len(device_names):
        raise InvalidArgumentError(
            f"the grid holds the device {last}, and there are {len(device_names)} device names; give one for each."
        )
    layouts = {name: Layout.checked(name, entry, grid) for name, entry in entries.items()}
    return Explanation(layouts, grid, tuple(device_names))


def _some(labels: Iterable[str]) -> str:
    first, *others = labels
    shown = ", ".join([first, *others[:2]])
    return shown if len(others) <= 2 else f"{shown} and {len(others) - 2} more"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
