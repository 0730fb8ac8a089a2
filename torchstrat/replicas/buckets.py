"""Gradients of one process, combined with those of the others in buckets that travel while backward goes on.

A *plan* says which gradients go into which bucket. It is made after the first backward pass from what every rank then
knows of all the others (the order in which rank 0's gradients became ready, as `DistributedDataParallel` does), so all
ranks hold the same plan and start the same collectives in the same order, whatever becomes ready first. The n-th
backward pass of a step has a plan of its own. What a plan did not foresee is combined when the pass ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchstrat.distributed.collectives.communicator import Communicator, Work

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

    def remake(self, number: int, order: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """The plan of that pass has these gradients from now on."""
        self._plans[number] = Plan(order, tensors)
