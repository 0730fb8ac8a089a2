"""One `OptimizerStep` of a push, on the shards that a server holds: checked first, then made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchstrat.errors import InvalidArgumentError, TorchstratError, UnsupportedError
from torchstrat.host_memory import check_fits
from torchstrat.optimizers import Gradients, Tier, is_listed
from torchstrat.parameter_server.messages import NewOptimizer, OptimizerStep, ShardKey, StateOfShard
from torchstrat.parameter_server.server.accumulators import check_gradient
from torchstrat.parameter_server.server.advice import MORE_SERVERS
from torchstrat.parameter_server.server.catalog import describe_optimizer
from torchstrat.parameter_server.server.fast_steps import fast_step_of
from torchstrat.parameter_server.server.held import HeldShards, check_rows
from torchstrat.parameter_server.server.live_optimizer import LiveOptimizer, StepsHaveSet, keep_values
from torchstrat.parameter_server.server.packing import Options, check_supported, unpack_kind
from torchstrat.parameter_server.server.row_optimizer import RowState, gather_state, learn_state, scatter_state
from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer, sparse_rows
from torchstrat.parameter_server.variables.edits import put_rows


class HeldOptimizer:
    """An optimizer of the job as one server runs it. Its state lies with the variables, behind their locks."""

    def __init__(self, new: NewOptimizer) -> None:
        self.number = new.number
        self.groups = tuple(tuple(group) for group in new.groups)
        self.rows_only = new.rows_only
        self._live: LiveOptimizer | None = None
        self.kind, packed = unpack_kind(new.blob)
        self.reaches: frozenset[int] = frozenset()
        """Variables that any of its steps may change, whatever has a gradient."""
        if self.kind.tier is Tier.ALL:
            self._live = LiveOptimizer(packed, new.groups)
            self.reaches = frozenset(number for group in self.groups for number in group)
            self._check_groups(self._live.options)
            self.cls, self.name = self._live.cls, self._live.name
        else:
            needs_sparse = self.kind.gradients is Gradients.SPARSE
            self.optimizer = ShardOptimizer.from_bytes(packed, needs_sparse=needs_sparse)
            self._check_groups(self.optimizer.options)
            self.cls, self.name = self.optimizer.cls, self.optimizer.name
        self._place_of = {v: (group, place) for group, vs in enumerate(new.groups) for place, v in enumerate(vs)}
        self._fast = fast_step_of(self.cls)

    def _check_groups(self, options: Sequence[Options]) -> None:
        if len(options) != len(self.groups):
            raise InvalidArgumentError(
                f"optimizer {self.number} has {len(options)} parameter groups; got variables for {len(self.groups)}."
            )

    def take_over(self, earlier: HeldOptimizer) -> None:
        """Go on from what an optimizer that this one `continues` has come to."""
        if self._live is not None and earlier._live is not None:
            earlier._live.grow(self._live)
            self._live = earlier._live

    @property
    def variables(self) -> Set[int]:
        """Those that it steps, here or elsewhere."""
        return self._place_of.keys()

    @property
    def description(self) -> dict[str, Any]:
        """What makes it the same optimizer as before, for a coordinator that is started again."""
        return describe_optimizer(self.number, self.name, self.groups, self.rows_only)

    def continues(self, earlier: HeldOptimizer) -> bool:
        """Whether this is the same optimizer, perhaps with parameters added since."""
        same = (self.name, self.kind, self.rows_only) == (earlier.name, earlier.kind, earlier.rows_only)
        grown = len(self.groups) >= len(earlier.groups)
        return (
            same
            and grown
            and all(own[: len(old)] == old for own, old in zip(self.groups, earlier.groups, strict=False))
        )

    def untouched_state(self, group: int, table: torch.Tensor) -> dict[str, RowState]:
        """Of a shard that no step has changed yet, while others of the variable have been stepped."""
        assert self._live is None, "its variables have one shard"
        return learn_state(self.optimizer, self.optimizer.options[group], group, table)

    def hand_out_options(self) -> StepsHaveSet:
        """By group, the hyperparameters that its steps have set, and the plain attributes."""
        return ([{} for _ in self.groups], {}) if self._live is None else self._live.hand_out()

    def load_options(self, options: Sequence[Options]) -> None:
        if self._live is not None:
            self._live.load_options(options)

    def check(self, step: OptimizerStep, shards: HeldShards) -> None:
        """Raise for what `make` could not do, before anything has changed."""
        name = self.name
        if len(step.options) != len(self.groups):
            raise InvalidArgumentError(
                f"a step of {name} on {shards.owner} came with hyperparameters of {len(step.options)} parameter "
                f"groups; it has {len(self.groups)}. A scheduled function cannot add or remove groups: call "
                "add_param_group on the coordinator, in the strategy's scope, before the function is scheduled."
            )
        check_supported(self.cls, step.options)
        keys = [*(key for key, _ in step.dense), *(key for key, _, _ in step.rows)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidArgumentError(
                f"a step of {name} has two gradients of {shards.name(twice)}; add them up first."
            )
        for key in keys:
            if key[0] not in self._place_of:
                raise InvalidArgumentError(
                    f"{shards.name(key)} is in no parameter group of optimizer {name}. A scheduled function cannot add "
                    "parameters: call add_param_group on the coordinator, in the strategy's scope, before the function "
                    "is scheduled."
                )
        for key, gradient in step.dense:
            if self.kind.gradients is Gradients.SPARSE:
                raise UnsupportedError(
                    f"{name} steps on sparse gradients alone, and that of {shards.name(key)} is dense. Use it for "
                    "embedding tables, and a second optimizer (Adam) for the rest."
                )
            check_gradient(gradient, shards, key, tuple(shards.tensor(key).shape))
        for key, ids, gradient in step.rows:
            shard = shards.tensor(key)
            if shard.dim() == 0:
                raise InvalidArgumentError(f"{shards.name(key)} is a scalar and has no rows to step.")
            check_rows(ids, shard.shape[0], shards.name(key), sorted_and_unique=True)
            check_gradient(gradient, shards, key, (ids.shape[0], *shard.shape[1:]))
            if self._goes_by_rows:
                self._learn_rows(key, step, shards)
        if self._live is not None:
            self._live.check(step)

    def make(self, step: OptimizerStep, shards: HeldShards) -> None:
        """Step all of it in one call of the optimizer, but for what a few lines step as well. The caller holds the
        variables' locks, and has checked."""
        if self._live is not None:
            with self._naming([*(key for key, _ in step.dense), *(key for key, _, _ in step.rows)], shards):
                self._live.make(step, self.number, self.groups, shards)
            return
        parts = [
            self._whole(key, gradient, step, shards)
            for key, gradient in step.dense
            if not self._is_stepped_fast(key, None, gradient, step, shards)
        ]
        for key, ids, gradient in step.rows:
            if self._goes_by_rows:
                if not self._is_stepped_fast(key, ids, gradient, step, shards):
                    parts.append(self._rows(key, ids, gradient, step, shards))
            else:
                parts.append(self._whole(key, self._spread(ids, gradient, shards.tensor(key)), step, shards))
        if not parts:
            return
        parameters: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for part in sorted(parts, key=lambda part: self._place_of[part.key[0]] + part.key):
            parameters[self._group(part.key)].append(part.parameter)
        with self._naming([part.key for part in parts], shards):
            states = self.optimizer.step(
                step.options, parameters, {part.parameter: part.state for part in parts}, step.attributes
            )
        for part in parts:
            self._keep(part, _without_gradient(states.get(part.parameter, {}), part.parameter), step, shards)

    @contextmanager
    def _naming(self, keys: Sequence[ShardKey], shards: HeldShards) -> Iterator[None]:
        """Around a step: what a class of the user's own raises says what it may have changed."""
        try:
            yield
        except TorchstratError:
            raise
        except Exception as error:
            names = ", ".join(shards.name(key) for key in keys)
            raise TorchstratError(
                f"{self.name}.step raised {type(error).__name__}: {error}. It may have changed some of {names} "
                "already; restore a checkpoint before training goes on."
            ) from error

    def _is_stepped_fast(
        self, key: ShardKey, ids: torch.Tensor | None, gradient: torch.Tensor, step: OptimizerStep, shards: HeldShards
    ) -> bool:
        if self._fast is None:
            return False
        return self._fast(shards, key, self.number, ids, gradient, step.options[self._group(key)])

    def _group(self, key: ShardKey) -> int:
        return self._place_of[key[0]][0]

    @property
    def _goes_by_rows(self) -> bool:
        """Otherwise rows make a gradient of the whole shard, and its rule applies: as asked for (``rows_only=False``),
        or because the optimizer looks at the whole variable (Adafactor), or at the gradient's layout."""
        return self.rows_only and self.kind.may_cut_rows and self.kind.gradients is not Gradients.BY_LAYOUT

    def _spread(self, ids: torch.Tensor, gradient: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        if self.kind.gradients is not Gradients.ALIKE:
            return sparse_rows(ids, gradient, shard.shape[0])
        return torch.zeros_like(shard).index_copy_(0, ids, gradient)

    def _learn_rows(self, key: ShardKey, step: OptimizerStep, shards: HeldShards) -> None:
        """Find out what the state of untouched rows is, and whether there is room for it."""
        table, state = shards.tensor(key), shards.state(key, self.number)
        group = self._group(key)
        learned = shards.row_state(key, self.number)
        if learned is None:
            learned = learn_state(self.optimizer, step.options[group], group, table)
            shards.learn_rows(key, self.number, learned)
        for name in learned:
            held = (state or {}).get(name)
            if isinstance(held, torch.Tensor) and held.shape[:1] != table.shape[:1]:
                raise InvalidArgumentError(
                    f"state[{name!r}] of {self.optimizer.name} for {shards.name(key)}, as it was loaded, has shape "
                    f"{tuple(held.shape)}; it needs {table.shape[0]} rows."
                )
        if state is None:
            needed = sum(entry.bytes_for(table.shape[0]) for entry in learned.values())
            check_fits(needed, f"the state of {self.optimizer.name} for {shards.name(key)}", MORE_SERVERS)

    def _parameter(self, key: ShardKey, value: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(value)
        if self.optimizer.tags:
            vars(parameter).update(self.optimizer.tags.get(self._place_of[key[0]], {}))
        return parameter

    def _whole(self, key: ShardKey, gradient: torch.Tensor, step: OptimizerStep, shards: HeldShards) -> _Part:
        parameter = self._parameter(key, shards.changing(key))
        parameter.grad = gradient
        state = shards.changing_state(key, self.number)
        if state is None:
            state = self.optimizer.initial_state(step.options[self._group(key)], parameter)
        return _Part(key, parameter, state)

    def _rows(
        self, key: ShardKey, ids: torch.Tensor, gradient: torch.Tensor, step: OptimizerStep, shards: HeldShards
    ) -> _Part:
        parameter = self._parameter(key, shards.tensor(key).index_select(0, ids))
        sparse = self.kind.gradients is Gradients.SPARSE
        parameter.grad = sparse_rows(torch.arange(len(ids)), gradient, len(ids)) if sparse else gradient
        learned = shards.row_state(key, self.number) or {}
        held = shards.changing_state(key, self.number, ids, learned)
        if held is not None:
            state = gather_state(held, ids, learned)
        else:
            state = self.optimizer.initial_state(step.options[self._group(key)], parameter)
        return _Part(key, parameter, state, ids)

    def _keep(self, part: _Part, state: StateOfShard, step: OptimizerStep, shards: HeldShards) -> None:
        if part.ids is None:
            if not is_listed(self.cls):
                keep_values(shards.tensor(part.key), part.parameter, self.name, shards.name(part.key))
            shards.put_state(part.key, self.number, state)
            return
        table, learned = shards.changing(part.key, part.ids), shards.row_state(part.key, self.number) or {}
        held = shards.changing_state(part.key, self.number, part.ids, learned)
        if held is None:
            held = {}
            shards.put_state(part.key, self.number, held)
        if any(name not in held and name not in learned for name in state):
            # The hyperparameters have changed since: a scheduler has switched momentum on.
            group = self._group(part.key)
            shards.learn_rows(part.key, self.number, learn_state(self.optimizer, step.options[group], group, table))
            learned = shards.row_state(part.key, self.number) or {}
        scatter_state(held, state, part.ids, table, learned)
        put_rows(table, part.ids, part.parameter)


@dataclass(frozen=True)
class _Part:
    """One parameter of a step: a whole shard, or some rows of one (``ids``) that were copied out."""

    key: ShardKey
    parameter: torch.Tensor
    state: StateOfShard
    ids: torch.Tensor | None = None


def _without_gradient(state: StateOfShard, parameter: torch.Tensor) -> StateOfShard:
    """An optimizer may keep the gradient itself in its state. Its memory is the worker's, and lent for this step."""
    if parameter.grad is not None and parameter.grad.layout == torch.strided:
        lent = parameter.grad.untyped_storage().data_ptr()
        for name, value in state.items():
            is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0
            if is_plain and value.untyped_storage().data_ptr() == lent:
                state[name] = value.clone()
    return state
