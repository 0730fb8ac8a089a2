"""Which tables there are; a new table adds a line."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from tests.matrix.table import Table

MODULES: Mapping[str, str] = {
    # name of the table → module that has it as TABLE
    "optimizers": "tests.matrix.optimizers",
    "gradients": "tests.matrix.gradients",
    "stand_ins": "tests.matrix.stand_ins",
    "stand_ins_on_tpu": "tests.matrix.stand_ins_on_tpu",
    "losses": "tests.matrix.losses",
    "scaled_tables": "tests.matrix.scaled_tables",
    "state": "tests.matrix.state",
    "ps_state": "tests.matrix.ps_state",
    "ps_writes": "tests.matrix.ps_writes",
    "ps_objects": "tests.matrix.ps_objects",
    "ps_buffers": "tests.matrix.ps_buffers",
    "round_trips": "tests.matrix.round_trips",
    "batches": "tests.matrix.batches",
    "lifetimes": "tests.matrix.lifetimes",
    "one_rank_alone": "tests.matrix.one_rank_alone",
    "made_in_steps": "tests.matrix.made_in_steps",
    "held": "tests.matrix.held",
}


def load(name: str) -> Table:
    """The table of that name; its file is imported by the first call."""
    table = import_module(MODULES[name]).TABLE
    assert isinstance(table, Table)
    assert table.name == name, f"{MODULES[name]} has the table {table.name}, and the catalog calls it {name}"
    return table
