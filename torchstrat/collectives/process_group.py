"""Collectives on torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors. The only file that calls them."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchstrat.cluster import ProcessPlan
from torchstrat.collectives.default_group import DefaultGroup
from torchstrat.collectives.failures import PATIENCE_SECONDS, FailureBoard
from torchstrat.collectives.peers import Identity, Peers, StartLostError
from torchstrat.collectives.shared_memory.lockstep import CallsDifferError, PeersMissingError
from torchstrat.collectives.words import Words
from torchstrat.errors import CommunicationError, CommunicationTimeoutError, ContextError

T = TypeVar("T")

_generations = itertools.count()

_BRIEF_SECONDS = 0.3  # for a note of a process that has ended: it was written before, or not at all

SUMMED_AS: dict[torch.dtype, torch.dtype] = {
    dtype: wider
    for wider, names in {
        torch.int64: ("int16", "uint16", "uint32", "uint64"),
        torch.float32: ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }.items()
    for dtype in (getattr(torch, name, None) for name in names)
    if dtype is not None
}
"""Dtypes that gloo and NCCL cannot add up, and in which their sum is computed instead."""


_leaves_garbage = False
_collected_before: list[bool] = []  # whether it was on, for each fork that is going on


def _leave_garbage_to_the_parent() -> None:
    """Let forked children, such as a DataLoader's workers, collect nothing that was there when they were forked.

    One that collected a strategy which the parent had closed and dropped would crash: a group ends its threads, and
    shared memory its mapping, and children have neither.
    """
    global _leaves_garbage
    if _leaves_garbage or not hasattr(os, "register_at_fork"):
        return
    _leaves_garbage = True
    os.register_at_fork(before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_freeze_in_child)


def _stop_collecting() -> None:
    # Other hooks run between the fork and the child's freeze, and might start a collection.
    _collected_before.append(gc.isenabled())
    gc.disable()


def _collect_again() -> None:
    if _collected_before.pop():
        gc.enable()


def _freeze_in_child() -> None:
    gc.freeze()
    _collect_again()


class _Work:
    def __init__(self, communicator: ProcessGroupCommunicator, work: Any, what: str) -> None:
        self._communicator, self._work, self._what = communicator, work, what

    def wait(self) -> None:
        self._communicator.guard(self._what, self._work.wait)


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        return None


_abandoned: collections.deque[Any] = collections.deque()
"""Groups that nobody refers to any more. Not destroyed right there: a garbage collection may come in the middle of any
other call to torch.distributed."""


def abandon(groups: Iterable[Any]) -> None:
    """Have these destroyed by the next call here that makes or closes groups."""
    _abandoned.extend(groups)


def _destroy_abandoned() -> None:
    while _abandoned:
        _destroy(_abandoned.popleft())


class _Family:
    """What the communicators derived from one another share."""

    def __init__(self, board: FailureBoard, default: DefaultGroup, store: Any) -> None:
        self.board = board
        self.default = default
        self.failure: CommunicationError | None = None
        self.store, self.words = store, itertools.count()
        self.groups: list[Any] = []  # but for those of channels
        self.closed = False
        weakref.finalize(self, abandon, self.groups).atexit = False  # of strategies that were dropped without `close`


class ProcessGroupCommunicator:
    """One process's end of a group. See `Communicator` for what the methods promise.

    An initialised default process group is reused and left alone; otherwise one is made, and destroyed by `close` of
    the last communicator that uses it.

    Args:
        plan: who this process is and where the group meets.
        device: where this process's replica computes; ``cuda`` devices add NCCL. Without it tensors on GPUs go through
            gloo, and GPUs may be shared.
        timeout: for every single collective, and for the first meeting.
        is_passing: it lasts for a moment, on a default group that is there: it neither keeps that alive nor ends it.
    """

    def __init__(self, plan: ProcessPlan, device: str, timeout: timedelta, *, is_passing: bool = False) -> None:
        self.timeout = timeout
        self.rank, self.size = plan.rank, plan.size
        self.ranks = tuple(range(self.size))
        self._global_rank = plan.rank
        _destroy_abandoned()
        self._uses_nccl = device.startswith("cuda")
        backend = "cpu:gloo,cuda:nccl" if self._uses_nccl else "gloo"
        default = DefaultGroup.join(self, plan, backend, timeout, is_passing=is_passing)
        store = dist.PrefixStore(f"torchstrat/{next(_generations)}", default.store)
        self._family = _Family(FailureBoard(store, plan.rank), default, store)
        self._subgroups: dict[tuple[int, ...], ProcessGroupCommunicator] = {}
        try:
            self._make_groups(host_only=False)
        except BaseException:
            self.close()
            raise

    # -- making groups ----------------------------------------------------------------------------------------------

    def _make_groups(self, *, host_only: bool) -> None:
        _leave_garbage_to_the_parent()
        self._group = self._device_group = self._new_group("gloo")
        if not host_only:
            self._family.groups.append(self._group)
        if self._family.default.peers is None:
            told = self.all_gather_object(Identity.own(), "the first meeting of all processes")
            self._family.default.peers = Peers(told)
        if self._uses_nccl and not host_only:
            self._device_group = self._new_group("nccl")
            self._family.groups.append(self._device_group)

    def _new_group(self, backend: str) -> Any:
        # All processes of the job make every group: with use_local_synchronization torch names a group after the number
        # of groups that each member has, and members that had different ones before never find each other.
        call = f"the start of a group of replicas {list(self.ranks)}"
        start = partial(dist.new_group, list(self.ranks), timeout=self.timeout, backend=backend)
        peers = self._family.default.peers
        if backend == "gloo" and peers is not None:
            group = self.guard(call, lambda: peers.started(self.ranks, start))
        else:
            group = self.guard(call, start)
        if backend == "gloo" and group is not dist.GroupMember.NON_GROUP_MEMBER:
            # A process is connected before the others are. One that went on, and closed, would break their start.
            self.guard(call, partial(dist.barrier, group=group))
        return group

    def subgroup(self, ranks: tuple[int, ...]) -> ProcessGroupCommunicator:
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._derive(ranks, host_only=False)
        return self._subgroups[ranks]

    def split(self) -> ProcessGroupCommunicator:
        _destroy_abandoned()
        channel = self._derive(self.ranks, host_only=True)
        weakref.finalize(channel, abandon, [channel._group]).atexit = False
        return channel

    def _derive(self, ranks: tuple[int, ...], *, host_only: bool) -> ProcessGroupCommunicator:
        derived: ProcessGroupCommunicator = object.__new__(ProcessGroupCommunicator)
        derived.__dict__.update(self.__dict__)
        derived.ranks, derived.size = ranks, len(ranks)
        derived.rank = ranks.index(self.rank) if self.rank in ranks else -1
        derived._subgroups = {}
        derived._make_groups(host_only=host_only)
        return derived

    def close(self) -> None:
        family = self._family
        if family.closed:
            return
        family.closed = True
        family.board.post("closed its strategy")
        abandon(family.groups)
        family.groups.clear()
        _destroy_abandoned()
        family.default.leave(self)

    # -- failures ---------------------------------------------------------------------------------------------------

    def guard(self, what: str, call: Callable[[], T]) -> T:
        """Run one collective; a failure becomes an error that says who was waited for, and in what."""
        if self._family.closed:
            raise ContextError(f"{what} was called after the strategy had been closed; make a new strategy.")
        if self._family.failure is not None:
            raise CommunicationError(
                f"{what} cannot start, because an earlier call failed and the processes no longer stand at the same "
                f"place: {self._family.failure}"
            )
        started = time.monotonic()
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and self._family.default.is_alive:
                raise  # of the value's own pickling
            self._family.failure = self._explain(what, error, time.monotonic() - started)
            raise self._family.failure from error

    def _explain(self, what: str, error: Exception, waited: float) -> CommunicationError:
        me = self._global_rank
        if not self._family.default.is_alive:
            return CommunicationError(
                f"{what} found that the process group the strategy works on has been destroyed; close the strategy "
                "before calling torch.distributed.destroy_process_group."
            )
        if isinstance(error, CallsDifferError):
            return self._explain_divergence(what)
        if isinstance(error, StartLostError):
            self._family.board.leave_alone()
        self._family.board.post(f"gave up waiting in {what}")
        if isinstance(error, PeersMissingError):
            return self._explain_missing(what, error, waited)
        others = [rank for rank in self.ranks if rank != me]
        said = self._family.board.read(others)
        timed_out = waited >= 0.9 * self.timeout.total_seconds()
        silent = [rank for rank in others if rank not in said]
        parts = []
        if silent and timed_out:
            parts.append(f"{_names(silent)} did not come")
        elif silent:
            parts.append(f"lost the connection; nothing was heard from {_names(silent)}")
        told = f"(torch.distributed: {(str(error).splitlines() or [''])[0][:200]})"
        return self._error(what, waited, parts, said, told, timed_out=timed_out)

    def _explain_divergence(self, what: str) -> CommunicationError:
        self._family.board.post(f"called {what}")
        said = {self._global_rank: f"called {what}", **self._family.board.read(list(self.ranks))}
        return CommunicationError(
            f"the processes no longer make the same calls: "
            f"{', '.join(f'process {rank} {said[rank]}' for rank in sorted(said))}. Each has to make the same in the "
            "same order, also those whose result only one of them prints; look for a branch that depends on the rank."
        )

    def _explain_missing(self, what: str, error: PeersMissingError, waited: float) -> CommunicationError:
        """Who is missing is known; what is not is whether they have left a note."""
        ended, closed, late = (
            [self.ranks[place] for place in places] for places in (error.ended, error.closed, error.late)
        )
        is_over = bool(ended or closed)
        said = self._family.board.read([*ended, *closed, *late], _BRIEF_SECONDS if is_over else PATIENCE_SECONDS)
        parts = []
        if silent := [rank for rank in ended if rank not in said]:
            parts.append(f"the process has ended, and nothing was heard from {_names(silent)}")
        if silent := [rank for rank in closed if rank not in said]:
            parts.append(f"{_names(silent)} closed its strategy")
        if silent := [rank for rank in late if rank not in said and not is_over]:
            parts.append(f"{_names(silent)} did not come")
        return self._error(what, waited, parts, said, "", timed_out=not is_over)

    def _error(
        self, what: str, waited: float, parts: list[str], said: dict[int, str], told: str, *, timed_out: bool
    ) -> CommunicationError:
        parts += [f"replica {rank} {said[rank]}" for rank in sorted(said)]
        if self._family.board.is_gone:
            parts.append("the store at which all met (hosted by the launcher, or by replica 0) does not answer either")
        return (CommunicationTimeoutError if timed_out else CommunicationError)(
            f"replica {self._global_rank} waited {waited:.1f} s in {what} for the other {self.size - 1}: "
            f"{'; '.join(parts)}. Every replica has to make the same calls in the same order; look at that process's "
            f"output. {told}".rstrip()
        )

    def give_up(self, what: str, interruption: BaseException) -> None:
        """A collective was left half-way, by Ctrl-C for example: the ranks no longer stand at the same place."""
        if self._family.failure is None:
            self._family.failure = CommunicationError(f"{what} was interrupted by {type(interruption).__name__}")

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        self._family.board.post(message, leaves=leaves)

    def call_when_leaving(self, call: Callable[[bool], None] | None) -> None:
        """``call(True)`` when this rank has reported that it leaves, ``call(False)`` when it comes all the same."""
        self._family.board.leaving = call

    def words(self) -> Words:
        family = self._family
        store = dist.PrefixStore(f"words/{next(family.words)}", family.store)
        peers, ranks = family.default.peers, self.ranks

        def ended() -> list[int]:
            return [] if peers is None else [ranks.index(rank) for rank in peers.ended(ranks)]

        return Words(store, self.rank, self.size, family.board.visit, ended)

    def forget_failure(self) -> None:
        self._family.board.clear()

    # -- collectives ------------------------------------------------------------------------------------------------

    def _group_for(self, tensor: torch.Tensor) -> Any:
        return self._device_group if tensor.is_cuda else self._group

    def all_reduce(self, tensor: torch.Tensor, what: str) -> _Work | Done:
        if tensor.numel() == 0:
            return Done()
        if tensor.dtype in SUMMED_AS:
            parts = self.all_gather(tensor, what)
            wide = [part.to(SUMMED_AS[tensor.dtype]) for part in parts]
            tensor.copy_(sum(wide[1:], start=wide[0]).to(tensor.dtype))
            return Done()
        work = self.guard(what, lambda: dist.all_reduce(tensor, group=self._group_for(tensor), async_op=True))
        return _Work(self, work, what)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        if tensor.numel():
            group = self._group_for(tensor)
            self.guard(what, lambda: dist.broadcast(bytes_of(tensor), self.ranks[source], group=group))

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.is_cuda and not self._uses_nccl:  # gloo sums and broadcasts from GPUs, and does not gather
            return [one.to(tensor.device) for one in self.all_gather(tensor.cpu(), what)]
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            parts = [bytes_of(one) for one in received]
            self.guard(what, lambda: dist.all_gather(parts, bytes_of(tensor), group=self._group_for(tensor)))
        return received

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        row = torch.tensor(numbers, dtype=torch.float64)
        return [received.tolist() for received in self.all_gather(row, what)]

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        received: list[Any] = [None] * self.size
        self.guard(what, lambda: dist.all_gather_object(received, value, group=self._group))
        return received

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        box = [value if self.rank == source else None]
        self.guard(
            what,
            lambda: dist.broadcast_object_list(box, self.ranks[source], group=self._group, device=torch.device("cpu")),
        )
        return box[0]

    def barrier(self, what: str) -> None:
        self.guard(what, lambda: dist.barrier(group=self._group))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as what it is in memory: gloo and NCCL know only some dtypes, and copying needs none."""
    return tensor.detach().view(-1).view(torch.uint8)


def _names(ranks: list[int]) -> str:
    return ", ".join(f"replica {rank}" for rank in ranks)


def _destroy(group: Any) -> None:
    with contextlib.suppress(ValueError):  # the user has destroyed all of them
        dist.destroy_process_group(group)
