"""The gradients of one replica: complete, and alike on all replicas, when ``backward()`` returns.

Between hosts they travel in buckets while backward runs. Where processes share memory they are added up in place when
it ends: both cores of a busy machine have nothing to overlap.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchstrat.core import gradients
from torchstrat.core._torch_private import queue_backward_callback
from torchstrat.core.engine import Communicator
from torchstrat.core.gradients import CombinedGradient, as_dense, is_watched, share_memory, shares
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.collectives.agreement import SumsInPlace, agree, agree_and_sum, all_equal
from torchstrat.replicas.exchange import broadcast_gradients
from torchstrat.replicas.gradient_records import (
    WITH_GRAPHS,
    EndOfPass,
    GradientRecords,
    GradientStatus,
    HookTurns,
    combine_with_graphs,
    has_graph,
    nothing,
)
from torchstrat.replicas.gradient_reducer import (
    GradientReducer,
    Owners,
    Plan,
    Plans,
    kinds_in,
    lacking_in,
    places_in,
)
from torchstrat.replicas.roster import Roster, Rosters
from torchstrat.replicas.thread_state import OwnSettings

BACKWARD = "backward() (gradients are combined as they become ready)"
WEIGHTS = "backward() under no_sync (weights are exchanged at its start)"
WATCHED = "backward() (gradients are combined before hooks that look at them)"
CATCH_UP = "optimizer step (combining gradients that no backward pass combined)"

_NOTHING, _DENSE, _SPARSE_TOO = range(3)  # what a rank contributes to a gradient

_PLAIN = (torch.float32, torch.float64)  # sums in half precision are scaled before: see `GradientReducer`

_EMPTY = Roster.of({})


class GradientSynchronizer:
    """The gradients of one replica. Each decision that starts a collective follows from what all ranks know alike.

    A mean is taken of whole gradients, so that what earlier passes left, which is alike on all ranks, stays as it is.
    A sum, and a mean after accumulation under ``no_sync``, *works by parts*: what was there before is remembered, only
    what is new travels, and is added to it. Parts accumulated under ``no_sync`` are weighted as they are accumulated,
    since every run has weights of its own.
    """

    def __init__(
        self,
        op: ReduceOp,
        owners: Owners | None = None,
        uninterrupted: AbstractContextManager[None] | None = None,
        rosters: Rosters | None = None,
    ) -> None:
        """``owners``: leave each gradient with those that own it, if there are any. ``uninterrupted``: what the end of
        a pass is called in. ``rosters``: of a process that has this replica alone, and between runs its gradients."""
        self._op = op
        self._owners = owners
        self._uninterrupted = uninterrupted
        self._rosters = rosters
        self._expected: set[int] = set()
        self._turns: HookTurns[int] = HookTurns()
        self._came_combined: set[int] = set()  # whose incoming gradient is combined
        self._no_sync = 0  # open blocks
        self.pending = False
        """Whether a run under ``no_sync`` has not been followed by a combining pass. Alike on all ranks."""
        self.before_adding_outside: Callable[[], object] = nothing  # where a backward pass outside of runs adds
        self.leaves_parts = False
        """Whether the last run has accumulated under a `no_sync` of its own, and not combined: see `weigh_parts`."""
        self.records = GradientRecords(op)
        self._reducer = GradientReducer(op, owners, self.records)
        self._plans = Plans()
        self._plan = Plan((), ())
        self._index: dict[int, int] = {}
        self._set_roster(_EMPTY)
        self._active = False
        self._unwatched: tuple[object, int] = (None, 0)  # a layout, and how many hooks there had been by then
        self._is_watched = False  # in this pass, hooks of the user's own look at gradients
        self._travels = False  # gradients of this pass go into buckets as they become ready
        self._for_hooks = False  # what is combined now all ranks need
        self._communicator: Any = None  # a `Communicator` from the first run on
        self._summing: SumsInPlace | None = None

    # -- a run ------------------------------------------------------------------------------------------------------

    def begin(
        self, roster: Roster, communicator: Communicator, weight: Callable[[], float], *, is_all: bool = True
    ) -> None:
        """``communicator``: of the ranks that take part; ``is_all``: in the job there are no others."""
        self._is_all, self._size = is_all, communicator.size
        if communicator is not self._communicator:
            self._communicator = communicator
            self._summing = communicator if isinstance(communicator, SumsInPlace) else None
        self._weight = weight
        self._works_by_parts = self.needs_early_hooks
        self._scaled = self._op is ReduceOp.MEAN and (self._no_sync > 0 or self.pending)
        self._reducer.begin(communicator, self._summing, scaled=self._scaled, works_by_parts=self._works_by_parts)
        self._pass = 0
        self._ready: dict[int, None] | None = None
        self._end_of_pass: Callable[[], object] = nothing  # a weak reference to what is called then
        self._factors: list[float] | None = None
        self._turns.end()
        self._came_combined.clear()
        self._expected.clear()
        self._accumulates = False  # under a `no_sync` that this run began
        self.use(roster)
        if self._rosters is not None and (self._scaled or self._op is ReduceOp.SUM):
            self.records.look_at_outside(roster.tensors, self._rosters.describe)
        self._active = True

    def use(self, roster: Roster) -> None:
        """The variables are these from now on. Not in the middle of a backward pass."""
        self._set_roster(roster)
        self.records.use(roster)

    def _set_roster(self, roster: Roster) -> None:
        self._roster, self._tensors, self._index = roster, roster.tensors, roster.layout.index
        self._reducer.use(roster.tensors)

    def end(self) -> None:
        """Nothing is combined until the next `begin`, and no variable is kept alive. What it refused, stays refused."""
        is_known = self._op is ReduceOp.SUM and (self._no_sync > 0 or self.pending)  # and nothing is to be weighted
        self.leaves_parts = self._active and self._accumulates and not is_known and bool(self.records.with_parts())
        if self._active and self._rosters and (self._scaled or self._accumulates or self._op is ReduceOp.SUM):
            self.records.leave()
        self._active = False
        self._set_roster(_EMPTY)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is a variable of the current run."""
        return id(tensor) in self._index

    def expect(self, tensor: torch.Tensor) -> None:
        """It becomes a variable in the midst of the run, on all ranks."""
        self._expected.add(id(tensor))

    def _use_expected(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._expected and self._ready is None and self._rosters is not None:
            self._expected.clear()
            self.use(self._rosters.now())

    def known(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are variables of the current run."""
        for tensor in tensors if self._expected else ():
            self._use_expected(tensor)
        return [tensor for tensor in tensors if id(tensor) in self._index]

    @property
    def no_sync(self) -> bool:
        return self._no_sync > 0

    def set_no_sync(self, active: bool) -> None:
        """A `no_sync` block begins or ends. Blocks nest."""
        self._no_sync += 1 if active else -1

    def weigh_parts(self, share: float) -> None:
        """Weight what `leaves_parts` tells of by the weights of the run that has ended, as is done at once in a run all
        under `no_sync`: the next one has others. ``share``: of this rank. All ranks call it, if any has such parts."""
        self.records.weigh_parts(1.0 if self._op is ReduceOp.SUM else share * self._size)
        self.pending = True

    @property
    def is_in_pass(self) -> bool:
        return self._active and self._ready is not None

    @property
    def leaves_with_owners(self) -> bool:
        return self._owners is not None

    @property
    def needs_early_hooks(self) -> bool:
        """Whether `before_accumulation` has to be called."""
        return self._op is ReduceOp.SUM or self._no_sync > 0 or self.pending or self._owners is not None

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def before_accumulation(
        self, tensor: torch.Tensor, gradient: torch.Tensor, is_watched: bool
    ) -> torch.Tensor | None:
        if self._expected:
            self._use_expected(tensor)
        if not self._active:
            self.before_adding_outside()
        if not self._active or id(tensor) not in self._index:
            return None
        if is_watched:
            return self._combine_incoming(tensor, gradient)
        if not self._works_by_parts:
            return None
        state = self.records.current(tensor)
        if tensor.grad is None:
            state.base = None
        elif not state.accumulated or not tensor.grad.any():  # zeroed in place since: nothing earlier is left
            state.base = tensor.grad.detach().clone()
        if not self._scaled:
            return None
        if self._factors is None:
            self._factors = self._exchange_weights(WEIGHTS)
        factor = self._factors[self._communicator.rank] * self._size
        if factor == 0.0:
            return torch.zeros_like(gradient)  # whatever it is, nan not excepted
        return None if factor == 1.0 else gradient * factor

    def after_accumulation(self, tensor: torch.Tensor, is_watched: bool) -> None:
        if self._expected:
            self._use_expected(tensor)
        index = self._index.get(id(tensor))
        if index is None or not self._active:
            return
        if index in self._came_combined:
            self._came_combined.discard(index)
            self.records.note_combined(tensor)
            return
        state = self.records.current(tensor)
        state.accumulated, state.combined = True, None
        if self._op is ReduceOp.SUM and tensor.grad is not None:
            state.grown = CombinedGradient(tensor.grad)
        if self._no_sync and not is_watched:
            self._accumulates = not self._scaled
            return
        ready = self._ready_in_pass()
        index = self._index.get(id(tensor))
        if index is None:
            return  # no other rank has it
        assert tensor.grad is not None
        if self._travels and index in self._reducer.contributed:
            # A reentrant backward pass (checkpointing) and the one around it both use the tensor.
            self._again.add(index)
        ready[index] = None
        if is_watched:
            self._combine_with_graphs() if has_graph(tensor.grad) else self._meet_at(index)
        elif self._travels:
            bucket = self._plan.bucket_of.get(index)
            if bucket is not None and tensor.grad.layout == torch.strided and index in bucket.waiting:
                self._reducer.contribute(index, bucket)
                self._plan.start_complete(self._communicator, BACKWARD)

    def _ready_in_pass(self) -> dict[int, None]:
        """The gradients that are ready in the pass that goes on, which this opens if there is none.

        A pass that fails never gets to its end; torch lets go of what it should have called there.
        """
        if self._ready is None or self._end_of_pass() is None:
            self._open_pass()
        assert self._ready is not None
        return self._ready

    def _open_pass(self) -> None:
        failed, self._ready = self._ready or {}, None
        self._is_watched = self._look_for_watchers()
        self._travels = self._summing is None and not self._is_watched
        if self._travels:
            if failed:
                self._plan.wait()
            self._begin_pass(BACKWARD)
            self._plan = self._plan_of_pass()
            self._plan.reset()
        end_of_pass = EndOfPass(self._end_pass)
        self._end_of_pass = weakref.ref(end_of_pass)
        queue_backward_callback(end_of_pass)
        self._ready = failed

    def _look_for_watchers(self) -> bool:
        now = self._roster.layout, gradients.hooks_registered
        if self._unwatched == now:
            return False
        found = any(map(is_watched, self._tensors))
        if not found:
            self._unwatched = now
        return found

    def _plan_of_pass(self) -> Plan:
        if not self._is_all:
            return Plan((), self._tensors)  # not kept: the ranks that sit this run out would not have it
        signature = tuple(kind[1:] for kind in self._roster.signature)
        return self._plans.of_pass(self._pass, signature, self._tensors)

    def _exchange_weights(self, call: str) -> list[float]:
        """The share of each rank; makes sure on the way that all ranks count with the same variables."""
        rows = agree(self._communicator, call, (self._weight(), self._roster.digest))
        self._use_what_all_have([row[1] for row in rows], call)
        return self._shares_of([row[0] for row in rows])

    def _use_what_all_have(self, digests: list[float], call: str) -> None:
        if any(digest != digests[0] for digest in digests):
            self.use(self._roster.in_common(self._communicator, call))

    def _shares_of(self, weights: list[float]) -> list[float]:
        return shares(self._op, weights if any(weights) else [1.0] * len(weights))

    # -- combining --------------------------------------------------------------------------------------------------

    def _begin_pass(self, call: str) -> None:
        self._set_shares(call, self._exchange_weights(call))

    def _set_shares(self, call: str, shares: list[float]) -> None:
        self._call = call
        self._again: set[int] = set()
        self._reducer.begin_pass(call, shares)

    def _combine_dense(self, indices: Sequence[int], ready: Container[int]) -> None:
        everywhere = self._no_sync > 0 or self.pending or self._for_hooks
        self._reducer.combine_dense(indices, ready, everywhere=everywhere)

    def _end_pass(self) -> None:
        with self._uninterrupted or nullcontext(), OwnSettings():
            self._combine_pass()
        self._came_combined.clear()  # of a pass that accumulates nothing: torch.autograd.grad

    def _combine_pass(self) -> None:
        self._combine_with_graphs()
        if self._is_watched:
            self._meet_at(None)
        if self._no_sync:  # only what hooks look at is combined
            self._ready = None
            return
        if self._summing is not None:
            self._flush_in_place()
            return
        if not self._travels:
            self._begin_pass(BACKWARD)
            self._plan = Plan((), self._tensors)
        self._flush()

    def _flush(self) -> None:
        """At the end of a pass: send the rest, learn what the others had, write the combined gradients back."""
        assert self._ready is not None
        ready, self._ready = self._ready, None
        self._forget_zeroed(ready)
        for bucket in self._plan.buckets:
            for index in list(bucket.waiting):
                grad = self._tensors[index].grad
                if grad is not None and grad.layout == torch.strided and self._reducer.contributes(index, ready):
                    self._reducer.contribute(index, bucket)
        self._plan.start_all(self._communicator, BACKWARD)
        places = self._exchange_places(ready)
        dense, sparse, again = kinds_in(places)
        self._plan.wait()
        in_time = {index for index in dense - again - sparse if index in self._plan.bucket_of}
        for index in in_time:
            self._reducer.write_back(index, self._plan.bucket_of[index].views[index])
        self._combine_dense(sorted(dense - in_time), ready)
        self._reducer.combine_sparse(sorted(sparse - dense), ready)
        if self._travels and self._is_all and not dense <= self._plan.bucket_of.keys():
            self._plans.remake(self._pass, places[0], dense, self._tensors)
        self._pass += 1
        self.pending = False

    def _flush_in_place(self) -> None:
        """The same where gradients are added up in place, with a single exchange if all ranks have the same ones and
        they are small."""
        assert self._ready is not None
        assert self._summing is not None
        ready, self._ready = self._ready, None
        self._forget_zeroed(ready)
        kinds, plain = self._contribution(ready)
        numbers = (self._weight(), self._roster.digest, float(zlib.crc32(kinds + bytes([bool(plain)]))))
        rows, add_up = agree_and_sum(self._summing, BACKWARD, numbers, plain)
        self._set_shares(BACKWARD, self._shares_of([row[0] for row in rows]))
        if all_equal([row[1:] for row in rows]):
            dense = [index for index, kind in enumerate(kinds) if kind == _DENSE]
            sparse = [index for index, kind in enumerate(kinds) if kind == _SPARSE_TOO]
            if add_up is not None and self._reducer.shares.count(self._reducer.factor_after) == self._size:
                add_up(self._reducer.factor_after)
                self.records.note_all_combined([self._tensors[index] for index in dense])
                dense = []
        else:
            found = [self._tensors[index] for index in ready]
            self._use_what_all_have([row[1] for row in rows], BACKWARD)
            ready = {self._index[id(tensor)]: None for tensor in self.known(found)}
            some_dense, some_sparse, _ = kinds_in(self._exchange_places(ready))
            dense, sparse = sorted(some_dense), sorted(some_sparse - some_dense)
        if dense:
            self._combine_dense(dense, ready)
        self._reducer.combine_sparse(sparse, ready)
        self._pass += 1
        self.pending = False

    def _contribution(self, ready: Container[int]) -> tuple[bytes, list[torch.Tensor]]:
        """Per tensor: what this rank has to contribute. And these gradients, if each can be added up where and as it
        lies; else none."""
        kinds = bytearray(len(self._tensors))  # of _NOTHING
        found: list[torch.Tensor] = []
        are_plain = not self._works_by_parts and self._owners is None
        for index, tensor in enumerate(self._tensors):
            if (gradient := tensor.grad) is None or not (index in ready or self._has_part(tensor)):
                continue
            if gradient.layout != torch.strided:
                kinds[index], are_plain = _SPARSE_TOO, False
                continue
            kinds[index] = _DENSE
            if are_plain:
                is_simple = gradient.dtype in _PLAIN and gradient.is_cpu and not gradient.requires_grad
                are_plain = is_simple and gradient.is_contiguous()
                found.append(gradient)
        return bytes(kinds), found if are_plain and not share_memory(found) else []

    def _has_part(self, tensor: torch.Tensor) -> bool:
        """Whether something was accumulated under ``no_sync`` and is still there."""
        return self._works_by_parts and self.records.current(tensor).accumulated

    def _forget_zeroed(self, ready: Container[int]) -> None:
        """Gradients that were accumulated under ``no_sync`` and have been zeroed or removed since."""
        for index, tensor in enumerate(self._tensors if self._works_by_parts else ()):
            state = self.records.current(tensor)
            if state.accumulated and index not in ready and (tensor.grad is None or not as_dense(tensor.grad).any()):
                state.accumulated, state.base = False, None

    def _exchange_places(self, ready: Iterable[int], loose: Iterable[int] = (), *, parts: bool = True) -> torch.Tensor:
        """Per rank and tensor: 0 for no gradient in this pass, else its place in that rank's ready order, from 1.

        Gradients left over from ``no_sync`` are last."""
        order = dict.fromkeys(ready)
        if self._works_by_parts and parts:
            order.update(dict.fromkeys(i for i, tensor in enumerate(self._tensors) if self._has_part(tensor)))
        own = places_in(order, self._tensors, self._again, loose)
        return torch.stack(self._communicator.all_gather(own, self._call))

    # -- in the midst of a pass -------------------------------------------------------------------------------------

    def _meet_at(self, index: int | None, incoming: torch.Tensor | None = None) -> torch.Tensor | None:
        """Meet the others where hooks are about to see a gradient (or ``incoming``, which is yet to be added to it),
        or, without an index, at the end of the pass. Returns ``incoming``, combined."""
        tensor = None if index is None else self._tensors[index]
        while True:
            if tensor is not None and (index := self._index.get(id(tensor))) is None:
                return incoming  # no other rank has it
            place = -1.0 if index is None else float(index)
            state = None if index is None else self.records.current(self._tensors[index])
            has_left = incoming is not None and state is not None and state.accumulated
            numbers = (place, self._weight(), self._roster.digest, float(incoming is not None), float(has_left))
            rows = agree(self._communicator, WATCHED, numbers)
            if any(row[2] != rows[0][2] for row in rows):
                self._use_what_all_have([row[2] for row in rows], WATCHED)
                continue
            places = {rank: int(row[0]) for rank, row in enumerate(rows) if row[0] >= 0}
            if not places:
                self._hand_over_missed()
                return None
            chosen = self._turns.next(places, range(len(rows)), lambda: range(len(self._tensors)))
            self._set_shares(WATCHED, self._shares_of([row[1] for row in rows]))
            own = chosen == index
            comes = any(row[3] for row in rows if row[0] == chosen)
            if not comes or any(row[4] for row in rows if row[0] == chosen):
                self._combine_one(chosen)
            combined = self._combine_loose(chosen, incoming if own else None) if comes else None
            if own:
                return combined

    def _hand_over_missed(self) -> None:
        for index, source, spared in self._turns.end():
            is_loose = float(index in self._came_combined)
            if agree(self._communicator, WATCHED, (is_loose,))[source][0]:
                self.records.note_lacking(self._tensors[index], self._communicator.rank in spared)
            else:
                self._hand_over(index, source, WATCHED)

    def _combine_one(self, index: int) -> None:
        """Combine a gradient at once, on all ranks, with what each has accumulated of it by now."""
        tensor, ready = self._tensors[index], self._ready or {}
        is_sparse = tensor.grad is not None and tensor.grad.layout != torch.strided
        kinds = agree(self._communicator, WATCHED, (float(tensor.grad is not None), float(is_sparse)))
        self._for_hooks = True
        if any(row[0] and not row[1] for row in kinds):
            self._combine_dense([index], ready)
        elif any(row[1] for row in kinds):
            self._reducer.combine_sparse([index], ready)
        self._for_hooks = False
        ready.pop(index, None)

    def _combine_loose(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Combine gradients that nobody has accumulated yet. Ranks without one bring none."""
        tensor, record = self._tensors[index], self.records.current(self._tensors[index])
        kept, ready = tensor.grad, self._ready
        accumulated, base, combined = record.accumulated, record.base, record.combined
        tensor.grad = None if gradient is None else gradient.detach().clone()
        record.accumulated, self._ready = False, {} if gradient is None else {index: None}
        try:
            self._combine_one(index)
            return tensor.grad
        finally:
            tensor.grad, self._ready = kept, ready
            record.accumulated, record.base, record.combined = accumulated, base, combined

    def _combine_incoming(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        self._ready_in_pass()
        index = self._index.get(id(tensor))
        if index is None:
            return None
        self._came_combined.add(index)
        if has_graph(gradient):
            combined: torch.Tensor | None = combine_with_graphs(
                self._exchange_with_graphs, [gradient], [None], f" (variable {index})"
            )[0]
        else:
            combined = self._meet_at(index, gradient)
        self.records.note_loose(tensor, combined)
        return combined

    def _combine_with_graphs(self) -> None:
        gradients: list[Any] = [self._tensors[index].grad for index in self._ready or ()]
        if not any(map(has_graph, gradients)):
            return
        rows = agree(self._communicator, WITH_GRAPHS, (self._roster.digest,))
        self._use_what_all_have([row[0] for row in rows], WITH_GRAPHS)
        ready = self._ready or {}
        own = torch.tensor([place in ready and has_graph(one.grad) for place, one in enumerate(self._tensors)])
        # A branch may have spared some ranks a parameter: they bring zeros, and have its gradient from then on.
        found = torch.stack(self._communicator.all_gather(own, WITH_GRAPHS)).any(dim=0).nonzero().flatten().tolist()
        tensors = [self._tensors[index] for index in found]
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]
        bases = [self._base_of(one) if self._works_by_parts else None for one in tensors]
        combined = combine_with_graphs(self._exchange_with_graphs, gradients, bases)
        for index, tensor, gradient in zip(found, tensors, combined, strict=True):
            ready.pop(index, None)
            tensor.grad = gradient
            self.records.note_combined(tensor)

    def _base_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What all ranks have in common in its gradient: the whole of it, where this one has added nothing."""
        return self.records.take_base(tensor) if self.records.of(tensor).accumulated else tensor.grad

    def _exchange_with_graphs(self, call: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows = agree(self._communicator, call, (self._weight(),))
        share = self._shares_of([row[0] for row in rows])[self._communicator.rank]
        if self._scaled:
            share = 1.0 / self._size  # each was weighted when it was accumulated
        totals = []
        with torch.no_grad():
            for tensor in tensors:
                own = tensor * share if share else torch.zeros_like(tensor)
                totals.append(own.clone(memory_format=torch.contiguous_format))
                self._communicator.all_reduce(totals[-1], call).wait()
        return totals

    # -- at the optimizer's step ------------------------------------------------------------------------------------

    def before_clipping(self, gradients: list[torch.Tensor]) -> None:
        """What no backward pass has combined is to be clipped as on one device."""
        if not self._active:
            return
        places = {id(gradient): place for place, gradient in enumerate(gradients)}
        tensors = [tensor for tensor in self._tensors if id(tensor.grad) in places]
        if self.records.are_as_combined(tensors) or not self.records.left_over(tensors):
            return
        at = {self._index[id(tensor)]: places[id(tensor.grad)] for tensor in tensors}
        for index in self.catch_up(tensors, alone=True):
            if (gradient := self._tensors[index].grad) is None:
                continue
            if index in at:
                gradients[at[index]] = gradient
            else:  # other ranks clip it: this one had none until now
                gradients.append(gradient)

    def catch_up(self, candidates: Sequence[torch.Tensor], *, alone: bool = False) -> set[int]:
        """Combine what any rank has left over among ``candidates``, in a pass of its own, and return the places of
        these. All ranks call it. ``alone``: not what runs have left of others, too."""
        self._begin_pass(CATCH_UP)
        self._forget_zeroed(())
        ready = {self._index[id(tensor)]: None for tensor in self.known(self.records.left_over(candidates))}
        loose = [self._index[id(tensor)] for tensor in self.known(self.records.had_alone(candidates))]
        places = self._exchange_places(ready, loose, parts=not alone)
        lacking = lacking_in(places)  # they get what is made of combined gradients as it is
        for index, source in lacking.items():
            self._hand_over(index, source, CATCH_UP)
        dense, sparse, _ = (kind - lacking.keys() for kind in kinds_in(places))
        self._combine_dense(sorted(dense), ready)
        self._reducer.combine_sparse(sorted(sparse - dense), ready)
        self.pending &= alone
        return dense | sparse | lacking.keys()

    def _hand_over(self, index: int, source: int, call: str) -> None:
        tensor = self._tensors[index]
        (gradient,) = broadcast_gradients(self._communicator, [tensor.grad], [tensor], source, call)
        self.records.take_over(tensor, gradient, GradientStatus.COMBINED)

    def combine_parts(self, roster: Roster, communicator: Communicator, weight: float = 1.0, *, is_all: bool) -> None:
        """Combine what runs have left. All ranks of ``communicator`` call it, outside of a run."""
        self.begin(roster, communicator, lambda: weight, is_all=is_all)
        self.catch_up(self.records.with_parts())
        self.end()
