"""What notebooks show of an object in the place of its `repr`: tables without any style of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_ROWS = 20
_LONGEST_CELL = 300


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a caption above it; the first and the last rows where there are more than 20.

    An empty ``header`` leaves the line of headings out.
    """
    found = list(rows)
    if len(found) > MOST_ROWS:
        left_out = len(found) - MOST_ROWS + 1
        found = [*found[: MOST_ROWS - 2], (f"… {left_out} more …", *[""] * (len(found[0]) - 1)), found[-1]]
    lines = [f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr>"] if header else []
    lines += [f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in found]
    # Some front ends put the caption below, and align numbers and words alike to the right.
    opening = '<table style="text-align: left"><caption style="caption-side: top; text-align: left">'
    return f"{opening}{_text(caption)}</caption>{''.join(lines)}</table>"


def facts(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """A table of two columns without headings; rows that say nothing (None, "") are left out."""
    return table(caption, (), [row for row in rows if row[1] not in (None, "")])


def preformatted(text: str) -> str:
    return f'<pre style="line-height: 1.2">{_escaped(text)}</pre>'


def _text(cell: object) -> str:
    text = str(cell)
    return _escaped(text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…").replace("\n", "<br>")


def _escaped(text: str) -> str:
    import html  # few programs need it

    return html.escape(text)
