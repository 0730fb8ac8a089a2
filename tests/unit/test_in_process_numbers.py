"""Steps that lean on what engines easily get wrong, compared with the same step in a plain loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
from tests.unit.in_process_strategies import STRATEGIES, opened
from torchstrat.testing import contract
from torchstrat.testing.training import (
    Case,
    Mlp,
    Training,
    classification,
    plain_step,
    plain_training,
    regression,
    squared_error,
)

UNEVEN = (8, 12, 5, 7, 9)
CASES: list[Case] = []


def case(**options):
    """Make the decorated function, which builds a training, a case of its name."""

    def add(build):
        CASES.append(Case(build.__name__, build, **{"batches": partial(regression, (12,) * 5), **options}))
        return build

    return add


# -- wrappers around optimizers --------------------------------------------------------------------------------------


class SharpnessAware(torch.optim.Optimizer):
    """As it is found on the web: an ascent step, a descent step, a copy of the weights in ``state`` in between."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old"]
        self.base.step()

    def step(self, closure=None):
        raise NotImplementedError


@case()
def sharpness_aware():
    model = Mlp()
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.2, momentum=0.9)

    def step(batch):
        x, y = batch
        squared_error(model(x), y).mean().backward()
        optimizer.first_step()
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        optimizer.second_step()
        optimizer.zero_grad()
        return losses.detach()

    return Training(step, {"model": model})


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer. Where it does without ``super().__init__``, torch's step hooks do not know it."""

    def __init__(self, base, *, initialize, every=2, blend=0.5):
        if initialize:
            super().__init__(base.param_groups, base.defaults)
        self.base, self.every, self.blend, self.counter = base, every, blend, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.counter += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                elif self.counter % self.every == 0:
                    state["slow"].add_(p - state["slow"], alpha=self.blend)
                    p.data.copy_(state["slow"])


def _lookahead(*, initialize):
    class Own(Lookahead):
        """A class of its own, because torch adds its hooks to the class."""

    model = Mlp()
    optimizer = Own(torch.optim.SGD(model.parameters(), lr=0.3), initialize=initialize)
    return Training(plain_step(model, optimizer), {"model": model, "count": lambda: optimizer.counter})


CASES += [
    Case("lookahead", partial(_lookahead, initialize=True), partial(regression, (12,) * 5)),
    Case("lookahead_without_hooks", partial(_lookahead, initialize=False), partial(regression, (12,) * 5)),
]


@case()
def step_in_backward():
    """One optimizer per parameter, stepped as soon as its gradient is there."""
    model = Mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def use(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(use)

    def step(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        losses.mean().backward()
        return losses.detach()

    return Training(step, {"model": model})


@case()
def weights_edited_by_step_hooks():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def decay(*_):
        for p in model.parameters():
            p.mul_(0.97)

    optimizer.register_step_post_hook(decay)
    optimizer.register_step_pre_hook(decay)
    seen = torch.zeros((), dtype=torch.float64)
    train = plain_step(model, optimizer)

    def step(batch):
        losses = train(batch)
        return losses + model.first.weight.detach().sum()

    return Training(step, {"model": model, "seen": seen})


@case()
def group_added_in_step():
    model, extra = Mlp(), Mlp(3, 4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch):
        x, y = batch
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        losses = squared_error(extra(model(x)), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model, "extra": extra, "optimizer": optimizer})


@case()
def everything_made_in_first_run():
    """Model, optimizer and scheduler are made by the step when it first runs."""
    made = {}

    def step(batch):
        x, y = batch
        if not made:
            model = Mlp()
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            made.update(model=model, optimizer=optimizer, scheduler=lr_scheduler.StepLR(optimizer, 2, 0.5))
        made["optimizer"].zero_grad()
        losses = squared_error(made["model"](x), y)
        losses.mean().backward()
        made["optimizer"].step()
        made["scheduler"].step()
        return losses.detach()

    return Training(
        step,
        {
            "weight": lambda: made["model"].first.weight,
            "rate": lambda: made["optimizer"].param_groups[0]["lr"],
            "count": lambda: made["scheduler"].last_epoch,
        },
    )


class MakesItsOwn(nn.Module):
    """Makes parameter and buffer in its first forward, as much code outside of torch does."""

    def __init__(self):
        super().__init__()
        self.weight = None

    def forward(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(torch.linspace(-1, 1, x.shape[1] * 3).view(3, -1))
            self.register_buffer("scale", torch.full((), 0.5))
        return nn.functional.linear(x, self.weight) * self.scale


@case()
def parameter_made_in_forward():
    model = MakesItsOwn()
    made = {}

    def step(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        if not made:
            made["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made["optimizer"].zero_grad()
        losses.mean().backward()
        made["optimizer"].step()
        return losses.detach()

    return Training(step, {"weight": lambda: model.weight, "scale": lambda: model.scale})


# -- inner loops ---------------------------------------------------------------------------------------------------


def _inner_loop(y):
    """Fit each row by itself: what a replica computes does not depend on the other rows."""
    answers = []
    for wanted in y:
        guess = torch.zeros(3, requires_grad=True)
        inner = torch.optim.SGD([guess], lr=0.3, momentum=0.5)
        for _ in range(2):
            inner.zero_grad()
            ((guess - wanted) ** 2).sum().backward()
            inner.step()
        answers.append(guess.detach())
    return torch.stack(answers)


@case(batches=partial(regression, (12,) * 2))
def inner_optimizer_over_tensors():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        target = _inner_loop(y)
        optimizer.zero_grad()
        losses = squared_error(model(x), target)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


@case(batches=partial(regression, (12,) * 2))
def inner_optimizer_over_a_copy():
    """A copy is trained for a while on this replica's rows alone: here all replicas see the same inner data."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner_x, inner_y = regression((4,))[0]

    def step(batch):
        x, y = batch
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.2, momentum=0.5)
        for _ in range(3):
            inner.zero_grad()
            squared_error(fast(inner_x), inner_y).mean().backward()
            inner.step()
        optimizer.zero_grad()
        losses = squared_error(model(x), y + fast(x).detach())
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


@case()
def adversarial_input():
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch):
        x, y = batch
        delta = nn.Parameter(torch.zeros_like(x))
        attack = torch.optim.SGD([delta], lr=0.5)
        for _ in range(2):
            attack.zero_grad()
            (-squared_error(model(x + delta), y).sum()).backward(inputs=[delta])
            attack.step()
        optimizer.zero_grad()
        losses = squared_error(model(x + delta.detach()), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


# -- backward ------------------------------------------------------------------------------------------------------


@case(batches=partial(regression, UNEVEN))
def backward_twice_over_one_graph():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward(retain_graph=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("not today")


@case()
def backward_that_fails_is_caught():
    """The gradients that were accumulated before the failure are dropped, and another loss is used."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        hidden = _Fails.apply(model.tanh(model.first(x)))
        try:
            model.last(hidden).sum().backward()
        except ArithmeticError:
            optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


@case(batches=partial(regression, UNEVEN))
def backward_of_some_inputs():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward(inputs=list(model.last.parameters()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


@case(batches=partial(regression, UNEVEN))
def nested_reentrant_checkpoints():
    model = Mlp(6, 6, 6)
    head = nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def inner(x):
        return checkpoint(model, x, use_reentrant=True)

    def step(batch):
        x, y = batch
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        losses = squared_error(head(inner(checkpoint(lambda v: inner(v) + model(v), x, use_reentrant=True))), y)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model, "head": head})


@case(gradient_reduce_op="sum", batches=partial(regression, UNEVEN))
def sums_zeroed_in_place():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def step(batch):
        x, y = batch
        optimizer.zero_grad(set_to_none=False)
        losses = squared_error(model(x), y)
        losses[x[:, 0] > 0].sum().backward(retain_graph=True)
        losses.square().sum().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


@case(gradient_reduce_op="sum", batches=partial(regression, UNEVEN))
def sums_of_branches():
    """Each row decides which of two layers its replica uses, in each of several backward passes."""
    layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.02)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        total = 0
        for passes in range(3):
            choice = (x[:, passes] > 0.5).long()
            loss = x.sum() * 0 + layers[0].weight.sum() * 0
            losses = torch.zeros(len(x))
            for index, layer in enumerate(layers):
                rows = choice == index
                if rows.any():
                    losses = losses.masked_scatter(rows, squared_error(layer(x[rows]), y[rows]))
            (losses.sum() + loss).backward()
            total = total + losses.detach()
        optimizer.step()
        return total

    return Training(step, {"layers": layers})


def _accumulating(*, clip=False):
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def accumulate(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        losses.sum().backward()
        return losses.detach()

    def step(batch):
        losses = accumulate(batch)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Training(step, {"model": model}, accumulate=accumulate, accumulate_on=frozenset({0, 2, 3}))


# The last replicas get no rows in some runs, inside and outside of no_sync.
IDLE = (8, 1, 2, 8, 1)
CASES.append(Case("sums_accumulated_and_idle", _accumulating, partial(regression, IDLE), gradient_reduce_op="sum"))
CASES.append(
    Case(
        "sums_accumulated_and_idle_clipped",
        partial(_accumulating, clip=True),
        partial(regression, (1, 8, 8, 2, 1)),
        gradient_reduce_op="sum",
    )
)


def _means_accumulated():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def accumulate(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        losses.mean().backward()
        return losses.detach()

    def step(batch):
        losses = accumulate(batch)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Training(step, {"model": model}, accumulate=accumulate, accumulate_on=frozenset({0, 2, 3}))


CASES.append(Case("means_accumulated_and_idle", _means_accumulated, partial(regression, IDLE)))
CASES.append(Case("means_accumulated_and_idle_2", _means_accumulated, partial(regression, (1, 8, 8, 2, 1))))


@case(batches=partial(regression, UNEVEN))
def no_sync_within_the_step():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        strategy = ts.get_strategy()
        if ts.has_strategy():
            with strategy.no_sync():
                losses.mean().backward(retain_graph=True)
        else:
            losses.mean().backward(retain_graph=True)
        losses.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


@case()
def update_by_hand():
    """No optimizer at all: an all_reduce between forward and backward, then an update in place."""
    model = Mlp()

    def step(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        context = ts.get_replica_context()
        context.all_reduce("mean", losses.detach().mean())
        gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
        gradients = context.all_reduce("mean", list(gradients))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(g, alpha=0.1)
        return losses.detach()

    return Training(step, {"model": model})


@case(gradient_reduce_op="sum")
def edited_before_the_others_have_finished_backward():
    """Under no_sync no replica waits for the others, and this one edits its weights right away."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def accumulate(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        ts.get_replica_context().all_reduce("sum", losses.detach().sum())
        losses.sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.98)
        return losses.detach()

    def step(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach()

    return Training(step, {"model": model}, accumulate=accumulate, accumulate_on=frozenset({0, 2}))


@case(batches=partial(classification, (12,) * 4))
def embedding_with_max_norm():
    """The forward pass itself scales rows of the table down, in place."""
    table, head = nn.Embedding(12, 4, max_norm=0.8), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.5)

    def step(batch):
        ids, labels = batch
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(head(table(ids).mean(dim=1)), labels, reduction="none")
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"table": table, "head": head})


@case()
def double_backward_across_all_reduce():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        x, y = batch
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        context = ts.get_replica_context()
        losses = squared_error(model(x), y)
        mean = context.all_reduce("mean", losses.square().mean())
        # The gradient of an all_reduced mean is the local mean's, which has so many rows fewer.
        rows = mean.square() / context.num_replicas_in_sync + losses.sum()
        (gradient,) = torch.autograd.grad(rows, x, create_graph=True)
        (losses.mean() + gradient.square().sum(dim=1).mean()).backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


# -- models ----------------------------------------------------------------------------------------------------------


def _trained(model, rate=0.1):
    return plain_training(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))


@case()
def spectral_norm():
    model = Mlp()
    parametrizations.spectral_norm(model.first)
    return _trained(model)


@case()
def parametrized_half_way():
    """Outside of the scope, between two runs, so no hook sees it."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((), 1.5))

        def forward(self, weight):
            return weight * self.scale

    def before(index):
        if index == 2:
            parametrize.register_parametrization(model.first, "weight", Scaled())
            optimizer.add_param_group({"params": [model.first.parametrizations.weight[0].scale]})

    return Training(plain_step(model, optimizer), {"model": model}, before=before)


@case()
def head_replaced_half_way():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 3)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]

    def before(index):
        if index == 2:
            model[2] = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
            with torch.no_grad():
                for p in model[2].parameters():
                    p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
            optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        losses = squared_error(model(x), y)
        model.zero_grad()
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizers[0].step()
        return losses.detach()

    return Training(step, {"model": model}, before=before)


class Counts(nn.Module):
    """Buffers of every kind: shared, not saved, replaced, made on the way, of integers and of a replica's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.other = nn.Module()
        self.other.register_buffer("shared", self.mean)
        ts.get_strategy().extended.set_aggregation(self, "mean", "mean")

    def forward(self, x):
        out = self.layer(x)
        self.steps += 1
        self.mean.mul_(0.5).add_(out.detach().mean(dim=0), alpha=0.5)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(3))
            ts.get_strategy().extended.set_aggregation(self, "late", "mean")
        self.late = self.late * 0.5 + out.detach().mean(dim=0)
        return out + self.other.shared.mean() * 0


@case()
def buffers_of_every_kind():
    model = Counts()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    return Training(
        plain_step(model, optimizer),
        {
            "layer": model.layer,
            "steps": lambda: model.steps,
            "mean": lambda: model.mean,
            "shared": lambda: model.other.shared,
            "late": lambda: model.late,
        },
    )


@case()
def data_set_and_weights_exchanged_in_step():
    """Weights are read out as one vector, changed, and written back as views of it."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = plain_step(model, optimizer)

    def step(batch):
        losses = train(batch)
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.98, model.parameters())
        return losses

    return Training(step, {"model": model})


@case()
def edited_through_data_everywhere():
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        for p in model.parameters():
            p.data.mul_(0.98)
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        for p in model.parameters():
            p.data.add_(0.01)
        optimizer.step()
        for p in model.parameters():
            p.data = p.data * 0.99
        return losses.detach()

    def after(index, loss):
        for p in model.parameters():
            p.data.sub_(0.003)

    return Training(step, {"model": model}, after=after)


@case()
def frozen_in_the_step():
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rounds = {"now": 0}

    def before(index):
        rounds["now"] = index

    def step(batch):
        x, y = batch
        model.first.requires_grad_(rounds["now"] % 2 == 1)
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model}, before=before)


def _scheduled(make, *, in_step):
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = make(optimizer)
    train = plain_step(model, optimizer)

    def advance(loss):
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()

    def step(batch):
        losses = train(batch)
        if in_step:
            advance(losses)
        return losses

    def after(index, loss):
        if not in_step:
            advance(loss)

    rate = {"rate": lambda: optimizer.param_groups[0]["lr"], "momentum": lambda: optimizer.param_groups[0]["momentum"]}
    return Training(step, {"model": model, **rate}, after=after)


SCHEDULERS = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=6),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.7)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.7)]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.05, 0.3, step_size_up=2),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}
CASES += [
    Case(
        f"scheduler_{name}_{'in' if in_step else 'out'}",
        partial(_scheduled, make, in_step=in_step),
        partial(regression, (12,) * 5),
    )
    for name, make in SCHEDULERS.items()
    for in_step in (True, False)
]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_numbers_of_a_plain_loop(one, name):
    replicas, _ = STRATEGIES[name]
    with opened(name, gradient_reduce_op=one.gradient_reduce_op) as strategy:
        contract.check(one, contract.run_case(one, strategy), contract.reference(one, replicas))
