"""How tensors are cut over replicas and their logical devices: grids, rules by name, and what is shown of it."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.annotations import ShardingRules
from torchstrat.sharding.explain import Explanation, explain_tensors
from torchstrat.sharding.grid import (
    REPLICA_AXIS,
    DeviceGrid,
    ShardedEntry,
    Sharding,
    joined_names,
    logical_axis,
    runs,
    size_text,
)

examples = settings(max_examples=60, deadline=None, derandomize=True)


def grid_of(replicas: int, logical_devices: int, order: list[int] | None = None) -> DeviceGrid:
    numbers = order or list(range(replicas * logical_devices))
    rows = [numbers[row * logical_devices : (row + 1) * logical_devices] for row in range(replicas)]
    return DeviceGrid(tuple(map(tuple, rows)))


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding, DeviceGrid]:
    """A shape, a sharding that it divides by, and a grid with its devices in any order."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    replicas = draw(st.integers(1, 3))
    count = replicas * math.prod(sizes)
    grid = grid_of(replicas, math.prod(sizes), draw(st.permutations(range(count))))
    axes = draw(st.permutations([REPLICA_AXIS, *map(logical_axis, range(len(sizes)))]))
    rank = draw(st.integers(1, 3))
    spec: list[list[str]] = [[] for _ in range(rank)]
    for axis in axes:
        dim = draw(st.integers(-1, rank - 1))  # -1: the axis cuts nothing
        if dim >= 0:
            spec[dim].append(axis)
    sharding = Sharding(sizes, tuple(map(tuple, spec)))
    shape = tuple(parts * draw(st.integers(1, 3)) for parts in sharding.parts(replicas))
    return shape, sharding, grid


@examples
@given(shardings())
def test_every_element_is_on_as_many_devices(drawn: tuple[tuple[int, ...], Sharding, DeviceGrid]) -> None:
    shape, sharding, grid = drawn
    held = torch.zeros(shape, dtype=torch.int64)
    tiles = sharding.tiles(shape, grid)
    for tile in tiles.values():
        assert held[tile].shape == sharding.tile_shape(shape, grid.num_replicas)
        held[tile] += 1
    count = grid.num_replicas * grid.num_logical_devices
    assert tiles.keys() == set(range(count))
    assert set(held.flatten().tolist()) == {count // math.prod(sharding.parts(grid.num_replicas))}


@examples
@given(shardings())
def test_devices_that_agree_on_an_axis_hold_the_same(drawn: tuple[tuple[int, ...], Sharding, DeviceGrid]) -> None:
    """Two devices hold the same part exactly if they are at the same place of all axes that cut the tensor."""
    shape, sharding, grid = drawn
    cutting = {axis for axes in sharding.spec for axis in axes}
    places: dict[int, tuple[int, ...]] = {}
    for replica, devices in enumerate(grid.devices):
        for device, coordinates in zip(devices, itertools.product(*map(range, sharding.axis_sizes)), strict=True):
            own = {REPLICA_AXIS: replica} | {logical_axis(index): at for index, at in enumerate(coordinates)}
            places[device] = tuple(own[axis] for axis in sorted(cutting))
    tiles = sharding.tiles(shape, grid)
    for one, other in itertools.combinations(places, 2):
        assert (tiles[one] == tiles[other]) == (places[one] == places[other])


@examples
@given(parts=st.lists(st.integers(1, 3), min_size=1, max_size=4), replicas=st.integers(1, 2))
def test_part_i_of_a_split_is_on_logical_device_i_of_every_replica(parts: list[int], replicas: int) -> None:
    grid, sharding = grid_of(replicas, math.prod(parts)), Sharding.split(parts)
    tiles = sharding.tiles(parts, grid)  # one element for each part
    numbers = torch.arange(math.prod(parts)).reshape(parts)
    for devices in grid.devices:
        assert [numbers[tiles[device]].item() for device in devices] == list(range(math.prod(parts)))


def test_a_stack_is_cut_over_replicas_first() -> None:
    grid = grid_of(2, 2)
    stacked = Sharding.split((1, 2)).stacked()
    assert stacked.rank == 3
    assert stacked.parts(2) == (2, 1, 2)
    assert stacked.tiles((2, 5, 4), grid) == {
        0: (slice(0, 1), slice(0, 5), slice(0, 2)),
        1: (slice(0, 1), slice(0, 5), slice(2, 4)),
        2: (slice(1, 2), slice(0, 5), slice(0, 2)),
        3: (slice(1, 2), slice(0, 5), slice(2, 4)),
    }


def test_the_first_of_several_axes_is_the_slowest() -> None:
    sharding = Sharding((2, 3), (("d1", "d0"),))
    tiles = sharding.tiles((6,), grid_of(1, 6))
    assert [tiles[device][0].start for device in range(6)] == [0, 2, 4, 1, 3, 5]


def test_replicated_is_whole_everywhere() -> None:
    sharding = Sharding.replicated(2, 4)
    assert sharding.is_replicated
    assert [*sharding.tiles((3, 5), grid_of(2, 4)).values()] == [(slice(0, 3), slice(0, 5))] * 8
    assert not Sharding.split((1, 4)).is_replicated
    assert Sharding.split((1, 1)).is_replicated
    assert set(Sharding.replicated(0, 2).tiles((), grid_of(1, 2)).values()) == {()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceGrid(()), "as many logical devices in each"),
        (lambda: DeviceGrid(((),)), "as many logical devices in each"),
        (lambda: DeviceGrid(((0, 1), (2,))), "as many logical devices in each"),
        (lambda: DeviceGrid(((0, 1), (1, 2))), "in one place only"),
        (lambda: Sharding((4,), (("d0",), ("d0",))), "one dimension only"),
        (lambda: Sharding((3,), (("d0",),)).tiles((6,), DeviceGrid(((0, 1), (2, 3)))), "for 3 logical devices"),
    ],
)
def test_what_is_no_grid_and_no_sharding_of_it(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


# == rules ===========================================================================================================


def test_a_model_is_cut_by_name() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    rules = ShardingRules({"*linear1.weight": ("d0", None), "*linear2.weight": (None, "d0")}, (4,))
    cut = {name: rules.sharding_for(name, own.shape) for name, own in model.named_parameters()}
    assert cut.pop("linear1.weight") == Sharding((4,), (("d0",), ()))
    assert cut.pop("linear2.weight") == Sharding((4,), ((), ("d0",)))
    assert cut
    assert all(own.is_replicated for own in cut.values())
    assert [own.rank for own in cut.values()] == [own.ndim for name, own in model.named_parameters() if name in cut]
    rules.require_all_used()


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*.weight", "a.b.weight", True),
        ("*.weight", "weight", False),
        ("*.weight", "a.weights", False),
        ("layers.?.weight", "layers.7.weight", True),
        ("layers.?.weight", "layers.10.weight", False),
        ("layers.[0-3].weight", "layers.2.weight", True),
        ("layers.[0-3].weight", "layers.4.weight", False),
        ("Layer.weight", "layer.weight", False),
        ("weight", "weight", True),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert ShardingRules({pattern: ("d0",)}, (2,)).sharding_for(name, (4,)).is_replicated is not matches


def test_the_first_rule_that_matches_decides() -> None:
    rules = ShardingRules({"head.weight": None, "*.weight": ("d0", None)}, (2,))
    assert rules.sharding_for("head.weight", (3, 3)).is_replicated
    assert rules.sharding_for("body.weight", (4, 3)) == Sharding((2,), (("d0",), ()))
    assert rules.unused() == []


@pytest.mark.parametrize(
    ("patterns", "names", "unused", "message"),
    [
        (
            ["*.weight", "head.weight"],
            ["head.weight"],
            ["head.weight"],
            r"(?s)'head.weight' comes too late.*head.weight.*'\*.weight'",
        ),
        (
            ["*.liner1.weight", "*.bias"],
            ["a.linear1.weight", "a.linear1.bias", "norm"],
            ["*.liner1.weight"],
            r"'\*.liner1.weight' matches no parameter's name; the most similar are a.linear1.weight.*by the first of",
        ),
        (["a"], [], ["a"], "no name has been asked for"),
    ],
    ids=["behind a more general one", "similar names", "before a name is asked for"],
)
def test_rules_that_decide_nothing(patterns: list[str], names: list[str], unused: list[str], message: str) -> None:
    rules = ShardingRules(dict.fromkeys(patterns, ("d0",)), (2,))
    for name in names:
        rules.sharding_for(name, (4,))
    assert rules.unused() == unused
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        rules.require_all_used()
    assert "bias'" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "sizes", "shape", "spec"),
    [
        ([None, ("d1", "d0")], [2, 3], (5, 6), ((), ("d1", "d0"))),
        ([["d0"], "d1"], [2, 3], (2, 3), (("d0",), ("d1",))),
        (((), None), [2, 3], (5, 5), ((), ())),
        (None, (2,), (), ()),
        (None, (2,), (3,), ((),)),
        (None, (2,), (3, 3), ((), ())),
        (("d0",), (2,), (0,), (("d0",),)),
    ],
    ids=["two axes", "lists", "none", "None for a scalar", "None for rank 1", "None for rank 2", "no elements"],
)
def test_entries(entries: Any, sizes: Any, shape: tuple[int, ...], spec: Any) -> None:
    rules = ShardingRules({"a": entries}, sizes)
    assert rules.axis_sizes == tuple(sizes)
    assert rules.sharding_for("a", shape) == Sharding(tuple(sizes), spec)


def test_an_axis_of_one_device_cuts_nothing() -> None:
    """So one set of rules serves any number of logical devices."""
    assert ShardingRules({"a": ("d0",)}, (1,)).sharding_for("a", (7,)).is_replicated


@pytest.mark.parametrize(
    ("entries", "shape", "message"),
    [
        (("d0",), (4, 4), r"'a\*' is \('d0',\), and abc has the shape \(4, 4\): .* differ, 1 and 2"),
        (("d0", None), (), r"is \('d0', None\), and abc has the shape \(\): .* differ, 2 and 0"),
        ((None, "d0"), (4, 5), r"'a\*' cuts dimension 1 of abc \(4, 5\) into 2 equal parts along d0; 5 does not"),
        ((("d0", "d1"), None), (8, 4), r"into 6 equal parts along d0, d1; 8 does not divide by 6"),
    ],
)
def test_a_rule_that_does_not_fit_the_tensor(entries: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ShardingRules({"a*": entries}, (2, 3)).sharding_for("abc", shape)


def _of(entries: Any) -> Any:
    return {"*.w": entries}


@pytest.mark.parametrize(
    ("rules", "sizes", "kind", "message"),
    [
        (_of("d0"), (2, 3), WrongTypeError, r"rule '\*.w': .*one entry per dimension"),
        (_of(3), (2, 3), WrongTypeError, r"rule '\*.w': .*one entry per dimension"),
        (_of({"d0"}), (2, 3), WrongTypeError, r"rule '\*.w': .*one entry per dimension"),
        (_of((None, 2)), (2, 3), WrongTypeError, r"rule '\*.w': .*entry 1 is int 2"),
        (_of(((1,), None)), (2, 3), WrongTypeError, r"rule '\*.w': .*entry 0 is tuple"),
        (_of(("d2",)), (2, 3), InvalidArgumentError, r"'\*.w': .*'d2'; there is 'd0' \(size 2\), 'd1' \(size 3\)"),
        (_of(("rows",)), (2, 3), InvalidArgumentError, r"rule '\*.w': .*axis 'rows'"),
        (_of(("replica",)), (2, 3), InvalidArgumentError, r"rule '\*.w': .*every replica has the whole parameter"),
        (_of(("d0", "d0")), (2, 3), InvalidArgumentError, r"'\*.w': .*\('d0', 'd0'\) uses d0 more than once"),
        (_of((("d0", "d1"), "d1")), (2, 3), InvalidArgumentError, r"\(\('d0', 'd1'\), 'd1'\) uses d1 more than once"),
        ([("a", None)], (2,), WrongTypeError, "a mapping from patterns"),
        ("a", (2,), WrongTypeError, "a mapping from patterns"),
        (None, (2,), WrongTypeError, "a mapping from patterns"),
        ({1: ("d0",)}, (2,), WrongTypeError, "is text; got int 1"),
        ({}, (), InvalidArgumentError, "axis_sizes"),
        ({}, (2, 0), InvalidArgumentError, "axis_sizes"),
        ({}, (2.0,), WrongTypeError, "axis_sizes"),
        ({}, 4, WrongTypeError, "axis_sizes"),
    ],
)
def test_what_are_no_rules(rules: Any, sizes: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ShardingRules(rules, sizes)


def test_repr() -> None:
    assert repr(ShardingRules({"a": None}, (2, 3))) == "<ShardingRules ['a'] over d0=2, d1=3>"


# == what is shown ===================================================================================================

Entries = dict[str, tuple[tuple[int, ...], Sharding]]


GRID = grid_of(2, 4)


def explained(entries: Entries, grid: DeviceGrid = GRID) -> Explanation:
    tensors = {name: ShardedEntry(shape, own, torch.float32) for name, (shape, own) in entries.items()}
    count = max(8, 1 + max(number for row in grid.devices for number in row))
    return explain_tensors(tensors, grid, [f"TPU:{number}" for number in range(count)])


def test_a_matrix_cut_along_its_columns() -> None:
    text = str(explained({"w": ((2, 8), Sharding.split((1, 4)))}))
    assert text == "\n".join(
        [
            "2 replicas × 4 logical devices",
            "             logical 0  logical 1  logical 2  logical 3",
            "  replica 0  TPU:0      TPU:1      TPU:2      TPU:3",
            "  replica 1  TPU:4      TPU:5      TPU:6      TPU:7",
            "",
            "tensor  dtype    shape   cut      piece   pieces  copies  per device",
            "w       float32  (2, 8)  (–, d1)  (2, 2)       4       2        16 B",
            "",
            "w: (2, 8) cut (–, d1), d1 = 4",
            "  dim 1   0:2         2:4         4:6         6:8",
            "        ┌───────────┬───────────┬───────────┬───────────┐",
            "        │ logical 0 │ logical 1 │ logical 2 │ logical 3 │",
            "        │ TPU:0, 4  │ TPU:1, 5  │ TPU:2, 6  │ TPU:3, 7  │",
            "        └───────────┴───────────┴───────────┴───────────┘",
            "",
            "In all, each device holds 16 B of 64 B (25%).",
        ]
    )


CUT_BOTH_WAYS = """\
w: (4, 6) cut (d0, d1), d0 = 2, d1 = 2
  dim 1   0:3         3:6
  dim 0 ┌───────────┬───────────┐
    0:2 │ logical 0 │ logical 1 │
        │ TPU:0, 4  │ TPU:1, 5  │
        ├───────────┼───────────┤
    2:4 │ logical 2 │ logical 3 │
        │ TPU:2, 6  │ TPU:3, 7  │
"""
CUT_ALONG_ROWS = """\
w: (4, 6) cut (d0, –), d0 = 2
  dim 0 ┌──────────────────────────────┐
    0:2 │ logical 0, 1  TPU:0, 1, 4, 5 │
        ├──────────────────────────────┤
    2:4 │ logical 2, 3  TPU:2, 3, 6, 7 │
        └──────────────────────────────┘
"""
PLACES_OF_A_STACK = ("0:1, 2:4 │ replica 0, logical 2", "1:2, 0:2 │ replica 1, logical 0")
LIST_OF_MANY = (
    "  dim 0  held by               on\n  0:2    replica 0, logical 0  TPU:0\n",
    "  22:24  replica 5, logical 1  TPU:11\n",
)
SHORTENED = "⋮ 49 more\n  126:128  logical 63  TPU:63"
EQUAL_LAYERS: Entries = {
    f"layers.{index}.{name}": entry
    for name, entry in (("weight", ((8, 4), Sharding.split((4, 1)))), ("bias", ((8,), Sharding.replicated(1, 4))))
    for index in range(12)
}

TEXTS: dict[str, tuple[Entries, DeviceGrid, tuple[str, ...]]] = {}


def _says(name: str, shape: tuple[int, ...], sharding: Sharding, grid: DeviceGrid, *parts: str) -> None:
    TEXTS[name] = {"w": (shape, sharding)}, grid, parts


_says("cut both ways", (4, 6), Sharding.split((2, 2)), GRID, CUT_BOTH_WAYS)
_says("cut along rows", (4, 6), Sharding((2, 2), (("d0",), ())), GRID, CUT_ALONG_ROWS)
_says("a stack has replicas", (2, 4, 4), Sharding.split((2, 2)).stacked(), GRID, "(replica, d0, d1)", "dim 0, 1")
_says("a stack names replicas", (2, 4, 4), Sharding.split((2, 2)).stacked(), GRID, *PLACES_OF_A_STACK)
_says("cut over replicas", (2, 5), Sharding.replicated(1, 4).stacked(), GRID, "replica 0, every logical  TPU:0–3")
_says(
    "not cut in a replica", (2, 5), Sharding.replicated(1, 4).stacked(), GRID, "20 B of it in tensors that are not cut"
)
_says("twelve pieces are drawn", (6, 4, 3), Sharding((2,), (("replica",), ("d0",), ())), grid_of(6, 2), "┌")
_says("many pieces", (24, 3), Sharding((2,), (("replica", "d0"), ())), grid_of(6, 2), *LIST_OF_MANY)
_says("too wide", (3, 16), Sharding.split((1, 16)), grid_of(1, 16), "  0:1    logical 0   TPU:0\n")
_says("very many pieces", (128, 3), Sharding((64,), (("d0",), ())), grid_of(1, 64), "  replica 0  TPU:0–63", SHORTENED)
_says("empty", (0, 4), Sharding.split((1, 4)), GRID, "0:1         1:2")
_says("a scalar", (), Sharding.replicated(0, 4), GRID, "w       float32  ()     whole")
_says("places are kept", (4,), Sharding.split((2,)), DeviceGrid(((5, 2), (0, 7))), "│ TPU:0, 5  │ TPU:2, 7  │")
_says("unused devices", (2,), Sharding.split((2,)), DeviceGrid(((1, 3),)), "  not used: TPU:0, 2, 4–7\n")
TEXTS["equal layers"] = EQUAL_LAYERS, GRID, ("12 × 32 B", "each device holds 768 B of 1.9 KiB (40%), 384 B of it")
TEXTS["nothing"] = {}, GRID, ("In all, each device holds 0 B of 0 B.",)
NOT_DRAWN = ("many pieces", "too wide", "very many pieces", "nothing", "a scalar")


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    entries, grid, parts = TEXTS[name]
    text = str(explained(entries, grid))
    assert [part for part in parts if part not in text] == []
    assert text.count("┌") == (name not in NOT_DRAWN)


CUT, WHOLE = ((8, 4), Sharding.split((4, 1))), ((8, 4), Sharding.replicated(2, 4))
BLOCKS = {f"blocks.{block}.layers.{layer}.w": CUT for block in range(2) for layer in range(3)}


@pytest.mark.parametrize(
    ("entries", "labels"),
    [
        (EQUAL_LAYERS, ["layers.{0–11}.weight", "layers.{0–11}.bias"]),
        ({"0.w": CUT, "1.w": CUT, "2.w": ((16, 4), CUT[1]), "3.w": WHOLE}, ["{0, 1}.w", "2.w", "3.w"]),
        (BLOCKS, ["blocks.{0, 1}.layers.{0–2}.w"]),
        ({**BLOCKS, "blocks.1.layers.2.w": WHOLE}, ["blocks.0.layers.0.w and 4 more", "blocks.1.layers.2.w"]),
    ],
    ids=["equal layers", "layers that differ", "two numbers", "two numbers with a hole"],
)
def test_labels_and_sums(entries: Entries, labels: list[str]) -> None:
    explanation = explained(entries)
    assert [group.label for group in explanation.groups] == labels
    parts = {name: 4 // (1 if own.is_replicated else 4) for name, (_, own) in entries.items()}
    whole = {name: 4 * math.prod(shape) for name, (shape, _) in entries.items()}
    assert explanation.total_bytes == sum(whole.values())
    assert explanation.bytes_per_device == sum(size * parts[name] // 4 for name, size in whole.items())


@pytest.mark.parametrize(
    ("entries", "devices", "message"),
    [
        ({"w": ((6, 4), CUT[1])}, 8, r"w has the shape \(6, 4\), which does not divide into \(4, 1\) equal parts"),
        ({"w": ((4,), CUT[1])}, 8, r"w has the shape \(4,\), and its sharding has 2 entries"),
        ({"w": ((4,), Sharding.split((2,)))}, 8, r"sizes \(2,\), which are 2 logical devices; the replicas have 4"),
        ({}, 3, "holds the device 7, and there are 3 device names"),
    ],
)
def test_what_does_not_fit(entries: Entries, devices: int, message: str) -> None:
    tensors = {name: ShardedEntry(shape, own, torch.float32) for name, (shape, own) in entries.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        explain_tensors(tensors, GRID, [f"TPU:{number}" for number in range(devices)])


def test_short_forms() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7, 8"
    assert runs([*range(0, 40, 4)]) == "0, 4, 8, … 36"
    assert joined_names(["TPU:3", "TPU:0", "TPU:1"]) == "TPU:0, 1, 3"
    assert joined_names(["host", "TPU:0"]) == "host, TPU:0"
    assert joined_names(["cpu:0", "TPU:0"]) == "cpu:0, TPU:0"
    assert [*map(size_text, (0, 1023, 1024, 3 << 20))] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB"]
    assert size_text(5 << 40) == "5.0 TiB"


@pytest.mark.parametrize("logical_devices", [1, 4, 32])
def test_the_picture(tmp_path: Path, logical_devices: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    entries: Entries = {
        "rows": ((64, 8), Sharding.split((logical_devices, 1))),
        "columns": ((8, 64), Sharding.split((1, logical_devices))),
        "stack": ((2, 64), Sharding.split((logical_devices,)).stacked()),
        "whole": ((8,), Sharding.replicated(1, logical_devices)),
    }
    path = tmp_path / "sharding.png"
    explained(entries, grid_of(2, logical_devices)).save_png(path)
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 300
    # White, black and more colours than the bars have: the boxes are there.
    assert len({tuple(pixel) for pixel in (pixels[::5, ::5, :3] * 255).round().reshape(-1, 3)}) > 10


def test_the_picture_of_nothing_and_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "nothing.png"
    explained({}).save_png(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        explained({}).save_png(path)
    assert not [*tmp_path.iterdir()]
