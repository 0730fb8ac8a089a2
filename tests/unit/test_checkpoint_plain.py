"""A checkpoint as one plain file, for programs without torchstrat, and such files as checkpoints."""

from __future__ import annotations

import copy
import enum
import errno
import json
import os
import runpy
import struct
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.checkpoint_writes import full_disk
from tests.support.checkpoints import Held, Net, contents, data_file, job, restored, same, saved_job, sharded, train
from torchstrat.errors import InvalidArgumentError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return saved_job(tmp_path / "saved")


def moments(objects: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    return [objects["optimizer"].state[one] for group in objects["optimizer"].param_groups for one in group["params"]]


def test_what_is_in_a_pt_file(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    assert ts.consolidate(path, tmp_path / "out" / "model.pt") == tmp_path / "out" / "model.pt"
    assert os.listdir(tmp_path / "out") == ["model.pt"]
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert state.pop("metric").tolist() == [1.0, 2.0]
    assert same(
        {**state, "model": dict(state["model"])}, {**contents(objects), "model": dict(objects["model"].state_dict())}
    )


def test_a_sharded_table_is_whole(tmp_path: Path) -> None:
    table = sharded(7, 3)
    optimizer = torch.optim.Adam(table.variables)
    (torch.as_tensor(table * 1) * table).sum().backward()
    optimizer.step()
    ts.Checkpoint(table=table, optimizer=optimizer).save(tmp_path / "saved")
    ts.consolidate(tmp_path / "saved", tmp_path / "table.pt")
    state = torch.load(tmp_path / "table.pt", weights_only=True)
    assert torch.equal(state["table"], torch.as_tensor(table))
    parameter = nn.Parameter(state["table"])
    plain = torch.optim.Adam([parameter])
    plain.load_state_dict(state["optimizer"])
    expected = torch.cat([optimizer.state[one]["exp_avg"] for one in table.variables])
    assert torch.equal(plain.state[parameter]["exp_avg"], expected)


class Level(enum.IntEnum):
    HIGH = 2


class Mode(str, enum.Enum):
    FAST = "fast"


def test_what_others_cannot_load_is_left_out_or_made_plain(tmp_path: Path) -> None:
    """Each alone would make ``weights_only=True`` refuse the whole file."""
    held = {
        "inner": {"own": Path("own"), "names": ["a", ("b", 1.5)], "none": None},
        "best": np.float64(0.5),
        "level": Level.HIGH,
        "mode": Mode.FAST,
        "by": {1: 1.0, Level.HIGH: 2.0},
        "seen": defaultdict(int, a=1, b=2),
    }
    ts.Checkpoint(own=Held(held), weight=torch.ones(2)).save(tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"^own\.") as warned:
        ts.consolidate(tmp_path / "saved", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)["own"]
    assert found == {
        "inner": {"names": ["a", ("b", 1.5)], "none": None},
        "best": 0.5,
        "level": 2,
        "mode": "fast",
        "by": {1: 1.0},
        "seen": {"a": 1, "b": 2},
    }
    assert [type(one) for one in found.values()] == [dict, float, int, str, dict, dict]
    said = "\n".join(str(one.message) for one in warned)
    for expected in (
        "own.inner.own, a PosixPath, is left out",
        "own.best, a float64, is written as the float",
        "own.level, a Level, is written as the int",
        "own.by has the key <Level.HIGH: 2>, a Level, which is left out",
        "own.seen, a defaultdict, is written as a dict",
    ):
        assert expected in said


def test_what_cannot_be_consolidated(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, plain = saved[0], tmp_path / "model"
    (tmp_path / "folder.pt").mkdir()
    ts.consolidate(path, plain, format="pt")
    before = plain.read_bytes()
    ts.Checkpoint(wide=torch.ones(2, dtype=torch.complex128)).save(tmp_path / "wide")
    damaged = saved_job(tmp_path / "damaged")[0]
    os.truncate(data_file(damaged), 99)
    for source, to, options, message in (
        (path, "model.onnx", {}, r"model\.onnx does not say its format; end its name in \.pt"),
        (path, "model.pt", {"format": "onnx"}, "format='onnx' is not known"),
        (tmp_path / "nothing", "model.pt", {}, "no such folder"),
        (path, "folder.pt", {}, r"folder\.pt is a folder"),
        (plain, "model.pt", {}, "is a plain file already"),
        (tmp_path / "wide", "wide.safetensors", {}, "wide is of torch.complex128, which safetensors does not have"),
        (damaged, "model", {"format": "pt"}, "is damaged"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            ts.consolidate(source, tmp_path / to, **options)  # type: ignore[arg-type]
    assert plain.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["damaged", "folder.pt", "model", "saved", "wide"]


def test_the_command(saved, tmp_path, monkeypatch, capsys) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["torchstrat", "consolidate", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("torchstrat", run_name="__main__")
        return ended.value.code  # type: ignore[return-value]

    assert run(str(saved[0]), str(tmp_path / "model.pt")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model.pt'}\n"
    assert "model" in torch.load(tmp_path / "model.pt", weights_only=True)
    assert run(str(tmp_path / "nothing"), str(tmp_path / "other.pt")) == 1
    assert "torchstrat consolidate: there is no checkpoint at" in capsys.readouterr().err
    assert [run(str(saved[0])), run("--help")] == [2, 0]
    assert "torchstrat consolidate CHECKPOINT FILE" in capsys.readouterr().out


def test_a_full_disk_leaves_what_was_there(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    ts.consolidate(saved[0], file)
    before = file.read_bytes()
    with (
        full_disk("*.writing-*"),
        pytest.raises(InvalidArgumentError, match=r"model\.safetensors cannot be written: .*No space left"),
    ):
        ts.consolidate(saved[0], file)
    assert file.read_bytes() == before
    full = OSError(errno.ENOSPC, "No space left on device")
    with (  # where a mapping of the file would find no room
        mock.patch("os.posix_fallocate", side_effect=full),
        pytest.raises(InvalidArgumentError, match=r"model\.pt cannot be written: .*No space left"),
    ):
        ts.consolidate(saved[0], tmp_path / "model.pt")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "saved"]


def test_the_library_reads_and_writes_the_same(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path, objects = saved
    ts.consolidate(path, tmp_path / "model.safetensors")
    found = library.load_file(tmp_path / "model.safetensors")
    expected = {f"model.{name}": one for name, one in objects["model"].state_dict().items()}
    expected["optimizer.state.head.bias.exp_avg"] = moments(objects)[-1]["exp_avg"]
    assert same({name: found[name] for name in expected}, expected)
    tensors = {"f64": torch.randn(2, 3, dtype=torch.float64), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    library.save_file(tensors, tmp_path / "theirs.safetensors")
    again = {name: torch.zeros_like(one) for name, one in tensors.items()}
    ts.Checkpoint(**again).restore(tmp_path / "theirs.safetensors")
    assert same(again, tensors)


def test_what_the_library_reads_is_in_the_order_it_needs(tmp_path: Path) -> None:
    """The format, byte by byte, where the library is not installed."""
    ts.Checkpoint(a=torch.tensor([1], dtype=torch.uint8), b=torch.tensor([2.0])).save(tmp_path / "saved")
    ts.consolidate(tmp_path / "saved", tmp_path / "two.safetensors")
    content = (tmp_path / "two.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [4, 5]},
    }
    assert content[8 + length :] == struct.pack("<f", 2.0) + b"\x01"


def test_safetensors_of_objects(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    ts.consolidate(path, tmp_path / "all.safetensors")
    after = job(1)
    rates = [group["lr"] for group in after["optimizer"].param_groups]
    ts.Checkpoint(model=after["model"], optimizer=after["optimizer"]).restore(tmp_path / "all.safetensors")
    assert same(objects["model"].state_dict(), after["model"].state_dict())
    assert same(moments(objects), moments(after))
    assert [group["lr"] for group in after["optimizer"].param_groups] == rates


def test_a_consolidated_file_is_restored(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    ts.consolidate(saved[0], tmp_path / "plain.pt")
    assert same(contents(saved[1]), restored(tmp_path / "plain.pt"))


@pytest.mark.parametrize("name", ["model", "table"])  # which is also the beginning of a parameter's
@pytest.mark.parametrize("zipped", [True, False])
def test_the_state_dict_of_the_one_module(name: str, zipped: bool, tmp_path: Path) -> None:
    model, after = Net(), Net()
    torch.save(model.state_dict(), tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    ts.Checkpoint(**{name: after}).restore(tmp_path / "model.pt")
    assert same(model.state_dict(), after.state_dict())


def test_shards_take_their_rows(tmp_path: Path) -> None:
    whole = torch.arange(14.0).reshape(7, 2)
    torch.save({"table": whole, "model": {"inner.table": whole + 1}}, tmp_path / "plain.pt")
    table, holder = sharded(7, 3, start=50.0), nn.Module()
    holder.inner = nn.Module()
    holder.inner.table = sharded(7, 2, start=50.0)
    ts.Checkpoint(table=table, model=holder).restore(tmp_path / "plain.pt")
    assert torch.equal(torch.as_tensor(table), whole)
    assert torch.equal(torch.as_tensor(holder.inner.table), whole + 1)


def test_all_that_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    objects, after = job(), job(1, rows=8)
    train(objects, range(1))
    torch.save(contents(objects), tmp_path / "plain.pt")
    after["model"].extra = nn.Linear(1, 1)
    before = copy.deepcopy(contents(after))
    with pytest.raises(InvalidArgumentError) as raised:
        ts.Checkpoint(**after, more=Held()).restore(tmp_path / "plain.pt")
    for expected in (
        "plain.pt does not fit this program",
        "model.table.weight is torch.float32 (6, 2) in the checkpoint and torch.float32 (8, 2)",
        "model.extra.weight is missing in the checkpoint",
        "optimizer.state.table.weight.exp_avg has shape (6, 2) in the checkpoint",
        "more is missing in the checkpoint",
    ):
        assert expected in str(raised.value)
    assert same(before, contents(after))


def saves(value: Callable[[dict[str, Any]], Any]) -> Callable[[Path, dict[str, Any]], None]:
    return lambda file, objects: torch.save(value(objects), file)


def cut_off(file: Path, objects: dict[str, Any]) -> None:
    torch.save(contents(objects), file)
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("write", "keeps", "message"),
    [
        (
            saves(lambda objects: objects["model"].state_dict()),
            "model optimizer",
            "optimizer is missing in the checkpoint",
        ),
        (
            saves(lambda objects: objects["model"].state_dict()),
            "scheduler",
            r"has table\.weight, .* neither a name of the checkpoint's objects",
        ),
        (
            saves(lambda objects: {"optimizer": torch.optim.Adam(Net().parameters()).state_dict()}),
            "optimizer",
            "optimizer has 1 parameter groups in the checkpoint and 3",
        ),
        (saves(lambda objects: [torch.zeros(2)]), "model", "bad holds a list, and no state_dict"),
        (lambda file, _: file.write_text("no checkpoint"), "model", "bad cannot be read as a file of torch.save"),
        (cut_off, "model", "bad cannot be read"),
    ],
    ids=["a module alone", "names of others", "other groups", "a list", "text", "half a file"],
)
def test_files_that_are_no_state_of_these_objects(write, keeps, message, tmp_path) -> None:
    objects = job()
    write(tmp_path / "bad", objects)
    with pytest.raises(InvalidArgumentError, match=message):
        ts.Checkpoint(**{name: objects[name] for name in keeps.split()}).restore(tmp_path / "bad")


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 40) + b"{}",
        header(b"no json!"),
        header(b"[]"),
        header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}} ') + b"short",
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,36]}} ') + b"0" * 36,
    ],
)
def test_damaged_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"bad\.safetensors (cannot be read as a saf|is damaged)"):
        ts.Checkpoint(a=torch.zeros(1)).restore(tmp_path / "bad.safetensors")


def test_a_pickle_is_read_with_a_warning(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "path": Path("own")}, tmp_path / "pickle.pt")
    weight = torch.zeros(2)
    with pytest.warns(UserWarning, match=r"pickle\.pt has more in it than tensors .* files that you trust"):
        ts.Checkpoint(weight=weight).restore(tmp_path / "pickle.pt")
    assert weight.tolist() == [1.0, 1.0]


def test_a_parameter_without_a_name_is_none_that_has_its_number_for_one(tmp_path: Path) -> None:
    """As the first of an `nn.ParameterList` has."""
    free, model = torch.ones(2, requires_grad=True), nn.ParameterList([torch.ones(2)])
    optimizer = torch.optim.SGD([free, model[0]], 0.1, momentum=0.9)
    free.sum().backward()
    optimizer.step()
    checkpoint = ts.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.save(tmp_path / "saved")
    checkpoint.restore(tmp_path / "saved")
    assert list(optimizer.state_dict()["state"]) == [0]
    model[0].sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "saved")
    checkpoint.restore(tmp_path / "saved")
    assert list(optimizer.state_dict()["state"]) == [0, 1]


class Grouped:
    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": [Held], "count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_groups_that_are_no_dicts_are_left_out_whole(tmp_path: Path) -> None:
    ts.Checkpoint(own=Grouped()).save(tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"own\.param_groups, a list, is left out"):
        file = ts.consolidate(tmp_path / "saved", tmp_path / "own.pt")
    assert torch.load(file, weights_only=True) == {"own": {"count": 1}}
