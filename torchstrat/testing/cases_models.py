"""Training cases: what the model is made of."""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import torchstrat as ts
from torchstrat.testing.training import (
    Batch,
    Case,
    FilledLazyLinear,
    Mlp,
    Training,
    adam,
    classification,
    filled,
    in_process_replicas,
    named,
    no_numbers,
    plain_step,
    plain_training,
    regression,
    replicas_by_hand,
    sgd,
    squared_error,
    train_step,
)

images = partial(regression, shape=(2, 4, 4))


def trained(make_model: Callable[[], nn.Module], **options: Any) -> Training:
    """``options``: of `sgd`."""
    model = make_model()
    return plain_training(model, sgd(model, **options))


def classifier(make_model: Callable[[], nn.Module]) -> Training:
    model = make_model()

    def losses(ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids), label, reduction="none")

    return Training(train_step(losses, adam(model, lr=0.02)), {"model": model})


class _Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: object) -> Any:
        return self.function(x)


def _mean_of_words(words: torch.Tensor) -> torch.Tensor:
    return words.mean(dim=1)


def _tied() -> nn.Module:
    """One matrix reads words in and reads them out."""
    embedding, out = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
    out.weight = embedding.weight
    return nn.Sequential(embedding, _Apply(_mean_of_words), nn.Linear(4, 4), nn.Tanh(), out)


def _tied_to_a_dropped_layer() -> nn.Module:
    dropped, kept = nn.Linear(6, 5), nn.Linear(6, 5)
    kept.weight, kept.bias = dropped.weight, dropped.bias
    dropped.__dict__["itself"] = dropped  # it stays till Python looks for cycles
    return nn.Sequential(kept, nn.Tanh(), nn.Linear(5, 3))


def _traced() -> nn.Module:
    """Of which TorchScript keeps the parameters, but not the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which newer PyTorch says of all of torch.jit
        traced: nn.Module = torch.jit.trace(_tied_to_a_dropped_layer(), torch.randn(2, 6))
        return traced


def collected_late(make_model: Callable[[], nn.Module]) -> Training:
    """What the program has dropped is there for as long as Python takes to look: in each process for its own time."""
    training, rank = trained(make_model), int(os.environ.get("RANK", "0"))
    return dataclasses.replace(training, before=lambda step: gc.collect() if step == 2 * rank else 0)


def _recurrent() -> nn.Module:
    lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    return nn.Sequential(nn.Embedding(12, 4), lstm, _Apply(lambda found: found[0][:, -1]), nn.Linear(10, 3))


def _transformer() -> nn.Module:
    """`nn.TransformerEncoder` deep-copies its layer, which no registration hook sees."""
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(12, 8), encoder, _Apply(_mean_of_words), nn.Linear(8, 3))


def _convolution(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


_batch_norm = partial(_convolution, nn.BatchNorm2d)
_instance_norm = partial(_convolution, partial(nn.InstanceNorm2d, affine=True, track_running_stats=True))
_cumulative_batch_norm = partial(_convolution, partial(nn.BatchNorm2d, momentum=None))


class _TrainsInForward(nn.Module):
    """In evaluation mode before a step and after it."""

    def __init__(self, make_inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = make_inner()
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.train()
        y: torch.Tensor = self.inner(x)
        self.eval()
        return y


class _NormalizesByHand(nn.Module):
    """Running statistics in evaluation mode that count no batches, and that nothing but a function writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _batch_norm()
        self.seen = nn.BatchNorm2d(2, affine=False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F.batch_norm(x, self.seen.running_mean, self.seen.running_var, training=True)
        y: torch.Tensor = self.inner(x)
        return y


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
    model: nn.Module = ts.convert_sync_batchnorm(_two_batch_norms())
    return model


def channels_last() -> Training:
    model = _convolution(partial(nn.GroupNorm, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    in_layout = partial(torch.Tensor.is_contiguous, model[0].weight, memory_format=torch.channels_last)
    return Training(plain_step(model, sgd(model)), {"model": model, "weight is channels_last": in_layout})


def lazy(make_layer: Callable[[int], nn.Module], *, dry_run: bool) -> Training:
    """Shapes, and so values, exist only after the first forward: in scope, or in the first step."""
    model = nn.Sequential(make_layer(5), nn.Tanh(), make_layer(3))
    if dry_run:
        model(torch.zeros(1, 6))
    return plain_training(model, adam(model))


def built_in_run(fills: bool) -> Training:
    """Model and optimizer are made by the first step."""
    made: dict[str, Any] = {}

    def step(batch: Batch) -> torch.Tensor:
        if not made:
            made["model"] = filled(nn.Linear(6, 3)) if fills else nn.Linear(6, 3)
            made["optimizer"] = sgd(made["model"])
        return plain_step(made["model"], made["optimizer"])(batch)

    return Training(step, {"weight": lambda: made["model"].weight, "bias": lambda: made["model"].bias})


class _MakesItsOwn(nn.Module):
    """Makes parameter and buffer in its first forward, as much code outside of torch does."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.linspace(-1, 1, x.shape[1] * 3).view(3, -1))
            self.register_buffer("scale", torch.full((), 0.5))
        return F.linear(x, self.weight) * self.scale


def parameter_made_in_forward() -> Training:
    model = _MakesItsOwn()
    made: dict[str, torch.optim.Optimizer] = {}

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        losses = squared_error(model(x), y)
        if not made:
            made["optimizer"] = sgd(model)
        made["optimizer"].zero_grad()
        losses.mean().backward()
        made["optimizer"].step()
        return losses.detach()

    return Training(step, {"weight": lambda: model.weight, "scale": lambda: model.scale})


def bare_parameters() -> Training:
    weight = nn.Parameter(torch.linspace(-1.0, 1.0, 18).reshape(6, 3))
    bias = torch.zeros(3, requires_grad=True)
    step = plain_step(lambda x: x @ weight + bias, torch.optim.Adam([weight, bias], lr=0.05))
    return Training(step, {"weight": weight, "bias": bias})


def frozen_bare_parameter() -> Training:
    """In no module, no optimizer, and without a gradient: a centre that the step moves."""
    model, centre = Mlp(), nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = sgd(model)

    def step(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            centre.add_(model.last.bias + 0.1)
        optimizer.zero_grad()
        losses: torch.Tensor = (model(batch[0]) - batch[1] - centre).square().mean(dim=-1)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model, "centre": centre})


class _MixedPrecision(nn.Module):
    """A float32 trunk under a float64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5, dtype=torch.float32)
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.trunk(x.float())).double()) * self.scale


def gan() -> Training:
    generator, discriminator = Mlp(2, 5, 6), Mlp(6, 5, 1)
    of_generator = adam(generator, lr=0.02, betas=(0.5, 0.9))
    of_discriminator = adam(discriminator, lr=0.02, betas=(0.5, 0.9))

    def on_both(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        on_real, on_fake = F.softplus(-discriminator(real)), F.softplus(discriminator(fake))
        return (on_real + on_fake).squeeze(1)

    discriminate = train_step(on_both, of_discriminator)
    fool = train_step(lambda fake: F.softplus(-discriminator(fake)).squeeze(1), of_generator)

    def step(batch: Batch) -> torch.Tensor:
        fake = generator(batch[1][:, :2])
        discriminate((batch[0], fake.detach()))
        return fool((fake,))

    return Training(step, {"generator": generator, "discriminator": discriminator})


def rank_dependent_values() -> Training:
    """Processes that start from different values: rank 0's count, as the first replica's do in one process."""
    model = Mlp()
    with torch.no_grad():
        model.first.weight.add_(float(os.environ.get("RANK", "0")))
    return plain_training(model, sgd(model, momentum=0.0))


class _Counting(nn.Module):
    """Has buffers that its forward pass changes in place and sets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor  # TorchScript takes no annotation of the class that is a string
        self.mean: torch.Tensor
        self.last = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + self.last.bias.detach()
        scaled: torch.Tensor = self.last(x) * (1 + self.calls / 10) + self.mean
        return scaled


def _in_torch_script() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which newer PyTorch says of all of torch.jit
        first = torch.jit.trace(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), torch.randn(2, 6))
        return nn.Sequential(first, torch.jit.script(_Counting()))


def _normed(norm: Callable[[nn.Module], object]) -> nn.Module:
    model = Mlp()
    norm(model.first)
    return model


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))


class _Centred(nn.Module):
    """A running mean the model keeps by itself, of a shape and a rule no library layer has."""

    centre: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        ts.get_strategy().extended.set_aggregation(self, "centre", "mean")

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.centre.lerp_(x.mean(dim=0), 0.1)
            self.calls += 1
        return self.inner(x)


class _Counts(nn.Module):
    """Buffers of every kind: shared, not saved, replaced, made on the way, of integers and of a replica's own; beside
    them a plain count."""

    steps: torch.Tensor
    mean: torch.Tensor
    late: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.calls = 0
        self.other = nn.Module()
        self.other.register_buffer("shared", self.mean)
        ts.get_strategy().extended.set_aggregation(self, "mean", "mean")

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layer(x)
        self.calls += 1
        self.steps += 1
        self.mean.mul_(0.5).add_(out.detach().mean(dim=0), alpha=0.5)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(3))
            ts.get_strategy().extended.set_aggregation(self, "late", "mean")
        self.late = self.late * 0.5 + out.detach().mean(dim=0)
        return out / self.calls + self.other.shared.mean() * 0  # type: ignore[operator]


def buffers_of_every_kind() -> Training:
    model: Any = _Counts()
    found = {name: partial(getattr, model, name) for name in ("steps", "mean", "late", "calls")}
    watch = {"layer": model.layer, **found, "shared": lambda: model.other.shared}
    return Training(plain_step(model, sgd(model, momentum=0.0)), watch)


class _Cooling(nn.Module):
    """Sets buffers, parameters and children that are there, which makes none, beside a plain number. What another
    module makes is no matter of its."""

    shift: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        self.temperature *= 0.9
        self.layer = self.layer
        self.seen += 1
        with torch.no_grad():
            self.shift *= 0.5
        return self.layer(x) / self.temperature + self.shift


def members_set_anew(last: Callable[[], nn.Module]) -> Training:
    cooling = _Cooling()
    model = nn.Sequential(cooling, last())
    watch = {"model": model, "temperature": lambda: cooling.temperature}
    return Training(plain_step(model, sgd(cooling)), watch)


class _Late(nn.Module):
    """Makes a buffer in its first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", torch.full((3,), 0.5))
        return x * self.get_buffer("late")


_uneven_images = partial(images, (8, 5, 1, 3, 7))


def _widen(model: Mlp) -> None:
    """The parameters stay, and are given other elements: what they began with, and three hidden units more."""
    first, last = model.first, model.last
    first.weight.data = torch.cat([first.weight.data, first.weight.data[:3] * 0.5])
    first.bias.data = torch.cat([first.bias.data, first.bias.data[:3]])
    last.weight.data = torch.cat([last.weight.data, last.weight.data[:, :3] * 0.5], dim=1)
    for parameter in model.parameters():
        parameter.grad = None


def _put_in(model: nn.Sequential) -> None:
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight.copy_(0.3 * torch.eye(6))
        layer.bias.fill_(0.1)
    model.insert(0, nn.Tanh())
    model.append(layer)


def _take_out(model: nn.Sequential) -> None:
    del model[0]
    model.pop(0)


def layers_of_a_container(change: Callable[[nn.Sequential], object]) -> Training:
    """The step puts layers into a container with numbers in the third run, or takes some out."""
    inner = Mlp(6, 5, 6)
    model = nn.Sequential(nn.Tanh(), nn.Identity(), inner)
    optimizer = adam(model)
    runs = [0]

    def call(x: torch.Tensor) -> torch.Tensor:
        if runs[0] == 2:
            change(model)
            known = {id(one) for group in optimizer.param_groups for one in group["params"]}
            new = [one for one in model.parameters() if id(one) not in known]
            if new:
                optimizer.add_param_group({"params": new, "lr": 0.02})
        hidden: torch.Tensor = model(x)[:, :3]
        return hidden

    def before(index: int) -> None:
        runs[0] = index

    return Training(
        plain_step(call, optimizer), {"inner": inner, "model": model, "optimizer": optimizer}, before=before
    )


def elements_of_other_shapes() -> Training:
    model = Mlp()
    train = plain_step(model, sgd(model, momentum=0.0))
    runs = [0]

    def step(batch: Batch) -> torch.Tensor:
        if runs[0] == 2:
            _widen(model)
        return train(batch)

    def before(index: int) -> None:
        runs[0] = index

    return Training(step, {"model": model}, before=before)


def group_removed() -> Training:
    """Its parameters have state still, which PyTorch makes no state dictionary of; later they are stepped again."""
    model = Mlp()
    optimizer = adam(model.last)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})
    removed = list(optimizer.param_groups[1:])

    def before(step_index: int) -> None:
        if step_index == 1:
            del optimizer.param_groups[1]
        if step_index == 4:
            optimizer.param_groups += removed

    return Training(plain_step(model, optimizer), {"model": model, "optimizer": optimizer}, before=before)


_idle = partial(regression, (12, 12, 1, 12, 12))
"""In the third run one replica alone has rows."""

CASES = (
    Case("weight_tying", partial(classifier, _tied), partial(classification, classes=12)),
    Case("lstm", partial(classifier, _recurrent), classification),
    Case("transformer_encoder", partial(classifier, _transformer), classification),
    Case("weight_norm", partial(trained, partial(_normed, weight_norm))),
    Case("spectral_norm", partial(trained, partial(_normed, spectral_norm))),
    Case("batch_norm", partial(trained, _batch_norm), images, expected=replicas_by_hand),
    Case("batch_norm_cumulative", partial(trained, _cumulative_batch_norm), images, expected=replicas_by_hand),
    Case(
        "batch_norm_empty", partial(trained, _batch_norm), partial(images, (8, 1, 2, 1, 8)), expected=replicas_by_hand
    ),
    Case(
        "batch_norm_trains_in_forward",
        partial(trained, partial(_TrainsInForward, _batch_norm)),
        _uneven_images,
        expected=replicas_by_hand,
    ),
    Case(
        "instance_norm_trains_in_forward", partial(trained, partial(_TrainsInForward, _instance_norm)), _uneven_images
    ),
    Case("batch_norm_by_hand", partial(trained, _NormalizesByHand), _uneven_images, expected=replicas_by_hand),
    Case("batch_norm_uneven", partial(trained, _batch_norm), _uneven_images, expected=replicas_by_hand),
    Case(
        "batch_norm_cumulative_uneven",
        partial(trained, _cumulative_batch_norm),
        _uneven_images,
        expected=replicas_by_hand,
    ),
    Case("instance_norm_uneven", partial(trained, _instance_norm), _uneven_images),
    *(
        Case(name, partial(trained, _sync_batch_norm), batches, plain=partial(trained, _two_batch_norms))
        for name, batches in {
            "sync_batch_norm": images,
            "sync_batch_norm_uneven": _uneven_images,
        }.items()
    ),
    *named(channels_last, batches=images),
    Case("lazy_in_scope", partial(lazy, nn.LazyLinear, dry_run=True)),
    Case("lazy_in_run", partial(lazy, FilledLazyLinear, dry_run=False)),
    Case("lazy_in_run_drawn", partial(lazy, nn.LazyLinear, dry_run=False), expected=no_numbers),
    Case("built_in_run", partial(built_in_run, True)),
    Case("built_in_run_drawn", partial(built_in_run, False), expected=no_numbers),
    Case("torch_script", partial(trained, _in_torch_script)),
    Case("tied_to_a_dropped_layer", partial(collected_late, _tied_to_a_dropped_layer)),
    Case("traced", partial(collected_late, _traced)),
    Case("mixed_dtypes", partial(trained, _MixedPrecision), tolerance=1e-5),
    *named(
        parameter_made_in_forward,
        bare_parameters,
        frozen_bare_parameter,
        gan,
        rank_dependent_values,
        buffers_of_every_kind,
    ),
    Case("members_set_anew", partial(members_set_anew, nn.Identity)),
    Case("members_set_anew_beside_made", partial(members_set_anew, _Late)),
    Case("layers_put_in", partial(layers_of_a_container, _put_in)),
    Case("layers_taken_out", partial(layers_of_a_container, _take_out)),
    Case("layers_taken_out_idle", partial(layers_of_a_container, _take_out), _idle),
    *named(elements_of_other_shapes, group_removed, batches=_idle),
    Case("own_buffer", partial(trained, _Centred, momentum=0.0)),
    Case("dropout", partial(trained, _dropout), expected=in_process_replicas),
)
