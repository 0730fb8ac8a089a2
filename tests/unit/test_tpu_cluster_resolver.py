"""Which hosts a TPU has: arguments before environment, addresses only, nobody contacted."""

from __future__ import annotations

from typing import Any

import pytest

from torchstrat.cluster_resolver import TPUClusterResolver
from torchstrat.errors import ClusterConfigError, ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.tpu.topology import Topology

HOSTS = ["10.0.0.1:8470", "10.0.0.2:8470"]


@pytest.mark.parametrize(
    "tpu",
    [
        "grpc://10.0.0.1:8470,grpc://10.0.0.2:8470",
        "grpc://10.0.0.1:8470, 10.0.0.2:8470",
        HOSTS,
        ("grpc://10.0.0.1:8470", "10.0.0.2:8470"),
    ],
)
def test_addresses_are_the_hosts_of_one_job(tpu: Any) -> None:
    resolver = TPUClusterResolver(tpu, environ={"TPU_NAME": "grpc://other:1"})
    assert resolver.cluster_spec().as_dict() == {"worker": HOSTS}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "")
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
    with pytest.raises(ClusterConfigError, match="no task 2"):
        resolver.master("worker", 2)


def test_a_coordinator_is_a_job_of_its_own() -> None:
    resolver = TPUClusterResolver(HOSTS, job_name="tpu", coordinator_name="coordinator", coordinator_address="me:1")
    assert resolver.cluster_spec().as_dict() == {"tpu": HOSTS, "coordinator": ["me:1"]}
    assert resolver.task_type == "tpu"
    assert resolver.master("coordinator", 0) == "grpc://me:1"


@pytest.mark.parametrize(
    "coordinator",
    [
        {"coordinator_name": "c"},
        {"coordinator_address": "me:1"},
        {"coordinator_name": "worker", "coordinator_address": "me:1"},
    ],
)
def test_half_a_coordinator_is_refused(coordinator: dict[str, str]) -> None:
    with pytest.raises(ClusterConfigError, match="a coordinator needs a name other than 'worker' and an address"):
        TPUClusterResolver(HOSTS, **coordinator)


@pytest.mark.parametrize(
    ("tpu", "environ"), [("local", {"TPU_NAME": "grpc://a:1"}), (None, {"TPU_NAME": "local"}), ("", {})]
)
def test_the_tpu_of_this_machine_has_no_cluster(tpu: str | None, environ: dict[str, str]) -> None:
    resolver = TPUClusterResolver(tpu, environ=environ)
    assert resolver.cluster_spec().as_dict() == {}
    assert (resolver.master(), resolver.master("worker", 1), resolver.task_type) == ("", "", "worker")
    assert resolver.process_plan() is None


@pytest.mark.parametrize("tpu", [None, ""])
def test_the_environment_says_what_the_argument_does_not(tpu: str | None) -> None:
    environ = {"TPU_NAME": "grpc://named:1", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://pod:1"}
    assert TPUClusterResolver(tpu, environ=environ).master() == "grpc://pod:1"
    assert TPUClusterResolver(tpu, environ={"TPU_NAME": "grpc://named:1"}).master() == "grpc://named:1"


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", raising=False)
    monkeypatch.setenv("TPU_NAME", "grpc://named:1")
    resolver = TPUClusterResolver()
    monkeypatch.setenv("TPU_NAME", "grpc://changed:1")
    assert resolver.master() == "grpc://named:1"


def test_nothing_said() -> None:
    with pytest.raises(ClusterConfigError, match=r"tpu was not given, and neither KUBE.* nor TPU_NAME is set"):
        TPUClusterResolver(environ={"TPU_NAME": ""})


@pytest.mark.parametrize("tpu", ["my-tpu", "grpc://host", "host:port", "http://a:1", "a:1,,b:1", "grpc://", []])
def test_names_are_not_looked_up(tpu: Any) -> None:
    with pytest.raises(ClusterConfigError):
        TPUClusterResolver(tpu, environ={"TPU_NAME": "no-address"})


@pytest.mark.parametrize("tpu", [8470, [1], {"worker": ["a:1"]}])
def test_other_types_are_refused(tpu: Any) -> None:
    with pytest.raises(WrongTypeError, match="tpu must be 'local', 'grpc://host:port' or a list"):
        TPUClusterResolver(tpu)


def test_the_number_of_cores_is_known_after_initialisation() -> None:
    resolver = TPUClusterResolver("local")
    with pytest.raises(ContextError, match="initialize_tpu_system"):
        resolver.num_accelerators()
    with pytest.raises(InvalidArgumentError):
        resolver.set_tpu_topology(b"garbage")
    resolver.set_tpu_topology(Topology.virtual([4, 2, 1, 2], host_shape=[2, 2, 1, 2]).serialized())
    assert resolver.num_accelerators() == {"TPU": 8}


def test_tensorflows_names() -> None:
    assert (TPUClusterResolver("local").get_job_name(), TPUClusterResolver("local").get_master()) == ("worker", "")
    resolver = TPUClusterResolver("grpc://a:1", job_name="hosts")
    assert (resolver.get_job_name(), resolver.get_master()) == ("hosts", "grpc://a:1")
