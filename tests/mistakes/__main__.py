"""``python -m tests.mistakes``: makes every mistake, and prints what is seen as Markdown."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.mistakes.table import Area, Mistake, all_areas, look


def main() -> None:
    areas = list(all_areas())
    mistakes = [mistake for area in areas for mistake in area]
    raised = sum(mistake.error is not None for mistake in mistakes)
    right = sum(bool(mistake.because) for mistake in mistakes)
    print(f"{len(mistakes)} mistakes: {raised} raise, {len(mistakes) - raised - right} warn, {right} are none.\n")
    for area in areas:
        print("\n".join(_markdown(area)), end="\n\n")


def _markdown(area: Area) -> Iterator[str]:
    yield f"## {area.title}\n"
    yield "| mistake | class | what the user sees |"
    yield "|---|---|---|"
    for mistake in area:
        yield f"| {mistake.name} | {_kind(mistake)} | {_shown(mistake)} |"


def _kind(mistake: Mistake) -> str:
    if mistake.error is not None:
        return f"`{mistake.error.__name__}`"
    return "none" if mistake.because else "a warning"


def _shown(mistake: Mistake) -> str:
    if mistake.because:
        return mistake.because
    with tempfile.TemporaryDirectory() as folder:
        return look(mistake, Path(folder)).message.replace("|", "\\|").replace("\n", "<br>")


if __name__ == "__main__":
    main()
