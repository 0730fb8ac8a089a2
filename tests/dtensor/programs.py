"""Small programs that do with a model what users do: over two logical devices they give the numbers of one.

Each has once been, or looked like being, a wrong number that nothing told of.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
from tests.dtensor.training import TIMEOUT, copied

RULES = {"0.weight": ("d0", None), "0.bias": ("d0",), "2.weight": (None, "d0")}
HIDDEN, ROWS, STEPS = 8, 8, 3
ADAM = partial(torch.optim.Adam, lr=0.01)


def layers(middle: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(6, HIDDEN), middle(), nn.Linear(HIDDEN, 4))


class Program:
    """A model, its optimizer, and batches; ``seen`` is what is compared, with the state at the end."""

    def __init__(
        self,
        logical: int,
        build: Callable[[], nn.Module] = layers,
        rules: Any = RULES,
        optimizer: Callable[..., torch.optim.Optimizer] = ADAM,
    ) -> None:
        torch.manual_seed(3)
        more = {"logical_devices_per_replica": logical, "sharding_rules": rules}
        self.logical = logical
        self.strategy: Any = ts.MirroredStrategy(**(more if logical > 1 else {}), timeout=TIMEOUT)
        with self.strategy.scope():
            self.model = build().double()
            self.optimizer = optimizer(self.model.parameters())
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(STEPS, ROWS, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(4, (STEPS, ROWS), generator=generator)
        self.first: Any = self.model[0].weight if isinstance(self.model, nn.Sequential) else None  # one that is cut
        self.seen: list[Any] = []

    def loss(self, number: int) -> torch.Tensor:
        return functional.cross_entropy(self.model(self.inputs[number]), self.targets[number])

    def cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [self.logical if one == dim else 1 for one in range(tensor.ndim)]
        return self.strategy.split_to_logical_devices(tensor, parts)  # type: ignore[no-any-return]

    def run(self, step: Callable[[], torch.Tensor | None]) -> None:
        (result,) = self.strategy.local_results(self.strategy.run(step))
        self.seen.append(result)

    def train(
        self, loss: Callable[[int], torch.Tensor] | None = None, before_step: Callable[[], Any] = lambda: None
    ) -> None:
        """`STEPS` steps as usual."""
        for number in range(STEPS):

            def step(number: int = number) -> torch.Tensor:
                self.optimizer.zero_grad()
                value = (loss or self.loss)(number)
                value.backward()
                before_step()
                self.optimizer.step()
                return value.detach()

            self.run(step)


PROGRAMS: dict[str, Callable[[int], Program]] = {}


def program(name: str = "", **made_with: Any) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    """``made_with``: of `Program`."""

    def add(work: Callable[[Program], None]) -> Callable[[Program], None]:
        def make(logical: int) -> Program:
            one = Program(logical, **made_with)
            work(one)
            return one

        PROGRAMS[name or work.__name__] = make
        return work

    return add


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


def _forgets_outside(forget: Callable[[Program], Any], one: Program) -> None:
    for number in range(STEPS):
        forget(one)

        def step(number: int = number) -> torch.Tensor:
            loss = one.loss(number)
            loss.backward()
            one.optimizer.step()
            return loss.detach()

        one.run(step)


def _without_gradients(one: Program) -> None:
    for parameter in one.model.parameters():
        parameter.grad = None


program("zero_grad_outside_of_a_run")(partial(_forgets_outside, lambda one: one.optimizer.zero_grad()))
program("zero_grad_of_the_model_outside")(partial(_forgets_outside, lambda one: one.model.zero_grad()))
program("gradients_set_to_none_outside")(partial(_forgets_outside, _without_gradients))
program("gradients_that_nobody_forgets")(partial(_forgets_outside, lambda one: None))


@program()
def gradients_accumulated_over_runs(one: Program) -> None:
    one.run(lambda: (one.loss(0) / 2).backward())
    one.run(lambda: (one.loss(1) / 2).backward())
    one.run(lambda: one.optimizer.step())
    one.optimizer.zero_grad()
    one.train()


@program()
def a_backward_pass_outside(one: Program) -> None:
    one.run(lambda: one.seen.append(one.loss(0)))
    one.seen.pop(0).backward()
    one.run(lambda: one.optimizer.step())


# -- gradients in a run --------------------------------------------------------------------------------------------


@program()
def backward_by_its_other_name(one: Program) -> None:
    def step() -> None:
        one.optimizer.zero_grad()
        torch.autograd.backward([one.loss(0), sum(each.square().sum() for each in one.model.parameters())])
        one.optimizer.step()

    one.run(step)


@program(build=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))
def gradients_that_are_replaced(one: Program) -> None:
    """By ones of the same cut, of another, and whole."""

    def replace() -> None:
        one.model[2].weight.grad = one.model[2].weight.grad * 0.5
        one.model[0].weight.grad = one.cut(one.model[0].weight.grad, 1)
        one.model[0].bias.grad = torch.arange(6.0, dtype=torch.float64) / 10

    one.train(before_step=replace)


@program()
def a_whole_gradient_of_something_cut(one: Program) -> None:
    weights = torch.linspace(0, 1, ROWS * HIDDEN, dtype=torch.float64).reshape(ROWS, HIDDEN)

    def loss(number: int) -> torch.Tensor:
        hidden = one.model[0](one.inputs[number])
        hidden.register_hook(lambda gradient: weights)
        return functional.cross_entropy(one.model[2](hidden), one.targets[number])

    one.train(loss)


@program()
def clipping(one: Program) -> None:
    """By the norm of all of them, and by the largest."""
    for norm in (2.0, float("inf")):
        clip = lambda norm=norm: nn.utils.clip_grad_norm_(one.model.parameters(), 0.01, norm)  # noqa: E731
        one.train(before_step=lambda: one.seen.append(clip()))  # noqa: B023


# -- parameters that a step reaches by other ways than as members of modules ----------------------------------------


def _recomputed(use_reentrant: bool, one: Program) -> None:
    def loss(number: int) -> torch.Tensor:
        inputs = one.inputs[number].clone().requires_grad_()
        products = checkpoint(lambda x: torch.tanh(x @ one.first.t()).sum(1), inputs, use_reentrant=use_reentrant)
        return one.loss(number) + products.square().sum()

    one.train(loss)


program("a_parameter_in_a_checkpointed_function")(partial(_recomputed, False))
program("a_parameter_in_a_reentrant_checkpoint")(partial(_recomputed, True))


@program()
def a_parameter_in_a_thread(one: Program) -> None:
    def loss(number: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(one.first.square().sum()))
        thread.start()
        thread.join()
        return one.loss(number) + found[0]

    one.train(loss)


@program()
def a_parameter_that_is_annotated_again(one: Program) -> None:
    one.train(lambda number: one.loss(number) + one.cut(one.first, 1).square().sum())


@program()
def a_parameter_for_all_replicas(one: Program) -> None:
    one.run(lambda: ts.get_replica_context().all_reduce("sum", one.first).detach())


@program(build=lambda: nn.Sequential(nn.Linear(1, 1)), rules=None)
def parameters_of_no_module(one: Program) -> None:
    with one.strategy.scope():
        first = nn.Parameter(torch.arange(32.0).reshape(4, 8).double() / 32)
        second = nn.Parameter(torch.ones(4, dtype=torch.float64))
        one.cut(first, 1)
        optimizer = torch.optim.SGD([first, second], lr=0.1)

    def loss(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        return ((first @ torch.ones(8, dtype=torch.float64)) * second).square().sum() + one.model[0].weight.sum()

    def update() -> None:
        one.seen.append([tuple(first.shape), tuple(first.grad.shape)])  # type: ignore[union-attr]
        one.seen.append(first.grad.sum())  # type: ignore[union-attr]
        optimizer.step()

    one.train(loss, update)
    if one.logical > 1:
        layout = ts.explain_sharding(first, strategy=one.strategy)
        assert layout.bytes_per_device == 4 * 4 * 8
        assert "1 replica × 2 logical devices" in str(layout)
        assert "rank 1" in str(layout)


# -- averages of weights, kept in the step ----------------------------------------------------------------------------


def _by_copies(mean: Any, model: nn.Module) -> None:
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.copy_(old * 0.9 + new * 0.1)


def _by_lerp(mean: Any, model: nn.Module) -> None:
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 0.1)


def _by_data(mean: Any, model: nn.Module) -> None:
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.data = 0.9 * old.data + 0.1 * new.data


def _by_lists(mean: Any, model: nn.Module) -> None:
    torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.1)


def _averaged(make: Callable[[nn.Module], Any], update: Callable[[Any, nn.Module], None], one: Program) -> None:
    with one.strategy.scope():
        mean = make(one.model)
    if update is _by_copies:
        mean.load_state_dict(one.model.state_dict())
    for number in range(STEPS):

        def step(number: int = number) -> None:
            one.optimizer.zero_grad()
            one.loss(number).backward()
            one.optimizer.step()
            with torch.no_grad():
                update(mean, one.model)

        one.run(step)
    one.seen.extend(copied(mean.state_dict()).values())


_average = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9))
program("an_averaged_model")(partial(_averaged, _average, lambda mean, model: mean.update_parameters(model)))
program("an_average_by_copies")(partial(_averaged, lambda model: layers().double(), _by_copies))
program("an_average_by_lerp")(partial(_averaged, copy.deepcopy, _by_lerp))
program("an_average_by_data")(partial(_averaged, copy.deepcopy, _by_data))
program("an_average_by_lists")(partial(_averaged, copy.deepcopy, _by_lists))


# -- what optimizers keep ----------------------------------------------------------------------------------------------


def _sums(one: Program) -> list[Any]:
    state = one.optimizer.state[one.first]
    return [state["exp_avg"].sum(), state["exp_avg_sq"].max(), tuple(state["exp_avg"].shape), float(state["step"])]


@program()
def state_of_an_optimizer_that_is_read(one: Program) -> None:
    """In steps, after they have stepped, and outside of runs."""
    for _ in range(2):
        one.train(before_step=lambda: one.seen.extend(_sums(one) if one.optimizer.state else []))
        one.run(lambda: one.seen.extend(_sums(one)))
        one.seen.extend(_sums(one))
        one.seen.extend(each["exp_avg"].square().sum() for each in one.optimizer.state.values())


@program()
def state_of_an_optimizer_that_is_edited(one: Program) -> None:
    """Momentum is halved, made what the gradient is, and replaced: in a step, and outside of runs."""

    def edit() -> None:
        for parameter in one.model.parameters():
            state = one.optimizer.state[parameter]
            state["exp_avg"].mul_(0.5)
            state["exp_avg"].lerp_(parameter.grad, 0.1)
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
        one.optimizer.state[one.first]["exp_avg"] = torch.linspace(0, 1, 48, dtype=torch.float64).reshape(HIDDEN, 6)

    one.train()
    one.train(before_step=edit)
    one.optimizer.state[one.first]["exp_avg"].mul_(0.5)
    one.optimizer.state[one.first]["exp_avg_sq"].add_(torch.arange(6.0, dtype=torch.float64))
    one.train()
    one.seen.extend(value for each in one.optimizer.state_dict()["state"].values() for value in each.values())


@program()
def an_optimizer_that_is_copied(one: Program) -> None:
    one.train()
    one.seen.extend(_sums(one))
    kept = copy.deepcopy(one.optimizer.state_dict())
    copied_state = copy.deepcopy(one.optimizer.state[one.first])
    one.train()
    one.seen.append(copied_state["exp_avg"].sum())
    one.optimizer.load_state_dict(kept)
    one.seen.extend(_sums(one))
    one.train()


def _read_again_and_again(one: Program) -> None:
    def read() -> None:
        for entries in one.optimizer.state.values():
            for value in entries.values():
                if isinstance(value, torch.Tensor):
                    one.seen.append([tuple(value.shape), value.is_floating_point()])
                    one.seen.append(value.double().sum())

    one.train(before_step=read)
    read()
    one.train(before_step=read)
    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    one.train(before_step=read)


for _kind, _settings in {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.Adagrad: {},
    torch.optim.RMSprop: {"centered": True, "momentum": 0.5},
    torch.optim.ASGD: {},
    torch.optim.Rprop: {},
    torch.optim.AdamW: {"foreach": True, "amsgrad": True},
    torch.optim.Adam: {"fused": True},
    ts.Ftrl: {},
}.items():
    program(f"state_of_{_kind.__name__}", optimizer=partial(_kind, lr=0.01, **_settings))(_read_again_and_again)


# -- memory that is given to variables ---------------------------------------------------------------------------------


@program()
def an_average_that_is_evaluated_and_put_away(one: Program) -> None:
    """As averages of weights are evaluated: what a variable was is kept, and given back."""
    averages: dict[str, torch.Tensor] = {}

    def note() -> None:
        for name, each in one.model.named_parameters():
            before = averages.get(name)
            averages[name] = each.data.clone() if before is None else 0.5 * before + 0.5 * each.data

    def evaluate() -> torch.Tensor:
        kept = {}
        for name, each in one.model.named_parameters():
            kept[name] = each.data
            each.data = averages[name]
        with torch.no_grad():
            loss = one.loss(0)
        for name, each in one.model.named_parameters():
            each.data = kept[name]
        return loss

    for _ in range(2):
        one.train(before_step=note)
        one.run(evaluate)


@program()
def models_whose_elements_are_exchanged(one: Program) -> None:
    with one.strategy.scope():
        other = copy.deepcopy(one.model)

    def exchange() -> None:
        for first, second in zip(one.model.parameters(), other.parameters(), strict=True):
            first.data, second.data = second.data, first.data

    one.train()
    one.run(exchange)
    one.train()
    one.seen.extend(copied(other.state_dict()).values())


@program()
def a_variable_that_shows_a_whole_tensor(one: Program) -> None:
    """What is written to the tensor, as long as it is there, is written to the variable."""

    def step() -> torch.Tensor:
        whole = torch.linspace(0, 1, one.first.numel(), dtype=torch.float64).reshape(one.first.shape)
        one.first.data = whole
        whole.mul_(2)
        del whole
        one.first.data.mul_(0.5)
        return one.loss(0).detach()

    one.run(step)
    one.train()


@program()
def a_gradient_that_is_kept_and_given_back(one: Program) -> None:
    def try_another() -> None:
        gradient = one.first.grad
        assert gradient is not None
        kept, gradient.data = gradient.data, 2 * gradient.data
        one.seen.append(one.first.grad.sum())  # type: ignore[union-attr]
        one.first.grad.data = kept  # type: ignore[union-attr]
        one.seen.append(gradient.sum())

    one.train(before_step=try_another)


# -- models --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(indices).mean(1))  # type: ignore[no-any-return]


def _tied(one: Program) -> None:
    indices, targets = torch.tensor([[1, 7, 3], [0, 0, 5]]), torch.tensor([2, 6])
    one.train(lambda number: functional.cross_entropy(one.model(indices), targets))


for _name, _cut in {"": ("d0", None), "_by_columns": (None, "d0")}.items():
    program(f"a_table_that_is_the_last_layer_too{_name}", build=Tied, rules={"embedding.weight": _cut})(_tied)


def _twice() -> nn.Module:
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 4))


program("one_module_under_two_names", build=_twice, rules={"0.weight": ("d0", None)})(Program.train)


@program(build=lambda: layers(lambda: nn.BatchNorm1d(HIDDEN)), rules={"2.weight": (None, "d0")})
def statistics_of_batches_that_are_cut(one: Program) -> None:
    def loss(number: int) -> torch.Tensor:
        hidden = one.model[1](one.cut(one.model[0](one.inputs[number]), 0))
        return functional.cross_entropy(one.model[2](hidden), one.targets[number])

    one.train(loss)
    one.model.eval()
    one.run(lambda: loss(0).detach())


# -- modes and precisions -------------------------------------------------------------------------------------------


@program()
def evaluation_in_other_modes(one: Program) -> None:
    """What is made for talking there is used in training as well."""
    for mode in (torch.inference_mode, torch.no_grad):

        def evaluate(mode: Any = mode) -> torch.Tensor:
            with mode():
                return one.loss(0) * 1

        one.run(evaluate)
        with mode():
            one.run(lambda: one.loss(1) * 1)
    one.train()


@program()
def half_precision(one: Program) -> None:
    """Values whose squares are beyond the largest number of float16, in operators that add these up."""

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


@program(build=lambda: nn.Sequential(nn.Linear(6, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4)))
def autocast(one: Program) -> None:
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
