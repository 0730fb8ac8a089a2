"""The inside of a process started by `torchstrat.testing.spawn`, and how functions and results get there and back: by
name where the other side can import them.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

from torchstrat.parameter_server.serialization.plain import ClassesHere


def pack(value: object) -> bytes:
    """``value`` for another process: by Python's own pickle, and by cloudpickle what that refuses (a function of a
    function) or what nobody can import: all of a ``__main__`` without a file, as a notebook's and ``python -c``'s is.

    Raises what pickle raises, where neither can.
    """
    try:
        if _children_have_main():
            return pickle.dumps(value)
        first: Exception | None = None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        first = error
    import cloudpickle  # type: ignore[import-untyped]  # needed for these alone

    try:
        by_value: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise first or error from None
    return by_value


def unpack(packed: bytes) -> object:
    """In the process that the classes came from: they stay as they are there."""
    return ClassesHere(io.BytesIO(packed)).load()


def by_value(function: Callable[..., object], module: ModuleType) -> Callable[..., object]:
    """The function, for processes that cannot import the module, of which it may use all."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    try:
        return _Packed(cloudpickle.dumps(function), getattr(function, "__qualname__", repr(function)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class _Packed:
    def __init__(self, packed: bytes, name: str) -> None:
        self._packed = packed
        self.__qualname__ = name

    def __call__(self, *arguments: object) -> object:
        return pickle.loads(self._packed)(*arguments)


def _children_have_main() -> bool:
    """Whether `multiprocessing` prepares this program's ``__main__`` in new processes, as their ``__mp_main__``."""
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:  # python -m
        return True
    return os.path.isfile(getattr(main, "__file__", None) or "")


@dataclass(frozen=True)
class Request:
    """Call a function in a process of the group."""

    call: bytes
    """Packed ``(function, args)``; opened where a failure to do so can be reported."""
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What came of a `Request`: a pickled result, or a reason with its traceback."""

    result: bytes | None
    reason: str = ""
    traceback: str = ""


def stacks_path(folder: Path, rank: int) -> Path:
    """Where process ``rank`` writes the stacks of its threads when it crashes or is asked to (SIGUSR1)."""
    return folder / f"stacks-of-rank-{rank}.txt"


def serve(connection: Connection[object, object], folder: str, rank: int, environment: Mapping[str, str]) -> None:
    """Answer requests until the other end of ``connection`` is closed. ``environment``: the whole of this process's."""
    _be_a_process_of_its_own(environment)
    with stacks_path(Path(folder), rank).open("w") as stacks:
        faulthandler.enable(file=stacks, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        # Ctrl-C reaches the whole foreground group; only the parent decides, and it kills.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            try:
                request: Request = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                break
            answer = pickle.dumps(_answer(request))
            try:
                connection.send_bytes(answer)
            except (BrokenPipeError, ConnectionResetError):
                break  # the parent is gone, or no longer interested
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _be_a_process_of_its_own(environment: Mapping[str, str]) -> None:
    """What a fork has of the process that it was forked from."""
    gc.freeze()  # a collection would otherwise go through all that was imported, and copy every page of it
    os.environ.clear()
    os.environ.update(environment)
    if (threads := environment["OMP_NUM_THREADS"]).isdecimal():  # it may also be a list, for nested regions
        torch.set_num_threads(int(threads))
    np.random.seed()
    # Of a process that multiprocessing has started, children would be started alike: a data loader's workers as new
    # interpreters, which takes seconds, where torchrun's processes fork.
    multiprocessing.set_start_method(None, force=True)


def _answer(request: Request) -> Answer:
    os.environ.update(request.environment)
    try:
        function, args = pickle.loads(request.call)
        with warnings.catch_warnings():  # filters that it sets would be the next function's too
            result = pack(function(*args))
        if dist.is_available() and dist.is_initialized():
            raise RuntimeError(
                "the function returned and left the default process group behind, which the next one would meet; "
                "end with strategy.close(), or with torch.distributed.destroy_process_group()."
            )
        if "torchstrat.distributed.collectives.default_group" in sys.modules:  # else nothing has met
            sys.modules["torchstrat.distributed.collectives.default_group"].forget_meeting_points()
    except BaseException as error:  # SystemExit too: it must not look like a crash
        reason = "".join(traceback.format_exception_only(error)).splitlines()[0]
        return Answer(None, reason, traceback.format_exc())
    return Answer(result)
