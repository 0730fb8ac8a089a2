"""What a strategy takes care of: modules, leaf tensors, optimizers and helpers made in its scope or reached by a step.

Registration hooks alone see only part of a model (deep copies and bare parameters register nothing), so three sources
are joined: hooks that last while a scope is open, the constructors of optimizers, schedulers and gradient scalers in
that time, and a walk over what the step function can reach. Everything is held weakly: a model that the user drops is
forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer

from torchstrat.reachable import HELPER_TYPES, Reached, reach


@dataclass(frozen=True)
class BufferSlot:
    """One entry of a module's buffers. The entry, not the tensor: modules may replace the tensor by assignment."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)


class _WeakOrdered:
    """Objects in order of arrival, compared by identity (tensors and modules define ``==`` otherwise), held weakly."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._numbers: dict[int, int] = {}
        self.count = 0
        """How many have ever been added."""

    def add(self, value: Any) -> bool:
        """Whether ``value`` is new."""
        key = id(value)
        if key in self._references:
            return False
        references, numbers = self._references, self._numbers

        def forget(_: Any) -> None:
            references.pop(key, None)
            numbers.pop(key, None)

        self._references[key] = weakref.ref(value, forget)
        self._numbers[key] = self.count
        self.count += 1
        return True

    def number_of(self, value: Any) -> int:
        return self._numbers.get(id(value), -1)

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """With the number that each got when it was added. Numbers are never used again, so they are equal on all
        processes of an SPMD program, even where one of them has not yet collected an object that another has."""
        for value in self:
            yield self._numbers[id(value)], value

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._references

    def __iter__(self) -> Iterator[Any]:
        for reference in list(self._references.values()):
            value = reference()
            if value is not None:
                yield value


class VariableRegistry:
    """The variables of one strategy, in order of creation (the same order on every process of an SPMD program)."""

    def __init__(self) -> None:
        self._modules = _WeakOrdered()
        self._tensors = _WeakOrdered()
        self._helpers = _WeakOrdered()
        self._open = 0
        self._undo: list[Callable[[], None]] = []
        self._walked: dict[Any, tuple[int, ...]] = {}
        self.on_parameter: Callable[[nn.Module, torch.Tensor], None] | None = None
        """Called for every parameter registered in a module while recording. Set by the engine during a run."""

    # -- while a scope is open --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start recording what is created. Nested calls count; hooks and wraps exist once and go with the last one."""
        self._open += 1
        if self._open == 1:
            self._install()

    def close(self) -> None:
        self._open -= 1
        if self._open == 0:
            while self._undo:
                self._undo.pop()()
            for module in list(self._modules):
                self._add_tree(module)

    def _install(self) -> None:
        def on_member(module: nn.Module, name: str, member: Any) -> None:
            self._modules.add(module)
            if self.on_parameter is not None and isinstance(member, torch.Tensor) and member.requires_grad:
                self.on_parameter(module, member)

        for register in (
            module_hooks.register_module_parameter_registration_hook,
            module_hooks.register_module_buffer_registration_hook,
            module_hooks.register_module_module_registration_hook,
        ):
            self._undo.append(register(on_member).remove)
        self._wrap(nn.Module, "__setstate__", self._modules.add)  # what copy.deepcopy and unpickling call
        for helper_type in HELPER_TYPES:
            self._wrap(helper_type, "__init__", self._helpers.add)

    def _wrap(self, owner: type, name: str, record: Callable[[Any], Any]) -> None:
        original = vars(owner).get(name)
        if original is None:
            return

        def wrapped(instance: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(instance, *args, **kwargs)
            record(instance)
            return result

        wrapped.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)
        self._undo.append(lambda: _unwrap(owner, name, wrapped, original))

    # -- at each run ------------------------------------------------------------------------------------------------

    def adopt(self, fn: Callable[..., Any], arguments: Iterable[Any]) -> list[str]:
        """Record what a step reaches. Returns descriptions of the trainable state among it that no scope had seen."""
        reached, signature = reach(fn, arguments)
        key = getattr(fn, "__code__", None) or type(fn)
        if signature is not None and self._walked.get(key) == signature:
            return []
        found: Reached = reached()
        adopted: list[str] = []
        for helper in found.helpers:
            self._helpers.add(helper)
        owned = {id(tensor) for tensor in self._optimizer_tensors()}
        for module in found.modules:
            is_new = module not in self._modules
            self._add_tree(module)
            if is_new and not self._open and _is_trainable(module):
                adopted.append(f"a {type(module).__name__}")
        members = {id(tensor) for module in self._modules for tensor in module._parameters.values()}
        for tensor in found.tensors:
            if id(tensor) in members:
                continue
            if self._tensors.add(tensor) and not self._open and id(tensor) not in owned:
                adopted.append(f"a leaf tensor of shape {tuple(tensor.shape)}")
        if signature is not None:
            self._walked[key] = signature
        return adopted

    def _add_tree(self, module: nn.Module) -> None:
        self._modules.add(module)
        for child in module._modules.values():
            if child is not None:
                self._add_tree(child)

    # -- what there is ----------------------------------------------------------------------------------------------

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return value in self._modules
        return any(value is tensor for tensor in self.tensors()) or any(
            value is slot.tensor for slot in self.buffer_slots()
        )

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def tensors(self) -> list[torch.Tensor]:
        """Parameters of the modules, leaf tensors, and what optimizers hold; each once. Looked up anew at every call,
        since parameters may be replaced (``load_state_dict(assign=True)``, ``.to()``, pruning)."""
        found: dict[int, torch.Tensor] = {}
        for _, _, _, tensor in self._members():
            found.setdefault(id(tensor), tensor)
        return list(found.values())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """`tensors`, by names that are the same on every process of an SPMD program."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, kind, number, tensor in self._members():
            if id(tensor) not in found:
                found[id(tensor)] = (f"{name} of {kind} {number}", tensor)
        return dict(found.values())

    def _members(self) -> Iterator[tuple[Any, str, int, torch.Tensor]]:
        for number, module in self._modules.numbered():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield name, "module", number, parameter
        for number, tensor in self._tensors.numbered():
            yield "value", "tensor", number, tensor
        for number, helper in self._helpers.numbered():
            for place, tensor in enumerate(_tensors_of(helper)):
                yield place, "optimizer", number, tensor

    def buffer_slots(self) -> list[BufferSlot]:
        return list(self.named_buffer_slots().values())

    def named_buffer_slots(self) -> dict[str, BufferSlot]:
        """`buffer_slots`, named as in `named_tensors`."""
        return {
            f"{name} of module {number}": BufferSlot(module, name)
            for number, module in self._modules.numbered()
            for name in module._buffers
        }

    def number_of(self, module: nn.Module) -> int:
        """The number that `named_tensors` gives a module; -1 for one that is not recorded."""
        return self._modules.number_of(module)

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many modules, tensors and helpers have ever been recorded: what the next ones' numbers follow from."""
        return self._modules.count, self._tensors.count, self._helpers.count

    def catch_up_with(self, counts: tuple[int, int, int]) -> None:
        """Go on numbering where another process is, which ran a step that this one did not."""
        for ordered, count in zip((self._modules, self._tensors, self._helpers), counts, strict=True):
            ordered.count = max(ordered.count, count)

    def helpers(self) -> list[Any]:
        """Optimizers, schedulers and gradient scalers."""
        return list(self._helpers)

    def optimizers(self) -> list[Optimizer]:
        return [helper for helper in self._helpers if isinstance(helper, Optimizer)]

    def add_helper(self, helper: Any) -> None:
        self._helpers.add(helper)

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for helper in self._helpers:
            yield from _tensors_of(helper)

    def describe(self, tensor: torch.Tensor) -> str:
        """A name for error messages: the owning module's class, the parameter's name and shape."""
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is tensor:
                    return f"{type(module).__name__}.{name} {tuple(tensor.shape)}"
        return f"tensor {tuple(tensor.shape)}"


def _unwrap(owner: type, name: str, wrapped: Any, original: Any) -> None:
    # Someone may have wrapped the method again in the meantime; theirs then keeps calling ours, which stays harmless.
    if vars(owner).get(name) is wrapped:
        setattr(owner, name, original)


def _tensors_of(helper: Any) -> Iterator[torch.Tensor]:
    if isinstance(helper, Optimizer):
        for group in getattr(helper, "param_groups", ()):
            yield from group["params"]


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
