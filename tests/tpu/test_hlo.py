"""What every device computes in a training step: pieces of activations and of weights, and what it sends to the others.

Each property is a function that raises `AssertionError`; a control without the annotation fails the same function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.tpu import models
from tests.tpu.hlo import DumpFolder, Module, Shape
from tests.tpu.models import ConvNet, Mlp, make_strategy

pytestmark = pytest.mark.tpu

DUMP_HLO = True

DEVICES = 8
ROWS = 4
CLASSES = 5
IMAGE = (3, 8, 12)
CHANNELS = 4
FEATURES, HIDDEN = 6, 16


@dataclass(frozen=True)
class Step:
    """``program``: of a training step that finds gradients and optimizer state."""

    program: Module
    strategy: ts.TPUStrategy
    model: torch.nn.Module

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


def compile_step(
    dumps: DumpFolder, strategy: ts.TPUStrategy, build: Callable[[], torch.nn.Module], shape: Sequence[int]
) -> Step:
    """Two training steps with Adam; the program of the second."""
    before = dumps.compiled
    with strategy.scope():
        model = models.seeded(build)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.classification_loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = models.dataset([ROWS * strategy.num_replicas_in_sync] * 2, shape, CLASSES)
    for batch in strategy.distribute_dataset(batches):
        strategy.run(step, args=(batch,))
    assert len(dumps.training_steps(after=before)) == 2
    return Step(dumps.training_step(after=before), strategy, model)


# --- properties -------------------------------------------------------------------------------------------------------


def require_all_devices(step: Step) -> None:
    assert step.program.num_partitions == DEVICES


def require_split_activations(step: Step, opcode: str, replica_shape: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """Of the layers' results (``opcode``) each device makes its part; nothing of a replica's full shape is anywhere."""
    piece = tuple(size // part for size, part in zip(replica_shape, parts, strict=True))
    made = [shape.dims for shape in step.program.shapes_of(opcode)]
    assert piece in made, f"no {opcode} makes {piece}: {made}"
    whole = [str(shape) for shape in _all_shapes(step.program) if _is_of(shape, replica_shape)]
    assert not whole, f"whole activations: {sorted(set(whole))}"


def require_split_images(step: Step, parts: tuple[int, ...]) -> None:
    """A device is given its part of its replica's images, and nothing of others."""
    piece = tuple(size // part for size, part in zip((ROWS, *IMAGE), parts, strict=True))
    given = [shape.dims for shape in step.program.parameters if len(shape.dims) == 1 + len(piece)]
    assert given == [(1, *piece)], f"images are arguments of {given}"


def _all_shapes(program: Module) -> list[Shape]:
    return [shape for one in program.instructions for shape in one.shapes]


def _is_of(shape: Shape, replica_shape: tuple[int, ...]) -> bool:
    """Whether a tensor is of ``replica_shape``, perhaps behind the dimension of the replicas."""
    return shape.dims in (replica_shape, (1, *replica_shape))


def require_halo_exchange(step: Step, image: tuple[int, int], parts: tuple[int, int]) -> None:
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
    for is_cut, of_piece in ((parts[0] > 1, lambda dims: dims[0] == 1), (parts[1] > 1, lambda dims: dims[1] == 1)):
        assert any(of_piece(dims) for dims in sent) or not is_cut, f"no border along a cut axis: {sent}"
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


def show(title: str, step: Step) -> None:
    program = step.program
    print(f"\n{title}: num_partitions={program.num_partitions}")
    print(f"  arguments   {' '.join(sorted(set(map(str, program.parameters))))}")
    print(f"  activations {' '.join(map(str, program.shapes_of('convolution', 'dot')))}")
    for text, count in Counter(map(str, program.collectives())).items():
        print(f"  {count} × {text}")


# --- a convolutional network, cut in space ----------------------------------------------------------------------------


def convnet_step(dumps: DumpFolder, strategy: ts.TPUStrategy, partition: Sequence[int] | None) -> Step:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x if partition is None else strategy.split_to_logical_devices(x, partition)

    return compile_step(dumps, strategy, lambda: ConvNet(IMAGE[0], CHANNELS, CLASSES, split), IMAGE)


@pytest.fixture(scope="module")
def whole_convnet(request) -> Callable[[DumpFolder], Step]:
    """The control: no annotation. Compiled once."""
    made: list[Step] = []

    def step(dumps: DumpFolder) -> Step:
        if not made:
            made.append(convnet_step(dumps, make_strategy(4, 2), None))
        return made[0]

    return step


@pytest.mark.parametrize(
    ("replicas", "logical_devices", "partition"), [(4, 2, (1, 1, 2, 1)), (2, 4, (1, 1, 2, 2))], ids=["R4 L2", "R2 L4"]
)
def test_convnet_step(hlo_dumps, replicas, logical_devices, partition):
    step = convnet_step(hlo_dumps, make_strategy(replicas, logical_devices), partition)
    show(f"ConvNet, {replicas} replicas, cut {list(partition)}", step)
    require_all_devices(step)
    require_split_activations(step, "convolution", (ROWS, CHANNELS, *IMAGE[1:]), partition)
    require_halo_exchange(step, IMAGE[1:], partition[2:])
    require_gradients_summed_over_replicas(step, {})
    require_nothing_gathered(step)
    require_split_images(step, partition)


def test_convnet_without_annotation_fails_the_same(hlo_dumps, whole_convnet):
    step = whole_convnet(hlo_dumps)
    show("ConvNet without annotation", step)
    require_all_devices(step)
    require_gradients_summed_over_replicas(step, {})
    with pytest.raises(AssertionError, match="no convolution makes"):
        require_split_activations(step, "convolution", (ROWS, CHANNELS, *IMAGE[1:]), (1, 1, 2, 1))
    with pytest.raises(AssertionError, match="whole activations"):
        require_split_activations(step, "convolution", (ROWS, CHANNELS, *IMAGE[1:]), (1, 1, 1, 1))
    require_split_images(step, (1, 1, 1, 1))
    with pytest.raises(AssertionError, match="images are arguments of"):
        require_split_images(step, (1, 1, 2, 1))
    with pytest.raises(AssertionError, match="no collective-permute"):
        require_halo_exchange(step, IMAGE[1:], (2, 1))


# --- a multilayer perceptron, its weights cut -------------------------------------------------------------------------

CUT = {
    parts: {"linear1.weight": parts, "linear1.bias": parts, "norm.weight": parts, "norm.bias": parts}
    | {"linear2.weight": parts}
    for parts in (2, 4)
}


def mlp_step(
    dumps: DumpFolder, strategy: ts.TPUStrategy, annotation: Callable[[torch.Tensor], torch.Tensor], cut_weights: bool
) -> Step:
    parts = strategy.device_assignment.num_cores_per_replica

    def build() -> Mlp:
        model = Mlp(FEATURES, HIDDEN, CLASSES, annotation)
        if cut_weights:
            strategy.split_to_logical_devices(model.linear1.weight, [parts, 1])
            for vector in (model.linear1.bias, model.norm.weight, model.norm.bias):
                strategy.split_to_logical_devices(vector, [parts])
            strategy.split_to_logical_devices(model.linear2.weight, [1, parts])
        return model

    return compile_step(dumps, strategy, build, (FEATURES,))


@pytest.mark.parametrize(
    ("replicas", "parts", "by_rules"), [(4, 2, True), (2, 4, False)], ids=["R4 L2 by rules", "R2 L4 by annotations"]
)
def test_tensor_parallel_mlp_step(hlo_dumps, replicas, parts, by_rules):
    strategy = make_strategy(replicas, parts, **({"sharding_rules": models.MLP_RULES} if by_rules else {}))
    split = lambda x: strategy.split_to_logical_devices(x, [1, parts])  # noqa: E731
    step = mlp_step(hlo_dumps, strategy, split, cut_weights=not by_rules)
    show(f"MLP, {replicas} replicas of {parts}, {'by rules' if by_rules else 'by annotations'}", step)
    require_all_devices(step)
    require_split_activations(step, "dot", (ROWS, HIDDEN), (1, parts))
    require_split_weights(step, (HIDDEN, FEATURES), (parts, 1))
    require_split_weights(step, (CLASSES, HIDDEN), (1, parts))
    require_gradients_summed_over_replicas(step, CUT[parts])
    require_nothing_gathered(step)


def test_mlp_without_annotation_fails_the_same(hlo_dumps):
    step = mlp_step(hlo_dumps, make_strategy(4, 2), models.unchanged, cut_weights=False)
    show("MLP without annotation", step)
    require_all_devices(step)
    require_gradients_summed_over_replicas(step, {})
    with pytest.raises(AssertionError, match="no dot makes"):
        require_split_activations(step, "dot", (ROWS, HIDDEN), (1, 2))
    with pytest.raises(AssertionError, match="0 arguments of shape"):
        require_split_weights(step, (HIDDEN, FEATURES), (2, 1))
    with pytest.raises(AssertionError, match="are not added up"):
        require_gradients_summed_over_replicas(step, CUT[2])


def test_asking_for_whole_activations_gathers_them(hlo_dumps):
    """The control of `require_nothing_gathered`."""
    strategy = make_strategy(4, 2, sharding_rules=models.MLP_RULES)
    step = mlp_step(hlo_dumps, strategy, strategy.replicate_to_logical_devices, cut_weights=False)
    show("MLP with cut weights and whole activations", step)
    with pytest.raises(AssertionError, match="all-gather"):
        require_nothing_gathered(step)
    with pytest.raises(AssertionError, match="whole activations"):
        require_split_activations(step, "dot", (ROWS, HIDDEN), (1, 2))
