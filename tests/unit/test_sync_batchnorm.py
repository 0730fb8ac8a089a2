"""`convert_sync_batchnorm`: the numbers of one device on the global batch, however its rows are split."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.support.replicas import cpus, opened

FEATURES = 3
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
Build = Callable[[], nn.Module]


@pytest.fixture(params=[2, 4])
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(cpus(request.param))
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Any]:
    with opened("mirrored x2") as made:
        yield made


def batches(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64) * 3 + 100

    return [(draw(FEATURES), draw(2)) for _ in range(3)]


X = batches(8)[0][0]


def parts(strategy: ts.Strategy, x: torch.Tensor = X) -> ts.PerReplica:
    return ts.PerReplica([part.clone().requires_grad_() for part in x.chunk(strategy.num_replicas_in_sync)])


def converted(strategy: ts.Strategy, layer: nn.Module, **options: Any) -> Any:
    with strategy.scope():
        return ts.convert_sync_batchnorm(copy.deepcopy(layer), **options)


# -- models ------------------------------------------------------------------------------------------------------------


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


class Frozen(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


def of_rows(layer: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), layer(4, **options), nn.Linear(4, 2))


def convolution(layer: Callable[..., nn.Module], kernel: Any, dimensions: int, size: int, **options: Any) -> nn.Module:
    shape = (1,) * dimensions + (FEATURES,)
    convolve = getattr(nn, f"Conv{dimensions}d")(1, 4, kernel)
    return nn.Sequential(nn.Unflatten(1, shape), convolve, layer(4, **options), nn.Flatten(), nn.Linear(size, 2))


SUBCLASSES: dict[str, Build] = {
    **{
        kind.__name__: partial(of_rows, kind)
        for kind in (Inherited, ThenActs, Named, CallsTheFunction, CallsTheOperation)
    },
    "a cumulative average": partial(of_rows, ThenActs, momentum=None),
    "no weights": partial(of_rows, ThenActs, affine=False),
    "no statistics": partial(of_rows, Named, track_running_stats=False),
}
MODELS: dict[str, Build] = {
    "rows": partial(of_rows, nn.BatchNorm1d),
    "sequences": partial(convolution, nn.BatchNorm1d, 2, 1, 8),
    "images": partial(convolution, nn.BatchNorm2d, 1, 2, 12, affine=False),
    "volumes": partial(convolution, nn.BatchNorm3d, 1, 3, 12, momentum=None),
    "untracked": partial(of_rows, nn.BatchNorm1d, track_running_stats=False),
    **SUBCLASSES,
}


# -- numbers -----------------------------------------------------------------------------------------------------------


def train(model: nn.Module, data: Any, run: Callable[..., object]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    for batch in data:
        run(step, args=(batch,))


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        close(parameter.grad, expected.grad)


@pytest.mark.parametrize("rows", [8, 7, 5])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_training_equals_one_device(strategy: ts.Strategy, build: Build, rows: int) -> None:
    torch.manual_seed(0)
    reference = build().double()
    model = converted(strategy, reference)
    train(reference, batches(rows), lambda step, args: step(*args))
    train(model, strategy.distribute_dataset(batches(rows)), strategy.run)
    close(model.state_dict(), reference.state_dict())
    assert_same_gradients(model, reference)


def test_outputs_and_input_gradients_equal_one_device(strategy: ts.Strategy) -> None:
    plain = nn.BatchNorm1d(FEATURES).double()
    layer, whole, split = converted(strategy, plain), X.clone().requires_grad_(), parts(strategy)
    expected = plain(whole)
    expected.pow(3).mean().backward()

    def step(part: torch.Tensor) -> torch.Tensor:
        y = layer(part)
        y.pow(3).mean().backward()
        return y.detach()

    close(strategy.gather(strategy.run(step, args=(split,)), axis=0), expected.detach())
    close(torch.cat([part.grad for part in split.values]) / strategy.num_replicas_in_sync, whole.grad)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_weights_that_the_step_sets_cross_over_with_gradients_that_are_averaged(op: str) -> None:
    x, y = batches(6)[0]
    tokens = torch.tensor([1.0, 5, 2, 1, 7, 3], dtype=torch.float64)  # how much each row counts
    torch.manual_seed(1)
    reference = MODELS["rows"]().double()

    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = (net(x) - y).square().mean(dim=1)
        return rows.sum() if op == "sum" else (rows * tokens).sum() / tokens.sum()

    loss(reference, x, y, tokens).backward()
    with opened("mirrored x2", gradient_reduce_op=op) as strategy:
        model = converted(strategy, reference)
        model.zero_grad()

        def step(x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> None:
            found = loss(model, x, y, tokens)
            if op == "mean":  # after forward: the weight is read when gradients cross over
                ts.get_replica_context().set_weight(float(tokens.sum()))  # type: ignore[union-attr]
            found.backward()

        strategy.run(step, args=tuple(ts.PerReplica(list(one.split([4, 2]))) for one in (x, y, tokens)))
    assert_same_gradients(model, reference)


def test_single_precision_survives_a_large_mean(two: Any) -> None:
    x = batches(64)[0][0].float() + 1000
    y = two.run(converted(two, nn.BatchNorm1d(FEATURES)), args=(parts(two, x),))
    expected = nn.BatchNorm1d(FEATURES).double()(x.double())
    torch.testing.assert_close(two.gather(y, axis=0).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layer", [Frozen, nn.BatchNorm1d], ids=["frozen", "in evaluation mode"])
def test_what_uses_the_running_statistics_is_as_it_was(strategy: ts.Strategy, layer: Any) -> None:
    plain = layer(FEATURES).double()
    if layer is nn.BatchNorm1d:
        plain(X)
        plain.eval()
    y = strategy.run(converted(strategy, plain), args=(parts(strategy),))
    assert torch.equal(strategy.gather(y, axis=0), plain(X))


def test_torchs_own_is_of_the_strategy_then(strategy: ts.Strategy) -> None:
    plain = nn.BatchNorm1d(FEATURES).double()
    layer = converted(strategy, nn.SyncBatchNorm(FEATURES).double())
    assert isinstance(layer, nn.SyncBatchNorm)
    close(strategy.gather(strategy.run(layer, args=(parts(strategy),)), axis=0), plain(X))
    close(layer.state_dict(), plain.state_dict())


def test_torchs_own_that_is_left_as_it_is_is_warned_of_once(strategy: ts.Strategy) -> None:
    with strategy.scope():
        layer = nn.SyncBatchNorm(FEATURES).double()
    with pytest.warns(UserWarning, match=r"torch.nn.SyncBatchNorm has normalised .* ts.convert_sync_batchnorm"):
        strategy.run(layer, args=(parts(strategy),))
    strategy.run(layer, args=(parts(strategy),))  # a warning would be an error
    strategy.run(layer.eval(), args=(parts(strategy),))


@pytest.mark.parametrize("training", [True, False])
def test_outside_of_run_it_is_the_plain_layer(training: bool) -> None:
    plain = nn.BatchNorm1d(FEATURES).double().train(training)
    layer = ts.convert_sync_batchnorm(copy.deepcopy(plain))
    assert torch.equal(layer(X), plain(X))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=0, atol=0)


# -- layers ------------------------------------------------------------------------------------------------------------


def kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(layer) for layer in model.modules()]


def test_conversion_keeps_the_layers_and_their_state() -> None:
    class Own(nn.BatchNorm1d):
        pass

    def build() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(2), nn.ModuleList([nn.BatchNorm2d(2), nn.GroupNorm(1, 2)]), Own(2))

    plain = build()
    parameters, state = list(plain.parameters()), copy.deepcopy(plain.state_dict())
    model = ts.convert_sync_batchnorm(plain)
    assert model is plain
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    model.load_state_dict(state)
    build().load_state_dict(model.state_dict())
    names = ["Sequential", "SyncBatchNorm1d", "ModuleList", "SyncBatchNorm2d", "GroupNorm", "SyncOwn"]
    assert [kind.__name__ for kind in kinds(model)] == names
    assert isinstance(plain[0], nn.BatchNorm1d)
    assert isinstance(plain[2], Own)
    before = kinds(plain)
    assert kinds(ts.convert_sync_batchnorm(plain)) == before


@pytest.mark.parametrize("make", SUBCLASSES.values(), ids=SUBCLASSES)
def test_a_converted_subclass_is_copied_and_pickled(make: Build) -> None:
    model, content = ts.convert_sync_batchnorm(make()), io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    for other in (copy.deepcopy(model), torch.load(content, weights_only=False), pickle.loads(pickle.dumps(model, 0))):
        assert kinds(other) == kinds(model)
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_subclass_that_cannot_be_synchronised_is_refused_by_name(strategy: ts.Strategy) -> None:
    by_hand = ByHand(FEATURES).double()
    refused, left = converted(strategy, by_hand), converted(strategy, nn.Sequential(by_hand), leave=(ByHand,))
    with pytest.raises(NotImplementedError, match=r"ByHand is a subclass .* leave=\(ByHand,\)"):
        strategy.run(refused, args=(parts(strategy),))
    assert type(left[0]) is ByHand
    refused.eval()
    for layer in (left, refused):
        strategy.run(layer, args=(parts(strategy),))


def test_errors_say_what_to_change(two: Any) -> None:
    layer = converted(two, nn.BatchNorm2d(2))
    for call, error, says in (
        (lambda: ts.convert_sync_batchnorm("model"), TypeError, r"torch.nn.Module; got str"),  # type: ignore[arg-type]
        (lambda: ts.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d())), ValueError, "run one batch"),
        (
            lambda: ts.convert_sync_batchnorm(nn.SyncBatchNorm(FEATURES, process_group=object())),
            ValueError,
            "process_group of its own",
        ),
        (lambda: two.run(lambda: layer(torch.zeros(2, 2))), ValueError, r"4D input; got shape \(2, 2\)"),
    ):
        with pytest.raises(error, match=says):
            call()
