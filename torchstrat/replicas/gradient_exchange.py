"""Gradients of replicas in one process: combined when a backward pass ends, or caught up at the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchstrat import gradients as arithmetic
from torchstrat._torch_private import queue_backward_callback
from torchstrat.gradients import CombinedGradient, is_left_over
from torchstrat.reduction import ReduceOp
from torchstrat.replicas.components import Components, TensorSlot

Meet = Callable[[str, Any, Callable[[dict[int, Any]], dict[int, Any]]], Any]

BACKWARD = "backward() (gradients are combined at its end)"
WEIGHTS = "backward() under no_sync (weights are exchanged at its start)"


class GradientExchange:
    """Bookkeeping of one run: which gradients each replica touched, and which are the same on all replicas.

    ``weights()`` gives the weight of each replica of the run. Every decision is taken while all replicas stand still.
    """

    def __init__(self, components: Components, op: ReduceOp) -> None:
        self._components = components
        self._op = op
        self._unsynced: set[int] = set()  # accumulated under no_sync and not yet combined
        self._synced: dict[int, dict[int, CombinedGradient]] = {}  # tensor id -> replica -> what it was given
        self._bases: dict[tuple[int, int], torch.Tensor | None] = {}
        self.no_sync = False
        self._begin([])

    # -- a run ------------------------------------------------------------------------------------------------------

    def _begin(self, replicas: list[int]) -> None:
        self._replicas = replicas
        self._touched: dict[int, dict[int, None]] = {replica: {} for replica in replicas}
        self._queued: set[int] = set()
        self._factors: list[float] | None = None

    def begin(
        self,
        replicas: list[int],
        idle: list[int],
        meet: Meet,
        holder: Callable[[], int | None],
        weights: Callable[[], list[float]],
    ) -> None:
        self._begin(replicas)
        self._idle = idle
        self._meet, self._holder, self._weights = meet, holder, weights
        self._scaled = self._op is ReduceOp.MEAN and (self.no_sync or bool(self._unsynced))
        if self._scaled and idle:
            self._move_to_leader(idle)
        alive = {id(slot.tensor) for slot in self._components.slots()}
        self._unsynced &= alive
        self._synced = {key: synced for key, synced in self._synced.items() if key in alive}

    @property
    def _everyone(self) -> int:
        return len(self._replicas) + len(self._idle)

    def _move_to_leader(self, idle: list[int]) -> None:
        """What replicas that sit this run out have accumulated waits with the leader: their sum is all that counts, and
        if the step now zeroes gradients it must zero those too."""
        self._components.park()
        leader, slots = self._replicas[0], list(self._components.slots())
        for slot in slots:
            for replica in idle:
                own, kept = slot.grads.get(replica), slot.grads.get(leader)
                if own is not None:
                    moved = own.to(self._components.device_of(leader))
                    slot.grads[leader] = moved if kept is None else kept + moved
                slot.grads[replica] = None
        self._components.reinstall_gradients(slots)

    @property
    def needs_early_hooks(self) -> bool:
        """Sums need to know what was in ``.grad`` before; accumulation without synchronisation scales each share."""
        return self._op is ReduceOp.SUM or self.no_sync or bool(self._unsynced)

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def before_accumulation(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        replica = self._holder()
        if replica is None:
            return None
        if self._op is ReduceOp.SUM:
            key = (id(tensor), replica)
            if tensor.grad is None:
                self._bases[key] = None
            elif key not in self._bases or not tensor.grad.any():  # zeroed in place since: nothing earlier is left
                self._bases[key] = tensor.grad.detach().clone()
            return None
        if not self._scaled:
            return None
        if self._factors is None:
            self._meet(WEIGHTS, None, self._fix_factors)
        assert self._factors is not None
        factor = self._factors[self._replicas.index(replica)] * self._everyone
        return None if factor == 1.0 else gradient * factor

    def _fix_factors(self, payloads: dict[int, Any]) -> dict[int, Any]:
        self._factors = arithmetic.shares(self._op, self._weights())
        return dict.fromkeys(payloads)

    def after_accumulation(self, tensor: torch.Tensor) -> None:
        replica = self._holder()
        if replica is None or self._components.slot_of(tensor) is None:
            return
        self._synced.get(id(tensor), {}).pop(replica, None)
        if self.no_sync:
            self._unsynced.add(id(tensor))
            return
        self._touched[replica][id(tensor)] = None
        if replica not in self._queued:
            self._queued.add(replica)
            queue_backward_callback(self._flush)

    def _flush(self) -> None:
        replica = self._holder()
        assert replica is not None
        self._queued.discard(replica)
        self._meet(BACKWARD, None, self._combine_touched)

    # -- while all replicas stand still -----------------------------------------------------------------------------

    def _combine_touched(self, payloads: dict[int, Any]) -> dict[int, Any]:
        touched: dict[int, None] = {}
        for replica in self._replicas:
            touched.update(self._touched[replica])
            self._touched[replica] = {}
        touched.update(dict.fromkeys(self._unsynced))
        self.combine(slot for slot in self._components.slots() if id(slot.tensor) in touched)
        return dict.fromkeys(payloads)

    def catch_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Combine the gradients of ``tensors`` that no backward pass has: assigned by hand, or left by ``no_sync``."""
        self._components.park()
        missing = []
        for tensor in tensors:
            slot = self._components.slot_of(tensor)
            if slot is None:
                continue
            synced = self._synced.get(id(tensor), {})
            if any(is_left_over(slot.grads.get(r), synced.get(r), self._op) for r in self._replicas):
                missing.append(slot)
        self.combine(missing)

    def after_step(self, tensors: Iterable[torch.Tensor]) -> None:
        """An optimizer has used the gradients of ``tensors``; what is assigned to them from now on is new."""
        for tensor in tensors:
            for combined in self._synced.get(id(tensor), {}).values():
                combined.use_up()

    def combine(self, slots: Iterable[TensorSlot]) -> None:
        """Replace the replicas' gradients in ``slots`` by the combined one, each replica's a tensor of its own."""
        self._components.park()
        if self._scaled:
            factors = [1.0 / self._everyone] * len(self._replicas)
        else:
            factors = arithmetic.shares(self._op, self._weights())
        plain: dict[torch.device, list[TensorSlot]] = {}
        done = []
        for slot in slots:
            grads = [slot.grads.get(replica) for replica in self._replicas]
            if all(grad is None for grad in grads):
                continue
            done.append(slot)
            if self._combines_in_place(slot, grads):
                assert grads[0] is not None
                plain.setdefault(grads[0].device, []).append(slot)
            else:
                self._combine_one(slot, grads, factors)
        for group in plain.values():
            arithmetic.combine_in_place([[slot.grads[r] for slot in group] for r in self._replicas], factors)  # type: ignore[misc]
        for slot in done:
            self._finish(slot)
        self._components.reinstall_gradients(done)

    def _combines_in_place(self, slot: TensorSlot, grads: list[torch.Tensor | None]) -> bool:
        first = grads[0]
        return (
            all(arithmetic.is_plain(grad) and grad.device == first.device for grad in grads)  # type: ignore[union-attr]
            and not any(self._bases.get((id(slot.tensor), replica)) is not None for replica in self._replicas)
        )

    def _combine_one(self, slot: TensorSlot, grads: list[torch.Tensor | None], factors: list[float]) -> None:
        device = next(grad for grad in grads if grad is not None).device
        total = arithmetic.combine_out_of_place(grads, factors, device)
        assert total is not None
        bases = self._bases_of(slot, grads)
        for base in bases:
            # A sum adds what this pass contributed; what was combined earlier is in every replica's gradient.
            if base is not None:
                total = total - base.to(device)
        earlier = next((base for base in bases if base is not None), None)
        if earlier is not None:
            total = total + earlier.to(device)
        for replica in self._replicas:
            slot.grads[replica] = total.clone().to(self._components.device_of(replica))

    def _bases_of(self, slot: TensorSlot, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What each replica's gradient held before this pass. One that this pass did not touch holds nothing else."""
        keys = [(id(slot.tensor), replica) for replica in self._replicas]
        if not any(key in self._bases for key in keys):
            return [None] * len(keys)
        return [self._bases.get(key, grad) for key, grad in zip(keys, grads, strict=True)]

    def _finish(self, slot: TensorSlot) -> None:
        key = id(slot.tensor)
        self._unsynced.discard(key)
        for replica in self._idle:
            combined = slot.grads[self._replicas[0]]
            slot.grads[replica] = None if combined is None else combined.clone().to(self._components.device_of(replica))
        synced = {}
        for replica in (*self._replicas, *self._idle):
            self._bases.pop((key, replica), None)
            grad = slot.grads[replica]
            if grad is not None:
                synced[replica] = CombinedGradient(grad)
        self._synced[key] = synced
