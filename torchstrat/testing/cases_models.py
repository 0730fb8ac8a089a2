"""Training cases: what the model is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from torchstrat.testing.references import in_process_replicas, no_numbers, replicas_by_hand
from torchstrat.testing.training import (
    EVEN_ROWS,
    Batch,
    Case,
    Mlp,
    Training,
    classification,
    plain_training,
    regression,
    squared_error,
)

IMAGE = (2, 4, 4)
images = partial(regression, shape=IMAGE)


def trained(make_model: Callable[[], nn.Module], *, lr: float = 0.1) -> Training:
    model = make_model()
    return plain_training(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def classifier(make_model: Callable[[], nn.Module]) -> Training:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def step(batch: Batch) -> torch.Tensor:
        ids, label = batch
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(ids), label, reduction="none")
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


class _Tied(nn.Module):
    """One matrix reads words in and reads them out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 12, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(torch.tanh(self.mix(self.embedding(ids).mean(dim=1))))
        return scores


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(ids))
        scores: torch.Tensor = self.head(outputs[:, -1])
        return scores


class _Transformer(nn.Module):
    """`nn.TransformerEncoder` deep-copies its layer, which no registration hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(self.embedding(ids)).mean(dim=1))
        return scores


def _convolution(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def _batch_norm() -> nn.Module:
    return _convolution(nn.BatchNorm2d)


def _cumulative_batch_norm() -> nn.Module:
    return _convolution(partial(nn.BatchNorm2d, momentum=None))


class _ActivatedBatchNorm(nn.BatchNorm2d):
    """A subclass whose forward calls the function, as layers with an activation of their own do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        momentum = self.momentum or 0.0
        y = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, momentum, self.eps
        )
        activated: torch.Tensor = F.leaky_relu(y)
        return activated


def _two_batch_norms() -> nn.Module:
    return _convolution(lambda channels: nn.Sequential(nn.BatchNorm2d(channels), _ActivatedBatchNorm(channels)))


def _sync_batch_norm() -> nn.Module:
    import torchstrat as ts

    model: nn.Module = ts.convert_sync_batchnorm(_two_batch_norms())
    return model


def _channels_last() -> nn.Module:
    return _convolution(partial(nn.GroupNorm, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def channels_last() -> Training:
    training = trained(_channels_last)
    weight = training.watch["model"][0].weight
    in_layout = partial(torch.Tensor.is_contiguous, weight, memory_format=torch.channels_last)
    return Training(training.step, {**training.watch, "weight is channels_last": in_layout})


class _FilledLinear(nn.LazyLinear):
    """Its first values do not depend on a generator, so that one device has the same."""

    def reset_parameters(self) -> None:
        if self.in_features == 0 or self.has_uninitialized_params():
            return
        with torch.no_grad():
            for parameter in (self.weight, self.bias):
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))


def lazy(make_layer: Callable[[int], nn.Module], *, dry_run: bool) -> Training:
    """Shapes, and so values, exist only after the first forward: in scope, or in the first step."""
    model = nn.Sequential(make_layer(5), nn.Tanh(), make_layer(3))
    if dry_run:
        model(torch.zeros(1, 6))
    return plain_training(model, torch.optim.Adam(model.parameters(), lr=0.05))


def built_in_run(fill: bool) -> Training:
    """Model and optimizer are made by the first step."""
    made: dict[str, Any] = {}

    def step(batch: Batch) -> torch.Tensor:
        if not made:
            made["model"] = nn.Linear(6, 3)
            if fill:
                nn.init.constant_(made["model"].weight, 0.1)
                nn.init.zeros_(made["model"].bias)
            made["optimizer"] = torch.optim.SGD(made["model"].parameters(), lr=0.1, momentum=0.9)
        train: Training = plain_training(made["model"], made["optimizer"])
        return train.step(batch)

    return Training(step, {"weight": lambda: made["model"].weight, "bias": lambda: made["model"].bias})


def bare_parameters() -> Training:
    weight = nn.Parameter(torch.linspace(-1.0, 1.0, 18).reshape(6, 3))
    bias = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(x @ weight + bias, y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"weight": weight, "bias": bias})


class _MixedPrecision(nn.Module):
    """A float32 trunk under a float64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5, dtype=torch.float32)
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.trunk(x.float())).double()) * self.scale
        return y


def gan() -> Training:
    generator, discriminator = Mlp(2, 5, 6), Mlp(6, 5, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.02, betas=(0.5, 0.9))

    def step(batch: Batch) -> torch.Tensor:
        real, noise = batch[0], batch[1][:, :2]
        of_discriminator.zero_grad()
        fake = generator(noise)
        on_real = nn.functional.softplus(-discriminator(real)).squeeze(1)
        on_fake = nn.functional.softplus(discriminator(fake.detach())).squeeze(1)
        (on_real + on_fake).mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        fooled = nn.functional.softplus(-discriminator(fake)).squeeze(1)
        fooled.mean().backward()
        of_generator.step()
        return fooled.detach()

    return Training(step, {"generator": generator, "discriminator": discriminator})


def rank_dependent_values() -> Training:
    """Processes that start from different values: rank 0's count, as the first replica's do in one process."""
    import os

    model = Mlp()
    with torch.no_grad():
        model.first.weight.add_(float(os.environ.get("RANK", "0")))
    return plain_training(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))


def _weight_norm() -> nn.Module:
    model = Mlp()
    weight_norm(model.first)
    return model


CASES = (
    Case("weight_tying", partial(classifier, _Tied), partial(classification, classes=12)),
    Case("lstm", partial(classifier, _Recurrent), classification),
    Case("transformer_encoder", partial(classifier, _Transformer), classification),
    Case("weight_norm", partial(trained, _weight_norm)),
    Case("batch_norm", partial(trained, _batch_norm), images, expected=replicas_by_hand),
    Case("batch_norm_cumulative", partial(trained, _cumulative_batch_norm), images, expected=replicas_by_hand),
    Case(
        "batch_norm_empty", partial(trained, _batch_norm), partial(images, (8, 1, 2, 1, 8)), expected=replicas_by_hand
    ),
    Case("sync_batch_norm", partial(trained, _sync_batch_norm), images, plain=partial(trained, _two_batch_norms)),
    Case(
        "sync_batch_norm_uneven",
        partial(trained, _sync_batch_norm),
        partial(images, (8, 5, 1, 3, 7)),
        plain=partial(trained, _two_batch_norms),
    ),
    Case("channels_last", channels_last, images),
    Case("lazy_in_scope", partial(lazy, nn.LazyLinear, dry_run=True)),
    Case("lazy_in_run", partial(lazy, _FilledLinear, dry_run=False)),
    Case("lazy_in_run_drawn", partial(lazy, nn.LazyLinear, dry_run=False), expected=no_numbers),
    Case("built_in_run", partial(built_in_run, True)),
    Case("built_in_run_drawn", partial(built_in_run, False), expected=no_numbers),
    Case("bare_parameters", bare_parameters),
    Case("mixed_dtypes", partial(trained, _MixedPrecision), tolerance=1e-5),
    Case("gan", gan, partial(regression, EVEN_ROWS)),
    Case("rank_dependent_values", rank_dependent_values),
    Case("dropout", partial(trained, _dropout), expected=in_process_replicas),
)
