"""What a step of `TPUStrategy` may ask of its tensors, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.tpu_beside_mirrored import fake_tpu
from torchstrat import PerReplica
from torchstrat.errors import UnsupportedError

X = PerReplica((torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) * 2))


def first(step: Callable[[torch.Tensor], Any]) -> Any:
    with fake_tpu(2) as strategy:
        return strategy.local_results(strategy.run(step, args=(X,)))[0]


def test_as_strided_by_what_it_means() -> None:
    wanted = X.values[0].as_strided((2, 2), (1, 2), 1)
    assert torch.equal(first(lambda x: (x * 1).as_strided((2, 2), (1, 2), 1)), wanted)
    assert torch.equal(first(lambda x: x.t().contiguous().as_strided((4,), (1,))), X.values[0].t().reshape(-1)[:4])


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.t().as_strided((2, 2), (1, 2)),
        lambda x: (x.t() * 2).as_strided((2, 2), (1, 2)),
        lambda x: x[:, :2].as_strided((2, 2), (1, 2)),
        lambda x: x.clone().resize_(2, 2),
    ],
)
def test_the_place_of_values_in_memory_is_refused_where_it_is_not_known(step: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"memory.*test_tpu_what_a_step_may_ask\.py:"):
        first(step)


@pytest.mark.parametrize("step", [lambda x: torch.tanh(torch.complex(x, x)), lambda x: torch.stft(x[0], 4)])
def test_complex_numbers_that_are_not_known_to_be_right(step: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match="in a step"):
        first(step)


def test_complex_numbers_by_their_parts() -> None:
    x = torch.complex(X.values[0], X.values[0] + 1)
    wanted = (x / x.conj()).abs() + (x + 1).angle() + x.mean().real
    seen = first(
        lambda real: (lambda z: (z / z.conj()).abs() + (z + 1).angle() + z.mean().real)(torch.complex(real, real + 1))
    )
    torch.testing.assert_close(seen, wanted)


def test_data_and_detach_in_place() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x * torch.ones(4, requires_grad=True)).detach_()
        assert not y.requires_grad
        return y + x.data * 2

    assert torch.equal(first(step), X.values[0] * 3)


def test_inference_mode_in_a_step_and_around_it() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x * 2

    assert torch.equal(first(step), X.values[0] * 2)
    with fake_tpu(2) as strategy, torch.inference_mode():
        assert torch.equal(strategy.local_results(strategy.run(step, args=(X,)))[0], X.values[0] * 2)


def test_a_mistake_of_the_users_is_said_in_pytorchs_words() -> None:
    with pytest.raises(RuntimeError, match="shape") as caught:
        first(lambda x: x.view(5, 5))
    assert not isinstance(caught.value, UnsupportedError)
