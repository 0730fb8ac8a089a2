"""`convert_sync_batchnorm`: the numbers of one device on the global batch, however its rows are split."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts

FEATURES = 3


@pytest.fixture(params=[2, 4])
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy([f"cpu:{index}" for index in range(request.param)])
    yield made
    made.close()


def model_1d() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def model_sequences() -> nn.Module:
    convolution = nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 2))
    return nn.Sequential(convolution, nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 2))


def model_2d() -> nn.Module:
    convolution = nn.Sequential(nn.Unflatten(1, (1, 1, FEATURES)), nn.Conv2d(1, 4, 1))
    return nn.Sequential(convolution, nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(12, 2))


def model_3d() -> nn.Module:
    convolution = nn.Sequential(nn.Unflatten(1, (1, 1, 1, FEATURES)), nn.Conv3d(1, 4, 1))
    return nn.Sequential(convolution, nn.BatchNorm3d(4, momentum=None), nn.Flatten(), nn.Linear(12, 2))


def model_untracked() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))


def batches(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64) * 3 + 100

    return [(draw(FEATURES), draw(2)) for _ in range(3)]


def train(model: nn.Module, run: Callable[..., None], data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    run(step, data)


def assert_same_numbers(model: nn.Module, reference: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-9)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-9)


class Inherited(nn.BatchNorm1d):
    """Nothing of its own."""


class ThenActs(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return super().forward(input).tanh()


class Named(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor, scale: float = 2.0) -> torch.Tensor:  # noqa: A002
        return scale * nn.BatchNorm1d.forward(self, input)


class CallsTheFunction(nn.BatchNorm1d):
    """As layers with an activation of their own do, for a model that can be scripted."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        y = F.batch_norm(input, self.running_mean, self.running_var, 1 + self.weight, self.bias, True, 0.3, self.eps)
        return F.leaky_relu(y)


class CallsTheOperation(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return torch.batch_norm(
            input, self.weight, self.bias, self.running_mean, self.running_var, True, 0.3, self.eps, False
        )


class ByHand(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return (input - input.mean(dim=0)) * torch.rsqrt(input.var(dim=0, unbiased=False) + self.eps)


def _of(layer: type[nn.BatchNorm1d], **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, 4), layer(4, **options), nn.Linear(4, 2))


SUBCLASSES = [_of(kind) for kind in (Inherited, ThenActs, Named, CallsTheFunction, CallsTheOperation)]
SUBCLASSES += [_of(ThenActs, momentum=None), _of(ThenActs, affine=False), _of(Named, track_running_stats=False)]


@pytest.mark.parametrize("rows", [8, 7, 5])
@pytest.mark.parametrize("build", [model_1d, model_sequences, model_2d, model_3d, model_untracked, *SUBCLASSES])
def test_training_equals_one_device(strategy: ts.Strategy, build: Callable[[], nn.Module], rows: int) -> None:
    torch.manual_seed(0)
    reference = build().double()
    data = batches(rows)
    with strategy.scope():
        model = ts.convert_sync_batchnorm(copy.deepcopy(reference))
        distributed = strategy.distribute_dataset(data)

    def one_device(step: Callable[..., None], data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for batch in data:
            step(batch)

    def all_replicas(step: Callable[..., None], _: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for batch in distributed:
            strategy.run(step, args=(batch,))

    train(reference, one_device, data)
    train(model, all_replicas, data)
    assert_same_numbers(model, reference)


def test_outputs_and_input_gradients_equal_one_device(strategy: ts.Strategy) -> None:
    x = batches(8)[0][0]
    plain = nn.BatchNorm1d(FEATURES).double()
    expected_x = x.clone().requires_grad_()
    expected = plain(expected_x)
    expected.pow(3).mean().backward()
    with strategy.scope():
        layer = ts.convert_sync_batchnorm(nn.BatchNorm1d(FEATURES).double())
    parts = [part.clone().requires_grad_() for part in x.chunk(strategy.num_replicas_in_sync)]

    def step(part: torch.Tensor) -> torch.Tensor:
        y = layer(part)
        y.pow(3).mean().backward()
        return y.detach()

    y = strategy.run(step, args=(ts.PerReplica(parts),))
    torch.testing.assert_close(strategy.gather(y, axis=0), expected.detach(), rtol=1e-9, atol=1e-9)
    gradient = torch.cat([part.grad for part in parts if part.grad is not None]) / len(parts)
    torch.testing.assert_close(gradient, expected_x.grad, rtol=1e-9, atol=1e-9)


def test_weights_that_the_step_sets_cross_over_with_the_gradients() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    x, y = batches(6)[0]
    tokens = torch.tensor([1.0, 5, 2, 1, 7, 3], dtype=torch.float64)  # how much each row counts
    torch.manual_seed(1)
    reference = model_1d().double()
    with strategy.scope():
        model = ts.convert_sync_batchnorm(copy.deepcopy(reference))

    def mean_loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return ((net(x) - y).square().mean(dim=1) * tokens).sum() / tokens.sum()

    def step(x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> None:
        loss = mean_loss(model, x, y, tokens)
        context = ts.get_replica_context()
        assert context is not None
        context.set_weight(float(tokens.sum()))  # after forward: the weight is read when gradients cross over
        loss.backward()

    mean_loss(reference, x, y, tokens).backward()
    strategy.run(step, args=tuple(ts.PerReplica(list(one.split([4, 2]))) for one in (x, y, tokens)))
    strategy.close()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_a_sum_of_gradients_is_not_weighed() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduce_op="sum")
    x, y = batches(5)[0]
    torch.manual_seed(1)
    reference = model_1d().double()
    (reference(x) - y).square().sum().backward()
    with strategy.scope():
        model = ts.convert_sync_batchnorm(copy.deepcopy(reference))
        model.zero_grad()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        (model(x) - y).square().sum().backward()

    strategy.run(step, args=tuple(ts.PerReplica(list(one.split([4, 1]))) for one in (x, y)))
    strategy.close()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_single_precision_survives_a_large_mean() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    x = batches(64)[0][0].float() + 1000
    expected = nn.BatchNorm1d(FEATURES).double()(x.double())
    with strategy.scope():
        layer = ts.convert_sync_batchnorm(nn.BatchNorm1d(FEATURES))
    y = strategy.run(layer, args=(ts.PerReplica(list(x.chunk(2))),))
    torch.testing.assert_close(strategy.gather(y, axis=0).double(), expected, rtol=0, atol=1e-4)
    strategy.close()


def test_conversion_keeps_the_layers_and_their_state() -> None:
    class Own(nn.BatchNorm1d):
        pass

    def build() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(2), nn.ModuleList([nn.BatchNorm2d(2), nn.GroupNorm(1, 2)]), Own(2))

    plain = build()
    parameters, state = list(plain.parameters()), copy.deepcopy(plain.state_dict())
    converted = ts.convert_sync_batchnorm(plain)
    assert converted is plain
    assert isinstance(plain[0], nn.BatchNorm1d)
    assert all(one is other for one, other in zip(converted.parameters(), parameters, strict=True))
    converted.load_state_dict(state)
    build().load_state_dict(converted.state_dict())
    kinds = [type(layer).__name__ for layer in converted.modules()]
    assert kinds == ["Sequential", "SyncBatchNorm1d", "ModuleList", "SyncBatchNorm2d", "GroupNorm", "SyncOwn"]
    assert isinstance(plain[2], Own)
    again = [type(layer) for layer in ts.convert_sync_batchnorm(plain).modules()]
    assert again == [type(layer) for layer in plain.modules()]


@pytest.mark.parametrize("make", SUBCLASSES)
def test_a_converted_subclass_is_copied_and_pickled(make: Callable[[], nn.Module]) -> None:
    model = ts.convert_sync_batchnorm(make())
    content = io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    for other in (copy.deepcopy(model), torch.load(content, weights_only=False), pickle.loads(pickle.dumps(model, 0))):
        assert [type(layer) for layer in other.modules()] == [type(layer) for layer in model.modules()]
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_subclass_that_cannot_be_synchronised_is_refused_by_name(strategy: ts.Strategy) -> None:
    data = batches(8)[0][0]
    with strategy.scope():
        refused = ts.convert_sync_batchnorm(ByHand(FEATURES).double())
        left = ts.convert_sync_batchnorm(nn.Sequential(ByHand(FEATURES).double()), leave=(ByHand,))
    parts = ts.PerReplica(list(data.chunk(strategy.num_replicas_in_sync)))
    with pytest.raises(NotImplementedError, match=r"ByHand is a subclass .* leave=\(ByHand,\)"):
        strategy.run(refused, args=(parts,))
    assert type(left[0]) is ByHand
    strategy.run(left, args=(parts,))
    refused.eval()
    strategy.run(refused, args=(parts,))


def test_a_frozen_subclass_is_as_it_was(strategy: ts.Strategy) -> None:
    class Frozen(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)

    plain = Frozen(FEATURES).double()
    with strategy.scope():
        layer = ts.convert_sync_batchnorm(copy.deepcopy(plain))
    data = batches(8)[0][0]
    y = strategy.run(layer, args=(ts.PerReplica(list(data.chunk(strategy.num_replicas_in_sync))),))
    assert torch.equal(strategy.gather(y, axis=0), plain(data))


def test_torchs_own_is_of_the_strategy_then(strategy: ts.Strategy) -> None:
    data = batches(8)[0][0]
    plain = nn.BatchNorm1d(FEATURES).double()
    with strategy.scope():
        layer = ts.convert_sync_batchnorm(nn.SyncBatchNorm(FEATURES).double())
    assert isinstance(layer, nn.SyncBatchNorm)
    y = strategy.run(layer, args=(ts.PerReplica(list(data.chunk(strategy.num_replicas_in_sync))),))
    torch.testing.assert_close(strategy.gather(y, axis=0), plain(data), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="process_group of its own"):
        ts.convert_sync_batchnorm(nn.SyncBatchNorm(FEATURES, process_group=object()))


@pytest.mark.parametrize("training", [True, False])
def test_outside_of_run_it_is_the_plain_layer(training: bool) -> None:
    x = batches(4)[0][0]
    plain = nn.BatchNorm1d(FEATURES).double().train(training)
    layer = ts.convert_sync_batchnorm(copy.deepcopy(plain))
    assert torch.equal(layer(x), plain(x))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_evaluation_mode_uses_the_running_statistics(strategy: ts.Strategy) -> None:
    x = batches(8)[0][0]
    plain = nn.BatchNorm1d(FEATURES).double()
    plain(x)
    plain.eval()
    with strategy.scope():
        layer = ts.convert_sync_batchnorm(copy.deepcopy(plain))
    y = strategy.run(layer, args=(ts.PerReplica(list(x.chunk(strategy.num_replicas_in_sync))),))
    assert torch.equal(strategy.gather(y, axis=0), plain(x))


def test_errors_say_what_to_change(strategy: ts.Strategy) -> None:
    with pytest.raises(TypeError, match=r"torch.nn.Module; got str"):
        ts.convert_sync_batchnorm("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run one batch"):
        ts.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    with strategy.scope():
        layer = ts.convert_sync_batchnorm(nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match=r"4D input; got shape \(2, 2\)"):
        strategy.run(lambda: layer(torch.zeros(2, 2)))
