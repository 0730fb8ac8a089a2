"""``python -m tests.mistakes``: makes every mistake, and prints what is seen as Markdown."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from tests.mistakes.table import Mistake, all_areas, look


def main() -> None:
    areas = list(all_areas())
    kinds = Counter(_kind(mistake) for area in areas for mistake in area.mistakes())
    warn, right = kinds.pop("a warning"), kinds.pop("none")
    print(f"{warn + right + kinds.total()} mistakes: {kinds.total()} raise, {warn} warn, {right} are none.")
    for area in areas:
        print(f"\n## {area.title}\n\n| mistake | class | what the user sees |\n|---|---|---|")
        for mistake in area.mistakes():
            with tempfile.TemporaryDirectory() as folder:
                seen = mistake.because or look(area, mistake, Path(folder)).message
            shown = seen if mistake.because else seen.replace("|", "\\|").replace("\n", "<br>")
            print(f"| {mistake.name} | {_kind(mistake)} | {shown} |")


def _kind(mistake: Mistake) -> str:
    if mistake.error is not None:
        return f"`{mistake.error.__name__}`"
    return "none" if mistake.because else "a warning"


if __name__ == "__main__":
    main()
