"""`ts.Checkpoint` in one process: what is on the disk, what comes back, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torchstrat as ts
from tests.support.checkpoints import (
    Held,
    Net,
    contents,
    data_file,
    flip,
    job,
    restored,
    same,
    saved_job,
    sharded,
    torch_alone,
    train,
)
from torchstrat import Checkpoint
from torchstrat.errors import InvalidArgumentError, WrongTypeError

MANIFEST, INDEX = "torchstrat.json", ".metadata"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return saved_job(tmp_path / "saved")


def keys_of(path: Path) -> set[str]:
    """As torch sees them."""
    return {key for key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata if "torchstrat" not in key}


@torch_alone
def test_torch_reads_it_alone(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    assert {"model.table.weight", "model.norm.running_mean", "optimizer.state.head.bias.exp_avg_sq"} <= keys_of(path)
    assert {"optimizer.param_groups.0.lr", "scheduler.last_epoch"} <= keys_of(path)
    target = {"model": Net().state_dict()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    assert same(target["model"], objects["model"].state_dict())
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert same(plain["model"], dict(objects["model"].state_dict()))
    moments = plain["optimizer"]["state"]["table.weight"]
    assert same(moments, objects["optimizer"].state[objects["model"].table.weight])
    groups = plain["optimizer"]["param_groups"]
    assert [name for one in groups for name in one["params"]] == [
        name for name, _ in objects["model"].named_parameters()
    ]
    assert [one["lr"] for one in groups] == [one["lr"] for one in objects["optimizer"].param_groups]
    assert same(plain["scheduler"], objects["scheduler"].state_dict())


@torch_alone
def test_what_torch_wrote_is_read_and_its_damage_named(tmp_path: Path) -> None:
    written, model, step = Net(), Net(), Held()
    dcp.save({"model": written.state_dict(), "own": {"step": 3}}, checkpoint_id=tmp_path / "torch", no_dist=True)
    Checkpoint(model=model, own=step).restore(tmp_path / "torch")
    assert same(written.state_dict(), model.state_dict())
    assert step.state == {"step": 3}
    file = data_file(tmp_path / "torch")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InvalidArgumentError, match=r"model\S+ in .*\.distcp cannot be read"):
        Checkpoint(model=model).restore(tmp_path / "torch")


def test_an_optimizer_over_two_modules_says_which(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    (one(torch.ones(2)) + two(torch.ones(2))).sum().backward()
    optimizer.step()
    Checkpoint(one=one, two=two, optimizer=optimizer).save(tmp_path / "both")
    assert {f"optimizer.state.{of}.weight.momentum_buffer" for of in ("one", "two")} <= keys_of(tmp_path / "both")


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 4)])
def test_any_layout_of_shards_restores_into_any_other(before: int, after: int, tmp_path: Path) -> None:
    one, two = sharded(7, before), sharded(7, after, start=100.0)
    optimizers = [torch.optim.Adam(one.variables), torch.optim.Adam(two.variables)]
    (torch.as_tensor(one * 1) * one).sum().backward()
    optimizers[0].step()
    Checkpoint(table=one, optimizer=optimizers[0]).save(tmp_path / "table")
    assert "optimizer.state.table.exp_avg" in keys_of(tmp_path / "table")
    Checkpoint(table=two, optimizer=optimizers[1]).restore(tmp_path / "table")
    assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
    for name in ("exp_avg", "exp_avg_sq"):
        pairs = zip(optimizers, (one, two), strict=True)
        moments = [torch.cat([optimizer.state[v][name] for v in table.variables]) for optimizer, table in pairs]
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


def test_all_that_does_not_fit_is_listed_and_nothing_changes(saved: tuple[Path, dict[str, Any]]) -> None:
    objects = job(1, rows=8)
    objects["model"].extra = nn.Linear(1, 1)
    del objects["model"].head
    objects["model"].norm.double()
    before = copy.deepcopy(contents(objects))
    with pytest.raises(InvalidArgumentError) as raised:
        Checkpoint(**objects, more=Held()).restore(saved[0])
    for expected in (
        "model.table.weight is torch.float32 (6, 2) in the checkpoint and torch.float32 (8, 2)",
        "model.norm.weight is torch.float32 (2,) in the checkpoint and torch.float64 (2,)",
        "model.extra.weight is missing in the checkpoint",
        "model.head.weight is in the checkpoint and not in the program",
        "more is missing in the checkpoint",
    ):
        assert expected in str(raised.value)
    assert same(before, contents(objects))


class Adapted(nn.Module):
    """Saves its adapter only, as methods without PyTorch's other arguments do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)

    def state_dict(self) -> Any:  # type: ignore[override]
        return self.adapter.state_dict()

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return self.adapter.load_state_dict(state)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_module_that_saves_in_a_way_of_its_own(replicas: int, tmp_path: Path) -> None:
    strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    with strategy.scope():
        saver, other = Adapted(), Adapted()
    base = other.base.weight.detach().clone()
    Checkpoint(model=saver).save(tmp_path / "saved")
    assert keys_of(tmp_path / "saved") == {"model.weight", "model.bias"}
    Checkpoint(model=other).restore(tmp_path / "saved")
    assert same(dict(other.adapter.named_parameters()), dict(saver.adapter.named_parameters()))
    assert torch.equal(other.base.weight, base)
    strategy.close()


def grouped(*groups: tuple[int, ...]) -> dict[str, Any]:
    """A job whose optimizer has these parameters, by their numbers."""
    model = Net()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": [parameters[number] for number in group]} for group in groups])
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grouped((0,), (1,), (2,), (3,), (4,)), "optimizer has 3 parameter groups in the checkpoint and 5"),
        (lambda: grouped((1, 2), (3,), (4,)), r"state\.table\.weight\.exp_avg is in the checkpoint and not"),
        (
            lambda: {"metric": sharded(6, 2)},
            r"metric is torch.float32 \(2,\) in the checkpoint and torch.float32 \(6, 2\)",
        ),
    ],
    ids=["number of groups", "parameters of groups", "shards"],
)
def test_other_objects(make: Callable[[], dict[str, Any]], message: str, saved: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Checkpoint(**make()).restore(saved[0])


# -- a part -----------------------------------------------------------------------------------------------------------


def flat(objects: dict[str, Any]) -> dict[str, Any]:
    """Everything, by the names of a checkpoint."""
    found = {"torchstrat": torch.get_rng_state()}
    for name in set(objects) - {"optimizer"}:
        state = objects[name].state_dict()
        found |= {f"{name}.{key}": value for key, value in state.items()} if name == "model" else {name: state}
    model, optimizer = objects["model"], objects["optimizer"]
    for name, parameter in model.named_parameters():
        found[f"optimizer.state.{name}"] = dict(optimizer.state[parameter])
    found["optimizer.param_groups"] = optimizer.state_dict()["param_groups"]
    return copy.deepcopy(found)


@pytest.mark.parametrize(
    "only",
    [
        ("model.table",),
        ("model.norm.running_mean",),
        ("model",),
        "scheduler",
        ["optimizer.state.head", "model.head"],
        ("optimizer.state",),
        ("optimizer.param_groups",),
        ("torchstrat", "optimizer"),
    ],
)
def test_what_is_named_is_restored_and_the_rest_stays(only: Any, saved: tuple[Path, dict[str, Any]]) -> None:
    source = job(0)
    Checkpoint(**source).restore(saved[0])
    there = flat(source)
    objects = job(1)
    train(objects, range(4, 9))
    before = flat(objects)
    assert not any(same(value, there[key]) for key, value in before.items()), "the control: all of it differs"
    assert not any(Checkpoint(**objects).restore(saved[0], only=only))
    names = (only,) if isinstance(only, str) else only
    for key, value in flat(objects).items():
        is_named = any(key == name or key.startswith(f"{name}.") for name in names)
        assert same(value, (there if is_named else before)[key]), key
    train(objects, range(2))


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (("model.tabel",), r"'model\.tabel', which is no name of .*near: model\.table"),
        (("table",), r"'table', which is no name of this checkpoint's objects \(near:? ?.*|no name of"),
        (("model.tab",), r"'model\.tab', which is no name"),
        (("scheduler.last_epoch",), "scheduler is restored as a whole"),
        (("optimizer.state.table.weight.exp_avg",), r"optimizer\.state\.table\.weight is restored as a whole"),
        (("torchstrat.process_0",), "torchstrat is restored as a whole"),
        ((), "names nothing"),
        (("model", 3), "must be names"),
        (7, "must be names"),
        (("more",), r"more is missing in the checkpoint"),
        (("model.extra.weight", "model.table"), r"model\.extra\.weight is missing in the checkpoint"),
    ],
)
def test_names_that_cannot_be_restored(only: Any, message: str, saved: tuple[Path, dict[str, Any]]) -> None:
    objects = job(1)
    objects["model"].extra = nn.Linear(1, 1)
    before = copy.deepcopy(contents(objects))
    with pytest.raises((InvalidArgumentError, WrongTypeError), match=message):
        Checkpoint(**objects, more=Held()).restore(saved[0], only=only)
    assert same(before, contents(objects))


def test_what_does_not_fit_is_skipped_and_told(saved: tuple[Path, dict[str, Any]]) -> None:
    model = Net(8)
    model.extra = nn.Linear(2, 1)
    model.norm = nn.BatchNorm1d(2, track_running_stats=False)
    model.head = nn.Linear(3, 1)  # as many rows, and other columns
    optimizer = torch.optim.Adam(model.parameters())
    objects = {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = flat(objects)
    skipped = Checkpoint(**objects, more=Held()).restore(saved[0], strict=False)
    assert set(skipped.mismatched_keys) == {
        *("model.table.weight", "model.head.weight", "optimizer.param_groups"),
        *("optimizer.state.table.weight", "optimizer.state.head.weight"),
    }
    assert {"model.extra.weight", "more", "optimizer.state.extra.weight"} <= set(skipped.missing_keys)
    assert {"model.norm.running_mean"} <= set(skipped.unexpected_keys)
    source = saved[1]
    assert same(model.head.bias, source["model"].head.bias)
    assert same(model.norm.weight, source["model"].norm.weight)
    assert same(objects["scheduler"].state_dict(), source["scheduler"].state_dict())
    after = flat(objects)
    for key in (*skipped.mismatched_keys, "model.extra.weight", "optimizer.state.extra.weight"):
        assert same(after[key], before[key]), key
    assert same(dict(optimizer.state[model.norm.weight]), dict(source["optimizer"].state[source["model"].norm.weight]))
    optimizer.step()


def test_one_tensor_of_two_names_is_found_under_either(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(2, 2)
            self.decoder = nn.Linear(2, 2)
            self.decoder.weight = self.encoder.weight

    before, after = Tied(), Tied()
    torch.save({"model": {k: v for k, v in before.state_dict().items() if k != "decoder.weight"}}, tmp_path / "one.pt")
    bias = after.decoder.bias.detach().clone()
    Checkpoint(model=after).restore(tmp_path / "one.pt", only="model.decoder.weight")
    assert same(after.encoder.weight, before.encoder.weight)
    assert same(after.decoder.bias, bias)


IS_NONE, IS_THERE = "holds no complete checkpoint", "is there already and is no checkpoint"
NO_FOLDER, NO_PLAIN_FILE = "no such folder", "cannot be read as a file of torch.save"


@pytest.mark.parametrize(
    ("place", "restoring", "saving"),
    [
        ("file", NO_PLAIN_FILE, IS_THERE),
        ("file/below", NO_FOLDER, "no checkpoint can be written to"),
        ("folder", IS_NONE, IS_THERE),
        ("link", NO_PLAIN_FILE, IS_THERE),
        ("broken", NO_FOLDER, IS_THERE),
        ("", "needs the path of a folder", "needs the path of a folder"),
    ],
)
def test_places_that_are_no_checkpoint_are_left_alone(place: str, restoring: str, saving: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file in (tmp_path / "file", tmp_path / "folder" / "mine"):
        file.write_text("precious")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("gone")
    before = sorted(tmp_path.rglob("*"))
    checkpoint, path = Checkpoint(tensor=torch.ones(1)), tmp_path / place if place else ""
    with pytest.raises(InvalidArgumentError, match=restoring):
        checkpoint.restore(path)
    with pytest.raises(InvalidArgumentError, match=saving):
        checkpoint.save(path)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "mine").read_text() == "precious"


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**manifest, **changes}))

    return edit


def index_of(content: bytes) -> Callable[[Path], None]:
    """Another one, and nothing that says what it was."""

    def replace(path: Path) -> None:
        (path / MANIFEST).unlink()
        (path / INDEX).write_bytes(content)

    return replace


CALLS = b"cposix\nsystem\n(S'true'\ntR."
LOOKS_UP = b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nVtouch\ntR."


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit": (lambda path: flip(data_file(path)), r"__0_0\.distcp is damaged: its contents are not what was written"),
    "cut off": (
        lambda path: os.truncate(data_file(path), 99),
        r"__0_0\.distcp is damaged: it has 99 bytes, and .* were",
    ),
    "no file": (
        lambda path: data_file(path).unlink(),
        r"__0_0\.distcp, a part of the checkpoint, cannot be read for \w+",
    ),
    "a bit of the index": (lambda path: flip(path / INDEX), r"\.metadata is damaged"),
    "no index": (lambda path: (path / INDEX).unlink(), "no complete checkpoint: its metadata is missing"),
    "an index that is no pickle": (index_of(b"no pickle"), "cannot be read as a checkpoint's metadata"),
    "an index that is a dict": (index_of(pickle.dumps({})), "holds a <class 'dict'>"),
    "an index that calls": (index_of(CALLS), "names posix.system, which no index of torch.distributed.checkpoint has"),
    "an index that looks up": (index_of(LOOKS_UP), "asks for 'touch'"),
    "a later format": (
        edited(format=3),
        r"format 3 of torchstrat's checkpoints, and this version reads formats 1 to 2\. Use",
    ),
    "other records": (edited(servers={"0": "other records"}), "is damaged"),
    "no checksums": (edited(files=None), "is damaged"),
    "half a manifest": (lambda path: (path / MANIFEST).write_text("{"), "is damaged"),
    "a list for a manifest": (lambda path: (path / MANIFEST).write_text("[{}]"), "is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_changes(kind: str, saved: tuple[Path, dict[str, Any]]) -> None:
    damage, message = DAMAGE[kind]
    damage(saved[0])
    objects = job(1)
    before = copy.deepcopy(contents(objects))
    with pytest.raises(InvalidArgumentError, match=message):
        Checkpoint(**objects).restore(saved[0])
    assert same(before, contents(objects))


class InterruptedSaveError(Exception):
    pass


@pytest.mark.parametrize("of_module", [False, True])
def test_what_is_expanded_is_refused_before_anything_changes(of_module: bool, tmp_path: Path) -> None:
    def job(value: torch.Tensor) -> dict[str, Any]:
        module = nn.Module()
        module.register_buffer("value", value)
        return {"before": torch.zeros(2), "one": module if of_module else value}

    Checkpoint(**{**job(torch.ones(2, 3)), "before": torch.ones(2)}).save(tmp_path / "saved")
    objects = job(torch.zeros(1, 3).expand(2, 3))
    with pytest.raises(InvalidArgumentError, match=r"one.*of shape \(2, 3\) is expanded.*\.clone\(\)"):
        Checkpoint(**objects).restore(tmp_path / "saved")
    assert not objects["before"].any()
    skipped = Checkpoint(**objects).restore(tmp_path / "saved", strict=False)
    assert skipped.mismatched_keys == ["one.value" if of_module else "one"]
    assert objects["before"].all()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise InterruptedSaveError


def test_a_failed_save_leaves_the_earlier_one(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, objects = saved
    before = restored(path)
    train(objects, range(3, 5))
    with pytest.raises(InterruptedSaveError):
        Checkpoint(**objects, failing=Held({"value": Unpicklable()})).save(path)
    with pytest.raises(InvalidArgumentError, match=r"both be called own\.a\.b"):
        Checkpoint(**objects, own=Held({"a": {"b": 1}, "a.b": 2})).save(path)
    with pytest.raises(InvalidArgumentError, match=r"Checkpoint\(torchstrat=…\): under this name"):
        Checkpoint(**objects, torchstrat=torch.zeros(1))
    assert os.listdir(tmp_path) == ["saved"]
    assert same(restored(path), before)


class Refuses:
    """An object of a program's own."""

    fails = False

    def state_dict(self) -> dict[str, int]:
        return {"version": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("another version")


@pytest.mark.parametrize("order", [("model", "optimizer", "counter", "own"), ("own", "counter", "optimizer", "model")])
def test_what_an_object_refuses_leaves_variables_alone(order: tuple[str, ...], tmp_path: Path) -> None:
    objects: dict[str, Any] = {"model": nn.Linear(2, 1), "own": Refuses(), "counter": torch.zeros(2)}
    objects["optimizer"] = torch.optim.SGD(objects["model"].parameters(), 0.1, momentum=0.9)
    checkpoint = Checkpoint(**{name: objects[name] for name in order})
    checkpoint.save(tmp_path / "saved")
    objects["own"].fails = True
    objects["counter"] += 1
    objects["model"](torch.ones(2)).sum().backward()
    objects["optimizer"].step()
    before = copy.deepcopy([objects["model"].state_dict(), objects["optimizer"].state_dict(), objects["counter"]])
    with pytest.raises(ValueError, match="another version") as raised:
        checkpoint.restore(tmp_path / "saved")
    assert same([objects["model"].state_dict(), objects["optimizer"].state_dict(), objects["counter"]], before)
    left = ", ".join([*order, "the job's random numbers"])
    assert any(f"restored are: none; not, or not whole: {left}." in note for note in raised.value.__notes__)
    objects["own"].fails = False
    checkpoint.restore(tmp_path / "saved")
    assert objects["counter"].sum() == 0
