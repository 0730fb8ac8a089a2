"""The devices' stream of random numbers, started by ``torch.manual_seed`` as those of other devices are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchstrat.replicas.randomness import seedings, stream_seed
from torchstrat.tpu.spmd import SpmdRuntime


class RandomStream:
    """One stream for all lanes, which draw different numbers from it; goes on from run to run, and starts anew when the
    default generator has been seeded, with whatever seed."""

    def __init__(self, runtime: SpmdRuntime) -> None:
        self._runtime = runtime
        self._states: dict[int, tuple[int, Any]] = {}
        self._outside: Any = None
        self._seed = 0
        self._epoch = 0

    def begin(self) -> None:
        self._seed = torch.initial_seed()
        self._epoch = seedings.epoch_of(self._seed, torch.default_generator.get_state())
        self._outside = self._runtime.random_state()
        known_epoch, state = self._states.get(self._seed, (None, None))
        if known_epoch == self._epoch:
            self._runtime.restore_random_state(state)
        else:
            self._runtime.seed(stream_seed(self._seed, 0))

    def end(self) -> None:
        self._states = {self._seed: (self._epoch, self._runtime.random_state())}
        self._runtime.restore_random_state(self._outside)
        seedings.leave(torch.default_generator, torch.default_generator.get_state())

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
