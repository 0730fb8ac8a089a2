"""Training on replicas of several logical devices: every number is the one that plain PyTorch computes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.tpu import models
from tests.tpu.models import Batch, ConvNet, Mlp, make_strategy, require_same_losses, require_same_state, seeded

pytestmark = pytest.mark.tpu

STEPS = 10
CLASSES = 5


@dataclass(frozen=True)
class Configuration:
    """``partition``: of an image batch of one replica. ``rows``: of each replica, ``channels``: within the network."""

    replicas: int
    logical_devices: int
    partition: tuple[int, int, int, int]
    rows: int
    image: tuple[int, int, int]
    channels: int
    features: int
    hidden: int

    def __str__(self) -> str:
        cut = "x".join(map(str, self.partition))
        return f"R{self.replicas} L{self.logical_devices} {cut} of {self.rows}x{'x'.join(map(str, self.image))}"


def generated(seed: int, replicas: int, logical_devices: int) -> Configuration:
    """Sizes drawn at random, and the factors of ``logical_devices`` dealt to the channels, the height and the width."""
    draw = random.Random(seed)
    parts = [1, 1, 1]
    for _ in range(int(math.log2(logical_devices))):
        parts[draw.randrange(3)] *= 2
    channels, height, width = (part * draw.randint(2, 3) for part in parts)
    return Configuration(
        replicas,
        logical_devices,
        (1, *parts),
        rows=draw.randint(2, 5),
        image=(channels, height, width),
        channels=parts[0] * draw.randint(2, 4),
        features=draw.randint(3, 7),
        hidden=logical_devices * draw.randint(2, 4),
    )


CONFIGURATIONS = [
    Configuration(4, 2, (1, 1, 2, 1), rows=4, image=(3, 8, 6), channels=4, features=6, hidden=16),
    Configuration(2, 4, (1, 1, 2, 2), rows=3, image=(2, 6, 8), channels=4, features=5, hidden=8),
    generated(6, 1, 8),
    Configuration(8, 1, (1, 1, 1, 1), rows=2, image=(3, 5, 5), channels=4, features=4, hidden=8),
    generated(5, 2, 2),  # four of the eight devices have nothing to do
]


@pytest.fixture(scope="module", autouse=True)
def system() -> None:
    """Before any of the plain backward passes of this file: autograd does not take up devices after the first."""
    ts.tpu.initialize_tpu_system(virtual_devices=8)


@pytest.fixture
def make() -> Iterator[Any]:
    """Strategies that are closed after the test."""
    made: list[ts.TPUStrategy] = []

    def strategy(*args: Any, **options: Any) -> ts.TPUStrategy:
        made.append(make_strategy(*args, **options))
        return made[-1]

    yield strategy
    for one in made:
        one.close()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(strategy: ts.TPUStrategy, model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """The README's loop; the losses of each step, ``[replicas]``."""

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.classification_loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    results = [strategy.run(step, args=(batch,)) for batch in strategy.distribute_dataset(batches)]
    return [stacked(strategy, result) for result in results]


def stacked(strategy: ts.TPUStrategy, result: Any) -> torch.Tensor:
    return torch.stack([value.cpu() for value in strategy.local_results(result)])


def test_the_configurations_are_what_they_are_meant_to_be():
    assert len({(one.replicas, one.logical_devices) for one in CONFIGURATIONS}) == 5
    assert {one.replicas * one.logical_devices for one in CONFIGURATIONS} == {8, 4}
    assert all(math.prod(one.partition) == one.logical_devices for one in CONFIGURATIONS)


def test_the_comparison_tells_statistics_of_replicas_from_those_of_the_global_batch():
    """The control: what a strategy without replicas of its own would compute is far outside of the tolerances."""
    batches = models.dataset([16] * STEPS, (3, 8, 6), CLASSES)
    trained = []
    for replicas in (4, 1):
        model = seeded(lambda: ConvNet(3, 4, CLASSES))
        losses = models.train_plainly(model, adam(model), batches, replicas, models.classification_loss)
        trained.append((model, [loss.mean() for loss in losses]))
    (own, own_losses), (together, global_losses) = trained
    with pytest.raises(AssertionError, match=r"losses differ by \d\.\d+e-0[1-4]"):
        require_same_losses(own_losses, global_losses)
    with pytest.raises(AssertionError, match=r" differs by \d\.\d+e-0[1-3]"):
        require_same_state(own, together)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_convnet_with_batch_norm_cut_in_space(make, configuration: Configuration):
    strategy = make(configuration.replicas, configuration.logical_devices)

    def split(x: torch.Tensor) -> torch.Tensor:
        return strategy.split_to_logical_devices(x, configuration.partition)

    def build(annotation: models.Annotation) -> ConvNet:
        return seeded(lambda: ConvNet(configuration.image[0], configuration.channels, CLASSES, annotation))

    with strategy.scope():
        model = build(split)
        optimizer = adam(model)
    plain = build(models.unchanged)
    batches = models.dataset([configuration.replicas * configuration.rows] * STEPS, configuration.image, CLASSES)
    losses = train(strategy, model, optimizer, batches)
    expected = models.train_plainly(plain, adam(plain), batches, configuration.replicas, models.classification_loss)
    errors = require_same_losses(losses, expected), require_same_state(model, plain)
    print(f"\nConvNet, {configuration}: errors of losses {errors[0]:.1e}, of parameters {errors[1]:.1e}")
    assert int(model.norm1.num_batches_tracked) == STEPS
    assert len(strategy.compilations) <= 2


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_mlp_with_layer_norm_whose_weights_are_cut(make, configuration: Configuration):
    """Three configurations say it by rules, two by annotations of the variables."""
    parts = configuration.logical_devices
    by_rules = configuration.replicas != 2
    strategy = make(configuration.replicas, parts, **({"sharding_rules": models.MLP_RULES} if by_rules else {}))

    def split(x: torch.Tensor) -> torch.Tensor:
        return strategy.split_to_logical_devices(x, [1, parts])

    def build(annotation: models.Annotation) -> Mlp:
        return seeded(lambda: Mlp(configuration.features, configuration.hidden, CLASSES, annotation))

    with strategy.scope():
        model = build(split)
        optimizer = adam(model)
        if not by_rules:
            strategy.split_to_logical_devices(model.linear1.weight, [parts, 1])
            strategy.split_to_logical_devices(model.linear1.bias, [parts])
            strategy.split_to_logical_devices(model.linear2.weight, [1, parts])
    plain = build(models.unchanged)
    batches = models.dataset([configuration.replicas * configuration.rows] * STEPS, [configuration.features], CLASSES)
    losses = train(strategy, model, optimizer, batches)
    expected = models.train_plainly(plain, adam(plain), batches, configuration.replicas, models.classification_loss)
    errors = require_same_losses(losses, expected), require_same_state(model, plain)
    how = "rules" if by_rules else "annotations"
    print(f"\nMLP by {how}, {configuration}: errors of losses {errors[0]:.1e}, of parameters {errors[1]:.1e}")
    assert len(strategy.compilations) <= 2


# --- other models and loops -------------------------------------------------------------------------------------------


class Sentences(nn.Module):
    """Token numbers ``[rows, 5]`` through an embedding and a Transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)).mean(dim=1))


def test_embedding_and_transformer_layer_cut_by_rules(make):
    rules = {
        "layer.linear1.weight": ("d0", None),
        "*.linear1.bias": ("d0",),
        "*.linear2.weight": (None, "d0"),
        "embedding.weight": (None, "d0"),
    }
    strategy = make(4, 2, sharding_rules=rules)

    def gentle_adam(model: nn.Module) -> torch.optim.Optimizer:
        # The bias of the attention's keys has no gradient but rounding errors, which a small eps makes into steps.
        return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)

    with strategy.scope():
        model = seeded(Sentences)
        optimizer = gentle_adam(model)
    plain = seeded(Sentences)
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randint(0, 11, (12, 5), generator=generator), torch.randint(0, CLASSES, (12,), generator=generator))
        for _ in range(STEPS)
    ]
    losses = train(strategy, model, optimizer, batches)
    expected = models.train_plainly(plain, gentle_adam(plain), batches, 4, models.classification_loss)
    require_same_losses(losses, expected)
    require_same_state(model, plain)
    assert len(strategy.compilations) <= 2


def test_dropout_differs_per_replica_and_repeats_with_the_seed(make):
    strategy = make(4, 2)
    build = lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, CLASSES))  # noqa: E731
    with strategy.scope():
        model = seeded(build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = seeded(build)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        optimizer.zero_grad()
        hidden = strategy.split_to_logical_devices(model[0](x), [1, 2])
        mask = F.dropout(torch.ones_like(hidden), 0.5)
        loss = F.cross_entropy(model[1](hidden * mask), y)
        loss.backward()
        optimizer.step()
        return loss.detach(), mask

    batches = models.dataset([16] * 6, [6], CLASSES)
    masks: list[torch.Tensor] = []
    for index, (distributed, batch) in enumerate(zip(strategy.distribute_dataset(batches), batches, strict=True)):
        if index in (0, 3):
            torch.manual_seed(5)
        loss, mask = strategy.run(step, args=(distributed,))
        masks.append(stacked(strategy, mask))
        own = masks[-1]

        def masked_loss(module: Any, x: torch.Tensor, y: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(module[1](module[0](x) * one), y)

        plain_optimizer.zero_grad()
        chunks = [(*chunk, one) for chunk, one in zip(models.chunks_of(batch, [4] * 4), own, strict=True)]
        expected = models.weighted_backward(plain, chunks, masked_loss)
        plain_optimizer.step()
        require_same_losses([stacked(strategy, loss)], [torch.stack(expected)])
    require_same_state(model, plain)

    assert set(torch.stack(masks).unique().tolist()) == {0.0, 2.0}
    for one in masks:
        assert 0.3 < one.count_nonzero() / one.numel() < 0.7
        assert all(not torch.equal(one[i], one[j]) for i in range(4) for j in range(i))
        assert not torch.equal(one[..., :8], one[..., 8:])  # nor do the logical devices draw the same
    assert not torch.equal(masks[0], masks[1])
    for index in range(3):
        assert torch.equal(masks[index], masks[index + 3])
    assert len(strategy.compilations) <= 2


def test_clipping_and_a_schedule_stepped_in_the_loop(make):
    strategy = make(4, 2, sharding_rules=models.MLP_RULES)

    def build(annotation: models.Annotation = models.unchanged) -> tuple[Mlp, Any, Any]:
        model = seeded(lambda: Mlp(6, 16, CLASSES, annotation))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.37, momentum=0.9)
        # From 0, a number that compilers like to have in the program itself.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: min(index / 4, 1.7))
        return model, optimizer, schedule

    with strategy.scope():
        model, optimizer, schedule = build(lambda x: strategy.split_to_logical_devices(x, [1, 2]))
    plain, plain_optimizer, plain_schedule = build()

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = models.classification_loss(model, *batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        return loss.detach(), norm

    batches = models.dataset([16] * STEPS, [6], CLASSES)
    clipped = 0
    for distributed, batch in zip(strategy.distribute_dataset(batches), batches, strict=True):
        loss, norm = strategy.run(step, args=(distributed,))
        schedule.step()
        plain_optimizer.zero_grad()
        expected = models.weighted_backward(plain, models.chunks_of(batch, [4] * 4), models.classification_loss)
        expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        plain_optimizer.step()
        plain_schedule.step()
        require_same_losses([stacked(strategy, loss)], [torch.stack(expected)])
        torch.testing.assert_close(stacked(strategy, norm), expected_norm.expand(4), rtol=1e-5, atol=0)
        clipped += int(expected_norm > 0.3)
    require_same_state(model, plain)
    assert clipped >= 3
    assert len(strategy.compilations) <= 2


def test_two_optimizers_and_several_backwards(make):
    strategy = make(4, 2)

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.ModuleDict({"body": nn.Linear(6, 16), "head": nn.Linear(16, CLASSES), "critic": nn.Linear(16, 1)})
        groups = [model["body"], model["head"]], [model["critic"]]
        parameters = [[p for module in group for p in module.parameters()] for group in groups]
        return model, [torch.optim.Adam(parameters[0], 1e-2), torch.optim.SGD(parameters[1], 0.1)]

    def losses_of(model: Any, annotation: models.Annotation, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = annotation(torch.tanh(model["body"](x)))
        return F.cross_entropy(model["head"](hidden), y), F.mse_loss(model["critic"](hidden).squeeze(1), y.float())

    with strategy.scope():
        model, optimizers = seeded(build)
    plain, plain_optimizers = seeded(build)

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = losses_of(model, lambda x: strategy.split_to_logical_devices(x, [1, 2]), *batch)
        first.backward(retain_graph=True)
        second.backward()
        for optimizer in optimizers:
            optimizer.step()
        return first.detach(), second.detach()

    batches = models.dataset([16] * STEPS, [6], CLASSES)
    for distributed, batch in zip(strategy.distribute_dataset(batches), batches, strict=True):
        results = strategy.run(step, args=(distributed,))
        for optimizer in plain_optimizers:
            optimizer.zero_grad()
        expected = []
        for chunk in models.chunks_of(batch, [4] * 4):
            first, second = losses_of(plain, models.unchanged, *chunk)
            ((first + second) / 4).backward()
            expected.append(torch.stack([first.detach(), second.detach()]))
        for optimizer in plain_optimizers:
            optimizer.step()
        for got, wanted in zip(results, torch.stack(expected, dim=1), strict=True):
            require_same_losses([stacked(strategy, got)], [wanted])
    require_same_state(model, plain)
    assert len(strategy.compilations) <= 2


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [([32, 32, 30], (8, 8, 8, 6)), ([16, 16, 5], (2, 2, 1, 0))],
    ids=["uneven last batch", "replicas without rows"],
)
def test_partial_batches_count_by_their_rows(make, sizes, rows):
    strategy = make(4, 2)

    def build(annotation: models.Annotation = models.unchanged) -> ConvNet:
        return seeded(lambda: ConvNet(3, 4, CLASSES, annotation))

    with strategy.scope():
        model = build(lambda x: strategy.split_to_logical_devices(x, [1, 1, 2, 1]))
        optimizer = adam(model)
    plain = build()
    plain_optimizer = adam(plain)

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = models.classification_loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach(), torch.full((), len(batch[0]))

    batches = models.dataset(sizes, (3, 4, 4), CLASSES)
    seen = []
    for distributed, batch in zip(strategy.distribute_dataset(batches), batches, strict=True):
        loss, counts = strategy.run(step, args=(distributed,))
        seen.append([int(count) for count in strategy.local_results(counts)])
        parts = [*seen[-1], *[0] * (4 - len(seen[-1]))]
        plain_optimizer.zero_grad()
        expected = models.weighted_backward(plain, models.chunks_of(batch, parts), models.classification_loss)
        plain_optimizer.step()
        require_same_losses([stacked(strategy, loss)], [torch.stack(expected)])
    assert seen[-1] == [count for count in rows if count]
    require_same_state(model, plain)
    assert len(strategy.compilations) <= 3  # one of them for the partial batch


# --- what replicas say to each other, and to the loop -----------------------------------------------------------------


def test_collectives_and_replica_numbers_in_a_step(make):
    strategy = make(4, 2)
    rows = torch.arange(24.0).reshape(8, 3)

    def double_of_sum(own: Any, value: Any) -> Any:
        return own.reduce("sum", value, axis=None) * 2

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        context = ts.get_replica_context()
        number = context.replica_id_in_sync_group
        x = strategy.split_to_logical_devices(x, [2, 1])
        return {
            "number": torch.as_tensor(number) + 0,
            "scaled": x * (number + 1),
            "sum": context.all_reduce("sum", x),
            "mean": context.all_reduce("mean", x),
            "gathered": context.all_gather(x, axis=0),
            "merged": context.merge_call(double_of_sum, args=(x,)),
        }

    (batch,) = list(strategy.distribute_dataset([rows]))
    results = {name: strategy.local_results(value) for name, value in strategy.run(step, args=(batch,)).items()}
    parts = rows.split(2)
    assert [int(value) for value in results["number"]] == [0, 1, 2, 3]
    for replica in range(4):
        expected = {
            "scaled": parts[replica] * (replica + 1),
            "sum": sum(parts),
            "mean": sum(parts) / 4,
            "gathered": rows,
            "merged": 2 * sum(parts),
        }
        for name, value in expected.items():
            assert torch.equal(results[name][replica].cpu(), value), (name, replica)


def test_evaluation_gather_and_reduce(make):
    strategy = make(4, 2)

    def build(annotation: models.Annotation = models.unchanged) -> ConvNet:
        return seeded(lambda: ConvNet(3, 4, CLASSES, annotation))

    with strategy.scope():
        model = build(lambda x: strategy.split_to_logical_devices(x, [1, 1, 2, 1]))
    plain = build()
    with torch.no_grad():
        for one in (model, plain):  # statistics that an evaluation has to use
            one.norm1.running_mean.fill_(0.25)
            one.norm2.running_var.fill_(2.0)
    model.eval()
    plain.eval()

    @torch.no_grad()
    def evaluate(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch[0])
        return logits, (logits.argmax(dim=1) == batch[1]).sum()

    batches = models.dataset([16, 16, 16], (3, 4, 4), CLASSES)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for distributed, (images, labels) in zip(strategy.distribute_dataset(batches), batches, strict=True):
        logits, correct = strategy.run(evaluate, args=(distributed,))
        with torch.no_grad():
            expected = plain(images)
        torch.testing.assert_close(strategy.gather(logits, axis=0), expected, rtol=1e-5, atol=1e-6)
        assert int(strategy.reduce("sum", correct, axis=None)) == int((expected.argmax(dim=1) == labels).sum())
        torch.testing.assert_close(
            strategy.reduce("mean", logits, axis=0).cpu(), expected.mean(dim=0), rtol=1e-5, atol=1e-6
        )
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
    assert len(strategy.compilations) <= 2


def test_values_and_datasets_from_functions(make):
    strategy = make(4, 2)
    values = strategy.distribute_values_from_function(
        lambda context: torch.tensor([10.0 * context.replica_id_in_sync_group, 1.0])
    )
    assert [value.tolist() for value in strategy.local_results(values)] == [[10.0 * i, 1.0] for i in range(4)]

    def dataset(context: ts.InputContext) -> Any:
        assert context.num_replicas_in_sync == 4
        size = context.get_per_replica_batch_size(16)
        assert size == 4
        return [torch.arange(float(size)) + 100 * index for index in range(8)]

    def step(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return x * 2 + own[0]

    totals = []
    for batch in strategy.distribute_datasets_from_function(dataset):
        result = strategy.run(step, args=(batch, values))
        totals.append([value.cpu() for value in strategy.local_results(result)])
    assert len(totals) == 2
    for index, parts in enumerate(totals):
        for replica, part in enumerate(parts):
            expected = (torch.arange(4.0) + 100 * (4 * index + replica)) * 2 + 10 * replica
            assert torch.equal(part, expected)
