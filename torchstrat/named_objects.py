"""What a command line names as ``MODULE:NAME``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from torchstrat.errors import InvalidArgumentError


def find(name: str) -> Any:
    """The object that ``train:build`` names. Modules of the working directory are found, as ``python -m`` finds them.

    Raises `InvalidArgumentError` where the name has another form, or nothing has it.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InvalidArgumentError(f"{name!r} must be MODULE:NAME, such as train:step.")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"{name!r} cannot be loaded from {here}: {error}.") from error
