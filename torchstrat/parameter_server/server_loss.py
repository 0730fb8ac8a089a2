"""What a coordinator does about the loss of a parameter server: raise, or take all servers back to a checkpoint.

A lost server takes its variables with it, and the others hold what was trained since the last checkpoint. Both go: all
servers take over the newest checkpoint that is intact, so that no value is of another moment than the rest.

Nothing happens on a thread of its own. A restore changes objects of the program (counters, positions in the data,
learning rates), and none of them may change under its hands, so it happens within the calls that would raise
otherwise, in the thread that makes one first. What such a call then does is as if it had been made just before the
loss: what it scheduled or changed is lost with the rest, what it reads it reads again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from torchstrat.core.errors import ContextError, InvalidArgumentError, ParameterServerUnavailable, WrongTypeError

if TYPE_CHECKING:
    from torchstrat.checkpoint import Checkpoint, CheckpointManager
    from torchstrat.checkpoint.remote import Servers
    from torchstrat.parameter_server.dispatcher import Dispatcher
    from torchstrat.parameter_server.job import Job

logger = logging.getLogger("torchstrat.parameter_server")

RAISE, RESTORE = POLICIES = ("raise", "restore")
"""What ``ParameterServerStrategy(on_server_loss=…)`` may be."""

_PAUSE_SECONDS = 0.2
"""Between a restore that another loss has ended and the next: a server that dies at once is not asked in a loop."""

_Result = TypeVar("_Result")


class OnServerLoss(Protocol):
    """What calls of a coordinator do when a server is lost before or during them. Thread-safe."""

    restores: bool
    """Whether it restores by itself, so that a call may find everything at an earlier position."""

    def attempt(self, call: Callable[[], _Result], after_restore: Callable[[], _Result]) -> _Result:
        """The result of ``call()``; of ``after_restore()`` where a restore came between."""

    def require_ready(self) -> None:
        """Raise `ContextError` where the program has yet to say what to do."""


class RaiseLoss:
    """``"raise"``: the program restores a checkpoint itself. Or ``"restore"``, and nobody has said from what yet."""

    restores = False

    def __init__(self, policy: str) -> None:
        self._is_ready = policy == RAISE

    def attempt(self, call: Callable[[], _Result], after_restore: Callable[[], _Result]) -> _Result:
        return call()

    def require_ready(self) -> None:
        if not self._is_ready:
            raise ContextError(
                f"the strategy has on_server_loss={RESTORE!r}, and nobody has said from what to restore. Call "
                "coordinator.restore_on_server_loss(manager, checkpoint) before the first function is scheduled."
            )


class RestoreNewest:
    """``"restore"``: every call that meets a loss takes all servers back to the newest intact checkpoint, and goes on.

    Args:
        dispatcher: whose functions end with the loss.
        manager, checkpoint: from what, and into what objects.
        servers: where they live.
        on_restored: told of the step, when all is as it was then.
        limit, within_seconds: so many restores in so long a time; the next loss is an error, since servers that die
            again and again do so for a reason.
        timeout_seconds: for one loss, from noticing it to the end of the restore, however often another one
            interrupts it.

    A restore that fails ends it: every call raises what the first one did, until the program itself has restored a
    checkpoint.
    """

    restores = True

    def __init__(
        self,
        dispatcher: Dispatcher,
        manager: CheckpointManager,
        checkpoint: Checkpoint,
        servers: Servers,
        *,
        on_restored: Callable[[int], object] | None,
        limit: int,
        within_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._manager = manager
        self._checkpoint = checkpoint
        self._servers = servers
        self._on_restored = on_restored
        self._limit, self._within_seconds = limit, within_seconds
        self._timeout_seconds = timeout_seconds
        self._clock = time.monotonic
        self._lock = threading.RLock()  # held while restoring: other threads' calls wait, its own calls go through
        self._is_restoring = False
        self._restores = 0
        self._ended: deque[float] = deque()  # when the last restores did
        self._failure: ParameterServerUnavailable | None = None

    def require_ready(self) -> None: ...

    def attempt(self, call: Callable[[], _Result], after_restore: Callable[[], _Result]) -> _Result:
        before = self._restores
        if not self._settle(before, None):
            try:
                return call()
            except ParameterServerUnavailable as loss:
                if not self._settle(before, loss):
                    raise
        return after_restore()

    def restoring(self, objects: Mapping[str, object], restore: Callable[[bool], _Result], *, whole: bool) -> _Result:
        """See `Servers.restoring`. A restore of less than the checkpoint's objects leaves a loss to this: what it does
        not bring back would begin again, beside what the other servers have trained since."""
        if whole and held_on(self._servers, self._checkpoint.objects) <= held_on(self._servers, objects):
            return restore(True)
        return self.attempt(lambda: restore(False), lambda: self.restoring(objects, restore, whole=whole))

    def _settle(self, before: int, met: ParameterServerUnavailable | None) -> bool:
        """Restore if a server is lost. Whether that was done, here or by another thread, since ``before``."""
        with self._lock:
            if self._is_restoring:  # a call of the restore itself
                return False
            if self._restores != before:
                return True
            lost = self._dispatcher.loss
            if lost is None:
                self._failure = None  # the program has restored a checkpoint itself, if there was one
            elif self._failure is not None:
                raise self._failure
            loss = lost or met
            if loss is None:
                return False
            self._is_restoring = True
            try:
                step = self._restore(loss)
            except Exception as error:
                self._failure = _not_brought_back(loss, error)
                raise self._failure from error
            finally:
                self._is_restoring = False
            self._restores += 1
            self._ended.append(self._clock())
            if self._on_restored is not None:
                self._on_restored(step)
            return True

    def _restore(self, loss: ParameterServerUnavailable) -> int:
        """The step that all servers are at now."""
        began = self._clock()
        unfinished = self._dispatcher.cancel_because_of(loss)
        self._require_few(began)
        if self._manager.latest is None:
            raise InvalidArgumentError(
                f"there is no checkpoint in {self._manager.directory} yet. Save one before the first function is "
                "scheduled: manager.save(checkpoint, 0)."
            )
        step = self._restore_until(began + self._timeout_seconds)
        logger.warning(
            "parameter server %s was lost: after %.1f s all servers are back at step %d. What was trained since then "
            "is lost; %d functions had not ended.",
            _index_of(loss),
            self._clock() - began,
            step,
            unfinished,
        )
        return step

    def _require_few(self, now: float) -> None:
        while self._ended and self._ended[0] <= now - self._within_seconds:
            self._ended.popleft()
        if len(self._ended) >= self._limit:
            raise InvalidArgumentError(
                f"that is loss {len(self._ended) + 1} within {self._within_seconds:g} s; max_restores={self._limit}. "
                "Look at why servers end (their memory, their output), or give restore_on_server_loss a larger number."
            )

    def _restore_until(self, until: float) -> int:
        while True:
            try:
                step = self._manager.restore(self._checkpoint)
            except ParameterServerUnavailable as again:
                if self._clock() >= until:
                    raise
                logger.warning("all servers go back once more, since the restore was interrupted: %s", again)
                time.sleep(_PAUSE_SECONDS)
                continue
            if step is None:
                raise InvalidArgumentError(f"no checkpoint in {self._manager.directory} is intact.")
            return step


def _index_of(loss: ParameterServerUnavailable) -> object:
    return "?" if loss.task is None else loss.task.index


def _not_brought_back(loss: ParameterServerUnavailable, error: Exception) -> ParameterServerUnavailable:
    return ParameterServerUnavailable(
        f"parameter server {_index_of(loss)} was lost, and on_server_loss={RESTORE!r} could not bring the servers "
        f"back: {error}",
        loss.task,
    )


def require_kinds(manager: object, checkpoint: object) -> None:
    """Raises `WrongTypeError` for what is no `CheckpointManager` and no `Checkpoint`, in this order."""
    from torchstrat.checkpoint import Checkpoint, CheckpointManager

    if not isinstance(manager, CheckpointManager) or not isinstance(checkpoint, Checkpoint):
        raise WrongTypeError(
            "restore_on_server_loss takes a ts.CheckpointManager and the ts.Checkpoint that it saves; got "
            f"{type(manager).__name__} and {type(checkpoint).__name__}."
        )


def held_on(servers: Servers, objects: Mapping[str, object]) -> set[tuple[str, int]]:
    """The variables and optimizers on the servers that a checkpoint of these objects has, by their numbers."""
    from torchstrat.checkpoint.optimizer_item import make_items

    items = make_items(objects, servers)
    held = {("variable", slot.spec.number) for item in items for slot in item.remote_slots()}
    return held | {("optimizer", state.optimizer) for item in items for state in item.remote_states()}


def require_complete(checkpoint: Checkpoint, job: Job, servers: Servers) -> None:
    """That all that is trained on the servers is in ``checkpoint``: the rest would be of another moment afterwards.

    Raises `InvalidArgumentError` naming what is not.
    """
    job.commit()
    held = held_on(servers, checkpoint.objects)
    missing = [spec.name for spec in job.trained() if ("variable", spec.number) not in held]
    missing += [
        f"the state of {type(optimizer).__name__}"
        for optimizer in job.optimizers()
        if (number := job.optimizer_number(optimizer)) is not None and ("optimizer", number) not in held
    ]
    if missing:
        raise InvalidArgumentError(
            f"{checkpoint!r} leaves out what lives on the parameter servers: {', '.join(missing)}. After a loss that "
            "would be newer than the rest, or gone; name its modules, optimizers and variables in ts.Checkpoint(…) too."
        )
