"""What a checkpoint has of the job itself: where its random numbers are, and what else its next step depends on.

Under the name ``torchstrat``, which no object of a user's may have::

    torchstrat.process_0.torch          the default generator of the process of rank 0; ….cuda.cuda_0, ….python, ….numpy
    torchstrat.strategy_0.replica_3     the stream of replica 3, see `torchstrat.core.randomness`; and what it has for
                                        itself where replicas step their own: `torchstrat.replicas.update_policies`
    torchstrat.parameter_servers        the seed of scheduled functions, and how many have ended

`strategy_0` is the strategy that the objects belong to. Another number of processes or replicas takes what it finds of
its own. Processes of which it has nothing take what all have that were saved, if these stood alike; replicas begin as
they would without. A checkpoint that has none of it leaves it all alone. So does a generator of the user's own, whose
state is for the user to save, if no distributed dataset draws from it.

`Processes` are those that save or restore one checkpoint together, where every process runs the same program.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchstrat.checkpoint.items import Reads, Want, Writes
from torchstrat.checkpoint.pieces import OWN, Comparison, Piece, Selection, flatten, is_of_job, unflatten
from torchstrat.core import context
from torchstrat.core.context import engine_of, is_open
from torchstrat.core.errors import TorchstratError
from torchstrat.core.randomness import seedings, state_of
from torchstrat.core.variable.variable import Variable
from torchstrat.data.own_draws import mark_of
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.replicas.roster import Rosters
from torchstrat.replicas.update_policies import OwnValues, mean_of, put_values

if TYPE_CHECKING:
    from torchstrat.checkpoint.reading import Stored
    from torchstrat.checkpoint.remote import Servers
    from torchstrat.core.context import StrategyLike
    from torchstrat.core.engine import Communicator

NAME = OWN


@dataclass(frozen=True)
class JobState:
    """Of one process, at one moment. ``strategies``: the streams of those that the objects belong to."""

    process: Mapping[str, object]
    strategies: Sequence[Mapping[str, object]]
    parameter_servers: Mapping[str, int]


def take(objects: Mapping[str, object], servers: Servers | None) -> JobState:
    """As it is now, between runs; asks no other process. With servers while no function runs."""
    streams = [engine_of(strategy).replica_states.state_dict() for strategy in strategies_of(objects)]
    return JobState(_process_state(), streams, {} if servers is None else servers.counters())


def writes_of(states: Sequence[JobState]) -> Writes:
    """What to write of the states of all processes, in the order of ranks."""
    tree: dict[str, Any] = {}
    for rank, state in enumerate(states):
        tree[f"process_{rank}"] = state.process
        for number, streams in enumerate(state.strategies):
            tree.setdefault(f"strategy_{number}", {}).update(streams)
    tree["parameter_servers"] = states[0].parameter_servers
    writes = Writes()
    for path, value in flatten((NAME,), tree).items():
        if isinstance(value, torch.Tensor):
            writes.tensors.append((Piece(path, tuple(value.shape)), value))
        elif value != {}:
            writes.values.append((path, value))
    return writes


def reads(
    stored: Stored,
    objects: Mapping[str, object],
    servers: Servers | None,
    rank: int,
    selection: Selection,
    comparison: Comparison,
) -> Reads:
    """What the process of this ``rank`` wants of it; to be put in place after everything else."""
    paths = [path for path in stored.under(NAME).values() if is_of_job(path) and selection.takes(NAME)]
    if not paths and NAME in (selection.only or ()):
        comparison.missing(NAME)
    wants: list[Want] = [(Piece(path, ()), None) for path in paths]

    def put(values: Sequence[object]) -> None:
        tree = unflatten(dict(zip(paths, values, strict=True)), depth=1)
        _load_process(process_of(rank, tree))
        for number, strategy in enumerate(strategies_of(objects)):
            if f"strategy_{number}" in tree:
                engine, kept = engine_of(strategy), tree[f"strategy_{number}"]
                engine.replica_states.load_state_dict(kept)
                if servers is None and (mean := mean_of(kept)) and engine.rounds is None:
                    put_values(engine.registry, Rosters(engine.registry).now(), OwnValues(mean, {}, []))
        if servers is not None and "parameter_servers" in tree:
            servers.load_counters(tree["parameter_servers"])

    return Reads(wants, put) if paths else Reads()


def process_of(rank: int, tree: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """The state for the process of this rank, of all that there are in a checkpoint.

    One that was not there goes on as all others, if they stood alike: what the program draws beside its steps (how rows
    are mixed, the size of images) is then the same on all ranks, as it was. Else nobody knows what it would have drawn.
    """
    states = [state for name, state in sorted(tree.items()) if name.startswith("process_")]
    if f"process_{rank}" in tree or not states:
        return tree.get(f"process_{rank}", {})
    if len({tuple(mark_of(state.get(name)) for name in _STREAMS) for state in states}) == 1:
        return states[0]
    warnings.warn(
        f"the checkpoint has the random numbers of {len(states)} processes, which stood at different places, and none "
        f"of rank {rank}: here PyTorch's, Python's and NumPy's generators stay as the program has seeded them. If it "
        f"draws beside its steps what has to be the same on all ranks, go on with {len(states)} processes, or seed all "
        "ranks alike after restoring.",
        stacklevel=2,
    )
    return {}


_STREAMS = ("torch", "python", "numpy")

# -- a process ---------------------------------------------------------------------------------------------------------


def _process_state() -> dict[str, object]:
    state: dict[str, object] = {
        "torch": state_of(),
        "seedings": seedings.state_dict(),
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = {f"cuda_{number}": one for number, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def _load_process(state: Mapping[str, Any]) -> None:
    if "torch" in state:
        torch.set_rng_state(state["torch"])
        seedings.load_state_dict(state.get("seedings", {}))
    for name, one in state.get("cuda", {}).items():
        number = int(name.removeprefix("cuda_"))
        if number < torch.cuda.device_count():
            torch.cuda.set_rng_state(one, number)
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        _load_numpy(state["numpy"])


def _numpy_state() -> dict[str, object]:
    """Of ``numpy.random``'s functions. Empty where nobody has imported it, or has put another generator there."""
    module = sys.modules.get("numpy.random")
    state = {} if module is None else module.get_state(legacy=False)
    if state.get("bit_generator") != "MT19937":
        return {}
    key = torch.tensor(state["state"]["key"].tolist(), dtype=torch.int64, device="cpu")
    return {"key": key, "position": [state["state"]["pos"], state["has_gauss"], state["gauss"]]}


def _load_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy as np
    except ImportError:
        return
    position, has_gauss, gauss = state["position"]
    np.random.set_state(("MT19937", np.array(state["key"].tolist(), dtype=np.uint32), position, has_gauss, gauss))


# -- whose objects they are --------------------------------------------------------------------------------------------


def strategies_of(objects: Mapping[str, object]) -> list[StrategyLike]:
    """The strategies that have any of the objects, in the order of the objects. Where none has (they were made outside
    of a scope, and no run has met them), the one strategy that is open."""
    # In comprehensions: a name that is left from a loop would keep a dropped strategy there.
    found = [one for value in objects.values() for one in _there() if _belongs_to(value, one)]
    if found:
        return list(dict.fromkeys(found))
    if sum(is_open(one) for one in _there()) > 1:
        gc.collect()  # strategies refer to themselves: one that was dropped may seem to be there, in some processes
    still_open = [one for one in _there() if is_open(one)]
    return still_open if len(still_open) == 1 else []


def _there() -> list[StrategyLike]:
    """All but the default one, closed ones among them."""
    return [one for one in context.strategies if not context.is_default(one)]


def everyone_of(objects: Mapping[str, object]) -> Communicator | None:
    """What all processes talk by that have a strategy of these objects; without objects, the one strategy there is.
    None where there is no strategy, or this process is alone."""
    for strategy in strategies_of(objects):
        everyone = engine_of(strategy).everyone
        if everyone is not None:
            return everyone
    return None


def _belongs_to(value: object, strategy: StrategyLike) -> bool:
    if isinstance(value, Variable):
        return context.strategy_of(value) is strategy
    registry = engine_of(strategy).registry
    if isinstance(value, nn.Module):
        return any(module in registry for module in value.modules())
    if isinstance(value, torch.Tensor):
        return value in registry
    return any(value is helper for helper in registry.helpers())


if TYPE_CHECKING:
    from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator

_TIMEOUT = timedelta(minutes=30)  # where no strategy has one

_Value = TypeVar("_Value")


class Processes:
    """``communicator``: None for a process that is alone. ``call``: what all are in, by a name that is the same on
    all, with what they have to be given alike. The ``what`` of the methods is for messages."""

    def __init__(self, communicator: ProcessGroupCommunicator | None, call: str) -> None:
        self._communicator, self._call = communicator, call

    @property
    def rank(self) -> int:
        return 0 if self._communicator is None else self._communicator.rank

    @property
    def size(self) -> int:
        return 1 if self._communicator is None else self._communicator.size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def go_on_in_background(self) -> None:
        """From now on a thread of its own calls the methods: the program may go on while that waits, and waits itself
        while that goes on."""
        if self._communicator is not None:
            self._communicator.channel.in_background = True

    def attempt(self, call: Callable[[], object], what: str) -> None:
        """Call it on each process, and raise on all where one raises: none goes on alone. ``what`` is for messages."""
        self.gather(lambda: (call(), None)[1], what)

    def gather(self, call: Callable[[], _Value], what: str) -> list[_Value]:
        """Call it on each process; the picklable results of all, in the order of ranks. Raises on all where one raises:
        there what it raised, elsewhere `TorchstratError` naming the rank."""
        if self._communicator is None:
            return [call()]
        own: Exception | None = None
        value: _Value | None = None
        try:
            value = call()
        except Exception as error:
            own = error
        told = self._communicator.all_gather_object((value, own and f"{type(own).__name__}: {own}"), self._call)
        if own is not None:
            raise own
        for rank, (_, message) in enumerate(told):
            if message is not None:
                raise TorchstratError(f"{what} failed on rank {rank}: {message}")
        return [value for value, _ in told]

    def of_first(self, call: Callable[[], _Value], what: str) -> _Value:
        """What ``call`` returns on rank 0, where alone it is called; picklable. Raises on all where it raises."""
        if self._communicator is None:
            return call()
        found: list[_Value] = []
        self.attempt(lambda: found.append(call()) if self.is_first else None, what)
        value: _Value = self._communicator.broadcast_object(found[0] if found else None, 0, self._call)
        return value

    def all_values(self, value: _Value) -> list[_Value]:
        """Any picklable value of every process, in the order of ranks."""
        return [value] if self._communicator is None else self._communicator.all_gather_object(value, self._call)


def names_of(objects: Mapping[str, object]) -> str:
    """In one order on all processes: what they have to agree on."""
    return ", ".join(sorted(objects))


@contextlib.contextmanager
def all_processes(call: str, objects: Mapping[str, object]) -> Iterator[Processes]:
    """Those of the default process group, if there is one of more than one process.

    Where a strategy has the ``objects``, its processes first agree that all of them are in this ``call``.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield Processes(None, call)
        return
    # Imported here: only where there are several processes.
    from torchstrat.distributed.collectives.agreement import agree
    from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator

    rank, size = dist.get_rank(), dist.get_world_size()
    plan = ProcessPlan(rank, size, rank, size, None, False, f"rank {rank} of {size}")
    timeout, everyone = _TIMEOUT, everyone_of(objects)
    if everyone is not None and everyone.size == size:
        agree(everyone, call)
        timeout = everyone.timeout
    communicator = ProcessGroupCommunicator(plan, "cpu", timeout, is_passing=True)
    try:
        yield Processes(communicator, call)
    finally:
        communicator.close()
