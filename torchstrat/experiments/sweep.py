"""What a sweep says when it ends: a table of its runs, and a picture of their curves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchstrat.experiments.metrics_file import read_metrics, read_records
from torchstrat.experiments.report import draw_curves

_COLUMNS = {"accuracy": ".4f", "loss": ".4f", "examples_per_second": ",.0f"}


def show(runs: Sequence[tuple[Path, Sequence[str], bool]]) -> None:
    """``runs``: of each its folder, its overrides, and whether it succeeded."""
    lines = [["run", *(name.replace("_per_second", "/s") for name in _COLUMNS), "settings"]]
    varying = [text for text in runs[0][1] if any(text not in overrides for _, overrides, _ in runs)]
    keys = {text.partition("=")[0] for text in varying}
    for folder, overrides, succeeded in runs:
        results = read_metrics(folder, "result") if succeeded else []
        values = results[-1] if results else {}
        numbers = [
            format(values[name], spec) if values.get(name) is not None else "-" for name, spec in _COLUMNS.items()
        ]
        settings = " ".join(text for text in overrides if text.partition("=")[0] in keys)
        lines.append([folder.name, *numbers, settings if results else f"{settings} (failed)"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(file=sys.stderr)
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=sys.stderr)
    drawn = [folder for folder, _, _ in runs if (folder / "curves.png").exists()]
    if drawn:
        file = drawn[0].parent / "sweep.png"
        draw_curves(file, {folder.name: read_records(folder) for folder in drawn})
        print(f"curves: {file}", file=sys.stderr)
