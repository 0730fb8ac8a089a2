"""A strategy's variables on the devices: brought there once, as the same Python objects, and cut as somebody said."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat.core._torch_private import (
    base_of,
    give_hooks,
    hooks_after_accumulation,
    hooks_on_gradient,
    own_buffers,
    own_parameters,
    swap_tensor_impl,
    untouched_by_surroundings,
    version_of,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_classes import in_place_of
from torchstrat.core.variables import VariableRegistry
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.sharding.tpu import _functorch_private as functorch
from torchstrat.sharding.tpu.edits import require_whole
from torchstrat.sharding.tpu.lanes import KeptTensor
from torchstrat.sharding.tpu.spmd import SpmdRuntime

ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
"""From a parameter's dotted name and shape to how it is cut."""

_WHOLE = "{replicated}"
"""What a runtime calls a tensor that every device has whole."""


class ValuesBefore:
    """What a run that fails puts back, as on every strategy: buffers as before the run, parameters as after its last
    step of an optimizer.

    Copies are recorded and not computed: no program that runs has them as results. ``several``: whether there are
    several replicas; with one, nothing is put back, and what a step does to a buffer counts once.
    """

    def __init__(self, registry: VariableRegistry, *, several: bool) -> None:
        self._registry = registry
        self._variables = {id(tensor): tensor for tensor in registry.tensors()} if several else {}
        self._edited: dict[int, torch.Tensor] = {}
        with untouched_by_surroundings():
            self._buffers = [
                (slot, tensor, version_of(tensor), tensor.detach().clone())
                for slot in (registry.buffer_slots() if several else ())
                if (tensor := slot.tensor) is not None and slot.has_values and not functorch.is_batched(tensor)
            ]

    def edits(self, tensor: torch.Tensor) -> None:
        """The step is about to change ``tensor``, which may show a part of a variable."""
        key = id(tensor)
        if key not in self._variables and (base := base_of(tensor)) is not None:
            key = id(base)
        if key in self._variables and key not in self._edited and not is_lazy(self._variables[key]):
            with untouched_by_surroundings():
                self._edited[key] = self._variables[key].detach().clone()

    def stepped(self) -> None:
        """An optimizer has: what was done to parameters until then stays."""
        self._edited.clear()

    def require_buffers(self) -> None:
        """Raises `UnsupportedError` where the step has assigned a buffer that adds up what replicas do to it."""
        for slot, tensor, *_ in self._buffers:
            if slot.tensor is not tensor:
                require_whole(self._registry, slot, "it is assigned")

    def forget(self) -> None:
        """The run is over."""
        self._edited, self._buffers = {}, []

    def put_back(self) -> None:
        with untouched_by_surroundings():
            for key, value in self._edited.items():
                self._variables[key].copy_(value)
            for slot, tensor, version, value in self._buffers:
                own_buffers(slot.module)[slot.name] = tensor
                if version_of(tensor) != version:
                    tensor.copy_(value)


class DeviceVariables:
    """Parameters, buffers and optimizer state of one strategy.

    Values that users made on the host move to the devices when a scope closes, or when a step first reaches them. The
    objects stay the same: optimizers, modules and the user's own references see the tensor on the device.
    """

    def __init__(
        self, registry: VariableRegistry, runtime: SpmdRuntime, grid: DeviceGrid, sharding_of: ShardingOf | None
    ) -> None:
        self._registry, self._runtime, self._grid = registry, runtime, grid
        self._sharding_of = sharding_of
        self._shardings: dict[int, tuple[weakref.ref[torch.Tensor], Sharding]] = {}

    # -- on the devices ---------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Bring what is still on the host to the devices."""
        new = [tensor for tensor in self._registry.tensors() if not self._is_taken(tensor)]
        if any(isinstance(tensor, KeptTensor) for tensor in new):
            self._let_go_of_kept()
            new = [tensor for tensor in new if not isinstance(tensor, KeptTensor)]
        names = self._registry.outermost_names() if new and self._sharding_of is not None else {}
        for tensor in new:
            self._take_variable(tensor, names.get(id(tensor)))
        for slot in self._registry.buffer_slots():
            buffer = slot.tensor
            if buffer is not None and not is_lazy(buffer) and not self._is_taken(buffer):
                if buffer.device != self._runtime.device:
                    self._move(buffer)
                self.shard(buffer, self._replicated(buffer))
        self._take_states()

    def _let_go_of_kept(self) -> None:
        """What an earlier step has made for each replica by itself is no variable, though this step reaches it."""
        modules = [
            module
            for module in self._registry.modules()
            if any(isinstance(one, KeptTensor) for one in own_parameters(module).values())
        ]
        self._registry.let_go(modules)

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._runtime.device and self.is_known(tensor)

    def _take_variable(self, tensor: torch.Tensor, name: str | None) -> None:
        if is_lazy(tensor):
            self._take_lazy(tensor)
            return
        was_on_host = tensor.device != self._runtime.device
        if not was_on_host and not self.is_known(tensor) and self._runtime.sharding_of(tensor) not in ("", _WHOLE):
            # A deep copy of a cut variable: cut by what computes it, which no later annotation replaces.
            swap_tensor_impl(tensor, in_place_of(tensor, tensor.detach().cpu()))
            was_on_host = True
        if was_on_host:
            gradient = tensor.grad
            self._move(tensor)
            if gradient is not None:
                tensor.grad = gradient.to(self._runtime.device)
        if not self.is_known(tensor):
            cut = self._replicated(tensor)
            if name is not None and self._sharding_of is not None:
                cut = self._sharding_of(name, tuple(tensor.shape))
            self.shard(tensor, cut)
        elif was_on_host:
            self._runtime.annotate(tensor, self.sharding(tensor), self._grid)

    def _take_lazy(self, tensor: torch.Tensor) -> None:
        """A parameter without a shape yet: it will be made where it is thought to be."""
        if tensor.device != self._runtime.device:
            kind: Callable[..., torch.Tensor] = type(tensor)
            swap_tensor_impl(tensor, kind(requires_grad=tensor.requires_grad, device=self._runtime.device))

    def _move(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            raise UnsupportedError(
                f"a variable of layout {tensor.layout} and shape {tuple(tensor.shape)} cannot live on this strategy's "
                "devices; use a dense one."
            )
        # Hooks belong to what a tensor object stands for, and would stay with the value that is left behind.
        hooks = hooks_on_gradient(tensor), hooks_after_accumulation(tensor)
        swap_tensor_impl(tensor, in_place_of(tensor, tensor.detach().to(self._runtime.device)))
        give_hooks(tensor, *hooks)

    def _take_states(self) -> None:
        """Optimizer state that was made on the host, as Adagrad's is. Counts of steps are numbers of the host, and so
        is what an optimizer keeps under a name and not for a parameter (``state["k"] = torch.tensor([0])``).
        """
        for optimizer in self._registry.optimizers():
            for state in optimizer.state.values():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.ndim and value.device != self._runtime.device:
                        state[key] = value.to(self._runtime.device)

    # -- how they are cut -------------------------------------------------------------------------------------------

    def _replicated(self, tensor: torch.Tensor) -> Sharding:
        return Sharding.replicated(tensor.ndim, self._grid.num_logical_devices)

    def shard(self, tensor: torch.Tensor, sharding: Sharding) -> None:
        """Cut a variable, now and for as long as it lives; its optimizer state follows."""
        key, known = id(tensor), self._shardings

        def forget(reference: object) -> None:
            if key in known and known[key][0] is reference:
                del known[key]

        before = known.get(key)
        known[key] = (weakref.ref(tensor, forget), sharding)
        if tensor.device != self._runtime.device:
            return  # still in its scope; `take` brings it to the devices, and says then
        if before is None or before[0]() is not tensor or before[1] != sharding:
            self._runtime.annotate(tensor, sharding, self._grid)

    def sharding(self, tensor: torch.Tensor) -> Sharding:
        """How a variable is cut; whole on every device unless somebody said otherwise."""
        entry = self._shardings.get(id(tensor))
        return self._replicated(tensor) if entry is None or entry[0]() is not tensor else entry[1]

    def planned(self, tensor: torch.Tensor) -> Sharding:
        """How a variable is cut, or will be when its scope closes."""
        name = self._registry.outermost_names().get(id(tensor)) if self._sharding_of is not None else None
        if self.is_known(tensor) or name is None or self._sharding_of is None:
            return self.sharding(tensor)
        return self._sharding_of(name, tuple(tensor.shape))

    def is_variable(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of the strategy's, also while its scope is still open."""
        if self.is_known(tensor) or isinstance(tensor, nn.Parameter) or tensor in self._registry:
            return True
        return any(slot.tensor is tensor for slot in self._registry.buffer_slots())

    def is_known(self, tensor: torch.Tensor) -> bool:
        entry = self._shardings.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def keep_shardings(self) -> None:
        """Before a recorded step runs: cut what it has newly made as its variable is; the rest stays as it is.

        Otherwise the compiler would choose, and spread over the devices what was to be whole on each.
        """
        for slot in self._registry.buffer_slots():
            buffer = slot.tensor
            if buffer is not None and buffer.device == self._runtime.device and not self.is_known(buffer):
                self.shard(buffer, self._replicated(buffer))
        for tensor, sharding in self._states():
            if not self.is_known(tensor) or self.sharding(tensor) != sharding:
                self.shard(tensor, sharding)

    def _states(self) -> Iterator[tuple[torch.Tensor, Sharding]]:
        for optimizer in self._registry.optimizers():
            for parameter, state in optimizer.state.items():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.device == self._runtime.device:
                        same = isinstance(parameter, torch.Tensor) and value.shape == parameter.shape
                        yield value, self.sharding(parameter) if same else self._replicated(value)
