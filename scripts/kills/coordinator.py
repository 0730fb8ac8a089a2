"""The coordinator of ./scripts/chaos, in a process of its own: does what it is told, says what it does, and may die.

It takes one act after the other from a pipe, and tells each thing before it does it: what was told has been done, or
the process died meanwhile. It dies, or has a server killed, in the middle of an act, at one of the act's calls of
Python functions: how many there are in all is known from the last time.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from scripts.kills import drawing
from torchstrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from torchstrat.testing.fault_plan import FaultPlan

VARIABLES = 3
SIDE_FUNCTIONS = 3
TRIAL_STEPS = 8
JOIN_SECONDS = 300.0
"""For a handful of functions of milliseconds: as long as all tasks may be down at once, on a busy machine."""
UNAVAILABLE = 75
"""The exit code of a coordinator that met a lost server before it could say from what to restore."""


@dataclass(frozen=True)
class Setting:
    """What a life of the coordinator begins with."""

    cluster: Mapping[str, Any]
    environment: Mapping[str, str]
    folder: Path
    size: int
    servers: int
    life: int
    functions: int
    """In a round."""


@dataclass(frozen=True)
class Order:
    """An act, and who dies in it. ``call``: at which of its calls; None: nobody dies."""

    act: str
    call: int | None = None
    victim: tuple[str, int] | None = None


def live(pipe: Connection, setting: Setting, starting: Order) -> None:
    """A life, from start to end."""
    with (setting.folder / "coordinator.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(setting.environment)
    told = Told(pipe)
    try:
        with told.moment(starting):
            training = Training(told, setting)
        told("started")
        while (order := told.hear()) is not None:
            training.play(order)
            told("played", order.act)
        training.strategy.close()
        told("closed")
    except ts.errors.ParameterServerUnavailable as error:
        traceback.print_exc()
        told("unavailable", str(error))
        os._exit(UNAVAILABLE)  # as a kill: nothing is put in order
    except BaseException:
        traceback.print_exc()
        told("failed", traceback.format_exc())
        os._exit(1)


class Told:
    """The other end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self._here = pipe, threading.Lock(), threading.local()

    def __call__(self, what: str, *about: object) -> None:
        self._here.speaks = True
        with self._lock:
            self._pipe.send((what, *about))
        self._here.speaks = False

    def hear(self) -> Any:
        if not self._pipe.poll(JOIN_SECONDS):
            raise TimeoutError(f"nothing was heard of ./scripts/chaos within {JOIN_SECONDS:g} s")
        return self._pipe.recv()

    @contextmanager
    def moment(self, order: Order) -> Iterator[None]:
        """The block is the act: at its ``call``-th call, or else at its end, the victim dies."""
        numbers, lock, is_due = itertools.count(1), threading.Lock(), [order.call is not None]

        def act() -> None:
            with lock:
                if not is_due[0]:
                    return
                is_due[0] = False
                assert order.victim is not None
                self("kills", *order.victim, order.act)
                if order.victim[0] == drawing.COORDINATOR:
                    os.kill(os.getpid(), signal.SIGKILL)
                assert self.hear() == "killed"

        def look(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and not getattr(self._here, "speaks", False) and next(numbers) == order.call:
                act()

        threading.setprofile(look)  # of the thread that writes a checkpoint
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self("calls", order.act, next(numbers))
            act()


class Training:
    """The training and what happens to it."""

    def __init__(self, told: Told, setting: Setting) -> None:
        self._told, self._setting = told, setting
        self._plan = FaultPlan(setting.folder / "plan")
        self._steps = itertools.count(setting.life * 100_000)
        self._went_back = False
        resolver = SimpleClusterResolver(ClusterSpec(setting.cluster), task_type="chief", task_id=0)
        self.strategy = strategy = ts.ParameterServerStrategy(
            resolver, on_server_loss="restore", timeout=timedelta(seconds=JOIN_SECONDS)
        )
        with strategy.scope():
            self.model = nn.ParameterList(nn.Parameter(torch.zeros(setting.size)) for _ in range(VARIABLES))
            self.side = nn.ParameterList([nn.Parameter(torch.zeros(()))])
            optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            side_optimizer = torch.optim.SGD(self.side.parameters(), lr=1.0)
        self.coordinator = coordinator = ts.ClusterCoordinator(strategy)
        self._note_losses()
        self._leased = coordinator.create_leased_dataset(lambda: range(setting.size), batch_size=1)
        data = coordinator.create_per_worker_dataset(lambda: torch.utils.data.DataLoader(range(1_000_000)))
        self._iterator = iter(data)
        self._add_one = adding(self.model, optimizer)
        self._add_aside = adding_aside(self.side, side_optimizer)
        self._manager = ts.CheckpointManager(setting.folder / "checkpoints")
        self._checkpoint = ts.Checkpoint(
            model=self.model,
            optimizer=optimizer,
            data=self._leased,
            side=self.side,
            side_optimizer=side_optimizer,
        )
        self._start()

    def _start(self) -> None:
        if self._manager.latest is None:
            self._save(asynchronous=False)
        else:
            self._show(at_rest=False)  # as the one before has left it
            self._restore()
        self.coordinator.restore_on_server_loss(
            self._manager, self._checkpoint, on_restored=self._note_restore, max_restores=1_000_000
        )
        self._show()

    def _note_losses(self) -> None:
        job = self.coordinator._job  # noqa: SLF001  # losses of workers are told to nobody else
        tell = job.on_worker_lost

        def lost(peer: Any, reason: Any) -> None:
            self._told("noticed", peer.pid, time.time())
            tell(peer, reason)

        job.on_worker_lost = lost

    def _note_restore(self, step: int) -> None:
        self._went_back = True
        self._told("restored", step)

    # -- acts -------------------------------------------------------------------------------------------------------

    def play(self, order: Order) -> None:
        """One act, functions to their end, and what is there then."""
        self._went_back = False
        beside = order.act in (drawing.RUNNING, drawing.SAVING_BESIDE, drawing.RESTORING_A_PART, drawing.DROPPING)
        functions: list[ts.RemoteValue[int]] = []
        ended: list[int] = []
        with self._told.moment(order):
            if beside:
                functions += self._schedule()
            self._acts()[order.act]()
            if order.act == drawing.RUNNING:
                ended += self._end(functions)
        if not self._went_back and order.act != drawing.RUNNING:
            functions += [] if beside else self._schedule()
            ended += self._end(functions)
        self._show()

    def _acts(self) -> Mapping[str, Callable[[], object]]:
        return {
            drawing.IDLE: self.coordinator.done,
            drawing.RUNNING: lambda: None,
            drawing.SAVING: lambda: self._save(asynchronous=False),
            drawing.SAVING_BESIDE: lambda: self._save(asynchronous=True),
            drawing.RESTORING: self._go_back,
            drawing.RESTORING_A_PART: self._restore_a_part,
            drawing.RELEASING: lambda: self._try_a_model(is_released=True),
            drawing.DROPPING: lambda: self._try_a_model(is_released=False),
        }

    def _schedule(self) -> list[ts.RemoteValue[int]]:
        """A few functions for each worker; fewer where a lost server takes all back."""
        functions = []
        for lease in itertools.islice(self._leased, self._setting.functions):
            self._told("scheduled", int(lease.rows[0]))
            functions.append(self.coordinator.schedule(self._add_one, args=(lease, self._iterator), max_attempts=None))
            if self._went_back:
                break
        if not functions:
            raise RuntimeError("all places are used up and kills are left: some phase is not reached.")
        return functions

    def _end(self, functions: list[ts.RemoteValue[int]]) -> list[int]:
        self.coordinator.join(JOIN_SECONDS)
        if self._went_back:  # of them, some were cancelled, and the others are undone
            return []
        places = results_of(functions)
        self._told("ended", places)
        return places

    def _save(self, *, asynchronous: bool) -> None:
        step = next(self._steps)
        self._told("saving", step)
        handle = self._manager.save(self._checkpoint, step, asynchronous=asynchronous)
        try:
            handle.result(JOIN_SECONDS)
        except ts.errors.ParameterServerUnavailable as error:
            self._require_a_restore(error)
        else:
            self._told("saved", step)

    def _go_back(self) -> None:
        self._restore()
        self._show()

    def _restore(self) -> None:
        """Ask again where a server is lost meanwhile: nothing is trained between."""
        until = time.monotonic() + JOIN_SECONDS
        while True:
            self._told("restoring")
            try:
                step = self._manager.restore(self._checkpoint)
            except ts.errors.ParameterServerUnavailable:
                if time.monotonic() > until:
                    raise
                traceback.print_exc()
                continue
            assert step is not None
            self._told("restored", step)
            return

    def _restore_a_part(self) -> None:
        """The side variable goes back, and then on; that nothing else does, the ledger of places shows."""
        path = self._manager.latest
        assert path is not None
        self._told("side begins")
        try:
            self._checkpoint.restore(path, only=("side", "side_optimizer"))
            values = [self.coordinator.schedule(self._add_aside, max_attempts=None) for _ in range(SIDE_FUNCTIONS)]
            results_of(values)
        except ts.errors.ParameterServerUnavailable as error:
            self._require_a_restore(error)
        if self._went_back:  # in the midst: some of the functions may have come after that
            self.coordinator.join(JOIN_SECONDS)
            self._told("side begins")
        else:
            self._told("side is", int(path.name.removeprefix("step-")), SIDE_FUNCTIONS)

    def _try_a_model(self, *, is_released: bool) -> None:
        """A small model that is made, trained, and let go: by `release`, or as garbage while its functions run."""
        try:
            with self.strategy.scope():
                model = nn.ParameterList([nn.Parameter(torch.zeros(8, 8))])
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            step = trial_step(model, optimizer)
            values = [self.coordinator.schedule(step, max_attempts=None) for _ in range(TRIAL_STEPS)]
            if is_released:
                found = results_of(values)
                self.coordinator.release(model, optimizer)
            else:
                del model, optimizer, step
                gc.collect()
                found = results_of(values)
        except ts.errors.ParameterServerUnavailable as error:
            self._require_a_restore(error)
            return
        if not self._went_back and max(found) != TRIAL_STEPS:
            raise AssertionError(f"{TRIAL_STEPS} steps of 1 have come to {found}")

    def _require_a_restore(self, error: Exception) -> None:
        """Only a lost server may be its reason, and all go back."""
        traceback.print_exc()
        self.coordinator.done()
        if not self._went_back:
            raise error

    # -- what is there ----------------------------------------------------------------------------------------------

    def _show(self, *, at_rest: bool = True) -> None:
        """The values; read again where a lost server takes all back meanwhile. Not at rest: as the coordinator before
        this one has left them; nothing, where it cannot be said."""
        while True:
            starts = self._server_starts()
            self._went_back = False
            try:
                values = [vector.detach().clone().numpy() for vector in self.model]
                side = float(self.side[0].detach())
            except ts.errors.ParameterServerUnavailable:
                if at_rest:
                    raise
                return
            if starts == self._server_starts() and not self._went_back:
                break
            if at_rest:
                self.coordinator.done()
        self._told("values", values, side, self._leased.ledger.finished if at_rest else None, starts)

    def _server_starts(self) -> tuple[int, ...]:
        return server_starts(self._plan, self._setting.servers)


def server_starts(plan: FaultPlan, servers: int) -> tuple[int, ...]:
    """How many processes each server has had."""
    return tuple(sum(line.event == "start" for line in plan.log("ps", index)) for index in range(servers))


def adding(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Callable[..., int]:
    def add_one(rows: torch.Tensor, iterator: Any) -> int:
        next(iterator)
        place = int(rows[0])
        for _ in range(2 if place % 10 == 9 else 1):
            model.zero_grad()
            sum(-vector[place] for vector in model).backward()
            optimizer.step()
        return place

    return add_one


def adding_aside(side: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def add_aside() -> None:
        side.zero_grad()
        (-side[0]).backward()
        optimizer.step()

    return add_aside


def trial_step(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """It returns how many steps of 1 there were."""

    def step() -> float:
        optimizer.zero_grad()
        (-model[0].sum()).backward()
        optimizer.step()
        return float(model[0].detach()[0, 0])

    return step


def results_of(values: Sequence[ts.RemoteValue[Any]]) -> list[Any]:
    return [value.get(JOIN_SECONDS) for value in values]
