"""Training cases: batches that do not divide, weights of their own, and replicas that talk in the middle of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing.training import EVEN_ROWS, Batch, Case, Mlp, Training, plain_step, regression, squared_error

UNEVEN_ROWS = (8, 5, 7, 3, 6)
EMPTY_ROWS = (8, 1, 2, 5, 1)
"""With two replicas the second has no rows at steps 1 and 4, with four there are never rows for all at 1, 2 and 4."""


def refuses_no_rows() -> Training:
    """Plain code that cannot be called without rows: a reshape that guesses, a mean of nothing, Adam's state."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x.reshape(len(x), -1)), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model, "optimizer": optimizer})


def clipped() -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x.reshape(len(x), -1)), y)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def sum_loss() -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def average_loss() -> Training:
    """TensorFlow's convention: divided by the global batch in the step, then summed over replicas."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        loss = ts.compute_average_loss(losses, global_batch_size=EVEN_ROWS[0])
        loss = loss + ts.scale_regularization_loss(0.01 * model.first.weight.square().sum())
        loss.backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def token_weighted() -> Training:
    """A mean over tokens, of which every row has its own number; a replica may have rows and no token at all."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y, counts = batch  # (rows, length, 6), (rows, length, 3), (rows,)
        valid = torch.arange(x.shape[1]) < counts.unsqueeze(1)
        _context().set_weight(float(valid.sum()))
        optimizer.zero_grad()
        losses = squared_error(model(x), y)[valid]
        (losses.sum() / max(1, len(losses))).backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        prediction = model(x)
        centre = _context().all_reduce("mean", prediction.mean(dim=0))
        losses = squared_error(prediction - centre, y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def centred_by_sum() -> Training:
    """As `centred_by_mean`, by a nest of sum and count, and so right for any number of rows; with a sum loss."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        prediction = model(x)
        parts = {"total": prediction.sum(dim=0), "rows": torch.tensor(float(len(x)))}
        everywhere = _context().all_reduce("sum", parts)
        losses = squared_error(prediction - everywhere["total"] / everywhere["rows"], y)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def _context() -> Any:
    context = ts.get_replica_context()
    assert context is not None
    return context


def contrastive() -> Training:
    """Every row is compared with the rows of all replicas, gathered with their gradient."""
    model = Mlp(6, 5, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        features = model(x)  # (rows, 4)
        everyone: torch.Tensor = _context().all_gather(features, axis=0)  # (rows of the global batch, 4)
        losses: torch.Tensor = (features @ everyone.T).logsumexp(dim=1) - features[:, :3].mul(y).sum(dim=1)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def plain() -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(plain_step(model, optimizer), {"model": model})


uneven = partial(regression, UNEVEN_ROWS)
empty = partial(regression, EMPTY_ROWS, (3, 2))


def in_no_module() -> Training:
    """Bare parameters, which an optimizer alone holds; each step returns a column of its scores."""
    weight, bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        squares = (x @ weight + bias - y).square()
        squares.mean().backward()
        optimizer.step()
        return squares.detach()[:, 0]

    return Training(step, {"weight": weight, "bias": bias, "optimizer": optimizer})


CASES = (
    Case("uneven_batches", plain, uneven),
    Case("uneven_batches_clipped", clipped, uneven),
    Case("empty_batches", refuses_no_rows, empty),
    Case("empty_batches_clipped", clipped, empty),
    Case("empty_batches_of_bare_parameters", in_no_module, partial(regression, (8, 1, 5, 1))),
    Case("token_weighted", token_weighted, _sentences),
    Case("sum_loss", sum_loss, gradient_reduce_op="sum"),
    Case("sum_loss_uneven", sum_loss, uneven, gradient_reduce_op="sum"),
    Case("average_loss", average_loss, gradient_reduce_op="sum"),
    Case("all_reduce_mean_in_step", centred_by_mean),
    Case("all_reduce_sum_in_step", centred_by_sum, gradient_reduce_op="sum"),
    Case("all_reduce_sum_in_step_uneven", centred_by_sum, uneven, gradient_reduce_op="sum"),
    Case("all_gather_in_step", contrastive),
)
