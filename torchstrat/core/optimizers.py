"""What the package knows of optimizers: kinds, stand-ins that are stepped in the place of one, and steps in blocks.

**Kinds.** This is the one place that says so: for parameter servers, for parameters that are cut over logical devices,
for blocks of a step, and for steps that processes share out. It is a list of classes, not a trial. A trial sees a few
small parameters; an optimizer that looks at several at once (a norm over all of them), or keeps things outside of
``state``, might pass it and be wrong when cut. Subclasses of these classes may do anything, and count as unknown. Where
the user says of a class that it works element by element, a trial checks that
(`torchstrat.parameter_server.variables.optimizer_state`).

**Stand-ins.** Optimizers that are stepped in the place of another one: of its class and with its attributes, over
other parameters and other state. No constructor runs, and what is stepped of them is nothing of the user's unless it is
given.

**Blocks.** A step in blocks that stay in the processor's cache, with the same numbers to the last bit. A step is
several kernels, three for SGD with momentum and a dozen for Adam, and each of them walks over the whole of a large
parameter, its gradient and its state, which come from memory every time. Where each element is stepped for itself their
order is free: here all kernels go over one block, then all over the next, and memory is read once. 12.6 million
parameters on one of two busy cores (AMD EPYC): Adam 74 ms whole, 23 ms in blocks; SGD with momentum 14 and 10 ms.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import step_without_compiler, tensors_in_storage
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.ftrl import Ftrl
from torchstrat.core.reachable import Start, address_of, has_address


class Tier(enum.Enum):
    """What a step looks at, and therefore how it may be shared out."""

    ELEMENTS = "each element for itself"
    ROWS = "each row for itself"
    PARAMETERS = "each parameter for itself"
    ALL = "all at once"


class Gradients(enum.Enum):
    """What a step makes of the layout of a gradient."""

    ALIKE = "a sparse gradient is stepped as the dense one of its rows"
    SPARSE = "only sparse ones are stepped"
    BY_LAYOUT = "dense and sparse ones may be stepped in different ways"


@dataclass(frozen=True)
class Kind:
    tier: Tier
    gradients: Gradients = Gradients.ALIKE

    @property
    def may_cut_rows(self) -> bool:
        """Whether a step of some rows of a parameter is what the step of the whole does to these."""
        return self.tier in (Tier.ELEMENTS, Tier.ROWS)


UNKNOWN = Kind(Tier.ALL, Gradients.BY_LAYOUT)
"""A class that is not listed may do anything."""

_KINDS: Mapping[type[Optimizer], Kind] = {
    torch.optim.SGD: Kind(Tier.ELEMENTS),
    torch.optim.Adam: Kind(Tier.ELEMENTS),
    torch.optim.AdamW: Kind(Tier.ELEMENTS),
    torch.optim.Adagrad: Kind(Tier.ELEMENTS),
    torch.optim.RMSprop: Kind(Tier.ELEMENTS),
    torch.optim.Adadelta: Kind(Tier.ELEMENTS),
    torch.optim.Adamax: Kind(Tier.ELEMENTS),
    torch.optim.NAdam: Kind(Tier.ELEMENTS),
    torch.optim.RAdam: Kind(Tier.ELEMENTS),
    torch.optim.ASGD: Kind(Tier.ELEMENTS),
    torch.optim.Rprop: Kind(Tier.ELEMENTS),
    Ftrl: Kind(Tier.ELEMENTS),
    torch.optim.SparseAdam: Kind(Tier.ROWS, Gradients.SPARSE),
    torch.optim.Adafactor: Kind(Tier.PARAMETERS),
    torch.optim.Muon: Kind(Tier.PARAMETERS),
    torch.optim.LBFGS: Kind(Tier.ALL),
}


def is_listed(cls: type[Optimizer]) -> bool:
    """Whether it is known what steps of this very class do."""
    return cls in _KINDS


def kind_of_class(cls: type[Optimizer]) -> Kind:
    return _KINDS.get(cls, UNKNOWN)


def kind_of(optimizer: Optimizer) -> Kind:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return UNKNOWN  # its step is part of a graph of the user's
    return kind_of_class(type(optimizer))


def tier_of(optimizer: Optimizer) -> Tier:
    return kind_of(optimizer).tier


def names_of(tier: Tier) -> str:
    """The listed classes of a tier, for error messages."""
    return ", ".join(cls.__name__ for cls, kind in _KINDS.items() if kind.tier is tier)


State = dict[torch.Tensor, dict[str, Any]]


def stand_in_of(
    kind: type[Optimizer], attributes: Mapping[str, object], groups: list[dict[str, object]], state: State | None = None
) -> Optimizer:
    """``attributes``: of an optimizer of this ``kind``, as `vars` gives them. ``groups``, ``state``: in place of these
    two of its own; None: no state."""
    stand_in: Optimizer = object.__new__(kind)
    vars(stand_in).update(
        attributes, param_groups=groups, state=collections.defaultdict(dict) if state is None else state
    )
    return stand_in


def make_stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and hyperparameters whose groups hold no parameters and whose state is its own."""
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    return stand_in_of(type(optimizer), vars(optimizer), groups)


# Of classes: every step asks.
_wraps_none: Callable[[type], bool] = functools.lru_cache(1024)(lambda kind: kind.__module__.startswith("torch.optim."))


def stepped_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """What a step of ``optimizer`` may change: its own parameters, and those of optimizers that it wraps."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if _wraps_none(type(optimizer)):
        return tensors
    known = {id(tensor) for tensor in tensors}
    for inner in wrapped_by(optimizer):
        for group in inner.param_groups:
            tensors += [tensor for tensor in group["params"] if id(tensor) not in known]
            known.update(map(id, group["params"]))
    return tensors


def wrapped_among(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """``id`` of the optimizers that these wrap: what steps them is, or may be, a step of another one."""
    return frozenset(id(inner) for one in optimizers for inner in wrapped_by(one))


def wrapped_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Those in its attributes, and in theirs."""
    return iter(()) if _wraps_none(type(optimizer)) else _wrapped_by(optimizer, {id(optimizer)})


def _wrapped_by(optimizer: Optimizer, seen: set[int]) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        members = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for member in members:
            if isinstance(member, Optimizer) and id(member) not in seen:
                seen.add(id(member))
                yield member
                yield from _wrapped_by(member, seen)


def own_step(optimizer: Optimizer) -> object:
    """What the program has put into the object in the place of its class's ``step``; None if it has not. A scheduler
    puts a wrapper there, around the one or the other."""
    step: Any = vars(optimizer).get("step")
    if not hasattr(step, "_wrapped_by_lr_sched"):
        return step
    wrapped = step.__wrapped__
    is_of_class = inspect.unwrap(wrapped) is inspect.unwrap(type(optimizer).step)
    return None if is_of_class else types.MethodType(wrapped, optimizer)


def is_seen_to_step(optimizer: Optimizer) -> bool:
    """Whether PyTorch's hooks are called around its steps, as its constructor sees to. Of a wrapper that does without
    that only the steps of what it wraps are seen, and all else that its ``step`` does is the program's code."""
    return hasattr(type(optimizer).step, "hooked")


def own_state(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Empty for a wrapper that shows the state of those that it wraps by something else than a dictionary: a
    `ChainMap` that is asked for an entry makes one in the first of them."""
    state: object = optimizer.state
    return state if isinstance(state, dict) else {}


def hyperparameters(group: Mapping[str, object]) -> dict[str, object]:
    """Of a parameter group, all but its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


Places = tuple[tuple[int, ...], ...]


def groups_with_wrapped(optimizer: Optimizer) -> tuple[list[dict[str, object]], Places]:
    """The parameter groups of an optimizer and, behind them, those that only optimizers have that it wraps; and by
    wrapped one, the places of its own among these."""
    groups, places = list(optimizer.param_groups), []
    known = {id(group): place for place, group in enumerate(groups)}
    for inner in wrapped_by(optimizer):
        for group in inner.param_groups:
            if known.setdefault(id(group), len(groups)) == len(groups):
                groups.append(group)
        places.append(tuple(known[id(group)] for group in inner.param_groups))
    return groups, tuple(places)


def keep_elements(
    stood: Iterable[tuple[torch.Tensor, torch.Tensor]], kept: Callable[[], Iterable[object]], holders: int | None = None
) -> None:
    """After a step in which each parameter stood for its memory, that memory has the parameter's elements.

    A step may have put others in their place (``p.data = state["slow"]``), those of another parameter, perhaps. What
    can be reached from what ``kept`` gives of the old ones gets memory of its own: it would change with the parameter.

    Args:
        stood: A parameter and its memory.
        kept: See `kept_by`. Called only where elements were replaced: every step comes here.
        holders: How many tensors show such a memory if nobody else does, the parameter included; None: not counted.

    Raises `UnsupportedError`, before any memory is changed, where more do.
    """
    replaced = [
        (parameter, memory, parameter.detach().clone())
        for parameter, memory in stood
        if parameter.data_ptr() != memory.data_ptr() or parameter.stride() != memory.stride()
    ]
    if not replaced:
        return
    for parameter, memory, _ in replaced:
        parameter.data = memory
    parameters = {id(parameter) for parameter, _, _ in replaced}
    addresses = {address_of(memory) for _, memory, _ in replaced}
    reached = Start(None, kept()).walk()
    for tensor in (*reached.plain, *reached.tensors):
        if id(tensor) not in parameters and has_address(tensor) and address_of(tensor) in addresses:
            tensor.data = tensor.detach().clone()
    for _, memory, elements in replaced:
        if holders is not None and tensors_in_storage(memory) > holders:
            raise UnsupportedError(
                f"a step has put another tensor in the place of the elements of a parameter of shape "
                f"{tuple(elements.shape)}, and something other than its optimizer keeps the old elements, which would "
                "change with the parameter here. Keep a clone of them, or exchange values in place (p.copy_(...))."
            )
    with torch.no_grad():
        for _, memory, elements in replaced:
            memory.copy_(elements)


def kept_by(optimizer: Optimizer) -> list[object]:
    """Where an optimizer, and those that it wraps, keep what they know of parameters."""
    found: list[object] = []
    for one in (optimizer, *wrapped_by(optimizer)):
        found += [value for name, value in vars(one).items() if name not in ("param_groups", "state")]
        found += one.state.values()
    return found


def state_of_removed(optimizer: Optimizer) -> dict[torch.Tensor, object]:
    """What it keeps of tensors that are in none of its groups any more."""
    listed = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    held = dict.items(optimizer.state) if isinstance(optimizer.state, dict) else ()
    return {key: entry for key, entry in held if isinstance(key, torch.Tensor) and id(key) not in listed}


def state_dict_of(optimizer: Optimizer) -> Any:
    """Its ``state_dict()``, which fails with a bare KeyError in PyTorch where there is a `state_of_removed`; that is
    left out."""
    removed = state_of_removed(optimizer)
    if not removed:
        return optimizer.state_dict()
    for key in removed:
        del optimizer.state[key]
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state.update(removed)


def load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`Optimizer.load_state_dict` into the groups and the state that are there, where PyTorch puts others in their
    place: an optimizer that wraps this one may have the same (``self.param_groups = wrapped.param_groups``). The
    `state_of_removed` stays."""
    kept, groups, each = optimizer.state, optimizer.param_groups, list(optimizer.param_groups)
    removed = state_of_removed(optimizer)
    if not is_seen_to_step(optimizer):  # to load would let PyTorch call hooks around its steps from now on
        tensors = [tensor for group in groups for tensor in group["params"]]
        kept.clear()
        kept.update({tensors[place]: entry for place, entry in state["state"].items()} | removed)
        return
    optimizer.load_state_dict(state)
    if optimizer.param_groups is not groups:
        for group, loaded in zip(each, optimizer.param_groups, strict=True):
            if loaded is not group:
                group.clear()
                group.update(loaded)
        optimizer.param_groups = groups
    if optimizer.state is not kept:
        kept.clear()
        kept.update(optimizer.state)
        optimizer.state = kept
    kept.update(removed)


def take_over_steps(kind: type[Optimizer], *, without_compiler: bool = False) -> None:
    """From now on a step of this class asks the hooks of this process, and that of a stand-in made to `be_idle` does
    nothing: what a class of the user's own does with no parameters at all is not known, and LBFGS fails.

    PyTorch puts its hooks around a class when the first of its objects is made; a class that has come from another
    process has none, or those of the other process. Objects of the class that have no tables of hooks, which PyTorch's
    constructor makes, step as before. ``without_compiler``: see `step_without_compiler`.
    """
    if getattr(kind.step, _TAKEN_OVER, None) is _HERE:
        return
    inner = step_without_compiler(kind.step) if without_compiler else _without_hooks(kind)
    if not hasattr(inner, _CAN_IDLE):
        inner = _idling(inner)
    hooked = Optimizer.profile_hook_step(inner)
    hooked.hooked = True  # type: ignore[attr-defined]

    @functools.wraps(hooked)
    def step(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        has_tables = hasattr(optimizer, "_optimizer_step_post_hooks")
        return (hooked if has_tables else inner)(optimizer, *args, **kwargs)

    kind.step = step  # type: ignore[method-assign,assignment]
    setattr(step, _TAKEN_OVER, _HERE)


def give_hook_tables(optimizer: Optimizer) -> None:
    """Lets hooks be registered on a wrapper that does without PyTorch's constructor, but sets tables of hooks itself:
    plain dictionaries, which take no handles, or that of hooks before a step alone. Its state can be saved and loaded,
    too."""
    own = vars(optimizer)
    if "_optimizer_step_pre_hooks" not in own:
        return
    for name in ("step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        own.setdefault(f"_optimizer_{name}_hooks", {})
    for name, table in own.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks") and type(table) is dict:
            own[name] = collections.OrderedDict(table)


def be_idle(stand_in: Optimizer, result: object = None) -> Optimizer:
    """``result``: what its step returns."""
    vars(stand_in)[_IS_IDLE] = result
    return stand_in


def _idling(step: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(step)
    def idling(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        found = vars(optimizer)
        return found[_IS_IDLE] if _IS_IDLE in found else step(optimizer, *args, **kwargs)

    setattr(idling, _CAN_IDLE, True)
    return idling


_IS_IDLE, _CAN_IDLE, _TAKEN_OVER = "_torchstrat_is_idle", "_torchstrat_can_idle", "_torchstrat_taken_over"
_HERE = object()
"""In a function that came by value it is another object, of the process that sent it."""


def bare_step(optimizer: Optimizer) -> None:
    """Without hooks: those of the user's optimizer run around its own step. By the class's method, for a scheduler may
    have put another into the attributes."""
    _without_hooks(type(optimizer))(optimizer)


def _without_hooks(kind: type[Optimizer]) -> Callable[..., Any]:
    step = kind.step
    bare: Callable[..., object] | None = _bare.get(step)
    if bare is None:
        bare = inspect.unwrap(step, stop=lambda step: not hasattr(step, "hooked"))
        if bare is not step:  # it would keep itself
            _bare[step] = bare
    return bare


_bare: weakref.WeakKeyDictionary[Callable[..., object], Callable[..., object]] = weakref.WeakKeyDictionary()
"""Kept because every step that is shared out asks."""


_BLOCK_BYTES = 1 << 20
"""Of one tensor, per thread of an operator: a step's five or six blocks fit into a core's own cache and its share of
the common one, and the Python code of a block's step, 30 µs, is little beside its kernels."""

_SHORT_STEPS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)
_FEWEST_BLOCKS = 16
"""For `_SHORT_STEPS`: with few kernels and at most one temporary tensor a step is faster whole while the parameter, its
gradient and its state stay in the common cache."""

_PLAIN = (torch.Tensor, nn.Parameter)
_MISSING = object()


def is_worth_blocks(optimizer: Optimizer) -> bool:
    """Whether `step_in_blocks` may have anything to gain; it is certain to have not where this is False."""
    if kind_of_class(type(optimizer)).tier is not Tier.ELEMENTS:
        return False
    largest_whole = _largest_whole(optimizer, _BLOCK_BYTES)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.nbytes > largest_whole and not _has_few_kernels(optimizer, group):
                return tier_of(optimizer) is Tier.ELEMENTS
    return False


def step_in_blocks(optimizer: Optimizer, step: Callable[[Optimizer], None] = bare_step) -> bool:
    """Step ``optimizer``, on the CPU, with the gradients that are there. False if there is nothing to gain, and nothing
    was done: it has no large parameter, or looks at more than one element, or its kernels do all at once.

    ``step``: how an optimizer is stepped; it is given stand-ins of the same class, over parts of parameters.
    """
    if tier_of(optimizer) is not Tier.ELEMENTS:
        return False
    count = _BLOCK_BYTES * torch.get_num_threads()
    cut = {id(parameter): _Blocks(parameter, optimizer, count) for parameter in _worth_cutting(optimizer, count)}
    if not cut:
        return False
    state: State = collections.defaultdict(dict)
    state.update((key, value) for key, value in optimizer.state.items() if id(key) not in cut)
    groups = []
    for group in optimizer.param_groups:
        parameters: list[torch.Tensor] = []
        for parameter in group["params"]:
            blocks = cut.get(id(parameter))
            if blocks is None:
                parameters.append(parameter)
            elif blocks.is_new:
                blocks.step_one_by_one(group, step)
            else:
                parameters += blocks.leaves
                state.update(zip(blocks.leaves, blocks.states, strict=True))
        groups.append({**group, "params": parameters})
    step(stand_in_of(type(optimizer), vars(optimizer), groups, state))
    for blocks in cut.values():
        blocks.keep(state)
    optimizer.state.update(state)  # of those that were stepped whole
    return True


def _worth_cutting(optimizer: Optimizer, block_bytes: int) -> Iterator[torch.Tensor]:
    largest_whole = _largest_whole(optimizer, block_bytes)
    for group in optimizer.param_groups:
        if not _has_few_kernels(optimizer, group):
            for parameter in group["params"]:
                if parameter.nbytes > largest_whole and _can_be_cut(parameter, optimizer):
                    yield parameter


def _largest_whole(optimizer: Optimizer, block_bytes: int) -> int:
    """Bytes of a parameter up to which it is stepped whole."""
    return block_bytes * (_FEWEST_BLOCKS if type(optimizer) in _SHORT_STEPS else 1)


def _has_few_kernels(optimizer: Optimizer, group: dict[str, object]) -> bool:
    """Whether its kernels take all parameters together, or there is but one or two, and little is read twice."""
    if group.get("fused") or group.get("foreach") or group.get("capturable"):
        return True
    return type(optimizer) is torch.optim.SGD and not group["momentum"]


def _can_be_cut(parameter: torch.Tensor, optimizer: Optimizer) -> bool:
    gradient = parameter.grad
    return (
        gradient is not None
        and type(gradient) in _PLAIN
        and gradient.shape == parameter.shape
        and type(parameter) in _PLAIN
        and all(_is_row(tensor) for tensor in (parameter, gradient))
        and all(
            _is_row(value) if value.shape == parameter.shape else value.numel() == 1
            for value in (optimizer.state.get(parameter) or {}).values()
            if isinstance(value, torch.Tensor)
        )
    )


def _is_row(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory of the host in their order."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()


class _Blocks:
    """One parameter, its gradient and its state, as views of parts."""

    def __init__(self, parameter: torch.Tensor, optimizer: Optimizer, block_bytes: int) -> None:
        self._parameter, self._optimizer = parameter, optimizer
        # Of equal length, and a multiple of what vectorised kernels take at once: see `central.portions`.
        self._count = block_bytes // parameter.element_size()
        self.leaves = self._row(parameter)
        assert parameter.grad is not None
        for leaf, gradient in zip(self.leaves, self._row(parameter.grad), strict=True):
            leaf.grad = gradient
        known = optimizer.state.get(parameter) or {}
        self.is_new = not known
        self.states: list[dict[str, object]] = [{} for _ in self.leaves]
        for name, value in known.items():
            for own, part in zip(self.states, self._parts(value), strict=True):
                own[name] = part
        self._before = dict(self.states[0])

    def _row(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        row: Sequence[torch.Tensor] = tensor.detach().view(-1).split(self._count)
        return row

    def _parts(self, value: object) -> Iterator[object]:
        if isinstance(value, torch.Tensor) and value.shape == self._parameter.shape:
            yield from self._row(value)
            return
        yield value
        for _ in self.leaves[1:]:  # a count of steps, say, which each block's step adds to
            yield value.clone() if isinstance(value, torch.Tensor) else value

    def step_one_by_one(self, group: dict[str, object], step: Callable[[Optimizer], None]) -> None:
        """The first step, which makes the state: so that there is never all of it in blocks and once more as a whole,
        memory that the process would keep."""
        whole: dict[str, Any] = {}
        for place, leaf in enumerate(self.leaves):
            optimizer = stand_in_of(type(self._optimizer), vars(self._optimizer), [{**group, "params": [leaf]}])
            step(optimizer)
            for name, value in optimizer.state[leaf].items():
                if isinstance(value, torch.Tensor) and value.shape == leaf.shape:
                    if place == 0:
                        whole[name] = torch.empty_like(self._parameter, dtype=value.dtype, requires_grad=False)
                    self._row(whole[name])[place].copy_(value)
                elif place == 0:
                    whole[name] = value
        if whole:
            self._optimizer.state[self._parameter] = whole

    def keep(self, stepped: State) -> None:
        """After the step of all: what has become of the state, and what is new in it. Takes the blocks out of
        ``stepped``."""
        states = [stepped.pop(leaf) for leaf in self.leaves if leaf in stepped]
        for name, value in states[0].items() if states else ():
            if value is not self._before.get(name, _MISSING):
                self._optimizer.state[self._parameter][name] = self._joined([state[name] for state in states])

    def _joined(self, parts: list[Any]) -> object:
        if isinstance(parts[0], torch.Tensor) and parts[0].shape == self.leaves[0].shape:
            return torch.cat(parts).view(self._parameter.shape)
        return parts[0]
