"""The user's own optimizer class, stepping tensors that are handed to it.

The optimizer object itself stays on the coordinator. A server gets its class, its attributes and its hyperparameters,
and makes a stand-in of the same class for each step, with ``param_groups`` and ``state`` of that step alone: so pushes
to different variables step at the same time, and the hyperparameters are those in force where the step was called.

Step hooks (`Optimizer.register_step_pre_hook` and the like) run where the user calls ``optimizer.step()``, on the
worker, and not again on the servers; an ``optimizer.step`` that a learning rate scheduler has wrapped is the worker's
too.
"""

from __future__ import annotations

import collections
import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat._torch_private import optimizers_without_compiler, step_without_compiler
from torchstrat.optimizers import Gradients, kind_of, stand_in_of, step_in_blocks
from torchstrat.parameter_server.messages import SetAttributes, StateOfShard
from torchstrat.parameter_server.server.packing import Options, check_supported, parts_of, unpickling


class ShardOptimizer:
    """An optimizer class with its attributes, and the hyperparameters its groups had when it was packed.

    Immutable, hence shared by threads.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        attributes: Mapping[str, Any],
        options: Sequence[Options],
        *,
        needs_sparse: bool = False,
        tags: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
    ) -> None:
        self.cls = cls
        self.options = tuple(options)
        self.attributes = dict(attributes)
        check_supported(cls, self.options)
        self._constructor_makes_state = self._find_whether_constructor_makes_state()
        self._step = step_without_compiler(cls.step)  # hooks run on the worker
        self.needs_sparse = needs_sparse
        """Whether it steps on sparse gradients alone, as SparseAdam does."""
        self.tags = tags or {}
        """What the program has set on parameters, by group and place in it."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> ShardOptimizer:
        """From an optimizer in this process, which stays as it is."""
        return cls(*parts_of(optimizer), needs_sparse=kind_of(optimizer).gradients is Gradients.SPARSE)

    @classmethod
    def from_bytes(cls, packed: bytes, *, needs_sparse: bool = False) -> ShardOptimizer:
        """From what `pack_optimizer` made, behind the kind. The bytes must come from a peer that is trusted: they are
        unpickled."""
        with unpickling():
            *parts, tags = pickle.loads(packed)
        return cls(*parts, needs_sparse=needs_sparse, tags=tags)

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def initial_state(self, options: Options, parameter: torch.Tensor) -> StateOfShard:
        """The state a parameter has before its first step: empty, or what the class's constructor puts there."""
        if not self._constructor_makes_state:
            return {}
        state: StateOfShard = self._construct(options, parameter).state.get(parameter, {})
        return state

    def step(
        self,
        options: Sequence[Options],
        parameters: Sequence[Sequence[torch.Tensor]],
        states: Mapping[torch.Tensor, StateOfShard],
        attributes: SetAttributes | None = None,
    ) -> dict[torch.Tensor, StateOfShard]:
        """One step of ``parameters`` (leaves with ``.grad``, a list per group), in place.

        ``states``: what is known of each before; its dictionaries are used as they are. ``attributes``: what the
        program has set on it since it was packed. Returns the states after the
        step, for the parameters that have any. If the optimizer raises, parameters and states may be half-stepped.
        """
        stand_in = self.stand_in(options, parameters, states)
        if attributes:
            vars(stand_in).update({name: value for name, (_, value) in attributes.items()})
        if not step_in_blocks(stand_in, self.call_step):
            self.call_step(stand_in)
        state = stand_in.state
        return {parameter: state[parameter] for group in parameters for parameter in group if parameter in state}

    def call_step(self, stand_in: Optimizer) -> None:
        """Its ``step``, without importing torch's compiler for that."""
        with torch.set_grad_enabled(bool(self.attributes.get("defaults", {}).get("differentiable"))):
            self._step(stand_in)

    def stand_in(
        self,
        options: Sequence[Options],
        parameters: Sequence[Sequence[torch.Tensor]],
        states: Mapping[torch.Tensor, StateOfShard],
    ) -> Optimizer:
        """An optimizer of the class, over these parameters and states. Its constructor does not run."""
        state: dict[torch.Tensor, StateOfShard] = collections.defaultdict(dict)
        state.update(states)
        groups = [{**own, "params": list(tensors)} for own, tensors in zip(options, parameters, strict=True)]
        return stand_in_of(self.cls, self.attributes, groups, state)

    def _find_whether_constructor_makes_state(self) -> bool:
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        try:
            return bool(self._construct(self.options[0], parameter).state)
        except Exception:  # its constructor needs more than its defaults say: then it is taken to make no state
            return False

    def _construct(self, options: Options, parameter: torch.Tensor) -> Optimizer:
        """Built anew by the class's constructor, from what it keeps in ``defaults``."""
        accepted = inspect.signature(self.cls.__init__).parameters
        defaults = {name: value for name, value in self.attributes.get("defaults", {}).items() if name in accepted}
        with optimizers_without_compiler():
            return self.cls([{**options, "params": [parameter]}], **defaults)


def sparse_rows(ids: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    """A coalesced sparse gradient. ``ids``: ``(n,)``, sorted and unique; ``values``: ``(n, …)``."""
    return torch.sparse_coo_tensor(
        ids.unsqueeze(0), values, (rows, *values.shape[1:]), is_coalesced=True, check_invariants=False
    )
