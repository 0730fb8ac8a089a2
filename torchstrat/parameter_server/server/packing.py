"""How an optimizer of the user's is sent to the servers, and what cannot be.

Pickled by value where the class lives in the user's script, so that servers need not import it. Not the object as it
is: ``Optimizer.__getstate__`` leaves out what a class of the user's keeps beside groups and defaults.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.errors import InvalidArgumentError, NotSendableError, UnsupportedError
from torchstrat.optimizers import Kind, Tier, is_listed, kind_of

Options = Mapping[str, Any]
"""The hyperparameters of a parameter group: everything in it but ``params``."""

Parts = tuple[type[Optimizer], dict[str, Any], tuple[dict[str, Any], ...]]
"""Of an optimizer without parameters and state: its class, its attributes, the hyperparameters of its groups."""

_NOT_SENT = {"state", "param_groups", "step"}
"""``step`` as an attribute of the object is a wrapper (of a scheduler, of a scope), not the class's own method."""


def check_supported(cls: type[Optimizer], options: Sequence[Options]) -> None:
    """Raise `UnsupportedError` for what cannot be stepped on a server, whatever the gradients."""
    if _needs_closure(cls):
        raise UnsupportedError(
            f"{cls.__name__}.step needs a closure that evaluates the model, and parameter servers have no model: they "
            "only get gradients. Use an optimizer whose step() takes none, or a synchronous strategy such as "
            "MirroredStrategy."
        )
    for number, group in enumerate(options):
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise UnsupportedError(
                    f"{cls.__name__} has {flag}=True in parameter group {number}; its steps are made on parameter "
                    f"servers, where nothing is captured or differentiated. Use {flag}=False."
                )


def _look_for_closure(cls: type[Optimizer]) -> bool:
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# Every push asks, and looking takes 0.1 ms.
_needs_closure: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_look_for_closure)


def pack_optimizer(optimizer: Optimizer, kind: Kind | None = None) -> bytes:
    """What `NewOptimizer.blob` carries. ``kind``: None is what is listed of its class.

    Before all else the kind itself, for `unpack_kind`. Of an optimizer that may be stepped in parts: class, attributes
    and hyperparameters; no parameters, no state, no hooks. Of any other the object itself, also without hooks; its
    parameters are references.

    Raises `UnsupportedError` for what cannot be stepped on a server, and `NotSendableError` where an attribute cannot
    be pickled, or one of an optimizer in parts holds parameters.
    """
    from torchstrat.parameter_server.serialization.pickler import (
        ValuePickler,  # cloudpickle is loaded when it is needed
    )

    cls, attributes, options = parts_of(optimizer)
    check_supported(cls, options)
    kind = kind or kind_of(optimizer)
    is_whole = kind.tier is Tier.ALL
    own = dict(_places_of(optimizer))

    class OptimizerPickler(ValuePickler):
        def persistent_id(self, found: Any) -> tuple[int, int, bool] | None:
            if not isinstance(found, torch.Tensor):
                return None
            if id(found) in own:
                if not is_whole:
                    raise NotSendableError(
                        f"{cls.__name__} keeps parameters in an attribute of its own, beside param_groups. On "
                        "parameter servers an optimizer only sees the shards that a step changes; look parameters up "
                        "in self.param_groups, or leave the class out of elementwise_optimizers."
                    )
                return (*own[id(found)], found.requires_grad)
            if found.is_meta:
                raise NotSendableError(
                    f"{cls.__name__} keeps a tensor of shape {tuple(found.shape)} on the meta device, which it has "
                    "made of a parameter without values. Make its parameters on the CPU."
                )
            return None

        def reducer_override(self, value: Any) -> Any:
            return _reduce_whole(value) if isinstance(value, Optimizer) else super().reducer_override(value)

    def pickled(value: Any) -> bytes:
        buffer = io.BytesIO()
        OptimizerPickler(buffer, protocol=5).dump(value)
        return buffer.getvalue()

    try:
        tags = {} if is_listed(cls) else _tags_of(optimizer)
        packed = pickled((optimizer, tags) if is_whole else (cls, attributes, options, tags))
        return pickle.dumps((kind, packed))
    except NotSendableError:
        raise
    except Exception as error:
        named = {f"self.{name}": value for name, value in attributes.items()}
        named |= {f"self.param_groups[{n}]": group for n, group in enumerate(options)}
        culprit = next((name for name, value in named.items() if not _succeeds(pickled, value)), "the class itself")
        raise NotSendableError(
            f"the optimizer {cls.__name__} cannot be sent to the parameter servers: {culprit} cannot be pickled "
            f"({error}). Keep such objects out of the optimizer, or make them where they are used."
        ) from error


def unpack_kind(blob: bytes) -> tuple[Kind, bytes]:
    """The kind, and the optimizer's own pickle."""
    kind, packed = pickle.loads(blob)
    return kind, packed


def _places_of(optimizer: Optimizer) -> Iterator[tuple[int, tuple[int, int]]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            yield id(tensor), (number, place)


def _tags_of(optimizer: Optimizer) -> dict[tuple[int, int], dict[str, Any]]:
    """What the program has set on parameters, by their places: optimizers of some packages look at it in a step."""
    return {
        (number, place): dict(vars(tensor))
        for number, group in enumerate(optimizer.param_groups)
        for place, tensor in enumerate(group["params"])
        if vars(tensor)
    }


def _reduce_whole(optimizer: Optimizer) -> Any:
    """With everything that is set on it, also of one that another one holds; without hooks."""
    attributes = {name: value for name, value in _without_hooks(optimizer).items() if name != "step"}
    return copyreg.__newobj__, (type(optimizer),), attributes, None, None, _set_attributes  # type: ignore[attr-defined]


def _set_attributes(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    vars(optimizer).update(attributes)


def _without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: collections.OrderedDict() if name.endswith("_hooks") else value for name, value in vars(optimizer).items()
    }


def _succeeds(act: Callable[[Any], Any], value: Any) -> bool:
    try:
        act(value)
    except Exception:
        return False
    return True


def parts_of(optimizer: Optimizer) -> Parts:
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentError(f"need a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    attributes = {name: value for name, value in _without_hooks(optimizer).items() if name not in _NOT_SENT}
    options = tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    return type(optimizer), attributes, options


@contextmanager
def unpickling() -> Iterator[None]:
    """Around the reading of what `pack_optimizer` made."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"a server cannot import {error.name!r}, where the class of an optimizer is defined. Install it there, "
            f"or have it sent: cloudpickle.register_pickle_by_value({error.name}) on the coordinator."
        ) from error
