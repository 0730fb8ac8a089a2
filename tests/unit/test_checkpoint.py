"""`ts.Checkpoint` in one process: what is on the disk, what comes back, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import torchstrat as ts
from tests.unit.checkpoints import contents, flip, same
from torchstrat import Checkpoint
from torchstrat.checkpoint import disk, files
from torchstrat.checkpoint.manifest import NAME
from torchstrat.errors import ContextError, InvalidArgumentError
from torchstrat.partitioners import row_offsets

alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
"""What torch.distributed.checkpoint says when it is used in one process; the second of itself, in torch 2.9."""


class Net(nn.Module):
    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.table(ids)))
        return output


class Counter:
    """Something of a user's own, with state of every kind."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def job(seed: int, rows: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
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
    Checkpoint(**objects).save(tmp_path / "saved")
    return tmp_path / "saved", objects


# -- there and back ---------------------------------------------------------------------------------------------------


def test_a_job_goes_on_as_if_it_had_never_stopped(saved: tuple[Path, dict[str, Any]]) -> None:
    path, before = saved
    after = job(1)
    assert not same(contents(before), contents(after))
    Checkpoint(**after).restore(path)
    assert same(contents(before), contents(after))
    train(before, range(3, 6))
    train(after, range(3, 6))
    assert same(contents(before), contents(after))


def test_restoring_takes_what_it_is_asked_for(saved: tuple[Path, dict[str, Any]]) -> None:
    path, before = saved
    after = job(1)
    Checkpoint(model=after["model"]).restore(path)
    assert same(before["model"].state_dict(), after["model"].state_dict())
    assert not after["optimizer"].state


def test_objects_of_the_users_own(tmp_path: Path) -> None:
    state = {"seen": 3, "by name": {"a": torch.arange(3), "b": (1, [2.0])}, "numbers": {1: "x"}, "none": None, "no": {}}
    counter, again = Counter(), Counter()
    counter.state = state
    variable, other = ts.Variable(3.0), ts.Variable(0.0)
    Checkpoint(counter=counter, metric=variable, tensor=torch.arange(4)).save(tmp_path / "own")
    tensor = torch.zeros(4, dtype=torch.int64)
    Checkpoint(counter=again, metric=other, tensor=tensor).restore(tmp_path / "own")
    assert same(again.state, state)
    assert float(other) == 3.0
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS, torch.optim.AdamW])
def test_optimizers_without_a_module(optimizer: Any, tmp_path: Path) -> None:
    def make() -> tuple[nn.Parameter, Any]:
        parameter = nn.Parameter(torch.ones(3))
        return parameter, optimizer([parameter], lr=0.1)

    def step(parameter: nn.Parameter, own: Any) -> None:
        def loss() -> torch.Tensor:
            own.zero_grad()
            value = (parameter * torch.arange(3)).square().sum()
            value.backward()
            return value

        own.step(loss)

    one, two = make(), make()
    step(*one)
    Checkpoint(weight=one[0], optimizer=one[1]).save(tmp_path / "saved")
    Checkpoint(weight=two[0], optimizer=two[1]).restore(tmp_path / "saved")
    assert same(one[1].state_dict()["state"], two[1].state_dict()["state"])
    step(*one)
    step(*two)
    assert torch.equal(one[0], two[0])


# -- the layout -------------------------------------------------------------------------------------------------------


@alone
def test_torch_reads_it_alone(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    fresh = Net()
    target = {"model": fresh.state_dict()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    assert same(target["model"], objects["model"].state_dict())
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert same(plain["model"], dict(objects["model"].state_dict()))
    moments = plain["optimizer"]["state"]["table.weight"]
    assert same(moments, objects["optimizer"].state[objects["model"].table.weight])
    [group] = plain["optimizer"]["param_groups"]
    assert group["params"] == [name for name, _ in objects["model"].named_parameters()]
    assert group["lr"] == objects["optimizer"].param_groups[0]["lr"]
    assert same(plain["scheduler"], objects["scheduler"].state_dict())


@alone
def test_what_torch_wrote_is_read(tmp_path: Path) -> None:
    written = Net()
    dcp.save({"model": written.state_dict()}, checkpoint_id=tmp_path / "torch", no_dist=True)
    model = Net()
    Checkpoint(model=model).restore(tmp_path / "torch")
    assert same(written.state_dict(), model.state_dict())


def test_keys_are_whole_names(saved: tuple[Path, dict[str, Any]]) -> None:
    metadata = dcp.FileSystemReader(saved[0]).read_metadata()
    keys = set(metadata.state_dict_metadata)
    assert {"model.table.weight", "model.norm.running_mean", "optimizer.state.head.bias.exp_avg_sq"} <= keys
    assert {"optimizer.param_groups.0.lr", "scheduler.last_epoch"} <= keys


def test_an_optimizer_over_two_modules_says_which(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    (one(torch.ones(2)) + two(torch.ones(2))).sum().backward()
    optimizer.step()
    Checkpoint(one=one, two=two, optimizer=optimizer).save(tmp_path / "both")
    keys = set(dcp.FileSystemReader(tmp_path / "both").read_metadata().state_dict_metadata)
    assert {"optimizer.state.one.weight.momentum_buffer", "optimizer.state.two.weight.momentum_buffer"} <= keys


def test_long_tensors_are_cut_into_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    tensor, again = torch.randn(33, 3), torch.zeros(33, 3)
    Checkpoint(tensor=tensor).save(tmp_path / "blocks")
    metadata = dcp.FileSystemReader(tmp_path / "blocks").read_metadata()
    described = metadata.state_dict_metadata["tensor"]
    assert isinstance(described, TensorStorageMetadata)
    assert len(described.chunks) == 7
    Checkpoint(tensor=again).restore(tmp_path / "blocks")
    assert torch.equal(tensor, again)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0)])
def test_small_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor, again = torch.full(shape, 2.0), torch.zeros(shape)
    Checkpoint(tensor=tensor, other=torch.ones(1)).save(tmp_path / "small")
    Checkpoint(tensor=again).restore(tmp_path / "small")
    assert torch.equal(tensor, again)


# -- shards of a variable ---------------------------------------------------------------------------------------------


def sharded(rows: int, shards: int, start: float = 0.0) -> ts.ShardedVariable:
    whole = torch.arange(start, start + 2.0 * rows).reshape(rows, 2)
    return ts.ShardedVariable([nn.Parameter(whole[a:b].clone()) for a, b in row_offsets(rows, shards)])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 4)])
def test_any_layout_of_shards_restores_into_any_other(before: int, after: int, tmp_path: Path) -> None:
    one, two = sharded(7, before), sharded(7, after, start=100.0)
    optimizers = [torch.optim.Adam(one.variables), torch.optim.Adam(two.variables)]
    (torch.as_tensor(one * 1) * one).sum().backward()
    optimizers[0].step()
    Checkpoint(table=one, optimizer=optimizers[0]).save(tmp_path / "table")
    assert (
        "optimizer.state.table.exp_avg" in dcp.FileSystemReader(tmp_path / "table").read_metadata().state_dict_metadata
    )
    Checkpoint(table=two, optimizer=optimizers[1]).restore(tmp_path / "table")
    assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
    for name in ("exp_avg", "exp_avg_sq"):
        moments = [
            torch.cat([o.state[v][name] for v in t.variables]) for o, t in zip(optimizers, (one, two), strict=True)
        ]
        assert torch.equal(*moments)
        assert bool(moments[0][1:].abs().sum() > 0)


def test_a_shard_that_no_step_has_touched(tmp_path: Path) -> None:
    table, whole = sharded(6, 3), nn.Parameter(torch.zeros(6, 2))
    optimizer, other = torch.optim.Adam(table.variables), torch.optim.Adam([whole])
    table.variables[1].sum().backward()
    optimizer.step()
    Checkpoint(table=table, optimizer=optimizer).save(tmp_path / "table")
    Checkpoint(table=whole, optimizer=other).restore(tmp_path / "table")
    assert other.state[whole]["exp_avg"][:, 0].tolist() == pytest.approx([0, 0, 0.1, 0.1, 0, 0])


def test_shards_within_a_module_are_one_tensor(tmp_path: Path) -> None:
    one, two = nn.Module(), nn.Module()
    one.inner, two.inner = nn.Module(), nn.Module()
    one.inner.table, two.inner.table = sharded(5, 2), sharded(5, 3, start=9.0)
    Checkpoint(model=one).save(tmp_path / "module")
    keys = dcp.FileSystemReader(tmp_path / "module").read_metadata().state_dict_metadata
    assert {key for key in keys if not key.startswith("torchstrat.")} == {"model.inner.table"}
    Checkpoint(model=two).restore(tmp_path / "module")
    assert torch.equal(torch.as_tensor(one.inner.table), torch.as_tensor(two.inner.table))


# -- strategies in one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one", "mirrored", "central"])
def test_synchronous_strategies(kind: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, plain = saved
    strategy: ts.Strategy
    if kind == "one":
        strategy = ts.OneDeviceStrategy("cpu:0")
    else:
        strategy = {"mirrored": ts.MirroredStrategy, "central": ts.CentralStorageStrategy}[kind](["cpu:0", "cpu:1"])
    with strategy.scope():
        objects = job(1)
        seen = ts.Variable(0.0, aggregation=ts.VariableAggregation.SUM)
    Checkpoint(**objects).restore(path)
    assert same(contents(plain), contents(objects))

    def step() -> None:
        train(objects, range(3, 4))
        seen.assign_add(torch.tensor(1.0))

    strategy.run(step)
    Checkpoint(**objects, seen=seen).save(tmp_path / "strategy")
    again, count = job(2), ts.Variable(0.0)
    Checkpoint(**again, seen=count).restore(tmp_path / "strategy")
    assert same(contents(objects), contents(again))
    assert float(count) == strategy.num_replicas_in_sync
    seen.assign(0.0)
    Checkpoint(seen=seen).restore(tmp_path / "strategy")
    assert float(seen) == strategy.num_replicas_in_sync
    strategy.close()


def test_not_in_a_replica(tmp_path: Path) -> None:
    strategy = ts.OneDeviceStrategy("cpu:0")
    with pytest.raises(ContextError, match=r"Checkpoint\.save was called in a replica"):
        strategy.run(lambda: Checkpoint(tensor=torch.ones(1)).save(tmp_path / "x"))
    strategy.close()


# -- what does not fit ------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_and_nothing_changes(saved: tuple[Path, dict[str, Any]]) -> None:
    objects = job(1, rows=8)
    objects["model"].extra = nn.Linear(1, 1)
    del objects["model"].head
    objects["model"].norm.double()
    before = contents(objects)
    with pytest.raises(InvalidArgumentError) as raised:
        Checkpoint(**objects, more=Counter()).restore(saved[0])
    message = str(raised.value)
    assert "model.table.weight is torch.float32 (6, 2) in the checkpoint and torch.float32 (8, 2)" in message
    assert "model.norm.weight is torch.float32 (2,) in the checkpoint and torch.float64 (2,)" in message
    assert "model.extra.weight is missing in the checkpoint" in message
    assert "model.head.weight is in the checkpoint and not in the program" in message
    assert "more is missing in the checkpoint" in message
    assert same(before, contents(objects))


def test_other_parameter_groups(saved: tuple[Path, dict[str, Any]]) -> None:
    objects = job(1)
    objects["optimizer"] = torch.optim.Adam([{"params": [p]} for p in objects["model"].parameters()])
    with pytest.raises(InvalidArgumentError, match="optimizer has 1 parameter groups in the checkpoint and 5"):
        Checkpoint(model=objects["model"], optimizer=objects["optimizer"]).restore(saved[0])
    objects["optimizer"] = torch.optim.Adam(list(objects["model"].parameters())[1:])
    with pytest.raises(InvalidArgumentError, match=r"state\.table\.weight\.exp_avg is in the checkpoint and not"):
        Checkpoint(model=objects["model"], optimizer=objects["optimizer"]).restore(saved[0])


def test_other_total_rows(tmp_path: Path) -> None:
    Checkpoint(table=sharded(7, 2)).save(tmp_path / "table")
    with pytest.raises(InvalidArgumentError, match=r"\(7, 2\) in the checkpoint and torch.float32 \(6, 2\)"):
        Checkpoint(table=sharded(6, 2)).restore(tmp_path / "table")


def test_objects_without_state() -> None:
    with pytest.raises(InvalidArgumentError, match="needs objects"):
        Checkpoint()
    with pytest.raises(InvalidArgumentError, match=r"Checkpoint\(step=…\) got int 3"):
        Checkpoint(step=3).save("never written")


def test_two_values_of_one_name(tmp_path: Path) -> None:
    counter = Counter()
    counter.state = {"a": {"b": 1}, "a.b": 2}
    with pytest.raises(InvalidArgumentError, match=r"both be called counter\.a\.b"):
        Checkpoint(counter=counter).save(tmp_path / "twice")
    assert os.listdir(tmp_path) == []


# -- damage -----------------------------------------------------------------------------------------------------------


def data_file(path: Path) -> Path:
    [file] = path.glob("*.distcp")
    return file


def refused(path: Path, message: str) -> None:
    objects = job(1)
    before = contents(objects)
    with pytest.raises(InvalidArgumentError, match=message):
        Checkpoint(**objects).restore(path)
    assert same(before, contents(objects))


def test_a_flipped_bit(saved: tuple[Path, dict[str, Any]]) -> None:
    flip(data_file(saved[0]))
    refused(saved[0], r"__0_0\.distcp is damaged: its contents are not what was written")


def test_a_truncated_file(saved: tuple[Path, dict[str, Any]]) -> None:
    file = data_file(saved[0])
    file.write_bytes(file.read_bytes()[:-10])
    refused(saved[0], r"__0_0\.distcp is damaged: it has .* bytes, and .* were written")


def test_a_missing_file(saved: tuple[Path, dict[str, Any]]) -> None:
    data_file(saved[0]).unlink()
    refused(saved[0], r"__0_0\.distcp, a part of the checkpoint, cannot be read")


def test_a_damaged_index(saved: tuple[Path, dict[str, Any]]) -> None:
    flip(saved[0] / ".metadata")
    refused(saved[0], r"\.metadata is damaged")
    (saved[0] / NAME).unlink()
    (saved[0] / ".metadata").write_bytes(b"no pickle")
    refused(saved[0], "cannot be read as a checkpoint's metadata")


def test_an_index_runs_nothing(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "harm",)

    (saved[0] / NAME).unlink()
    (saved[0] / ".metadata").write_bytes(pickle.dumps(Harm()))
    refused(saved[0], r"names (builtins\.getattr|pathlib\S*), which no index|asks for 'touch'")
    assert not (tmp_path / "harm").exists()
    (saved[0] / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    refused(saved[0], "names posix.system, which no index of torch.distributed.checkpoint has")
    (saved[0] / ".metadata").write_bytes(pickle.dumps({}))
    refused(saved[0], "holds a <class 'dict'>")


def test_a_later_format(saved: tuple[Path, dict[str, Any]]) -> None:
    manifest = json.loads((saved[0] / NAME).read_text())
    (saved[0] / NAME).write_text(json.dumps({**manifest, "format": 99}))
    refused(saved[0], "format 99 of torchstrat's checkpoints")
    (saved[0] / NAME).write_text("{")
    refused(saved[0], "is damaged")


def test_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such folder")
    (tmp_path / "half").mkdir()
    refused(tmp_path / "half", "no complete checkpoint: its metadata is missing")


# -- written whole or not at all --------------------------------------------------------------------------------------


class InterruptedSaveError(Exception):
    pass


class Failing(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": Unpicklable()}


class Unpicklable:
    def __reduce__(self) -> Any:
        raise InterruptedSaveError


def test_a_failed_save_leaves_the_earlier_one(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    train(objects, range(3, 5))
    with pytest.raises(InterruptedSaveError):
        Checkpoint(**objects, failing=Failing()).save(path)
    assert os.listdir(tmp_path) == ["saved"]
    after = job(1)
    Checkpoint(**after).restore(path)
    assert after["scheduler"].last_epoch == 3


@pytest.mark.parametrize("exchange", [True, False])
def test_a_later_one_takes_its_place(
    exchange: bool, saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, objects = saved
    if not exchange:
        monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    train(objects, range(3, 5))
    Checkpoint(**objects).save(path)
    assert os.listdir(tmp_path) == ["saved"]
    after = job(1)
    Checkpoint(**after).restore(path)
    assert same(contents(objects), contents(after))


def test_killed_between_the_two_renames(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, objects = saved
    rename = disk.rename

    def interrupted(path: Path, target: Path) -> None:
        if "writing" in path.name:
            raise InterruptedSaveError
        rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "exchange", lambda one, other: False)
        patched.setattr(disk, "rename", interrupted)
        with pytest.raises(InterruptedSaveError):
            Checkpoint(**objects).save(path)
    assert not path.exists()
    after = job(1)
    Checkpoint(**after).restore(path)
    assert same(contents(objects), contents(after))
    train(objects, range(3, 4))
    Checkpoint(**objects).save(path)
    assert os.listdir(tmp_path) == ["saved"]


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tensor=torch.ones(1))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InvalidArgumentError, match="is there already and is no checkpoint"):
        checkpoint.save(tmp_path / "file")
    with pytest.raises(InvalidArgumentError, match="no checkpoint can be written to"):
        checkpoint.save(tmp_path / "file" / "below")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    with pytest.raises(InvalidArgumentError, match="is there already and is no checkpoint"):
        checkpoint.save(tmp_path / "full")
    assert (tmp_path / "full" / "mine").read_text() == "precious"
    with pytest.raises(InvalidArgumentError, match="needs the path of a folder"):
        checkpoint.save("")
