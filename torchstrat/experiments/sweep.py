"""What a sweep says when it ends: a table of its runs, and a picture of their curves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchstrat.experiments.report import read_metrics

_COLUMNS = {"accuracy": ".4f", "loss": ".4f", "examples_per_second": ",.0f"}


def show(runs: Sequence[tuple[Path, Sequence[str], bool]], with_picture: bool) -> None:
    """``runs``: of each its folder, its overrides, and whether it succeeded."""
    lines = [["run", *(name.replace("_per_second", "/s") for name in _COLUMNS), "settings"]]
    varying = [text for text in runs[0][1] if any(text not in overrides for _, overrides, _ in runs)]
    keys = {text.partition("=")[0] for text in varying}
    for folder, overrides, succeeded in runs:
        results = read_metrics(folder, "result") if succeeded and (folder / "metrics.jsonl").exists() else []
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
    if with_picture:
        _draw([folder for folder, _, _ in runs if (folder / "metrics.jsonl").exists()])


def _draw(folders: Sequence[Path]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, event, value in zip(figure.subplots(1, 2), ("step", "evaluation"), ("loss", "accuracy"), strict=True):
        for folder in folders:
            points = [(one["step"], one[value]) for one in read_metrics(folder, event) if one[value] is not None]
            axes.plot(*zip(*points, strict=True), label=folder.name) if points else None
        axes.set(xlabel="step", ylabel="training loss" if event == "step" else "held-out accuracy")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    file = folders[0].parent / "sweep.png" if folders else None
    if file is not None:
        figure.savefig(file, dpi=120)
        print(f"curves: {file}", file=sys.stderr)
