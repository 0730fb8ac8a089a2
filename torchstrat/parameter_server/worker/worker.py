"""What a worker answers: it runs one function at a time, for one coordinator at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from torchstrat.core._torch_private import version_of
from torchstrat.core.context import StrategyLike
from torchstrat.core.devices import local_devices, torch_device
from torchstrat.core.errors import (
    CommunicationError,
    ContextError,
    FencedError,
    FunctionError,
    ParameterServerUnavailable,
    PeerUnavailableError,
    TorchstratError,
)
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.dispatch import (
    PLAIN_RESULTS,
    Arguments,
    Batch,
    Gradients,
    Modes,
    Options,
    Raised,
    Recalled,
    Report,
    Resources,
    ServerGone,
)
from torchstrat.parameter_server.interface import Endpoint, Handler, Peer
from torchstrat.parameter_server.messages import Token
from torchstrat.parameter_server.remote_value import numbers_of
from torchstrat.parameter_server.serialization.functions import World, pack_exception, pack_result, unpack
from torchstrat.parameter_server.serialization.pack_cache import KEPT_CODES, Packed, Recent
from torchstrat.parameter_server.variables.attributes import put_back
from torchstrat.parameter_server.variables.remote_access import ServerGroup, VariableAccess
from torchstrat.parameter_server.worker import executor
from torchstrat.parameter_server.worker.executor import (
    Executor,
    FunctionRun,
    Outcomes,
    current_run,
    current_worker_index,
)
from torchstrat.parameter_server.worker.gradients import LeftGradients
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.parameter_server.worker.push import StepHook
from torchstrat.parameter_server.worker.session import Settings
from torchstrat.parameter_server.worker.stand_ins import view_of


class BatchQueue:
    """Between the thread that runs functions and those on which recalls arrive. For one coordinator.

    A recall names functions by their batch, since a function may come back in a later one, and it may overtake a batch
    that it names: what is recalled of a batch that has not begun is promised, and left out when that begins.
    """

    def __init__(self) -> None:
        self.next = 0
        """The number of the batch that is to be run next."""
        self._lock = threading.Lock()
        self._is_running = False
        self._waiting: dict[int, None] = {}  # of the batch that runs: what has not begun
        self._promised: dict[int, set[int]] = {}  # of later batches, by their numbers

    def begin(self, functions: Iterable[int]) -> None:
        """The next batch begins."""
        with self._lock:
            self._is_running = True
            promised = self._promised.pop(self.next, ())
            self._waiting = {function: None for function in functions if function not in promised}

    def take(self, function: int) -> bool:
        """Whether to run it now. From then on it cannot be recalled."""
        return self._waiting.pop(function, False) is None  # one step, which needs no lock

    def take_rest(self) -> tuple[int, ...]:
        """What has not begun; it will not be run."""
        return tuple(function for function in list(self._waiting) if self.take(function))

    def end(self) -> None:
        """The batch is over."""
        with self._lock:
            self._is_running = False
            self.next += 1

    def recall(self, recalled: Recalled) -> tuple[int, ...]:
        """Those of the functions that have not begun, and will not be run; each is given once."""
        given: list[int] = []
        with self._lock:
            for number, functions in recalled:
                if number == self.next and self._is_running:
                    given += [function for function in functions if self.take(function)]
                elif number >= self.next:
                    promised = self._promised.setdefault(number, set())
                    given += [function for function in functions if function not in promised]
                    promised.update(functions)
        return tuple(given)


_Work = tuple["Future[object]", Callable[..., object], tuple[object, ...], dict[str, object]]


class FunctionThread(concurrent.futures.Executor):
    """Runs what is submitted, in this order, on one thread that starts with the first of it.

    Unlike `ThreadPoolExecutor` it can run the next work *within* the present one, for work that arrived too early.
    Python waits for the thread at its end, so `shutdown` has to be called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        """Raises `RuntimeError` after `shutdown`."""
        future: Future[object] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} has been shut down")
            self._works.put((future, fn, args, kwargs))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name)
                self._thread.start()
        return future

    def run_next(self) -> bool:
        """In submitted work: wait for the next one and run it. False if there will be none, since this is the end."""
        work = self._works.get()
        if work is None:
            self._works.put(None)  # for the loop, or a run_next further out
            return False
        future, fn, args, kwargs = work
        if future.set_running_or_notify_cancel():
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # the work's, whatever it is; the thread is not its to end
                future.set_exception(error)
            else:
                future.set_result(result)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                if cancel_futures:
                    self._cancel_all()
                self._works.put(None)
            thread = self._thread
        if wait and thread is not None:
            thread.join()

    def _cancel_all(self) -> None:
        while True:
            try:
                work = self._works.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                work[0].cancel()
                work[0].set_running_or_notify_cancel()

    def _loop(self) -> None:
        while self.run_next():
            pass


class CoordinatorHere:
    """On a worker, a coordinator knows which worker this is, and of how many. Scheduling is done where the program
    runs."""

    def __init__(self, strategy: StrategyLike) -> None:
        self.strategy = strategy
        self.workers = 0

    def num_workers(self) -> int:
        return self.workers

    def get_current_worker_index(self) -> int:
        return current_worker_index()

    experimental_get_current_worker_index = get_current_worker_index

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ContextError(
            f"a scheduled function used coordinator.{name}; on a worker there are only get_current_worker_index() "
            "and num_workers(). Functions do not schedule functions: return what the coordinator needs to go on."
        )


SERVER_TIMEOUT_SECONDS = 60.0
_ARRIVAL_POLL_SECONDS = 0.01


class FunctionWorker:
    """The role ``worker``. What it knows belongs to one coordinator; another one starts from nothing."""

    def __init__(self, index: int, *, owns_process: bool = True) -> None:
        self._index = index
        self._owns_process = owns_process
        self._thread = FunctionThread("torchstrat-function")
        self._outcomes = Outcomes(self._get_endpoint)
        self._lock = threading.Lock()
        self._coordinator: Peer | None = None
        self._endpoint: Endpoint | None = None
        self._queues: dict[Peer, BatchQueue] = {}  # of one coordinator, the last that sent anything
        self._session: _Session | None = None
        self._leaving = False
        self._has_hook = False

    # -- Service ----------------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "worker.run": Handler(self._run, self._thread),
            "worker.recall": Handler(self._recall),
            "worker.left_gradients": Handler(self._left_gradients, self._thread),
        }

    def attach(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        if not self._has_hook:  # now and not when it is made: the task's port may be in use, and nobody closes it then
            self._has_hook = True
            StepHook.attach()

    def status(self) -> Mapping[str, object]:
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
        # Queued behind the batches that are here, which are handed back but for the function that runs now: when this
        # is done, so is that one, and its answer is on its way.
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
        self._outcomes.close()
        if self._has_hook:
            self._has_hook = False
            StepHook.detach()

    def join(self) -> None:
        """After `close`: wait for the function that still runs."""
        self._thread.shutdown(wait=True)
        self._outcomes.join()

    def _get_endpoint(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint

    # -- running ----------------------------------------------------------------------------------------------------

    def _queue_of(self, sender: Peer) -> BatchQueue:
        """Raises `FencedError` for one who is not the coordinator. With the lock."""
        if self._coordinator is not None and sender != self._coordinator:
            raise FencedError(f"worker {self._index} works for {self._coordinator}, not for {sender}.")
        if sender not in self._queues:
            self._queues = {sender: BatchQueue()}
        return self._queues[sender]

    def _recall(self, sender: Peer, recalled: Recalled) -> tuple[int, ...]:
        with self._lock:
            queue = self._queue_of(sender)
        return queue.recall(recalled)

    def _left_gradients(self, sender: Peer, numbers: Sequence[int]) -> tuple[int, ...]:
        return self._session_of(sender).left_of(numbers)

    def _run(self, sender: Peer, batch: Batch) -> Report:
        with self._lock:
            queue = self._queue_of(sender)
        if batch.number < queue.next:  # it was run; the coordinator has its news
            return Report()
        while queue.next < batch.number:  # those before it are still on their way
            if not self._thread.run_next():
                raise CommunicationError(f"worker {self._index} is closing; it has not begun this batch.")
        queue.begin(function for function, _, arguments, _ in batch.functions if arguments is not None)
        try:
            return self._run_batch(self._session_of(sender), queue, batch)
        finally:
            queue.end()

    def _session_of(self, sender: Peer) -> _Session:
        with self._lock:
            self._queue_of(sender)  # or another coordinator has come meanwhile
            session = self._session
            if session is None or session.coordinator != sender:
                session = _Session(sender, self._get_endpoint(), self._index, owns_process=self._owns_process)
                self._session = session
            return session

    def _run_batch(self, session: _Session, queue: BatchQueue, batch: Batch) -> Report:
        outcomes, coordinator = self._outcomes, session.coordinator
        session.learn(batch)
        last = len(batch.functions) - 1
        for place, (function, code, arguments, seed) in enumerate(batch.functions):
            if self._leaving or batch.stops < session.stops:
                break
            if arguments is None or not queue.take(function):
                continue
            session.set_up_to(place)
            began = time.perf_counter()
            result = session.run(function, code, arguments, seed, is_repeated=batch.is_repeated)
            outcomes.note(
                session.left,
                session.take_gradients(),
                wrote_parameters=session.wrote_parameters,
                accumulates=session.accumulates,
            )
            if isinstance(result, Raised | ServerGone):
                session.stops += 1
                return outcomes.rest(
                    ended=((function, result),),
                    handed_back=queue.take_rest(),
                    stops=session.stops,
                    leaving=self._leaving,
                )
            outcomes.add(coordinator, function, result, time.perf_counter() - began, is_last=place == last)
        return outcomes.rest(handed_back=queue.take_rest(), stops=session.stops, leaving=self._leaving)


class _Session:
    """Everything that one coordinator has sent to this worker."""

    def __init__(self, coordinator: Peer, endpoint: Endpoint, index: int, *, owns_process: bool) -> None:
        self.coordinator = coordinator
        self.stops = 0
        """How often a function did not return."""
        self._index = index
        self._incarnation = endpoint.peer.incarnation
        self._servers = ServerGroup(endpoint, timeout_seconds=SERVER_TIMEOUT_SECONDS)
        self._access = VariableAccess(self._servers, current_run)
        devices = local_devices()
        self._device = devices[0] if devices else "cpu:0"
        self._copies = Copies(self._access, torch_device(self._device))
        self._left = LeftGradients(self._copies.parameters)
        self._strategy = executor.make_strategy(self._device, self._servers, self._left.block)
        self._world = World(self._copies.make, self._make_missing, torch_device(self._device), view_of)
        self._world.register(("strategy",), self._strategy)
        self._world.register(("access",), self._access)
        self._world.register(("coordinator",), CoordinatorHere(self._strategy))
        self._resources = Resources(self._build)
        self._kept_codes: Recent[_Code] = Recent(KEPT_CODES)
        self._codes: list[_Code] = []  # of the batch
        put_back()  # on classes, what another job has set
        self._settings = Settings(self._world, self._copies, owns_process=owns_process)
        self._new_settings: list[tuple[int, Options | None, Modes | None]] = []  # not in force yet; the last one first
        self._rested = True  # the next function comes after a rest
        self._trouble: BaseException | None = None  # with what a batch brought, for the next function to raise
        self._executor = Executor(
            self._strategy,
            self._copies,
            self._left,
            self._number_of,
            self._settings.attributes_of,
            lambda value: self._world.token_of(value) is not None,
        )

    # -- what a batch brings, whether its functions are run or not: it is not sent again ----------------------------

    @property
    def left(self) -> tuple[int, ...]:
        """As `LeftGradients.unused`."""
        return self._left.unused

    def take_gradients(self) -> Gradients:
        """As `LeftGradients.take_changes`."""
        return self._left.take_changes()

    def left_of(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """As `LeftGradients.held`."""
        return self._left.held(numbers)

    @property
    def wrote_parameters(self) -> bool:
        return self._copies.wrote_parameters

    @property
    def accumulates(self) -> bool:
        return self._left.accumulates

    def learn(self, batch: Batch) -> None:
        self._rested |= batch.rested
        if batch.gone:
            self._kept_codes.drop(lambda code: not code.packed.tokens.isdisjoint(batch.gone))
        self._left.share(batch.is_shared, batch.left_elsewhere, accumulates=batch.accumulates)
        self._left.learn(batch.gradients)
        self._copies.buffer_edits.is_shared = batch.is_shared
        for digest, packed in batch.codes:
            if packed is not None:
                self._kept_codes.add(digest, _Code(packed))
        self._codes = [self._kept_codes.use(digest) for digest, _ in batch.codes]
        # Of settings that did not come into force in the last batch, the newest hold now.
        waiting = [(0, options, modes) for _, options, modes in reversed(self._new_settings)]
        self._new_settings = [*waiting, *batch.settings][::-1]
        try:
            self._learn(batch)
        except BaseException as error:
            self._trouble = error
        if batch.gone:
            self._release(batch.gone)

    def _release(self, tokens: Sequence[Token]) -> None:
        """The coordinator has dropped these; nothing is sent any more that names them."""
        held = [weakref.ref(held) for token in tokens if (held := self._world.find(token)) is not None]
        self._settings.release(tokens)
        variables = [token[1] for token in tokens if token[0] in ("parameter", "buffer")]
        for code in self._kept_codes.values():
            code.learned.difference_update(variables)
        self._executor.release(variables)
        for number in numbers_of(tokens):
            self._resources.forget(number)
        self._world.release(tokens)
        self._copies.members.note(module for _, module in self._world.modules())
        if any(reference() is not None for reference in held):  # in a cycle, as far as nothing of the program holds it
            gc.collect()
        self._servers.give_back_memory()

    def _learn(self, batch: Batch) -> None:
        if batch.servers is not None:
            self._servers.use(batch.servers)
            self._copies.expire()
        for spec in batch.resources:
            self._resources.learn(spec)
        for increment in batch.increments:
            self._world.load(increment)
        if batch.increments:
            self._executor.steps.keep_state_of(optimizer for _, optimizer in self._world.optimizers())
            self._copies.note_modules(module for _, module in self._world.modules())

    def set_up_to(self, place: int) -> None:
        """Bring into force what the function at this place of the batch was scheduled with."""
        options: Options | None = None
        modes: Modes | None = None
        while self._new_settings and self._new_settings[-1][0] <= place:
            _, new_options, new_modes = self._new_settings.pop()
            options = options if new_options is None else new_options
            modes = modes if new_modes is None else new_modes
        try:
            if modes is not None:  # first: they bring what is new in modules, and optimizers may step that
                self._settings.set_modes(modes)
            if options is not None:
                self._settings.set_options(options)
        except BaseException as error:
            self._trouble = error
            self._new_settings.append((place, options, modes))  # no function runs without them

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, function: int, code: int, arguments: Arguments, seed: int, *, is_repeated: bool) -> Any:
        """What the function returned, plain or `Packed`; or `Raised`, or `ServerGone`."""
        try:
            if self._trouble is not None:
                trouble, self._trouble = self._trouble, None
                raise trouble
            run = FunctionRun(function, self._incarnation, self._index, is_repeated=is_repeated)
            rested, self._rested = self._rested, False
            try:
                result = self._executor.call(run, lambda: self._load(self._codes[code], arguments), seed, rested=rested)
            finally:
                self._settings.put_back()
                self._codes[code].warn_of_changes()
            return result if type(result) in PLAIN_RESULTS else pack_result(result, self._world)
        except ParameterServerUnavailable as error:
            index, cause = error.task.index, error.__cause__
            return ServerGone(
                self._servers.peers().get(index),
                index,
                str(error),
                str(cause or error),
                is_cut_off=isinstance(cause, PeerUnavailableError),
            )
        except BaseException as error:
            return pack_exception(error, self._world)
        finally:
            phases.reached(phases.IDLE)

    def _load(
        self, code: _Code, arguments: Arguments
    ) -> tuple[Any, tuple[object, ...], dict[str, object], Iterable[object], set[int]]:
        phases.reached(phases.UNPICKLING)
        if not code.is_loaded:
            code.load(self._world)
            code.captured = self._captured(code.packed.tokens)
        if isinstance(arguments, bytes):
            (args, kwargs), captured = self._world.unpickle_plain(arguments, "args"), code.captured
        else:
            blob, tensors, buffers, tokens = arguments
            args, kwargs = self._world.unpickle(blob, tensors, buffers, "args")
            captured = [*code.captured, *self._captured(tokens)]
        phases.reached(phases.INSIDE)
        return self._settings.surround(code.function), tuple(args), dict(kwargs), captured, code.learned

    def _captured(self, tokens: Iterable[Token]) -> list[object]:
        return [self._world.resolve(token) for token in tokens]

    def _number_of(self, optimizer: Optimizer) -> int | None:
        token = self._world.token_of(optimizer)
        return token[1] if token is not None and token[0] == "helper" else None

    def _make_missing(self, token: Token) -> object:
        if token[0] == "per_worker":
            return self._resources.get(token[1])
        raise FunctionError(f"a scheduled function refers to the {token[0]}, which workers do not have.")

    def _build(self, builder: Packed) -> object:
        return unpack(builder, self._world)()


class _Code:
    """A function's code: as it came, and unpickled when it is first needed."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.is_loaded = False
        self.function: Any = None
        self.captured: list[object] = []
        self.learned: set[int] = set()
        """Numbers of variables that it has used without having been seen to reach them."""
        self._plain: list[tuple[torch.Tensor, int]] = []
        """Tensors that came with it, which are this worker's own, and their versions."""

    def load(self, world: World) -> None:
        self.function, self.is_loaded = unpack(self.packed, world), True
        tensors = self.packed.tensors[: len(self.packed.tensors) - self.packed.buffers]
        self._plain = [(tensor, version_of(tensor)) for tensor in tensors]

    def warn_of_changes(self) -> None:
        for tensor, version in self._plain:
            if version_of(tensor) != version:
                self._plain = []
                warnings.warn(
                    f"{self.packed.what} has changed a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, in place "
                    "that lies outside of it. Each worker has a copy of its own, and the coordinator's stays as it was."
                    " Make it a buffer of a module, or a ts.Variable, within the strategy's scope, or return what it "
                    "becomes. (Further ones are not warned of.)",
                    stacklevel=2,
                )
                return
