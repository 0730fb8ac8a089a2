"""Gradients added up over replicas: at once where they lie or at their owners, or in buckets that travel while backward
goes on.

Sparse gradients (embeddings) of several ranks have each their own number of entries, or none.

A *plan* says which gradients go into which bucket. It is made after the first backward pass from what every rank then
knows of all the others (the order in which rank 0's gradients became ready, as `DistributedDataParallel` does), so all
ranks hold the same plan and start the same collectives in the same order, whatever becomes ready first. The n-th
backward pass of a step has a plan of its own. What a plan did not foresee is combined when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from torchstrat.core.engine import Communicator, Work
from torchstrat.core.gradients import Owned, as_dense, is_plain, share_memory
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.collectives.agreement import SumsInPlace
from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece
from torchstrat.replicas.gradient_records import GradientRecords

FIRST_BUCKET_BYTES = 1 << 20  # a small first bucket is under way early
BUCKET_BYTES = 25 << 20

PlanSignature = tuple[tuple[object, ...], ...]
"""Shape, dtype and device of all variables: plans are made for these."""


class Bucket:
    """Some gradients of one dtype and device, flat and contiguous in ``buffer``."""

    def __init__(self, indices: list[int], tensors: Sequence[torch.Tensor]) -> None:
        self.indices = indices
        first = tensors[indices[0]]
        sizes = [tensors[index].numel() for index in indices]
        self.buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        pieces = self.buffer.split(sizes)
        self.views = {index: piece.view(tensors[index].shape) for index, piece in zip(indices, pieces, strict=True)}
        self.waiting: set[int] = set()
        self.work: Work | None = None

    def reset(self) -> None:
        self.waiting = set(self.indices)
        self.work = None

    def start(self, communicator: Communicator, what: str) -> None:
        """Send; what was never filled counts as zero."""
        for index in self.waiting:
            self.views[index].zero_()
        self.work = communicator.all_reduce(self.buffer, what)


def make_buckets(order: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[Bucket]:
    """Buckets in ``order``, each of one dtype and device; the first at most 1 MiB, others 25 MiB (or one tensor)."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in order:
        tensor = tensors[index]
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        members, held = open_buckets.get(key, (None, 0))
        limit = FIRST_BUCKET_BYTES if members is not None and members is buckets[0] else BUCKET_BYTES
        if members is None or held + size > limit:
            members, held = [], 0
            buckets.append(members)
        members.append(index)
        open_buckets[key] = (members, held + size)
    return [Bucket(indices, tensors) for indices in buckets]


class Plan:
    """The buckets of one backward pass."""

    def __init__(self, order: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self.order = tuple(order)
        self.buckets = make_buckets(order, tensors)
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        self._next = 0

    def reset(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def start_complete(self, communicator: Communicator, what: str) -> None:
        """Send the buckets that are full, in order, up to the first that is not."""
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._start_next(communicator, what)

    def start_all(self, communicator: Communicator, what: str) -> None:
        while self._next < len(self.buckets):
            self._start_next(communicator, what)

    def _start_next(self, communicator: Communicator, what: str) -> None:
        self.buckets[self._next].start(communicator, what)
        self._next += 1

    def wait(self) -> None:
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()


class Plans:
    """Of the passes of a step, by their numbers; kept as long as the variables are of the same kinds."""

    def __init__(self) -> None:
        self._signature: PlanSignature = ()
        self._plans: list[Plan] = []

    def of_pass(self, number: int, signature: PlanSignature, tensors: Sequence[torch.Tensor]) -> Plan:
        """One that foresees nothing, at first."""
        if self._signature != signature:
            self._signature, self._plans = signature, []
        while len(self._plans) <= number:
            self._plans.append(Plan((), tensors))
        return self._plans[number]

    def remake(self, number: int, places: torch.Tensor, dense: set[int], tensors: Sequence[torch.Tensor]) -> None:
        """The plan of that pass has these gradients from now on: in the first rank's order (``places``), then what only
        others had. It is kept while it foresees all."""
        order = sorted(dense, key=lambda index: (places[index] == 0, int(places[index]), index))
        self._plans[number] = Plan(order, tensors)


def sum_of_sparse(
    communicator: Communicator, tensor: torch.Tensor, own: torch.Tensor | None, factor: float, what: str
) -> torch.Tensor:
    """The coalesced sum of the ranks' gradients of ``tensor``, each times its rank's ``factor``; sparse, on its device.

    ``own``: sparse COO, of the shape of ``tensor``; None on ranks that have none.
    """
    dims = [int(dim) for dim in communicator.all_gather(torch.tensor([0 if own is None else own.sparse_dim()]), what)]
    dim = min(dim for dim in dims if dim)
    if own is None:
        own = _without_entries(tensor, dim)
    elif own.sparse_dim() != dim:
        own = own.to_dense().to_sparse(dim)
    own = own.coalesce()
    return _gather(communicator, own.indices(), own.values() * factor, own.shape, what)


def _without_entries(tensor: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.zeros(sparse_dim, 0, dtype=torch.int64, device=tensor.device),
        tensor.new_zeros(0, *tensor.shape[sparse_dim:]).detach(),
        tensor.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _gather(
    communicator: Communicator, indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, what: str
) -> torch.Tensor:
    """Entries padded to the longest, gathered, cut and joined. ``indices``: (sparse_dim, n); ``values``: (n, …)."""
    counts = [int(n) for n in communicator.all_gather(torch.tensor([values.shape[0]]), what)]
    padded_indices = indices.new_zeros(indices.shape[0], max(counts))
    padded_indices[:, : indices.shape[1]] = indices
    padded_values = values.new_zeros(max(counts), *values.shape[1:])
    padded_values[: values.shape[0]] = values
    all_indices = communicator.all_gather(padded_indices, what)
    all_values = communicator.all_gather(padded_values, what)
    return torch.sparse_coo_tensor(
        torch.cat([one[:, :count] for one, count in zip(all_indices, counts, strict=True)], dim=1),
        torch.cat([one[:count] for one, count in zip(all_values, counts, strict=True)]),
        shape,
        check_invariants=False,  # joined from tensors that hold them; torch warns unless told
    ).coalesce()


Owners = Callable[[torch.Tensor], Owned | None]
"""Who is to have which elements of a variable's gradient; None if every rank needs all."""


# Added to a gradient's place in the ready order:
_SPARSE = 1 << 20  # it is sparse
_AGAIN = 1 << 21  # it was accumulated again after its bucket had been filled
_LOOSE = 1 << 22  # it is made of one that is combined, which a branch has spared other ranks


def places_in(
    order: Iterable[int], tensors: Sequence[torch.Tensor], again: Container[int], loose: Iterable[int]
) -> torch.Tensor:
    """What a rank tells the others of its gradients: per tensor 0 for none, else its place in ``order``, from 1, and
    what is special about it."""
    places = torch.zeros(len(tensors), dtype=torch.int32)
    for place, index in enumerate(order, start=1):
        if (gradient := tensors[index].grad) is not None:
            is_sparse = gradient.layout != torch.strided
            places[index] = place + _SPARSE * is_sparse + _AGAIN * (index in again)
    for index in loose:
        places[index] += _LOOSE
    return places


def kinds_in(places: torch.Tensor) -> tuple[set[int], set[int], set[int]]:
    """Of what all told: indices with a dense gradient on some rank, a sparse one, and one accumulated again."""
    present, is_sparse = places.bitwise_and(_SPARSE - 1) != 0, places.bitwise_and(_SPARSE) != 0
    kinds = (present & ~is_sparse, is_sparse, places.bitwise_and(_AGAIN) != 0)
    dense, sparse, again = (set(kind.any(dim=0).nonzero().flatten().tolist()) for kind in kinds)
    return dense, sparse, again


def lacking_in(places: torch.Tensor) -> dict[int, int]:
    """Indices of those made of combined ones that some ranks lack → the first rank that has it."""
    have = places.bitwise_and(_LOOSE) != 0
    found = (have.any(dim=0) & ~have.all(dim=0)).nonzero().flatten().tolist()
    return {index: int(have[:, index].int().argmax()) for index in found}


class GradientReducer:
    """What a rank contributes to a sum, and what becomes of it, in one pass after the other. All ranks make the same
    calls."""

    def __init__(self, op: ReduceOp, owners: Owners | None, records: GradientRecords) -> None:
        self._op = op
        self._owners = owners
        self._records = records
        self._tensors: Sequence[torch.Tensor] = ()
        self._communicator: Any = None  # a `Communicator` from the first run on
        self._summing: SumsInPlace | None = None
        self._scaled = self._works_by_parts = False
        self.shares: list[float] = []
        """Of the ranks, in the pass that goes on."""
        self.contributed: set[int] = set()
        """What this rank has brought in it."""
        self.factor_after = 1.0
        """Of what all ranks bring."""

    def begin(
        self, communicator: Communicator, summing: SumsInPlace | None, *, scaled: bool, works_by_parts: bool
    ) -> None:
        """A run begins. ``summing``: the communicator, if it adds up in place; ``scaled``: parts have been weighted as
        they were accumulated."""
        self._communicator, self._summing = communicator, summing
        self._scaled, self._works_by_parts = scaled, works_by_parts

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """The variables are these from now on."""
        self._tensors = tensors

    def begin_pass(self, call: str, shares: list[float]) -> None:
        self._call = call
        self.shares = shares
        self.contributed = set()
        self.factor_after = 1.0
        if self._op is ReduceOp.MEAN and shares.count(shares[0]) == len(shares):
            self.factor_after = shares[0]
        if self._scaled:
            self.factor_after = 1.0 / self._communicator.size

    def _factors_of(self, tensor: torch.Tensor) -> tuple[float, float]:
        """What this rank's contribution is multiplied by before the sum, and the sum afterwards.

        Equal shares are divided after the sum, which is exact for 2, 4, … ranks. A sum in half precision may not exist
        where the mean does.
        """
        before, after = self.shares[self._communicator.rank] / self.factor_after, self.factor_after
        if self._op is ReduceOp.SUM or (self._scaled and self._records.current(tensor).accumulated):
            before = 1.0  # it was weighted when it was accumulated
        return (before * after, 1.0) if tensor.dtype == torch.float16 else (before, after)

    def contribute(self, index: int, bucket: Bucket) -> None:
        """Put this rank's share of a gradient into its bucket."""
        tensor, view = self._tensors[index], bucket.views[index]
        assert tensor.grad is not None
        self.contributed.add(index)
        bucket.waiting.discard(index)
        with torch.no_grad():
            view.copy_(as_dense(tensor.grad))
            if self._works_by_parts and (base := self._records.take_base(tensor)) is not None:
                view.sub_(as_dense(base))
            factor, _ = self._factors_of(tensor)
            if factor == 0.0:
                view.zero_()  # whatever it is, nan not excepted
            elif factor != 1.0:
                view.mul_(factor)

    def contributes(self, index: int, ready: Container[int]) -> bool:
        """Whether this rank brings anything for a gradient that some rank has combined."""
        tensor = self._tensors[index]
        if tensor.grad is None:
            return False
        return index in ready or not self._works_by_parts or self._records.current(tensor).accumulated

    def combine_dense(self, indices: Sequence[int], ready: Container[int], *, everywhere: bool) -> None:
        """Combine the gradients of these tensors at once; ranks without one contribute nothing. ``everywhere``: all
        ranks are to have them, whoever owns them."""
        if self._summing is not None:
            self._combine_in_place(self._summing, indices, ready, everywhere)
            return
        for bucket in make_buckets(indices, self._tensors):
            bucket.reset()
            for index in bucket.indices:
                if self.contributes(index, ready):
                    self.contribute(index, bucket)
            bucket.start(self._communicator, self._call)
            assert bucket.work is not None
            bucket.work.wait()
            for index in bucket.indices:
                self.write_back(index, bucket.views[index])

    def _combine_in_place(
        self, communicator: SumsInPlace, indices: Sequence[int], ready: Container[int], is_everywhere: bool
    ) -> None:
        """The same without buckets: gradients are added up where they lie."""
        groups: dict[float, list[tuple[int, torch.Tensor]]] = {}
        gradients = [self._tensors[index].grad for index in indices]
        copies = share_memory([one for one in gradients if one is not None and one.layout == torch.strided])
        with torch.no_grad():
            for index in indices:
                before, after = self._factors_of(self._tensors[index])
                groups.setdefault(after, []).append((index, self._own_part(index, ready, before, copies)))
            for after, members in groups.items():
                everywhere = members
                if self._owners is not None and not is_everywhere:
                    everywhere = self._combine_at_owners(communicator, self._owners, members, after)
                communicator.sum_in_place([part for _, part in everywhere], after, self._call)
                for index, combined in everywhere:
                    self._put(index, combined)

    def _combine_at_owners(
        self, communicator: SumsInPlace, owners: Owners, members: list[tuple[int, torch.Tensor]], after: float
    ) -> list[tuple[int, torch.Tensor]]:
        """Leave gradients with their owners; those that have none, and are still to be combined, are returned."""
        everywhere = []
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor, Owned]]] = {}
        for index, part in members:
            owned = owners(self._tensors[index])
            if owned is None:
                everywhere.append((index, part))
            else:
                by_dtype.setdefault(part.dtype, []).append((index, part, owned))
        for kept in by_dtype.values():
            pieces: list[list[Piece]] = [[] for _ in range(self._communicator.size)]
            for place, (_, _, owned) in enumerate(kept):
                for rank, start, stop in owned:
                    pieces[rank].append(Piece(place, start, stop))
            communicator.sum_to_owners([part for _, part, _ in kept], after, pieces, self._call)
            for index, part, owned in kept:
                self._put(index, part)
                combined = self._records.current(self._tensors[index]).combined
                assert combined is not None
                combined.owned = owned
        return everywhere

    def _own_part(self, index: int, ready: Container[int], factor: float, copies: bool) -> torch.Tensor:
        """What this rank contributes, where it may be overwritten: its gradient itself, if that can be and no
        ``copies`` are wanted."""
        tensor = self._tensors[index]
        if not self.contributes(index, ready):
            return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        assert tensor.grad is not None
        self.contributed.add(index)
        base, part = self._records.take_base(tensor) if self._works_by_parts else None, tensor.grad
        if copies or not is_plain(part) or not part.is_contiguous():
            part = as_dense(part).detach().clone(memory_format=torch.contiguous_format)
        if base is not None:
            part.sub_(as_dense(base))
        if factor == 0.0:
            return part.zero_()
        return part if factor == 1.0 else part.mul_(factor)

    def _put(self, index: int, combined: torch.Tensor) -> None:
        """Make the combined gradient this rank's own, if it is not already."""
        tensor = self._tensors[index]
        earlier = self._earlier(index)
        if earlier is not None:
            combined.add_(as_dense(earlier))
        if tensor.grad is combined:
            self._records.note_combined(tensor)
            return
        if tensor.grad is None or not is_plain(tensor.grad):
            tensor.grad = torch.empty_like(tensor, requires_grad=False)
        tensor.grad.copy_(combined)
        self._records.note_combined(tensor)

    def _earlier(self, index: int) -> torch.Tensor | None:
        """What the combined gradient is to be added to: what this rank has and did not contribute."""
        tensor = self._tensors[index]
        state = self._records.current(tensor)
        if not self._works_by_parts:
            return None
        if state.accumulated:
            return state.base
        return None if index in self.contributed or tensor.grad is None else tensor.grad.detach()

    def write_back(self, index: int, combined: torch.Tensor) -> None:
        """Make the combined gradient this rank's own: in its place where one is, else a new tensor."""
        tensor = self._tensors[index]
        with torch.no_grad():
            _, factor = self._factors_of(tensor)
            if factor != 1.0:
                combined.mul_(factor)
            self._put(index, combined)

    def combine_sparse(self, indices: Sequence[int], ready: Container[int]) -> None:
        for index in indices:
            tensor = self._tensors[index]
            own = tensor.grad.detach() if tensor.grad is not None and self.contributes(index, ready) else None
            if own is not None:
                self.contributed.add(index)
            earlier = self._earlier(index)
            if own is not None and earlier is not None:
                own = own - earlier
            before, after = self._factors_of(tensor)
            if own is not None and not before:
                own = torch.zeros_like(own)  # whatever it is, nan not excepted
            total = sum_of_sparse(self._communicator, tensor, own, before * after, self._call)
            tensor.grad = (total if earlier is None else total + earlier).to(tensor.device)
            self._records.note_combined(tensor)
