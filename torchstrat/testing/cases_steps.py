"""Training cases: what a step does between backward and optimizer, and to its parameters by hand; batches that do not
divide, weights of their own, and replicas that talk in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import torchstrat as ts
from torchstrat.testing.training import (
    EVEN_ROWS,
    STEPS,
    Batch,
    Case,
    Mlp,
    Training,
    adam,
    named,
    no_numbers,
    plain_step,
    regression,
    scale,
    sgd,
    squared_error,
    train_step,
)

UNEVEN_ROWS = (8, 5, 7, 3, 6)
EMPTY_ROWS = (8, 1, 2, 5, 1)
"""With two replicas the second has no rows at steps 1 and 4, with four there are never rows for all at 1, 2 and 4."""
uneven, empty = partial(regression, UNEVEN_ROWS), partial(regression, EMPTY_ROWS, (3, 2))


def plain() -> Training:
    model = Mlp()
    return Training(plain_step(model, sgd(model)), {"model": model})


def refuses_no_rows(*, clip: bool) -> Training:
    """Plain code that cannot be called without rows: a reshape that guesses, a mean of nothing, Adam's state."""
    model = Mlp()
    optimizer = sgd(model, lr=0.2) if clip else adam(model)
    edit = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.1) if clip else None
    step = plain_step(lambda x: model(x.reshape(len(x), -1)), optimizer, edit=edit)
    return Training(step, {"model": model, "optimizer": optimizer})


def sum_loss() -> Training:
    model = Mlp()
    return Training(plain_step(model, sgd(model, lr=0.01), loss=torch.sum), {"model": model})


def average_loss() -> Training:
    """TensorFlow's convention: divided by the global batch in the step, then summed over replicas."""
    model = Mlp()

    def loss(losses: torch.Tensor) -> torch.Tensor:
        regularization = ts.scale_regularization_loss(0.01 * model.first.weight.square().sum())
        return ts.compute_average_loss(losses, global_batch_size=EVEN_ROWS[0]) + regularization

    return Training(plain_step(model, sgd(model), loss=loss), {"model": model})


def token_weighted() -> Training:
    """A mean over tokens, of which every row has its own number; a replica may have rows and no token at all."""
    model = Mlp()

    def losses(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(rows, length, 6), (rows, length, 3), (rows,) → the loss of each token."""
        valid = torch.arange(x.shape[1]) < counts.unsqueeze(1)
        _context().set_weight(float(valid.sum()))
        return squared_error(model(x), y)[valid]

    return Training(train_step(losses, sgd(model), loss=lambda rows: rows.sum() / max(1, len(rows))), {"model": model})


def _sentences() -> list[Batch]:
    generator = np.random.default_rng(5)
    batches: list[Batch] = []
    for index, rows in enumerate(UNEVEN_ROWS):
        counts = generator.integers(1, 5, size=rows)
        if index == 3:
            counts[-1] = 0  # the last replica's only row, with two replicas and with four
        x, y = generator.normal(size=(rows, 4, 6)), generator.normal(size=(rows, 4, 3))
        batches.append((torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(counts)))
    return batches


def centred_by_mean() -> Training:
    """The mean prediction of the global batch is taken off, and the gradient goes through it."""
    model = Mlp()

    def call(x: torch.Tensor) -> Any:
        prediction = model(x)
        return prediction - _context().all_reduce("mean", prediction.mean(dim=0))

    return Training(plain_step(call, sgd(model)), {"model": model})


def centred_by_sum() -> Training:
    """As `centred_by_mean`, by a nest of sum and count, and so right for any number of rows; with a sum loss."""
    model = Mlp()

    def call(x: torch.Tensor) -> Any:
        prediction = model(x)
        parts = {"total": prediction.sum(dim=0), "rows": torch.tensor(float(len(x)))}
        everywhere = _context().all_reduce("sum", parts)
        return prediction - everywhere["total"] / everywhere["rows"]

    return Training(plain_step(call, sgd(model, lr=0.01), loss=torch.sum), {"model": model})


def _context() -> Any:
    context = ts.get_replica_context()
    assert context is not None
    return context


def contrastive() -> Training:
    """Every row is compared with the rows of all replicas, gathered with their gradient."""
    model = Mlp(6, 5, 4)

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = model(x)  # (rows, 4)
        everyone: torch.Tensor = _context().all_gather(features, axis=0)  # (rows of the global batch, 4)
        found: torch.Tensor = (features @ everyone.T).logsumexp(dim=1) - features[:, :3].mul(y).sum(dim=1)
        return found

    return Training(train_step(losses, adam(model, lr=0.02)), {"model": model})


def in_no_module() -> Training:
    """Bare parameters, which an optimizer alone holds; each step returns a column of its scores."""
    weight, bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9)

    def squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ weight + bias - y).square()

    train = train_step(squares, optimizer)
    return Training(lambda batch: train(batch)[:, 0], {"weight": weight, "bias": bias, "optimizer": optimizer})


_OF_BATCHES = (
    Case("uneven_batches", plain, uneven),
    Case("uneven_batches_clipped", partial(refuses_no_rows, clip=True), uneven),
    Case("empty_batches", partial(refuses_no_rows, clip=False), empty),
    Case("empty_batches_clipped", partial(refuses_no_rows, clip=True), empty),
    Case("empty_batches_of_bare_parameters", in_no_module, partial(regression, (8, 1, 5, 1))),
    *named(token_weighted, batches=_sentences),
    *named(sum_loss, average_loss, gradient_reduce_op="sum"),
    Case("sum_loss_uneven", sum_loss, uneven, gradient_reduce_op="sum"),
    Case("all_reduce_mean_in_step", centred_by_mean),
    Case("all_reduce_sum_in_step", centred_by_sum, gradient_reduce_op="sum"),
    Case("all_reduce_sum_in_step_uneven", centred_by_sum, uneven, gradient_reduce_op="sum"),
    Case("all_gather_in_step", contrastive),
)


def edited_gradients(edit: Callable[[nn.Module], object]) -> Training:
    """``edit(model)`` runs between backward and step, and sees the gradient of the global batch."""
    model = Mlp()
    return Training(plain_step(model, sgd(model, lr=0.2), edit=lambda: edit(model)), {"model": model})


def _clip_once(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)


def _clip_twice(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def _add_noise(model: nn.Module, *, drawn: bool) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        noise = torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape)
        parameter.grad.add_(torch.randn_like(parameter) * 0.1 if drawn else noise)


def inspected_gradients() -> Training:
    """The gradient a step looks at is that of the global batch, on every replica."""
    model = Mlp()
    norms: list[torch.Tensor] = []

    def look() -> None:
        norms[:] = [nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])]

    train = plain_step(model, sgd(model, momentum=0.0), edit=look)
    return Training(lambda batch: torch.zeros_like(train(batch)) + norms[0].detach(), {"model": model})


def edited_parameters(
    before: Callable[[nn.Module], object] | None = None, after: Callable[[nn.Module], object] | None = None
) -> Training:
    """Parameters written in place by the step itself, at its begin and at its end."""
    model = Mlp()
    train = plain_step(model, adam(model, lr=0.1))

    def step(batch: Batch) -> torch.Tensor:
        if before is not None:
            before(model)
        losses = train(batch)
        if after is not None:
            after(model)
        return losses

    return Training(step, {"model": model})


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def _decay_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.99)


@torch.no_grad()
def _exchange_as_a_vector(model: nn.Module) -> None:
    """Weights are read out as one vector, changed, and written back as views of it."""
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.98, model.parameters())


def _average_as_lists(model: nn.Module) -> None:
    parameters = list(model.parameters())
    average = get_ema_multi_avg_fn(0.98)
    average(parameters, [torch.zeros_like(one) for one in parameters], 1)


def weights_edited_by_step_hooks() -> Training:
    model = Mlp()
    optimizer = sgd(model, momentum=0.0)
    optimizer.register_step_post_hook(lambda *_: scale(model, 0.97))
    optimizer.register_step_pre_hook(lambda *_: scale(model, 0.97))
    train = plain_step(model, optimizer)
    return Training(lambda batch: train(batch) + model.first.weight.detach().sum(), {"model": model})


def update_by_hand() -> Training:
    """No optimizer at all: an all_reduce between forward and backward, then an update in place."""
    model = Mlp()

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        losses = squared_error(model(x), y)
        context = ts.get_replica_context()
        assert context is not None
        context.all_reduce("mean", losses.detach().mean())
        gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), context.all_reduce("mean", list(gradients)), strict=True):
                p.sub_(g, alpha=0.1)
        return losses.detach()

    return Training(step, {"model": model})


def zero_grad(set_to_none: bool, *, with_model: bool = False, given: bool = False) -> Training:
    """Gradients are zeroed after the step. ``given``: then each gets a value outside of `run`, to add to."""
    model = Mlp()
    optimizer = sgd(model)
    train = plain_step(model)

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        optimizer.step()
        (model if with_model else optimizer).zero_grad(set_to_none=set_to_none)
        return losses

    def before(step_index: int) -> None:
        for parameter in model.parameters() if given else ():
            parameter.grad = torch.full_like(parameter, 0.1)

    return Training(step, {"model": model}, before=before)


# -- accumulation ----------------------------------------------------------------------------------------------------

IDLE_ROWS = (8, 1, 2, 1, 8)
ALSO_IDLE_ROWS = (1, 8, 8, 2, 1)
"""The last replicas have no rows in some runs, inside and outside of no_sync."""


def accumulation(
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.mean,
    *,
    no_sync: bool = True,
    clip: float = 0.0,
    on: frozenset[int] = frozenset({0, 2, 3}),
    lr: float = 0.05,
) -> Training:
    """The runs ``on`` only accumulate, the others step as well; written out as its user has to."""
    model = Mlp()
    optimizer = sgd(model, lr=lr)
    accumulate = plain_step(model, loss=loss)

    def step(batch: Batch) -> torch.Tensor:
        losses = accumulate(batch)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Training(step, {"model": model}, accumulate=accumulate, accumulate_on=on, no_sync=no_sync)


def no_sync_within_the_step() -> Training:
    model = Mlp()

    def loss(losses: torch.Tensor) -> torch.Tensor:
        with ts.get_strategy().no_sync() if ts.has_strategy() else torch.enable_grad():
            losses.mean().backward(retain_graph=True)
        return losses.square().mean()

    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.5)
    return Training(plain_step(model, sgd(model, momentum=0.0), loss=loss, edit=clip), {"model": model})


def no_sync_up_to_the_next_run(
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.mean, *, penalized: bool = False
) -> Training:
    """What a run leaves counts by that run's weights. ``penalized``: the program adds to it."""
    model = Mlp()
    optimizer = sgd(model, lr=0.02 if penalized else 0.1)
    backward = plain_step(model, loss=loss)

    def before(index: int) -> None:
        if penalized and index in (1, 3, 4):
            _penalize(model)

    def accumulate(batch: Batch) -> torch.Tensor:
        with ts.get_strategy().no_sync() if ts.has_strategy() else torch.enable_grad():
            return backward(batch)

    def step(batch: Batch) -> torch.Tensor:
        losses = backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Training(step, {"model": model}, accumulate, frozenset({0, 2, 3}), no_sync=False, before=before)


def stepped_outside_of_runs() -> Training:
    """Runs under no_sync, then a step that is in none."""
    model = Mlp()
    optimizer = sgd(model, lr=0.1)
    backward = plain_step(model)

    def after(index: int, loss: torch.Tensor) -> None:
        if index in (0, 3, 4):
            optimizer.step()
            optimizer.zero_grad()

    return Training(backward, {"model": model}, backward, frozenset({0, 1, 2, 4}), after=after)


def used_between_runs(use: Callable[[nn.Module], object], loss: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    """What runs under no_sync have left, in the program's hands before the run that steps."""
    model = Mlp()
    optimizer = sgd(model, lr=0.02)
    accumulate = plain_step(model, loss=loss)

    def step(batch: Batch) -> torch.Tensor:
        losses = accumulate(batch)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    def before(index: int) -> None:
        if index in (1, 3, 4):
            use(model)

    return Training(step, {"model": model}, accumulate, frozenset({0, 2, 3}), before=before)


def _penalize(model: nn.Module) -> None:
    torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()


def penalties_alone(set_to_none: bool = True) -> Training:
    """Gradients that are made wholly outside of runs; every other run only steps with them."""
    model = Mlp()
    optimizer = sgd(model, lr=0.02)
    add = plain_step(model, loss=torch.sum)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    def step(batch: Batch) -> torch.Tensor:
        losses = squared_error(model(batch[0]), batch[1]).detach()
        finish()
        return losses

    def also_add(batch: Batch) -> torch.Tensor:
        losses = add(batch)
        finish()
        return losses

    return Training(
        step, {"model": model}, also_add, frozenset({1, 4}), no_sync=False, before=lambda _: _penalize(model)
    )


def clipped_in_parts() -> Training:
    """What runs under no_sync have left, in a run without a backward pass, one by one."""
    model = Mlp()
    optimizer = sgd(model, lr=0.1)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.2)
        optimizer.step()
        optimizer.zero_grad()
        return squared_error(model(x), y).detach()

    return Training(step, {"model": model}, plain_step(model), frozenset({0, 2, 3}))


def edited_before_the_others_have_finished_backward() -> Training:
    """Under no_sync no replica waits for the others, and this one edits its weights right away."""
    model = Mlp()
    optimizer = sgd(model, lr=0.01, momentum=0.0)
    train = plain_step(model, loss=torch.sum)

    def accumulate(batch: Batch) -> torch.Tensor:
        x, y = batch
        losses = squared_error(model(x), y)
        context = ts.get_replica_context()
        assert context is not None
        context.all_reduce("sum", losses.detach().sum())
        losses.sum().backward()
        scale(model, 0.98)
        return losses.detach()

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Training(step, {"model": model}, accumulate=accumulate, accumulate_on=frozenset({0, 2}))


def targets_moved_to_the_outputs() -> Training:
    """As models of other packages that compute their loss themselves do."""
    model = Mlp()
    optimizer = sgd(model)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        outputs: torch.Tensor = model(batch[0])
        losses = squared_error(outputs, batch[1].to(outputs.device))
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


_every_third = partial(accumulation, on=frozenset(index for index in range(STEPS - 1) if index % 3 != 2), lr=0.1)
_summed = partial(accumulation, torch.sum, lr=0.02)
_uneven = partial(regression, (8, 12, 5, 7, 9))
_idle, _also_idle = partial(regression, IDLE_ROWS), partial(regression, ALSO_IDLE_ROWS)

CASES = (
    *_OF_BATCHES,
    Case("clip_once", partial(edited_gradients, _clip_once)),
    Case("clip_twice", partial(edited_gradients, _clip_twice)),
    Case("gradient_noise", partial(edited_gradients, partial(_add_noise, drawn=False))),
    Case(
        "gradient_noise_drawn_in_step",
        partial(edited_gradients, partial(_add_noise, drawn=True)),
        expected=no_numbers,
        warns="the replicas have changed the gradient of ",
    ),
    *named(inspected_gradients, weights_edited_by_step_hooks, update_by_hand, targets_moved_to_the_outputs),
    Case("parameter_decay_first", partial(edited_parameters, before=scale)),
    Case("parameter_decay_last", partial(edited_parameters, after=scale)),
    Case("parameter_decay_through_data", partial(edited_parameters, _decay_data, _decay_data)),
    Case("parameter_decay_through_data_uneven", partial(edited_parameters, _decay_data, _decay_data), _uneven),
    Case("parameter_decay_between_through_data", partial(edited_gradients, _decay_data)),
    Case("parameter_decay_between", partial(edited_gradients, scale)),
    Case("parameter_clamp", partial(edited_parameters, after=_clamp)),
    Case("weights_averaged_as_lists_uneven", partial(edited_parameters, after=_average_as_lists), _uneven),
    Case("weights_exchanged_as_a_vector", partial(edited_parameters, after=_exchange_as_a_vector)),
    Case("weights_exchanged_as_a_vector_uneven", partial(edited_parameters, after=_exchange_as_a_vector), _uneven),
    Case("zero_grad_to_none", partial(zero_grad, True)),
    Case("zero_grad_to_zero", partial(zero_grad, False)),
    Case("zero_grad_of_model", partial(zero_grad, True, with_model=True)),
    Case("gradients_given_between_steps", partial(zero_grad, True, given=True)),
    Case("accumulation_no_sync", _every_third),
    Case("accumulation_synchronized", partial(_every_third, no_sync=False)),
    Case("accumulation_uneven", _every_third, partial(regression, (8, 5, 7, 3, 6))),
    Case("accumulation_idle", accumulation, _idle),
    Case("accumulation_idle_at_first", accumulation, _also_idle),
    Case("accumulated_sums_idle", _summed, _idle, gradient_reduce_op="sum"),
    Case("accumulated_sums_idle_clipped", partial(_summed, clip=0.5), _also_idle, gradient_reduce_op="sum"),
    *named(
        no_sync_within_the_step,
        no_sync_up_to_the_next_run,
        stepped_outside_of_runs,
        clipped_in_parts,
        batches=_uneven,
    ),
    Case("clipped_between_runs", partial(used_between_runs, _clip_once, torch.mean), _uneven),
    Case("penalized_between_runs", partial(used_between_runs, _penalize, torch.mean), _uneven),
    *(
        Case(name, partial(used_between_runs, use, torch.sum), _idle, gradient_reduce_op="sum")
        for name, use in (("sums_clipped_between_runs", _clip_once), ("sums_penalized_between_runs", _penalize))
    ),
    *named(
        edited_before_the_others_have_finished_backward,
        penalties_alone,
        gradient_reduce_op="sum",
    ),
    Case(
        "sums_penalized_up_to_the_next_run",
        partial(no_sync_up_to_the_next_run, torch.sum, penalized=True),
        gradient_reduce_op="sum",
    ),
    Case("penalized_up_to_the_next_run", partial(no_sync_up_to_the_next_run, penalized=True), _uneven),
    Case("penalties_alone_zeroed", partial(penalties_alone, False), gradient_reduce_op="sum"),
    Case("penalties_alone_idle", penalties_alone, _idle, gradient_reduce_op="sum"),
    Case("penalties_alone_also_idle", partial(penalties_alone, False), _also_idle, gradient_reduce_op="sum"),
)
