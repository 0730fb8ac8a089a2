"""A training program in which one replica meets its fate at a chosen place."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrat as ts
from tests.faults.forked import Outcome, in_fork

START_TIMEOUT = timedelta(seconds=60)
FATAL_STEP = 1
STEPS = 3
PLACES = ("before backward", "in backward", "before the step", "in the step", "in reduce", "in the data iterator")
ALL = -1


class ReplicaGivesUpError(Exception):
    """Raised by a replica; a class that no library knows."""


class Fault(NamedTuple):
    """Who does what, and where."""

    act: str
    """"kill" (SIGKILL), "stop" (SIGSTOP), "raise"."""
    place: str
    """Of `PLACES`, or ``operation n``: the n-th call in C of the exchange of gradients."""
    victim: int
    """Or `ALL`."""
    strategy: str = "mirrored"
    processes: int = 2
    meets_by_tf_config: bool = False
    """Then replica 0 hosts the store at which all have met."""

    def __str__(self) -> str:
        meeting = "-tf_config" if self.meets_by_tf_config else ""
        return f"{self.act}-{self.victim}-of-{self.processes}-{self.place}-{self.strategy}{meeting}".replace(" ", "_")

    def hits(self, rank: int) -> bool:
        return self.victim in (rank, ALL)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Batches of one process; that of the fatal step may never come."""

    def __init__(self, act: Callable[[str, int], None]) -> None:
        self._act = act

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> torch.Tensor:
        self._act("in the data iterator", step)
        if step >= STEPS:
            raise IndexError
        return torch.ones(2, 600)


class AtOperation(TorchDispatchMode):
    """``act()`` at the n-th operation that PyTorch is asked for in this block."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._act = number, act

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            self._act()
        return function(*args, **(kwargs or {}))


class AtExchange:
    """``act()`` at the n-th call of a function in C that the exchange of gradients makes in this block."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left, self._act = number, act

    def __enter__(self) -> None:
        if self._left:
            sys.setprofile(self._look)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_call" and frame.f_globals["__name__"].startswith(
            "torchstrat.distributed.collectives.shared_memory"
        ):
            self._left -= 1
            if self._left == 0:
                self._act()


def play(fault: Fault, timeout_seconds: float, limit_seconds: float, evidence: str, port: int) -> Outcome | None:
    """Train in a fork. Called in every process of a group; those that the fault has no place for do nothing."""
    me = int(os.environ["RANK"])
    if me >= fault.processes:
        return None
    folder, others = Path(evidence).parent, [rank for rank in range(fault.processes) if not fault.hits(rank)]

    def is_over() -> bool:
        """A stopped process never ends by itself; it is of no more interest once the others have."""
        may_stand = fault.act == "stop" and fault.hits(me) and bool(others)
        return may_stand and all((folder / f"{rank} has ended").exists() for rank in others)

    outcome = in_fork(limit_seconds, is_over, _train, fault, timedelta(seconds=timeout_seconds), Path(evidence), port)
    (folder / f"{me} has ended").touch()
    return outcome


def _train(fault: Fault, timeout: timedelta, evidence: Path, port: int) -> str:
    me = int(os.environ["RANK"])
    make = _strategy_maker(fault, me, port)
    with contextlib.closing(make(timeout=START_TIMEOUT)):  # on a busy machine others may be seconds behind
        strategy = make(timeout=timeout)
    (evidence.parent / f"memory of {me}").write_text("\n".join(shared_inodes("self")))
    number = int(fault.place.removeprefix("operation ")) if fault.place.startswith("operation ") else 0
    now = {"step": 0}

    def meet_fate(place: str, step: int | None = None) -> None:
        if fault.hits(me) and (place, now["step"] if step is None else step) == (fault.place, FATAL_STEP):
            evidence.write_text(str(fault))
            _do(fault.act)

    try:
        with strategy.scope():
            # 2.9 MB of gradients, which are added up in several pieces.
            model = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: meet_fate("in the step"))

        def step(x: torch.Tensor) -> torch.Tensor:
            hidden = model[1](model[0](x))
            hidden.register_hook(lambda _: meet_fate("in backward"))
            loss = model[2](hidden).square().mean()
            optimizer.zero_grad()
            meet_fate("before backward")
            with AtExchange(number, lambda: meet_fate(fault.place)):
                loss.backward()
            meet_fate("before the step")
            optimizer.step()
            return loss.detach()

        for batch in strategy.distribute_datasets_from_function(lambda _: Rows(meet_fate)):
            loss = strategy.run(step, args=(batch,))
            with AtOperation(1, lambda: meet_fate("in reduce")):
                strategy.reduce("mean", loss)
            now["step"] += 1
    finally:
        strategy.close()
    return "trained to the end"


def _do(act: str) -> None:
    if act == "raise":
        raise ReplicaGivesUpError("no more")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[act])


def shared_inodes(process: str) -> set[str]:
    """Of the memory that torchstrat shares, as ``process`` maps it."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:  # it has ended, or is another user's
        return set()
    return {line.split()[4] for line in lines if "memfd:torchstrat" in line}


def _strategy_maker(fault: Fault, me: int, port: int) -> Any:
    if fault.meets_by_tf_config:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        workers = [f"127.0.0.1:{port}", *(f"127.0.0.1:{port + other}" for other in range(1, fault.processes))]
        task = {"type": "worker", "index": me}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        return ts.MultiWorkerMirroredStrategy
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(fault.processes)
    return {"mirrored": ts.MirroredStrategy, "central": ts.CentralStorageStrategy}[fault.strategy]
