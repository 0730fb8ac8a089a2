"""What a process of a group does to prove cases of `operator_cases`: the same with tensors cut, and with whole ones."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

import torchstrat as ts
from tests.dtensor.operator_cases import CASES, Case, Shapes, ways_to_cut
from torchstrat.errors import UnsupportedError
from torchstrat.sharding.dtensor import cut_tensors
from torchstrat.sharding.dtensor.cut_tensors import cut_of, recut, whole
from torchstrat.sharding.dtensor.devices import LogicalAxes, LogicalDevices
from torchstrat.sharding.dtensor.operators import elementwise, reductions

TOLERANCE = 1e-9


class Proof(NamedTuple):
    case: str
    proven: int
    refused: int
    failures: list[str]


def prove(
    names: Sequence[str],
    logical_devices: int,
    seeds: int,
    most_ways: int,
    enough: float,
    broken: str | None = None,
) -> list[Proof]:
    """``enough``: how many ways that are proven make other shapes needless. ``broken``: what is switched off, to see
    that it is needed."""
    with _BREAKS[broken]() if broken else nullcontext():
        return _proofs(names, logical_devices, seeds, most_ways, enough)


def _proofs(names: Sequence[str], logical_devices: int, seeds: int, most_ways: int, enough: float) -> list[Proof]:
    warnings.simplefilter("error")
    strategy = ts.MirroredStrategy(logical_devices_per_replica=logical_devices, timeout=timedelta(seconds=240))
    proofs: list[Proof] = []

    def step() -> None:
        for case in CASES:
            if case.name in names:
                proofs.append(_prove(case, strategy._engine.devices, seeds, most_ways, enough))

    try:
        strategy.run(step)
    finally:
        strategy.close()
    return proofs


_BREAKS = {
    "sums going backward": lambda: mock.patch.object(cut_tensors, "spread", lambda tensor, devices, axes: tensor),
    "sums going forward": lambda: mock.patch.object(cut_tensors, "added_up", lambda tensor, devices, axes: tensor),
    "neighbours' rows": lambda: mock.patch.object(LogicalDevices, "edges", return_value=(None, None)),
    "which part is whose": lambda: mock.patch.object(LogicalAxes, "index_along", return_value=0),
    "dimensions made whole": lambda: mock.patch.object(reductions, "_whole_along", lambda cut, dims: cut),
    "random numbers": lambda: mock.patch.object(
        elementwise, "own_noise", lambda call, shape, cut, like, p: functional.dropout(torch.ones_like(like), p)
    ),
}

REFUSED: dict[str, Any] = {
    "roll": lambda x: x.roll(1, 0),
    "is one of matrices": lambda x: torch.linalg.norm(x, 2),
    "add_": lambda x: x.add_(1),
    "item": lambda x: x.item(),
    "backward": lambda x: x.backward(),
    "numpy": lambda x: x.numpy(),
    "mm": lambda x: torch.ops.aten.mm.default(x, x),
    "to_local": lambda x: x.to_local(),
    "redistribute": lambda x: x.redistribute(),
    "softmax": lambda x: torch.softmax(x, 0, out=torch.zeros(4, 4)),
    "cannot write to out=": lambda x: torch.add(torch.ones(4, 4), 1, out=x),
    "truth values": lambda x: x[True],
    "any": lambda x: (x > 0).any(()),
    "takes no weights": lambda x: functional.mse_loss(x, x.detach(), weight=torch.ones(4, 4)),
    "l1_loss": lambda x: functional.l1_loss(x, torch.ones(4, 4), weight=torch.ones(4, 4)),
    "takes a bias": lambda x: functional.linear(torch.ones(4), x, torch.ones(1)),
    "finds indices": lambda x: torch.where(x > 0),
    "unexpected keyword argument 'axis'": lambda x: torch.sum(x, axis=0),
    "a DTensor of another kind": lambda x: x + DTensor.from_local(torch.ones(4, 4), x.device_mesh, [Replicate()]),
}
"""By words of the message. The table of stand-ins in tests/matrix asks for every other operation of PyTorch."""

RAISED_BY_PLAIN: dict[str, Any] = {
    "mm": lambda x: torch.mm(x.unsqueeze(2), x),
    "conv1d": lambda x: functional.conv1d(x.unsqueeze(0), torch.ones(1, 4, 2), stride=2, padding="same"),
    "batch_norm": lambda x: functional.batch_norm(x, None, None),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(
        x, torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4).tril(-1).bool(), is_causal=True
    ),
    "a bias that is too long": lambda x: functional.linear(torch.ones(2, 4), x, torch.ones(2)),
    "targets of a piece": lambda x: functional.cross_entropy(x, torch.tensor([0, 1])),
    "one target": lambda x: functional.cross_entropy(x, torch.tensor([1])),
    "weights of a piece": lambda x: functional.layer_norm(x, (4,), torch.ones(2)),
    "rows of a piece": lambda x: x + torch.ones(2, 4),
}
"""What plain PyTorch raises for the whole tensors, it raises for their pieces too."""


def refusals() -> dict[str, str]:
    """What each raised on a tensor that is cut; of `RAISED_BY_PLAIN` the class."""
    strategy = ts.MirroredStrategy(logical_devices_per_replica=2, timeout=timedelta(seconds=240))

    def step() -> dict[str, str]:
        cut = strategy.split_to_logical_devices(torch.rand(4, 4, generator=torch.Generator().manual_seed(1)), [2, 1])
        messages = {}
        for name, function in REFUSED.items():
            try:
                function(cut)
            except UnsupportedError as error:
                messages[name] = str(error)
        for name, function in RAISED_BY_PLAIN.items():
            try:
                function(cut)
            except (RuntimeError, ValueError) as error:
                messages[name] = type(error).__name__
        return messages

    try:
        (messages,) = strategy.local_results(strategy.run(lambda: [step()]))
        return messages[0]  # type: ignore[no-any-return]
    finally:
        strategy.close()


def _prove(case: Case, devices: Any, seeds: int, most_ways: int, enough: float) -> Proof:
    proven, refused, failures = 0, 0, []
    for seed in range(seeds):
        if proven >= enough:
            break
        function, arguments = case.make(Shapes(f"{case.name} {seed}"))
        noise = torch.get_rng_state()
        expected = _results(function, arguments, seed)
        ways = list(itertools.product(*[list(ways_to_cut(one.shape, devices.axes.sizes)) for one in arguments]))
        ways = [way for way in ways if any(dim is not None for cut in way for dim in cut)]
        for way in random.Random(seed).sample(ways, min(most_ways, len(ways))):
            torch.set_rng_state(noise)
            try:
                found = _results(function, arguments, seed, way, devices)
            except UnsupportedError as error:
                refused += 1
                if not case.refuses:
                    failures.append(f"{way}: {error}")
                continue
            complaint = _difference(found, expected)
            proven += not complaint
            if complaint:
                shapes = [tuple(one.shape) for one in arguments]
                failures.append(f"seed {seed}, shapes {shapes} cut like {way}: {complaint}")
    return Proof(case.name, proven, refused, failures[:3])


def _results(
    function: Any, arguments: list[torch.Tensor], seed: int, way: Any = None, devices: Any = None
) -> list[torch.Tensor | None]:
    """What the function returns, and the gradients of its arguments."""
    leaves = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in arguments]
    given = leaves if way is None else [recut(leaf, devices, cut) for leaf, cut in zip(leaves, way, strict=True)]
    returned = function(*given)
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    if devices is not None:
        for output in outputs:
            shape, dtype = tuple(output.shape), output.dtype
            piece = whole(output)
            assert (tuple(piece.shape), piece.dtype) == (shape, dtype)
            assert cut_of(piece, devices) == devices.axes.whole
    plain = [whole(output) for output in outputs]
    generator = torch.Generator().manual_seed(seed)
    total: Any = 0.0
    for one in plain:
        if one.requires_grad:
            total = total + (one * torch.randn(one.shape, dtype=one.dtype, generator=generator)).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    return [*[one.detach() for one in plain], *[leaf.grad for leaf in leaves]]


def _difference(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> str:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if (one is None) != (other is None):
            return f"number {index} is {'missing' if one is None else 'too many'}"
        if other is None:
            continue
        near = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(other.dtype, TOLERANCE)
        near = near if other.is_floating_point() else 0.0
        try:
            torch.testing.assert_close(one, other, rtol=near, atol=near, equal_nan=True)
        except AssertionError as error:
            return f"number {index}: {error}"
    return ""
