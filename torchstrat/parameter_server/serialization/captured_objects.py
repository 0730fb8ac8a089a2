"""The coordinator's list of captured objects: what workers know by a token, and how they get their copies.

Captured are the modules, optimizers, schedulers and gradient scalers that the strategy's registry knows, the tensors
that live on the servers, and what is registered by hand (the strategy, the coordinator, per-worker values). Functions
refer to them by token. A worker gets a skeleton of each once, in numbered *increments*, with all its Python state and
without values: parameters and buffers in it are descriptions, of which the worker makes tensors of its own.

Of the Python state that changes after its increment was made, modes and plain attributes follow with the settings of a
function (see `PlainAttributes`); other containers and objects do not. Do such things inside the scheduled function.

The coordinator holds everything that has a token weakly. What dies is noted with the number of the next function, and
is released when every function below that number has its outcome: none of them can begin, be repeated or come back any
more, and later ones cannot name what was gone before they were scheduled. Tokens are never used again.
"""

from __future__ import annotations

import collections
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from torchstrat.core._torch_private import DisableTorchFunctionSubclass, own_children
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.reachable import HELPER_TYPES
from torchstrat.core.variables import VariableRegistry
from torchstrat.parameter_server.messages import Token, VariableSpec
from torchstrat.parameter_server.serialization.closure_walk import Reach
from torchstrat.parameter_server.serialization.path_errors import (
    Refused,
    not_sendable,
    note_scaler,
    path_to,
    refusal,
    training_state_refusal,
    why_not,
)
from torchstrat.parameter_server.serialization.plain import LEAST_ADDRESS
from torchstrat.sharding.annotations import LogicalDeviceMethods

if TYPE_CHECKING:
    from torchstrat.parameter_server.serialization.closure_walk import Look


class Objects(Protocol):
    """Those of a worker; see `World`."""

    def resolve(self, token: Token) -> Any: ...


Recipe = Callable[[Objects], object]
"""Builds a worker's object, from others that are there."""

_NEVER_CAPTURED = frozenset({types.FunctionType, types.ModuleType, types.CellType, types.MethodType, type})


_SHOWS_A_TABLE = (
    "it is a view, .data or detach() of {}, which goes by rows: workers have no memory of that, and a copy would not "
    "follow its steps. Take the view in the function, or send a copy: .clone()."
)


@dataclass(frozen=True, eq=False)
class Described:
    """Stands for a variable in an increment, where no module holds it."""

    spec: VariableSpec


def culprit_of(error: Exception, last: object) -> tuple[object, str]:
    """What could not be pickled, and why."""
    if isinstance(error, Refused):
        return error.value, error.reason
    return last, why_not(last, error)


def _is_derived(value: object) -> bool:
    """Whether it was computed from parameters. Modules keep such tensors and renew them in their forward pass: masked
    and normalised weights."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def token_of_spec(spec: VariableSpec) -> Token:
    return spec.kind, spec.number


class Outgoing:
    """What goes as a reference from the coordinator to workers. ``fresh``: ids of captured objects that go themselves.
    ``follows``: whether views of a variable's memory are views of the worker's, and no copies.

    Afterwards ``tokens`` has the references that were made and the objects that they stand for, ``described`` the
    variables whose descriptions went along.
    """

    makes_plain = False

    def __init__(
        self, catalog: Catalog, root: object, fresh: frozenset[int] | None = None, *, follows: bool = True
    ) -> None:
        self._catalog = catalog
        self._root = root
        self._follows = follows
        self._fresh = fresh if fresh is not None else frozenset()
        self._describes = fresh is not None
        self._memo: dict[int, bool] = {}
        self.tokens: dict[Token, object] = {}
        self.described: set[Token] = set()

    def reference_to(self, value: object) -> tuple[object, ...] | None:
        if id(value) in self._fresh:
            return None
        if type(value) in _NEVER_CAPTURED:
            return None
        found = self._described(value) if self._describes else None
        if found is None:
            token = self._catalog.refer_to(value)
            if token is not None:
                note_scaler(value)
                self.tokens[token] = value
                found = "ref", token
        if found is None and self._follows and isinstance(value, torch.Tensor):
            found = self._view(value)
        if found is not None:
            return found
        reason = refusal(value) or self._mixes(value)
        if reason is None and not (self._describes and _is_derived(value)):
            reason = training_state_refusal(value)
        if reason is not None:
            raise Refused(value, reason)
        return None

    def _described(self, value: object) -> tuple[object, ...] | None:
        """Within an increment: what the worker makes its own object from, at whatever place it meets it first."""
        spec = value.spec if isinstance(value, Described) else None
        if isinstance(value, torch.Tensor):
            spec = self._catalog.spec_of(value)
        if spec is not None:
            self.described.add(token_of_spec(spec))
            return "tensor", spec
        found = self._catalog.recipe_of(value)
        return ("made", *found) if found is not None else None

    def _view(self, value: torch.Tensor) -> tuple[object, ...] | None:
        whole = self._catalog.shown_by(value)
        spec = None if whole is None else self._catalog.spec_of(whole)
        if whole is None or spec is None:
            return None
        if spec.by_rows:
            if not whole.requires_grad:
                return None
            raise Refused(value, _SHOWS_A_TABLE.format(spec.name))
        with DisableTorchFunctionSubclass():
            start = int(value.storage_offset()) - int(whole.storage_offset())
            return "view", self.reference_to(whole), tuple(value.shape), value.stride(), start

    def _mixes(self, value: object) -> str | None:
        if isinstance(value, LogicalDeviceMethods):  # as every strategy is
            return "it is another strategy than the one that schedules the function."
        return None

    def enters(self, value: object) -> bool:
        """Whether ``value`` is sent with its contents."""
        return id(value) in self._fresh or self._catalog.token_of(value) is None

    def address(self, value: int) -> tuple[str, object] | None:
        return self._catalog.address(value)

    def by_value(self, value: object) -> bool:
        return self._catalog.reach.by_value(value, self._root, self._memo)

    def note_name(self, value: object) -> None:
        self._catalog.reach.note_name(value)

    def rests_on(self, value: object) -> list[tuple[Look, list[object]]] | None:
        """Of a function or class that goes by name: see `Reach.rests_on`."""
        return self._catalog.reach.rests_on(value)

    def names_used(self) -> frozenset[str]:
        return self._catalog.reach.names_from(self._root)


class Lifetimes:
    """Of one job's captured objects and variables, by their tokens. Thread-safe."""

    def __init__(self) -> None:
        self._next_function: Callable[[], int] = lambda: 0
        self._on_death: Callable[[], None] = lambda: None
        self._dead: deque[tuple[int, Token]] = deque()
        self._here: deque[Token] = deque()
        self._is_told = False
        self.deaths = 0
        """Another number whenever something has died since."""

    def watch(self, next_function: Callable[[], int], on_death: Callable[[], None]) -> None:
        """``next_function()``: the number of the function that is scheduled next. ``on_death`` is called, in whatever
        thread and with whatever locks held, when there is something to release."""
        self._next_function, self._on_death = next_function, on_death

    def died(self, token: Token) -> None:
        """An object is gone. For the callbacks of weak references, so it takes no lock."""
        self.deaths += 1
        self._here.append(token)
        self._dead.append((self._next_function(), token))
        if not self._is_told:
            self._is_told = True
            self._on_death()

    @property
    def has_dead(self) -> bool:
        """Whether anything waits to be released."""
        return bool(self._dead)

    def take_released(self, ended_below: int) -> tuple[Token, ...]:
        """What no function can name any more, given that those below this number have ended; each once."""
        self._is_told = False  # first: what dies from now on tells again
        dead, taken = self._dead, []
        while dead and dead[0][0] <= ended_below:
            taken.append(dead.popleft()[1])
        return tuple(taken)

    def take_dead(self) -> tuple[Token, ...]:
        """What the coordinator's own tables need not know any more, whether or not functions do; each once."""
        here, taken = self._here, []
        while here:
            taken.append(here.popleft())
        return tuple(taken)


SpecOf = Callable[[torch.Tensor], VariableSpec | None]


@dataclass(frozen=True, eq=False)
class Increment:
    """Captured objects for a world of version ``since`` or later, which then has version ``number``.

    ``blob``, ``tensors``, ``buffers``: as in `Packed`.
    """

    number: int
    since: int
    blob: bytes = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    buffers: int = 0


@dataclass(frozen=True, eq=False)
class _Entry:
    token: Token
    get: Callable[[], object]  # a weak reference, where that is possible
    recipe: Recipe | None = None


class Catalog:
    """Captured objects and their tokens. Thread-safe.

    Args:
        registry: of the strategy. Everything in it is captured; what it forgets disappears here too.
        spec_of: the variable of the job that a tensor is; None for an ordinary tensor.
        lifetimes: is told of what the program drops.
        variable_at: the tensor of a variable whose `id` this is, if there is one.
        shown_by: the tensor of a variable of whose memory another tensor shows a part, if there is one.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        spec_of: SpecOf,
        lifetimes: Lifetimes,
        variable_at: Callable[[int], torch.Tensor | None] = lambda _: None,
        shown_by: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self.spec_of = spec_of
        self._lifetimes = lifetimes
        self._variable_at = variable_at
        self.shown_by = shown_by
        self._lock = threading.RLock()
        self._by_id: dict[int, _Entry] = {}
        self._numbers: collections.Counter[str] = collections.Counter()
        self._seen_counts: tuple[int, int, int] | None = None
        self._pending: list[_Entry] = []
        self._pending_specs: dict[Token, VariableSpec] = {}
        self._aside: dict[Token, _Entry] = {}  # of an increment that could not be made, until something refers to them
        self._described: set[Token] = set()  # variables that are in some increment
        self._referenced: weakref.WeakValueDictionary[Token, torch.Tensor] = weakref.WeakValueDictionary()
        self._increments: list[Increment] = []
        self._number = 0
        self._whole: tuple[int, Increment] | None = None  # of everything, when so many had died
        self._has_looked = False  # at everything, since the last `begin`
        self.reach = Reach(self._matters, self._holds_captured)
        self.captures = 0
        """Counts what was given a token, but for tensors."""
        self.warned: set[object] = set()
        """What has been warned about, so that each warning appears once."""

    # -- tokens -----------------------------------------------------------------------------------------------------

    def register(self, value: object, token: Token, recipe: Recipe | None = None) -> None:
        """Give an object, of any class but the builtin containers, a token of its own. It is held weakly, where its
        class allows that.

        ``recipe`` builds each worker's object from its `World`. It is pickled with the next increment and may refer
        to captured objects. Without it, a worker registers its object itself (`World.register`), or makes it when it
        is first asked for.
        """
        with self._lock:
            if any(entry.token == token and entry.get() is not value for entry in self._live()):
                raise InvalidArgumentError(f"token {token!r} belongs to another object.")
            entry = self._add(value, token, recipe)
            if recipe is not None:
                self._pending.append(entry)

    def token_of(self, value: object) -> Token | None:
        """The token of a captured object; None for any other."""
        entry = self._by_id.get(id(value))
        if entry is not None:
            return entry.token
        if isinstance(value, torch.Tensor):
            return self._token_of_tensor(value)
        if isinstance(value, (nn.Module, *HELPER_TYPES)):
            with self._lock:
                if not self._has_looked:
                    self._has_looked = True
                    self._look_around(again=True)
                entry = self._by_id.get(id(value))
            return entry.token if entry is not None else None
        return None

    def refer_to(self, value: object) -> Token | None:
        """`token_of`, for what something that is sent refers to: it has to be part of an increment."""
        token = self.token_of(value)
        if token in self._aside:
            with self._lock:
                self._pending.append(self._aside.pop(token))
        return token

    def address(self, value: int) -> tuple[str, object] | None:
        """What goes in the place of a number that is the `id` of a variable or a captured object, as key of a table by
        them, perhaps: a worker's own object has another. None for other numbers."""
        if value < LEAST_ADDRESS:
            return None
        entry = self._by_id.get(value)
        found = self._variable_at(value) if entry is None else entry.get()
        return None if found is None else ("id", found)

    def recipe_of(self, value: object) -> tuple[Token, Recipe] | None:
        """The token and the recipe of an object that was registered with one."""
        entry = self._by_id.get(id(value))
        return (entry.token, entry.recipe) if entry is not None and entry.recipe is not None else None

    def _token_of_tensor(self, tensor: torch.Tensor) -> Token | None:
        spec = self.spec_of(tensor)
        if spec is None:
            return None
        token = token_of_spec(spec)
        if token not in self._referenced or token not in self._described:
            with self._lock:
                self._referenced[token] = tensor
                if token not in self._described:
                    self._pending_specs[token] = spec
        return token

    def _add(self, value: object, token: Token, recipe: Recipe | None = None) -> _Entry:
        key, by_id, lifetimes = id(value), self._by_id, self._lifetimes

        def forget(_: object) -> None:
            by_id.pop(key, None)
            lifetimes.died(token)

        try:
            entry = _Entry(token, weakref.ref(value, forget), recipe)
        except TypeError:
            entry = _Entry(token, lambda: value, recipe)
        by_id[key] = entry
        self.captures += 1
        return entry

    def _live(self) -> Iterator[_Entry]:
        return iter(list(self._by_id.values()))

    def registered(self) -> list[object]:
        """What was registered by hand, as far as it is alive."""
        return [value for entry in self._live() if (value := entry.get()) is not None]

    def let_go(self, values: Iterable[object]) -> None:
        """These have no tokens any more, though they are alive."""
        with self._lock:
            for value in values:
                self._by_id.pop(id(value), None)
            self.captures += 1  # what was packed with references to these is to be packed again

    def begin(self) -> None:
        """Something is about to be pickled, and the registry may know more than it did."""
        with self._lock:
            self._has_looked = False
            self._look_around()

    def _look_around(self, *, again: bool = False) -> None:
        """Take in what the registry has found since. ``again``: look at all modules' children too, which may be put
        there while the registry does not watch."""
        counts = self._registry.counts
        if counts == self._seen_counts and not again:
            return
        self._seen_counts = counts
        seen: set[int] = set()
        for module in self._registry.modules():
            self._take_in_tree(module, seen)
        for helper in self._registry.helpers():
            self._take_in(helper, "helper")

    def _take_in_tree(self, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        self._take_in(module, "module")
        for child in own_children(module).values():
            if child is not None:
                self._take_in_tree(child, seen)

    def _take_in(self, value: object, kind: str) -> None:
        if id(value) not in self._by_id:
            self._pending.append(self._add(value, (kind, self._numbers[kind])))
            self._numbers[kind] += 1

    def _matters(self, value: object) -> bool:
        """Whether a function that reaches ``value`` must travel by value: it is captured, or ought to be."""
        if id(value) in self._by_id or training_state_refusal(value) is not None:
            return True
        return isinstance(value, (torch.Tensor, nn.Module, *HELPER_TYPES)) and self.token_of(value) is not None

    def _holds_captured(self, namespace: dict[str, object]) -> bool:
        by_id = self._by_id
        return any(id(value) in by_id for value in list(namespace.values()))

    # -- increments -------------------------------------------------------------------------------------------------

    def increments(self, after: int, *, new: bool = True) -> list[Increment]:
        """What a world of version ``after`` (0: a new one) has yet to load, in order.

        Call it after `pack` and before the packed function is sent, in the call that schedules it: what the function
        refers to is in these increments, and what is captured and cannot travel is an error here, once: all that was
        captured since the last increment is then left out, until something that is packed refers to it.

        ``new=False``: no increment is made of what has been captured since the last call. For threads other than the
        user's, in which a model may be half built.

        Raises:
            NotSendableError: part of a captured object cannot travel; the message names it.
        """
        with self._lock:
            if new:
                self.begin()
                self._advance()
            first = self._number - len(self._increments)
            if after == 0 and self._number > 0 and (self._lifetimes.deaths or first > 0):
                try:
                    return [self._made_anew()]
                except Exception:  # the user may be changing a model in this moment
                    if first > 0:
                        raise
            if after < first:
                raise InvalidArgumentError(
                    f"increments up to {first} have been trimmed, and a world of version {after} needs some of them."
                )
            return [increment for increment in self._increments if increment.number > after]

    def _advance(self) -> None:
        """Make an increment of what has been captured since the last one."""
        if not self._pending_specs and all(entry.get() is None for entry in self._pending):
            return
        self._number += 1
        try:
            made = self._make_next()
        except BaseException:
            self._number -= 1
            self._aside.update((entry.token, entry) for entry in self._pending)
            self._pending = []
            self.captures += 1  # what was packed with references to these is to be packed again
            raise
        self._increments.append(made)
        self._pending, self._pending_specs, self._whole = [], {}, None

    def describe_anew(self, tensor: torch.Tensor) -> None:
        """Another spec holds for a variable: every world learns it before it runs another function, also of those that
        were packed before. In the moment after `increments`, with nothing captured since."""
        with self._lock:
            spec = self.spec_of(tensor)
            assert spec is not None
            token = token_of_spec(spec)
            self._referenced[token] = tensor
            self._pending_specs[token] = spec
            self._advance()

    @property
    def is_up_to_date(self) -> bool:
        """Whether all that is captured is part of some increment, as far as the registry knows."""
        return (
            not self._pending_specs
            and (not self._pending or all(entry.get() is None for entry in self._pending))
            and self._registry.counts == self._seen_counts
        )

    @property
    def version(self) -> int:
        """The number of the newest increment: what a world has loaded that lacks nothing known so far."""
        return self._number

    def trim(self, oldest: int) -> None:
        """Forget increments that all present worlds have loaded; ``oldest`` is the lowest of their versions.

        Worlds that begin later get one increment made of what is alive then.
        """
        with self._lock:
            self._increments = [increment for increment in self._increments if increment.number > oldest]

    def _make_next(self) -> Increment:
        while True:
            pending = list(self._pending)
            specs = [spec for token, spec in self._pending_specs.items() if token in self._referenced]
            made, _ = self._made_of(pending, specs, self._number - 1)
            if len(self._pending) == len(pending):  # it refers to nothing that was left out
                return made

    def _made_anew(self) -> Increment:
        """One increment in place of all so far, with what is alive."""
        deaths = self._lifetimes.deaths
        if self._whole is None or self._whole[0] != deaths:
            pending = {entry.token for entry in (*self._pending, *self._aside.values())}
            own = [entry for entry in self._live() if entry.token not in pending and _is_sent(entry)]
            specs = [self.spec_of(tensor) for token, tensor in self._referenced.items() if token in self._described]
            whole, tokens = self._made_of(own, [spec for spec in specs if spec is not None], 0)
            if not pending.isdisjoint(tokens):  # something new has been put into something old
                self._advance()
                return self._made_anew()
            self._whole = deaths, whole
        return self._whole[1]

    def forget(self, dead: Collection[Token]) -> None:
        """Nothing refers to these any more."""
        with self._lock:
            self._described.difference_update(dead)
            for token in dead:
                self._aside.pop(token, None)
                self._pending_specs.pop(token, None)

    def _made_of(self, entries: list[_Entry], specs: list[VariableSpec], since: int) -> tuple[Increment, set[Token]]:
        """The increment, and the tokens of other captured objects that it refers to."""
        # cloudpickle is loaded when it is needed
        from torchstrat.parameter_server.serialization.pickler import ObjectPickler

        objects = [(entry.token, value) for entry in entries if (value := entry.get()) is not None]
        values = [value for _, value in objects]
        by_token = {entry.token: entry for entry in entries}
        fresh = frozenset(id(value) for token, value in objects if by_token[token].recipe is None)
        references = Outgoing(self, values, fresh)
        pickler = ObjectPickler(references)
        try:
            blob = pickler.pickle((objects, [Described(spec) for spec in specs]))
        except Exception as error:
            culprit, reason = culprit_of(error, pickler.last)
            paths = [
                path_to(value, type(value).__name__, lambda found: found is culprit, references.enters)
                for value in values
            ]
            # Children are captured too; the longest path begins at the model.
            where = max((path for path in paths if path is not None), key=len, default="a captured object")
            raise not_sendable(where, culprit, reason, "a worker") from error
        self._described.update(references.described)
        increment = Increment(self._number, since, blob, pickler.tensors, pickler.buffers)
        return increment, set(references.tokens)


def _is_sent(entry: _Entry) -> bool:
    """Whether its object is part of increments; the others are registered by each worker itself."""
    return entry.token[0] in ("module", "helper") or entry.recipe is not None
