"""Tables with ``max_norm``, of which a step's lookups scale rows in place: what else uses one is refused.

One device scales the rows of the whole batch before anything else reads the table (``hidden @ table.weight.T``, a norm
of it). Each replica has scaled only those of its own part by then, and would read others. So in a run such a table is
of a class of its own, which is asked about every use, and so are the views that are made of it. From a lookup on, until
the optimizer's step or the end of the run has brought the scaled rows of all replicas together, two uses are let
through: the same lookups again, and to multiply all of it by a number. After that nothing may be looked up until then:
a row that another replica has scaled already would be scaled anew.

Tables of `torch.nn.Embedding` and `torch.nn.EmbeddingBag` are known when a run begins, others from their first lookup.
Where the code of a step names such a lookup, any matrix may be a table in its first run.

Nor may a replica that looks nothing up use a table in which another one has looked rows up by then. Replicas in
processes of their own tell each other when they bring scaled rows together. One that has not known a table before has
not seen what it has used it for, so that counts as a use.

What asks no class is found by the table's memory (`table_memory`), in the first run of a step, for that costs each
operator: ``torch.DoubleTensor(table)``, C++ extensions.
"""

from __future__ import annotations

import copy
import dis
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchstrat.core._functional_private import (
    have_readers_ask,
    put_lookup_hook,
    remove_lookup_hook,
    watch_scaling_lookups,
)
from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    foreach_div_,
    foreach_mul_,
    is_compiler_at_work,
    new_hook_key,
    own_parameters,
    share_storage,
    uncompiled_because,
)
from torchstrat.core.context import get_replica_context
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.gradients import REGISTERS_HOOK
from torchstrat.core.registration_order import WeakOrdered
from torchstrat.core.tensor_classes import NEEDS_NO_VALUES, asking_class, methods, tensors_in
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.table_memory import (
    LOOKED_UP,
    UNSEEN,
    MemoryUses,
    aliases_of,
    arrays_of,
    is_part_of,
    may_be_table,
    scaling_tables,
    shows,
    shows_memory,
)

Norm = tuple[float, float]
"""``max_norm`` and ``norm_type`` of a lookup."""

Refuse = Callable[[torch.Tensor, str], UnsupportedError]
"""The table and what has used it → the error."""


class _Group:
    """A table and its views, as one replica has them."""

    __slots__ = (
        "_is_inside",
        "_is_levelled",
        "_is_paused",
        "_lent",
        "_members",
        "_norm",
        "_refuse",
        "has_looked_up",
        "used_by",
    )

    def __init__(self, tensors: Iterable[torch.Tensor], refuse: Refuse, used_by: str = "") -> None:
        self._members: list[tuple[weakref.ref[torch.Tensor], type]] = []
        self._lent: list[tuple[Callable[[], object], str]] = []  # what is no tensor, and shows the memory of one
        self._refuse = refuse
        self.has_looked_up = False
        """Whether there has been a lookup since what replicas have scaled was last brought together."""
        self.used_by = used_by
        """What has used the table otherwise since, before any lookup."""
        self._start()
        for tensor in tensors:
            self.add(tensor)

    def _start(self) -> None:
        self._norm: Norm | str = _NOT_YET
        self._is_paused = self._is_levelled = False
        self._is_inside = False  # a lookup that has scaled rows and not yet read them

    def begin_run(self) -> None:
        """Another run begins, in which its views are what they are."""
        self._start()
        self._lent, self.has_looked_up, self.used_by = [], False, ""

    def add(self, tensor: torch.Tensor, *, as_parameter: bool = False) -> None:
        key, kind = id(tensor), nn.Parameter if as_parameter else type(tensor)
        if issubclass(kind, _Asks):  # a Ctrl-C has come between
            kind = kind.__bases__[1]
        self._members.append((weakref.ref(tensor, lambda gone: self._forget(key, gone)), kind))

    def _forget(self, key: int, gone: weakref.ref[torch.Tensor]) -> None:
        """A view is no more; another tensor may come to have its ``id``."""
        self._members = [member for member in self._members if member[0] is not gone]
        if _asking.get(key) is self:
            del _asking[key]

    def has(self, tensor: torch.Tensor) -> bool:
        return any(one() is tensor for one, _ in self._members)

    def lend(self, value: object, by: str) -> None:
        """``by`` has given what shows the memory, and will ask nobody."""
        is_weak = type(value).__weakrefoffset__ != 0  # which a capsule is not
        self._lent.append((weakref.ref(value) if is_weak else lambda: value, by))

    @property
    def table(self) -> torch.Tensor | None:
        """The first of them."""
        return self._members[0][0]() if self._members else None

    @property
    def members(self) -> list[torch.Tensor]:
        return [one for reference, _ in self._members if (one := reference()) is not None]

    @property
    def ids(self) -> set[int]:
        """What `id` gives for each of them."""
        return {id(one()) for one, _ in self._members}

    @property
    def is_at_step(self) -> bool:
        """Whether this replica has come to where scaled rows are brought together."""
        return self._is_paused and self._is_levelled

    @property
    def is_used(self) -> bool:
        """Whether rows have been looked up."""
        return self._norm != _NOT_YET

    # -- who asks ---------------------------------------------------------------------------------------------------

    def put(self) -> None:
        """Have them ask, while it is this replica's turn."""
        for reference, kind in () if self._is_paused else self._members:
            tensor = reference()
            if tensor is not None:
                _asking[id(tensor)] = self
                tensor.__class__ = asking_class(_Asks, kind)

    def lift(self) -> None:
        for reference, kind in self._members:
            tensor = reference()
            if tensor is not None and _asking.get(id(tensor)) is not None:
                tensor.__class__ = kind
                del _asking[id(tensor)]

    def pause(self, *, is_levelled: bool) -> None:
        """Nobody asks until `go_on`. ``is_levelled``: what replicas have scaled is brought together now."""
        self.lift()
        self._is_paused, self._is_levelled = True, is_levelled
        if is_levelled:
            self._norm = _NOT_YET

    def go_on(self) -> None:
        if self._is_levelled:
            self.has_looked_up, self.used_by = False, ""
        self._is_paused = self._is_levelled = False
        self.put()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        self.lift()
        try:
            yield
        finally:
            self.put()

    # -- what they ask ----------------------------------------------------------------------------------------------

    def look_up(self, norm: Norm) -> None:
        """A lookup has scaled rows, and is about to read them."""
        self._norm, self._is_inside, self.has_looked_up = norm, True, True
        by = next((by for reference, by in self._lent if reference() is not None), None)
        if by is not None:
            raise self.refuse(by)

    def is_alike(self, norm: tuple[object, object]) -> bool:
        """Whether all lookups so far have been with this norm."""
        return self._norm == norm

    def ask(
        self, table: torch.Tensor, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Raises `UnsupportedError` where ``func`` uses ``table`` after lookups otherwise than in lookups like them."""
        is_inside, self._is_inside = self._is_inside, False
        if func in _ASKS_FORM or func in _DIFFERENTIATES or (is_inside and func in _READS_ROWS):
            return
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__", "__new__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]  # the property, or the class
        if not self.is_used:
            if not (func in _LOOKUPS and kwargs.get("max_norm") is not None):
                self.used_by = name
            return
        if func in _LOOKUPS and args[1] is table:
            name = f"{name} with max_norm={kwargs.get('max_norm')}"
            if self.is_alike((kwargs.get("max_norm"), kwargs.get("norm_type", 2.0))):
                return
        if func in _SCALES and all(one.numel() == 1 for one in tensors_in((args[1:], kwargs))):
            self._norm = _SCALED
            return
        raise self._refuse(table, name)

    def use(self, by: str) -> None:
        """Something has used the table's values, and asked nobody."""
        if self.is_used:
            raise self.refuse(by)
        self.used_by = self.used_by or by

    def refuse(self, by: str) -> UnsupportedError:
        """What there is to say of such a use by this replica."""
        table = self.table
        assert table is not None, "a member that is no more is forgotten"
        return self._refuse(table, by)


_AN_ARRAY = "a NumPy array that shows its memory"
_NOT_YET, _SCALED = "not yet looked up", "scaled as a whole since"

_asking: dict[int, _Group] = {}
"""By ``id``: the tensors that ask."""

_LOOKUPS = frozenset({F.embedding, F.embedding_bag})
_READS_ROWS = frozenset({torch.embedding, torch.embedding_bag})
_SCALES = frozenset({*methods("mul_", "div_", "__imul__", "__itruediv__"), foreach_mul_, foreach_div_})
_ASKS_FORM = frozenset(
    {
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *methods("new_zeros", "new_ones", "new_empty", "new_full", "is_same_size", "data_ptr"),
    }
)
_NEEDS_NO_VALUES = NEEDS_NO_VALUES | REGISTERS_HOOK
_DIFFERENTIATES = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


def _is_for_parameter(func: Callable[..., object]) -> bool:
    """Whether `torch.nn.Parameter` is being made of one: of what it does not know it wants a view of the same class."""
    return func is torch.Tensor.detach and sys._getframe(2).f_code is nn.Parameter.__new__.__code__


class _Asks(torch.Tensor):
    @classmethod
    @uncompiled_because("on several replicas, what a table with max_norm is used for has to be seen where it happens")
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _NEEDS_NO_VALUES or is_compiler_at_work():  # what is compiled leaves the call itself to Python
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with ExitStack() as stack:
            groups = {}
            for tensor in tensors_in((args, kwargs)):
                group = _asking.get(id(tensor)) if isinstance(tensor, _Asks) else None
                if group is not None:  # the first time that it comes: it has been lifted then
                    stack.enter_context(group.lifted())
                    group.ask(tensor, func, args, kwargs)
                    groups[id(tensor)] = tensor, group
            if not groups:  # of a class that asks, and made of one that does
                stack.enter_context(DisableTorchFunctionSubclass())
            result = func(*args, **kwargs)
            for tensor, group in groups.values():
                if shows_memory(result):
                    group.lend(result, getattr(func, "__name__", str(func)))
                for made in tensors_in(result):
                    if share_storage(made, tensor) and not group.has(made):
                        group.add(made, as_parameter=_is_for_parameter(func))
            return result

    def as_subclass(self, cls: type[object]) -> Any:
        return type(self).__torch_function__(torch.Tensor.as_subclass, (type(self),), (self, cls))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        group = _asking[id(self)]
        with group.lifted():
            group.ask(self, copy.deepcopy, (self,), {})
            return copy.deepcopy(self, memo)


_OF_LOOKUPS = frozenset({"embedding", "embedding_bag"})


def _looks_up(code: CodeType) -> bool:
    """Whether it names such a function of a module's, and not a member of an object (``self.embedding(ids)``)."""
    if _OF_LOOKUPS.isdisjoint(_words(code)):
        return False
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.argval in _OF_LOOKUPS and not (before is not None and _loads_object(before)):
            return True
        before = instruction
    return False


def _loads_object(instruction: dis.Instruction) -> bool:
    """Whether what it loads is no module, as far as its name tells."""
    if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return bool(instruction.argval != "functional")
    return instruction.opname.startswith("LOAD_FAST")


def _may_scale(code: CodeType) -> bool:
    """Whether it names one, and ``max_norm`` as a variable, an attribute or an argument."""
    words = _words(code)
    return "max_norm" in words and not _OF_LOOKUPS.isdisjoint(words)


def _words(code: CodeType) -> list[object]:
    words: list[object] = [*code.co_names, *code.co_varnames]
    for one in code.co_consts:
        words += one if isinstance(one, tuple) else (one,)
    return words


@contextmanager
def _within(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


class ScalingLookups:
    """Of one strategy."""

    def __init__(
        self,
        strategy: object,
        num_replicas: int,
        registry: VariableRegistry,
        inner: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """``inner``: the tensors by which the strategy itself has the memory of variables."""
        self._strategy, self._num_replicas, self._registry = strategy, num_replicas, registry
        self._inner = inner
        self._key = new_hook_key()
        self._others = WeakOrdered()  # tables in no module of torch's
        self._modules: tuple[int, list[weakref.ref[nn.Module]]] = (-1, [])  # with the registry's count of changes
        self._groups: dict[int, list[_Group]] = {}  # by replica
        self._last: dict[int, list[_Group]] = {}  # those of the last run
        self._replicas: list[int] = []
        self._begun: set[int] = set()  # those that have had a turn
        self._seen: set[CodeType] = set()  # of steps that have been looked at
        self._code: Sequence[CodeType] = ()
        self._is_first = self._has_come_up = False
        self._end_asking: Callable[[], None] | None = None
        if num_replicas > 1:
            watch_scaling_lookups()

    def begin(self, replicas: Iterable[int]) -> None:
        """A run of these begins."""
        if self._num_replicas == 1:
            return
        self._replicas, self._begun, last = list(replicas), set(), self._last
        self._last = {}
        put_lookup_hook(self._key, self._note)
        known = self._known()
        if not known:
            return
        aliases = aliases_of(known, self._inner()) if self._is_first_run() else [[] for _ in known]
        arrays = [[array for array in self._registry.arrays() if shows(array, table)] for table in known]
        for replica in self._replicas:
            before = {id(group.table): group for group in last.get(replica, ())}
            self._groups[replica] = groups = []
            for table, others, shown in zip(known, aliases, arrays, strict=True):
                group = before.get(id(table)) or self._group([table])
                group.begin_run()
                for one in others:
                    if not group.has(one):
                        group.add(one)
                for array in shown:
                    group.lend(array, _AN_ARRAY)
                groups.append(group)
        self._have_readers_ask()

    def around(self, inner: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """What to call the step in, of which ``inner`` is a part: in its first run, and in the one after that in which
        a table has come up, its operators are looked at."""
        if self._num_replicas == 1 or not (self._registry.new_code or self._has_come_up):
            return inner
        has_come_up, self._has_come_up = self._has_come_up, False
        if has_come_up or (self._is_first_run() and (self._known() or any(map(_looks_up, self._registry.new_code)))):
            return _within(inner, MemoryUses(self._hear_of_use, _Asks))
        return inner

    def _known(self) -> list[torch.Tensor]:
        """What is, or may be, a table when a run begins."""
        if self._modules[0] != self._registry.changes:
            found = scaling_tables(self._registry.modules())
            self._modules = self._registry.changes, [weakref.ref(one) for one in found]
        candidates = self._candidates()
        if not (self._modules[1] or self._others.count or candidates):
            return []
        return list({id(table): table for table in (*self._tables(), *candidates)}.values())

    def _is_first_run(self) -> bool:
        """Whether the step has code that none has had before. One that is made anew for each run has not."""
        code = self._registry.new_code
        if code is not self._code:
            self._code, self._is_first = code, not self._seen.issuperset(code)
            self._seen.update(code)
        return self._is_first

    def _hear_of_use(self, tensors: list[torch.Tensor], by: str) -> None:
        """An operator uses these. Where a class has been asked about it, the table does not ask now."""
        asking = {id(group) for group in tuple(_asking.values())}
        for group in [one for one in self._all() if id(one) in asking]:
            if any(is_part_of(tensor, member) for tensor in tensors for member in group.members):
                group.use(by)

    def _tables(self) -> Iterator[torch.Tensor]:
        """Those that are known."""
        for reference in self._modules[1]:
            module = reference()
            weight = None if module is None else own_parameters(module).get("weight")
            if weight is not None:
                yield weight
        yield from self._others.alive()

    def _candidates(self) -> list[torch.Tensor]:
        """Before the first run of a step: what may turn out to be tables, where its code says that there are others."""
        if not any(map(_may_scale, self._registry.new_code)):
            return []
        return [one for one in self._registry.tensors() if may_be_table(one)]

    def _have_readers_ask(self) -> None:
        if self._end_asking is None:
            self._end_asking = have_readers_ask(_Asks)

    def end(self) -> UnsupportedError | None:
        """It has ended, or failed. What there is to say of uses that other replicas' lookups forbid."""
        remove_lookup_hook(self._key)
        found = None
        if self._end_asking is not None:
            self._end_asking()
            self._end_asking = None
        if self._groups:
            found = self._used_elsewhere(self._all())
            for group in self._all():
                group.pause(is_levelled=True)  # for good: a replica may still be in what it has been stopped in
            self._groups, self._last = {}, self._groups
        return found

    def of(self, key: int) -> str | None:
        """Of the only replica of this process, in a run or right after it; see `UsesOfTables`."""
        groups = itertools.chain.from_iterable((self._groups or self._last).values())
        group = next((one for one in groups if key in one.ids), None)
        return UNSEEN if group is None else LOOKED_UP if group.has_looked_up else group.used_by or None

    def possible(self) -> list[torch.Tensor]:
        """When a run begins: what is a table, or may turn out to be one in it."""
        if any(map(_looks_up, self._registry.new_code)):
            return [one for one in self._registry.tensors() if may_be_table(one)]
        return self._known()

    def hear_of(self, key: int) -> None:
        self._others.add(next(one for one in self._registry.tensors() if id(one) == key))

    def refused(self, key: int, by: str) -> UnsupportedError:
        return self._refused(next(one for one in self._registry.tensors() if id(one) == key), by)

    def _used_elsewhere(self, groups: Iterable[_Group]) -> UnsupportedError | None:
        """``groups``: of replicas that have come to where scaled rows are brought together."""
        looked_up, used = set[int](), list[_Group]()
        for group in groups:
            if group.has_looked_up:
                looked_up |= group.ids
            elif group.used_by:
                used.append(group)
        refused = (group for group in used if not looked_up.isdisjoint(group.ids))
        return next((group.refuse(group.used_by) for group in refused), None)

    def switch(self, replica: int | None) -> None:
        """It is the turn of this one; None: all stand still, and what any has looked up asks."""
        if replica is not None:
            self._begun.add(replica)
        if self._groups:
            for group in self._all():
                group.lift()
            own = self._all() if replica is None else self._groups.get(replica, ())
            for group in sorted(own, key=lambda one: one.is_used):  # of one table's the last one is asked
                group.put()

    def begin_step(self, replica: int, tensors: Sequence[torch.Tensor]) -> None:
        """These are about to be stepped on all replicas, which brings scaled rows together. Nothing asks until
        `end_step`."""
        for group in self._groups.get(replica, ()):
            group.pause(is_levelled=any(map(group.has, tensors)))
        if self._groups:
            found = self._used_elsewhere(group for group in self._all() if group.is_at_step)
            if found is not None:
                raise found

    def end_step(self, replica: int) -> None:
        for group in self._groups.get(replica, ()):
            group.go_on()

    def _all(self) -> Iterator[_Group]:
        return itertools.chain.from_iterable(self._groups.values())

    def _group(self, tensors: Iterable[torch.Tensor], used_by: str = "") -> _Group:
        return _Group(tensors, self._refused, used_by)

    def _note(self, table: torch.Tensor, max_norm: float, norm_type: float) -> None:
        context = get_replica_context()
        if context is None or context.strategy is not self._strategy:
            return
        groups = self._groups.setdefault(context.replica_id_in_sync_group, [])
        group = next((one for one in groups if one.has(table)), None)
        if group is None:
            self._refuse_buffers(table)
            shown = self._variables_of(table)
            if not shown and table.is_leaf:  # what a replica has for itself is its own affair
                return
            meant = list({id(one): one for one in (*shown, table)}.values())
            aliases = aliases_of(shown, (*self._inner(), *meant)) if shown else []
            group = self._group({id(one): one for one in itertools.chain(meant, *aliases)}.values())  # from now on
            for array in arrays_of(table):
                group.lend(array, _AN_ARRAY)
            groups.append(group)
            self._has_come_up = True
            for replica in self._replicas if shown else ():
                if replica != context.replica_id_in_sync_group:
                    unseen = UNSEEN if replica in self._begun else ""
                    self._groups.setdefault(replica, []).append(self._group(shown, unseen))
            self._have_readers_ask()
        elif self._registry.new_code:
            self._variables_of(table)
        group.look_up((max_norm, norm_type))
        group.put()

    def _refuse_buffers(self, table: torch.Tensor) -> None:
        for slot in self._registry.buffer_slots():
            if slot.tensor is table or (slot.tensor is not None and is_part_of(slot.tensor, table)):
                raise UnsupportedError(
                    f"the step looks rows up with max_norm in {type(slot.module).__name__}.{slot.name}, a buffer. A "
                    f"lookup scales rows in place, and each of {self._num_replicas} replicas only those of its own part"
                    " of the batch, while a buffer becomes the mean of what replicas have. Make the table a parameter: "
                    "torch.nn.Parameter(table, requires_grad=False) if it is not trained."
                )

    def _variables_of(self, table: torch.Tensor) -> list[torch.Tensor]:
        """Those whose memory a table shares. One without any a replica may have computed from a variable."""
        copied, variables = self._registry.copied(), self._registry.tensors()
        with DisableTorchFunctionSubclass():
            shown = [one for one in variables if one is table or is_part_of(one, table)]
        shown = [one for one in shown if id(one) not in copied]
        for one in shown:
            self._others.add(one)
        return shown

    def _refused(self, table: torch.Tensor, by: str) -> UnsupportedError:
        if by == UNSEEN:
            return UnsupportedError(
                f"the step looks rows of {self._registry.describe(table)} up with max_norm, and not on every replica. "
                "Nothing has said before that it is such a table, so what the other replicas have used it for has not "
                "been seen, and they may have used rows as they were before scaling. Give max_norm by its name: "
                "torch.nn.functional.embedding(ids, table, max_norm=1.0), or torch.nn.Embedding(…, max_norm=1.0)."
            )
        return UnsupportedError(
            f"{self._registry.describe(table)} has max_norm, and the step uses it as a whole ({by}) beside looking "
            f"rows up. A lookup scales rows in place, and each of {self._num_replicas} replicas only those of its own "
            "part of the batch, so each would use another table than one device does. Use it in lookups only; or leave "
            "max_norm out, and scale all rows after the optimizer's step: "
            "with torch.no_grad(): table.weight.copy_(table.weight.renorm(2, 0, max_norm))."
        )
