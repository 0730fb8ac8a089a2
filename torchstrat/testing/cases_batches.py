"""Training cases: batches that do not divide, weights of their own, and replicas that talk in the middle of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing.training import (
    EVEN_ROWS,
    Batch,
    Case,
    Mlp,
    Training,
    adam,
    named,
    plain_step,
    regression,
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


CASES = (
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
