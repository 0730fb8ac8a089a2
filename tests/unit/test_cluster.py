"""Cluster descriptions, what resolvers read from mappings in place of the environment, and the job of a process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import torchstrat as ts
from torchstrat import cluster_resolver
from torchstrat.cluster_resolver import (
    ClusterSpec,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    UnionResolver,
    id_in_cluster,
    is_chief,
    worker_count,
)
from torchstrat.distributed.cluster import DEFAULT_TIMEOUT
from torchstrat.distributed.launcher import launched_job, launched_plan
from torchstrat.errors import (
    ClusterConfigError,
    CommunicationError,
    InvalidArgumentError,
    UnsupportedError,
    WrongTypeError,
)


def env(text: str) -> dict[str, str]:
    """As a shell shows it."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = env("WORLD_SIZE=4 RANK=3 LOCAL_WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29500")
ALONE = env("WORLD_SIZE=1 RANK=0 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0")
TWO = {"worker": ["a:1", "b:1"]}


def tf_config(cluster: Any, task_type: str, index: int) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})}


def torchrun(environ: dict[str, str]) -> TorchrunClusterResolver:
    return TorchrunClusterResolver(environ=environ)


def tf_resolver(document: Any, **given: Any) -> TFConfigClusterResolver:
    text = document if isinstance(document, str) else json.dumps(document)
    return TFConfigClusterResolver(environ={"TF_CONFIG": text}, **given)


def task(cluster: Any, task_type: str | None = None, task_id: int | None = None) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=task_id)


def plan_of(resolver: Any) -> tuple[Any, ...]:
    plan = resolver.process_plan()
    assert plan is not None
    return dataclasses.astuple(plan)[:-1]  # the last is of launchers, not of resolvers


def test_a_spec_sorts_the_jobs_of_a_copy_is_equal_by_content_and_does_not_change_with_what_it_was_made_of() -> None:
    cluster: dict[str, Any] = {"worker": ["a:1"], "ps": {"2": "b:1"}}
    spec = ClusterSpec(cluster)
    cluster["worker"].append("b:1")
    spec.as_dict()["worker"].append("c:1")  # type: ignore[union-attr]
    assert spec.num_tasks("worker") == 1
    assert spec.jobs == ["worker", "ps"]
    assert ClusterSpec(spec).jobs == ["ps", "worker"]
    assert ClusterSpec(spec) == spec == ClusterSpec({"worker": {0: "a:1"}, "ps": {2: "b:1"}})
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert spec.as_dict() == {"worker": ["a:1"], "ps": {2: "b:1"}}
    assert repr(spec) == "ClusterSpec({'ps': {2: 'b:1'}, 'worker': ['a:1']})"


@pytest.mark.parametrize("cluster", [{1: ["a"]}, {"worker": {"a"}}, {"worker": "a"}, {"worker": [None]}, ["a"], None])
def test_a_spec_of_the_wrong_types(cluster: Any) -> None:
    with pytest.raises(WrongTypeError):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({0: "a:1", "0": "b:1"}, r"twice: its indices are \[0, '0'\]"),
        ({-1: "a:1"}, r"task index=-1; it must be a whole number of at least 0"),
        ({"x": "a:1"}, r"task index='x'; it must be"),
        ({1.5: "a:1"}, r"task index=1\.5; it must be"),
    ],
)
def test_a_spec_of_tasks_without_a_number_of_their_own(tasks: Any, message: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"job 'worker' has a.* {message}"):
        ClusterSpec({"worker": tasks})


def test_the_chief_comes_first_and_evaluators_count_apart() -> None:
    cluster = {"chief": ["a"], "worker": ["b", "c"], "ps": ["d"], "evaluator": ["e"]}
    assert [id_in_cluster(cluster, *one) for one in (("chief", 0), ("worker", 1), ("evaluator", 0))] == [0, 2, 0]
    assert [worker_count(cluster, role) for role in ("chief", "worker", "evaluator")] == [3, 3, 1]
    assert [is_chief(cluster, role, 0) for role in ("chief", "evaluator", "worker")] == [True, True, False]
    assert [is_chief({"worker": ["b", "c"]}, "worker", index) for index in (0, 1)] == [True, False]


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    assert is_chief({"worker": ["a"]}, "evaluator", 0)
    assert id_in_cluster({"worker": ["a"]}, "evaluator", 0) == 0
    with pytest.raises(KeyError, match=r"no 'evaluator'; its jobs are worker"):
        worker_count({"worker": ["a"]}, "evaluator")


MIXED = {"worker": ["a:1", "b:1", "b:2"], "chief": ["a:9"], "ps": ["c:1"]}


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (lambda: torchrun(TORCHRUN), (3, 4, 1, 2, "env://", True, "rank 3 of 4")),
        (lambda: torchrun(TORCHRUN | ALONE), (0, 1, 0, 1, "env://", False, "rank 0 of 1")),
        # The chief comes first, and hosts are those of the addresses.
        (lambda: task(MIXED, "chief", 0), (0, 4, 0, 2, "tcp://a:9", True, "rank 0 of 4 (chief 0)")),
        (lambda: task(MIXED, "worker", 0), (1, 4, 1, 2, "tcp://a:9", True, "rank 1 of 4 (worker 0)")),
        (lambda: task(MIXED, "worker", 2), (3, 4, 1, 2, "tcp://a:9", True, "rank 3 of 4 (worker 2)")),
        (
            lambda: TFConfigClusterResolver(environ=tf_config({"worker": ["localhost:1", "localhost:2"]}, "worker", 1)),
            (1, 2, 1, 2, "tcp://localhost:1", False, "rank 1 of 2 (worker 1)"),
        ),
        (lambda: task(TWO, "evaluator", 0), (0, 1, 0, 1, None, False, "evaluator 0")),
    ],
)
def test_plans(make: Callable[[], Any], plan: tuple[Any, ...]) -> None:
    resolver = make()
    assert plan_of(resolver) == plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolver.process_plan().rank = 0


def test_a_lone_process_has_no_cluster_and_no_plan() -> None:
    for resolver in (torchrun({}), torchrun({"RANK": "0"}), task({}), TFConfigClusterResolver(environ={})):
        assert not resolver.cluster_spec()
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.master()) == (None, None, None, "")
        assert resolver.process_plan() is None


def test_the_torchrun_resolver_lists_every_rank_under_the_meeting_point() -> None:
    resolver = torchrun(TORCHRUN)
    assert resolver.cluster_spec().as_dict() == {"worker": ["node0:29500"] * 4}
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert [resolver.master(), resolver.master(rpc_layer="tcp")] == ["node0:29500", "tcp://node0:29500"]


def refused_variable(name: str, value: str) -> Any:
    return lambda: torchrun(TORCHRUN | {name: value}), f"(?<![A-Z_]){name}='{value}'"


def missing_variable(name: str) -> Any:
    left = {key: value for key, value in TORCHRUN.items() if key != name}
    return lambda: torchrun(left), f"(?<![A-Z_]){name} is not set.*torchrun"


def unknown_job(method: str) -> Any:
    return lambda: getattr(ClusterSpec({"worker": ["a"], "ps": ["b"]}), method)("chief"), r"\['ps', 'worker'\]"


def no_place(cluster: Any, task_type: str, task_id: int | None, message: str) -> Any:
    return lambda: id_in_cluster(cluster, task_type, task_id), message


def no_plan(cluster: Any, task_type: str | None, task_id: int | None, message: str) -> Any:
    return lambda: task(cluster, task_type, task_id).process_plan(), message


def malformed(text: str, message: str) -> Any:
    return lambda: tf_resolver(text), message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *map(unknown_job, ("num_tasks", "task_indices", "job_tasks")),
        no_place({"worker": ["a"]}, "worker", 1, r"tasks \[0\]"),
        no_place({"worker": ["a"]}, "chief", 0, "no job 'chief'"),
        no_place({"worker": ["a"], "master": ["b"]}, "worker", 0, "'master' is no role"),
        no_place({"worker": ["a"]}, "boss", 0, "'boss' is no role"),
        no_place({"chief": ["a", "b"]}, "chief", 0, "2 tasks of type 'chief'"),
        no_place({"worker": ["a"], "ps": ["b"]}, "ps", 0, "no place"),
        no_place({"worker": ["a"]}, "worker", None, "no place"),
        *map(missing_variable, TORCHRUN.keys() - {"WORLD_SIZE"}),
        (lambda: torchrun({"WORLD_SIZE": "2"}), "".join(f"(?=.*{name} is not set)" for name in [*TORCHRUN][1:])),
        *(refused_variable("WORLD_SIZE", value) for value in ("0", "four")),
        *(refused_variable("RANK", value) for value in ("4", "-1")),
        *(refused_variable("MASTER_PORT", value) for value in ("x", "70000")),
        refused_variable("LOCAL_RANK", "2"),
        refused_variable("LOCAL_WORLD_SIZE", "5"),
        no_plan({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0, "parameter server 0"),
        no_plan(TWO, None, None, "which task"),
        no_plan(TWO, "worker", None, "which task"),
        no_plan({"worker": {0: "a:1", 2: "b:1"}}, "worker", 2, "no gap"),
        no_plan({"worker": ["a", "b:1"]}, "worker", 1, "'a'; write 'host:port'"),
        no_plan({"worker": ["a:1"]}, "worker", 3, "not in the cluster"),
        malformed("{", "not JSON"),
        malformed("[]", r"TF_CONFIG is \[\]; it must be an object"),
        malformed('{"cluster": null}', "cluster=None"),
        malformed('{"task": {"type": 3}}', "task.type=3"),
        malformed('{"task": {"index": true}}', "task.index=True"),
        malformed('{"task": {"index": "one"}}', "task.index='one'"),
        malformed('{"rpc_layer": 7}', "rpc_layer=7"),
        malformed('{"cluster": {"worker": {"x": "a:1"}}}', "cluster={'worker': {'x': 'a:1'}}"),
        malformed(tf_config({"worker": ["a:1"]}, "wroker", 0)["TF_CONFIG"], r"task.type='wroker'.*\['worker'\]"),
        malformed(tf_config({"worker": ["a:1"]}, "worker", 1)["TF_CONFIG"], r"task.index=1.*\[0\]"),
    ],
)
def test_what_is_refused_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        call()


@pytest.mark.parametrize("role", ["chief", "evaluator"])
def test_roles_that_nobody_dials_need_no_address(role: str) -> None:
    assert TFConfigClusterResolver(environ=tf_config({"worker": ["a:1"], "ps": ["b:1"]}, role, 0)).task_type == role


def test_the_variable_is_checked_again_at_each_access() -> None:
    environ = tf_config(TWO, "worker", 1)
    resolver = TFConfigClusterResolver(environ=environ)
    assert resolver.master() == "b:1"
    environ["TF_CONFIG"] = "3"
    with pytest.raises(ClusterConfigError, match="TF_CONFIG is 3"):
        resolver.cluster_spec()


@pytest.mark.parametrize("index", [1, "1", 1.0])
def test_what_goes_before_the_variable_is_read_by_its_rules(index: Any) -> None:
    environ = tf_config(TWO, "worker", 0)
    by_argument = TFConfigClusterResolver(task_id=index, environ=environ)
    by_setter = TFConfigClusterResolver(environ=environ)
    by_setter.task_id = index
    for resolver in (by_argument, by_setter):
        assert (type(resolver.task_id), resolver.task_id, resolver.master()) == (int, 1, "b:1")


BAD_INDICES = [("task_id", index) for index in ("one", -1, 1.5, True, float("inf"))]


@pytest.mark.parametrize(("name", "value"), [*BAD_INDICES, ("task_type", 4), ("rpc_layer", 4)])
def test_what_cannot_go_before_the_variable_is_refused_at_once(name: str, value: Any) -> None:
    environ = tf_config(TWO, "worker", 0)
    resolver = TFConfigClusterResolver(environ=environ)
    for give in (
        lambda: TFConfigClusterResolver(**{name: value}, environ=environ),
        lambda: setattr(resolver, name, value),
    ):
        with pytest.raises(ClusterConfigError, match=f"{name}={value!r}; it must be"):
            give()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, None)


def test_a_session_master_goes_before_everything_and_null_is_none() -> None:
    assert tf_resolver({"session_master": "m:1"}).master() == "m:1"
    nothing = tf_resolver({"cluster": {"worker": ["a:1"]}, "session_master": None, "rpc_layer": None})
    assert (nothing.master(), nothing.rpc_layer) == ("", None)


def test_exported_names_exist_and_are_listed() -> None:
    assert cluster_resolver.__all__ == sorted(cluster_resolver.__all__)
    assert all(hasattr(cluster_resolver, name) for name in cluster_resolver.__all__)


# Slurm


def slurm(rank: int = 0, **changes: str | None) -> dict[str, str]:
    """Five tasks on three hosts: 2, 2 and 1 of them."""
    environ: dict[str, Any] = env("SLURM_STEP_NODELIST=n[01-02],m7 SLURM_STEP_NUM_TASKS=5 SLURM_GPUS_ON_NODE=4")
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": str(rank)}
    return {name: value for name, value in (environ | changes).items() if value is not None}


def nodes(text: str) -> dict[str, str]:
    return slurm(SLURM_STEP_NODELIST=text, SLURM_STEP_TASKS_PER_NODE=None, SLURM_STEP_NUM_TASKS=None)


CYCLIC = slurm(3, SLURM_DISTRIBUTION="cyclic:block", SLURM_NODEID="0", SLURM_LOCALID="1")
TWICE = [f"{host}:{port}" for host in ("n01", "n02", "m7") for port in (8888, 8889)]


@pytest.mark.parametrize(
    ("environ", "per_node", "tasks"),
    [
        (nodes("n1"), 1, ["n1:8888"]),
        (nodes("n[001-003,007],m5"), 1, [f"{host}:8888" for host in ("n001", "n002", "n003", "n007", "m5")]),
        (nodes("n[9-11]"), 1, ["n9:8888", "n10:8888", "n11:8888"]),
        (nodes("n[099-101]"), 1, ["n099:8888", "n100:8888", "n101:8888"]),
        (nodes("rack[1-2]-n[3,5].s"), 1, [f"rack{rack}-n{node}.s:8888" for rack in "12" for node in "35"]),
        (nodes("a,b-0,c[4]"), 1, ["a:8888", "b-0:8888", "c4:8888"]),
        (nodes("n[01-02],m7"), 2, TWICE),
        (nodes("n[01-02],m7"), {"n01": 2, "n02": 2, "m7": 2}, TWICE),
        # Cyclic distribution takes the hosts in turn.
        (CYCLIC, None, ["n01:8888", "n02:8888", "m7:8888", "n01:8889", "n02:8889"]),
        # The job's variables serve where there is no step.
        (
            env("SLURM_JOB_NODELIST=a,b SLURM_TASKS_PER_NODE=1(x2) SLURM_NTASKS=2 SLURM_PROCID=1"),
            None,
            ["a:8888", "b:8888"],
        ),
    ],
)
def test_the_tasks_of_a_step(environ: dict[str, str], per_node: Any, tasks: list[str]) -> None:
    resolver = SlurmClusterResolver(tasks_per_node=per_node, environ=environ)
    assert resolver.cluster_spec().job_tasks("worker") == tasks
    assert resolver.master() == tasks[int(environ["SLURM_PROCID"])]


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
    first = {"JOB_COMPLETION_INDEX": "0"}
    named = KubernetesClusterResolver({"chief": 1}, subdomain="s", job_name="j", port=9, environ=first)
    assert named.master("chief", 0, "grpc") == "grpc://j-0.s:9"


def pytorch_job(rank: int, first: str = "job-master-0", **changes: str | None) -> dict[str, str]:
    environ = {"MASTER_ADDR": first, "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": str(rank)} | changes
    return {name: value for name, value in environ.items() if value is not None}


@pytest.mark.parametrize(
    ("environ", "addresses"),
    [
        (pytorch_job(1), ["job-master-0:23456", "job-worker-0:23456", "job-worker-1:23456"]),
        (pytorch_job(1, "job-worker-0"), ["job-worker-0:23456", "job-worker-1:23456", "job-worker-2:23456"]),
        (
            env("PET_MASTER_ADDR=t-node-0-0.t PET_MASTER_PORT=29400 PET_NNODES=2 PET_NODE_RANK=1"),
            ["t-node-0-0.t:29400", "t-node-0-1.t:29400"],
        ),
        (
            env("PET_RDZV_ENDPOINT=job-worker-0.ns:1 PET_NNODES=2 PET_NODE_RANK=1"),
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


def tf_job(document: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(document)}


def test_pods_of_a_tf_job() -> None:
    cluster = {"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1", "w:2"]}
    environ = tf_job({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    resolver = KubernetesClusterResolver(rpc_layer="grpc", environ=environ)
    assert resolver.cluster_spec().as_dict() == cluster
    assert resolver.master() == "grpc://w:2"


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


# What is refused


def bad_step(named: list[str], /, *, jobs: Any = None, given: Any = (), **changes: str | None) -> Any:
    return lambda: SlurmClusterResolver(jobs, environ=slurm(**changes), **dict(given)), named


def bad_pod(named: list[str], jobs: Any = None, /, **environ: str) -> Any:
    return lambda: KubernetesClusterResolver(jobs, subdomain="svc", environ=environ), named


def bad_job(named: list[str], environ: dict[str, str], jobs: Any = None) -> Any:
    return lambda: KubernetesClusterResolver(jobs, environ=environ), named


WORKER = {"cluster": {"worker": ["w:1"]}, "task": {"type": "worker"}}
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "j-1"}
NO_LISTS = ["", "a,,b", "a,", "n[1-3", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n[1,]", "n[[1]]"]
NO_ROLES: list[Any] = [{"worker": 4}, {"ps": 1, "worker": 5}, {}, {"worker": -5}, {"worker": "5"}, ["worker"], {1: 5}]

NO_NUMBERS: list[tuple[str, Any]] = [
    *(("tasks_per_node", value) for value in (0, -2, "2", 2.0, [2, 2])),
    *(("port_base", value) for value in (0, "8888", 8888.5, True)),
    *((name, value) for name in ("gpus_per_node", "gpus_per_task") for value in (-1, "2")),
]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        *(bad_step([f"SLURM_STEP_NODELIST={text!r}", "srun"], SLURM_STEP_NODELIST=text) for text in NO_LISTS[1:]),
        bad_step(["NODELIST", "srun"], SLURM_STEP_NODELIST=""),
        bad_step(
            ["SLURM_STEP_NODELIST and SLURM_JOB_NODELIST and SLURM_NODELIST are not set", "srun"],
            SLURM_STEP_NODELIST=None,
        ),
        bad_step(["SLURM_STEP_TASKS_PER_NODE='2(y2)'", "srun"], SLURM_STEP_TASKS_PER_NODE="2(y2)"),
        bad_step(["2 nodes, and there are 3", "srun"], SLURM_STEP_TASKS_PER_NODE="2(x2)"),
        bad_step(["adds up to 5 tasks, and the step has 6", "srun"], SLURM_STEP_NUM_TASKS="6"),
        bad_step(["SLURM_PROCID='5' must be a whole number of at least 0 and below 5", "srun"], SLURM_PROCID="5"),
        bad_step(["SLURM_PROCID='-1'", "srun"], SLURM_PROCID="-1"),
        bad_step(
            ["SLURM_PROCID is not set", "SLURM_STEP_NUM_TASKS='x'", "srun"], SLURM_PROCID=None, SLURM_STEP_NUM_TASKS="x"
        ),
        bad_step(["SLURM_GPUS_ON_NODE='many'", "srun"], SLURM_GPUS_ON_NODE="many"),
        bad_step(["SLURM_NODEID='1'", "--distribution=block", "srun"], SLURM_NODEID="1", SLURM_LOCALID="0"),
        (lambda: SlurmClusterResolver(environ={}), ["NODELIST", "TASKS_PER_NODE", "PROCID is not set"]),
        *(bad_step([repr(jobs)], jobs=jobs) for jobs in NO_ROLES),
        *(bad_step([f"{name}={value!r} must be a whole number"], given={name: value}) for name, value in NO_NUMBERS),
        bad_step(["tasks_per_node['n01']=2.5 must be a whole number"], given={"tasks_per_node": {"n01": 2.5}}),
        bad_step(["does not name the hosts ['n02', 'm7']"], given={"tasks_per_node": {"n01": 5}}),
        bad_step(["no task is said to run on any"], given={"tasks_per_node": dict.fromkeys(("n01", "n02", "m7"), 0)}),
        bad_step(["gpus_per_task=3 for 2 tasks on one host needs 6 GPUs"], given={"gpus_per_task": 3}),
        bad_pod(["JOB_COMPLETION_INDEX is not set", "HOSTNAME is not set"], {"worker": 2}),
        bad_pod(["JOB_COMPLETION_INDEX='2'", "below 2"], {"worker": 2}, JOB_COMPLETION_INDEX="2", HOSTNAME="j-2"),
        bad_pod(["JOB_COMPLETION_INDEX='one'"], {"worker": 2}, JOB_COMPLETION_INDEX="one", HOSTNAME="j-1"),
        bad_pod(["HOSTNAME='node'", "job_name="], {"worker": 2}, JOB_COMPLETION_INDEX="1", HOSTNAME="node"),
        *(bad_pod([f"jobs={jobs!r}"], jobs, **POD) for jobs in (None, {}, {"worker": 1.5})),
        bad_job(["TF_CONFIG (TFJob)", "subdomain="], {}),
        bad_job(["RANK='3'", "below 3"], pytorch_job(3)),
        bad_job(["PET_MASTER_PORT and MASTER_PORT are not set", "RANK"], pytorch_job(0, MASTER_PORT=None, RANK=None)),
        bad_job(["MASTER_PORT='70000'"], pytorch_job(0, MASTER_PORT="70000")),
        bad_job(["'10.0.0.1'", "the other 2"], pytorch_job(0, "10.0.0.1")),
        bad_job(["PET_NNODES='1:3' is a range"], pytorch_job(0, PET_NNODES="1:3")),
        bad_job(["WORLD_SIZE='three'"], pytorch_job(0, WORLD_SIZE="three")),
        bad_job(["HOSTNAME is not set"], pytorch_job(0, "localhost")),
        bad_job(["must be 'host:port'"], env("PET_RDZV_ENDPOINT=job-worker-0 PET_NNODES=2 PET_NODE_RANK=0")),
        bad_job(["cluster is missing", "task.type is missing", "task.index is missing"], tf_job({})),
        bad_job(["task.index is missing"], tf_job(WORKER)),
        bad_job(["task.index=4"], tf_job({**WORKER, "task": {"type": "worker", "index": 4}})),
        bad_job(["jobs={'worker': 2} is given too"], tf_config({"worker": ["w:1"]}, "worker", 0), {"worker": 2}),
    ],
)
def test_everything_that_is_wrong_is_one_error(make: Callable[[], Any], named: list[str]) -> None:
    with pytest.raises(ClusterConfigError) as failure:
        make()
    assert all(text in str(failure.value) for text in named), failure.value


STEP = env("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NODELIST=a,b SLURM_STEP_NUM_TASKS=2")
STEP |= env("SLURM_STEP_TASKS_PER_NODE=1(x2)")
MPI = env("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500")
MPI |= env("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2")
OPERATOR = env("PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456")
OPERATOR |= env("WORLD_SIZE=2 RANK=1 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
TF_WORKER = tf_config(TWO, "worker", 1)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    return lambda environ: [monkeypatch.setenv(name, value) for name, value in environ.items()] and None


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        (TORCHRUN, "torchrun", 3, 4),
        (TF_WORKER, "TF_CONFIG", 1, 2),
        (STEP, "Slurm (srun)", 1, 2),
        (MPI, "mpirun", 2, 4),
        (STEP | TORCHRUN, "torchrun", 3, 4),
    ],
)
def test_the_job_of_each_launcher(environ: dict[str, str], launcher: str, rank: int, size: int) -> None:
    job = launched_job(environ)
    assert job is not None
    assert (job.launcher, job.plan.rank, job.plan.size) == (launcher, rank, size)


def test_a_pod_of_the_training_operator_with_torchrun_and_without() -> None:
    job, under_torchrun = launched_job(OPERATOR), launched_job({**OPERATOR, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert job is not None
    assert (job.plan.rank, job.plan.size, job.plan.init_method) == (1, 2, "tcp://job-master-0:23456")
    assert isinstance(job.resolver, KubernetesClusterResolver)
    assert under_torchrun is not None
    assert isinstance(under_torchrun.resolver, TorchrunClusterResolver)


@pytest.mark.parametrize(("environ", "minutes"), [(STEP, 2), (MPI, 2), (TORCHRUN, 30), (TF_WORKER, 30)])
def test_how_long_tasks_wait_for_each_other_to_start(environ: dict[str, str], minutes: int) -> None:
    job = launched_job(environ)
    assert job is not None
    assert job.plan.joining_timeout(DEFAULT_TIMEOUT) == timedelta(minutes=minutes)
    assert job.plan.joining_timeout(timedelta(hours=1)) == timedelta(hours=1), "what the user says"


def test_a_task_whose_others_never_come_says_so(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment({**STEP, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"})
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # which is set before torch allocates, and stays
    monkeypatch.setattr("torchstrat.distributed.cluster._ALL_STARTED", timedelta(seconds=0.5))
    with pytest.raises(CommunicationError, match=r"could not reach .* where rank 0 listens, within 0.5 s.* timeout="):
        ts.MultiWorkerMirroredStrategy()


def test_the_tasks_of_a_step_meet_at_one_port_which_steps_do_not_share() -> None:
    def meeting_point(**changes: str) -> str | None:
        job = launched_job(STEP | changes)
        assert job is not None
        return job.plan.init_method

    assert meeting_point(SLURM_PROCID="0") == meeting_point(SLURM_PROCID="1") != meeting_point(SLURM_STEP_ID="1")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        env("SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_JOB_ID=7"),  # a batch script, which is one process
        tf_config({**TWO, "ps": ["c:1"], "chief": ["d:1"]}, "worker", 1),
        env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"),
    ],
)
def test_no_job(environ: dict[str, str]) -> None:
    assert launched_job(environ) is None


@pytest.mark.parametrize(("host", "written"), [("node0", "node0"), ("::1", "[::1]"), ("[fe80::2]", "[fe80::2]")])
def test_where_ranks_meet(host: str, written: str) -> None:
    job = launched_job({**MPI, "MASTER_ADDR": host})
    assert job is not None
    assert job.plan.init_method == f"tcp://{written}:29500"
    assert torchrun({**TORCHRUN, "MASTER_ADDR": host}).master() == f"{written}:29500"
    alone = KubernetesClusterResolver(environ=pytorch_job(0, host, PET_NNODES="1"))
    assert alone.cluster_spec().as_dict() == {"worker": [f"{written}:23456"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), ""), r"MASTER_ADDR.*MASTER_PORT.*TORCHSTRAT_INDEPENDENT=1"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT='70000' must be .* below 65536. Name a free port"),
    ],
)
def test_mpi_does_not_say_where_ranks_meet(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        launched_job({**MPI, **changes})


@pytest.mark.parametrize("environ", [TORCHRUN, STEP, MPI, TF_WORKER])
def test_a_strategy_of_one_process_names_both_remedies(
    environ: dict[str, str], environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(environ)
    remedies = r"MultiWorkerMirroredStrategy.*independent=True.*TORCHSTRAT_INDEPENDENT=1"
    for make in (lambda: ts.OneDeviceStrategy("cpu"), ts.TPUStrategy):
        with pytest.raises(UnsupportedError, match=remedies):
            make()
    ts.OneDeviceStrategy("cpu", independent=True).close()
    monkeypatch.setenv("TORCHSTRAT_INDEPENDENT", "1")
    ts.OneDeviceStrategy("cpu").close()


@pytest.mark.parametrize("environ", [TORCHRUN, STEP, MPI])
@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        (ts.MirroredStrategy, [["cpu:0"]]),
        (ts.CentralStorageStrategy, [["cpu:0"]]),
        (ts.MultiWorkerMirroredStrategy, []),
    ],
)
def test_independent_processes_join_nobody(environ: Any, strategy: Any, arguments: Any, environment: Any) -> None:
    environment(environ)
    made = strategy(*arguments, independent=True)
    assert made.num_replicas_in_sync == 1
    made.close()


def test_an_application_sees_what_its_strategies_see(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(STEP)
    plan = launched_plan()
    assert plan is not None
    assert plan.size == 2
    with pytest.raises(UnsupportedError, match=r"Slurm \(srun\) started 2 .*MultiWorkerMirroredStrategy.*independent"):
        ts.MirroredStrategy()
    monkeypatch.setenv("TORCHSTRAT_INDEPENDENT", "1")
    assert launched_plan() is None


def test_the_strategy_shows_what_describes_its_job(environment: Any) -> None:
    alone = env("SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0")
    environment(STEP | alone)
    strategy = ts.MultiWorkerMirroredStrategy()
    assert isinstance(strategy.cluster_resolver, SlurmClusterResolver)
    strategy.close()
