"""Training cases: what lives beside model and optimizer, models that are exchanged, and what surrounds the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import torchstrat as ts
from torchstrat.testing.training import (
    EVEN_ROWS,
    STEPS,
    Batch,
    Case,
    FilledLazyLinear,
    Mlp,
    Training,
    adam,
    filled,
    named,
    plain_step,
    regression,
    sgd,
    squared_error,
    train_step,
)


def averaged(make: Callable[[nn.Module], tuple[nn.Module, Callable[[], object]]], *, in_step: bool) -> Training:
    """``make(model)``: a second model, and what updates it: in the step, or outside of `run`."""
    model = Mlp()
    average, update = make(model)
    train = plain_step(model, sgd(model, lr=0.2, momentum=0.0))
    watch = {"model": model, "average": average}

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        update()
        return losses

    return Training(step, watch) if in_step else Training(train, watch, after=lambda *_: update())


def _copied(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    """By deepcopy, which no registration hook sees; its parameters still require grad, as users leave it."""
    average = copy.deepcopy(model)

    @torch.no_grad()
    def blend() -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.2)

    return average, blend


def _frozen_copy(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    """Updated without `torch.no_grad`: its parameters become parts of a graph."""
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)

    def blend() -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.2)

    return average, blend


def _of_torch(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    """It counts in an integral buffer."""
    average = AveragedModel(model)
    return average, lambda: average.update_parameters(model)


def _exchanging(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    """Two models whose elements change places, as averages and weights do for an evaluation."""
    other = copy.deepcopy(model)

    def exchange() -> None:
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.data, theirs.data = theirs.data, mine.data

    return other, exchange


def elements_set_aside() -> Training:
    """Every other step trains other elements; then the parameters get those back that they had, not copies."""
    model = Mlp()
    kept: list[torch.Tensor] = []

    def before(step_index: int) -> None:
        if step_index % 2:
            kept[:] = [parameter.data for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5

    def after(step_index: int, loss: torch.Tensor) -> None:
        if step_index % 2:
            for parameter, elements in zip(model.parameters(), kept, strict=True):
                parameter.data = elements

    return Training(plain_step(model, adam(model)), {"model": model}, before=before, after=after)


def deepcopy_in_step(*, keep: bool) -> Training:
    """A target network copied inside the step: afresh every time, or only at every second step."""
    model = Mlp()
    kept: dict[str, nn.Module] = {}

    def after(step_index: int, loss: torch.Tensor) -> None:
        if step_index % 2 == 1:
            kept.clear()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not keep or "target" not in kept:
            kept["target"] = copy.deepcopy(model)
        return squared_error(model(x), y + 0.3 * kept["target"](x).detach())

    return Training(train_step(losses, adam(model)), {"model": model}, after=after)


def scaled_training(*, clip: bool, updates_outside: bool = False) -> Training:
    """Float32 with `GradScaler`. Batches are (x, y, factor); an infinite factor makes that row's gradient infinite."""
    model = Mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(batch: Batch) -> torch.Tensor:
        x, y, factor = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        scaler.scale((losses * factor).mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        if not updates_outside:
            scaler.update()
        return losses.detach()

    def after(step_index: int, loss: torch.Tensor) -> None:
        if updates_outside:
            scaler.update()

    return Training(step, {"model": model, "scale": scaler.get_scale}, after=after)


def _overflowing(step_index: int | None, rows: tuple[int, ...] = EVEN_ROWS) -> list[Batch]:
    """In the batch at ``step_index`` the last row, which is on the last replica, overflows."""
    batches: list[Batch] = []
    for index, (x, y) in enumerate(regression(rows)):
        factor = torch.ones(len(x))
        if index == step_index:
            factor[-1] = torch.inf
        batches.append((x, y, factor))
    return batches


def autocast() -> Training:
    model = Mlp(6, 16, 3)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction: torch.Tensor = model(x)
        return prediction.float()

    return Training(plain_step(call, sgd(model, lr=0.3)), {"model": model})


# -- models that are exchanged half-way ------------------------------------------------------------------------------


def exchanged(exchange: Callable[[Mlp], object], *, clip: bool = False) -> Training:
    """``exchange(model)`` replaces tensors of the model half-way, outside of the scope, or returns another model."""
    current: dict[str, Any] = {"model": Mlp()}
    current["optimizer"] = sgd(current["model"])

    def before(step_index: int) -> None:
        if step_index == 2:
            found = exchange(current["model"])
            current["model"] = found if isinstance(found, nn.Module) else current["model"]
            current["optimizer"] = sgd(current["model"], lr=0.05, momentum=0.5)

    def step(batch: Batch) -> torch.Tensor:
        edit = partial(nn.utils.clip_grad_norm_, list(current["model"].parameters()), 0.3) if clip else None
        return plain_step(current["model"], current["optimizer"], edit=edit)(batch)

    return Training(step, {"model": lambda: current["model"]}, before=before)


def _assign(model: Mlp) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)


def _prune(model: Mlp) -> None:
    prune.l1_unstructured(model.first, "weight", amount=0.4)


def pruned_for_a_while() -> Training:
    """One parameter has another name, and then its first one again, while its optimizer goes on. The last steps have
    replicas without rows."""
    model = Mlp()

    def before(step_index: int) -> None:
        if step_index == 2:
            _prune(model)
        elif step_index == 3:
            prune.remove(model.first, "weight")

    return Training(plain_step(model, sgd(model)), {"model": model}, before=before)


class _Penalised(nn.Linear):
    def __init__(self, inputs: int, outputs: int, penalties: list[torch.Tensor]) -> None:
        super().__init__(inputs, outputs)
        self.penalties = penalties

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.penalties.append(y.square().mean(dim=-1, keepdim=True))
        return y


class _InOneList(nn.Module):
    """Adds up what its layers have put into a list that it has made; and has a dictionary that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[torch.Tensor] = []
        self.first, self.last = (_Penalised(*sizes, self.penalties) for sizes in ((6, 5), (5, 3)))
        self.kept: dict[str, Any] = {"penalties": self.penalties}
        self.kept["kept"] = self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalties.clear()
        y: torch.Tensor = self.last(torch.tanh(self.first(x)))
        penalties: list[torch.Tensor] = self.kept["kept"]["penalties"]
        return y + penalties[0] + penalties[1]


def penalties_in_one_list() -> Training:
    model = _InOneList()
    return Training(plain_step(model, sgd(model)), {"model": model})


def pruned_further() -> Training:
    """By what the last forward pass has left in an attribute."""
    model = Mlp()

    def before(step_index: int) -> None:
        if step_index in (0, 2, 4):
            _prune(model)

    return Training(plain_step(model, sgd(model)), {"model": model}, before=before)


def _another_head(model: Mlp) -> None:
    model.last = filled(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))  # type: ignore[assignment]


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


def _parametrize(model: Mlp) -> None:
    parametrize.register_parametrization(model.first, "weight", _Scaled())


def _edit_in_numpy(model: Mlp) -> None:
    model.first.weight.detach().numpy()[:] *= 2


def behind_the_hooks(child: Callable[[], nn.Module]) -> Training:
    """PyTorch's hooks do not see a child that comes like this.

    The step reaches model and optimizer and nothing else, so that a walk from it is made once only.
    """
    model = Mlp()
    optimizer = sgd(model)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        losses: torch.Tensor = (model(batch[0]) - batch[1]).square().mean(dim=-1)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    def before(step_index: int) -> None:
        if step_index == 2:
            model._modules["more"] = added = child()  # noqa: SLF001
            optimizer.param_groups[0]["params"].extend(added.parameters())

    return Training(step, {"model": model}, before=before)


def weight_replaced_in_step(*, lists_stay: bool) -> Training:
    """In the third run the step puts another weight in the place of one, with its state: in the model, in a list that
    the model holds, and in the optimizer's group. ``lists_stay``: in the lists that are there."""
    model = Mlp()
    model.held = [model.last.weight]  # type: ignore[assignment]
    optimizer = adam(model)
    runs = [0]

    def call(x: torch.Tensor) -> torch.Tensor:
        if runs[0] == 2:
            old, new = model.last.weight, nn.Parameter(model.last.weight.detach() * 0.5)
            model.last.weight = new
            if old in optimizer.state:  # central storage on sockets has it on rank 0
                optimizer.state[new] = optimizer.state.pop(old)
            for owner, name in ((vars(model), "held"), (optimizer.param_groups[0], "params")):
                others = [new if one is old else one for one in owner[name]]
                if lists_stay:
                    owner[name][:] = others
                else:
                    owner[name] = others
        hidden: torch.Tensor = model(x) * model.held[0].mean()  # type: ignore[index]
        return hidden

    def before(index: int) -> None:
        runs[0] = index

    return Training(plain_step(call, optimizer), {"model": model, "optimizer": optimizer}, before=before)


class _Trainer(nn.Module):
    """A module that keeps all that trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.is_due = Mlp(), False
        self.set(sgd(self.model, momentum=0.9))

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.schedulers: list[lr_scheduler.LRScheduler] = [lr_scheduler.ExponentialLR(optimizer, 0.9)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)


def remade_in_a_module(name: str, *, in_step: bool = False) -> Training:
    """Before the second run, or in it, a trainer that is a module gets another optimizer, scheduler or scaler. The step
    reaches the trainer and nothing else, so that a walk from it is made once only."""
    trainer = _Trainer()
    made: Mapping[str, Callable[[], object]] = {
        "optimizer": lambda: trainer.set(sgd(trainer.model, lr=0.2, momentum=0.5)),
        "scheduler": lambda: trainer.schedulers.__setitem__(0, lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)),
        "scaler": lambda: setattr(trainer, "scaler", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)),
    }

    def step(batch: Batch) -> torch.Tensor:
        if trainer.is_due:
            trainer.is_due = False
            made[name]()
        trainer.optimizer.zero_grad()
        losses: torch.Tensor = (trainer.model(batch[0]) - batch[1]).square().mean(dim=-1)
        trainer.scaler.scale(losses.mean()).backward()
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()
        trainer.schedulers[0].step()
        return losses.detach()

    def look() -> torch.Tensor:
        numbers = trainer.scaler.get_scale(), trainer.schedulers[0].last_epoch, trainer.schedulers[0].get_last_lr()[0]
        return torch.tensor(numbers)

    def before(step_index: int) -> None:
        if step_index == 1 and not in_step:
            made[name]()
        trainer.is_due = step_index == 1 and in_step

    return Training(step, {"model": trainer.model, "numbers": look}, before=before)


class _Mean(nn.Module):
    """Has a buffer and no parameters, so no optimizer knows of it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        ts.get_strategy().extended.set_aggregation(self, "mean", "mean")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x


def _another_model(model: Mlp) -> nn.Module:
    return filled(Mlp())


# -- inner loops -----------------------------------------------------------------------------------------------------


def inner_optimizer_over_tensors() -> Training:
    """Fits each row by itself: what a replica computes does not depend on the other rows."""
    model = Mlp()

    def fit(wanted: torch.Tensor) -> torch.Tensor:
        guess = torch.zeros(3, requires_grad=True)
        inner = torch.optim.SGD([guess], lr=0.3, momentum=0.5)
        for _ in range(2):
            inner.zero_grad()
            ((guess - wanted) ** 2).sum().backward()
            inner.step()
        return guess.detach()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return squared_error(model(x), torch.stack([fit(row) for row in y]))

    return Training(train_step(losses, sgd(model, momentum=0.0)), {"model": model})


def inner_optimizer_over_a_copy() -> Training:
    """A copy is trained for a while on this replica's rows alone: here all replicas see the same inner data."""
    model = Mlp()
    inner_batch = regression((4,))[0]

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fast = copy.deepcopy(model)
        train = plain_step(fast, sgd(fast, lr=0.2, momentum=0.5))
        for _ in range(3):
            train(inner_batch)
        return squared_error(model(x), y + fast(x).detach())

    return Training(train_step(losses, sgd(model, momentum=0.0)), {"model": model})


def adversarial_input() -> Training:
    model = Mlp()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        delta = nn.Parameter(torch.zeros_like(x))
        attack = torch.optim.SGD([delta], lr=0.5)
        for _ in range(2):
            attack.zero_grad()
            (-squared_error(model(x + delta), y).sum()).backward(inputs=[delta])
            attack.step()
        return squared_error(model(x + delta.detach()), y)

    return Training(train_step(losses, adam(model)), {"model": model})


# -- between and after steps -----------------------------------------------------------------------------------------


def evaluated_between_steps() -> Training:
    """The model is read outside of `run`, in evaluation mode, after every step; its dropout then does nothing."""
    model = nn.Sequential(*Mlp(), nn.Dropout(0.0))
    scores = torch.zeros(STEPS)
    probe = torch.linspace(-1.0, 1.0, 12).reshape(2, 6)

    def after(step_index: int, loss: torch.Tensor) -> None:
        model.eval()
        with torch.inference_mode():
            scores[step_index] = model(probe).sum().item()
        model.train()

    return Training(plain_step(model, adam(model)), {"model": model, "scores": scores}, after=after)


def evaluated_in_step() -> Training:
    """Every step trains, then scores its rows again without a graph."""
    model = Mlp()
    train = plain_step(model, adam(model))

    def step(batch: Batch) -> torch.Tensor:
        train(batch)
        x, y = batch
        model.eval()
        with torch.no_grad():
            losses = squared_error(model(x), y)
        model.train()
        return losses

    return Training(step, {"model": model})


def edited_between_steps() -> Training:
    """The script writes a parameter itself, outside of `run`."""
    model = Mlp()

    @torch.no_grad()
    def after(step_index: int, loss: torch.Tensor) -> None:
        model.first.weight.mul_(0.9)
        model.last.bias[0] = float(step_index)

    return Training(plain_step(model, sgd(model)), {"model": model}, after=after)


_OUTSIDE = "the step uses trainable variables that"
_inner = partial(regression, (8,) * 2)
_of_scaler: dict[str, Any] = {"tolerance": 1e-5, "dtype": torch.float32}

CASES = (
    *(
        Case(f"{name}_{where}", partial(averaged, make, in_step=where == "in_step"))
        for name, make in {
            "moving_average": _copied,
            "averaged_model": _of_torch,
            "elements_exchanged": _exchanging,
        }.items()
        for where in ("in_step", "outside")
    ),
    *(
        Case(f"{name}_remade_in_a_module{suffix}", partial(remade_in_a_module, name), partial(regression, rows))
        for name in ("optimizer", "scheduler", "scaler")
        for suffix, rows in (("", EVEN_ROWS), ("_idle", (8, 8, 1, 8, 1)))
    ),
    *(
        Case(
            f"{name}_remade_in_a_module_by_the_step",
            partial(remade_in_a_module, name, in_step=True),
            partial(regression, (8, 1, 8, 8, 1)),
        )
        for name in ("scheduler", "scaler")
    ),
    Case("moving_average_under_autograd", partial(averaged, _frozen_copy, in_step=True)),
    Case("weight_replaced_in_step", partial(weight_replaced_in_step, lists_stay=False)),
    Case("weight_replaced_in_step_in_lists", partial(weight_replaced_in_step, lists_stay=True)),
    Case("deepcopy_in_step", partial(deepcopy_in_step, keep=False)),
    Case("deepcopy_kept_between_steps", partial(deepcopy_in_step, keep=True)),
    Case("grad_scaler", partial(scaled_training, clip=False), partial(_overflowing, None), **_of_scaler),
    Case("grad_scaler_overflow", partial(scaled_training, clip=False), partial(_overflowing, 2), **_of_scaler),
    Case("grad_scaler_clip_overflow", partial(scaled_training, clip=True), partial(_overflowing, 1), **_of_scaler),
    Case(
        "grad_scaler_updated_between_steps",
        partial(scaled_training, clip=True, updates_outside=True),
        partial(_overflowing, 1, (8, 1, 8, 1, 8)),
        **_of_scaler,
    ),
    *named(autocast, tolerance=5e-3, dtype=torch.float32),
    Case("assigned_state_dict", partial(exchanged, _assign)),
    Case("pruned_half_way", partial(exchanged, _prune)),
    *named(pruned_for_a_while, batches=partial(regression, (*EVEN_ROWS[1:], 1))),
    *named(pruned_further, penalties_in_one_list, batches=partial(regression, (12, 1, 12, 1, 12))),
    Case("parametrized_half_way", partial(exchanged, _parametrize)),
    Case("edited_in_numpy_half_way", partial(exchanged, _edit_in_numpy)),
    Case("another_head_half_way", partial(exchanged, _another_head, clip=True), warns=_OUTSIDE),
    Case("another_model_half_way", partial(exchanged, _another_model), warns=_OUTSIDE),
    *(
        Case(f"{name}_behind_the_hooks", partial(behind_the_hooks, child), warns=_OUTSIDE)
        for name, child in {
            "layer": lambda: filled(nn.Linear(3, 3)),
            "lazy_layer": lambda: FilledLazyLinear(3),
            "buffer": _Mean,
        }.items()
    ),
    *named(inner_optimizer_over_tensors, inner_optimizer_over_a_copy, batches=_inner),
    *named(adversarial_input, evaluated_between_steps, evaluated_in_step, edited_between_steps, elements_set_aside),
)
