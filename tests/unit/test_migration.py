"""MIGRATION.md: its names are there, and its programs run as they stand in it.

Central storage runs unchanged. The parameter-server program runs on a cluster of threads: the line that makes the
strategy is given that cluster in place of the resolver. The TPU program runs unchanged on the fake of a TPU, which is
put where `initialize_tpu_system` keeps the system that it has started.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.migration import TEXT, TITLES, losses, program, replaced, run
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.tpu.system import system_of

# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", TITLES)
def test_the_programs_of_tensorflow_are_python(which: str) -> None:
    code = program(which, "TensorFlow")
    compile(code, "MIGRATION.md", "exec")
    assert "import tensorflow as tf" in code


def test_central_storage_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    run(program("central"))
    found = losses(capsys.readouterr().out)
    assert len(found) == 20
    assert found[-1] < 0.2 < found[0]


def test_central_storage_gives_the_same_on_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    made, found = "strategy = ts.CentralStorageStrategy()", []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        run(replaced(program("central"), made, f"strategy = ts.CentralStorageStrategy({devices})"))
        found.append(losses(capsys.readouterr().out))
    assert found[1] == pytest.approx(found[0], abs=2e-4)


def test_parameter_servers_on_a_cluster_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    code = replaced(
        program("ps"),
        "strategy = ts.ParameterServerStrategy(resolver, variable_partitioner=partitioner)",
        "strategy = cluster.strategy(variable_partitioner=partitioner)",
    )
    with FakeCluster(workers=2, ps=2) as cluster:
        defined = run(code, cluster=cluster)
    found = losses(capsys.readouterr().out)
    assert len(found) == 4
    assert found[-1] < found[0] / 2
    assert isinstance(defined["strategy"], ts.ParameterServerStrategy)


def test_tpu_on_the_fake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torchstrat.tpu.system._system", system_of(FakeSpmdRuntime(8, [2, 2, 1, 2])))
    strategy = run(program("tpu"))["strategy"]
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (4, 2)
    found = losses(capsys.readouterr().out)
    assert len(found) == 15
    assert found[-1] < found[0] * 0.95


# -- names -------------------------------------------------------------------------------------------------------------


def table_rows() -> list[tuple[str, str]]:
    """The two cells of every row of every table, without the heads."""
    found = re.findall(r"^\| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE)
    return [row for row in found if row[0] != "TensorFlow"]


def names_in(cell: str) -> list[str]:
    """What stands in backquotes and is a dotted name of torchstrat, of a strategy, or of torch."""
    quoted = re.findall(r"`([^`]+)`", cell)
    return [name for name in quoted if re.fullmatch(r"(ts|strategy|torch)(\.\w+)+", name)]


def test_every_row_of_the_tables_says_what_to_write() -> None:
    assert len(table_rows()) > 60
    for ours in dict(table_rows()).values():
        assert re.search(r"`.+`|nothing|no counterpart", ours), ours


def test_every_name_of_torchstrat_is_there() -> None:
    strategy = ts.CentralStorageStrategy(["cpu:0", "cpu:1"])
    roots = {"ts": ts, "torch": torch, "strategy": strategy}
    checked = {name for _, ours in table_rows() for name in names_in(ours)}
    for name in sorted(checked):
        root, *path = name.split(".")
        value: Any = roots[root]
        for part in path:
            assert hasattr(value, part), f"MIGRATION.md names {name}"
            value = getattr(value, part)
    assert len(checked) > 90
    strategy.close()


def test_every_method_that_the_documents_list_is_in_the_tables() -> None:
    documented = [name for name in dir(ts.Strategy) if name.startswith("experimental_")]
    documented += ["scope", "run", "reduce", "gather", "make_dataset_iterator", "make_input_fn_iterator"]
    documented += ["distribute_datasets_from_function", "update_config_proto", "num_replicas_in_sync"]
    ours = " ".join(ours for _, ours in table_rows())
    assert not [name for name in documented if f"`strategy.{name}`" not in ours]


def test_second_names_are_the_same_objects() -> None:
    assert ts.experimental.partitioners is ts.partitioners
    assert ts.experimental.coordinator.ClusterCoordinator is ts.ClusterCoordinator
    assert ts.experimental.coordinator.RemoteValue is ts.RemoteValue
    with pytest.raises(RuntimeError, match="inside a function that a ClusterCoordinator has scheduled"):
        ts.experimental.coordinator.experimental_get_current_worker_index()
    for name in ("CentralStorageStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "TPUStrategy"):
        assert getattr(ts.experimental, name) is getattr(ts, name)
    assert isinstance(ts.get_strategy().extended, ts.StrategyExtended)
