"""Reads the compiler's dumps: what every device computes, on pieces of which shapes, and what it sends to the others.

With `DUMP_FLAGS` in ``XLA_FLAGS`` each compilation leaves, among others, the program just after it was partitioned:
HLO text (https://openxla.org/xla/hlo_to_llvm and ``xla/hlo/parser``) in which all shapes are those of one device's
piece and all communication is explicit, before fusion makes it hard to read. Only text is parsed; nothing is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

DUMP_FLAGS = "--xla_dump_hlo_as_text --xla_dump_hlo_pass_re=spmd-partitioning"
"""What ``XLA_FLAGS`` needs besides the folder, ``--xla_dump_to=``."""

COMPILES_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""For ``XLA_FLAGS``: machine code for CPUs as it comes, half the work of a compilation. What is partitioned, fused and
computed is as without it."""

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

Groups = tuple[tuple[int, ...], ...]


class Shape(NamedTuple):
    """One device's piece: ``str()`` is HLO's own ``f32[4,8]``, without the layout."""

    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


class Instruction(NamedTuple):
    """``shapes``: of the result, more than one for a tuple. ``operands``: names. ``attributes``: what follows them."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    in_entry: bool


class Collective(NamedTuple):
    """``groups``: the partitions that exchange with each other; for a collective-permute the pairs (from, to)."""

    opcode: str
    groups: Groups
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]

    def __str__(self) -> str:
        return f"{self.opcode} of {', '.join(map(str, self.operands))} in {[list(group) for group in self.groups]}"


@dataclass(frozen=True)
class Module:
    """One compiled program as one device runs it. ``number``: of the compilation, from 0 in each process."""

    text: str
    number: int = 0

    @cached_property
    def name(self) -> str:
        found = re.match(r"HloModule ([^\s,]+)", self.text)
        if found is None:
            raise ValueError(f"not the text of an HLO module: {self.text[:60]!r}")
        return found[1]

    @cached_property
    def num_partitions(self) -> int:
        """For how many devices the program was partitioned; HLO leaves a 1 out."""
        found = re.search(r"\bnum_partitions=(\d+)", self.text.partition("\n")[0])
        return int(found[1]) if found else 1

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(_instructions(self.text))

    @cached_property
    def parameters(self) -> tuple[Shape, ...]:
        """The program's arguments in order: on each device the piece that it holds."""
        arguments = [one for one in self.instructions if one.in_entry and one.opcode == "parameter"]
        return tuple(one.shapes[0] for one in sorted(arguments, key=lambda one: int(one.operands[0])))

    def shapes_of(self, *opcodes: str) -> tuple[Shape, ...]:
        """Results of instructions, in the order of the program: of ``"convolution"`` and ``"dot"`` the activations."""
        return tuple(shape for one in self.instructions if one.opcode in opcodes for shape in one.shapes)

    def collectives(self, *opcodes: str) -> tuple[Collective, ...]:
        """All communication, or that of some of `COLLECTIVES`."""
        if unknown := set(opcodes) - set(COLLECTIVES):
            raise ValueError(f"{sorted(unknown)} unknown; choose from {COLLECTIVES}")
        shapes = {one.name: one.shapes for one in self.instructions}
        return tuple(
            Collective(
                opcode,
                _groups(one.attributes, self.num_partitions),
                tuple(shape for operand in one.operands for shape in shapes[operand]),
                one.shapes,
            )
            for one in self.instructions
            if (opcode := one.opcode.removesuffix("-start")) in (opcodes or COLLECTIVES)
        )


class DumpFolder:
    """Where a process that was started with `DUMP_FLAGS` writes its programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def compiled(self) -> int:
        """How many programs there are so far; to be given as ``after`` later."""
        return 1 + max((number for number, _ in self._files()), default=-1)

    def modules(self, *, after: int = 0) -> list[Module]:
        """The partitioned programs in the order of their compilation, without the first ``after`` of the process."""
        return [Module(path.read_text(), number) for number, path in self._files() if number >= after]

    def training_steps(self, *, after: int = 0) -> list[Module]:
        """The programs at least half as long as the longest: the step that finds no optimizer state, then the one that
        does. What a loop does between steps (a mean of losses, a copy) takes a handful of instructions."""
        modules = self.modules(after=after)
        longest = max((len(module.instructions) for module in modules), default=0)
        return [module for module in modules if 2 * len(module.instructions) >= longest]

    def training_step(self, *, after: int = 0) -> Module:
        """The last of `training_steps`: the one that all later steps are."""
        steps = self.training_steps(after=after)
        if not steps:
            raise LookupError(f"{self.folder} has no partitioned program of number {after} or later")
        return steps[-1]

    def _files(self) -> list[tuple[int, Path]]:
        paths = self.folder.glob("module_*.after_spmd-partitioning.*.txt")
        return sorted((int(path.name.split(".")[0].removeprefix("module_")), path) for path in paths)


_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_DEFINITION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")


def _instructions(text: str) -> Iterator[Instruction]:
    in_entry = False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            in_entry = line.startswith("ENTRY")
        definition = _DEFINITION.match(line)
        if definition is None:
            continue
        name, rest = definition.groups()
        # A tuple's shape is in parentheses too: the opcode is looked for behind it.
        start = _closing(rest, 0) if rest.startswith("(") else 0
        opcode = _OPCODE.search(rest, start)
        if opcode is None:
            raise ValueError(f"not an HLO instruction: {line!r}")
        end = _closing(rest, opcode.end() - 1)
        arguments = rest[opcode.end() : end]
        operands = (arguments,) if opcode[1] == "parameter" else tuple(_OPERAND.findall(arguments))
        yield Instruction(name, opcode[1], _shapes(rest[: opcode.start()]), operands, rest[end + 1 :], in_entry)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"a parenthesis is not closed: {text!r}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(Shape(dtype, _numbers(dims)) for dtype, dims in _SHAPE.findall(text))


def _groups(attributes: str, num_partitions: int) -> Groups:
    """Of ``replica_groups={{0,1},{2,3}}``, its short form ``[2,2]<=[4]``, or ``source_target_pairs={{0,1}}``."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if listed:
        groups = tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", listed[1])))
        return groups or (tuple(range(num_partitions)),)  # {}: all together
    short = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if short is None:
        raise ValueError(f"no groups of devices in {attributes!r}")
    (count, size), dims = _numbers(short[1]), _numbers(short[2])
    order = _numbers(short[3]) if short[3] else tuple(range(len(dims)))
    # iota over dims, transposed by order, in rows of `size`
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    flat = [
        sum(index * strides[axis] for index, axis in zip(place, order, strict=True))
        for place in product(*(range(dims[axis]) for axis in order))
    ]
    return tuple(tuple(flat[row * size : (row + 1) * size]) for row in range(count))
