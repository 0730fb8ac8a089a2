"""Tables and boxes of text for `torchstrat.sharding.explain`."""

from __future__ import annotations

from collections.abc import Sequence

from torchstrat.sharding.grid import DeviceGrid
from torchstrat.sharding.layout import Layout, joined_names

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
