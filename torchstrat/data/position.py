"""How far data has been read, as plain data: what `DistributedDataset.state_dict` saves and `load_state_dict` checks.

What counts is what was handed out to the loop. Data that was read ahead, by data-loading workers or a prefetching
thread, is read again after a restore. A position is counted in rows of the order in which the dataset's rows come, so
that it means the same for another batch size and another number of replicas. It consists of numbers, strings, tensors
and lists of numbers, and does not grow with the dataset: what a sampler drew is not saved but drawn again, from the
random states of the beginning of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.data.options import AutoShardPolicy

T = TypeVar("T")
VERSION = 1
_KEYS = {"version", "under_way", "reads", "policy", "pipelines", "steps", "cycle", "streams"}


class Place(NamedTuple):
    """Where the reading of one stream of rows stands, after some of its batches. Made for every batch: hence cheap."""

    batches: int = 0
    rows: int | None = 0
    """None: batches whose rows nobody can count."""
    order: int = 0
    """A checksum of the indices of these rows, for what is read by index."""
    own: Any = None
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


@dataclass(frozen=True)
class Stream(Generic[T]):
    """One reading of a source, just opened."""

    items: Iterator[T]
    stand: Callable[[], Place]
    """The place after the item that was given out last. Called in the thread that takes the items."""
    beginning: Callable[[], dict[str, Any]] = dict
    """What `Resume` needs later."""
    here: bool = False
    """Whether items have to be taken in the caller's thread: the process's random streams are put aside meanwhile."""


@dataclass(frozen=True)
class Terms:
    """What a position refers to: equal, as far as `check` asks, in the run that saved it and in the one that loads."""

    reads: str
    """What is counted: ``"rows by index"``, ``"rows in sequence"``, ``"elements of a function"``."""
    settings: Mapping[int, Mapping[str, Any]]
    """Of the datasets of this process's streams, by the names that errors give them: its length, for example."""
    policy: AutoShardPolicy
    pipelines: int
    """Streams that are read in all: 1 where every process reads the same one."""
    splits: bool = False
    """Whether what one of several pipelines has left can be read by any process."""

    def check(self, state: Any) -> Saved:
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
        here: dict[str, Any] = {"reading": self.reads}
        there: dict[str, Any] = {"reading": saved.reads}
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
    settings: Mapping[int, Mapping[str, Any]]
    policy: str
    pipelines: int
    steps: int
    cycle: tuple[int, ...]
    """What the sizes of the fixed-size rule depend on: processes, replicas in each, declared and inferred batch."""
    streams: Mapping[int, Resume]
    """Of the pass under way, by pipeline."""
    between: Mapping[int, Mapping[str, Any]]
    """Between two passes: what each pipeline's next one depends on."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Saved:
        found: dict[int, Resume] = {}
        settings: dict[int, Mapping[str, Any]] = {}
        between: dict[int, Mapping[str, Any]] = {}
        for number, stream in state["streams"].items():
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
        )


def stream_state(place: Place, beginning: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """One stream's part of the state of a pass under way."""
    return {"place": place._asdict(), "beginning": dict(beginning), "settings": dict(settings)}
