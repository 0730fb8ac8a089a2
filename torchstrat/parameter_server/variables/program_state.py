"""One look at everything of the program that servers and workers have to be told of when it changes.

`CapturedVariables` knows which tensor of the user's model is which variable on the servers. Nothing tells of a
parameter that was written, of ``model.eval()`` or of a new learning rate, so all of it is looked at whenever a
function is scheduled. What is then done about a change takes a hundred times as long as to see that there is none: two
equal readings mean that nothing has to be done.
"""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    own_buffer,
    own_parameters,
    tensors_in_storage,
    version_of,
)
from torchstrat.core.buffer_rules import is_statistic
from torchstrat.core.errors import ContextError, NotSendableError, UnsupportedError
from torchstrat.core.optimizers import Places, groups_with_wrapped, hyperparameters, is_listed
from torchstrat.core.reduction import VariableAggregation
from torchstrat.core.tensor_bytes import overlap, shows_part
from torchstrat.core.variables import BufferSlot, VariableRegistry
from torchstrat.parameter_server.dispatch import SAME_AS, Options
from torchstrat.parameter_server.messages import Token, VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import token_of_spec
from torchstrat.parameter_server.serialization.plain import are_atoms, is_dense, is_fixed, is_plain
from torchstrat.parameter_server.variables.attributes import PlainAttributes, marks_of_classes
from torchstrat.parameter_server.variables.cached_parameter import alias_of, let_ask, no_longer_one, shares_memory
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.module_structure import (
    ModuleStructure,
    marks_of_hooks,
    require_no_global_hooks,
)
from torchstrat.parameter_server.variables.optimizer_state import Kinds, RemoteOptimizerState
from torchstrat.parameter_server.variables.placement import Bonds, Placement
from torchstrat.replicas.thread_state import SCOPE, PlainSettings, what_sees_operators

_MOST_NAMES = 3
_WRITTEN_TOO = (
    "a scheduled function has written to {} by hand while functions on other workers changed the same: its values "
    "stay, and what the others had changed since it read them is lost. This is said once. Write on the coordinator, "
    "where that waits until no function is half-way; or let the optimizer do it (weight_decay); or call "
    "coordinator.join() before and after the function."
)
_CHANGED_TOO = (
    "workers have changed {} at the same time, and the last value stays: what the others added is not in it. If it "
    "counts or adds up, call strategy.extended.set_aggregation(module, {}, 'sum') on the coordinator, with the {}; "
    "'only_first_replica' says that the last one is meant. Integral buffers are summed by themselves."
)


class _Slot(NamedTuple):
    """A `BufferSlot` whose module the program may drop."""

    module: weakref.ref[nn.Module]
    key: tuple[int, str]

    @property
    def name(self) -> str:
        return self.key[1]

    @property
    def tensor(self) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else own_buffer(module, self.name)


class CapturedVariables:
    """Parameters, buffers and leaf tensors of the registry, by the variables they became. Held weakly.

    ``died`` is told of variables whose tensors the program has dropped, and of buffers whose modules it has, too.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        placement: Placement,
        kinds: Kinds,
        cache: CoordinatorCache,
        died: Callable[[Token], None] = lambda token: None,
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._died = died
        self._placement, self._kinds = placement, kinds
        self._specs: dict[int, VariableSpec] = {}
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}  # by id of the tensor
        self._buffers: dict[int, list[_Slot]] = {}  # one, or as many as modules have the same tensor
        self._buffer_ids: dict[int, int] = {}  # of the tensor that was last seen there
        self._slots: dict[tuple[int, str], int] = {}  # (id of the module, name) -> number
        self.shared: dict[int, str] = {}
        """Buffers that show memory of another variable, by number, with its name."""
        self._beside: dict[int, VariableSpec] = {}
        self._to_create: list[VariableSpec] = []
        self._unchecked: set[int] = set()  # that may show another variable's memory; until that was looked at
        self._conflicts: set[int] = set()  # that were warned of
        self._whole_for: dict[int, str] = {}
        self._growths, self._has_warned_of_writes = 0, False

    # -- who is who -------------------------------------------------------------------------------------------------

    def spec_of(self, tensor: torch.Tensor) -> VariableSpec | None:
        number = self._numbers.get(id(tensor))
        # A module may have put another tensor in a buffer's place: the id is then free for anybody's.
        return None if number is None or self.tensor(number) is not tensor else self._specs[number]

    def specs_of(self, optimizer: Optimizer) -> dict[torch.Tensor, VariableSpec]:
        """Of the variables among an optimizer's tensors."""
        tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
        return {tensor: spec for tensor in tensors if (spec := self.spec_of(tensor)) is not None}

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
        """Of the variables among them."""
        return (spec.number for tensor in tensors if (spec := self.spec_of(tensor)) is not None)

    def spec_of_buffer(self, module: nn.Module, name: str) -> VariableSpec | None:
        number = self._slots.get((id(module), name))
        return None if number is None else self._specs[number]

    def tensor(self, number: int) -> torch.Tensor | None:
        """The coordinator's copy; None when the program has dropped it."""
        if number in self._buffers:
            return self._slot(number).tensor
        reference = self._parameters.get(number)
        return None if reference is None else reference()

    def at(self, address: int) -> torch.Tensor | None:
        """The coordinator's copy of which this is the `id`."""
        number = self._numbers.get(address)
        tensor = None if number is None else self.tensor(number)
        return tensor if id(tensor) == address else None

    def shown_by(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The variable in whose memory all lies that ``tensor`` shows: it is a view, or ``.data``. It asks from now on,
        as it does if it was made after the variable was placed."""
        with DisableTorchFunctionSubclass():
            if tensor.requires_grad or not is_dense(tensor) or tensor.is_meta or tensors_in_storage(tensor) < 2:
                return None
            for number in list(self._specs):
                whole = self.tensor(number)
                if whole is None or whole is tensor or not shows_part(tensor, whole):
                    continue
                if (alias := alias_of(whole)) is not None and type(tensor) is torch.Tensor:
                    let_ask(tensor, alias.holder)
                return whole
        return None

    def specs(self) -> list[VariableSpec]:
        """Of what the program still has."""
        return [spec for spec in list(self._specs.values()) if self._is_there(spec.number)]

    def _is_there(self, number: int) -> bool:
        if number in self._buffers:
            return self._slot(number).module() is not None
        return self.tensor(number) is not None

    def _slot(self, number: int) -> _Slot:
        """Of a buffer: one whose module is there, if there is any."""
        slots = self._buffers[number]
        return slots[0] if len(slots) == 1 else next((one for one in slots if one.module() is not None), slots[0])

    def parameters(self) -> Iterator[tuple[VariableSpec, torch.Tensor]]:
        """Every parameter that the program still has."""
        for number in self._parameters:
            tensor = self.tensor(number)
            if tensor is not None:
                yield self._specs[number], tensor

    def tensors(self) -> Iterator[tuple[Token, torch.Tensor]]:
        """Every variable that the program still has, by its token."""
        for spec in self.specs():
            tensor = self.tensor(spec.number)
            if tensor is not None:
                yield token_of_spec(spec), tensor

    def specs_under(self, modules: Iterable[nn.Module]) -> list[VariableSpec]:
        """The variables of these modules and their children, each once."""
        found: dict[int, VariableSpec] = {}
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                spec = self.spec_of(tensor)
                if spec is not None:
                    found[spec.number] = spec
        return list(found.values())

    def go_by_rows(self, specs: Collection[VariableSpec]) -> bool:
        """Whether gradients of some name rows alone: those of tables that travel so, and of lookups that are sparse."""
        sparse = (one for one in self._registry.modules() if getattr(one, "sparse", None) is True)
        numbers = set(self.numbers_of(p for one in sparse for p in own_parameters(one).values() if p is not None))
        return any(spec.by_rows or spec.number in numbers for spec in specs)

    def grow(self, spec: VariableSpec) -> None:
        """The servers have more rows of a variable, and ``spec`` is what it is now."""
        self._specs[spec.number] = spec
        self._growths += 1
        self._cache.grow(spec)

    # -- new ones ---------------------------------------------------------------------------------------------------

    def put_beside(self, tensor: torch.Tensor, spec: VariableSpec) -> None:
        """``tensor`` is to live with ``spec``; said before it is placed."""
        self._beside[id(tensor)] = spec

    def place_new(self) -> None:
        """Give every variable that has none yet its place, in order of creation."""
        new = {name: t for name, t in self._registry.named_tensors().items() if self.spec_of(t) is None}
        if new:
            tables = set(_possible_tables(self._registry.modules()))
            bonds = Bonds((one, self._kinds.of(one)) for one in self._registry.optimizers())
            for name, tensor in new.items():
                self._place(name, tensor, bonds, is_table=id(tensor) in tables)
        for name, slot in self._registry.named_buffer_slots().items():
            if slot.tensor is not None and (id(slot.module), slot.name) not in self._slots:
                self._place_buffer(name, slot)
        self._unchecked.update(self._follow_buffers(), (spec.number for spec in self._to_create))
        if self._unchecked:
            self._require_own_memory(self._unchecked)
            self._unchecked.clear()

    def _require_own_memory(self, new: Collection[int]) -> None:
        """Of two variables that show the same memory here, each has its own on the servers and on workers. Buffers may:
        two layers have parts of one mask. They are `shared` then, and no function may change them."""
        held: dict[int, list[tuple[VariableSpec, torch.Tensor]]] = {}
        with DisableTorchFunctionSubclass():
            for number, spec in self._specs.items():
                tensor = self.tensor(number)
                if tensor is not None and tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
                    held.setdefault(tensor.untyped_storage().data_ptr(), []).append((spec, tensor))
            self.shared.clear()
            for together in held.values():
                for (spec, tensor), (other, its_tensor) in combinations(together, 2):
                    is_of_buffers = spec.kind == other.kind == "buffer"
                    is_new = spec.number in new or other.number in new
                    if (is_of_buffers or is_new) and overlap(tensor, its_tensor):
                        if not is_of_buffers:
                            raise shares_memory(other.name, spec.name)
                        self.shared |= {spec.number: other.name, other.number: spec.name}

    def to_create(self) -> list[VariableSpec]:
        """What has a place and is not on the servers yet, as far as the program still has it."""
        self._to_create = [spec for spec in self._to_create if self.tensor(spec.number) is not None]
        return list(self._to_create)

    def created(self, *, with_these_values: bool) -> None:
        """The servers have all of `to_create` now. ``with_these_values``: those that it has here; else perhaps others,
        which an earlier coordinator left there."""
        for spec in self._to_create:
            tensor = self.tensor(spec.number)
            if tensor is not None:
                self._cache.adopt(spec, tensor, is_current=with_these_values)
        self._to_create.clear()

    def give_up_new(self) -> None:
        """The servers do not get what is to be created."""
        for spec in self._to_create:
            self._forget(spec.number)
        self._to_create.clear()

    def forget(self, numbers: Collection[int]) -> None:
        """The program has dropped these."""
        for number in numbers:
            self._forget(number)

    def _forget(self, number: int) -> None:
        tensor = self.tensor(number)
        if tensor is not None and self._numbers.get(id(tensor)) == number:  # it was let go
            del self._numbers[id(tensor)]
        for slot in self._buffers.get(number, ()):
            if self._slots.get(slot.key) == number:
                del self._slots[slot.key]
        for table in (self._specs, self._parameters, self._buffers, self._whole_for, self.shared):
            table.pop(number, None)
        self._cache.release(number)
        key = self._buffer_ids.pop(number, None)
        if key is not None and self._numbers.get(key) == number:
            del self._numbers[key]

    def place_now(self, tensor: torch.Tensor) -> None:
        """Do not wait for the others: somebody asks where ``tensor`` lives."""
        if self.spec_of(tensor) is None:
            self.place_new()

    def _place(self, name: str, tensor: torch.Tensor, bonds: Bonds, *, is_table: bool) -> None:
        others = (self.spec_of(other) for other in bonds.stepped_together_with(tensor))
        beside = self._beside.pop(id(tensor), None) or next((spec for spec in others if spec is not None), None)
        whole_for = bonds.keeps_whole(tensor)
        spec = self._placement.place(
            name,
            tensor.shape,
            tensor.dtype,
            "parameter",
            requires_grad=tensor.requires_grad,
            with_variable=beside,
            may_split=whole_for is None,
            is_table=is_table and not bonds.looks_at_layout(tensor),
        )
        if whole_for is not None:
            self._whole_for[spec.number] = whole_for
        token, key = token_of_spec(spec), id(tensor)
        numbers, died = self._numbers, self._died

        def forget(_: object) -> None:
            numbers.pop(key, None)
            died(token)

        self._parameters[spec.number] = weakref.ref(tensor, forget)
        self._register(spec, tensor)

    def _place_buffer(self, name: str, slot: BufferSlot) -> None:
        assert slot.tensor is not None
        tied = self._tied(name, slot.tensor)
        spec = tied or self._placement.place(name, slot.tensor.shape, slot.tensor.dtype, "buffer", may_split=False)
        token, key = token_of_spec(spec), (id(slot.module), slot.name)
        slots, buffers, died, cache, number = self._slots, self._buffers, self._died, self._cache, spec.number

        def forget(_: object) -> None:
            slots.pop(key, None)
            if any(one.module() is not None for one in buffers.get(number, ())):
                return
            kept = cache.tensor(number)
            if kept is None:
                died(token)
            else:  # a statistic that outlives its layer, or one that is about to go with it
                weakref.finalize(kept, died, token).atexit = False

        buffers.setdefault(number, []).append(_Slot(weakref.ref(slot.module, forget), key))
        slots[key] = number
        if tied is None:
            self._buffer_ids[number] = id(slot.tensor)
            self._register(spec, slot.tensor)

    def _tied(self, name: str, tensor: torch.Tensor) -> VariableSpec | None:
        """The variable that it is already, as the buffer of another module."""
        spec = self.spec_of(tensor)
        if spec is not None and spec.number not in self._buffers:
            raise shares_memory(name, spec.name)
        return spec

    def _register(self, spec: VariableSpec, tensor: torch.Tensor) -> None:
        self._specs[spec.number] = spec
        self._to_create.append(spec)
        self._numbers[id(tensor)] = spec.number

    def whole_for(self, spec: VariableSpec) -> str:
        """The class of the optimizer because of which a variable is not cut; empty if it is not for any."""
        return self._whole_for.get(spec.number, "")

    def _follow_buffers(self) -> list[int]:
        """Modules may have put another tensor in a buffer's place. The numbers of those buffers."""
        replaced = []
        for number, slots in self._buffers.items():
            tensor, before = self._slot(number).tensor, self._buffer_ids[number]
            if len(slots) > 1:
                self._require_one(number, slots)
            if tensor is not None and id(tensor) != before:
                other = self.spec_of(tensor)
                if other is not None:
                    raise shares_memory(self._specs[number].name, other.name)
                if self._numbers.get(before) == number:
                    del self._numbers[before]
                self._numbers[id(tensor)] = number
                self._buffer_ids[number] = id(tensor)
                replaced.append(number)
        return replaced

    def _require_one(self, number: int, slots: Sequence[_Slot]) -> None:
        if len({id(slot.tensor) for slot in slots if slot.module() is not None}) > 1:
            raise no_longer_one(self._specs[number].name)

    # -- buffers ----------------------------------------------------------------------------------------------------

    def aggregations(self) -> dict[int, VariableAggregation]:
        """What the program has set, of buffers, by the numbers of their variables."""
        rules = self._registry.buffer_rules
        found: dict[int, VariableAggregation] = {}
        every = ((number, slot) for number, slots in self._buffers.items() for slot in slots)
        for number, slot in every if rules else ():
            module = slot.module()
            aggregation = None if module is None else rules.get(module, slot.name)
            if aggregation is VariableAggregation.NONE:
                raise UnsupportedError(
                    f"{self._specs[number].name} has aggregation 'none', by which every replica keeps its own. On "
                    "parameter servers workers come and go and keep nothing: hand such a state from function to "
                    "function, or keep it in a per-worker resource."
                )
            if aggregation is not None:
                found[number] = aggregation
        return found

    def may_conflict(self, *, wrote_parameters: bool) -> bool:
        """Whether servers may know of one worker's value that has replaced another's, in a buffer or, where functions
        have written to some by hand, in a parameter; but for what was warned of."""
        if wrote_parameters and not self._has_warned_of_writes:
            return True
        modules = ((slot.module(), slot.name) for slots in self._buffers.values() for slot in slots)
        return any(module is not None and not is_statistic(module, name) for module, name in modules)

    def warn_of_conflicts(self, numbers: Iterable[int]) -> None:
        """Once for each buffer of these variables, and once for parameters."""
        new = sorted(set(numbers) - self._conflicts)
        self._conflicts.update(new)
        specs = [self._specs[number] for number in new if number in self._specs]
        names = [spec.name for spec in specs if spec.kind == "parameter"]
        if names and not self._has_warned_of_writes:
            self._has_warned_of_writes = True
            warnings.warn(_WRITTEN_TOO.format(", ".join(names[:_MOST_NAMES])), stacklevel=3)
        for spec in specs:
            slot = self._slot(spec.number) if spec.number in self._buffers else None
            if slot is not None and (module := slot.module()) is not None:
                message = _CHANGED_TOO.format(spec.name, repr(slot.name), type(module).__name__)
                warnings.warn(message, stacklevel=3)

    # -- whether anything has changed ---------------------------------------------------------------------------------

    @property
    def population(self) -> tuple[int, ...]:
        """Other numbers whenever there are other variables, or larger ones, or some that the servers do not know yet,
        or other rules for buffers."""
        rules = self._registry.buffer_rules.changes
        return len(self._specs), len(self._numbers), len(self._to_create), rules, self._growths

    def states(self, mark: Callable[[torch.Tensor], object]) -> list[object]:
        """Of each variable: how often it was written, and whether it takes gradients; None for one that was dropped.
        ``mark``: of one on which the program has set something."""
        found: list[object] = []
        with DisableTorchFunctionSubclass():
            for reference in self._parameters.values():
                tensor = reference()
                found += (None, None) if tensor is None else (version_of(tensor), tensor.requires_grad)
                if tensor is not None and tensor.__dict__:
                    found.append(mark(tensor))
            for number, slots in self._buffers.items():
                tensor = slots[0].tensor if len(slots) == 1 else self._slot(number).tensor
                is_known = self._cache.tensor(number) is tensor
                found += (None, None) if tensor is None else (version_of(tensor), is_known)
                if tensor is not None and tensor.__dict__:
                    found.append(mark(tensor))
        return found

    def has_traceless_changes(self) -> bool:
        """Whether anything was written that `states` does not show."""
        return self._cache.has_traceless_changes()

    def follow_replaced(self) -> None:
        """Modules may have put another tensor in a buffer's place: that is its value."""
        now = ((number, self._slot(number).tensor) for number in self._buffers)
        replaced = {n: one for n, one in now if one is not None and self._cache.tensor(n) is not one}
        if replaced:
            self._cache.replace(replaced)


def _possible_tables(modules: Iterable[nn.Module]) -> Iterator[int]:
    """Ids of the parameters that `torch.nn.functional.embedding` may look up: weights of embeddings, and what a module
    of the user's own holds itself. Weights of torch's other layers are used whole."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or not type(module).__module__.startswith("torch."):
            yield from (id(parameter) for parameter in own_parameters(module).values())


_members = operator.attrgetter("training", "_parameters", "_modules", "_buffers", "__class__")


def as_they_are(group: Mapping[str, object]) -> dict[str, object]:
    """Hyperparameters that will not change: one may be a tensor, which the program writes to."""
    return {name: None if name == "params" else _as_it_is(name, value) for name, value in group.items()}


def _as_it_is(name: str, value: object) -> object:
    if is_fixed(value):
        return value
    try:
        if not isinstance(value, torch.Tensor) and not is_plain(value):
            pickle.loads(pickle.dumps(value))
        return copy.deepcopy(value)
    except Exception as error:
        raise NotSendableError(
            f"{name!r} of a parameter group cannot travel to workers and servers: {type(value).__name__} {value!r:.80} "
            f"({error}). Keep numbers, strings and tensors there, and what is computed of them in the function."
        ) from error


def options_of(optimizer: Optimizer) -> tuple[list[dict[str, object]], Places]:
    """Hyperparameters by group, to be sent, and the places of those of optimizers that it wraps."""
    groups, places = groups_with_wrapped(optimizer)
    return [hyperparameters(as_they_are(group)) for group in groups], places


def all_options(
    optimizers: Iterable[tuple[int, Optimizer]], numbers_of: Callable[[Sequence[torch.Tensor]], Iterable[int]]
) -> Options:
    """The parameter groups of all optimizers as they are now, with numbers in the place of parameters."""
    found: dict[int, tuple[dict[str, object], ...]] = {}
    first: dict[int, tuple[int, int]] = {}
    for number, optimizer in optimizers:
        groups = []
        for place, group in enumerate(optimizer.param_groups):
            groups.append({**as_they_are(group), "params": tuple(numbers_of(group["params"]))})
            if first.setdefault(id(group), (number, place)) != (number, place):
                groups[place][SAME_AS] = first[id(group)]
        found[number] = tuple(groups)
    return found


class Reading:
    """Of modules: their class, members, modes and plain attributes. Of variables: whether they were written, or take
    gradients. Of optimizers: parameter groups and hyperparameters, and whether their state was changed here.

    It keeps nothing of the program alive but hyperparameters. Members are told apart by id: that of a module or a
    parameter is not given to another one unnoticed, since the registry and the variables count who is there, and a
    buffer that took another one's place and id is the same variable.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        variables: CapturedVariables,
        attributes: PlainAttributes,
        structure: ModuleStructure,
    ) -> None:
        population = registry.population
        if (sees := what_sees_operators()) == SCOPE:
            raise ContextError(
                f"a function was scheduled within `with {SCOPE}:`. What the block makes is on the servers when it "
                "ends: leave it before the first coordinator.schedule, and keep the loop that schedules outside of it."
            )
        if sees:
            raise UnsupportedError(
                f"a function was scheduled within `with {sees}:`, which would not see what the function does on its "
                "worker. Open that block in the function, or schedule outside of it."
            )
        require_no_global_hooks()
        self.surroundings = PlainSettings.here()
        self.marks: list[object] = [torch.get_default_dtype(), self.surroundings, *population, *variables.population]
        self._hyperparameters: list[object] = []  # alive, so that their ids stay theirs
        self._is_comparable = True
        if any(population):
            modules = list(registry.modules())
            self._read_modules(modules)
            self.marks += map(attributes.mark, modules)
            self.marks += structure.mark()
            self.marks += marks_of_classes()
            self.marks += variables.states(attributes.mark)
            self._is_comparable = not variables.has_traceless_changes()
            optimizers = registry.optimizers()
            self.marks += marks_of_hooks(optimizers)
            for optimizer in optimizers:
                self._read_groups(optimizer)
                if not is_listed(type(optimizer)):
                    self.marks.append(attributes.mark(optimizer))

    def is_same(self, earlier: Reading) -> bool:
        """Whether nothing has changed that this is about. False where that cannot be told."""
        return self._is_comparable and self.marks == earlier.marks

    def _read_modules(self, modules: Iterable[object]) -> None:
        marks = self.marks
        for training, parameters, children, buffers, kind in map(_members, modules):
            marks += (training, len(parameters), len(children), len(buffers), kind)
            if parameters:
                marks += parameters
                marks += map(id, parameters.values())
            if children:
                marks += children
                marks += map(id, children.values())
            if buffers:
                marks += buffers
                marks += map(id, buffers.values())

    def _read_groups(self, optimizer: Optimizer) -> None:
        marks, kept = self.marks, self._hyperparameters
        state = getattr(optimizer, "state", None)
        if isinstance(state, RemoteOptimizerState):
            self._is_comparable = self._is_comparable and not state.is_changed()
        groups = optimizer.param_groups
        marks += (id(optimizer), id(getattr(state, "keeper", None)), len(groups))
        for group in groups:
            marks.append(id(group))
            marks += group
            marks += map(id, group.values())
            marks += map(id, group["params"])
            values = [value for name, value in group.items() if name != "params"]
            kept += values
            if not are_atoms(map(type, values)) and not all(map(is_fixed, values)):
                self._is_comparable = False  # a tensor, or a list: it may change and stay the same object
