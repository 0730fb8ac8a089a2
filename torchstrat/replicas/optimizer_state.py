"""What an optimizer keeps, its hyperparameters and its state, as replicas see it.

**Hyperparameters.** Where replicas have set other ones, the first one's count. In one process they do because the first
replica's optimizer is the one that steps. Between processes every rank steps its copy, or its share, of the parameters
with what stands in its own groups, and would never meet the others again.

**State.** In one process it is there once, and only the leader steps it. A step may read and edit it: halve a momentum,
replace a moment. The leader's edits are what lasts, so every other replica edits a copy of its own, made when it first
looks, of what was there before the leader's code changed it. Most steps never look, and cost nothing: the leader's
optimizer steps on the state itself.
"""

from __future__ import annotations

import collections
import copy
import operator
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.core.engine import Communicator
from torchstrat.core.optimizers import own_state
from torchstrat.core.tensor_classes import memory_of
from torchstrat.distributed.collectives.agreement import fingerprint

_PLAIN = (bool, int, float, complex, str, type(None))


class _Digest(NamedTuple):
    found: list[object]
    """All that there is in the groups, the lists of parameters among it."""
    number: float
    tensors: list[torch.Tensor]
    """Those among the values, which may be edited in place and are not in the number."""


_digests: weakref.WeakKeyDictionary[Optimizer, _Digest] = weakref.WeakKeyDictionary()


class Difference(NamedTuple):
    group: int
    name: str
    first: object
    other: Any


def places(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Where an optimizer with these ``attributes`` keeps what its step may set: a count, the next rate."""
    return [attributes, *attributes.get("param_groups", ())]


def settings(optimizer: Optimizer) -> list[dict[str, object]]:
    """What it has there now."""
    return [dict(place) for place in places(vars(optimizer))]


def put(attributes: dict[str, Any], changed: Sequence[Mapping[str, object]]) -> None:
    """Make in another replica's optimizer the `changes` that there were in one."""
    for place, values in zip(places(attributes), changed, strict=False):
        place.update(values)


def changes(optimizer: Optimizer, before: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """The values there that are not those of ``before``, but for parameters."""
    return [
        {
            name: value
            for name, value in place.items()
            if name != "params" and earlier.get(name, _NOTHING) is not value and _is_value(value)
        }
        for place, earlier in zip(places(vars(optimizer)), before, strict=False)
    ]


_NOTHING = object()


def entries(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its groups, and then the state of each parameter, in an order that is the same on all ranks."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    states = [own_state(optimizer).get(tensor) for tensor in tensors]
    return [*optimizer.param_groups, *(one if isinstance(one, dict) else {} for one in states)]


def tensors_in(optimizer: Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Those in its `entries`, by place and name."""
    found = enumerate(entries(optimizer))
    return {
        (place, name): one for place, entry in found for name, one in entry.items() if isinstance(one, torch.Tensor)
    }


def keep_tensors(optimizer: Optimizer, before: Mapping[tuple[int, str], torch.Tensor]) -> None:
    """Let these be in their places again, with the values of those that are there now: the program may hold them
    elsewhere too, in what it has loaded."""
    now = entries(optimizer)
    for (place, name), own in before.items():
        told = now[place].get(name)
        if isinstance(told, torch.Tensor) and told is not own and are_alike(memory_of(own), memory_of(told)):
            with torch.no_grad():
                memory_of(own).copy_(memory_of(told))
            now[place][name] = own


def are_alike(own: torch.Tensor, told: torch.Tensor) -> bool:
    """Whether ``own`` can have the values of ``told``, and be what it was."""
    is_plain = own.layout == told.layout == torch.strided and not own.is_inference()
    return is_plain and (own.shape, own.dtype, own.device) == (told.shape, told.dtype, told.device)


def digest(optimizer: Optimizer) -> float:
    """A number that is equal on ranks whose groups are. Every step asks, and hardly any has changed them."""
    found: list[object] = []
    for group in optimizer.param_groups:
        found += group.values()
    known = _digests.get(optimizer)
    if known is None or len(known.found) != len(found) or not all(map(operator.is_, known.found, found)):
        values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
        known = _digest_of(found, values)
        if not any(map(_may_change, values)):
            _digests[optimizer] = known
    return known.number + sum(fingerprint(known.tensors)) if known.tensors else known.number


def _digest_of(found: list[object], values: list[object]) -> _Digest:
    number = float(zlib.crc32(repr([value for value in values if is_plain(value)]).encode()))
    return _Digest(found, number, [one for one in values if isinstance(one, torch.Tensor) and one.is_cpu])


def _may_change(value: object) -> bool:
    """Whether it may become another plain value and stay the same object, as ``group["betas"][0] = 0.8`` makes it."""
    return isinstance(value, list) or (isinstance(value, tuple) and any(map(_may_change, value)))


def _is_value(value: object) -> bool:
    return is_plain(value) or isinstance(value, torch.Tensor)


def is_plain(value: object) -> bool:
    """Whether it is a number, a text or the like, or a list or tuple of these."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(is_plain, value)))


def differing(first: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]]) -> Difference | None:
    """The first plain value that two replicas' groups, or attributes, do not have alike."""
    for number, (group, other) in enumerate(zip(first, others, strict=False)):
        for name, value in group.items():
            theirs = other.get(name)
            if value is not theirs and name != "params" and is_plain(value) and is_plain(theirs) and value != theirs:
                return Difference(number, name, value, theirs)
    return None


def level(communicator: Communicator, optimizer: Optimizer, call: str) -> Difference | None:
    """The first rank's become everyone's. All ranks call it, when digests differ; they come to the same `differing`."""
    own = [{name: value for name, value in group.items() if _is_value(value)} for group in optimizer.param_groups]
    for group in own:
        group.pop("params", None)
    told, *others = communicator.all_gather_object(own, call)
    for group, values in zip(optimizer.param_groups, told, strict=False):
        for name, value in values.items():
            here = group.get(name)
            if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
                with torch.no_grad():
                    here.copy_(value)
            elif not isinstance(here, torch.Tensor):
                group[name] = value
    return next((found for one in others if (found := differing(told, one)) is not None), None)


_MISSING = object()


class SharedState:
    """The state of one optimizer in one run. ``copy_of`` makes a replica's own copy of an entry."""

    def __init__(self, real: dict[object, object], copy_of: Callable[[object], object]) -> None:
        self.real = real
        self.copy_of = copy_of
        self.before: dict[Any, object] = {}
        """Entries that the leader has looked at since its last step, as they were."""
        self.views: list[ReplicaView] = []

    def keep(self, key: object) -> None:
        if key not in self.before:
            self.before[key] = self.copy_of(self.real[key]) if key in self.real else _MISSING

    @property
    def is_looked_at(self) -> bool:
        """Whether there is any such entry as of `looked_at`."""
        return bool(self.before) or any(view.own for view in self.views)

    def looked_at(self) -> list[tuple[object, list[object]]]:
        """Entries that any replica has looked at since the last step, and what each has there, the leader first."""
        keys = {id(key): key for key in [*self.before, *(key for view in self.views for key in view.own)]}
        return [(key, [self.real.get(key), *(view.peek(key) for view in self.views)]) for key in keys.values()]

    def stepped(self) -> None:
        """The optimizer has stepped: everyone sees what the state is now."""
        self.before.clear()
        for view in self.views:
            view.forget()


if TYPE_CHECKING:
    _Mapping = collections.defaultdict[object, object]
else:
    # All methods come from the first class, and the second is what `isinstance` asks for. To mypy they are strangers.
    class _Mapping(MutableMapping, collections.defaultdict):
        pass


class _View(_Mapping):
    """Looks like the dictionary that torch's optimizers have, and holds nothing itself."""

    def __init__(self, shared: SharedState) -> None:
        collections.defaultdict.__init__(self, getattr(shared.real, "default_factory", None))
        self.shared = shared

    def __missing__(self, key: object) -> object:
        if self.default_factory is None:
            raise KeyError(key)
        self[key] = made = self.default_factory()
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return collections.defaultdict, (self.default_factory, dict(self.items()))

    def copy(self) -> Any:
        return collections.defaultdict(self.default_factory, dict(self.items()))

    __copy__ = copy

    def __repr__(self) -> str:
        return repr(self.copy())


class LeaderView(_View):
    """The state itself, of which is kept what the leader's code looks at, and might edit."""

    def __getitem__(self, key: object) -> object:
        self.shared.keep(key)
        return self.shared.real[key] if key in self.shared.real else self.__missing__(key)

    def __setitem__(self, key: object, value: object) -> None:
        self.shared.keep(key)
        self.shared.real[key] = value

    def __delitem__(self, key: object) -> None:
        self.shared.keep(key)
        del self.shared.real[key]

    def __contains__(self, key: object) -> bool:
        return key in self.shared.real

    def __iter__(self) -> Iterator[object]:
        return iter(self.shared.real)

    def __len__(self) -> int:
        return len(self.shared.real)


class ReplicaView(_View):
    """Another replica's: copies of the entries that it looks at."""

    def __init__(self, shared: SharedState) -> None:
        super().__init__(shared)
        self.own: dict[Any, Any] = {}
        shared.views.append(self)

    def forget(self) -> None:
        self.own.clear()

    def peek(self, key: object) -> object:
        """What it has there; None for nothing."""
        found = self.own[key] if key in self.own else self._theirs(key)
        return None if found is _MISSING else found

    def _theirs(self, key: object) -> object:
        before = self.shared.before
        return before[key] if key in before else self.shared.real.get(key, _MISSING)

    def __getitem__(self, key: object) -> object:
        own = self.own.get(key)
        if own is None:
            theirs = _MISSING if key in self.own else self._theirs(key)
            if theirs is _MISSING:
                return self.__missing__(key)
            own = self.own[key] = self.shared.copy_of(theirs)
        return own

    def __setitem__(self, key: object, value: object) -> None:
        self.own[key] = value

    def __delitem__(self, key: object) -> None:
        if key not in self:
            raise KeyError(key)
        self.own[key] = None

    def __contains__(self, key: object) -> bool:
        return self.own[key] is not None if key in self.own else self._theirs(key) is not _MISSING

    def __iter__(self) -> Iterator[object]:
        keys = [*self.shared.real, *self.shared.before, *self.own]
        return iter([key for key in {id(key): key for key in keys}.values() if key in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def real_state(state: Any) -> Any:
    """The dictionary behind a view; anything else is its own."""
    while type(state) in (LeaderView, ReplicaView):  # what `isinstance` asks an abstract class takes longer
        state = state.shared.real
    return state
