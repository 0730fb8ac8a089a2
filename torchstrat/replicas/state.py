"""State that a step's own code may change: whether it has been, what a replica's copy of it is, and who is told when
replicas have changed the same thing in different ways, of which one lasts.

Of each tensor a few bytes are compared, by which edits are noticed that no version counter shows.

Variables or their gradients may share memory with a tensor that a step reaches: one flat vector and its views. What a
step does to the vector it does to them. So a replica that works on copies needs a copy of the whole memory, of which
its variables, its gradients and the vector are the views that the leader's are of the original.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core._torch_private import version_of
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.core.gradients import CombinedGradient
from torchstrat.core.reachable import address_of, has_address, slots_of
from torchstrat.core.tensor_classes import plain_kind
from torchstrat.replicas.optimizer_state import Difference, SharedState, is_plain

Made = dict[int, tuple[object, object]]
"""By the ``id`` of what has been copied: that, so that nothing else comes to have this ``id``, and the copy."""


def private_value(value: Any, vectors: Container[int] = (), made: Made | None = None) -> object:
    """``vectors``: the ``id`` of tensors that stay themselves. ``made``: what else one replica has copies of, to which
    these are added: what is one object in several places stays one."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if made is None:
        made = {}
    elif id(value) in made:
        return made[id(value)][1]
    if kind in _OF_PYTHON:
        own = value.copy()  # in a tenth of the time of `copy.copy`: an optimizer has six dictionaries of hooks
    elif isinstance(value, torch.Tensor):
        own = value if value.requires_grad or id(value) in vectors else value.clone()
    elif not is_container(kind):
        return value
    elif isinstance(value, tuple):
        return getattr(kind, "_make", kind)(private_value(member, vectors, made) for member in value)
    else:
        own = _copied(value)
    made[id(value)] = value, own  # before its members, one of which may be itself
    if isinstance(value, dict):
        for key, member in value.items():
            if type(member) not in _ATOMS:
                own[key] = private_value(member, vectors, made)
    elif isinstance(value, list):
        if value and all(isinstance(member, nn.Parameter) for member in value):
            return own
        own[:] = [private_value(member, vectors, made) for member in value]
    elif isinstance(value, collections.deque):
        for index, member in enumerate(value):
            own[index] = private_value(member, vectors, made)
    return own


class OwnCopies:
    """What replicas have in one run in the place of what another one has, of containers and plain tensors. What is one
    object to that one is one to each of the others, wherever it is held: a list that layers add to and a model adds up.
    ``vectors``: the ``id`` of tensors that are buffers, or share memory with variables, and change hands with these.
    """

    def __init__(self, vectors: Container[int] = ()) -> None:
        self.vectors = vectors
        self._made: dict[tuple[int, int], Made] = {}

    def of(self, owner: int, replica: int) -> Made:
        """``replica``'s, of what ``owner`` has."""
        return self._made.setdefault((owner, replica), {})

    def copy(self, value: object, owner: int, replica: int) -> object:
        return private_value(value, self.vectors, self.of(owner, replica))


_ATOMS = frozenset({int, float, bool, str, type(None)})
_OF_PYTHON = frozenset({dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque})

_CONTAINERS = (list, dict, tuple, set, collections.deque)
_COPYING = ("__copy__", "__reduce__", "__reduce_ex__", "__setitem__", "__iter__")


def _is_container(kind: type) -> bool:
    """Whether it is one of Python's, a named tuple, or a subclass that is copied as these are."""
    base = next((one for one in _CONTAINERS if issubclass(kind, one)), None)
    if base is None or kind is base or kind.__module__ == "collections":
        return base is not None
    is_other = any(name in vars(one) for one in kind.__mro__[: kind.__mro__.index(base)] for name in _COPYING)
    return hasattr(kind, "_make") if base is tuple else not is_other


def _copied(value: object) -> object:
    """Without the class' constructor, which may need other arguments, or its ``append``, which may do more."""
    base = next(one for one in _CONTAINERS if isinstance(value, one))
    own: object = base.__new__(type(value))  # type: ignore[type-var]
    size = (value.maxlen,) if isinstance(value, collections.deque) else ()
    base.__init__(own, value, *size)  # type: ignore[call-arg, call-overload]
    for name in filter(functools.partial(hasattr, value), slots_of(type(value))):
        setattr(own, name, getattr(value, name))
    getattr(own, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return own


is_container: Callable[[type], bool] = functools.lru_cache(1024)(_is_container)  # which every run asks


SEQUENCES = (list, tuple, collections.deque)


def trace(value: Any, around: tuple[int, ...] = ()) -> object:
    """Changes when somebody edits the value: the objects in a container, a tensor's count of edits. ``around``: the
    ``id`` of the containers that it is in, of which it may be one."""
    if isinstance(value, torch.Tensor):
        return (_Identity(value), 0 if value.is_inference() else version_of(value))
    kind = type(value)
    if not is_container(kind) or id(value) in around:
        return _Identity(value)
    around = (*around, id(value))
    if issubclass(kind, dict):
        return {key: trace(member, around) for key, member in value.items()}
    return [trace(member, around) for member in value] if issubclass(kind, SEQUENCES) else set(value)


class _Identity:
    """Holds the object, so that no other one can have its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


_PROBED = 16  # bytes of each tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Of types. Those that take over dispatch (DTensor, fake tensors) may have no elements of their own; a piece has.
is_memory: Callable[[object], bool] = functools.lru_cache(1024)(
    lambda kind: plain_kind(kind).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
)


def sample(tensor: torch.Tensor) -> bytes:
    """Some of the bytes of a tensor in host memory, from all over it. Read at its address: through a view it takes ten
    times as long, and every run asks for every tensor."""
    if type(tensor) not in _PLAIN and not is_memory(type(tensor)):
        return b""
    if not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
        return b""
    count, address = tensor.nbytes, tensor.data_ptr()
    if not count or not address:  # its storage may have been given back for the time being
        return b""
    # An odd step meets all bytes of the elements: the high ones of two numbers are often equal.
    sample: bytes = _bytes_at(count).from_address(address)[:: count // _PROBED | 1]
    return sample


@functools.lru_cache(maxsize=4096)
def _bytes_at(count: int) -> Any:
    return ctypes.c_char * count


Trace = tuple[int, int, bytes]


def trace_of(tensor: torch.Tensor) -> Trace:
    """Another one when somebody has changed the tensor, also through ``.data``."""
    return version_of(tensor), tensor.data_ptr() if tensor.layout == torch.strided else 0, sample(tensor)


class CommonStorages:
    """Which storages those are, and the replicas' copies of them, kept from run to run."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}  # by the address of the original

    def __bool__(self) -> bool:
        return bool(self._storages)

    def begin(
        self, vectors: Sequence[torch.Tensor], data: Iterable[torch.Tensor], devices: dict[int, torch.device]
    ) -> None:
        """A run begins. ``vectors``: tensors that the step reaches, which share memory with variables or gradients;
        ``data``: those of variables. ``devices``: of the replicas that have copies."""
        if not vectors:
            self._storages = {}
            return
        addresses = {address_of(tensor) for tensor in data if has_address(tensor)}
        known, self._storages = self._storages, {}
        for vector in vectors:
            address = address_of(vector)
            storage = self._storages.get(address) or known.get(address)
            if storage is None or not storage.is_of(vector):
                storage = _Storage(vector)
            self._storages[address] = storage
            storage.add(vector)
            for replica, device in devices.items():
                storage.give(replica, device, refresh=address in addresses)

    def of(self, tensor: torch.Tensor) -> _Storage | None:
        return self._storages.get(address_of(tensor)) if self._storages and has_address(tensor) else None

    def park(self, replica: int) -> None:
        for storage in self._storages.values():
            storage.park(replica)

    def install(self, replica: int) -> None:
        for storage in self._storages.values():
            storage.install(replica)


class _Storage:
    """The memory under one flat vector, or several."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vectors: dict[int, tuple[weakref.ref[torch.Tensor], dict[int, torch.Tensor]]] = {}
        self._all = torch.empty(0, dtype=vector.dtype, device=vector.device).set_(vector.untyped_storage())
        self._copies: dict[int, torch.Tensor] = {}

    def is_of(self, vector: torch.Tensor) -> bool:
        return self._all.untyped_storage().nbytes() == vector.untyped_storage().nbytes()

    def add(self, vector: torch.Tensor) -> None:
        known = self._vectors.get(id(vector))
        if known is None or known[0]() is not vector:
            self._vectors[id(vector)] = weakref.ref(vector), {}

    def give(self, replica: int, device: torch.device, *, refresh: bool) -> None:
        """Its copy; ``refresh``: made equal to the original again, where that is not another replica's own business."""
        if replica not in self._copies:
            self._copies[replica] = self._all.clone().to(device)
        elif refresh:
            self._copies[replica].copy_(self._all)
        for reference, data in self._vectors.values():
            vector = reference()
            if vector is not None:
                data[replica] = self.view_like(vector, replica)

    def view_like(self, tensor: torch.Tensor, replica: int) -> torch.Tensor:
        """What ``tensor``, of the original, is in a replica's copy."""
        copy = self._copies[replica]
        if tensor.dtype == copy.dtype:
            return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        return view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def holds(self, tensor: torch.Tensor, replica: int) -> bool:
        return address_of(tensor) == address_of(self._copies[replica])

    def park(self, replica: int) -> None:
        for reference, data in self._vectors.values():
            vector = reference()
            if vector is not None:
                data[replica] = vector.data

    def install(self, replica: int) -> None:
        for reference, data in self._vectors.values():
            vector = reference()
            if vector is not None and replica in data:
                vector.data = data[replica]


class TensorSlot:
    """One parameter or leaf tensor: per replica its data, its gradient and its count of in-place edits.

    Kept from run to run, because gradients may accumulate over several. In between the tensor itself is only held
    weakly, by the ``reference``.
    """

    __slots__ = (
        "agreed",
        "data",
        "first",
        "grad_dtype",
        "grads",
        "is_copy",
        "is_shared",
        "left",
        "made_by",
        "parked_grad",
        "reference",
        "tensor",
        "trained",
        "trains",
        "unedited",
        "version",
        "versions",
    )

    def __init__(self, tensor: torch.Tensor, reference: weakref.ref[torch.Tensor]) -> None:
        self.reference = reference
        self.tensor = tensor  # during a run
        self.data: dict[int, torch.Tensor] = {}
        self.grads: dict[int, torch.Tensor | None] = {}
        self.versions: dict[int, int] = {}
        self.version = 0
        """Of all components, at the last moment when they were equal. One that has another was edited in place."""
        self.agreed: torch.Tensor | None = None
        """The central component at that moment: the very tensor, which `.data =` replaces."""
        self.unedited: torch.Tensor | None = None
        """A copy of what it then was, if the leader has edited it in place since."""
        self.parked_grad: tuple[weakref.ref[torch.Tensor] | None, int] | None = None
        """What the last run left in ``.grad``, and its version then."""
        self.grad_dtype: torch.dtype | None = None
        self.left: Trace | None = None
        """Of the tensor, when the last run ended."""
        self.trained = True
        """Whether it required a gradient when the run began."""
        self.trains: dict[int, bool] = {}
        """Whether it does, per replica; empty until one has changed that."""

        # Of variables that came up during the run
        self.made_by: int | None = None
        """The replica that did, or None for all that were there before."""
        self.is_shared = True
        """False as long as no other replica has used it: it may be that replica's own, made anew by each."""
        self.is_copy = False
        """It belongs to a deep copy, such as an inner loop trains. Its gradients are that replica's own."""
        self.first = b""
        """A `sample` of what the others have found."""

    def take(self, tensor: torch.Tensor) -> None:
        """A run begins; ``tensor`` is the one this slot was made for."""
        self.tensor = tensor
        self.made_by, self.is_shared, self.is_copy = None, True, False
        self.trained, self.trains = tensor.requires_grad, {}

    def keep_data_of(self, replicas: list[int]) -> None:
        """Give up the components of all others; those of a run are overwritten when it begins."""
        for key in [key for key in self.data if key not in replicas]:
            del self.data[key]

    def release(self) -> None:
        """The run has ended. Until the next one, the tensor lives only as long as the user keeps it."""
        grad = self.tensor.grad
        self.parked_grad = (None, 0) if grad is None else (weakref.ref(grad), version_of(grad))
        self.grad_dtype = None if grad is None else grad.dtype
        self.agreed = self.unedited = None
        del self.tensor

    def keep_apart(self, tensor: torch.Tensor) -> None:
        """The run has ended, and what the replicas have is each one's own. ``tensor``: the one this slot is for."""
        self.left = trace_of(tensor)

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is as the last run left it."""
        return self.left is not None and self.left == trace_of(tensor)

    def is_grad_untouched(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad``, found in ``.grad``, is as the last run left it there."""
        if self.parked_grad is None:
            return False
        left, version = self.parked_grad
        if grad is None or left is None:
            return grad is None and left is None
        return grad is left() and version_of(grad) == version

    def grad_of(self, replica: int) -> torch.Tensor | None:
        """Unless it is of what the tensor was before a run that the replica has sat out: ``p.data = torch.cat(…)``."""
        grad, tensor = self.grads.get(replica), self.tensor
        if grad is None or grad.shape != tensor.shape:
            return None
        return grad if getattr(tensor, "grad_dtype", tensor.dtype) in (None, grad.dtype) else None

    def cast_grads(self, dtype: torch.dtype) -> None:
        """The program has cast the tensor and its gradient, of which it sees the installed one."""
        changed = {r: grad.to(dtype) for r, grad in self.grads.items() if grad is not None and grad.dtype != dtype}
        self.grads.update(changed)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those by which replicas' components are held here."""
        return [one for one in (*self.data.values(), self.agreed, self.unedited) if one is not None]

    def is_edited(self, replica: int) -> bool:
        """Whether that replica's component was edited in place since all were equal. For parked slots."""
        return self.versions[replica] != self.version


def is_variable(tensor: torch.Tensor) -> bool:
    """Lazy ones are not yet, and those on "meta" have no values; those made in inference mode can be neither trained
    nor swapped, and are shared."""
    return not is_lazy(tensor) and not tensor.is_meta and not tensor.is_inference()


def leave_graph(tensors: Iterable[torch.Tensor]) -> None:
    """A frozen parameter that a step writes to without `torch.no_grad` (an average of trained ones) becomes part of a
    graph: the next run finds a leaf."""
    for tensor in tensors:
        if not tensor.is_leaf:
            tensor.detach_()


class DifferingEdits:
    """Of one strategy. ``describe(tensor)`` names a variable."""

    def __init__(self, describe: Callable[[torch.Tensor], str]) -> None:
        self._describe = describe
        self.is_told = False
        self.is_told_of_settings = self.is_told_of_statistics = self.is_told_of_frozen = False

    def report(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor] = (),
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        """``gradients``: variables whose gradients they are; ``state``: whose state an optimizer keeps. All replicas
        come to the same ones."""
        if self.is_told or not (parameters or gradients or state):
            return
        self.is_told = True
        names = [*map(self._describe, parameters), *(f"the gradient of {self._describe(one)}" for one in gradients)]
        names += [f"what an optimizer keeps of {self._describe(one)}" for one in state]
        warnings.warn(
            f"the replicas have changed {_first_of(names)} in the step, each in another way. What the first one did "
            "counts for all of them, and what the others did is lost. If each has used what its own rows gave "
            "(torch.autograd.grad, say), combine that first: g = ts.get_replica_context().all_reduce('mean', g); or "
            "let an optimizer step with it: p.grad = g. If it was random noise, this is as it should be.",
            stacklevel=2,
        )

    def report_frozen(self, names: Sequence[str]) -> None:
        """``names``: of parameters that this replica had another ``requires_grad`` of than the first one."""
        if self.is_told_of_frozen or not names:
            return
        self.is_told_of_frozen = True
        warnings.warn(
            f"this replica had another requires_grad of {_first_of(names)} than the first one, whose counts for all of "
            "them from here on. In this run the gradient counted as zero where it was frozen: freeze a parameter on "
            "all replicas, or on none.",
            stacklevel=2,
        )

    def report_statistics(self) -> None:
        """Replicas have changed running statistics each by its own rows, have one mean of them now, and read it in the
        same run."""
        if self.is_told_of_statistics:
            return
        self.is_told_of_statistics = True
        warnings.warn(
            "the step normalises with running statistics that it has changed before, and on TPUStrategy these are the "
            "mean of all replicas at once: on other strategies each replica has its own until the run ends, so that "
            "what the step computes from them differs. Normalise with them in another run.",
            stacklevel=2,
        )

    def report_settings(self, helper: object, found: Difference | None) -> None:
        """``found``: what replicas have set differently in an optimizer or scheduler. All come to the same."""
        if found is None or self.is_told_of_settings:
            return
        self.is_told_of_settings = True
        group = f" of group {found.group}" if isinstance(helper, Optimizer) else ""
        warnings.warn(
            f"the replicas have set {found.name}{group} of {type(helper).__name__} differently in the step "
            f"({found.first!r} and {found.other!r}), and the first one's counts for all of them. A scheduler that looks"
            " at a loss needs that of the whole batch: ts.get_replica_context().all_reduce('mean', loss) in the step, "
            "or strategy.reduce('mean', losses) and scheduler.step(loss) outside of Strategy.run.",
            stacklevel=2,
        )


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def edited_differently(slots: Iterable[TensorSlot], replicas: Sequence[int]) -> list[torch.Tensor]:
    """Parameters that replicas in one process have changed in place, each in another way. For parked slots."""
    first, *others = replicas
    return [
        slot.tensor
        for slot in slots
        if any(slot.is_edited(replica) for replica in replicas)
        and any(not are_equal(slot.data[first], slot.data[other]) for other in others)
        and slot.is_shared
        and not slot.is_copy
    ]


def state_edited_differently(states: Iterable[SharedState]) -> list[torch.Tensor]:
    """Parameters of which replicas in one process have changed what optimizers keep, each in another way."""
    looked_at = [found for state in states if state.is_looked_at for found in state.looked_at()]
    return [
        key
        for key, (first, *others) in looked_at
        if isinstance(key, torch.Tensor) and not all(_are_alike(first, other) for other in others)
    ]


def _are_alike(one: object, other: object) -> bool:
    """Of values that an optimizer keeps."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or are_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_alike(value, other[name]) for name, value in one.items())
    return not (is_plain(one) and is_plain(other)) or (one or None) == (other or None)


CombinedOf = Callable[[int, torch.Tensor], CombinedGradient | None]
"""What is known of a replica's gradient of a tensor."""


def data_edited_differently(
    slots: Iterable[TensorSlot], replicas: Sequence[int], combined_of: CombinedOf
) -> list[torch.Tensor]:
    """The same through ``.data``, which no version counter shows: looked for where there is no gradient that a backward
    pass has combined, for what an optimizer steps is hardly edited otherwise."""
    found = []
    for slot in slots:
        if not slot.tensor.requires_grad or not slot.is_shared or slot.is_copy:
            continue
        if combined_of(replicas[0], slot.tensor) is not None:
            continue
        own, *others = [sample(slot.data[replica]) for replica in replicas]
        if any(other != own for other in others):
            found.append(slot.tensor)
    return found


def gradients_edited_differently(
    slots: Iterable[TensorSlot], replicas: Sequence[int], combined_of: CombinedOf
) -> list[torch.Tensor]:
    """The same of combined gradients, which clipping changes alike on all of them."""
    first, *others = replicas
    found = []
    for slot in slots:
        combined, grad = combined_of(first, slot.tensor), slot.grads.get(first)
        if combined is None or grad is None or combined.version == version_of(grad):
            continue
        if combined.used or not combined.is_in(grad):
            continue
        own = sample(grad)
        if any(other is not None and sample(other) != own for other in (slot.grads.get(one) for one in others)):
            found.append(slot.tensor)
    return found


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != torch.strided:
        return one.shape == other.shape
    return torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())


def refuse_changes_of(made: list[TensorSlot], replicas: list[int], describe: Callable[[torch.Tensor], str]) -> None:
    """Raises where a replica has changed a variable that another has made, otherwise than its maker has since. For
    parked slots.

    Between processes each replica makes its own (``if self.average is None: self.average = Average(model)``). In one
    process the others find the first one's, as it was when they came to it, and have it to themselves from there on.
    Nobody can tell whether what its maker had changed by then was to give it its first values, or something that the
    others do once more. So all that change it have to do so equally often from there on, as they do where it is made
    before the backward pass and changed after the optimizer's step.
    """
    for slot in made:
        for replica in replicas:
            is_edited, maker = slot.is_edited(replica), slot.made_by
            if maker in (None, replica) or not (is_edited or sample(slot.data[replica]) != slot.first):
                continue
            is_as_often = is_edited and slot.versions[replica] == slot.versions[maker]
            if not is_as_often and not are_equal(slot.data[replica], slot.data[maker]):
                raise made_by_another(describe(slot.tensor), maker, replica)


def settle(made: list[TensorSlot], replicas: list[int], home: int) -> None:
    """The run ends: what no other replica has used is as its maker left it; all else is as the first one left it.
    ``home``: the key of the central components."""
    for slot in made:
        maker = slot.made_by
        if maker is not None and not slot.is_shared and maker != replicas[0]:
            others = [replica for replica in replicas if replica != maker]
            if not any(slot.is_edited(one) or slot.grads.get(one) is not None for one in others):
                slot.data[home], slot.grads[home] = slot.data[maker], slot.grads.get(maker)


def made_by_another(name: str, maker: int | None, replica: int) -> ReplicaDivergenceError:
    """The error."""
    return ReplicaDivergenceError(
        f"replica {maker} has made {name} in this run, and replica {replica}, which found it there, has changed it "
        f"otherwise than replica {maker} has since. Replicas of one process share what one of them makes, so what a "
        "step on one device does once would be done to it several times. Make it within `with strategy.scope():`, "
        "before the first run that changes it."
    )
