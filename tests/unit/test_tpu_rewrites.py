"""The TPU backend's replacements of PyTorch functions: values, gradients and running statistics of the originals.

A replica's reference is the original on that replica's inputs alone. The replacement runs once, under ``vmap`` over
all replicas, and may not fall back to running them one by one (a warning, which fails these tests).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchstrat.errors import ContextError, InvalidArgumentError, UnsupportedError
from torchstrat.tpu import _functorch_private as functorch
from torchstrat.tpu.rewrites import Rewrites

REPLICAS = 3

quickly = hypothesis.settings(max_examples=12, deadline=None, derandomize=True)


def first_replica(tensor: torch.Tensor) -> torch.Tensor:
    if not functorch.is_batched(tensor):
        return tensor
    return functorch.unwrapped(tensor).select(functorch.batch_dim_of(tensor), 0)


REWRITES = Rewrites(first_replica, logical_devices=2)


def replaced(func: Any) -> Callable[..., Any]:
    found = REWRITES.find(func)
    assert found is not None
    return found


def draws(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """One tensor of ``shape`` for each replica, stacked."""
    return torch.randn(REPLICAS, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def indices(below: int, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, below, (REPLICAS, *shape), generator=torch.Generator().manual_seed(seed))


def assert_same(
    func: Any,
    batched: list[torch.Tensor],
    plain: list[torch.Tensor],
    call: Callable[[Callable[..., Any], list[Any], list[Any]], torch.Tensor],
    tolerance: float = 1e-12,
) -> None:
    """``call(function, one replica's inputs, what all share)``, of the original and of the replacement."""
    results = []
    for one_by_one in (True, False):
        inputs = [one.clone().requires_grad_(one.is_floating_point()) for one in batched]
        shared = [one.clone().requires_grad_(one.is_floating_point()) for one in plain]
        if one_by_one:
            y = torch.stack([call(func, [one[r] for one in inputs], shared) for r in range(REPLICAS)])
        else:
            y = torch.vmap(lambda *own: call(replaced(func), list(own), shared))(*inputs)  # noqa: B023
        leaves = [one for one in (*inputs, *shared) if one.requires_grad]
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        results.append((y.detach(), torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)))
    (expected, expected_gradients), (found, gradients) = results
    assert found.dtype == expected.dtype
    close(found, expected, tolerance)
    for own, wanted in zip(gradients, expected_gradients, strict=True):
        assert (own is None) == (wanted is None)
        if wanted is not None:
            assert own.dtype == wanted.dtype
            close(own, wanted, tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest entry, or to 1 where all are smaller: what cancels has rounding errors of its terms."""
    scale = expected.detach().abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * max(scale, 1.0), equal_nan=True)


# Normalisations


@quickly
@hypothesis.given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    tail=st.integers(1, 3),
    affine=st.sampled_from(["neither", "weight", "both"]),
    eps=st.sampled_from([1e-5, 0.1]),
    offset=st.sampled_from([0.0, 1e3]),
)
def test_layer_norm(shape: list[int], tail: int, affine: str, eps: float, offset: float) -> None:
    normalized = [*shape[-tail:]]
    normalized[-1] += 1
    own = [*shape[:-1], shape[-1] + 1]
    parameters = [draws(*normalized, seed=7 + index)[0] for index in range(["neither", "weight", "both"].index(affine))]
    assert_same(
        F.layer_norm,
        [draws(2, *own) + offset],
        parameters,
        lambda f, x, p: f(x[0], normalized, *p, eps=eps),
        tolerance=1e-12 if offset == 0 else 1e-9,
    )


@quickly
@hypothesis.given(shape=st.lists(st.integers(2, 4), min_size=1, max_size=3), eps=st.sampled_from([None, 1e-3]))
def test_rms_norm(shape: list[int], eps: float | None) -> None:
    x = draws(2, *shape)
    assert_same(F.rms_norm, [x], [draws(shape[-1])[0]], lambda f, x, p: f(x[0], (shape[-1],), p[0], eps))
    assert_same(torch.rms_norm, [x], [], lambda f, x, p: f(x[0], shape, eps=eps))


@quickly
@hypothesis.given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    spatial=st.lists(st.integers(1, 3), max_size=3),
    affine=st.booleans(),
)
def test_group_norm(groups: int, per_group: int, spatial: list[int], affine: bool) -> None:
    channels = groups * per_group
    # Two values or more in a group: of a single one, both compute rounding errors.
    x = draws(2, channels, *spatial, 2)
    parameters = [draws(channels, seed=3)[0], draws(channels, seed=4)[0]] if affine else []
    assert_same(F.group_norm, [x], parameters, lambda f, x, p: f(x[0], groups, *p, eps=1e-3))


@quickly
@hypothesis.given(
    channels=st.integers(1, 3),
    spatial=st.lists(st.integers(1, 3), max_size=3),
    momentum=st.sampled_from([0.1, 0.7, 1.0]),
    affine=st.booleans(),
    tracked=st.booleans(),
    training=st.booleans(),
)
def test_batch_norm(
    channels: int, spatial: list[int], momentum: float, affine: bool, tracked: bool, training: bool
) -> None:
    tracked = tracked or not training
    x = draws(3, channels, *spatial)
    parameters = [draws(channels, seed=3)[0], draws(channels, seed=4)[0]] if affine else [None, None]
    given = [draws(channels, seed=5)[0], draws(channels, seed=6)[0].abs() + 0.1]
    stored: list[list[torch.Tensor]] = []

    def call(f: Callable[..., torch.Tensor], own: list[torch.Tensor], p: list[torch.Tensor]) -> torch.Tensor:
        stored.append([one.clone() for one in given] if tracked else [None, None])
        weight, bias = p if p else (None, None)
        return f(own[0], *stored[-1], weight, bias, training, momentum, 1e-4)

    assert_same(F.batch_norm, [x], [one for one in parameters if one is not None], call)
    if tracked:  # calls: one per replica, then one of the replacement
        for own, wanted in zip(stored[REPLICAS], stored[0], strict=True):
            close(own, wanted, 1e-12)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("use_input_stats", [True, False])
@pytest.mark.parametrize("spatial", [(3,), (2, 3), (2, 1, 2)])
def test_instance_norm(spatial: tuple[int, ...], use_input_stats: bool, tracked: bool) -> None:
    if not tracked and not use_input_stats:
        with pytest.raises(RuntimeError, match="running_mean"):
            replaced(F.instance_norm)(draws(2, 2, 3), use_input_stats=False)
        return
    given = [draws(2, seed=5)[0], draws(2, seed=6)[0].abs() + 0.1]
    stored: list[list[torch.Tensor]] = []

    def call(f: Callable[..., torch.Tensor], own: list[torch.Tensor], p: list[torch.Tensor]) -> torch.Tensor:
        stored.append([one.clone() for one in given] if tracked else [None, None])
        return f(own[0], *stored[-1], *p, use_input_stats=use_input_stats, momentum=0.3, eps=1e-3)

    assert_same(F.instance_norm, [draws(3, 2, *spatial)], [draws(2, seed=3)[0], draws(2, seed=4)[0]], call)
    if tracked:
        for own, wanted in zip(stored[REPLICAS], stored[0], strict=True):
            close(own, wanted, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_parameters", [True, False])
def test_normalisations_of_half_precision(dtype: torch.dtype, wide_parameters: bool) -> None:
    x = draws(4, 6, 5, dtype=torch.float32).to(dtype)
    p = [draws(n, seed=n, dtype=torch.float32)[0].to(torch.float32 if wide_parameters else dtype) for n in (5, 6)]
    step = torch.finfo(dtype).eps
    assert_same(F.layer_norm, [x], [p[0]], lambda f, x, p: f(x[0], (5,), p[0], p[0]), 2 * step)
    assert_same(F.group_norm, [x], [p[1]], lambda f, x, p: f(x[0], 2, p[0], p[0]), 2 * step)
    assert_same(F.batch_norm, [x], [p[1]], lambda f, x, p: f(x[0], None, None, p[0], p[0], True), 2 * step)
    if not wide_parameters:
        assert_same(F.rms_norm, [x], [p[0]], lambda f, x, p: f(x[0], (5,), p[0]), 2 * step)


def test_half_precision_sums_in_single_precision() -> None:
    """300 values around 100 whose mean bfloat16 cannot hold."""
    x = (draws(300, 2, dtype=torch.float32) + 100).bfloat16()
    one = torch.ones(2)  # without parameters in single precision, PyTorch's own mean on CPUs is rounded to 8 bits
    assert_same(F.batch_norm, [x], [one], lambda f, x, p: f(x[0], None, None, p[0], p[0], training=True), 2**-6)
    running = torch.zeros(2)
    torch.vmap(lambda own: replaced(F.batch_norm)(own, running, None, training=True, momentum=1.0))(x)
    close(running, x[0].float().mean(dim=0), 1e-6)


def test_bad_shapes_are_refused() -> None:
    x = draws(4, 6)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        replaced(F.layer_norm)(x, (5,))
    with pytest.raises(RuntimeError, match="weight"):
        replaced(F.layer_norm)(x, (6,), torch.ones(1, dtype=x.dtype))
    with pytest.raises(RuntimeError, match="divisible"):
        replaced(F.group_norm)(x, 3)
    with pytest.raises(InvalidArgumentError, match=r"running_mean has shape \(1,\).*4 channels"):
        replaced(F.batch_norm)(x, torch.zeros(1), torch.ones(4), training=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        replaced(F.batch_norm)(x[:1, :, :1], None, None, training=True)
    with pytest.raises(RuntimeError, match="running_mean"):
        replaced(F.batch_norm)(x, None, None)


class _SumOfReplicas(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].sum(dim=0, keepdim=True).expand_as(gradients[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor) -> Any:
        moved = tensor.movedim(in_dims[0], 0)
        return moved.sum(dim=0, keepdim=True).expand_as(moved), 0


@pytest.mark.parametrize("spatial", [(), (2,), (2, 3)])
def test_sync_batch_norm_is_that_of_all_rows(spatial: tuple[int, ...]) -> None:
    rewrites = Rewrites(first_replica, _SumOfReplicas.apply)
    x, weight, bias = draws(4, 2, *spatial) + 50, draws(2, seed=2)[0], draws(2, seed=3)[0]
    running = [torch.zeros(2, dtype=x.dtype), torch.ones(2, dtype=x.dtype)]
    expected_running = copy.deepcopy(running)
    leaf, expected_leaf = x.clone().requires_grad_(), x.flatten(0, 1).clone().requires_grad_()
    y = torch.vmap(lambda own: rewrites.sync_batch_norm(own, *running, weight, bias, 0.3, 1e-4))(leaf)
    expected = F.batch_norm(expected_leaf, *expected_running, weight, bias, True, 0.3, 1e-4)
    close(y.flatten(0, 1), expected, 1e-11)
    for own, wanted in zip(running, expected_running, strict=True):
        close(own, wanted, 1e-12)
    y.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert leaf.grad is not None
    assert expected_leaf.grad is not None
    close(leaf.grad.flatten(0, 1), expected_leaf.grad, 1e-10)


def test_sync_batch_norm_needs_replicas() -> None:
    with pytest.raises(ContextError, match=r"within Strategy\.run"):
        REWRITES.sync_batch_norm(draws(2), None, None)


# Losses


@pytest.mark.parametrize("spatial", [(), (2,), (2, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 1])
def test_losses_over_classes(spatial: tuple[int, ...], reduction: str, weighted: bool, ignore_index: int) -> None:
    x, target = draws(4, 5, *spatial), indices(5, 4, *spatial)
    weight = draws(5, seed=2)[0].abs() if weighted else None
    options = {"weight": weight, "reduction": reduction, "ignore_index": ignore_index}
    for smoothing in (0.0, 0.2):
        assert_same(
            F.cross_entropy,
            [x, target],
            [],
            lambda f, own, p: f(*own, label_smoothing=smoothing, **options),  # noqa: B023
        )
    assert_same(F.nll_loss, [x, target], [], lambda f, own, p: f(*own, **options))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_class_probabilities_and_single_rows(reduction: str) -> None:
    x, target = draws(4, 5), draws(4, 5, seed=1).softmax(-1)
    weight = draws(5, seed=2)[0].abs()
    assert_same(
        F.cross_entropy,
        [x, target],
        [],
        lambda f, own, p: f(*own, weight=weight, reduction=reduction, label_smoothing=0.1),
    )
    for func in (F.cross_entropy, F.nll_loss):
        assert_same(func, [draws(5), indices(5)], [], lambda f, own, p: f(*own, weight=weight, reduction=reduction))


def test_targets_that_are_all_ignored_or_impossible() -> None:
    x, target = draws(4, 5), torch.full((REPLICAS, 4), 3)
    assert_same(F.cross_entropy, [x, target], [], lambda f, own, p: f(*own, ignore_index=3, reduction="sum"))
    loss = torch.vmap(lambda *own: replaced(F.cross_entropy)(*own, ignore_index=3))(x, target)
    assert loss.isnan().all()  # as PyTorch: nothing to take the mean of
    impossible = x.clone()
    impossible[:, :, 0] = float("-inf")
    assert_same(F.cross_entropy, [impossible, target], [], lambda f, own, p: f(*own))


def test_an_index_that_is_no_class_cannot_go_unnoticed() -> None:
    x = draws(3, 5)[0]
    loss = replaced(F.cross_entropy)(x, torch.tensor([1, 5, -1]), reduction="none")
    assert loss.isnan().tolist() == [False, True, True]
    with pytest.raises(InvalidArgumentError, match=r"target has shape \(2,\).*need a target of shape \(3,\)"):
        replaced(F.nll_loss)(x, torch.tensor([1, 2]))
    with pytest.raises(InvalidArgumentError, match="integer"):
        replaced(F.nll_loss)(x, torch.zeros(3))
    with pytest.raises(InvalidArgumentError, match="5 classes"):
        replaced(F.nll_loss)(x, torch.tensor([1, 2, 0]), torch.ones(1))
    with pytest.raises(InvalidArgumentError, match="reduction='max'"):
        replaced(F.nll_loss)(x, torch.tensor([1, 2, 0]), reduction="max")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy_of_other_types(dtype: torch.dtype) -> None:
    x, target = draws(8, 5, dtype=torch.float32).to(dtype), indices(5, 8)
    assert_same(F.cross_entropy, [x, target], [], lambda f, own, p: f(*own), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("size_average", "reduce"), [(True, None), (False, None), (None, False), (False, True)])
def test_the_old_names_of_reductions(size_average: bool | None, reduce: bool | None) -> None:
    x, target = draws(4, 5)[0], indices(5, 4)[0]
    with pytest.warns(UserWarning, match="size_average and reduce"):
        expected = F.nll_loss(x, target, size_average=size_average, reduce=reduce)
    close(replaced(F.nll_loss)(x, target, size_average=size_average, reduce=reduce), expected, 1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_over_numbers(reduction: str) -> None:
    x, y = draws(4, 5), draws(4, 5, seed=1)
    for beta in (1.0, 0.3):
        assert_same(F.smooth_l1_loss, [x, y], [], lambda f, own, p: f(*own, reduction=reduction, beta=beta))  # noqa: B023
    for var in (y.abs(), y[..., :1].abs(), y[..., 0].abs(), y.abs() * 1e-6):
        for full in (False, True):
            assert_same(
                F.gaussian_nll_loss,
                [x, y, var],
                [],
                lambda f, own, p: f(*own, full=full, eps=1e-5, reduction=reduction),  # noqa: B023
            )


@pytest.mark.parametrize("reduction", ["none", "sum", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div(reduction: str, log_target: bool) -> None:
    x, target = draws(4, 5).log_softmax(-1), draws(4, 5, seed=1).softmax(-1)
    target = target.log() if log_target else target
    assert_same(F.kl_div, [x, target], [], lambda f, own, p: f(*own, reduction=reduction, log_target=log_target))
    with pytest.warns(UserWarning, match="reduction: 'mean'"):
        expected = F.kl_div(x[0], target[0], log_target=log_target)
    close(replaced(F.kl_div)(x[0], target[0], log_target=log_target), expected, 1e-12)


def test_gaussian_nll_loss_of_bad_variances() -> None:
    x = draws(2, 3)[0]
    assert replaced(F.gaussian_nll_loss)(x, x, -torch.ones_like(x), reduction="none").isnan().all()
    with pytest.raises(InvalidArgumentError, match="var has shape"):
        replaced(F.gaussian_nll_loss)(x, x, torch.ones(5))


# Embeddings, activations, convolutions


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_bags_of_equal_length(mode: str, padding_idx: int | None) -> None:
    ids, table = indices(4, 3, 5), draws(4, 2, seed=2)[0]
    ids[0, 0] = 3 if padding_idx == -1 else 2  # a bag of padding only
    assert_same(F.embedding_bag, [ids], [table], lambda f, own, p: f(own[0], p[0], mode=mode, padding_idx=padding_idx))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_embedding_bags_of_any_length(mode: str, include_last_offset: bool) -> None:
    ids, table = indices(4, 6), draws(4, 2, seed=2)[0]
    offsets = torch.tensor([[0, 2, 6], [0, 0, 6], [0, 5, 6]])  # empty bags too
    assert_same(
        F.embedding_bag,
        [ids, offsets],
        [table],
        lambda f, own, p: f(own[0], p[0], own[1], mode=mode, include_last_offset=include_last_offset, padding_idx=1),
    )


def test_embedding_bags_with_weights() -> None:
    ids, table = indices(4, 3, 5), draws(4, 2, seed=2)[0]
    assert_same(
        F.embedding_bag,
        [ids, draws(3, 5)],
        [table],
        lambda f, own, p: f(own[0], p[0], mode="sum", per_sample_weights=own[1]),
    )


@pytest.mark.parametrize("name", ["elu", "celu", "selu"])
def test_elu_family(name: str) -> None:
    x = draws(4, 5)
    x[0, 0, :3] = torch.tensor([0.0, 800.0, -800.0])
    func = getattr(F, name)
    assert_same(func, [x], [], lambda f, own, p: f(own[0]))
    if name != "selu":
        assert_same(func, [x], [], lambda f, own, p: f(own[0], 0.5))  # PyTorch rounds others to float
    changed = x.clone()
    assert replaced(func)(changed, inplace=True) is changed
    close(changed, func(x), 1e-12)


@pytest.mark.parametrize("slopes", [1, 3])
def test_prelu(slopes: int) -> None:
    assert_same(F.prelu, [draws(4, 3, 2)], [draws(slopes)[0]], lambda f, own, p: f(own[0], p[0]))
    with pytest.raises(RuntimeError):
        replaced(F.prelu)(draws(4), torch.ones(2))


@pytest.mark.parametrize("func", [F.conv1d, F.conv2d, F.conv3d])
@pytest.mark.parametrize("per_group", [1, 2])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, "same", 2), (3, 2, 2), (1, "valid", 1)]
)
def test_convolutions_in_groups(func: Any, per_group: int, stride: int, padding: int | str, dilation: int) -> None:
    spatial = [F.conv1d, F.conv2d, F.conv3d].index(func) + 1
    x, weight = draws(2, 2 * per_group, *[6, 5, 7][:spatial]), draws(4, per_group, *[3, 2, 3][:spatial], seed=2)[0]
    if padding == "same" and spatial > 1:  # PyTorch warns that an even kernel needs a copy
        weight = draws(4, per_group, *[3] * spatial, seed=2)[0]
    for own_bias in ([], [draws(4, seed=3)[0]]):
        assert_same(
            func,
            [x],
            [weight, *own_bias],
            lambda f, own, p: f(
                own[0],
                p[0],
                p[1] if len(p) > 1 else None,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=2,
            ),
        )


def test_convolutions_of_one_example_and_without_groups() -> None:
    x, weight = draws(4, 6, 6), draws(4, 2, 3, 3)[0]
    assert_same(F.conv2d, [x], [weight], lambda f, own, p: f(own[0], p[0], stride=(1, 2), padding=(0, 1), groups=2))
    assert_same(F.conv2d, [x], [draws(3, 4, 3, 3)[0]], lambda f, own, p: f(own[0], p[0]))
    with pytest.raises(RuntimeError):
        replaced(F.conv2d)(x[0], weight, groups=3)


@pytest.mark.parametrize("func", [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d])
def test_transposed_convolutions_in_groups(func: Any) -> None:
    spatial = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d].index(func) + 1
    x, weight, bias = draws(2, 4, *[4] * spatial), draws(4, 3, *[3] * spatial)[0], draws(6)[0]
    assert_same(
        func,
        [x],
        [weight, bias],
        lambda f, own, p: f(own[0], *p, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
    )


# Recurrent layers


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    "build", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *a, **k: nn.RNNCell(*a, **k, nonlinearity="relu")]
)
def test_recurrent_cells(build: Callable[..., nn.Module], with_bias: bool) -> None:
    torch.manual_seed(0)
    cell = build(3, 4, bias=with_bias).double()
    func = {nn.LSTMCell: torch.lstm_cell, nn.GRUCell: torch.gru_cell}.get(
        type(cell), torch.rnn_relu_cell if getattr(cell, "nonlinearity", "") == "relu" else torch.rnn_tanh_cell
    )

    def call(f: Callable[..., Any], own: list[torch.Tensor], p: list[torch.Tensor]) -> torch.Tensor:
        if func is torch.lstm_cell:
            return torch.stack(f(own[0], (own[1], own[2]), *p))
        return f(own[0], own[1], *p)

    states = [draws(2, 4, seed=1), draws(2, 4, seed=2)][: 2 if func is torch.lstm_cell else 1]
    assert_same(func, [draws(2, 3), *states], [one.detach() for one in cell.parameters()], call)
    with Recorded() as recorded:
        torch.vmap(cell)(draws(2, 3))
    assert recorded.used == [func]


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN, lambda *a: nn.RNN(*a, nonlinearity="relu")])
def test_recurrent_layers_are_refused(build: Callable[..., nn.Module]) -> None:
    layer = build(3, 4).double()
    name = type(layer).__name__
    with Recorded(), pytest.raises(UnsupportedError, match=rf"{name} cannot run.*global_view=True.*{name}Cell"):
        torch.vmap(layer)(draws(5, 2, 3))


# Who is called


class Recorded(TorchFunctionMode):
    """As a step is recorded; ``used``: what was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = REWRITES.find(func)
        if replacement is not None:
            self.used.append(func)
        return (replacement or func)(*args, **(kwargs or {}))


IMAGES, SEQUENCES, IDS = (2, 4, 6, 6), (2, 4, 6), (2,)

MODULES: list[tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = [
    (lambda: nn.LayerNorm(6), SEQUENCES, F.layer_norm),
    (lambda: nn.RMSNorm(6), SEQUENCES, F.rms_norm),
    (lambda: nn.GroupNorm(2, 4), IMAGES, F.group_norm),
    (lambda: nn.BatchNorm1d(4), SEQUENCES, F.batch_norm),
    (lambda: nn.BatchNorm2d(4), IMAGES, F.batch_norm),
    (lambda: nn.BatchNorm2d(4, track_running_stats=False), IMAGES, F.batch_norm),
    (lambda: nn.BatchNorm2d(4).eval(), IMAGES, F.batch_norm),
    (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGES, F.instance_norm),
    (lambda: nn.ELU(), SEQUENCES, F.elu),
    (lambda: nn.CELU(), SEQUENCES, F.celu),
    (lambda: nn.SELU(), SEQUENCES, F.selu),
    (lambda: nn.PReLU(), SEQUENCES, F.prelu),
    (lambda: nn.Conv1d(4, 4, 3, groups=2), SEQUENCES, F.conv1d),
    (lambda: nn.Conv2d(4, 4, 3, groups=4, padding_mode="circular", padding=1), IMAGES, F.conv2d),
    (lambda: nn.Conv3d(2, 2, 1, groups=2), (1, 2, 2, 2, 2), F.conv3d),
    (lambda: nn.ConvTranspose1d(4, 4, 3, groups=2), SEQUENCES, F.conv_transpose1d),
    (lambda: nn.ConvTranspose2d(4, 4, 3, groups=2), IMAGES, F.conv_transpose2d),
    (lambda: nn.ConvTranspose3d(2, 2, 1, groups=2), (1, 2, 2, 2, 2), F.conv_transpose3d),
]


@pytest.mark.parametrize(("build", "shape", "func"), MODULES)
def test_modules_meet_the_replacement(build: Callable[[], nn.Module], shape: tuple[int, ...], func: Any) -> None:
    torch.manual_seed(0)
    module = build().double()
    reference = copy.deepcopy(module)
    x = draws(*shape)
    with Recorded() as recorded:
        y = torch.vmap(module)(x)
    assert recorded.used == [func]
    close(y[0], reference(x[0]), 1e-12)
    for own, wanted in zip(module.buffers(), reference.buffers(), strict=True):
        close(own, wanted, 1e-12)


@pytest.mark.parametrize(
    ("module", "func"),
    [
        (nn.CrossEntropyLoss(), F.cross_entropy),
        (nn.CrossEntropyLoss(label_smoothing=0.1), F.cross_entropy),
        (nn.NLLLoss(), F.nll_loss),
        (nn.SmoothL1Loss(), F.smooth_l1_loss),
        (nn.KLDivLoss(reduction="batchmean"), F.kl_div),
        (nn.GaussianNLLLoss(), F.gaussian_nll_loss),
        (nn.EmbeddingBag(5, 2), F.embedding_bag),
    ],
)
def test_modules_of_several_inputs_meet_the_replacement(module: nn.Module, func: Any) -> None:
    inputs = {
        F.smooth_l1_loss: (draws(2), draws(2, seed=1)),
        F.kl_div: (draws(2, 3).log_softmax(-1), draws(2, 3, seed=1).softmax(-1)),
        F.gaussian_nll_loss: (draws(2), draws(2, seed=1), draws(2, seed=2).abs()),
        F.embedding_bag: (indices(5, 2, 3),),
    }.get(func, (draws(2, 5), indices(5, 2)))
    with Recorded() as recorded:
        losses = torch.vmap(module)(*inputs)
    assert recorded.used == [func]
    close(losses[1], module(*(one[1] for one in inputs)), 1e-12 if func is not F.embedding_bag else 1e-6)


@pytest.mark.parametrize("func", [torch.layer_norm, torch.group_norm, torch.batch_norm, torch.instance_norm])
def test_functions_below_torch_nn_are_replaced(func: Any) -> None:
    x, ones, zeros = draws(3, 4, 2), torch.ones(4).double(), torch.zeros(4).double()
    arguments = {
        torch.layer_norm: ((4, 2), torch.ones(4, 2).double(), torch.zeros(4, 2).double(), 1e-5, False),
        torch.group_norm: (2, ones, zeros, 1e-5, False),
        torch.batch_norm: (ones, zeros, None, None, True, 0.1, 1e-5, False),
        torch.instance_norm: (ones, zeros, None, None, True, 0.1, 1e-5, False),
    }[func]
    with Recorded() as recorded:
        y = torch.vmap(lambda own: func(own, *arguments))(x)
    assert recorded.used == [func]
    close(y[0], func(x[0], *arguments), 1e-12)


def test_without_logical_devices_convolutions_stay() -> None:
    rewrites = Rewrites(first_replica)
    assert rewrites.find(F.conv2d) is None
    assert rewrites.find(F.layer_norm) is not None
    assert rewrites.find(torch.add) is None
    assert rewrites.find([]) is None
