"""What a recorded step cannot do, in words that help: functorch's errors are about functorch.

They name the line of the user's code: `current_place`. What the compiler has other numbers for, or fails with when the
step is run, is refused at that line (`refusals`): a program that it refuses takes later ones with it.
"""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import functional as F

from torchstrat.core import nest
from torchstrat.core._torch_private import own_buffers, untouched_by_surroundings
from torchstrat.core.errors import TorchstratError, UnsupportedError
from torchstrat.sharding.tpu._functorch_private import leave_levels

_NOT_THE_USERS = (__name__.partition(".")[0], "torch", "torch_xla", "contextlib")


def current_place() -> str:
    """The innermost line that is being run and is neither torch's nor ours."""
    return _first_of_user(_outwards(inspect.currentframe()))


def place_of(error: BaseException) -> str:
    """The innermost such line that ``error`` came through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _first_of_user(reversed(frames), {id(f): line for f, line in traceback.walk_tb(error.__traceback__)})


_READERS = {
    "torch.optim.swa_utils": "Call update_parameters outside of run, where it averages what the step has left.",
    "torch.nn.modules.batchnorm": "Give the layer a momentum: without one it counts its batches on the host.",
    "torch_xla._patched_functions": "Clip with total = torch.nn.utils.get_total_norm([p.grad for p in parameters], "
    "norm_type) and torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total).",
}
"""Modules that read a tensor for their caller, who cannot write what they do in another way."""


def instead_of_read() -> str:
    """What to change where a step reads a tensor, on the line that `current_place` names."""
    for frame in _outwards(inspect.currentframe()):
        module = frame.f_globals.get("__name__", "")
        if module in _READERS:
            return _READERS[module]
        if module.partition(".")[0] not in _NOT_THE_USERS:
            break
    return "Return the tensor and read it outside of run, or write the condition with torch.where."


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first_of_user(frames: Iterator[FrameType], lines: dict[int, int] | None = None) -> str:
    for frame in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
            continue
        number = frame.f_lineno if lines is None else lines[id(frame)]
        summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        return f"{summary.filename}:{number}, in {summary.name}: {summary.line}"
    return "an unknown place"


GLOBAL_VIEW = (
    "run the step with options=ts.RunOptions(global_view=True), where it sees the global batch as one and is not "
    "mapped over replicas"
)


class _Limit(NamedTuple):
    """``pattern``: of functorch's message, with a group for what it is about; ``meaning``: what to tell the user."""

    pattern: str
    meaning: str


_LIMITS = (
    _Limit(
        r"Batching rule not implemented for (\S+?)[.;]?\s",
        "{0} cannot run for all replicas at once: torch.vmap has no rule for it. Use operations that can, or {view}.",
    ),
    _Limit(
        r"(autograd\.Function) with functorch transforms",
        "the step used a torch.{0} that cannot run for all replicas at once. torch.utils.checkpoint and backward hooks "
        "of modules are made of such functions, too. Give one of your own a setup_context and "
        "generate_vmap_rule = True; else {view}.",
    ),
    _Limit(
        r"(module 'torch' has no attribute 'xla')",
        "torch.utils.checkpoint does not know these devices ({0}); {view}, and use torch_xla's own checkpoint.",
    ),
    _Limit(
        r"(You tried to vmap over \S+)",
        "an operation met a tensor of another replica's shape ({0}); torch.utils.checkpoint, which computes again in "
        "the backward pass, does so. For checkpoints {view}.",
    ),
    _Limit(
        r"(tensor) may have escaped",
        "a {0} was used outside of the run that it belongs to: kept from an earlier run, or computed again by "
        "torch.utils.checkpoint. Return tensors from the step to keep them; for checkpoints {view}.",
    ),
    _Limit(
        r"(embedding_renorm_)\(self, \*extra_args\) is not possible",
        "a lookup with max_norm scales rows of the table in place ({0}), and replicas, which share the table, look up "
        "different rows. Leave max_norm out and scale what was looked up: rows * (max_norm / rows.norm(dim=-1, "
        "keepdim=True)).clamp(max=1); or {view}.",
    ),
    _Limit(
        r"(?:vmap: )?(\S+)\(self, \*extra_args\) is not possible",
        "{0}, an operation in place, would write what differs between replicas into a tensor that they share. Write it "
        "out of place: total = total + value.",
    ),
    _Limit(
        r"(data-dependent control flow|calling \.item\(\) on a Tensor)",
        "the step needs the value of a tensor ({0}), which is not there before it has been recorded and run. Return "
        "the tensor and read it outside of run, or write the condition with torch.where.",
    ),
    _Limit(
        r"from the '(Sparse\w*)' backend",
        "the step made a sparse tensor ({0}), which these devices do not have. Make embeddings with sparse=False, and "
        "use an optimizer of dense gradients.",
    ),
    _Limit(
        r"(one of the variables needed for gradient computation has been modified by an inplace operation)",
        "{0}: write it out of place (x = x + 1 for x += 1).",
    ),
    _Limit(
        r"When vmap-ing (\S+), please provide",
        "{0} would look at its values for a size; give the size as an argument, as num_classes is.",
    ),
    _Limit(
        r"(dynamic shapes?|dynamic sizes?)",
        "the step uses an operation whose result has a shape that depends on values ({0}). Keep the shape and mask: "
        "torch.where(condition, value, 0).",
    ),
)


def explained(error: Exception, place: str | None = None) -> Exception:
    """``error``, which the step raised while it was recorded, or what it means. ``place``: where, if that is known."""
    if type(error) not in (RuntimeError, NotImplementedError, AttributeError):
        return error
    text = str(error)
    for limit in _LIMITS:
        found = re.search(limit.pattern, text)
        if found is not None:
            meaning = limit.meaning.format(found[1], view=GLOBAL_VIEW)
            return UnsupportedError(f"{meaning} It is at {place or place_of(error)}. (PyTorch said: {text[:200]})")
    return error


@contextmanager
def explaining(place: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """In this block errors of PyTorch's become what they mean, as `explained`."""
    try:
        yield
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        reason = explained(error, place())
        if reason is error:
            raise
        raise reason from error


_ONLY_ELSEWHERE = {"fused": "its kernels are those of other devices", "capturable": "it is for CUDA graphs"}


def require_possible(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` where a step of these devices' variables is beyond PyTorch."""
    groups = optimizer.param_groups
    if all(parameter.device.type == "cpu" for group in groups for parameter in group["params"]):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            f"{name} steps on sparse gradients, which these devices do not have. Use torch.optim.Adam, and embeddings "
            "with sparse=False."
        )
    for option, why in _ONLY_ELSEWHERE.items():
        if any(group.get(option) for group in groups):
            raise UnsupportedError(
                f"{name} has {option}=True, which these devices do not have: {why}. Leave {option} out; the whole step "
                "is compiled into one program as it is."
            )


def require_python(modules: Iterable[torch.nn.Module]) -> None:
    """Raise `UnsupportedError` for what a step that is recorded for all replicas at once cannot follow."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule) and len(own_buffers(module)):
            raise UnsupportedError(
                f"a module of TorchScript ({module.original_name}) has buffers, which C++ reads and sets where "
                "replicas that are recorded at once are not told apart. Use the module that it was made of, or "
                f"{GLOBAL_VIEW}."
            )


def named(
    error: Exception,
    func: Callable[..., object],
    args: Iterable[object],
    kwargs: dict[str, object],
    device: torch.device,
) -> Exception:
    """What ``func`` raised: the user's mistake as it is, and what only this strategy cannot do in its words.

    It is the user's where the same call fails without values, lanes and compiler.
    """
    known = explained(error, current_place())
    if known is not error or isinstance(error, TorchstratError) or func is torch.Tensor.backward:
        return known
    if not any(_runs_plainly(func, args, kwargs, device, elsewhere) for elsewhere in ("meta", "cpu")):
        return error
    name = getattr(func, "__name__", str(func))
    said = str(error).strip().partition("\n")[0]
    return UnsupportedError(
        f"{name} cannot run in a step of this strategy as it is called at {current_place()}: for all replicas at once, "
        f"or by this compiler, there is no way. Write it with other operations, or {GLOBAL_VIEW}. "
        f"(It said: {said[:200]})"
    )


def refused_program(error: Exception) -> Exception:
    """What the compiler said to a whole step, which no line of it raised."""
    if isinstance(error, TorchstratError):
        return error
    return UnsupportedError(
        "the compiler cannot run the step that was recorded: one of its operations is beyond it, mostly for tensors "
        f"with dimensions of size 0 or 1. Leave operations out to find which, or write it with others. (It said: "
        f"{str(error).strip()[:300]})"
    )


def _runs_plainly(
    func: Callable[..., object], args: Iterable[object], kwargs: dict[str, object], device: torch.device, elsewhere: str
) -> bool:
    """On another device, where not every operation exists for shapes alone."""
    with leave_levels(), untouched_by_surroundings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*_without_values(list(args), device, elsewhere), **_without_values(kwargs, device, elsewhere))
        except Exception:
            return False
    return True


def _without_values(value: object, device: torch.device, elsewhere: str) -> Any:
    def bare(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.device == device:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=elsewhere)
        return leaf

    return nest.map_structure(bare, value)


_REFUSED = """
    cond eig eigvals geqrf inv_ex lstsq lu_unpack matrix_rank ormqr pca_lowrank pinv pinverse svd svd_lowrank
    svdvals logdet slogdet nuclear_norm polygamma_ new_empty_strided native_batch_norm native_layer_norm
    lobpcg _native_batch_norm_legit _batch_norm_with_update
"""


def refusals() -> dict[object, Callable[..., object]]:
    """The function of PyTorch → what refuses it."""
    found: dict[object, Callable[..., object]] = {}
    for name in _REFUSED.split():
        for owner in (torch, torch.Tensor, torch.linalg, F):
            member = getattr(owner, name, None)
            if callable(member):
                found[member] = refuse(name)
    for member in (torch.linalg.matrix_norm, torch.linalg.norm):
        found[member] = partial(_without_singular_values, member)
    return found


def _without_singular_values(
    norm: Callable[..., torch.Tensor],
    A: torch.Tensor,  # noqa: N803
    ord: object = None,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    if ord == "nuc" or (ord in (2, -2) and (norm is torch.linalg.matrix_norm or _dims(args, kwargs, A) > 1)):
        refuse(f"a matrix norm of order {ord!r}")()
    if ord is None and norm is torch.linalg.matrix_norm:
        ord = "fro"  # noqa: A001
    return norm(A, ord, *args, **kwargs)


def _dims(args: tuple[object, ...], kwargs: dict[str, object], A: torch.Tensor) -> int:  # noqa: N803
    """How many dimensions the norm is over."""
    dim = args[0] if args else kwargs.get("dim")
    return A.dim() if dim is None else len(dim) if isinstance(dim, Sized) else 1


def refuse(
    name: str, instead: str = "Write it with other operations, or compute it outside of the step."
) -> Callable[..., NoReturn]:
    """What stands for a function of that name."""

    def refused(*_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{name} in a step (at {current_place()}): this strategy's compiler has other numbers, or none. {instead}"
        )

    return refused
