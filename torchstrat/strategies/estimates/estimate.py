"""`estimate`: what a program takes under each strategy, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.parameter_server.variables.placement import Partitioner
from torchstrat.strategies.estimates import on_servers, synchronous
from torchstrat.strategies.estimates.program import Program, optimizer_named
from torchstrat.strategies.estimates.rows import Estimate, joined

DEVICES = ("cpu", "cuda")


def estimate(
    build: Callable[[], Any],
    optimizer: str | Callable[[list[torch.Tensor]], Optimizer] | None = None,
    *,
    replicas: int = 2,
    device: str = "cpu",
    ps: int | None = None,
    workers: int | None = None,
    partitioner: Partitioner | None = None,
    batch: Any = None,
) -> Estimate:
    """Say how many bytes each device or process holds and sends under each strategy. Nothing is allocated::

        print(ts.estimate(build_model, "adam", replicas=4, ps=2, workers=4))

    Args:
        build: Makes the model or models, and may make optimizers, and returns them. Called on ``torch.device("meta")``,
            where tensors have no values.
        optimizer: The name of one of torch's optimizers (or "ftrl"), or what makes one of a list of parameters, such as
            ``functools.partial(torch.optim.SGD, momentum=0.9)``. None where ``build`` makes them.
        replicas: Of the synchronous strategies.
        device: What their replicas compute on: "cpu" or "cuda".
        ps, workers: Parameter servers and workers; without them parameter servers are left out.
        partitioner: Of the parameter servers, as `ParameterServerStrategy` takes it.
        batch: An example of a global batch, as the model that ``build`` returns is called with it: a tensor, or a tuple
            of arguments. With it activations are counted, and the rows of tables that travel by rows. Its values do not
            matter.

    **Memory** is what stays between two steps, and with ``batch`` what the forward pass keeps for the backward pass.
    Batches, and what an operator takes while it runs, are not in it. **Sent** are gradients and values of parameters,
    on the best known way: in a sum of n bytes over P processes each sends 2 n (P - 1) / P. Processes of one host pass
    the same bytes through memory that they share. What a step changes in buffers is not in it.

    Raises:
        InvalidArgumentError: ``build`` needs values, makes no parameters, or makes optimizers although ``optimizer`` is
            given; a number is less than 1; the model cannot be called with ``batch``.
    """
    if not callable(build) or isinstance(build, nn.Module):
        raise WrongTypeError(f"build must be a function that makes the model, or its class; got {build!r:.60}.")
    for name, number in {"replicas": replicas, "ps": ps, "workers": workers}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InvalidArgumentError(f"{name}={number!r} must be a whole number of at least 1.")
    if (ps is None) is not (workers is None):
        raise InvalidArgumentError(f"ps={ps} and workers={workers}: give both, or neither to leave them out.")
    if device not in DEVICES:
        raise InvalidArgumentError(f"device={device!r} must be one of {', '.join(map(repr, DEVICES))}.")
    program = Program.built(build, optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer)
    rows = [row for way in synchronous.ways(device, replicas) for row in way.rows(program, batch)]
    if ps is not None and workers is not None:
        rows += on_servers.rows(program, ps, workers, partitioner, batch)
    classes = dict.fromkeys(type(one).__name__ for one in program.optimizers)
    return Estimate(joined(rows), program.sizes, tuple(classes))
