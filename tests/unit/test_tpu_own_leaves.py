"""`TPUStrategy`: deep copies, and parameters in no module, that a step makes and adapts to its replica's rows.

Judged by a plain loop over the replicas' rows, which makes them for each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tpu import fake_tpu
from torchstrat.errors import ReplicaDivergenceError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:the step uses trainable variables:UserWarning")

Step = Callable[[torch.Tensor], torch.Tensor]


def layer(seed: int, *more: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 3), *more).double()
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=draw, dtype=torch.float64))
    return made


LAYER, NORMALIZED = layer(0), layer(1, nn.BatchNorm1d(3))
WEIGHT = nn.Parameter(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
LEAF = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)


def loss_of(f: Step, x: torch.Tensor) -> torch.Tensor:
    return (f(x) - 1).square().sum(dim=1).mean()


def trained(f: Step, tensors: Iterable[torch.Tensor], x: torch.Tensor, between: Any = lambda tensors: None) -> Any:
    tensors = list(tensors)
    optimizer = torch.optim.SGD(tensors, 0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss_of(f, x).backward()
        between(tensors)
        optimizer.step()
    return f(x).detach()


def parameter(x: torch.Tensor) -> torch.Tensor:
    made = nn.Parameter(WEIGHT.detach().clone())
    return trained(lambda x: x * made, [made], x)


def parameter_of_rows(x: torch.Tensor) -> torch.Tensor:
    made = nn.Parameter(x.mean(dim=0))
    return trained(lambda x: x * made, [made], x)


def copied(x: torch.Tensor) -> torch.Tensor:
    outcomes = []
    for one in (WEIGHT, LEAF):
        made = copy.deepcopy(one)
        outcomes.append(trained(lambda x, made=made: x * made, [made], x))
    return torch.cat(outcomes, dim=1)


def copy_of_a_copy(x: torch.Tensor) -> torch.Tensor:
    first = copy.deepcopy(LAYER)
    trained(first, first.parameters(), x)
    second = copy.deepcopy(first)
    return trained(second, second.parameters(), x)


def normalized(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(NORMALIZED)
    trained(made, made.parameters(), x)
    return made.eval()(x).detach()


def statistics_alone(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(NORMALIZED)
    made(x)
    return made.eval()(x).detach()


def with_a_parameter_of_its_own(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(LAYER)
    made[0].weight = nn.Parameter(made[0].weight.detach() * 0.5)
    return trained(made, made.parameters(), x)


def clipped(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(LAYER)
    clip = lambda tensors: nn.utils.clip_grad_norm_(tensors, 0.05, foreach=False)  # noqa: E731
    return trained(made, made.parameters(), x, clip)


def edited_gradient(x: torch.Tensor) -> torch.Tensor:
    made = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (made * x).sum().backward()
    assert made.grad is not None
    made.grad.mul_(2)
    (made * x * x).sum().backward()
    return x * made.grad


def given_gradient(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(WEIGHT)
    made.grad = x.sum(dim=0)
    (made * x * x).sum().backward()
    assert made.grad is not None
    return x * made.grad


def edited(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(LAYER)
    with torch.no_grad():
        made[0].weight.mul_(x.mean())
    gradients = torch.autograd.grad(loss_of(made, x), list(made.parameters()))
    for tensor, gradient in zip(made.parameters(), gradients, strict=True):
        tensor.data = tensor.data - gradient * 0.1
        tensor.data.sub_(gradient * 0.1)
    return made(x).detach()


def frozen(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(LAYER).requires_grad_(False)
    made[0].weight.copy_(made[0].weight * x.mean())
    return made(x)


def with_a_closure(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(NORMALIZED)[:1]  # and what is left out is not stepped
    optimizer = torch.optim.SGD(made.parameters(), 0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(made, x)
        loss.backward()
        return loss

    optimizer.step(closure)
    return made(x).detach()


def partly_used(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(NORMALIZED)
    return trained(made[0], made[0].parameters(), x) + trained_with(made, made[:1], x)


def trained_with(all_of_it: nn.Module, used: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(all_of_it.parameters(), 0.1)
    loss_of(used, x).backward()
    optimizer.step()
    return used(x).detach()  # type: ignore[no-any-return]


def in_transforms(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(LAYER)
    parameters = dict(made.named_parameters())
    gradients = torch.func.grad(lambda given: torch.func.functional_call(made, given, (x,)).square().mean())(parameters)
    with torch.no_grad():
        for name, one in parameters.items():
            one.sub_(gradients[name] * 0.1)
    return trained(torch.vmap(made), made.parameters(), x)


def hooked(x: torch.Tensor) -> torch.Tensor:
    made = copy.deepcopy(WEIGHT)
    made.register_hook(lambda gradient: gradient * 0.5)
    return trained(lambda x: x * made, [made], x)


STEPS: list[Step] = [
    *(parameter, parameter_of_rows, copied, copy_of_a_copy, normalized, statistics_alone, with_a_parameter_of_its_own),
    *(clipped, edited_gradient, given_gradient, edited, frozen, with_a_closure, partly_used, in_transforms, hooked),
]


@pytest.mark.parametrize("rows", [(2, 2), (3, 2)], ids=["as many rows", "other rows"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_a_step_makes_is_adapted_to_its_replicas_rows(step: Step, rows: tuple[int, ...]) -> None:
    batch = torch.rand(sum(rows), 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = torch.cat([step(part) for part in batch.split(list(rows))])
    with fake_tpu(2) as strategy:
        (given,) = strategy.distribute_dataset([batch])
        seen = strategy.gather(strategy.run(step, args=(given,)), axis=0)
    torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-10)


def test_a_copy_that_only_follows_is_one_for_all_and_may_be_kept() -> None:
    kept: dict[str, nn.Module] = {}
    with fake_tpu(2) as strategy:
        with strategy.scope():
            model = copy.deepcopy(LAYER)

        def step(x: torch.Tensor) -> torch.Tensor:
            followed = kept.setdefault("average", copy.deepcopy(model))
            before = followed(x)  # with gradients, of which there are none in the end
            with torch.no_grad():
                for mine, theirs in zip(followed.parameters(), model.parameters(), strict=True):
                    theirs.mul_(0.5)
                    mine.mul_(0.5).add_(theirs, alpha=0.5)
            return before.detach()

        for batch in strategy.distribute_dataset([torch.ones(4, 3, dtype=torch.float64)] * 2):
            strategy.run(step, args=(batch,))
        assert torch.equal(kept["average"][0].weight, LAYER[0].weight * (0.75 * 0.5 + 0.25 * 0.5))


def test_one_replica_may_keep_what_it_has_trained() -> None:
    def losses(run: Any) -> list[float]:
        kept: dict[str, Any] = {}

        def step(x: torch.Tensor) -> torch.Tensor:
            if not kept:
                kept["copy"] = copy.deepcopy(NORMALIZED)
                kept["optimizer"] = torch.optim.SGD(kept["copy"].parameters(), 0.1)
            loss = loss_of(kept["copy"], x)
            loss.backward()
            kept["optimizer"].step()
            return loss.detach()

        draw = torch.Generator().manual_seed(0)
        return [float(run(step, torch.rand(4, 3, generator=draw, dtype=torch.float64))) for _ in range(3)]

    with fake_tpu(1) as strategy:
        seen = losses(lambda step, x: strategy.run(step, args=(x,)))
    assert seen == pytest.approx(losses(lambda step, x: step(x)), rel=1e-10)


def test_a_changed_copy_has_no_value_outside_of_its_run() -> None:
    kept: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(copy.deepcopy(LAYER))
        return trained(kept[-1], kept[-1].parameters(), x)

    with fake_tpu(2) as strategy:
        for batch in strategy.distribute_dataset([torch.ones(rows, 3, dtype=torch.float64) for rows in (4, 4, 5)]):
            strategy.run(step, args=(batch,))
    assert isinstance(kept[0][0].weight, nn.Parameter)
    with pytest.raises(UnsupportedError, match=r"outside of the run that it belongs to"):
        kept[0][0].weight + 1


def test_others_that_look_at_a_copys_memory_are_named() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = copy.deepcopy(WEIGHT)
        memory = made.data
        y = made * x
        memory.mul_(0.5)
        return y

    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match=r"become each replica's own.*same memory"):
        strategy.run(step, args=(1.0,))


def test_replicas_with_other_numbers_of_rows_do_not_step_one_optimizer() -> None:
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor) -> None:
        if not kept:
            kept["copy"] = copy.deepcopy(LAYER)
            kept["optimizer"] = torch.optim.SGD(kept["copy"].parameters(), 0.1)
        loss_of(kept["copy"], x).backward()
        kept["optimizer"].step()

    with fake_tpu(2) as strategy:
        (batch,) = strategy.distribute_dataset([torch.ones(3, 3, dtype=torch.float64)])
        with pytest.raises(ReplicaDivergenceError, match=r"different numbers of rows step one SGD.*strategy\.scope"):
            strategy.run(step, args=(batch,))
