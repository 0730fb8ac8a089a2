"""Every operator on tensors that are cut equals plain PyTorch, however they are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.dtensor import proving
from tests.dtensor.operator_cases import CASES, PROVEN_ELSEWHERE
from tests.dtensor.operator_list import DOCUMENT, text
from torchstrat.dtensor.operators import operators
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

SEEDS, WAYS = 3, 6
SEEDS_OVER_FOUR, WAYS_OVER_FOUR = 3, 4
SEEDS_OF_SOAK, WAYS_OF_SOAK = 6, 24
NAMES = [case.name for case in CASES]
PARTS = [NAMES[start::6] for start in range(6)]


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Workers]:
    with Workers(4, timeout_seconds=300) as workers:
        yield workers


def test_every_operator_has_a_case() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {operator for case in CASES for operator in case.operators} | set(PROVEN_ELSEWHERE) == set(operators())


def check(proofs: list[list[proving.Proof]], names: list[str]) -> None:
    assert [proof.case for proof in proofs[0]] == [name for name in NAMES if name in names]
    for of_rank in proofs:
        for proof in of_rank:
            assert not proof.failures, proof
            assert proof.proven, proof
        assert [proof[:3] for proof in of_rank] == [proof[:3] for proof in proofs[0]]


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_over_two_logical_devices(part: int, two_processes: Workers) -> None:
    check(two_processes.run(proving.prove, PARTS[part], 2, SEEDS, WAYS, timeout_seconds=200), PARTS[part])


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_over_four_logical_devices(part: int, four_processes: Workers) -> None:
    check(four_processes.run(proving.prove, PARTS[part], 4, SEEDS_OVER_FOUR, WAYS_OVER_FOUR), PARTS[part])


@pytest.mark.soak
@pytest.mark.deadline(400)
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_over_four_logical_devices_in_more_ways(part: int, four_processes: Workers) -> None:
    check(four_processes.run(proving.prove, PARTS[part], 4, SEEDS_OF_SOAK, WAYS_OF_SOAK), PARTS[part])


def test_the_list_in_the_docs_is_of_these_cases() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == text(), "run python -m tests.dtensor.operator_list"


def test_everything_else_raises(two_processes: Workers) -> None:
    for messages in two_processes.run(proving.refusals):
        assert set(messages) == {*proving.REFUSED, *proving.RAISED_BY_PLAIN}
        whole = torch.rand(4, 4)
        for name, function in proving.RAISED_BY_PLAIN.items():
            with pytest.raises(Exception) as raised:  # of the same class
                function(whole)
            assert messages.pop(name) == type(raised.value).__name__, name
        for name, message in messages.items():
            assert name in message, message
            assert "replicate_to_logical_devices" in message, message
            assert "split" in message or "cut over logical devices" in message, message


CONTROLS = {
    # what is broken → a case that has to fail then
    "sums going backward": "linear without bias",
    "sums going forward": "softmax",
    "neighbours' rows": "conv2d",
    "which part is whose": "embedding",
    "random numbers": "dropout",
}


@pytest.mark.parametrize("broken", CONTROLS)
def test_a_broken_rule_is_noticed(broken: str, two_processes: Workers) -> None:
    name = CONTROLS[broken]
    for rule in (None, broken):
        of_ranks = two_processes.run(proving.prove, [name], 2, 4, 12, rule)
        assert all(bool(proofs[0].failures) == (rule is not None) for proofs in of_ranks), (rule, of_ranks)
