"""Gradients of replicas in one process: each replica has what a replica in a process of its own has, and its turn.

Its meetings are the communicator that replicas of several processes have. Nothing is sent: whoever comes to a meeting
last has what all have brought, and what each gets back is made of it while all stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch

from torchstrat.core import gradients as arithmetic
from torchstrat.core.engine import Done, Words, Work
from torchstrat.core.gradients import CombinedGradient, GradientHooks, as_dense, shares
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.variables import Members, VariableRegistry
from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece
from torchstrat.replicas.engine import StepWeights
from torchstrat.replicas.gradient_records import GradientStatus, NotedGradients, edited_part, nothing
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.in_process.baton import Baton
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.roster import Roster, Rosters, Twins
from torchstrat.replicas.thread_state import OwnSettings


class InProcessCommunicator:
    """One object for all ``replicas``: ``rank`` is that of the replica whose turn it is. `begin` gives it the baton of
    a run. Objects are handed over as they are, without being pickled, and must not be changed by who gets them."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self._places = {replica: place for place, replica in enumerate(replicas)}
        self._baton: Baton | None = None

    def begin(self, baton: Baton) -> None:
        self._baton = baton

    def end(self) -> None:
        self._baton = None

    @property
    def rank(self) -> int:
        """-1 while all stand still."""
        holder = None if self._baton is None else self._baton.holder
        return -1 if holder is None else self._places[holder]

    @property
    def size(self) -> int:
        return len(self._places)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._places)

    @property
    def timeout(self) -> timedelta:
        return timedelta.max  # nobody is waited for who is not here

    def _meet(self, what: str, payload: object, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """``combine``: what all bring → what each gets."""

        def meet(payloads: dict[int, object]) -> dict[int, object]:
            with OwnSettings():
                return dict(zip(payloads, combine(list(payloads.values())), strict=True))

        assert self._baton is not None
        return self._baton.meet(what, payload, meet)

    def _share(self, what: str, payload: object, combine: Callable[[list[Any]], object]) -> Any:
        """The same where all get the same."""
        return self._meet(what, payload, lambda all_of: [combine(all_of)] * len(all_of))

    # -- collective calls -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Work:
        self.sum_in_place([tensor], 1.0, what)
        return Done()

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        def combine(tensors: list[torch.Tensor]) -> list[None]:
            for place, other in enumerate(tensors):
                if place != source:
                    other.copy_(tensors[source])
            return [None] * len(tensors)

        self._meet(what, tensor, combine)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        def combine(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            # Copies: the first to go on may change what it has brought before the next one looks.
            return [[one.to(own.device, copy=True) for one in tensors] for own in tensors]

        return self._meet(what, tensor.detach(), combine)  # type: ignore[no-any-return]

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return self._share(what, list(numbers), lambda rows: rows)  # type: ignore[no-any-return]

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        return self._share(what, value, lambda values: values)  # type: ignore[no-any-return]

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        return self._share(what, value, lambda values: values[source])

    def barrier(self, what: str) -> None:
        self._share(what, None, lambda _: None)

    # -- sums where gradients lie -----------------------------------------------------------------------------------

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        def combine(columns: list[Sequence[torch.Tensor]]) -> None:
            _sum(columns, factor)

        if tensors:
            self._share(what, tensors, combine)

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        def combine(brought: dict[int, tuple[list[float], Sequence[torch.Tensor]]]) -> dict[int, Any]:
            columns = [one for _, one in brought.values()]
            made = [row for row, _ in brought.values()], _SumOnce(columns) if all(columns) else None
            return dict.fromkeys(brought, made)

        assert self._baton is not None
        return self._baton.meet(what, (list(numbers), tensors), combine)  # type: ignore[no-any-return]

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        self.sum_in_place(tensors, factor, what)

    # -- between processes only -------------------------------------------------------------------------------------

    def subgroup(self, ranks: tuple[int, ...]) -> NoReturn:
        raise NotImplementedError("replicas of one process have a communicator for those of each run")

    def split(self) -> NoReturn:
        raise NotImplementedError("input of one process needs no channel")

    def words(self, what: str) -> Words:
        raise NotImplementedError("replicas of one process are told apart by nothing that could differ")

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        """The baton ends the others."""

    def forget_failure(self) -> None: ...

    def leave_run(self) -> None:
        """A run that raises ends for all replicas."""

    def named(self, what: str) -> str:
        return what

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        """The baton tells."""
        return what

    def close(self) -> None: ...


class _SumOnce:
    """Makes the sums of all, the first time that one of them asks, in its `OwnSettings`."""

    def __init__(self, columns: list[Sequence[torch.Tensor]]) -> None:
        self._columns = columns

    def __call__(self, factor: float) -> None:
        if self._columns:
            _sum(self._columns, factor)
            self._columns = []


def _sum(columns: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    """``columns[replica][i]`` all become the same factor · Σ columns[replica][i]."""
    if len({tensor.device for column in columns for tensor in column}) == 1:
        arithmetic.combine_in_place(columns, factor)
        return
    groups: dict[tuple[torch.device, ...], list[int]] = {}
    for place, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(tuple(tensor.device for tensor in row), []).append(place)
    for devices, places in groups.items():
        chosen = [[column[place] for place in places] for column in columns]
        if devices.count(devices[0]) == len(devices):
            arithmetic.combine_in_place(chosen, factor)
            continue
        for row in zip(*chosen, strict=True):
            total = sum(tensor.to(devices[0]) for tensor in row) * factor
            for tensor in row:
                tensor.copy_(total)


class _Shielded:
    """A block in which Ctrl-C does not end a replica, so that it leaves no gradient half-combined. Entered again and
    again; no generator, which takes longer."""

    baton: Baton | None = None
    """Of the run that goes on."""

    def __enter__(self) -> None:
        assert self.baton is not None
        self.baton.shield()

    def __exit__(self, *_: object) -> None:
        assert self.baton is not None
        self.baton.unshield()


class InProcessGradients:
    """The `GradientSynchronizer` of every replica. Hooks, on tensors that are there once, tell that of the replica
    whose turn it is.

    ``combines``: False where every replica keeps its own gradients.
    """

    def __init__(
        self, components: Components, registry: VariableRegistry, op: ReduceOp, count: int, *, combines: bool = True
    ) -> None:
        self._combines = combines
        self._components = components
        self._op = op
        self._rosters = Rosters(registry, is_only=True)
        self._shielded = _Shielded()
        self._of = [GradientSynchronizer(op, uninterrupted=self._shielded) for _ in range(count)]
        self._communicators: dict[tuple[int, ...], InProcessCommunicator] = {}
        self._baton: Baton | None = None
        self.twins = Twins()
        self._current: GradientSynchronizer | None = None  # of the replica whose turn it is
        self._replicas: list[int] = []
        self._idle: list[int] = []
        self._began = 0  # the generation of variables with which the run has begun
        self._seen: dict[int, int] = {}  # replica → that with which it counts
        self.hooks = GradientHooks(self, lambda: None if self._baton is None else self._baton.holder)
        self.before_adding_outside: Callable[[], object] = nothing
        """Called where a backward pass outside of runs is about to add to a gradient."""

    @property
    def of_replicas(self) -> Sequence[GradientSynchronizer]:
        return self._of

    # -- a run ------------------------------------------------------------------------------------------------------

    def begin(self, baton: Baton, weights: StepWeights, members: Members) -> None:
        """A run of the replicas that are active in ``weights`` begins, for all of them; the components have begun."""
        self._baton = self._shielded.baton = baton
        self._replicas = weights.active
        communicator = self._communicators.get(tuple(self._replicas))
        if communicator is None:
            communicator = self._communicators[tuple(self._replicas)] = InProcessCommunicator(self._replicas)
        communicator.begin(baton)
        self.communicator = communicator
        roster = self._rosters.now(members)
        self._idle = []
        if len(self._replicas) < len(self._of):
            self._idle = [replica for replica in range(len(self._of)) if replica not in self._replicas]
        self._began = self._components.generation
        self.twins.begin(self._replicas)
        self._seen = dict.fromkeys(self._replicas, self._began)
        for replica in self._replicas:
            weight = partial(weights.of_gradients, self._op, replica)
            self._of[replica].begin(roster, communicator, weight, is_all=not self._idle)
        for slot in self._components.given:
            for replica, gradients in enumerate(self._of):
                if (own := slot.grads.get(replica)) is not None:
                    gradients.records.note_made_outside(slot.tensor, own)
        if self._combines:
            self.hooks.attach_to_run(roster.tensors, roster.layout, early=self.needs_early_hooks)

    def attach(self, tensors: list[torch.Tensor]) -> None:
        """They have come up in this run."""
        if self._combines:
            self.hooks.attach(tensors, early=self.needs_early_hooks)

    def end(self, weights: Sequence[float] | None) -> None:
        """A run has ended, and all replicas stand still. Let go of everything that belongs to it alone. ``weights``: of
        the replicas that have run; None after a failure, also one before `begin` was called."""
        if self._baton is None:
            return
        active = [self._of[replica] for replica in self._replicas]
        for gradients in active:
            gradients.end()
        if weights is not None and any(gradients.leaves_parts for gradients in active):
            for replica, share in zip(self._replicas, shares(self._op, weights), strict=True):
                with self._components.gradients_of(replica):
                    self._of[replica].weigh_parts(share)
        if self._idle:
            self._give_to_idle()
        pending = self._combines and (active[0].pending or active[0].no_sync)
        for gradients in self._of:
            gradients.pending = pending
        if pending:
            roster = self._rosters.now()
            self.hooks.attach_to_run(roster.tensors, roster.layout, early=True)
        self.communicator.end()
        self.twins.end()
        self._baton = self._shielded.baton = None
        self._replicas, self._idle, self._current = [], [], None

    def switch(self, replica: int | None) -> None:
        """It is the turn of ``replica``; None: all stand still."""
        self._current = None if replica is None else self._of[replica]

    def set_no_sync(self, active: bool) -> None:
        """A `no_sync` block begins or ends, in a replica's code or outside of runs. Blocks nest."""
        holder = None if self._baton is None else self._baton.holder
        for gradients in self._of if holder is None else [self._of[holder]]:
            gradients.set_no_sync(active)

    @property
    def is_pending(self) -> bool:
        """Whether runs have left gradients uncombined."""
        return self._of[0].pending

    def refuse_edited_parts(self) -> None:
        """A run begins. The program sees the first replica's part of what runs have left uncombined, and whatever it
        has made of that says nothing of the others' parts; unless it has zeroed it, or taken it away."""
        for slot in self._components.slots():
            tensor = slot.reference()
            if tensor is None or tensor.grad is None or slot.is_grad_untouched(tensor.grad):
                continue
            has_parts = any(gradients.records.of(tensor).accumulated for gradients in self._of)
            if has_parts and as_dense(tensor.grad).any():
                raise edited_part(self._rosters.describe(tensor))

    @property
    def needs_early_hooks(self) -> bool:
        return any(gradients.needs_early_hooks for gradients in self._of)

    # -- replicas without rows --------------------------------------------------------------------------------------

    def _give_to_idle(self) -> None:
        """What all replicas that took part have alike (combined, or zeroed) the others have too."""
        roster, leader = self._rosters.now(), self._replicas[0]
        tensors = dict(roster.items())
        new = []
        for replica in self._replicas:
            with self._components.gradients_of(replica):
                new.append(self._of[replica].records.new_in_sum(roster))
        for replica in self._replicas if any(new) else ():
            with self._components.gradients_of(replica):
                self._of[replica].records.settle(roster, new)
        with self._components.gradients_of(leader):
            statuses = self._of[leader].records.for_idle(roster)
            found = {name: tensors[name].grad for name in statuses}
        for replica in self._idle:
            device = self._components.device_of(replica)
            with self._components.gradients_of(replica):
                for name, status in statuses.items():
                    grad = found[name]
                    own = None if grad is None else grad.detach().clone().to(device)
                    self._of[replica].records.take_over(tensors[name], own, status)

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def _now(self, tensor: torch.Tensor | None = None) -> GradientSynchronizer | None:
        """Those of the replica whose turn it is, which is about to use ``tensor``; None outside of runs."""
        replica = None if self._baton is None else self._baton.holder
        if replica is None:
            return None
        gradients = self._of[replica]
        if self._components.generation == self._began and (tensor is None or gradients.has(tensor)):
            return gradients  # nothing has come up in this run: nearly always
        if tensor is not None:
            slot = self._components.slot_of(tensor)
            if slot is None:
                with OwnSettings():
                    slot = self._components.new_slot_of(tensor)
            if slot is not None:
                self._components.note_use_of(slot, replica)
        if self._seen[replica] != self._components.generation and not gradients.is_in_pass:
            self._seen[replica] = self._components.generation
            gradients.use(self.roster_of(replica))
        return gradients

    def roster_of(self, replica: int) -> Roster:
        """Without what another replica has made in this run, and this one not used: each makes its own, perhaps."""
        roster = self._rosters.now()
        hidden = self._components.hidden_from(replica)
        return self.twins.renamed(roster, hidden) if hidden else roster

    def before_accumulation(
        self, tensor: torch.Tensor, gradient: torch.Tensor, is_watched: bool
    ) -> torch.Tensor | None:
        gradients = self._now(tensor)
        if gradients is None:
            self.before_adding_outside()
            return None
        return gradients.before_accumulation(tensor, gradient, is_watched)

    def after_accumulation(self, tensor: torch.Tensor, is_watched: bool) -> None:
        gradients = self._current  # every pass asks for every variable
        if gradients is not None and not (self._components.generation == self._began and gradients.has(tensor)):
            gradients = self._now(tensor)
        if gradients is not None:
            gradients.after_accumulation(tensor, is_watched)

    # -- at an optimizer's step -------------------------------------------------------------------------------------

    def before_clipping(self, gradients: list[torch.Tensor]) -> None:
        own = self._now()
        if own is not None:
            own.before_clipping(gradients)

    def look_at(self, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
        """Whether the gradients of ``tensors`` that the replica whose turn it is has are as they were combined, and
        whether there are some that no backward pass has combined."""
        own = self._now()
        assert own is not None
        is_as_combined = own.records.are_as_combined(tensors)
        return is_as_combined, not is_as_combined and bool(own.records.left_over(tensors))

    def combine_parts(self) -> None:
        """Those that runs have left uncombined. All replicas call it."""
        own = self._now()
        assert own is not None
        with OwnSettings():
            own.catch_up(own.records.with_parts())

    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Combine those that any replica has: assigned by hand, or left by ``no_sync``. All replicas call it."""
        own = self._now()
        assert own is not None
        with OwnSettings():
            own.catch_up(tensors)

    def combined_of(self, replica: int, tensor: torch.Tensor) -> CombinedGradient | None:
        """What is known of the gradient that the replica has been given last, until it adds to it."""
        return self._of[replica].records.of(tensor).combined

    def after_step(self, tensors: Sequence[torch.Tensor]) -> None:
        """An optimizer has used the gradients that the replica whose turn it is has of ``tensors``, or outside of a run
        those of all; what is assigned to them from now on is new."""
        holder = None if self._baton is None else self._baton.holder
        for gradients in self._of if holder is None else [self._of[holder]]:
            gradients.records.after_step(tensors)

    def central(self) -> NotedGradients:
        """While the central components are installed for code that runs once."""
        return NotedGradients(slot.tensor for slot in self._components.slots())

    def spread_central(self, before: NotedGradients) -> None:
        """After such code: gradients that it zeroed, removed or replaced are so for every replica."""
        home, tensors = self._components.home, [slot.tensor for slot in self._components.slots()]
        changed = [(tensor, tensor.grad) for tensor in tensors if before.has_changed(tensor)]
        for replica in self._replicas if changed else ():
            with self._components.gradients_of(replica):
                for tensor, grad in changed:
                    own = grad
                    if grad is not None and replica != home:
                        own = grad.detach().clone().to(self._components.device_of(replica))
                    self._of[replica].records.take_over(tensor, own, GradientStatus.COMBINED)
