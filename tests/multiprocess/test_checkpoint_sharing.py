"""Several processes write one checkpoint together: each value once, by one that holds it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat import Checkpoint
from torchstrat.checkpoint import writing
from torchstrat.errors import InvalidArgumentError, TorchstratError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess


def make(seed: int) -> dict[str, Any]:
    """Eight tensors of 1 MiB to be shared out, with Adam's, and small ones."""
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)])
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def started(kind: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    strategy = ts.CentralStorageStrategy() if kind == "central" else ts.MirroredStrategy()
    with strategy.scope():
        return strategy, make(seed)


def train(strategy: ts.Strategy, objects: dict[str, Any]) -> None:
    def step() -> None:
        objects["optimizer"].zero_grad()
        sum(layer(torch.ones(1, 512)).square().mean() for layer in objects["model"]).backward()
        objects["optimizer"].step()

    strategy.run(step)


def parameters(objects: dict[str, Any]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in objects["model"].parameters()]


def save(kind: str, path: str, asynchronous: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    strategy, objects = started(kind)
    train(strategy, objects)
    saved = parameters(objects)
    reached, go_on, write = threading.Event(), threading.Event(), writing.write_part

    def held(*args: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return write(*args)

    writing.write_part = held
    try:
        if not asynchronous:
            go_on.set()
        handle = Checkpoint(**objects).save(path, asynchronous=asynchronous)
        assert reached.wait(60)
        train(strategy, objects)  # the strategy's own messages meet those of the save
        go_on.set()
        handle.result(60)
    finally:
        writing.write_part = write
        strategy.close()
    return saved, parameters(objects)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_the_bytes_are_shared_out(kind: str, asynchronous: bool, two_processes: Workers, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    (saved, later), _ = two_processes.run(save, kind, str(path), asynchronous)
    assert not torch.equal(saved[0], later[0])
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    # Values of 4 MiB and the optimizer's 8 MiB, which both see.
    assert sum(sizes) < 13 << 20, "written once"
    assert abs(sizes[0] - sizes[1]) < 2 << 20
    objects = make(7)
    Checkpoint(**objects).restore(path)
    assert all(map(torch.equal, saved, objects["model"].parameters()))
    assert all(float(state["step"]) == 1.0 for state in objects["optimizer"].state_dict()["state"].values())


def fail(path: str, asynchronous: bool) -> tuple[str, str, list[str]]:
    """Rank 1 cannot write."""
    strategy, objects = started("mirrored")
    checkpoint, write = Checkpoint(**objects), writing.write_part
    checkpoint.save(path)
    train(strategy, objects)

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    messages = []
    try:
        if not strategy.is_chief:
            writing.write_part = full
        handle = checkpoint.save(path, asynchronous=asynchronous)
        handle.result(60)
    except TorchstratError as error:
        messages.append(f"{type(error).__name__}: {error}")
    finally:
        writing.write_part = write
    left = sorted(os.listdir(os.path.dirname(path)))
    checkpoint.save(path + "-next")
    strategy.close()
    [message] = messages
    return message, type(strategy).__name__, left


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_of_one_is_one_of_all(asynchronous: bool, two_processes: Workers, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    (first, _, left), (second, _, _) = two_processes.run(fail, str(path), asynchronous)
    assert first.startswith(f"TorchstratError: saving {path} failed on rank 1: InvalidArgumentError: the check")
    assert second.startswith("InvalidArgumentError: the checkpoint cannot be written")
    assert left == ["saved"]
    torch.manual_seed(0)
    expected, objects = make(0), make(7)
    Checkpoint(**objects).restore(path)
    assert all(map(torch.equal, expected["model"].parameters(), objects["model"].parameters()))


class Elsewhere(type(Path())):  # type: ignore[misc]
    """A path on another machine: nothing is there."""

    def is_dir(self, **_: Any) -> bool:
        return False


def save_unseen(path: str) -> list[str]:
    strategy, objects = started("mirrored")
    only_here = {} if strategy.is_chief else {"own": nn.Linear(2, 2)}
    folder = writing.Folder
    messages = []
    try:
        if not strategy.is_chief:
            writing.Folder = Elsewhere
        Checkpoint(**objects).save(path)
        try:
            Checkpoint(**objects, **only_here).save(path + "-lost")
        except InvalidArgumentError as error:
            messages.append(str(error))
    finally:
        writing.Folder = folder
        strategy.close()
    return messages


def test_who_does_not_see_the_folder_does_not_write(two_processes: Workers, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    first, second = two_processes.run(save_unseen, str(path))
    assert first == second
    assert "own.weight is held by rank 1 alone, which does not see" in first[0]
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    assert not (path / "__1_0.distcp").exists()
    Checkpoint(**make(7)).restore(path)


def fail_and_ask_differently(path: str) -> list[str]:
    """Rank 0 asks the handle, rank 1 does not: the next save fails on both, and nobody waits for the other."""
    strategy, objects = started("mirrored")
    checkpoint, write = Checkpoint(**objects), writing.write_part

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    writing.write_part = full
    handle = checkpoint.save(path, asynchronous=True)
    ended = threading.Event()
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    writing.write_part = write
    messages = []
    for attempt in ("ask", "save", "save"):
        try:
            if attempt == "save":
                checkpoint.save(path)
            elif strategy.is_chief:
                handle.result()
        except TorchstratError as error:
            messages.append(f"{attempt}: {error}")
    strategy.close()
    return messages


def test_an_error_that_only_some_have_asked_for(two_processes: Workers, tmp_path: Path) -> None:
    first, second = two_processes.run(fail_and_ask_differently, str(tmp_path / "saved"))
    assert [message.split(":")[0] for message in first] == ["ask", "save"]
    assert "failed on rank 1" in first[1]
    assert [message.split(":")[0] for message in second] == ["save"]
    Checkpoint(**make(7)).restore(tmp_path / "saved")


def save_after_trials(lagging: int, path: str) -> float:
    """Objects of no strategy, while one process still has two that are over: one closed, and one only dropped."""
    closed, dropped = ts.MirroredStrategy(), ts.MirroredStrategy()
    closed.close()
    if int(os.environ["RANK"]) != lagging:
        closed = None
        del dropped
        gc.collect()
    fresh = ts.MirroredStrategy()
    gc.disable()  # as if none happened to come before the save
    try:
        dropped = None
        model = nn.Linear(2, 2)
        wanted = model.weight.detach().clone()
        Checkpoint(model=model).save(path)
        with torch.no_grad():
            model.weight.zero_()
        Checkpoint(model=model).restore(path)
    finally:
        gc.enable()
    fresh.close()
    return float((model.weight - wanted).abs().max())


@pytest.mark.parametrize("lagging", [0, 1])
def test_strategies_that_are_over_take_no_part(tmp_path: Path, two_processes: Workers, lagging: int) -> None:
    assert two_processes.run(save_after_trials, lagging, str(tmp_path / "saved"))[0] == 0
