"""The inside of a process started by `torchstrat.testing.spawn`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchstrat.testing._travel import pack


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


def serve(connection: Connection[Any, Any], folder: str, rank: int, environment: Mapping[str, str]) -> None:
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
