"""A checkpoint as one plain file, for programs without torchstrat, and such files as checkpoints."""

from __future__ import annotations

import enum
import json
import os
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.checkpoints import contents, same
from torchstrat import cli
from torchstrat.checkpoint import disk, reading, safetensors_file
from torchstrat.errors import InvalidArgumentError
from torchstrat.partitioners import FixedShardsPartitioner, row_offsets
from torchstrat.testing.fake_cluster import FakeCluster


class Net(nn.Module):
    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.table(ids)))
        return output


def job(seed: int, rows: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(rows)
    groups = [{"params": model.table.parameters(), "lr": 0.3}, {"params": [*model.norm.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=0.1 * (seed + 1))
    optimizer.add_param_group({"params": model.head.parameters(), "weight_decay": 0.1})
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(objects: dict[str, Any], steps: range) -> None:
    for step in steps:
        objects["optimizer"].zero_grad()
        objects["model"](torch.tensor([step % 6, 1, 2])).square().sum().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the objects it is of."""
    objects = job(0)
    train(objects, range(3))
    ts.Checkpoint(**objects, metric=torch.tensor([1.0, 2.0])).save(tmp_path / "saved")
    return tmp_path / "saved", objects


def moments(objects: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    return [objects["optimizer"].state[one] for group in objects["optimizer"].param_groups for one in group["params"]]


# -- out --------------------------------------------------------------------------------------------------------------


def test_what_is_in_a_pt_file(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    assert ts.consolidate(path, tmp_path / "out" / "model.pt") == tmp_path / "out" / "model.pt"
    assert os.listdir(tmp_path / "out") == ["model.pt"]
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert set(state) == {"model", "optimizer", "scheduler", "metric"}
    assert same(state["model"], dict(objects["model"].state_dict()))
    assert same(state["scheduler"], objects["scheduler"].state_dict())
    assert state["metric"].tolist() == [1.0, 2.0]
    assert same(state["optimizer"], objects["optimizer"].state_dict())


_ELSEWHERE = """
import sys
sys.modules["torchstrat"] = None  # importing it is an error
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)

model = Net()
groups = [{"params": model.table.parameters(), "lr": 9}, {"params": [*model.norm.parameters()]},
          {"params": model.head.parameters()}]
optimizer = torch.optim.Adam(groups)
state = torch.load(sys.argv[1], weights_only=True)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
optimizer.zero_grad()
model.head(model.norm(model.table(torch.tensor([3, 1, 2])))).square().sum().backward()
optimizer.step()
torch.save([p.detach() for p in model.parameters()], sys.argv[2])
"""


def test_a_program_without_torchstrat_goes_on(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    ts.consolidate(path, tmp_path / "model.pt")
    files = [str(tmp_path / "model.pt"), str(tmp_path / "after.pt")]
    ran = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, *files], check=False, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    train(objects, range(3, 4))
    assert same(torch.load(files[1], weights_only=True), [one.detach() for one in objects["model"].parameters()])


def test_a_sharded_table_is_whole(tmp_path: Path) -> None:
    whole = torch.arange(14.0).reshape(7, 2)
    table = ts.ShardedVariable([nn.Parameter(whole[a:b].clone()) for a, b in row_offsets(7, 3)])
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


class Odd:
    """State of which a part is of a class that nobody else knows."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, "inner": {"own": Path("own"), "names": ["a", ("b", 1.5)], "none": None}}

    def load_state_dict(self, state: Any) -> None: ...


def test_what_others_cannot_load_is_left_out(tmp_path: Path) -> None:
    ts.Checkpoint(odd=Odd(), weight=torch.ones(2)).save(tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"odd\.inner\.own, a PosixPath, is left out"):
        ts.consolidate(tmp_path / "saved", tmp_path / "odd.pt")
    state = torch.load(tmp_path / "odd.pt", weights_only=True)
    assert state["odd"] == {"count": 3, "inner": {"names": ["a", ("b", 1.5)], "none": None}}


class Stored:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def consolidated(folder: Path, **objects: Any) -> Any:
    ts.Checkpoint(**objects).save(folder / "saved")
    ts.consolidate(folder / "saved", folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=True)


def test_tensors_within_other_values_have_their_numbers(tmp_path: Path) -> None:
    held = {
        "list": [1, torch.ones(2), (torch.arange(3), {"x": torch.full((2,), 5.0)})],
        "numbered": {1: torch.arange(4.0), 2: {3: torch.ones(1)}},
        "count": Counter(a=3),
        "ordered": OrderedDict(b=torch.ones(2), a=1),
    }
    found = consolidated(tmp_path, stored=Stored(held))["stored"]
    assert same(found, held)
    assert type(found["count"]) is Counter
    assert list(found["ordered"]) == ["b", "a"]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15
@pytest.mark.parametrize("layout", ["sparse", "quantized", "parameter"])
def test_tensors_that_are_more_than_numbers(layout: str, tmp_path: Path) -> None:
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 2, torch.qint8),
        "parameter": lambda: nn.Parameter(torch.ones(2)),
    }[layout]()
    found = consolidated(tmp_path, stored=Stored({"held": [tensor]}), weight=torch.arange(3.0))
    assert found["weight"].tolist() == [0.0, 1.0, 2.0]
    [held] = found["stored"]["held"]
    assert type(held) is type(tensor)
    assert held.layout == tensor.layout
    assert held.requires_grad == tensor.requires_grad
    dense = [one.dequantize() if one.is_quantized else one.to_dense() for one in (held, tensor)]
    assert torch.equal(*dense)


class Level(enum.IntEnum):
    HIGH = 2


class Mode(str, enum.Enum):
    FAST = "fast"


def test_classes_that_others_do_not_know(tmp_path: Path) -> None:
    """Each alone would make ``weights_only=True`` refuse the whole file."""
    held = {
        "best": np.float64(0.5),
        "level": Level.HIGH,
        "mode": Mode.FAST,
        "by": {1: 1.0, Level.HIGH: 2.0},
        "seen": defaultdict(int, a=1, b=2),
    }
    with pytest.warns(UserWarning, match=r"^stored\.") as warned:
        found = consolidated(tmp_path, stored=Stored(held))["stored"]
    assert found == {"best": 0.5, "level": 2, "mode": "fast", "by": {1: 1.0}, "seen": {"a": 1, "b": 2}}
    assert [type(one) for one in found.values()] == [float, int, str, dict, dict]
    said = "\n".join(str(one.message) for one in warned)
    for expected in (
        "stored.best, a float64, is written as the float",
        "stored.level, a Level, is written as the int",
        "stored.by has the key <Level.HIGH: 2>, a Level, which is left out",
        "stored.seen, a defaultdict, is written as a dict",
    ):
        assert expected in said


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_one_tensor_at_a_time(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{number}": torch.randn(50, 3) for number in range(4)}
    ts.Checkpoint(**tensors).save(tmp_path / "saved")
    read, asked = reading.StoredFolder.read, []

    def counted(self: Any, wanted: Any) -> Any:
        asked.append([piece.key for piece, _ in wanted])
        return read(self, wanted)

    monkeypatch.setattr(reading.StoredFolder, "read", counted)
    ts.consolidate(tmp_path / "saved", tmp_path / f"out.{suffix}")
    assert sorted(keys for keys in asked if keys) == [[name] for name in tensors]


def test_what_cannot_be_consolidated(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = saved
    with pytest.raises(InvalidArgumentError, match=r"model\.onnx does not say its format; end its name in \.pt"):
        ts.consolidate(path, tmp_path / "model.onnx")
    with pytest.raises(InvalidArgumentError, match="format='onnx' is not known"):
        ts.consolidate(path, tmp_path / "model.pt", format="onnx")
    with pytest.raises(InvalidArgumentError, match="no such folder"):
        ts.consolidate(tmp_path / "nothing", tmp_path / "model.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"folder\.pt is a folder"):
        ts.consolidate(path, tmp_path / "folder.pt")
    ts.consolidate(path, tmp_path / "model", format="pt")
    with pytest.raises(InvalidArgumentError, match="is a plain file already"):
        ts.consolidate(tmp_path / "model", tmp_path / "model.pt")
    before = (tmp_path / "model").read_bytes()
    [file] = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidArgumentError, match="is damaged"):
        ts.consolidate(path, tmp_path / "model", format="pt")
    assert (tmp_path / "model").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["folder.pt", "model", "saved"]


def test_the_command(
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["torchstrat", "consolidate", *words])
        return cli.main()

    assert run(str(saved[0]), str(tmp_path / "model.pt")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model.pt'}\n"
    assert "model" in torch.load(tmp_path / "model.pt", weights_only=True)
    assert run(str(tmp_path / "nothing"), str(tmp_path / "other.pt")) == 1
    assert "torchstrat consolidate: there is no checkpoint at" in capsys.readouterr().err
    for words, status in (([str(saved[0])], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            run(*words)
        assert ended.value.code == status
    assert "torchstrat consolidate CHECKPOINT FILE" in capsys.readouterr().out


# -- safetensors ------------------------------------------------------------------------------------------------------


ALL_DTYPES = {
    "bool": torch.tensor([True, False, True]),
    "i8": torch.arange(3, dtype=torch.int8),
    "i64": torch.arange(5),
    "bf16": torch.randn(3).bfloat16(),
    "f16": torch.randn(2, 2).half(),
    "f64": torch.randn(2, 3, dtype=torch.float64),
    "c64": torch.randn(2, dtype=torch.complex64),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "f8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`same` for dtypes that cannot be compared."""
    return {name: (one.dtype, one.shape, one.reshape(-1).view(torch.uint8)) for name, one in tensors.items()}


def test_a_safetensors_file_has_the_tensors(tmp_path: Path) -> None:
    ts.Checkpoint(**ALL_DTYPES).save(tmp_path / "saved")
    ts.consolidate(tmp_path / "saved", tmp_path / "all.safetensors")
    found = safetensors_file.mapped(tmp_path / "all.safetensors")
    assert same(bits(found), bits(dict(sorted(ALL_DTYPES.items(), key=lambda one: list(found).index(one[0])))))
    again = {name: torch.zeros_like(one) for name, one in ALL_DTYPES.items()}
    ts.Checkpoint(**again).restore(tmp_path / "all.safetensors")
    assert same(bits(again), bits(ALL_DTYPES))


def test_the_library_reads_and_writes_the_same(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path, objects = saved
    ts.consolidate(path, tmp_path / "model.safetensors")
    found = library.load_file(tmp_path / "model.safetensors")
    expected = {f"model.{name}": one for name, one in objects["model"].state_dict().items()}
    assert same({name: found[name] for name in expected}, expected)
    assert torch.equal(
        found["optimizer.state.head.bias.exp_avg"], objects["optimizer"].state_dict()["state"][4]["exp_avg"]
    )
    library.save_file(ALL_DTYPES, tmp_path / "theirs.safetensors")
    again = {name: torch.zeros_like(one) for name, one in ALL_DTYPES.items()}
    ts.Checkpoint(**again).restore(tmp_path / "theirs.safetensors")
    assert same(bits(again), bits(ALL_DTYPES))


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


def test_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    ts.Checkpoint(wide=torch.ones(2, dtype=torch.complex128)).save(tmp_path / "saved")
    with pytest.raises(InvalidArgumentError, match=r"wide is of torch.complex128, which safetensors does not have"):
        ts.consolidate(tmp_path / "saved", tmp_path / "wide.safetensors")
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 8) + b"no json!",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 56) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}} ' + b"short",
        struct.pack("<Q", 56) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,36]}} ' + b"0" * 36,
    ],
)
def test_damaged_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"bad\.safetensors (cannot be read as a saf|is damaged)"):
        ts.Checkpoint(a=torch.zeros(1)).restore(tmp_path / "bad.safetensors")


# -- in ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["consolidated", "torch.save"])
def test_a_file_by_the_names_of_objects(kind: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    if kind == "consolidated":
        ts.consolidate(path, tmp_path / "plain.pt")
    else:
        torch.save(contents(objects), tmp_path / "plain.pt")
    after = job(1)
    ts.Checkpoint(**after).restore(tmp_path / "plain.pt")
    assert same(contents(objects), contents(after))
    train(objects, range(3, 5))
    train(after, range(3, 5))
    assert same(contents(objects), contents(after))


def test_the_state_dict_of_the_one_module(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, objects = saved
    torch.save(objects["model"].state_dict(), tmp_path / "model.pt")
    for name in ("model", "table", "net"):  # also where a name is the beginning of a parameter's
        after = job(1)
        ts.Checkpoint(**{name: after["model"]}).restore(tmp_path / "model.pt")
        assert same(objects["model"].state_dict(), after["model"].state_dict())
    torch.save(objects["model"].state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    after = job(1)
    ts.Checkpoint(model=after["model"]).restore(tmp_path / "old.pt")
    assert same(objects["model"].state_dict(), after["model"].state_dict())


def test_safetensors_of_objects(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    ts.consolidate(path, tmp_path / "all.safetensors")
    after = job(1)
    rates = [group["lr"] for group in after["optimizer"].param_groups]
    ts.Checkpoint(model=after["model"], optimizer=after["optimizer"]).restore(tmp_path / "all.safetensors")
    assert same(objects["model"].state_dict(), after["model"].state_dict())
    assert same(moments(objects), moments(after))
    assert [group["lr"] for group in after["optimizer"].param_groups] == rates


def test_shards_take_their_rows(tmp_path: Path) -> None:
    whole = torch.arange(14.0).reshape(7, 2)
    torch.save({"table": whole, "model": {"inner.table": whole + 1}}, tmp_path / "plain.pt")
    table, model = (
        ts.ShardedVariable([nn.Parameter(torch.zeros(b - a, 2)) for a, b in row_offsets(7, count)]) for count in (3, 2)
    )
    holder = nn.Module()
    holder.inner = nn.Module()
    holder.inner.table = model
    ts.Checkpoint(table=table, model=holder).restore(tmp_path / "plain.pt")
    assert torch.equal(torch.as_tensor(table), whole)
    assert torch.equal(torch.as_tensor(model), whole + 1)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_parameter_servers(suffix: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    file = tmp_path / f"plain.{suffix}"
    ts.consolidate(path, file)
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(variable_partitioner=FixedShardsPartitioner(2), rows_only=True)
        with strategy.scope():
            after = job(1)
        checkpoint = ts.Checkpoint(model=after["model"], optimizer=after["optimizer"])
        checkpoint.restore(file)
        assert same(objects["model"].state_dict(), after["model"].state_dict())
        checkpoint.save(tmp_path / "again")
    back = job(2)
    ts.Checkpoint(model=back["model"], optimizer=back["optimizer"]).restore(tmp_path / "again")
    assert same(objects["model"].state_dict(), back["model"].state_dict())
    assert same(moments(objects), moments(back))


def test_what_does_not_fit(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, objects = saved
    torch.save(contents(objects), tmp_path / "plain.pt")
    after = job(1, rows=8)
    after["model"].extra = nn.Linear(1, 1)
    before = contents(after)
    with pytest.raises(InvalidArgumentError) as raised:
        ts.Checkpoint(**after, more=Odd()).restore(tmp_path / "plain.pt")
    message = str(raised.value)
    assert "plain.pt does not fit this program" in message
    assert "model.table.weight is torch.float32 (6, 2) in the checkpoint and torch.float32 (8, 2)" in message
    assert "model.extra.weight is missing in the checkpoint" in message
    assert "optimizer.state.table.weight.exp_avg has shape (6, 2) in the checkpoint" in message
    assert "more is missing in the checkpoint" in message
    assert same(before, contents(after))
    torch.save(objects["model"].state_dict(), tmp_path / "model.pt")
    with pytest.raises(InvalidArgumentError, match="optimizer has 0 parameter groups in the checkpoint and 3"):
        ts.Checkpoint(**job(1)).restore(tmp_path / "model.pt")
    with pytest.raises(InvalidArgumentError, match=r"has table\.weight, .* neither a name of the checkpoint's objects"):
        ts.Checkpoint(weight=torch.zeros(1)).restore(tmp_path / "model.pt")
    other = job(1)
    other["optimizer"] = torch.optim.Adam(list(other["model"].parameters())[1:])
    with pytest.raises(InvalidArgumentError, match="optimizer has 3 parameter groups in the checkpoint and 1"):
        ts.Checkpoint(model=other["model"], optimizer=other["optimizer"]).restore(tmp_path / "plain.pt")


def test_files_that_are_no_state_dict(tmp_path: Path) -> None:
    checkpoint = ts.Checkpoint(weight=torch.zeros(2))
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(InvalidArgumentError, match=r"text\.pt cannot be read as a file of torch\.save"):
        checkpoint.restore(tmp_path / "text.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(InvalidArgumentError, match=r"list\.pt holds a list, and no state_dict"):
        checkpoint.restore(tmp_path / "list.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "half.pt")
    content = (tmp_path / "half.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidArgumentError, match=r"half\.pt cannot be read"):
        checkpoint.restore(tmp_path / "half.pt")


def test_a_pickle_is_read_with_a_warning(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "path": Path("own")}, tmp_path / "pickle.pt")
    weight = torch.zeros(2)
    with pytest.warns(UserWarning, match=r"pickle\.pt has more in it than tensors .* files that you trust"):
        ts.Checkpoint(weight=weight).restore(tmp_path / "pickle.pt")
    assert weight.tolist() == [1.0, 1.0]


def test_a_full_disk_leaves_what_was_there(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ts.consolidate(saved[0], tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "sync_folder", full)
    monkeypatch.setattr(safetensors_file, "write", full)
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors cannot be written: .*No space left"):
        ts.consolidate(saved[0], tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "saved"]
