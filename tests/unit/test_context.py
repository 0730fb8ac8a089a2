"""Which calls belong to which context, and the default strategy. Which context a place has is in tests/conformance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.errors import ContextError, StrategyMixingError


@pytest.fixture(params=["one_device", "mirrored", "central"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    made: ts.Strategy = {
        "one_device": lambda: ts.OneDeviceStrategy("cpu:0"),
        "mirrored": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    }[request.param]()
    yield made
    made.close()


def replica_context() -> ts.ReplicaContext:
    context = ts.get_replica_context()
    assert context is not None
    return context


def state() -> tuple[bool, bool, bool]:
    return ts.has_strategy(), ts.in_cross_replica_context(), ts.get_replica_context() is not None


OUTSIDE, CROSS = (False, False, True), (True, True, False)


def test_the_default_strategy() -> None:
    default = ts.get_strategy()
    context = replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync, context.strategy) == (0, 1, default)
    assert context.all_reduce("sum", torch.tensor(2.0)) == 2
    assert context.merge_call(lambda s, x: (s is default, x + 1), args=(1,)) == (True, 2)
    assert default.run(state) == OUTSIDE
    with default.scope() as entered:
        assert (entered, state(), replica_context()) == (default, OUTSIDE, context)
        other = ts.MirroredStrategy(["cpu:0"])
        with other.scope():
            assert ts.get_strategy() is other
    assert default.extended.update(ts.Variable(1.0), lambda _: state()) == OUTSIDE
    assert default.extended.update_non_slot(None, state) == OUTSIDE
    in_a_merge = context.merge_call(lambda s: (state(), s.extended.update(ts.Variable(1.0), lambda _: state())))
    assert in_a_merge == ((False, True, False), (False, True, False))
    dataset = [1, 2]
    assert default.distribute_dataset(dataset) is dataset
    for refused, message in (
        (lambda: default.scope().__enter__(), "default strategy's scope"),
        (lambda: default.extended.worker_devices, "no devices of its own"),
        (lambda: copy.copy(default), "copied"),
        (lambda: copy.deepcopy(default), "copied"),
    ):
        with other.scope(), pytest.raises(ContextError, match=message):
            refused()
    other.close()


def test_scopes_close_in_the_order_of_opening(strategy: ts.Strategy) -> None:
    with pytest.raises(ContextError, match="left by a thread, or in an order, other than it was entered"):
        strategy.scope().__exit__(None, None, None)


CROSS_ONLY: dict[str, Callable[[ts.Strategy], Any]] = {
    "scope": lambda s: s.scope().__enter__(),
    "run": lambda s: s.run(lambda: None),
    "reduce": lambda s: s.reduce("sum", torch.tensor(1.0)),
    "gather": lambda s: s.gather(torch.ones(1), axis=0),
    "reduce_to": lambda s: s.extended.reduce_to("sum", torch.tensor(1.0), "cpu:0"),
    "broadcast_to": lambda s: s.extended.broadcast_to(torch.tensor(1.0), "cpu:0"),
}


@pytest.mark.parametrize("name", CROSS_ONLY)
def test_calls_that_belong_in_no_replica_and_in_no_other_scope(strategy: ts.Strategy, name: str) -> None:
    with pytest.raises(ContextError, match=f"{name} was called inside replica 0"):
        strategy.run(lambda: CROSS_ONLY[name](strategy))
    other = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with other.scope(), pytest.raises(StrategyMixingError, match=rf"{name} of <{type(strategy).__name__}"):
        CROSS_ONLY[name](strategy)
    other.close()


def test_calls_that_work_in_a_replica(strategy: ts.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    value = ts.PerReplica([torch.ones(1)] * count)
    strategy.run(lambda: replica_context().merge_call(lambda s: s.gather(value, axis=0)))

    def step() -> Any:
        values = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        return strategy.local_results(values)

    results = strategy.local_results(strategy.run(step))
    assert all(list(one) == list(range(count)) for one in results)


@pytest.mark.parametrize(
    "call",
    [
        lambda context: context.all_reduce("sum", torch.ones(1)),
        lambda context: context.all_gather(torch.ones(1), 0),
        lambda context: context.merge_call(print),
        lambda context: context.set_weight(1),
    ],
)
def test_a_replica_context_ends_with_its_turn(strategy: ts.Strategy, call: Any) -> None:
    kept: list[ts.ReplicaContext] = []
    strategy.run(lambda: kept.append(replica_context()))
    with pytest.raises(ContextError, match="a context ends with its run"):
        call(kept[0])


def test_replica_contexts_made_by_hand(strategy: ts.Strategy) -> None:
    context = ts.ReplicaContext(strategy, 0)
    with context:
        assert ts.get_replica_context() is context
    assert context.devices == strategy.extended.worker_devices[:1]
    for bad in ("0", 1.5, True):
        with pytest.raises(ValueError, match="must be an int"):
            ts.ReplicaContext(strategy, bad)  # type: ignore[arg-type]


def test_experimental_set_strategy(strategy: ts.Strategy) -> None:
    ts.experimental_set_strategy(strategy)
    assert (state(), ts.get_strategy() is strategy) == (CROSS, True)
    second = ts.OneDeviceStrategy("cpu:0")
    ts.experimental_set_strategy(second)
    assert ts.get_strategy() is second
    ts.experimental_set_strategy(None)
    assert state() == OUTSIDE
    with strategy.scope(), pytest.raises(ContextError, match="inside a scope"):
        ts.experimental_set_strategy(None)


def test_strategies_are_remade_by_deepcopy(strategy: ts.Strategy) -> None:
    remade = copy.deepcopy(strategy)
    assert type(remade) is type(strategy)
    assert remade is not strategy
    assert remade.extended.worker_devices == strategy.extended.worker_devices
    remade.close()


class OwnStrategy(ts.Strategy):
    def __init__(self, first: list[str], *, second: str) -> None:
        ts.policy.place(self, ts.policy.ReplicatedUpdate(), [*first, second])


def test_so_are_those_of_the_program() -> None:
    remade = copy.deepcopy(OwnStrategy(["cpu:2"], second="cpu:0"))
    assert (type(remade), remade.extended.worker_devices) == (OwnStrategy, ("cpu:2", "cpu:0"))
