"""Buffers with one replica per process: brought together when a run ends, where a step has changed them differently."""

from __future__ import annotations

import torch

from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas.agreement import agree, fingerprint
from torchstrat.replicas.transfer import broadcast_tensors
from torchstrat.variables import VariableRegistry

CALL = "the end of a run (merging buffers)"


class ProcessBuffers:
    """The buffers of modules in training mode, as they are when a run starts.

    Afterwards floating ones that differ between ranks are averaged and integral ones are the first rank's. Buffers on
    which all agree are left alone: averaging equal numbers would change them by rounding.
    """

    def __init__(self, registry: VariableRegistry) -> None:
        self._slots = [slot for slot in registry.buffer_slots() if slot.module.training and slot.tensor is not None]

    def merge(self, communicator: Communicator) -> None:
        tensors = [slot.tensor for slot in self._slots if slot.tensor is not None]
        if not tensors:
            return
        agree(communicator, CALL, (float(len(tensors)),))
        own = torch.tensor([fingerprint([tensor]) for tensor in tensors], dtype=torch.float64)
        prints = communicator.all_gather(own.view(torch.int64), CALL)  # compared bit by bit: nan equals itself
        same = torch.stack([one == prints[0] for one in prints]).all(dim=0).all(dim=1)
        differing = [tensor for tensor, equal in zip(tensors, same.tolist(), strict=True) if not equal]
        floating = [tensor for tensor in differing if tensor.is_floating_point() or tensor.is_complex()]
        with torch.no_grad():
            for tensor in floating:
                total = tensor.detach().clone().contiguous()
                communicator.all_reduce(total, CALL).wait()
                tensor.copy_(total / communicator.size)
        rest = [tensor.data for tensor in differing if not (tensor.is_floating_point() or tensor.is_complex())]
        broadcast_tensors(communicator, rest, 0, CALL)
