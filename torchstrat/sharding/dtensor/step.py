"""What a step runs in: parameters that are `CutTensor`s where they are cut, and optimizers that step pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

from torchstrat.core._torch_private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    clipping_hooks,
    hooks_after_step,
    hooks_before_step,
    optimizer_post_hooks,
    optimizer_pre_hooks,
    raise_on_data_pointer,
    uncompiled,
)
from torchstrat.core.errors import ContextError, UnsupportedError
from torchstrat.core.optimizers import Tier, bare_step, names_of, stand_in_of, tier_of
from torchstrat.core.tensor_classes import plain_kind
from torchstrat.core.variables import VariableRegistry
from torchstrat.sharding.dtensor.cut_tensors import STAND_IN, CutTensor, local_of
from torchstrat.sharding.dtensor.operators import apply
from torchstrat.sharding.dtensor.operators.data_attribute import (
    require_own_memory,
    show,
    take_own_memory,
)
from torchstrat.sharding.dtensor.parameters import CutVariables

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_OF_CUT_TENSORS = ("full_tensor", "to_local", "redistribute", "share_memory_", "storage_offset", "const_data_ptr")
"""Methods of `CutTensor` that are no functions of tensors, or of which PyTorch tells nobody."""


def _of_stand_in(name: str) -> Callable[..., object]:
    def method(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        found: object = getattr(getattr(self, STAND_IN), name)(*args, **kwargs)
        return found

    return method


@functools.cache
def _watched(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """``kind`` whose instances stay out of sight: what is done with one is done with its stand-in. The backend's own
    work, under `DisableTorchFunction`, sees the piece."""

    @uncompiled
    def of_stand_ins(
        cls: type,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return apply(func, types, args, kwargs or {})

    members = {
        "__module__": kind.__module__,
        "__torch_function__": classmethod(of_stand_ins),
        "__deepcopy__": lambda self, memo: getattr(self, STAND_IN).__deepcopy__(memo),  # parameters have their own
        "__reduce_ex__": lambda self, protocol: getattr(self, STAND_IN).__reduce_ex__(protocol),
        **{name: _of_stand_in(name) for name in _OF_CUT_TENSORS},
    }
    metaclass: Callable[..., type[torch.Tensor]] = type(kind)
    return metaclass(kind.__name__, (kind,), members)


@contextmanager
def _out_of_sight(stand_ins: dict[int, CutTensor]) -> Iterator[None]:
    """What a step does with a variable is done with its stand-in, also in functions of autograd, in what is computed
    again going backward, and in threads; the object is the one that modules, optimizers and tables have. For calls that
    PyTorch reports to no class (``to_dlpack``) it has no memory: they raise."""
    hidden: list[tuple[torch.Tensor, type[torch.Tensor]]] = []
    try:
        for stand_in in stand_ins.values():
            tensor = stand_in.variable
            assert tensor is not None
            hidden.append((tensor, type(tensor)))
            show(tensor, _no_memory_like(local_of(stand_in)))
            vars(tensor)[STAND_IN], tensor.__class__ = stand_in, _watched(type(tensor))
        yield
    finally:
        for tensor, kind in hidden:
            tensor.__class__ = kind
            show(tensor, local_of(vars(tensor).pop(STAND_IN)))


@functools.cache
def _no_memory(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element, whose pointer nobody gets."""
    with torch.inference_mode(False):
        made = torch.zeros((), dtype=dtype, device=device)
    raise_on_data_pointer(made)
    return made


def _no_memory_like(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        return _no_memory(tensor.dtype, tensor.device).expand(tensor.shape)


@contextmanager
def _with_memory(stand_ins: Iterable[CutTensor]) -> Iterator[None]:
    """In this block variables have their pieces, for who works on these."""
    shown = [one for one in stand_ins if not one.is_shown]
    for one in shown:
        show(one.variable, local_of(one))  # type: ignore[arg-type]
        one.is_shown = True
    try:
        yield
    finally:
        for one in shown:
            show(one.variable, _no_memory_like(local_of(one)))  # type: ignore[arg-type]
            one.is_shown = False


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
                    _require_no_hooks(optimizer)
                    stack.enter_context(_quick_zero_grad(optimizer))
            stack.callback(take_own_memory, stand_ins.values())
            stack.enter_context(_backend_sees_pieces(stand_ins))
            stack.enter_context(_out_of_sight(stand_ins))
            stack.enter_context(_named())
            yield
            require_own_memory(stand_ins.values(), "the end of the step would keep")

    def check_optimizers(self) -> None:
        """Raise `UnsupportedError` for an optimizer that is not known to step pieces right."""
        for optimizer in self._registry.optimizers():
            if tier_of(optimizer) is Tier.ELEMENTS:
                continue
            cut = self._variables.cut_in(optimizer)
            if cut:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} steps {len(cut)} parameters that are cut over logical devices, and "
                    f"only of {names_of(Tier.ELEMENTS)} is it known that they step each element by itself. "
                    "Give the others an optimizer of their own, or leave these parameters whole (no sharding rule, no "
                    "annotation)."
                )


@contextmanager
def _named() -> Iterator[None]:
    """What the compiler makes of a refusal says what was compiled, and what PyTorch says of tensors without memory, of
    what they are."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if said.startswith("Cannot access data pointer of Tensor"):
            raise UnsupportedError(
                "a call that asks no class of tensors (torch.utils.dlpack.to_dlpack, an extension in C++) was given a "
                "tensor that is cut over logical devices, of which a process has a piece only. Give it what "
                f"strategy.replicate_to_logical_devices returns. (PyTorch said: {said[:100]})"
            ) from error
        if not type(error).__module__.startswith("torch._dynamo") or "cut over logical devices" not in said:
            raise
        raise UnsupportedError(
            "torch.compile of a function that works on tensors that are cut over logical devices; call it as it is, "
            f"not compiled, or leave the parameters whole that it uses. (The compiler said: {said[:200]})"
        ) from error


@contextmanager
def _backend_sees_pieces(stand_ins: dict[int, CutTensor]) -> Iterator[None]:
    """In its hooks on all optimizers; those of the user's see stand-ins."""
    replaced = [
        (hooks, key, hook)
        for hooks in (optimizer_pre_hooks, optimizer_post_hooks)
        for key, hook in hooks.items()
        if _is_of_backend(hook)
    ]
    before_clipping = [*clipping_hooks.items()]
    try:
        for hooks, key, hook in replaced:
            hooks[key] = _on_pieces(hook, stand_ins.values())
        for key, hook in before_clipping:
            clipping_hooks[key] = _on_gradients(hook, stand_ins.values())
        yield
    finally:
        for hooks, key, hook in (*replaced, *((clipping_hooks, *one) for one in before_clipping)):
            if key in hooks:
                hooks[key] = hook


def _is_of_backend(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torchstrat.")


def _on_pieces(hook: Callable[Arguments, Result], stand_ins: Collection[CutTensor] = ()) -> Callable[Arguments, Result]:
    """``stand_ins``: of variables whose values it needs."""

    def on_pieces(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with DisableTorchFunction(), _with_memory(stand_ins):
            return hook(*args, **kwargs)

    return on_pieces


def _on_gradients(
    hook: Callable[[list[torch.Tensor]], None], stand_ins: Collection[CutTensor]
) -> Callable[[list[torch.Tensor]], None]:
    """``hook`` may put other gradients into a list, and sees those of pieces there."""

    def on_gradients(gradients: list[torch.Tensor]) -> None:
        pieces = [_piece_of_gradient(one) for one in gradients]
        given = [*pieces]
        with DisableTorchFunction(), _with_memory(stand_ins):
            hook(pieces)
            now = {id(one.variable.grad): one for one in stand_ins}  # type: ignore[union-attr]
        for place, piece in enumerate(pieces):
            if place >= len(given) or piece is not given[place]:
                of_variable = now.get(id(piece))
                seen = piece if of_variable is None else of_variable.gradient()
                assert seen is not None
                gradients[place : place + 1] = [seen]

    return on_gradients


def _piece_of_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_grad if isinstance(tensor, CutTensor) and tensor.as_grad is not None else tensor


@contextmanager
def _quick_zero_grad(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A stand-in for each gradient that is only forgotten would cost more than the rest of it."""
    zero_grad, before = optimizer.zero_grad, vars(optimizer).get("zero_grad")
    optimizer.zero_grad = _on_pieces(zero_grad)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del optimizer.zero_grad
        else:
            optimizer.zero_grad = before  # type: ignore[method-assign]


@contextmanager
def _in_sight(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Its variables are the classes they were: only of those does it step several at a time."""
    hidden = [one for group in optimizer.param_groups for one in group["params"] if STAND_IN in one.__dict__]
    kinds = [type(one) for one in hidden]
    try:
        for one, kind in zip(hidden, kinds, strict=True):
            one.__class__ = plain_kind(kind)
        with DisableTorchDispatch(), _with_memory([getattr(one, STAND_IN) for one in hidden]):
            yield
    finally:
        for one, kind in zip(hidden, kinds, strict=True):
            one.__class__ = kind


def _require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    for hook in (*hooks_before_step(optimizer).values(), *hooks_after_step(optimizer).values()):
        if not _is_of_backend(hook):
            raise UnsupportedError(
                f"{type(optimizer).__name__} has a hook on its steps, and parameters that are cut over logical "
                "devices, of which the hook would see a piece. Do what it does in the step, around step()."
            )


def step_pieces(optimizer: torch.optim.Optimizer, variables: CutVariables) -> None:
    """A hook that lasts, so that it meets each step, by whatever name the method is called: it steps the pieces, and an
    optimizer of nothing goes on in the place of this one."""

    def take_over(
        stepped: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if args[0] is not stepped or not variables.cut_in(stepped):
            return None
        if not variables.is_inside:
            raise ContextError(
                f"{type(stepped).__name__}.step() was called outside of run, and has parameters that are cut over "
                "logical devices; step in the function that strategy.run calls."
            )
        if any(callable(one) for one in (*args[1:], *kwargs.values())):
            raise UnsupportedError(
                f"{type(stepped).__name__}.step(closure) with parameters that are cut over logical devices; call "
                "the closure's backward first, and step() without it."
            )
        require_own_memory(
            [getattr(one, STAND_IN) for one in variables.cut_in(stepped)], f"{type(stepped).__name__}.step() would step"
        )
        with variables.states_as_pieces(stepped), DisableTorchFunction(), _in_sight(stepped):
            bare_step(stepped)
        return (stand_in_of(type(stepped), vars(stepped), []), *args[1:]), kwargs

    optimizer.register_step_pre_hook(take_over)
