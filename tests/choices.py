"""What the files under ``configs/`` choose, as a configuration has it, for tests that do without Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def chosen(choice: str, **settings: Any) -> dict[str, Any]:
    """``chosen("model=mlp", hidden=[8])``: the call that the command line ``model=mlp model.hidden=[8]`` asks for."""
    file = CONFIGS / f"{choice.replace('=', '/')}.yaml"
    return {**yaml.safe_load(file.read_text(encoding="utf-8")), **settings}
