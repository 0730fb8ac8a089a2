"""A store that nobody has written to, out of one that earlier starts of the same processes may have used.

torchrun keeps one store for all its restarts, at one address. Who connects to what another has written there may
therefore read an address, or a message, of a process that is long dead. Nothing in the environment tells the starts
apart on all machines alike: ``TORCHELASTIC_RESTART_COUNT`` is each machine's own count of its own failures.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchstrat.core.errors import CommunicationTimeoutError
from torchstrat.distributed.collectives.failures import said_at

_LOOK_SECONDS = 0.01


def fresh_store(store: Any, rank: int, size: int, purpose: str, timeout: timedelta) -> Any:
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


def _ask(meeting: Any, rank: int, own: str, timeout: timedelta) -> str:
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


def _answer(meeting: Any, own: str, size: int, timeout: timedelta) -> None:
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
