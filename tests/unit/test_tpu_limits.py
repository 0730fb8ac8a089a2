"""What a recorded step cannot do: each thing done for real on the fake, and the error that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.tpu_beside_mirrored import fake_tpu, own
from torchstrat.errors import ContextError, UnsupportedError
from torchstrat.tpu import limits

X = own([[1.0, 2.0]], [[3.0, 0.0]])

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    r"\.item\(\)": lambda x: x.sum().item(),
    r"\.tolist\(\)": lambda x: x.tolist(),
    r"\.numpy\(\)": lambda x: x.numpy(),
    r"\.cpu\(\)": lambda x: x.cpu(),
    r"float\(tensor\)": lambda x: float(x.sum()),
    r"int\(tensor\)": lambda x: int(x.sum()),
    r"bool\(tensor\), as in `if tensor:`": lambda x: 1 if x.sum() > 0 else 2,
    r"using a tensor as an index": lambda x: [1, 2][x.sum().long()],
    r"making an array of a tensor": lambda x: np.asarray(x),
    r"printing a tensor": lambda x: repr(x),
    r"formatting a tensor": lambda x: f"{x.sum():.3f}",
    r"torch\.equal": lambda x: torch.equal(x, x),
    r"torch\.allclose": lambda x: torch.allclose(x, x),
    r"\.equal\(\)": lambda x: x.equal(x),
    r"\.allclose\(\)": lambda x: x.allclose(x),
}


@pytest.mark.parametrize("what", READS)
def test_reading_a_value(what: str) -> None:
    with fake_tpu(2) as strategy:
        with pytest.raises(ContextError, match=rf"^{what} in a step needs a value that is not there yet") as raised:
            strategy.run(READS[what], args=(X,))
        assert "test_tpu_limits.py:" in str(raised.value)  # the line of the step
        assert strategy.run(lambda x: x.shape, args=(X,)) == (1, 2)


@pytest.mark.parametrize(
    ("what", "step"),
    [
        ("nonzero", lambda x: torch.nonzero(x)),
        ("nonzero", lambda x: x.nonzero()),
        ("masked_select", lambda x: torch.masked_select(x, x > 0)),
        ("masked_select", lambda x: x.masked_select(x > 0)),
        ("unique", lambda x: torch.unique(x)),
        ("unique", lambda x: x.unique()),
        ("dynamic shape", lambda x: x[x > 0]),
    ],
)
def test_shapes_that_depend_on_values(what: str, step: Callable[[torch.Tensor], Any]) -> None:
    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match=rf"(?s){what}.*torch\.where\("):
        strategy.run(step, args=(X,))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


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


def test_functions_of_ones_own() -> None:
    with fake_tpu(2) as strategy:
        with pytest.raises(UnsupportedError, match=r"autograd\.Function that cannot run for all replicas.*global_view"):
            strategy.run(Doubled.apply, args=(X,))
        assert [one.tolist() for one in strategy.run(DoubledForAll.apply, args=(X,)).values] == [[[2, 4]], [[6, 0]]]


def test_backward_hooks_of_modules() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1)
        layer.register_full_backward_hook(lambda *_: None)
        with pytest.raises(UnsupportedError, match="backward hooks of modules are made of such functions"):
            strategy.run(layer, args=(X,))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    def step(x: torch.Tensor) -> None:
        checkpoint(layer, x.requires_grad_(), use_reentrant=use_reentrant).sum().backward()

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        with pytest.raises(UnsupportedError, match=r"checkpoint.*options=ts\.RunOptions\(global_view=True\)"):
            strategy.run(step, args=(X,))


def test_a_tensor_that_is_used_after_its_run() -> None:
    kept: list[torch.Tensor] = []

    def recomputes(x: torch.Tensor) -> None:
        y = x.requires_grad_() * 1
        y.register_hook(lambda gradient: gradient * kept[0])
        y.sum().backward()

    with fake_tpu(2) as strategy:
        strategy.run(lambda x: kept.append(x * 2), args=(X,))
        with pytest.raises(RuntimeError, match=r"outside of the run that it belongs to.*Return it from the step"):
            kept[0] + 1
        # In a later run it is a tensor of the replicas with the values of its own run.
        result = strategy.run(lambda x: x + kept[0], args=(X,))
        assert [one.tolist() for one in result.values] == [[[3, 6]], [[9, 0]]]
        strategy.run(recomputes, args=(X,))


def test_operations_that_cannot_be_mapped() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.LSTM(2, 3, batch_first=True)
        with pytest.raises(UnsupportedError, match=r"global_view=True"):
            strategy.run(layer, args=(own([[[1.0, 2.0]]], [[[3.0, 4.0]]]),))


# -- the translation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (
            RuntimeError(
                "Batching rule not implemented for aten::_thnn_fused_lstm_cell.out; We could not generate a fallback."
            ),
            r"^aten::_thnn_fused_lstm_cell\.out cannot run for all replicas at once: torch\.vmap has no rule",
        ),
        (RuntimeError("vmap: aten::add_(self, *extra_args) is not possible because …"), "aten::add_, an operation in"),
        (RuntimeError("vmap: It looks like you're attempting to use data-dependent control flow"), "torch.where"),
        (RuntimeError("vmap: It looks like you're calling .item() on a Tensor."), "the step needs the value"),
        (NotImplementedError("Could not run 'aten::x' with arguments from the 'SparseCPU' backend."), "sparse=False"),
        (AttributeError("module 'torch' has no attribute 'xla'"), "does not know these devices"),
        (RuntimeError("cannot have dynamic shapes here"), "Keep the shape and mask"),
    ],
)
def test_functorchs_words_and_ours(error: Exception, meaning: str) -> None:
    explained = limits.explained(error)
    assert isinstance(explained, UnsupportedError)
    with pytest.raises(UnsupportedError, match=meaning):
        raise explained
    assert f"(PyTorch said: {str(error)[:60]}" in str(explained)


@pytest.mark.parametrize(
    "error", [RuntimeError("anything else"), ValueError("dynamic shapes"), UnsupportedError("dynamic shapes")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert limits.explained(error) is error


def test_patterns_have_a_group_for_their_meaning() -> None:
    assert all(limit.pattern.count("(") and "{" in limit.meaning for limit in limits._LIMITS)
