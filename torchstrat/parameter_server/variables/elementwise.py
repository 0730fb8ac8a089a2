"""Can an optimizer's variable be split over servers? Found by a trial, not by a list of classes.

An optimizer that treats every element (or every row) by itself gives the same numbers for a shard of a variable as for
the whole; one that looks at the whole tensor (Adafactor's root mean square, Muon's orthogonalisation, a trust ratio)
does not, and its variables stay whole, each on one server. The trial steps a small random parameter whole and in
shards of rows, several times, with the user's own class and hyperparameters, in float64.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.errors import UnsupportedError
from torchstrat.parameter_server.messages import StateOfShard
from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer, sparse_rows

_STEPS = 4
_LARGEST_DIM = {1: 1024, 2: 160, 3: 32}
"""Of the trial's parameter, by its number of dimensions. Generous, because there are optimizers that treat small
tensors another way (a threshold of 128 is common for factored state); 12 beyond three dimensions."""

_answers: weakref.WeakKeyDictionary[type[Optimizer], dict[Any, bool]] = weakref.WeakKeyDictionary()


def is_elementwise(optimizer: Optimizer, parameter_shape: Sequence[int]) -> bool:
    """Whether ``optimizer``'s step on shards of rows of such a parameter is its step on the whole.

    ``optimizer`` stays as it is, and so does the random state. Answers are kept per class and hyperparameters. Raises
    `UnsupportedError` for optimizers whose steps servers cannot make: a closure is needed, ``capturable=True``,
    ``differentiable=True``, state that lives in ``param_groups`` or in attributes, or a step that fails.
    """
    with torch.random.fork_rng(devices=[]):
        return steps_rows_alone(ShardOptimizer.of(optimizer), parameter_shape)


def steps_rows_alone(optimizer: ShardOptimizer, parameter_shape: Sequence[int]) -> bool:
    """The same, for an optimizer as a server holds it."""
    shape = _trial_shape(parameter_shape)
    key = (shape, tuple(tuple(sorted(_described(own).items())) for own in optimizer.options))
    answers = _answers.setdefault(optimizer.cls, {})
    if key not in answers:
        with torch.random.fork_rng(devices=[]):
            answers[key] = all(_try(optimizer, group, shape) for group in range(len(optimizer.options)))
    return answers[key]


def _plain(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _trial_shape(shape: Sequence[int]) -> tuple[int, ...]:
    largest = _LARGEST_DIM.get(len(shape), 12)
    if not shape:
        return ()
    # At least six rows, whatever there are: a variable of one row is not split, but then the answer does not matter.
    return (min(max(shape[0], 6), largest), *(min(max(size, 1), largest) for size in shape[1:]))


def _try(optimizer: ShardOptimizer, group: int, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(17)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(_STEPS)]
    if not shape:
        _run(optimizer, group, start, gradients)
        return True
    rows = shape[0]
    # Shards must differ in what a whole-tensor statistic sees: rows grow over two orders of magnitude.
    scale = torch.logspace(-1, 1, rows, dtype=torch.float64).reshape(-1, *(1 for _ in shape[1:]))
    gradients = [gradient * scale for gradient in gradients]
    whole = _run(optimizer, group, start, gradients)
    cuts = [0, 1, rows // 2, rows]
    parts = [
        _run(optimizer, group, start[low:high], [gradient[low:high] for gradient in gradients])
        for low, high in itertools.pairwise(cuts)
    ]
    # A kernel may round the last elements of a tensor differently; whole-tensor optimizers are off by far more.
    return torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)


def _run(optimizer: ShardOptimizer, group: int, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    options = [dict(own) for own in optimizer.options]
    groups: list[list[torch.Tensor]] = [[] for _ in options]
    groups[group] = [parameter]
    state: StateOfShard = optimizer.initial_state(options[group], parameter)
    attributes, hyperparameters = _described(optimizer.attributes), [_described(own) for own in options]
    for gradient in gradients:
        rows = torch.arange(gradient.shape[0] if gradient.dim() else 0)
        parameter.grad = sparse_rows(rows, gradient, len(rows)) if optimizer.needs_sparse else gradient.clone()
        try:
            stand_in = optimizer.stand_in(options, groups, {parameter: state})
            optimizer.call_step(stand_in)
        except Exception as error:  # a class of the user's own
            raise UnsupportedError(
                f"a trial step of {optimizer.name} on a parameter of shape {tuple(start.shape)} failed with "
                f"{type(error).__name__}: {error}. Parameter servers step it with gradients alone, on parameters that "
                "come and go; it must keep what it needs in self.state[parameter]."
            ) from error
        state = stand_in.state.get(parameter, {})
        _refuse_state_elsewhere(optimizer, stand_in, parameter, attributes, hyperparameters)
    return parameter.detach()


def _refuse_state_elsewhere(
    optimizer: ShardOptimizer,
    after: Optimizer,
    parameter: torch.Tensor,
    attributes: dict[str, str],
    hyperparameters: list[dict[str, str]],
) -> None:
    """What a step changes outside ``state[parameter]`` would be lost: each step has a stand-in of its own."""
    now = _described({k: v for k, v in vars(after).items() if k not in ("state", "param_groups")})
    # A flag that goes down after the first step, as torch's own do, is no state.
    places = [
        f"self.{name}" for name in now if now[name] != attributes.get(name) and now[name] not in ("True", "False")
    ]
    for number, (group, before) in enumerate(zip(after.param_groups, hyperparameters, strict=True)):
        described = _described({k: v for k, v in group.items() if k != "params"})
        places += [f"self.param_groups[{number}][{k!r}]" for k in described if described[k] != before.get(k)]
    places += [f"self.state[{other!r}]" for other in after.state if other is not parameter]
    if places:
        raise UnsupportedError(
            f"{optimizer.name} keeps state in {', '.join(places)}. Parameter servers step shards at the same time, "
            "on several machines, and keep only self.state[parameter]; use an optimizer that has all its state there, "
            "or a synchronous strategy such as MirroredStrategy."
        )


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _plain(value) for name, value in values.items()}
