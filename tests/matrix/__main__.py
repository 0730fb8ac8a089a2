"""``python -m tests.matrix``: the tables as Markdown, from what their cells have to come to."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

from tests.matrix import catalog
from tests.matrix.table import Cell, Table

SIGNS = {"right": "✓", "refused": "refused", "documented": "documented"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(catalog.MODULES)}; none: all")
    parser.add_argument("--faults", action="store_true", help="the planted faults instead, and what catches them")
    options = parser.parse_args()
    for name in options.tables or catalog.MODULES:
        table = catalog.load(name)
        print("\n".join(_faults(table) if options.faults else _markdown(table)), end="\n\n")


def _markdown(table: Table) -> list[str]:
    cells = list(table.cells.values())
    counts = Counter(cell.expected.verdict for cell in cells)
    lines = [f"## {table.name}", "", table.question, ""]
    lines.append(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "refused", "documented", "open")))
    lines.append(f"({len(cells)} cells, of which {len(table.sample)} are in the sample).")
    lines += ["", *_grid(cells), *_reasons(cells)]
    if table.causes:
        lines += ["", *(f"* **{number}**: {cause}" for number, cause in table.causes.items())]
    return lines


def _grid(cells: list[Cell]) -> list[str]:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    by_row: dict[str, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        by_row[cell.row][cell.column].append(cell)
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, found in by_row.items():
        lines.append(f"| {row} | " + " | ".join(_sign(found[column]) for column in columns) + " |")
    return lines


def _sign(cells: list[Cell]) -> str:
    """One sign for the cells of all places: what they all come to, or each with the places where it is so."""
    signs: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        signs[SIGNS.get(cell.expected.verdict, cell.expected.reason)].append(cell.place)
    if len(signs) < 2:
        return "".join(signs) or "–"
    return "; ".join(sign if sign == "✓" else f"{sign} ({', '.join(places)})" for sign, places in signs.items())


def _reasons(cells: list[Cell]) -> list[str]:
    told = {
        (cell.expected.verdict, cell.row, cell.column, cell.expected.reason): None
        for cell in cells
        if cell.expected.verdict in ("refused", "documented")
    }
    return ["", *(f"* {row}, {column}: {verdict}: {reason}" for verdict, row, column, reason in told)] if told else []


def _faults(table: Table) -> list[str]:
    lines = [f"## {table.name}: planted faults", ""]
    return lines + [f"* {fault.name}: {'; '.join(fault.cells)}" for fault in table.faults]


if __name__ == "__main__":
    main()
