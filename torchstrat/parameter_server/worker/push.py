"""``optimizer.step()`` in a function: gradients go to the servers, which step, and fresh values come back, some of them
while the next function runs.

The user's call goes through PyTorch's global step hook, so gradient scalers, clipping and user hooks around it work as
they do anywhere; the optimizer itself steps a stand-in without parameters.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchstrat.core import without_collection
from torchstrat.core._torch_private import (
    DisableTorchFunction,
    before_step,
    hooks_before_step,
    number_hooks_apart,
    sparse_indices,
    sparse_values,
)
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.optimizers import (
    be_idle,
    groups_with_wrapped,
    hyperparameters,
    is_listed,
    make_stand_in,
    stepped_by,
    wrapped_by,
)
from torchstrat.parameter_server.messages import (
    Accumulation,
    OptimizerStep,
    SetAttributes,
    ShardKey,
    StateOfShard,
    Token,
    VariableSpec,
    Wrapped,
)
from torchstrat.parameter_server.serialization.captured_objects import token_of_spec
from torchstrat.parameter_server.variables.attributes import marks_of_tensors
from torchstrat.parameter_server.variables.optimizer_state import RemoteOptimizerState, read_state
from torchstrat.parameter_server.variables.placement import pieces
from torchstrat.parameter_server.variables.remote_access import VariableAccess, edits_by_server
from torchstrat.parameter_server.worker.gradients import LeftGradient, LeftGradients, rows_of
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.parameter_server.worker.session import notice_members
from torchstrat.parameter_server.worker.stand_ins import be_told, be_told_no_more
from torchstrat.parameter_server.worker.stepped_optimizers import SteppedOptimizers, reads_result
from torchstrat.replicas.optimizer_step import LastHooks, closure_of


class _Compiler:
    """What PyTorch imports at an optimizer's first step (its compiler, about a second), imported ahead of it in a
    thread, while a process that has just started waits for its coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_there = False

    def begin(self) -> None:
        """Start importing, once per process."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._import, name="torchstrat-warm-up", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Until it is done; it is not waited for where `begin` was not called."""
        if self._thread is not None and not self._is_there:
            self._thread.join()

    def _import(self) -> None:
        with without_collection():
            torch.compiler.disable(self._import)
        self._is_there = True  # every function asks


compiler = _Compiler()


class _Here(threading.local):
    before: Callable[[Optimizer, object, object], object] | None = None
    left: LeftGradients | None = None


_here = _Here()


class StepHook:
    """PyTorch's hook before every optimizer's step, there as long as this process has a worker. A worker of a test is a
    thread: all of them share one, since the hooks are a plain dictionary that steps of other threads walk over."""

    _lock = threading.Lock()
    _workers = 0
    _handles: tuple[Any, ...] = ()

    @classmethod
    def attach(cls) -> None:
        with cls._lock:
            cls._workers += 1
            if cls._workers == 1:
                compiler.begin()
                number_hooks_apart()
                be_told(LeftGradient)
                cls._handles = (register_optimizer_step_pre_hook(_before_step), *notice_members())
                for owner, told in _TELL.items():
                    setattr(owner, told.__name__, told)

    @classmethod
    def detach(cls) -> None:
        with cls._lock:
            cls._workers -= 1
            if cls._workers == 0:
                for handle in cls._handles:
                    handle.remove()
                for owner, told in _TELL.items():
                    setattr(owner, told.__name__, told.__wrapped__)
                be_told_no_more()
                compiler.wait()


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> Any:
    if _here.before is not None:
        return _here.before(optimizer, args, kwargs)
    keeper = getattr(getattr(optimizer, "state", None), "keeper", None)
    if isinstance(keeper, _StateOnServers):
        keeper.refuse_on_this_thread()
    return None


def _telling(owner: type, name: str, tell: Callable[[Any, LeftGradients], None]) -> object:
    """A method that tells of its calls in functions."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def told(self: object, *args: object, **kwargs: object) -> object:
        if _here.left is not None:
            tell(self, _here.left)
        return method(self, *args, **kwargs)

    return told


def _clears(owner: Optimizer | torch.nn.Module, left: LeftGradients) -> None:
    left.note_zeroed(owner)


def _scales(scaler: torch.amp.GradScaler, left: LeftGradients) -> None:
    left.has_scaled |= scaler.is_enabled()


_TELL: dict[type, Any] = {
    Optimizer: _telling(Optimizer, "zero_grad", _clears),
    torch.nn.Module: _telling(torch.nn.Module, "zero_grad", _clears),
    torch.amp.GradScaler: _telling(torch.amp.GradScaler, "scale", _scales),
}
"""What PyTorch has no hooks for."""


class RemoteSteps:
    """Optimizer steps while one function runs, on its thread. Entered anew for each function.

    Args:
        number_of: the job's number of an optimizer, None for one that it does not know.
        attributes_of: what the program has set on the optimizer, or the variable, with a token.
    """

    def __init__(
        self,
        copies: Copies,
        access: VariableAccess,
        number_of: Callable[[Optimizer], int | None],
        left: LeftGradients,
        attributes_of: Callable[[Token], SetAttributes],
    ) -> None:
        self._copies = copies
        self._access = access
        self._number_of = number_of
        self._attributes_of = attributes_of
        self._uncompiled: Callable[[Optimizer, object, object], object] | None = None
        """`before`; made when PyTorch's compiler has been imported, and once: that takes as long as ten functions."""
        self._last_hooks, self._last = LastHooks(), before_step(self._step)
        self._watched: list[Optimizer] = []
        self._own: list[Optimizer] = []  # of classes of the program's own
        self._kept: list[tuple[Optimizer, object]] = []  # of those, as a function begins
        self._read: list[Optimizer] = []  # whose state was asked for since the last step
        self._states: weakref.WeakKeyDictionary[Optimizer, RemoteOptimizerState] = weakref.WeakKeyDictionary()
        self._left = left
        self._latest, self._is_asking = SteppedOptimizers(access, copies.specs_of, number_of), False
        self.stepped = False
        """Whether a step has brought fresh values, or let them come."""
        self.refused: UnsupportedError | None = None
        """What a thread of the function's own was told. It may have kept it to itself."""

    def __enter__(self) -> RemoteSteps:
        if self._uncompiled is None:
            compiler.wait()
            # Called in the middle of a compiled training step, and not to be compiled itself.
            self._uncompiled = torch.compiler.disable(self.before)
        self.stepped, self.refused = False, None
        _here.before, _here.left = self._uncompiled, self._left
        self._ask_for(self._own)
        return self

    def __exit__(self, *_: object) -> None:
        _here.before = _here.left = None
        self._last_hooks.clear()
        self._ask_no_more()

    def _ask_for(self, own: list[Optimizer]) -> None:
        if own:
            self._is_asking = True
            self._latest.begin(own)

    def _ask_no_more(self) -> None:
        if self._is_asking:  # of most functions nobody does
            self._latest.end()
            self._is_asking = False

    def watch(self, captured: Iterable[object]) -> None:
        """What the function that begins is seen to reach."""
        self._forget_states()
        self._watched = [value for value in captured if isinstance(value, Optimizer)]
        self._own = [optimizer for optimizer in self._watched if not is_listed(type(optimizer))]
        self._kept = [(optimizer, marks_of_tensors(optimizer)) for optimizer in self._own]

    def keep_state_of(self, optimizers: Iterable[Optimizer]) -> None:
        """Let ``optimizer.state`` of these, which have just come, ask the servers."""
        for optimizer in optimizers:
            if hasattr(optimizer, "state") and optimizer not in self._states:
                optimizer.state = RemoteOptimizerState(_StateOnServers(self, optimizer), {})
                self._states[optimizer] = optimizer.state

    def _used(self) -> Iterator[tuple[Optimizer, RemoteOptimizerState]]:
        """What this function may have asked for state, or given another."""
        for optimizer in dict.fromkeys((*self._watched, *self._read)):
            state = self._states.get(optimizer)
            if state is not None:
                yield optimizer, state

    def _forget_states(self) -> None:
        """What was read of them is as old as the last step."""
        for optimizer, state in self._used():
            state.keeper.is_read = False  # type: ignore[attr-defined]
            dict.clear(state)
            state.note()
            optimizer.state = state
        self._read.clear()

    def check_states(self) -> None:
        """Raise `UnsupportedError` where the function has changed an optimizer's state, or given it some of its own,
        which nobody would send anywhere: by other ways than ``step()``, or on another thread."""
        if self.refused is not None:
            raise self.refused
        found = [
            optimizer
            for optimizer, state in self._used()
            if (state.is_changed() if optimizer.state is state else not state.holds(optimizer.state))
        ]
        for optimizer, marks in self._kept:
            if marks_of_tensors(optimizer) != marks:
                self._kept = []  # said once
                raise UnsupportedError(
                    f"a scheduled function has put tensors into attributes of {type(optimizer).__name__} outside of "
                    "its step(), or changed some there. Steps are made on a parameter server, by an optimizer that has "
                    "others. Compute such things in step(), or use a synchronous strategy such as MirroredStrategy, "
                    "also for optimizers with steps of several parts (SAM)."
                )
        if found:
            self._forget_states()
            raise UnsupportedError(
                f"a scheduled function has put state into {type(found[0]).__name__}.state outside of its step(), or "
                "changed what is there. The state of optimizers is on the parameter servers, which make the steps; a "
                "worker would keep this for itself, and what it changes by it would overwrite the steps of others. "
                "Change it on the coordinator, or use a synchronous strategy such as MirroredStrategy, also for "
                "optimizers with steps of several parts (SAM)."
            )

    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, StateOfShard]:
        """What the servers have of it; read once between two steps."""
        self._read.append(optimizer)
        number = self._number_of(optimizer)
        return {} if number is None else read_state(self._access.servers, number, self._copies.specs_of(optimizer))

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> object:
        """What PyTorch asks before a step of this thread: what to call instead, or None."""
        number = self._number_of(optimizer)
        if number is None:
            self._check_foreign(optimizer)
            return None
        if hooks_before_step(optimizer):  # hooks of the user's, which may change gradients: after those
            self._last_hooks.put(optimizer, self._last)
            return None
        return self._step(optimizer, args, kwargs)

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> object:
        number, is_own = self._number_of(optimizer), not is_listed(type(optimizer))
        keeps_result = is_own and reads_result()
        assert number is not None
        self._ask_no_more()
        if closure_of(args, kwargs) is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) needs many evaluations under one set of values, which "
                "parameter servers do not hold still. Call loss.backward() and step() without a closure."
            )
        if not any(optimizer is one for one in self._watched):
            self._reach(optimizer)
        self.check_states()
        self._left.check(optimizer, self.name_of, self._number_of_variable)
        with DisableTorchFunction():  # here are hundreds of operators, and nobody has to look at them
            is_made = self._push(number, optimizer, keeps_result=keeps_result)
            result = self._latest.result_of(optimizer) if keeps_result and is_made else None
        self._forget_states()
        stand_in = be_idle(make_stand_in(optimizer), result)
        self._ask_for([optimizer] if is_own else [])
        return (stand_in, *args[1:]), kwargs

    def _reach(self, optimizer: Optimizer) -> None:
        """One that the function was not seen to reach: so are its parameters, and all that is asked of those is asked
        of these."""
        self._watched.append(optimizer)
        for spec in self._copies.specs_of(optimizer).values():
            self._copies.reach(spec.number)

    def name_of(self, tensor: torch.Tensor) -> str:
        spec = self._copies.spec_of(tensor)
        return "a parameter" if spec is None else spec.name

    def _number_of_variable(self, tensor: torch.Tensor) -> int | None:
        spec = self._copies.spec_of(tensor)
        return None if spec is None else spec.number

    def _check_foreign(self, optimizer: Optimizer) -> None:
        for spec in self._copies.specs_of(optimizer).values():
            raise InvalidArgumentError(
                f"a scheduled function steps an optimizer ({type(optimizer).__name__}) of its own on {spec.name}, "
                "which lives on parameter servers. Create it on the coordinator, inside `with strategy.scope():`."
            )

    # -- the push ---------------------------------------------------------------------------------------------------

    def _push(self, number: int, optimizer: Optimizer, *, keeps_result: bool) -> bool:
        """Whether a step is made, which a gradient scaler may have called off."""
        step = _Gradients(optimizer, self._copies.spec_of, self._left.pushed, self._left.accumulates)
        cleared = self._left.take_cleared(None if step.found_inf else optimizer, self._number_of_variable)
        parts, others = edits_by_server(self._copies.take_edits()), self._discards(cleared)
        if not step.found_inf:
            options = tuple(map(hyperparameters, optimizer.param_groups))
            attributes = self._attributes_of(("helper", number))
            wrapped = None if is_listed(type(optimizer)) else self._wrapped_by(optimizer)
            tags = {} if is_listed(type(optimizer)) else self._tags_of(optimizer)
            for server in step.servers:
                dense, rows = step.shards.of(server)
                made = parts if server in step.changes or server in parts else others
                made.setdefault(server, {})["steps"] = (
                    OptimizerStep(number, options, dense, rows, attributes, tags, wrapped, step.reuses, keeps_result),
                )
        if is_listed(type(optimizer)):
            self._copies.note_stepped(step.stepped)
        self._send(parts, others, self._copies.dense(self._copies.reached))
        self.stepped = True
        return not step.found_inf

    def _wrapped_by(self, optimizer: Optimizer) -> Wrapped | None:
        numbers = [self._number_of(inner) for inner in wrapped_by(optimizer)]
        if not numbers:
            return None
        name, own = type(optimizer).__name__, optimizer.param_groups
        for tensor in stepped_by(optimizer)[sum(len(group["params"]) for group in own) :]:
            if tensor.grad is not None:
                raise UnsupportedError(
                    f"{self.name_of(tensor)} has a gradient and belongs to an optimizer that {name} wraps, but to no "
                    f"parameter group of {name} itself: its step is made on a parameter server, with the gradients of "
                    "its own groups. Put the parameter into both."
                )
        groups, places = groups_with_wrapped(optimizer)
        attributes = [{} if number is None else self._attributes_of(("helper", number)) for number in numbers]
        return Wrapped(places, tuple(map(hyperparameters, groups[len(own) :])), tuple(attributes))

    def _tags_of(self, optimizer: Optimizer) -> dict[int, SetAttributes]:
        specs = [spec for tensor in stepped_by(optimizer) if (spec := self._copies.spec_of(tensor)) is not None]
        found = {spec.number: self._attributes_of(token_of_spec(spec)) for spec in specs}
        return {number: attributes for number, attributes in found.items() if attributes}

    def finish(self, taken: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The function has ended: what it has changed besides, and what it leaves to the next step of any goes to the
        servers. ``taken``: parameters with gradients."""
        parts, others = edits_by_server(self._copies.take_edits()), {}
        if self._left.accumulates:
            shards = _Shards()
            with DisableTorchFunction():
                for tensor, gradient in taken:
                    spec = self._copies.spec_of(tensor)
                    assert spec is not None
                    shards.add(spec, rows_of(gradient))
            for server in shards.servers:
                parts[server]["accumulation"] = Accumulation(*shards.of(server))
            others = self._discards(self._left.take_cleared(None, self._number_of_variable))
        self._send(parts, others, None)

    def _discards(self, numbers: Iterable[int]) -> dict[int, dict[str, object]]:
        """The parts of a push that lets go of what others have left of these variables."""
        by_server: dict[int, dict[int, None]] = defaultdict(dict)
        for number in numbers:
            for shard in self._copies.specs[number].shards:
                by_server[shard.server][number] = None
        return {server: {"accumulation": Accumulation(discards=tuple(of))} for server, of in by_server.items()}

    def _send(
        self, parts: dict[int, dict[str, Any]], others: dict[int, dict[str, Any]], specs: Sequence[VariableSpec] | None
    ) -> None:
        """``specs``: whose values are to come back. ``others``: see `VariableAccess.send_push`."""
        for server in parts.keys() & others.keys():
            also = others.pop(server)
            left = parts[server].get("accumulation", Accumulation())
            discards = also.get("accumulation", left).discards
            parts[server] = {**also, **parts[server], "accumulation": replace(left, discards=discards)}
        if specs is None:
            self._access.send_push(parts, others=others)
        else:
            self._copies.fill(specs, partial(self._access.send_push, parts, others=others))


class _StateOnServers:
    """Keeps ``optimizer.state`` of a worker: read while a function runs, until the next step."""

    def __init__(self, steps: RemoteSteps, optimizer: Optimizer) -> None:
        self._steps, self._optimizer = steps, weakref.ref(optimizer)
        self.is_read = False

    def is_current(self) -> bool:
        return self.is_read

    def is_at_rest(self) -> bool:
        return False

    def read(self) -> dict[torch.Tensor, StateOfShard]:
        optimizer = self._optimizer()
        assert optimizer is not None
        found = self._steps.state_of(optimizer)
        self.is_read = True
        return found

    def refuse_on_this_thread(self) -> None:
        self._steps.refused = UnsupportedError(
            f"a scheduled function steps {type(self._optimizer()).__name__} on a thread of its own. The servers make "
            "steps, and what belongs to one function goes there by the thread that runs it. Call step() there, after "
            "thread.join()."
        )
        raise self._steps.refused

    def change(self, state: RemoteOptimizerState, make: Callable[[], object]) -> Any:
        optimizer = self._optimizer()
        raise UnsupportedError(
            f"a scheduled function changes {type(optimizer).__name__}.state, which is on the parameter servers and "
            "belongs to all workers. Change it on the coordinator, where that waits until no function is half-way."
        )


class _Shards:
    """Gradients of whole variables, cut into shards, by server."""

    def __init__(self) -> None:
        self._dense: dict[int, list[tuple[ShardKey, torch.Tensor]]] = defaultdict(list)
        self._rows: dict[int, list[tuple[ShardKey, torch.Tensor, torch.Tensor]]] = defaultdict(list)

    @property
    def servers(self) -> Set[int]:
        return self._dense.keys() | self._rows.keys()

    def of(self, server: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Dense ones and rows, as in `OptimizerStep`."""
        return tuple(self._dense.get(server, ())), tuple(self._rows.get(server, ()))

    def add(self, spec: VariableSpec, gradient: torch.Tensor) -> None:
        if gradient.layout == torch.sparse_coo:
            self._add_rows(spec, gradient)
            return
        for number, (shard, part) in enumerate(zip(spec.shards, pieces(spec, gradient), strict=True)):
            self._dense[shard.server].append(((spec.number, number), part.cpu()))

    def _add_rows(self, spec: VariableSpec, gradient: torch.Tensor) -> None:
        """``gradient``: sparse in its first dimension.

        Shards without any of the rows are told too: an optimizer's count of steps is the table's, not the shard's.
        """
        if gradient.sparse_dim() != 1:
            raise InvalidArgumentError(
                f"the gradient of {spec.name} is sparse in {gradient.sparse_dim()} dimensions; parameter servers take "
                "gradients that are dense, or sparse in the first dimension, as those of embeddings are."
            )
        ids, values = _sorted_rows(gradient)
        ends = [0, *torch.searchsorted(ids, torch.tensor([shard.stop for shard in spec.shards])).tolist()]
        for number, shard in enumerate(spec.shards):
            where = slice(ends[number], ends[number + 1])
            self._rows[shard.server].append(((spec.number, number), ids[where] - shard.start, values[where]))


class _Gradients:
    """The gradients of one optimizer's parameters. ``takes_left``: servers may have some that functions have left.

    ``stepped``: what the step will change; ``servers``: all that have to make it; ``changes``: those of them on which
    it does something by itself. ``reuses``: see `OptimizerStep`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        spec_of: Callable[[torch.Tensor], VariableSpec | None],
        pushed: Callable[[torch.Tensor], bool],
        takes_left: bool,
    ) -> None:
        self.shards = _Shards()
        self.reuses = False
        # A gradient scaler leaves unscaling to fused optimizers; the servers know nothing of it.
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self.found_inf = found is not None and bool(found)
        self.stepped: list[VariableSpec] = []
        without: set[int] = set()  # servers of parameters that have no gradient
        # A step without any gradient is one too for a class that may do anything: it may count them.
        always = not is_listed(type(optimizer))
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    if not self.found_inf:
                        gradient = rows_of(tensor.grad)
                        known = _known(spec_of(tensor), tensor, optimizer)
                        self.stepped.append(known)
                        self.shards.add(known, gradient if scale is None else gradient / scale)
                    self.reuses |= pushed(tensor.grad)  # also where the scaler has looked at it, and makes no step
                elif (always or takes_left) and not self.found_inf:
                    shards = _known(spec_of(tensor), tensor, optimizer).shards
                    without |= {shard.server for shard in shards}
        self.servers = self.shards.servers | without
        self.changes = self.servers if always else self.shards.servers


def _sorted_rows(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of its rows, sorted and unique, and the rows, on the CPU.

    Autograd forgets on the way that they are, and `coalesce` would then sort and copy them.
    """
    ids = sparse_indices(gradient)[0]
    if not bool((ids[1:] > ids[:-1]).all()):
        gradient = gradient.coalesce()
        ids = gradient.indices()[0]
    return ids.cpu(), sparse_values(gradient).cpu()


def _known(spec: VariableSpec | None, tensor: torch.Tensor, optimizer: Optimizer) -> VariableSpec:
    if spec is None:
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} holds a parameter of shape {tuple(tensor.shape)} that is not on the parameter "
            "servers; a function cannot add any. Create them on the coordinator, inside `with strategy.scope():`."
        )
    return spec
