"""What a step of `TPUStrategy` cannot do: each thing done for real on the fake, and the error that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
from tests.support.tpu import Doubled, fake_tpu, here, own, rows_of, seen
from torchstrat.errors import (
    ContextError,
    InvalidArgumentError,
    ReplicaDivergenceError,
    StructureMismatchError,
    UnsupportedError,
    WrongTypeError,
)
from torchstrat.sharding.tpu import limits

X = own([[1.0, 2.0]], [[3.0, 0.0]])
UNEVEN = rows_of((2, 1), columns=2)
UNLIKE = [[1.0, 2.0], [4.0, 5.0]], [[3.0, 0.0]]
PLACE = rf".*{re.escape(__file__)}:\d+"
GLOBAL = ts.RunOptions(global_view=True)
OUTSIDE = torch.zeros(2)
WIDE = own(torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) * 2)


class DoubledForAll(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def with_backward_hook(made: Any, x: torch.Tensor) -> Any:
    made.linear.register_full_backward_hook(lambda *_: None)
    return made.linear(x)


def checkpointed(made: Any, x: torch.Tensor, use_reentrant: bool) -> Any:
    middle = lambda y: made.linear(y).tanh()  # noqa: E731
    return checkpoint(middle, x.requires_grad_(), use_reentrant=use_reentrant).sum().backward()


def trained_module(made: Any, x: torch.Tensor) -> Any:
    layer = nn.Linear(2, 2)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    inner.step()


def edited_by_parts(made: Any, x: torch.Tensor) -> Any:
    z = torch.complex(x, x)
    torch.view_as_real(z).mul_(0.5)
    return z


def backward_to_rows(made: Any, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    made.linear(x).sum().backward(inputs=[x])


def own_gradient_through_a_collective(made: Any, x: torch.Tensor) -> Any:
    """There is one backward pass for each replica then, and another replica's would have to wait for it."""
    loss = (made.linear(x) - here().all_reduce("mean", made.linear(x).mean(dim=0))).square().mean()
    return torch.autograd.grad(loss, made.linear.weight)


def filled_behind_a_view(made: Any, x: torch.Tensor) -> Any:
    total = torch.zeros(2, 3)
    kept = total.view(-1)
    total.normal_()
    return kept


def filled_in_part(made: Any, x: torch.Tensor) -> Any:
    torch.zeros(2, 3)[1:].normal_()


def edited_behind_a_detached_one(made: Any, x: torch.Tensor) -> Any:
    total = torch.zeros(3)
    kept = total.detach()
    total.add_(torch.randn(3))
    return kept


def dropout_after_a_seed(made: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return F.dropout(x)


def never(made: Any, x: Any) -> Any:
    pytest.fail("the step was called")


Step = Callable[[Any, torch.Tensor], Any]
"""Of what was made in the scope, and of a replica's rows."""

READS: dict[str, Step] = {
    r"\.item\(\)": lambda made, x: x.sum().item(),
    r"\.tolist\(\)": lambda made, x: x.tolist(),
    r"\.numpy\(\)": lambda made, x: x.numpy(),
    r"\.cpu\(\)": lambda made, x: x.cpu(),
    r"float\(tensor\)": lambda made, x: float((made.linear.bias * x).sum()),
    r"int\(tensor\)": lambda made, x: int(x.sum()),
    r"bool\(tensor\), as in `if tensor:`": lambda made, x: 1 if x.sum() > 0 else 2,
    r"using a tensor as an index": lambda made, x: [1, 2][x.sum().long()],
    r"making an array of a tensor": lambda made, x: np.asarray(x),
    r"printing a tensor": lambda made, x: repr(x),
    r"formatting a tensor": lambda made, x: f"{x.sum():.3f}",
    r"torch\.equal": lambda made, x: torch.equal(x, x),
    r"torch\.allclose": lambda made, x: torch.allclose(x, x),
    r"\.equal\(\)": lambda made, x: x.equal(x),
    r"\.allclose\(\)": lambda made, x: x.allclose(x),
}
UNSUPPORTED: dict[str, Step | list[Step]] = {
    r"(?s)nonzero.*torch\.where\(": [lambda made, x: torch.nonzero(x), lambda made, x: x.nonzero()],
    r"(?s)masked_select.*torch\.where\(": [
        lambda made, x: torch.masked_select(x, x > 0),
        lambda made, x: x.masked_select(x > 0),
    ],
    r"(?s)unique.*torch\.where\(": [lambda made, x: torch.unique(x), lambda made, x: x.unique()],
    r"(?s)dynamic shape.*torch\.where\(": lambda made, x: x[x > 0],
    r"retain_grad in a step.*register_hook": lambda made, x: made.linear(x).retain_grad(),
    # what cannot be mapped over replicas
    r"autograd\.Function that cannot run for all replicas.*global_view": lambda made, x: Doubled.apply(x),
    r"backward hooks of modules are made of such functions": with_backward_hook,
    r"checkpoint.*options=ts\.RunOptions\(global_view=True\)": [
        partial(checkpointed, use_reentrant=False),
        partial(checkpointed, use_reentrant=True),
    ],
    r"global_view=True": lambda made, x: made.lstm(x.unsqueeze(0)),
    r"inside a transform of torch\.func": lambda made, x: torch.func.grad(lambda y: here().all_reduce("sum", y).sum())(
        x
    ),
    # gradients
    r"only variables accumulate gradients": backward_to_rows,
    r"is_grads_batched=True": lambda made, x: torch.autograd.grad(
        made.linear(x).sum(), made.linear.weight, is_grads_batched=True
    ),
    r"autograd\.grad": own_gradient_through_a_collective,
    # random numbers and edits in place
    r"out of place": [filled_behind_a_view, filled_in_part, edited_behind_a_detached_one],
    rf"bernoulli with a generator{PLACE}": lambda made, x: torch.bernoulli(x / 9, generator=torch.Generator()),
    r"dropout after torch\.manual_seed": dropout_after_a_seed,
    r"Write it out of place: total = total": [
        lambda made, x: OUTSIDE.add_(x[0]),
        lambda made, x: OUTSIDE.copy_(x[0]),
        lambda made, x: OUTSIDE.__setitem__(0, x[0, 0]),
        lambda made, x: OUTSIDE.scatter_add_(0, torch.zeros(2, dtype=torch.long), x[0]),
    ],
    r"in a step": lambda made, x: torch.tanh(torch.complex(x, x)),
}
INVALID: dict[str, Step | list[Step]] = {
    r"backward needs a scalar.*shape \(1, 2\) on each replica": lambda made, x: made.linear(x).backward(),
    r"needs a scalar.*shape \(1, 2\)": lambda made, x: torch.autograd.grad(made.linear(x), x.requires_grad_()),
    r"finite number that is not negative": [
        lambda made, x: here().set_weight(-1.0),
        lambda made, x: here().set_weight(float("nan")),
        lambda made, x: here().set_weight(float("inf")),
    ],
    r"one number; got a tensor of shape \(1, 2\)": lambda made, x: here().set_weight(x),
}
MISTAKEN: dict[type[Exception], dict[str, Step | list[Step]]] = {
    WrongTypeError: {
        "all_reduce": [
            lambda made, x: here().all_reduce("sum", "text"),
            lambda made, x: here().all_reduce("sum", None),
            lambda made, x: here().all_reduce("sum", object()),
        ],
        "cannot combine bool tensors": lambda made, x: here().all_reduce("sum", x > 0),
    },
    ContextError: {
        r"run was called inside .*replica.* it works outside of run": lambda made, x: ts.get_strategy().run(int),
        r"reduce was called inside .*replica": lambda made, x: ts.get_strategy().reduce("sum", x),
    },
    RuntimeError: {"shape": lambda made, x: x.view(5, 5)},
    KeyError: {"mine": lambda made, x: {}["mine"]},
}
JOINED: list[Step] = [
    lambda made, x: here().all_reduce("sum", x),
    lambda made, x: here().all_gather(x, axis=0),
    lambda made, x: here().merge_call(lambda strategy: None),
]
IN_MEMORY: list[Step] = [
    lambda made, x: x.t().as_strided((2, 2), (1, 2)),
    lambda made, x: (x.t() * 2).as_strided((2, 2), (1, 2)),
    lambda made, x: x[:, :2].as_strided((2, 2), (1, 2)),
    lambda made, x: x.clone().resize_(2, 2),
]
"""The place of values, where it is not known."""
WITH_ROWS: list[tuple[type[Exception], str, Any, ts.RunOptions | None, Step]] = [
    (
        ReplicaDivergenceError,
        "all_reduce",
        UNEVEN,
        None,
        lambda _, x: here().all_reduce("sum", x.sum()) if len(x) == 2 else x,
    ),
    (UnsupportedError, "has made parameters and steps them", own(*UNLIKE), None, trained_module),
    (UnsupportedError, rf"checkpoint{PLACE}", own(*UNLIKE), None, partial(checkpointed, use_reentrant=False)),
    (StructureMismatchError, "the same structure", UNEVEN, None, lambda made, x: [x] * len(x)),
    (UnsupportedError, "momentum=None counts batches on the host", UNEVEN, None, lambda made, x: made.norm(x)),
    *((ContextError, "a step sees all replicas' rows already", X, GLOBAL, step) for step in JOINED),
    *((UnsupportedError, f"memory{PLACE}", WIDE, None, step) for step in IN_MEMORY),
    (UnsupportedError, "in a step", WIDE, None, lambda made, x: torch.stft(x[0], 4)),
    *((UnsupportedError, f"changes a copy{PLACE}", X, options, edited_by_parts) for options in (None, GLOBAL)),
    (UnsupportedError, f"changes a copy{PLACE}", X, None, lambda made, x: torch.view_as_real(x + 1j)[..., 0].mul_(2)),
    (UnsupportedError, "single numbers that differ between replicas", own(1.0, 2.0), GLOBAL, never),
    (UnsupportedError, "XLA_FLAGS", X, ts.RunOptions(xla_options={"a": 1}), never),
    (UnsupportedError, "tensors or numbers", ts.PerReplica(["a", "b"]), None, never),
    (UnsupportedError, "tensors or numbers", ts.PerReplica([object(), object()]), None, never),
    (UnsupportedError, "tensors or numbers", ts.PerReplica([None, 1]), None, never),
    (UnsupportedError, "strings", ts.PerReplica([np.array(["a"]), np.array(["b"])]), None, never),
    (InvalidArgumentError, r"components for replicas \[0\], not for replica 1", own(1.0), None, never),
]
REFUSALS = [
    *(
        (ContextError, rf"^{what} in a step needs a value that is not there yet{PLACE}", X, None, READS[what])
        for what in READS
    ),
    *(
        (error, message, X, None, step)
        for error, table in {UnsupportedError: UNSUPPORTED, InvalidArgumentError: INVALID, **MISTAKEN}.items()
        for message, steps in table.items()
        for step in (steps if isinstance(steps, list) else [steps])
    ),
    *WITH_ROWS,
]


@pytest.mark.parametrize(("error", "message", "rows", "options", "step"), REFUSALS, ids=[one[1] for one in REFUSALS])
def test_a_step_is_refused_and_the_strategy_goes_on(
    error: type[Exception], message: str, rows: Any, options: ts.RunOptions | None, step: Step
) -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            made = SimpleNamespace(linear=nn.Linear(2, 2), lstm=nn.LSTM(2, 3, batch_first=True))
            made.norm = ts.convert_sync_batchnorm(nn.BatchNorm1d(2, momentum=None, dtype=torch.float64))
        with pytest.raises(error, match=message) as raised:
            strategy.run(lambda x: step(made, x), args=(rows,), options=options)
        assert raised.type is error
        assert OUTSIDE.tolist() == [0, 0]
        assert not ts.has_strategy()
        assert strategy.run(lambda x: x.shape, args=(X,)) == (1, 2)


def test_a_function_of_ones_own_with_a_rule() -> None:
    with fake_tpu(2) as strategy:
        assert seen(strategy.run(DoubledForAll.apply, args=(X,))) == [[[2, 4]], [[6, 0]]]


def test_what_is_used_after_its_run() -> None:
    """A tensor of a run raises outside; in a later run it has the values of its own. A context has ended."""
    kept: list[Any] = []

    def recomputes(x: torch.Tensor) -> None:
        y = x.requires_grad_() * 1
        y.register_hook(lambda gradient: gradient * kept[0])
        y.sum().backward()

    with fake_tpu(2) as strategy:
        strategy.run(lambda x: kept.extend([x * 2, here()]), args=(X,))
        with pytest.raises(RuntimeError, match=r"outside of the run that it belongs to.*Return it from the step"):
            kept[0] + 1
        with pytest.raises(ContextError, match="not the running one"):
            strategy.run(lambda: kept[1].all_reduce("sum", torch.ones(1)))
        assert seen(strategy.run(lambda x: x + kept[0], args=(X,))) == [[[3, 6]], [[9, 0]]]
        strategy.run(recomputes, args=(X,))


# -- the translation of PyTorch's errors ----------------------------------------------------------------------------

FUSED = "Batching rule not implemented for aten::_thnn_fused_lstm_cell.out; We could not generate a fallback."


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (
            RuntimeError(FUSED),
            r"^aten::_thnn_fused_lstm_cell\.out cannot run for all replicas at once: torch\.vmap has",
        ),
        (RuntimeError("vmap: aten::add_(self, *extra_args) is not possible because …"), "aten::add_, an operation in"),
        (RuntimeError("vmap: It looks like you're attempting to use data-dependent control flow"), "torch.where"),
        (RuntimeError("vmap: It looks like you're calling .item() on a Tensor."), "the step needs the value"),
        (NotImplementedError("Could not run 'aten::x' with arguments from the 'SparseCPU' backend."), "sparse=False"),
        (AttributeError("module 'torch' has no attribute 'xla'"), "does not know these devices"),
        (RuntimeError("cannot have dynamic shapes here"), "Keep the shape and mask"),
        (RuntimeError("You tried to vmap over dim0, but"), "another replica's shape .You tried to vmap over dim0,"),
        (RuntimeError("a tensor may have escaped from a function"), "tensor was used outside of the run"),
        (
            RuntimeError("When vmap-ing torch.bincount, please provide"),
            "torch.bincount, would look|torch.bincount would",
        ),
        (
            RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            ),
            "modified by an inplace operation: write it out of place",
        ),
    ],
)
def test_functorchs_words_and_ours(error: Exception, meaning: str) -> None:
    explained = limits.explained(error)
    assert isinstance(explained, UnsupportedError)
    assert re.search(meaning, str(explained))
    assert f"(PyTorch said: {str(error)[:60]}" in str(explained)


@pytest.mark.parametrize(
    "error", [RuntimeError("anything else"), ValueError("dynamic shapes"), UnsupportedError("dynamic shapes")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert limits.explained(error) is error


def test_options_are_replaced_as_those_of_named_tuples_are() -> None:
    options = ts.RunOptions(global_view=True)
    replaced = options._replace(experimental_enable_dynamic_batch_size=False)
    assert replaced == ts.RunOptions(enable_dynamic_batch_size=False, global_view=True)
    assert options._replace(global_view=False) == ts.RunOptions()
