"""What processes tell each other about their input, where it does not follow from the split of a global batch.

Pipelines that every process reads for itself (FILE, OFF, HINT, `distribute_datasets_from_function`) may differ in rows
and in length. One small exchange per step keeps all processes stepping together until the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torchstrat.core import nest
from torchstrat.core.communicator import Communicator
from torchstrat.core.errors import CommunicationError, InvalidArgumentError
from torchstrat.data import rows
from torchstrat.data.streams import Step


class _Report(NamedTuple):
    rows: tuple[int, ...] | None  # of the local replicas; None: this process has no data left
    template: nest.Nest  # an empty batch, in the first step, for processes that never see data
    failure: str | None


class StepAgreement:
    """Steps of all processes, made of the steps of each. Collective: every process calls `next` for every step."""

    def __init__(self, communicator: Communicator, local_replicas: int) -> None:
        self._communicator = communicator
        self._local = local_replicas
        self._empty: nest.Nest = None

    def next(self, pull: Callable[[], Step | None]) -> Step | None:
        """The next step with the rows of every replica; empty batches where this process's data has ended.

        Args:
            pull: this process's next step, with the rows of its own replicas; None, again and again, after the last.

        Returns:
            None when all processes have reached their ends.

        Raises:
            CommunicationError: another process failed to read its next batch. A failure of ``pull`` itself is raised
                here as it is.
        """
        step, failure = None, None
        try:
            step = pull()
        except Exception as error:  # told to the others, who would wait for this process otherwise
            failure = error
        first = self._empty is None
        if step is not None and first:
            self._empty = rows.empty_like(step.components[0])
        report = _Report(
            None if step is None else step.rows,
            self._empty if first else None,
            None if failure is None else f"{type(failure).__name__}: {failure}",
        )
        reports = self._communicator.all_gather_object(report, "the rows of the next step")
        if failure is not None:
            raise failure
        for rank, other in enumerate(reports):
            if other.failure is not None:
                raise CommunicationError(f"rank {rank} could not read its next batch: {other.failure}")
        if all(other.rows is None for other in reports):
            return None
        if self._empty is None:
            self._empty = next(other.template for other in reports if other.template is not None)
        sizes = tuple(size for other in reports for size in other.rows or (0,) * self._local)
        components = (self._empty,) * self._local if step is None else step.components
        return Step(components, sizes)


class PassEnd:
    """How a pass that needs no agreement about its steps ended for each process. Every process makes one per pass.

    One that fails says so, and does not wait; who left its loop early has nothing against the pass.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank = communicator.rank
        self._words = communicator.words("the end of a pass over a distributed dataset")

    def left(self) -> None:
        self._words.tell("")

    def failed(self, error: BaseException) -> None:
        self._words.tell(f"{type(error).__name__}: {error}"[:1000])

    def reached(self) -> None:
        """This process has come to its end. Raises `CommunicationError` where another one did not, or does not come."""
        self.left()
        words = self._words.of_all()
        for rank, word in sorted(words.items()):
            if word and rank != self._rank:
                raise CommunicationError(
                    f"rank {rank} could not read its rows of a batch: {word}. What this rank has read is less than the "
                    "pass: the rows of the other replicas in that batch and after it are missing."
                )


def require_equal_data(communicator: Communicator, first: Step | None, cardinality: int) -> None:
    """Every process reads the whole dataset and keeps its own rows: then all must read the same.

    Compares the first batches, and the numbers of batches where they are known.
    """
    checksum = None if first is None else first.checksum
    reports = communicator.all_gather_object((checksum, cardinality), "the checksum of the first batch")
    sums, counts = zip(*reports, strict=True)
    if len(set(counts)) > 1:
        raise InvalidArgumentError(
            f"the dataset has {list(counts)} batches on ranks 0 to {len(counts) - 1}, and under AutoShardPolicy.DATA "
            "every process reads the same dataset and keeps its own rows. If it is sharded already, pass "
            "InputOptions(auto_shard_policy=AutoShardPolicy.OFF) or use distribute_datasets_from_function."
        )
    if len(set(sums)) == 1:
        return
    odd = [rank for rank, other in enumerate(sums) if other != sums[0]]
    raise InvalidArgumentError(
        f"rank(s) {odd} read another first batch than rank 0. Under AutoShardPolicy.DATA every process reads the same "
        "dataset and keeps its own rows. If it is sharded already, pass "
        "InputOptions(auto_shard_policy=AutoShardPolicy.OFF) or use distribute_datasets_from_function; if it is "
        "shuffled, give every rank the same seed."
    )
