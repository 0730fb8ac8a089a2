"""Small programs that do with a model what users do: over two logical devices they give the numbers of one.

Each has once been, or looked like being, a wrong number that nothing told of.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
from tests.dtensor.training import TIMEOUT, copied

RULES = {"0.weight": ("d0", None), "0.bias": ("d0",), "2.weight": (None, "d0")}
HIDDEN, ROWS, STEPS = 8, 8, 3


def layers(middle: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(6, HIDDEN), middle(), nn.Linear(HIDDEN, 4))


class Program:
    """A model, its optimizer, and batches; ``seen`` is what is compared, with the state at the end."""

    def __init__(self, logical: int, build: Callable[[], nn.Module] = layers, rules: Any = RULES, **options: Any):
        torch.manual_seed(3)
        more = {"logical_devices_per_replica": logical, "sharding_rules": rules}
        self.logical = logical
        self.strategy: Any = ts.MirroredStrategy(**(more if logical > 1 else {}), timeout=TIMEOUT)
        with self.strategy.scope():
            self.model = build().double()
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), **{"lr": 0.01} | options)
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(STEPS, ROWS, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(4, (STEPS, ROWS), generator=generator)
        self.first = self.model[0].weight if isinstance(self.model, nn.Sequential) else None  # one that is cut
        self.seen: list[Any] = []

    def loss(self, number: int) -> torch.Tensor:
        return functional.cross_entropy(self.model(self.inputs[number]), self.targets[number])

    def cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [self.logical if one == dim else 1 for one in range(tensor.ndim)]
        return self.strategy.split_to_logical_devices(tensor, parts)  # type: ignore[no-any-return]

    def run(self, step: Callable[[], torch.Tensor | None]) -> None:
        (result,) = self.strategy.local_results(self.strategy.run(step))
        self.seen.append(result)

    def train(self, loss: Callable[[int], torch.Tensor], before_step: Callable[[], Any] = lambda: None) -> None:
        """`STEPS` steps as usual."""
        for number in range(STEPS):

            def step(number: int = number) -> torch.Tensor:
                self.optimizer.zero_grad()
                value = loss(number)
                value.backward()
                before_step()
                self.optimizer.step()
                return value.detach()

            self.run(step)


PROGRAMS: dict[str, Callable[[int], Program]] = {}


def program(make: Callable[[int], Program]) -> Callable[[int], Program]:
    PROGRAMS[make.__name__] = make
    return make


def run_all(logical: int, names: list[str]) -> dict[str, tuple[list[Any], dict[str, torch.Tensor]]]:
    """What each program has seen, and the state it ends with."""
    warnings.simplefilter("error")
    found = {}
    for name in names:
        one = PROGRAMS[name](logical)
        found[name] = (one.seen, copied(one.model.state_dict()))
        one.strategy.close()
    return found


# -- gradients outside of a run ------------------------------------------------------------------------------------


def _forgets_outside(name: str, forget: Callable[[Program], Any]) -> None:
    def make(logical: int) -> Program:
        one = Program(logical)
        for number in range(STEPS):
            forget(one)

            def step(number: int = number) -> torch.Tensor:
                loss = one.loss(number)
                loss.backward()
                one.optimizer.step()
                return loss.detach()

            one.run(step)
        return one

    make.__name__ = name
    program(make)


def _without_gradients(one: Program) -> None:
    for parameter in one.model.parameters():
        parameter.grad = None


_forgets_outside("zero_grad_outside_of_a_run", lambda one: one.optimizer.zero_grad())
_forgets_outside("zero_grad_of_the_model_outside", lambda one: one.model.zero_grad())
_forgets_outside("gradients_set_to_none_outside", _without_gradients)
_forgets_outside("gradients_that_nobody_forgets", lambda one: None)


@program
def gradients_accumulated_over_runs(logical: int) -> Program:
    one = Program(logical)
    one.run(lambda: (one.loss(0) / 2).backward())
    one.run(lambda: (one.loss(1) / 2).backward())
    one.run(lambda: one.optimizer.step())
    one.optimizer.zero_grad()
    one.train(one.loss)
    return one


@program
def a_backward_pass_outside(logical: int) -> Program:
    one = Program(logical)
    one.run(lambda: one.seen.append(one.loss(0)))
    one.seen.pop(0).backward()
    one.run(lambda: one.optimizer.step())
    return one


# -- gradients in a run --------------------------------------------------------------------------------------------


@program
def backward_by_its_other_name(logical: int) -> Program:
    one = Program(logical)

    def step() -> None:
        one.optimizer.zero_grad()
        torch.autograd.backward([one.loss(0), sum(each.square().sum() for each in one.model.parameters())])
        one.optimizer.step()

    one.run(step)
    return one


@program
def two_backward_passes_through_one_graph(logical: int) -> Program:
    one = Program(logical)

    def loss(number: int) -> torch.Tensor:
        found = one.loss(number)
        found.backward(retain_graph=True)
        return found

    one.train(loss)
    return one


@program
def gradients_that_are_replaced(logical: int) -> Program:
    """By ones of the same cut, of another, and whole."""
    one = Program(logical, lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))

    def replace() -> None:
        one.model[2].weight.grad = one.model[2].weight.grad * 0.5
        one.model[0].weight.grad = one.cut(one.model[0].weight.grad, 1)
        one.model[0].bias.grad = torch.arange(6.0, dtype=torch.float64) / 10

    one.train(one.loss, replace)
    return one


@program
def a_whole_gradient_of_something_cut(logical: int) -> Program:
    one = Program(logical)
    weights = torch.linspace(0, 1, ROWS * HIDDEN, dtype=torch.float64).reshape(ROWS, HIDDEN)

    def loss(number: int) -> torch.Tensor:
        hidden = one.model[0](one.inputs[number])
        hidden.register_hook(lambda gradient: weights)
        return functional.cross_entropy(one.model[2](hidden), one.targets[number])

    one.train(loss)
    return one


@program
def clipping_by_the_largest(logical: int) -> Program:
    one = Program(logical)
    norm = float("inf")
    one.train(one.loss, lambda: one.seen.append(nn.utils.clip_grad_norm_(one.model.parameters(), 0.01, norm)))
    return one


# -- parameters that a step reaches by other ways than as members of modules ----------------------------------------


def _recomputed(name: str, use_reentrant: bool) -> None:
    def make(logical: int) -> Program:
        one = Program(logical)

        def loss(number: int) -> torch.Tensor:
            inputs = one.inputs[number].clone().requires_grad_()
            products = checkpoint(lambda x: torch.tanh(x @ one.first.t()).sum(1), inputs, use_reentrant=use_reentrant)
            return one.loss(number) + products.square().sum()

        one.train(loss)
        return one

    make.__name__ = name
    program(make)


_recomputed("a_parameter_in_a_checkpointed_function", use_reentrant=False)
_recomputed("a_parameter_in_a_reentrant_checkpoint", use_reentrant=True)


@program
def a_parameter_in_a_thread(logical: int) -> Program:
    one = Program(logical)

    def loss(number: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(one.first.square().sum()))
        thread.start()
        thread.join()
        return one.loss(number) + found[0]

    one.train(loss)
    return one


@program
def a_parameter_that_is_annotated_again(logical: int) -> Program:
    one = Program(logical)
    one.train(lambda number: one.loss(number) + one.cut(one.first, 1).square().sum())
    return one


@program
def parameters_by_functional_call(logical: int) -> Program:
    one = Program(logical)
    parameters = dict(one.model.named_parameters())

    def loss(number: int) -> torch.Tensor:
        logits = torch.func.functional_call(one.model, parameters, (one.inputs[number],))
        return functional.cross_entropy(logits, one.targets[number])

    one.train(loss)
    return one


@program
def a_parameter_for_all_replicas(logical: int) -> Program:
    one = Program(logical)
    one.run(lambda: ts.get_replica_context().all_reduce("sum", one.first).detach())
    return one


# -- models --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(indices).mean(1))  # type: ignore[no-any-return]


def _tied(name: str, rules: Any) -> None:
    def make(logical: int) -> Program:
        one = Program(logical, Tied, rules)
        indices, targets = torch.tensor([[1, 7, 3], [0, 0, 5]]), torch.tensor([2, 6])
        one.train(lambda number: functional.cross_entropy(one.model(indices), targets))
        return one

    make.__name__ = name
    program(make)


_tied("a_table_that_is_the_last_layer_too", {"embedding.weight": ("d0", None)})
_tied("a_table_that_is_the_last_layer_too_by_columns", {"embedding.weight": (None, "d0")})


@program
def one_module_under_two_names(logical: int) -> Program:
    shared = nn.Linear(6, 6)
    one = Program(
        logical, lambda: nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 4)), {"0.weight": ("d0", None)}
    )
    one.train(one.loss)
    return one


@program
def statistics_of_batches_that_are_cut(logical: int) -> Program:
    one = Program(logical, lambda: layers(lambda: nn.BatchNorm1d(HIDDEN)), {"2.weight": (None, "d0")})

    def loss(number: int) -> torch.Tensor:
        hidden = one.model[1](one.cut(one.model[0](one.inputs[number]), 0))
        return functional.cross_entropy(one.model[2](hidden), one.targets[number])

    one.train(loss)
    one.model.eval()
    one.run(lambda: loss(0).detach())
    return one


@program
def parameters_that_are_frozen_for_a_while(logical: int) -> Program:
    one = Program(logical)
    one.first.requires_grad_(False)
    one.train(one.loss)
    one.first.requires_grad_(True)
    one.train(one.loss)
    return one


# -- optimizers, and modes -----------------------------------------------------------------------------------------


@program
def two_optimizers_and_a_schedule(logical: int) -> Program:
    one = Program(logical)
    with one.strategy.scope():
        other = torch.optim.SGD(
            [{"params": [one.first], "lr": 0.3}, {"params": one.model[2].parameters()}], lr=0.1, momentum=0.9
        )
    schedule = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    one.train(one.loss, lambda: (other.step(), other.zero_grad(set_to_none=False)))
    schedule.step()
    one.train(one.loss, lambda: (other.step(), schedule.step()))
    return one


@program
def steps_of_several_parameters_at_a_time(logical: int) -> Program:
    one = Program(logical, foreach=True)
    one.train(one.loss)
    return one


@program
def evaluation_in_other_modes(logical: int) -> Program:
    """What is made for talking there is used in training as well."""
    one = Program(logical)
    for mode in (torch.inference_mode, torch.no_grad):

        def evaluate(mode: Any = mode) -> torch.Tensor:
            with mode():
                return one.loss(0) * 1

        one.run(evaluate)
        with mode():
            one.run(lambda: one.loss(1) * 1)
    one.train(one.loss)
    return one


@program
def half_precision(logical: int) -> Program:
    """Values whose squares are beyond the largest number of float16, in operators that add these up."""
    one = Program(logical)

    def step() -> torch.Tensor:
        x = one.cut(torch.linspace(-900, 900, 8 * HIDDEN).reshape(8, HIDDEN).half(), 1)
        found = [
            functional.layer_norm(x, (HIDDEN,)),
            functional.rms_norm(x, (HIDDEN,)),
            functional.group_norm(x.unsqueeze(1), 1),
            torch.linalg.vector_norm(x / 100, dim=1),
            x.abs().mean(1),
            (x / 10).std(1),
            torch.logsumexp(x / 100, 1),
            torch.softmax(x / 100, 1),
        ]
        return torch.cat([one.strategy.replicate_to_logical_devices(each).flatten() for each in found])

    one.run(step)
    return one


@program
def autocast(logical: int) -> Program:
    one = Program(logical, lambda: nn.Sequential(nn.Linear(6, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4)))
    one.model.load_state_dict({name: value.bfloat16() for name, value in one.model.state_dict().items()})

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            weight = one.cut(torch.eye(6), 0)
            hidden = functional.linear(one.inputs[0].float(), weight)
            normal = functional.layer_norm(hidden, (6,))
            loss = functional.cross_entropy(hidden, one.targets[0])
        kinds = torch.tensor([each.dtype == torch.float32 for each in (hidden, normal, loss)])
        return torch.cat([kinds.float(), loss.reshape(1).float()])

    one.run(step)
    return one
