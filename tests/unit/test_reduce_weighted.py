"""`reduce("mean", …, weighted=True)`: means over the replicas' rows become the mean over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.unit.in_process_strategies import STRATEGIES, opened
from torchstrat.testing.fake_tpu import fake_tpu_strategy

pytestmark = pytest.mark.unit
ROWS = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], dtype=torch.float64)


@pytest.fixture(params=[*STRATEGIES, "one device", "tpu x2", "tpu x3"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param in STRATEGIES:
        with opened(request.param) as made:
            yield made
        return
    tpu = request.param.startswith("tpu")
    made = fake_tpu_strategy(int(request.param[-1])) if tpu else ts.OneDeviceStrategy("cpu:0")
    yield made
    made.close()


def context() -> ts.ReplicaContext:
    found = ts.get_replica_context()
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [7, 5, 4, 1])
def test_the_mean_over_the_global_batch(strategy: Any, rows: int) -> None:
    batch = ROWS[:rows]
    for part in strategy.distribute_dataset([batch]):
        means = strategy.run(
            lambda x: {"mean": x.mean(), "columns": [torch.stack([x.mean(), -x.mean()])]}, args=(part,)
        )
        found = strategy.reduce("mean", means, weighted=True)
        torch.testing.assert_close(found["mean"].cpu(), batch.mean(), rtol=1e-12, atol=0)
        columns = found["columns"][0].cpu()
        torch.testing.assert_close(columns, torch.stack([batch.mean(), -batch.mean()]), rtol=1e-12, atol=0)


def test_a_replica_of_no_weight_is_left_out() -> None:
    """What it computes of no rows is nan."""
    options = ts.InputOptions(empty_replicas="run")
    for name in ("mirrored x2", "mirrored x4", "central x3"):
        with opened(name) as strategy:
            for part in strategy.distribute_dataset([ROWS[:1]], options):
                means = strategy.run(torch.mean, args=(part,))
                assert strategy.reduce("mean", means).isnan()
                assert strategy.reduce("mean", means, weighted=True) == 1.0


@pytest.mark.parametrize("name", ["mirrored x2", "central x3", "tpu x2"])
def test_the_weights_are_what_the_step_said(name: str) -> None:
    strategy = fake_tpu_strategy(2) if name == "tpu x2" else STRATEGIES[name][1]()
    count = strategy.num_replicas_in_sync
    values = strategy.distribute_values_from_function(lambda c: torch.tensor(c.replica_id_in_sync_group + 1.0))

    def step(value: torch.Tensor, weight: float | None) -> torch.Tensor:
        if weight is not None:
            context().set_weight(weight)
        return value

    with pytest.raises(ValueError, match="nothing says how much each replica counts"):
        strategy.reduce("mean", strategy.run(step, args=(values, None)), weighted=True)
    weighed = strategy.run(step, args=(values, 3.0))
    assert strategy.reduce("mean", weighed, weighted=True) == (count + 1) / 2
    if name != "tpu x2":  # there replicas run as one program, in which a weight of their own is a tensor
        weights = ts.PerReplica([float(2**replica) for replica in range(count)])
        expected = sum((replica + 1) * 2**replica for replica in range(count)) / (2**count - 1)
        found = strategy.reduce("mean", strategy.run(step, args=(values, weights)), weighted=True)
        torch.testing.assert_close(found, torch.tensor(expected))
        zeros = strategy.run(step, args=(values, 0.0))
        assert strategy.reduce("mean", zeros, weighted=True) == (count + 1) / 2
    strategy.close()


def test_a_weight_that_only_the_program_of_a_tpu_knows_is_refused() -> None:
    strategy = fake_tpu_strategy(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        context().set_weight((x > 2).sum())  # type: ignore[arg-type]
        return x.mean()

    for part in strategy.distribute_dataset([ROWS]):
        means = strategy.run(step, args=(part,))
        with pytest.raises(ValueError, match="nothing says how much each replica counts"):
            strategy.reduce("mean", means, weighted=True)
    strategy.close()


def test_merge_calls_know_the_rows() -> None:
    def merge(strategy: ts.Strategy, mean: Any) -> Any:
        return strategy.reduce("mean", mean, weighted=True)

    def step(x: torch.Tensor, _: torch.Tensor) -> Any:
        return context().merge_call(merge, args=(x.mean(),))

    with opened("mirrored x2") as strategy:
        for part in strategy.distribute_dataset([(ROWS[:6].reshape(3, 2), torch.tensor([0, 1, 2]))]):
            assert strategy.local_results(strategy.run(step, args=part))[0] == ROWS[:6].mean()


def test_what_is_the_same_everywhere_is_its_own_mean(strategy: Any) -> None:
    assert strategy.reduce("mean", 2.5, weighted=True) == 2.5
    assert strategy.reduce("mean", torch.tensor(3), weighted=True) == 3


def test_what_weights_mean_nothing_for(strategy: Any) -> None:
    value = strategy.run(lambda: torch.ones(2))
    with pytest.raises(ValueError, match="got 'sum' and axis=None"):
        strategy.reduce("sum", value, weighted=True)
    with pytest.raises(ValueError, match="got 'mean' and axis=0"):
        strategy.reduce("mean", value, axis=0, weighted=True)
    if not isinstance(strategy, ts.TPUStrategy):
        with strategy.scope():
            variable = ts.Variable(1.0)
        with pytest.raises(ValueError, match="a Variable, which has no rows"):
            strategy.reduce("mean", variable, weighted=True)
