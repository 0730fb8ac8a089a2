"""How far a pass over a distributed dataset got, counted where batches are handed to the loop, and told as a state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchstrat.core.errors import CommunicationError, InvalidArgumentError
from torchstrat.data.position import VERSION, Terms, stream_state
from torchstrat.data.standing import Places, Standing
from torchstrat.data.streams import Step
from torchstrat.distributed.collectives.communicator import Communicator

_WHAT = "the position in a distributed dataset"


class Progress:
    """One pass of this process.

    Args:
        standing: follows the steps as they are made, which may be ahead of the loop, in another thread.
        pipelines: streams that all processes read in all.
    """

    def __init__(self, standing: Standing, pipelines: int) -> None:
        self.pipelines = pipelines
        self.steps = standing.steps_before
        self.ended = False
        self._places = standing.before()
        self._pulled = self._at_end = self._places
        self._made: deque[Places] = deque()
        # Not the streams themselves: a loop that is left early gives up its workers, and keeps its place.
        self._cycle = standing.cycle
        self._beginnings = {number: stream.beginning for number, stream in standing.streams.items()}

    def following(self, steps: Iterator[Step], standing: Standing) -> Iterator[Step]:
        """``steps``, with the places that each leads to put aside until it is handed out."""
        for step in steps:
            self._made.append(standing.after(step))
            yield step
        self._at_end = standing.at_end()

    def pull(self, step: Step | None) -> Step | None:
        """``step`` is what this process has for the next step of all."""
        if step is None:
            self._pulled = self._at_end
        else:
            self._pulled = self._made.popleft()
        return step

    def hand_out(self) -> None:
        """The loop gets the step that was pulled."""
        self._places = self._pulled
        self.steps += 1

    @property
    def cycle(self) -> tuple[int, ...]:
        return self._cycle.plain()

    def streams(self, settings: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """The state of this process's streams."""
        same = next(iter(settings.values()))  # of one dataset, whoever had which part of it
        return {
            str(number): stream_state(place, self._beginnings[number](), settings.get(number, same))
            for number, place in self._places.items()
        }


def state_of(
    progress: Progress | None,
    terms: Terms,
    between: Callable[[], Mapping[int, Mapping[str, Any]]],
    peers: Communicator | None,
) -> dict[str, Any]:
    """What `Terms.check` takes. With ``peers``, every process calls it, and all return the same.

    Args:
        progress: of the pass; None or ended: there is none under way.
        terms: what the position refers to.
        between: what the pipelines' next passes depend on, for when there is none.
        peers: the other processes.
    """
    current = None if progress is None or progress.ended else progress
    failure: Exception | None = None
    streams: Mapping[str, Any] = {}
    try:
        if terms.pipelines > 1 or peers is None or peers.rank == 0:
            if current is None:
                streams = {str(number): dict(one) for number, one in between().items()}
            else:
                streams = current.streams(terms.settings)
    except Exception as error:  # told to the others, who would wait for this process otherwise
        failure = error
    steps = -1 if current is None else current.steps
    streams = streams if peers is None else _gathered(peers, streams, steps, failure)
    if failure is not None:
        raise failure
    return {
        "version": VERSION,
        "under_way": current is not None,
        "reads": terms.reads,
        "policy": terms.policy.name,
        "pipelines": terms.pipelines if current is None else current.pipelines,
        "steps": max(steps, 0),
        "cycle": () if current is None else current.cycle,
        "streams": streams,
    }


def _gathered(
    peers: Communicator, streams: Mapping[str, Any], steps: int, failure: Exception | None
) -> Mapping[str, Any]:
    """The streams of all processes."""
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = peers.all_gather_object((steps, streams, told), _WHAT)
    if failure is not None:
        return streams
    for rank, (_, _, message) in enumerate(reports):
        if message is not None:
            raise CommunicationError(f"rank {rank} could not tell its position in a distributed dataset: {message}")
    counts = [count for count, _, _ in reports]
    if len(set(counts)) > 1:
        said = ["between passes" if count < 0 else f"after step {count}" for count in counts]
        raise InvalidArgumentError(
            f"ranks 0 to {len(said) - 1} are {said} of a distributed dataset: all have to ask for its state after the "
            "same step."
        )
    return {number: state for _, of_rank, _ in reports for number, state in of_rank.items()}
