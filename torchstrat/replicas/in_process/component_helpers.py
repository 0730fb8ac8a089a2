"""Each replica's own attributes of optimizers, schedulers and gradient scalers.

Every replica's code steps a scheduler, updates a scaler or sets a learning rate; what the leader's does is what lasts.
Of an optimizer's state, which only the leader's steps change, replicas have views (see `optimizer_state`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

from torchstrat.optimizers import is_listed, wrapped_by
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.in_process.kept_attributes import KeptAttributes
from torchstrat.replicas.optimizer_state import LeaderView, ReplicaView, SharedState, real_state
from torchstrat.replicas.state import private_value


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
        self._apart: dict[tuple[int, int], Any] = {}  # replicas' own states, by the id of the owner's and the replica
        self._vectors: Container[int] = ()
        self._settings: dict[int, list[dict[str, Any]]] = {}  # of those that step, from before

    def begin(self, helpers: list[Any], replicas: list[int], vectors: Container[int] = ()) -> None:
        """``vectors``: the ``id`` of tensors that share memory with variables, and change hands with these."""
        self._vectors = vectors
        self._replicas, self.helpers, self._known = replicas, [], set()
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
                    has = left.get(replica, {})
                    attributes[replica] = own if replica == owner else _private(own, shared, self._vectors, has) | has
                if shared is not None and self._watches_leader and id(helper) not in self._stepping:
                    own["state"] = self._views[id(helper)] = LeaderView(shared)
                self.helpers.append((helper, attributes, owner))

    def _left_by(self, helper: Any, owner: int) -> dict[int, dict[str, Any]]:
        """By replica what each finds again, with a state of its own in any case."""
        assert self.kept is not None
        left, state = self.kept.take(helper, owner), vars(helper).get("state")
        for replica in self._replicas if isinstance(helper, Optimizer) and isinstance(state, dict) else ():
            if replica != owner:
                own, key = left.setdefault(replica, {}), (id(state), replica)
                if key not in self._apart:  # a wrapper and what it wraps have one in common
                    self._apart[key] = own["state"] if "state" in own else private_value(state, self._vectors)
                own["state"] = self._apart[key]
        return left

    def state_of(self, optimizer: Optimizer, replica: int, owner: int) -> dict[Any, Any]:
        """Between runs: the state that the replica will find in the next."""
        assert self.kept is not None
        own = self.kept.peek(optimizer, owner).get(replica, {})
        return dict(own.get("state", optimizer.state))

    def put_states(self, optimizer: Optimizer, states: dict[int, dict[Any, Any]]) -> None:
        """Between runs: every replica finds its own."""
        assert self.kept is not None
        if states:
            self.kept.put(optimizer, 0, {replica: {"state": state} for replica, state in states.items()})

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
            self._settings = {id(one): optimizer_state.settings(one) for one in (optimizer, *wrapped_by(optimizer))}
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
            view = self._views.get(id(optimizer))
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
        self.helpers, self._known, self._replicas = [], set(), []
        self._states, self._views, self._stepping, self._apart = {}, {}, set(), {}


def _without_settings(helper: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """What is a replica's own also after a round: an optimizer's hyperparameters are not, nor are plain values that
    others keep (see `optimizer_state.level` and `plain_state.level`, which do this between processes)."""
    if isinstance(helper, Optimizer):
        return {name: value for name, value in attributes.items() if name != "param_groups"}
    return {name: value for name, value in attributes.items() if not optimizer_state.is_plain(value)}


def _private(
    attributes: dict[str, Any], shared: SharedState | None, vectors: Container[int], has: Container[str]
) -> dict[str, Any]:
    """A replica's own copy of a helper's attributes, but for those that it ``has``: containers and plain tensors
    copied, objects shared, and so are an optimizer's lists of parameters."""
    return {
        name: ReplicaView(shared) if name == "state" and shared is not None else private_value(value, vectors)
        for name, value in attributes.items()
        if name not in has
    }
