"""MIGRATION.md: its names are there, and its programs run as they stand in it.

Central storage runs unchanged. The parameter-server program runs on a cluster of threads: the line that makes the
strategy is given that cluster in place of the resolver. The TPU program runs unchanged on the fake of a TPU, which is
put where `initialize_tpu_system` keeps the system that it has started.
"""

from __future__ import annotations

import re
from datetime import timedelta
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.migration import TEXT, TITLES, losses, program, replaced, run
from torchstrat.sharding.tpu.system import system_of
from torchstrat.strategies.multi_worker_mirrored import in_own_words
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.fake_tpu import FakeSpmdRuntime

# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", TITLES)
def test_the_programs_of_tensorflow_are_python(which: str) -> None:
    code = program(which, "TensorFlow")
    compile(code, "MIGRATION.md", "exec")
    assert "import tensorflow as tf" in code


def test_central_storage_as_it_stands_and_the_same_on_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    made, found = "strategy = ts.CentralStorageStrategy()", []
    for devices in ("", ["cpu:0"], ["cpu:0", "cpu:1"]):
        run(replaced(program("central"), made, f"strategy = ts.CentralStorageStrategy({devices})"))
        found.append(losses(capsys.readouterr().out))
    assert len(found[0]) == 20
    assert found[0][-1] < 0.2 < found[0][0]
    assert found[2] == pytest.approx(found[1], abs=2e-4)


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
    monkeypatch.setattr("torchstrat.sharding.tpu.system._system", system_of(FakeSpmdRuntime(8, [2, 2, 1, 2])))
    strategy = run(program("tpu"))["strategy"]
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (4, 2)
    found = losses(capsys.readouterr().out)
    assert len(found) == 15
    assert found[-1] < found[0] * 0.95


# -- names -------------------------------------------------------------------------------------------------------------


ROWS = {ours: tensorflow for tensorflow, ours in re.findall(r"^\| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE)}
"""The cells of every row of every table."""


def test_every_row_of_the_tables_says_what_to_write_in_names_that_are_there() -> None:
    strategy = ts.CentralStorageStrategy(["cpu:0", "cpu:1"])
    rows = [ours for ours, tensorflow in ROWS.items() if tensorflow != "TensorFlow"]
    assert len(rows) > 60
    assert all(re.search(r"`.+`|nothing|no counterpart", ours) for ours in rows)
    names = {name for ours in rows for name in re.findall(r"`((?:ts|strategy|torch)(?:\.\w+)+)`", ours)}
    assert len(names) > 90
    for name in names:
        attrgetter(name)(SimpleNamespace(ts=ts, torch=torch, strategy=strategy))
    strategy.close()
    documented = [name for name in dir(ts.Strategy) if name.startswith("experimental_")]
    documented += ["scope", "run", "reduce", "gather", "make_dataset_iterator", "make_input_fn_iterator"]
    documented += ["distribute_datasets_from_function", "update_config_proto", "num_replicas_in_sync"]
    assert not [name for name in documented if not any(f"`strategy.{name}`" in ours for ours in rows)]


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


def test_every_name_of_ours_exists_and_what_is_said_to_have_no_counterpart_has_none() -> None:
    names = set(re.findall(r"\bts\.((?:\w+\.)*\w+)", TEXT)) - {"X", "experimental.X"}
    assert len(names) > 60
    assert sorted(name for name in names if not found(name)) == []
    without = TEXT.split("**What has no counterpart**")[1].split("\n## ")[0]
    said = re.findall(r"`tf\.distribute\.([\w.]+)`", without)
    assert len(said) == 7
    assert not [name for name in said if found(name)]


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
    strategy = ts.experimental.MultiWorkerMirroredStrategy(None, ts.experimental.CommunicationOptions())
    assert strategy.num_replicas_in_sync == 1
    strategy.close()
