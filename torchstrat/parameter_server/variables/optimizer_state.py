"""Optimizers that parameter servers step: their state, and what kind they are.

``optimizer.state`` on the coordinator and workers asks for the state. The kind is what is listed of the class, or what
the user says of it. The user's word (``elementwise_optimizers=[MyOptimizer]``) is checked by a trial: twelve steps of
two random parameters of different shapes, once whole and together, as in a plain program, and once in shards of rows,
each by itself, as servers step them. With dense gradients and with sparse ones, of magnitudes from 1e-4 to 1e4, the
user's own class and hyperparameters, in float64. Where the numbers differ, the error says so.
"""

from __future__ import annotations

import collections
import copy
import itertools
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from torchstrat.checkpoint.pieces import goes_by_rows, is_block
from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    tensors_in_storage,
    untouched_by_surroundings,
    version_of,
)
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.optimizers import Gradients, Kind, Tier, hyperparameters, is_listed, kind_of, kind_of_class
from torchstrat.core.tensor_bytes import memory_of
from torchstrat.parameter_server.messages import ShardKey, StateOfShard, VariableSpec
from torchstrat.parameter_server.serialization.plain import are_equal
from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer, check_supported, parts_of, sparse_rows
from torchstrat.parameter_server.variables.cached_state import CachedState, of_parameters, tensors_in
from torchstrat.parameter_server.variables.placement import pieces
from torchstrat.parameter_server.variables.remote_access import ServerGroup, shard_keys

_Result = TypeVar("_Result")


class StateKeeper(Protocol):
    """Where the state is."""

    def is_current(self) -> bool:
        """Whether what was read last may be used still."""

    def is_at_rest(self) -> bool:
        """Whether it is current, and nothing but the program changes it."""

    def read(self) -> Mapping[torch.Tensor, StateOfShard]: ...

    def change(self, state: RemoteOptimizerState, make: Callable[[], _Result]) -> _Result:
        """``make()``, which changes entries of ``state``; or an error, where that is not done here."""


class RemoteOptimizerState(collections.defaultdict[torch.Tensor, dict[str, object]]):
    """``optimizer.state``: parameter → its state, as the servers have it. What it holds beside that is what was read
    last; ``dict.items(state)`` gives that without asking. ``holder``: of its tensors, on the coordinator."""

    def __init__(
        self, keeper: StateKeeper, held: Mapping[torch.Tensor, StateOfShard], holder: CachedState | None = None
    ) -> None:
        super().__init__(dict, held)
        self.keeper, self.holder = keeper, holder
        self._checksums: list[int] | None = None
        """Of its tensors, from when they were first handed out: ``.data`` and arrays leave no trace in a version."""
        self._is_handed_out = holder is not None and _is_shared(self)
        """Since they were last compared, or still."""
        self.note()

    def refresh(self) -> None:
        """Read it, whether it is current or not."""
        read = self.keeper.read()
        own = {key: value for key, value in dict.items(self) if not isinstance(key, torch.Tensor)}  # no parameter's
        renewed = {tensor: self._renewed(dict.get(self, tensor), entry) for tensor, entry in read.items()}
        dict.clear(self)
        dict.update(self, {**own, **renewed})
        self.note()

    def _renewed(self, here: StateOfShard | None, read: StateOfShard) -> StateOfShard:
        """``read``, in the dictionary and the tensors that the program may have."""
        if here is None or self.holder is None:
            return read
        with untouched_by_surroundings(), DisableTorchFunctionSubclass():
            for name, value in read.items():
                if self.holder.can_take(here.get(name), value):
                    read[name] = here[name].copy_(value)
        here.clear()
        here.update(read)
        return here

    def note(self) -> None:
        """The servers have what it holds."""
        if self.holder is not None:
            self.holder.adopt(dict.items(self))
        self._noted = _marks(self)
        self._checksums = _checksums(self) if self._is_handed_out and _is_shared(self) else None

    def is_changed(self) -> bool:
        """Whether entries, or their tensors in place, have changed since."""
        if not self._noted and not dict.__len__(self):
            return False
        if _marks(self) != self._noted:
            return True
        if not self._is_handed_out or self._checksums is None:
            return False
        is_changed = self._checksums != _checksums(self)
        self._is_handed_out = is_changed or _is_shared(self)
        return is_changed

    def holds(self, other: Mapping[torch.Tensor, StateOfShard]) -> bool:
        """Whether ``other`` has the values that were read: a ``load_state_dict`` of what ``state_dict`` gave."""
        there = {tensor: entry for tensor, entry in other.items() if entry}
        here = {tensor: entry for tensor, entry in dict.items(self) if entry}
        return there.keys() == here.keys() and all(_are_equal(entry, here[tensor]) for tensor, entry in there.items())

    def write(self, make: Callable[[], _Result]) -> _Result:
        """``make()``, which changes tensors in place."""
        self.fill()
        return make() if self.keeper.is_at_rest() else self.keeper.change(self, make)

    def fill(self) -> None:
        """What it holds is current, and may be changed without a trace from now on."""
        self._is_handed_out = True  # first: what was written to what is replaced is looked for once more
        if not self.keeper.is_current():
            self.refresh()
        if self._checksums is None:
            self._checksums = _checksums(self)

    def __getitem__(self, tensor: torch.Tensor) -> dict[str, object]:
        """An empty entry for a parameter without state, as everywhere; that changes nothing."""
        self.fill()
        if not dict.__contains__(self, tensor):
            dict.__setitem__(self, tensor, {})
        return dict.__getitem__(self, tensor)

    def __repr__(self) -> str:
        """Never waits for a server: debuggers and loggers call it."""
        return repr(dict(dict.items(self))) if self.keeper.is_current() else "<optimizer state on parameter servers>"

    def __reduce__(self) -> tuple[object, ...]:
        self.fill()
        return collections.defaultdict, (dict, dict(dict.items(self)))

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        self.fill()
        return collections.defaultdict(dict, dict(dict.items(self)))


def _reading(name: str) -> Callable[..., object]:
    method = getattr(collections.defaultdict, name)

    def read(self: RemoteOptimizerState, *args: object, **kwargs: object) -> object:
        self.fill()
        return method(self, *args, **kwargs)

    return read


def _changing(name: str) -> Callable[..., object]:
    method = getattr(collections.defaultdict, name)

    def change(self: RemoteOptimizerState, *args: object, **kwargs: object) -> object:
        return self.keeper.change(self, lambda: method(self, *args, **kwargs))

    return change


for _name in ("__iter__", "__len__", "__contains__", "__eq__", "get", "keys", "values", "items"):
    setattr(RemoteOptimizerState, _name, _reading(_name))
for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(RemoteOptimizerState, _name, _changing(_name))


def _marks(state: RemoteOptimizerState) -> list[object]:
    """What is another when an entry is replaced, or a tensor in it changed in place. An empty entry, which comes into
    being when somebody asks for it, is like none."""
    marks: list[object] = []
    if not dict.__len__(state):
        return marks
    with DisableTorchFunctionSubclass():
        for tensor, entry in of_parameters(dict.items(state)):
            if entry:
                marks.append(id(tensor))
                marks += [
                    (name, id(value), version_of(value)) if isinstance(value, torch.Tensor) else (name, value)
                    for name, value in entry.items()
                ]
    return marks


def _checksums(state: RemoteOptimizerState) -> list[int]:
    with DisableTorchFunctionSubclass():
        return [
            zlib.crc32(memory_of(tensor.detach().cpu().contiguous())) for _, _, tensor in tensors_in(dict.items(state))
        ]


def _is_shared(state: RemoteOptimizerState) -> bool:
    """Whether anything else shows the memory of one of its tensors."""
    with DisableTorchFunctionSubclass():
        found = (tensor for _, _, tensor in tensors_in(dict.items(state)))
        return any(is_block(tensor) and tensors_in_storage(tensor) > 1 for tensor in found)


def _are_equal(one: StateOfShard, other: StateOfShard) -> bool:
    return one.keys() == other.keys() and all(are_equal(value, other[name]) for name, value in one.items())


def has_begun(optimizer: Optimizer, kind: Kind) -> bool:
    """Whether the program has put state into an optimizer, which the servers would not make of its class. What is sent
    as an object of its own has it."""
    if kind.tier is Tier.ALL:
        return False
    own = ShardOptimizer.of(optimizer)
    held = dict(dict.items(optimizer.state))
    return any(
        bool(held.get(tensor)) and not _are_equal(held[tensor], own.initial_state(options, tensor))
        for group, options in zip(optimizer.param_groups, own.options, strict=True)
        for tensor in group["params"]
        if not tensor.is_meta
    )


def read_state(
    servers: ServerGroup, optimizer: int, specs: Mapping[torch.Tensor, VariableSpec]
) -> dict[torch.Tensor, StateOfShard]:
    """The state of an optimizer, by its number; of parameters that have any."""
    wanted = shard_keys(specs.values())
    answers = servers.ask("ps.optimizer_state", {server: (optimizer, keys) for server, keys in wanted.items()})
    states: dict[ShardKey, StateOfShard] = {
        key: state for of_server in answers.values() for key, state in of_server.items()
    }
    found = {}
    for tensor, spec in specs.items():
        parts = [states.get((spec.number, shard)) for shard in range(len(spec.shards))]
        if parts[0]:
            found[tensor] = join_state(spec, parts)
    return found


def split_state(spec: VariableSpec, state: StateOfShard) -> list[StateOfShard]:
    """An optimizer's state of a whole variable, for each of its shards: what goes by rows is cut, the rest copied."""
    parts: list[StateOfShard] = [{} for _ in spec.shards]
    for name, value in state.items():
        cut = bool(spec.shape) and goes_by_rows(value, spec.shape[0], spec.shape)
        values = [part.contiguous() for part in pieces(spec, value)] if cut else [value] * len(parts)
        for part, own in zip(parts, values, strict=True):
            part[name] = own
    return parts


def join_state(spec: VariableSpec, parts: Sequence[StateOfShard | None]) -> StateOfShard:
    """The reverse of `split_state`."""
    first, shape = parts[0] or {}, spec.shard_shape(0)
    joined: StateOfShard = {}
    for name, value in first.items():
        is_cut = len(parts) > 1 and goes_by_rows(value, shape[0], shape)
        joined[name] = torch.cat([(part or first)[name] for part in parts]) if is_cut else value
    return joined


_STEPS = 12
_LARGEST_DIM = {1: 1024, 2: 160, 3: 32}
"""Of the trial's parameters, by their number of dimensions. Generous, because there are optimizers that treat small
tensors another way (a threshold of 128 is common for factored state); 12 beyond three dimensions."""

_FLAGS_OF_TORCH = frozenset({"_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"})
"""Attributes that torch's own optimizers set in a step, and that are no state."""

Shape = tuple[int, ...]
_answers: weakref.WeakKeyDictionary[type[Optimizer], dict[object, Gradients]] = weakref.WeakKeyDictionary()


class Kinds:
    """The kinds of one strategy's optimizers.

    Args:
        elementwise: classes of which the user says that their steps treat each element, or each row, by itself.

    Raises:
        WrongTypeError: something else than classes of optimizers.
        InvalidArgumentError: a class of which the opposite is known.
    """

    def __init__(self, elementwise: Sequence[type[Optimizer]] = ()) -> None:
        if isinstance(elementwise, str | type) or not isinstance(elementwise, collections.abc.Collection):
            raise WrongTypeError(
                f"elementwise_optimizers must be a list of classes, such as [MyOptimizer]; got {elementwise!r}."
            )
        for cls in elementwise:
            if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
                raise WrongTypeError(
                    f"elementwise_optimizers must name classes derived from torch.optim.Optimizer; got {cls!r}."
                )
            if is_listed(cls) and not kind_of_class(cls).may_cut_rows:
                raise InvalidArgumentError(
                    f"elementwise_optimizers names {cls.__name__}, whose steps look at {kind_of_class(cls).tier.value}"
                    ". Leave it out: its variables stay whole."
                )
        self._elementwise = frozenset(elementwise)

    def of(self, optimizer: Optimizer) -> Kind:
        """``optimizer`` stays as it is, and so does the random state. Raises `UnsupportedError` where the trial shows
        that the user's word of its class does not hold, and for what no server can step: see `check_supported`."""
        if type(optimizer) not in self._elementwise or is_listed(type(optimizer)):
            return kind_of(optimizer)
        cls, _, options = parts_of(optimizer)
        check_supported(cls, options)
        shapes = {
            trial_shape(tensor.shape) for group in optimizer.param_groups for tensor in group["params"] if tensor.dim()
        }
        return Kind(Tier.ROWS, _one(check_word(optimizer, shape) for shape in sorted(shapes or {(6,)})))


def _one(found: Iterable[Gradients]) -> Gradients:
    answers = set(found)
    return answers.pop() if len(answers) == 1 else Gradients.BY_LAYOUT


def trial_shape(shape: Sequence[int]) -> Shape:
    """Of the trial's first parameter, for a variable of this shape, which has a dimension."""
    largest = _LARGEST_DIM.get(len(shape), 12)
    # At least six rows, whatever there are: a variable of one row is not split, but then the answer does not matter.
    return (min(max(shape[0], 6), largest), *(min(max(size, 1), largest) for size in shape[1:]))


def check_word(optimizer: Optimizer, shape: Shape) -> Gradients:
    """The trial, with a first parameter of this shape: what ``optimizer`` makes of gradients. Answers are kept."""
    cls, attributes, options = parts_of(optimizer)
    key = (shape, _text(attributes), *map(_text, options))
    answers = _answers.setdefault(cls, {})
    if key not in answers:
        with torch.random.fork_rng(devices=[]):
            trials = [_Trial(ShardOptimizer(cls, attributes, options), group, shape) for group in range(len(options))]
            answers[key] = _one(trial.result() for trial in trials)
    return answers[key]


@dataclass
class _Case:
    """Two parameters and the gradients of all steps, dense or sparse."""

    start: tuple[torch.Tensor, torch.Tensor]
    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    sparse: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """Which rows (ids, sorted) of each have a gradient in a step; None: the gradients are dense."""

    def part(self, which: int, step: int, low: int, high: int) -> torch.Tensor:
        """A fresh gradient of rows ``low`` to ``high`` of one of the parameters."""
        gradient = self.gradients[step][which][low:high]
        if self.sparse is None:
            return gradient.clone()
        ids = self.sparse[step][which]
        ids = ids[(ids >= low) & (ids < high)] - low
        return sparse_rows(ids, gradient[ids].clone(), high - low)


class _Trial:
    """Of one parameter group."""

    def __init__(self, optimizer: ShardOptimizer, group: int, shape: Shape) -> None:
        self._optimizer, self._group = optimizer, group
        second = (9, *(size // 2 + 1 for size in shape[1:]))
        generator = torch.Generator().manual_seed(17)
        self._generator = generator

        def random(size: Shape) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self._start = random(shape), random(second)
        self._gradients = [
            (random(shape) * self._scales(shape), random(second) * self._scales(second)) for _ in range(_STEPS)
        ]

    def _scales(self, shape: Shape) -> torch.Tensor:
        """One per row, other ones in each step: shards must differ in what a statistic of the whole sees."""
        scales = torch.logspace(-4, 4, shape[0], dtype=torch.float64)
        scales = scales[torch.randperm(shape[0], generator=self._generator)]
        return scales.reshape(-1, *(1 for _ in shape[1:]))

    def result(self) -> Gradients:
        """Raises `UnsupportedError` where parts do not make the whole."""
        every = [(torch.arange(len(a)), torch.arange(len(b))) for a, b in self._gradients]
        some = [tuple(self._some(len(one)) for one in pair) for pair in self._gradients]
        dense = self._whole(_Case(self._start, self._gradients))
        sparse = self._whole(_Case(self._start, self._gradients, some))  # type: ignore[arg-type]
        if isinstance(dense, Exception) and isinstance(sparse, Exception):
            raise UnsupportedError(
                f"a trial step of {self._name} on a parameter of shape {tuple(self._start[0].shape)} failed with "
                f"{type(dense).__name__}: {dense}. Named in elementwise_optimizers, it is stepped with gradients "
                "alone, on parts of parameters that come and go; it must keep what it needs in self.state[parameter]. "
                "Leave it out: then its variables stay whole, on one server."
            ) from dense
        if not isinstance(dense, Exception):
            self._compare(dense, _Case(self._start, self._gradients), "dense")
        if isinstance(sparse, Exception):
            return Gradients.ALIKE  # rows are given to it as dense gradients
        self._compare(sparse, _Case(self._start, self._gradients, some), "sparse")  # type: ignore[arg-type]
        if isinstance(dense, Exception):
            return Gradients.SPARSE
        all_rows = self._whole(_Case(self._start, self._gradients, every))
        same = not isinstance(all_rows, Exception) and all(map(_is_close, all_rows, dense))
        return Gradients.ALIKE if same else Gradients.BY_LAYOUT

    def _some(self, rows: int) -> torch.Tensor:
        return torch.randperm(rows, generator=self._generator)[: max(1, rows // 2)].sort().values

    @property
    def _name(self) -> str:
        return self._optimizer.name

    def _compare(self, whole: list[torch.Tensor], case: _Case, layout: str) -> None:
        try:
            parts = self._in_parts(case)
        except Exception as error:  # a class of the user's own
            raise UnsupportedError(
                f"elementwise_optimizers names {self._name}, and its step of some rows of a parameter alone failed "
                f"with {type(error).__name__}: {error}. Leave it out: then its variables stay whole, on one server."
            ) from error
        for one, cut in zip(whole, parts, strict=True):
            if not _is_close(one, cut):
                raise UnsupportedError(
                    f"elementwise_optimizers names {self._name}, and {_STEPS} steps of a parameter of shape "
                    f"{tuple(one.shape)}, whole beside another, and the same in shards of rows, with {layout} "
                    f"gradients, came to values that are up to {(one - cut).abs().max().item():.3g} apart: its step "
                    "looks at more than one row at once, draws random numbers, or keeps state beside "
                    "self.state[parameter]. Leave it out: then its variables stay whole, on one server, and any step "
                    "is right."
                )

    def _whole(self, case: _Case) -> list[torch.Tensor] | Exception:
        """As a plain program steps: one object, both parameters. What it raised, if it did."""
        parameters = [torch.nn.Parameter(start.clone()) for start in case.start]
        options, attributes = self._fresh()
        groups: list[list[torch.Tensor]] = [[] for _ in options]
        groups[self._group] = list(parameters)
        own = ShardOptimizer(self._optimizer.cls, attributes, options)
        states = {one: own.initial_state(options[self._group], one) for one in parameters}
        stand_in = own.stand_in(options, groups, {one: state for one, state in states.items() if state})
        before = _Described(stand_in)
        try:
            for step in range(_STEPS):
                for which, parameter in enumerate(parameters):
                    parameter.grad = case.part(which, step, 0, len(parameter))
                own.call_step(stand_in)
        except Exception as error:  # a class of the user's own
            return error
        before.refuse_other_state(self._name, stand_in, parameters)
        return [parameter.detach() for parameter in parameters]

    def _in_parts(self, case: _Case) -> list[torch.Tensor]:
        """As servers step: each shard by itself, with an object of each step's own."""
        torch.manual_seed(0)
        whole = []
        for which, start in enumerate(case.start):
            cuts = [0, 1, len(start) // 2, len(start)]
            whole.append(torch.cat([self._part(case, which, *ends) for ends in itertools.pairwise(cuts)]))
        return whole

    def _part(self, case: _Case, which: int, low: int, high: int) -> torch.Tensor:
        parameter = torch.nn.Parameter(case.start[which][low:high].clone())
        options, attributes = self._fresh()
        own = ShardOptimizer(self._optimizer.cls, attributes, options)
        state: StateOfShard = own.initial_state(options[self._group], parameter)
        for step in range(_STEPS):
            groups: list[list[torch.Tensor]] = [[] for _ in options]
            groups[self._group] = [parameter]
            parameter.grad = case.part(which, step, low, high)
            stand_in = own.stand_in(options, groups, {parameter: state})
            own.call_step(stand_in)
            state = stand_in.state.get(parameter, {})
        return parameter.detach()

    def _fresh(self) -> tuple[list[dict[str, object]], dict[str, object]]:
        options = [copy.deepcopy(dict(own)) for own in self._optimizer.options]
        return options, copy.deepcopy(self._optimizer.attributes)


class _Described:
    """What an optimizer has beside its state, before any step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes, self._groups = self._read(optimizer)

    @staticmethod
    def _read(optimizer: Optimizer) -> tuple[dict[str, str], list[dict[str, str]]]:
        own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
        groups = [hyperparameters(group) for group in optimizer.param_groups]
        return _described(own), [_described(group) for group in groups]

    def refuse_other_state(self, name: str, after: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """What a step changes outside of ``state[parameter]`` would be lost: each step has an object of its own."""
        attributes, groups = self._read(after)
        places = [
            f"self.{key}"
            for key, value in attributes.items()
            if value != self._attributes.get(key) and key not in _FLAGS_OF_TORCH
        ]
        for number, (now, before) in enumerate(zip(groups, self._groups, strict=True)):
            places += [f"self.param_groups[{number}][{k!r}]" for k, v in now.items() if v != before.get(k)]
        places += [f"self.state[{key!r}]" for key in after.state if not any(key is own for own in parameters)]
        if places:
            raise UnsupportedError(
                f"elementwise_optimizers names {name}, which keeps state in {', '.join(places)}. Servers step its "
                "shards at the same time, and keep only self.state[parameter]. Leave it out: then its variables stay "
                "whole, on one server, and it keeps its state where it likes."
            )


def require_growth(optimizer: Optimizer, earlier: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> None:
    """Raise `UnsupportedError` where variables that servers step with ``optimizer`` are no longer in its groups."""
    if len(groups) < len(earlier) or any(
        now[: len(before)] != before for before, now in zip(earlier, groups, strict=False)
    ):
        raise UnsupportedError(
            f"parameters were removed from param_groups of {type(optimizer).__name__}, or put into another order, "
            "after it had been placed on parameter servers. More can be added behind them. What is not to be trained "
            "any more gets requires_grad_(False), or make another optimizer in a `with strategy.scope():`."
        )


def moves_rows_without_gradient(optimizer: Optimizer, kind: Kind) -> bool:
    """Whether its step changes a row, or the state of one, to which the gradient is zero. Not for one that steps sparse
    gradients alone: what these do not name stays as it is anywhere."""
    if kind.gradients is Gradients.SPARSE:
        return False
    own = ShardOptimizer(*parts_of(optimizer))
    return any(_moves(own, number, begun) for number in range(len(own.options)) for begun in (False, True))


def warn_of_rows(optimizer: Optimizer, kind: Kind) -> bool:
    """Whether it does not do on servers what it does on one device; then there was a warning."""
    if not moves_rows_without_gradient(optimizer, kind):
        return False
    warnings.warn(
        f"on one device {type(optimizer).__name__} moves all rows of an embedding table in every step (by "
        "momentum, running averages, weight decay); on parameter servers with a variable_partitioner, or with "
        "sparse=True, rows that no gradient touches stay as they are. ParameterServerStrategy(…, rows_only=False) has "
        "those of one device, and steps whole tables; rows_only=True says that this is meant, without this warning.",
        stacklevel=3,
    )
    return True


def _moves(optimizer: ShardOptimizer, group: int, begun: bool) -> bool:
    parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    groups: list[list[torch.Tensor]] = [[] for _ in optimizer.options]
    groups[group] = [parameter]
    states: dict[torch.Tensor, StateOfShard]
    states = {parameter: optimizer.initial_state(optimizer.options[group], parameter)}
    before: list[torch.Tensor] = []
    for gradient in [1.0, 0.0] if begun else [0.0]:
        before = _of_rows(parameter, states)
        parameter.grad = torch.full_like(parameter, gradient)
        states = optimizer.step(optimizer.options, groups, states)
    after = _of_rows(parameter, states)
    return any(not torch.equal(one, other) for one, other in zip(before, after, strict=False))


def _of_rows(parameter: torch.Tensor, states: Mapping[torch.Tensor, StateOfShard]) -> list[torch.Tensor]:
    found = [parameter, *(states.get(parameter) or {}).values()]
    return [one.detach().clone() for one in found if isinstance(one, torch.Tensor) and one.shape == parameter.shape]


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A kernel may round the last elements of a tensor differently; what is wrong when cut is off by far more.
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def _described(values: Mapping[str, object]) -> dict[str, str]:
    return {
        name: repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value) for name, value in values.items()
    }


def _text(values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(_described(values).items()))
