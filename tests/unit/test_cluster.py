"""Cluster descriptions, resolvers, and the plan of a process, from mappings in place of the environment."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from torchstrat import cluster_resolver
from torchstrat.cluster import (
    ProcessPlan,
    process_plan_from_cluster,
    process_plan_from_torchrun,
    read_tf_config,
)
from torchstrat.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    id_in_cluster,
    is_chief,
    worker_count,
)
from torchstrat.errors import ClusterConfigError, WrongTypeError

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def tf_config(cluster: Any, task_type: str, index: int) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})}


# ClusterSpec


def test_a_spec_is_equal_by_content_and_sorts_the_jobs_of_a_copy() -> None:
    spec = ClusterSpec({"worker": ["a:1"], "ps": {"2": "b:1"}})
    assert spec.jobs == ["worker", "ps"]
    assert ClusterSpec(spec).jobs == ["ps", "worker"]
    assert ClusterSpec(spec) == spec == ClusterSpec({"worker": {0: "a:1"}, "ps": {2: "b:1"}})
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert spec.as_dict() == {"worker": ["a:1"], "ps": {2: "b:1"}}
    assert repr(spec) == "ClusterSpec({'ps': {2: 'b:1'}, 'worker': ['a:1']})"


def test_a_spec_does_not_change_with_the_dict_it_was_made_of() -> None:
    cluster = {"worker": ["a:1"]}
    spec = ClusterSpec(cluster)
    cluster["worker"].append("b:1")
    spec.as_dict()["worker"].append("c:1")  # type: ignore[union-attr]
    assert spec.num_tasks("worker") == 1


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_an_unknown_job_is_answered_with_those_there_are(method: str) -> None:
    with pytest.raises(ClusterConfigError, match=r"\['ps', 'worker'\]"):
        getattr(ClusterSpec({"worker": ["a"], "ps": ["b"]}), method)("chief")


@pytest.mark.parametrize("cluster", [{1: ["a"]}, {"worker": {"a"}}, {"worker": "a"}, {"worker": [None]}, ["a"], None])
def test_a_spec_of_the_wrong_types(cluster: Any) -> None:
    with pytest.raises(WrongTypeError):
        ClusterSpec(cluster)


# Roles


def test_the_chief_comes_first_and_evaluators_count_apart() -> None:
    cluster = {"chief": ["a"], "worker": ["b", "c"], "ps": ["d"], "evaluator": ["e"]}
    assert [id_in_cluster(cluster, "chief", 0), id_in_cluster(cluster, "worker", 1)] == [0, 2]
    assert id_in_cluster(cluster, "evaluator", 0) == 0
    assert [worker_count(cluster, role) for role in ("chief", "worker", "evaluator")] == [3, 3, 1]
    assert is_chief(cluster, "chief", 0)
    assert is_chief(cluster, "evaluator", 0)
    assert not is_chief(cluster, "worker", 0)
    assert is_chief({"worker": ["b", "c"]}, "worker", 0)
    assert not is_chief({"worker": ["b", "c"]}, "worker", 1)


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    assert is_chief({"worker": ["a"]}, "evaluator", 0)
    assert id_in_cluster({"worker": ["a"]}, "evaluator", 0) == 0
    with pytest.raises(KeyError, match=r"no 'evaluator'; its jobs are worker"):
        worker_count({"worker": ["a"]}, "evaluator")


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({"worker": ["a"]}, "worker", 1, r"tasks \[0\]"),
        ({"worker": ["a"]}, "chief", 0, "no job 'chief'"),
        ({"worker": ["a"], "master": ["b"]}, "worker", 0, "'master' is no role"),
        ({"worker": ["a"]}, "boss", 0, "'boss' is no role"),
        ({"chief": ["a", "b"]}, "chief", 0, "2 tasks of type 'chief'"),
        ({"worker": ["a"], "ps": ["b"]}, "ps", 0, "no place"),
        ({"worker": ["a"]}, "worker", None, "no place"),
    ],
)
def test_tasks_without_a_place(cluster: Any, task_type: str, task_id: int | None, message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        id_in_cluster(cluster, task_type, task_id)


# torchrun


def test_the_plan_of_a_rank_that_torchrun_started() -> None:
    assert process_plan_from_torchrun(TORCHRUN) == ProcessPlan(3, 4, 1, 2, "env://", True, "rank 3 of 4")


def test_without_a_launcher_there_is_no_plan() -> None:
    assert process_plan_from_torchrun({}) is None
    assert process_plan_from_torchrun({"RANK": "0"}) is None


def test_a_world_of_one_is_a_plan() -> None:
    alone = TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    plan = process_plan_from_torchrun(alone)
    assert plan is not None
    assert (plan.rank, plan.size, plan.spans_hosts) == (0, 1, False)


def test_a_plan_does_not_change() -> None:
    plan = process_plan_from_torchrun(TORCHRUN)
    assert plan is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rank = 0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_every_variable_that_is_missing_is_named(name: str) -> None:
    without = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ClusterConfigError, match=f"(?<![A-Z_]){name} is not set.*torchrun"):
        process_plan_from_torchrun(without)


def test_all_missing_variables_are_named_at_once() -> None:
    with pytest.raises(ClusterConfigError) as caught:
        process_plan_from_torchrun({"WORLD_SIZE": "2"})
    for name in TORCHRUN.keys() - {"WORLD_SIZE"}:
        assert f"{name} is not set" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "four"),
        ("RANK", "4"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_a_variable_that_cannot_be_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"(?<![A-Z_]){name}='{value}'"):
        process_plan_from_torchrun(TORCHRUN | {name: value})


def test_the_torchrun_resolver_lists_every_rank_under_the_meeting_point() -> None:
    resolver = TorchrunClusterResolver(environ=TORCHRUN)
    assert resolver.cluster_spec().as_dict() == {"worker": ["node0:29500"] * 4}
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "node0:29500"
    assert resolver.master(rpc_layer="tcp") == "tcp://node0:29500"
    assert resolver.process_plan() == process_plan_from_torchrun(TORCHRUN)


def test_the_torchrun_resolver_of_a_lone_process_is_empty() -> None:
    resolver = TorchrunClusterResolver(environ={})
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.process_plan() is None


# Plans of clusters


def test_ranks_count_the_chief_first_and_hosts_come_from_addresses() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1", "b:2"], "chief": ["a:9"], "ps": ["c:1"]})
    plans = [process_plan_from_cluster(spec, *task) for task in (("chief", 0), ("worker", 0), ("worker", 2))]
    assert plans == [
        ProcessPlan(0, 4, 0, 2, "tcp://a:9", True, "rank 0 of 4 (chief 0)"),
        ProcessPlan(1, 4, 1, 2, "tcp://a:9", True, "rank 1 of 4 (worker 0)"),
        ProcessPlan(3, 4, 1, 2, "tcp://a:9", True, "rank 3 of 4 (worker 2)"),
    ]


def test_workers_of_one_host_do_not_span_hosts() -> None:
    environ = tf_config({"worker": ["localhost:1", "localhost:2"]}, "worker", 1)
    plan = TFConfigClusterResolver(environ=environ).process_plan()
    assert plan == ProcessPlan(1, 2, 1, 2, "tcp://localhost:1", False, "rank 1 of 2 (worker 1)")


def test_an_evaluator_computes_alone() -> None:
    plan = process_plan_from_cluster(ClusterSpec({"worker": ["a:1", "b:1"]}), "evaluator", 0)
    assert plan == ProcessPlan(0, 1, 0, 1, None, False, "evaluator 0")


def test_an_empty_cluster_has_no_plan() -> None:
    assert SimpleClusterResolver(ClusterSpec({})).process_plan() is None


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0, "parameter server 0"),
        ({"worker": ["a:1", "b:1"]}, None, None, "which task"),
        ({"worker": ["a:1", "b:1"]}, "worker", None, "which task"),
        ({"worker": {0: "a:1", 2: "b:1"}}, "worker", 2, "no gap"),
        ({"worker": ["a", "b:1"]}, "worker", 1, "'a'; write 'host:port'"),
        ({"worker": ["a:1"]}, "worker", 3, "not in the cluster"),
    ],
)
def test_tasks_that_cannot_train_together(
    cluster: Any, task_type: str | None, task_id: int | None, message: str
) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        process_plan_from_cluster(ClusterSpec(cluster), task_type, task_id)


# TF_CONFIG


def test_an_unset_variable_describes_no_cluster() -> None:
    config = read_tf_config({})
    assert not config.cluster
    assert (config.task_type, config.task_id, config.rpc_layer) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", r"TF_CONFIG is \[\]; it must be an object"),
        ('{"cluster": null}', "cluster=None"),
        ('{"task": {"type": 3}}', "task.type=3"),
        ('{"task": {"index": true}}', "task.index=True"),
        ('{"task": {"index": "one"}}', "task.index='one'"),
        ('{"rpc_layer": 7}', "rpc_layer=7"),
        ('{"cluster": {"worker": {"x": "a:1"}}}', "cluster={'worker': {'x': 'a:1'}}"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "wroker", "index": 0}}',
            r"task.type='wroker'.*\['worker'\]",
        ),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', r"task.index=1.*\[0\]"),
    ],
)
def test_a_malformed_variable_is_refused_with_its_key_and_value(text: str, message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        TFConfigClusterResolver(environ={"TF_CONFIG": text})


@pytest.mark.parametrize("role", ["chief", "evaluator"])
def test_roles_that_nobody_dials_need_no_address(role: str) -> None:
    assert read_tf_config(tf_config({"worker": ["a:1"], "ps": ["b:1"]}, role, 0)).task_type == role


def test_the_variable_is_checked_again_at_each_access() -> None:
    environ = tf_config({"worker": ["a:1", "b:1"]}, "worker", 1)
    resolver = TFConfigClusterResolver(environ=environ)
    assert resolver.master() == "b:1"
    environ["TF_CONFIG"] = "3"
    with pytest.raises(ClusterConfigError, match="TF_CONFIG is 3"):
        resolver.cluster_spec()


@pytest.mark.parametrize("index", [1, "1", 1.0])
def test_what_goes_before_the_variable_is_read_by_its_rules(index: Any) -> None:
    environ = tf_config({"worker": ["a:1", "b:1"]}, "worker", 0)
    by_argument, by_setter = (
        TFConfigClusterResolver(task_id=index, environ=environ),
        TFConfigClusterResolver(environ=environ),
    )
    by_setter.task_id = index
    for resolver in (by_argument, by_setter):
        assert (type(resolver.task_id), resolver.task_id, resolver.master()) == (int, 1, "b:1")


BAD_INDICES = [("task_id", index) for index in ("one", -1, 1.5, True, float("inf"))]


@pytest.mark.parametrize(("name", "value"), [*BAD_INDICES, ("task_type", 4), ("rpc_layer", 4)])
def test_what_cannot_go_before_the_variable_is_refused_at_once(name: str, value: Any) -> None:
    environ = tf_config({"worker": ["a:1", "b:1"]}, "worker", 0)
    with pytest.raises(ClusterConfigError, match=f"{name}={value!r}; it must be"):
        TFConfigClusterResolver(**{name: value}, environ=environ)
    resolver = TFConfigClusterResolver(environ=environ)
    with pytest.raises(ClusterConfigError, match=f"{name}={value!r}; it must be"):
        setattr(resolver, name, value)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, None)


def test_a_session_master_that_is_null_is_none() -> None:
    environ = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "session_master": None})}
    assert TFConfigClusterResolver(environ=environ).master() == ""


def test_a_session_master_goes_before_everything() -> None:
    assert TFConfigClusterResolver(environ={"TF_CONFIG": '{"session_master": "m:1"}'}).master() == "m:1"


# The public module


def test_exported_names_exist_and_are_listed() -> None:
    assert cluster_resolver.__all__ == sorted(cluster_resolver.__all__)
    assert all(hasattr(cluster_resolver, name) for name in cluster_resolver.__all__)


def test_a_layer_that_is_null_is_none() -> None:
    environ = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "rpc_layer": None})}
    assert TFConfigClusterResolver(environ=environ).rpc_layer is None
