"""The logical devices of this process's replica: where this process is among them, and what they do together.

To tensors they are axes, each of which cuts a dimension (`LogicalAxes`, which asks no process). What they send each
other is counted (`Traffic`).

Axes are as fine as they can be: their sizes are primes. So one set of axes serves all partitions whose tiles are
numbered alike: 4 logical devices are two axes of 2, and a tensor cut 4 × 1, 1 × 4 or 2 × 2 gives each axis a dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from torchstrat.core.engine import Communicator
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.distributed.collectives.agreement import agree
from torchstrat.sharding.grid import REPLICA_AXIS, Sharding, logical_axis


class SameCalls:
    """Makes sure that the logical devices of a replica make the same calls where what carries their tensors compares
    none: sockets. ``channel``: of these devices, for nothing else than this.

    There a sum that one process alone asks for would be answered by what another sends for its next one. So they agree
    on a call before they make it, once: a step that repeats the last one costs nothing. A process that calls another
    thing says so where the others do not come, and that is found while both wait, as different calls elsewhere are
    (`torchstrat.distributed.collectives.notes`).
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._agreed: list[str] = []
        """The calls of the last step, of this one as far as it has come."""
        self._place: int | None = None
        """How many calls this step has made; None outside of steps, where each call is agreed on."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._place = 0
        try:
            yield
            if self._place < len(self._agreed):
                agree(self._channel, "the end of a step")
                del self._agreed[self._place :]
        finally:
            self._place = None

    def expect(self, call: str) -> None:
        """Before each call. Raises `ReplicaDivergenceError` or `CommunicationError` where others make another one."""
        place = self._place
        if place is None:
            agree(self._channel, call)
            return
        if place >= len(self._agreed) or self._agreed[place] != call:
            agree(self._channel, call, (place,))
            self._agreed[place:] = [call]
        self._place = place + 1


Cut = tuple[int | None, ...]
"""For each axis the dimension that it cuts; None: whole along it. Axes that cut one dimension: the slowest first."""


class LogicalAxes:
    """``mesh_shape``: how sharding rules see the logical devices, the sizes of ``d0``, ``d1``, …"""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.sizes = tuple(prime for size in self.mesh_shape for prime in _primes(size))
        names = []
        for index, size in enumerate(self.mesh_shape):
            several = len(_primes(size)) > 1
            names += [f"{logical_axis(index)}{f'_{n}' if several else ''}" for n in range(len(_primes(size)))]
        self.names = tuple(names)
        """``d0`` for an axis of the rules that is one axis here, else ``d0_0``, ``d0_1``, …"""

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def num_logical_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def whole(self) -> Cut:
        return (None,) * self.count

    def coordinates(self, logical: int) -> tuple[int, ...]:
        """Where logical device ``logical`` is along each axis; row-major."""
        found = []
        for size in reversed(self.sizes):
            logical, place = divmod(logical, size)
            found.append(place)
        return tuple(reversed(found))

    def size_of(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def index_along(self, logical: int, axes: Sequence[int]) -> int:
        """The number of a logical device among those that differ from it along ``axes`` only, in their order."""
        place = self.coordinates(logical)
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + place[axis]
        return index

    def peers(self, logical: int, axes: Sequence[int]) -> tuple[int, ...]:
        """The logical devices that differ from ``logical`` along ``axes`` only, itself among them, in order."""
        own, others = self.coordinates(logical), [axis for axis in range(self.count) if axis not in axes]
        every = ((device, self.coordinates(device)) for device in range(self.num_logical_devices))
        return tuple(device for device, place in every if all(place[axis] == own[axis] for axis in others))

    # -- cuts -------------------------------------------------------------------------------------------------------

    def cut_of(self, sharding: Sharding) -> Cut:
        """Raises `InvalidArgumentError` for a partition that numbers its tiles in another way, `UnsupportedError` for
        axes that cut one dimension in another order than theirs."""
        groups = self._groups(sharding.axis_sizes)
        cut: list[int | None] = [None] * self.count
        for dim, names in enumerate(sharding.spec):
            axes = [axis for name in names for axis in groups[int(name[1:])]]
            if axes != sorted(axes):
                raise UnsupportedError(
                    f"dimension {dim} is to be cut along {', '.join(names)}, in this order; on this strategy the axes "
                    f"that cut one dimension go in the order of their numbers: {', '.join(sorted(names))}."
                )
            for axis in axes:
                cut[axis] = dim
        return tuple(cut)

    def _groups(self, sizes: Sequence[int]) -> list[list[int]]:
        """For each of an arrangement's axes which axes here make it up."""
        groups, position = [], 0
        for size in sizes:
            group: list[int] = []
            while self.size_of(group) < size and position < self.count:
                group.append(position)
                position += 1
            if self.size_of(group) != size:
                raise InvalidArgumentError(
                    f"parts {tuple(sizes)} do not fit the logical devices, which are arranged as {self.mesh_shape} in "
                    f"axes of {self.sizes}: each number of parts has to be a product of sizes that follow one another "
                    f"there. Pass logical_mesh_shape={tuple(size for size in sizes if size > 1)} to the strategy."
                )
            groups.append(group)
        return groups

    def sharding_of(self, cut: Cut, rank: int) -> Sharding:
        """For showing; its axes are the fine ones, numbered through."""
        spec: list[list[str]] = [[] for _ in range(rank)]
        for axis, dim in enumerate(cut):
            if dim is not None:
                spec[dim].append(logical_axis(axis))
        return Sharding(self.sizes, tuple(tuple(names) for names in spec))

    def axes_of(self, cut: Cut, dim: int) -> tuple[int, ...]:
        """Those that cut dimension ``dim``."""
        return tuple(axis for axis, own in enumerate(cut) if own == dim)

    def parts(self, cut: Cut, dim: int) -> int:
        return self.size_of(self.axes_of(cut, dim))

    def piece_shape(self, shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
        """Of a tensor of ``shape``, which has to divide."""
        return tuple(size // self.parts(cut, dim) for dim, size in enumerate(shape))

    def whole_shape(self, piece: Sequence[int], cut: Cut) -> tuple[int, ...]:
        return tuple(size * self.parts(cut, dim) for dim, size in enumerate(piece))


def cut_axes(cut: Cut) -> tuple[int, ...]:
    """The axes that cut anything."""
    return tuple(axis for axis, dim in enumerate(cut) if dim is not None)


def _primes(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


@dataclass
class Traffic:
    """Bytes that one process sends, by the kind of exchange, since `clear`.

    Counted is what each kind has to send on the best known way: of a sum of n bytes over P processes 2 n (P - 1) / P,
    of n bytes that all others get (pieces, maxima, and also the edges of bands) n (P - 1). What an implementation sends
    on top (gloo's and NCCL's headers) is not counted.
    """

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, sent: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent

    def clear(self) -> None:
        self.calls.clear()
        self.sent_bytes.clear()

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def __str__(self) -> str:
        parts = [f"{kind} {self.sent_bytes[kind]:,} bytes in {self.calls[kind]}" for kind in sorted(self.calls)]
        return ", ".join(parts) or "nothing"


CALL = "a sum or an exchange of pieces between the logical devices of a replica"
_calls: dict[str, str] = {"": CALL}


class LogicalDevices:
    """All logical devices of a replica call the collectives in the same order, with pieces of equal shapes.

    Args:
        mesh: the job's, with the axes ``replica`` and those of ``axes``.
        own: which logical device this process is.
        groups: non-empty set of axes → those of the replica's processes that differ from this one along these axes
            only, in the order of `LogicalAxes.peers`.
        device: where pieces are.
        calls: what makes sure that all make the same ones, where the groups do not.
    """

    def __init__(
        self,
        axes: LogicalAxes,
        mesh: DeviceMesh,
        own: int,
        groups: dict[tuple[int, ...], Communicator],
        device: torch.device,
        calls: SameCalls | None = None,
    ) -> None:
        self.axes, self.own, self.device = axes, own, device
        self.mesh = mesh[axes.names]
        self._groups = groups
        self.calls = calls
        self.traffic = Traffic()
        self.doing = ""
        """The operator that a step is in, or the call for which a value is put together; going backward, none."""

    @property
    def everyone(self) -> Communicator:
        """All logical devices of the replica."""
        return self._groups[tuple(range(self.axes.count))]

    def placements(self, cut: Cut) -> tuple[Placement, ...]:
        return tuple(Replicate() if dim is None else Shard(dim) for dim in cut)

    # -- pieces -----------------------------------------------------------------------------------------------------

    def own_part(self, whole: torch.Tensor, axes: Sequence[int], dim: int) -> torch.Tensor:
        """The part of ``whole`` that is this process's when dimension ``dim`` is cut along ``axes``; a view."""
        size, rest = divmod(whole.shape[dim], self.axes.size_of(axes))
        assert not rest, (tuple(whole.shape), dim, axes)
        return whole.narrow(dim, self.axes.index_along(self.own, axes) * size, size)

    def own_piece(self, whole: torch.Tensor, cut: Cut) -> torch.Tensor:
        """A view."""
        for dim in range(whole.ndim):
            axes = self.axes.axes_of(cut, dim)
            if axes:
                whole = self.own_part(whole, axes, dim)
        return whole

    def whole(self, piece: torch.Tensor, cut: Cut, call: str) -> torch.Tensor:
        """The tensor that ``piece`` is this process's piece of. No graph. ``call``: what it is for."""
        before, self.doing = self.doing, call
        try:
            for dim in range(piece.ndim):
                axes = self.axes.axes_of(cut, dim)
                if axes:
                    piece = self.gathered(piece, axes, dim)
        finally:
            self.doing = before
        return piece

    # -- collectives ------------------------------------------------------------------------------------------------

    @property
    def _call(self) -> str:
        """By what name a process meets the others: one that has called another operator is found by it."""
        call = _calls.get(self.doing)
        if call is None:
            call = _calls[self.doing] = f"{self.doing} on a tensor that is cut over logical devices ({CALL})"
        return call

    def _group_for(self, kind: str, tensor: torch.Tensor, axes: Sequence[int]) -> Communicator:
        """For an exchange of this kind."""
        if self.calls is not None:
            parts = (tensor.dtype, tuple(tensor.shape), *(self.axes.names[axis] for axis in axes))
            self.calls.expect(f"{self._call}: {kind} of {', '.join(map(str, parts))}")
        return self._groups[tuple(axes)]

    def summed(self, tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """The sum over the processes along ``axes``, as a new tensor; all of them get the same bits."""
        group = self._group_for("sums", tensor, axes)
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, self._call).wait()
        self.traffic.add("sums", 2 * total.nbytes * (group.size - 1) // group.size)
        return total

    def largest(
        self, tensor: torch.Tensor, axes: Sequence[int], of: Callable[..., torch.Tensor] = torch.amax
    ) -> torch.Tensor:
        """The same for the elementwise maximum, or minimum."""
        return of(torch.stack(self._exchanged(tensor, axes, "maxima")), 0)

    def gathered(self, piece: torch.Tensor, axes: Sequence[int], dim: int) -> torch.Tensor:
        """The pieces along ``axes``, one after the other in dimension ``dim``."""
        return torch.cat(self._exchanged(piece, axes, "pieces"), dim)

    def _exchanged(self, tensor: torch.Tensor, axes: Sequence[int], kind: str) -> list[torch.Tensor]:
        group = self._group_for(kind, tensor, axes)
        received = group.all_gather(tensor.detach().contiguous(), self._call)
        self.traffic.add(kind, tensor.nbytes * (group.size - 1))
        return received

    def edges(
        self, to_previous: torch.Tensor, to_next: torch.Tensor, axes: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Give each neighbour along ``axes`` a tensor. What the previous and the next have given; None at the ends."""
        flat = torch.cat([to_previous.detach().reshape(-1), to_next.detach().reshape(-1)])
        group = self._group_for("edges", flat, axes)
        index = group.rank
        received = group.all_gather(flat, self._call)
        self.traffic.add("edges", flat.nbytes * (group.size - 1))
        sizes = [to_previous.numel(), to_next.numel()]
        previous = received[index - 1].split(sizes)[1].view(to_next.shape) if index > 0 else None
        last = index == group.size - 1
        following = None if last else received[index + 1].split(sizes)[0].view(to_previous.shape)
        return previous, following


def make_mesh(axes: LogicalAxes, replicas: int, device: str) -> DeviceMesh:
    """The job's, ``(replica, *axes)``. Every process calls it: it makes process groups."""
    shape = (replicas, *axes.sizes)
    ranks = torch.arange(replicas * axes.num_logical_devices, device="cpu").reshape(shape)
    return DeviceMesh(device.partition(":")[0], ranks, mesh_dim_names=(REPLICA_AXIS, *axes.names))


def make_groups(
    axes: LogicalAxes, replicas: int, rank: int, make: Callable[[tuple[int, ...]], Communicator]
) -> dict[tuple[int, ...], Communicator]:
    """The groups of `LogicalDevices`, by ``make(ranks)``, which every process calls for the groups of all of them."""
    logical = axes.num_logical_devices
    own_replica, own = divmod(rank, logical)
    found: dict[tuple[int, ...], Communicator] = {}
    for count in range(1, axes.count + 1):
        for chosen in itertools.combinations(range(axes.count), count):
            for replica in range(replicas):
                for peers in dict.fromkeys(axes.peers(device, chosen) for device in range(logical)):
                    group = make(tuple(replica * logical + device for device in peers))
                    if replica == own_replica and own in peers:
                        found[chosen] = group
    return found
