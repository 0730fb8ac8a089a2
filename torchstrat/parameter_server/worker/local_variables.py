"""This worker's copies of the variables: made without values, filled from the servers when a function reaches them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from torchstrat.core import _torch_private
from torchstrat.core._torch_private import DisableTorchFunctionSubclass, own_buffer, own_buffers, own_parameters
from torchstrat.core.buffer_rules import is_statistic
from torchstrat.core.errors import CommunicationError, InvalidArgumentError, UnsupportedError
from torchstrat.core.reduction import VariableAggregation
from torchstrat.core.tensor_bytes import is_same, overlap
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.cached_parameter import grow_gradient, no_longer_one, shared_buffer
from torchstrat.parameter_server.variables.module_structure import KnownMembers
from torchstrat.parameter_server.variables.remote_access import ValuesToCome, VariableAccess, VariableEdit
from torchstrat.parameter_server.worker.stand_ins import (
    Arrivals,
    Bringer,
    WatchedParameter,
    hears_of_compilations,
    refuse_in_a_fork,
    resume,
    suspend,
    watch_arrays_over,
    worth_waiting_for,
)
from torchstrat.parameter_server.worker.table_parameter import TableLookups, TableParameter


class BufferEdits:
    """The rule by which changes of several workers come together. ``aggregations``: by variable, what the program has
    set (`StrategyExtended.set_aggregation`). ``shared``: whose memory a variable shows, too, on the coordinator.
    ``is_shared``: whether there are other workers.

    Integral buffers, and those that are set to be sums, go as differences, so that every worker's changes count.
    Others go as they are. Where another worker has changed one meanwhile, the difference is added to running statistics
    of `torch.nn`; of any other the last value stays, and servers note a conflict, unless the program has set that.
    """

    def __init__(self) -> None:
        self.aggregations: Mapping[int, VariableAggregation] = {}
        self.shared: Mapping[int, str] = {}
        self.is_shared = False

    def edit_of(
        self, spec: VariableSpec, current: torch.Tensor, reference: torch.Tensor, *, is_statistic: bool
    ) -> VariableEdit:
        """``reference``: its value when it was read."""
        if spec.number in self.shared:
            raise shared_buffer(spec.name, self.shared[spec.number])
        aggregation = self.aggregations.get(spec.number)
        is_inexact = current.is_floating_point() or current.is_complex()
        if current.dtype != torch.bool and (aggregation is VariableAggregation.SUM or not is_inexact):
            return VariableEdit(spec, "add", current - reference)
        if not self.is_shared or aggregation is not None:
            return VariableEdit(spec, "assign", current)
        return VariableEdit(spec, "move" if is_statistic and is_inexact else "assign", current, None, reference)


_LARGE_BYTES = 64 << 20


class Copies:
    """Parameters and buffers by the numbers of their variables. For the thread that runs functions, but for `bring` and
    `bring_table`."""

    def __init__(self, access: VariableAccess, device: torch.device) -> None:
        self.access = access
        self._device = device
        self._specs: dict[int, VariableSpec] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._slots: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
        self._buffers_of: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._reference: dict[int, torch.Tensor] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._reached: set[int] = set()
        self._is_running = False
        self._open: set[int] = set()  # whose tensors are ordinary ones
        self._pending_buffers: dict[int, torch.Tensor] = {}
        self._bringer: weakref.ref[Bringer] = weakref.ref(self)
        self._tables: set[int] = set()
        self._held: set[int] = set()  # tables that are here as a whole
        self.lookups = TableLookups(access)
        self._staging: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()
        self._can_wait: set[int] = set()
        self._arrivals = Arrivals(self._settled, self._lock, self._bring_all)
        self.buffer_edits = BufferEdits()
        self.members = KnownMembers()
        self.wrote_parameters = False
        """Whether a function has written to any by hand."""

    # -- made from a skeleton ---------------------------------------------------------------------------------------

    def make(self, spec: VariableSpec) -> torch.Tensor:
        """The tensor that stands for ``spec`` here; its values come later. A table takes no memory. One that is here
        gets the rows that are new in ``spec``."""
        if spec.number in self._tensors:
            if spec != self._specs[spec.number]:
                self._grow(spec)
            return self._tensors[spec.number]
        tensor: torch.Tensor
        if spec.by_rows:
            tensor = TableParameter(spec, self._device, self.lookups, self)
            self._tables.add(spec.number)
        else:
            value = _unknown(self._memory_for(spec))
            tensor = WatchedParameter(value, spec.requires_grad) if spec.kind == "parameter" else value
        if type(tensor) is WatchedParameter:
            watch_arrays_over(tensor)
        self._specs[spec.number] = spec
        self._tensors[spec.number] = tensor
        self._numbers[id(tensor)] = spec.number
        if not spec.by_rows:
            self._suspend(spec.number)
        return tensor

    def _grow(self, spec: VariableSpec) -> None:
        """No function runs, and values come when they are needed."""
        with self._lock, _torch_private.untouched_by_surroundings():
            if spec.number in self._arrivals:  # servers may be writing to its memory
                self._arrivals.settle()
            self._specs[spec.number] = spec
            self._staging.pop(spec.number, None)
            self._fresh.discard(spec.number)
            if spec.by_rows:
                self._held.discard(spec.number)
                self._table(spec.number).grow(spec)
            else:
                self._parameter(spec.number).replace(_unknown(self._memory_for(spec)))
                self._suspend(spec.number)
            grow_gradient(self._tensors[spec.number], spec.shape)

    def _memory_for(self, spec: VariableSpec) -> torch.Tensor:
        """Where the values of a dense variable are here. Servers may write to parameters on the CPU themselves."""
        if spec.kind == "parameter" and self._device.type == "cpu":
            return self.access.servers.empty(spec.shape, spec.dtype)
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)

    def note_modules(self, modules: Iterable[nn.Module]) -> None:
        """Remember where buffers are, since modules may replace the tensor by assignment; and what may arrive late."""
        modules = list(modules)
        self.members.note(modules)
        with DisableTorchFunctionSubclass():
            large = worth_waiting_for(modules)
        self._can_wait = {number for one, number in self._numbers.items() if one in large} - self._tables
        for module in modules:
            for name, tensor in own_buffers(module).items():
                number = None if tensor is None else self._numbers.get(id(tensor))
                if number is not None:
                    self._buffers_of.setdefault(module, {})[name] = number
                    slots = self._slots.setdefault(number, [])
                    if not any(known() is module and n == name for known, n in slots):
                        slots.append((weakref.ref(module), name))

    @property
    def specs(self) -> Mapping[int, VariableSpec]:
        return self._specs

    def tensor_of(self, number: int) -> torch.Tensor:
        return self._tensors[number]

    # -- what is known of a tensor ----------------------------------------------------------------------------------

    def spec_of(self, tensor: torch.Tensor) -> VariableSpec | None:
        number = self._numbers.get(id(tensor))
        return None if number is None else self._specs[number]

    def specs_of(self, optimizer: Optimizer) -> dict[torch.Tensor, VariableSpec]:
        """Of the variables among an optimizer's tensors."""
        tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
        return {tensor: spec for tensor in tensors if (spec := self.spec_of(tensor)) is not None}

    def has_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether that of this name is a variable."""
        return name in self._buffers_of.get(module, ())

    def numbers_under(self, module: nn.Module) -> Iterator[int]:
        """The variables of a module and its children. Buffers by their names: a function may have put another tensor
        in a buffer's place."""
        numbers, none = self._numbers, dict[str, int]()
        for one in module.modules():
            for parameter in own_parameters(one).values():
                if parameter is not None and (number := numbers.get(id(parameter))) is not None:
                    yield number
            if own_buffers(one):
                yield from self._buffers_of.get(one, none).values()

    def parameters(self, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, WatchedParameter]]:
        """Those of the variables, or of all, that take gradients."""
        for number in list(self._tensors) if numbers is None else numbers:
            tensor = self._tensors.get(number)
            if isinstance(tensor, WatchedParameter):
                yield number, tensor

    # -- values -----------------------------------------------------------------------------------------------------

    @property
    def reached(self) -> frozenset[int]:
        """Numbers of the variables that the function that runs is known to reach: its step brings their values back."""
        return frozenset(self._reached)

    def reach(self, number: int) -> None:
        """The function that runs has turned out to reach this one, too."""
        self._reached.add(number)

    def begin(self, reached: Iterable[int]) -> None:
        """A function begins that reaches these variables, as far as can be seen of it."""
        hears_of_compilations()
        self._reached = set(reached)
        self._is_running = True
        # Whoever uses a table as a whole is likely to do so again: then its values come with those of other variables.
        for number in [number for number in self._held if not self._table(number).is_current]:
            self._held.discard(number)
            self._fresh.discard(number)
            self._table(number).whole = None
        for number in self._held:
            self._table(number).is_current = False
        self.refresh(self._reached)
        with self._lock:
            for number in self._reached - self._open - self._tables:
                if number in self._fresh and number not in self._arrivals:
                    self._resume(number)
            for number in self._open - self._reached:
                self._suspend(number)

    def leave_graph(self) -> None:
        """The function has ended. A parameter that takes no gradients and that it has written to without
        `torch.no_grad` (an average of trained ones) has become part of a graph; the next function finds a leaf."""
        with DisableTorchFunctionSubclass():
            for number in self._reached:
                tensor = self._tensors.get(number)
                if tensor is not None and not tensor.is_leaf and isinstance(tensor, WatchedParameter):
                    tensor.detach_()

    def end(self) -> None:
        """The function has ended."""
        self._is_running = False

    def recover(self) -> None:
        """The function has raised: what it has assigned, and has not been sent, is given up."""
        for number, parameter in self.parameters():
            if parameter.has_other_memory:
                parameter.has_other_memory = False
                self._move(self._specs[number])

    def bring(self, number: int) -> None:
        """See `Bringer`."""
        refuse_in_a_fork(self._pid)
        with self._lock, _torch_private.untouched_by_surroundings():
            self._arrivals.wait(number)
            if number not in self._fresh:
                self.fill([self._specs[number]], self.access.start_reading)
                self._arrivals.wait(number)
            self.reach(number)
            self._resume(number)

    def _bring_all(self) -> None:
        """PyTorch's compiler takes hold of tensors without asking their classes."""
        if self._is_running:
            for number in self._specs.keys() - self._open - self._tables:
                with contextlib.suppress(CommunicationError):  # whoever uses it will be told
                    self.bring(number)

    def _suspend(self, number: int) -> None:
        tensor = self._tensors[number]
        if self._specs[number].kind == "buffer":
            tensor = self._buffer(self._specs[number])
            if type(tensor) is not torch.Tensor:  # a function has put it there
                return
            self._pending_buffers[number] = tensor
        suspend(tensor, self._bringer, number)
        self._open.discard(number)

    def _resume(self, number: int) -> None:
        resume(self._pending_buffers.pop(number, self._tensors[number]))
        self._open.add(number)

    def dense(self, numbers: Iterable[int]) -> list[VariableSpec]:
        """Those of the variables that this worker holds whole."""
        specs = [self._specs[number] for number in numbers if number in self._specs]
        return [spec for spec in specs if not spec.by_rows or spec.number in self._held]

    def expire(self) -> None:
        """Whatever is here may be out of date."""
        self._arrivals.settle()
        self._fresh.clear()

    def refresh(self, numbers: Iterable[int]) -> None:
        """Pull what is not known to be up to date; one call per server."""
        stale = [spec for spec in self.dense(numbers) if spec.number not in self._fresh]
        if stale:
            self.fill(stale, self.access.start_reading)

    def fill(
        self,
        specs: Sequence[VariableSpec],
        ask: Callable[[Sequence[VariableSpec], Sequence[torch.Tensor]], ValuesToCome],
    ) -> None:
        """Bring the values of these variables, by one call of each server. Some may arrive late: see `stand_ins`.

        ``ask(specs, places)`` asks for them, in the order in which they are to come. ``places``: where the servers may
        write them, whole and on the CPU: the parameters themselves, or something that is then stored. If this raises, a
        server that is slow, or was stopped, may write there at any later time. Then everything moves elsewhere.
        """
        with self._lock:
            self._fill(specs, ask)

    def _fill(
        self,
        specs: Sequence[VariableSpec],
        ask: Callable[[Sequence[VariableSpec], Sequence[torch.Tensor]], ValuesToCome],
    ) -> None:
        self._arrivals.settle()
        if self._can_wait:  # last those that may arrive late, first layers first
            specs = sorted(specs, key=lambda spec: (spec.number in self._can_wait, spec.number))
        may_be_late = {spec.number for spec in specs if self._may_be_late(spec)}
        try:
            places = [self._landing(spec) for spec in specs]
            values = ask(specs, places)
            values.wait_until_done()
            for spec, place in zip(specs, places, strict=True):
                keys = [(spec.number, shard) for shard in range(len(spec.shards))]
                if spec.number in may_be_late and not values.is_written(keys):
                    self._arrivals.add(spec.number, values, keys)
                    self._fresh.add(spec.number)
                    self._suspend(spec.number)
                else:
                    values.fetch(keys)
                    self.store(spec, place)
        except BaseException:
            self._arrivals.settle()
            for spec in specs:
                self._move(spec)
            raise

    def _may_be_late(self, spec: VariableSpec) -> bool:
        return spec.number in self._can_wait and self._arrivals.may_be_late(self._parameter(spec.number))

    def _settled(self, number: int, is_here: bool) -> None:
        if is_here:
            self._parameter(number).settle()
            if number in self._reached:
                self._resume(number)
        else:
            self._move(self._specs[number])

    def _landing(self, spec: VariableSpec) -> torch.Tensor:
        if spec.kind == "parameter" and self._device.type == "cpu":
            own = self._parameter(spec.number).memory
            if own.is_contiguous():
                return own
        if spec.number not in self._staging:
            self._staging[spec.number] = self.access.servers.empty(spec.shape, spec.dtype)
        return self._staging[spec.number]

    def _move(self, spec: VariableSpec) -> None:
        self._staging.pop(spec.number, None)
        if spec.kind == "parameter" and self._device.type == "cpu":
            parameter = self._parameter(spec.number)
            memory = self._memory_for(spec)
            # Else what a function has given up: elements of another shape, which are refused.
            parameter.replace(memory.copy_(parameter.memory) if parameter.memory.shape == memory.shape else memory)
        self._fresh.discard(spec.number)
        if spec.by_rows:
            self._table(spec.number).is_current = False
        else:
            self._suspend(spec.number)

    def store(self, spec: VariableSpec, value: torch.Tensor) -> None:
        """``value`` has just been read from the servers."""
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunctionSubclass():
            if spec.kind == "buffer":
                self._store_buffer(spec, value)
            else:
                self._parameter(spec.number).store(value)
        self._fresh.add(spec.number)

    def _store_buffer(self, spec: VariableSpec, value: torch.Tensor) -> None:
        # Not counted as a change in place, as with parameters that are not stepped: it may come between a forward and
        # its backward, when another model's optimizer steps.
        buffer = self._buffer(spec)
        if buffer.shape != value.shape or buffer.dtype != value.dtype:  # of a function, which was refused
            buffer.data = torch.empty_like(value, device=self._device)
        buffer.data.copy_(value)
        slots = self._slots.get(spec.number, ())
        for known, name in slots if len(slots) > 1 else ():
            if (module := known()) is not None:
                own_buffers(module)[name] = buffer
        self._reference[spec.number] = value.to(self._device, copy=True)

    def _is_statistic(self, spec: VariableSpec) -> bool:
        for known, name in self._slots.get(spec.number, ()):
            module = known()
            if module is not None and is_statistic(module, name):
                return True
        return False

    def _buffer(self, spec: VariableSpec) -> torch.Tensor:
        for known, name in self._slots.get(spec.number, ()):
            module = known()
            current = None if module is None else own_buffer(module, name)
            if current is not None:
                return current
        return self._tensors[spec.number]

    def _require_one(self, spec: VariableSpec) -> None:
        """Modules have one buffer, and a function may have put another tensor into one of them."""
        current = self._buffer(spec)
        for known, name in self._slots[spec.number]:
            if (module := known()) is not None and own_buffer(module, name) is not current:
                raise no_longer_one(spec.name)

    def bring_table(self, table: TableParameter) -> None:
        """See `TablesHolder`."""
        refuse_in_a_fork(self._pid)
        spec, number = table.spec, table.spec.number
        with self._lock, _torch_private.untouched_by_surroundings():
            if table.is_current:  # another thread has just brought it
                return
            if table.whole is None:
                _warn_of_size(table)
                table.replace(self._memory_for(spec))
                self._held.add(number)
                self._fresh.discard(number)
            if number not in self._fresh:
                self.fill([spec], self.access.start_reading)
            self.reach(number)
            table.is_current = True

    def _table(self, number: int) -> TableParameter:
        table = self._tensors[number]
        assert isinstance(table, TableParameter)
        return table

    def release(self, numbers: Collection[int]) -> None:
        """The coordinator has dropped these variables."""
        if any(number in self._arrivals for number in numbers):  # servers may be writing to their memory
            self._arrivals.settle()
        for number in numbers:
            tensor = self._tensors.pop(number, None)
            if tensor is not None:
                self._numbers.pop(id(tensor), None)
            for table in (self._specs, self._slots, self._reference, self._staging, self._pending_buffers):
                table.pop(number, None)
        for known in (self._tables, self._held, self._fresh, self._can_wait, self._open, self._reached):
            known.difference_update(numbers)

    def _parameter(self, number: int) -> WatchedParameter:
        tensor = self._tensors[number]
        assert isinstance(tensor, WatchedParameter)
        return tensor

    # -- what the function wrote by hand ----------------------------------------------------------------------------

    def take_edits(self) -> list[VariableEdit]:
        """What the function itself has changed since the values were read, to be told to the servers.

        Parameters as they are now, buffers as `BufferEdits` says. Of tables those that are here as a whole.
        """
        self._notice_replaced_buffers()
        numbers = self.reached
        return [*self._parameter_edits(numbers), *self._buffer_edits(numbers)]

    def _parameter_edits(self, numbers: Iterable[int]) -> Iterator[VariableEdit]:
        for spec in self.dense(numbers):
            if spec.kind != "parameter" or spec.number not in self._fresh or spec.number in self._arrivals:
                continue
            parameter = self._parameter(spec.number)
            if parameter.is_written():
                current = parameter.memory
                _require_form(spec, current)
                self.wrote_parameters = True
                yield VariableEdit(spec, "assign", current.clone())
                if parameter.has_other_memory:
                    self._give_own_memory(spec, parameter)
                parameter.settle()

    def note_stepped(self, specs: Iterable[VariableSpec]) -> None:
        """A step of one of torch's classes is about to change these, of which `take_edits` has told. PyTorch counts
        that, so that backward notices where it needs what was there before; the values that come do not count."""
        for spec in self.dense(spec.number for spec in specs):
            parameter = self._parameter(spec.number)
            increment_version(parameter)
            parameter.settle()

    def _give_own_memory(self, spec: VariableSpec, parameter: WatchedParameter) -> None:
        """A function has assigned ``data``. Whoever else has that memory would be written to with the next values."""
        if parameter.has_views():
            raise UnsupportedError(
                f"a scheduled function assigned .data of {spec.name}, of which this function or another, or a module, "
                "has a view (.data, detach()) from before. On one device that would stay with the old memory; on "
                "parameter servers it follows. Change the values in place: parameter.data.copy_(…)."
            )
        for number, other in self.parameters():
            if other is parameter or (number in self._tables and number not in self._held):
                continue
            if overlap(parameter.memory, other.memory):
                raise UnsupportedError(
                    f"a scheduled function made {spec.name} share its memory with {self._specs[number].name}, by "
                    "assigning .data. On parameter servers each has its own. Copy the values: "
                    "parameter.data.copy_(other) or parameter.data = other.data.clone()."
                )
        parameter.replace(self._memory_for(spec).copy_(parameter.memory))
        parameter.has_other_memory = False

    def _notice_replaced_buffers(self) -> None:
        """A function may put another tensor in a buffer's place without having used the one that was there."""
        for number, tensor in list(self._pending_buffers.items()):
            spec = self._specs[number]
            if self._buffer(spec) is not tensor:
                (value,) = self.access.read([spec])
                self._reference[number] = value.to(self._device)
                self._fresh.add(number)
                self._resume(number)
                self.reach(number)

    def _buffer_edits(self, numbers: Iterable[int]) -> list[VariableEdit]:
        edits: list[VariableEdit] = []
        for number in numbers:
            reference = self._reference.get(number)
            if reference is None:
                continue
            spec = self._specs[number]
            current = self._buffer(spec).detach()
            _require_form(spec, current)
            if len(self._slots.get(number, ())) > 1:
                self._require_one(spec)
            if is_same(current, reference):
                continue
            edits.append(self.buffer_edits.edit_of(spec, current, reference, is_statistic=self._is_statistic(spec)))
            self._reference[number] = current.clone()
        return edits


def _require_form(spec: VariableSpec, value: torch.Tensor) -> None:
    if value.shape != torch.Size(spec.shape):
        raise InvalidArgumentError(
            f"a scheduled function gave {spec.name} {spec.shape} another shape, {tuple(value.shape)}. Variables on "
            "parameter servers keep their shape; give a buffer that grows its largest one."
        )
    if value.dtype != spec.dtype:
        raise InvalidArgumentError(
            f"a scheduled function gave {spec.name} {spec.dtype} another dtype, {value.dtype}. Variables on parameter "
            "servers keep their dtype: make it so within the scope, or write to it in place (copy_)."
        )


def _unknown(value: torch.Tensor) -> torch.Tensor:
    """Filled with what no program takes for a value: who gets past the class of what was never read shall see it."""
    if value.is_floating_point() or value.is_complex():
        return value.fill_(float("nan"))
    return value.zero_() if value.dtype == torch.bool else value.fill_(torch.iinfo(value.dtype).min)


def _warn_of_size(table: TableParameter) -> None:
    spec = table.spec
    size = table.numel() * table.element_size()
    if size > _LARGE_BYTES:
        warnings.warn(
            f"table {spec.name} {spec.shape} is used as a whole, not only by F.embedding or F.embedding_bag, so "
            f"every worker holds all of its {size / 2**20:.0f} MiB and sends its whole gradient. Look rows up "
            "instead, or create it without a partitioner.",
            stacklevel=_level_of_program(),
        )


def _level_of_program() -> int:
    """For a warning of the caller's: the line outside of PyTorch and torchstrat that has led here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "torchstrat"):
        level, frame = level + 1, frame.f_back
    return level
