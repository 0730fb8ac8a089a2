"""What `explain_tensors` prints and draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torchstrat.errors import InvalidArgumentError
from torchstrat.sharding.explain import Explanation, explain_tensors
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.sharding.layout import ShardedEntry, joined_names, runs, size_text

GRID = DeviceGrid(((0, 1, 2, 3), (4, 5, 6, 7)))
NAMES = [f"TPU:{number}" for number in range(8)]


def explained(entries: dict[str, tuple[tuple[int, ...], Sharding]], grid: DeviceGrid = GRID) -> Explanation:
    tensors = {name: ShardedEntry(shape, own, torch.float32) for name, (shape, own) in entries.items()}
    return explain_tensors(tensors, grid, NAMES)


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


def test_a_matrix_cut_both_ways_lies_like_the_tensor() -> None:
    text = str(explained({"w": ((4, 6), Sharding.split((2, 2)))}))
    assert text.split("\n")[8:16] == [
        "w: (4, 6) cut (d0, d1), d0 = 2, d1 = 2",
        "  dim 1   0:3         3:6",
        "  dim 0 ┌───────────┬───────────┐",
        "    0:2 │ logical 0 │ logical 1 │",
        "        │ TPU:0, 4  │ TPU:1, 5  │",
        "        ├───────────┼───────────┤",
        "    2:4 │ logical 2 │ logical 3 │",
        "        │ TPU:2, 6  │ TPU:3, 7  │",
    ]


def test_a_matrix_cut_along_its_rows() -> None:
    text = str(explained({"w": ((4, 6), Sharding((2, 2), (("d0",), ())))}))
    assert text.split("\n")[8:14] == [
        "w: (4, 6) cut (d0, –), d0 = 2",
        "  dim 0 ┌──────────────────────────────┐",
        "    0:2 │ logical 0, 1  TPU:0, 1, 4, 5 │",
        "        ├──────────────────────────────┤",
        "    2:4 │ logical 2, 3  TPU:2, 3, 6, 7 │",
        "        └──────────────────────────────┘",
    ]


def test_a_stack_names_the_replicas() -> None:
    text = str(explained({"x": ((2, 4, 4), Sharding.split((2, 2)).stacked())}))
    for part in ("(replica, d0, d1)", "dim 0, 1", "0:1, 2:4 │ replica 0, logical 2", "1:2, 0:2 │ replica 1, logical 0"):
        assert part in text


def test_what_only_replicas_cut_is_with_every_logical_device() -> None:
    text = str(explained({"x": ((2, 5), Sharding.replicated(1, 4).stacked())}))
    assert "replica 0, every logical  TPU:0–3" in text
    assert "20 B of it in tensors that are not cut over logical devices" in text


def test_many_pieces_are_a_list() -> None:
    grid = DeviceGrid(tuple((2 * index, 2 * index + 1) for index in range(6)))
    entry = ShardedEntry((6, 4, 3), Sharding((2,), (("replica",), ("d0",), ())), torch.float32)
    text = str(explain_tensors({"x": entry}, grid, [f"TPU:{number}" for number in range(12)]))
    assert text.count("┌") == 1
    entry = ShardedEntry((24, 3), Sharding((2,), (("replica", "d0"), ())), torch.float32)
    text = str(explain_tensors({"x": entry}, grid, [f"TPU:{number}" for number in range(12)]))
    assert "  dim 0  held by               on\n  0:2    replica 0, logical 0  TPU:0\n" in text
    assert "  22:24  replica 5, logical 1  TPU:11\n" in text
    assert "┌" not in text


def test_what_is_too_wide_is_a_list() -> None:
    entry = ShardedEntry((3, 16), Sharding.split((1, 16)), torch.float32)
    text = str(explain_tensors({"x": entry}, DeviceGrid((tuple(range(16)),)), [f"TPU:{n}" for n in range(16)]))
    assert "  0:1    logical 0   TPU:0\n" in text
    assert "┌" not in text


def test_very_many_pieces_are_shortened() -> None:
    grid = DeviceGrid((tuple(range(64)),))
    entry = ShardedEntry((128, 3), Sharding((64,), (("d0",), ())), torch.float32)
    text = str(explain_tensors({"x": entry}, grid, [f"TPU:{number}" for number in range(64)]))
    assert "  replica 0  TPU:0–63" in text
    assert "⋮ 49 more\n  126:128  logical 63  TPU:63" in text


def test_equal_layers_are_one_line() -> None:
    cut, whole = Sharding.split((4, 1)), Sharding.replicated(1, 4)
    entries = {f"layers.{index}.weight": ((8, 4), cut) for index in range(12)}
    entries |= {f"layers.{index}.bias": ((8,), whole) for index in range(12)}
    explanation = explained(entries)
    assert [group.label for group in explanation.groups] == ["layers.{0–11}.weight", "layers.{0–11}.bias"]
    text = str(explanation)
    assert "12 × 32 B" in text
    assert text.count("┌") == 1
    assert explanation.bytes_per_device == 12 * (32 + 32)
    assert explanation.total_bytes == 12 * (128 + 32)
    assert "each device holds 768 B of 1.9 KiB (40%), 384 B of it" in text


def test_layers_that_differ_are_lines_of_their_own() -> None:
    cut, whole = Sharding.split((4, 1)), Sharding.replicated(2, 4)
    shapes = {"0.w": (8, 4), "1.w": (8, 4), "2.w": (16, 4), "3.w": (8, 4)}
    entries = {name: (shape, cut if name != "3.w" else whole) for name, shape in shapes.items()}
    assert [group.label for group in explained(entries).groups] == ["{0, 1}.w", "2.w", "3.w"]


def test_names_with_two_numbers() -> None:
    cut = Sharding.split((4, 1))
    full = {f"blocks.{block}.layers.{layer}.w": ((8, 4), cut) for block in range(2) for layer in range(3)}
    assert [group.label for group in explained(full).groups] == ["blocks.{0, 1}.layers.{0–2}.w"]
    del full["blocks.1.layers.2.w"]
    assert [group.label for group in explained(full).groups] == ["blocks.0.layers.0.w and 4 more"]


def test_nothing_at_all() -> None:
    assert str(explained({})).endswith("In all, each device holds 0 B of 0 B.")


def test_empty_tensors_and_scalars() -> None:
    text = str(explained({"e": ((0, 4), Sharding.split((1, 4))), "s": ((), Sharding.replicated(0, 4))}))
    assert "0:1         1:2" in text
    assert "s       float32  ()      whole" in text


def test_devices_that_are_not_used() -> None:
    grid = DeviceGrid(((1, 3),))
    assert "  not used: TPU:0, 2, 4–7\n" in str(explained({}, grid))


def test_devices_keep_their_places() -> None:
    text = str(explained({"w": ((4,), Sharding.split((2,)))}, DeviceGrid(((5, 2), (0, 7)))))
    assert "│ TPU:0, 5  │ TPU:2, 7  │" in text


@pytest.mark.parametrize(
    ("shape", "sharding", "message"),
    [
        ((6, 4), Sharding.split((4, 1)), r"w has the shape \(6, 4\), which does not divide into \(4, 1\) equal parts"),
        ((4,), Sharding.split((4, 1)), r"w has the shape \(4,\), and its sharding has 2 entries"),
        ((4,), Sharding.split((2,)), r"axes of sizes \(2,\), which are 2 logical devices; the replicas have 4"),
    ],
)
def test_what_does_not_fit(shape: tuple[int, ...], sharding: Sharding, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        explained({"w": (shape, sharding)})


def test_every_device_needs_a_name() -> None:
    with pytest.raises(InvalidArgumentError, match="holds the device 7, and there are 3 device names"):
        explain_tensors({}, GRID, NAMES[:3])


def test_short_forms() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7, 8"
    assert runs([*range(0, 40, 4)]) == "0, 4, 8, … 36"
    assert joined_names(["TPU:3", "TPU:0", "TPU:1"]) == "TPU:0, 1, 3"
    assert joined_names(["host", "TPU:0"]) == "host, TPU:0"
    assert joined_names(["cpu:0", "TPU:0"]) == "cpu:0, TPU:0"
    assert [size_text(size) for size in (0, 1023, 1024, 3 << 20, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("logical_devices", [1, 4, 32])
def test_the_picture(tmp_path: Path, logical_devices: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    grid = DeviceGrid((tuple(range(logical_devices)), tuple(range(logical_devices, 2 * logical_devices))))
    names = [f"TPU:{number}" for number in range(2 * logical_devices)]
    entries = {
        "rows": ShardedEntry((64, 8), Sharding.split((logical_devices, 1)), torch.float32),
        "columns": ShardedEntry((8, 64), Sharding.split((1, logical_devices)), torch.float32),
        "stack": ShardedEntry((2, 64), Sharding.split((logical_devices,)).stacked(), torch.float32),
        "whole": ShardedEntry((8,), Sharding.replicated(1, logical_devices), torch.float32),
    }
    path = tmp_path / "sharding.png"
    explain_tensors(entries, grid, names).save_png(path)
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 300
    # White, black and more colours than the bars have: the boxes are there.
    assert len({tuple(pixel) for pixel in (pixels[::5, ::5, :3] * 255).round().reshape(-1, 3)}) > 10


def test_the_picture_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    explained({}).save_png(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        explained({}).save_png(tmp_path / "nothing.png")
    assert not [*tmp_path.iterdir()]
