"""One `OptimizerStep` of a push, on the shards that a server holds: checked first, then made.

Gradients that functions have left under ``no_sync`` are added up here until a step of any function takes them. They
lie with the variables, behind their locks, as ``.grad`` lies with a parameter: whichever optimizer steps takes them.
They are in no checkpoint, as ``.grad`` is in none, and one that is restored empties them: they were computed with
values that are gone.

The two optimizers that tables are trained with most step without making an optimizer. The general way
(`ShardOptimizer`, and `learn_state` for rows) makes parameters of what is stepped, and an optimizer
around them. `fast_step_of` is only what remains for `torch.optim.SGD` without momentum, and for rows stepped by
`torch.optim.Adagrad`: the same operators in the same order, so that the results are the same to the last bit.

`add_rows` makes more rows of the last shard of a table: the rows that are there stay, in other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from torchstrat.checkpoint.pieces import goes_by_rows
from torchstrat.core.errors import InvalidArgumentError, TorchstratError, UnsupportedError
from torchstrat.core.memory import check_fits
from torchstrat.core.optimizers import Gradients, Places, Tier, is_listed, keep_elements
from torchstrat.parameter_server.messages import (
    Accumulation,
    NewOptimizer,
    NewRows,
    OptimizerStep,
    Reader,
    ShardKey,
    StateOfShard,
)
from torchstrat.parameter_server.server.live_optimizer import LiveOptimizer, StepsHaveSet, check_is_alike
from torchstrat.parameter_server.server.shard_optimizer import (
    Options,
    RowState,
    ShardOptimizer,
    check_supported,
    gather_state,
    learn_state,
    scatter_state,
    sparse_rows,
    unpack_kind,
)
from torchstrat.parameter_server.server.shards import Gradient, HeldShards, HeldVariable, check_rows, describe_optimizer
from torchstrat.parameter_server.server.snapshot import MORE_SERVERS
from torchstrat.parameter_server.variables.attributes import put_own
from torchstrat.parameter_server.variables.deferred_init import replay
from torchstrat.parameter_server.variables.edits import put_rows


def check_accumulation(left: Accumulation, shards: HeldShards) -> None:
    """Raise for what `accumulate` could not do, before anything has changed."""
    there = shards.gradients
    for key, (ids, values) in _gradients_in(left):
        _check_gradient(key, (ids, values), shards)
        if ids is None and key not in there:
            check_fits(values.nbytes, f"gradients of {shards.name(key)} that no_sync has left", MORE_SERVERS)


def _check_gradient(key: ShardKey, sent: Gradient, shards: HeldShards) -> None:
    ids, gradient = sent
    shard = shards.tensor(key)
    dtype, shape = shard.dtype, tuple(shard.shape)
    if ids is not None:
        if shard.dim() == 0:
            raise InvalidArgumentError(f"{shards.name(key)} is a scalar and has no rows to step.")
        check_rows(ids, shard.shape[0], shards.name(key), sorted_and_unique=True)
        shape = (ids.shape[0], *shape[1:])
    if not isinstance(gradient, torch.Tensor) or gradient.layout != torch.strided or gradient.device.type != "cpu":
        raise InvalidArgumentError(f"the gradient of {shards.name(key)} must be a dense tensor on the CPU.")
    if tuple(gradient.shape) != shape or gradient.dtype != dtype:
        raise InvalidArgumentError(
            f"the gradient of {shards.name(key)} must be {dtype} of shape {shape}; got {gradient.dtype} of shape "
            f"{tuple(gradient.shape)}."
        )
    if not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgumentError(f"{shards.name(key)} is {dtype}, which no optimizer steps.")


def accumulate(left: Accumulation, shards: HeldShards) -> None:
    """Add gradients to those that are here. The sender's memory is lent for this call."""
    there = shards.gradients
    for key, gradient in _gradients_in(left):
        shards.put_gradient(key, _sum(there[key], gradient) if key in there else _copy(gradient))


def with_accumulated(step: OptimizerStep, variables: Collection[int], shards: HeldShards) -> OptimizerStep:
    """The step with what is here of these variables, which are those of its optimizer, added to its gradients. A
    variable of which it brings none is stepped as well. What is here stays, until `HeldShards.drop_gradients`."""
    found = {key: gradient for key, gradient in shards.gradients.items() if key[0] in variables}
    if not found:
        return step
    for key, gradient in _gradients_in(step):
        found[key] = _sum(found[key], gradient) if key in found else gradient
    dense = tuple((key, values) for key, (ids, values) in found.items() if ids is None)
    rows = tuple((key, ids, values) for key, (ids, values) in found.items() if ids is not None)
    return replace(step, dense=dense, rows=rows)


def _gradients_in(sent: Accumulation | OptimizerStep) -> Iterator[tuple[ShardKey, Gradient]]:
    for key, values in sent.dense:
        yield key, (None, values)
    for key, ids, rows in sent.rows:
        yield key, (ids, rows)


def _copy(gradient: Gradient) -> Gradient:
    ids, values = gradient
    return None if ids is None else ids.clone(), values.clone()


def _sum(there: Gradient, more: Gradient) -> Gradient:
    """In memory of its own. Dense where either is, as PyTorch's own sum of the two."""
    (old_ids, old), (new_ids, new) = there, more
    if old_ids is None:
        return None, old + new if new_ids is None else old.index_add(0, new_ids, new)
    if new_ids is None:
        return None, new.index_add(0, old_ids, old)
    ids, places = torch.unique(torch.cat([old_ids, new_ids]), return_inverse=True)
    return ids, old.new_zeros(len(ids), *old.shape[1:]).index_add_(0, places, torch.cat([old, new]))


FastStep: TypeAlias = Callable[[HeldShards, ShardKey, int, torch.Tensor | None, torch.Tensor, Options], bool]
"""(shards, which of them, optimizer's number, ids ``(n,)`` sorted and unique, gradient ``(n, …)``, hyperparameters) →
whether it was done; if not, nothing has changed. Without ids it is a step of the whole shard."""


def fast_step_of(cls: type[torch.optim.Optimizer]) -> FastStep | None:
    """For this very class; one derived from it may do anything."""
    return _FAST.get(cls)


def _sgd(
    shards: HeldShards,
    key: ShardKey,
    optimizer: int,
    ids: torch.Tensor | None,
    gradient: torch.Tensor,
    options: Options,
) -> bool:
    if options.get("momentum", 0) != 0 or not _is_plain(options, gradient):
        return False
    values = shards.changing(key, ids)
    if ids is None:
        values.add_(gradient, alpha=-options["lr"])
    else:
        put_rows(values, ids, values.index_select(0, ids).add_(gradient, alpha=-options["lr"]))
    return True


def _adagrad(
    shards: HeldShards,
    key: ShardKey,
    optimizer: int,
    ids: torch.Tensor | None,
    gradient: torch.Tensor,
    options: Options,
) -> bool:
    known = shards.state(key, optimizer)
    if ids is None or known is None or not _is_plain(options, gradient):
        return False  # the first step makes the state, and large shards are stepped in blocks
    table = shards.changing(key, ids)
    state = shards.changing_state(key, optimizer, ids, ("sum",))
    assert state is not None
    state["step"] += 1
    rate = options["lr"] / (1 + (float(state["step"]) - 1) * options["lr_decay"])
    sums = state["sum"].index_select(0, ids).addcmul_(gradient, gradient, value=1)
    put_rows(state["sum"], ids, sums)
    rows = table.index_select(0, ids).addcdiv_(gradient, sums.sqrt_().add_(options["eps"]), value=-rate)
    put_rows(table, ids, rows)
    return True


def _is_plain(options: Options, gradient: torch.Tensor) -> bool:
    """Without what makes other operators of it; ``fused`` rounds differently."""
    usual = not any(options.get(name) for name in ("weight_decay", "maximize", "fused"))
    return usual and isinstance(options["lr"], float) and not gradient.is_complex()


_FAST: dict[type[torch.optim.Optimizer], FastStep] = {torch.optim.SGD: _sgd, torch.optim.Adagrad: _adagrad}


class HeldOptimizer:
    """An optimizer of the job as one server runs it. Its state lies with the variables, behind their locks."""

    def __init__(self, new: NewOptimizer) -> None:
        self.number = new.number
        self.groups = tuple(tuple(group) for group in new.groups)
        self.rows_only = new.rows_only
        self.live: LiveOptimizer | None = None
        self.kind, packed = unpack_kind(new.blob)
        self.reaches: frozenset[int] = frozenset()
        """Variables that any of its steps may change, whatever has a gradient."""
        if self.kind.tier is Tier.ALL:
            self.live = LiveOptimizer(packed, new.number, new.groups, new.wraps)
            self.reaches = frozenset(number for group in self.groups for number in group)
            self._check_groups(self.live.options)
            self.cls, self.name = self.live.cls, self.live.name
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
        if self.live is not None and earlier.live is not None:
            earlier.live.grow(self.live)
            self.live = earlier.live

    @property
    def variables(self) -> Set[int]:
        """Those that it steps, here or elsewhere."""
        return self._place_of.keys()

    @property
    def description(self) -> dict[str, object]:
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
        assert self.live is None, "its variables have one shard"
        return learn_state(self.optimizer, self.optimizer.options[group], group, table)

    def hand_out_options(self, options: Sequence[Options], places: Places, reader: Reader) -> StepsHaveSet:
        """By group, the hyperparameters that its steps have set, and the plain attributes."""
        return ([], []) if self.live is None else self.live.hand_out(options, places, reader)

    def load_options(self, options: Sequence[Options], places: Places) -> None:
        if self.live is not None:
            self.live.load_options(options, places)

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
            _check_gradient(key, (None, gradient), shards)
        for key, ids, gradient in step.rows:
            _check_gradient(key, (ids, gradient), shards)
            if self._goes_by_rows:
                self._learn_rows(key, step, shards)
        if self.live is not None:
            self.live.check(step)

    def make(self, step: OptimizerStep, shards: HeldShards) -> object:
        """Step all of it in one call of the optimizer, but for what a few lines step as well. The caller holds the
        variables' locks, and has checked. Returns what the step has returned, where the function reads that."""
        if self.live is not None:
            with self._naming([*(key for key, _ in step.dense), *(key for key, _, _ in step.rows)], shards):
                return self.live.make(step, self.groups, shards)
        parts = [
            self._whole(key, self._for_keeps(gradient), step, shards)
            for key, gradient in step.dense
            if not self._is_stepped_fast(key, None, gradient, step, shards)
        ]
        for key, ids, gradient in step.rows:
            if not self._goes_by_rows:
                spread = self._spread(self._for_keeps(ids), self._for_keeps(gradient), shards.tensor(key))
                parts.append(self._whole(key, spread, step, shards))
            elif not self._is_stepped_fast(key, ids, gradient, step, shards):
                parts.append(self._rows(key, ids, self._for_keeps(gradient), step, shards))
        if not parts:
            return None
        parameters: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for part in sorted(parts, key=lambda part: self._place_of[part.key[0]] + part.key):
            parameters[self._group(part.key)].append(part.parameter)
        with self._naming([part.key for part in parts], shards):
            states = self.optimizer.step(
                step.options, parameters, {part.parameter: part.state for part in parts}, step.attributes
            )
        for part in parts:
            self._keep(part, states.get(part.parameter, {}), step, shards)
        return _of_parts(self.name) if step.keeps_result and self.optimizer.has_returned else None

    def _for_keeps(self, sent: torch.Tensor) -> torch.Tensor:
        """What was sent lies in the worker's memory, which is lent for this step; a class that is not listed may keep
        it anywhere."""
        return sent if is_listed(self.cls) else sent.clone()

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

    def _parameter(self, key: ShardKey, value: torch.Tensor, step: OptimizerStep) -> torch.Tensor:
        parameter = torch.nn.Parameter(value)
        if self.optimizer.tags:
            vars(parameter).update(self.optimizer.tags.get(self._place_of[key[0]], {}))
        if step.tags:
            put_own(parameter, step.tags.get(key[0], {}))
        return parameter

    def _whole(self, key: ShardKey, gradient: torch.Tensor, step: OptimizerStep, shards: HeldShards) -> _Part:
        parameter = self._parameter(key, shards.changing(key), step)
        parameter.grad = gradient
        state = shards.changing_state(key, self.number)
        if state is None:
            state = self.optimizer.initial_state(step.options[self._group(key)], parameter)
        return _Part(key, parameter, state)

    def _rows(
        self, key: ShardKey, ids: torch.Tensor, gradient: torch.Tensor, step: OptimizerStep, shards: HeldShards
    ) -> _Part:
        parameter = self._parameter(key, shards.tensor(key).index_select(0, ids), step)
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
                shard = shards.tensor(part.key)
                check_is_alike(shard, part.parameter, self.name, shards.name(part.key))
                keep_elements([(part.parameter, shard)], lambda: [state])
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


def _of_parts(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"a scheduled function reads what {name}.step() returns. elementwise_optimizers names the class, so that each "
        "server steps parts of parameters, and has what the step of these returns. Leave the class out, or compute it "
        "in the function."
    )


def add_rows(
    new: NewRows,
    key: ShardKey,
    variable: HeldVariable,
    shards: HeldShards,
    optimizer_of: Callable[[int], HeldOptimizer],
) -> None:
    """Behind the rows of shard ``key``, and to what optimizers keep of each row. Changes all of it or, where it raises,
    nothing."""
    table, spec = shards.tensor(key), new.spec
    first, count = variable.spec.shape[0], spec.shape[0] - variable.spec.shape[0]
    by_rows = {
        slot: [name for name, value in state.items() if _goes_by_rows(value, table)]
        for slot, state in variable.states.items()
        if slot[1] == key[1]
    }
    held = [table, *(variable.states[slot][name] for slot, names in by_rows.items() for name in names)]
    needed = sum(one.nbytes // max(len(one), 1) * (len(one) + count) for one in held)
    check_fits(needed, f"{count:,} more rows of {shards.name(key)}, and those that it has, in one piece", MORE_SERVERS)
    added = new.value
    if added is None:
        added = replay(new.recipe, (count, *spec.shape[1:]), spec.dtype, new.seed, first, spec.shape[0], spec.name)
    states = {
        slot: dict(_with_rows(variable.states[slot], names, key, added, shards, optimizer_of(slot[0])))
        for slot, names in by_rows.items()
    }
    shards.replace(key, torch.cat([table, added]), states)
    ids, gradient = shards.gradients.get(key, (None, None))
    if ids is None and gradient is not None:  # left under no_sync, of the whole table
        shards.put_gradient(key, (None, torch.cat([gradient, torch.zeros_like(added)])))


def _goes_by_rows(value: object, table: torch.Tensor) -> bool:
    return goes_by_rows(value, table.shape[0], tuple(table.shape))


def _with_rows(
    state: StateOfShard,
    names: list[str],
    key: ShardKey,
    added: torch.Tensor,
    shards: HeldShards,
    optimizer: HeldOptimizer,
) -> Iterator[tuple[str, torch.Tensor]]:
    learned = dict(shards.row_state(key, optimizer.number) or {})
    if not learned.keys() >= set(names):
        group = next(number for number, variables in enumerate(optimizer.groups) if key[0] in variables)
        learned = {**optimizer.untouched_state(group, shards.tensor(key)), **learned}
    for name in names:
        if name not in learned:
            raise UnsupportedError(
                f"{shards.name(key)} gets no more rows: what state[{name!r}] of {optimizer.name} is for a row that no "
                "step has touched cannot be told. Make the larger table in a new program, and restore a checkpoint."
            )
        yield name, torch.cat([state[name], learned[name].allocate(added)])
