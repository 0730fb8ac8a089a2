"""What a program sets where functions and steps look: on parameters and buffers (``weight.no_decay = True``), and what
methods of its classes name.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from tests.matrix.own_optimizers import Own

Numbers = Mapping[str, torch.Tensor]
Change = Callable[[nn.Parameter], object]
ROUNDS = 4


class _Scaled(Own):
    """Looks at parameters in its steps."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


def _keep(p: Any) -> None:
    pass


def _set(p: Any) -> None:
    p.scale = 0.25


def _delete(p: Any) -> None:
    del p.scale


def _made(way: Any, kind: type[torch.optim.Optimizer]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with way.scope():
        model: Any = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        optimizer: Any = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        for number, p in enumerate(model.parameters()):
            p.scale = 0.5 + number
        model[1].running_mean.tags = ("kept", 0.3)
    return model, optimizer


def _trained(
    way: Any, *, change: Change = _keep, kind: type[torch.optim.Optimizer] = torch.optim.SGD, by_steps: bool = False
) -> Numbers:
    model, optimizer = _made(way, kind)

    def step(batch: torch.Tensor) -> list[float]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if not by_steps:
            loss = loss + 0.1 * sum(getattr(p, "scale", 1.0) * p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        return [float(loss), getattr(model[1].running_mean, "tags", ("lost", -1.0))[1]]

    def set_anew() -> None:
        change(model[0].weight)
        model[1].running_mean.tags = ("other", 0.7)

    return _run(way, step, model, set_anew)


def _run(
    way: Any, step: Callable[[torch.Tensor], object], model: nn.Module, change: Callable[[], None], turn: int = 2
) -> Numbers:
    """What the steps have returned, and the model in the end. ``change()`` comes before the step of number ``turn``."""
    draw = torch.Generator().manual_seed(1)
    found = {}
    for number in range(ROUNDS):
        if number == turn:
            change()
        seen = way.call(step, torch.randn(3, 4, generator=draw, dtype=torch.float64))
        found[f"seen {number}"] = torch.tensor(seen, dtype=torch.float64)
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def _squares(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], float]:
    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


# -- classes that travel by value --------------------------------------------------------------------------------------

FACTOR = 1.0
SETTINGS = {"factor": 1.0}
ORDERED = collections.OrderedDict(factor=1.0)


@dataclasses.dataclass(slots=True)
class _Record:
    factor: float = 1.0
    dtype: torch.dtype = torch.float64


RECORD = _Record()
"""Of functions of a class that workers find in no file."""


def _helper(value: torch.Tensor) -> torch.Tensor:
    return value * 1.5


def _other_helper(value: torch.Tensor) -> torch.Tensor:
    return value.tanh() * 0.5


def _set_global(kind: Any, _: Callable[[float], None]) -> None:
    globals()["FACTOR"] = 0.5


def _set_member(kind: Any, _: Callable[[float], None]) -> None:
    SETTINGS["factor"] = 0.5


def _set_in_subclass(kind: Any, _: Callable[[float], None]) -> None:
    ORDERED["factor"] = 0.5


def _set_in_slots(kind: Any, _: Callable[[float], None]) -> None:
    RECORD.factor = 0.5


def _set_in_list(kind: Any, _: Callable[[float], None]) -> None:
    kind.factors.append(0.5)


def _replace_helper(kind: Any, _: Callable[[float], None]) -> None:
    globals()["_helper"] = _other_helper


def _set_around(kind: Any, set_around: Callable[[float], None]) -> None:
    set_around(0.5)


def _replace_method(kind: Any, _: Callable[[float], None]) -> None:
    kind.forward = lambda self, x: self.layer(x).tanh() * 3


def _replace_static_method(kind: Any, _: Callable[[float], None]) -> None:
    kind.scaled = staticmethod(_other_helper)


def _of_changed_class(way: Any, *, change: Callable[[Any, Callable[[float], None]], None], derives: bool) -> Numbers:
    around = 1.0

    def set_around(value: float) -> None:
        nonlocal around
        around = value

    class Net(nn.Module):
        factors: ClassVar[list[float]] = [1.0]

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        @staticmethod
        def scaled(value: torch.Tensor) -> torch.Tensor:
            return value * 0.9

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = FACTOR * SETTINGS["factor"] * ORDERED["factor"] * RECORD.factor * self.factors[-1] * around
            return _helper(self.scaled(self.layer(x))) * factor

    class Derived(Net):
        pass

    torch.manual_seed(0)
    with way.scope():
        model = nn.Sequential(Derived() if derives else Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    kept = dict(globals())
    try:
        return _run(way, _squares(model, optimizer), model, lambda: change(Net, set_around))
    finally:
        globals().update(kept)
        SETTINGS["factor"] = ORDERED["factor"] = RECORD.factor = 1.0


CHANGES: Mapping[str, Callable[[Any, Callable[[float], None]], None]] = {
    "a global": _set_global,
    "a member of a global": _set_member,
    "a member of an ordered dictionary": _set_in_subclass,
    "a record with slots": _set_in_slots,
    "a list in the class": _set_in_list,
    "a helper function": _replace_helper,
    "a variable around it": _set_around,
    "a method": _replace_method,
    "a static method": _replace_static_method,
}
# -- what stands in a file, which workers import -----------------------------------------------------------------------

RATE = 1.0
RATES = {"rate": 1.0}
NESTED = {"of": {"rate": 1.0}}


class InFile(nn.Module):
    """Of a class that travels by name."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.layer(x)) * self.scale


class Other:
    """No module's class, and no optimizer's."""

    scale = 1.0


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * RATE * RATES["rate"] * NESTED["of"]["rate"] * Other.scale


def _set_number() -> None:
    globals()["RATE"] = 0.5


def _set_in_dictionary() -> None:
    RATES["rate"] = 0.5


def _set_in_nested() -> None:
    NESTED["of"]["rate"] = 0.5


def _set_on_class() -> None:
    InFile.scale = 0.5


def _set_on_other_class() -> None:
    Other.scale = 0.5


def _of_changed_file(way: Any, *, change: Callable[[], None], turn: int) -> Numbers:
    try:
        torch.manual_seed(0)
        if turn == 0:
            change()
        with way.scope():
            model = nn.Sequential(InFile())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        return _run(way, _squares(model, optimizer), model, change, turn)
    finally:
        globals()["RATE"] = RATES["rate"] = NESTED["of"]["rate"] = InFile.scale = Other.scale = 1.0


IN_FILE: Mapping[str, Callable[[], None]] = {
    "a number": _set_number,
    "a number in a dictionary": _set_in_dictionary,
    "a number in a dictionary of a dictionary": _set_in_nested,
    "an attribute of a module's class": _set_on_class,
    "an attribute of another class": _set_on_other_class,
}
FILE = "what a program sets in a file of its own"
CODE = "what methods of a class by value name"
ROW = "what is set on variables"
ROWS: Mapping[str, Mapping[str, Callable[[Any], Numbers]]] = {
    ROW: {
        "read by functions": _trained,
        "read by functions, set anew": partial(_trained, change=_set),
        "read by functions, deleted": partial(_trained, change=_delete),
        "read by steps": partial(_trained, kind=_Scaled, by_steps=True),
        "read by steps, set anew": partial(_trained, kind=_Scaled, by_steps=True, change=_set),
        "read by steps, deleted": partial(_trained, kind=_Scaled, by_steps=True, change=_delete),
    },
    FILE: {
        **{name: partial(_of_changed_file, change=change, turn=2) for name, change in IN_FILE.items()},
        **{f"{name}, before": partial(_of_changed_file, change=change, turn=0) for name, change in IN_FILE.items()},
    },
    CODE: {
        **{name: partial(_of_changed_class, change=change, derives=False) for name, change in CHANGES.items()},
        **{
            f"{name}, of its base": partial(_of_changed_class, change=change, derives=True)
            for name, change in CHANGES.items()
        },
    },
}
