"""The tables of ``tests/matrix`` in short, for the page that shows them: counts, rows and columns of each."""

from __future__ import annotations

from collections import Counter

from tests.matrix import catalog

VERDICTS = ("right", "refused", "documented", "open")


def summary() -> str:
    """Markdown: a section for each table, with what its cells have to come to, by column."""
    parts = [_overview(), *map(_table, catalog.MODULES)]
    return "\n\n".join(parts)


def _overview() -> str:
    lines = [
        "| table | cells | rows × columns | right | refused | documented | known wrong |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    totals: Counter[str] = Counter()
    for name in catalog.MODULES:
        cells = list(catalog.load(name).cells.values())
        counts = Counter(cell.expected.verdict for cell in cells)
        totals.update(counts)
        shape = f"{len({cell.row for cell in cells})} × {len({cell.column for cell in cells})}"
        numbers = " | ".join(f"{counts[verdict]:,}" for verdict in VERDICTS)
        lines.append(
            f"| [{_title(name)}](#{_title(name).lower().replace(' ', '-')}) | {len(cells):,} | {shape} | {numbers} |"
        )
    numbers = " | ".join(f"{totals[verdict]:,}" for verdict in VERDICTS)
    lines.append(f"| **all** | {totals.total():,} | | {numbers} |")
    return "\n".join(lines)


def _title(name: str) -> str:
    return name.replace("_", " ").replace("ps state", "state on servers").replace("tpu", "TPU")


def _table(name: str) -> str:
    table = catalog.load(name)
    cells = list(table.cells.values())
    places = list(dict.fromkeys(cell.place for cell in cells))
    lines = [f"## {_title(name)}", "", f"*{table.question}*", "", f"Places: {'; '.join(places)}.", ""]
    lines += ["| column | cells | right | refused | documented | known wrong |", "|---|--:|--:|--:|--:|--:|"]
    for column in dict.fromkeys(cell.column for cell in cells):
        counts = Counter(cell.expected.verdict for cell in cells if cell.column == column)
        numbers = " | ".join(f"{counts[verdict]:,}" for verdict in VERDICTS)
        lines.append(f"| {column.replace('|', '/')} | {counts.total():,} | {numbers} |")
    return "\n".join(lines)
