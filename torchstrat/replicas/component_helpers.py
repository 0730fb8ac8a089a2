"""Each replica's own attributes of optimizers, schedulers and gradient scalers.

Every replica's code steps a scheduler, updates a scaler or sets a learning rate; what the leader's does is what lasts.
Of an optimizer's state, which only the leader's steps change, replicas have views (see `optimizer_views`).
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.optimizer_tiers import is_listed
from torchstrat.replicas import hyperparameters
from torchstrat.replicas.optimizer_views import LeaderView, ReplicaView, SharedState, real_state
from torchstrat.stand_ins import wrapped_by


class ComponentHelpers:
    """The helpers of one run after the other. The leader works on the user's own objects, the others on copies.

    ``watches_leader``: whether `enter_step` and `leave_step` are called around the leader's steps, so that what its own
    code looks at in between can be told from what these do.
    """

    def __init__(self, *, watches_leader: bool = False) -> None:
        self.helpers: list[tuple[Any, dict[int, dict[str, Any]], int]] = []  # helper, attributes, whose last
        self._watches_leader = watches_leader
        self._known: set[int] = set()
        self._replicas: list[int] = []
        self._states: dict[int, SharedState] = {}  # by the id of the optimizer; wrappers may share theirs
        self._stepping: set[int] = set()
        self._vectors: Container[int] = ()
        self._settings: dict[int, list[dict[str, Any]]] = {}  # of those that step, from before

    def begin(self, helpers: list[Any], replicas: list[int], vectors: Container[int] = ()) -> None:
        """``vectors``: the ``id`` of tensors that share memory with variables, and change hands with these."""
        self._vectors = vectors
        self._replicas, self.helpers, self._known = replicas, [], set()
        self._states, self._stepping = {}, set()
        self.add(helpers, replicas[0])

    def add(self, helpers: list[Any], owner: int) -> None:
        """``owner``, whose turn it is or was, has their attributes as they are; the others get copies of these."""
        for helper in helpers:
            if id(helper) not in self._known:
                self._known.add(id(helper))
                own = vars(helper)
                shared = self._share_state(helper, own)
                attributes = {r: own if r == owner else _private(own, shared, self._vectors) for r in self._replicas}
                if shared is not None and self._watches_leader and id(helper) not in self._stepping:
                    own["state"] = LeaderView(shared)
                self.helpers.append((helper, attributes, owner))

    def _share_state(self, helper: Any, own: dict[str, Any]) -> SharedState | None:
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
        self.helpers, self._known = [], set()
        for helper, owner, own in kept:
            helper.__dict__ = own
            self.add([helper], owner)

    def enter_step(self, optimizer: Optimizer) -> None:
        """The leader's ``optimizer`` is about to step: on the state itself."""
        self._stepping.add(id(optimizer))
        if not is_listed(type(optimizer)):
            self._settings = {id(one): hyperparameters.settings(one) for one in (optimizer, *wrapped_by(optimizer))}
        own = vars(optimizer)
        if "state" in own:
            own["state"] = real_state(own["state"])

    def leave_step(self, optimizer: Optimizer) -> None:
        self._stepping.discard(id(optimizer))
        self._tell_settings()
        shared, own = self._states.get(id(optimizer)), vars(optimizer)
        if shared is None or not isinstance(own.get("state"), dict):
            return
        shared.real = real_state(own["state"])
        shared.stepped()
        if self._watches_leader:
            own["state"] = LeaderView(shared)

    def _tell_settings(self) -> None:
        """What a step has set in its groups (a count, the next rate) is every replica's: nobody else has stepped."""
        before, self._settings = self._settings, {}
        for helper, attributes, _ in self.helpers if before else ():
            changed = hyperparameters.changes(helper, before[id(helper)]) if id(helper) in before else []
            for own in attributes.values() if any(changed) else ():
                if own is not vars(helper):
                    hyperparameters.put(own, changed)

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

    def end(self) -> None:
        for helper, attributes, owner in self.helpers:
            helper.__dict__ = own = attributes[owner]
            if id(helper) in self._states:
                own["state"] = real_state(own.get("state"))
        self.helpers, self._known, self._replicas = [], set(), []
        self._states, self._stepping = {}, set()


def _private(attributes: dict[str, Any], shared: SharedState | None, vectors: Container[int]) -> dict[str, Any]:
    """A replica's own copy of a helper's attributes: containers and plain tensors copied, objects shared, and so are an
    optimizer's lists of parameters."""
    return {
        name: ReplicaView(shared) if name == "state" and shared is not None else private_value(value, vectors)
        for name, value in attributes.items()
    }


def private_value(value: Any, vectors: Container[int] = ()) -> Any:
    """``vectors``: the ``id`` of tensors that stay themselves."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad or id(value) in vectors else value.clone()
    kind = type(value)
    if kind is tuple:
        return tuple(private_value(member, vectors) for member in value)
    if kind is dict:
        return {key: member if key == "params" else private_value(member, vectors) for key, member in value.items()}
    if not is_container(kind):
        return value
    if isinstance(value, list):
        if value and all(isinstance(member, nn.Parameter) for member in value):
            return value
        if kind is list:
            return [private_value(member, vectors) for member in value]
    own = copy.copy(value)
    if isinstance(value, dict):
        for key, member in value.items():
            if key != "params":
                own[key] = private_value(member, vectors)
    elif isinstance(value, list | collections.deque):
        for index, member in enumerate(value):
            own[index] = private_value(member, vectors)
    return own


_CONTAINERS = (list, dict, set, collections.deque)
_COPYING = ("__copy__", "__reduce__", "__reduce_ex__", "__setitem__", "__iter__")


def _is_container(kind: type) -> bool:
    """Whether it is one of Python's that can be filled, or a subclass that is copied as these are."""
    base = next((one for one in _CONTAINERS if issubclass(kind, one)), None)
    if base is None or kind is base or kind.__module__ == "collections":
        return base is not None
    return not any(name in vars(one) for one in kind.__mro__[: kind.__mro__.index(base)] for name in _COPYING)


is_container: Callable[[type], bool] = functools.lru_cache(1024)(_is_container)  # which every run asks
