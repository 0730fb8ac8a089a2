"""`CheckpointManager`: the checkpoints of one training in one directory, numbered by step.

Asynchronous saves whose outcome nobody has been told yet.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from torchstrat.checkpoint.folder import WriterLock
from torchstrat.checkpoint.numbered import NumberedCheckpoints, clear_finished, mark_finished, tell
from torchstrat.core.errors import ContextError, InvalidArgumentError, ParameterServerUnavailable, WrongTypeError
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.values import misfit

if TYPE_CHECKING:
    from torchstrat.checkpoint.checkpoint import Checkpoint
    from torchstrat.checkpoint.job_state import Processes
    from torchstrat.checkpoint.writing import SaveHandle


class PendingSaves:
    """``complaints``: errors that were not raised, for lack of somebody to catch them; to be told as warnings."""

    def __init__(self) -> None:
        self._saves: list[tuple[SaveHandle, threading.Event]] = []
        self.complaints: list[str] = []

    def add(self, handle: SaveHandle, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """``then`` is called when it has succeeded, ``otherwise`` when it has failed, by the thread that writes; they
        count as parts of the save."""
        ended = threading.Event()

        def end(done: SaveHandle) -> None:
            try:
                (then if _error_of(done) is None else otherwise)()
            finally:
                ended.set()

        self._saves.append((handle, ended))
        handle.add_done_callback(end)

    def raise_errors(self) -> None:
        """Wait until all have ended. Raises what one of them failed with, once."""
        first: Exception | None = None
        while self._saves:
            error = self._next_error()
            if error is not None and first is None:
                first = error
            elif error is not None:
                self.complaints.append(str(error))
        if first is not None:
            raise first

    def wait(self) -> None:
        """Until all have ended, well or not: what restores the state after a failure must not fail with it."""
        while self._saves:
            path = self._saves[0][0].path
            error = self._next_error()
            if error is not None:
                self.complaints.append(f"{path} was not saved: {error}")

    def _next_error(self) -> Exception | None:
        handle, ended = self._saves[0]
        error = _error_of(handle)
        ended.wait()
        del self._saves[0]  # not before: Ctrl-C may have ended the waiting
        return error


def _error_of(handle: SaveHandle) -> Exception | None:
    try:
        handle.result()
    except Exception as error:
        return error
    return None


logger = logging.getLogger("torchstrat.checkpoint")
_CALLS = (
    "Write CheckpointManager(directory, max_to_keep=5, keep_every=None), or the same after the checkpoint: "
    "CheckpointManager(checkpoint, directory, max_to_keep=5)."
)
_Path: TypeAlias = "str | os.PathLike[str]"


@short_tracebacks
class CheckpointManager:
    """Saves checkpoints into a directory under the numbers of steps, deletes old ones, finds the newest intact one::

        with ts.CheckpointManager("run/checkpoints", max_to_keep=3) as manager:
            step = manager.restore(checkpoint) or 0
            while step < steps:
                train(step)
                step += 1
                if step % 100 == 0:
                    manager.save(checkpoint, step)

    Args:
        checkpoint: what `save` and `restore` are about where they are given none, as in TensorFlow:
            ``CheckpointManager(checkpoint, directory, max_to_keep=2)``, then ``save(step)`` and ``restore()``.
        directory: where to; made by the first `save`. Each checkpoint is a folder ``step-00000042`` in it. All
            processes of a job, parameter servers included, must see the same directory: on several machines a shared
            file system such as NFS, whose renames are atomic. An object store has to be mounted as a file system that
            has these.
        max_to_keep: this many of the newest checkpoints stay; None: all of them.
        keep_every: those whose step is a multiple of it stay as well, however old.

    **The newest checkpoint is the one with the highest step**, whenever it was written. So that this stays true, a
    `save` of a step below one that is there is refused, unless this manager's `restore` has gone back behind it:
    because it was damaged, or because an earlier ``step`` was asked for. Then the next `save` puts those after the
    restored one aside, as ``step-00000042.aside``; no manager looks at or deletes that. Saving the same step again
    replaces it.

    With several processes (torchrun) each one makes a manager of the same directory and calls the same methods; rank 0
    writes, deletes and locks. With parameter servers the coordinator does.

    One manager at a time writes to a directory, from its first `save` (or `claim`) to its `close`; another one's
    attempt is an error that names the process. If the writer dies, the system lets go of the lock. Reading (`restore`,
    `latest`, `checkpoints`) needs no lock: see `SidecarEvaluator` for a reader beside a training.
    """

    @overload
    def __init__(self, directory: _Path, max_to_keep: int | None = 5, keep_every: int | None = None) -> None: ...

    @overload
    def __init__(
        self, checkpoint: Checkpoint, directory: _Path, max_to_keep: int | None = 5, keep_every: int | None = None
    ) -> None: ...

    def __init__(self, *args: Any, checkpoint: Checkpoint | None = None, **settings: Any) -> None:
        if args and _is_checkpoint(args[0]):
            checkpoint, *args = args  # type: ignore[assignment]
        self._checkpoint = checkpoint
        error = misfit(self._set_up, *args, **settings)
        if error is not None:
            raise WrongTypeError(f"CheckpointManager: {error}. {_CALLS}")
        self._set_up(*args, **settings)

    def _set_up(self, directory: _Path, max_to_keep: int | None = 5, keep_every: int | None = None) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise WrongTypeError(
                "CheckpointManager needs the path of a directory, after a ts.Checkpoint if there is one; got "
                f"{type(directory).__name__} {directory!r:.80}. {_CALLS}"
            )
        text = os.fspath(directory)
        if not text or "://" in text:
            raise InvalidArgumentError(
                f"CheckpointManager needs the path of a directory; got {text!r}."
                + (" Mount the store as a file system and give the path of that." if text else "")
            )
        _require_count("max_to_keep", max_to_keep)
        _require_count("keep_every", keep_every)
        self.directory = Path(os.path.abspath(text))
        self._max_to_keep = max_to_keep
        self._keep_every = keep_every
        self._numbered = NumberedCheckpoints(self.directory)
        self._lock = WriterLock(self.directory)
        self._pending = PendingSaves()
        self._left_behind: set[int] = set()  # steps later than the restored one: no part of this training any more
        self._aside: dict[int, Path] = {}  # what the save that is under way has put aside
        self._closed = False

    # -- what is there ----------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, path) of the complete ones, in the order of steps. Looks at names only, not at contents."""
        return [(step, self._numbered.path(step)) for step in self._numbered.steps()]

    @property
    def latest(self) -> Path | None:
        """The newest complete one; None where there is none. Its contents are checked by `restore`."""
        there = self.checkpoints
        return there[-1][1] if there else None

    # -- saving -----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Be the directory's writer from now on rather than from the first `save`: a second job then ends at its start.

        Every process has to call it. Raises `InvalidArgumentError` naming the process that is its writer.
        """
        from torchstrat.checkpoint.job_state import all_processes

        self._require_open("claim")
        with all_processes(f"CheckpointManager.claim of {self.directory}", {}) as processes:
            processes.of_first(self._become_writer, f"claiming {self.directory}")

    def save(
        self, checkpoint: Checkpoint | int | None = None, step: int | None = None, *, asynchronous: bool = False
    ) -> SaveHandle:
        """Save ``checkpoint`` as that of ``step``, and then delete those that are not to be kept.

        A manager made with a checkpoint needs the step only: ``save(step)``.

        Every process has to call it, with the same ``step``. See `Checkpoint.save` for what it writes and when it
        returns. An asynchronous save deletes when it is in place; what goes wrong in it is raised by the handle's
        ``result()``, and by the next `save` or `close` of this manager, which wait for its end. An old checkpoint that
        cannot be deleted is a warning. After an error the checkpoints that were there are as they were.

        Raises:
            ReplicaDivergenceError: another process has called it with another step, directory, or names of objects.
            InvalidArgumentError: another process writes to the directory; it cannot be written to; there is a
                checkpoint of a later step (see above).
            what `Checkpoint.save` raises, also of the asynchronous save before this one.
        """
        self._require_open("save")
        if step is None and not _is_checkpoint(checkpoint):
            checkpoint, step = None, checkpoint
        what, number = self._meant(checkpoint, "save"), _require_step(step)
        path = self._numbered.path(number)
        from torchstrat.checkpoint.remote import attempts
        from torchstrat.checkpoint.writing import not_saved

        attempt = attempts.get(self)
        if attempt is None:
            return self._save(what, number, path, asynchronous)
        return attempt(lambda: self._save(what, number, path, asynchronous), lambda: not_saved(path))

    def _save(self, checkpoint: Checkpoint, step: int, path: Path, asynchronous: bool) -> SaveHandle:
        from torchstrat.checkpoint.job_state import all_processes, names_of

        call = f"CheckpointManager.save of {names_of(checkpoint.objects)} to {path}"
        with all_processes(call, checkpoint.objects) as processes:
            processes.attempt(self._pending.raise_errors, f"the save before that of {path}")
            try:
                processes.of_first(lambda: self._prepare(step), f"saving {path}")
                handle = checkpoint.save(path, asynchronous=asynchronous)
            except BaseException:
                self._put_back()
                raise
        delete_old = self._delete_old if processes.is_first else lambda: None
        if asynchronous:
            self._pending.add(handle, delete_old, self._put_back)
        else:
            delete_old()
        self._tell_complaints()
        return handle

    def _prepare(self, step: int) -> None:
        self._become_writer()
        later = [there for there in self._numbered.steps() if there > step and there not in self._left_behind]
        if later:
            raise InvalidArgumentError(
                f"step {step} cannot be saved in {self.directory}: there is a checkpoint of step {later[-1]}, which "
                f"would go on being the newest. To go on from an earlier one, restore it with this manager: "
                f"restore(checkpoint, step=…). For a new training give a new directory, or empty this one."
            )
        clear_finished(self.directory)  # of the training that this one continues
        self._put_aside()

    def _become_writer(self) -> None:
        if not self._lock.is_held:
            self._lock.take()
            tell(self.directory)
            self._numbered.sweep()

    def _put_aside(self) -> None:
        for step in sorted(self._left_behind):
            try:
                aside = self._numbered.put_aside(step)
            except OSError as error:
                raise InvalidArgumentError(
                    f"{self._numbered.path(step)}, which is later than the checkpoint that was restored, cannot be put "
                    f"aside: {error}"
                ) from error
            if aside is not None:
                self._aside[step] = aside
                name = self._numbered.path(step)
                logger.warning("%s is no part of this training any more; it is %s now.", name, aside.name)
        self._left_behind.clear()

    def _put_back(self) -> None:
        """What a save that has failed had put aside; the next one puts it aside again."""
        for step, aside in self._aside.items():
            self._numbered.put_back(step, aside)
        self._left_behind.update(self._aside)
        self._aside.clear()

    # -- deleting ---------------------------------------------------------------------------------------------------

    def _delete_old(self) -> None:
        self._aside.clear()
        if self._max_to_keep is None:
            return
        try:
            old = self._numbered.steps()[: -self._max_to_keep]
        except InvalidArgumentError as error:
            self._numbered.complaints.append(str(error))
            return
        for step in old:
            if self._keep_every is None or step % self._keep_every:
                self._numbered.delete(step)

    # -- restoring --------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint | None = None, step: int | None = None) -> int | None:
        """Restore the newest checkpoint that is intact; returns its step, or None where there is no checkpoint.

        Every process has to call it. A damaged one (see `Checkpoint.restore`) is passed over for the next older, with a
        warning that names the damage. One that is whole and does not fit the program is an error: an older one would
        not fit either. If an asynchronous save is under way, it waits for its end.

        Args:
            step: restore the checkpoint of this step and none else. Later ones are put aside by the next `save`.

        Raises:
            InvalidArgumentError: there are checkpoints and all are damaged; there is none of ``step``.
            what `Checkpoint.restore` raises.
        """
        from torchstrat.checkpoint.job_state import all_processes

        self._require_open("restore")
        if step is not None:
            _require_step(step)
        what = self._meant(checkpoint, "restore")
        self._pending.wait()
        call = f"CheckpointManager.restore of {'the newest' if step is None else f'step {step}'} in {self.directory}"
        with all_processes(call, what.objects) as processes:
            restored = self._restore(what, step, processes)
        self._tell_complaints()
        return restored

    def _restore(self, checkpoint: Checkpoint, wanted: int | None, processes: Processes) -> int | None:
        damaged: dict[int, str] = {}
        looks = f"listing {self.directory}"
        numbered = self._numbered
        incomplete, there = processes.of_first(lambda: (numbered.incomplete(), numbered.steps()), looks)
        if wanted is None:
            self._tell_incomplete(incomplete, there)
        while True:
            there = processes.of_first(self._numbered.steps, looks)
            left = [step for step in there if step not in damaged and wanted in (None, step)]
            if not left:
                break
            step = left[-1]
            try:
                checkpoint.restore(self._numbered.path(step))
            except ParameterServerUnavailable:
                raise  # nothing is wrong with the checkpoint
            except Exception:
                # On all processes: one that fails lets all fail.
                is_gone, problem = processes.of_first(partial(self._look_at, step), f"looking at step {step}")
                if is_gone:
                    continue  # its writer has deleted it in this moment, after newer ones had come
                if problem is None or wanted is not None:
                    raise
                damaged[step] = problem
                warnings.warn(f"{problem} The checkpoint before it is used.", stacklevel=4)
                continue
            self._left_behind = {later for later in (*there, *incomplete) if later > step}
            return step
        if wanted is not None:
            raise InvalidArgumentError(
                f"there is no checkpoint of step {wanted} in {self.directory}; there are {there or 'none'}. Give one "
                "of these, or leave step out for the newest."
            )
        self._left_behind = set(incomplete)
        if damaged:
            raise InvalidArgumentError(
                f"all checkpoints in {self.directory} are damaged: {' '.join(damaged.values())} Bring back a copy, or "
                "begin anew in another directory."
            )
        return None

    def _tell_incomplete(self, incomplete: list[int], there: list[int]) -> None:
        for step in incomplete:
            if not there or step > there[-1]:
                instead = f"that of step {there[-1]} is used" if there else "there is no other"
                warnings.warn(
                    f"{self._numbered.path(step)} is no complete checkpoint: its .metadata is missing, which is "
                    f"written last. It is passed over; {instead}. The next save puts it aside.",
                    stacklevel=5,
                )

    def _look_at(self, step: int) -> tuple[bool, str | None]:
        """Whether it is gone, and its damage."""
        from torchstrat.checkpoint.stored import damage_of

        if step not in self._numbered.steps():
            return True, None
        return False, damage_of(self._numbered.path(step))

    def _tell_complaints(self) -> None:
        for complaints in (self._pending.complaints, self._numbered.complaints):
            while complaints:
                warnings.warn(complaints.pop(0), stacklevel=3)

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self, *, finished: bool = False) -> None:
        """Wait for an asynchronous save, and let another manager write to the directory. May be called twice.

        Args:
            finished: training is done: leave the end mark, ``finished.json`` with the newest step, at which a
                `SidecarEvaluator` of this directory ends. The next `save` takes it away. Every process has to call it,
                while they still form a group. Under ``torchstrat launch --evaluator`` the launcher leaves it when the
                program ends with status 0, whether this was said or not.

        Raises what an asynchronous save has failed with, if no other call of this manager has.
        """
        self._closed = True
        try:
            self._pending.raise_errors()
            if finished:
                self._mark_finished()
        finally:
            self._pending.wait()
            self._lock.release()
        self._tell_complaints()

    def _mark_finished(self) -> None:
        from torchstrat.checkpoint.job_state import all_processes

        def mark() -> None:
            self._become_writer()
            mark_finished(self.directory, max(self._numbered.steps(), default=0))

        with all_processes(f"CheckpointManager.close(finished=True) of {self.directory}", {}) as processes:
            processes.of_first(mark, f"marking the end of training in {self.directory}")

    def _meant(self, checkpoint: object, call: str) -> Checkpoint:
        meant = self._checkpoint if checkpoint is None else checkpoint
        if meant is None:
            raise WrongTypeError(
                f"{call} needs a ts.Checkpoint: give it here, or make the manager with it, "
                "CheckpointManager(checkpoint, directory)."
            )
        if not _is_checkpoint(meant):
            raise WrongTypeError(
                f"{call} needs a ts.Checkpoint; got {type(meant).__name__} {meant!r:.80}. Write "
                "ts.Checkpoint(model=model, optimizer=optimizer)."
            )
        return cast("Checkpoint", meant)

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise ContextError(f"{call} was called on a CheckpointManager that is closed; make a new one.")

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._pending.wait()  # what ended the block is raised, and not what failed behind it
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self.directory}>"


def _require_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(f"{name} must be an int or None; got {value!r}.")
    if value < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, or None; got {value}.")


def _is_checkpoint(value: object) -> bool:
    from torchstrat.checkpoint.checkpoint import Checkpoint

    return isinstance(value, Checkpoint)


def _require_step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int):
        raise WrongTypeError(
            f"step must be an int, the number of steps made so far; got {step!r}. Write save(step) "
            "of a manager that was made with its checkpoint, else save(checkpoint, step)."
        )
    if step < 0:
        raise InvalidArgumentError(f"step must not be negative; got {step}.")
    return step
