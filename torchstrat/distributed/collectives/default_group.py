"""torch.distributed's default process group: found and left alone, or made, shared, and destroyed by its last user.

Its processes meet in a store that nobody has written to (`fresh_store`): torchrun keeps one store for all its restarts,
at one address. Who connects to what another has written there may therefore read an address, or a message, of a process
that is long dead. Nothing in the environment tells the starts apart on all machines alike:
``TORCHELASTIC_RESTART_COUNT`` is each machine's own count of its own failures.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import uuid
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchstrat.core._torch_private import store_of_default_group
from torchstrat.core.errors import CommunicationError, CommunicationTimeoutError, UnsupportedError
from torchstrat.core.terminal import wait_for_listener
from torchstrat.distributed.cluster import ProcessPlan, torchrun_address
from torchstrat.distributed.collectives.notes import Peers, Standstill, StoreVisits, said_at

_LONGER = "Processes that start later than that need a longer timeout=."

_stores: dict[str, dist.Store] = {}  # one per meeting point: rank 0 may not listen on the same port twice
_numbers = itertools.count()  # of groups made there: the keys of an earlier one are still in the store
_joined = itertools.count()  # of the user's groups that strategies worked on: in a store of his own
_found: DefaultGroup | None = None  # the latest one that the user made
_made: DefaultGroup | None = None  # the latest one that torchstrat made; torch.distributed has one at a time


class DefaultGroup:
    """The default group while strategies work on it.

    ``store``: where its processes met. ``name``: where they talk about it there; the same in all of them.
    """

    def __init__(self, store: dist.Store, name: str, *, is_ours: bool, excepthook_before: Any = None) -> None:
        self.store = store
        self._name, self._families = name, itertools.count()
        self._excepthooks = excepthook_before, sys.excepthook
        self._is_ours = is_ours
        self._group = dist.group.WORLD
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.peers: Peers | None = None
        self.visits = StoreVisits(store)
        self.standstill = Standstill(self.visits, dist.get_rank(), dist.get_world_size(), f"waiting/{name}")

    @staticmethod
    def join(
        user: object, plan: ProcessPlan, backend: str, timeout: timedelta, *, is_passing: bool = False
    ) -> DefaultGroup:
        """The group there is, or a new one, with ``user`` among its users, unless it ``is_passing``."""
        global _made, _found
        if not dist.is_initialized():
            group = _made = _make(plan, backend, timeout)
        elif _made is not None and _made.is_alive:
            group = _made  # another strategy, still open, has made it
        else:
            group = _found = _of_user(plan)
        if not is_passing:
            group.users.add(user)
        return group

    def new_prefix(self) -> str:
        """For what one family of communicators says in the store, beside the keys that torch has for the group."""
        return f"torchstrat/family/{self._name}/{next(self._families)}"

    @property
    def is_alive(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._group

    def leave(self, user: object) -> None:
        """Destroy the group if torchstrat made it and no other open strategy works on it."""
        if user not in self.users:
            return
        self.users.discard(user)
        if not self._is_ours or not self.is_alive:
            return
        if self.users:
            gc.collect()  # strategies refer to themselves: one that was dropped may still seem to be there
        if not self.users:
            dist.destroy_process_group()
            before, its = self._excepthooks
            if before is not None and sys.excepthook is its:
                sys.excepthook = before  # torch hangs another one on it for each group, and takes none away


def _make(plan: ProcessPlan, backend: str, timeout: timedelta) -> DefaultGroup:
    store, name = _meet(plan, timeout), f"default/{next(_numbers)}"
    excepthook = sys.excepthook
    try:
        dist.init_process_group(
            backend,
            # On a connection of its own. A start that is given up keeps it to itself, and the next group needs one.
            store=dist.PrefixStore(f"torchstrat/{name}", store.clone()),
            rank=plan.rank,
            world_size=plan.size,
            timeout=timeout,
        )
    except Exception as error:
        raise CommunicationTimeoutError(
            f"{plan.name} waited {timeout.total_seconds():g} s for all {plan.size} processes to start: {error}"
        ) from error
    return DefaultGroup(store, name, is_ours=True, excepthook_before=excepthook)


def _meet(plan: ProcessPlan, timeout: timedelta) -> Any:
    """The store at the meeting point."""
    assert plan.init_method is not None
    place = torchrun_address() if plan.init_method == "env://" else plan.init_method
    joining = plan.joining_timeout(timeout)
    if place not in _stores or not answers(_stores[place]):
        try:
            if plan.rank > 0 and plan.init_method != "env://":
                # torch's own wait takes up to twice as long, prints stacks, and lets no Ctrl-C through
                wait_for_listener(place.removeprefix("tcp://"), joining.total_seconds())
            store, _, _ = next(dist.rendezvous(plan.init_method, plan.rank, plan.size, timeout=joining))
            store.set_timeout(timeout)
        except Exception as error:
            raise CommunicationError(
                f"{plan.name} could not reach the meeting point {place}, where rank 0 listens, within "
                f"{joining.total_seconds():g} s: {error}. {_LONGER}"
            ) from error
        try:
            _stores[place] = fresh_store(store, plan.rank, plan.size, "process group", joining)
        except CommunicationTimeoutError as error:
            raise CommunicationTimeoutError(f"{error} {_LONGER}") from error
    return _stores[place]


def forget_meeting_points() -> None:
    """What this process was part of is over: its next job meets elsewhere. Their stores have a connection each."""
    global _made, _found
    _stores.clear()
    _made = _found = None


def answers(store: dist.Store) -> bool:
    """Whether whoever hosts ``store`` is still there; a later job may have been given the same port."""
    try:
        store.check(["anything"])
    except Exception:  # torch raises several classes here, RuntimeError and DistNetworkError among them
        return False
    return True


def _of_user(plan: ProcessPlan) -> DefaultGroup:
    store = _store_of_users_group(plan)
    if _found is not None and _found.is_alive:
        return _found
    return DefaultGroup(store, f"joined/{next(_joined)}", is_ours=False)


def _store_of_users_group(plan: ProcessPlan) -> dist.Store:
    found = (dist.get_rank(), dist.get_world_size())
    if found != (plan.rank, plan.size):
        raise UnsupportedError(
            f"torch.distributed is initialised as rank {found[0]} of {found[1]}; the launcher says {plan.name}. "
            "Initialise it with the launcher's numbers, or leave that to the strategy."
        )
    store: dist.Store = store_of_default_group()
    return store


_LOOK_SECONDS = 0.01


def fresh_store(store: dist.Store, rank: int, size: int, purpose: str, timeout: timedelta) -> dist.Store:
    """A part of ``store`` for the processes that call this now. Each of ``size`` calls it; returns when all have.

    Every process says a word that nobody has said before, and rank 0 answers each word with its own, which names the
    part. What is left of an earlier start is answered too, and nobody waits for that answer.

    Args:
        store: Where all meet; a `torch.distributed.Store`.
        purpose: Keeps one use of the same store from another.

    Raises:
        CommunicationTimeoutError: a process was not there in time; the message names it.
    """
    own = uuid.uuid4().hex
    meeting = dist.PrefixStore(f"torchstrat/{purpose}", store)
    name = own if rank == 0 else _ask(meeting, rank, own, timeout)
    if rank == 0:
        _answer(meeting, own, size, timeout)
    return dist.PrefixStore(f"torchstrat/{purpose}/{name}", store)


def _ask(meeting: dist.Store, rank: int, own: str, timeout: timedelta) -> str:
    answer = f"answer/{rank}/{own}"
    meeting.set(f"word/{rank}", own)
    try:
        meeting.wait([answer], timeout)
    except RuntimeError as error:
        raise CommunicationTimeoutError(
            f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to start; was it started, and can it reach "
            "MASTER_ADDR?"
        ) from error
    name = str(meeting.get(answer).decode())
    meeting.set(f"met/{name}/{rank}", "")
    return name


def _answer(meeting: dist.Store, own: str, size: int, timeout: timedelta) -> None:
    until = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, size))
    answered: set[str] = set()
    while missing:
        for rank in missing:
            word = said_at(meeting, f"word/{rank}")
            if word is not None and word not in answered:
                answered.add(word)
                meeting.set(f"answer/{rank}/{word}", own)
        missing = [rank for rank in missing if not meeting.check([f"met/{own}/{rank}"])]
        if missing and time.monotonic() > until:
            names = ", ".join(map(str, missing))
            raise CommunicationTimeoutError(
                f"rank 0 waited {timeout.total_seconds():g} s for rank {names} of {size} to start; was it started, and "
                "can it reach MASTER_ADDR?"
            )
        if missing:
            time.sleep(_LOOK_SECONDS)
