"""Local SGD with one replica per process: the numbers of loops by hand, and those of replicas in one process."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from tests.support.local_steps import (
    CHANGES,
    KIND,
    OPTIMIZERS,
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
)
from tests.support.replicas import EVERY_LINE
from torchstrat.errors import InvalidArgumentError, ReplicaDivergenceError
from torchstrat.testing import Workers, contract

COLLECTIVES = ("shared_memory", "process_group")
Found = tuple[list[list[float]], list[list[float]]]


def joined(each: list[Found]) -> Found:
    """What ranks found, as one process finds it."""
    losses, values = zip(*each, strict=True)
    return [list(chain(*step)) for step in zip(*losses, strict=True)], list(chain(*values))


def train(kind: str, collectives: str) -> Found:
    strategy = local_sgd(None, collectives=collectives)
    try:
        mine = Training(strategy, kind)
        return mine.train(batches(8, 2)), mine.values()
    finally:
        strategy.close()


@pytest.mark.parametrize("collectives", COLLECTIVES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_of_loops_by_hand(two_processes: Workers, kind: str, collectives: str) -> None:
    simulation = Simulation(kind, 2, 3)
    losses, values = joined(two_processes.run(train, kind, collectives))
    close(losses, simulation.train(batches(8, 2)))
    close(values, simulation.values())


def train_changed(name: str) -> Found:
    strategy = local_sgd(None)
    try:
        mine = Training(strategy, KIND)
        mine.train(batches(2, 2))
        CHANGES[name](mine.job)
        return mine.train(batches(3, 2)), mine.values()
    finally:
        strategy.close()


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_program_changes_between_runs_is_rank_0s_for_all(two_processes: Workers, name: str) -> None:
    losses, values = joined(two_processes.run(train_changed, name))
    wanted_losses, wanted_values = changed_by_hand(name)
    close(losses, wanted_losses)
    close(values, wanted_values)


def change_more_on_rank_0(collectives: str) -> None:
    strategy = local_sgd(None, collectives=collectives)
    try:
        mine = Training(strategy, KIND)
        mine.train(batches(1, 2))
        first, *others = mine.job.model.parameters()
        with torch.no_grad():
            for parameter in (first, *others) if strategy.is_chief else [first]:
                parameter.mul_(2)
        with pytest.raises(
            ReplicaDivergenceError, match=r"between two runs of a round.* on replica \d tensors of shapes"
        ):
            mine.train(batches(1, 2))
    finally:
        strategy.close()


@pytest.mark.parametrize("collectives", COLLECTIVES)
def test_what_the_program_changes_otherwise_on_each_rank(two_processes: Workers, collectives: str) -> None:
    two_processes.run(change_more_on_rank_0, collectives)


def test_a_run_whose_end_of_a_round_raised_does_not_count(two_processes: Workers) -> None:
    assert two_processes.run(rounds_after_a_failure, None) == [1, 1]


def test_what_a_failed_run_has_stepped_is_each_ranks_own_until_the_round_is_ended(two_processes: Workers) -> None:
    each = two_processes.run(fail_and_end_by_hand, None)
    close([list(chain(*values)) for values in zip(*each, strict=True)], failed_and_ended_by_hand())


def train_at_rates() -> Found:
    strategy = local_sgd(None)
    try:
        mine = Training(strategy, KIND)
        with pytest.warns(UserWarning, match="have set lr of group 0 of SGD differently"):
            return mine.train_at_rates(), mine.values()
    finally:
        strategy.close()


def test_rates_that_ranks_set_are_their_own_until_a_round_ends(two_processes: Workers) -> None:
    losses, values = joined(two_processes.run(train_at_rates))
    wanted_losses, wanted_values = rates_by_hand()
    close(losses, wanted_losses)
    close(values, wanted_values)


# -- the contract's cases ----------------------------------------------------------------------------------------------


def train_wrapped() -> Found:
    strategy = local_sgd(None)
    try:
        mine = Training(strategy, "wrapped")
        losses = rates_of_a_wrapper(lambda start, stop: mine.train(batches(stop, 2)[start:]), [mine.job])
        return losses, mine.values()
    finally:
        strategy.close()


def test_groups_that_an_optimizer_shares_with_what_it_wraps_stay_shared(two_processes: Workers) -> None:
    losses, values = joined(two_processes.run(train_wrapped))
    by_hand = Simulation("wrapped", 2, 3)
    close(losses, rates_of_a_wrapper(lambda start, stop: by_hand.train(batches(stop, 2)[start:]), by_hand.jobs))
    close(values, by_hand.values())


def run_contract(name: str, row: str) -> contract.Snapshot | str:
    """Or the text of the error that it ended with."""
    strategy = contract.LOCAL[row].make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return contract.run_case(contract.CASES[name], strategy)
    except InvalidArgumentError as error:
        return str(error)
    finally:
        strategy.close()


OUTSIDE = {"evaluated_between_steps": {"scores"}}
"""What code outside of runs computes: of the first replica in this process."""
CELLS = [
    # Half of what goes through every line: what differs from other launches is when there is a mean, once in a round.
    pytest.param(name, row, marks=[] if name in EVERY_LINE and number % 4 == turn else [pytest.mark.soak])
    for number, (name, case) in enumerate(contract.CASES.items())
    for turn, row in enumerate(("local_sgd", "local_sgd on sockets"))
    if ts.ReduceOp.parse(case.gradient_reduce_op) is ts.ReduceOp.MEAN and not case.needs_compiler
]


@pytest.mark.parametrize(("name", "row"), CELLS)
def test_bits_of_replicas_in_one_process(two_processes: Workers, name: str, row: str) -> None:
    """Of every training case: its losses, and what each replica has in the end."""
    wanted = run_contract(name, "local_sgd x2")
    found = two_processes.run(run_contract, name, row, timeout_seconds=240)
    if isinstance(wanted, str):
        assert found == [wanted] * 2
        return
    for rank, snapshot in enumerate(found):
        assert not isinstance(snapshot, str), snapshot
        for key, value in wanted.items():
            of, _, replica = key.partition(" on replica ")
            if of not in OUTSIDE.get(name, ()) and replica in ("", str(rank)) and (replica or rank == 0):
                torch.testing.assert_close(snapshot[key], value, rtol=0, atol=0, equal_nan=True, msg=key)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_or_restore(replicas: int | None, folder: Path, save_as: str | None) -> Found:
    """Five steps and a checkpoint, or the four steps after it."""
    strategy = local_sgd(replicas)
    try:
        mine = Training(strategy, KIND)
        data = batches(9, 2)
        if save_as is not None:
            mine.train(data[:5])
            ts.Checkpoint(**mine.job.objects()).save(folder / save_as)
        else:
            [saved] = folder.iterdir()
            ts.Checkpoint(**mine.job.objects()).restore(saved)
        return mine.train(data[5:]), mine.values()
    finally:
        strategy.close()


@pytest.mark.parametrize("saver", ["processes", "one process"])
@pytest.mark.parametrize("restorer", ["processes", "one process"])
def test_goes_on_from_the_midst_of_a_round(two_processes: Workers, tmp_path: Path, saver: str, restorer: str) -> None:
    def call(who: str, save_as: str | None) -> Found:
        if who == "one process":
            return save_or_restore(2, tmp_path, save_as)
        return joined(two_processes.run(save_or_restore, None, tmp_path, save_as))

    wanted = call(saver, "saved")
    assert call(restorer, None) == wanted


def restore(folder: Path) -> list[list[float]]:
    strategy = local_sgd(None)
    try:
        mine = Training(strategy, KIND)
        ts.Checkpoint(**mine.job.objects()).restore(folder)
        return mine.values()
    finally:
        strategy.close()


def test_other_numbers_of_replicas_go_on_from_the_mean(two_processes: Workers, tmp_path: Path) -> None:
    strategy = local_sgd(3)
    mine = Training(strategy, KIND)
    mine.train(batches(2, 3))
    ts.Checkpoint(**mine.job.objects()).save(tmp_path / "saved")
    count = sum(parameter.numel() for parameter in mine.job.model.parameters())
    mean = torch.tensor(mine.values(), dtype=torch.float64)[:, :count].mean(dim=0).tolist()
    strategy.close()
    for found in two_processes.run(restore, tmp_path / "saved"):
        close([one[:count] for one in found], [mean])
