"""What a hook before a forward pass derives from a module's parameters, and keeps as an attribute: ``weight`` of a
layer that `torch.nn.utils.prune` prunes, or of one with `torch.nn.utils.weight_norm`.

On the coordinator it is as old as the last forward pass there, and functions train the parameters meanwhile. In a plain
program it would be that of the last training step, which nobody has here. So who reads it is told, where the hook would
make another value now; pruning the layer once more reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from torchstrat.core._torch_private import DisableTorchFunctionSubclass
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_bytes import is_same
from torchstrat.parameter_server.variables.cached_parameter import Alias, TensorCall, let_ask

_Make = Callable[[nn.Module], torch.Tensor]


def watch(module: nn.Module, name: str) -> None:
    """Functions may change what an attribute was derived from, if it is such a one."""
    value = vars(module)[name]
    make = _maker(module, name) if type(value) is torch.Tensor else None
    if make is not None:
        let_ask(value, DerivedValue(module, name, value, make))


def _maker(module: nn.Module, name: str) -> _Make | None:
    """What makes the attribute anew, and sets nothing."""
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "_tensor_name", None) == name and hasattr(hook, "apply_mask"):
            return hook.apply_mask  # type: ignore[no-any-return]
        # Spectral norm goes one iteration further each time.
        if getattr(hook, "name", None) == name and not hasattr(hook, "n_power_iterations"):
            return getattr(hook, "compute_weight", None)
    return None


class DerivedValue:
    """A `Holder`, of the attribute itself. Pickles and deep copies have it as it is."""

    is_variable = False

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor, make: _Make) -> None:
        self._module, self._name, self._tensor = weakref.ref(module), name, weakref.ref(tensor)
        self._make = make  # pruning takes its hook away before it reads

    @property
    def shown(self) -> str:
        return f"<{self._name}, as the last forward pass on the coordinator has made it>"

    def require_value(self) -> None:
        module, tensor = self._module(), self._tensor()
        if module is None or tensor is None:
            return
        is_in_place = vars(module).get(self._name) is tensor
        if not is_in_place:
            return  # it is nobody's any more
        with torch.no_grad():
            now = self._make(module)
        with DisableTorchFunctionSubclass():
            if is_same(tensor, now):
                return
        kind = type(module).__name__
        raise UnsupportedError(
            f"{self._name} of {kind} is what the last forward pass on the coordinator has made of its parameters, and "
            f"functions have changed these since. Call the {kind}, or the model that it is in, on the coordinator "
            f"(under torch.no_grad()) before you read {self._name} or prune it again; what is trained is "
            f"{self._name}_orig (pruning) or {self._name}_g and {self._name}_v (weight_norm)."
        )

    def call(self, call: TensorCall) -> object:
        return call.run()

    def read(self, alias: Alias) -> None:
        pass
