"""Replicas of several processes each: the replica axis as everywhere, and the logical devices of a replica across it.

Along the replica axis nothing is new: `PerProcessReplica` runs this process's part of the replica, and combines
gradients, buffers and results with the same logical device of the other replicas. This adds what happens within a
replica: equal variables and equal input on all logical devices, and pieces of what is cut.

``state_dict()`` of modules and optimizers with variables that are cut: whole, and the same in every layout.

Putting a variable together involves all logical devices of the replica, so all processes have to call ``state_dict()``
and ``load_state_dict()``, as they do `Checkpoint.save` and ``restore``, which call these. The whole variables of one
module at a time are in memory then.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from torchstrat.core import context, nest
from torchstrat.core._torch_private import (
    hooks_after_module_state,
    own_parameters,
    sparse_indices,
    sparse_values,
)
from torchstrat.core.context import StrategyLike
from torchstrat.core.devices import torch_device
from torchstrat.core.engine import Communicator, InputLayout
from torchstrat.core.errors import ContextError, ReplicaDivergenceError
from torchstrat.core.memory import Copies
from torchstrat.core.randomness import state_of
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import PerReplica
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.agreement import INPUT, SumsInPlace, agree, all_equal, code, fingerprint
from torchstrat.distributed.collectives.process_group import abandon
from torchstrat.distributed.collectives.shared_memory.neighbours import NotNeighboursError
from torchstrat.distributed.collectives.shm import SharedMemoryCommunicator, choose_communicator
from torchstrat.replicas.engine import adoption_warning
from torchstrat.replicas.per_process.engine import PerProcessReplica
from torchstrat.sharding.annotations import Assignments, ShardingRules
from torchstrat.sharding.dtensor import operators as _operators  # noqa: F401  # loaded before a step needs it
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, as_given, recut, whole
from torchstrat.sharding.dtensor.devices import LogicalAxes, LogicalDevices, SameCalls, Traffic, make_groups, make_mesh
from torchstrat.sharding.dtensor.no_values import NOTE
from torchstrat.sharding.dtensor.operators import with_stand_ins
from torchstrat.sharding.dtensor.operators.data_attribute import both_are_asked
from torchstrat.sharding.dtensor.optimizer_state import has_dims
from torchstrat.sharding.dtensor.parameters import CutVariables
from torchstrat.sharding.dtensor.replica_axis import Alone, FirstOfReplica, Forwarding, OwnColumn, OwnColumnInPlace
from torchstrat.sharding.dtensor.step import StepSurroundings, step_pieces
from torchstrat.sharding.grid import DeviceGrid, ShardedEntry, Sharding


def hook_modules(modules: Iterator[nn.Module], variables: CutVariables) -> None:
    if not len(variables):
        return
    for module in modules:
        if not _is_hooked(module, variables) and _cut_members(module, variables):
            states = _OfModule(variables)
            module.register_state_dict_post_hook(_PutTogether(variables))
            module.register_load_state_dict_pre_hook(states.take_apart)


def _is_hooked(module: nn.Module, variables: CutVariables) -> bool:
    """Asked is the module itself: a deep copy has the hooks, and nobody was told of it."""
    hooks = hooks_after_module_state(module).values()
    return any(isinstance(hook, _PutTogether) and hook.belongs_to(variables) for hook in hooks)


def _cut_members(module: nn.Module, variables: CutVariables) -> dict[str, torch.Tensor]:
    return {
        name: parameter
        for name, parameter in own_parameters(module).items()
        if parameter is not None and variables.find(parameter) is not None
    }


class _Hooks:
    """A deep copy of a module has the same hooks, which find its variables if these are copies that are cut."""

    def __init__(self, variables: CutVariables) -> None:
        self._variables = variables

    def __deepcopy__(self, memo: object) -> _Hooks:
        return self

    def belongs_to(self, variables: CutVariables) -> bool:
        return self._variables is variables


class _PutTogether(_Hooks):
    """An object of its own: torch writes on it that it was registered."""

    def __call__(self, module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        if self._variables.is_inside:
            raise ContextError("state_dict() of a module whose parameters are cut was called in run; call it outside.")
        for name, parameter in _cut_members(module, self._variables).items():
            if state.get(prefix + name) is parameter:  # keep_vars=True: the parameter itself, for who knows it by that
                continue
            state[prefix + name] = self._variables.whole_copy(parameter)


class _OfModule(_Hooks):
    def take_apart(
        self, module: nn.Module, state: dict[str, object], prefix: str, metadata: dict[str, object], *_: object
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ContextError(
                f"load_state_dict(…, assign=True) of a {type(module).__name__} whose parameters are cut over logical "
                "devices would put whole tensors in their place; leave assign out: their values are taken in pieces."
            )
        for name, parameter in _cut_members(module, self._variables).items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                self._variables.load(parameter, value)
                state[prefix + name] = parameter.detach()  # which changes nothing when it is written to the parameter


def hook_optimizer(optimizer: torch.optim.Optimizer, variables: CutVariables) -> None:
    states = _OfOptimizer(variables)
    optimizer.register_state_dict_post_hook(states.put_together)
    optimizer.register_load_state_dict_pre_hook(states.keep)
    optimizer.register_load_state_dict_post_hook(states.take_apart)
    states.adopt(optimizer)


class _OfOptimizer(_Hooks):
    def __init__(self, variables: CutVariables) -> None:
        super().__init__(variables)
        self._kept: dict[int, dict[str, Any]] = {}

    def put_together(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        found = dict(state["state"])
        for number, parameter in enumerate(parameters):
            if self._variables.find(parameter) is not None and number in found:
                entries = found[number]
                found[number] = {name: self._variables.whole_state(value) for name, value in entries.items()}
        return {**state, "state": found}

    def keep(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer would move entries of the parameter's shape to where it sees its parameters: nowhere. It is
        given the others, some of which every parameter has in the state of some classes (a count of steps)."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        given = dict(state["state"])
        self._kept = {place: given[number] for place, number in enumerate(numbers) if number in given}
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=False):  # PyTorch refuses other lengths
            if self._variables.find(parameter) is not None and number in given:
                given[number] = {name: one for name, one in given[number].items() if not has_dims(one)}
        return {**state, "state": given}

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """What it was given before anybody knew of it, made outside of scopes, is as if it were loaded now."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        given = {number: optimizer.state.get(one) for number, one in enumerate(parameters)}
        self._kept = {number: entries for number, entries in given.items() if isinstance(entries, dict) and entries}
        self.take_apart(optimizer)

    def take_apart(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        kept, self._kept = self._kept, {}
        for number, parameter in enumerate(parameters):
            if self._variables.find(parameter) is None or number not in kept:
                continue
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = {
                name: self._variables.cut_state(parameter, value) if has_dims(value) else loaded.get(name, value)
                for name, value in kept[number].items()
            }


RUN = "run (all logical devices of a replica get the same input)"
_LOOKED_AT_BYTES = 1 << 14


class LogicalReplicas(PerProcessReplica):
    """This process's part of one replica: along the replica axis, a replica in a process of its own.

    Args:
        everyone: all processes of the job, ``replica * L + logical device``.
        column: those that are the same logical device of the other replicas.
        devices: those of this replica.
    """

    _has_step_context = True

    def __init__(
        self,
        strategy: StrategyLike,
        everyone: Communicator,
        column: Communicator,
        devices: LogicalDevices,
        device: str,
        gradient_op: ReduceOp,
        rules: ShardingRules | None,
        *,
        communication: str,
    ) -> None:
        self._everyone, self.devices = everyone, devices
        self._names = [str(name) for name in everyone.all_gather_object(device, "the names of devices")]
        super().__init__(strategy, column, device, gradient_op, central=False, communication=communication)
        self.variables = CutVariables(self.registry, devices, None if rules is None else rules.sharding_for)
        self._unchecked_rules = rules
        self._surroundings = StepSurroundings(self.registry, self.variables)
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.assign = Assignments(
            "all logical devices of a replica run the same program, and a tensor cannot be kept to one of them"
        ).assign
        self._while_cut, self._is_asking = ExitStack(), False
        """Between runs, too: the program has what a step has kept, and the state of optimizers."""
        self._drawn = 0.0  # tells where the replica's random numbers were when the last step ended

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        return self._everyone.rank == 0

    @property
    def everyone(self) -> Communicator | None:
        return None if self._is_closed else self._everyone

    @property
    def layout(self) -> InputLayout:
        agree(self._everyone, INPUT)
        (replica,) = self.local_replicas
        return InputLayout(
            num_replicas=self.num_replicas,
            local_replicas=self.local_replicas,
            devices=(self.devices.device,),
            num_workers=self.num_replicas,
            worker_index=replica,
            always_wrap=True,
            communicator=FirstOfReplica(self._everyone.split(), self.devices.axes.num_logical_devices),
        )

    def copies(self) -> list[Copies]:
        """Of what is not cut; what is cut takes less."""
        return [copies for copies in super().copies() for _ in range(self.devices.axes.num_logical_devices)]

    # -- scope ------------------------------------------------------------------------------------------------------

    def scope_closed(self, *, failed: bool = False) -> None:
        if failed:
            super().scope_closed(failed=True)
            return
        with ExitStack() as stack:
            try:
                self.variables.draw()
                stack.enter_context(self.variables.inside())
            except BaseException:
                super().scope_closed(failed=True)
                raise
            super().scope_closed()
        self._take()

    def check_replicas(self, when: str) -> None:
        with self.variables.inside():
            super().check_replicas(when)

    def close(self) -> None:
        self._while_cut.close()
        super().close()

    def _take(self) -> None:
        self.variables.take()
        if len(self.variables) and not self._is_asking:
            self._is_asking = True
            self._while_cut.enter_context(both_are_asked())
        hook_modules(self.registry.modules(), self.variables)
        for optimizer in self.registry.optimizers():
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                continue  # a wrapper that does without PyTorch's constructor: its step will be refused by name
            if optimizer not in self._hooked and self.variables.cut_in(optimizer):
                self._hooked.add(optimizer)
                hook_optimizer(optimizer, self.variables)
                step_pieces(optimizer, self.variables)

    # -- run --------------------------------------------------------------------------------------------------------

    def _run(self, fn: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]) -> Any:
        leaves = nest.flatten((args, kwargs)) if args or kwargs else []
        adopted = self.registry.adopt(fn, leaves)
        if adopted:
            warnings.warn(adoption_warning(adopted, self._strategy), stacklevel=5)
        self._take()
        if self._unchecked_rules is not None:
            self._unchecked_rules.require_all_used()
            self._unchecked_rules = None
        self._surroundings.check_optimizers()
        self._require_alike(leaves)
        with self.variables.inside():
            result = super()._run(fn, args, kwargs)
        return nest.map_by_keys(_put_together, result)

    def _require_alike(self, leaves: Sequence[object]) -> None:
        """A batch, or a random number, that differs between logical devices would make every sum over them wrong, and
        nothing would tell. Looked at is the beginning of each tensor: other rows differ there too."""
        own = [value for leaf in leaves for value in (leaf.values if isinstance(leaf, PerReplica) else (leaf,))]
        looked_at = [_looked_at(one) for one in own if isinstance(one, torch.Tensor | np.ndarray | np.generic)]
        parts = [one.detach() for _, found in looked_at for one in found]
        heads = [one.reshape(-1)[: _LOOKED_AT_BYTES // one.element_size()] for one in parts]
        shapes = code(repr([shape for shape, _ in looked_at]))
        seed = code(str(torch.initial_seed()))
        rows = agree(self.devices.everyone, RUN, (seed, self._drawn, shapes, *fingerprint(heads)))
        if not all_equal([row[1:2] for row in rows]):
            raise ReplicaDivergenceError(
                "the logical devices of this replica have drawn different random numbers in the last run; all "
                "processes of a replica have to run the same program, and to draw as often."
            )
        if not all_equal([row[2:] for row in rows]):
            raise ReplicaDivergenceError(
                "run got other arguments on other logical devices of this replica; all processes of a replica have to "
                "pass equal ones. strategy.distribute_dataset gives them equal batches; what a program draws or reads "
                "for itself it has to make equal."
            )
        if not all_equal([row[:1] for row in rows]):
            # PyTorch seeds each process differently where the program does not.
            state = self.devices.everyone.broadcast_object(state_of(), 0, RUN)
            torch.set_rng_state(state)

    @contextmanager
    def _around_step(self) -> Iterator[None]:
        calls = self.devices.calls
        with self._surroundings(), nullcontext() if calls is None else calls.step():
            yield
        self._drawn = fingerprint([state_of()])[0]

    # -- annotations ------------------------------------------------------------------------------------------------

    def cut(self, tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        """``tensor`` of this replica, cut over its logical devices, and its gradient with it. A variable outside of a
        step is cut for good."""
        in_step = context.get_replica_context() is not None and context.get_strategy() is self._strategy
        if in_step or isinstance(tensor, CutTensor):
            return as_given(recut(with_stand_ins(tensor), self.devices, self.devices.axes.cut_of(sharding)))
        if not self.variables.is_variable(tensor):
            raise ContextError(
                f"a tensor of shape {tuple(tensor.shape)} was to be cut over logical devices outside of run, where "
                "only parameters of the strategy can be; annotate it in the function that strategy.run calls."
            )
        self.variables.plan(tensor, sharding)
        return tensor

    def entry_of(self, tensor: torch.Tensor) -> ShardedEntry:
        """How a tensor is cut, for `explain_sharding`. What nobody cut is whole."""
        shape = tuple(tensor.shape)
        if isinstance(tensor, CutTensor):
            return ShardedEntry(shape, self.devices.axes.sharding_of(tensor.cut, len(shape)), tensor.dtype)
        if self.variables.is_variable(tensor):
            entry = self.variables.find(tensor)
            return ShardedEntry(shape if entry is None else entry.shape, self.variables.planned(tensor), tensor.dtype)
        return ShardedEntry(shape, Sharding.replicated(len(shape), self.devices.axes.num_logical_devices), tensor.dtype)

    @property
    def traffic(self) -> Traffic:
        return self.devices.traffic

    def grid(self) -> tuple[DeviceGrid, list[str]]:
        """The processes by their ranks, and what they are called."""
        logical = self.devices.axes.num_logical_devices
        rows = [tuple(range(first, first + logical)) for first in range(0, self._everyone.size, logical)]
        return DeviceGrid(tuple(rows)), [f"rank {rank} ({name})" for rank, name in enumerate(self._names)]

    # -- replica context -------------------------------------------------------------------------------------------

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        return super().all_reduce(op, nest.map_by_keys(_whole, value))

    def all_gather(self, value: object, axis: int) -> Any:
        return super().all_gather(nest.map_by_keys(_whole, value), axis)

    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        whole_args, whole_kwargs = nest.map_by_keys(_whole, list(args)), nest.map_by_keys(_whole, kwargs)
        return super().merge_call(fn, tuple(whole_args), whole_kwargs)


def _looked_at(value: object) -> tuple[object, list[torch.Tensor]]:
    """The shape of a tensor or an array, and dense tensors that differ where it does; none of what is cut, of which
    each process has another piece."""
    if not isinstance(value, torch.Tensor):
        array = np.asarray(value)
        return array.shape, [_bytes_of(array)]
    if isinstance(value, CutTensor) or NOTE in vars(value):
        return tuple(value.shape), []
    if value.is_nested:
        rows = value.unbind()
        return [tuple(row.shape) for row in rows], [*rows]
    if value.layout == torch.sparse_coo:
        return tuple(value.shape), [sparse_indices(value), sparse_values(value)]
    return tuple(value.shape), [value if value.layout == torch.strided else value.to_dense()]


def _bytes_of(array: NDArray[np.generic]) -> torch.Tensor:
    """Those of the beginning of an array; of objects, what strings among them say."""
    head = array.flat[: _LOOKED_AT_BYTES // max(1, array.itemsize)]
    if array.dtype.hasobject:
        found = "".join([ascii(one) for one in head if isinstance(one, str | bytes)]).encode()
    else:
        found = head.tobytes()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, device="cpu")


def _whole(leaf: object) -> Any:
    """What the other replicas see of something in a step."""
    return whole(with_stand_ins(leaf)) if isinstance(leaf, torch.Tensor) else leaf


def _put_together(leaf: object) -> object:
    """What a step returns is whole."""
    if not isinstance(leaf, PerReplica) or not any(isinstance(value, CutTensor) for value in leaf.values):
        return leaf
    return PerReplica(tuple(map(whole, leaf.values)), replica_ids=leaf.replica_ids, weights=leaf.weights)


def replicas_of_processes(
    strategy: StrategyLike,
    plan: ProcessPlan,
    device: str,
    op: ReduceOp,
    timeout: timedelta,
    *,
    collectives: str,
    mesh_shape: Sequence[int],
    rules: ShardingRules | None,
) -> LogicalReplicas:
    """Every process of the job calls it; ``plan.size`` is a multiple of the logical devices."""
    axes = LogicalAxes(mesh_shape)
    logical = axes.num_logical_devices
    replicas, own = plan.size // logical, plan.rank % logical
    everyone, why = choose_communicator(plan, device, timeout, collectives)
    groups = _Groups(everyone)
    try:
        columns = [groups.of(tuple(range(start, plan.size, logical))) for start in range(logical)]
        within = make_groups(axes, replicas, plan.rank, groups.of)
        mesh = make_mesh(axes, replicas, device)
        column = groups.fastest(columns[own])
        of_column = OwnColumnInPlace if isinstance(column, SumsInPlace) else OwnColumn
        devices = LogicalDevices(
            axes,
            mesh,
            own,
            {chosen: groups.fastest(group) for chosen, group in within.items()},
            torch_device(device),
            groups.same_calls(replicas, plan.rank // logical, logical),
        )
        made = [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]

        return LogicalReplicas(
            strategy,
            everyone,
            of_column(column, _Closing(everyone, groups, made), logical),
            devices,
            device,
            op,
            rules,
            communication=f"{why}; {logical} logical devices in each replica",
        )
    except BaseException:
        groups.close()
        everyone.close()
        raise


class _Groups:
    """The parts of a job that talk among themselves, each made once."""

    def __init__(self, everyone: Communicator) -> None:
        self._everyone = everyone
        self._quick: list[SharedMemoryCommunicator] = []
        self._fastest: dict[tuple[int, ...], Communicator] = {}

    def of(self, ranks: tuple[int, ...]) -> Communicator:
        """Every process of the job calls it."""
        if len(ranks) == 1:
            return Alone(ranks[0], self._everyone.timeout)
        return self._everyone.subgroup(ranks)

    def same_calls(self, replicas: int, own: int, logical: int) -> SameCalls | None:
        """Of the processes of replica ``own``; None where all talk in shared memory, which compares calls by itself.
        Every process of the job calls it."""
        if logical == 1 or isinstance(self._everyone, SharedMemoryCommunicator):
            return None
        channels = self._everyone.split()
        of_replicas = [
            channels.subgroup(tuple(range(replica * logical, (replica + 1) * logical))) for replica in range(replicas)
        ]
        return SameCalls(of_replicas[own])

    def fastest(self, group: Communicator) -> Communicator:
        """In shared memory, where the job is. The group's own processes call it."""
        if isinstance(group, Alone) or not isinstance(self._everyone, SharedMemoryCommunicator):
            return group
        if group.ranks not in self._fastest:
            try:
                quick = SharedMemoryCommunicator(_Borrowed(group))  # type: ignore[arg-type]
            except NotNeighboursError:
                return group
            self._quick.append(quick)
            self._fastest[group.ranks] = quick
        return self._fastest[group.ranks]

    def close(self) -> None:
        while self._quick:
            self._quick.pop().close()


class _Borrowed:
    """A group that outlives who uses it."""

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self._group, name)
        return found

    def close(self) -> None: ...


class _Closing(Forwarding):
    """All processes of the job; closing them closes what was made of them."""

    def __init__(self, everyone: Communicator, groups: _Groups, made: list[dist.ProcessGroup]) -> None:
        """``made``: groups of torch's own."""
        super().__init__(everyone)
        self._groups = groups
        self._abandon = weakref.finalize(self, abandon, made)
        self._abandon.atexit = False

    def close(self) -> None:
        self._groups.close()
        self._abandon()
        super().close()
