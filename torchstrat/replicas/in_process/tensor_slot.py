"""What the engine for several replicas in one process keeps of one parameter or leaf tensor."""

from __future__ import annotations

import weakref

import torch
from torch.nn.parameter import is_lazy

from torchstrat.replicas.samples import Trace, trace_of


class TensorSlot:
    """One parameter or leaf tensor: per replica its data, its gradient and its count of in-place edits.

    Kept from run to run, because gradients may accumulate over several. In between the tensor itself is only held
    weakly, by the ``reference``.
    """

    __slots__ = (
        "agreed",
        "data",
        "grad_dtype",
        "grads",
        "is_copy",
        "is_shared",
        "left",
        "made_by",
        "parked_grad",
        "reference",
        "tensor",
        "trained",
        "trains",
        "unedited",
        "version",
        "versions",
    )

    def __init__(self, tensor: torch.Tensor, reference: weakref.ref[torch.Tensor]) -> None:
        self.reference = reference
        self.tensor = tensor  # during a run
        self.data: dict[int, torch.Tensor] = {}
        self.grads: dict[int, torch.Tensor | None] = {}
        self.versions: dict[int, int] = {}
        self.version = 0
        """Of all components, at the last moment when they were equal. One that has another was edited in place."""
        self.agreed: torch.Tensor | None = None
        """The central component at that moment: the very tensor, which `.data =` replaces."""
        self.unedited: torch.Tensor | None = None
        """A copy of what it then was, if the leader has edited it in place since."""
        self.parked_grad: tuple[weakref.ref[torch.Tensor] | None, int] | None = None
        """What the last run left in ``.grad``, and its version then."""
        self.grad_dtype: torch.dtype | None = None
        self.left: Trace | None = None
        """Of the tensor, when the last run ended."""
        self.trained = True
        """Whether it required a gradient when the run began."""
        self.trains: dict[int, bool] = {}
        """Whether it does, per replica; empty until one has changed that."""

        # Of variables that came up during the run
        self.made_by: int | None = None
        """The replica that did, or None for all that were there before."""
        self.is_shared = True
        """False as long as no other replica has used it: it may be that replica's own, made anew by each."""
        self.is_copy = False
        """It belongs to a deep copy, such as an inner loop trains. Its gradients are that replica's own."""

    def take(self, tensor: torch.Tensor) -> None:
        """A run begins; ``tensor`` is the one this slot was made for."""
        self.tensor = tensor
        self.made_by, self.is_shared, self.is_copy = None, True, False
        self.trained, self.trains = tensor.requires_grad, {}

    def keep_data_of(self, replicas: list[int]) -> None:
        """Give up the components of all others; those of a run are overwritten when it begins."""
        for key in [key for key in self.data if key not in replicas]:
            del self.data[key]

    def release(self) -> None:
        """The run has ended. Until the next one, the tensor lives only as long as the user keeps it."""
        grad = self.tensor.grad
        self.parked_grad = (None, 0) if grad is None else (weakref.ref(grad), grad._version)
        self.grad_dtype = None if grad is None else grad.dtype
        self.agreed = self.unedited = None
        del self.tensor

    def keep_apart(self, tensor: torch.Tensor) -> None:
        """The run has ended, and what the replicas have is each one's own. ``tensor``: the one this slot is for."""
        self.left = trace_of(tensor)

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is as the last run left it."""
        return self.left is not None and self.left == trace_of(tensor)

    def is_grad_untouched(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad``, found in ``.grad``, is as the last run left it there."""
        if self.parked_grad is None:
            return False
        left, version = self.parked_grad
        if grad is None or left is None:
            return grad is None and left is None
        return grad is left() and grad._version == version

    def cast_grads(self, dtype: torch.dtype) -> None:
        """The program has cast the tensor and its gradient, of which it sees the installed one."""
        changed = {r: grad.to(dtype) for r, grad in self.grads.items() if grad is not None and grad.dtype != dtype}
        self.grads.update(changed)

    def is_edited(self, replica: int) -> bool:
        """Whether that replica's component was edited in place since all were equal. For parked slots."""
        return self.versions[replica] != self.version


def is_variable(tensor: torch.Tensor) -> bool:
    """Lazy ones are not yet, and those on "meta" have no values; those made in inference mode can be neither trained
    nor swapped, and are shared."""
    return not is_lazy(tensor) and not tensor.is_meta and not tensor.is_inference()
