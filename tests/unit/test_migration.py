"""MIGRATION.md: its names are there, and its programs run as they stand in it.

Central storage runs unchanged. The parameter-server program runs on a cluster of threads: the line that makes the
strategy is given that cluster in place of the resolver. The TPU program runs unchanged on the fake of a TPU, which is
put where `initialize_tpu_system` keeps the system that it has started.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.migration import TEXT, TITLES, losses, program, replaced, run
from torchstrat.collectives.communication_options import in_own_words
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


NAMES_OF_TENSORFLOW = """
    CrossDeviceOps DistributedDataset DistributedIterator DistributedValues HierarchicalCopyAllReduce InputContext
    InputOptions InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy
    ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy
    experimental_set_strategy get_replica_context get_strategy has_strategy in_cross_replica_context
    cluster_resolver.ClusterResolver cluster_resolver.GCEClusterResolver cluster_resolver.KubernetesClusterResolver
    cluster_resolver.SimpleClusterResolver cluster_resolver.SlurmClusterResolver
    cluster_resolver.TFConfigClusterResolver cluster_resolver.TPUClusterResolver cluster_resolver.UnionResolver
    coordinator.ClusterCoordinator coordinator.PerWorkerValue coordinator.RemoteValue
    coordinator.experimental_get_current_worker_index
    experimental.CentralStorageStrategy experimental.CollectiveCommunication experimental.CollectiveHints
    experimental.CommunicationImplementation experimental.CommunicationOptions
    experimental.MultiWorkerMirroredStrategy experimental.ParameterServerStrategy
    experimental.PreemptionCheckpointHandler experimental.PreemptionWatcher experimental.TPUStrategy
    experimental.TerminationConfig experimental.ValueContext
    experimental.coordinator.ClusterCoordinator experimental.coordinator.PerWorkerValues
    experimental.coordinator.RemoteValue experimental.partitioners.FixedShardsPartitioner
    experimental.partitioners.MaxSizePartitioner experimental.partitioners.MinSizePartitioner
    experimental.partitioners.Partitioner experimental.rpc.Client experimental.rpc.Server
"""


def found(name: str) -> bool:
    value: Any = ts
    for part in name.split("."):
        value = getattr(value, part, None)
    return value is not None


@pytest.mark.parametrize("name", NAMES_OF_TENSORFLOW.split())
def test_every_name_of_tf_distribute_is_there_or_has_a_line(name: str) -> None:
    assert found(name) or f"`tf.distribute.{name}`" in TEXT


def test_what_is_said_to_have_no_counterpart_has_none() -> None:
    without = TEXT.split("**What has no counterpart**")[1].split("\n## ")[0]
    said = re.findall(r"`tf\.distribute\.([\w.]+)`", without)
    assert len(said) == 7
    assert not [name for name in said if found(name)]


def test_every_name_of_ours_exists() -> None:
    names = set(re.findall(r"\bts\.((?:\w+\.)*\w+)", TEXT)) - {"X", "experimental.X"}
    assert len(names) > 60
    assert sorted(name for name in names if not found(name)) == []


def test_hints_are_said_in_tensorflows_order(monkeypatch: pytest.MonkeyPatch) -> None:
    hints = ts.experimental.CollectiveHints(0, 5.0)
    assert hints == ts.experimental.CommunicationOptions(timeout_seconds=5.0)
    assert ts.experimental.CollectiveCommunication.AUTO is ts.experimental.CommunicationImplementation.AUTO
    ring = ts.experimental.CommunicationOptions(implementation=ts.experimental.CommunicationImplementation.RING)
    minutes = timedelta(minutes=1)
    assert in_own_words(None, minutes, "auto") == (minutes, "auto")
    assert in_own_words(hints, minutes, "auto") == (timedelta(seconds=5), "auto")
    assert in_own_words(ring, minutes, "auto") == (minutes, "process_group")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nccl = ts.experimental.CommunicationOptions(implementation=ts.experimental.CommunicationImplementation.NCCL)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        in_own_words(nccl, minutes, "auto")
    for wrong in ({"bytes_per_pack": -1}, {"timeout_seconds": 0.0}, {"implementation": "AUTO"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            ts.experimental.CommunicationOptions(**wrong)


def test_a_strategy_takes_the_hints() -> None:
    strategy = ts.experimental.MultiWorkerMirroredStrategy(None, ts.experimental.CommunicationOptions())
    assert strategy.num_replicas_in_sync == 1
    strategy.close()
