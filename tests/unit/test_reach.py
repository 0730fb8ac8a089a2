"""What tests reach that is not public is found in their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.measuring.reach import reached_by


@pytest.mark.parametrize(
    ("source", "reached"),
    [
        ("from torchstrat.replicas.roster import Roster", {"torchstrat.replicas.roster"}),
        ("from torchstrat.replicas import roster", {"torchstrat.replicas", "torchstrat.replicas.roster"}),
        ("import torchstrat.core.nest", {"torchstrat.core", "torchstrat.core.nest"}),
        ("import torchstrat as ts\nts.MirroredStrategy()._engine.close()", {"._engine"}),
        ("import torchstrat as ts\nts.context._frames", {"._frames"}),
        ("def f(self):\n    return self.strategy._engine", {"._engine"}),
        ("from torchstrat import Checkpoint\nfrom torchstrat.errors import UnsupportedError", set()),
        ("from torchstrat.data import axis\nfrom torchstrat.testing import contract", set()),
        ("def f(self, tensor):\n    return self._engine, tensor._version, tensor.__dict__", set()),
        ("import os\nimport torch\nos._exit(torch._C._get_version())", set()),
    ],
)
def test_what_a_file_reaches(tmp_path: Path, source: str, reached: set[str]) -> None:
    file = tmp_path / "test_made.py"
    file.write_text(source)
    assert reached_by(file) == reached
