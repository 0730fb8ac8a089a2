"""Calls that a configuration names: checked before anything is started, made when the run needs them.

``_target_`` is the path of a function or a class in any package that Python finds, also in the folder that the command
is run in. It is imported and called: it is code of the configuration's author, so run no configuration that you would
not run as a program.

The keys beside it are arguments. Some are offered besides, to a call that has a parameter of that name:

=========  =================================================================================================
strategy   ``config``, ``plan``: the `ExperimentConfig`, and the launcher's plan
model      what the data says of itself: ``input_shape``, ``classes``
data       nothing; it returns an `Examples`, or a pair of `torch.utils.data.Dataset`: training, held out
optimizer  ``params``
loss       nothing; a class is called, a function is the loss
step       ``model``, ``optimizer``, ``loss``; it returns a function: a batch → the loss
=========  =================================================================================================
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torchstrat.app.config import CALLS, MISSING, ExperimentConfig, require
from torchstrat.core.errors import InvalidArgumentError

_OFFERED = {
    "strategy": ("config", "plan"),
    "model": ("input_shape", "classes"),
    "optimizer": ("params",),
    "step": ("model", "optimizer", "loss"),
}
_NO_ARGUMENTS = {"strategy": ("gradient_reduce_op",), "data": ("global_batch", "workers")}
"""Keys that the application itself reads."""


def check(config: ExperimentConfig) -> None:
    """Raise `InvalidArgumentError` where a call of this configuration cannot be made as it says."""
    for group in CALLS:
        call = getattr(config, group)
        if call or group not in ("loss", "step"):
            _check(group, call)


def _check(group: str, call: Mapping[str, object]) -> None:
    target, given = locate(group, call), arguments(group, call)
    parameters = _parameters(target)
    if parameters is None:
        return
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {name: one for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    own = [name for name in named if name not in _OFFERED.get(group, ())]
    for key, value in given.items():
        if key.startswith("_") and key.endswith("_"):  # instantiate's own
            continue
        near = difflib.get_close_matches(key, own, 1)
        require(
            takes_any or key in named,
            f"{group}.{key} is not a setting: {call['_target_']} has {', '.join(own) or 'none'}. "
            + (f"Did you mean {group}.{near[0]}?" if near else f"Remove it, or choose another {group}."),
        )
        require(value != MISSING, f"{group}.{key} has no default; set {group}.{key}=…")
    if group == "loss" and not isinstance(target, type):
        return
    for name in own:
        is_missing = named[name].default is inspect.Parameter.empty and name not in given
        require(not is_missing, f"{group}.{name} has no default, and {call['_target_']} needs it; set {group}.{name}=…")


def locate(group: str, call: Mapping[str, object]) -> Callable[..., Any]:
    """What ``_target_`` names. Imports its module."""
    path = call.get("_target_")
    require(
        isinstance(path, str) and path != MISSING,
        f"{group} says {dict(call)!r}, and no _target_: the path of a function or a class, such as "
        f"{group}._target_=mine.make. Choose {group}=… or set it.",
    )
    try:
        target: Callable[..., Any] = pkgutil.resolve_name(str(path))
    except Exception as error:
        raise InvalidArgumentError(
            f"{group}._target_={path} cannot be imported: {type(error).__name__}: {error}. Python looks in the folder "
            "that the command is run in, in PYTHONPATH and among what is installed."
        ) from error
    require(callable(target), f"{group}._target_={path} is {target!r}; a function or a class is needed.")
    return target


def arguments(group: str, call: Mapping[str, object]) -> dict[str, Any]:
    """The keys of ``call`` that are arguments."""
    left_out = {"_target_", "name", *_NO_ARGUMENTS.get(group, ())}
    if "name" in (_parameters(locate(group, call)) or ()):
        left_out.remove("name")
    return {key: value for key, value in call.items() if key not in left_out}


def defaults(group: str, call: Mapping[str, object]) -> dict[str, object]:
    """The arguments that the call can be made without, with their values."""
    parameters = _parameters(locate(group, call)) or {}
    return {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}


def make(group: str, call: Mapping[str, object], **offered: Any) -> Any:
    """Call what ``_target_`` names, with those of ``offered`` that it has parameters for.

    Raises:
        InvalidArgumentError: it says so, or with a `ValueError`, `TypeError` or `OSError`, that it cannot use such
            arguments.
    """
    target, settings = locate(group, call), arguments(group, call)
    made: Any = functools.partial(target, **settings)
    if any(isinstance(value, dict | list) or key.startswith("_") for key, value in settings.items()):
        from hydra.utils import instantiate  # optional; for calls among the arguments

        # Partial, since instantiate would copy what it is given besides: parameters, for one.
        made = instantiate({**settings, "_target_": call["_target_"], "_partial_": True}, _convert_="all")
    if group == "loss" and not isinstance(target, type):
        return made if settings else target
    parameters = _parameters(target) or {}
    wanted = {name: value for name, value in offered.items() if name in parameters and name not in settings}
    needed = [name for name in _OFFERED.get(group, ()) if name in parameters and name not in {**wanted, **settings}]
    lacking = [name for name in needed if parameters[name].default is inspect.Parameter.empty]
    require(
        not lacking,
        f"{group}={call.get('name', call['_target_'])} needs {', '.join(lacking)}, and this data has "
        f"{', '.join(offered) or 'nothing of the kind'}; set {' '.join(f'{group}.{name}=…' for name in lacking)}",
    )
    try:
        return made(**wanted)
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        shown, why = ", ".join(f"{key}={value!r}" for key, value in settings.items()), " ".join(str(error).split())
        refused = f"{group}._target_={call['_target_']} refused its arguments {shown}"
        raise InvalidArgumentError(f"{refused}: {why} (HYDRA_FULL_ERROR=1 shows where.)") from error


def _parameters(target: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """By name; None where Python does not know them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
