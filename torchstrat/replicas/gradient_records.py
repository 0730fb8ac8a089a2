"""What one rank knows of each gradient: what has been accumulated and not combined, and what is combined."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from torchstrat.core._torch_private import is_view, version_of
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.gradients import CombinedGradient, Owned, as_dense, is_left_over, is_plain
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.collectives.agreement import fingerprint
from torchstrat.replicas.roster import Layout, Roster


class GradientStatus(enum.Enum):
    """What has become of a gradient."""

    COMBINED = enum.auto()
    USED = enum.auto()  # by an optimizer's step
    NEW = enum.auto()  # assigned, or changed since it was used: an optimizer's step combines it


class GradientRecord:
    """What is known of one tensor's gradient on this rank."""

    __slots__ = ("accumulated", "base", "combined", "grown", "lacks", "left", "loose", "reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        self.accumulated = False  # something was added that is not combined yet
        self.base: torch.Tensor | None = None
        """What was there before that, alike on all ranks. Kept where only what is new is combined."""
        self.grown: CombinedGradient | None = None
        """What it then had become, with the base in it. Of sums."""
        self.combined: CombinedGradient | None = None
        self.loose: CombinedGradient | None = None
        """A combined one that hooks have been given, and that has been accumulated nowhere since: what is assigned by
        hand is made of it (``p.grad = torch.autograd.grad(loss, p)``)."""
        self.left: CombinedGradient | None = None
        """As the last run has left it; see `GradientRecords.leave`."""
        self.lacks: bool | None = None
        """Where some ranks have not come to that one, for a branch has spared them it: whether this is one of them."""


def edited_part(variable: str) -> UnsupportedError:
    """What to raise where the program has changed one replica's part of a gradient."""
    return UnsupportedError(
        f"the gradient of {variable} was changed between runs where each replica has a part of its own in it, which a "
        "run under no_sync has left; what was changed is one replica's alone. Change it in a step (Strategy.run), or "
        "leave no_sync before the last run that adds to it. Zeroing it, backward(), clipping and optimizer.step() "
        "need no run."
    )


class NotedGradients:
    """What gradients tensors have at a moment, to tell later which of them somebody has zeroed, removed or replaced:
    code that runs once for all replicas, such as a leader's ``step(closure)``."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = ((id(tensor), tensor.grad) for tensor in tensors)
        self._noted = {key: (grad, 0 if grad is None else version_of(grad)) for key, grad in found}

    def has_changed(self, tensor: torch.Tensor) -> bool:
        grad, (earlier, version) = tensor.grad, self._noted.get(id(tensor), (None, 0))
        return grad is not earlier or (grad is not None and version_of(grad) != version)


class GradientRecords:
    """The records of a run's variables, which last from run to run."""

    def __init__(self, op: ReduceOp) -> None:
        self.op = op
        self._records: dict[int, GradientRecord] = {}
        self._layout: Layout | None = None

    def use(self, roster: Roster) -> None:
        """The variables are these from now on."""
        if self._layout is not roster.layout:
            self._records = {id(tensor): self.of(tensor) for tensor in roster.tensors}
            self._layout = roster.layout

    def current(self, tensor: torch.Tensor) -> GradientRecord:
        """Of a variable of this run."""
        return self._records[id(tensor)]

    def of(self, tensor: torch.Tensor) -> GradientRecord:
        """Of any tensor; a new one, which is not kept, if nothing is known."""
        record = self._records.get(id(tensor))
        return record if record is not None and record.reference() is tensor else GradientRecord(tensor)

    def take_base(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is not this rank's own in a gradient that is accumulated, and to be left out of a sum of all ranks'.

        Raises `UnsupportedError` where nobody can say what that is now: the program has changed the whole of it.
        """
        record = self.of(tensor)
        if not record.accumulated or record.base is None or record.grown is None or tensor.grad is None:
            return record.base if record.accumulated else None
        if not record.grown.is_new(tensor.grad) and bool((record.base != 0).any()):
            raise UnsupportedError(
                f"a gradient of shape {tuple(tensor.shape)} was changed by hand after a backward pass under no_sync "
                "had added to a combined one, and before replicas have combined that: in a sum their parts cannot be "
                "told from what they have in common. Change it where all is combined (after a backward pass outside "
                "of no_sync), or zero it before no_sync begins; means have no such limit."
            )
        return record.base

    def with_parts(self) -> list[torch.Tensor]:
        """Those with something in their gradient that is not combined."""
        found = [record.reference() for record in self._records.values() if record.accumulated]
        return [tensor for tensor in found if tensor is not None]

    def note_combined(self, tensor: torch.Tensor) -> None:
        """Its gradient is from now on the combined one."""
        record = self._records[id(tensor)]
        record.accumulated, record.base = False, None
        record.combined = None if tensor.grad is None else CombinedGradient(tensor.grad)
        record.loose = record.lacks = None

    def note_lacking(self, tensor: torch.Tensor, lacks: bool) -> None:
        """Of a gradient as `note_loose` has it. ``lacks``: this rank has not come to it; on all ranks."""
        self._records[id(tensor)].lacks = lacks

    def had_alone(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of which this rank has a loose gradient, and some ranks lack it."""
        return [tensor for tensor in tensors if self.of(tensor).lacks is False]

    def note_loose(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``gradient`` has been combined, and is handed on."""
        self._records[id(tensor)].loose = None if gradient is None else CombinedGradient(gradient)

    def note_all_combined(self, tensors: Iterable[torch.Tensor]) -> None:
        """The same of several, which all have gradients."""
        records = self._records
        for tensor in tensors:
            record = records[id(tensor)]
            record.accumulated, record.base, record.combined = False, None, CombinedGradient(tensor.grad)  # type: ignore[arg-type]

    # -- between runs -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """A run ends. What is not combined is remembered as it is, to know later what the program has made of it."""
        for record in self._records.values():
            record.left = None
            if (tensor := record.reference()) is None or (gradient := tensor.grad) is None:
                continue
            if record.accumulated or is_left_over(gradient, record.combined, self.op):
                record.left = CombinedGradient(gradient)

    def weigh_parts(self, factor: float) -> None:
        """After a run has ended: ``factor`` for all that is not combined."""
        for tensor in self.with_parts() if factor != 1.0 else ():
            if tensor.grad is not None:
                tensor.grad = tensor.grad * factor if factor else torch.zeros_like(tensor.grad)
        self.leave()

    def look_at_outside(self, tensors: Iterable[torch.Tensor], describe: Callable[[torch.Tensor], str]) -> None:
        """A run begins, or something outside of runs combines what they have left: what has the program made of
        gradients since? Raises `UnsupportedError` where that was a part of one, unless it was zeroed or taken away."""
        for tensor in tensors:
            if (gradient := tensor.grad) is None:
                continue
            record = self.current(tensor)
            is_open = record.accumulated or is_left_over(gradient, record.combined, self.op)
            if not is_open or (record.left is not None and record.left.is_new(gradient)):
                continue
            if record.accumulated and as_dense(gradient).any():
                raise edited_part(describe(tensor))
            self.note_made_outside(tensor, gradient)

    def note_made_outside(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """It is what the program has made outside of runs, the same on all ranks: in a sum it counts once."""
        record = self.of(tensor)
        if self.op is ReduceOp.SUM and record.lacks is None and is_left_over(gradient, record.combined, self.op):
            self._records[id(tensor)] = record
            record.accumulated, record.base, record.loose = False, None, None
            record.combined = CombinedGradient(gradient)

    # -- at an optimizer's step -------------------------------------------------------------------------------------

    def owned(self, tensor: torch.Tensor) -> Owned | None:
        """Who has which elements of its gradient; None if every rank has all, or there is none."""
        combined = self.of(tensor).combined
        return None if combined is None or tensor.grad is None else combined.owned

    def torn(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of these has a gradient that was left with its owners and has been changed or replaced since."""

        def is_left(tensor: torch.Tensor) -> bool:
            combined = self.of(tensor).combined
            return combined is not None and combined.owned is not None and not combined.used

        return bool(self.edited(filter(is_left, tensors)))

    def are_as_combined(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether nothing has happened to any of these gradients since they were combined: the usual case, in which
        there is no need to look closer."""
        records = self._records
        for tensor in tensors:
            if (gradient := tensor.grad) is not None:
                record = records.get(id(tensor))
                if record is None or record.combined is None or not record.combined.is_new(gradient):
                    return False
        return True

    def left_over(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those with a gradient that no backward pass has combined: assigned by hand, or left by ``no_sync``."""

        def is_left(tensor: torch.Tensor) -> bool:
            record = self.of(tensor)
            if record.lacks is not None:
                return True
            if not is_left_over(tensor.grad, record.combined, self.op):
                return False
            return record.loose is None or is_left_over(tensor.grad, record.loose, self.op)

        return [tensor for tensor in tensors if is_left(tensor)]

    def edited(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Combined gradients that the step has changed since (clipped, unscaled, made noisy), or put others in place
        of: those that `left_over` does not report because they count as combined."""
        found = []
        for tensor in tensors:
            combined = self.of(tensor).combined
            if tensor.grad is None or combined is None:
                continue
            is_replaced = not combined.used and not combined.is_in(tensor.grad)
            if is_replaced or combined.is_edited(tensor.grad):
                found.append(tensor.grad)
        return found

    def after_step(self, tensors: Iterable[torch.Tensor]) -> None:
        """An optimizer has used the gradients of ``tensors``; what is assigned to them from now on is new."""
        for tensor in tensors:
            record = self.of(tensor)
            record.loose = record.lacks = None
            if record.combined is not None:
                record.combined.use_up()

    # -- replicas that sit a run out --------------------------------------------------------------------------------

    def status_of(self, tensor: torch.Tensor) -> GradientStatus:
        """That of a gradient with no part that is accumulated and not combined: alike on all ranks of the run."""
        combined = self.of(tensor).combined
        if is_left_over(tensor.grad, combined, self.op):
            return GradientStatus.NEW
        return GradientStatus.USED if combined is not None and combined.used else GradientStatus.COMBINED

    def for_idle(self, roster: Roster) -> dict[str, GradientStatus]:
        """After a run: what has become of the gradients, which ranks without a part in it are to have too."""
        return {name: self.status_of(tensor) for name, tensor in roster.items()}

    def new_in_sum(self, roster: Roster) -> dict[str, tuple[float, float]]:
        """After a run that some ranks have sat out: fingerprints of gradients that are to be summed once more."""
        if self.op is not ReduceOp.SUM:
            return {}
        return {
            name: fingerprint([tensor.grad])
            for name, tensor in roster.items()
            if tensor.grad is not None
            and not self.of(tensor).accumulated
            and self.status_of(tensor) is GradientStatus.NEW
        }

    def settle(self, roster: Roster, found: Sequence[dict[str, tuple[float, float]]]) -> None:
        """``found``: `new_in_sum` of the ranks that ran. What all of these have alike (a gradient that was zeroed in
        place, or scaled, after its step) is combined, so that the others can have the same. What is assigned in its
        place from now on is new, as after that step."""
        for name, tensor in roster.items():
            if name in found[0] and all(one.get(name) == found[0][name] for one in found):
                self.take_over(tensor, tensor.grad, GradientStatus.USED)

    def take_over(self, tensor: torch.Tensor, gradient: torch.Tensor | None, status: GradientStatus) -> None:
        """Make ``gradient`` the one of ``tensor``. One that is a part of a flat buffer stays that. Of a sum, what is
        new is the part of the rank that it comes from: this one has nothing to add."""
        if gradient is not None and status is GradientStatus.NEW and self.op is ReduceOp.SUM:
            gradient = torch.zeros_like(gradient)
        own = tensor.grad
        if gradient is not None and own is not None and is_view(own) and is_plain(own) and is_plain(gradient):
            gradient = own.copy_(gradient)
        tensor.grad = gradient
        self._records[id(tensor)] = record = self.of(tensor)
        record.accumulated, record.base, record.combined, record.loose = False, None, None, None
        record.lacks = None
        if gradient is not None and status is not GradientStatus.NEW:
            record.combined = CombinedGradient(gradient)
            record.combined.used = status is GradientStatus.USED
