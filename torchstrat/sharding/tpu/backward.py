"""Gradients of a step that runs for all replicas at once.

functorch refuses ``backward`` inside of a mapping. What the step means by it is well defined all the same: the losses
of all lanes are one tensor, and the gradient of their weighted sum is what the replicas' gradients combine to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from torchstrat.core._torch_private import hooks_after_accumulation, hooks_on_gradient
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.core.gradients import check_weight
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.variables import VariableRegistry
from torchstrat.sharding.tpu import _functorch_private as functorch
from torchstrat.sharding.tpu.lanes import Lanes

Payload = TypeVar("Payload")
Result = TypeVar("Result")
Combine = Callable[[dict[int, Payload]], Mapping[int, Result]]
Tensors = torch.Tensor | Sequence[torch.Tensor]
Gradients = torch.Tensor | Sequence[torch.Tensor | None]


class Meet(Protocol):
    """What all passes of a run do together; see `Baton.meet`."""

    def __call__(self, call: str, payload: Payload, combine: Combine[Payload, Result]) -> Result: ...


_torch_backward = torch.autograd.backward
"""PyTorch's own; while a step is recorded the name leads here."""


def _real_dtype(like: torch.Tensor) -> torch.dtype:
    return like.dtype.to_real() if like.is_complex() else like.dtype


class LaneWeights:
    """How much each lane of a pass counts in the combined gradient: its rows, or what the step says by `set_weight`.

    Args:
        rows: of each active lane; equal numbers where all count alike.
        all_passes: the weights of all passes of the run, this one's among them once it has been added.
        in_buffers: the share of each active lane in means of buffers.
        require: raises where rows do not say how much a lane counts, and neither has the step.
    """

    def __init__(
        self,
        lanes: Lanes,
        op: ReduceOp,
        rows: Sequence[float],
        all_passes: list[LaneWeights],
        in_buffers: Sequence[float],
        require: Callable[[], object] = lambda: None,
    ) -> None:
        self.in_buffers = list(in_buffers)
        self._require = require
        self.lanes = lanes
        self._op = op
        self.rows = list(rows)
        self.given: torch.Tensor | None = None
        self._all_passes = all_passes
        self.are_crossed = False
        """Whether gradients may flow between replicas."""
        all_passes.append(self)

    @property
    def are_equal(self) -> bool:
        """Whether all active lanes of all passes are known to count alike. So they do when none has any weight."""
        if any(one.given is not None for one in self._all_passes):
            return False
        return len({row for one in self._all_passes for row in one.rows}) <= 1

    @property
    def rows_of_each(self) -> int:
        """How many rows each active lane has; 0 where that is not known."""
        rows = self.rows[0] if self.given is None and len(set(self.rows)) == 1 else 0
        return int(rows) if float(rows).is_integer() else 0

    def give(self, weight: object) -> None:
        """The step's own weights: a number, or a scalar that differs from lane to lane. Call it at the level."""
        if not isinstance(weight, torch.Tensor):
            self.given = None
            self.rows = [check_weight(weight)] * len(self.rows)
            return
        if weight.ndim:
            raise InvalidArgumentError(f"set_weight needs one number; got a tensor of shape {tuple(weight.shape)}.")
        with self.lanes.left("set_weight"):
            self.given = self.lanes.stacked(weight).detach()

    def as_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """``[lanes]``, real, on ``like``'s device, in single precision at least, for half of it ends at 65504; 0 for
        lanes that do not count."""
        kind = torch.promote_types(_real_dtype(like), torch.float32)
        if self.given is not None:
            mask = self.lanes.mask(like).to(kind)
            return torch.where(mask > 0, self.given.to(mask), torch.zeros_like(mask))
        values = dict(zip(self.lanes.active, self.rows, strict=True))
        numbers = [float(values.get(lane, 0.0)) for lane in range(self.lanes.count)]
        return torch.tensor(numbers, dtype=kind, device=like.device)

    def factors(self, gradient: torch.Tensor, lane_dim: int = 0) -> torch.Tensor:
        """What each lane's gradient is multiplied with in the combined one; outside of the level.

        Of ``gradient``'s number of dimensions, with the lanes in ``lane_dim`` and 1 in all others.
        """
        return self._by_lane(gradient).reshape([-1 if dim == lane_dim else 1 for dim in range(gradient.ndim)])

    def without_factors(self, gradient: torch.Tensor, lane_dim: int = 0) -> torch.Tensor:
        """``gradient`` of the combined loss, as each lane's of its own loss. A lane that does not count keeps its."""
        factors = self.factors(gradient, lane_dim)
        divisors = torch.where(factors > 0, factors, torch.ones_like(factors))
        # Quotients of complex numbers are not among what the compiler gets right.
        return gradient * divisors.reciprocal() if gradient.is_complex() else gradient / divisors

    def with_factors(self, stacked: torch.Tensor) -> torch.Tensor:
        """``[lanes, …]`` times the factors; 0 for lanes that do not count, which may well have NaN."""
        factors = self.factors(stacked)
        return torch.where(factors > 0, stacked * factors, torch.zeros_like(stacked))

    def _by_lane(self, like: torch.Tensor) -> torch.Tensor:
        """``[lanes]``."""
        if self._op is ReduceOp.SUM:
            return self.lanes.mask(like)
        if self.are_equal:
            return self.lanes.mask(like) / sum(len(one.rows) for one in self._all_passes)
        total = torch.stack([one.as_tensor(like).sum() for one in self._all_passes]).sum()
        return (self.as_tensor(like) / total).to(_real_dtype(like))

    def combined(self, stacked: torch.Tensor) -> torch.Tensor:
        """The lanes' losses ``[lanes]`` as one number, whose gradient is this pass's part of the combined one."""
        if not self.are_crossed:
            self._require()
        if self.are_equal and self.lanes.all_active:  # so there is no other pass
            return stacked.sum() if self._op is ReduceOp.SUM else stacked.mean()
        return self.with_factors(stacked).sum()


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _gradients(given: Gradients | None, roots: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return [given] if isinstance(given, torch.Tensor) else list(given or [None] * len(roots))


class LaneBackward:
    """``backward`` and ``autograd.grad`` for the code of a step."""

    def __init__(self, weights: LaneWeights, meet: Meet, registry: VariableRegistry) -> None:
        self.lanes, self.weights, self._meet, self._registry = weights.lanes, weights, meet, registry
        self.before: Callable[[], None] = lambda: None
        """Called before each backward pass."""
        self._has_hooks = False
        """On replicas' own tensors."""
        self._alone: int | None = None
        """The lane whose loss is differentiated, where that is done for one after the other."""

    def backward(
        self,
        tensors: Tensors,
        grad_tensors: Gradients | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Gradients | None = None,
        inputs: Tensors | None = None,
    ) -> None:
        """As `torch.autograd.backward`; ``.grad`` of variables then holds the gradient combined over replicas."""
        self.before()
        roots = _listed(tensors)
        gradients = _gradients(grad_tensors if grad_tensors is not None else grad_variables, roots)
        with self.lanes.left("backward"), torch.enable_grad():  # what is added to the graph here, also under no_grad
            stacked = [self._lane_sums(root, gradient) for root, gradient in zip(roots, gradients, strict=True)]
            wanted = self._behind(inputs)

            def combine(payloads: dict[int, Callable[[], torch.Tensor]]) -> dict[int, None]:
                totals = [total() for total in payloads.values()]
                if len(totals) > 1 and self._is_hooked():
                    totals = [torch.stack(totals).sum()]  # hooks of variables are to be called once
                # Otherwise one after the other: in one go the order of their operations depends on how many each thread
                # has ever made, and another order is another program.
                for total in totals[:-1]:
                    without = [one for one in self._registry.tensors() if one.grad is None]
                    _torch_backward(total, None, True, create_graph, inputs=wanted)
                    # PyTorch lets gradients of ``a + b`` have the same memory, and the next pass adds in place.
                    for one in without:
                        one.grad = None if one.grad is None else one.grad.clone()
                _torch_backward(totals[-1], None, retain_graph, create_graph, inputs=wanted)
                return dict.fromkeys(payloads)

            self._meet("backward", lambda: self.weights.combined(torch.stack(stacked).sum(dim=0)), combine)

    @property
    def rows_of_each(self) -> int:
        """As of `LaneWeights`."""
        return self.weights.rows_of_each

    def _is_hooked(self) -> bool:
        return any(hooks_on_gradient(one) or hooks_after_accumulation(one) for one in self._registry.tensors())

    def _behind(self, inputs: Tensors | None) -> list[torch.Tensor] | None:
        """The tensors that gradients are accumulated in."""
        if inputs is None:
            return None
        wanted = _listed(inputs)
        for tensor in wanted:
            if self.lanes.is_lane_tensor(tensor):
                raise UnsupportedError(
                    "backward(inputs=…) was given a tensor that differs between replicas; on this strategy only "
                    "variables accumulate gradients. Use torch.autograd.grad(loss, tensor) for the gradient of a "
                    "replica's own tensor."
                )
        return wanted

    def grad(
        self,
        outputs: Tensors,
        inputs: Tensors,
        grad_outputs: Gradients | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """As `torch.autograd.grad`: each replica's own gradient, with respect to variables too (see `_local_grad`)."""
        if self.lanes.is_inside_transform:
            rest = (retain_graph, create_graph, only_inputs, allow_unused, is_grads_batched, materialize_grads)
            inner: tuple[torch.Tensor, ...] = torch.autograd.grad(outputs, inputs, grad_outputs, *rest)
            return inner
        roots, wanted = _listed(outputs), _listed(inputs)
        given = _gradients(grad_outputs, roots)
        if is_grads_batched:
            raise UnsupportedError("autograd.grad(is_grads_batched=True) does not work in a step of this strategy.")
        if any(not self.lanes.is_lane_tensor(tensor) for tensor in wanted):
            return self._local_grad(roots, given, wanted, retain_graph, create_graph, allow_unused, materialize_grads)
        with self.lanes.left("autograd.grad"), torch.enable_grad():
            losses = [self._lane_sums(root, one) for root, one in zip(roots, given, strict=True)]
            of_lanes = torch.stack(losses).sum(dim=0)
            # A replica's own gradient of its own loss needs no weights, one of which may be 0.
            is_each = not (self.weights.are_crossed or self._has_hooks)
            total = of_lanes.sum() if is_each else self.weights.combined(of_lanes)
            behind = [self.lanes.behind(tensor) for tensor in wanted]

            def combine(
                payloads: dict[int, tuple[torch.Tensor, list[torch.Tensor]]],
            ) -> dict[int, list[torch.Tensor | None]]:
                totals, inputs = zip(*payloads.values(), strict=True)
                flat = torch.autograd.grad(
                    totals[0] if len(totals) == 1 else torch.stack(totals).sum(),
                    [one for own in inputs for one in own],
                    None,
                    retain_graph,
                    create_graph,
                    allow_unused=allow_unused,
                    materialize_grads=materialize_grads,
                )
                rest = iter(flat)
                return {index: [next(rest) for _ in own] for index, own in zip(payloads, inputs, strict=True)}

            # Passes have to do with each other only where replicas have exchanged tensors.
            found = (
                self._meet("autograd.grad", (total, behind), combine)
                if self.weights.are_crossed
                else combine({0: (total, behind)})[0]
            )
            own = [
                one if one is None or is_each else self._unweighted(one, tensor)
                for one, tensor in zip(found, wanted, strict=True)
            ]
        pairs = zip(own, wanted, strict=True)
        return tuple(None if one is None else self.lanes.hide_as(one, tensor) for one, tensor in pairs)

    def _local_grad(
        self,
        roots: list[torch.Tensor],
        given: list[torch.Tensor | None],
        wanted: list[torch.Tensor],
        retain_graph: bool | None,
        create_graph: bool,
        allow_unused: bool | None,
        materialize_grads: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """With respect to variables, which the lanes share: the gradient of each lane's loss by itself, so one backward
        pass per lane; of variables with hooks the combined one.

        Raises:
            UnsupportedError: replicas have exchanged tensors in this step, so that a loss depends on how other replicas
                use the variables, too.
        """
        if self.weights.are_crossed:
            raise UnsupportedError(
                "torch.autograd.grad with respect to variables, in a step that has used all_reduce, all_gather or "
                "batch normalisation over all replicas, is not possible on this strategy. Use loss.backward() and "
                ".grad."
            )
        hooked = [one for one in wanted if not self.lanes.is_lane_tensor(one) and hooks_on_gradient(one)]
        own_to = [one for one in wanted if all(one is not other for other in hooked)]
        options = partial(
            torch.autograd.grad,
            create_graph=create_graph,
            allow_unused=True if materialize_grads and allow_unused is None else allow_unused,
        )
        with self.lanes.left("autograd.grad"), torch.enable_grad():
            rows = [self._lane_sums(root, one) for root, one in zip(roots, given, strict=True)]
            losses = torch.stack(rows).sum(dim=0)
            found: dict[int, torch.Tensor | None] = {}
            if own_to:
                behind = [self.lanes.behind(tensor) for tensor in own_to]
                each = self._of_each_lane(options, losses, behind, True if hooked else retain_graph)
                for tensor, gradients in zip(own_to, each, strict=True):
                    own = self._diagonal(gradients, tensor)
                    found[id(tensor)] = None if own is None else self.lanes.hide(own)
            if hooked:
                combined = self._of_all_lanes(options, losses, hooked, retain_graph)
                found.update(zip(map(id, hooked), combined, strict=True))
        if materialize_grads:  # of many losses at once PyTorch makes them without the losses' dimension
            for tensor in wanted:
                if found[id(tensor)] is None:
                    found[id(tensor)] = torch.zeros_like(tensor, requires_grad=create_graph)
        return tuple(found[id(tensor)] for tensor in wanted)

    def _of_each_lane(
        self,
        differentiate: Callable[..., Sequence[torch.Tensor | None]],
        losses: torch.Tensor,
        inputs: list[torch.Tensor],
        retain_graph: bool | None,
    ) -> Sequence[torch.Tensor | None]:
        """``[lanes, …]``: of each lane's loss by itself. All in one, but where hooks look at one lane's gradient."""
        each = torch.eye(self.lanes.count, dtype=losses.dtype, device=losses.device)
        if not self._has_hooks:
            return differentiate(losses, inputs, each, retain_graph=retain_graph, is_grads_batched=True)
        found = []
        try:
            for self._alone, one in enumerate(each.unbind(0)):
                is_last = self._alone == len(each) - 1
                found.append(differentiate(losses, inputs, one, retain_graph=retain_graph if is_last else True))
        finally:
            self._alone = None
        return [None if own[0] is None else torch.stack(own) for own in zip(*found, strict=True)]

    def _of_all_lanes(
        self,
        differentiate: Callable[..., Sequence[torch.Tensor | None]],
        losses: torch.Tensor,
        variables: list[torch.Tensor],
        retain_graph: bool | None,
    ) -> Sequence[torch.Tensor | None]:
        """The combined gradients, which hooks of variables are given: what they make of them is all lanes'."""

        def combine(totals: dict[int, torch.Tensor]) -> dict[int, Sequence[torch.Tensor | None]]:
            found = differentiate(torch.stack(list(totals.values())).sum(), variables, retain_graph=retain_graph)
            return {index: [None if one is None else one.clone() for one in found] for index in totals}

        return self._meet("autograd.grad", self.weights.combined(losses), combine)

    def _diagonal(self, gradients: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor | None:
        """Of each lane's loss: with respect to a lane tensor, the part that is the lane's own."""
        if gradients is None or not self.lanes.is_lane_tensor(tensor):
            return gradients
        at = self.lanes.dim_of(tensor)
        return torch.diagonal(gradients.movedim(at + 1, 1), dim1=0, dim2=1).movedim(-1, 0)

    def combined_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that a step assigns to a variable: what the replicas' ones combine to."""
        with self.lanes.left("an assignment to .grad"):
            own = self.weights.with_factors(self.lanes.stacked(gradient)).sum(dim=0)

            def combine(shares: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
                if len(shares) == 1:
                    return shares
                total = torch.stack(list(shares.values())).sum(dim=0)
                return {index: total.clone() for index in shares}  # each pass may edit its gradient in place

            return self._meet("an assignment to .grad", own, combine)

    def _lane_sums(self, root: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """``[lanes]``: what each lane differentiates."""
        if gradient is None and root.numel() != 1:
            raise InvalidArgumentError(
                "backward needs a scalar, and so does autograd.grad, or the gradient of the output; got a tensor of "
                f"shape {tuple(root.shape)} on each replica."
            )
        if gradient is not None and gradient.shape != root.shape:
            raise InvalidArgumentError(
                f"backward and autograd.grad were given a gradient of shape {tuple(gradient.shape)} for an output of "
                f"shape {tuple(root.shape)} on each replica; the two must be equal."
            )
        stacked = self.lanes.stacked(root)
        if gradient is not None:
            stacked = stacked * self.lanes.stacked(gradient)
        return stacked.reshape(self.lanes.count, -1).sum(dim=1)

    def gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """``.grad`` of a replica's own tensor: this replica's gradient of its own loss."""
        behind = self.lanes.behind(tensor)
        if behind.grad is None:
            return None
        with self.lanes.left("grad"):
            own = self._unweighted(behind.grad, tensor)
        return self.lanes.hide_as(own, tensor)

    def _unweighted(self, gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Of the combined loss, with respect to what is behind a lane tensor: as the gradient of each lane's own loss.

        Not the gradient of the plain sum of losses: where replicas exchange tensors (`cross_lanes`), what comes back is
        right for weighted losses only.
        """
        return self.weights.without_factors(gradient, self.lanes.dim_of(tensor))

    def register_hook(
        self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> RemovableHandle:
        """As `torch.Tensor.register_hook`; on a replica's own tensor ``hook`` sees this replica's gradient."""
        if not self.lanes.is_lane_tensor(tensor):
            plain: RemovableHandle = tensor.register_hook(hook)
            return plain
        at = self.lanes.dim_of(tensor)
        self._has_hooks = True
        with self.lanes.left("register_hook") as left:
            levels = list(left)

            def hooked(gradient: torch.Tensor) -> torch.Tensor | None:
                own = gradient if self._alone is not None else self.weights.without_factors(gradient, at)
                with functorch.return_to_levels(levels):
                    changed = hook(self.lanes.hide_as(own, tensor))
                if changed is None:
                    return None
                stacked = self.lanes.stacked(changed).movedim(0, at)
                if self._alone is None:
                    return stacked * self.weights.factors(gradient, at)
                is_its = torch.arange(self.lanes.count, device=stacked.device) == self._alone
                shape = [-1 if dim == at else 1 for dim in range(stacked.ndim)]
                return torch.where(is_its.reshape(shape), stacked, torch.zeros_like(stacked))

            of_lanes: RemovableHandle = self.lanes.behind(tensor).register_hook(hooked)
            return of_lanes
