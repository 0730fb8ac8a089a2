"""What cannot travel between processes, and how to tell the user which name it goes by.

Pickling fails deep inside; users know their program by its names. So the part that cannot travel is looked for again
from the outside, along closures, globals, attributes and items, and the shortest way to it is the error's first words:
``step → closure variable 'state'['lock'] (a _thread.lock) cannot travel to a worker: …``.

A captured object whose class or module cannot be imported on a worker, or whose own code raised when it was made, has
a stand-in there (`NotHere`). One such object must not keep everything that was captured with it, or after it, from
arriving: a program that never uses it on a worker runs. Whatever is asked of the stand-in raises the error of the
import, or of that code.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import socket
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchstrat.core.errors import FunctionError, NotSendableError
from torchstrat.core.variable.tensor_like import TensorLike
from torchstrat.parameter_server.serialization.closure_walk import CachedFunction, is_library, is_own, names_in

_MAX_OBJECTS = 50_000
_MAX_MEMBERS = 10_000  # of one container


class StaysHere:
    """Mixin for callables that belong to one process (hooks on the user's modules and optimizers, for example).

    They may be pickled with what they hang on; in the other process there is a callable that does nothing instead.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _do_nothing_callable, ()


def _do_nothing_callable() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object, **__: object) -> None:
    return None


class Refused(Exception):  # noqa: N818  # never leaves the package: `not_sendable` turns it into the user's error
    """Raised while pickling: ``value`` must not travel, for ``reason`` (which says what to do instead)."""

    def __init__(self, value: object, reason: str) -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason


# -- why --------------------------------------------------------------------------------------------------------------

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event)
_PER_WORKER = (
    "Create it inside the function, or once on each worker with coordinator.create_per_worker_dataset or "
    "create_per_worker_resource."
)


def refusal(value: object) -> str | None:
    """Why an object of this kind never travels, even where a pickle could be made of it; None for all others."""
    if isinstance(value, io.IOBase):
        # cloudpickle turns a file open for reading into its contents, and refers to the standard streams.
        if value in (sys.stdout, sys.stderr, sys.stdin) or isinstance(value, io.StringIO | io.BytesIO):
            return None
        return f"an open file exists in one process only. {_PER_WORKER}"
    if isinstance(value, socket.socket):
        return f"a socket exists in one process only. {_PER_WORKER}"
    if isinstance(value, _LOCKS):
        return (
            "a lock guards something in one process only, and workers share nothing with the coordinator. Functions "
            "of one worker run one at a time, so they need none."
        )
    if isinstance(value, threading.Thread):
        return f"a thread runs in one process only. {_PER_WORKER}"
    if isinstance(value, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
        return f"a generator is in the middle of its work, in one process only. {_PER_WORKER}"
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return "TorchScript does not travel. Send the Python module or function that it was made from."
    if isinstance(value, torch.Stream | torch.Event):
        return "streams and events belong to a device of one process. Create them inside the function."
    return None


COMPILED = (
    "what torch.compile has made of a function is this process's own. Call torch.compile in the scheduled function, or "
    "compile a module, model.compile(), which travels and is compiled on each worker."
)


def is_compiled(function: types.FunctionType) -> bool:
    """Whether torch.compile has made it, and not torch.compiler.disable."""
    return "_torchdynamo_orig_callable" in vars(function) and "_torchdynamo_disable" not in vars(function)


def why_not(value: object, error: BaseException) -> str:
    """Words for a failed pickle of ``value``: what kind of thing it is, or what Python said."""
    if _is_process_group(value):
        return "a process group exists in one process only; workers are not members of the coordinator's."
    kind = type(value)
    if kind.__module__.startswith("torch.utils.data"):
        return f"an iterator over data is in the middle of its work, in one process only. {_PER_WORKER}"
    said = str(error).strip() or type(error).__name__
    return f"{said.rstrip('.')}. {_PER_WORKER}"


def _is_process_group(value: object) -> bool:
    distributed = torch.distributed
    return distributed.is_available() and isinstance(value, distributed.ProcessGroup | distributed.Store)


def training_state_refusal(value: object) -> str | None:
    """Why state of a training that no scope has seen does not travel; None for all that may go as a plain copy.

    A copy of it on a worker would be trained there, and thrown away.
    """
    remedy = "Create it inside `with strategy.scope():`."
    if isinstance(value, nn.Module):
        name = next((name for name, parameter in value.named_parameters() if parameter.requires_grad), None)
        if name is None:
            return None
        return (
            f"it was created outside the strategy's scope and is trainable ({name!r} requires a gradient), so each "
            f"worker would train a copy of its own that nobody sees. {remedy} If it is not to be trained, call "
            "requires_grad_(False) on it."
        )
    if isinstance(value, Optimizer):
        return (
            "it was created outside the strategy's scope, so each worker would keep a state of its own that nobody "
            f"sees. {remedy}"
        )
    if isinstance(value, torch.Tensor) and value.requires_grad:
        if value.is_leaf:
            return (
                f"a tensor of shape {tuple(value.shape)} that requires a gradient and was created outside the "
                f"strategy's scope would be trained in a copy that nobody sees. {remedy} Or send value.detach()."
            )
        return (
            f"a tensor of shape {tuple(value.shape)} with a gradient history, which stays in this process. Send "
            "value.detach(), or compute it inside the function."
        )
    if isinstance(value, TensorLike):
        return (
            "it was created outside the strategy's scope, so what workers assign to their copies would be lost. "
            f"{remedy} Or send its value: variable.read_value()."
        )
    return None


# -- where ------------------------------------------------------------------------------------------------------------


def not_sendable(where: str, value: object, reason: str, destination: str) -> NotSendableError:
    """The error to raise because ``value``, found at the path ``where``, cannot travel to ``destination``."""
    return NotSendableError(f"{where} ({type_name(value)}) cannot travel to {destination}: {reason}")


def type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    article = "an" if (module or kind.__qualname__)[0].lower() in "aeiou" else "a"
    return f"{article} {module}{kind.__qualname__}"


def name_of(value: object, what: str) -> str:
    """How error messages call what is sent: a function by its own name, other things by their role."""
    if what != "fn":
        return what
    if isinstance(value, functools.partial):
        return f"partial({name_of(value.func, what)})"
    if isinstance(value, types.MethodType):
        return f"{type(value.__self__).__name__}.{value.__func__.__name__}"
    if isinstance(value, types.FunctionType):
        return value.__name__
    return f"the {type(value).__name__}"


def path_to(
    root: object, what: str, is_it: Callable[[object], bool], enters: Callable[[object], bool] = lambda _: True
) -> str | None:
    """The shortest way from ``root``, which is called ``what``, to an object that ``is_it``; None where none is found.

    ``enters``: whether an object is sent with its contents; False for what goes as a reference.
    """
    return next((path for path, value in paths(root, what, enters) if is_it(value)), None)


def paths(root: object, what: str, enters: Callable[[object], bool]) -> Iterator[tuple[str, object]]:
    """Everything that ``root`` consists of, each object once, by the shortest way to it; the nearest first."""
    pending: collections.deque[tuple[str, object]] = collections.deque([(what, root)])
    seen: dict[int, object] = {}  # the values too: temporaries must outlive the search, or others could get their ids
    while pending and len(seen) < _MAX_OBJECTS:
        path, value = pending.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if value is root or enters(value):
            pending.extend((path + step, part) for step, part in _parts(value))


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What ``value`` consists of, each with how to write it after the path to ``value``."""
    if isinstance(value, str | bytes | int | float | complex | torch.Tensor | type(None)):
        return
    if isinstance(value, types.ModuleType):
        if is_own(value.__name__):
            yield from ((f".{name}", part) for name, part in list(vars(value).items()))
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield " → self", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f" → argument {index}", part) for index, part in enumerate(value.args))
        yield from ((f" → argument {name!r}", part) for name, part in value.keywords.items())
    elif isinstance(value, CachedFunction):
        yield "", value.__wrapped__
    elif isinstance(value, type):
        for name, part in list(vars(value).items()):
            yield f".{name}", getattr(part, "__func__", getattr(part, "fget", None)) or part
    elif isinstance(value, Mapping):
        for key, part in itertools.islice(list(value.items()), _MAX_MEMBERS):
            yield f"[{key!r}]", part
            yield f" → key {key!r}", key
        yield from _attributes(value)
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from ((f"[{index}]", part) for index, part in enumerate(itertools.islice(list(value), _MAX_MEMBERS)))
        yield from _attributes(value)
    else:
        yield from _attributes(value)


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield f" → closure variable {name!r}", cell.cell_contents
        except ValueError:  # a name that is assigned later
            continue
    for name in names_in(fn.__code__):
        if name in fn.__globals__:
            yield f" → global {name!r}", fn.__globals__[name]
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    for name, part in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True):
        yield f" → default of {name!r}", part
    for name, part in (fn.__kwdefaults__ or {}).items():
        yield f" → default of {name!r}", part
    yield from ((f".{name}", part) for name, part in list(vars(fn).items()))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    members = dict(getattr(value, "__dict__", {}))
    if type(value).__module__.startswith("torchstrat."):  # no name that the user knows
        members = {name: part for name, part in members.items() if not name.startswith("_")}
    if isinstance(value, Optimizer):
        members.pop("state", None)  # it is made where the variables are
    if isinstance(value, nn.Module):
        for group in ("_modules", "_parameters", "_buffers"):
            yield from ((f".{name}", part) for name, part in members.pop(group, {}).items())
    yield from ((f".{name}", part) for name, part in members.items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)
    if not is_library(type(value).__module__):
        yield f" → class {type(value).__name__}", type(value)


class NotHere:
    """Base of the classes that stand for missing ones; see `class_for`."""

    _why: FunctionError

    def __new__(cls, *_: object, **__: object) -> NotHere:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    # -- what unpickling does to an object, whatever class it has

    def __setstate__(self, _: object) -> None:
        pass

    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    # -- what programs do to it

    def __getattr__(self, name: str) -> NoReturn:
        raise FunctionError(str(self._why)) from self._why

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise FunctionError(str(self._why)) from self._why

    __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __lt__ = __int__ = __float__ = (
        _refuse
    )
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __index__ = __enter__ = __exit__ = _refuse
    __hash__ = object.__hash__


def missing_error(error: Exception, what: str) -> FunctionError:
    """Of something captured: what this process cannot import, and the remedy."""
    module = error.name if isinstance(error, ModuleNotFoundError) and error.name else what.rpartition(".")[0] or what
    made = FunctionError(
        f"captured objects need {what}, which this worker cannot import ({type(error).__name__}: {error}). Install the "
        f"module {module!r} on the workers and start them again, or have it sent: "
        f"cloudpickle.register_pickle_by_value({module}) on the coordinator, before the objects are made in a scope."
    )
    made.__cause__ = error
    return made


def class_for(name: str, why: FunctionError) -> type[NotHere]:
    """The class that stands for the missing one of that name, or for a function: a call of it makes a stand-in."""
    return type(name, (NotHere,), {"_why": why})


class MissingModule(types.ModuleType):
    """Stands for a module that cannot be imported."""

    def __init__(self, name: str, why: FunctionError) -> None:
        super().__init__(name)
        self.__dict__["_why"] = why

    def __getattr__(self, name: str) -> NoReturn:
        why: FunctionError = self.__dict__["_why"]
        raise FunctionError(str(why)) from why


# -- gradient scalers ------------------------------------------------------------------------------------------------
#
# Each worker has one of its own, which goes by what its functions meet. The numbers of a step do not depend on the
# scale; but that of the coordinator's object is the one with which it was sent, and what is loaded into it later goes
# nowhere. Who asks one here for its scale is told.

_untold: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""Those that were sent, until it was said of them."""
_sent_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()


def note_scaler(value: object) -> None:
    """A function is sent with a reference to it."""
    if isinstance(value, GradScaler) and value.is_enabled() and value not in _sent_scalers:
        _sent_scalers.add(value)
        _untold.add(value)
        _tell_of_scalers()


@functools.cache
def _tell_of_scalers() -> None:
    for name in ("get_scale", "state_dict", "load_state_dict", "update"):
        setattr(GradScaler, name, _telling_of_scale(name))


def _telling_of_scale(name: str) -> Callable[..., object]:
    method: Callable[..., object] = getattr(GradScaler, name)

    @functools.wraps(method)
    def told(self: GradScaler, *args: Any, **kwargs: Any) -> object:
        is_own_code = sys._getframe(1).f_globals is GradScaler.__getstate__.__globals__  # it is being sent
        if self in _untold and not is_own_code:
            _untold.discard(self)
            warnings.warn(
                f"GradScaler.{name}() was called on the coordinator, and scheduled functions use this scaler. Each "
                "worker has one of its own, which goes on from the scale that it was sent with; the coordinator's "
                "stays as it is, also in checkpoints, and what is loaded or set here is not sent. Return "
                "scaler.get_scale() from the function, and set the scale before the first function is scheduled. (This "
                "is said once.)",
                stacklevel=2,
            )
        return method(self, *args, **kwargs)

    return told
