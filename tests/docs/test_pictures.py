"""The pictures of ``docs/`` are those that their program draws, and each is on a page."""

from __future__ import annotations

import importlib.util

from tests.docs.pages import DOCS


def test_the_pictures_are_what_their_program_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "images" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    drawn = {draw.file_name(picture): str(picture()) for picture in draw.PICTURES}
    there = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*.svg")}
    assert there == drawn, "run python docs/images/draw.py"
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert not [name for name in drawn if f"images/{name}" not in text]
