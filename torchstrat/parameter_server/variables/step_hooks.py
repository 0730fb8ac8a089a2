"""Hooks around steps of optimizers (`Optimizer.register_step_pre_hook` and the like): workers have the program's.

They travel with their optimizer and run where a function calls ``step()``, before what it pushes and after that. What
the program registers or removes later travels with the settings of the next function. So does a ``step`` that it puts
into the object itself, which is then the function's own code.

The step itself is made on a server. So what PyTorch calls in the middle of one cannot be called: hooks of an optimizer
that another one wraps, and those of an optimizer whose class calls ``super().step()``, which hooks see as a step of its
own as soon as the process has made an optimizer of that base class. A function that makes such a step is refused.

Hooks on all optimizers, or on all modules, are those of one process. While the program's has any, nothing is scheduled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple, NoReturn

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat.core._torch_private import global_module_hooks, next_hook_id, optimizer_post_hooks, optimizer_pre_hooks
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import is_listed, own_step, wrapped_by
from torchstrat.parameter_server.messages import Token
from torchstrat.parameter_server.serialization.captured_objects import Catalog
from torchstrat.parameter_server.serialization.closure_walk import functions_of, names_in
from torchstrat.parameter_server.serialization.functions import pack
from torchstrat.parameter_server.serialization.pack_cache import Packed

STEP_HOOKS = "step hooks"
"""Of the settings' keys: (this, token of an optimizer) → `Packed` of `tables_of` it and its `own_step`."""

_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def tables_of(optimizer: Optimizer) -> dict[str, dict[int, object]]:
    """Of hooks, by name. A wrapper that does without PyTorch's constructor has none; its step is a function's own."""
    return {name: table for name in _TABLES if (table := vars(optimizer).get(name)) is not None}


def has_hooks(optimizer: Optimizer) -> bool:
    return any(tables_of(optimizer).values())


def marks_of(optimizers: Sequence[Optimizer]) -> list[object]:
    """Equal ones, as long as no hook was registered anywhere: nothing has changed. Every `schedule` asks."""
    counts = [len(table) for one in optimizers for name in _TABLES if (table := one.__dict__.get(name))]
    steps: list[object] = [id(one.__dict__.get("step")) for one in optimizers]
    return [counts, steps, *map(called_within, optimizers)] if counts else steps


def called_within(optimizer: Optimizer) -> str:
    """Whose hooks PyTorch calls in the middle of a step of ``optimizer``, for errors; "" if there are none."""
    if is_listed(type(optimizer)) or not tables_of(optimizer):
        return ""
    for inner in wrapped_by(optimizer):
        if has_hooks(inner):
            return f"those of the {type(inner).__name__} that it wraps"
    base = _stepped_within(type(optimizer)) if has_hooks(optimizer) else None
    return "" if base is None else f"its own, to which {base.__name__}.step, called within it, is a step as well"


def _stepped_within(kind: type[Optimizer]) -> type | None:
    """The base class whose ``step`` the class's own may call, if hooks see that."""
    for base in kind.__mro__[1 : kind.__mro__.index(Optimizer)]:
        # PyTorch puts its hooks around the step of a class when the first of its objects is made.
        if hasattr(vars(base).get("step"), "hooked") and _may_step(kind, base):
            return base
    return None


def _look_for_step(kind: type, base: type) -> bool:
    """Whether code of ``kind``, or of classes between it and ``base``, names a ``step``."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    members = [one for each in between for member in vars(each).values() for one in functions_of(member)]
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in members if callable(one))
    return any("step" in names_in(code) for code in codes if code is not None)


_may_step: Callable[[object, object], bool] = functools.lru_cache(1024)(_look_for_step)


class _Refusing(NamedTuple):
    """A hook before a step that is not to be made in a function."""

    what: str

    def __call__(self, optimizer: Optimizer, *_: object) -> NoReturn:
        raise UnsupportedError(
            f"a scheduled function steps {type(optimizer).__name__}, and PyTorch calls hooks in the middle of its "
            f"step: {self.what}. Steps are made on parameter servers, where no hook runs. Do what the hook does in the "
            "function, before or after step(), and remove it (handle.remove())."
        )


_OF_TORCH = ("torch.", "torchstrat.")
_found_none: object = None  # when the tables were looked at last; every `schedule` asks


def require_no_global_hooks() -> None:
    """Raise `UnsupportedError` where the program has registered hooks on all modules or optimizers of this process."""
    global _found_none
    now = next_hook_id(), len(optimizer_pre_hooks), len(optimizer_post_hooks)
    if now == _found_none:
        return
    tables = [("optimizers", table) for table in (optimizer_pre_hooks, optimizer_post_hooks)]
    tables += [("modules", table) for table in global_module_hooks]
    for what, table in tables:
        for hook in list(table.values()):
            if not str(getattr(hook, "__module__", "")).startswith(_OF_TORCH):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise UnsupportedError(
                    f"a function was scheduled while {name} is registered as a hook on all {what} of this process. "
                    "Workers are other processes, where it would not be called. Register it on those that it is meant "
                    "for, or remove it (handle.remove())."
                )
    _found_none = now


class StepHooks:
    """Remembers what hooks optimizers had when they were sent. Weak."""

    def __init__(self) -> None:
        self._sent: MutableMapping[Optimizer, object] = WeakIdKeyDictionary()
        self._changed: MutableMapping[Optimizer, tuple[object, Packed]] = WeakIdKeyDictionary()

    def changed(self, catalog: Catalog, optimizers: Iterable[Optimizer]) -> Iterator[tuple[Token, Packed]]:
        """Of those whose hooks are others than when they were here first, which is when they are sent, or that must
        not be stepped: what they have now."""
        for optimizer in optimizers:
            within, tables, step = called_within(optimizer), tables_of(optimizer), own_step(optimizer)
            own: list[object] = [(name, [*table], list(map(id, table.values()))) for name, table in tables.items()]
            own.append(id(getattr(step, "__func__", step)))
            sent = self._sent.setdefault(optimizer, own)
            before, packed = self._changed.get(optimizer, (None, None))
            if before is None and sent == own and not within:
                continue
            if packed is None or before != (own, within):
                found = _with(tables, within), step
                packed = pack(found, catalog, what=f"what {type(optimizer).__name__} does around steps")
                self._changed[optimizer] = (own, within), packed
            yield (STEP_HOOKS, catalog.token_of(optimizer)), packed


def _with(tables: Mapping[str, Mapping[int, object]], within: str) -> dict[str, dict[int, object]]:
    found = {name: dict(table) for name, table in tables.items()}
    if within:
        found[_TABLES[0]] = {-1: _Refusing(within), **found[_TABLES[0]]}
    return found
