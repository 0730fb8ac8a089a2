"""`SidecarEvaluator`: evaluates the checkpoints of a training that runs elsewhere.

`WatchedDirectory` reads what is in their directory while the training adds to it and deletes from it; means of metrics
are over all rows of some batches, each row counted once, under any strategy or none; a `FinishRequest` may come from a
signal handler.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from torchstrat.checkpoint.checkpoint import Checkpoint
from torchstrat.checkpoint.folder import is_checkpoint
from torchstrat.checkpoint.journal import Evaluation, Journal
from torchstrat.checkpoint.manifest import NAME as MANIFEST
from torchstrat.checkpoint.numbered import last_step, step_of
from torchstrat.core import nest
from torchstrat.core.context import StrategyLike
from torchstrat.core.errors import CommunicationTimeoutError, InvalidArgumentError, WrongTypeError
from torchstrat.data import unmarked
from torchstrat.data.distributed import DistributedDataset

if TYPE_CHECKING:
    from torchstrat.checkpoint.job_state import Processes


class FinishRequest:
    """Like `threading.Event`, whose lock a signal handler cannot take while the same thread waits with it."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put is reentrant

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or when it is set. One thread waits at a time."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=seconds)


@dataclass(frozen=True)
class Found:
    """A checkpoint as it was when it was looked for.

    ``fingerprint``: of its contents, the same after a copy; another one when the step is saved again with other
    values, as a training does that went back to an earlier checkpoint. Empty while the checkpoint is incomplete.
    ``changed``: when something in the folder last came or went, in nanoseconds; tells an incomplete one from the same
    one, further on.
    """

    step: int
    folder: Path
    fingerprint: str
    changed: int


class WatchedDirectory:
    """A directory of folders ``step-00000042``, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[Path, tuple[tuple[int, int], Found]] = {}

    def checkpoints(self) -> list[Found]:
        """All that are there, by step. One that is deleted meanwhile is there or not. Raises `InvalidArgumentError`."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidArgumentError(f"checkpoint_dir={self.path} cannot be read: {error}") from error
        before, self._known = self._known, {}
        for name in names:
            if (step := step_of(name)) is not None:
                self._look_at(step, self.path / name, before)
        return sorted((found for _, found in self._known.values()), key=lambda found: found.step)

    def forget(self, folder: Path) -> None:
        """Open this one again at the next look: its files were changed in place."""
        self._known.pop(folder, None)

    def _look_at(self, step: int, folder: Path, before: dict[Path, tuple[tuple[int, int], Found]]) -> None:
        """A folder whose own data is what it was is not opened again: there may be hundreds of them on a slow disk."""
        try:
            stat = folder.stat()
        except OSError:
            return
        identity = (stat.st_ino, stat.st_mtime_ns)
        known = before.get(folder)
        if known is None or known[0] != identity:
            known = identity, Found(step, folder, fingerprint(folder) or "", stat.st_mtime_ns)
        self._known[folder] = known


def fingerprint(folder: Path) -> str | None:
    """Of a checkpoint's contents: of the checksums of its files, so that it costs next to nothing. None where there is
    no complete checkpoint."""
    if not is_checkpoint(folder):
        return None
    for name in (MANIFEST, ".metadata"):  # torch.distributed.checkpoint by itself writes no checksums
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue
        return f"{zlib.crc32(content):08x}-{len(content)}"
    return None


Metric = Callable[[Any, Any], Any]
"""``metric(outputs, targets)`` of one batch → a tensor ``(rows,)``, or the mean over the rows: a tensor or a number."""


def score(
    model: nn.Module, batches: Iterable[object], metrics: Mapping[str, Metric], strategy: StrategyLike | None
) -> dict[str, float]:
    """The mean of each metric over the rows of all batches.

    Args:
        model: In evaluation mode; called with the inputs, in the replicas.
        batches: Pairs ``(inputs, targets)``, each a nest of tensors with rows in dim 0; distributed, with a strategy.
        metrics: Called in the replicas, without gradients.
        strategy: None: everything is computed here, where the model is.

    Raises:
        WrongTypeError: a batch is no such pair.
        InvalidArgumentError: there are no rows; a metric returns neither a number nor one for each row.
    """

    def measure(batch: object) -> torch.Tensor:
        with torch.no_grad():
            return _measure(model, batch, metrics)

    total = torch.zeros(1 + len(metrics), dtype=torch.float64)
    place = _device_of(model)
    for batch in batches:
        if strategy is None:
            total += measure(_moved(batch, place)).cpu()
        else:
            total += _over_replicas(strategy, strategy.run(measure, args=(batch,))).cpu()
    rows, *sums = total.tolist()
    if not rows:
        raise InvalidArgumentError("the data to evaluate on has no rows; give at least one batch.")
    return {name: value / rows for name, value in zip(metrics, sums, strict=True)}


def _over_replicas(strategy: StrategyLike, measured: object) -> torch.Tensor:
    if isinstance(measured, torch.Tensor):  # there is one replica, or only one of them had rows
        return measured
    reduced: torch.Tensor = strategy.reduce("sum", measured, axis=None)
    return reduced


def _measure(model: nn.Module, batch: object, metrics: Mapping[str, Metric]) -> torch.Tensor:
    """``(1 + metrics,)``: the batch's rows, and the sum of each metric over them."""
    inputs, targets = _pair(batch)
    first = next((leaf for leaf in nest.leaves(targets) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    if first is None:
        raise WrongTypeError(f"the targets of a batch have no tensor with rows in dim 0; got {type(targets).__name__}.")
    rows, device = len(first), first.device
    # Sums over many rows need the digits; accelerators other than CUDA's have no float64.
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    if not rows:  # a mean over no rows is not a number
        return torch.zeros(1 + len(metrics), dtype=dtype, device=device)
    outputs = model(inputs)
    sums = [
        _sum(name, torch.as_tensor(metric(outputs, targets), dtype=dtype, device=device), rows)
        for name, metric in metrics.items()
    ]
    return torch.stack([torch.tensor(rows, dtype=dtype, device=device), *sums])


def _sum(name: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    if value.dim() == 0:
        return value * rows
    if value.shape != (rows,):
        raise InvalidArgumentError(
            f"metrics[{name!r}] returned shape {tuple(value.shape)} for a batch of {rows} rows; return one number, the "
            f"mean over the rows, or a tensor ({rows},) with one for each."
        )
    return value.sum()


def _pair(batch: object) -> tuple[Any, object]:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise WrongTypeError(
        f"metrics= needs batches of (inputs, targets); got {type(batch).__name__}"
        f"{f' of {len(batch)}' if isinstance(batch, list | tuple) else ''}. For other batches give evaluate_fn=, which "
        "gets the model and the data."
    )


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _moved(batch: object, place: torch.device | None) -> object:
    plain = unmarked(batch)
    if place is None:
        return plain
    return nest.map_structure(lambda leaf: leaf.to(place) if isinstance(leaf, torch.Tensor) else leaf, plain)


_CHOICE = "choosing a checkpoint to evaluate"

_TRIES = 2
"""Looks at a checkpoint that cannot be read before it counts as damaged. Between them there is a wait: who deletes file
by file, or copies here, is given time to be done with it."""


class Clock(Protocol):
    """Time as an evaluator sees it."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""

    def wait(self, seconds: float, unless: FinishRequest) -> None:
        """Return after so many seconds, or when the request has come."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float, unless: FinishRequest) -> None:
        unless.wait(seconds)


class SidecarEvaluator:
    """Watches a directory of checkpoints and evaluates each of them once, beside the training and without slowing it::

        evaluator = ts.SidecarEvaluator(
            Net, held_out_loader, "checkpoints", metrics={"accuracy": accuracy}, log_dir="evaluation"
        )
        evaluator.start()

    The directory is that of a `CheckpointManager`: folders ``step-00000042``, which appear whole. It need not be there
    yet. Checkpoints are taken in the order of their steps. One that is deleted before or while it is read is left out;
    one that is damaged is left out with a warning that names it. Only the model of a checkpoint is read; it may have
    been saved under any strategy. A step that is saved again with other values is evaluated again.

    Args:
        model_fn: Makes the model, whose values do not matter; called once, in the scope of ``strategy``. Or the model.
        data: Batches of held-out rows, in something that can be gone through again and again, such as a `DataLoader`.
            With ``strategy`` it is distributed over the replicas.
        checkpoint_dir: What to watch.
        evaluate_fn: ``evaluate_fn(model, batches) -> {"name": number}``. The model is in evaluation mode, and
            gradients are off. With ``strategy``, batches are distributed and the function calls ``strategy.run``.
        metrics: Instead of ``evaluate_fn``, where batches are ``(inputs, targets)``: functions ``(outputs, targets)``
            of a batch, by name. They return a tensor ``(rows,)``, or the mean over the rows; the result is the mean
            over all rows.
        strategy: Where to evaluate; None: where ``model_fn`` puts the model. Under torchrun each process makes an
            evaluator, and they evaluate together; rank 0 writes.
        log_dir: A folder of its own for the results: ``metrics.jsonl`` with one JSON object per checkpoint, and event
            files for TensorBoard (``evaluation/<metric>``). It is also the memory: an evaluator that starts again goes
            on where the one before it ended or was killed. None: results are only returned.
        name: What the checkpoint calls the model: ``model`` for ``ts.Checkpoint(model=…)``.
        max_evaluations: End after so many, those of earlier starts included.
        newest_only: Leave checkpoints out that are not the newest, to keep up with the training.
        poll_seconds: Between two looks at the directory.
        timeout: Seconds without a new checkpoint after which `start` raises; None: it waits for as long as it takes.
        stop: Asked at each look; True means that no more checkpoints will come, as does `finish`.
        until_step: The step that training goes to, where it is known. The end mark of an earlier one is then that of
            a shorter training, which is now continued, and does not count.
        on_evaluation: Called with each `Evaluation` and the model that has its values, before the result is written;
            after a kill at that moment, again.
        tensorboard: Whether to write event files.
        clock: For tests, and for programs that have something else to do in the meantime.

    Raises:
        InvalidArgumentError, WrongTypeError: an argument cannot be used.
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module] | nn.Module,
        data: Iterable[object],
        checkpoint_dir: str | os.PathLike[str],
        *,
        evaluate_fn: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        strategy: StrategyLike | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        name: str = "model",
        max_evaluations: int | None = None,
        newest_only: bool = False,
        poll_seconds: float = 1.0,
        timeout: timedelta | float | None = None,
        stop: Callable[[], bool] | None = None,
        until_step: int | None = None,
        on_evaluation: Callable[[Evaluation, nn.Module], None] | None = None,
        tensorboard: bool = True,
        clock: Clock | None = None,
    ) -> None:
        if not callable(model_fn):
            raise WrongTypeError(f"model_fn={model_fn!r:.80} must be a function that makes the model, or a module.")
        if (evaluate_fn is None) == (metrics is None):
            raise InvalidArgumentError(
                "SidecarEvaluator needs either evaluate_fn=, a function of the model and the data, or metrics=, "
                f"functions of a batch by name; got {'neither' if metrics is None else 'both'}."
            )
        if metrics is not None and not metrics:
            raise InvalidArgumentError("metrics={} has no metric in it; name at least one, {'accuracy': function}.")
        if _is_used_up(data):
            raise WrongTypeError(
                f"data={data!r:.80} can be gone through once, and there will be several checkpoints; give a "
                "DataLoader, a list, or another object whose iter() starts anew."
            )
        self._directory = WatchedDirectory(_directory(checkpoint_dir))
        self._seconds_without = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        for what, value in {
            "max_evaluations": max_evaluations,
            "poll_seconds": poll_seconds,
            "timeout": self._seconds_without,
        }.items():
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{what}={value} must be greater than 0.")
        self._model_fn, self._data = model_fn, data
        self._evaluate_fn, self._metrics, self._strategy = evaluate_fn, metrics, strategy
        self._name, self._max_evaluations, self._newest_only = name, max_evaluations, newest_only
        self._poll_seconds, self._stop, self._until_step = poll_seconds, stop, until_step
        self._on_evaluation = on_evaluation
        self._clock = clock or SystemClock()
        self._finish_request = FinishRequest()
        log_folder = None if log_dir is None else Path(os.path.abspath(log_dir))
        self._journal = Journal(log_folder, tensorboard=tensorboard)
        self._tries: dict[Found, int] = {}
        self._given_up: set[Found] = set()
        self._last_news = 0.0

    def start(self) -> list[Evaluation]:
        """Evaluate until training has ended, and return the results of this call. Blocks.

        Training has ended when its manager has left the end mark in the directory
        (``CheckpointManager.close(finished=True)``), when ``stop`` says so, or after `finish`: what is there by then is
        still evaluated. While it runs in the main thread, SIGTERM counts as `finish`, unless the program has a handler
        of its own; a second one ends the process.

        Raises:
            CommunicationTimeoutError: no new checkpoint came for ``timeout``; it names the directory and the last step.
            InvalidArgumentError: checkpoints are intact and do not fit the model; the directory or ``log_dir`` cannot
                be used; another evaluator uses the same ``log_dir``.
        """
        from torchstrat.checkpoint.job_state import all_processes

        evaluations: list[Evaluation] = []
        with (
            all_processes("SidecarEvaluator.start", {}) as processes,
            self._told_by_sigterm(),
            contextlib.ExitStack() as stack,
        ):
            processes.of_first(lambda: stack.enter_context(self._journal.opened()), "opening the evaluator's log_dir")
            self._last_news = self._clock.now()
            model, batches = self._made()
            checkpoint = Checkpoint(**{self._name: model})
            while True:
                found, over = processes.of_first(self._next, _CHOICE)
                if over:
                    return evaluations
                if found is not None and self._restored(checkpoint, found, processes):
                    evaluations.append(self._evaluate(found, model, batches, processes))
                elif processes.is_first and (found is None or found in self._tries):
                    self._wait(self._poll_seconds)

    def finish(self) -> None:
        """Tell it that no more checkpoints will come: `start` evaluates those that are there, and returns. From any
        thread, or a signal handler."""
        self._finish_request.set()

    def _wait(self, seconds: float) -> None:
        self._clock.wait(seconds, self._finish_request)

    # ---- what is next ------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[Found | None, bool]:
        """The next checkpoint to evaluate, if there is one, and whether all is done. In the first process."""
        if self._max_evaluations is not None and len(self._journal) >= self._max_evaluations:
            return None, True
        # Before the directory is read: what training saved before it ended is then seen.
        has_ended = self._has_ended()
        usable = [found for found in self._directory.checkpoints() if found not in self._given_up]
        if self._newest_only:
            usable = usable[-1:]
        waiting = [found for found in usable if not self._journal.has(found.step, found.fingerprint)]
        if waiting:
            return waiting[0], False
        if not has_ended:
            self._require_news()
        return None, has_ended

    def _has_ended(self) -> bool:
        if self._finish_request.is_set() or (self._stop is not None and self._stop()):
            return True
        step = last_step(self._directory.path)
        return step is not None and (self._until_step is None or step >= self._until_step)

    def _require_news(self) -> None:
        if self._seconds_without is None or self._clock.now() - self._last_news < self._seconds_without:
            return
        last = self._journal.newest_step
        came = "none came" if last is None else f"none came after that of step {last}"
        there = "" if self._directory.path.is_dir() else ", which does not exist"
        raise CommunicationTimeoutError(
            f"SidecarEvaluator waited {self._seconds_without:g} s for a checkpoint in {self._directory.path}{there}, "
            f"and {came}. Look whether the training runs and saves there; if it saves less often, raise timeout=."
        )

    # ---- one checkpoint ----------------------------------------------------------------------------------------------

    def _restored(self, checkpoint: Checkpoint, found: Found, processes: Processes) -> bool:
        """Whether the model has the values of the checkpoint now. Every process gets the same answer."""
        error: Exception | None = None
        try:
            checkpoint.restore(found.folder)
        except Exception as raised:  # in all processes, where it is raised in one
            error = raised
        return processes.of_first(lambda: self._is_what_was_found(found, error), _CHOICE)

    def _is_what_was_found(self, found: Found, error: Exception | None) -> bool:
        from torchstrat.checkpoint.stored import damage_of

        self._last_news = self._clock.now()
        now = fingerprint(found.folder)
        if now is not None and now != found.fingerprint:
            self._directory.forget(found.folder)
            return False  # saved again in the meantime: the next look finds that one
        if error is None or not found.folder.exists():
            return error is None  # the training deletes old ones, and may be faster
        self._tries[found] = self._tries.get(found, 0) + 1
        if self._tries[found] < _TRIES:
            return False
        if damage_of(found.folder) is None:
            raise error  # of the program: it would be the same with every other checkpoint
        self._given_up.add(found)
        warnings.warn(f"{found.folder.name} is left out of the evaluation: {error}", RuntimeWarning)
        return False

    def _evaluate(self, found: Found, model: nn.Module, batches: Any, processes: Processes) -> Evaluation:
        began = self._clock.now()
        model.eval()
        with torch.no_grad():
            if self._evaluate_fn is not None:
                values = _numbers(self._evaluate_fn(model, batches))
            else:
                assert self._metrics is not None
                values = score(model, batches, self._metrics, self._strategy)
        self._last_news = self._clock.now()
        evaluation = Evaluation(found.step, found.folder, values, time.time(), self._last_news - began)
        if self._on_evaluation is not None:
            self._on_evaluation(evaluation, model)
        if processes.is_first:
            self._journal.add(evaluation, found.fingerprint)
        return evaluation

    def _made(self) -> tuple[nn.Module, Any]:
        """The model, and the batches as replicas take them."""
        scope = contextlib.nullcontext() if self._strategy is None else self._strategy.scope()
        with scope:
            model = self._model_fn if isinstance(self._model_fn, nn.Module) else self._model_fn()
        if not isinstance(model, nn.Module):
            raise WrongTypeError(f"model_fn returned {type(model).__name__} {model!r:.80}; it has to return a module.")
        if self._strategy is None or isinstance(self._data, DistributedDataset):
            return model, self._data
        return model, self._strategy.distribute_dataset(self._data)

    # ---- SIGTERM -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _told_by_sigterm(self) -> Iterator[None]:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.finish()

        signal.signal(signal.SIGTERM, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_used_up(data: object) -> bool:
    """Whether going through it uses it up, as with a generator."""
    return hasattr(data, "__next__")


def _directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(os.path.abspath(path))
    if not os.fspath(path) or (directory.exists() and not directory.is_dir()):
        raise InvalidArgumentError(
            f"checkpoint_dir={os.fspath(path)!r} must be the directory that checkpoints are saved in, or will be."
        )
    return directory


def _numbers(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping) or not values:
        raise WrongTypeError(
            f"evaluate_fn returned {type(values).__name__} {values!r:.80}; return a dict from names to numbers."
        )
    try:
        with torch.no_grad():  # a parameter, for one, does not like to be taken for a number otherwise
            return {str(name): float(value) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise WrongTypeError(f"evaluate_fn returned a value that is not one number: {error}") from error
