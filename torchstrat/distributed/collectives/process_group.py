"""Collectives on torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors. The only file that calls them."""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchstrat.core.engine import Done
from torchstrat.core.errors import CommunicationError, CommunicationTimeoutError, ContextError
from torchstrat.core.randomness import READING
from torchstrat.core.tensor_bytes import bytes_of
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.agreement import OBJECT, header, length_in, pickled
from torchstrat.distributed.collectives.default_group import DefaultGroup
from torchstrat.distributed.collectives.notes import (
    MOMENT_SECONDS,
    PATIENCE_SECONDS,
    Channel,
    FailureBoard,
    Identity,
    Peers,
    StandstillError,
    StoredWords,
)
from torchstrat.distributed.collectives.shared_memory.lockstep import CallsDifferError, PeersMissingError

logger = logging.getLogger("torchstrat.collectives")

T = TypeVar("T")

_SLICE = timedelta(seconds=MOMENT_SECONDS / 2)  # of a wait, between which a rank looks around
_BRIEF_SECONDS = 0.3  # for a note of a process that has ended: it was written before, or not at all

SUMMED_AS: dict[torch.dtype, torch.dtype] = {
    **dict.fromkeys((torch.int16, torch.uint16, torch.uint32, torch.uint64), torch.int64),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.float32),
    **dict.fromkeys((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.float32),
}
"""Dtypes that gloo and NCCL cannot add up, and in which their sum is computed instead."""


_collected_before: list[bool] = []  # whether it was on, for each fork that is going on


@functools.cache
def _leave_garbage_to_the_parent() -> None:
    """Let forked children, such as a DataLoader's workers, collect nothing that was there when they were forked.

    One that collected a strategy which the parent had closed and dropped would crash: a group ends its threads, and
    shared memory its mapping, and children have neither.
    """
    os.register_at_fork(before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_freeze_in_child)


def _stop_collecting() -> None:
    # Other hooks run between the fork and the child's freeze, and might start a collection. A thread that reads a
    # random state has it off and puts it on again: not between this and the fork.
    READING.acquire()
    _collected_before.append(gc.isenabled())
    gc.disable()


def _collect_again() -> None:
    if _collected_before.pop():
        gc.enable()
    READING.release()


def _freeze_in_child() -> None:
    gc.freeze()
    _collect_again()


class _Work:
    def __init__(self, communicator: ProcessGroupCommunicator, work: object, what: str, *, by_device: bool) -> None:
        self._communicator, self._work, self._what = communicator, work, what
        self._number, self._by_device = communicator.channel.count, by_device
        communicator.channel.begun += 1

    def wait(self) -> None:
        communicator = self._communicator
        communicator.guard(
            self._what, lambda: communicator.finish(self._work, by_device=self._by_device), number=self._number
        )
        communicator.channel.begun -= 1


_abandoned: collections.deque[dist.ProcessGroup] = collections.deque()
"""Groups that nobody refers to any more. Not destroyed right there: a garbage collection may come in the middle of any
other call to torch.distributed."""


_communicators: weakref.WeakSet[ProcessGroupCommunicator] = weakref.WeakSet()


def abandon(groups: Iterable[dist.ProcessGroup]) -> None:
    """Have these destroyed by the next call here that makes or closes groups."""
    _abandoned.extend(groups)


def _destroy_abandoned() -> None:
    while _abandoned:
        _destroy([_abandoned.popleft()])


@functools.cache
def _leave_stuck_groups_at_exit() -> None:
    atexit.register(_leave_stuck_groups)


def _leave_stuck_groups() -> None:
    """Let Python end without destroying groups in which this rank has called what another may never come to."""
    for communicator in list(_communicators):
        communicator.abandon_if_stuck()
    for group in _abandoned:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # what a module refers to is destroyed as well


class _Family:
    """What the communicators derived from one another share. ``prefix``: of what they say in the store."""

    def __init__(self, default: DefaultGroup, prefix: str, rank: int) -> None:
        self.board = FailureBoard(default.visits, prefix, rank)
        self.default, self.prefix = default, prefix
        self.failure: CommunicationError | None = None
        self.left_runs = 0
        self.words, self.channels = itertools.count(), itertools.count()
        self.members: weakref.WeakSet[ProcessGroupCommunicator] = weakref.WeakSet()
        self.closed = False


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
        self._family = _Family(default, default.new_prefix(), plan.rank)
        self._subgroups: dict[tuple[int, ...], ProcessGroupCommunicator] = {}
        try:
            self._make_groups(host_only=False)
        except BaseException:
            self.close()
            raise

    # -- making groups ----------------------------------------------------------------------------------------------

    def _make_groups(self, *, host_only: bool) -> None:
        _leave_garbage_to_the_parent()
        _leave_stuck_groups_at_exit()
        _communicators.add(self)
        family = self._family
        name = f"{family.prefix}/{next(family.channels)}"
        self.channel = family.default.standstill.channel(self, name, self.ranks, family.prefix)
        family.members.add(self)
        self._groups: list[dist.ProcessGroup] = []
        weakref.finalize(self, abandon, self._groups).atexit = False  # of those that are dropped without `close`
        self._group = self._device_group = self._new_group("gloo")
        if self._family.default.peers is None:
            told = self.all_gather_object(Identity.own(), "the first meeting of all processes")
            self._family.default.peers = Peers(told)
        if self._uses_nccl and not host_only:
            self._device_group = self._new_group("nccl")
        logger.debug("replica %d is in the group %s of replicas %s.", self.rank, name, list(self.ranks))

    def _new_group(self, backend: str) -> Any:
        # All processes of the job make every group: with use_local_synchronization torch names a group after the number
        # of groups that each member has, and members that had different ones before never find each other.
        call = f"the start of a group of replicas {list(self.ranks)}"
        start = partial(dist.new_group, list(self.ranks), timeout=self.timeout, backend=backend)
        peers = self._family.default.peers
        if backend == "gloo" and peers is not None:
            group = self.guard(call, lambda: peers.started(self.ranks, start, self.look))
        else:
            group = self.guard(call, start)
        if backend == "gloo" and group is not dist.GroupMember.NON_GROUP_MEMBER:
            # A process is connected before the others are. One that went on, and closed, would break their start.
            self.guard(call, lambda: self.finish(dist.barrier(group=group, async_op=True)))
        self._groups.append(group)
        return group

    def subgroup(self, ranks: tuple[int, ...]) -> ProcessGroupCommunicator:
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._derive(ranks, host_only=False)
        return self._subgroups[ranks]

    def split(self) -> ProcessGroupCommunicator:
        _destroy_abandoned()
        return self._derive(self.ranks, host_only=True)

    def _derive(self, ranks: tuple[int, ...], *, host_only: bool) -> ProcessGroupCommunicator:
        derived: ProcessGroupCommunicator = object.__new__(ProcessGroupCommunicator)
        derived.__dict__.update(self.__dict__)
        derived.ranks, derived.size = ranks, len(ranks)
        derived.rank = ranks.index(self.rank) if self.rank in ranks else -1
        derived.be_part(host_only=host_only)
        return derived

    def be_part(self, *, host_only: bool) -> None:
        """Of a copy for some of the ranks: groups of its own, for the host's memory alone or for devices too."""
        self._subgroups = {}
        self._make_groups(host_only=host_only)

    def close(self) -> None:
        family = self._family
        if family.closed or self.is_inherited:
            return
        family.closed = True
        family.board.post("closed its strategy")
        for communicator in (self, *self._subgroups.values()):
            communicator.destroy_groups()
        _destroy_abandoned()
        family.default.leave(self)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that is in the group, and that goes on with it."""
        return self._family.board.is_inherited

    def abandon_if_stuck(self) -> None:
        """Where a call has failed, or has begun and not ended."""
        if self._family.failure is not None or self.channel.call or self.channel.begun:
            abandon(self._groups)

    def destroy_groups(self) -> None:
        self._group = self._device_group = None  # a collection of garbage may not be what ends them
        while self._groups:
            _destroy([self._groups.pop()])

    def _let_go(self) -> None:
        """Hang up where others may wait for this rank, which will not come: they could not end before they are told."""
        for communicator in list(self._family.members):
            # What goes on there of its own would be waited for.
            if not communicator.channel.call and not communicator.channel.begun:
                communicator.destroy_groups()

    # -- failures ---------------------------------------------------------------------------------------------------

    def guard(
        self,
        what: str,
        call: Callable[[], T],
        *,
        channel: Channel | None = None,
        number: int = 0,
        is_last_if_left: bool = False,
    ) -> T:
        """Run one collective; a failure becomes an error that says who was waited for, and in what.

        ``is_last_if_left``: where it is left half-way, by Ctrl-C for example, ranks no longer stand at the same place.
        ``number``: of the call on the ``channel`` that is only waited for now, having begun before; 0: another one.
        """
        if self._family.closed:
            raise ContextError(f"{what} was called after the strategy had been closed; make a new strategy.")
        if self.is_inherited:
            raise ContextError(
                f"{what} was called in a fork of the process of replica {self._global_rank}, which itself uses the "
                "connections to the others and the memory they share. Make a strategy in the new process, or compute "
                "there without one."
            )
        if self._family.failure is not None:
            raise CommunicationError(
                f"{what} cannot start, because an earlier call failed and the processes no longer stand at the same "
                f"place: {self._family.failure}"
            )
        if self._family.board.has_note:
            self._family.board.clear()  # it takes part again
        channel = channel or self.channel
        if not number:
            channel.count += 1
        before = channel.call, channel.number
        channel.call, channel.number = what, number or channel.count
        started = time.monotonic()
        try:
            result = call()
            self._family.default.standstill.over(channel)
            return result
        except CommunicationError:  # of a call that this one is made of
            raise
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and self._family.default.is_alive:
                raise  # of the value's own pickling
            self._family.failure = self._explain(what, error, time.monotonic() - started)
            raise self._family.failure from error
        except BaseException as interruption:
            if is_last_if_left and not isinstance(interruption, Exception) and self._family.failure is None:
                self._family.failure = CommunicationError(f"{what} was interrupted by {type(interruption).__name__}")
            raise
        finally:
            channel.call, channel.number = before

    def finish(self, work: Any, *, by_device: bool = False) -> None:
        """Wait, in a call of `guard`, for a collective that has begun. ``by_device``: this thread need not."""
        if by_device:
            work.wait()
            return
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()
                    return
            self.look()

    def look(self, *, at_once: bool = False) -> None:
        """For who waits for other ranks in a call of `guard`. Raises where that has no end; see `Standstill.look`."""
        self._family.default.standstill.look(self.channel, at_once=at_once)

    def _explain(self, what: str, error: Exception, waited: float) -> CommunicationError:
        me = self._global_rank
        if not self._family.default.is_alive:
            return CommunicationError(
                f"{what} found that the process group the strategy works on has been destroyed; close the strategy "
                "before calling torch.distributed.destroy_process_group."
            )
        if isinstance(error, CallsDifferError):
            self._family.board.post(f"called {what}")
            return CommunicationError(self._who_called(what))
        if isinstance(error, StandstillError):
            return self._explain_standstill(what, error, waited)
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

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        text = self._who_called(what)
        if is_over:
            self._family.failure = CommunicationError(text)
            self._family.board.post(f"called {what}")
        return text

    def _who_called(self, what: str) -> str:
        place = f"{self.channel.name}/{self.channel.count}"
        return _differing(self._family.board.calls(place, what, self.ranks), self.ranks)

    def _explain_standstill(self, what: str, error: StandstillError, waited: float) -> CommunicationError:
        self._family.board.post(f"called {what}")
        self._let_go()
        if error.failed:
            return self._error(what, waited, [], error.failed, "", timed_out=False)
        return CommunicationError(_differing(error.calls, self.ranks))

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

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        self._family.board.post(message, leaves=leaves)

    def leave_run(self) -> None:
        self._family.left_runs += 1

    def named(self, what: str) -> str:
        left = self._family.left_runs
        return f"{what} after {left} run{'s' * (left > 1)} that raised" if left else what

    def call_when_leaving(self, call: Callable[[bool], None] | None) -> None:
        """``call(True)`` when this rank has reported that it leaves, ``call(False)`` when it comes all the same."""
        self._family.board.leaving = call

    def words(self, what: str) -> StoredWords:
        return StoredWords(_WordsPlace(self, self._family, what), self.rank, self.size, self.timeout.total_seconds())

    def ended(self) -> list[int]:
        """Places in this group of those whose processes have ended, as far as this one can tell."""
        peers = self._family.default.peers
        return [] if peers is None else [self.ranks.index(rank) for rank in peers.ended(self.ranks)]

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
        return _Work(self, work, what, by_device=self._is_by_device(tensor))

    def _is_by_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and self._uses_nccl

    def _run(self, what: str, start: Callable[[], object], tensor: torch.Tensor | None = None) -> None:
        by_device = tensor is not None and self._is_by_device(tensor)
        self.guard(what, lambda: self.finish(start(), by_device=by_device))

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        if tensor.numel():
            own = bytes_of(tensor)
            self._run(
                what,
                lambda: dist.broadcast(own, self.ranks[source], group=self._group_for(tensor), async_op=True),
                tensor,
            )

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.is_cuda and not self._uses_nccl:  # gloo sums and broadcasts from GPUs, and does not gather
            return [one.to(tensor.device) for one in self.all_gather(tensor.cpu(), what)]
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            parts, own = [bytes_of(one) for one in received], bytes_of(tensor)
            self._run(what, lambda: dist.all_gather(parts, own, group=self._group_for(tensor), async_op=True), tensor)
        return received

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return [received.tolist() for received in self.all_gather(row, what)]

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        message = pickled(value, what)
        lengths = self._meet(message, what)
        row = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        row[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = self.all_gather(row, what)
        return [pickle.loads(one.numpy()[:length].tobytes()) for one, length in zip(rows, lengths, strict=True)]

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        message = pickled(value, what) if self.rank == source else b""
        length = self._meet(message, what)[source]
        if self.rank != source:
            row = torch.empty(length, dtype=torch.uint8, device="cpu")
            self.broadcast(row, source, what)
            return pickle.loads(row.numpy().tobytes())
        self.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), source, what)
        return value

    def _meet(self, message: bytes, what: str) -> list[int]:
        """How long each rank's message is: they have to know before any is sent, and learn who is in another call."""
        what = self.named(what)
        own = torch.tensor(header(OBJECT, what, (float(len(message)),)), dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(own) for _ in range(self.size)]

        def exchange() -> None:
            self.finish(dist.all_gather(rows, own, group=self._group, async_op=True))
            if any(row[0] != own[0] for row in rows):
                raise CallsDifferError

        self.guard(what, exchange)
        return [length_in(row.tolist()) for row in rows]

    def barrier(self, what: str) -> None:
        self._run(what, lambda: dist.barrier(group=self._group, async_op=True))


class _WordsPlace:
    """Where the words of one thing are left, and a channel of their own for who waits for them."""

    def __init__(self, communicator: ProcessGroupCommunicator, family: _Family, what: str) -> None:
        self._communicator, self._family, self._what = communicator, family, what
        self._prefix = f"words/{next(family.words)}"
        name = f"{family.prefix}/{self._prefix}"
        self._channel = family.default.standstill.channel(self, name, communicator.ranks, family.prefix)

    def visit(self, call: Callable[[dist.Store], T], otherwise: T) -> T:
        return self._family.board.visit(lambda store: call(dist.PrefixStore(self._prefix, store)), otherwise)

    def told(self) -> None:
        self._channel.count = 1

    def wait(self, listen: Callable[[], T]) -> T:
        return self._communicator.guard(self._what, listen, channel=self._channel, number=1)

    def look(self) -> None:
        self._family.default.standstill.look(self._channel)

    def ended(self) -> Sequence[int]:
        return self._communicator.ended()


def _differing(calls: Mapping[int, str], ranks: Sequence[int]) -> str:
    """``calls``: what each rank has called, of those that have told in time."""
    told = [f"replica {rank} called {calls.get(rank, 'another, which it has not told in time')}" for rank in ranks]
    return (
        f"the replicas no longer make the same calls: {', '.join(told)}. Each has to make the same in the same order, "
        "also those whose result only one of them prints; look for a branch that depends on the rank."
    )


def _names(ranks: list[int]) -> str:
    return ", ".join(f"replica {rank}" for rank in ranks)


def _destroy(last: list[dist.ProcessGroup]) -> None:
    """End the group that is in ``last``, which nobody else refers to: no frame of an error that somebody keeps does.

    Its destructor waits for what was begun in it, until the timeout where another rank neither comes nor hangs up.
    """
    with contextlib.suppress(ValueError):  # the user has destroyed all of them
        dist.destroy_process_group(last[0])
    thread = threading.Thread(target=last.clear, name="torchstrat-group-end", daemon=True)
    thread.start()
    thread.join(_BRIEF_SECONDS)  # nearly always at once
