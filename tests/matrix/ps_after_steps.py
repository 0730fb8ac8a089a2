"""What steps of a program's own optimizers set: who looks at it is the function, after its step, or the coordinator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.matrix.own_optimizers import Own

Numbers = Mapping[str, torch.Tensor]


class Setting(Own):
    """Sets something of each kind in every step, and returns the norm of the gradients."""

    count = 0

    def prepare(self) -> None:
        self.norms: list[float] = []
        self.seen: dict[str, list[float]] = {"rates": []}
        self.averages = [torch.zeros(3, dtype=torch.float64)]

    @property
    def total(self) -> float:
        return sum(self.norms)

    @torch.no_grad()
    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        super().step()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        self.count += 1
        self.norms.append(norm)
        self.seen["rates"] += [group["lr"] for group in self.param_groups]
        self.averages[0].lerp_(torch.full((3,), norm, dtype=torch.float64), 0.5)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["norms"] = (*group.get("norms", ()), norm)
        return norm

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] / (1 + self.count))


class Around(Own):
    """Wraps another one, with whose groups it works."""

    def __init__(self, base: Any) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]])
        self.base = base
        self.param_groups = base.param_groups
        self.turns = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.turns += 1
        return self.base.step()


Look = Callable[[Any], list[float]]


def _attribute(optimizer: Any) -> list[float]:
    return [optimizer.count, getattr(optimizer, "missing", -1)]


def _list(optimizer: Any) -> list[float]:
    return list(optimizer.norms)


def _dictionary(optimizer: Any) -> list[float]:
    return list(optimizer.seen["rates"])


def _tensor(optimizer: Any) -> list[float]:
    return optimizer.averages[0].tolist()  # type: ignore[no-any-return]


def _group(optimizer: Any) -> list[float]:
    (group,) = optimizer.param_groups
    return [group["k"], len({**group}), *group["norms"]] if "k" in group else [-1.0]


def _held_group(group: Any) -> list[float]:
    return [group["k"], len(group), *group.get("norms"), *sorted(map(len, group))]


def _property(optimizer: Any) -> list[float]:
    return [optimizer.total]


def _members(optimizer: Any) -> list[float]:
    (group,) = copy.deepcopy(optimizer.param_groups)
    return [vars(optimizer).get("count", -1), *group.get("norms", ())]


def _of_wrapped(optimizer: Any) -> list[float]:
    return [optimizer.turns, optimizer.base.count, *optimizer.base.norms]


def _made(way: Any, *, wraps: bool) -> tuple[nn.Module, Any, Any]:
    """A model, the optimizer that steps it, and the one that wraps that or is the same."""
    with way.scope():
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        inner: Any = Setting(model.parameters(), lr=0.1)
        return model, inner, Around(inner) if wraps else inner


def _batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3)]


def after_steps(way: Any, *, look: Look, wraps: bool = False, holds: bool = False) -> Numbers:
    """The function looks before and after its steps; or after them, at a group that it ``holds`` since then."""
    model, _, optimizer = _made(way, wraps=wraps)

    def step(batch: torch.Tensor) -> tuple[list[float], Any]:
        found: list[float] = []
        held = optimizer.param_groups[0]
        if not holds:
            found += look(optimizer)
        for turn in range(3):
            optimizer.zero_grad()
            (model(batch) + turn).square().mean().backward()
            optimizer.step()
            if turn != 1:
                found += look(held if holds else optimizer)
        return found, [p.detach().clone() for p in model.parameters()]

    seen = {}
    for index, batch in enumerate(_batches()):
        found, parameters = way.call(step, batch)
        seen |= {f"seen {index}": torch.tensor(found, dtype=torch.float64)}
        seen |= {f"parameter {index}.{place}": p for place, p in enumerate(parameters)}
    return seen


def result(way: Any, *, wraps: bool = False) -> Numbers:
    model, _, optimizer = _made(way, wraps=wraps)

    def step(batch: torch.Tensor) -> list[float]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        first = optimizer.step()
        optimizer.step()
        return [first, optimizer.step(), float(optimizer.step())]

    return {f"{n}": torch.tensor(way.call(step, one), dtype=torch.float64) for n, one in enumerate(_batches())}


def on_coordinator(way: Any, *, look: Look, wraps: bool = False) -> Numbers:
    """The program has the lists and dictionaries before functions change them."""
    model, inner, optimizer = _made(way, wraps=wraps)
    norms, rates = inner.norms, inner.seen

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    seen = {}
    for index, batch in enumerate(_batches()):
        way.call(step, batch)
        way.join()
        seen[f"{index}"] = torch.tensor(look(optimizer), dtype=torch.float64)
        seen[f"held {index}"] = torch.tensor(norms + rates["rates"], dtype=torch.float64)
    return seen


IN_FUNCTION, ON_COORDINATOR = "what a step sets, in its function", "what a step sets, on the coordinator"
_LOOKS: Mapping[str, Look] = {
    "an attribute": _attribute,
    "a list": _list,
    "a dictionary": _dictionary,
    "a group": _group,
    "a property": _property,
}
ROWS: Mapping[str, Mapping[str, Callable[[Any], Numbers]]] = {
    IN_FUNCTION: {
        **{name: partial(after_steps, look=look) for name, look in _LOOKS.items()},
        "a tensor": partial(after_steps, look=_tensor),
        "all members": partial(after_steps, look=_members),
        "of a wrapped one": partial(after_steps, look=_of_wrapped, wraps=True),
        "a group of a wrapped one": partial(after_steps, look=_group, wraps=True),
        "a group that is held": partial(after_steps, look=_held_group, holds=True),
        "what step() returns": result,
        "what step() of a wrapper returns": partial(result, wraps=True),
    },
    ON_COORDINATOR: {
        **{name: partial(on_coordinator, look=look) for name, look in _LOOKS.items()},
        "of a wrapped one": partial(on_coordinator, look=_of_wrapped, wraps=True),
    },
}
