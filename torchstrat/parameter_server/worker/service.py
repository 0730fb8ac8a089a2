"""What a worker answers: it runs one function at a time, for one coordinator at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchstrat.devices import local_devices, torch_device
from torchstrat.errors import FencedError, FunctionError, ParameterServerUnavailable, TorchstratError
from torchstrat.parameter_server.dispatch import (
    KEPT_CODES,
    Dispatch,
    Modes,
    NotRun,
    Options,
    Outcome,
    Raised,
    Recent,
    Returned,
    ServerGone,
)
from torchstrat.parameter_server.endpoint import Endpoint, Handler
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.travel.closures import pack_result, unpack
from torchstrat.parameter_server.travel.world import World
from torchstrat.parameter_server.variables.server_group import ServerGroup
from torchstrat.parameter_server.variables.variable_access import VariableAccess
from torchstrat.parameter_server.worker import phases
from torchstrat.parameter_server.worker.coordinator_here import CoordinatorHere
from torchstrat.parameter_server.worker.copies import Copies
from torchstrat.parameter_server.worker.resources import Resources
from torchstrat.parameter_server.worker.run import Executor, FunctionRun, current_run
from torchstrat.parameter_server.worker.steps import StepHook

SERVER_TIMEOUT_SECONDS = 60.0
_ARRIVAL_POLL_SECONDS = 0.01


class FunctionWorker:
    """The role ``worker``. What it knows belongs to one coordinator; another one starts from nothing."""

    def __init__(self, index: int, *, server_timeout_seconds: float = SERVER_TIMEOUT_SECONDS) -> None:
        self._index = index
        self._server_timeout_seconds = server_timeout_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchstrat-function")
        self._lock = threading.Lock()
        self._coordinator: Peer | None = None
        self._endpoint: Endpoint | None = None
        self._session: _Session | None = None
        self._leaving = False
        self._closed = False
        StepHook.attach()

    # -- Service ----------------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        return {"worker.run": Handler(self._run, self._thread)}

    def attach(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def status(self) -> Mapping[str, Any]:
        return {}

    def coordinator_arrived(self, coordinator: Peer) -> None:
        with self._lock:
            self._coordinator = coordinator
        phases.reached(phases.IDLE)

    def coordinator_left(self, *, finished: bool) -> None:
        with self._lock:
            self._coordinator = None

    def drain(self, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        with self._lock:
            self._leaving = True
            coordinator = self._coordinator
        # Queued behind the function that runs now: when this is done, so is that one, and its answer is on its way.
        behind = self._thread.submit(lambda: None)
        if coordinator is not None and self._endpoint is not None:
            told = self._endpoint.call(
                coordinator, "coordinator.worker_leaves", {"index": self._index}, timeout_seconds=timeout_seconds
            )
            concurrent.futures.wait([told, behind], timeout=timeout_seconds)
            self._wait_for_arrival(coordinator, self._endpoint, until)
        else:
            concurrent.futures.wait([behind], timeout=timeout_seconds)

    def _wait_for_arrival(self, coordinator: Peer, endpoint: Endpoint, until: float) -> None:
        """Until the coordinator has the last function's answer. The news of this process's end goes another way, and
        would overtake it: then the function would run again elsewhere."""
        with contextlib.suppress(TorchstratError):  # the coordinator has gone
            while (left := until - time.monotonic()) > 0 and endpoint.call(
                coordinator, "coordinator.worker_leaves", {"index": self._index}, timeout_seconds=left
            ).result():
                time.sleep(_ARRIVAL_POLL_SECONDS)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if not self._closed:
            self._closed = True
            StepHook.detach()

    def join(self) -> None:
        """After `close`: wait for the function that still runs."""
        self._thread.shutdown(wait=True)

    # -- running ----------------------------------------------------------------------------------------------------

    def _run(self, sender: Peer, dispatch: Dispatch) -> Outcome:
        with self._lock:
            if self._coordinator is not None and sender != self._coordinator:
                raise FencedError(f"worker {self._index} works for {self._coordinator}, not for {sender}.")
            if self._leaving:
                return NotRun()
            session = self._session
            if session is None or session.coordinator != sender:
                assert self._endpoint is not None
                session = self._session = _Session(sender, self._endpoint, self._index, self._server_timeout_seconds)
        return session.run(dispatch)


class _Session:
    """Everything that one coordinator has sent to this worker."""

    def __init__(self, coordinator: Peer, endpoint: Endpoint, index: int, timeout_seconds: float) -> None:
        from torchstrat.strategies.parameter_server import ParameterServerStrategy

        self.coordinator = coordinator
        self._index = index
        self._incarnation = endpoint.peer.incarnation
        self._servers = ServerGroup(endpoint, timeout_seconds=timeout_seconds)
        self._access = VariableAccess(self._servers, current_run)
        devices = local_devices()
        self._device = devices[0] if devices else "cpu:0"
        self._copies = Copies(self._access, torch_device(self._device))
        self._strategy = ParameterServerStrategy._on_worker(self._device, self._servers)
        self._world = World(self._copies.make, self._make_missing, torch_device(self._device))
        self._world.register(("strategy",), self._strategy)
        self._world.register(("access",), self._access)
        self._world.register(("coordinator",), CoordinatorHere(self._strategy))
        self._resources = Resources(self._build)
        self._codes = Recent(KEPT_CODES)
        self._executor = Executor(self._strategy, self._copies, self._number_of)

    def run(self, dispatch: Dispatch) -> Outcome:
        try:
            self._learn(dispatch)
            run = FunctionRun(dispatch.function, self._incarnation, self._index)
            result = self._executor.call(run, lambda: self._load(dispatch), dispatch.seed, rested=dispatch.rested)
            return Returned(pack_result(result, self._world))
        except ParameterServerUnavailable as error:
            index = error.task.index
            return ServerGone(self._servers.peers().get(index), index, str(error))
        except BaseException as error:
            return Raised(portable(error))
        finally:
            phases.reached(phases.IDLE)

    def _learn(self, dispatch: Dispatch) -> None:
        if dispatch.servers is not None:
            self._servers.use(dispatch.servers)
            self._copies.expire()
        for increment in dispatch.increments:
            self._world.load(increment)
        if dispatch.increments:
            self._copies.note_buffers(module for _, module in self._world.modules())
        for spec in dispatch.resources:
            self._resources.learn(spec)
        if dispatch.options is not None:
            self._set_options(dispatch.options)
        if dispatch.modes is not None:
            self._set_modes(dispatch.modes)

    def _load(self, dispatch: Dispatch) -> tuple[Any, tuple[Any, ...], dict[str, Any], Iterable[Any]]:
        phases.reached(phases.UNPICKLING)
        if dispatch.packed_code is not None:
            code = dispatch.packed_code
            self._codes.add(dispatch.code, (unpack(code, self._world), self._captured(code.tokens)))
        fn, captured = self._codes.use(dispatch.code)
        args, kwargs = unpack(dispatch.arguments, self._world)
        phases.reached(phases.INSIDE)
        return fn, tuple(args), dict(kwargs), [*captured, *self._captured(dispatch.arguments.tokens)]

    def _captured(self, tokens: Iterable[Any]) -> list[Any]:
        return [self._world.resolve(token) for token in tokens]

    def _set_options(self, options: Options) -> None:
        for number, groups in options.items():
            if self._world.knows(("helper", number)):
                optimizer = self._world.resolve(("helper", number))
                for values in groups[len(optimizer.param_groups) :]:
                    optimizer.param_groups.append({"params": [self._copies.tensor_of(n) for n in values["params"]]})
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.update({name: value for name, value in values.items() if name != "params"})

    def _set_modes(self, modes: Modes) -> None:
        for token, flag in modes.items():
            if self._world.knows(token):
                captured = self._world.resolve(token)
                if isinstance(captured, nn.Module):
                    captured.training = flag
                else:
                    captured.requires_grad_(flag)

    def _number_of(self, optimizer: Optimizer) -> int | None:
        token = self._world.token_of(optimizer)
        return token[1] if token is not None and token[0] == "helper" else None

    def _make_missing(self, token: Any) -> Any:
        if token[0] == "per_worker":
            return self._resources.get(token[1])
        raise FunctionError(f"a scheduled function refers to the {token[0]}, which workers do not have.")

    def _build(self, builder: Any) -> Any:
        return unpack(builder, self._world)()


def portable(error: BaseException) -> BaseException:
    """``error`` with the worker's traceback as a note, if it survives the way to the coordinator; else its text in an
    error that does."""
    text = "".join(traceback.format_exception(error))
    try:
        if not isinstance(error, Exception):  # sys.exit() in a function is not to end the coordinator
            raise TypeError
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = FunctionError(f"{type(error).__name__}: {error}")
    if hasattr(copy, "add_note"):
        copy.add_note(f"on the worker:\n{text}")
    return copy
