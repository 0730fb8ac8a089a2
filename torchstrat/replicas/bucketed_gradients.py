"""Gradients of one replica per process: combined while backward runs, complete when ``backward()`` returns."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch

from torchstrat._torch_private import queue_backward_callback
from torchstrat.collectives.communicator import Communicator
from torchstrat.gradients import CombinedGradient, is_left_over, shares
from torchstrat.reduction import ReduceOp
from torchstrat.replicas.agreement import agree
from torchstrat.replicas.buckets import Bucket, Plan, make_buckets

BACKWARD = "backward() (gradients are combined as they become ready)"
_SPARSE = 1 << 20  # added to a gradient's place in the ready order to say that it is sparse


class BucketedGradients:
    """The gradients of one process. Each decision that starts a collective follows from what all ranks know alike."""

    def __init__(self, op: ReduceOp) -> None:
        self._op = op
        self.no_sync = False
        self._unsynced: set[int] = set()
        self._synced: dict[int, CombinedGradient] = {}
        self._bases: dict[int, torch.Tensor | None] = {}
        self._plans: list[Plan] = []
        self._plan_tensors: tuple[int, ...] = ()
        self._tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}
        self._scaled = False
        self._active = False

    # -- a run ------------------------------------------------------------------------------------------------------

    def begin(
        self, tensors: list[torch.Tensor], communicator: Communicator, everyone: int, weight: Callable[[], float]
    ) -> None:
        """``tensors``: all captured ones, in one order on every rank. ``everyone`` counts the ranks of the job."""
        self._everyone = everyone
        self._tensors = tensors
        self._index = {id(tensor): index for index, tensor in enumerate(tensors)}
        if self._plan_tensors != tuple(self._index):
            self._plan_tensors, self._plans = tuple(self._index), []
            self._unsynced &= self._index.keys()
            self._synced = {key: value for key, value in self._synced.items() if key in self._index}
        self._communicator, self._weight = communicator, weight
        self._scaled = self.accumulates_apart
        self._pass = 0
        self._ready: dict[int, None] | None = None
        self._factors: list[float] | None = None
        self._active = True

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that came to be during the run, in the same order on every rank."""
        for tensor in tensors:
            if id(tensor) not in self._index:
                self._index[id(tensor)] = len(self._tensors)
                self._tensors.append(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._index

    def end(self) -> None:
        self._active = False

    @property
    def accumulates_apart(self) -> bool:
        """Whether ranks hold gradients of their own that are still to be combined, or will after this run."""
        return self._op is ReduceOp.MEAN and (self.no_sync or bool(self._unsynced))

    @property
    def needs_early_hooks(self) -> bool:
        """As in `gradient_exchange`: sums need to know what was there, and no_sync scales each share on its own."""
        return self._op is ReduceOp.SUM or self.no_sync or bool(self._unsynced)

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def before_accumulation(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self._active or id(tensor) not in self._index:
            return None
        key = id(tensor)
        if self._op is ReduceOp.SUM:
            if tensor.grad is None:
                self._bases[key] = None
            elif key not in self._bases or not tensor.grad.any():
                self._bases[key] = tensor.grad.detach().clone()
            return None
        if not self._scaled:
            return None
        if self._factors is None:
            self._factors = self._exchange_weights("backward() under no_sync (weights are exchanged at its start)")
        factor = self._factors[self._communicator.rank] * self._everyone
        return None if factor == 1.0 else gradient * factor

    def after_accumulation(self, tensor: torch.Tensor) -> None:
        index = self._index.get(id(tensor)) if self._active else None
        if index is None:
            return
        self._synced.pop(id(tensor), None)
        if self.no_sync:
            self._unsynced.add(id(tensor))
            return
        if self._ready is None:
            self._open_pass()
        assert self._ready is not None
        self._ready[index] = None
        bucket = self._plan.bucket_of.get(index)
        assert tensor.grad is not None
        if bucket is not None and tensor.grad.layout == torch.strided and index in bucket.waiting:
            self._contribute(index, bucket.views[index], tensor.grad)
            bucket.waiting.discard(index)
            self._plan.start_complete(self._communicator, BACKWARD)

    def _open_pass(self) -> None:
        self._ready = {}
        self._contributed: set[int] = set()
        factors = self._exchange_weights(BACKWARD)
        self._pass_factors = [1.0 / self._everyone] * len(factors) if self._scaled else factors
        while len(self._plans) <= self._pass:
            self._plans.append(Plan((), self._tensors))
        self._plan = self._plans[self._pass]
        self._plan.reset()
        queue_backward_callback(self._flush)

    def _exchange_weights(self, call: str) -> list[float]:
        weights = [row[0] for row in agree(self._communicator, call, (self._weight(),))]
        return shares(self._op, weights if any(weights) else [1.0] * len(weights))

    # -- combining --------------------------------------------------------------------------------------------------

    def _contribute(self, index: int, view: torch.Tensor, gradient: torch.Tensor) -> None:
        """Put this rank's share of a gradient into a buffer. Equal shares are divided after the sum."""
        self._contributed.add(index)
        with torch.no_grad():
            view.copy_(gradient)
            base = self._bases.get(id(self._tensors[index]))
            if base is not None:
                view.sub_(base)
            if not self._equal_factors and self._op is ReduceOp.MEAN:
                view.mul_(self._pass_factors[self._communicator.rank])

    @property
    def _equal_factors(self) -> bool:
        return all(factor == self._pass_factors[0] for factor in self._pass_factors)

    def _flush(self) -> None:
        """At the end of a pass: send the rest, learn what the others had, write the combined gradients back."""
        assert self._ready is not None
        ready, self._ready = self._ready, None
        for bucket in self._plan.buckets:
            for index in list(bucket.waiting):
                self._contribute_earlier(index, bucket)
        self._plan.start_all(self._communicator, BACKWARD)
        places = self._exchange_places(ready)
        touched = (places != 0).any(dim=0)
        sparse = (places >= _SPARSE).any(dim=0)
        union = [index for index in range(len(self._tensors)) if touched[index]]
        rest = [index for index in union if index not in self._plan.bucket_of and not sparse[index]]
        self._plan.wait()
        for bucket in self._plan.buckets:
            for index, view in bucket.views.items():
                if touched[index] and not sparse[index]:
                    self._write_back(index, view)
        self._combine_now(rest, ready)
        self._combine_sparse([index for index in union if sparse[index]])
        self._remake_plan(places, union, sparse)
        self._pass += 1

    def _contribute_earlier(self, index: int, bucket: Bucket) -> None:
        """For a gradient that this pass did not touch here, and perhaps elsewhere: what earlier passes left in it.

        A mean is taken of whole gradients, and that part is alike on all ranks. A sum is taken of what is new.
        """
        grad = self._tensors[index].grad
        if grad is not None and grad.layout == torch.strided and self._op is ReduceOp.MEAN:
            self._contribute(index, bucket.views[index], grad)
            bucket.waiting.discard(index)

    def _exchange_places(self, ready: dict[int, None]) -> torch.Tensor:
        """Per rank and tensor: 0 for no gradient in this pass, else its place in that rank's ready order, from 1.

        Gradients left over from ``no_sync`` are last; sparse ones are marked.
        """
        own = torch.zeros(len(self._tensors), dtype=torch.int32)
        late = [self._index[key] for key in self._unsynced if self._index[key] not in ready]
        for place, index in enumerate((*ready, *sorted(late)), start=1):
            grad = self._tensors[index].grad
            if grad is not None:
                own[index] = place + (_SPARSE if grad.layout != torch.strided else 0)
        return torch.stack(self._communicator.all_gather(own, BACKWARD))

    def _remake_plan(self, places: torch.Tensor, union: list[int], sparse: torch.Tensor) -> None:
        """The next plan of this pass: the first rank's order, then what only others had. Kept while it foresees all."""
        dense = [index for index in union if not sparse[index]]
        if set(dense) <= self._plan.bucket_of.keys():
            return
        first = places[0]
        order = sorted(dense, key=lambda index: (first[index] == 0, int(first[index]), index))
        self._plans[self._pass] = Plan(order, self._tensors)

    def _combine_now(self, indices: Sequence[int], ready: Container[int]) -> None:
        """Combine the gradients of these tensors at once; ranks without one contribute nothing."""
        for bucket in make_buckets(indices, self._tensors):
            bucket.reset()
            for index in bucket.indices:
                grad = self._tensors[index].grad
                if grad is not None and index in ready:
                    self._contribute(index, bucket.views[index], grad)
                    bucket.waiting.discard(index)
                else:
                    self._contribute_earlier(index, bucket)
            bucket.start(self._communicator, BACKWARD)
            assert bucket.work is not None
            bucket.work.wait()
            for index in bucket.indices:
                self._write_back(index, bucket.views[index])

    def _write_back(self, index: int, combined: torch.Tensor) -> None:
        """Make the combined gradient this rank's own: in its place where one is, else a new tensor."""
        tensor = self._tensors[index]
        base = self._bases.pop(id(tensor), None)
        with torch.no_grad():
            if self._op is ReduceOp.SUM and index not in self._contributed and tensor.grad is not None:
                base = tensor.grad.detach().clone()
            if self._op is ReduceOp.MEAN and self._equal_factors:
                combined.mul_(self._pass_factors[0])
            if base is not None:
                combined.add_(base)
            if tensor.grad is None or tensor.grad.requires_grad:
                tensor.grad = combined.clone().to(tensor.device)
            else:
                tensor.grad.copy_(combined)
        self._record(tensor)

    def _record(self, tensor: torch.Tensor) -> None:
        self._unsynced.discard(id(tensor))
        if tensor.grad is not None:
            self._synced[id(tensor)] = CombinedGradient(tensor.grad)

    def _combine_sparse(self, indices: Sequence[int]) -> None:
        for index in indices:
            tensor = self._tensors[index]
            own = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor).to_sparse()
            base = self._bases.pop(id(tensor), None)
            own = own.detach().to_sparse() if base is None else (own.detach() - base).to_sparse()
            total = self._gather_sparse((own.coalesce() * self._pass_factors[self._communicator.rank]).coalesce())
            tensor.grad = (total if base is None else total + base).to(tensor.device)
            self._record(tensor)

    def _gather_sparse(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' sparse tensors: entries padded to the longest, gathered, cut and joined."""
        communicator = self._communicator
        counts = [int(n) for n in communicator.all_gather(torch.tensor([own._nnz()]), BACKWARD)]
        longest = max(counts)
        indices, values = own.indices(), own.values()
        padded_indices = torch.zeros(indices.shape[0], longest, dtype=torch.int64)
        padded_indices[:, : indices.shape[1]] = indices
        padded_values = values.new_zeros(longest, *values.shape[1:])
        padded_values[: values.shape[0]] = values
        all_indices = communicator.all_gather(padded_indices, BACKWARD)
        all_values = communicator.all_gather(padded_values, BACKWARD)
        return torch.sparse_coo_tensor(
            torch.cat([one[:, :count] for one, count in zip(all_indices, counts, strict=True)], dim=1),
            torch.cat([one[:count] for one, count in zip(all_values, counts, strict=True)]),
            own.shape,
            check_invariants=False,  # joined from tensors that hold them; torch warns unless told
        ).coalesce()

    # -- at the optimizer's step ------------------------------------------------------------------------------------

    def left_over(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those with a gradient that no backward pass has combined: assigned by hand, or left by ``no_sync``."""
        return [t for t in tensors if is_left_over(t.grad, self._synced.get(id(t)), self._op)]

    def catch_up(self, candidates: Sequence[torch.Tensor]) -> None:
        """Combine what any rank has left over among ``candidates``, in a pass of its own. All ranks call it."""
        factors = self._exchange_weights("optimizer step (combining gradients that no backward pass combined)")
        self._pass_factors = [1.0 / self._everyone] * len(factors) if self._scaled else factors
        self._contributed = set()
        leftover = {id(tensor) for tensor in self.left_over(candidates)}
        ready = {self._index[id(t)]: None for t in candidates if id(t) in leftover and id(t) in self._index}
        places = self._exchange_places(ready)
        touched, sparse = (places != 0).any(dim=0), (places >= _SPARSE).any(dim=0)
        union = [index for index in range(len(self._tensors)) if touched[index]]
        self._combine_now([index for index in union if not sparse[index]], ready)
        self._combine_sparse([index for index in union if sparse[index]])

    def edited(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Combined gradients that the step has changed in place since (clipped, unscaled, made noisy)."""
        found = []
        for tensor in tensors:
            combined = self._synced.get(id(tensor))
            if tensor.grad is not None and combined is not None and combined.is_edited(tensor.grad):
                found.append(tensor.grad)
        return found

    def after_step(self, tensors: Iterable[torch.Tensor]) -> None:
        """An optimizer has used the gradients of ``tensors``; what is assigned to them from now on is new."""
        for tensor in tensors:
            combined = self._synced.get(id(tensor))
            if combined is not None:
                combined.use_up()
