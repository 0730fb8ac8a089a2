"""Training cases: which optimizer, how its state and its settings change, and what wraps it."""

from __future__ import annotations

import copy
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import ParamsT
from torch.optim.swa_utils import SWALR

from torchstrat.testing.training import (
    STEPS,
    Batch,
    Case,
    Mlp,
    Training,
    adam,
    classification,
    filled,
    named,
    plain_step,
    plain_training,
    regression,
    sgd,
    squared_error,
    train_step,
)


def with_optimizer(make: Callable[[ParamsT], torch.optim.Optimizer]) -> Training:
    model = Mlp()
    return plain_training(model, make(model.parameters()))


class _Inertia(torch.optim.Optimizer):
    """Stands for optimizers of other packages: Python state of its own, and no check for missing gradients."""

    def __init__(self, parameters: ParamsT, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps_taken = 0
        self.velocity: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if not self.velocity:
            self.velocity = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]
        self.steps_taken += 1
        for group, velocities in zip(self.param_groups, self.velocity, strict=True):
            for index, parameter in enumerate(group["params"]):
                velocity = velocities[index].mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=group["lr"] / self.steps_taken)


class _Counting(torch.optim.Optimizer):
    """Keeps a count of its steps in its state, under a name, as some optimizers of other packages do."""

    def __init__(self, parameters: ParamsT, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.state["taken"] = torch.tensor([0])  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        taken = self.state["taken"]  # type: ignore[index]
        taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / taken.item())


def count_in_optimizer_state() -> Training:
    model = Mlp()
    return Training(plain_step(model, _Counting(model.parameters(), lr=0.1)), {"model": model})


def third_party_optimizer() -> Training:
    model = Mlp()
    return Training(plain_step(model, _Inertia(model.parameters(), lr=0.1)), {"model": model})


class FreeOfSchedules(torch.optim.Optimizer):
    """Weights are put where they are to be evaluated, and back, from what the optimizer keeps, between steps."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "fast" not in state:
                    state["fast"] = parameter.clone()
                state["fast"].sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(state["fast"], 0.4)

    @torch.no_grad()
    def move(self, share: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "fast" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["fast"], share)


def weights_moved_by_optimizer() -> Training:
    """Not after the last step: under central storage between processes the first rank's alone would show it."""
    model = Mlp()
    optimizer = FreeOfSchedules(model.parameters(), {"lr": 0.1})
    return Training(
        plain_step(model, optimizer),
        {"model": model},
        before=lambda step_index: optimizer.move(-0.25 if step_index % 2 else 0.0),
        after=lambda step_index, loss: optimizer.move(0.5 if step_index < STEPS - 1 else 0.0),
    )


class _Exchanging(torch.optim.Optimizer):
    """Every other step exchanges the elements of a parameter with those of its state, by reference; and the elements of
    parameters of one shape with each other."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        of_shape: dict[tuple[int, ...], torch.Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("slow", parameter.detach().clone())
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["slow"].lerp_(parameter, 0.3)
                if state["steps"] % 2 == 0:
                    parameter.data, state["slow"] = state["slow"], parameter.data
                other = of_shape.setdefault(tuple(parameter.shape), parameter)
                if other is not parameter:
                    parameter.data, other.data = other.data, parameter.data


def elements_exchanged_by_optimizer() -> Training:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), Mlp())
    optimizer = _Exchanging(model.parameters(), {"lr": 0.1})
    return Training(plain_step(model, optimizer), {"model": model})


class _Warming(torch.optim.Optimizer):
    """Sets its own rate, and comes back to what it was given."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            if group["steps"] <= 3:
                group["lr"] = group["full"] * group["steps"] / 3
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def rate_set_by_optimizer() -> Training:
    """And later by its user."""
    model = Mlp()
    optimizer = _Warming(model.parameters(), {"lr": 0.3, "full": 0.3, "steps": 0})
    seen: list[float] = []

    def after(step_index: int, loss: torch.Tensor) -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        if step_index == 3:
            optimizer.param_groups[0]["lr"] = 0.05

    watch = {"model": model, "optimizer": optimizer, "rates": lambda: torch.tensor(seen)}
    return Training(plain_step(model, optimizer), watch, after=after)


class _SharpnessAware(torch.optim.Optimizer):
    """As it is found on the web: an ascent step, a descent step, a copy of the weights in ``state`` in between."""

    def __init__(self, params: ParamsT, base: Any, rho: float = 0.05, **options: object) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _trained(self) -> list[tuple[torch.Tensor, float]]:
        return [(p, g["rho"]) for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def ascend(self) -> None:
        norm = torch.stack([p.grad.norm() for p, _ in self._trained() if p.grad is not None]).norm()
        for p, rho in self._trained():
            assert p.grad is not None
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (rho / (norm + 1e-12)))

    @torch.no_grad()
    def descend(self) -> None:
        for p, _ in self._trained():
            p.data = self.state[p]["old"]
        self.base.step()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def sharpness_aware() -> Training:
    model = Mlp()
    optimizer = _SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.2, momentum=0.9)
    backward = plain_step(model)

    def step(batch: Batch) -> torch.Tensor:
        backward(batch)
        optimizer.ascend()
        optimizer.zero_grad()
        losses = backward(batch)
        optimizer.descend()
        optimizer.zero_grad()
        return losses

    return Training(step, {"model": model})


def lookahead(*, initialize: bool, tables: bool = False) -> Training:
    """A wrapper of another optimizer. Where it does without ``super().__init__``, torch's step hooks do not know it.

    ``tables``: it sets one of torch's tables of hooks itself, as packages do for what looks at them.
    """

    class Lookahead(torch.optim.Optimizer):
        """Made anew, because torch adds its hooks to the class."""

        def __init__(self, base: torch.optim.Optimizer, every: int = 2, blend: float = 0.5) -> None:
            if initialize:
                super().__init__(base.param_groups, base.defaults)
            if tables:
                self._optimizer_step_pre_hooks = {}
            self.base, self.every, self.blend, self.counter = base, every, blend, 0
            self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.base.zero_grad(set_to_none)

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.base.step()
            self.counter += 1
            for p in (p for group in self.param_groups for p in group["params"]):
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                elif self.counter % self.every == 0:
                    state["slow"].add_(p - state["slow"], alpha=self.blend)
                    p.data.copy_(state["slow"])

    model = Mlp()
    optimizer = Lookahead(sgd(model, lr=0.3, momentum=0.0))
    return Training(plain_step(model, optimizer), {"model": model, "count": lambda: optimizer.counter})


class _Several(torch.optim.Optimizer):
    """Steps several, and saves them as a list."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        self.each, self.defaults, self.state = each, {}, defaultdict(dict)
        self._optimizer_step_pre_hooks = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for one in self.each for group in one.param_groups]

    def state_dict(self) -> Any:
        return [one.state_dict() for one in self.each]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.each:
            one.zero_grad(set_to_none)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


class _Chained(torch.optim.Optimizer):
    """Steps several, and shows their states as one."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        groups = [group for one in each for group in one.param_groups]
        super().__init__(groups, {})
        self.each, self.param_groups, self.state = each, groups, ChainMap(*(one.state for one in each))  # type: ignore[assignment]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


def states_in_a_chain() -> Training:
    model = Mlp()
    optimizer = _Chained(sgd(model.first), sgd(model.last, momentum=0.5))
    return Training(plain_step(model, optimizer), {"model": model})


def several_in_one() -> Training:
    model = Mlp()
    optimizer = _Several(sgd(model.first), sgd(model.last, momentum=0.0))
    return Training(plain_step(model, optimizer), {"model": model})


def sparse_adam() -> Training:
    table, head = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 3)
    sparse = torch.optim.SparseAdam(table.parameters(), lr=0.05)

    def losses(ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(table(ids).mean(dim=1)), label, reduction="none")

    return Training(train_step(losses, sparse, sgd(head, momentum=0.0)), {"table": table, "head": head})


def with_closure(make: Callable[[ParamsT], torch.optim.Optimizer], *, returns_loss: bool = False) -> Training:
    """``returns_loss``: what the optimizer's step returns, which is the loss over the global batch on every replica."""
    model = Mlp()
    optimizer = make(model.parameters())

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch

        def closure() -> Any:
            optimizer.zero_grad()
            loss = squared_error(model(x), y).mean()
            loss.backward()
            return loss

        loss = torch.as_tensor(optimizer.step(closure)).detach()
        with torch.no_grad():
            return loss.expand(len(x)).clone() if returns_loss else squared_error(model(x), y)

    return Training(step, {"model": model})


def rate_set_by_hand() -> Training:
    model = Mlp()
    groups: list[dict[str, object]] = [
        {"params": model.first.parameters(), "lr": 0.3},
        {"params": model.last.parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    train = plain_step(model, optimizer)

    def step(batch: Batch) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
        return train(batch)

    return Training(step, {"model": model, "optimizer": optimizer})


def group_added_later() -> Training:
    model = Mlp()
    optimizer = adam(model.last)

    def before(step_index: int) -> None:
        if step_index == 2:
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})

    return Training(plain_step(model, optimizer), {"model": model, "optimizer": optimizer}, before=before)


def group_added_in_step() -> Training:
    model, extra = Mlp(), Mlp(3, 4, 3)
    optimizer = adam(model)

    def call(x: torch.Tensor) -> Any:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.02})
        return extra(model(x))

    return Training(plain_step(call, optimizer), {"model": model, "extra": extra, "optimizer": optimizer})


def replaced_in_step(replace: Callable[[Mlp], object]) -> Training:
    """In the third run the step gives the model another last layer, made of the one that is there, and the optimizer
    its parameters."""
    model = Mlp()
    optimizer = adam(model)
    runs = [0]

    def call(x: torch.Tensor) -> torch.Tensor:
        if runs[0] == 2:
            old = list(model.last.parameters())
            replace(model)
            group, ids = optimizer.param_groups[0], {id(parameter) for parameter in old}
            group["params"] = [one for one in group["params"] if id(one) not in ids]
            for parameter in old:
                optimizer.state.pop(parameter, None)
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        hidden: torch.Tensor = model(x)
        return hidden

    def before(index: int) -> None:
        runs[0] = index

    return Training(plain_step(call, optimizer), {"model": model, "optimizer": optimizer}, before=before)


def _another_layer(model: Mlp) -> None:
    layer = nn.Linear(model.last.in_features, model.last.out_features)
    layer.load_state_dict({name: value * 0.5 for name, value in model.last.state_dict().items()})
    model.last = layer


def _other_parameters(model: Mlp) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach() * 0.5)
    model.last.bias = nn.Parameter(model.last.bias.detach() * 0.5)


def state_dict_round_trip() -> Training:
    """Saves after the second step and goes back there after the third: model, optimizer and scheduler."""
    model = Mlp()
    optimizer = adam(model)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    saved: list[dict[str, object]] = []

    def after(step_index: int, loss: torch.Tensor) -> None:
        scheduler.step()
        parts: tuple[Any, ...] = (model, optimizer, scheduler)
        if step_index == 1:
            saved.extend(copy.deepcopy(part.state_dict()) for part in parts)
        if step_index == 2:
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)

    watch = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Training(plain_step(model, optimizer), watch, after=after)


def snapshot_loaded_again() -> Training:
    """What is loaded is not copied: steps change the snapshot, which is loaded once more."""
    model = Mlp()
    optimizer = adam(model)
    saved: list[dict[str, Any]] = []

    def after(step_index: int, loss: torch.Tensor) -> None:
        if step_index == 0:
            saved.append(copy.deepcopy(optimizer.state_dict()))
        if step_index in (1, 3):
            optimizer.load_state_dict(saved[0])

    return Training(plain_step(model, optimizer), {"model": model, "optimizer": optimizer}, after=after)


def begun_elsewhere(make: Callable[[ParamsT], torch.optim.Optimizer], *names: str) -> Training:
    """The optimizer is given the state of an earlier training where it is made."""
    model = Mlp()
    optimizer = make(model.parameters())
    state = optimizer.state_dict()
    for number, parameter in enumerate(model.parameters()):
        state["state"][number] = {"step": torch.tensor(3.0)} | {name: torch.full_like(parameter, 0.2) for name in names}
    optimizer.load_state_dict(state)
    return Training(plain_step(model, optimizer), {"model": model})


def state_replaced() -> Training:
    """By none, as programs begin another task with an optimizer that they have; also as a group is added."""
    model = Mlp()
    optimizer = adam(model.first)

    def before(step_index: int) -> None:
        if step_index in (2, 4):
            optimizer.state = defaultdict(dict)
        if step_index == 2:
            optimizer.add_param_group({"params": list(model.last.parameters())})

    return Training(plain_step(model, optimizer), {"model": model}, before=before)


def everything_made_in_first_run() -> Training:
    """Model, optimizer and scheduler are made by the step when it first runs."""
    made: dict[str, Any] = {}

    def step(batch: Batch) -> torch.Tensor:
        if not made:
            made["model"] = filled(Mlp())
            made["optimizer"] = adam(made["model"], lr=0.1)
            made["scheduler"] = lr_scheduler.StepLR(made["optimizer"], 2, 0.5)
        losses = plain_step(made["model"], made["optimizer"])(batch)
        made["scheduler"].step()
        return losses

    watch = {
        "weight": lambda: made["model"].first.weight,
        "rate": lambda: made["optimizer"].param_groups[0]["lr"],
        "count": lambda: made["scheduler"].last_epoch,
    }
    return Training(step, watch)


# -- schedulers ------------------------------------------------------------------------------------------------------

Make = Callable[[torch.optim.Optimizer], Any]


def scheduled(make: Make, *, in_step: bool) -> Training:
    """The scheduler is stepped by the step, or outside of `run`, where it may look at the loss."""
    model = Mlp()
    optimizer = sgd(model, lr=0.2)
    scheduler = make(optimizer)
    train = plain_step(model, optimizer)
    looks = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        if in_step:
            scheduler.step(*([1.0] if looks else []))
        return losses

    def after(step_index: int, loss: torch.Tensor) -> None:
        if not in_step:
            scheduler.step(*([loss] if looks else []))

    watch = {"model": model, "optimizer": optimizer}
    return Training(step, watch if looks else {**watch, "scheduler": scheduler}, after=after)


def _constant_and_exponential(optimizer: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
    return [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.7)]


_SCHEDULERS: Mapping[str, Make] = {
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.8),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "one_cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=8),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.5),
    "sequential": lambda one: lr_scheduler.SequentialLR(one, _constant_and_exponential(one), [2]),
    "chained": lambda one: lr_scheduler.ChainedScheduler(_constant_and_exponential(one)),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.05, max_lr=0.3, step_size_up=2),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step),
    "averaging": partial(SWALR, swa_lr=0.01, anneal_epochs=3),
}
_OPTIMIZERS: Mapping[str, Callable[[ParamsT], torch.optim.Optimizer]] = {
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam_foreach": partial(torch.optim.Adam, lr=0.05, foreach=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True, foreach=False),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "tensor_rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False),
}
_LBFGS = partial(torch.optim.LBFGS, lr=0.2, max_iter=4)
_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_BEGUN = {"sgd_momentum": ["momentum_buffer"], "adam_foreach": ["exp_avg", "exp_avg_sq"], "adagrad": ["sum"]}

CASES = (
    *(Case(name, partial(with_optimizer, make)) for name, make in _OPTIMIZERS.items()),
    *named(
        third_party_optimizer,
        count_in_optimizer_state,
        weights_moved_by_optimizer,
        elements_exchanged_by_optimizer,
        rate_set_by_optimizer,
        sharpness_aware,
        rate_set_by_hand,
        group_added_later,
        group_added_in_step,
    ),
    Case("layer_replaced_in_step", partial(replaced_in_step, _another_layer)),
    Case("parameters_replaced_in_step", partial(replaced_in_step, _other_parameters)),
    Case(
        "parameters_replaced_in_step_idle",
        partial(replaced_in_step, _other_parameters),
        partial(regression, (12, 12, 1, 12, 12)),
    ),
    *(Case(f"{name}_begun_elsewhere", partial(begun_elsewhere, _OPTIMIZERS[name], *of)) for name, of in _BEGUN.items()),
    *named(state_dict_round_trip),
    Case("snapshot_loaded_again_idle", snapshot_loaded_again, partial(regression, (8, 8, 3, 1, 8))),
    *named(state_replaced, snapshot_loaded_again, everything_made_in_first_run),
    *named(sparse_adam, batches=classification),
    Case("lookahead", partial(lookahead, initialize=True)),
    Case("lookahead_without_hooks", partial(lookahead, initialize=False)),
    Case(
        "lookahead_without_hooks_idle", partial(lookahead, initialize=False), partial(regression, (12, 12, 1, 12, 12))
    ),
    Case("states_in_a_chain", states_in_a_chain, partial(regression, (12, 12, 1, 12, 12))),
    Case("several_in_one", several_in_one, partial(regression, (12, 12, 1, 12, 12))),
    Case(
        "lookahead_with_plain_hooks",
        partial(lookahead, initialize=False, tables=True),
        partial(regression, (12, 12, 12, 1, 12, 12)),
    ),
    Case("lbfgs", partial(with_closure, _LBFGS), tolerance=1e-6),
    Case("lbfgs_strong_wolfe", partial(with_closure, partial(_LBFGS, line_search_fn="strong_wolfe")), tolerance=1e-6),
    Case("closure_of_sgd", partial(with_closure, _SGD, returns_loss=True)),
    *(
        Case(f"{name}_scheduler_{where}", partial(scheduled, make, in_step=where == "in_step"))
        for name, make in _SCHEDULERS.items()
        for where in ("in_step", "outside")
    ),
)
