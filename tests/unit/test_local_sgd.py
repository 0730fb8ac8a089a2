"""Replicas that step variables of their own in one process: local SGD, and policies of a program's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.local_steps import (
    CHANGES,
    KIND,
    OPTIMIZERS,
    Job,
    Simulation,
    Training,
    batches,
    changed_by_hand,
    close,
    fail_and_end_by_hand,
    failed_and_ended_by_hand,
    local_sgd,
    rates_by_hand,
    rates_of_a_wrapper,
    rounds_after_a_failure,
    values,
)
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.testing import contract


@contextmanager
def training(replicas: int = 2, period: int = 3, kind: str = KIND) -> Iterator[Training]:
    strategy = local_sgd(replicas, period)
    try:
        yield Training(strategy, kind)
    finally:
        strategy.close()


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_of_loops_by_hand(kind: str, replicas: int, period: int) -> None:
    simulation = Simulation(kind, replicas, period)
    with training(replicas, period, kind) as mine:
        close(mine.train(batches(8, replicas)), simulation.train(batches(8, replicas)))
        close(mine.values(), simulation.values())


def test_a_round_that_is_ended_by_hand() -> None:
    simulation = Simulation(KIND, 2, 100)
    with training(period=100) as mine:
        for data in (batches(2, 2), batches(5, 2)):
            mine.train(data)
            mine.strategy.end_round()
            simulation.train(data)
            simulation.average()
            close(mine.values(), simulation.values())
            assert mine.values()[0] == mine.values()[1] == values(mine.job.model)


def test_what_a_round_has_changed_before_a_checkpoint_becomes_alike_at_its_end(tmp_path: Path) -> None:
    simulation = Simulation(KIND, 2, 100)
    simulation.train(batches(2, 2))
    simulation.average()
    with training(period=100) as first:
        first.train(batches(2, 2))
        ts.Checkpoint(**first.job.objects()).save(tmp_path / "saved")
    with training(period=100) as second:
        ts.Checkpoint(**second.job.objects()).restore(tmp_path / "saved")
        second.values()  # a run that changes nothing
        second.strategy.end_round()
        close(second.values(), simulation.values())


def test_runs_without_a_step_do_not_count() -> None:
    simulation = Simulation(KIND, 2, 3)
    with training() as mine:
        for data in (batches(2, 2), batches(2, 2)):
            mine.train(data)
            mine.values()
            mine.strategy.run(lambda: mine.job.model(torch.ones(4, 3, dtype=torch.float64)).sum().backward())
            simulation.train(data)
        mine.job.model[1].reset_running_stats()  # which the runs in between have changed
        for job in simulation.jobs:
            job.model[1].reset_running_stats()  # type: ignore[index]
        close(mine.values(), simulation.values())


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_program_changes_between_runs_is_for_all(name: str) -> None:
    with training() as mine:
        mine.train(batches(2, 2))
        CHANGES[name](mine.job)
        losses, seen = changed_by_hand(name)
        close(mine.train(batches(3, 2)), losses)
        close(mine.values(), seen)


def test_rates_that_replicas_set_are_their_own_until_a_round_ends() -> None:
    with training() as mine:
        losses, seen = rates_by_hand()
        with pytest.warns(UserWarning, match="have set lr of group 0 of SGD differently"):
            close(mine.train_at_rates(), losses)
        close(mine.values(), seen)


def test_groups_that_an_optimizer_shares_with_what_it_wraps_stay_shared() -> None:
    by_hand = Simulation("wrapped", 2, 3)
    losses = rates_of_a_wrapper(lambda start, stop: by_hand.train(batches(stop, 2)[start:]), by_hand.jobs)
    with training(kind="wrapped") as mine:
        close(rates_of_a_wrapper(lambda start, stop: mine.train(batches(stop, 2)[start:]), [mine.job]), losses)
        close(mine.values(), by_hand.values())


def test_every_replica_needs_rows() -> None:
    with training() as mine:
        before = mine.values()
        with pytest.raises(InvalidArgumentError, match="no rows for replica 1 of 2"):
            mine.train([tuple(part[:1] for part in batches(1, 2)[0])])  # type: ignore[list-item]
        assert mine.values() == before


def test_a_run_whose_end_of_a_round_raised_does_not_count() -> None:
    assert rounds_after_a_failure(["cpu:0", "cpu:1"]) == 2, "one of each replica"


def test_a_run_that_raises_leaves_each_replica_what_its_own_steps_made() -> None:
    simulation = Simulation(KIND, 2, 3)
    with training() as mine:
        mine.train(batches(2, 2))
        simulation.train(batches(2, 2))

        def failing() -> None:
            raise ValueError("for once")

        with pytest.raises(ValueError, match="for once"):
            mine.strategy.run(failing)
        close(mine.train(batches(2, 2)), simulation.train(batches(2, 2)))
        close(mine.values(), simulation.values())


def test_what_a_failed_run_has_stepped_is_each_replicas_own_until_the_round_is_ended() -> None:
    close(fail_and_end_by_hand(2), failed_and_ended_by_hand())


def test_calls_that_have_no_meaning_are_refused() -> None:
    with training() as mine:
        context = ts.get_replica_context
        with pytest.raises(UnsupportedError, match="merge_call runs code once"):
            mine.strategy.run(lambda: context().merge_call(lambda strategy: None))  # type: ignore[union-attr]
        with pytest.raises(UnsupportedError, match="different variables by design"):
            mine.strategy.extended.check_replicas()
    for period, error in ((0, InvalidArgumentError), (2.0, WrongTypeError), (True, WrongTypeError)):
        with pytest.raises(error, match="period"):
            ts.LocalSGDStrategy(period=period)  # type: ignore[arg-type]


def _replace(job: Job) -> None:
    layer = job.model[3]
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


def _append(job: Job) -> None:
    job.model.append(nn.Linear(2, 2))  # type: ignore[operator]


def _make_once(job: Job) -> None:
    """Which the other replica finds, and not in its own group."""
    layer = job.model[3]
    if not hasattr(layer, "gain"):
        layer.gain = nn.Parameter(torch.ones(2, dtype=torch.float64))
        job.optimizer.add_param_group({"params": [layer.gain]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_replace, r"in the place of Linear\.weight"),
        (_append, "adds members to a Net"),
        (_make_once, "gives one replica's SGD other parameters"),
    ],
)
def test_members_that_a_step_makes_are_refused(make: Callable[[Job], None], message: str) -> None:
    with training() as mine, pytest.raises(UnsupportedError, match=message):
        mine.strategy.run(make, args=(mine.job,))
    with training(replicas=1) as mine:
        mine.strategy.run(make, args=(mine.job,))


def test_updates_by_hand_that_end_no_round_are_warned_of() -> None:
    @torch.no_grad()
    def update(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(0.9)

    with training() as mine:
        mine.strategy.run(update, args=(mine.job.model,))  # first values, perhaps
        with pytest.warns(UserWarning, match="no optimizer has"):
            mine.strategy.run(update, args=(mine.job.model,))
        mine.train(batches(1, 2))
        mine.strategy.run(update, args=(mine.job.model,))


def test_every_replica_counts_with_an_optimizer_state_of_its_own() -> None:
    with training() as mine:
        local = mine.strategy.extended.estimate(mine.job.model, mine.job.optimizer).holdings
        assert len({one.optimizer_state_bytes for one in local}) == 1
        assert all(one.optimizer_state_bytes > 0 for one in local)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [3, 5])
def test_goes_on_from_the_midst_of_a_round(tmp_path: Path, kind: str, saved_after: int) -> None:
    data = batches(9, 2)
    with training(kind=kind) as mine:
        mine.train(data[:saved_after])
        ts.Checkpoint(**mine.job.objects()).save(tmp_path / "saved")
        wanted = mine.train(data[saved_after:]), mine.values()
    with training(kind=kind) as other:
        other.train(batches(1, 2))  # of which nothing must be left
        ts.Checkpoint(**other.job.objects()).restore(tmp_path / "saved")
        assert (other.train(data[saved_after:]), other.values()) == wanted


def test_on_another_number_of_replicas_they_go_on_from_the_mean(tmp_path: Path) -> None:
    with training() as mine:
        mine.train(batches(2, 2))
        ts.Checkpoint(**mine.job.objects()).save(tmp_path / "saved")
        count = sum(parameter.numel() for parameter in mine.job.model.parameters())
        parameters = torch.tensor(mine.values(), dtype=torch.float64)[:, :count]
    wanted = parameters.mean(dim=0).tolist()
    with training(replicas=3) as other:
        ts.Checkpoint(**other.job.objects()).restore(tmp_path / "saved")
        for seen in [*other.values(), values(other.job.model)]:
            assert seen[: len(wanted)] == pytest.approx(wanted, rel=1e-12)
        other.train(batches(2, 3))  # a new round: after two steps they still differ
        assert other.values()[0] != other.values()[1]


@pytest.mark.parametrize("make", [ts.MirroredStrategy, ts.CentralStorageStrategy, ts.OneDeviceStrategy])
def test_under_another_strategy_they_go_on_from_the_mean(tmp_path: Path, make: Any) -> None:
    with training() as mine:
        mine.train(batches(2, 2))
        ts.Checkpoint(**mine.job.objects()).save(tmp_path / "saved")
        mine.strategy.end_round()
        wanted = [parameter.tolist() for parameter in mine.job.model.parameters()]
    other = Training(make(), KIND)
    ts.Checkpoint(**other.job.objects()).restore(tmp_path / "saved")
    assert [parameter.tolist() for parameter in other.job.model.parameters()] == wanted
    other.strategy.close()


# -- policies of a program's own ---------------------------------------------------------------------------------------


class DiLoCo(ts.policy.LocalUpdate):
    """Steps an outer momentum on the mean of what replicas have changed."""

    def __init__(self, period: int) -> None:
        self.period = period

    def ends_round(self, steps: int) -> bool:
        return steps >= self.period

    def end_round(self, replica: ts.policy.Replica) -> None:
        kept = replica.state.setdefault("kept", {})
        for place, parameter in enumerate(replica.parameters):
            start = kept.get(f"start {place}", torch.zeros_like(parameter)).detach().clone()
            change = start - parameter.detach()
            replica.average([change])
            momentum = kept[f"momentum {place}"] = 0.5 * kept.get(f"momentum {place}", 0) + change
            with torch.no_grad():
                parameter.copy_(start - 0.7 * momentum)
            kept[f"start {place}"] = parameter.detach().clone()


class DiLoCoStrategy(ts.Strategy):
    def __init__(self, devices: list[str] | None = None, *, period: int = 2) -> None:
        ts.policy.place(self, DiLoCo(period), devices)


def diloco_by_hand(data: Any) -> list[list[float]]:
    """The mean of what is frozen, but for the first layer, which is so between the steps."""
    simulation = Simulation(KIND, 2, 1000)
    named = dict(simulation.jobs[0].model.named_parameters())
    frozen = {place for place, name in enumerate(named) if "average" in name or "frozen" in name}
    starts, momenta = ([torch.zeros_like(one) for one in named.values()] for _ in range(2))
    for number, batch in enumerate(data, start=1):
        simulation.train([batch])
        if number % 2 == 0:
            with torch.no_grad():
                for place, each in enumerate(zip(*(job.model.parameters() for job in simulation.jobs), strict=True)):
                    mean = torch.stack(each).mean(dim=0)
                    momenta[place] = 0.5 * momenta[place] + starts[place] - mean
                    starts[place] = mean if place in frozen else starts[place] - 0.7 * momenta[place]
                    for one in each:
                        one.copy_(starts[place])
            simulation.average("buffers")
    return simulation.values()


def test_a_registered_strategy_with_a_policy_of_its_own(tmp_path: Path) -> None:
    ts.registry.register("diloco", DiLoCoStrategy)
    data, wanted = batches(6, 2), diloco_by_hand(batches(6, 2))
    strategies = [ts.registry.create("diloco", devices=["cpu:0", "cpu:1"]) for _ in range(2)]
    first, second = (Training(one, KIND) for one in strategies)
    first.train(data[:3])
    ts.Checkpoint(**first.job.objects()).save(tmp_path / "saved")  # with what the policy keeps
    ts.Checkpoint(**second.job.objects()).restore(tmp_path / "saved")
    for mine in (first, second):
        mine.train(data[3:])
        close(mine.values(), wanted)
        mine.strategy.close()


POLICIES = [ts.policy.ReplicatedUpdate(), ts.policy.PrimaryUpdate(), ts.policy.ShardedUpdate()]


class Placed(ts.Strategy):
    """Any policy, on two replicas."""

    def __init__(self, policy: Any) -> None:
        ts.policy.place(self, policy, ["cpu:0", "cpu:1"])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: type(one).__name__)
def test_other_policies_have_the_numbers_of_one_device(policy: ts.policy.UpdatePolicy) -> None:
    case = contract.CASES["sgd_momentum"]
    strategy = Placed(policy)
    contract.check(case, contract.run_case(case, strategy), contract.reference(case, 2))
    with pytest.raises(UnsupportedError, match="Placed has no rounds"):
        ts.policy.end_round(strategy)
    strategy.close()


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(WrongTypeError, match="place needs a ReplicatedUpdate"):
        Placed("replicated")
