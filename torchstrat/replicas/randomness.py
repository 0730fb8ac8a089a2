"""One stream of random numbers per replica, the same in one process as with one replica per process.

A replica's stream is seeded by the seed of the default generator (``torch.manual_seed``) and the replica's id, and goes
on from run to run. Calling ``torch.manual_seed`` again starts all streams anew. Outside of runs the default generator
is the user's: what is drawn there (shuffling, say) does not move the replicas' streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def stream_seed(seed: int, replica: int) -> int:
    """A 63-bit seed for one replica; streams of neighbouring seeds and replicas are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ReplicaStreams:
    """Swaps the state of the default generators (the CPU's and the replica's own GPU's) with the replicas' turns."""

    def __init__(self, devices: Sequence[torch.device], first_replica: int = 0) -> None:
        self._devices = devices
        self._first_replica = first_replica
        self._states: dict[int, list[torch.Tensor]] = {}
        self._outside: list[torch.Tensor] = []
        self._current: int | None = None
        self._seed: int | None = None
        self._touched_after_seed: torch.Tensor | None = None

    def _generators(self, replica: int | None) -> list[torch.Generator]:
        generators = [torch.default_generator]
        devices = self._devices if replica is None else [self._devices[replica - self._first_replica]]
        for device in devices:
            if device.type == "cuda":
                generators.append(torch.cuda.default_generators[device.index or 0])
        return generators

    def begin(self, replicas: Sequence[int]) -> None:
        self._outside = [generator.get_state() for generator in self._generators(None)]
        if self._was_reseeded():
            self._seed = torch.initial_seed()
            self._states = {}
        for replica in replicas:
            if replica not in self._states:
                self._states[replica] = self._fresh(replica)

    def _fresh(self, replica: int) -> list[torch.Tensor]:
        assert self._seed is not None
        seed = stream_seed(self._seed, replica)
        return [torch.Generator(device=g.device).manual_seed(seed).get_state() for g in self._generators(replica)]

    def _was_reseeded(self) -> bool:
        """Whether ``manual_seed`` was called since the last run, with the same seed as before or another.

        `end` leaves the default generator one draw further than a fresh one, so a fresh state means a new call.
        """
        if self._seed != torch.initial_seed():
            return True
        fresh = torch.Generator().manual_seed(self._seed).get_state()
        return torch.equal(self._outside[0], fresh)

    def activate(self, replica: int | None) -> None:
        """Let the default generators be those of ``replica``; None: those outside of any run."""
        if replica == self._current:
            return
        if self._current is None:
            self._outside = [generator.get_state() for generator in self._generators(None)]
        else:
            self._states[self._current] = [one.get_state() for one in self._generators(self._current)]
        states = self._outside if replica is None else self._states[replica]
        for generator, state in zip(self._generators(replica), states, strict=True):
            generator.set_state(state)
        self._current = replica

    def end(self) -> None:
        self.activate(None)
        if torch.equal(self._outside[0], torch.Generator().manual_seed(torch.initial_seed()).get_state()):
            torch.empty((), dtype=torch.int64).random_()  # see _was_reseeded
