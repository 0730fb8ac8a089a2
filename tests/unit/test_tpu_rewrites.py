"""The TPU backend's replacements of PyTorch functions: values, gradients and running statistics of the originals.

A replica's reference is the original on that replica's inputs alone. The replacement runs once, under ``vmap`` over
all replicas, and may not fall back to running them one by one (a warning, which fails these tests).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.matrix import stand_ins_on_tpu as stand_ins
from tests.support.tpu import fake_tpu
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.tpu import _functorch_private as functorch
from torchstrat.sharding.tpu.rewrites import Rewrites

REPLICAS = 3
REDUCTIONS = ("none", "mean", "sum")

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


def shared(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return draws(*shape, seed=seed, dtype=dtype)[0]


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, (REPLICAS, *shape), generator=torch.Generator().manual_seed(1))


def affine(channels: int) -> dict[str, torch.Tensor]:
    return {"weight": shared(channels, seed=3), "bias": shared(channels, seed=4)}


def statistics(channels: int) -> dict[str, torch.Tensor]:
    return {"running_mean": shared(channels, seed=5), "running_var": shared(channels, seed=6).abs() + 0.1}


class Same(NamedTuple):
    """``own``: of each replica; ``leaves``: shared, and with gradients; ``state``: shared, and what becomes of it."""

    func: Any
    own: tuple[torch.Tensor, ...]
    leaves: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    tolerance: float
    call: Callable[..., Any]
    options: dict[str, Any]


def same(
    func: Any,
    *own: torch.Tensor,
    leaves: Any = (),
    state: Any = (),
    tolerance: float = 1e-12,
    call: Callable[..., Any] = lambda f, *own, **named: f(*own, **named),
    **options: Any,
) -> Same:
    return Same(func, own, dict(leaves), dict(state), tolerance, call, options)


def require(one: Same) -> None:
    """Values, gradients and what becomes of the state, by the original and by the replacement."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().requires_grad_(tensor.is_floating_point())

    states: list[dict[str, torch.Tensor]] = []

    def call(f: Callable[..., Any], own: Any, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        states.append({name: tensor.clone() for name, tensor in one.state.items()})
        return one.call(f, *own, **leaves, **states[-1], **one.options)

    results = []
    for one_by_one in (True, False):
        inputs = [leaf(tensor) for tensor in one.own]
        leaves = {name: leaf(tensor) for name, tensor in one.leaves.items()}
        if one_by_one:
            y = torch.stack([call(one.func, [each[r] for each in inputs], leaves) for r in range(REPLICAS)])
        else:
            y = torch.vmap(lambda *own: call(replaced(one.func), own, leaves))(*inputs)  # noqa: B023
        wanted = [each for each in (*inputs, *leaves.values()) if each.requires_grad]
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        results.append([y.detach(), *torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)])
    for expected, found in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert found.dtype == expected.dtype
            close(found, expected, one.tolerance)
    for name, expected in states[0].items():  # of the first replica, and of the replacement, which was last
        close(states[REPLICAS][name], expected, 1e-12)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest entry, or to 1 where all are smaller: what cancels has rounding errors of its terms."""
    scale = expected.detach().abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * max(scale, 1.0), equal_nan=True)


# -- PyTorch's own samples of arguments -------------------------------------------------------------------------------

FUNCTIONS = (
    *("layer_norm", "rms_norm", "group_norm", "instance_norm", "cross_entropy", "nll_loss", "kl_div", "smooth_l1_loss"),
    *("gaussian_nll_loss", "elu", "celu", "selu", "prelu", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the table of stand-ins, whose other operations run with torch_xla: of two replicas, on logical devices."""
    with fake_tpu(2, 2, max_different_graphs=10**6) as strategy:
        monkeypatch.setattr(stand_ins, "_strategy", lambda: strategy)
        monkeypatch.setattr(stand_ins, "MOST_SAMPLES", 24)
        asked = stand_ins.questions.__wrapped__(f"torch.nn.functional.{name}")
        assert asked
        for question in asked:
            stand_ins.judge(question, stand_ins.in_a_step([question])[0])


# -- what samples leave out -------------------------------------------------------------------------------------------


@quickly
@hypothesis.given(
    channels=st.integers(1, 3),
    spatial=st.lists(st.integers(1, 3), max_size=3),
    momentum=st.sampled_from([0.1, 0.7, 1.0]),
    has_parameters=st.booleans(),
    tracked=st.booleans(),
    training=st.booleans(),
)
def test_batch_norm(
    channels: int, spatial: list[int], momentum: float, has_parameters: bool, tracked: bool, training: bool
) -> None:
    leaves = affine(channels) if has_parameters else {}
    is_tracked = tracked or not training
    untracked = {} if is_tracked else {"running_mean": None, "running_var": None}
    state = statistics(channels) if is_tracked else {}
    options = {"training": training, "momentum": momentum, "eps": 1e-4, **untracked}
    require(same(F.batch_norm, draws(3, channels, *spatial), leaves=leaves, state=state, **options))


def normalisations() -> Iterator[Same]:
    for spatial, of_input, tracked in product([(3,), (2, 3), (2, 1, 2)], [True, False], [True, False]):
        if tracked or of_input:
            options = {"use_input_stats": of_input, "momentum": 0.3, "eps": 1e-3}
            state = statistics(2) if tracked else {}
            yield same(F.instance_norm, draws(3, 2, *spatial), leaves=affine(2), state=state, **options)
    for dtype, wide in product([torch.bfloat16, torch.float16], [True, False]):
        x, of_parameters = draws(4, 6, 5, dtype=torch.float32).to(dtype), torch.float32 if wide else dtype
        five, six = ({"p": shared(n, seed=n, dtype=torch.float32).to(of_parameters)} for n in (5, 6))
        tolerance = 2 * torch.finfo(dtype).eps
        yield same(F.layer_norm, x, leaves=five, tolerance=tolerance, call=lambda f, x, p: f(x, (5,), p, p))
        yield same(F.group_norm, x, leaves=six, tolerance=tolerance, call=lambda f, x, p: f(x, 2, p, p))
        yield same(F.batch_norm, x, leaves=six, tolerance=tolerance, call=lambda f, x, p: f(x, None, None, p, p, True))
        if not wide:
            yield same(F.rms_norm, x, leaves=five, tolerance=tolerance, call=lambda f, x, p: f(x, (5,), p))
    # Sums in single precision: 300 values around 100 whose mean bfloat16 cannot hold. Without parameters in single
    # precision, PyTorch's own mean on CPUs is rounded to 8 bits.
    x = (draws(300, 2, dtype=torch.float32) + 100).bfloat16()
    yield same(
        F.batch_norm, x, leaves={"p": torch.ones(2)}, tolerance=2**-6, call=lambda f, x, p: f(x, None, None, p, p, True)
    )
    # Functions below torch.nn.
    x, ones, zeros = draws(3, 4, 2), torch.ones(4).double(), torch.zeros(4).double()
    four_two = ((4, 2), torch.ones(4, 2).double(), torch.zeros(4, 2).double(), 1e-5, False)
    yield same(torch.layer_norm, x, call=lambda f, x: f(x, *four_two))
    yield same(torch.group_norm, x, call=lambda f, x: f(x, 2, ones, zeros, 1e-5, False))
    for func in (torch.batch_norm, torch.instance_norm):
        yield same(func, x, call=lambda f, x: f(x, ones, zeros, None, None, True, 0.1, 1e-5, False))


def others() -> Iterator[Same]:
    x, y, threes = draws(4, 5), draws(4, 5, seed=1), torch.full((REPLICAS, 4), 3)
    yield same(F.layer_norm, x + 1e3, leaves=affine(5), tolerance=1e-9, normalized_shape=[5])
    yield same(F.group_norm, draws(2, 6, 4) + 1e3, leaves=affine(6), tolerance=1e-9, num_groups=2)
    for spatial, reduction, weighted, ignored in product([(), (2,)], REDUCTIONS, [False, True], [-100, 1]):
        weight = shared(5, seed=2).abs() if weighted else None
        options = {"weight": weight, "reduction": reduction, "ignore_index": ignored, "label_smoothing": 0.2}
        yield same(F.cross_entropy, draws(4, 5, *spatial), indices(5, 4, *spatial), **options)
    for beta in (1.0, 0.3):
        yield same(F.smooth_l1_loss, x, y, beta=beta)
    narrow = {"weight": shared(4, 1, 3, 3)}
    yield same(F.conv2d, draws(2, 2, 5, 5), leaves=narrow, padding="valid", groups=2)
    yield same(F.conv2d, draws(2, 6, 5), leaves=narrow, stride=(1, 2), padding=(0, 1), groups=2)
    for reduction in REDUCTIONS:  # single rows
        for func in (F.cross_entropy, F.nll_loss):
            yield same(func, draws(5), indices(5), weight=shared(5, seed=2).abs(), reduction=reduction)
    impossible = x.clone()
    impossible[:, :, 0] = float("-inf")
    yield same(F.cross_entropy, x, threes, ignore_index=3, reduction="sum")
    yield same(F.cross_entropy, impossible, threes)
    for dtype in (torch.bfloat16, torch.float32):
        tolerance = 2 * torch.finfo(dtype).eps
        yield same(F.cross_entropy, draws(8, 5, dtype=torch.float32).to(dtype), indices(5, 8), tolerance=tolerance)
    for var in (y[..., :1].abs(), y[..., 0].abs(), y.abs() * 1e-6):
        yield same(F.gaussian_nll_loss, x, y, var, full=True, eps=1e-5)
    table, offsets = {"weight": shared(4, 2, seed=2)}, torch.tensor([[0, 2, 6], [0, 0, 6], [0, 5, 6]])  # empty bags too
    for mode, padding in product(["sum", "mean", "max"], [None, 2, -1]):
        ids = indices(4, 3, 5)
        ids[0, 0] = 3 if padding == -1 else 2  # a bag of padding only
        yield same(F.embedding_bag, ids, leaves=table, mode=mode, padding_idx=padding)
    for mode, last in product(["sum", "mean"], [False, True]):
        options = {"mode": mode, "include_last_offset": last, "padding_idx": 1}
        by_offsets = lambda f, ids, offsets, **named: f(ids, offsets=offsets, **named)  # noqa: E731
        yield same(F.embedding_bag, indices(4, 6), offsets, leaves=table, call=by_offsets, **options)
    weighed = lambda f, ids, w, weight: f(ids, weight, mode="sum", per_sample_weights=w)  # noqa: E731
    yield same(F.embedding_bag, indices(4, 3, 5), draws(3, 5), leaves=table, call=weighed)
    assigned = lambda f, x, mask, value=-1.0: (changed := x * 1, f(changed, mask, value))[0]  # noqa: E731
    for mask, value in ((x > 0, shared()), (x[..., 0] > 0, shared(5))):
        yield same(torch.Tensor.__setitem__, x, mask, call=assigned)
        yield same(torch.Tensor.__setitem__, x, mask, leaves={"value": value}, call=assigned)
    extreme = x.clone()
    extreme[0, 0, :3] = torch.tensor([0.0, 800.0, -800.0])
    for func in (F.elu, F.celu, F.selu, F.relu):
        yield same(func, extreme)


@pytest.mark.parametrize("one", [*normalisations(), *others()], ids=lambda one: one.func.__name__)
def test_replacements(one: Same) -> None:
    require(one)


def test_a_running_mean_that_half_precision_cannot_hold() -> None:
    x, running = (draws(300, 2, dtype=torch.float32) + 100).bfloat16(), torch.zeros(2)
    torch.vmap(lambda own: replaced(F.batch_norm)(own, running, None, training=True, momentum=1.0))(x)
    close(running, x[0].float().mean(dim=0), 1e-6)


@pytest.mark.parametrize("n", [4, 6, 250])
def test_ends_of_a_spectrum_are_real(n: int) -> None:
    """To the last bit, as PyTorch's are: a gradient that is nothing but rounding has a sign."""
    spectrum = REWRITES.find(torch.fft.rfft)(torch.randn(3, n))  # type: ignore[misc]
    assert not spectrum.imag[:, [0, -1]].any()


def test_activations_in_place() -> None:
    for func in (F.elu, F.celu, F.selu, F.relu):
        x = draws(4, 5)
        changed = x.clone()
        assert replaced(func)(changed, inplace=True) is changed
        close(changed, func(x), 1e-12)


@pytest.mark.parametrize(
    ("func", "warning", "options"),
    [
        *(
            (F.nll_loss, "size_average and reduce", {"size_average": size_average, "reduce": reduce})
            for size_average, reduce in ((True, None), (False, None), (None, False), (False, True))
        ),
        *((F.kl_div, "reduction: 'mean'", {"log_target": log_target}) for log_target in (False, True)),
    ],
)
def test_options_that_pytorch_warns_of(func: Any, warning: str, options: dict[str, Any]) -> None:
    y = shared(4, 5, seed=1).softmax(-1)
    x, target = (shared(4, 5).log_softmax(-1), y) if func is F.kl_div else (shared(4, 5), indices(5, 4)[0])
    with pytest.warns(UserWarning, match=warning):
        expected = func(x, target, **options)
    close(replaced(func)(x, target, **options), expected, 1e-12)


def test_what_cannot_go_unnoticed_is_nan() -> None:
    """An index that is no class, targets that are all ignored, bad variances."""
    x = shared(3, 5)
    loss = replaced(F.cross_entropy)(x, torch.tensor([1, 5, -1]), reduction="none")
    assert loss.isnan().tolist() == [False, True, True]
    assert replaced(F.cross_entropy)(x, torch.full((3,), 3), ignore_index=3).isnan()  # as PyTorch
    assert replaced(F.gaussian_nll_loss)(x, x, -torch.ones_like(x), reduction="none").isnan().all()
    assert replaced(F.threshold)(x * float("nan"), 0.1, 20.0).isnan().all()


X, NUMBERS = draws(4, 6), torch.tensor([1, 2, 0])


@pytest.mark.parametrize(
    ("func", "args", "options", "error", "message"),
    [
        (F.layer_norm, (X, (5,)), {}, RuntimeError, "normalized_shape"),
        (F.layer_norm, (X, (6,), torch.ones(1, dtype=X.dtype)), {}, RuntimeError, "weight"),
        (F.group_norm, (X, 3), {}, RuntimeError, "divisible"),
        (
            *(F.batch_norm, (X, torch.zeros(1), torch.ones(4)), {"training": True}),
            *(InvalidArgumentError, r"running_mean has shape \(1,\).*4 channels"),
        ),
        (F.batch_norm, (X[:1, :, :1], None, None), {"training": True}, ValueError, "more than 1 value per channel"),
        (F.batch_norm, (X, None, None), {}, RuntimeError, "running_mean"),
        (F.instance_norm, (draws(2, 2, 3),), {"use_input_stats": False}, RuntimeError, "running_mean"),
        (
            *(F.nll_loss, (X[0][:3, :5], NUMBERS[:2]), {}),
            *(InvalidArgumentError, r"target has shape \(2,\).*need a target of shape \(3,\)"),
        ),
        (F.nll_loss, (X[0][:3, :5], torch.zeros(3)), {}, InvalidArgumentError, "integer"),
        (F.nll_loss, (X[0][:3, :5], NUMBERS, torch.ones(1)), {}, InvalidArgumentError, "5 classes"),
        (F.nll_loss, (X[0][:3, :5], NUMBERS), {"reduction": "max"}, InvalidArgumentError, "reduction='max'"),
        (F.gaussian_nll_loss, (X[0], X[0], torch.ones(5)), {}, InvalidArgumentError, "var has shape"),
        (F.prelu, (draws(4), torch.ones(2)), {}, RuntimeError, "."),
        (
            *(torch.index_add, (shared(4, 3), 0, NUMBERS[:1], shared(1, 1)), {}),
            *(InvalidArgumentError, r"must be of shape \(1, 3\)"),
        ),
        (F.interpolate, (shared(1, 1, 2), 4), {"align_corners": True}, ValueError, "align_corners"),
        (
            *(F.interpolate, (indices(9, 1, 4).byte(), 8), {"mode": "linear"}),
            *(UnsupportedError, r"interpolate of torch.uint8.*mode='linear'\)\.round\(\)"),
        ),
        (F.conv2d, (draws(4, 6, 6)[0], shared(4, 2, 3, 3)), {"groups": 3}, RuntimeError, "."),
    ],
)
def test_what_is_refused(func: Any, args: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replaced(func)(*args, **options)


# -- batch normalisation over all replicas, and recurrent layers -------------------------------------------------------


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
    x, weight, bias = draws(4, 2, *spatial) + 50, shared(2, seed=2), shared(2, seed=3)
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("build", "func"),
    [
        (nn.LSTMCell, torch.lstm_cell),
        (nn.GRUCell, torch.gru_cell),
        (nn.RNNCell, torch.rnn_tanh_cell),
        (lambda *a, **k: nn.RNNCell(*a, **k, nonlinearity="relu"), torch.rnn_relu_cell),
    ],
)
def test_recurrent_cells(build: Callable[..., nn.Module], func: Any, bias: bool) -> None:
    torch.manual_seed(0)
    cell = build(3, 4, bias=bias).double()
    leaves = {name: one.detach() for name, one in cell.named_parameters()}
    x, h, c = draws(2, 3), draws(2, 4, seed=1), draws(2, 4, seed=2)
    if func is torch.lstm_cell:
        require(same(func, x, h, c, leaves=leaves, call=lambda f, x, h, c, **p: torch.stack(f(x, (h, c), *p.values()))))
    else:
        require(same(func, x, h, leaves=leaves, call=lambda f, x, h, **p: f(x, h, *p.values())))
    with Recorded() as recorded:
        torch.vmap(cell)(x)
    assert recorded.used == [func]


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN, lambda *a: nn.RNN(*a, nonlinearity="relu")])
def test_recurrent_layers_are_refused(build: Callable[..., nn.Module]) -> None:
    layer = build(3, 4).double()
    name = type(layer).__name__
    with Recorded(), pytest.raises(UnsupportedError, match=rf"{name} cannot run.*global_view=True.*{name}Cell"):
        torch.vmap(layer)(draws(5, 2, 3))


# -- who is called ----------------------------------------------------------------------------------------------------

IMAGES, SEQUENCES, VOLUMES = (draws(2, 4, 6, 6),), (draws(2, 4, 6),), (draws(1, 2, 2, 2, 2),)
SCORES = draws(2, 5), indices(5, 2)

MODULES: list[tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], Any]] = [
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
    (lambda: nn.ReLU(), SEQUENCES, F.relu),
    (lambda: nn.PReLU(), SEQUENCES, F.prelu),
    (lambda: nn.Conv1d(4, 4, 3, groups=2), SEQUENCES, F.conv1d),
    (lambda: nn.Conv2d(4, 4, 3, groups=4, padding_mode="circular", padding=1), IMAGES, F.conv2d),
    (lambda: nn.Conv3d(2, 2, 1, groups=2), VOLUMES, F.conv3d),
    (lambda: nn.ConvTranspose1d(4, 4, 3, groups=2), SEQUENCES, F.conv_transpose1d),
    (lambda: nn.ConvTranspose2d(4, 4, 3, groups=2), IMAGES, F.conv_transpose2d),
    (lambda: nn.ConvTranspose3d(2, 2, 1, groups=2), VOLUMES, F.conv_transpose3d),
    (lambda: nn.CrossEntropyLoss(), SCORES, F.cross_entropy),
    (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), SCORES, F.cross_entropy),
    (lambda: nn.NLLLoss(), SCORES, F.nll_loss),
    (lambda: nn.SmoothL1Loss(), (draws(2), draws(2, seed=1)), F.smooth_l1_loss),
    (
        lambda: nn.KLDivLoss(reduction="batchmean"),
        (draws(2, 3).log_softmax(-1), draws(2, 3, seed=1).softmax(-1)),
        F.kl_div,
    ),
    (lambda: nn.GaussianNLLLoss(), (draws(2), draws(2, seed=1), draws(2, seed=2).abs()), F.gaussian_nll_loss),
    (lambda: nn.EmbeddingBag(5, 2), (indices(5, 2, 3),), F.embedding_bag),
]


@pytest.mark.parametrize(("build", "inputs", "func"), MODULES)
def test_modules_meet_the_replacement(
    build: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...], func: Any
) -> None:
    torch.manual_seed(0)
    module = build().double()
    reference = copy.deepcopy(module)
    with Recorded() as recorded:
        y = torch.vmap(module)(*inputs)
    assert recorded.used == [func]
    close(y[0], reference(*(one[0] for one in inputs)), 1e-12)
    for own, wanted in zip(module.buffers(), reference.buffers(), strict=True):
        close(own, wanted, 1e-12)


def test_without_logical_devices_convolutions_stay() -> None:
    rewrites = Rewrites(first_replica)
    assert rewrites.find(F.conv2d) is None
    assert rewrites.find(F.layer_norm) is not None
    assert rewrites.find(torch.add) is None
    assert rewrites.find([]) is None
