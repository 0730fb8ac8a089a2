"""What a caller may say about its input: `InputOptions` and the enumerations in it, and `InputContext`; and what FILE
asks of a data set.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeGuard, TypeVar

from torch.utils.data import Dataset, IterableDataset

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

EnumT = TypeVar("EnumT", bound=enum.Enum)


class InputReplicationMode(enum.Enum):
    """How many input pipelines a `dataset_fn` makes: one for each process, or one for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.IntEnum):
    """How the processes of a job share a dataset. It also picks the rule by which batches are split over replicas.

    ========  =====================================================  ===================================
    policy    who reads what                                         how a global batch is split
    ========  =====================================================  ===================================
    AUTO      FILE for a dataset that reads files, else DATA
    FILE      file ``i`` belongs to process ``i mod num_workers``    fixed sizes (`batch_sizes_for_worker`)
    DATA      every process its own rows of each global batch        equal chunks of ``ceil(rows / n)``
    HINT      what the dataset's own ``shard`` call says             fixed sizes
    OFF       every process everything (or: it is sharded already)   fixed sizes
    ========  =====================================================  ===================================
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Fields(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int
    auto_shard_policy: AutoShardPolicy | None
    empty_replicas: Literal["skip", "run"]
    collate: Literal["batch", "rows"]


class InputOptions(_Fields):
    """How a dataset is distributed; an immutable named tuple. Every field also goes without ``experimental_``.

    Args:
        experimental_fetch_to_device: move batches to the replicas' devices (default), or leave them on the host.
        experimental_replication_mode: for `distribute_datasets_from_function`: one pipeline per process (default) or
            per replica.
        experimental_place_dataset_on_device: accepted for TensorFlow programs; only means something with PER_REPLICA.
        experimental_per_replica_buffer_size: batches kept ready for each replica. With 1 (the default) the dataset's
            own code runs in the thread that asks for the batch, as in a PyTorch loop, so that its random draws are
            reproducible; only data-loading workers and copies to an accelerator run ahead. With more, the dataset is
            read that many batches ahead in a background thread; in the asking one where there are several processes
            and its code may draw.
        auto_shard_policy: how processes share the data; None reads ``dataset.auto_shard_policy``, else AUTO.
        empty_replicas: what a replica does in a step in which it has no rows: ``"skip"`` the step (default), or
            ``"run"`` it with tensors of zero rows, as TensorFlow does.
        collate: what the collate function of a `DataLoader`, or a data set that makes batches itself, looks at.
            ``"batch"`` (default): perhaps at the whole batch, to pad it to its longest row, say. So each of several
            processes reads all rows of each global batch, unless torch's own collate function stacks them.
            ``"rows"``: your word that it does to each row the same whatever the others are; then a process reads its
            own rows only.

    Raises:
        InvalidArgumentError: a value that the field cannot have.
        WrongTypeError: a value of the wrong kind, or a field given under both of its names.
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode | str | None = None,
        experimental_place_dataset_on_device: bool | None = None,
        experimental_per_replica_buffer_size: int | None = None,
        auto_shard_policy: AutoShardPolicy | str | None = None,
        empty_replicas: Literal["skip", "run"] = "skip",
        collate: Literal["batch", "rows"] = "batch",
        *,
        fetch_to_device: bool | None = None,
        replication_mode: InputReplicationMode | str | None = None,
        place_dataset_on_device: bool | None = None,
        per_replica_buffer_size: int | None = None,
    ) -> InputOptions:
        fetch = _one_of("fetch_to_device", experimental_fetch_to_device, fetch_to_device, True)
        mode = _one_of(
            "replication_mode", experimental_replication_mode, replication_mode, InputReplicationMode.PER_WORKER
        )
        place = _one_of("place_dataset_on_device", experimental_place_dataset_on_device, place_dataset_on_device, False)
        size = _one_of("per_replica_buffer_size", experimental_per_replica_buffer_size, per_replica_buffer_size, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgumentError(f"per_replica_buffer_size={size!r} must be an int of at least 1.")
        if empty_replicas not in ("skip", "run"):
            raise InvalidArgumentError(f'empty_replicas={empty_replicas!r} must be "skip" or "run".')
        if collate not in ("batch", "rows"):
            raise InvalidArgumentError(f'collate={collate!r} must be "batch" or "rows".')
        return super().__new__(
            cls,
            bool(fetch),
            _member(InputReplicationMode, mode, "replication_mode"),
            bool(place),
            size,
            None if auto_shard_policy is None else parse_policy(auto_shard_policy),
            empty_replicas,
            collate,
        )

    @classmethod
    def _make(cls, iterable: Iterable[object]) -> InputOptions:  # type: ignore[override]
        """Of all fields in order. `_replace` calls it, and would otherwise take any values."""
        return cls(*iterable)  # type: ignore[arg-type]

    fetch_to_device = property(lambda self: self.experimental_fetch_to_device)
    replication_mode = property(lambda self: self.experimental_replication_mode)
    place_dataset_on_device = property(lambda self: self.experimental_place_dataset_on_device)
    per_replica_buffer_size = property(lambda self: self.experimental_per_replica_buffer_size)


def parse_policy(policy: AutoShardPolicy | str | int) -> AutoShardPolicy:
    """An `AutoShardPolicy`, also from its name in any case or its number."""
    return _member(AutoShardPolicy, policy, "auto_shard_policy")


def require_options(options: InputOptions | None) -> InputOptions:
    """``options`` or the defaults; anything else is an error that says what to pass."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise WrongTypeError(
            f"options must be a torchstrat InputOptions; got {type(options).__name__}. Write ts.InputOptions(…)."
        )
    return options


def _one_of(name: str, long: object, short: object, default: object) -> object:
    if long is not None and short is not None:
        raise WrongTypeError(f"InputOptions was given both {name} and experimental_{name}; they are one field.")
    chosen = long if long is not None else short
    return default if chosen is None else chosen


def _member(kind: type[EnumT], value: object, field: str) -> EnumT:
    if isinstance(value, kind):
        return value
    for member in kind if not isinstance(value, bool) else ():  # False would be AUTO, which is 0
        if value == member.value or (isinstance(value, str) and value.upper() == member.name):
            return member
    names = ", ".join(member.name for member in kind)
    raise InvalidArgumentError(f"{field}={value!r} is none of {names}.")


@dataclass(frozen=True)
class InputContext:
    """What a `dataset_fn` learns about its place: which pipeline it makes, of how many, for how many replicas."""

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """``global_batch_size`` divided by the replicas of the whole group.

        Raises:
            InvalidArgumentError: it does not divide evenly.
            WrongTypeError: it is not a number.
        """
        replicas = self.num_replicas_in_sync
        if isinstance(global_batch_size, str | bytes) or not hasattr(global_batch_size, "__mod__"):
            raise WrongTypeError(f"global_batch_size must be a number; got {global_batch_size!r}.")
        if global_batch_size % replicas != 0:
            below = int(global_batch_size // replicas) * replicas
            raise InvalidArgumentError(
                f"global_batch_size={global_batch_size} does not split evenly over {replicas} replicas; use a multiple "
                f"of {replicas}, such as {below or below + replicas} or {(below or replicas) + replicas}."
            )
        return global_batch_size // replicas

    def __str__(self) -> str:
        # Word for word what TensorFlow prints: programs and logs that were ported compare it.
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
        )


PathLike = str | os.PathLike[str]


class FileSource(Protocol):
    """A dataset that reads files, as the FILE policy sees it: any object with these two names, unless it is a map-style
    data set, whose rows are shared by index; see `reads_files`."""

    files: Sequence[PathLike]

    def open(self, files: Sequence[PathLike]) -> Iterable[nest.Nest]:
        """The elements in these of the files, in order."""


def reads_files(dataset: object) -> TypeGuard[FileSource]:
    """Whether ``dataset`` is a `FileSource`. Not ``isinstance``, which does not see names that are delegated.

    A map-style data set has an order, a sampler's or its own, which reading its files one after the other would lose;
    and the names are usual ones: it may open a single file for a row.
    """
    return hasattr(dataset, "files") and callable(getattr(dataset, "open", None)) and not _is_map_style(dataset)


def _is_map_style(dataset: object) -> bool:
    by_index = getattr(type(dataset), "__getitem__", None)
    has_rows = by_index not in (None, Dataset.__getitem__) and hasattr(dataset, "__len__")
    return has_rows and not isinstance(dataset, IterableDataset)


def files_of_worker(files: Sequence[PathLike], worker: int, workers: int) -> tuple[PathLike, ...]:
    """The files of one process. Raises, in every process, when there are not enough for all."""
    if len(files) < workers:
        raise InvalidArgumentError(
            f"{len(files)} file(s) cannot be shared by {workers} processes: under the policies FILE and AUTO each "
            "needs one at least. Use auto_shard_policy=AutoShardPolicy.DATA to share the rows, or split the files."
        )
    return tuple(files[worker::workers])
