"""The names of TorchScript that are not public API, looked up when this file is imported."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torchstrat.core._torch_private import look_up

_script_kinds = [look_up(f"jit.{name}") for name in ("ScriptModule", "_script.RecursiveScriptModule")]
_ScriptMethod, _ScriptFunction = look_up("_C.ScriptMethod"), look_up("_C.ScriptFunction")
_TensorDicts, _ModuleDict = (look_up("_C.ParameterDict"), look_up("_C.BufferDict")), look_up("_C.ModuleDict")
_freeze_module = look_up("_C._freeze_module")
_SAVING = (
    *("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter"),
    *("__copy__", "__deepcopy__"),
)


def _tensors_of_script(held: Any) -> Iterator[Any]:
    """Of a TorchScript module of C++."""
    for kind in _TensorDicts:
        yield from (tensor for _, tensor in kind(held).items())
    for _, child in _ModuleDict(held).items():
        yield from _tensors_of_script(child)


def before_scripts_use(callback: Callable[[list[Any]], None], is_needed: Callable[[], bool]) -> None:
    """From now on call ``callback(values)`` with the tensors of a TorchScript module before it is called, saved, copied
    or frozen, and with what it, or a function of TorchScript, is given: C++ asks no tensor's class. Not while
    ``is_needed()`` says no. For good, in the whole process."""

    def asking(method: Callable[..., Any], module_of: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def asked(own: Any, *args: Any, **kwargs: Any) -> Any:
            if is_needed():
                module = module_of(own)
                callback([*args, *kwargs.values(), *(() if module is None else _tensors_of_script(module))])
            return method(own, *args, **kwargs)

        return asked

    def held_by(module: Any) -> Any:
        return vars(vars(module).get("_actual_script_module", module)).get("_c")  # None while it is being made

    for kind in _script_kinds:
        for name in _SAVING:
            if name in vars(kind):
                setattr(kind, name, asking(vars(kind)[name], held_by))
    _ScriptMethod.__call__ = asking(_ScriptMethod.__call__, operator.attrgetter("owner"))
    _ScriptFunction.__call__ = asking(_ScriptFunction.__call__, lambda _: None)
    vars(look_up("_C")).update(_freeze_module=asking(_freeze_module, lambda held: held))
