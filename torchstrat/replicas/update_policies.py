"""Update policies: how the steps that all replicas make become updates of the variables.

Public as `torchstrat.policy`. The first three say where variables and optimizer state live, and the engine does the
rest; a `LocalUpdate` leaves each replica its own and says when, and how, they are brought together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchstrat.core.communicator import Communicator
from torchstrat.replicas.transfer import average_tensors, broadcast_tensors

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
