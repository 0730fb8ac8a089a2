"""Memory that variables or their gradients share with a tensor that a step reaches: one flat vector and its views.

What a step does to the vector it does to them. So a replica that works on copies needs a copy of the whole memory, of
which its variables, its gradients and the vector are the views that the leader's are of the original.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from torchstrat._torch_private import DisableTorchFunctionSubclass


class CommonStorages:
    """Which storages those are, and the replicas' copies of them, kept from run to run."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}  # by the address of the original

    def __bool__(self) -> bool:
        return bool(self._storages)

    def begin(
        self, vectors: Sequence[torch.Tensor], data: Iterable[torch.Tensor], devices: dict[int, torch.device]
    ) -> None:
        """A run begins. ``vectors``: tensors that the step reaches, which share memory with variables or gradients;
        ``data``: those of variables. ``devices``: of the replicas that have copies."""
        if not vectors:
            self._storages = {}
            return
        addresses = {address_of(tensor) for tensor in data if has_address(tensor)}
        known, self._storages = self._storages, {}
        for vector in vectors:
            address = address_of(vector)
            storage = self._storages.get(address) or known.get(address)
            if storage is None or not storage.is_of(vector):
                storage = _Storage(vector)
            self._storages[address] = storage
            storage.add(vector)
            for replica, device in devices.items():
                storage.give(replica, device, refresh=address in addresses)

    def of(self, tensor: torch.Tensor) -> _Storage | None:
        return self._storages.get(address_of(tensor)) if self._storages and has_address(tensor) else None

    def park(self, replica: int) -> None:
        for storage in self._storages.values():
            storage.park(replica)

    def install(self, replica: int) -> None:
        for storage in self._storages.values():
            storage.install(replica)


class _Storage:
    """The memory under one flat vector, or several."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vectors: dict[int, tuple[weakref.ref[torch.Tensor], dict[int, torch.Tensor]]] = {}
        self._all = torch.empty(0, dtype=vector.dtype, device=vector.device).set_(vector.untyped_storage())
        self._copies: dict[int, torch.Tensor] = {}

    def is_of(self, vector: torch.Tensor) -> bool:
        return self._all.untyped_storage().nbytes() == vector.untyped_storage().nbytes()

    def add(self, vector: torch.Tensor) -> None:
        known = self._vectors.get(id(vector))
        if known is None or known[0]() is not vector:
            self._vectors[id(vector)] = weakref.ref(vector), {}

    def give(self, replica: int, device: torch.device, *, refresh: bool) -> None:
        """Its copy; ``refresh``: made equal to the original again, where that is not another replica's own business."""
        if replica not in self._copies:
            self._copies[replica] = self._all.clone().to(device)
        elif refresh:
            self._copies[replica].copy_(self._all)
        for reference, data in self._vectors.values():
            vector = reference()
            if vector is not None:
                data[replica] = self.view_like(vector, replica)

    def view_like(self, tensor: torch.Tensor, replica: int) -> torch.Tensor:
        """What ``tensor``, of the original, is in a replica's copy."""
        copy = self._copies[replica]
        if tensor.dtype == copy.dtype:
            return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        return view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def holds(self, tensor: torch.Tensor, replica: int) -> bool:
        return address_of(tensor) == address_of(self._copies[replica])

    def park(self, replica: int) -> None:
        for reference, data in self._vectors.values():
            vector = reference()
            if vector is not None:
                data[replica] = vector.data

    def install(self, replica: int) -> None:
        for reference, data in self._vectors.values():
            vector = reference()
            if vector is not None and replica in data:
                vector.data = data[replica]


def has_address(tensor: torch.Tensor) -> bool:
    """Whether it is plain memory, which can be shared."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.layout == torch.strided and (tensor.is_cpu or tensor.is_cuda)
    with DisableTorchFunctionSubclass():  # a variable that is cut over logical devices says where its pieces are
        return tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda") and not is_lazy(tensor)


def address_of(tensor: torch.Tensor) -> int:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.untyped_storage().data_ptr()
    with DisableTorchFunctionSubclass():  # one of parameter servers would bring its values, and keep them in mind
        return tensor.untyped_storage().data_ptr()
