"""`ts.estimate`, against the bytes of real tensors and of real messages."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import cpus
from torchstrat.app import cli
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.parameter_server.messages import Push
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.strategies.estimates import optimizer_named
from torchstrat.testing.fake_cluster import FakeCluster

IDS = torch.tensor([[3, 99, 7], [17, 50, 21], [0, 1, 2], [4, 5, 6]])


class Clicks(nn.Module):
    """A table, layers, a frozen bias, a buffer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.body = nn.Sequential(nn.Linear(24, 16), nn.LayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 1)
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(ids).flatten(1)) * self.scale)


momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"adam": "adam", "momentum": momentum, "adagrad": "adagrad"}


def trained(strategy: ts.Strategy, optimizer: Any) -> tuple[Clicks, torch.optim.Optimizer, Any]:
    """A model after two steps, its optimizer, and the step."""
    make = optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
    with strategy.scope():
        model = Clicks()
        stepped = make([one for one in model.parameters() if one.requires_grad])

    def step(ids: torch.Tensor) -> None:
        stepped.zero_grad()
        model(ids).sum().backward()
        stepped.step()

    return model, stepped, step


def nbytes(tensors: Any) -> int:
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return nbytes(value for state in optimizer.state.values() for value in state.values())


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_device_holds_what_is_estimated(optimizer: str) -> None:
    (row,) = ts.estimate(Clicks, OPTIMIZERS[optimizer]).of("one_device")
    strategy = ts.OneDeviceStrategy("cpu:0")
    model, stepped, step = trained(strategy, OPTIMIZERS[optimizer])
    strategy.run(step, args=(IDS,))
    strategy.close()
    assert row.memory.parameters_bytes == nbytes(model.parameters())
    assert row.memory.buffers_bytes == nbytes(model.buffers())
    assert row.memory.gradients_bytes == nbytes(one.grad for one in model.parameters())
    assert row.memory.optimizer_state_bytes == state_bytes(stepped) > 0
    assert row.sent_bytes == 0


REPLICATED = {"mirrored": "devices", "central_storage": "compute_devices"}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_of_one_process_hold_what_is_estimated(name: str) -> None:
    rows = ts.estimate(Clicks, "adam", replicas=2).of(name, "one")
    strategy = ts.registry.create(name, **{REPLICATED[name]: cpus(2)})
    model, stepped, step = trained(strategy, "adam")
    seen: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}}

    def look(ids: torch.Tensor) -> None:
        """What each replica has, by its place in memory."""
        step(ids)
        for one in model.parameters():
            seen["parameters"][one.data_ptr()] = one.nbytes
            if one.grad is not None:
                seen["gradients"][one.grad.data_ptr()] = one.grad.nbytes

    strategy.run(look, args=(IDS,))
    state = state_bytes(stepped)
    strategy.close()
    assert sum(row.count for row in rows) == 2
    assert sum(row.count * row.memory.parameters_bytes for row in rows) == sum(seen["parameters"].values())
    assert sum(row.count * row.memory.gradients_bytes for row in rows) == sum(seen["gradients"].values())
    assert sum(row.count * row.memory.optimizer_state_bytes for row in rows) == state


@pytest.mark.parametrize("name", ["one_device", *REPLICATED])
def test_a_strategy_that_exists_estimates_the_same(name: str) -> None:
    strategy = ts.registry.create(name, **({REPLICATED[name]: cpus(3)} if name in REPLICATED else {"device": "cpu:0"}))
    with torch.device("meta"):
        model = Clicks()
    stepped = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    known = strategy.extended.estimate(model, stepped)
    strategy.close()
    rows = ts.estimate(Clicks, "adam", replicas=3).of(name, "one")
    assert sum(row.count * row.memory.total_bytes for row in rows) == known.total_bytes


# -- parameter servers -------------------------------------------------------------------------------------------------


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of tensors that servers were sent and gave, together."""
    counted = {"to servers": 0, "from servers": 0}
    one_at_a_time = threading.Lock()  # servers are called in threads

    def add(way: str, tensors: Any) -> None:
        size = nbytes(tensors)
        with one_at_a_time:
            counted[way] += size

    def count(name: str, sent: Callable[[Any], Any], given: Callable[[Any], Any]) -> None:
        real = getattr(VariableStore, name)

        def counting(store: Any, asked: Any, *memory: Any) -> Any:
            add("to servers", sent(asked))
            reply = real(store, asked, *memory)
            add("from servers", given(reply))
            return reply

        monkeypatch.setattr(VariableStore, name, counting)

    def pushed(message: Push) -> Iterator[Any]:
        for step in message.steps:
            yield from (gradient for _, gradient in step.dense)
            yield from (tensor for _, *both in step.rows for tensor in both)

    count("read", lambda keys: (), lambda values: values)
    count("read_rows", lambda requests: [request.ids for request in requests], lambda values: values)
    count("push", pushed, lambda reply: reply.values)
    return counted


PARTITIONERS = {"whole": None, "cut": ts.partitioners.FixedShardsPartitioner(2)}


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_servers_hold_and_send_what_is_estimated(partitioner: str, optimizer: str, moved: dict[str, int]) -> None:
    chosen = PARTITIONERS[partitioner]
    found = ts.estimate(Clicks, OPTIMIZERS[optimizer], ps=2, workers=1, partitioner=chosen, batch=IDS)
    *servers, worker, coordinator = found.of("parameter_server")
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(chosen, rows_only=True)
        model, _, step = trained(strategy, OPTIMIZERS[optimizer])
        functions = ts.ClusterCoordinator(strategy)

        def steps(number: int) -> None:
            for _ in range(number):
                step(IDS)

        per_function = []
        for number in (1, 2):  # a function that begins reads everything, and their difference is a step
            moved.update(dict.fromkeys(moved, 0))
            functions.schedule(steps, args=(number,)).get(timeout=60)
            per_function.append(dict(moved))
        per_step = {way: per_function[1][way] - per_function[0][way] for way in moved}
        held = [cluster.service("ps", index).store.total_bytes for index in range(2)]
    assert [server.memory.total_bytes for server in servers] == held
    assert coordinator.memory.total_bytes == nbytes(model.parameters()) + nbytes(model.buffers())
    assert sum(server.sent_bytes for server in servers) == per_step["from servers"]
    assert worker.sent_bytes == per_step["to servers"]


# -- a forward pass ----------------------------------------------------------------------------------------------------


def test_activations_are_those_that_a_step_keeps() -> None:
    model, kept = Clicks(), {}
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), IDS)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(IDS)
    found = ts.estimate(Clicks, "adam", replicas=2, batch=IDS)
    assert found.of("one_device")[0].activations_bytes == sum(one.nbytes() for one in kept.values()) > 0
    halves = {row.activations_bytes for row in found.of("mirrored")}
    assert halves == {ts.estimate(Clicks, "adam", replicas=1, batch=IDS[:2]).of("one_device")[0].activations_bytes}


# -- how it is asked ---------------------------------------------------------------------------------------------------


def test_a_build_may_bring_several_models_and_their_optimizers() -> None:
    def build() -> Any:
        one, other = nn.Linear(8, 4), nn.Linear(4, 2)
        return {
            "models": [one, other],
            "optimizers": [torch.optim.Adam(one.parameters()), momentum(other.parameters())],
        }

    found = ts.estimate(build)
    assert found.optimizers == ("Adam", "SGD")
    assert found.sizes.parameters == 4 * (8 * 4 + 4 + 4 * 2 + 2)
    assert found.sizes.optimizer_state == 2 * 4 * (8 * 4 + 4) + 2 * 4 + 4 * (4 * 2 + 2)  # Adam counts its steps


def test_it_prints_a_line_for_each_kind_of_holder_and_allocates_nothing() -> None:
    found = ts.estimate(lambda: nn.Linear(10_000_000, 1_000_000), "adam", replicas=8, ps=4, workers=8)
    assert found.sizes.parameters > 4 * 10**13, "larger than any memory"
    assert "145.5 TiB" in repr(found)
    lines = repr(ts.estimate(Clicks, "adam", replicas=4, ps=2, workers=3)).splitlines()
    assert lines[0].endswith("state of Adam 9.8 KiB")
    assert [line.split()[0] for line in lines[2:5]] == ["strategy", "one_device", "mirrored"]
    assert sum("3 × worker" in line for line in lines) == 1
    assert all(len(line) < 180 for line in lines)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicas": 0}, "replicas=0 must be a whole number of at least 1"),
        ({"ps": 2}, "ps=2 and workers=None: give both"),
        ({"device": "gpu"}, "device='gpu' must be one of 'cpu', 'cuda'"),
        ({"optimizer": "adma"}, "there is no optimizer 'adma'; there are adadelta, "),
        ({"build": lambda: 3}, "build made no parameters; it returned int 3"),
        ({"build": lambda: nn.LazyLinear(3)}, "build makes lazy layers"),
        ({"build": lambda: nn.Linear(3, int(torch.ones(1)))}, "cannot make its model on torch.device"),
        ({"batch": torch.ones(4, 7)}, "the model cannot be called with this batch"),
        ({"build": lambda: [nn.Linear(3, 3)], "batch": torch.ones(4, 3)}, "build returned list, not one module"),
        (
            {"build": lambda: torch.optim.SGD(nn.Linear(3, 3).parameters()), "optimizer": "adam"},
            "optimizers of its own",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says.replace(".", r"\.")):
        ts.estimate(**{"build": lambda: nn.Linear(3, 3), **options})
    with pytest.raises(WrongTypeError, match="build must be a function that makes the model, or its class"):
        ts.estimate(nn.Linear(3, 3))  # type: ignore[arg-type]


# -- the command -------------------------------------------------------------------------------------------------------


PROGRAM = """
import torch

RULES = {"0.weight": ("d0", None), "0.bias": ("d0",)}
batch = torch.ones(6, 8)

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
"""
Run = Callable[[str], int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "my_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_program", raising=False)

    def call(words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["torchstrat", *words.split()])
        return cli.main()

    yield call
    sys.modules.pop("my_program", None)


EXPLAIN = "explain my_program:build --rules my_program:RULES --logical-devices"


def test_what_they_print(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "--optimizer sgd momentum=0.9 --replicas 3 --ps 2 --workers 4 --max-shards 2"
    assert run(f"estimate my_program:build --batch my_program:batch {settings}") == 0
    out = capsys.readouterr().out
    assert out.startswith("parameters 184 B, buffers 0 B, gradients 184 B, state of SGD 184 B\n")
    assert "4 × worker" in out
    assert "?" not in out
    assert run(f"{EXPLAIN} 2") == 0
    out = capsys.readouterr().out
    assert out.startswith("1 replica × 2 logical devices")
    assert "0.weight  float32  (4, 8)  (d0, –)" in out


REFUSED = {
    "estimate my_program": "'my_program' must be MODULE:NAME",
    "estimate ../a:b": "is no path of a file",
    "estimate my_program:nothing": "'my_program:nothing' cannot be loaded from",
    "estimate my_program:build --optimizer sgd momentum": "'momentum' must be ARGUMENT=VALUE",
    "estimate my_program:build --optimizer adma": "there is no optimizer 'adma'",
    "estimate my_program:build --ps 2": "ps=2 and workers=None",
    f"{EXPLAIN} 3": "3",
    f"{EXPLAIN} 2 --replicas 0": "0 replicas",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_they_cannot_use(run: Run, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 2
    assert REFUSED[words] in capsys.readouterr().err.splitlines()[-1]
