"""The names of torch.nn.functional, TorchScript and gradient scalers that are not public API, looked up when this file
is imported; and PyTorch's readers, which this file replaces.

A lookup with ``max_norm`` is heard of by the first.

Readers make a tensor of another one, or a number of it, and ask neither's class: functions, methods, constructors,
assigning to ``.data``. Here they ask, also under the names that modules have imported (``from torch import tensor``).
What a program keeps elsewhere, in a closure, and the constructors of one dtype each (``torch.DoubleTensor``) cannot be
replaced. They would ask a class that has ``__torch_dispatch__``, but a tensor gets such a class only with another
implementation below its object: graphs that were built before would lose it, and NumPy refuses it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchstrat.core._torch_private import is_compiler_at_work, look_up, uncompiled
from torchstrat.core.tensor_classes import tensors_in

_functional = importlib.import_module("torch.nn.functional")
_RENORM = "_no_grad_embedding_renorm_"
_scale_rows = look_up(_RENORM, _functional)
_lookup_hooks: dict[int, Callable[[torch.Tensor, float, float], None]] = {}
_compiled_lookups: list[None] = []
"""Something, where such a lookup has been compiled while there were no hooks."""
_resets: list[None] = []
_MOST_RESETS = 8  # a program that goes on compiling lookups between runs would else compile everything for each of them


def watch_scaling_lookups() -> None:
    """Have `put_lookup_hook` work, also in functions that are compiled from now on. For good, in the whole process."""
    if vars(_functional)[_RENORM] is _scale_rows_and_tell:
        return
    vars(_functional)[_RENORM] = _scale_rows_and_tell
    look_up("_register_builtin", importlib.import_module("torch.jit._builtins"))(
        _scale_rows_and_tell, f"aten::{_RENORM}"
    )
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None and look_up("counters", compiler)["frames"]:  # which may have been such lookups
        torch.compiler.reset()


def put_lookup_hook(key: int, hook: Callable[[torch.Tensor, float, float], None]) -> None:
    """Call ``hook(table, max_norm, norm_type)`` when a lookup of `torch.nn.functional` has scaled rows of a table, and
    before it reads them. A compiled function leaves such lookups to Python while there are hooks; what has been
    compiled with one is compiled anew."""
    _lookup_hooks[key] = hook
    if _compiled_lookups:
        _compiled_lookups.clear()
        _resets.append(None)
        torch.compiler.reset()


def remove_lookup_hook(key: int) -> None:
    _lookup_hooks.pop(key, None)


@uncompiled  # else it is compiled by itself where PyTorch has given up on who calls it
def _scale_rows_and_tell(weight: torch.Tensor, input: torch.Tensor, max_norm: float, norm_type: float) -> Any:  # noqa: A002
    if is_compiler_at_work():
        if _lookup_hooks or len(_resets) >= _MOST_RESETS:
            raise NotImplementedError("a lookup with max_norm on several replicas, which Python has to see")
        _compiled_lookups.append(None)
    result = _scale_rows(weight, input, max_norm, norm_type)
    if _lookup_hooks:
        _tell_of_lookup(weight, max_norm, norm_type)
    return result


@uncompiled
def _tell_of_lookup(table: torch.Tensor, max_norm: float, norm_type: float) -> None:
    for hook in tuple(_lookup_hooks.values()):
        hook(table, max_norm, norm_type)


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


_asked: tuple[type, ...] = ()
_changing = threading.Lock()
_may_ask: Callable[[], bool] = look_up("_C._is_torch_function_enabled")

_FUNCTIONS = (
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "full", "full_like"),
    *(f"sparse_{layout}_tensor" for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    *("nested.nested_tensor", "to_dlpack", "utils.dlpack.to_dlpack"),
)
_HOMES = {"torch" + f".{path}".rpartition(".")[0] for path in _FUNCTIONS}
_METHODS = ("new_tensor", "new", "new_full", "set_")


class _Asking:
    """Takes the place of a function, and is equal to it: compilers and modes find what they know of one by either.

    Numbers in lists are asked by PyTorch (``__float__``), so only ``in_lists`` has them looked through.
    """

    def __init__(self, path: str, read: Any, *, in_lists: bool = False) -> None:
        self._path, self._read, self._in_lists = path, read, in_lists
        functools.update_wrapper(self, read)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._read

    def __hash__(self) -> int:
        return hash(self._read)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return look_up, (self._path,)

    def __get__(self, owner: object, kind: object = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _asked and _may_ask():
            for one in tensors_in((args, kwargs)) if self._in_lists else (*args, *kwargs.values()):
                if isinstance(one, _asked):
                    kind: Any = type(one)
                    return kind.__torch_function__(self._read, (kind,), args, kwargs)
        return self._read(*args, **kwargs)


class _AskingData(property):
    """`torch.Tensor.data`: the tensor that is assigned asks as well. PyTorch passes on the ``__get__`` and ``__set__``
    that it finds here, which stay its own."""

    def __init__(self, data: Any) -> None:
        super().__init__(data.__get__, _Asking("Tensor.data", data.__set__))
        vars(self).update(__get__=data.__get__, __set__=data.__set__)


@functools.cache
def _have_all_ask() -> None:
    """For good, in the whole process: modules keep what they import, and a class that changes all the time is slow for
    who uses it."""
    base: Any = look_up("_C.TensorBase")
    for name in _METHODS:
        setattr(torch.Tensor, name, _Asking(f"Tensor.{name}", getattr(base, name)))
    torch.Tensor.data = _AskingData(inspect.getattr_static(torch.Tensor, "data"))  # type: ignore[assignment]
    torch.Tensor.__new__ = _asking_constructor(base.__new__)  # type: ignore[method-assign]
    register = look_up("_register_builtin", importlib.import_module("torch.jit._builtins"))
    asking: dict[int, _Asking] = {}
    for path in _FUNCTIONS:
        home, _, name = path.rpartition(".")
        read = look_up(path)
        made = asking[id(read)] = _Asking(path, read, in_lists=home == "nested")
        register(made, f"aten::{name}")  # TorchScript goes by the ``id``
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and _is_served(module):
            names = vars(module)
            for name, value in list(names.items()):
                if id(value) in asking:
                    names[name] = asking[id(value)]


def _is_served(module: ModuleType) -> bool:
    """PyTorch's own modules call its functions as they are, but for those from which programs take them."""
    name = module.__name__
    return name.partition(".")[0] != "torch" or name in _HOMES


def _asking_constructor(construct: Any) -> Callable[..., Any]:
    """A function: PyTorch's compiler, where it is imported from now on, takes nothing else."""
    asking = _Asking("Tensor.__new__", construct)

    def make(*args: Any, **kwargs: Any) -> Any:
        return asking(*args, **kwargs)

    return make


def have_readers_ask(*kinds: type) -> Callable[[], None]:
    """Until what this returns is called, `torch.tensor`, `torch.as_tensor`, `torch.asarray`, ``torch.Tensor(tensor)``,
    `torch.Tensor.new_tensor`, ``tensor.data = other`` and their like, which ask no class about a tensor that they read,
    ask these."""
    global _asked
    with _changing:
        _have_all_ask()
        _asked = (*_asked, *kinds)

    def end() -> None:
        global _asked
        with _changing:
            rest = list(_asked)
            for kind in kinds:
                rest.remove(kind)
            _asked = tuple(rest)

    return end


# -- what a scaler notes of each optimizer from `unscale_` to `update`, and its state dictionary does not have

_SCALE, _NOTED = "_scale", "_per_optimizer_states"
_begin = look_up("amp.GradScaler._lazy_init_scale_growth_tracker")
_STAGE, _FOUND = "stage", "found_inf_per_device"


class NotedByScaler(NamedTuple):
    """As it can be sent to another process."""

    has_scaled: bool
    optimizers: dict[int, tuple[object, list[float]]]
    """By number, the stage of its step, and whether there were infinite gradients, by device."""


def noted_by(scaler: GradScaler, optimizers: Mapping[int, Optimizer]) -> NotedByScaler:
    numbers = {id(one): number for number, one in optimizers.items()}
    found = {
        numbers[key]: (noted[_STAGE], [float(one) for one in noted[_FOUND].values()])
        for key, noted in getattr(scaler, _NOTED).items()
        if key in numbers
    }
    return NotedByScaler(getattr(scaler, _SCALE) is not None, found)


def put_noted(
    scaler: GradScaler, told: NotedByScaler, optimizers: Mapping[int, Optimizer], device: torch.device
) -> None:
    """Before the scaler's state is loaded. ``device``: of what is scaled."""
    if told.has_scaled and getattr(scaler, _SCALE) is None:
        _begin(scaler, device)
    noted = getattr(scaler, _NOTED)
    noted.clear()
    for number, (stage, found) in told.optimizers.items():
        if number in optimizers:
            tensors = [torch.full((), value, dtype=torch.float32, device=device) for value in found]
            noted[id(optimizers[number])].update({_STAGE: stage, _FOUND: dict(enumerate(tensors))})
