"""A worker's variables while they are not current: on their way, never read, or written by the function itself.

Servers may still be writing fresh values while the next function computes with the first layers. The first use waits.
So layers wait one by one, at no cost for those that are there.

What is let arrive late is what nobody can get at past its class: parameters of PyTorch's own modules, on the CPU,
whose memory no other tensor shows. Everything else is waited for before the function goes on; and when a transform of
`torch.func` or PyTorch's compiler takes hold of tensors itself, everything is waited for before that, and from the
compiler's first compilation on nothing is late any more.

What a function writes to a parameter by hand (weight decay, clamping, an average) must reach the servers. In-place
operators count in ``_version``; what goes through ``.data`` or a NumPy array does not, so whoever takes one has the
value from before kept. An array may be taken of any tensor over the memory, so `torch.Tensor.numpy` tells of all in the
process.

A parameter or buffer that is not current, since the function that runs is not seen to reach it, or it was never read,
or servers are still writing it, has a class of its own, which PyTorch asks before it does anything with the values:
the first use brings them, on whichever thread, and makes an ordinary one of it again. So what a function is seen to
reach need not be all that it uses; it is what is brought before the function begins.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn

from torchstrat.core import _torch_private
from torchstrat.core._functional_private import have_readers_ask
from torchstrat.core._torch_private import DisableTorchFunctionSubclass, own_parameters
from torchstrat.core.errors import CommunicationError, ContextError
from torchstrat.core.tensor_bytes import is_same
from torchstrat.core.tensor_classes import NEEDS_NO_VALUES, tensors_in
from torchstrat.parameter_server.messages import ShardKey
from torchstrat.parameter_server.variables.cached_parameter import DATA, GRAD
from torchstrat.parameter_server.variables.remote_access import ValuesToCome


class WatchedParameter(nn.Parameter):
    """Otherwise an ordinary parameter: torch does not look at its class."""

    _version_stored = 0
    _before: torch.Tensor | None = None
    has_other_memory = False
    """Whether a function has given it memory that may be another tensor's, too."""
    views: Sequence[tuple[weakref.ref[torch.Tensor], int]] = ()
    """What `view_of` has made, and where it begins."""
    has_left_gradient = False
    """Whether functions before this one have left a gradient of it on a worker, and this one has not looked: see
    `gradients`. Autograd adds to it below Python; whoever sets it to nothing, or sees that there is none, asks
    here."""

    is_cleared = False
    """Whether somebody has set its gradient to nothing, also where there was none, or to something else: what others
    have left is no part of it."""

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = GRAD.__get__(self)
        if gradient is None and self.has_left_gradient:
            self.has_left_gradient = False
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        GRAD.__set__(self, value)
        self.note_cleared()

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)
        self.note_cleared()

    def note_cleared(self) -> None:
        """Its gradient is another one, or none: what was left is no part of it."""
        self.has_left_gradient, self.is_cleared = False, True

    @property
    def data(self) -> torch.Tensor:
        raw: torch.Tensor = DATA.__get__(self)
        self.keep_before()
        return raw

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self._before is None:
            self._before = self.memory
        DATA.__set__(self, value)
        self.has_other_memory = True

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        found = super().set_(*args, **kwargs)
        self.has_other_memory = True
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is an ordinary parameter of the function's own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: object) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def store(self, value: torch.Tensor) -> None:
        """``value`` is what the servers hold. They may have written it to `memory` themselves."""
        memory = self.memory
        if value.data_ptr() != memory.data_ptr():
            memory.copy_(value)
        self.settle()

    @property
    def memory(self) -> torch.Tensor:
        """The values, to be written by who tells this object; see `data`."""
        with DisableTorchFunctionSubclass():  # it may be pending
            value: torch.Tensor = DATA.__get__(self)
        return value

    def replace(self, value: torch.Tensor) -> None:
        """Another tensor of the same shape takes the place of the values."""
        with DisableTorchFunctionSubclass():
            DATA.__set__(self, value)
            for reference, start in self.views:
                if (view := reference()) is not None:
                    place = value.storage_offset() + start
                    DATA.__set__(view, value.as_strided(view.shape, view.stride(), place))
        self.settle()
        watch_arrays_over(self)

    def has_views(self) -> bool:
        """Whether what `view_of` has made of it is there still."""
        return any(reference() is not None for reference, _ in self.views)

    def settle(self) -> None:
        """Servers and this copy agree now."""
        with DisableTorchFunctionSubclass():
            self._version_stored, self._before = self._version, None

    def is_written(self) -> bool:
        """Whether the function has changed the values since they agreed."""
        with DisableTorchFunctionSubclass():
            if self._version != self._version_stored:
                return True
        before = self._before
        return before is not None and not is_same(before, self.memory)

    def keep_before(self) -> None:
        """Somebody gets at the values past the counter of versions."""
        if self._before is None:
            self._before = self.memory.clone()


def view_of(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], start: int) -> torch.Tensor:
    """A part of a variable's memory, which follows it where that moves. It counts what is written to it as the
    variable does."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        view = tensor.detach().as_strided(shape, stride, start + tensor.storage_offset())
    if isinstance(tensor, WatchedParameter):
        tensor.views = [*(one for one in tensor.views if one[0]() is not None), (weakref.ref(view), start)]
    return view


_by_address: dict[int, weakref.ref[WatchedParameter]] = {}


def watch_arrays_over(parameter: WatchedParameter) -> None:
    """From now on notice when somebody takes an array over its memory, through whichever tensor."""
    address = parameter.memory.untyped_storage().data_ptr()
    _by_address[address] = weakref.ref(parameter, functools.partial(_forget, address))


_end_asking: list[Callable[[], None]] = []


def be_told(*others: type) -> None:
    """From now on `watch_arrays_over` works, and what makes tensors of what is pending asks it, as it does
    ``others``."""
    for name, take in _GIVE_ARRAYS.items():
        setattr(torch.Tensor, name, _telling(take))
    _end_asking.append(have_readers_ask(PendingParameter, PendingBuffer, *others))


def be_told_no_more() -> None:
    for name, take in _GIVE_ARRAYS.items():
        setattr(torch.Tensor, name, take)
    _end_asking.pop()()


def _forget(address: int, reference: weakref.ref[WatchedParameter]) -> None:
    if _by_address.get(address) is reference:
        del _by_address[address]


def _telling(take: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(take)
    def told(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if _by_address:
            _keep_before(tensor)
        return take(tensor, *args, **kwargs)

    return told


def _keep_before(tensor: torch.Tensor) -> None:
    with DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        reference = _by_address.get(tensor.untyped_storage().data_ptr())
        parameter = None if reference is None else reference()
        if (
            parameter is not None
            and parameter.memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        ):
            parameter.keep_before()


_GIVE_ARRAYS = {name: getattr(torch.Tensor, name) for name in ("numpy", "__array__", "__dlpack__")}


_ATTRIBUTE = "_torchstrat_pending"


class Bringer(Protocol):
    """Who has the variables of a worker."""

    def reach(self, number: int) -> None:
        """The function that runs turns out to have to do with variable ``number``."""

    def bring(self, number: int) -> None:
        """Afterwards variable ``number`` is current, and its tensor an ordinary one. On any thread.

        Raises:
            ParameterServerUnavailable: a server is gone.
        """


_CHANGE_GRADIENT = (GRAD.__set__, GRAD.__delete__)


class _Asked:
    is_asked_first: ClassVar[bool] = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in NEEDS_NO_VALUES:
            if func in _CHANGE_GRADIENT:  # the gradient may be left for other functions, which have to know
                _reach(args[0])
            with _torch_private.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            wait_for(tensor)
        return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """One of the few that PyTorch does not ask about."""
        wait_for(self)  # which gives it another class
        return cast(torch.Tensor, self).set_(*args, **kwargs)


class PendingParameter(_Asked, WatchedParameter):
    """Whatever needs its values brings them."""


class PendingBuffer(_Asked, torch.Tensor):
    """The same of a buffer."""


def suspend(tensor: object, bringer: weakref.ref[Bringer], number: int) -> None:
    """From now on whoever uses ``tensor``, which is variable ``number``, has it brought."""
    setattr(tensor, _ATTRIBUTE, (bringer, number))
    tensor.__class__ = PendingParameter if isinstance(tensor, WatchedParameter) else PendingBuffer


def resume(tensor: object) -> None:
    """It is current."""
    if type(tensor) in _PENDING:
        tensor.__class__ = WatchedParameter if type(tensor) is PendingParameter else torch.Tensor
        delattr(tensor, _ATTRIBUTE)


def wait_for(tensor: object) -> None:
    """Until the values of ``tensor`` are here; returns at once for anything that is current."""
    if type(tensor) in _PENDING:
        found = getattr(tensor, _ATTRIBUTE, None)
        if found is None:  # another thread has just brought it
            return
        bringer, number = cast(tuple[weakref.ref[Bringer], int], found)
        here = bringer()
        if here is None:
            raise ContextError("a variable was used on a worker after the coordinator that had sent it was gone.")
        here.bring(number)


def _reach(tensor: object) -> None:
    found = getattr(tensor, _ATTRIBUTE, None)
    if found is not None and (bringer := found[0]()) is not None:
        bringer.reach(found[1])


def refuse_in_a_fork(pid: int) -> None:
    """Raises `ContextError` in another process than ``pid``, where the worker is: a function has forked this one, and
    nobody here can ask a server."""
    if os.getpid() != pid:
        raise ContextError(
            "variables on parameter servers were used in a process that a scheduled function, or a DataLoader of its "
            "worker, has forked. Use them in the function itself."
        )


_PENDING = frozenset((PendingParameter, PendingBuffer))


SWITCH = "TORCHSTRAT_OVERLAP_PULLS"
"""``off`` in the environment: a function goes on when all of its values are here."""

_LARGE_BYTES = 1 << 20
"""Smaller parameters are here before anybody could use the time."""

_CHOOSE_BY_CLASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""They take another algorithm where a parameter has a class that asks: rounding would depend on who came first."""


class Arrivals:
    """The parameters of one worker that are on their way. Their class is the business of whoever adds them.

    Args:
        settled: called with the number of a variable when its value is here, or is not going to be
            (``settled(number, False)``): then its memory may still be written to, and must not be used.
        lock: held while anything here changes.
        bring_all: called before PyTorch's compiler traces anything in this process.
    """

    _all: ClassVar[weakref.WeakSet[Arrivals]] = weakref.WeakSet()
    compiles = False

    def __init__(
        self,
        settled: Callable[[int, bool], None],
        lock: threading.RLock | None = None,
        bring_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._settled = settled
        self._lock = threading.RLock() if lock is None else lock
        self.bring_all = bring_all
        self._coming: dict[int, tuple[ValuesToCome, Sequence[ShardKey]]] = {}
        self._is_on = os.environ.get(SWITCH, "").lower() != "off"
        _watch_what_passes_by()
        self._all.add(self)

    def may_be_late(self, parameter: WatchedParameter) -> bool:
        """Whether nobody reads the memory of this parameter but through itself; see the module."""
        memory = parameter.memory
        return (
            self._is_on
            and hears_of_compilations()
            and not Arrivals.compiles
            and memory.device.type == "cpu"
            and memory.is_contiguous()
            and _torch_private.tensors_in_storage(memory) == 2  # the parameter, and what was just made to look at it
        )

    def add(self, number: int, values: ValuesToCome, keys: Sequence[ShardKey]) -> None:
        """Variable ``number`` has its value when ``values`` has written ``keys``."""
        with self._lock:
            self._coming[number] = values, keys

    def __contains__(self, number: int) -> bool:
        return number in self._coming

    def wait(self, number: int) -> None:
        """Until it is here, on any thread. Raises `ParameterServerUnavailable`."""
        with self._lock, _torch_private.untouched_by_surroundings():
            found = self._coming.get(number)
            if found is None:
                return
            values, keys = found
            is_here = False
            try:
                values.fetch(keys)
                is_here = True
            finally:
                del self._coming[number]
                self._settled(number, is_here)

    def settle(self) -> None:
        """Wait for all. What cannot come is forgotten: whoever needs it will ask for it again."""
        for number in list(self._coming):
            try:
                self.wait(number)
            except CommunicationError:
                continue

    @classmethod
    def settle_all(cls) -> None:
        """Of every worker in this process."""
        for arrivals in list(cls._all):
            arrivals.settle()

    @classmethod
    def stop(cls) -> None:
        """From now on nothing is late."""
        cls.compiles = True
        cls.settle_all()
        for arrivals in list(cls._all):
            arrivals.bring_all()


def worth_waiting_for(modules: Iterable[nn.Module]) -> set[int]:
    """The ``id`` of each large parameter that belongs to PyTorch's own modules alone. All that these do with it is to
    call PyTorch's functions; modules of others may hand it to code of their own, which does not ask."""
    by_torch: set[int] = set()
    by_others: set[int] = set()
    for module in modules:
        if isinstance(module, _CHOOSE_BY_CLASS):
            by_others.update(map(id, module.parameters()))
        else:
            owned = by_torch if type(module).__module__.startswith("torch.nn.modules.") else by_others
            owned.update(id(one) for one in own_parameters(module).values() if _is_large(one))
    return by_torch - by_others


def _is_large(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.nbytes >= _LARGE_BYTES


_watching = threading.Lock()
_is_watching = False
_is_hearing = False


def _watch_what_passes_by() -> None:
    """What takes tensors without asking their class. Once per process, by whoever first has a worker in it."""
    global _is_watching
    with _watching:
        if not _is_watching:
            _is_watching = True
            _torch_private.before_transforms_take(wait_for)
            os.register_at_fork(before=Arrivals.settle_all)


def hears_of_compilations() -> bool:
    """Not before the compiler is imported, which workers do when they start."""
    global _is_hearing
    if not _is_hearing and "torch._dynamo" in sys.modules:
        with _watching:
            if not _is_hearing:
                _torch_private.before_compilations(Arrivals.stop)
                _is_hearing = True
    return _is_hearing
