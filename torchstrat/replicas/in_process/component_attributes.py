"""Plain attributes that each replica has for itself: of modules, what a forward pass leaves there, lists that a step
fills, modes; of optimizers, schedulers and gradient scalers, all but what is stepped.

Replicas of one process take turns in the midst of a step, so an attribute of the only module there is could change
hands between its write and its read. Every replica but the leader therefore has attributes of its own: what it has
left there itself, and else copies of the leader's, made when a run starts. Code outside of runs sees the leader's.
Parameters, buffers, children and hooks are in dictionaries that all replicas share, and so is whatever is no container
and no plain tensor.

Every replica's code steps a scheduler, updates a scaler or sets a learning rate; what the leader's does is what lasts.
Of an optimizer's state, which only the leader's steps change, replicas have views (see `optimizer_state`).

From run to run each replica keeps what it has left in its attributes. A recurrent state, a memory of past activations,
a list that fills: between processes each replica finds what its own last step left there. In one process the object has
the first replica's, which code outside of runs sees and changes. So the others' are kept here, and are theirs again as
long as the first one's is as the run left it; what was set or changed since is for all. (An edit through ``.data`` is
not noticed: it leaves no trace.)
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import next_hook_id
from torchstrat.core.optimizers import is_listed, wrapped_by
from torchstrat.core.reachable import is_made
from torchstrat.core.registration_order import reference_of_entry
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.in_process.members import SHARED, NumberOfMaker, ReplacedMembers, tell
from torchstrat.replicas.optimizer_state import LeaderView, ReplicaView, SharedState, real_state
from torchstrat.replicas.state import SEQUENCES, OwnCopies, is_container, private_value, trace

_NOTHING = object()
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_Attributes = dict[str, Any]


@dataclass(frozen=True)
class _Left:
    """What a run has left in one object."""

    reference: weakref.ref[Any]
    leader: int
    """Whose attributes the object has."""
    lasting: dict[str, tuple[object, object]]
    """The leader's values of the names below, and what they were then (`trace`)."""
    own: dict[int, _Attributes]
    """Of the other replicas, where theirs is not the leader's."""


class KeptAttributes:
    """Of all modules of a strategy, or its optimizers and the like, between one run and the next."""

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}  # by the id of the object
        self._warned: set[tuple[type, str]] = set()

    def keep(
        self,
        owner: object,
        leader: int,
        others: Iterable[tuple[int, _Attributes]],
        replaced: Mapping[int, object] = MappingProxyType({}),
    ) -> None:
        """A run ends, and ``owner`` has the leader's attributes. ``others``: of the other replicas that took part.
        ``replaced``: as of `ReplacedMembers.of_leader`."""
        lasting, own = vars(owner), {}
        for replica, attributes in others:
            found = {
                name: value
                for name, value in attributes.items()
                if name != "training" and not _is_equal(value, lasting.get(name, _NOTHING), replaced)
            }
            if found:
                own[replica] = found
        if own:
            self.put(owner, leader, own)

    def take(self, owners: Sequence[object], leader: int) -> list[dict[int, _Attributes]]:
        """A run begins: of each, what is still each replica's own. It is kept no longer."""
        if not self._left:
            return [{}] * len(owners)
        found = [self.peek(owner, leader) for owner in owners]
        for owner in owners:
            self._left.pop(id(owner), None)
        return found

    def put(self, owner: object, leader: int, own: dict[int, _Attributes]) -> None:
        """Replicas have these, and what ``owner`` has is the leader's."""
        values = {name: vars(owner).get(name, _NOTHING) for found in own.values() for name in found}
        lasting = {name: (value, trace(value)) for name, value in values.items()}
        self._left[id(owner)] = _Left(reference_of_entry(owner, self._left), leader, lasting, own)

    def peek(self, owner: object, leader: int) -> dict[int, _Attributes]:
        """What is still each replica's own."""
        left = self._left.get(id(owner))
        if left is None or left.reference() is not owner or left.leader != leader:
            return {}
        stale = set()
        for name, (before, then) in left.lasting.items():
            now = vars(owner).get(name, _NOTHING)
            if now is not before or trace(now) != then:
                stale.add(name)
                self._look_at(owner, name, before, now)
        return {
            replica: {name: value for name, value in own.items() if name not in stale}
            for replica, own in left.own.items()
        }

    def _look_at(self, owner: object, name: str, before: object, now: object) -> None:
        """``model.state = model.state.detach()`` between runs is meant for every replica's, and sees the first's."""
        if _memory(now) is None or _memory(before) != _memory(now) or (type(owner), name) in self._warned:
            return
        self._warned.add((type(owner), name))
        warnings.warn(
            f"{type(owner).__name__}.{name} differs between replicas, and code outside of Strategy.run has set it to "
            "another view of the first replica's, which every replica has now. Do this within the step, where each "
            "replica sees its own.",
            stacklevel=7,
        )


def _is_equal(value: Any, other: Any, replaced: Mapping[int, object], around: tuple[tuple[int, int], ...] = ()) -> bool:
    """Of what one replica has left and the leader: whether they are the same, or containers and plain values alike.
    ``around``: the ``id`` of the containers that they are in, of which they may be ones."""
    kind = type(value)
    if value is other or (replaced and replaced.get(id(value), value) is other):
        return True
    if kind is not type(other):
        return False
    if kind is torch.Tensor:
        is_plain = all(_has_elements(one) and not one.requires_grad for one in (value, other))
        return is_plain and (value.device, value.dtype) == (other.device, other.dtype) and torch.equal(value, other)
    if not is_container(kind):
        return kind in _PLAIN and bool(value == other)
    if (pair := (id(value), id(other))) in around:
        return True
    around = (*around, pair)
    if issubclass(kind, SEQUENCES):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(_is_equal(one, its, replaced, around) for one, its in pairs)
    if issubclass(kind, dict):
        is_alike = value.keys() == other.keys()
        return is_alike and all(_is_equal(value[key], other[key], replaced, around) for key in value)
    return bool(value == other)


def _has_elements(tensor: torch.Tensor) -> bool:
    """Whether it has one shape and all its elements in memory: it is not sparse, nested, or on "meta"."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta


def _memory(value: object) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and _has_elements(value) else None


_MOST_MEMBERS = 1_000
"""Of a container: longer ones hold data, which replicas share."""

_set_attributes = object.__setattr__  # a module's own asks whether it is given a parameter, a child, a buffer


class ComponentAttributes:
    """The attributes of one run after the other."""

    def __init__(self) -> None:
        self._modules: list[object] = []  # and data classes that they hold
        self._attributes: dict[int, list[_Attributes]] = {}
        self._copies: dict[int, _Copies] = {}  # by the id of the tensor, which they refer to
        self._makers: set[int] = set()  # ids of modules of which this turn has made members
        self._numbers: list[NumberOfMaker] = []
        self._replicas: list[int] = []
        self._made = OwnCopies()
        self._owners: dict[int, int] = {}  # by the places of modules that were made in the run
        self._before: list[_Attributes] | None = None
        self._kept = KeptAttributes()
        self._hooks = _HooksOfStep()
        self._replaced = ReplacedMembers()

    @property
    def modules(self) -> list[nn.Module]:
        return [one for one in self._modules if isinstance(one, nn.Module)]

    def begin(self, modules: Iterable[nn.Module], replicas: list[int], made: OwnCopies) -> None:
        """``replicas``: of the run, the leader first. With one there is nobody to keep apart. ``made``: of the run."""
        self._makers, self._before, self._modules, self._owners, self._numbers = set(), None, [], {}, []
        self._replicas, self._made, self._attributes = replicas, made, {replica: [] for replica in replicas}
        self._hooks.begin(self._modules)
        self._take(modules, replicas[0])
        self._replaced.begin(self._modules)

    def add(self, modules: Iterable[nn.Module], owner: int) -> None:
        """That replica has made these in the run, and its turn ends: the others find them as they are now."""
        first = len(self._modules)
        self._take([one for one in modules if not _is_of_torch(type(one))], owner)
        self._owners.update(dict.fromkeys(range(first, len(self._modules)), owner))

    def _take(self, modules: Iterable[nn.Module], owner: int) -> None:
        new: list[Any] = [one for one in modules if not _is_script(type(one))] if len(self._replicas) > 1 else []
        if not new:
            return
        known, found = {id(one) for one in (*self._modules, *new)}, []
        for one in new:  # which grows
            names, data = _look_at(one, vars(one))
            found.append(names)
            for value in data:
                if id(value) not in known:
                    known.add(id(value))
                    new.append(value)
        left = self._kept.take(new, owner)  # it may warn, and a warning be an error
        self._modules += new
        own = [vars(module) for module in new]
        for replica in self._replicas:
            if replica == owner:
                self._attributes[replica] += own
                continue
            mine = [attributes.copy() for attributes in own]
            self._attributes[replica] += mine
            for attributes, names, kept in zip(mine, found, left, strict=True):
                mine_still = kept.get(replica, {})
                for name in names:
                    if name not in mine_still and id(attributes[name]) not in self._made.vectors:
                        attributes[name] = self._copy_of(attributes[name], owner, replica)
                attributes.update(mine_still)

    def _copy_of(self, value: object, owner: int, replica: int) -> Any:
        made = self._made.of(owner, replica)
        if not isinstance(value, torch.Tensor) or id(value) in made or not _has_elements(value):
            return self._made.copy(value, owner, replica)
        key, kept = id(value), self._copies
        if key not in kept or kept[key].reference() is not value:
            kept[key] = _Copies(reference_of_entry(value, kept))
        own = kept[key].of(value, replica)
        made[key] = value, own
        return own

    def expect_member(self, module: nn.Module, name: str, member: object, replica: int) -> None:
        """``replica``, whose turn it is, sets a member."""
        if len(self._replicas) > 1 and self._before is None and self._replaced.note(module, name, member, replica):
            return
        if isinstance(member, torch.Tensor) and is_made(module, name, member):
            self.made_members(module)

    def made_members(self, module: nn.Module) -> None:
        """The replica whose turn it is registers parameters or buffers. They are made once, for all, so what it sets
        beside them (``self.is_built = True``) must not be missed by the others."""
        self._makers.add(id(module))

    def park(self, replica: int) -> None:
        own = self._attributes.get(replica)
        if own is None:
            return
        self._hooks.park(replica)
        self._replaced.park(replica)
        if self._makers:
            makers, self._makers = self._makers, set()
            new = {id(self._modules[place]) for place in self._owners}
            known = {id(one) for one in self._modules} - new
            for index, (module, attributes) in enumerate(zip(self._modules, own, strict=False)):
                children = attributes.get("_modules", {}).values()
                is_maker = id(module) in makers or any(one is not None and id(one) not in known for one in children)
                for key, other in self._attributes.items():
                    if other is not own:
                        numbers = tell(other[index], attributes, is_maker=is_maker)
                        self._numbers += [
                            NumberOfMaker(type(module), other[index], replica, key, *one) for one in numbers
                        ]

    def refuse_other_numbers(self) -> None:
        """While all replicas stand still."""
        for number in self._numbers:
            number.refuse_other_meaning()

    def install(self, replica: int) -> None:
        for module, attributes in zip(self._modules, self._attributes.get(replica, ()), strict=False):
            _set_attributes(module, "__dict__", attributes)
        self._hooks.install(replica)
        self._replaced.install(replica)

    def grown(self) -> nn.Module | None:
        return self._replaced.grown()

    def refuse_replaced_by_some(self, *, at_end: bool) -> None:
        """While all replicas stand still; until the end of the run the others may follow."""
        if at_end:
            self._replaced.refuse_of_some(self._replicas)

    def begin_common(self) -> None:
        """While all replicas stand still, code runs that is for all of them, on the leader's attributes."""
        self._before = [vars(module).copy() for module in self._modules]

    def end_common(self, leader: int) -> None:
        """What that code has set is so for every replica."""
        before, self._before = self._before, None
        made = OwnCopies(self._made.vectors)
        for index, (module, earlier) in enumerate(zip(self._modules, before or (), strict=True)):
            changed = {n: v for n, v in vars(module).items() if n not in earlier or earlier[n] is not v}
            gone = [name for name in earlier if name not in vars(module)]
            for replica, attributes in self._attributes.items():
                if replica != leader:
                    attributes[index].update({n: made.copy(value, leader, replica) for n, value in changed.items()})
                    for name in gone:
                        attributes[index].pop(name, None)

    def end(self, leader: int) -> None:
        for place, owner in self._owners.items():
            self._attributes[leader][place] = self._attributes[owner][place]
        self.install(leader)
        others = [replica for replica in self._attributes if replica != leader]
        replaced = self._replaced.of_leader(leader)
        for index, module in enumerate(self._modules):
            own = [(replica, self._attributes[replica][index]) for replica in others]
            self._kept.keep(module, leader, own, replaced)
        self._modules, self._attributes, self._before, self._owners, self._made = [], {}, None, {}, OwnCopies()
        self._hooks.end()
        self._replaced.forget()


class _HooksOfStep:
    """Hooks that replicas register on modules in a run. The dictionaries are common to all, and what one registers for
    a part of its step (an activation to look at, up to ``handle.remove()``) is for its own forward passes; what is left
    at the end is the leader's."""

    def __init__(self) -> None:
        self._modules: list[object] = []
        self._first = 0
        self._parked: dict[int, list[tuple[dict[int, object], int, object]]] = {}

    def begin(self, modules: list[object]) -> None:
        """``modules``: and data classes, which have no hooks."""
        self._modules, self._first, self._parked = modules, next_hook_id(), {}

    def park(self, replica: int) -> None:
        if next_hook_id() != self._first:  # else nobody has registered a hook on anything
            self._parked[replica] = [(table, key, table.pop(key)) for table, key in list(self._found())]

    def install(self, replica: int) -> None:
        for table, key, hook in self._parked.pop(replica, ()):
            table[key] = hook

    def end(self) -> None:
        self._modules, self._parked = [], {}

    def _found(self) -> Iterator[tuple[dict[int, object], int]]:
        for module in self._modules:
            if not isinstance(module, nn.Module):
                continue
            attributes = vars(module)
            tables = [table for name in _HOOKS if (table := attributes.get(name))]
            own = {key for table in tables for key, hook in table.items() if type(hook).__module__.startswith(_OWN)}
            for table in tables:
                yield from ((table, key) for key in table if key >= self._first and key not in own)


_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_OWN = "torchstrat."


class _Copies:
    """Of a plain tensor in an attribute; their memory is kept from run to run."""

    def __init__(self, reference: weakref.ref[torch.Tensor]) -> None:
        self.reference = reference
        self._copies: dict[int, torch.Tensor] = {}

    def of(self, value: torch.Tensor, replica: int) -> torch.Tensor:
        kept = self._copies.get(replica)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (value.shape, value.dtype, value.device):
            kept = self._copies[replica] = value.clone()
        else:
            kept.copy_(value)
        return kept


def _look_at(module: object, attributes: _Attributes) -> tuple[list[str], list[object]]:
    """The names of attributes that a step may change in place, and the data classes among them, which are kept apart as
    modules are: so they stay the objects that they are to whoever else holds them. Torch's own modules change none."""
    names: list[str] = []
    data: list[object] = []
    if _is_of_torch(type(module)):
        return names, data
    for name, value in attributes.items():
        role = _role_of(type(value))
        if role == _COPIED and name not in SHARED and _is_small(value):
            names.append(name)
        elif role == _DATA:
            data.append(value)
    return names, data


_COPIED, _DATA = "copied", "data"


def _find_role(kind: type[object]) -> str | None:
    if is_container(kind) or issubclass(kind, torch.Tensor):
        return _COPIED
    has_attributes = kind.__dictoffset__ and kind.__weakrefoffset__
    return _DATA if dataclasses.is_dataclass(kind) and has_attributes else None


# Of classes: every run asks.
_role_of: Callable[[type], str | None] = functools.lru_cache(1024)(_find_role)
_is_of_torch: Callable[[type], bool] = functools.lru_cache(1024)(lambda kind: kind.__module__.startswith("torch."))
_is_script: Callable[[type], bool] = functools.lru_cache(1024)(lambda kind: issubclass(kind, torch.jit.ScriptModule))


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and not value.requires_grad and not value.is_inference()
    return len(value) <= _MOST_MEMBERS


class ComponentHelpers:
    """The helpers of one run after the other. The leader works on the user's own objects, the others on copies.

    ``watches_leader``: whether `enter_step` and `leave_step` are called around the leader's steps, so that what its own
    code looks at in between can be told from what these do. ``apart``: every replica steps, with a state of its own,
    which it finds again in the next run, as all that differs by replica.
    """

    def __init__(self, *, watches_leader: bool = False, apart: bool = False) -> None:
        self.kept = KeptAttributes() if apart else None
        self.helpers: list[tuple[Any, dict[int, dict[str, Any]], int]] = []  # helper, attributes, whose last
        self._watches_leader = watches_leader
        self._known: set[int] = set()
        self._replicas: list[int] = []
        self._states: dict[int, SharedState] = {}  # by the id of the optimizer; wrappers may share theirs
        self._views: dict[int, LeaderView] = {}  # likewise
        self._stepping: set[int] = set()
        self._apart: dict[tuple[int, int], object] = {}  # replicas' own states, by the id of the owner's and it
        self._made = OwnCopies()
        self._settings: dict[int, list[dict[str, object]]] = {}  # of those that step, from before

    def begin(self, helpers: list[object], replicas: list[int], made: OwnCopies) -> None:
        """``made``: of the run."""
        self._replicas, self._made, self.helpers, self._known = replicas, made, [], set()
        self._states, self._views, self._stepping, self._apart = {}, {}, set(), {}
        self.add(helpers, replicas[0])

    def add(self, helpers: list[Any], owner: int) -> None:
        """``owner``, whose turn it is or was, has their attributes as they are; the others get copies of these."""
        for helper in helpers:
            if id(helper) not in self._known:
                self._known.add(id(helper))
                own = vars(helper)
                shared = self._share_state(helper, own) if self.kept is None else None
                left = {} if self.kept is None else self._left_by(helper, owner)
                attributes = {}
                for replica in self._replicas:
                    attributes[replica] = self._of(replica, owner, own, shared, left.get(replica, {}))
                if shared is not None and self._watches_leader and id(helper) not in self._stepping:
                    own["state"] = self._views[id(helper)] = LeaderView(shared)
                self.helpers.append((helper, attributes, owner))

    def _of(
        self, replica: int, owner: int, own: dict[str, object], shared: SharedState | None, has: dict[str, object]
    ) -> dict[str, object]:
        """A replica's attributes, of a helper of which ``owner`` has these: what it ``has`` already, and of the others
        containers and plain tensors copied, objects shared."""
        if replica == owner:
            return own
        if shared is not None and "state" not in has:
            has = {**has, "state": ReplicaView(shared)}
        vectors, made = self._made.vectors, self._made.of(owner, replica)
        mine = {name: value if name in has else private_value(value, vectors, made) for name, value in own.items()}
        return mine | has

    def _left_by(self, helper: object, owner: int) -> dict[int, dict[str, object]]:
        """By replica what each finds again, with a state of its own in any case."""
        assert self.kept is not None
        (left,), state = self.kept.take([helper], owner), vars(helper).get("state")
        for replica in self._replicas if isinstance(helper, Optimizer) and isinstance(state, dict) else ():
            if replica != owner:
                own, key = left.setdefault(replica, {}), (id(state), replica)
                if key not in self._apart:  # a wrapper and what it wraps have one in common
                    self._apart[key] = own["state"] if "state" in own else self._made.copy(state, owner, replica)
                own["state"] = self._apart[key]
        return left

    def state_of(self, optimizer: Optimizer, replica: int, owner: int) -> dict[Any, object]:
        """Between runs: the state that the replica will find in the next."""
        assert self.kept is not None
        own = self.kept.peek(optimizer, owner).get(replica, {})
        return dict(own.get("state", optimizer.state))

    def put_states(self, optimizer: Optimizer, states: dict[int, dict[object, object]]) -> None:
        """Between runs: every replica finds its own."""
        assert self.kept is not None
        if states:
            self.kept.put(optimizer, 0, {replica: {"state": state} for replica, state in states.items()})

    def _share_state(self, helper: object, own: dict[str, object]) -> SharedState | None:
        state = own.get("state")
        if not isinstance(helper, Optimizer) or not isinstance(state, dict):
            return None
        real = real_state(state)
        shared = next((one for one in self._states.values() if one.real is real), None)
        self._states[id(helper)] = shared = SharedState(real, private_value) if shared is None else shared
        return shared

    def copy_again(self) -> None:
        """Give the others copies of what their owner's attributes have become, while all replicas stand still."""
        kept = [(helper, owner, attributes[owner]) for helper, attributes, owner in self.helpers]
        self.helpers, self._known, self._made = [], set(), OwnCopies(self._made.vectors)
        for helper, owner, own in kept:
            helper.__dict__ = own
            self.add([helper], owner)

    def enter_step(self, optimizer: Optimizer) -> None:
        """The leader's ``optimizer`` is about to step, and with it those that it wraps: on the state itself."""
        stepping = (optimizer, *wrapped_by(optimizer))
        if not is_listed(type(optimizer)):
            self._settings = {id(one): optimizer_state.settings(one) for one in stepping}
        for one in stepping:
            self._stepping.add(id(one))
            own = vars(one)
            if "state" in own:
                own["state"] = real_state(own["state"])

    def leave_step(self, optimizer: Optimizer) -> None:
        self._tell_settings()
        for one in (optimizer, *wrapped_by(optimizer)):
            self._stepping.discard(id(one))
            shared, own = self._states.get(id(one)), vars(one)
            if shared is None or not isinstance(own.get("state"), dict):
                continue
            shared.real = real_state(own["state"])
            shared.stepped()
            if self._watches_leader:
                view = self._views.get(id(one))
                own["state"] = LeaderView(shared) if view is None else view

    def _tell_settings(self) -> None:
        """What a step has set in its groups (a count, the next rate) is every replica's: nobody else has stepped."""
        before, self._settings = self._settings, {}
        for helper, attributes, _ in self.helpers if before else ():
            changed = optimizer_state.changes(helper, before[id(helper)]) if id(helper) in before else []
            for own in attributes.values() if any(changed) else ():
                if own is not vars(helper):
                    optimizer_state.put(own, changed)

    def forget_state(self, optimizer: Optimizer) -> None:
        """For another replica, in its turn: what it has done to the state so far is undone by a step."""
        state = vars(optimizer).get("state")
        if isinstance(state, ReplicaView):
            state.forget()

    def park(self, replica: int) -> None:
        for helper, attributes, _ in self.helpers:
            attributes[replica] = helper.__dict__

    def install(self, replica: int) -> None:
        for helper, attributes, _ in self.helpers:
            helper.__dict__ = attributes[replica]

    def settings(self) -> Iterator[tuple[Any, list[list[dict[str, Any]]]]]:
        """Helpers and what each replica has set in them, the first one's first: an optimizer's groups, and the
        attributes of others. For parked replicas."""
        for helper, attributes, _ in self.helpers:
            if isinstance(helper, Optimizer):
                yield helper, [attributes[replica].get("param_groups", []) for replica in self._replicas]
            else:
                yield helper, [[attributes[replica]] for replica in self._replicas]

    def states(self) -> Iterable[SharedState]:
        """Of the optimizers."""
        return self._states.values()

    def end(self, *, is_round: bool = False) -> None:
        """``is_round``: a round of replicas that are apart ends, and what they have set becomes the first one's."""
        for helper, attributes, owner in self.helpers:
            helper.__dict__ = own = attributes[owner]
            if id(helper) in self._states:
                own["state"] = real_state(own.get("state"))
            if self.kept is not None:
                others = [(replica, other) for replica, other in attributes.items() if replica != owner]
                if is_round:
                    others = [(replica, _without_settings(helper, other)) for replica, other in others]
                self.kept.keep(helper, owner, others)
        self.helpers, self._known, self._replicas, self._made = [], set(), [], OwnCopies()
        self._states, self._views, self._stepping, self._apart = {}, {}, set(), {}


def _without_settings(helper: object, attributes: dict[str, object]) -> dict[str, object]:
    """What is a replica's own also after a round: an optimizer's hyperparameters are not, nor are plain values that
    others keep (see `optimizer_state.level` and `level_plain`, which do this between processes)."""
    if isinstance(helper, Optimizer):
        return {name: value for name, value in attributes.items() if name != "param_groups"}
    return {name: value for name, value in attributes.items() if not optimizer_state.is_plain(value)}
