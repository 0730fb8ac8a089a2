"""What one replica's code makes in a run and others find (``if self.average is None: self.average = Average(model)``).

Between processes each replica makes its own. In one process the others find the first one's, as it was when they came
to it, and have it to themselves from there on. Nobody can tell whether what its maker had changed by then was to give
it its first values, or something that the others do once more. So all that change it have to do so equally often from
there on, as they do where it is made before the backward pass and changed after the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.replicas.state import TensorSlot, are_equal, sample


def refuse_changes_of(made: list[TensorSlot], replicas: list[int], describe: Callable[[torch.Tensor], str]) -> None:
    """Raises where a replica has changed a variable that another has made, otherwise than its maker has since. For
    parked slots."""
    for slot in made:
        for replica in replicas:
            is_edited, maker = slot.is_edited(replica), slot.made_by
            if maker in (None, replica) or not (is_edited or sample(slot.data[replica]) != slot.first):
                continue
            is_as_often = is_edited and slot.versions[replica] == slot.versions[maker]
            if not is_as_often and not are_equal(slot.data[replica], slot.data[maker]):
                raise made_by_another(describe(slot.tensor), maker, replica)


def settle(made: list[TensorSlot], replicas: list[int], home: int) -> None:
    """The run ends: what no other replica has used is as its maker left it; all else is as the first one left it.
    ``home``: the key of the central components."""
    for slot in made:
        maker = slot.made_by
        if maker is not None and not slot.is_shared and maker != replicas[0]:
            others = [replica for replica in replicas if replica != maker]
            if not any(slot.is_edited(one) or slot.grads.get(one) is not None for one in others):
                slot.data[home], slot.grads[home] = slot.data[maker], slot.grads.get(maker)


def made_by_another(name: str, maker: int | None, replica: int) -> ReplicaDivergenceError:
    """The error."""
    return ReplicaDivergenceError(
        f"replica {maker} has made {name} in this run, and replica {replica}, which found it there, has changed it "
        f"otherwise than replica {maker} has since. Replicas of one process share what one of them makes, so what a "
        "step on one device does once would be done to it several times. Make it within `with strategy.scope():`, "
        "before the first run that changes it."
    )
