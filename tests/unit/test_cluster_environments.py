"""The clusters that Slurm and Kubernetes describe, from mappings in place of the environment; unions of clusters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from torchstrat.cluster_resolver import (
    ClusterSpec,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    UnionResolver,
)
from torchstrat.errors import ClusterConfigError, InvalidArgumentError, WrongTypeError
from torchstrat.slurm import expand_node_list

# Slurm


def slurm(rank: int = 0, **changes: str | None) -> dict[str, str]:
    """Five tasks on three hosts: 2, 2 and 1 of them."""
    environ: dict[str, str | None] = {
        "SLURM_STEP_NODELIST": "n[01-02],m7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_PROCID": str(rank),
        "SLURM_GPUS_ON_NODE": "4",
    }
    return {name: value for name, value in (environ | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[001-003,007],m5", ["n001", "n002", "n003", "n007", "m5"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("rack[1-2]-n[3,5].site", ["rack1-n3.site", "rack1-n5.site", "rack2-n3.site", "rack2-n5.site"]),
        ("a,b-0,c[4]", ["a", "b-0", "c4"]),
    ],
)
def test_lists_of_nodes(text: str, hosts: list[str]) -> None:
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,", "n[1-3", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n[1,]", "n[[1]]"]
)
def test_malformed_lists_of_nodes(text: str) -> None:
    with pytest.raises(ClusterConfigError):
        expand_node_list(text)


def test_ranks_fill_the_hosts_block_by_block_and_take_the_roles_in_order() -> None:
    jobs = {"ps": 1, "chief": 1, "worker": 3}
    resolvers = [SlurmClusterResolver(jobs, environ=slurm(rank)) for rank in range(5)]
    assert [(one.task_type, one.task_id) for one in resolvers] == [
        ("ps", 0), ("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2),
    ]  # fmt: skip
    spec = ClusterSpec({"ps": ["n01:8888"], "chief": ["n01:8889"], "worker": ["n02:8888", "n02:8889", "m7:8888"]})
    assert all(one.cluster_spec() == spec for one in resolvers)
    assert [one.master() for one in resolvers] == ["n01:8888", "n01:8889", "n02:8888", "n02:8889", "m7:8888"]
    assert resolvers[0].master("worker", 2, "grpc") == "grpc://m7:8888"
    assert resolvers[0].num_accelerators() == {"GPU": 2}


def test_without_roles_all_are_workers() -> None:
    resolver = SlurmClusterResolver(port_base=5000, rpc_layer="grpc", environ=slurm(4))
    assert (resolver.task_type, resolver.task_id) == ("worker", 4)
    assert resolver.cluster_spec().num_tasks("worker") == 5
    assert resolver.master() == "grpc://m7:5000"
    plan = resolver.process_plan()
    assert plan is not None
    assert (plan.rank, plan.size, plan.local_rank, plan.local_size) == (4, 5, 0, 1)
    assert plan.init_method == "tcp://n01:5000"


def test_cyclic_distribution_takes_the_hosts_in_turn() -> None:
    environ = slurm(3, SLURM_DISTRIBUTION="cyclic:block", SLURM_NODEID="0", SLURM_LOCALID="1")
    tasks = SlurmClusterResolver(environ=environ).cluster_spec().job_tasks("worker")
    assert tasks == ["n01:8888", "n02:8888", "m7:8888", "n01:8889", "n02:8889"]


def test_the_jobs_variables_serve_where_there_is_no_step() -> None:
    environ = {
        "SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    }  # fmt: skip
    assert SlurmClusterResolver(environ=environ).master() == "b:8888"


@pytest.mark.parametrize("given", [2, {"n01": 2, "n02": 2, "m7": 2}])
def test_tasks_per_node_can_be_given(given: Any) -> None:
    environ = slurm(5, SLURM_STEP_TASKS_PER_NODE=None, SLURM_STEP_NUM_TASKS=None)
    assert SlurmClusterResolver(tasks_per_node=given, environ=environ).master() == "m7:8889"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_STEP_NODELIST": None}, ["SLURM_STEP_NODELIST and SLURM_JOB_NODELIST and SLURM_NODELIST are not set"]),
        ({"SLURM_STEP_NODELIST": "n[1"}, ["SLURM_STEP_NODELIST='n[1'"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ["SLURM_STEP_TASKS_PER_NODE='2(y2)'"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["2 nodes, and there are 3"]),
        ({"SLURM_STEP_NUM_TASKS": "6"}, ["adds up to 5 tasks, and the step has 6"]),
        ({"SLURM_PROCID": "5"}, ["SLURM_PROCID='5' must be a whole number of at least 0 and below 5"]),
        ({"SLURM_PROCID": "-1"}, ["SLURM_PROCID='-1'"]),
        ({"SLURM_PROCID": None, "SLURM_STEP_NUM_TASKS": "x"}, ["SLURM_PROCID is not set", "SLURM_STEP_NUM_TASKS='x'"]),
        ({"SLURM_GPUS_ON_NODE": "many"}, ["SLURM_GPUS_ON_NODE='many'"]),
        ({"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, ["SLURM_NODEID='1'", "--distribution=block"]),
    ],
)
def test_everything_wrong_with_a_step_is_one_error(changes: dict[str, str | None], named: list[str]) -> None:
    with pytest.raises(ClusterConfigError) as failure:
        SlurmClusterResolver(environ=slurm(**changes))
    assert all(text in str(failure.value) for text in named), failure.value
    assert "srun" in str(failure.value)


def test_outside_of_slurm_all_variables_are_missed_at_once() -> None:
    with pytest.raises(ClusterConfigError, match=r"NODELIST.*TASKS_PER_NODE.*PROCID is not set"):
        SlurmClusterResolver(environ={})


@pytest.mark.parametrize(
    "jobs", [{"worker": 4}, {"ps": 1, "worker": 5}, {}, {"worker": -5}, {"worker": "5"}, ["worker"], {1: 5}]
)
def test_roles_take_exactly_the_tasks_there_are(jobs: Any) -> None:
    with pytest.raises(ClusterConfigError, match=re.escape(repr(jobs))):
        SlurmClusterResolver(jobs, environ=slurm())


def test_hosts_without_a_number_of_tasks() -> None:
    with pytest.raises(ClusterConfigError, match=r"does not name the hosts \['n02', 'm7'\]"):
        SlurmClusterResolver(tasks_per_node={"n01": 5}, environ=slurm())


def test_too_few_gpus() -> None:
    with pytest.raises(ClusterConfigError, match="gpus_per_task=3 for 2 tasks on one host needs 6 GPUs"):
        SlurmClusterResolver(gpus_per_task=3, environ=slurm())


@pytest.mark.parametrize(
    ("rank", "shown", "mine"),
    [(0, None, "0,1"), (1, None, "2,3"), (3, "4,5,6,7", "6,7"), (4, "1", "0,1")],
)
def test_a_task_can_be_shown_its_own_gpus_only(rank: int, shown: str | None, mine: str) -> None:
    environ = slurm(rank, CUDA_VISIBLE_DEVICES=shown)
    SlurmClusterResolver(environ=environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == shown
    SlurmClusterResolver(auto_set_gpu=True, environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == mine


# Kubernetes


def test_pods_of_an_indexed_job() -> None:
    environ = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-7-3"}
    resolver = KubernetesClusterResolver({"ps": 2, "worker": 3}, subdomain="svc", environ=environ)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["train-7-0.svc:2222", "train-7-1.svc:2222"],
        "worker": ["train-7-2.svc:2222", "train-7-3.svc:2222", "train-7-4.svc:2222"],
    }
    assert resolver.master() == "train-7-3.svc:2222"
    assert resolver.environment == "kubernetes"
    named = KubernetesClusterResolver(
        {"chief": 1}, subdomain="s", job_name="j", port=9, environ={"JOB_COMPLETION_INDEX": "0"}
    )
    assert named.master("chief", 0, "grpc") == "grpc://j-0.s:9"


@pytest.mark.parametrize(
    ("jobs", "environ", "named"),
    [
        ({"worker": 2}, {}, ["JOB_COMPLETION_INDEX is not set", "HOSTNAME is not set"]),
        ({"worker": 2}, {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "j-2"}, ["JOB_COMPLETION_INDEX='2'", "below 2"]),
        ({"worker": 2}, {"JOB_COMPLETION_INDEX": "one", "HOSTNAME": "j-1"}, ["JOB_COMPLETION_INDEX='one'"]),
        ({"worker": 2}, {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "node"}, ["HOSTNAME='node'", "job_name="]),
        (None, {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "j-1"}, ["jobs=None"]),
        ({}, {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "j-1"}, ["jobs={}"]),
        ({"worker": 1.5}, {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "j-1"}, ["jobs={'worker': 1.5}"]),
    ],
)
def test_everything_wrong_with_an_indexed_job_is_one_error(jobs: Any, environ: Any, named: list[str]) -> None:
    with pytest.raises(ClusterConfigError) as failure:
        KubernetesClusterResolver(jobs, subdomain="svc", environ=environ)
    assert all(text in str(failure.value) for text in named), failure.value


def pytorch_job(rank: int, first: str = "job-master-0", **changes: str | None) -> dict[str, str]:
    environ = {"MASTER_ADDR": first, "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": str(rank)} | changes
    return {name: value for name, value in environ.items() if value is not None}


@pytest.mark.parametrize(
    ("environ", "addresses"),
    [
        (pytorch_job(1), ["job-master-0:23456", "job-worker-0:23456", "job-worker-1:23456"]),
        (pytorch_job(1, "job-worker-0"), ["job-worker-0:23456", "job-worker-1:23456", "job-worker-2:23456"]),
        (
            {"PET_MASTER_ADDR": "t-node-0-0.t", "PET_MASTER_PORT": "29400", "PET_NNODES": "2", "PET_NODE_RANK": "1"},
            ["t-node-0-0.t:29400", "t-node-0-1.t:29400"],
        ),
        (
            {"PET_RDZV_ENDPOINT": "job-worker-0.ns:1", "PET_NNODES": "2", "PET_NODE_RANK": "1"},
            ["job-worker-0.ns:1", "job-worker-1.ns:1"],
        ),
        (
            pytorch_job(1, "job-master-0", PET_NNODES="2", PET_NODE_RANK="1", WORLD_SIZE="16", RANK="9"),
            ["job-master-0:23456", "job-worker-0:23456"],
        ),
    ],
)
def test_pods_of_a_pytorch_job(environ: dict[str, str], addresses: list[str]) -> None:
    resolver = KubernetesClusterResolver(environ=environ)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    jobs = {"ps": 1, "worker": len(addresses) - 1}
    assert KubernetesClusterResolver(jobs, environ=environ).master() == addresses[1]


def test_the_first_pod_of_older_operators_and_a_job_of_one_pod() -> None:
    first = KubernetesClusterResolver(environ=pytorch_job(0, "localhost", HOSTNAME="job-master-0"))
    assert first.cluster_spec() == KubernetesClusterResolver(environ=pytorch_job(1)).cluster_spec()
    alone = KubernetesClusterResolver(environ=pytorch_job(0, "10.0.0.1", WORLD_SIZE="1"))
    assert alone.cluster_spec().as_dict() == {"worker": ["10.0.0.1:23456"]}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, ["TF_CONFIG (TFJob)", "subdomain="]),
        (pytorch_job(3), ["RANK='3'", "below 3"]),
        (pytorch_job(0, MASTER_PORT=None, RANK=None), ["PET_MASTER_PORT and MASTER_PORT are not set", "RANK"]),
        (pytorch_job(0, MASTER_PORT="70000"), ["MASTER_PORT='70000'"]),
        (pytorch_job(0, "10.0.0.1"), ["'10.0.0.1'", "the other 2"]),
        (pytorch_job(0, PET_NNODES="1:3"), ["PET_NNODES='1:3' is a range"]),
        (pytorch_job(0, WORLD_SIZE="three"), ["WORLD_SIZE='three'"]),
        (pytorch_job(0, "localhost"), ["HOSTNAME is not set"]),
        ({"PET_RDZV_ENDPOINT": "job-worker-0", "PET_NNODES": "2", "PET_NODE_RANK": "0"}, ["must be 'host:port'"]),
    ],
)
def test_everything_wrong_with_a_pytorch_job_is_one_error(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ClusterConfigError) as failure:
        KubernetesClusterResolver(environ=environ)
    assert all(text in str(failure.value) for text in named), failure.value


def tf_job(document: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(document)}


def test_pods_of_a_tf_job() -> None:
    cluster = {"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1", "w:2"]}
    environ = tf_job({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    resolver = KubernetesClusterResolver(rpc_layer="grpc", environ=environ)
    assert resolver.cluster_spec().as_dict() == cluster
    assert resolver.master() == "grpc://w:2"
    with pytest.raises(ClusterConfigError, match=r"jobs=\{'worker': 2\} is given too"):
        KubernetesClusterResolver({"worker": 2}, environ=environ)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({}, ["cluster is missing", "task.type is missing", "task.index is missing"]),
        ({"cluster": {"worker": ["w:1"]}, "task": {"type": "worker"}}, ["task.index is missing"]),
        ({"cluster": {"worker": ["w:1"]}, "task": {"type": "worker", "index": 4}}, ["task.index=4"]),
    ],
)
def test_a_tf_job_needs_a_whole_variable(document: Any, named: list[str]) -> None:
    with pytest.raises(ClusterConfigError) as failure:
        KubernetesClusterResolver(environ=tf_job(document))
    assert all(text in str(failure.value) for text in named), failure.value


# Unions


def simple(cluster: Any, **arguments: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **arguments)


def test_a_union_is_who_its_first_resolver_is() -> None:
    first = simple(
        {"ps": ["p:1"]}, master="m:1", task_type="ps", task_id=0, environment="cloud", rpc_layer="grpc",
        num_accelerators={"GPU": 2},
    )  # fmt: skip
    union = UnionResolver(first, simple({"worker": ["w:1", "w:2"]}, task_type="worker", task_id=1))
    assert (union.task_type, union.task_id, union.environment, union.rpc_layer) == ("ps", 0, "cloud", "grpc")
    assert union.num_accelerators() == {"GPU": 2}
    assert union.cluster_spec().as_dict() == {"ps": ["p:1"], "worker": ["w:1", "w:2"]}
    assert union.master() == "grpc://m:1"
    assert union.master("worker", 1) == "grpc://w:2"
    assert union.master("worker", 1, "http") == "http://w:2"
    first.task_id = 5
    assert union.task_id == 5, "asked at each access"


def test_what_a_union_is_told_goes_first() -> None:
    union = UnionResolver(simple({"worker": ["w:1"]}, task_id=3), task_type="worker", task_id=0, rpc_layer="http")
    assert (union.task_type, union.task_id) == ("worker", 0)
    assert union.master("worker", 0) == "http://w:1"
    union.task_type, union.task_id, union.rpc_layer, union.environment = "ps", 7, "grpc", "here"
    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("ps", 7, "grpc", "here")


def test_overlapping_numbers_are_an_error_of_both_kinds() -> None:
    union = UnionResolver(simple({"worker": {2: "a", 4: "b"}}), simple({"worker": ["c", "d", "e"]}))
    with pytest.raises(KeyError) as failure:
        union.cluster_spec()
    assert isinstance(failure.value, ClusterConfigError)
    assert str(failure.value).startswith("job 'worker' has tasks [2] in more than one")


def test_unions_of_nothing_and_of_other_things() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one"):
        UnionResolver()
    with pytest.raises(WrongTypeError, match="got dict"):
        UnionResolver({"worker": ["w:1"]})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"\['port'\]"):
        UnionResolver(simple({}), port=3)
