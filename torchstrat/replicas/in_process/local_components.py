"""The components of replicas that step variables of their own: what each has it finds again in the next run.

Outside of runs the user's objects are the first replica's. What the program does to them it does to everyone's, which
become copies of these.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchstrat.core._torch_private import version_of
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.in_process.component_attributes import ComponentHelpers
from torchstrat.replicas.in_process.component_buffers import copy_to
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.state import settle
from torchstrat.replicas.update_policies import OwnValues, put_values


class LocalComponents(Components):
    """All replicas take part in every run, and the first one leads."""

    _undoes = False

    def __init__(self, registry: VariableRegistry, devices: tuple[torch.device, ...]) -> None:
        super().__init__(registry, devices, None, ComponentHelpers(apart=True))

    def _level(self) -> None:
        self.refresh(self._touched())

    def _touched(self) -> list[torch.Tensor]:
        """What the program has changed since the last run. Of all else replicas find what they have left."""
        touched = []
        for slot in self._slots.values():
            if slot.is_untouched(slot.tensor) and all(replica in slot.data for replica in self._replicas):
                slot.data[self._home], slot.versions[self._home] = slot.tensor.data, version_of(slot.tensor)
                slot.agreed = slot.unedited = None
            else:
                touched.append(slot.tensor)
        return touched

    def end_apart(self, *, is_end: bool) -> None:
        """`end` where replicas stay apart; but buffers become alike at the end of a round (``is_end``)."""
        self.park()
        if is_end:
            self.buffers.merge([1.0] * len(self._replicas), ())
        else:
            self.buffers.keep_apart()
        settle(self._made, self._replicas, self._home)
        self._leave()
        for slot in self._slots.values():
            slot.keep_apart(slot.tensor)
        self._let_go(failed=False, is_round=is_end)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def own_values(self, replica: int, roster: Roster) -> OwnValues:
        """Between runs, where replicas stay apart: what that one will find in the next."""
        parameters = {}
        for name, tensor in roster.items():
            slot = self._slots.get(id(tensor))
            is_own = slot is not None and replica in slot.data and replica != self._home and slot.is_untouched(tensor)
            parameters[name] = slot.data[replica] if slot is not None and is_own else tensor
        states = [dict(one.state) for one in self._registry.optimizers()]
        if replica != self._home:
            states = [self.helpers.state_of(one, replica, self._home) for one in self._registry.optimizers()]
        return OwnValues(parameters, self.buffers.own_of(replica, self._registry.named_buffer_slots()), states)

    def put_own_values(self, own: Mapping[int, OwnValues], roster: Roster) -> None:
        """Every replica finds these in the next run."""
        put_values(self._registry, roster, own[0])
        for name, tensor in roster.items():
            slot = self._slots.get(id(tensor)) or self._new_slot(tensor)
            for replica, values in own.items():
                value = values.parameters.get(name, tensor)
                value = value if value.shape == tensor.shape else tensor
                slot.data[replica] = copy_to(value.detach(), self._devices[replica])
                slot.versions[replica] = version_of(tensor)
            slot.keep_apart(tensor)
        self.buffers.put_own(own, self._registry.named_buffer_slots())
        for number, optimizer in enumerate(self._registry.optimizers()):
            states = {r: values.optimizers[number] for r, values in own.items() if r and values.optimizers}
            self.helpers.put_states(optimizer, states)
