"""Pytest plugin of ``./scripts/test --fast``: of the contract of strategies, the cells that stand for the others.

Those of one device, and of two replicas in this process: what three and four replicas, and central storage, add is
another device for the variables and another divisor. Compilers are left out; they take as long as all other cells.
"""

from __future__ import annotations

import pytest

CELLS = {
    "tests/unit/test_contract_in_process.py": ("one_device]", "mirrored x2]"),
}
"""Test file → how the ids of its cells end."""

TOO_SLOW = "[compiled"
"""How the parameters of a cell begin that waits for a compiler."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells-of", action="append", default=[], help="a file of CELLS of which they alone are run")


@pytest.hookimpl(tryfirst=True)  # before -k and -m: a choice of theirs may well leave none
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (kept if stays(item.nodeid, config.getoption("--cells-of")) else left).append(item)
    for file in config.getoption("--cells-of"):
        if not any(item.nodeid.startswith(file) for item in kept):
            raise pytest.UsageError(f"no test of {file} has an id that ends as scripts/measuring/core_cells.py says")
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def stays(test: str, cells_of: list[str]) -> bool:
    file = test.partition("::")[0]
    return file not in cells_of or (test.endswith(CELLS[file]) and TOO_SLOW not in test)
