"""What cannot work is one clear error, before anything is compiled or waits; and the strategy goes on afterwards."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.tpu import models
from tests.tpu.models import Batch, make_strategy
from torchstrat.errors import ContextError, DeviceError, InvalidArgumentError, UnsupportedError, WrongTypeError

pytestmark = pytest.mark.tpu

ROOT = Path(__file__).parents[2]
SUBPROCESS_SECONDS = 240


@pytest.fixture(scope="module")
def strategy() -> Iterator[ts.TPUStrategy]:
    made = make_strategy(4, 2)
    yield made
    made.close()


# --- devices and annotations


def topology() -> Any:
    return ts.tpu.initialize_tpu_system(virtual_devices=8)


def test_logical_devices_that_do_not_divide_the_devices():
    three = topology().device_coordinates.reshape(8, 4)[:3]
    assignment = ts.tpu.DeviceAssignment(topology(), three[np.newaxis])
    with pytest.raises(InvalidArgumentError, match="3 logical devices does not divide the 8 devices"):
        ts.TPUStrategy(device_assignment=assignment)


def test_more_replicas_than_the_mesh_has_room_for():
    with pytest.raises(InvalidArgumentError, match="5"):
        ts.tpu.DeviceAssignment.build(topology(), computation_shape=[1, 1, 1, 2], num_replicas=5)


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        ([1, 1], InvalidArgumentError, "makes 1 parts, and a replica has 2 logical devices"),
        ([4, 1], InvalidArgumentError, "makes 4 parts, and a replica has 2 logical devices"),
        ([2, 2], InvalidArgumentError, "dimension 1 has size 3, which does not divide into 2"),
        ([1, 2], InvalidArgumentError, "dimension 1 has size 3, which does not divide into 2"),
        ([2], InvalidArgumentError, "entries and dimensions differ, 1 and 2"),
        ([2, 1, 1], InvalidArgumentError, "entries and dimensions differ, 3 and 2"),
        ([2, 0], InvalidArgumentError, "entry 1 is 0"),
        ([-2, -1], InvalidArgumentError, "entry 0 is -2"),
        ([2.0, 1], WrongTypeError, "integers"),
        ("21", WrongTypeError, "sequence of integers"),
    ],
    ids=str,
)
def test_partitions(strategy, dims, error, message):
    """The same in a step and outside; a step sees its replica's shape, here (4, 3)."""
    with pytest.raises(error, match=message):
        strategy.split_to_logical_devices(torch.zeros(4, 3), dims)

    def step(x: torch.Tensor) -> torch.Tensor:
        return strategy.split_to_logical_devices(x * 2, dims)

    (batch,) = list(strategy.distribute_dataset([torch.zeros(16, 3)]))
    with pytest.raises(error, match=message):
        strategy.run(step, args=(batch,))


@pytest.mark.parametrize(
    ("device", "error"),
    [(2, InvalidArgumentError), (-1, InvalidArgumentError), (0.5, WrongTypeError), ("0", WrongTypeError)],
)
def test_logical_device_ids(strategy, device, error):
    with pytest.raises(error, match="logical"):
        strategy.assign_to_logical_device(torch.zeros(4), device)


def test_annotating_what_is_no_tensor(strategy):
    for call in (
        lambda: strategy.split_to_logical_devices("images", [2]),
        lambda: strategy.replicate_to_logical_devices([1, 2]),
        lambda: strategy.assign_to_logical_device(None, 0),
    ):
        with pytest.raises(WrongTypeError):
            call()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"linear1.weight": ("d1", None)}, "d1"),
        ({"linear1.weight": ("d0",)}, "numbers of entries and dimensions differ"),
        ({"linear2.weight": ("d0", None)}, "5 does not divide by 2"),
        ({"linear3.weight": ("d0", None)}, "matches no parameter"),
    ],
    ids=["unknown axis", "rank", "not divisible", "no such parameter"],
)
def test_sharding_rules(rules, message):
    def use() -> None:
        strategy = make_strategy(4, 2, sharding_rules=rules)
        with strategy.scope():
            model = models.Mlp(6, 16, 5)
        (batch,) = list(strategy.distribute_dataset([torch.zeros(16, 6)]))
        strategy.run(model, args=(batch,))

    with pytest.raises(InvalidArgumentError, match=message):
        use()


def test_mesh_of_rules_has_to_be_the_logical_devices():
    with pytest.raises(InvalidArgumentError, match=r"logical_mesh_shape=\[2, 2\] has 4 places"):
        make_strategy(4, 2, logical_mesh_shape=(2, 2))


# --- values that a step cannot have


def use_item(loss: torch.Tensor) -> Any:
    return loss.item()


def use_float(loss: torch.Tensor) -> Any:
    return float(loss)


def use_if(loss: torch.Tensor) -> Any:
    if loss > 0:
        return loss * 2
    return loss


def use_print(loss: torch.Tensor) -> Any:
    print(loss)
    return loss


def use_format(loss: torch.Tensor) -> Any:
    return f"{loss:.3f}"


def use_numpy(loss: torch.Tensor) -> Any:
    return loss.detach().numpy()


def use_nonzero(loss: torch.Tensor) -> Any:
    return torch.nonzero(loss.reshape(1))


def use_mask(loss: torch.Tensor) -> Any:
    return loss.reshape(1)[loss.reshape(1) > 0]


HIDDEN_READS = [
    (use_item, ContextError, ".item()"),
    (use_float, ContextError, "float(tensor)"),
    (use_if, ContextError, "bool(tensor)"),
    (use_print, ContextError, "printing a tensor"),
    (use_format, ContextError, "a tensor"),
    (use_numpy, ContextError, ".numpy()"),
    (use_nonzero, UnsupportedError, "shape depends on values"),
    (use_mask, UnsupportedError, "depend"),
]


@pytest.mark.parametrize("layer_first", [True, False], ids=["of a loss", "of the batch"])
@pytest.mark.parametrize(("use", "error", "what"), HIDDEN_READS, ids=[use.__name__ for use, *_ in HIDDEN_READS])
def test_reading_a_value_in_a_step_says_where(strategy, use, error, what, layer_first):
    with strategy.scope():
        layer = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> Any:
        return use(layer(x).square().mean() if layer_first else x.sum())

    (batch,) = list(strategy.distribute_dataset([torch.ones(16, 3)]))
    before = len(strategy.compilations)
    with pytest.raises(error) as raised:
        strategy.run(step, args=(batch,))
    assert what in str(raised.value)
    lines, first = inspect.getsourcelines(use)
    places = [f"{__file__}:{first + index}" for index in range(len(lines))]
    assert any(place in str(raised.value) for place in places), f"no place in: {raised.value}"
    assert len(strategy.compilations) == before


def test_a_variable_cannot_be_read_in_a_step_either(strategy):
    with strategy.scope():
        layer = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(layer.bias)

    (batch,) = list(strategy.distribute_dataset([torch.ones(16, 3)]))
    with pytest.raises(ContextError) as raised:
        strategy.run(step, args=(batch,))
    _, first = inspect.getsourcelines(step)
    assert f"{__file__}:{first + 1}" in str(raised.value)


def test_a_step_that_failed_has_left_nothing_behind():
    """After an error in the middle of a step the same variables train to plain PyTorch's numbers."""
    strategy = make_strategy(4, 2)

    def build() -> nn.Module:
        return models.seeded(lambda: nn.Linear(3, 5))

    with strategy.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(batch: Batch, fails: bool) -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.classification_loss(model, *batch)
        if fails:
            loss.item()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = models.dataset([16, 16, 16], [3], 5)
    expected = models.train_plainly(plain, plain_optimizer, batches, 4, models.classification_loss)
    for distributed, wanted in zip(strategy.distribute_dataset(batches), expected, strict=True):
        with pytest.raises(ContextError):
            strategy.run(step, args=(distributed, True))
        losses = strategy.local_results(strategy.run(step, args=(distributed, False)))
        models.require_same_losses([torch.stack([loss.cpu() for loss in losses])], [wanted])
    models.require_same_state(model, plain)
    strategy.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: torch.optim.Adam(parameters, fused=True), r"Adam has fused=True.*Leave fused out"),
        (lambda parameters: torch.optim.Adam(parameters, capturable=True), r"capturable=True.*Leave capturable out"),
        (torch.optim.SparseAdam, r"SparseAdam steps on sparse gradients.*torch\.optim\.Adam.*sparse=False"),
    ],
)
def test_optimizers_of_other_devices(strategy, make, message):
    with strategy.scope():
        model = nn.Linear(3, 5)
        optimizer = make(model.parameters())

    def step(batch: Batch) -> None:
        models.classification_loss(model, *batch).backward()
        optimizer.step()

    (batch,) = list(strategy.distribute_dataset(models.dataset([16], [3], 5)))
    with pytest.raises(UnsupportedError, match=message):
        strategy.run(step, args=(batch,))


# --- what cannot be mapped over replicas


class Recurrent(nn.Module):
    """``[rows, 7, 3]`` through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_lstm_needs_the_global_view_and_then_trains_as_plainly():
    strategy = make_strategy(4, 2)
    with strategy.scope():
        model = models.seeded(Recurrent)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plain = models.seeded(Recurrent)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    seen: list[tuple[int, ...]] = []

    def step(batch: Batch) -> torch.Tensor:
        seen.append(tuple(batch[0].shape))
        optimizer.zero_grad()
        loss = models.classification_loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = models.dataset([8] * 4, (7, 3), 5)
    distributed = list(strategy.distribute_dataset(batches))
    with pytest.raises(UnsupportedError, match="global_view=True"):
        strategy.run(step, args=(distributed[0],))
    assert seen.pop() == (2, 7, 3)

    expected = models.train_plainly(plain, plain_optimizer, batches, 1, models.classification_loss)
    for batch, wanted in zip(distributed, expected, strict=True):
        loss = strategy.run(step, args=(batch,), options=ts.RunOptions(global_view=True))
        models.require_same_losses([loss.reshape(1)], [wanted])
    assert seen == [(8, 7, 3)] * 4
    models.require_same_state(model, plain)
    strategy.close()


def test_collectives_have_no_meaning_in_the_global_view(strategy):
    def step(x: torch.Tensor) -> torch.Tensor:
        return ts.get_replica_context().all_reduce("sum", x)

    (batch,) = list(strategy.distribute_dataset([torch.ones(16, 3)]))
    with pytest.raises(ContextError, match="global_view"):
        strategy.run(step, args=(batch,), options=ts.RunOptions(global_view=True))


class Doubled(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


KEPT = torch.zeros(3)


def into_a_tensor_of_all(x: torch.Tensor) -> torch.Tensor:
    return KEPT.add_(x.sum(dim=0))


LIMITS: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("autograd.Function", Doubled.apply, "generate_vmap_rule"),
    ("in place", into_a_tensor_of_all, "out of place"),
    ("unique", lambda x: torch.unique(x), "shape depends on values"),
]


@pytest.mark.parametrize(("use", "message"), [limit[1:] for limit in LIMITS], ids=[name for name, *_ in LIMITS])
def test_limits_of_mapping(strategy, use, message):
    (batch,) = list(strategy.distribute_dataset([torch.ones(16, 3)]))
    with pytest.raises(UnsupportedError, match=message):
        strategy.run(use, args=(batch,))


# --- the system: in processes of their own


def test_initializing_again_with_other_numbers():
    assert ts.tpu.initialize_tpu_system(virtual_devices=8) is not None
    with pytest.raises(ContextError, match="runs with 8 devices") as raised:
        ts.tpu.initialize_tpu_system(virtual_devices=4)
    assert "virtual_devices=4" in str(raised.value)
    with pytest.raises(ContextError, match=r"mesh_shape=\[8, 1, 1, 1\]"):
        ts.tpu.initialize_tpu_system(mesh_shape=[8, 1, 1, 1])


def in_subprocess(code: str) -> str:
    """What ``code`` prints, in a process whose environment says nothing of devices."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "XLA_USE_SPMD")
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SUBPROCESS_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_without_a_tpu_and_virtual_devices():
    said = in_subprocess("""
        import sys
        import torchstrat as ts
        for call in (ts.TPUStrategy, ts.tpu.initialize_tpu_system):
            try:
                call()
            except ValueError as error:
                print(type(error).__name__, error)
        print("torch_xla" in sys.modules)
    """)
    first, second, imported = said.splitlines()
    assert first == second
    assert first.startswith(f"{DeviceError.__name__} no TPU was found")
    assert "virtual_devices=8" in first
    assert "PJRT_DEVICE=CPU" in first
    assert imported == "False"


def test_a_backward_pass_before_the_system():
    said = in_subprocess("""
        import torch
        import torchstrat as ts
        torch.ones(2, requires_grad=True).sum().backward()
        try:
            ts.tpu.initialize_tpu_system(virtual_devices=8)
        except NotImplementedError as error:
            print(type(error).__name__, error)
    """)
    assert said.startswith("UnsupportedError a backward pass ran in this process before the TPU system")
    assert "at the start of the program" in said


def test_torch_xla_of_another_release_or_missing():
    said = in_subprocess("""
        import importlib.metadata
        import sys
        import torchstrat as ts
        real = importlib.metadata.version

        def faked(answer):
            def version(name):
                if name != "torch_xla":
                    return real(name)
                if answer is None:
                    raise importlib.metadata.PackageNotFoundError(name)
                return answer
            return version

        for answer in ("2.8.1", None):
            importlib.metadata.version = faked(answer)
            try:
                ts.tpu.initialize_tpu_system(virtual_devices=8)
            except NotImplementedError as error:
                print(type(error).__name__, error)
        print("torch_xla" in sys.modules)
    """)
    other, missing, imported = said.splitlines()
    assert other.startswith("UnsupportedError torch_xla 2.8.1 does not work with torch ")
    assert "pip install torch==2.8.0" in other
    assert missing.startswith("UnsupportedError TPUStrategy needs torch_xla, which is not installed")
    assert "pip install torch==2.9.0" in missing
    assert imported == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("virtual_devices=0", "virtual_devices=0 must be an int of at least 1"),
        ("virtual_devices=8, mesh_shape=[3, 1, 1, 1]", "has 3 places for virtual_devices=8"),
    ],
)
def test_numbers_of_virtual_devices(arguments, message):
    """Refused before the environment is touched, so that the next call can be right."""
    said = in_subprocess(f"""
        import os
        import sys
        import torchstrat as ts
        try:
            ts.tpu.initialize_tpu_system({arguments})
        except ValueError as error:
            print(type(error).__name__, error)
        print("PJRT_DEVICE" in os.environ, "torch_xla" in sys.modules)
    """)
    assert said.startswith("InvalidArgumentError ")
    assert message in said
    assert said.splitlines()[-1] == "False False"
