"""Collectives on torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors. The only file that calls them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchstrat.cluster import ProcessPlan
from torchstrat.errors import CommunicationError, CommunicationTimeoutError, UnsupportedError

T = TypeVar("T")

_GRACE_SECONDS = 2.0  # how long a rank that gave up waits for the others to say why they did
_generations = itertools.count()
_stores: dict[str, Any] = {}  # one per meeting point: rank 0 may not listen on the same port twice


def _answers(store: Any) -> bool:
    """Whether whoever hosts ``store`` is still there; a later job may have been given the same port."""
    try:
        store.check(["anything"])
    except Exception:  # torch raises several classes here, RuntimeError and DistNetworkError among them
        return False
    return True


def _default_store() -> Any:
    """The store of a process group that the user made; torch has no public name for it."""
    try:
        return dist.distributed_c10d._get_default_store()
    except AttributeError as error:
        raise CommunicationError(
            f"torch {torch.__version__} has no distributed_c10d._get_default_store, which torchstrat needs to reuse an "
            "initialised process group. Let the strategy make the group, or report the version."
        ) from error


class _Work:
    def __init__(self, communicator: ProcessGroupCommunicator, work: Any, what: str) -> None:
        self._communicator, self._work, self._what = communicator, work, what

    def wait(self) -> None:
        self._communicator._guard(self._what, self._work.wait)


class ProcessGroupCommunicator:
    """One process's end of a group. See `Communicator` for what the methods promise.

    An initialised default process group is reused and left alone; otherwise one is made, and destroyed by `close`.

    Args:
        plan: who this process is and where the group meets.
        device: where this process's replica computes; ``cuda`` devices add NCCL.
        timeout: for every single collective, and for the first meeting.
    """

    def __init__(self, plan: ProcessPlan, device: str, timeout: timedelta) -> None:
        self.timeout = timeout
        self._name = plan.name
        self._uses_nccl = device.startswith("cuda")
        self._made_default = not dist.is_initialized()
        self._generation = next(_generations)
        if self._made_default:
            self._store = self._meet(plan)
            self._initialise(plan, device)
        else:
            self._check_existing(plan)
            self._store = dist.PrefixStore(f"torchstrat/{self._generation}", _default_store())
        self.rank, self.size = plan.rank, plan.size
        self.ranks = tuple(range(self.size))
        self._group = self._new_group(self.ranks, "gloo", local=False)
        self._device_group = self._new_group(self.ranks, "nccl", local=False) if self._uses_nccl else self._group
        self._subgroups: dict[tuple[int, ...], ProcessGroupCommunicator] = {}
        self._splits: list[ProcessGroupCommunicator] = []
        self._closed = False

    # -- making groups ----------------------------------------------------------------------------------------------

    def _meet(self, plan: ProcessPlan) -> Any:
        """The store at the meeting point, with a prefix of its own for each strategy made one after the other."""
        assert plan.init_method is not None
        from torchstrat.cluster import torchrun_address

        place = torchrun_address() if plan.init_method == "env://" else plan.init_method
        if place not in _stores or not _answers(_stores[place]):
            try:
                store, _, _ = next(dist.rendezvous(plan.init_method, plan.rank, plan.size, timeout=self.timeout))
            except Exception as error:
                raise CommunicationError(
                    f"{plan.name} could not reach the meeting point {place} within {self.timeout.total_seconds():g} s: "
                    f"{error}"
                ) from error
            _stores[place] = store
        return dist.PrefixStore(f"torchstrat/{self._generation}", _stores[place])

    def _initialise(self, plan: ProcessPlan, device: str) -> None:
        backend = "cpu:gloo,cuda:nccl" if self._uses_nccl else "gloo"
        try:
            dist.init_process_group(
                backend, store=self._store, rank=plan.rank, world_size=plan.size, timeout=self.timeout
            )
        except Exception as error:
            raise CommunicationTimeoutError(
                f"{plan.name} waited {self.timeout.total_seconds():g} s for all {plan.size} processes to start: {error}"
            ) from error

    def _check_existing(self, plan: ProcessPlan) -> None:
        found = (dist.get_rank(), dist.get_world_size())
        if found != (plan.rank, plan.size):
            raise UnsupportedError(
                f"torch.distributed is initialised as rank {found[0]} of {found[1]}; the launcher says {plan.name}. "
                "Initialise it with the launcher's numbers, or leave that to the strategy."
            )

    def _new_group(self, ranks: tuple[int, ...], backend: str, *, local: bool) -> Any:
        return dist.new_group(list(ranks), timeout=self.timeout, backend=backend, use_local_synchronization=local)

    def subgroup(self, ranks: tuple[int, ...]) -> ProcessGroupCommunicator:
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._derive(ranks, local=True)
        return self._subgroups[ranks]

    def split(self) -> ProcessGroupCommunicator:
        derived = self._derive(self.ranks, local=False)
        self._splits.append(derived)
        return derived

    def _derive(self, ranks: tuple[int, ...], *, local: bool) -> ProcessGroupCommunicator:
        derived: ProcessGroupCommunicator = object.__new__(ProcessGroupCommunicator)
        derived.__dict__.update(self.__dict__)
        derived.ranks = tuple(self.ranks[rank] for rank in ranks)
        derived.rank, derived.size = ranks.index(self.rank), len(ranks)
        derived._group = self._guard(
            "the start of a group", lambda: self._new_group(derived.ranks, "gloo", local=local)
        )
        derived._device_group = (
            self._new_group(derived.ranks, "nccl", local=local) if self._uses_nccl else derived._group
        )
        derived._subgroups, derived._splits, derived._made_default = {}, [], False
        return derived

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for derived in (*self._subgroups.values(), *self._splits):
            derived.close()
        if not dist.is_initialized():
            return
        for group in {id(self._group): self._group, id(self._device_group): self._device_group}.values():
            dist.destroy_process_group(group)
        if self._made_default:
            dist.destroy_process_group()

    # -- failures ---------------------------------------------------------------------------------------------------

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        """Run one collective; a failure becomes an error that says who was waited for, and in what."""
        started = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, CommunicationError):
                raise
            raise self._explain(what, error, time.monotonic() - started) from error

    def _explain(self, what: str, error: RuntimeError, waited: float) -> CommunicationError:
        me = self.ranks[self.rank]
        self.report_failure(f"gave up waiting in {what}")
        said = self._what_others_said()
        silent = [rank for rank in self.ranks if rank != me and rank not in said]
        parts = [f"replica {rank} {message}" for rank, message in sorted(said.items())]
        timed_out = waited >= 0.9 * self.timeout.total_seconds()
        kind = CommunicationTimeoutError if timed_out else CommunicationError
        if silent:
            names = ", ".join(f"replica {rank}" for rank in silent)
            parts.insert(
                0, f"{names} did not come" if timed_out else f"lost the connection; nothing was heard from {names}"
            )
        return kind(
            f"replica {me} waited {waited:.1f} s in {what} for the other {self.size - 1}: {'; '.join(parts)}. "
            "Every replica has to make the same calls in the same order; look at that process's output. "
            f"(torch.distributed: {str(error).splitlines()[0][:200]})"
        )

    def report_failure(self, message: str) -> None:
        try:
            self._store.set(f"failures/{self.ranks[self.rank]}", message)
        except Exception:  # the store may have gone with the process that held it; then silence has to speak
            return

    def _what_others_said(self) -> dict[int, str]:
        me, said = self.ranks[self.rank], {}
        deadline = time.monotonic() + _GRACE_SECONDS
        missing = [rank for rank in self.ranks if rank != me]
        try:
            while missing and time.monotonic() < deadline:
                for rank in list(missing):
                    if self._store.check([f"failures/{rank}"]):
                        said[rank] = self._store.get(f"failures/{rank}").decode()
                        missing.remove(rank)
                time.sleep(0.05)
        except Exception:  # see report_failure
            return said
        return said

    # -- collectives ------------------------------------------------------------------------------------------------

    def _group_for(self, tensor: torch.Tensor) -> Any:
        return self._device_group if tensor.is_cuda else self._group

    def all_reduce(self, tensor: torch.Tensor, what: str) -> _Work:
        work = self._guard(what, lambda: dist.all_reduce(tensor, group=self._group_for(tensor), async_op=True))
        return _Work(self, work, what)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        self._guard(what, lambda: dist.broadcast(tensor, self.ranks[source], group=self._group_for(tensor)))

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        self._guard(what, lambda: dist.all_gather(received, tensor, group=self._group_for(tensor)))
        return received

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        received: list[Any] = [None] * self.size
        self._guard(what, lambda: dist.all_gather_object(received, value, group=self._group))
        return received

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        box = [value if self.rank == source else None]
        self._guard(
            what,
            lambda: dist.broadcast_object_list(box, self.ranks[source], group=self._group, device=torch.device("cpu")),
        )
        return box[0]

    def barrier(self, what: str) -> None:
        self._guard(what, lambda: dist.barrier(group=self._group))
