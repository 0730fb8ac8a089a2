"""Which device holds which piece of which tensor, as text and as a picture: `explain_sharding`.

And ``torchstrat explain``, for a model that no job trains yet. Computed, not asked of a device. The picture has a panel
for each kind of cut tensor, and what fills a device; it needs matplotlib.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchstrat.core import notebook_html
from torchstrat.core.context import StrategyLike, get_strategy
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.terminal import named_object, parser_with_examples
from torchstrat.sharding.annotations import Annotator, ShardingRules, annotator_of
from torchstrat.sharding.grid import (
    DeviceGrid,
    Layout,
    ShardedEntry,
    Sharding,
    drawing,
    grid_table,
    joined_names,
    runs,
    shape_text,
    size_text,
    table,
)

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


def explain_sharding(
    value: torch.Tensor | nn.Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str] | None = None,
    *,
    strategy: StrategyLike | None = None,
) -> Explanation:
    """Say which device holds which piece of ``value``; ``print`` what comes back.

    Works in the scope, in a step (for tensors that an annotation returned) and outside. Nothing is computed or moved.

    Args:
        value: a variable, an annotated tensor, a dict of them by name, or a model, whose parameters and buffers are
            meant.
        path: where to write the same as a picture, a PNG; needs matplotlib.
        strategy: whose devices; None: the current one's.

    Raises:
        InvalidArgumentError: nobody has said how a tensor is cut: it is no variable of the strategy and was not
            returned by an annotation.
    """
    chosen = get_strategy() if strategy is None else strategy
    annotator = annotator_of(chosen)
    entries = {name: _entry_of(annotator, name, tensor) for name, tensor in _named(value).items()}
    if annotator is None:
        names = list(chosen.extended.worker_devices)
        grid = DeviceGrid(tuple((number,) for number in range(len(names))))
    else:
        grid, names = annotator.grid()
    explanation = explain_tensors(entries, grid, names)
    if path is not None:
        explanation.save_png(path)
    return explanation


def _entry_of(annotator: Annotator | None, name: str, tensor: torch.Tensor) -> ShardedEntry:
    """How ``tensor`` is cut. Where replicas have one device, that has all of it."""
    if annotator is None:
        return ShardedEntry(tuple(tensor.shape), Sharding.replicated(tensor.ndim, 1), tensor.dtype)
    entry = annotator.entry_of(tensor)
    if entry is None:
        raise InvalidArgumentError(
            f"nobody has said how {name}, of shape {tuple(tensor.shape)}, is cut: it is no variable of this "
            "strategy, and no annotation returned it. Pass what split_to_logical_devices returned, or a model of "
            "the scope."
        )
    return entry


def _named(value: torch.Tensor | nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {"tensor": value}
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, Mapping) and all(isinstance(one, torch.Tensor) for one in value.values()):
        return {str(name): tensor for name, tensor in value.items()}
    raise WrongTypeError(
        f"explain_sharding needs a tensor, a module or a dict of tensors; got {type(value).__name__} {value!r:.80}."
    )


def main(words: Sequence[str]) -> int:
    """``torchstrat explain``: print where the pieces of the parameters are that ``words`` name."""
    parser = parser_with_examples(
        "torchstrat explain",
        "Print which device holds which piece of which parameter, for sharding rules that no job has been started "
        "with yet. The model is made without values. Within a job: torchstrat.explain_sharding.",
        (
            "torchstrat explain train:build_model --rules train:RULES --logical-devices 2",
            "torchstrat explain train:build_model --rules train:RULES --logical-devices 2 4 --replicas 2 --png it.png",
        ),
    )
    parser.add_argument("build", metavar="MODULE:BUILD", help="makes the model and returns it")
    parser.add_argument(
        "--rules", required=True, metavar="MODULE:RULES", help="sharding_rules, as a strategy takes them"
    )
    parser.add_argument(
        "--logical-devices",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="of a replica; several numbers are the sizes of d0, d1, …: logical_mesh_shape",
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="how many there are (1)")
    parser.add_argument("--png", metavar="FILE", help="draw it, too; needs matplotlib")
    options = parser.parse_args(words)
    try:
        build, rules = named_object(options.build), named_object(options.rules)
        explanation = explain_rules(build, rules, options.logical_devices, options.replicas)
    except (InvalidArgumentError, WrongTypeError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{explanation}\n")
    if options.png is not None:
        explanation.save_png(options.png)
    return 0


def explain_rules(
    build: Callable[[], nn.Module], rules: Mapping[str, Any], mesh_shape: Sequence[int], replicas: int
) -> Explanation:
    """Where the pieces of a model's parameters will be under ``rules``.

    Raises `InvalidArgumentError` for rules that do not fit the model, `WrongTypeError` for what is no rule or no model.
    """
    if replicas < 1:
        raise InvalidArgumentError(f"there are {replicas} replicas; the least is 1.")
    checked = ShardingRules(rules, mesh_shape)
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise WrongTypeError(f"the model's builder returned {type(model).__name__} {model!r:.60}, which is no module.")
    entries = {
        name: ShardedEntry(tuple(tensor.shape), checked.sharding_for(name, tuple(tensor.shape)), tensor.dtype)
        for name, tensor in model.named_parameters()
    }
    checked.require_all_used()
    each = math.prod(mesh_shape)
    grid = DeviceGrid(tuple(tuple(range(first, first + each)) for first in range(0, replicas * each, each)))
    return explain_tensors(entries, grid, [f"device {number}" for number in range(replicas * each)])


PANELS_SHOWN = 12
PANELS_PER_ROW = 3
BARS_SHOWN = 10
LABELS_SHOWN = 16
PANEL_INCHES = (5.2, 3.6)
BAR_INCHES = 0.34
LARGEST_FONT, SMALLEST_FONT = 9.0, 5.0
CUT, WHOLE = "#2a7f9e", "#b9b9b9"


def save_png(explanation: Explanation, path: str | os.PathLike[str]) -> None:
    """Draw ``explanation`` and write it to ``path``. `ModuleNotFoundError` where matplotlib is missing."""
    try:
        # Not pyplot: it would choose a window system and keep figures for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture of a sharding needs matplotlib, which is not installed; run `pip install matplotlib`, or print "
            "the explanation.",
            name=error.name,
        ) from error
    panels = explanation.drawings[:PANELS_SHOWN]
    groups = sorted(explanation.groups, key=lambda group: -group.bytes_per_device)[:BARS_SHOWN]
    across = min(PANELS_PER_ROW, max(1, math.ceil(math.sqrt(len(panels)))))
    down = math.ceil(len(panels) / across)
    width, heights = max(9.0, PANEL_INCHES[0] * across), [PANEL_INCHES[1] * down, BAR_INCHES * len(groups) + 0.8]
    figure: Any = Figure(figsize=(width, sum(heights) + 0.5), layout="constrained", facecolor="white")
    # Figures of their own, so that the long names beside the bars do not push the panels aside.
    above, below = figure.subfigures(2, 1, height_ratios=[max(height, 0.1) for height in heights])
    for number, (names, layout) in enumerate(panels):
        axes = above.add_subplot(down, across, number + 1)
        _draw_panel(axes, names, layout, explanation.device_names, width / across)
    _draw_bars(below.add_subplot(), groups, explanation)
    figure.suptitle(_title(explanation, len(explanation.drawings) - len(panels)), fontsize=12)
    figure.set_canvas(FigureCanvasAgg(figure))
    figure.savefig(os.fspath(path), format="png")


def _title(explanation: Explanation, left_out: int) -> str:
    grid = explanation.grid
    devices = joined_names([explanation.device_names[device] for own in grid.devices for device in own])
    text = f"replicas: {grid.num_replicas}, logical devices in each: {grid.num_logical_devices}, on {devices}"
    return f"{text}; {left_out} more layouts not drawn" if left_out > 0 else text


def _draw_panel(axes: Any, names: str, layout: Layout, device_names: Sequence[str], width_inches: float) -> None:
    """Boxes that lie like the tensor's indices, a colour for each logical device."""
    from matplotlib.patches import Rectangle

    texts = {index: [*layout.who(index), layout.where(index, device_names)] for index in layout.holders}
    rows, columns = len(layout.table), len(layout.table[0])
    style = _text_style([*texts.values()], 0.8 * width_inches / columns, 0.7 * PANEL_INCHES[1] / rows)
    for down, row in enumerate(layout.table):
        for across, index in enumerate(row):
            box = Rectangle((across, down), 1, 1, facecolor=_colour(layout, index), edgecolor="white", linewidth=2)
            axes.add_patch(box)
            if style:
                axes.text(across + 0.5, down + 0.5, "\n".join(texts[index]), ha="center", va="center", **style)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    _label(axes.xaxis, [layout.column_span(index) for index in layout.table[0]], layout.column_label())
    _label(axes.yaxis, [layout.row_span(row[0]) for row in layout.table], layout.row_label())
    pieces = f"{layout.num_pieces} pieces {shape_text(layout.piece_shape)}, copies: {layout.copies}"
    title = f"{_fitting(names)}\n{shape_text(layout.entry.shape)} cut {layout.spec_text()}: {pieces}"
    axes.set_title(title, fontsize=9)
    axes.spines[:].set_visible(False)


def _text_style(texts: Sequence[Sequence[str]], width_inches: float, height_inches: float) -> dict[str, object]:
    """How text fits into a box of that size, lying or standing; empty: it does not."""
    characters, lines = max(len(line) for text in texts for line in text), max(map(len, texts))

    def largest_font(along: float, across: float) -> float:
        return min(LARGEST_FONT, 72 * along / (0.6 * characters), 72 * across / (1.3 * lines))

    lying, standing = largest_font(width_inches, height_inches), largest_font(height_inches, width_inches)
    if max(lying, standing) < SMALLEST_FONT:
        return {}
    return {"fontsize": max(lying, standing), "rotation": 0 if lying >= standing else 90}


def _colour(layout: Layout, index: tuple[int, ...]) -> tuple[float, ...]:
    """By the first logical device that holds the piece; paler where several of a replica hold it."""
    from matplotlib import colormaps

    logical, count = sorted({own for _, own in layout.holders[index]}), layout.grid.num_logical_devices
    colour = colormaps["tab10"](logical[0]) if count <= 10 else colormaps["viridis"](logical[0] / (count - 1))
    return (*colour[:3], 0.35 if len(logical) == 1 else 0.15)


def _label(axis: Any, labels: Sequence[str], name: str) -> None:
    """Ranges of indices at the middles of the boxes."""
    shown = range(0, len(labels), math.ceil(len(labels) / LABELS_SHOWN)) if name else range(0)
    axis.set_ticks([place + 0.5 for place in shown], [labels[place] for place in shown])
    axis.set_tick_params(length=0, labelsize=7 if len(labels) > 4 else 8)
    axis.set_label_text(name, fontsize=8)


def _draw_bars(axes: Any, groups: Sequence[Group], explanation: Explanation) -> None:
    """What fills a device: the tensors that take most of it."""
    from matplotlib.patches import Patch

    sizes = [group.bytes_per_device for group in groups]
    colours = [CUT if group.layout.is_cut_over_logical_devices else WHOLE for group in groups]
    bars = axes.barh(range(len(groups)), sizes, height=0.7, color=colours)
    axes.bar_label(bars, [size_text(size) for size in sizes], padding=3, fontsize=8)
    axes.set_yticks(range(len(groups)), [_fitting(group.label) for group in groups], fontsize=8)
    axes.set(xticks=[], xlim=(0, 1.15 * max([*sizes, 1])), ylim=(max(len(groups), 1) - 0.5, -0.5))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    kinds = [Patch(color=CUT, label="cut over logical devices"), Patch(color=WHOLE, label="not cut over them")]
    axes.legend(handles=kinds, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    more = len(explanation.groups) - len(groups)
    title = explanation.totals() + (f" (the largest; {more} more)" if more > 0 else "")
    axes.set_title(title[0].upper() + title[1:], fontsize=9)


def _fitting(names: str, most: int = 60) -> str:
    """The end of a long name: it tells tensors apart."""
    return names if len(names) <= most else f"…{names[1 - most :]}"
