"""How often a step is compiled: for its first two runs, and for new shapes, each of which is reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.tpu import models
from tests.tpu.hlo import DumpFolder
from tests.tpu.models import Batch, Mlp, make_strategy

pytestmark = pytest.mark.tpu

DUMP_HLO = True

HIDDEN, CLASSES = 16, 5
LOGGER = "torchstrat.tpu"


class Training:
    """An MLP with cut weights, Adam, and a step that counts how often it was recorded.

    ``features``: another number for each test, since a program that the process has compiled already is not compiled.
    """

    def __init__(self, dumps: DumpFolder, features: int, **options: Any) -> None:
        self.features = features
        self.strategy = strategy = make_strategy(4, 2, sharding_rules=models.MLP_RULES, **options)
        self._dumps, self._compiled_before = dumps, dumps.compiled
        with strategy.scope():
            self.model = models.seeded(
                lambda: Mlp(features, HIDDEN, CLASSES, lambda x: strategy.split_to_logical_devices(x, [1, 2]))
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.recorded = 0

    def step(self, batch: Batch) -> torch.Tensor:
        self.recorded += 1
        self.optimizer.zero_grad()
        loss = models.classification_loss(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, sizes: list[int]) -> None:
        """A step for each of ``sizes``, rows of a global batch; each loss is read."""
        for batch in self.strategy.distribute_dataset(models.dataset(sizes, [self.features], CLASSES)):
            loss = self.strategy.reduce("mean", self.strategy.run(self.step, args=(batch,)), axis=None)
            assert torch.isfinite(loss.cpu())

    @property
    def compiles(self) -> int:
        return len(self.strategy.compilations)

    @property
    def programs(self) -> int:
        """The compiler's own number of programs of this training, by its dumps."""
        return len(self._dumps.modules(after=self._compiled_before))


@pytest.fixture
def make(hlo_dumps: DumpFolder) -> Iterator[Any]:
    made: list[Training] = []

    def training(features: int, **options: Any) -> Training:
        made.append(Training(hlo_dumps, features, **options))
        return made[-1]

    yield training
    for one in made:
        one.strategy.close()


def test_two_for_a_shape_and_one_for_another_that_is_reported(make, caplog):
    training = make(6)
    with caplog.at_level(logging.WARNING, LOGGER):
        training.run([16] * 6)
        assert training.compiles == training.programs == 2
        assert not caplog.records
        first, second = training.strategy.compilations
        assert (first.run, second.run) == (0, 1)
        assert "first" in first.reason
        assert "optimizer state" in second.reason

        training.run([8])
        assert training.compiles == training.programs == 3
        (record,) = caplog.records
        message = record.getMessage()
        assert record.name == LOGGER
        assert "run 6 was compiled" in message
        assert "args[0][0] is float32[2, 6] now, it was float32[4, 6]" in message
        assert "args[0][1] is int64[2] now, it was int64[4]" in message
        assert training.strategy.compilations[-1].reason in message

        # Both come again, epoch after epoch.
        training.run([16, 16, 8] * 2)
        assert training.compiles == training.programs == 3
        assert len(caplog.records) == 1
    assert training.recorded == 13


def test_a_partial_batch_that_does_not_divide_costs_one_too(make, caplog):
    """Replicas of 4, 4, 4 and 2 rows: two passes in one program."""
    training = make(7)
    with caplog.at_level(logging.WARNING, LOGGER):
        training.run([16, 16, 16, 14])
        assert training.compiles == training.programs == 3
        (record,) = caplog.records
        assert "replicas [3]: args[0][0] is float32[2, 7] now" in record.getMessage()
        training.run([16, 16, 14] * 2)
    assert training.compiles == training.programs == 3
    assert len(caplog.records) == 1


def test_too_many_shapes_are_refused_before_anything_is_recorded(make):
    training = make(9, max_different_graphs=2)
    training.run([16, 16, 24])
    before = {name: value.cpu().clone() for name, value in training.model.state_dict().items()}
    compiled, recorded = training.programs, training.recorded  # reading what is cut takes programs, too
    with pytest.raises(ts.errors.InvalidArgumentError) as raised:
        training.run([32])
    message = str(raised.value)
    assert "max_different_graphs=2" in message
    assert "float32[8, 9] now" in message
    assert (training.programs, training.recorded) == (compiled, recorded)
    for name, value in training.model.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name
    training.run([16])  # what is known goes on
    assert training.recorded == recorded + 1


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "3"])
def test_the_number_of_graphs_has_to_be_one(most):
    with pytest.raises(ts.errors.InvalidArgumentError, match="max_different_graphs"):
        make_strategy(4, 2, max_different_graphs=most)


def test_evaluation_is_a_step_of_its_own(make, caplog):
    """It has no state to find: one program, which is no cause for concern; training is not compiled again between."""
    training = make(10)

    @torch.no_grad()
    def evaluate(batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(training.model(batch[0]), batch[1])

    def evaluate_all() -> None:
        for batch in training.strategy.distribute_dataset(models.dataset([16, 16], [training.features], CLASSES)):
            training.strategy.run(evaluate, args=(batch,))

    training.run([16] * 3)
    with caplog.at_level(logging.WARNING, LOGGER):
        evaluate_all()
        training.run([16] * 2)
        evaluate_all()
    assert training.compiles == training.programs == 3
    assert not caplog.records
    reason = training.strategy.compilations[-1].reason
    assert "evaluate" in reason
    assert f"{__file__}:" in reason
