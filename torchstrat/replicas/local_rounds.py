"""Rounds of local steps: what an engine does for a `LocalUpdate`, whose replicas step variables of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.optimizers import stepped_by
from torchstrat.distributed.collectives.agreement import agree, all_equal
from torchstrat.distributed.collectives.communicator import Communicator
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.update_policies import END_OF_ROUND, LocalUpdate, Replica


class LocalRounds:
    """The rounds of one ``replica``. ``helpers()``: optimizers, schedulers and scalers that there are."""

    def __init__(self, policy: LocalUpdate, replica: int, helpers: Callable[[], Iterable[Any]]) -> None:
        self._policy = policy
        self._replica = replica
        self._helpers = helpers
        self._scales: list[Any] = []
        self._before = 0
        self._variables: set[int] = set()
        self._has_stepped = False
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

    def note_step(self, optimizer: Optimizer) -> None:
        """An inner loop's, over copies, or over what this replica alone has, does not count."""
        if not self._has_stepped:
            self._has_stepped = any(id(tensor) in self._variables for tensor in stepped_by(optimizer))

    def end_run(self, communicator: Communicator, roster: Roster) -> bool:
        """Whether a round has ended with this run. All replicas call it."""
        if not self._has_stepped and self._scales == self._read_scalers():
            return False
        self.steps += 1
        if not self._policy.ends_round(self.steps):
            return False
        self.end(communicator, roster)
        return True

    def undo_run(self) -> None:
        """The run has failed, perhaps between two replicas' ends of it: it does not count, so that all count alike."""
        self.steps = self._before

    def _read_scalers(self) -> list[Any]:
        """A scaler that finds an overflow, on this replica alone, makes no step: its update tells that one was due."""
        return [helper.state_dict() for helper in self._helpers() if isinstance(helper, torch.amp.GradScaler)]

    def end(self, communicator: Communicator, roster: Roster) -> None:
        """End the round now. All replicas call it."""
        rows = agree(communicator, END_OF_ROUND, (roster.digest,))
        if not all_equal(rows):
            roster = roster.in_common(communicator, END_OF_ROUND)
        trained = [tensor for tensor in roster.tensors if tensor.requires_grad]
        self._policy.end_round(Replica(self._replica, communicator, trained, self.state))
        self.steps = 0


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
