"""`InputOptions`, the enumerations in it, and `InputContext`."""

from __future__ import annotations

import copy
import pickle
from operator import methodcaller
from typing import Any

import pytest

from torchstrat.data import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from torchstrat.errors import InvalidArgumentError, WrongTypeError


def test_the_defaults_are_tensorflows() -> None:
    assert InputOptions()[:4] == (True, InputReplicationMode.PER_WORKER, False, 1)
    assert (InputOptions().auto_shard_policy, InputOptions().empty_replicas) == (None, "skip")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fetch_to_device", False),
        ("replication_mode", InputReplicationMode.PER_REPLICA),
        ("place_dataset_on_device", True),
        ("per_replica_buffer_size", 3),
    ],
)
def test_every_field_has_two_names(name: str, value: Any) -> None:
    short, long = InputOptions(**{name: value}), InputOptions(**{f"experimental_{name}": value})
    assert short == long
    assert getattr(short, name) == getattr(short, f"experimental_{name}") == value
    with pytest.raises(WrongTypeError, match=f"both {name} and experimental_{name}"):
        InputOptions(**{name: value, f"experimental_{name}": value})


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, "DATA", "data", 2])
def test_a_policy_may_be_named(policy: Any) -> None:
    assert InputOptions(auto_shard_policy=policy).auto_shard_policy is AutoShardPolicy.DATA


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("auto_shard_policy", "ROWS"),
        ("replication_mode", "PER_HOST"),
        ("per_replica_buffer_size", 0),
        ("empty_replicas", "drop"),
        ("collate", "replica"),
    ],
)
def test_a_value_that_a_field_cannot_have(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field}={value!r}"):
        InputOptions(**{field: value})


def test_options_do_not_change_and_can_be_copied() -> None:
    options = InputOptions(auto_shard_policy="OFF", empty_replicas="run", fetch_to_device=False)
    with pytest.raises(AttributeError):
        options.experimental_fetch_to_device = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    changed = methodcaller("_replace", empty_replicas="skip")(options)  # public, of a named tuple
    assert (changed.auto_shard_policy, changed.empty_replicas) == (AutoShardPolicy.OFF, "skip")


@pytest.mark.parametrize(
    ("size", "message"), [(30, "=30 .* over 4 replicas; .* such as 28 or 32"), (3, "such as 4 or 8")]
)
def test_a_batch_that_does_not_divide_names_ones_that_do(size: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"global_batch_size.*{message}"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)
