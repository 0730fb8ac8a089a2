"""Gradients of replicas in one process: combined when a backward pass ends, or caught up at the optimizer's step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchstrat import gradients as arithmetic
from torchstrat._torch_private import (
    DisableTorchFunction,
    current_backward_pass,
    foreach_copy_,
    queue_backward_callback,
    uncompiled,
)
from torchstrat.gradients import CombinedGradient, is_left_over
from torchstrat.reduction import ReduceOp
from torchstrat.replicas.components import Components
from torchstrat.replicas.gradients_with_graphs import combine_with_graphs, has_graph
from torchstrat.replicas.hooked_gradients import HookTurns
from torchstrat.replicas.tensor_slot import TensorSlot
from torchstrat.replicas.thread_state import OwnSettings

Meet = Callable[[str, Any, Callable[[dict[int, Any]], dict[int, Any]]], Any]

BACKWARD = "backward() (gradients are combined at its end)"
CLIPPING = "clipping (combining gradients that no backward pass has combined)"
WEIGHTS = "backward() under no_sync (weights are exchanged at its start)"


class GradientExchange:
    """Bookkeeping of one run: which gradients each replica touched, and which are the same on all replicas.

    ``weights()`` gives the weight of each replica of the run. Every decision is taken while all replicas stand still.
    """

    def __init__(self, components: Components, op: ReduceOp) -> None:
        self._components = components
        self._op = op
        self._no_sync: dict[int | None, int] = {}  # replica, or None for outside of runs → open `no_sync` blocks
        self._holder: Callable[[], int | None] = lambda: None
        self._turns = HookTurns[TensorSlot]()
        self._reset([])

    # -- a run ------------------------------------------------------------------------------------------------------

    def _reset(self, replicas: list[int]) -> None:
        self._replicas = replicas
        self._turns.end()
        self._idle: list[int] = []
        self._touched: dict[int, dict[int, TensorSlot]] = {replica: {} for replica in replicas}
        self._queued: set[tuple[int, int]] = set()  # replica and backward pass, at whose end it will meet the others
        self._factors: list[float] | None = None
        self._combines = False  # at the end of the pass
        self._came_combined: set[tuple[int, int]] = set()  # replica and tensor, whose incoming gradient is combined

    def begin(
        self,
        replicas: list[int],
        idle: list[int],
        meet: Meet,
        holder: Callable[[], int | None],
        weights: Callable[[], list[float]],
    ) -> None:
        self._reset(replicas)
        self._idle = idle
        self._meet, self._holder, self._weights = meet, holder, weights
        self._scaled = self._op is ReduceOp.MEAN and (self.is_no_sync or self._has_unsynced())
        if idle:
            self._move_to_leader()

    def end(self) -> None:
        """A run has ended. Let go of everything that belongs to it alone."""
        if self._op is ReduceOp.MEAN and not self._scaled:
            self._scale_unsynced()
        if self._idle:
            self._give_to_idle()
        self._reset([])
        self._holder = lambda: None
        del self._meet, self._weights

    def set_no_sync(self, active: bool) -> None:
        """A `no_sync` block begins or ends, in a replica's code or outside of runs. Blocks nest."""
        place = self._holder()
        self._no_sync[place] = self._no_sync.get(place, 0) + (1 if active else -1)

    @property
    def is_no_sync(self) -> bool:
        return bool(self._no_sync.get(None) or self._no_sync.get(self._holder()))

    def _has_unsynced(self) -> bool:
        return any(slot.unsynced for slot in self._components.slots())

    @property
    def begins_with_early_hooks(self) -> bool:
        """`needs_early_hooks`, as of the beginning of this run."""
        return self._op is ReduceOp.SUM or self._scaled

    @property
    def needs_early_hooks(self) -> bool:
        """Sums need to know what was in ``.grad`` before; accumulation without synchronisation scales each share."""
        return self._op is ReduceOp.SUM or self.is_no_sync or self._has_unsynced()

    @property
    def _everyone(self) -> int:
        return len(self._replicas) + len(self._idle)

    # What is not combined yet is kept so that its sum over all replicas (of a mean: divided by their number) is what
    # counts, whoever has it.

    def _move_to_leader(self) -> None:
        """What replicas that sit this run out have accumulated waits with the leader: if the step now zeroes gradients
        it must zero those too."""
        components, leader = self._components, self._replicas[0]
        components.park()
        moved = []
        for slot in components.slots():
            if not slot.unsynced and not self._scaled:
                continue
            moved.append(slot)
            for replica in self._idle:
                own, kept = slot.grads.get(replica), slot.grads.get(leader)
                if self._op is ReduceOp.SUM:
                    base = slot.bases.pop(replica, own)  # without a base it has added nothing
                    slot.bases.setdefault(leader, None if kept is None else kept.clone())
                    own, slot.grads[replica] = _difference(own, base), base
                else:
                    slot.grads[replica] = None
                if own is not None:
                    own = own.to(components.device_of(leader))
                    slot.grads[leader] = own if kept is None else kept + own
                    slot.unsynced = True  # also if it was: the leader now has more than its part
        components.reinstall_gradients(moved)

    def _scale_unsynced(self) -> None:
        """Under `no_sync` in a replica's code: scale each share by its weight, as is done where the whole run is."""
        unsynced = [slot for slot in self._components.slots() if slot.unsynced]
        if not unsynced:
            return
        factors = arithmetic.shares(self._op, self._weights())
        self._components.park()
        for slot in unsynced:
            for replica, factor in zip(self._replicas, factors, strict=True):
                own = slot.grads.get(replica)
                if own is not None and factor * self._everyone != 1.0:
                    slot.grads[replica] = own * (factor * self._everyone)
            for replica in self._idle:
                slot.grads[replica] = None
        self._components.reinstall_gradients(unsynced)

    def _give_to_idle(self) -> None:
        """What is equal on all replicas that took part (combined, or zeroed) is so on the others too."""
        self._components.park()
        leader = self._replicas[0]
        for slot in self._components.slots():
            grad, combined = slot.grads.get(leader), slot.synced.get(leader)
            if slot.unsynced:
                continue
            for replica in self._idle:
                own = None if grad is None else grad.clone().to(self._components.device_of(replica))
                slot.grads[replica] = own
                if own is not None and grad is not None and combined is not None and combined.is_in(grad):
                    slot.synced[replica] = CombinedGradient(own)
                    slot.synced[replica].used = combined.used

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def _find(self, tensor: torch.Tensor) -> tuple[int | None, TensorSlot | None]:
        """The replica that runs now, and the tensor's slot."""
        replica = self._holder()
        if replica is None:
            return None, None
        slot = self._components.slot_of(tensor)
        if slot is None:
            with OwnSettings():
                slot = self._components.new_slot_of(tensor)
        return replica, slot

    def before_accumulation(
        self, tensor: torch.Tensor, gradient: torch.Tensor, is_watched: bool
    ) -> torch.Tensor | None:
        replica, slot = self._find(tensor)
        if replica is None or slot is None:
            return None
        if is_watched and not slot.is_copy:
            slot.note_use(replica)
            self._meet_at_end_of_pass(replica, combines=not self.is_no_sync)
            self._came_combined.add((replica, id(tensor)))
            if has_graph(gradient):
                return combine_with_graphs(self._exchange_with_graphs, [gradient], [None])[0]
            return self._meet_at(slot, gradient)
        if self._op is ReduceOp.SUM:
            if tensor.grad is None:
                slot.bases[replica] = None
            elif replica not in slot.bases or not tensor.grad.any():  # zeroed in place since: nothing earlier is left
                slot.bases[replica] = tensor.grad.detach().clone()
            return None
        if not self._scaled:
            return None
        if self._factors is None:
            self._meet(WEIGHTS, None, self._fix_factors)
        assert self._factors is not None
        factor = self._factors[self._replicas.index(replica)] * self._everyone
        if factor == 0.0:
            return torch.zeros_like(gradient)  # whatever it is, nan not excepted
        return None if factor == 1.0 else gradient * factor

    def _fix_factors(self, payloads: dict[int, Any]) -> dict[int, Any]:
        self._factors = arithmetic.shares(self._op, self._weights())
        return dict.fromkeys(payloads)

    def after_accumulation(self, tensor: torch.Tensor, is_watched: bool) -> None:
        replica, slot = self._find(tensor)
        if replica is None or slot is None or slot.is_copy:
            return
        if (replica, id(tensor)) in self._came_combined:
            self._came_combined.discard((replica, id(tensor)))
            assert tensor.grad is not None
            slot.synced[replica] = CombinedGradient(tensor.grad)
            return
        slot.synced.pop(replica, None)
        slot.note_use(replica)
        is_no_sync = self.is_no_sync
        if is_no_sync and not is_watched:
            slot.unsynced = True
            return
        self._touched[replica][id(tensor)] = slot
        self._meet_at_end_of_pass(replica, combines=not is_no_sync)
        if is_watched:
            self._combine_with_graphs(replica) if has_graph(tensor.grad) else self._meet_at(slot)

    def _meet_at_end_of_pass(self, replica: int, *, combines: bool) -> None:
        self._combines |= combines
        # A pass that fails never gets to its end, so what was queued in an earlier one does not count.
        key = (replica, current_backward_pass())
        if key not in self._queued:
            self._queued.add(key)
            queue_backward_callback(functools.partial(self._flush, key))

    @uncompiled
    def _flush(self, key: tuple[int, int]) -> None:
        self._queued.discard(key)
        replica = self._holder()
        if replica is not None:
            self._combine_with_graphs(replica)
            self._meet_at(None)

    def _meet_at(self, slot: TensorSlot | None, incoming: torch.Tensor | None = None) -> torch.Tensor | None:
        """Meet the others within a pass: where hooks are about to see the gradient in ``slot`` (or ``incoming``, which
        is yet to be added to it), or, without a slot, at the end. Returns ``incoming``, combined."""
        while True:
            combined_now, combined = self._meet(BACKWARD, (slot, incoming), self._combine_next)
            if combined_now is slot:
                return combined  # type: ignore[no-any-return]

    def _combine_with_graphs(self, replica: int) -> None:
        touched = self._touched[replica]
        slots = [slot for slot in touched.values() if (grad := slot.tensor.grad) is not None and grad.requires_grad]
        if not slots:
            return
        gradients: Any = [slot.tensor.grad for slot in slots]
        bases = [slot.bases.pop(replica, None) for slot in slots]
        with DisableTorchFunction():
            combined = combine_with_graphs(self._exchange_with_graphs, gradients, bases)
        for slot, gradient in zip(slots, combined, strict=True):
            del touched[id(slot.tensor)]
            slot.tensor.grad = gradient
            slot.synced[replica] = CombinedGradient(gradient)
            slot.unsynced = False

    def _exchange_with_graphs(self, call: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        def combine(payloads: dict[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
            with OwnSettings():
                columns = zip(*payloads.values(), strict=True)
                totals: list[Any] = [self._weighted_sum(column, self._shares()) for column in columns]
                return {r: [self._copy_for(r, total) for total in totals] for r in payloads}

        return self._meet(call, tensors, combine)  # type: ignore[no-any-return]

    # -- while all replicas stand still -----------------------------------------------------------------------------

    def _combine_next(self, payloads: dict[int, Any]) -> dict[int, Any]:
        """Where hooks wait for a gradient, combine that; at the end of the pass, all that it has touched."""
        places = {replica: slot for replica, (slot, _) in payloads.items() if slot is not None}
        chosen = self._turns.next(places, payloads, self._components.slots) if places else None
        if chosen is None:
            self._hand_over_missed()
            if self._combines:  # under `no_sync` only what hooks look at is
                self._combine_touched()
            self._combines = False
            return dict.fromkeys(payloads, (None, None))
        incoming = [gradient if slot is chosen else None for slot, gradient in payloads.values()]
        comes = any(gradient is not None for gradient in incoming)
        if chosen.unsynced or not comes:
            for touched in self._touched.values():
                touched.pop(id(chosen.tensor), None)
            self.combine([chosen])
        if not comes:
            return dict.fromkeys(payloads, (chosen, None))
        with OwnSettings():
            total = self._weighted_sum(incoming, arithmetic.shares(self._op, self._weights()))
            assert total is not None
            return {replica: (chosen, self._copy_for(replica, total)) for replica in payloads}

    def _hand_over_missed(self) -> None:
        for slot, source, missing in self._turns.end():
            grad = slot.grads.get(source)
            for replica in missing:
                slot.grads[replica] = None if grad is None else self._copy_for(replica, grad)
                slot.synced.pop(replica, None)
                if grad is not None:
                    slot.synced[replica] = CombinedGradient(slot.grads[replica])  # type: ignore[arg-type]
            self._components.reinstall_gradients([slot])

    def _combine_touched(self) -> None:
        touched: dict[int, TensorSlot] = {}
        for replica in self._replicas:
            touched.update(self._touched[replica])
            self._touched[replica] = {}
        self.combine(slot for slot in self._components.slots() if slot.unsynced or id(slot.tensor) in touched)

    def catch_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Combine the gradients of ``tensors`` that no backward pass has: assigned by hand, or left by ``no_sync``."""
        self._components.park()
        missing = []
        for tensor in tensors:
            slot = self._components.slot_of(tensor)
            if slot is None:
                continue
            slot.is_shared = True
            if any(is_left_over(slot.grads.get(r), slot.synced.get(r), self._op) for r in self._replicas):
                missing.append(slot)
        self.combine(missing)

    def before_clipping(self, gradients: list[torch.Tensor]) -> None:
        """On a replica: what no backward pass has combined is to be clipped as on one device."""
        replica = self._holder()
        places = {id(gradient): place for place, gradient in enumerate(gradients)}
        slots = [] if replica is None else [s for s in self._components.slots() if id(s.tensor.grad) in places]
        left_over = [s for s in slots if is_left_over(s.tensor.grad, s.synced.get(replica), self._op)]  # type: ignore[arg-type]
        if not left_over:
            return
        at = [(places[id(slot.tensor.grad)], slot.tensor) for slot in slots]

        def combine(payloads: dict[int, Any]) -> dict[int, Any]:
            with OwnSettings():
                self.catch_up([slot.tensor for slot in slots])
            return dict.fromkeys(payloads)

        self._meet(f"{CLIPPING} of {len(left_over)} parameters", None, combine)
        for place, tensor in at:
            if tensor.grad is not None:
                gradients[place] = tensor.grad

    def central(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        """While the central components are installed for code that runs once: what gradients there are, by ``id`` of
        their tensors, and their versions."""
        found = ((key, slot.tensor.grad) for key, slot in self._components.keyed_slots())
        return {key: (grad, 0 if grad is None else grad._version) for key, grad in found}

    def spread_central(self, before: dict[int, tuple[torch.Tensor | None, int]]) -> None:
        """After `Components.spread_central` and such code: gradients that it zeroed, removed or replaced are so for
        every replica."""
        for key, slot in self._components.keyed_slots():
            grad = slot.grads.get(self._components.home)
            earlier, version = before.get(key, (None, 0))
            if grad is earlier and (grad is None or grad._version == version):
                continue
            for replica in self._replicas:
                if replica != self._components.home:
                    slot.grads[replica] = None if grad is None else self._copy_for(replica, grad.detach())
            self._finish(slot)

    def after_step(self, tensors: Iterable[torch.Tensor]) -> None:
        """An optimizer has used the gradients of ``tensors``; what is assigned to them from now on is new."""
        for tensor in tensors:
            slot = self._components.slot_of(tensor)
            for combined in () if slot is None else slot.synced.values():
                combined.use_up()

    def combine(self, slots: Iterable[TensorSlot]) -> None:
        """Replace the replicas' gradients in ``slots`` by the combined one, each replica's a tensor of its own."""
        with OwnSettings():
            self._components.park()
            factors = self._shares()
            plain: dict[tuple[torch.device, bool], list[TensorSlot]] = {}
            done = []
            for slot in slots:
                grads = [slot.grads.get(replica) for replica in self._replicas]
                if not slot.is_shared or all(grad is None for grad in grads):
                    continue
                done.append(slot)
                if self._combines_in_place(slot, grads):
                    assert grads[0] is not None
                    kind = grads[0].device, grads[0].dtype == torch.float16
                    plain.setdefault(kind, []).append(slot)
                else:
                    self._combine_one(slot, grads, factors)
            for group in plain.values():
                self._combine_group(group, factors)
            for slot in done:
                self._finish(slot)
            self._components.reinstall_gradients(done)

    def _shares(self) -> list[float]:
        if self._scaled:  # each share was weighted when it was accumulated
            return [1.0 / self._everyone] * len(self._replicas)
        return arithmetic.shares(self._op, self._weights())

    def _copy_for(self, replica: int, total: torch.Tensor) -> torch.Tensor:
        return total.clone().to(self._components.device_of(replica))

    def _weighted_sum(self, gradients: Sequence[torch.Tensor | None], factors: list[float]) -> torch.Tensor | None:
        # A replica of weight 0 counts as zero, and is not multiplied: its gradient may well be nan.
        counted = [
            gradient if gradient is None or factor else torch.zeros_like(gradient)
            for gradient, factor in zip(gradients, factors, strict=True)
        ]
        device = next(gradient for gradient in counted if gradient is not None).device
        return arithmetic.combine_out_of_place(counted, factors, device)

    def _combines_in_place(self, slot: TensorSlot, grads: list[torch.Tensor | None]) -> bool:
        first = grads[0]
        return (
            all(arithmetic.is_plain(grad) and grad.device == first.device for grad in grads)  # type: ignore[union-attr]
            and all(base is None for base in slot.bases.values())
        )

    def _combine_group(self, group: list[TensorSlot], factors: list[float]) -> None:
        columns: list[Any] = [[slot.grads[replica] for slot in group] for replica in self._replicas]
        if arithmetic.share_memory([gradient for column in columns for gradient in column]):
            totals = [self._weighted_sum(gradients, factors) for gradients in zip(*columns, strict=True)]
            for column in columns:
                foreach_copy_(column, totals)
            return
        # A replica of weight 0 is left out, not multiplied: its gradient may well be nan.
        counted = [(column, factor) for column, factor in zip(columns, factors, strict=True) if factor]
        arithmetic.combine_in_place([column for column, _ in counted], [factor for _, factor in counted])
        for column, factor in zip(columns, factors, strict=True):
            if not factor:
                foreach_copy_(column, counted[0][0])

    def _combine_one(self, slot: TensorSlot, grads: list[torch.Tensor | None], factors: list[float]) -> None:
        device = next(grad for grad in grads if grad is not None).device
        bases = [slot.bases.get(r, grad) for r, grad in zip(self._replicas, grads, strict=True)] if slot.bases else []
        total = self._weighted_sum(grads, factors)
        for base in bases:
            # A sum adds what this pass contributed; what was combined earlier is in every replica's gradient. One
            # that this pass did not touch holds nothing else.
            if base is not None:
                total = _difference(total, base.to(device))
        earlier = next((base for base in bases if base is not None), None)
        if earlier is not None:
            total = earlier.to(device) if total is None else total + earlier.to(device)
        for replica in self._replicas:
            slot.grads[replica] = None if total is None else self._copy_for(replica, total)

    def _finish(self, slot: TensorSlot) -> None:
        slot.unsynced = False
        slot.bases = {}
        slot.synced = {}
        for replica in self._replicas:
            grad = slot.grads[replica]
            if grad is not None:
                slot.synced[replica] = CombinedGradient(grad)


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return one if other is None else -other
    return one - other
