"""Asynchronous training on parameter servers: the coordinator's loop around the step of the synchronous one.

The coordinator schedules ``train_step`` and trains nothing itself. It sends the training data set to the workers (one
that reads files sends their names) and leases its rows to them, a batch for each step: a fast worker takes more of them
than a slow one, one that is lost leaves its rows to another, and an epoch sees every row exactly once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from torchstrat.app import data, targets
from torchstrat.app.checkpoints import WentBack, checkpoints_of
from torchstrat.app.launch import Run
from torchstrat.app.loop import Batch, Training, report_of, require_enough_rows, score
from torchstrat.app.parameter_server_cluster import (
    ClusterSize,
    ParameterServers,
    cluster_of,
    given_resolver,
    serve,
)
from torchstrat.core.errors import CancelledByServerLossError

if TYPE_CHECKING:
    from torchstrat.parameter_server.coordinator import ClusterCoordinator

_AHEAD_PER_WORKER = 64
"""Steps that are scheduled before the oldest one's result is asked for: enough to keep a worker busy, and few enough
that a failure or ``max_steps`` does not leave a queue behind."""


def train(run: Run) -> None:
    """Do one run. Returns on the coordinator when it is done, on workers and servers when their cluster is.

    Raises:
        InvalidArgumentError: the data cannot be read, or the configuration does not fit it or the cluster.
        ParameterServerUnavailable: a server was lost, and the variables it held.
    """
    config = run.config
    chosen: ParameterServers = targets.make("strategy", config.strategy, config=config, plan=run.plan)
    given = given_resolver(config.cluster, run.plan)
    if given is not None and serve(given):
        return
    size = ClusterSize(chosen.workers, chosen.servers) if given is None else ClusterSize.of(given.cluster_spec())
    examples = data.load(config.data)
    require_enough_rows(config, examples, size.workers, "workers")
    with (
        cluster_of(given, size, keep_pages=chosen.keep_pages) as resolver,
        closing(chosen.strategy(resolver, size.servers)) as strategy,
    ):
        from torchstrat.parameter_server.coordinator import ClusterCoordinator  # imports torch.distributed.rpc

        coordinator = ClusterCoordinator(strategy)
        with closing(report_of(run, examples, f"({size})")) as report, checkpoints_of(run) as checkpoints:
            training = Training(run, examples, strategy, report, checkpoints)
            AsynchronousLoop(training, coordinator, size).run()


class AsynchronousLoop:
    """The loop of the coordinator."""

    def __init__(self, training: Training, coordinator: ClusterCoordinator, size: ClusterSize) -> None:
        self._training, self._config = training, training.config
        self._strategy, self._coordinator, self._size = training.strategy, coordinator, size
        self._position, self._checkpoints = training.position, training.checkpoints
        self._timeout = timedelta(seconds=training.config.cluster.timeout_seconds)

    def run(self) -> None:
        config, examples, strategy = self._config, self._training.examples, self._strategy
        train_step = self._training.train_step

        def worker_step(batch: Batch) -> tuple[float, int]:
            """Runs on a worker: the loss of a batch, and the batch's rows."""
            loss = strategy.run(train_step, args=(batch,))
            return float(loss), len(batch[1])

        # In batches and in an order like those of a run on one device.
        loader = examples.train_loader(config.global_batch, config.seed, workers=0)
        leased = self._coordinator.create_leased_dataset(
            examples.train, config.global_batch, shuffle=LoaderOrder(loader), collate_fn=loader.collate_fn
        )
        self._training.begin(leased)
        self._checkpoints.restore_on_server_loss(self._coordinator, self._position)
        epoch = self._position.epoch
        while epoch <= config.epochs:
            try:
                self._epoch(epoch, worker_step, leased)
            except WentBack:
                epoch = self._position.epoch
                continue
            if self._training.is_over:
                break
            epoch += 1
        self._training.end(processes=1 + self._size.workers + self._size.servers, replicas=self._size.workers)

    def _epoch(self, epoch: int, worker_step: Callable[..., object], leased: Any) -> None:
        try:
            self._train_epoch(epoch, worker_step, leased)
        except CancelledByServerLossError:
            self._coordinator.join(self._timeout)  # raises the loss, or `WentBack` after the restore
            raise
        names = ("rows", "handed_out", "finished", "repeated", "returned", "lost")
        counts = {name: getattr(leased.ledger, name) for name in names}
        self._training.report.tell("ledger", step=self._position.step, epoch=epoch, **counts)
        model = self._training.model
        self._strategy.extended.pull(model)  # the servers' values of this moment, to be scored here
        model.eval()
        test_batches = self._training.examples.test_loader(self._config.global_batch)
        self._training.evaluated(**score(model, test_batches, self._training.loss))
        model.train()

    def _train_epoch(self, epoch: int, worker_step: Callable[..., object], leased: Any) -> None:
        """Train on the rows that are left of the epoch, or until ``max_steps``."""
        training, position, checkpoints = self._training, self._position, self._checkpoints
        position.begin_epoch(epoch)
        for loss, rows in self._results(worker_step, leased):
            training.count(loss, rows)
            if position.step == self._config.snapshot_after_steps:
                self._strategy.extended.pull(training.model)
                training.save_parameters(f"parameters_after_step_{position.step}")
            if training.is_saved_after(position.step):
                checkpoints.save(position)
        self._coordinator.join(self._timeout)
        if checkpoints.should_stop():
            checkpoints.save(position)
        leased.ledger.check(complete=not training.is_over)
        position.end_epoch()

    def _results(self, worker_step: Callable[..., object], leased: Any) -> Iterator[tuple[float, int]]:
        """The results of an epoch's steps in the order they were scheduled, which is not that of their updates.

        Nothing is in flight when the result is yielded after which a snapshot or a checkpoint is due: it has the
        updates of the steps that were counted, and of no others.
        """
        pending: deque[Any] = deque()
        first_step, began = self._position.step, time.perf_counter()
        for step, lease in enumerate(self._leases_left(leased), first_step + 1):
            if self._checkpoints.should_stop():
                break  # this lease's rows count as not handed out
            pending.append(self._coordinator.schedule(worker_step, args=(lease,)))
            ahead = self._steps_ahead(self._position.step - first_step, time.perf_counter() - began)
            is_last_in_flight = step == self._config.snapshot_after_steps or self._training.is_saved_after(step)
            while pending and (is_last_in_flight or len(pending) >= ahead):
                yield pending.popleft().get(self._timeout)
        while pending:
            yield pending.popleft().get(self._timeout)

    def _leases_left(self, leased: Any) -> Iterator[Any]:
        """Of this epoch. None where all its rows are finished, as in a run that goes on at its end: a loop over them
        would begin the next one."""
        if leased.epoch >= self._position.epoch or self._training.is_over:
            return iter(())
        steps_left = None if self._config.max_steps is None else self._config.max_steps - self._position.step
        return islice(leased, steps_left)

    def _steps_ahead(self, steps: int, seconds: float) -> int:
        """How many may be scheduled at a time, after so many steps in so many seconds: those that are under way when
        the run is told to end have to end before it can save."""
        workers, drain_seconds = self._size.workers, self._checkpoints.drain_seconds
        most = _AHEAD_PER_WORKER * workers
        if drain_seconds is None or not steps:
            return most
        least = 2 * workers  # however long a step takes: one that runs, and one that comes next
        return max(min(most, int(drain_seconds * steps / max(seconds, 1e-9))), least)


class LoaderOrder:
    """The rows of each epoch in the order in which a shuffled `DataLoader` would go through them.

    So a run on one worker makes the steps of a run without parameter servers, one after the other.

    Args:
        loader: never read from itself; with a generator of its own, that stands where the first epoch begins.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._generator = loader.generator
        self._beginnings = [loader.generator.get_state()]  # of the epochs that were reached so far
        numbers: Any = range(len(loader.dataset))  # type: ignore[arg-type]
        # A loader, not only its sampler: loaders draw from the generator themselves at the start of each pass.
        self._batches: DataLoader[object] = DataLoader(
            numbers, batch_sampler=loader.batch_sampler, generator=loader.generator, collate_fn=list
        )

    def __call__(self, epoch: int) -> Iterator[int]:
        """The rows of epoch ``epoch``, counted from 0. Goes through the ones before first, if they have not been."""
        for before in range(len(self._beginnings) - 1, epoch):
            deque(self._pass(before), maxlen=0)
        return self._pass(epoch)

    def _pass(self, epoch: int) -> Iterator[int]:
        self._generator.set_state(self._beginnings[epoch])
        for batch in self._batches:
            yield from batch
        if epoch == len(self._beginnings) - 1:
            self._beginnings.append(self._generator.get_state())
