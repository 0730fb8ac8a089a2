"""The logical devices of a replica as axes, and which dimension of a tensor each axis cuts. Pure: no process is asked.

Axes are as fine as they can be: their sizes are primes. So one set of axes serves all partitions whose tiles are
numbered alike: 4 logical devices are two axes of 2, and a tensor cut 4 × 1, 1 × 4 or 2 × 2 gives each axis a dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.grid import Sharding, logical_axis

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
