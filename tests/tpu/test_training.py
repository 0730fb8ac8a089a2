"""Training on replicas of several logical devices: every number is plain PyTorch's, and every device has its part.

What a device computes, holds and sends is read off the programs that were compiled for the very same trainings. Each
property of a program is a function that raises `AssertionError`; a control without the annotation fails the same one.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.tpu import models
from tests.tpu.hlo import DumpFolder, Module, Shape
from tests.tpu.models import Annotation, Batch, ConvNet, Mlp, Pair, make_strategy, require_same_losses, seeded, stacked

pytestmark = pytest.mark.tpu

DUMP_HLO = True

STEPS, CLASSES, CHANNELS = 10, 5, 4
LOGGER = "torchstrat.tpu"


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


FOUR_BY_TWO = Configuration(4, 2, (1, 1, 2, 1), rows=4, image=(3, 8, 12), channels=CHANNELS, features=6, hidden=16)
TWO_BY_FOUR = Configuration(2, 4, (1, 1, 2, 2), rows=4, image=(2, 8, 12), channels=CHANNELS, features=6, hidden=16)
IDLE = generated(5, 2, 2)
"""Four of the eight devices have nothing to do."""
CONFIGURATIONS = [
    FOUR_BY_TWO,
    TWO_BY_FOUR,
    generated(6, 1, 8),
    Configuration(8, 1, (1, 1, 1, 1), rows=2, image=(3, 5, 5), channels=CHANNELS, features=4, hidden=8),
    IDLE,
]


def in_every_run(*chosen: Configuration) -> list[Any]:
    """The others, which differ from these in sizes, take half a minute of compilation: in soak."""
    return [pytest.param(one, marks=[] if one in chosen else [pytest.mark.soak]) for one in CONFIGURATIONS]


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


def splitting(strategy: ts.TPUStrategy, *parts: int) -> Annotation:
    return lambda x: strategy.split_to_logical_devices(x, parts)


# --- properties of programs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """``program``: of a training step that finds gradients and optimizer state; ``rows``: of a replica."""

    program: Module
    strategy: ts.TPUStrategy
    model: nn.Module
    rows: int

    @property
    def replica_groups(self) -> frozenset[frozenset[int]]:
        """Devices of all replicas that have the same part of a model."""
        return frozenset(frozenset(column) for column in zip(*self._devices(), strict=True))

    @property
    def logical_groups(self) -> frozenset[frozenset[int]]:
        """Devices of one replica."""
        return frozenset(frozenset(row) for row in self._devices())

    def _devices(self) -> list[list[int]]:
        assignment = self.strategy.device_assignment
        return [
            [assignment.tpu_ordinal(replica, logical) for logical in range(assignment.num_cores_per_replica)]
            for replica in range(assignment.num_replicas)
        ]


def require_split_activations(step: Step, opcode: str, of_row: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """Of the layers' results (``opcode``) each device makes its part; nothing of a replica's full shape is anywhere."""
    whole = (step.rows, *of_row)
    piece = tuple(size // part for size, part in zip(whole, parts, strict=True))
    made = [shape.dims for shape in step.program.shapes_of(opcode)]
    assert piece in made, f"no {opcode} makes {piece}: {made}"
    found = [str(shape) for shape in _all_shapes(step.program) if shape.dims in (whole, (1, *whole))]
    assert not found, f"whole activations: {sorted(set(found))}"


def require_split_images(step: Step, image: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """A device is given its part of its replica's images, and nothing of others."""
    piece = tuple(size // part for size, part in zip((step.rows, *image), parts, strict=True))
    given = [shape.dims for shape in step.program.parameters if len(shape.dims) == 1 + len(piece)]
    assert given == [(1, *piece)], f"images are arguments of {given}"


def _all_shapes(program: Module) -> list[Shape]:
    return [shape for one in program.instructions for shape in one.shapes]


def require_halo_exchange(step: Step, image: Sequence[int], parts: Sequence[int]) -> None:
    """Neighbours in a replica send each other one row or column, along every axis that is cut, both ways.

    ``image``: height and width; ``parts``: of each.
    """
    exchanges = step.program.collectives("collective-permute")
    assert exchanges, "no collective-permute"
    for exchange in exchanges:
        assert all(any(set(pair) <= group for group in step.logical_groups) for pair in exchange.groups), str(exchange)
        assert all(1 in sent.dims[2:] for sent in exchange.operands), f"more than a border: {exchange}"
    pairs = [frozenset(exchange.groups) for exchange in exchanges]
    backwards = [frozenset((to, sender) for sender, to in pair) for pair in pairs]
    assert set(pairs) == set(backwards), "borders go one way only"
    height, width = image[0] // parts[0], image[1] // parts[1]
    sent = {operand.dims[2:] for exchange in exchanges for operand in exchange.operands}
    for axis in (0, 1):
        assert any(dims[axis] == 1 for dims in sent) or parts[axis] == 1, f"no border along a cut axis: {sent}"
    assert all(dims[0] <= height + 2 and dims[1] <= width + 2 for dims in sent)


def require_gradients_summed_over_replicas(step: Step, parts_of: dict[str, int]) -> None:
    """Each parameter's gradient, or the part of it that a device holds, is added up over the replica groups.

    ``parts_of``: name → number of parts, for the parameters that are cut.
    """
    sums = Counter(
        operand.elements
        for one in step.program.collectives("all-reduce")
        if frozenset(map(frozenset, one.groups)) == step.replica_groups
        for operand in one.operands
    )
    needed = Counter(parameter.numel() // parts_of.get(name, 1) for name, parameter in step.model.named_parameters())
    missing = needed - sums
    assert not missing, f"gradients of so many elements are not added up over {step.replica_groups}: {dict(missing)}"


def require_nothing_gathered(step: Step) -> None:
    gathered = step.program.collectives("all-gather", "all-to-all")
    assert not gathered, "; ".join(map(str, gathered))


def require_split_weights(step: Step, whole: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """A weight and its two Adam states are a device's arguments as parts, and nothing of the full shape is anywhere."""
    piece = tuple(size // part for size, part in zip(whole, parts, strict=True))
    held = [shape.dims for shape in step.program.parameters]
    assert held.count(piece) >= 3, f"{held.count(piece)} arguments of shape {piece}: {held}"
    found = [str(shape) for shape in _all_shapes(step.program) if shape.dims in (whole, whole[::-1])]
    assert not found, f"whole weights: {sorted(set(found))}"


# --- training ---------------------------------------------------------------------------------------------------------


def trained(dumps: DumpFolder, pair: Pair, rows: int, shape: Sequence[int], partial: Sequence[int] = ()) -> Step:
    """Its numbers are plain PyTorch's, in `STEPS` steps of ``rows`` on each replica and in those of ``partial`` rows.

    Two programs are compiled for the whole batches, and one for each other number of rows.
    """
    replicas = pair.strategy.num_replicas_in_sync
    before = dumps.compiled
    pair.train(models.dataset([replicas * rows] * STEPS, shape, CLASSES))
    assert len(pair.strategy.compilations) == len(dumps.training_steps(after=before)) == 2
    step = Step(dumps.training_step(after=before), pair.strategy, pair.model, rows)
    assert step.program.num_partitions == 8
    if partial:
        seen = pair.train(models.dataset(partial, shape, CLASSES, seed=2))
        assert [sum(counts) for counts in seen] == list(partial)
        assert len(pair.strategy.compilations) == 2 + len(partial)
    return step


def test_the_comparison_tells_statistics_of_replicas_from_those_of_the_global_batch():
    """The control: what a strategy without replicas of its own would compute is far outside of the tolerances."""
    batches = models.dataset([16] * STEPS, (3, 8, 6), CLASSES)
    trainings = []
    for replicas in (4, 1):
        model = seeded(lambda: ConvNet(3, CHANNELS, CLASSES))
        optimizer, losses = models.adam(model), []
        for batch in batches:
            optimizer.zero_grad()
            rows = [16 // replicas] * replicas
            losses.append(models.weighted_backward(model, batch, rows, models.classification_loss).mean())
            optimizer.step()
        trainings.append((model, torch.stack(losses)))
    (own, own_losses), (together, global_losses) = trainings
    with pytest.raises(AssertionError, match=r"losses differ by \d\.\d+e-0[1-4]"):
        require_same_losses(own_losses, global_losses)
    with pytest.raises(AssertionError, match=r" differs by \d\.\d+e-0[1-3]"):
        models.require_same_state(own, together)


def convnet(strategy: ts.TPUStrategy, configuration: Configuration, annotation: Annotation) -> Pair:
    build = lambda split: ConvNet(configuration.image[0], configuration.channels, CLASSES, split)  # noqa: E731
    return Pair(strategy, build, annotation)


@pytest.mark.parametrize("configuration", in_every_run(TWO_BY_FOUR), ids=str)
def test_convnet_with_batch_norm_cut_in_space(make, hlo_dumps, configuration: Configuration):
    one = configuration
    assert math.prod(one.partition) == one.logical_devices
    strategy = make(one.replicas, one.logical_devices)
    pair = convnet(strategy, one, splitting(strategy, *one.partition))
    # Replicas of other numbers of rows, and without rows.
    partial = {FOUR_BY_TWO: [14, 5], TWO_BY_FOUR: [7, 1]}.get(one, [])
    step = trained(hlo_dumps, pair, one.rows, one.image, partial)
    assert int(pair.model.norm1.num_batches_tracked) == STEPS + len(partial)
    if one in (FOUR_BY_TWO, TWO_BY_FOUR):
        require_split_activations(step, "convolution", (CHANNELS, *one.image[1:]), one.partition)
        require_halo_exchange(step, one.image[1:], one.partition[2:])
        require_gradients_summed_over_replicas(step, {})
        require_nothing_gathered(step)
        require_split_images(step, one.image, one.partition)


def once(dumps: DumpFolder, pair: Pair, rows: int, shape: Sequence[int]) -> Step:
    """The program of the first step, for controls."""
    before = dumps.compiled
    pair.train(models.dataset([4 * rows], shape, CLASSES))
    return Step(dumps.training_step(after=before), pair.strategy, pair.model, rows)


def test_convnet_without_annotation_fails_the_same(make, hlo_dumps):
    pair = convnet(make(4, 2), FOUR_BY_TWO, models.unchanged)
    step = once(hlo_dumps, pair, 4, FOUR_BY_TWO.image)
    require_gradients_summed_over_replicas(step, {})
    of_row = (CHANNELS, *FOUR_BY_TWO.image[1:])
    with pytest.raises(AssertionError, match="no convolution makes"):
        require_split_activations(step, "convolution", of_row, (1, 1, 2, 1))
    with pytest.raises(AssertionError, match="whole activations"):
        require_split_activations(step, "convolution", of_row, (1, 1, 1, 1))
    require_split_images(step, FOUR_BY_TWO.image, (1, 1, 1, 1))
    with pytest.raises(AssertionError, match="images are arguments of"):
        require_split_images(step, FOUR_BY_TWO.image, (1, 1, 2, 1))
    with pytest.raises(AssertionError, match="no collective-permute"):
        require_halo_exchange(step, FOUR_BY_TWO.image[1:], (2, 1))


def mlp(strategy: ts.TPUStrategy, one: Configuration, annotation: Annotation, by_annotations: bool = False) -> Pair:
    parts = one.logical_devices

    def build(split: Annotation) -> Mlp:
        model = Mlp(one.features, one.hidden, CLASSES, split)
        if by_annotations and split is not models.unchanged:
            strategy.split_to_logical_devices(model.linear1.weight, [parts, 1])
            for vector in (model.linear1.bias, model.norm.weight, model.norm.bias):
                strategy.split_to_logical_devices(vector, [parts])
            strategy.split_to_logical_devices(model.linear2.weight, [1, parts])
        return model

    return Pair(strategy, build, annotation)


def cut(parts: int) -> dict[str, int]:
    """How many pieces of each parameter there are."""
    return dict.fromkeys(("linear1.weight", "linear1.bias", "norm.weight", "norm.bias", "linear2.weight"), parts)


@pytest.mark.parametrize("configuration", in_every_run(FOUR_BY_TWO, TWO_BY_FOUR, IDLE), ids=str)
def test_mlp_with_layer_norm_whose_weights_are_cut(make, hlo_dumps, configuration: Configuration):
    """Three configurations say it by rules, two by annotations of the variables."""
    one, parts = configuration, configuration.logical_devices
    by_rules = one.replicas != 2
    strategy = make(one.replicas, parts, **({"sharding_rules": models.MLP_RULES} if by_rules else {}))
    step = trained(hlo_dumps, mlp(strategy, one, splitting(strategy, 1, parts), not by_rules), one.rows, [one.features])
    if one in (FOUR_BY_TWO, TWO_BY_FOUR):
        require_split_activations(step, "dot", (one.hidden,), (1, parts))
        require_split_weights(step, (one.hidden, one.features), (parts, 1))
        require_split_weights(step, (CLASSES, one.hidden), (1, parts))
        require_gradients_summed_over_replicas(step, cut(parts))
        require_nothing_gathered(step)


def test_mlp_without_annotation_fails_the_same(make, hlo_dumps):
    step = once(hlo_dumps, mlp(make(4, 2), FOUR_BY_TWO, models.unchanged), 4, [6])
    require_gradients_summed_over_replicas(step, {})
    with pytest.raises(AssertionError, match="no dot makes"):
        require_split_activations(step, "dot", (16,), (1, 2))
    with pytest.raises(AssertionError, match="0 arguments of shape"):
        require_split_weights(step, (16, 6), (2, 1))
    with pytest.raises(AssertionError, match="are not added up"):
        require_gradients_summed_over_replicas(step, cut(2))


def test_asking_for_whole_activations_gathers_them(make, hlo_dumps):
    """The control of `require_nothing_gathered`."""
    strategy = make(4, 2, sharding_rules=models.MLP_RULES)
    step = once(hlo_dumps, mlp(strategy, FOUR_BY_TWO, strategy.replicate_to_logical_devices), 4, [6])
    with pytest.raises(AssertionError, match="all-gather"):
        require_nothing_gathered(step)
    with pytest.raises(AssertionError, match="whole activations"):
        require_split_activations(step, "dot", (16,), (1, 2))


# --- how often a step is compiled -------------------------------------------------------------------------------------


def test_compilations(make, hlo_dumps, caplog):
    """Two for a shape and one for another that is reported; the compiler's own number, by its dumps, is the same."""
    strategy = make(4, 2, sharding_rules=models.MLP_RULES, max_different_graphs=4)
    pair = Pair(strategy, lambda split: Mlp(7, 16, CLASSES, split), splitting(strategy, 1, 2))
    before, recorded, model, train = hlo_dumps.compiled, [0], pair.model, pair.step

    def step(batch: Batch) -> torch.Tensor:
        recorded[0] += 1
        return train(batch)[0]

    @torch.no_grad()
    def evaluate(batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def run(sizes: list[int], fn: Callable[[Batch], torch.Tensor] = step) -> tuple[int, list[str]]:
        """How many programs there are then, and what was reported."""
        caplog.clear()
        for batch in strategy.distribute_dataset(models.dataset(sizes, [7], CLASSES)):
            loss = strategy.reduce("mean", strategy.run(fn, args=(batch,)), axis=None)
            assert torch.isfinite(loss.cpu())
        assert len(strategy.compilations) == len(hlo_dumps.modules(after=before))
        return len(strategy.compilations), [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, LOGGER):
        assert run([16] * 6) == (2, [])
        first, second = strategy.compilations
        assert (first.run, second.run) == (0, 1)
        assert "first" in first.reason
        assert "optimizer state" in second.reason
        count, (message,) = run([8])
        assert count == 3
        assert "run 6 was compiled" in message
        assert "args[0][0] is float32[2, 7] now, it was float32[4, 7]" in message
        assert "args[0][1] is int64[2] now, it was int64[4]" in message
        assert strategy.compilations[-1].reason in message
        # Both come again, epoch after epoch.
        assert run([16, 16, 8] * 2) == (3, [])
        assert recorded == [13]
        # Replicas of 4, 4, 4 and 2 rows: two passes in one program.
        count, (message,) = run([14])
        assert count == 4
        assert "replicas [3]: args[0][0] is float32[2, 7] now" in message
        assert run([16, 14] * 2) == (4, [])
        # Evaluation has no state to find: one program, which is no cause for concern.
        assert run([16, 16], evaluate) == (5, [])
        assert run([16, 16], evaluate) == (5, [])
        assert run([16, 16]) == (5, [])
    assert f"evaluate ({__file__}:" in strategy.compilations[-1].reason

    # Too many shapes are refused before anything is recorded; what is known goes on.
    state = {name: value.cpu().clone() for name, value in pair.model.state_dict().items()}
    compiled, known = hlo_dumps.compiled, recorded[0]  # reading what is cut takes programs, too
    (batch,) = strategy.distribute_dataset(models.dataset([32], [7], CLASSES))
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"max_different_graphs=4\).*float32\[8, 7\] now"):
        strategy.run(step, args=(batch,))
    assert (hlo_dumps.compiled, recorded[0]) == (compiled, known)
    for name, value in pair.model.state_dict().items():
        assert torch.equal(value.cpu(), state[name]), name
    (batch,) = strategy.distribute_dataset(models.dataset([16], [7], CLASSES))
    strategy.run(step, args=(batch,))
    assert recorded[0] == known + 1


# --- other models and loops -------------------------------------------------------------------------------------------


class Sentences(nn.Module):
    """Numbers ``[rows, 5]`` as tokens through an embedding and a Transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 5).long() % 11
        return self.head(self.layer(self.embedding(tokens)).mean(dim=1))


def test_embedding_and_transformer_layer_cut_by_rules(make):
    rules = {
        "layer.linear1.weight": ("d0", None),
        "*.linear1.bias": ("d0",),
        "*.linear2.weight": (None, "d0"),
        "embedding.weight": (None, "d0"),
    }
    # The bias of the attention's keys has no gradient but rounding errors, which a small eps makes into steps.
    gentle = lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)  # noqa: E731
    strategy = make(4, 2, sharding_rules=rules)
    Pair(strategy, lambda _: Sentences(), optimizer=gentle).train(models.dataset([12] * STEPS, [5], CLASSES))
    assert len(strategy.compilations) <= 2


class Recurrent(nn.Module):
    """``[rows, 3, 3]`` through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_lstm_needs_the_global_view_and_then_trains_as_plainly(make):
    pair = Pair(make(4, 2), lambda _: Recurrent())
    batches = models.dataset([8] * 4, (3, 3), CLASSES)
    with pytest.raises(ts.errors.UnsupportedError, match="global_view=True"):
        pair.strategy.run(pair.step, args=(next(iter(pair.strategy.distribute_dataset(batches))),))
    assert pair.train(batches, global_view=True) == [[8]] * 4


def test_clipping_and_a_schedule_stepped_in_the_loop(make):
    strategy = make(4, 2, sharding_rules=models.MLP_RULES)
    norms: list[torch.Tensor] = []

    def clipped(model: nn.Module) -> torch.Tensor:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        return norms[-1]

    def schedule(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        # From 0, a number that compilers like to have in the program itself.
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: min(index / 4, 1.7)).step

    pair = Pair(
        strategy,
        lambda split: Mlp(6, 16, CLASSES, split),
        splitting(strategy, 1, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.37, momentum=0.9),
        before_step=clipped,
        after_step=schedule,
    )
    pair.train(models.dataset([16] * STEPS, [6], CLASSES))
    assert sum(bool(norm > 0.3) for norm in norms[1::2]) >= 3  # the plain model's
    assert len(strategy.compilations) <= 2


def test_dropout_differs_per_replica_and_repeats_with_the_seed(make):
    strategy = make(4, 2)
    build = lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, CLASSES))  # noqa: E731
    with strategy.scope():
        model = seeded(build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = seeded(build)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def masked_loss(module: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module[1](module[0](x) * mask), y)

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
        plain_optimizer.zero_grad()
        expected = models.weighted_backward(plain, (*batch, masks[-1].flatten(0, 1)), [4] * 4, masked_loss)
        plain_optimizer.step()
        require_same_losses(stacked(strategy, loss), expected)
    models.require_same_state(model, plain)

    assert set(torch.stack(masks).unique().tolist()) == {0.0, 2.0}
    for one in masks:
        assert 0.3 < one.count_nonzero() / one.numel() < 0.7
        assert all(not torch.equal(one[i], one[j]) for i in range(4) for j in range(i))
        assert not torch.equal(one[..., :8], one[..., 8:])  # nor do the logical devices draw the same
    assert not torch.equal(masks[0], masks[1])
    assert all(torch.equal(masks[index], masks[index + 3]) for index in range(3))
    assert len(strategy.compilations) <= 2


def test_what_replicas_say_to_each_other_and_to_the_loop(make):
    """Collectives and replica numbers, and their sums, means and rows put together outside."""
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
    results = strategy.run(step, args=(batch,))
    parts = rows.split(2)
    scaled = [part * (replica + 1) for replica, part in enumerate(parts)]
    expected = {"number": torch.arange(4), "scaled": torch.stack(scaled), "sum": sum(parts), "mean": sum(parts) / 4}
    for name, wanted in {**expected, "gathered": rows, "merged": 2 * sum(parts)}.items():
        found = stacked(strategy, results[name])
        assert torch.equal(found, wanted.expand(4, *wanted.shape) if wanted.ndim < found.ndim else wanted), name
    assert torch.equal(strategy.gather(results["scaled"], axis=0).cpu(), torch.cat(scaled))
    assert int(strategy.reduce("sum", results["number"], axis=None)) == 6
    assert torch.equal(strategy.reduce("mean", results["scaled"], axis=0).cpu(), torch.cat(scaled).mean(dim=0))


def test_evaluation_uses_statistics_and_changes_none(make):
    strategy = make(4, 2)
    pair = convnet(strategy, FOUR_BY_TWO, splitting(strategy, 1, 1, 2, 1))
    with torch.no_grad():
        for one in (pair.model, pair.plain):
            one.norm1.running_mean.fill_(0.25)
            one.norm2.running_var.fill_(2.0)
            one.eval()

    model = pair.model

    @torch.no_grad()
    def evaluate(batch: Batch) -> torch.Tensor:
        return model(batch[0])

    batches = models.dataset([16] * 3, FOUR_BY_TWO.image, CLASSES)
    for distributed, (images, _) in zip(strategy.distribute_dataset(batches), batches, strict=True):
        logits = strategy.gather(strategy.run(evaluate, args=(distributed,)), axis=0)
        torch.testing.assert_close(logits, pair.plain(images).detach(), rtol=1e-5, atol=1e-6)
    models.require_same_state(pair.model, pair.plain)
    assert len(strategy.compilations) <= 2


def test_eight_virtual_devices_in_a_process_of_their_own():
    import torch_xla.runtime

    assert (os.environ["CPU_NUM_DEVICES"], os.environ["OMP_NUM_THREADS"]) == ("8", "1")
    assert torch_xla.runtime.global_runtime_device_count() == 8
