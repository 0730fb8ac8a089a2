"""An order of chips in which each is next to the one before it, and the last next to the first."""

from __future__ import annotations

Chip = tuple[int, int, int]


def ring_of_chips(x_size: int, y_size: int, z_size: int) -> list[Chip]:
    """All chips of a grid as a closed walk that begins at the origin; neighbours in the list are linked in the mesh.

    In the plane it goes to and fro over all columns but the first, and back through the first. Here 4 × 4 chips, x to
    the right, y downwards::

         0  1  2  3
        15  6  5  4
        14  7  8  9
        13 12 11 10

    In space the planes are walked one after the other without their corner, every second one backwards, and the way
    back is the edge of corners.

    Where more than one size is above 1 and one of these is odd, the order is x first, then y, then z: it is what
    TensorFlow does, although neighbours are then not always linked. Along a single axis it is the line.
    """
    sizes = [size for size in (x_size, y_size, z_size) if size > 1]
    if len(sizes) <= 1 or any(size % 2 for size in sizes):
        return [(x, y, z) for z in range(z_size) for y in range(y_size) for x in range(x_size)]
    ring = [(0, 0, 0)]
    if z_size == 1:
        return ring + [(x, y, 0) for x, y in _around(x_size, y_size)]
    if y_size == 1:
        return ring + [(x, 0, z) for x, z in _around(x_size, z_size)]
    if x_size == 1:
        return ring + [(0, y, z) for y, z in _around(y_size, z_size)]
    plane = _around(x_size, y_size)
    for z in range(z_size):
        ring += [(x, y, z) for x, y in (reversed(plane) if z % 2 else plane)]
    return ring + [(0, 0, z) for z in range(z_size - 1, 0, -1)]


def _around(columns: int, rows: int) -> list[tuple[int, int]]:
    """All points (column, row) of a grid but the origin, as a walk from (1, 0) to (0, 1). ``rows`` is even."""
    walk: list[tuple[int, int]] = []
    for row in range(rows):
        walk += [(column, row) for column in (range(columns - 1, 0, -1) if row % 2 else range(1, columns))]
    return walk + [(0, row) for row in range(rows - 1, 0, -1)]
