"""The devices' stream of random numbers, started by ``torch.manual_seed`` as those of other devices are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchstrat.core.randomness import seedings, state_of, stream_seed
from torchstrat.sharding.tpu.spmd import SpmdRuntime


class RandomStream:
    """One stream for all lanes, which draw different numbers from it; goes on from run to run, and starts anew when the
    default generator has been seeded, with whatever seed."""

    def __init__(self, runtime: SpmdRuntime) -> None:
        self._runtime = runtime
        self._states: dict[int, tuple[int, Any]] = {}
        self._outside: Any = None
        self._seed = self._seed_within = 0
        self._epoch = 0
        self._host: torch.Tensor | None = None
        self._is_shared = self._is_seeded_within = False

    def begin(self) -> None:
        self._host, self._is_seeded_within = state_of(), False
        self._seed = torch.initial_seed()
        self._epoch = seedings.epoch_of(self._seed, state_of())
        self._outside = self._runtime.random_state()
        known_epoch, state = self._states.get(self._seed, (None, None))
        if known_epoch == self._epoch:
            self._runtime.restore_random_state(state)
        else:
            self._is_shared = False
            self._runtime.seed(stream_seed(self._seed, 0))
        self._mark()

    def _mark(self) -> None:
        self._seed_within = torch.initial_seed()
        seedings.leave(torch.default_generator, state_of())

    def seeded_in_step(self) -> bool:
        """Whether the replicas' streams are one, because a step has seeded them all alike; to ask before each draw.

        Seeding within a step is seeding a replica's stream: the user's generator is as it was when the run is over.
        """
        if torch.initial_seed() != self._seed_within or seedings.is_seeded_since(state_of()):
            self._is_shared = self._is_seeded_within = True
            self._runtime.seed(stream_seed(torch.initial_seed(), 0))
            self._mark()
        return self._is_shared

    def end(self) -> None:
        self.seeded_in_step()  # after the last draw, perhaps
        self._states = {self._seed: (self._epoch, self._runtime.random_state())}
        self._runtime.restore_random_state(self._outside)
        if self._is_seeded_within and self._host is not None:
            torch.default_generator.set_state(self._host)
        seedings.leave(torch.default_generator, state_of())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, between runs: ``{"lanes": {"now": state}}``; empty before the first run of a seed."""
        for label, seed in seedings.labels():
            epoch, state = self._states.get(seed, (None, None))
            if epoch == seedings.epoch_of_known(seed):
                return {"lanes": {label: state}}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Where ``state`` is another strategy's, the stream begins with the seed in force."""
        self._states = {}
        for label, kept in state.get("lanes", {}).items():
            seed = seedings.seed_of(label)
            self._states[seed] = (seedings.epoch_of_known(seed), kept)
