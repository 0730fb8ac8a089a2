"""The coordinator's copies of variables: reading one gives the servers' value, writing one changes it.

A copy is current while no function has run since it was read, and none is running: then reads and writes are those of
an ordinary tensor, and what was written goes to the servers with the next call that tells them anything. Otherwise

- a read brings the value first. While functions run it is one of that moment, and is used once;
- a write waits until no function is half-way, brings the value, changes it, and sends it before any function goes on:
  nothing that functions trained is undone;
- what was written where nobody could ask (a NumPy array over the memory, an alias from before the variable was placed)
  is found by comparing bytes. It is sent where no function has changed the variable meanwhile, and refused by name
  where one has.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from torchstrat.checkpoint.remote import RemoteVariable
from torchstrat.core import _torch_private
from torchstrat.core._torch_private import DisableTorchFunctionSubclass, untouched_by_surroundings, version_of
from torchstrat.core.errors import ContextError, InvalidArgumentError, TorchstratError, UnsupportedError
from torchstrat.core.tensor_bytes import is_same
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.cached_parameter import (
    Alias,
    Functions,
    Moment,
    NoFunctions,
    TensorCall,
    alias_of,
    aliases_in,
    ask_before_others_take,
    can_ask,
    give_memory,
    given_rows,
    grow_gradient,
    let_alone,
    let_ask,
    lost_value,
    read_rows,
    require_own_memory,
)
from torchstrat.parameter_server.variables.deferred_init import carry_initialisers, repeated_on_servers
from torchstrat.parameter_server.variables.remote_access import VariableAccess, VariableEdit

SWITCH = "TORCHSTRAT_COORDINATOR_CACHE"
"""``off`` in the environment: the coordinator's tensors are ordinary ones, with the values that were last pulled."""

_LEAST_AHEAD_BYTES, _MOST_AHEAD_BYTES = 1 << 20, 64 << 20


class CoordinatorCache:
    """All copies of one job. For any thread. ``access``: None where variables are only planned. ``seed``: the job's."""

    def __init__(self, access: VariableAccess | None, seed: Callable[[], int], timeout_seconds: float) -> None:
        self.functions: Functions = NoFunctions()
        self._maybe_access, self._seed, self._repeated = access, seed, 0
        self._timeout_seconds = timeout_seconds
        self._copies: dict[int, CachedVariable] = {}
        self._handed_out: dict[int, CachedVariable] = {}
        self._lock, self._process = threading.RLock(), os.getpid()
        self.is_on = os.environ.get(SWITCH, "").lower() != "off"
        self._warned: set[int] = set()
        # When, and how many bytes, the last read brought that nobody had asked for.
        self._ahead: tuple[Moment, int] = ((-1, 0), 0)
        self._end_asking: weakref.finalize[[], CoordinatorCache] | None = None

    @property
    def _access(self) -> VariableAccess:
        assert self._maybe_access is not None
        return self._maybe_access

    def _attempt(self, call: Callable[[], object], after_restore: Callable[[], object]) -> object:
        """Through losses of servers, as all calls of the coordinator; see `OnServerLoss`."""
        return self._access.servers.attempt(call, after_restore)

    # -- which there are --------------------------------------------------------------------------------------------

    def adopt(self, spec: VariableSpec, tensor: torch.Tensor, *, is_current: bool) -> None:
        """``tensor`` stands for a variable from now on. ``is_current``: it has the value that the servers have."""
        copy = self._copies[spec.number] = self._new(spec, tensor)
        copy.read_at = self.now() if is_current else None

    def replace(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """The program has put these in the places of what stood for variables: they are to be the values. One that has
        stood for another variable gets that one's value before."""
        moved = _copies_among(alias for one in tensors.values() if (alias := alias_of(one)) is not None)
        if behind := [copy for copy in moved if not self.is_current(copy)]:
            self.bring(behind)
        specs = {number: self._copies[number].spec for number in tensors}
        for number, tensor in tensors.items():
            self.release(number)
            let_alone(tensor)
        for number, spec in specs.items():
            self._copies[number] = self._new(spec, tensors[number])
            self._copies[number].is_replaced = True

    def _new(self, spec: VariableSpec, tensor: torch.Tensor) -> CachedVariable:
        if self.is_on and self._end_asking is None:
            self._end_asking = weakref.finalize(self, ask_before_others_take())
        return CachedVariable(self, spec, tensor, asks=self.is_on and can_ask(tensor))

    def tensor(self, number: int) -> torch.Tensor | None:
        """What stands for a variable, as far as the cache knows."""
        copy = self._copies.get(number)
        return None if copy is None else copy.tensor()

    def release(self, number: int) -> None:
        """The variable is no longer one of the servers', or another tensor stands for it: an ordinary tensor again."""
        copy = self._copies.pop(number, None)
        self._handed_out.pop(number, None)
        if copy is not None and (tensor := copy.tensor()) is not None:
            let_alone(tensor)

    def close(self, *, brings: bool) -> None:
        """All are ordinary tensors again, with the servers' values, as far as these are here or ``brings`` has them
        read. Reading the others raises `ContextError` from now on."""
        with self._lock:
            behind = [copy for copy in self._copies.values() if copy.is_asking and not self.is_current(copy)]
            if brings and behind:
                with contextlib.suppress(TorchstratError):  # the servers are gone, or another job's
                    self._read([copy for copy in behind if not copy.is_meta])
                    behind = []
            for copy in behind:
                copy.is_lost = not copy.is_meta
            for number in [number for number, copy in self._copies.items() if not copy.is_lost]:
                self.release(number)
            if self._end_asking is not None:
                self._end_asking.detach() if self._copies else self._end_asking()

    # -- reading ----------------------------------------------------------------------------------------------------

    def now(self) -> Moment:
        return self.functions.next_function, self.functions.num_unfinished

    def paused(self, who: str) -> AbstractContextManager[None]:
        """A block in which no function is half-way, for ``who``."""
        return self.functions.paused(self._timeout_seconds, who)

    @contextlib.contextmanager
    def alone(self, who: str) -> Iterator[None]:
        """The same, and no other thread reads or writes copies."""
        with self._lock, self.paused(who):
            yield

    def is_current(self, copy: CachedVariable) -> bool:
        """Whether it has the servers' value, which only the program changes."""
        return copy.read_at == self.now() and copy.read_at[1] == 0

    def is_fresh(self, alias: Alias | None) -> bool:
        """Whether the memory may be read by a tensor. While functions run: once, and not after one has ended."""
        if alias is None or not isinstance(copy := alias.holder, CachedVariable):
            return False
        return (
            copy.is_meta
            or copy.tensor() is None
            or self.is_current(copy)
            or (alias.unread == copy.readings and copy.read_at == self.now())
        )

    def pull(self, specs: Iterable[RemoteVariable]) -> None:
        """Bring the values of these variables, whether their copies are current or not."""
        copies = (self._copies.get(spec.number) for spec in specs)
        self._read([copy for copy in copies if copy is not None and copy.tensor() is not None and not copy.is_meta])

    def _read(self, copies: Sequence[CachedVariable]) -> None:
        read_at = self.now()
        held = [(copy, tensor) for copy in copies if (tensor := copy.tensor()) is not None]  # nobody drops them now
        for (copy, tensor), value in zip(held, self._access.read([copy.spec for copy, _ in held]), strict=True):
            self._store(copy, tensor, value, read_at)

    def _store(self, copy: CachedVariable, tensor: torch.Tensor, value: torch.Tensor, read_at: Moment) -> None:
        """The servers have ``value``. ``read_at``: what `now` said before they were asked."""
        with untouched_by_surroundings():
            tensor.copy_(value)
        copy.note()
        copy.read_at = read_at
        copy.readings += 1
        if (alias := alias_of(tensor)) is not None:
            alias.unread = copy.readings

    def bring(self, copies: Sequence[CachedVariable]) -> None:
        """Make these current, and what is likely to be read next."""
        self._require_here(copies)
        self._attempt(lambda: self._bring_now(copies), lambda: self.bring(copies))

    def _bring_now(self, copies: Sequence[CachedVariable]) -> None:
        with self._lock, untouched_by_surroundings():
            copies = [*copies, *self._next_after(copies)]
            self.push_written(copies)
            self._read(copies)

    def _next_after(self, copies: Sequence[CachedVariable]) -> list[CachedVariable]:
        """Copies that are not current, in order of creation after these, more each time: who reads one reads all."""
        when, brought = self._ahead
        now = self.now()
        limit = min(max(brought * 4, _LEAST_AHEAD_BYTES), _MOST_AHEAD_BYTES) if when == now else _LEAST_AHEAD_BYTES
        self._ahead = now, limit
        asked = {copy.spec.number for copy in copies}
        found: list[CachedVariable] = []
        for number in sorted(self._copies):
            copy = self._copies.get(number)
            if copy is None or number < min(asked) or number in asked or self.is_current(copy):
                continue
            tensor = copy.tensor()
            if tensor is None or tensor.is_meta or self.is_fresh(alias_of(tensor)):
                continue
            limit -= tensor.nbytes
            if limit < 0:
                break
            found.append(copy)
        return found

    def bring_rows(self, copy: CachedVariable, ids: torch.Tensor) -> None:
        """Make these rows of a table current, and leave the others as they are."""
        self._require_here([copy])
        self._attempt(lambda: self._bring_rows_now(copy, ids), lambda: self.bring_rows(copy, ids))

    def _bring_rows_now(self, copy: CachedVariable, ids: torch.Tensor) -> None:
        with self._lock, untouched_by_surroundings():
            self.push_written([copy])
            tensor = copy.tensor()
            if tensor is not None and len(ids):
                tensor.index_copy_(0, ids.to(tensor.device), self._access.read_rows(copy.spec, ids).to(tensor.device))
                copy.note()

    def _require_here(self, copies: Iterable[CachedVariable]) -> None:
        if os.getpid() != self._process:
            names = ", ".join(copy.spec.name for copy in copies)
            raise ContextError(
                f"{names} of a ParameterServerStrategy was used in a process that the coordinator has forked (of a "
                "DataLoader, perhaps), which has no connection to the servers. Give that process the values that it "
                "needs, as a copy: tensor.detach().clone()."
            )

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self, copies: Sequence[CachedVariable], call: TensorCall) -> object:
        """Make a call that changes some of these in place."""
        if not all(map(self.is_current, copies)) and not self.functions.num_unfinished:
            self.bring(copies)
        if all(map(self.is_current, copies)):
            return self._run(copies, call)
        self._require_here(copies)
        return self._attempt(lambda: self._write_now(copies, call), lambda: self._write_in_vain(copies, call))

    def _run(self, copies: Sequence[CachedVariable], call: TensorCall) -> object:
        if call.hands_out:  # before it does: what it changes is found by what there was
            require_own_memory(call, self._copies.values())
            for copy in copies:
                self.hand_out(copy)
        result = call.run()
        for copy in _copies_among(call.uncounted):
            copy.version = None
        return result

    def _write_now(self, copies: Sequence[CachedVariable], call: TensorCall) -> object:
        names = ", ".join(copy.spec.name for copy in copies)
        with self.alone(f"writing {names} on the coordinator"):
            self.push_written(copies)
            self._read(copies)
            is_done = False
            try:
                result = self._run(copies, call)
                is_done = True
            finally:
                if not is_done:  # it may have written a part: the next read brings what there was
                    self._put_back(copies)
            written = self.written(copies)
            for copy in written:
                copy.require_shape()
            self._assign(written)
            return result

    def _write_in_vain(self, copies: Sequence[CachedVariable], call: TensorCall) -> object:
        """All servers went back to a checkpoint: what was written just before is lost with the rest."""
        result = call.run()
        self._put_back(copies)
        return result

    def write_without_values(self, copy: CachedVariable, call: TensorCall) -> object:
        """Make a call that changes a table on ``meta``, of which only the servers have values."""
        self._require_here([copy])
        tensor = copy.tensor()
        assert tensor is not None
        with DisableTorchFunctionSubclass():
            edit = given_rows(call, tensor, copy.spec.name)
        if edit is not None:
            self._attempt(lambda: self._access.edit(copy.spec, "assign", *edit), lambda: None)
            return call.args[0]
        with repeated_on_servers(tensor, copy.spec.name) as recipe:
            result = call.run()
        self._repeated += 1
        seed = hash((self._seed(), copy.spec.number, self._repeated)) % 2**63
        self._attempt(lambda: self._access.repeat(copy.spec, tuple(recipe), seed), lambda: None)
        copy.watch(result, self, hands_out=False)
        return result

    def write_rows(self, copy: CachedVariable, call: TensorCall) -> bool:
        """Make a call that assigns whole rows of a table; False where it does something else. Whatever functions do to
        the others stays, so nothing has to wait."""
        tensor = copy.tensor()
        assert tensor is not None
        if call.func is not torch.Tensor.__setitem__ or call.args[0] is not tensor or len(call.aliases) > 1:
            return False
        self._require_here([copy])
        edit = None
        with DisableTorchFunctionSubclass(), contextlib.suppress(UnsupportedError, IndexError):  # of parts of rows
            edit = given_rows(call, tensor, copy.spec.name)
        if edit is None:
            return False
        self._attempt(lambda: self._write_rows_now(copy, call, *edit), lambda: None)
        return True

    def _write_rows_now(
        self, copy: CachedVariable, call: TensorCall, value: torch.Tensor, ids: torch.Tensor | None
    ) -> None:
        with self._lock:
            self.push_written([copy])
            call.run()  # first: what PyTorch refuses changes nothing on the servers either
            copy.note()
            read_at, copy.read_at = copy.read_at, None  # until they have it: it stays current, if it was
            self._access.edit(copy.spec, "assign", value, ids)
            copy.read_at = read_at

    def _put_back(self, copies: Iterable[CachedVariable]) -> None:
        for copy in copies:
            copy.note()
            copy.read_at = None

    def _assign(self, copies: Sequence[CachedVariable]) -> None:
        with untouched_by_surroundings():
            held = [(copy.spec, tensor) for copy in copies if (tensor := copy.tensor()) is not None]
            if held:
                self._access.push(VariableEdit(spec, "assign", tensor) for spec, tensor in held)
        for copy in copies:
            copy.note()

    def written(self, copies: Iterable[CachedVariable] | None) -> list[CachedVariable]:
        """Those whose memory has changed since it was equal to the servers'."""
        with DisableTorchFunctionSubclass():
            return [copy for copy in (self._copies.values() if copies is None else copies) if copy.is_written()]

    def push_written(self, copies: Iterable[CachedVariable] | None = None) -> None:
        """Send what the program has written. Raises `InvalidArgumentError` where functions have changed it since."""
        with self._lock:
            written = self.written(copies)
            for copy in written:
                copy.require_shape()
            if not self.is_on or all(copy.is_replaced or self.is_current(copy) for copy in written):
                self._assign(written)
            else:
                with self.paused("sending what the coordinator has written"):
                    self._assign_unless_changed(written)

    def _assign_unless_changed(self, written: Sequence[CachedVariable]) -> None:
        behind = [copy for copy in written if not copy.is_replaced and not self.is_current(copy)]
        held = self._access.read([copy.spec for copy in behind])
        pairs = zip(behind, held, strict=True)
        changed = [copy for copy, value in pairs if copy.before is None or not is_same(copy.before, value)]
        self._put_back(changed)
        self._assign([copy for copy in written if copy not in changed])
        if changed:
            names = ", ".join(copy.spec.name for copy in changed)
            raise InvalidArgumentError(
                f"{names} was written on the coordinator through memory that it shares with something else (a NumPy "
                "array, a view or .data taken earlier), after functions had changed it on the servers since that "
                "memory was read. What was written there is given up, and the servers keep what was trained. Write to "
                "the parameter itself (with torch.no_grad(): parameter.copy_(…)), or wait for the functions with "
                "coordinator.join() and take the array anew."
            )

    def check_unforeseen(self, copies: Iterable[CachedVariable]) -> None:
        """After a call that was not known to write: raise where it has, and was not waited with."""
        with DisableTorchFunctionSubclass():
            written = [copy for copy in copies if not self.is_current(copy) and copy.is_written()]
        if written:
            self._put_back(written)
            names = ", ".join(copy.spec.name for copy in written)
            raise ContextError(
                f"a call on the coordinator has changed {names} in place while scheduled functions run. It is not "
                "known to do that, so it did not wait for them, and what it wrote is given up. Call "
                "coordinator.join() before it, or write its result with parameter.copy_(…)."
            )

    def hand_out(self, copy: CachedVariable) -> None:
        """The memory is about to be given to code that changes it without a trace."""
        if copy.before is None:
            copy.keep_before()
        self._handed_out[copy.spec.number] = copy

    def is_shared(self, number: int) -> bool:
        """Whether anything else than its tensor shows the memory of a variable."""
        return not self._copies[number].is_meta and self._copies[number].is_shared()

    def grow(self, spec: VariableSpec) -> None:
        """The servers have more rows of a variable. Its tensor gets memory for them."""
        self._handed_out.pop(spec.number, None)
        self._copies[spec.number].grow(spec)

    def bring_new_rows(self, spec: VariableSpec, first: int) -> None:
        """Those that a variable has got, so that what is here is something that was read."""
        if not self._copies[spec.number].is_meta:
            self._bring_rows_now(self._copies[spec.number], torch.arange(first, spec.shape[0]))

    def has_traceless_changes(self) -> bool:
        """Whether memory was changed by others, who leave no trace in its tensor's version."""
        found = False
        for number, copy in list(self._handed_out.items()):
            self._warn_of_size(copy)
            with DisableTorchFunctionSubclass():
                is_written = copy.is_written()
            if not is_written and not copy.is_shared():
                copy.before = None
                del self._handed_out[number]
            found = found or is_written
        return found

    def _warn_of_size(self, copy: CachedVariable) -> None:
        before = copy.before
        if before is not None and before.nbytes > _MOST_AHEAD_BYTES and copy.spec.number not in self._warned:
            self._warned.add(copy.spec.number)
            warnings.warn(
                f"something holds the memory of {copy.spec.name} on the coordinator (a NumPy array, .data, a pointer), "
                f"so that all of its {before.nbytes / 2**20:.0f} MiB are compared in every call to schedule, to see "
                "what was written there. Let go of it, or take a copy: parameter.detach().clone().",
                stacklevel=2,
            )


class CachedVariable:
    """One variable's copy. ``read_at``: when it had the servers' value; None: it has another. ``readings``: how often
    that was brought. ``version``: its tensor's at that time; ``before``: that value, where what is written may leave no
    trace in the version. ``is_replaced``: the program has put another tensor in a buffer's place, which the servers do
    not have. ``is_lost``: the job is over, and nobody can say what the value was."""

    is_variable, hands_on = True, False

    def __init__(self, cache: CoordinatorCache, spec: VariableSpec, tensor: torch.Tensor, *, asks: bool) -> None:
        self._cache = weakref.ref(cache)
        self.spec = spec
        self.read_at: Moment | None = None
        self.readings = 0
        self.before: torch.Tensor | None = None
        self.is_replaced = self.is_lost = False
        self.is_asking, self.is_meta = asks, tensor.is_meta
        self.tensor = weakref.ref(tensor)
        self.version: int | None = version_of(tensor)
        if asks:
            let_ask(tensor, self)
            if not self.is_meta and self.is_shared():  # with what was made before it was placed
                cache.hand_out(self)

    def is_shared(self) -> bool:
        """Whether anything else shows the memory."""
        tensor = self.tensor()
        if tensor is None:
            return False
        with DisableTorchFunctionSubclass():
            return _torch_private.tensors_in_storage(tensor) > 1

    # -- what servers have ------------------------------------------------------------------------------------------

    def note(self) -> None:
        """The servers have what it holds."""
        tensor = self.tensor()
        if tensor is not None:
            with DisableTorchFunctionSubclass():
                self.version = version_of(tensor)
            self.is_replaced = False
            if self.before is not None:
                self.keep_before()

    def keep_before(self) -> None:
        tensor = self.tensor()
        if tensor is not None:
            with untouched_by_surroundings():
                self.before = tensor.detach().clone()

    def is_written(self) -> bool:
        tensor = self.tensor()
        if tensor is None or tensor.is_meta:
            return False
        return (
            self.is_replaced
            or version_of(tensor) != self.version
            or (self.before is not None and not is_same(self.before, tensor))
        )

    def require_shape(self) -> None:
        tensor = self.tensor()
        assert tensor is not None
        if tuple(tensor.shape) != self.spec.shape or tensor.dtype != self.spec.dtype:
            raise InvalidArgumentError(
                f"{self.spec.name} {self.spec.shape} {self.spec.dtype} was made {tuple(tensor.shape)} {tensor.dtype} "
                "on the coordinator. Variables on parameter servers keep their shape and dtype: make such changes "
                "within the first `with strategy.scope():`."
            )

    def grow(self, spec: VariableSpec) -> None:
        tensor = self.tensor()
        assert tensor is not None
        with untouched_by_surroundings(), DisableTorchFunctionSubclass():
            memory = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
            if not self.is_meta:
                memory[len(tensor) :] = 0
                memory[: len(tensor)] = tensor.detach()
            carry_initialisers(tensor, memory)
            give_memory(tensor, memory)
            grow_gradient(tensor, spec.shape)
        self.spec, self.read_at, self.before = spec, None, None
        self.readings += 1
        self.note()

    # -- Holder -----------------------------------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        cache = self._cache()
        if not self.is_lost and (cache is None or cache.is_current(self)):
            return ""
        return (
            f"<{self.spec.name}: {self.spec.kind} of shape {self.spec.shape}, {self.spec.dtype}, on parameter servers; "
            "functions have run since it was read, and reading it (.detach()) brings its value>"
        )

    def _bring(self, cache: CoordinatorCache, aliases: Sequence[Alias]) -> None:
        if behind := _copies_among(alias for alias in aliases if not cache.is_fresh(alias)):
            cache.bring(behind)
        for alias in aliases:
            alias.unread = None

    def _bring_rows(self, cache: CoordinatorCache, call: TensorCall) -> bool:
        """Whether a call looks at rows of a table alone, which are here then."""
        tensor = self.tensor()
        if tensor is None or not self.spec.by_rows or len(call.aliases) != 1 or cache.is_fresh(call.aliases[0]):
            return False
        with DisableTorchFunctionSubclass():
            ids = read_rows(call, tensor)
        if ids is not None:
            cache.bring_rows(self, ids)
        return ids is not None

    def require_value(self) -> None:
        if self.is_lost:
            raise lost_value(self.spec.name)

    def call(self, call: TensorCall) -> object:
        cache = self._cache()
        if cache is None:
            return call.run()
        # What is left of a variable that the program has dropped is an ordinary tensor, with its last values.
        copies = [copy for copy in _copies_among(call.aliases) if copy.tensor() is not None]
        if not copies:
            return call.run()
        on_meta = [copy for copy in copies if copy.is_meta]
        if on_meta and call.writes:
            return cache.write_without_values(on_meta[0], call)
        if call.writes:
            if len(copies) == 1 and self.spec.by_rows and cache.write_rows(self, call):
                return None
            result = cache.write([copy for copy in copies if not copy.is_meta], call)
        elif len(copies) == 1 and self._bring_rows(cache, call):
            result = call.run()
        else:
            self._bring(cache, call.aliases)
            result = call.run()
            cache.check_unforeseen(copies)
        for copy in copies:
            copy.watch(call.shown_by(result), cache, hands_out=call.hands_out)
        return result

    def read(self, alias: Alias) -> None:
        self.require_value()
        if (cache := self._cache()) is not None:
            self._bring(cache, [alias])

    def watch(self, result: object, cache: CoordinatorCache, *, hands_out: bool) -> None:
        """What a call has made of it asks too, where it shows the memory."""
        tensor = self.tensor()
        if tensor is None:
            return
        if hands_out and not self.is_meta:
            cache.hand_out(self)
        with DisableTorchFunctionSubclass():
            for one in aliases_in(result, tensor):
                let_ask(one, self, self.readings)


def _copies_among(aliases: Iterable[Alias]) -> list[CachedVariable]:
    """Those whose memory these show, each once."""
    return [one for one in {id(a.holder): a.holder for a in aliases}.values() if isinstance(one, CachedVariable)]
