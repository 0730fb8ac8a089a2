"""Optimizers on the coordinator. Reading ``optimizer.state`` asks the servers, changing it is a load; a step takes the
gradients that the program has here, and is refused where functions have left theirs on workers.

A table is given more rows from here: first the server that gets them, then everybody learns of it. No function is
half-way meanwhile. What waits in the queue, and what runs once more because its worker was lost, finds the larger
table: workers load its new description before their next function.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat.core._torch_private import DisableTorchFunctionSubclass, own_parameters
from torchstrat.core.errors import ContextError, InvalidArgumentError, UnsupportedError
from torchstrat.core.variables import VariableRegistry
from torchstrat.parameter_server.messages import NewRows, StateOfShard, VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import Catalog
from torchstrat.parameter_server.variables.cached_parameter import Moment, tell_of_gradients
from torchstrat.parameter_server.variables.cached_state import CachedState, of_parameters
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.deferred_init import recipe_by, recipe_of_more
from torchstrat.parameter_server.variables.optimizer_state import Kinds, RemoteOptimizerState
from torchstrat.parameter_server.variables.placement import seed_of_variable
from torchstrat.parameter_server.variables.program_state import CapturedVariables
from torchstrat.parameter_server.variables.remote_access import ServerGroup, VariableAccess
from torchstrat.parameter_server.waiting import held_back


class _Job(Protocol):
    """Of a `Job`, whose state this is."""

    access: VariableAccess
    cache: CoordinatorCache
    catalog: Catalog
    kinds: Kinds
    left_gradients: Callable[[Sequence[int]], set[int]]
    seed: int
    servers: ServerGroup
    variables: CapturedVariables

    def commit(self) -> None: ...
    def optimizers(self) -> list[Optimizer]: ...
    def parameters_of(self, optimizer: Optimizer) -> dict[torch.Tensor, VariableSpec]: ...
    def push_optimizer(self, optimizer: Optimizer) -> None: ...
    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, StateOfShard]: ...


_Result = TypeVar("_Result")


class CoordinatorState:
    """Keeps the `RemoteOptimizerState` of one optimizer."""

    _holders: ClassVar[MutableMapping[Optimizer, CachedState]] = WeakIdKeyDictionary()

    def __init__(self, job: _Job, optimizer: Optimizer, *, is_current: bool) -> None:
        self._job: _Job = weakref.proxy(job)
        self.reference = weakref.ref(optimizer)
        self.read_at: Moment | None = job.cache.now() if is_current else None

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self.reference()
        if optimizer is None:
            raise InvalidArgumentError(
                "this is optimizer.state of an optimizer that the program has dropped, and with it the servers. Keep "
                "the optimizer until another one has the state, or copy that before: optimizer.state_dict()."
            )
        return optimizer

    @classmethod
    def attach(cls, job: _Job, optimizer: Optimizer, *, is_current: bool) -> None:
        if cls.keeps(optimizer):
            cls.of(optimizer).read_at = job.cache.now() if is_current else None
            _remote_state(optimizer).note()
        else:
            keeper, holder = cls(job, optimizer, is_current=is_current), cls._holder_of(optimizer)
            held = dict(optimizer.state.items())
            if isinstance(optimizer.state, RemoteOptimizerState):  # another one's
                held |= {tensor: dict(entry) for tensor, entry in of_parameters(held.items())}
            optimizer.state = RemoteOptimizerState(keeper, held, holder)

    @classmethod
    def _holder_of(cls, optimizer: Optimizer) -> CachedState:
        """One for all that is ever its state: a load gives it other mappings with the same tensors."""
        if optimizer not in cls._holders:
            cls._holders[optimizer] = CachedState(optimizer)
        return cls._holders[optimizer]

    @classmethod
    def keeps(cls, optimizer: Optimizer) -> bool:
        """Whether its state is the servers'. That of another optimizer, which the program has given it, is like any."""
        keeper = getattr(optimizer.state, "keeper", None)
        return isinstance(keeper, CoordinatorState) and keeper.reference() is optimizer

    @classmethod
    def held(cls, optimizer: Optimizer) -> dict[torch.Tensor, StateOfShard]:
        """What its state holds, as it was read last if it is the servers'; to be sent."""
        held = dict.items(optimizer.state) if cls.keeps(optimizer) else optimizer.state.items()
        plain = cls._holder_of(optimizer).plain
        return {tensor: {name: plain(value) for name, value in entry.items()} for tensor, entry in of_parameters(held)}

    @classmethod
    def refresh(cls, optimizer: Optimizer) -> bool:
        """Read its state, if it is the servers'; whether it is."""
        if is_kept := cls.keeps(optimizer):
            _remote_state(optimizer).refresh()
        return is_kept

    @staticmethod
    def expire(optimizer: Optimizer) -> None:
        """The servers have another state than what was read, though no function has run since."""
        state: object = optimizer.state
        if isinstance(state, RemoteOptimizerState):
            CoordinatorState.of(optimizer).read_at = None
            state.note()

    @staticmethod
    def detach(optimizer: Optimizer) -> None:
        """It is an ordinary optimizer again, with the state that it holds."""
        if isinstance(getattr(optimizer, "state", None), RemoteOptimizerState):
            optimizer.state = defaultdict(dict, dict.items(optimizer.state))
            CoordinatorState._holder_of(optimizer).adopt(())

    @staticmethod
    def of(optimizer: Optimizer) -> CoordinatorState:
        keeper = _remote_state(optimizer).keeper
        assert isinstance(keeper, CoordinatorState)
        return keeper

    # -- StateKeeper ------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Also while functions run, until one of them has ended."""
        return self.read_at == self._job.cache.now()

    def is_at_rest(self) -> bool:
        return self.is_current() and not self._job.cache.now()[1]

    def read(self) -> dict[torch.Tensor, StateOfShard]:
        return self._job.servers.asking(self._read_now)

    def _read_now(self) -> dict[torch.Tensor, StateOfShard]:
        self.push_changed()
        read_at = self._job.cache.now()
        found = self._job.state_of(self._optimizer)
        self.read_at = read_at
        return found

    def change(self, state: RemoteOptimizerState, make: Callable[[], _Result]) -> _Result:
        """Waits until no function is half-way, and sends what there is after it."""
        result: _Result = self._job.servers.attempt(lambda: self._change_now(state, make), make)
        return result

    def _change_now(self, state: RemoteOptimizerState, make: Callable[[], _Result]) -> _Result:
        with self._job.cache.paused("changing the state of an optimizer on the coordinator"):
            if not self.is_current():
                state.refresh()
            result = make()
            self._job.push_optimizer(self._optimizer)
            return result

    def push_changed(self) -> None:
        """Send what was changed in place, in tensors or entries that were read. Raises `InvalidArgumentError` where
        functions have run since."""
        state = _remote_state(self._optimizer)
        if not state.is_changed():
            return
        if self.is_at_rest():
            self._job.push_optimizer(self._optimizer)
            return
        self.read_at = None
        state.note()
        raise InvalidArgumentError(
            f"the state of {type(self._optimizer).__name__} was changed on the coordinator, in tensors that had been "
            "read before functions ran which may have changed it since. What was written is given up. Call "
            "coordinator.join(), take optimizer.state[parameter] anew, and change that."
        )


def _remote_state(optimizer: Optimizer) -> RemoteOptimizerState:
    state: object = optimizer.state
    assert isinstance(state, RemoteOptimizerState)
    return state


class CoordinatorSteps:
    """Looks at steps that the program makes on the coordinator, and at gradients that it looks for there, until the
    job is closed."""

    def __init__(self, job: _Job) -> None:
        self._job: _Job = weakref.proxy(job)
        self._asked, self._has_warned = 0, False
        check, look = weakref.WeakMethod(self._check), weakref.WeakMethod(self._look_for_gradient)

        def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
            if (method := check()) is not None:
                method(optimizer)

        def gradient_wanted(parameter: object) -> None:
            if (method := look()) is not None:
                method(parameter)

        steps, gradients = register_optimizer_step_pre_hook(before_step), tell_of_gradients(gradient_wanted)

        def close() -> None:
            steps.remove()
            gradients()

        self.close = weakref.finalize(self, close)

    def _look_for_gradient(self, parameter: object) -> None:
        """In a plain program it would be what the last backward pass has left."""
        spec = self._job.variables.spec_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if spec is None or self._has_warned:
            return
        self._asked += 1
        if self._asked & (self._asked - 1):  # it waits for functions that are half-way: seldom
            return
        if spec.number in self._job.left_gradients([spec.number]):
            self._has_warned = True
            warnings.warn(
                f"the gradient of {spec.name} was looked for, or cleared, on the coordinator, which has none; a "
                "scheduled function has left its own on a worker, where it stays. zero_grad(), clip_grad_norm_() and "
                "norms of gradients belong into the function that computes these; return what the coordinator shall "
                "see. (Further ones are not warned of.)",
                stacklevel=5,
            )

    def _check(self, optimizer: Optimizer) -> None:
        """Without any gradient here a step does nothing. In a plain program it would take what the last backward passes
        have left, and these were made by functions."""
        specs = self._job.parameters_of(optimizer)
        if not specs or any(parameter.grad is not None for parameter in specs):
            return
        numbers = [spec.number for spec in specs.values()]
        left = self._job.left_gradients(numbers)
        for found in self._job.servers.ask_all("ps.left_gradients", numbers).values():
            left |= found
        if left:
            name = next(spec.name for spec in specs.values() if spec.number in left)
            raise ContextError(
                f"{type(optimizer).__name__}.step() was called on the coordinator, where no parameter has a gradient; "
                f"scheduled functions have left that of {name} on a worker, or under no_sync on the servers. Call step "
                "in the function that computes the gradients; or clear them there (optimizer.zero_grad()), and return "
                "what the coordinator shall step with, to be set as parameter.grad."
            )


Initialiser = Callable[[torch.Tensor], object]


def grow(job: _Job, registry: VariableRegistry, weight: torch.Tensor, rows: int, init: Initialiser | None) -> None:
    """See `grow_rows`. May be repeated."""
    job.commit()
    spec = job.variables.spec_of(weight)
    if spec is None:
        raise InvalidArgumentError("grow_rows: the table is not one of this strategy's variables.")
    modules = list(_tables_of(registry, weight, spec))
    if rows < spec.shape[0]:
        raise InvalidArgumentError(
            f"grow_rows: {spec.name} has {spec.shape[0]} rows, and tables only grow; got rows={rows}."
        )
    if rows > spec.shape[0]:
        optimizers = [one for one in job.optimizers() if _steps(one, weight)]
        _require_growable(job, spec, optimizers)
        job.catalog.increments(job.catalog.version)  # what cannot be sent is an error now, before anything has changed
        new = _new_rows(job, weight, spec, rows, init)
        with job.cache.alone(f"growing {spec.name}"):
            job.cache.push_written()
            with held_back:  # or the servers would have another table than the coordinator
                _tell(job, new, weight, modules)
            for optimizer in optimizers:
                CoordinatorState.expire(optimizer)


def _tables_of(
    registry: VariableRegistry, weight: torch.Tensor, spec: VariableSpec
) -> Iterator[nn.Embedding | nn.EmbeddingBag]:
    for module in registry.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not weight:
                continue
            if name != "weight" or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                raise UnsupportedError(
                    f"grow_rows: {spec.name} is also the {name} of a {type(module).__name__}, which depends on how "
                    "many rows it has. Only weights of nn.Embedding and nn.EmbeddingBag grow."
                )
            yield module


def _steps(optimizer: Optimizer, weight: torch.Tensor) -> bool:
    return any(one is weight for group in optimizer.param_groups for one in group["params"])


def _require_growable(job: _Job, spec: VariableSpec, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        kind = job.kinds.of(optimizer)
        if not kind.may_cut_rows:
            raise UnsupportedError(
                f"grow_rows: {spec.name} is stepped by {type(optimizer).__name__}, which looks at {kind.tier.value}, "
                "so what it knows is of as many rows as there are. Step it by an elementwise optimizer, or make the "
                "larger table in a new program and restore the rest with strict=False."
            )
    if job.cache.is_shared(spec.number):
        gc.collect()
        if job.cache.is_shared(spec.number):
            raise InvalidArgumentError(
                f"grow_rows: {spec.name} cannot have more rows while something on the coordinator shows its memory: a "
                "view, .data, a state_dict() that is kept, a NumPy array. It would go on showing the old rows. Let go "
                "of it, or keep a copy: tensor.detach().clone()."
            )


def _tell(job: _Job, new: NewRows, weight: torch.Tensor, modules: Sequence[nn.Embedding | nn.EmbeddingBag]) -> None:
    """If a server is lost when that of the new rows has them, the table has grown; the others hold what they held."""
    last, first = new.spec.shards[-1].server, len(weight)
    job.servers.ask("ps.grow", {last: new})
    job.variables.grow(new.spec)
    job.catalog.describe_anew(weight)
    for module in modules:
        module.num_embeddings = new.spec.shape[0]
    others = {shard.server for shard in new.spec.shards} - {last}
    job.servers.ask("ps.grow", dict.fromkeys(others, dataclasses.replace(new, value=None)))
    job.cache.bring_new_rows(new.spec, first)


def _new_rows(job: _Job, weight: torch.Tensor, spec: VariableSpec, rows: int, init: Initialiser | None) -> NewRows:
    last = dataclasses.replace(spec.shards[-1], stop=rows)
    grown = dataclasses.replace(spec, shape=(rows, *spec.shape[1:]), shards=(*spec.shards[:-1], last))
    seed = seed_of_variable(job.seed, spec)
    shape = (rows - spec.shape[0], *spec.shape[1:])
    with DisableTorchFunctionSubclass():
        if init is None:
            return NewRows(grown, None, recipe_of_more(weight, spec.name), seed)
        if weight.is_meta:
            return NewRows(grown, None, recipe_by(init, shape, weight, spec.shape[0]), seed)
        with torch.no_grad():
            zeros = torch.zeros(shape, dtype=spec.dtype, device="cpu")
            made = init(zeros)
    value: object = zeros if made is None else made
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != spec.dtype:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidArgumentError(
            f"grow_rows: init= has to fill the new rows of {spec.name}, {spec.dtype} {shape}, or return them; got "
            f"{found}."
        )
    return NewRows(grown, value.detach().cpu().contiguous())
