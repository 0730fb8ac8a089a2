"""The position in a dataset, as plain data: what `DistributedDataset.state_dict` saves and `load_state_dict` checks,
which place in its streams each step leads to, and how far a pass got.

What counts is what was handed out to the loop. Data that was read ahead, by data-loading workers or a prefetching
thread, is read again after a restore. A position is counted in rows of the order in which the dataset's rows come, so
that it means the same for another batch size and another number of replicas. It consists of numbers, strings, tensors
and lists of numbers, and does not grow with the dataset: what a sampler drew is not saved but drawn again, from the
random states of the beginning of the pass.

Generators of the user's own, which other datasets may draw from as well, are put where they stood when the position was
saved, as soon as it is loaded. What is drawn again later leaves them where they are then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torchstrat.core import nest
from torchstrat.core.engine import Communicator, InputLayout
from torchstrat.core.errors import CommunicationError, InvalidArgumentError, WrongTypeError
from torchstrat.core.randomness import RandomStreams
from torchstrat.data.options import AutoShardPolicy
from torchstrat.data.streams import InferredBatch, Step, fixed_size_steps, require_aligned

T_co = TypeVar("T_co", covariant=True)
VERSION = 2
_KEYS = {"version", "under_way", "reads", "policy", "pipelines", "steps", "cycle", "streams"}
GENERATORS = "generators"
"""In what a pass, or the next one, depends on: where the generators of the user's objects stand. Since version 2."""
AHEAD = "ahead"
"""Beside it: whether these may have moved for batches that have not been handed out."""


class Place(NamedTuple):
    """Where the reading of one stream of rows stands, after some of its batches. Made for every batch: hence cheap."""

    batches: int = 0
    rows: int | None = 0
    """None: batches whose rows nobody can count."""
    order: int = 0
    """A checksum of the indices of these rows, for what is read by index."""
    own: object = None
    """What the dataset's or the sampler's own ``state_dict()`` says here, where it has one."""
    ended: bool = False
    """Whether nothing is left."""
    extra: int = 0
    """Rows beyond ``rows`` that were handed out: of a batch that lasts several steps."""


@dataclass(frozen=True)
class Resume:
    """Where to go on in a stream, and what it takes to open it as it was opened then."""

    place: Place
    beginning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """Whether generators of the user's objects stood where they had to when the position had been loaded."""
        return GENERATORS in self.beginning


@dataclass(frozen=True)
class Stream(Generic[T_co]):
    """One reading of a source, just opened."""

    items: Iterator[T_co]
    stand: Callable[[], Place]
    """The place after the item that was given out last. Called in the thread that takes the items."""
    beginning: Callable[[], Mapping[str, object]] = dict
    """What `Resume` needs later."""
    here: bool = False
    """Whether items have to be taken in the caller's thread: the process's random streams are put aside meanwhile."""


@dataclass(frozen=True)
class Terms:
    """What a position refers to: equal, as far as `check` asks, in the run that saved it and in the one that loads."""

    reads: str
    """What is counted: ``"rows by index"``, ``"rows in sequence"``, ``"elements of a function"``."""
    settings: Mapping[int, Mapping[str, object]]
    """Of the datasets of this process's streams, by the names that errors give them: its length, for example."""
    policy: AutoShardPolicy
    pipelines: int
    """Streams that are read in all: 1 where every process reads the same one."""
    splits: bool = False
    """Whether what one of several pipelines has left can be read by any process."""

    def check(self, state: object) -> Saved:
        """``state`` of `pack`, if it can be gone on with here.

        Raises:
            WrongTypeError: no position.
            InvalidArgumentError: of a newer torchstrat, of another dataset, or of settings with which rows would be
                lost or repeated.
        """
        if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
            raise WrongTypeError(
                "load_state_dict of a distributed dataset takes what its state_dict() returned; got "
                f"{type(state).__name__} {state!r:.80}."
            )
        if not isinstance(state["version"], int) or state["version"] > VERSION:
            raise InvalidArgumentError(
                f"the data position has format version {state['version']!r}, and this torchstrat reads versions up to "
                f"{VERSION}: use the torchstrat that saved it, or a newer one."
            )
        saved = Saved.of(state)
        if saved.under_way:
            self._require_same(saved)
            self._require_pipelines(saved)
        return saved

    def _require_same(self, saved: Saved) -> None:
        here: dict[str, object] = {"reading": self.reads}
        there: dict[str, object] = {"reading": saved.reads}
        if self.reads == saved.reads:
            for number, settings in self.settings.items():
                here |= settings
                there |= saved.settings.get(number, saved.settings[0])
        differ = [name for name in there if name in here and here[name] != there[name]]
        if differ:
            raise InvalidArgumentError(
                "the data position is of another dataset, or of other settings: "
                + "; ".join(f"{name} was {there[name]} when it was saved and is {here[name]} here" for name in differ)
                + ". Within a pass these must be as they were: give the dataset and loader of the run that saved it, "
                "or leave the position out of what is restored to start the pass over."
            )

    def _require_pipelines(self, saved: Saved) -> None:
        alike = saved.pipelines == 1 or saved.policy == self.policy.name
        if alike and (saved.pipelines == self.pipelines or self.splits):
            return
        before = f"{saved.pipelines} input pipeline(s), auto_shard_policy={saved.policy}"
        here = f"{self.pipelines}, auto_shard_policy={self.policy.name}"
        raise InvalidArgumentError(
            f"the data position is of {before}; here there are {here}, and what each pipeline had left cannot be "
            "shared out anew. Go on with as many processes (and replicas, under PER_REPLICA) and the same policy until "
            "the pass has ended, or leave the position out of what is restored. AutoShardPolicy.DATA with a "
            "DataLoader, and FILE, go on with any number of processes."
        )


@dataclass(frozen=True)
class Saved:
    """A position that was saved, taken apart."""

    under_way: bool
    """Whether a pass has begun and not ended."""
    reads: str
    settings: Mapping[int, Mapping[str, object]]
    policy: str
    pipelines: int
    steps: int
    cycle: tuple[int, ...]
    """What the sizes of the fixed-size rule depend on: processes, replicas in each, declared and inferred batch."""
    streams: Mapping[int, Resume]
    """Of the pass under way, by pipeline."""
    between: Mapping[int, Mapping[str, object]]
    """Between two passes: what each pipeline's next one depends on."""
    generators: Mapping[int, Mapping[str, object]]
    """Where those of the user's objects stood, by pipeline. Empty in version 1."""

    def put_generators(self, streams: Mapping[int, RandomStreams]) -> None:
        """Bring those of the user's objects, by pipeline, to where they stood.

        Raises:
            InvalidArgumentError: others than there were, within a pass. Nothing has been moved.
        """
        stood = self.generators
        found = [(one, stood[number if number in stood else 0]) for number, one in streams.items() if stood]
        for one, states in found:
            if self.under_way and states["kinds"] != one.own_kinds:
                raise InvalidArgumentError(
                    "the data position is of a dataset that draws from other generators of its own: they were "
                    f"{states['kinds']} when it was saved and are {one.own_kinds} here. Within a pass these must be as "
                    "they were: give the dataset of the run that saved it, or leave the position out of what is "
                    "restored to start the pass over."
                )
        for one, states in found:
            if states["kinds"] == one.own_kinds:
                one.put(states)

    def streams_now(self, streams: Mapping[int, RandomStreams], peers: Communicator | None) -> dict[str, object]:
        """The streams of a state that has not been gone on with yet, though other datasets may have moved generators.
        With ``peers``, every process calls it, and all return the same."""
        found, own = dict[str, object](), dict[str, object]()
        for number in self.streams if self.under_way else self.between:
            is_here = number in streams and number in self.generators
            now = generators_now(streams[number]) if is_here else {}
            one: dict[str, object] = {**self.between.get(number, {}), **now}
            if self.under_way:
                resume = self.streams[number]
                one = stream_state(resume.place, {**resume.beginning, **now}, self.settings[number])
            found[str(number)] = one
            if is_here and (self.pipelines > 1 or peers is None or peers.rank == 0):
                own[str(number)] = one
        steps = self.steps if self.under_way else -1
        return {**found, **(own if peers is None else _gathered(peers, own, steps, None))}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Saved:
        found: dict[int, Resume] = {}
        settings: dict[int, Mapping[str, object]] = {}
        between: dict[int, Mapping[str, object]] = {}
        generators: dict[int, Mapping[str, object]] = {}
        for number, stream in state["streams"].items():
            dependent = stream["beginning"] if state["under_way"] else stream
            if GENERATORS in dependent:
                generators[int(number)] = dependent[GENERATORS]
            if state["under_way"]:
                found[int(number)] = Resume(Place(**stream["place"]), stream["beginning"])
                settings[int(number)] = stream["settings"]
            else:
                between[int(number)] = stream
        return cls(
            bool(state["under_way"]),
            state["reads"],
            settings,
            state["policy"],
            state["pipelines"],
            state["steps"],
            tuple(state["cycle"]),
            found,
            between,
            generators,
        )


def generators_now(streams: RandomStreams) -> dict[str, object]:
    """The entry of a position that says where the generators of the user's objects stand."""
    return {GENERATORS: {"kinds": streams.own_kinds, **streams.own_states()}}


def stream_state(place: Place, beginning: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """One stream's part of the state of a pass under way."""
    return {"place": place._asdict(), "beginning": dict(beginning), "settings": dict(settings)}


Places = Mapping[int, Place]
"""By the number of the stream."""


@dataclass
class Cycle:
    """What the sizes of the fixed-size rule depend on besides the rows."""

    num_workers: int = 0
    local_replicas: int = 0
    declared: int = 0
    inferred: InferredBatch = field(default_factory=InferredBatch)

    @property
    def settings(self) -> tuple[int, int, int]:
        return self.num_workers, self.local_replicas, self.declared

    def plain(self) -> tuple[int, ...]:
        return (*self.settings, -1 if self.inferred.rows is None else self.inferred.rows)


class Standing(Protocol):
    """Follows the streams of one pass in this process. It keeps them open, and so is kept only where steps are made."""

    streams: Mapping[int, Stream[object]]
    steps_before: int
    """Of this pass, when the streams were opened."""
    cycle: Cycle

    def before(self) -> Places:
        """Before the first step."""

    def after(self, step: Step) -> Places:
        """After ``step``, which has just been made. Called for every step, where it is made."""

    def at_end(self) -> Places:
        """After the last step, when there was found to be no other."""


class StepPerItem:
    """Every step takes whole items of the streams, and no more than it needs."""

    def __init__(self, streams: Mapping[int, Stream[object]], saved: Saved | None) -> None:
        self.streams = streams
        self.steps_before = 0 if saved is None else saved.steps
        self.cycle = Cycle()

    def before(self) -> Places:
        return {number: stream.stand() for number, stream in self.streams.items()}

    def after(self, step: Step) -> Places:
        return self.before()

    def at_end(self) -> Places:
        return _ended(self.streams)


class FixedSizes:
    """Steps by the fixed-size rule, which cut what the streams give, one stream after the other, across batches.

    Args:
        streams: this process's; usually one, several to go on with those of a larger number of processes.
        declared: rows of a full batch.
        layout: the replicas.
        saved: the position from which the streams go on, if they do.
    """

    def __init__(
        self, streams: Mapping[int, Stream[nest.Nest]], declared: int | None, layout: InputLayout, saved: Saved | None
    ) -> None:
        self.streams = streams
        self._layout = layout
        self._by_rows = layout.num_replicas > 1
        self._places = {number: stream.stand() for number, stream in streams.items()}
        self._borders: deque[tuple[int, int, Place]] = deque()  # what had been read by then, stream, place
        self._read, self._taken, self._passed = 0, 0, 0
        self.cycle = Cycle(layout.num_workers, len(layout.local_replicas), declared or 0)
        self.steps_before = 0
        if saved is not None and saved.cycle[:3] == self.cycle.settings:
            self.steps_before = saved.steps
            self.cycle.inferred.rows = saved.cycle[3] if saved.cycle[3] >= 0 else None

    def steps(self) -> Iterator[Step]:
        """Cut the streams. Once; not kept here, so that whoever takes the steps can let go of the streams."""
        cycle, taken = self.cycle, next((place.extra for place in self._places.values()), 0)
        batches = self._batches()
        return fixed_size_steps(batches, cycle.declared, self._layout, self.steps_before, cycle.inferred, taken)

    def _batches(self) -> Iterator[nest.Nest]:
        for number, stream in self.streams.items():
            for batch in stream.items:
                self._read += require_aligned(batch) if self._by_rows else 1
                self._borders.append((self._read, number, stream.stand()))
                yield batch
            self._borders.append((self._read, number, stream.stand()))

    def before(self) -> Places:
        return dict(self._places)

    def after(self, step: Step) -> Places:
        self._taken += sum(step.rows) if self._by_rows else 1
        while self._borders and self._borders[0][0] <= self._taken:
            self._passed, number, place = self._borders.popleft()
            self._places[number] = place
        if self._taken == self._passed:
            return dict(self._places)
        number = self._borders[0][1]
        begun = self._places[number]
        # The batch is read again when this place is gone on from; these rows of it are then left out.
        return {**self._places, number: begun._replace(extra=begun.extra + self._taken - self._passed)}

    def at_end(self) -> Places:
        return _ended(self.streams)


def _ended(streams: Mapping[int, Stream[object]]) -> Places:
    return {number: stream.stand()._replace(ended=True) for number, stream in streams.items()}


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
        self.reads_ahead = False
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

    def streams(self, settings: Mapping[int, Mapping[str, object]]) -> dict[str, object]:
        """The state of this process's streams."""
        same = next(iter(settings.values()))  # of one dataset, whoever had which part of it
        return {
            str(number): stream_state(
                place, {**self._beginnings[number](), AHEAD: self.reads_ahead}, settings.get(number, same)
            )
            for number, place in self._places.items()
        }


def state_of(
    progress: Progress | None,
    terms: Terms,
    between: Callable[[], Mapping[int, Mapping[str, object]]],
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
    streams: Mapping[str, object] = {}
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
    peers: Communicator, streams: Mapping[str, object], steps: int, failure: Exception | None
) -> Mapping[str, object]:
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
