"""All replicas of a step at once: one function call over a hidden first dimension, one *lane* per replica.

The step sees the tensors of one replica. Below it every one of them has a first dimension more, which the runtime cuts
over the replicas' devices. There may be more lanes than replicas that work: a program always runs on all devices, so
lanes without a replica, or whose replica sits this pass out, compute on copies of another's input and count nothing.

Tensors of a step that somebody has kept: there is no value behind them, and they say what to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import DisableTorchFunctionSubclass
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_classes import properties
from torchstrat.sharding.tpu import _functorch_private as functorch

Function = Callable[..., object]
Arguments = Sequence[object]
Options = dict[str, object]
"""By name. Of a call of PyTorch's that a step makes."""

_FACTS = properties("shape", "dtype", "device", "ndim", "layout", "is_leaf", "requires_grad", "is_sparse", "is_meta")


class KeptTensor(torch.Tensor):
    """What a tensor that differs between replicas becomes when its run is over.

    It was one for all replicas, when there were no values; what the step returns is what has them.
    """

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        with DisableTorchFunctionSubclass():
            if func in _FACTS or functorch.interpreters():  # in a later run it has the values of its own
                return func(*args, **(kwargs or {}))
            kept = next((one for one in args if isinstance(one, cls)), None)
            shape = "" if kept is None else f" of shape {tuple(kept.shape)}"
        if func is torch.Tensor.clone:
            return kept  # of nothing: lists that have one are copied, too
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return f"<a tensor{shape} of a run that is over>"
        raise UnsupportedError(
            f"a tensor{shape} was used outside of the run that it belongs to: a step has kept it (in a list, or "
            "as an attribute), or torch.utils.checkpoint computes again with it. On this strategy it stands for all "
            "replicas, and has no value. Return it from the step: run then has it for each replica."
        )


class KeptParameter(KeptTensor, nn.Parameter):
    """The same of a parameter."""


_KEPT: dict[type, type[torch.Tensor]] = {torch.Tensor: KeptTensor, nn.Parameter: KeptParameter}


class TensorSet:
    """Tensors by identity, which it does not keep alive."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, value: object) -> bool:
        reference = self._known.get(id(value))
        return reference is not None and reference() is value

    def __bool__(self) -> bool:
        return bool(self._known)


class Notes:
    """The tensors of one run that differ between replicas."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []

    def add(self, result: object) -> None:
        """What an operation gave, which may be no such tensor at all."""
        if isinstance(result, torch.Tensor):
            self._known.append(weakref.ref(result))
        elif isinstance(result, list | tuple):
            for one in result:
                self.add(one)

    def close(self, is_lane_tensor: Callable[[torch.Tensor], bool]) -> None:
        """The run is over: who still has one learns so."""
        for reference in self._known:
            tensor = reference()
            kept = _KEPT.get(type(tensor))
            if tensor is not None and kept is not None and is_lane_tensor(tensor):
                tensor.__class__ = kept
        self._known = []


def steps_own_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer of the step's own steps what differs between replicas, and no variables.

    Raises:
        UnsupportedError: it steps both.
    """
    own = {functorch.is_batched(one) for group in optimizer.param_groups for one in group["params"]}
    if len(own) > 1:
        raise UnsupportedError(
            f"a step's {type(optimizer).__name__} has both variables, which all replicas share on this strategy, and "
            "tensors that the step has made, which are each replica's own. Use an optimizer for each of the two."
        )
    return True in own


class Lanes:
    """One pass of a step over ``count`` lanes. ``active``: the lanes that are replicas and count, in order.

    Only the thread that entered it uses it, and only until it is left.
    """

    def __init__(self, count: int, active: Sequence[int]) -> None:
        self.count = count
        self.active = tuple(active)
        self._level = 0
        self.notes = Notes()
        """Of what the step may keep."""

    @property
    def all_active(self) -> bool:
        return len(self.active) == self.count

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In this block operations on lane tensors are those of each lane; random numbers differ between lanes."""
        self._level = functorch.push_level(self.count, "different")
        try:
            yield
        finally:
            self.notes.close(self.is_lane_tensor)
            functorch.pop_level()

    @property
    def is_inside_transform(self) -> bool:
        """Whether the step is in a transform of ``torch.func`` of its own at this moment."""
        return len(functorch.interpreters() or ()) > 1

    @property
    def is_at_level(self) -> bool:
        """Whether the code that runs is that of each lane: neither in `left` nor in a transform of its own."""
        return len(functorch.interpreters() or ()) == 1

    @contextmanager
    def left(self, call: str) -> Iterator[list[object]]:
        """In this block, inside of `entered`, tensors are what they are to the program: whole.

        Raises:
            UnsupportedError: the step is in a mapping or a gradient of ``torch.func`` of its own.
        """
        if self.is_inside_transform:
            raise UnsupportedError(
                f"{call} was called inside a transform of torch.func (vmap, grad, jvp, …) within the step. Call it "
                "outside of the transform; gradients inside of it come from torch.func.grad itself."
            )
        with functorch.leave_levels() as levels:
            yield levels

    def is_lane_tensor(self, value: object) -> bool:
        """Whether ``value`` differs, or may, from lane to lane."""
        return isinstance(value, torch.Tensor) and functorch.is_batched(value)

    def hide(self, stacked: torch.Tensor) -> torch.Tensor:
        """``stacked[lane]`` for the code of each lane. Call it at the level, or in `left`."""
        hidden = functorch.add_batch_dim(stacked, 0, self._level)
        self.notes.add(hidden)
        return hidden

    def hide_as(self, behind: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
        """As `hide`, for a tensor of the layout of the one behind ``example``."""
        hidden = functorch.add_batch_dim(behind, functorch.batch_dim_of(example), self._level)
        self.notes.add(hidden)
        return hidden

    def dim_of(self, value: torch.Tensor) -> int:
        """Which dimension of the tensor behind the lane tensor ``value`` is that of the lanes."""
        return functorch.batch_dim_of(value)

    def stacked(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor ``[lanes, …]`` behind what the lanes see; of a tensor they share, as often as there are lanes.

        Call it in `left`."""
        if not functorch.is_batched(value):
            return value.unsqueeze(0).expand(self.count, *value.shape)
        return functorch.unwrapped(value).movedim(functorch.batch_dim_of(value), 0)

    def behind(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor of all lanes of which ``value`` shows one, as it lies; a tensor that the lanes share as it is."""
        return functorch.unwrapped(value) if self.is_lane_tensor(value) else value

    def first(self, value: torch.Tensor) -> torch.Tensor:
        """What the first active lane has of a lane tensor, as a tensor that the lanes share."""
        with functorch.leave_levels():
            return self.stacked(value)[self.active[0]]

    def mask(self, like: torch.Tensor) -> torch.Tensor:
        """``[lanes]``, real, of ``like``'s precision and device: 1 for the active ones, else 0."""
        values = [1 if lane in self.active else 0 for lane in range(self.count)]
        return torch.tensor(values, dtype=like.dtype.to_real() if like.is_complex() else like.dtype, device=like.device)
