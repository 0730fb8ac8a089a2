"""Update policies: how the steps that all replicas make become updates of the variables.

Public as `torchstrat.policy`. The first three say where variables and optimizer state live, and the engine does the
rest; a `LocalUpdate` leaves each replica its own and says when, and how, they are brought together. Of its rounds of
local steps an engine makes `LocalRounds`; `OwnValues` is what checkpoints keep of each replica.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.core._torch_private import version_of
from torchstrat.core.engine import Communicator
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.optimizers import stepped_by
from torchstrat.core.randomness import ROUND, ReplicaStreams
from torchstrat.core.variables import VariableRegistry
from torchstrat.distributed.collectives.agreement import agree, all_equal, code, fingerprint
from torchstrat.replicas.exchange import average_tensors, broadcast_tensors
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.state import Trace, trace_of

END_OF_ROUND = "the end of a round (bringing the replicas' variables together)"


class UpdatePolicy:
    """What `place` is told; one of the four kinds below."""


class ReplicatedUpdate(UpdatePolicy):
    """Gradients are combined over all replicas, and every replica has the variables, equal everywhere, as
    `ts.MirroredStrategy` has them. Optimizer state is kept once in a process."""


class PrimaryUpdate(UpdatePolicy):
    """Gradients are combined over all replicas; the first one has the variables and the optimizer's state, steps them,
    and hands out the new values.

    Args:
        device: where they live; None: with the first replica.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = device


class ShardedUpdate(PrimaryUpdate):
    """The same in memory that processes of one host share: elementwise steps are divided among them, as
    `ts.CentralStorageStrategy` does it. Where they share no memory it is a `PrimaryUpdate`.

    Args:
        device: as before.
        keeps_gradients: combine each gradient only where it is stepped; then no rank may read or clip any.
    """

    def __init__(self, device: str | torch.device | None = None, *, keeps_gradients: bool = False) -> None:
        super().__init__(device)
        self.keeps_gradients = keeps_gradients


class Replica:
    """One replica at the end of a round: what `LocalUpdate.end_round` works with. Its methods are collective: every
    replica calls them, with tensors of equal shapes and dtypes in one order.

    Attributes:
        index: which of the replicas it is; ``count``: how many there are.
        parameters: its own, those that require a gradient, in one order on all replicas. To be changed in place. With
            them are those that have been stepped and are frozen now, where replicas have come to differ in them.
        state: what the policy keeps of this replica from round to round: tensors, numbers and texts by name, and
            dictionaries of these. Saved in checkpoints.
    """

    def __init__(
        self, index: int, communicator: Communicator, parameters: list[torch.Tensor], state: dict[str, object]
    ) -> None:
        self.index = index
        self.count = communicator.size
        self.parameters = parameters
        self.state = state
        self._communicator = communicator

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each (floating or complex) by its mean over all replicas, which get the same bits."""
        average_tensors(self._communicator, tensors, END_OF_ROUND)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Replace each by that of replica ``source``."""
        broadcast_tensors(self._communicator, tensors, source, END_OF_ROUND)


class LocalUpdate(UpdatePolicy):
    """Each replica steps variables, and keeps optimizer state and buffers, of its own; a *round* is the steps between
    two moments at which replicas are brought together. Base class of local SGD, DiLoCo and the like::

        class LocalSGD(ts.policy.LocalUpdate):
            def ends_round(self, steps):
                return steps == 8

            def end_round(self, replica):
                replica.average(replica.parameters)

    One object serves all replicas of a process: what differs by replica goes into `Replica.state`.
    """

    def ends_round(self, steps: int) -> bool:
        """Whether the round ends with the run that has just been made. Called after each run of `Strategy.run` in which
        an optimizer has stepped variables; ``steps``: such runs since the last round. Has to be the same on all
        replicas."""
        raise NotImplementedError

    def end_round(self, replica: Replica) -> None:
        """Bring ``replica`` together with the others, in place. Called on every replica, within its turn. Afterwards
        buffers, modes and hyperparameters become alike by themselves, as at the end of a run of other strategies, and
        so do frozen parameters that the step changes, such as averages of weights: to their mean."""
        raise NotImplementedError


class LocalRounds:
    """The rounds of one ``replica``. ``helpers()``: optimizers, schedulers and scalers that there are."""

    def __init__(self, policy: LocalUpdate, replica: int, helpers: Callable[[], Iterable[object]]) -> None:
        self._policy = policy
        self._replica = replica
        self._helpers = helpers
        self._scales: list[object] = []
        self._before = 0
        self._variables: set[int] = set()
        self._has_stepped = False
        self._frozen: dict[int, Trace] | None = None  # by id; as they were when the round began
        self._versions: list[int] | None = []  # None: an optimizer has stepped at some time
        self._edits = 0  # runs that have changed what is trained before that
        self.steps = 0
        """Runs with a step since the last round."""
        self.state: dict[str, Any] = {}
        """See `Replica`."""

    def begin_run(self) -> None:
        self._has_stepped, self._before = False, self.steps

    def look_at(self, roster: Roster) -> None:
        """The replica's code is about to begin."""
        self._scales = self._read_scalers()
        self._variables = set(roster.layout.index)
        if self._versions is not None:
            self._versions = _versions_of(roster)
        if self._frozen is None:
            self._frozen = {id(one): trace_of(one) for one in roster.tensors if not one.requires_grad}

    def note_step(self, optimizer: Optimizer) -> None:
        """An inner loop's, over copies, or over what this replica alone has, does not count."""
        if not self._has_stepped:
            self._has_stepped = any(id(tensor) in self._variables for tensor in stepped_by(optimizer))

    def end_run(self, communicator: Communicator, roster: Roster) -> bool:
        """Whether a round has ended with this run. All replicas call it."""
        if not self._has_stepped and self._scales == self._read_scalers():
            self._warn_of_edits(roster)
            return False
        self._versions = None
        self.steps += 1
        if not self._policy.ends_round(self.steps):
            return False
        self.end(communicator, roster)
        return True

    def _warn_of_edits(self, roster: Roster) -> None:
        """One run may be there to give first values."""
        if self._versions is None or self._versions == _versions_of(roster):
            return
        self._edits += 1
        if self._edits < 2:
            return
        self._versions = None
        if self._replica == 0:
            warnings.warn(
                "steps have changed parameters, and no optimizer has: a round of local steps ends after so many runs "
                "with a step of an optimizer, so that replicas are never brought together. Let an optimizer make the "
                "step (torch.optim.SGD), or call strategy.end_round() where a round is to end.",
                stacklevel=2,
            )

    def undo_run(self) -> None:
        """The run has failed, perhaps between two replicas' ends of it: it does not count, so that all count alike."""
        self.steps = self._before

    def _read_scalers(self) -> list[object]:
        """A scaler that finds an overflow, on this replica alone, makes no step: its update tells that one was due."""
        return [helper.state_dict() for helper in self._helpers() if isinstance(helper, torch.amp.GradScaler)]

    def end(self, communicator: Communicator, roster: Roster) -> None:
        """End the round now. All replicas call it."""
        frozen = [place for place, one in enumerate(roster.tensors) if not one.requires_grad]
        touched = self._touched(roster)
        rows = agree(communicator, END_OF_ROUND, (roster.digest, code(str(frozen)), float(len(touched))))
        if any(row[0] != rows[0][0] for row in rows):
            roster = roster.in_common(communicator, END_OF_ROUND)
        trained, others = [one for one in roster.tensors if one.requires_grad], list[torch.Tensor]()
        if touched or not all_equal(rows):
            trained, others = self._apart(communicator, roster, touched)
        replica = Replica(self._replica, communicator, trained, self.state)
        self._policy.end_round(replica)
        numbers = [one for one in others if one.is_floating_point() or one.is_complex()]
        replica.average(numbers)
        replica.broadcast([one for one in others if not (one.is_floating_point() or one.is_complex())])
        self.steps, self._frozen, self._versions = 0, None, None

    def _touched(self, roster: Roster) -> set[int]:
        """The ``id`` of those that are frozen now, and have changed since the round began."""
        known = self._frozen or {}
        return {id(one) for one in roster.tensors if not one.requires_grad and known.get(id(one)) != trace_of(one)}

    def _apart(
        self, communicator: Communicator, roster: Roster, touched: set[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is trained, and other variables that replicas have come to differ in, such as averages of weights. What
        is frozen only at the moment, as a GAN's other network, is trained."""
        optimizers = [one for one in self._helpers() if isinstance(one, Optimizer)]
        stepped = {id(key) for one in optimizers for key in getattr(one, "state", ())}
        own: dict[int, tuple[bool, object]] = {
            place: (id(one) in stepped or one.grad is not None, fingerprint([one]))
            for place, one in enumerate(roster.tensors)
            if id(one) in touched
        }
        own.update((place, (True, None)) for place, one in enumerate(roster.tensors) if one.requires_grad)
        everyone = communicator.all_gather_object(own, END_OF_ROUND)
        trained, others = list[torch.Tensor](), list[torch.Tensor]()
        for place, tensor in enumerate(roster.tensors):
            each = [told.get(place, (False, None)) for told in everyone]
            if (True, None) in each or any(one != each[0] for one in each):
                (trained if any(is_trained for is_trained, _ in each) else others).append(tensor)
        return trained, others

    def resume(self, steps: int, state: Mapping[str, Any]) -> None:
        """Go on within a round that a checkpoint was made in: any frozen variable may have changed before."""
        self.steps, self.state, self._frozen = steps, dict(state), {}


def _versions_of(roster: Roster) -> list[int]:
    return [version_of(one) for one in roster.tensors if one.requires_grad]


def require_rows_for_all(active: Iterable[int], count: int) -> None:
    """A replica without rows makes no step, and could not take part when the round ends within the others' run."""
    idle = sorted(set(range(count)) - set(active))
    if idle and len(idle) < count:
        raise InvalidArgumentError(
            f"the batch has no rows for replica {', '.join(map(str, idle))} of {count}, and with local steps each one "
            "makes its own. Let every batch have a row for each (DataLoader(…, drop_last=True) leaves out the "
            "short last one), or use a strategy that combines gradients, such as MirroredStrategy."
        )


def refuse_merge_call() -> UnsupportedError:
    return UnsupportedError(
        "merge_call runs code once for all replicas, and with local steps each has variables of its own. Use "
        "all_reduce or all_gather in the step, or what LocalUpdate.end_round does."
    )


def refuse_check() -> UnsupportedError:
    return UnsupportedError(
        "check_replicas has nothing to compare: with local steps replicas have different variables by design, until a "
        "round ends. Leave it, and TORCHSTRAT_CHECK, to strategies that combine gradients."
    )


State = dict[Any, Any]
"""An optimizer's, by the tensor."""


class OwnValues(NamedTuple):
    """Of one replica, by names that are equal on all."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizers: list[State]


class ReplicaRounds:
    """The states of the replicas of this process, as `ReplicaEngine.replica_states`.

    ``rounds``: by replica, of the ``count`` that there are in all. ``read``: what one of them has; ``write``: give each
    what it is to have.
    """

    def __init__(
        self,
        streams: ReplicaStreams,
        rounds: Mapping[int, LocalRounds],
        count: int,
        optimizers: Callable[[], list[Optimizer]],
        read: Callable[[int], OwnValues],
        write: Callable[[dict[int, OwnValues]], None],
    ) -> None:
        self._streams = streams
        self._rounds = rounds
        self._count = count
        self._optimizers = optimizers
        self._read = read
        self._write = write

    def state_dict(self) -> dict[str, Any]:
        """As `ReplicaStreams`' with ``{"replica_0": {"round": {"steps": 3, "parameters": {...}, ...}}}``."""
        found = self._streams.state_dict()
        for replica, rounds in self._rounds.items():
            own = self._read(replica)
            found.setdefault(f"replica_{replica}", {})[ROUND] = {
                "steps": rounds.steps,
                "state": _copied(rounds.state),
                "parameters": _copied(own.parameters),
                "buffers": _copied(own.buffers),
                "optimizers": {
                    str(number): _by_place(optimizer, state)
                    for number, (optimizer, state) in enumerate(zip(self._optimizers(), own.optimizers, strict=True))
                },
            }
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; where there were more or fewer replicas, from the mean of their parameters, with a new
        round and the first one's optimizer state."""
        self._streams.load_state_dict(state)
        stored = _rounds_in(state)
        is_same = len(stored) == self._count
        mean = {} if is_same else mean_of(state)
        own = {}
        for replica, rounds in self._rounds.items():
            kept: Mapping[str, Any] = stored[replica] if is_same else {"parameters": mean}
            rounds.resume(kept.get("steps", 0), kept.get("state", {}))
            optimizers = kept.get("optimizers", {})
            states = [_by_tensor(one, optimizers.get(str(n), {})) for n, one in enumerate(self._optimizers())]
            own[replica] = OwnValues(kept.get("parameters", {}), kept.get("buffers", {}), states if is_same else [])
        self._write(own)


def _rounds_in(state: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {int(name.removeprefix("replica_")): one[ROUND] for name, one in state.items() if ROUND in one}


def mean_of(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The mean of the parameters of all replicas that stepped their own, by name; empty if ``state`` is of others. The
    first one's where they are no floating numbers."""
    stored = _rounds_in(state)
    each = [stored[replica].get("parameters", {}) for replica in sorted(stored)]
    means = {}
    for name, first in each[0].items() if each else ():
        values = [one[name] for one in each if name in one]
        means[name] = torch.stack(values).mean(dim=0) if first.is_floating_point() or first.is_complex() else first
    return means


def put_values(registry: VariableRegistry, roster: Roster, own: OwnValues) -> None:
    """In the user's objects: parameters and buffers that still have these shapes, and the state of optimizers."""
    slots, parameters = registry.named_buffer_slots(), dict(roster.items())
    pairs = [(parameters.get(name), value) for name, value in own.parameters.items()]
    pairs += [(slots[name].tensor, value) for name, value in own.buffers.items() if name in slots]
    with torch.no_grad():
        for tensor, value in pairs:
            if tensor is not None and tensor.shape == value.shape:
                tensor.copy_(value)
    for optimizer, state in zip(registry.optimizers(), own.optimizers, strict=False):
        optimizer.state.clear()
        optimizer.state.update(state)


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value


def _by_place(optimizer: Optimizer, state: State) -> dict[str, object]:
    """Names of a checkpoint's are texts: a tensor's is its place in the optimizer."""
    tensors = stepped_by(optimizer)
    return {str(place): _copied(state[tensor]) for place, tensor in enumerate(tensors) if state.get(tensor)}


def _by_tensor(optimizer: Optimizer, kept: Mapping[str, Any]) -> State:
    state: State = collections.defaultdict(dict)
    for place, tensor in enumerate(stepped_by(optimizer)):
        for name, value in kept.get(str(place), {}).items():
            is_of_tensor = isinstance(value, torch.Tensor) and value.dim()
            state[tensor][name] = value.to(tensor.device) if is_of_tensor else value
    return state
