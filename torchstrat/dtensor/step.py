"""What a step runs in: modules with `CutTensor`s where parameters are cut, and optimizers that step pieces."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchstrat._torch_private import DisableTorchFunction
from torchstrat.dtensor.cut_tensor import CutTensor
from torchstrat.dtensor.parameters import CutVariables
from torchstrat.errors import ContextError, UnsupportedError
from torchstrat.variables import VariableRegistry

ELEMENTWISE_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Those that step each element by itself, so that a piece is stepped as it would be within the whole."""


class _StandingIn(TorchFunctionMode):
    """A variable that a step uses directly, and not as the member of a module, is its stand-in too."""

    def __init__(self, stand_ins: dict[int, CutTensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args = [self._seen(one) for one in args]
        return func(*args, **{name: self._seen(one) for name, one in kwargs.items()}) if kwargs else func(*args)

    def _seen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_ins.get(id(value), value)
        is_plain = type(value) is list or type(value) is tuple
        if is_plain and any(id(one) in self._stand_ins for one in value):
            return type(value)(self._seen(one) for one in value)
        return value


class StepSurroundings:
    """``with surroundings():`` around the step function of a run, inside of `CutVariables.inside`."""

    def __init__(self, registry: VariableRegistry, variables: CutVariables) -> None:
        self._registry, self._variables = registry, variables

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not len(self._variables):
            yield
            return
        stand_ins = self._variables.stand_ins()
        with ExitStack() as stack:
            for optimizer in self._registry.optimizers():
                if self._variables.cut_in(optimizer):
                    stack.enter_context(_on_pieces(optimizer))
            stack.enter_context(_in_modules(self._registry.modules(), stand_ins))
            stack.enter_context(_StandingIn(stand_ins))
            yield

    def check_optimizers(self) -> None:
        """Raise `UnsupportedError` for an optimizer that is not known to step pieces right."""
        for optimizer in self._registry.optimizers():
            if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
                continue
            cut = self._variables.cut_in(optimizer)
            if cut:
                known = ", ".join(kind.__name__ for kind in ELEMENTWISE_OPTIMIZERS)
                raise UnsupportedError(
                    f"{type(optimizer).__name__} steps {len(cut)} parameters that are cut over logical devices, and "
                    f"only of {known} is it known that they step each element by itself. Give the others an optimizer "
                    "of their own, or leave these parameters whole (no sharding rule, no annotation)."
                )


@contextmanager
def _in_modules(modules: Iterator[nn.Module], stand_ins: dict[int, CutTensor]) -> Iterator[None]:
    replaced: list[tuple[nn.Module, str, nn.Parameter, CutTensor]] = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in stand_ins:
                replaced.append((module, name, parameter, stand_ins[id(parameter)]))
    try:
        for module, name, _, stand_in in replaced:
            module._parameters[name] = stand_in  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter, stand_in in replaced:
            now: Any = module._parameters.get(name)
            if now is stand_in:  # else the step has replaced it
                module._parameters[name] = parameter


@contextmanager
def _on_pieces(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Its methods see the pieces and not the stand-ins."""
    before = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
    for name in before:
        setattr(optimizer, name, _bound(optimizer, getattr(optimizer, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, method)


def _bound(optimizer: torch.optim.Optimizer, method: Any) -> Any:
    """A bound method: that is what learning rate schedulers wrap."""

    def on_pieces(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(callable(one) for one in (*args, *kwargs.values())):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) with parameters that are cut over logical devices; call "
                "the closure's backward first, and step() without it."
            )
        with DisableTorchFunction():
            return method(*args, **kwargs)

    on_pieces.__dict__.update(getattr(method, "__dict__", {}))
    return types.MethodType(on_pieces, optimizer)


def refuse_steps_outside(optimizer: torch.optim.Optimizer, variables: CutVariables) -> None:
    """A hook that lasts: outside of a run there is neither a piece nor its gradient to step."""

    def check(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if not variables.is_inside and variables.cut_in(stepped):
            raise ContextError(
                f"{type(stepped).__name__}.step() was called outside of run, and has parameters that are cut over "
                "logical devices; step in the function that strategy.run calls."
            )

    optimizer.register_step_pre_hook(check)
