"""What is proven of operators on tensors that are cut: the cases, and the one source of the list in the docs.

A case makes arguments of generated shapes and calls operators with them. It is proven where values and gradients equal
those of plain PyTorch for every way to cut every tensor among its arguments (a sample of them where there are many).
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

Function = Callable[..., Any]
Arguments = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    operators: tuple[str, ...]
    """By the names of `torchstrat.sharding.dtensor.operators.operators()`."""
    make: Callable[[Shapes], tuple[Function, Arguments]]
    refuses: str = ""
    """Which ways to cut raise instead, in words; empty: none."""


class Shapes:
    """Sizes and numbers of one generated case."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(self._random.randrange(2**31))

    def size(self, *choices: int) -> int:
        return self._random.choice(choices or (2, 4, 6, 8))

    def dims(self, rank: int) -> list[int]:
        """Of which at least one divides by 4."""
        sizes = [self._random.choice((1, 2, 3, 4, 6, 8)) for _ in range(rank)]
        sizes[self._random.randrange(rank)] = 4
        return sizes

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._generator)

    def positive(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self._generator) + 0.5

    def indices(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self._generator)

    def choice(self, *values: Any) -> Any:
        return self._random.choice(values)


CASES: list[Case] = []


def case(*operators: str, name: str = "", refuses: str = "") -> Callable[[Any], Any]:
    def add(make: Callable[[Shapes], tuple[Function, Arguments]]) -> Any:
        CASES.append(Case(name or operators[0], operators, make, refuses))
        return make

    return add


def call(
    operators: str, *functions: Any, of: list[tuple[int, ...]] | None = None, name: str = "", refuses: str = ""
) -> None:
    """Any of ``functions``, or of (function, shapes of its arguments), on normal numbers. ``of``: these shapes."""

    def make(shapes: Shapes) -> tuple[Function, Arguments]:
        chosen = shapes.choice(*functions)
        function, dims = chosen if isinstance(chosen, tuple) else (chosen, of)
        return function, [shapes.normal(*one) for one in dims]

    case(*operators.split(), name=name, refuses=refuses)(make)


# -- functions of elements -----------------------------------------------------------------------------------------

_SIGNED = (
    *("abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "logical_not", "neg"),
    *("negative", "nan_to_num", "round", "sigmoid", "sign", "sin", "square", "tanh", "elu", "gelu", "hardsigmoid"),
    *("hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu", "relu6", "selu", "silu", "softplus"),
    *(
        "softsign",
        "celu",
        "hardshrink",
        "softshrink",
        "tanhshrink",
        "bfloat16",
        "bool",
        "clone",
        "contiguous",
        "detach",
        "double",
        "float",
        "half",
        "int",
        "long",
    ),
)
_POSITIVE = ("log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sqrt")


def _called(name: str) -> Function:
    function = getattr(torch, name, None)
    if not callable(function) or name in ("bfloat16", "bool", "double", "float", "half", "int", "long"):
        function = getattr(F, name, None) or getattr(torch.Tensor, name)
    return function


def _unary(name: str, shapes: Shapes) -> tuple[Function, Arguments]:
    dims = shapes.dims(shapes.size(1, 2, 3))
    return _called(name), [shapes.positive(*dims) if name in _POSITIVE else shapes.normal(*dims)]


for _name in (*_SIGNED, *_POSITIVE):
    case(_name)(partial(_unary, _name))

_OF_TORCH = (
    *("add", "atan2", "div", "divide", "eq", "fmod", "ge", "greater", "greater_equal", "gt", "le", "less"),
    *("less_equal", "logical_and", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "multiply"),
    *("ne", "not_equal", "pow", "remainder", "rsub", "sub", "subtract", "true_divide"),
)
_PAIRS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _OF_TORCH},
    "__rsub__": lambda x, y: 1 - x + y,
    "__rdiv__": lambda x, y: torch.Tensor.__rdiv__(x, 2.0) + y,
    "__rtruediv__": lambda x, y: 1 / x + y,
    "__pow__": lambda x, y: x**2 + y**x,
    "__rpow__": lambda x, y: 2**x + y,
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "truediv")},
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "masked_fill": lambda x, y: x.masked_fill(y.detach() > 1, 0.25) * y,
    "where": lambda x, y: torch.where(x.detach() > 1, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "clamp": lambda x, y: x.clamp(min=0.7) * y.clamp(0.6, 1.2),
    "clip": lambda x, y: x.clip(0.7) * y,
    "type_as": lambda x, y: x.type_as(y) * y,
    "cpu": lambda x, y: x.cpu() * y,
    "view_as": lambda x, y: x.view_as(x) * y,
    "to": lambda x, y: x.to(torch.float32).to(y) * y.to("cpu"),
}


def _pair(name: str, shapes: Shapes) -> tuple[Function, Arguments]:
    dims = shapes.dims(3)
    other = [size if shapes.choice(True, True, False) else 1 for size in dims][shapes.size(0, 1, 2) :]
    return _PAIRS[name], [shapes.positive(*dims), shapes.positive(*other)]


for _name in _PAIRS:
    case(_name)(partial(_pair, _name))


@case("add", "mul", "sub", name="a tensor used twice, and scalars")
def _twice(shapes: Shapes) -> tuple[Function, Arguments]:
    dims = shapes.dims(2)
    return lambda x, y: (x * y + x.sin() * 3 - y) * x, [shapes.normal(*dims), shapes.normal(*dims)]


# -- sums of products, attention and embedding ---------------------------------------------------------------------


@case("linear")
def _linear(shapes: Shapes) -> tuple[Function, Arguments]:
    batch = [shapes.size(1, 3, 4) for _ in range(shapes.size(0, 1, 2))]
    inputs, outputs = shapes.size(), shapes.size()
    return F.linear, [shapes.normal(*batch, inputs), shapes.normal(outputs, inputs), shapes.normal(outputs)]


call("linear", F.linear, of=[(4, 8), (4, 8)], name="linear without bias")


@case("matmul", "mm", "__matmul__")
def _matmul(shapes: Shapes) -> tuple[Function, Arguments]:
    rows, inner, columns = shapes.size(3, 4), shapes.size(), shapes.size()
    function = shapes.choice(torch.matmul, torch.mm, operator.matmul)
    return function, [shapes.normal(rows, inner), shapes.normal(inner, columns)]


@case("matmul", "bmm", "__rmatmul__", name="matmul of batches")
def _matmul_batches(shapes: Shapes) -> tuple[Function, Arguments]:
    batch, heads = shapes.size(1, 4), shapes.size(3, 4)
    right = [shapes.choice(1, batch), heads, 8, 4][shapes.size(0, 1) :]
    function = shapes.choice(torch.matmul, lambda x, y: torch.Tensor.__rmatmul__(y, x))
    return function, [shapes.normal(batch, heads, 4, 8), shapes.normal(*right)]


call("bmm", torch.bmm, of=[(4, 3, 8), (4, 8, 4)])
call("matmul", (torch.matmul, [(4, 8), (8,)]), (torch.matmul, [(8,), (8, 4)]), name="matmul with vectors")


@case("scaled_dot_product_attention")
def _attention(shapes: Shapes) -> tuple[Function, Arguments]:
    batch, heads, queries, keys = shapes.size(1, 2, 4), 4, shapes.size(), shapes.size()
    causal = shapes.choice(True, False)
    tensors = [shapes.normal(batch, heads, queries, 8), shapes.normal(batch, heads, keys, 8)]
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    return function, [*tensors, shapes.normal(batch, heads, keys, 4)]


call(
    "scaled_dot_product_attention",
    *(
        (
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3),
            [(2, 4, 4, 8), (2, 4, 8, 8), (2, 4, 8, 4), mask],
        )
        for mask in ((4, 8), (1, 4, 4, 8), (2, 1, 1, 8))
    ),
    name="attention with a mask and a scale",
)
call(
    "scaled_dot_product_attention",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.4, True),
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.4, False),
    of=[(2, 4, 4, 8)] * 3,
    name="attention with dropout",
)
call(
    "scaled_dot_product_attention",
    *(
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [(2, 8, 4, 4), (2, heads, 8, 4), (2, heads, 8, 4)],
        )
        for heads in (2, 4)
    ),
    name="attention whose heads share keys",
)


@case("embedding")
def _embedding(shapes: Shapes) -> tuple[Function, Arguments]:
    padding = shapes.choice(None, 2, -1)
    function = lambda i, w: F.embedding(i, w, padding)  # noqa: E731
    return function, [shapes.indices(8, 4, shapes.size(1, 4)), shapes.normal(8, 4)]


# -- reductions and softmax ----------------------------------------------------------------------------------------


def _reduction(name: str, shapes: Shapes) -> tuple[Function, Arguments]:
    function = getattr(torch, name)
    dim, keepdim = shapes.choice(0, 1, -1, (0, 2), (1, 2)), shapes.choice(True, False)
    if shapes.choice(True, False, False) or (name in ("any", "all") and not isinstance(dim, int)):
        chosen = function
    else:
        chosen = lambda x: function(x, dim, keepdim=keepdim)  # noqa: E731
    if name == "count_nonzero":
        chosen = lambda x: torch.count_nonzero(x.round(), dim)  # noqa: E731
    numbers = shapes.normal(4, shapes.size(3, 4), shapes.size(4, 8)).mul(1.5)
    is_complex = name in ("var", "std") and shapes.choice(True, False)
    return chosen, [torch.complex(numbers, numbers.flip(0)) if is_complex else numbers]


for _name in ("sum", "mean", "amax", "amin", "var", "std", "any", "all", "count_nonzero"):
    case(_name)(partial(_reduction, _name))


@case("amax", "amin", "max", "min", name="extremes with ties")
def _ties(shapes: Shapes) -> tuple[Function, Arguments]:
    function = shapes.choice(
        lambda x: torch.amax(x, 0), lambda x: x.amin((0, 1), True), lambda x: x.max() + x.min(), lambda x: x.amax()
    )
    return function, [shapes.normal(4, 8).round()]


@case("amax", "amin", "max", "min", "any", "all", name="extremes of other numbers")
def _whole_extremes(shapes: Shapes) -> tuple[Function, Arguments]:
    function = shapes.choice(
        *(lambda x, name=name: getattr(x, name)() for name in ("amax", "amin", "max", "min", "any", "all")),
        lambda x: (x.amax(0), x.amin(1, True)),
    )
    numbers = shapes.choice(torch.tensor([0, 1, 2, 255], dtype=torch.uint8), torch.tensor([False, True, True, True]))
    whole = shapes.choice(numbers, torch.tensor([-(2**63), -1, 0, 7]))
    return function, [whole[shapes.indices(4, 4, 8)]]


@case("logsumexp")
def _logsumexp(shapes: Shapes) -> tuple[Function, Arguments]:
    dim, keepdim = shapes.choice(0, 1, (0, 2)), shapes.choice(True, False)
    return lambda x: torch.logsumexp(x, dim, keepdim), [shapes.normal(4, 4, 3) * 5]


@case("linalg_vector_norm", "_foreach_norm")
def _norm(shapes: Shapes) -> tuple[Function, Arguments]:
    order, dim = shapes.choice(1, 2, 3, math.inf, -math.inf), shapes.choice(None, 0, (0, 1))
    function = shapes.choice(lambda x: torch.linalg.vector_norm(x, order, dim), lambda x: torch._foreach_norm([x])[0])
    numbers = shapes.choice(shapes.positive(4, 8), torch.complex(shapes.normal(4, 8), shapes.positive(4, 8)))
    return function, [numbers]


@case("normalize")
def _normalize(shapes: Shapes) -> tuple[Function, Arguments]:
    order, dim = shapes.choice(1, 2, 2, 3), shapes.choice(0, 1, -1)
    return lambda x: F.normalize(x, order, dim), [shapes.normal(4, 8).round()]


@case("norm", "linalg_norm")
def _norm_by_its_other_names(shapes: Shapes) -> tuple[Function, Arguments]:
    order, dim, keepdim = shapes.choice(1, 2, 3, math.inf), shapes.choice(0, 1, -1), shapes.choice(True, False)
    function = shapes.choice(
        lambda x: x.norm() * x.norm(order),
        lambda x: torch.norm(x, order, dim, keepdim),
        lambda x: x.norm(dim=(0, 1), keepdim=keepdim),
        lambda x: torch.linalg.norm(x) * torch.linalg.norm(x, ord=order, dim=dim, keepdim=keepdim),
        lambda x: torch.linalg.norm(x, "fro"),
    )
    return function, [shapes.normal(4, 8).round()]


@case("argmax", "argmin", "argsort", "kthvalue", "max", "min", "sort", "topk", name="places in an order")
def _places(shapes: Shapes) -> tuple[Function, Arguments]:
    dim, keepdim = shapes.choice(0, 1, -1), shapes.choice(True, False)
    function = shapes.choice(
        lambda x: (x.argmax(dim, keepdim), x.argmin(), torch.argmax(x, dim=dim)),
        lambda x: (*torch.sort(x, dim, True), x.argsort(), *x.sort(stable=True, dim=dim)),
        lambda x: (*x.topk(2, dim), *torch.kthvalue(x, 3, dim, keepdim), *x.topk(2)),
        lambda x: (*x.max(dim, keepdim), *torch.min(x, dim=dim), x.max(dim).values),
    )
    return function, [shapes.normal(4, 8)]


@case("flip")
def _flip(shapes: Shapes) -> tuple[Function, Arguments]:
    function = shapes.choice(lambda x: x.flip(0), lambda x: torch.flip(x, (0, -1)), lambda x: x.flip(1, 2))
    return function, [shapes.normal(4, 4, 8)]


@case("cumprod", "cumsum", "glu", "logcumsumexp", "prod", "softmin", name="along a dimension")
def _along(shapes: Shapes) -> tuple[Function, Arguments]:
    dim, keepdim = shapes.choice(0, 1, -1), shapes.choice(True, False)
    function = shapes.choice(
        lambda x: x.cumsum(dim) * torch.cumprod(x, dim=dim),
        lambda x: x.logcumsumexp(dim) * F.softmin(x, dim=dim),
        lambda x: (x.prod(), torch.prod(x, dim, keepdim), x.prod(dim=dim)),
        lambda x: F.glu(x, dim) * F.glu(x, dim=dim),
    )
    return function, [shapes.normal(*shapes.dims(1), 4, 8)]


@case("full_like", "ones_like", "rand_like", "randn_like", "zeros_like", name="made like another")
def _made_like(shapes: Shapes) -> tuple[Function, Arguments]:
    function = shapes.choice(
        lambda x: x + torch.zeros_like(x) + torch.full_like(x, 0.5, dtype=torch.float32),
        lambda x: x * torch.ones_like(x),
        lambda x: x * torch.rand_like(x) + torch.randn_like(x),
    )
    return function, [shapes.normal(*shapes.dims(2))]


@case("prelu", "threshold")
def _slopes(shapes: Shapes) -> tuple[Function, Arguments]:
    channels = shapes.choice(1, 4)
    return lambda x, w: F.prelu(x, w) * F.threshold(x, 0.1, 0.3), [shapes.normal(4, 4, 8), shapes.normal(channels)]


@case("softmax", "log_softmax")
def _softmax(shapes: Shapes) -> tuple[Function, Arguments]:
    function, dim = shapes.choice(torch.softmax, torch.log_softmax, F.softmax, F.log_softmax), shapes.choice(0, 1, -1)
    return lambda x: function(x, dim=dim), [shapes.normal(*shapes.dims(2), 4) * 4]


# -- losses and normalisation --------------------------------------------------------------------------------------


@case("cross_entropy")
def _cross_entropy(shapes: Shapes) -> tuple[Function, Arguments]:
    batch, classes, places = shapes.size(), shapes.size(), shapes.choice((), (4,))
    options = {"reduction": shapes.choice("mean", "sum", "none"), "label_smoothing": shapes.choice(0.0, 0.2)}
    options |= {"weight": shapes.choice(None, shapes.positive(classes)), "ignore_index": shapes.choice(-100, 1)}
    target = shapes.indices(classes, batch, *places)
    return partial(F.cross_entropy, **options), [shapes.normal(batch, classes, *places) * 3, target]


@case("cross_entropy", name="cross entropy with probabilities")
def _cross_entropy_probabilities(shapes: Shapes) -> tuple[Function, Arguments]:
    options = {"reduction": shapes.choice("mean", "sum", "none"), "label_smoothing": shapes.choice(0.0, 0.2)}
    options["weight"] = shapes.choice(None, shapes.positive(8))
    return partial(F.cross_entropy, **options), [shapes.normal(4, 8), torch.softmax(shapes.normal(4, 8), 1)]


@case("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
def _elementwise_losses(shapes: Shapes) -> tuple[Function, Arguments]:
    function = shapes.choice(F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
    reduction = shapes.choice("mean", "sum", "none")
    return lambda x, y: function(x, y, reduction=reduction), [shapes.normal(4, 8), shapes.positive(4, 8) / 2]


@case("layer_norm")
def _layer_norm(shapes: Shapes) -> tuple[Function, Arguments]:
    count, dims = shapes.choice(1, 2), [shapes.size(3, 4), 4, 8]
    function = lambda x, w, b: F.layer_norm(x, dims[-count:], w, b)  # noqa: E731
    return function, [shapes.normal(*dims), shapes.normal(*dims[-count:]), shapes.normal(*dims[-count:])]


@case("rms_norm")
def _rms_norm(shapes: Shapes) -> tuple[Function, Arguments]:
    count, eps, dims = shapes.choice(1, 2), shapes.choice(None, 1e-3), [shapes.size(3, 4), 4, 8]
    return lambda x, w: F.rms_norm(x, dims[-count:], w, eps), [shapes.normal(*dims), shapes.normal(*dims[-count:])]


@case("group_norm", refuses="channels cut into parts that do not divide the number of groups")
def _group_norm(shapes: Shapes) -> tuple[Function, Arguments]:
    groups = shapes.choice(1, 2, 4)
    function = lambda x, w, b: F.group_norm(x, groups, w, b)  # noqa: E731
    return function, [shapes.normal(4, 8, 4, shapes.size(1, 4)), shapes.normal(8), shapes.normal(8)]


@case("batch_norm", refuses="a cut along channels")
def _batch_norm(shapes: Shapes) -> tuple[Function, Arguments]:
    training = shapes.choice(True, True, False)
    return _normalized(training), [shapes.normal(4, 3, 4, 4), shapes.normal(3), shapes.normal(3)]


@case("batch_norm", name="batch_norm of no rows", refuses="a cut along channels")
def _batch_norm_of_none(shapes: Shapes) -> tuple[Function, Arguments]:
    return _normalized(True), [shapes.normal(0, 3, 4, 4), shapes.normal(3), shapes.normal(3)]


def _normalized(training: bool) -> Function:
    def normalized(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
        return F.batch_norm(x, mean, var, w, b, training), mean, var

    return normalized


@case("dropout")
def _dropout(shapes: Shapes) -> tuple[Function, Arguments]:
    training = shapes.choice(True, True, False)
    return lambda x: F.dropout(x, 0.3, training) * 2, [shapes.normal(*shapes.dims(3))]


# -- shapes --------------------------------------------------------------------------------------------------------


@case("reshape", "view", refuses="a dimension that is cut and is not the slowest of those it is joined with")
def _reshape(shapes: Shapes) -> tuple[Function, Arguments]:
    new = shapes.choice((32, 8), (4, 8, 8), (4, -1), (8, 4, 8), (4, 1, 8, 2, 4), (256,), (16, 16))
    return shapes.choice(lambda x: x.reshape(new), lambda x: x.view(*new)), [shapes.normal(4, 8, 8)]


call(
    "flatten unflatten",
    lambda x: x.flatten(1),
    lambda x: torch.flatten(x),
    lambda x: x.unflatten(1, (4, -1)),
    of=[(4, 8, 4)],
    refuses="as reshape",
)
call(
    "transpose permute swapaxes swapdims t Tensor.T Tensor.mT",
    lambda x: x.transpose(0, -1),
    lambda x: x.permute(2, 0, 1),
    lambda x: torch.permute(x, (1, 2, 0)),
    lambda x: x.swapaxes(0, 1),
    lambda x: torch.swapdims(x, 1, 2),
    lambda x: x.mT,
    lambda x: x.select(1, 0).t(),
    lambda x: x.select(1, 0).T,
    of=[(4, 1, 8)],
    name="transpose and permute",
)
call(
    "unsqueeze squeeze expand",
    lambda x: x.unsqueeze(1) * 2,
    lambda x: x.unsqueeze(-1),
    lambda x: x.squeeze(),
    lambda x: x.squeeze(1),
    lambda x: x.squeeze((0, 1)),
    lambda x: x.expand(-1, 3, -1),
    lambda x: x.expand(2, 4, 5, 8),
    of=[(4, 1, 8)],
)
call(
    "chunk split narrow select __getitem__",
    lambda x: x.chunk(2, dim=1),
    lambda x: torch.chunk(x, 2, 2),
    lambda x: torch.split(x, 4, dim=2),
    lambda x: x.split([2, 2], 1),
    lambda x: x.narrow(1, 1, 2),
    lambda x: x.select(1, -1),
    lambda x: x[:, 1],
    lambda x: x[:, :, None, 2:5],
    lambda x: x[..., 0, :],
    lambda x: x[1],
    of=[(4, 4, 8)],
    refuses="along a dimension that is cut",
)
call(
    "cat concat concatenate stack",
    (lambda x, y: torch.cat([x, y], 1), [(4, 8), (4, 3)]),
    (lambda x, y: torch.cat([x, y], 1), [(4, 8), (4, 3)]),
    lambda x, y: torch.cat([x, y], 1),
    lambda x, y: torch.concat((x, y), dim=0),
    lambda x, y: torch.concatenate((x, y), -1),
    lambda x, y: torch.stack([x, y], 1),
    lambda x, y: torch.stack([x, y], -1),
    of=[(4, 8), (4, 8)],
    refuses="cat along a dimension that is cut",
)


# -- images --------------------------------------------------------------------------------------------------------

_BANDS = "bands that do not make the same band of the result (see torchstrat.sharding.dtensor.operators.contraction)"


@case("conv2d", refuses=_BANDS)
def _conv2d(shapes: Shapes) -> tuple[Function, Arguments]:
    ways = [(3, 1, 1, 1), (5, 1, 2, 1), (1, 1, 0, 1), (2, 2, 0, 1), (3, 2, 1, 1)]
    kernel, *how = shapes.choice(*ways, (3, 1, "same", 1), (2, 1, "same", 1), (3, 1, 2, 2))
    batch, image = shapes.choice([4], [1], []), shapes.choice((8, 8), (16, 8), (8, 4))
    function = lambda x, w, b: F.conv2d(x, w, b, *how)  # noqa: E731
    return function, [shapes.normal(*batch, 4, *image), shapes.normal(8, 4, kernel, kernel), shapes.normal(8)]


call(
    "conv2d",
    *(
        (partial(F.conv2d, bias=None, padding=1, groups=groups), [(2, 4, 8, 8), (8, 4 // groups, 3, 3)])
        for groups in (2, 4)
    ),
    refuses=_BANDS,
    name="conv2d in groups",
)
call(
    "conv1d conv3d",
    (partial(F.conv1d, padding=1), [(2, 4, 8), (4, 4, 3), (4,)]),
    (partial(F.conv3d, padding=1), [(1, 3, 4, 8, 4), (4, 3, 3, 3, 3), (4,)]),
    refuses=_BANDS,
)


def _pool(kind: str, shapes: Shapes) -> tuple[Function, Arguments]:
    rank = shapes.choice(1, 2, 3)
    how = shapes.choice((2, None, 0), (3, 1, 1), (3, 2, 1), (2, 2, 0))
    if kind == "adaptive_avg":
        how = (shapes.choice(1, 1, 2),)
    function = getattr(F, f"{kind}_pool{rank}d")
    return lambda x: function(x, *how), [shapes.normal(4, 4, *[8, 8, 4][:rank])]


for _kind in ("avg", "max", "adaptive_avg"):
    _refuses = "averages of other sizes than 1 over what is cut" if _kind == "adaptive_avg" else _BANDS
    case(*(f"{_kind}_pool{rank}d" for rank in (1, 2, 3)), refuses=_refuses)(partial(_pool, _kind))


# -- gradients -----------------------------------------------------------------------------------------------------

_WRITTEN = (
    *("abs", "add", "addcdiv", "addcmul", "atan2", "ceil", "clamp", "clip", "copy", "cos", "div", "divide", "elu"),
    *("eq", "erf", "exp", "expm1", "fill", "floor", "fmod", "ge", "greater", "greater_equal", "gt", "hardtanh"),
    *("le", "leaky_relu", "lerp", "less", "less_equal", "log", "log10", "log1p", "log2", "logical_and"),
    *("logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "mul", "multiply", "nan_to_num", "ne"),
    *("neg", "negative", "not_equal", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "selu", "sigmoid"),
    *("sign", "sin", "sqrt", "square", "sub", "subtract", "tanh", "true_divide", "zero"),
)
_WRITTEN_LISTS = ("abs", "add", "addcdiv", "addcmul", "copy", "div", "lerp", "mul", "neg", "pow", "sqrt", "sub", "zero")

PROVEN_ELSEWHERE = dict.fromkeys(
    (
        *(f"{name}_" for name in _WRITTEN),
        *(f"_foreach_{name}_" for name in _WRITTEN_LISTS),
        *("__iadd__", "__idiv__", "__imul__", "__isub__", "Tensor.data"),
    ),
    "written to variables and their gradients",
)
"""Operators that change variables, their averages and gradients → what they are proven as, in tests/matrix."""


def ways_to_cut(shape: torch.Size, sizes: tuple[int, ...]) -> Iterator[tuple[int | None, ...]]:
    """All cuts of a tensor over axes of ``sizes`` that divide it."""

    def extend(cut: tuple[int | None, ...]) -> Iterator[tuple[int | None, ...]]:
        if len(cut) == len(sizes):
            yield cut
            return
        for dim in (None, *range(len(shape))):
            longer = (*cut, dim)
            parts = math.prod(size for size, own in zip(sizes, longer, strict=False) if own == dim)
            if dim is None or (shape[dim] > 1 and shape[dim] % parts == 0):
                yield from extend(longer)

    yield from extend(())
