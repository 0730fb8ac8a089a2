"""The contract can fail: strategies that are wrong on purpose do not get through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.replicas import reference
from torchstrat.testing import contract
from torchstrat.testing.training import equal_chunks, one_device, replicas_by_hand

NO_COMPILER = [case for case in contract.CASES.values() if not case.needs_compiler]
every_case = pytest.mark.parametrize("case", NO_COMPILER, ids=lambda case: case.name)


class OneModel:
    """Runs the step on the whole global batch: as right as a strategy of one replica can be."""

    replicas = 1

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    no_sync = scope

    def distribute_dataset(self, batches: list[Any]) -> Iterator[list[Any]]:
        for batch in batches:
            yield [chunk for chunk in equal_chunks(batch, self.replicas) if len(chunk[0])]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        return [function(*chunk) for chunk in zip(*args, strict=True)] if args else [function()]

    def reduce(self, reduce_op: str, results: list[Any], axis: int) -> Any:
        return torch.cat(results).mean(dim=axis)

    def local_results(self, results: list[Any]) -> list[Any]:
        return results


class NoAggregation(OneModel):
    """Both replicas step one model, each with its own gradient."""

    replicas = 2


class FirstReplicaOnly(NoAggregation):
    """Two replicas, of which only the first counts."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        return super().run(function, tuple(chunks[:1] for chunks in args))


class ForgottenReplica(OneModel):
    """The numbers are right, but one replica looks at other ones."""

    def local_results(self, results: list[Any]) -> list[Any]:
        replica_id, numbers = results[0]
        stale = {name: value + 1 for name, value in numbers.items()}
        return [(replica_id, numbers), (replica_id + 1, stale)]


def _passes(case: contract.Case, strategy: Any) -> bool:
    try:
        contract.check(case, contract.run_case(case, strategy), reference(case, strategy.replicas))
    except Exception:
        return False
    return True


@every_case
def test_one_model_passes(case: contract.Case) -> None:
    contract.check(case, contract.run_case(case, OneModel()), reference(case, 1))


@pytest.mark.parametrize("wrong", [NoAggregation, FirstReplicaOnly], ids=lambda wrong: wrong.__name__)
def test_wrong_strategies_fail(wrong: type[OneModel]) -> None:
    # What is drawn at random has no expected numbers, only replicas that must agree, and these have one model.
    asked = [case for case in NO_COMPILER if case.name != "dropout" and reference(case, 2) is not None]
    assert [case.name for case in asked if _passes(case, wrong())] == []


@every_case
def test_training_moves(case: contract.Case) -> None:
    """Every case changes what it watches, to finite numbers, and more than its tolerance would forgive."""
    trained = reference(replace(case, expected=None), 1)
    short = one_device(replace(case, expected=None, batches=lambda: case.batches()[:1]), 1)
    kept = [name for name in short if name in trained and trained[name].shape == short[name].shape]
    watched = [name for name in kept if not name.startswith("loss[")]
    assert all(bool(trained[name].isfinite().all()) for name in trained)
    assert any(float((trained[name] - short[name]).abs().max()) > 20 * case.tolerance for name in watched)


def test_replicas_and_processes_must_agree() -> None:
    drawn, case = contract.CASES["lazy_in_run_drawn"], contract.CASES["sgd_momentum"]
    with pytest.raises(AssertionError, match="on replica 1 differs by 1"):
        contract.check(drawn, contract.run_case(drawn, ForgottenReplica()), None)
    right = contract.run_case(case, OneModel())
    contract.check_agreement(case, [right, right])
    name = next(iter(right))
    with pytest.raises(AssertionError, match="ranks 0 and 1 disagree"):
        contract.check_agreement(case, [right, {**right, name: right[name] + 1e-15}])


def test_batch_norm_by_hand() -> None:
    """With one replica the hand-written loop is the plain loop; with two it is not."""
    case = contract.CASES["batch_norm"]
    single, double = replicas_by_hand(case, 1), replicas_by_hand(case, 2)
    plain = one_device(case, 1)
    assert all(torch.equal(single[name], plain[name]) for name in plain)
    assert float((double["model.1.running_var"] - plain["model.1.running_var"]).abs().max()) > 1e-3


def test_message_names_the_worst_and_the_first_loss() -> None:
    case = contract.CASES["sgd_momentum"]
    expected = reference(case, 1)
    assert expected is not None
    got = {name: value.clone() for name, value in expected.items()}
    got |= {f"{name} on replica 0": value for name, value in expected.items() if "loss" in name}
    got["model.last.bias"][1] += 0.5
    got["loss[3]"] += 0.25
    got["loss[3] on replica 0"] = got["loss[3]"]
    with pytest.raises(AssertionError) as raised:
        contract.check(case, got, expected)
    lines = str(raised.value).splitlines()
    assert "model.last.bias differs by 5.00e-01" in lines[1]
    assert "flat index 1" in lines[1]
    assert "first wrong loss: loss[3]" in lines[-1]
