"""The role ``ps`` as its process hosts it: the store's methods, as messages."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.core.errors import CommunicationTimeoutError
from torchstrat.core.kept_pages import give_back_pages
from torchstrat.parameter_server.interface import AnswerMemory, Endpoint, Handler, Peer
from torchstrat.parameter_server.server.store import VariableStore

if TYPE_CHECKING:
    from torchstrat.parameter_server.server.checkpoint_shards import CheckpointShards

_SWITCH_INTERVAL_SECONDS = 5e-4
"""Of the interpreter, while a server runs. Its threads spend their time in torch, without the interpreter's lock; with
Python's 5 ms a thread that comes back from there waits that long, per call, for one that is busy in Python."""

_LEAVE_MUCH_FREE = (
    *("ps.create", "ps.grow", "ps.release", "ps.load_optimizer_state"),
    *("ps.read_checkpoint", "ps.end_checkpoint"),
)
"""Orders for which a server takes, for a while, as much memory again as it holds; or that give back what it held."""

_switches_lock = threading.Lock()
_before: list[float] = []


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """A setting of the whole process: the first server in it sets it, the last one puts it back."""
    with _switches_lock:
        _before.append(_before[0] if _before else sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        with _switches_lock:
            before = _before.pop()
            if not _before:
                sys.setswitchinterval(before)


class VariableServer:
    """A `Service`. Messages and their payloads are those of `VariableStore`'s methods:

    ==========================  =========================================  ===================================
    ``ps.create``               sequence of `NewShard`                     None
    ``ps.add_optimizer``        `NewOptimizer`                             None
    ``ps.release``              `Dropped`                                  None
    ``ps.read``                 sequence of `ShardKey`                     list of tensors
    ``ps.read_rows``            sequence of `RowsRequest`                  list of tensors
    ``ps.push``                 `Push`                                     `PushReply`
    ``ps.fence``                a worker's incarnation                     None, when none of its pushes is at work
    ``ps.forget_below``         id of a function                           None
    ``ps.grow``                 `NewRows`                                  None
    ``ps.repeat``               list of `RepeatedOps`                      None
    ``ps.applied_parts``        id of a function                           push → `AppliedPart`
    ``ps.optimizer_state``      (optimizer, keys or None for all)          shard → state
    ``ps.load_optimizer_state`` (optimizer, shard → state)                 None
    ``ps.optimizer_options``    optimizer                                  `StepsHaveSet`
    ``ps.load_optimizer_options``  (optimizer, by group)                   None
    ``ps.begin_checkpoint``     token                                      `CutReport`
    ``ps.write_checkpoint``     `WriteOrder`                               `WriteReport`
    ``ps.end_checkpoint``       token                                      None
    ``ps.read_checkpoint``      `ReadOrder`                                None
    ``ps.adopt_checkpoint``     `AdoptOrder`                               None
    ``ps.reset``                None                                       None
    ``ps.left_gradients``       numbers of variables                       those with gradients for steps
    ``ps.take_conflicts``       None                                       variables, see `VariableStore.take_conflicts`
    ``ps.catalog``              None                                       plain data, see `VariableStore.catalog`
    ``ps.add_peer``             `Peer` that will call                      None
    ``ps.use_default_dtype``    the program's default dtype                None
    ==========================  =========================================  ===================================

    Reads, pushes and checkpoints run on ``threads`` threads, so that several fused optimizers step at once; reads and
    pushes of processes of the same host on a thread per process. Short orders of the coordinator (fence, forget,
    catalog, peers, dtype) have a thread of their own and never queue behind those.
    """

    def __init__(self, threads: int = 4, *, owns_process: bool = True) -> None:
        self._owns_process = owns_process
        self.store = VariableStore()
        self._work = ThreadPoolExecutor(threads, thread_name_prefix="torchstrat-ps")
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="torchstrat-ps-orders")
        self._making = threading.Lock()
        self._checkpoints: CheckpointShards | None = None
        self._endpoint: Endpoint | None = None
        self._switching: contextlib.ExitStack = contextlib.ExitStack()
        self._has_left_overs = threading.Event()
        self._coordinator: Peer | None = None

    def handlers(self) -> Mapping[str, Handler]:
        store = self.store
        steps: dict[str, Callable[[Peer, Any, AnswerMemory], Any]] = {
            "ps.read": lambda sender, keys, memory: store.read(keys, memory, sender.incarnation),
            "ps.read_rows": lambda _, requests, memory: store.read_rows(requests, memory),
            "ps.push": lambda _, push, memory: store.push(push, memory),
        }
        work: dict[str, Callable[[Any], Any]] = {
            "ps.create": store.create,
            "ps.repeat": store.repeat,
            "ps.grow": store.grow,
            "ps.add_optimizer": store.add_optimizer,
            "ps.release": store.release,
            "ps.optimizer_state": lambda payload: store.optimizer_state(*payload),
            "ps.load_optimizer_state": lambda payload: store.load_optimizer_state(*payload),
            "ps.optimizer_options": store.optimizer_options,
            "ps.load_optimizer_options": lambda payload: store.load_optimizer_options(*payload),
            "ps.begin_checkpoint": lambda token: store.begin_cut(token).report(),
            "ps.write_checkpoint": lambda order: self._checkpoint_shards().write(order),
            "ps.end_checkpoint": self._end_checkpoint,
            "ps.read_checkpoint": lambda order: self._checkpoint_shards().read(order),
            "ps.adopt_checkpoint": lambda order: self._checkpoint_shards().adopt(order),
            "ps.reset": lambda _: store.reset(),
        }
        orders: dict[str, Callable[[Any], Any]] = {
            "ps.fence": store.fence,
            "ps.forget_below": self._forget_below,
            "ps.take_conflicts": lambda _: store.take_conflicts(),
            "ps.left_gradients": store.left_gradients,
            "ps.applied_parts": store.applied_parts,  # behind the fence of who ran it before
            "ps.catalog": lambda _: store.catalog(),
            "ps.add_peer": self._add_peer,
            "ps.use_default_dtype": self._use_default_dtype,
        }
        for name in _LEAVE_MUCH_FREE:
            work[name] = self._noting_left_overs(work[name])
        # The store copies what it keeps, so that orders need not be copied before.
        handlers = {name: Handler(_without_sender(answer), self._work, borrows=True) for name, answer in work.items()}
        handlers |= {name: Handler(_without_sender(answer), self._orders) for name, answer in orders.items()}
        return handlers | {name: self._step(answer) for name, answer in steps.items()}

    def _step(self, answer: Callable[[Peer, Any, AnswerMemory], Any]) -> Handler:
        return Handler(answer, self._work, takes_memory=True, borrows=True, may_hold_up_its_caller=True)

    def attach(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.store.owner = str(endpoint.peer)
        self._switching.enter_context(_quick_switches())

    def status(self) -> Mapping[str, Any]:
        """``digest`` of the catalog, ``variables``: how many, ``next_function``: see `VariableStore.catalog`."""
        catalog = self.store.catalog()
        return {
            "digest": catalog["digest"],
            "variables": len(catalog["variables"]),
            "next_function": catalog["next_function"],
        }

    def coordinator_arrived(self, coordinator: Peer) -> None:
        """It asks for the catalog, and creates what it misses. Gradients that another program's functions have left for
        its steps are nothing to this one."""
        if self._coordinator not in (None, coordinator):
            self.store.drop_gradients()
        self._coordinator = coordinator

    def coordinator_left(self, *, finished: bool) -> None:
        """After a job that has finished the server is as new; one that was lost finds everything as it was."""
        if finished:
            self.store.reset()
            give_back_pages()
        else:
            self.store.end_cut()

    def drain(self, timeout_seconds: float) -> None:
        """Let the pushes that have begun end, as far as the time allows."""
        try:
            self.store.wait_until_idle(timeout_seconds)
        except CommunicationTimeoutError:
            return  # the process ends all the same; who waits for an answer learns it from that

    def close(self) -> None:
        self._work.shutdown(wait=False, cancel_futures=True)
        self._orders.shutdown(wait=False, cancel_futures=True)
        self._switching.close()

    def _checkpoint_shards(self) -> CheckpointShards:
        # Imported when it is needed.
        from torchstrat.parameter_server.server.checkpoint_shards import CheckpointShards

        with self._making:
            if self._checkpoints is None:
                self._checkpoints = CheckpointShards(self.store)
            return self._checkpoints

    def _end_checkpoint(self, token: str) -> None:
        self.store.end_cut(token)
        with self._making:
            checkpoints = self._checkpoints
        if checkpoints is not None:
            checkpoints.forget(token)

    def _noting_left_overs(self, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noting(payload: Any) -> Any:
            try:
                return answer(payload)
            finally:
                self._has_left_overs.set()

        return noting

    def _forget_below(self, function: int) -> None:
        """Comes when functions have ended: by then nobody holds what they, and all before them, were sent."""
        self.store.forget_below(function)
        if self._has_left_overs.is_set():
            self._has_left_overs.clear()
            give_back_pages()

    def _use_default_dtype(self, dtype: torch.dtype) -> None:
        """Optimizers make state of it."""
        if self._owns_process:
            torch.set_default_dtype(dtype)

    def _add_peer(self, peer: Peer) -> None:
        assert self._endpoint is not None, "a message arrived before the endpoint was attached"
        self._endpoint.add_peer(peer)


def _without_sender(answer: Callable[[Any], Any]) -> Callable[[Peer, Any], Any]:
    return lambda _sender, payload: answer(payload)
