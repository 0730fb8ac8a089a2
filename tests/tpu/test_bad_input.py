"""What cannot work with torch_xla is one clear error, before anything is compiled or waits; and it goes on afterwards.

What is checked before a runtime is asked, the tests of one process show on the fake: `test_tpu_limits` and others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchstrat as ts
from tests.support.tpu import Doubled
from tests.tpu import models
from tests.tpu.models import Batch, Pair, make_strategy
from torchstrat.errors import ContextError, UnsupportedError

pytestmark = pytest.mark.tpu

ROOT = Path(__file__).parents[2]
SUBPROCESS_SECONDS = 200


@pytest.fixture(scope="module")
def strategy() -> Iterator[ts.TPUStrategy]:
    made = make_strategy(4, 2)
    yield made
    made.close()


KEPT = torch.zeros(3)

REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    # of what a layer makes of the batch; the place is that of the line
    (lambda loss: loss.item(), ContextError, r"\.item\(\).*PLACE"),
    (lambda loss: float(loss), ContextError, r"float\(tensor\).*PLACE"),
    (lambda loss: loss * 2 if loss > 0 else loss, ContextError, r"bool\(tensor\).*PLACE"),
    (lambda loss: print(loss), ContextError, r"printing a tensor.*PLACE"),
    (lambda loss: f"{loss:.3f}", ContextError, r"a tensor.*PLACE"),
    (lambda loss: loss.detach().numpy(), ContextError, r"\.numpy\(\).*PLACE"),
    (lambda loss: torch.nonzero(loss.reshape(1)), UnsupportedError, r"(?s)shape depends on values.*PLACE"),
    (lambda loss: loss.reshape(1)[loss.reshape(1) > 0], UnsupportedError, r"(?s)depend.*PLACE"),
    (lambda loss: torch.unique(loss.reshape(1)), UnsupportedError, "shape depends on values"),
    (Doubled.apply, UnsupportedError, "generate_vmap_rule"),
    (lambda loss: KEPT.add_(loss), UnsupportedError, "out of place"),
]


@pytest.mark.parametrize("layer_first", [True, False], ids=["of a loss", "of the batch"])
@pytest.mark.parametrize(("use", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_steps_that_are_refused(
    strategy: ts.TPUStrategy, use: Callable[[Any], Any], error: type[Exception], message: str, layer_first: bool
) -> None:
    with strategy.scope():
        layer = nn.Linear(3, 1)
    (batch,) = strategy.distribute_dataset([torch.ones(16, 3)])
    before = len(strategy.compilations)
    place = f"{__file__}:{use.__code__.co_firstlineno}" if hasattr(use, "__code__") else ""
    with pytest.raises(error, match=message.replace("PLACE", place)):
        strategy.run(lambda x: use(layer(x).square().mean() if layer_first else x.sum()), args=(batch,))
    with pytest.raises(ContextError, match=r"float\(tensor\)"):
        strategy.run(lambda x: x * float(layer.bias), args=(batch,))
    assert len(strategy.compilations) == before


@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        (lambda made, _: nn.utils.clip_grad_norm_(made.layer.parameters(), 1.0, float("inf")), "get_total_norm"),
        (lambda made, _: made.average.update_parameters(made.layer), "Call update_parameters outside of run"),
        (lambda made, x: made.norm(x), "Give the layer a momentum"),
    ],
)
def test_what_reads_tensors_for_a_step_is_refused_with_what_to_do(
    strategy: ts.TPUStrategy, use: Callable[[Any, torch.Tensor], Any], remedy: str
) -> None:
    with strategy.scope():
        layer = nn.Linear(3, 1)
        made = SimpleNamespace(layer=layer, average=AveragedModel(layer), norm=nn.BatchNorm1d(3, momentum=None))
    (batch,) = strategy.distribute_dataset([torch.ones(16, 3)])

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        use(made, x)

    with pytest.raises(ContextError, match=rf"{re.escape(__file__)}:\d+, in .*{remedy}"):
        strategy.run(step, args=(batch,))


def test_a_step_that_failed_has_left_nothing_behind() -> None:
    """After an error in the middle of a step the same variables train to plain PyTorch's numbers."""
    pair = Pair(make_strategy(4, 2), lambda _: nn.Linear(3, 5))
    batches, model, optimizer = models.dataset([16, 16, 16], [3], 5), pair.model, pair.optimizer

    def fails(batch: Batch) -> None:
        optimizer.zero_grad()
        models.classification_loss(model, *batch).item()

    for batch in batches:
        with pytest.raises(ContextError):
            pair.strategy.run(fails, args=(next(iter(pair.strategy.distribute_dataset([batch]))),))
        pair.train([batch])
    pair.strategy.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: torch.optim.Adam(parameters, fused=True), r"Adam has fused=True.*Leave fused out"),
        (lambda parameters: torch.optim.Adam(parameters, capturable=True), r"capturable=True.*Leave capturable out"),
        (torch.optim.SparseAdam, r"SparseAdam steps on sparse gradients.*torch\.optim\.Adam.*sparse=False"),
    ],
)
def test_optimizers_of_other_devices(strategy: ts.TPUStrategy, make: Callable[[Any], Any], message: str) -> None:
    with strategy.scope():
        model = nn.Linear(3, 5)
        optimizer = make(model.parameters())

    def step(batch: Batch) -> None:
        models.classification_loss(model, *batch).backward()
        optimizer.step()

    (batch,) = strategy.distribute_dataset(models.dataset([16], [3], 5))
    with pytest.raises(UnsupportedError, match=message):
        strategy.run(step, args=(batch,))


# --- the system -------------------------------------------------------------------------------------------------------


def test_initializing_again_with_other_numbers() -> None:
    assert ts.tpu.initialize_tpu_system(virtual_devices=8) is not None
    with pytest.raises(ContextError, match=r"runs with 8 devices.*virtual_devices=4"):
        ts.tpu.initialize_tpu_system(virtual_devices=4)
    with pytest.raises(ContextError, match=r"mesh_shape=\[8, 1, 1, 1\]"):
        ts.tpu.initialize_tpu_system(mesh_shape=[8, 1, 1, 1])


CALLS = """
    import importlib.metadata
    import json
    import os
    import sys
    import torch
    import torchstrat as ts

    def said(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__} {error}"

    def with_torch_xla(answer):
        def version(name):
            if name != "torch_xla":
                return real(name)
            if answer is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return answer
        importlib.metadata.version = version
        return said(initialize, virtual_devices=8)

    real, initialize = importlib.metadata.version, ts.tpu.initialize_tpu_system
    found = {
        "no TPU": said(initialize),
        "no TPU for a strategy": said(ts.TPUStrategy),
        "no devices": said(initialize, virtual_devices=0),
        "another mesh": said(initialize, virtual_devices=8, mesh_shape=[3, 1, 1, 1]),
        # Refused before the environment is touched, so that the next call can be right.
        "touched": ["PJRT_DEVICE" in os.environ],
        "another torch_xla": with_torch_xla("2.8.1"),
        "no torch_xla": with_torch_xla(None),
    }
    found["touched"].append("torch_xla" in sys.modules)
    importlib.metadata.version = real
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    found["another environment"] = said(initialize, virtual_devices=8)
    del os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"]
    torch.ones(2, requires_grad=True).sum().backward()
    found["a backward pass before"] = said(initialize, virtual_devices=8)
    print(json.dumps(found))
"""


def test_what_is_said_before_there_is_a_system() -> None:
    """In a process whose environment says nothing of devices."""
    ours = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "XLA_USE_SPMD")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALLS)],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SUBPROCESS_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("touched") == [False, False]
    assert found["no TPU"] == found.pop("no TPU for a strategy")
    expected = {
        "no TPU": ["DeviceError no TPU was found", "virtual_devices=8", "PJRT_DEVICE=CPU"],
        "no devices": ["InvalidArgumentError ", "virtual_devices=0 must be an int of at least 1"],
        "another mesh": ["InvalidArgumentError ", "has 3 places for virtual_devices=8"],
        "another torch_xla": [
            "UnsupportedError torch_xla 2.8.1 does not work with torch ",
            "pip install torch==2.8.0",
        ],
        "no torch_xla": [
            "UnsupportedError TPUStrategy needs torch_xla, which is not installed",
            "pip install torch==2.9.0",
        ],
        "another environment": [
            "InvalidArgumentError ",
            "virtual_devices=8 needs CPU_NUM_DEVICES=8, and the environment says CPU_NUM_DEVICES=4",
        ],
        "a backward pass before": [
            "UnsupportedError a backward pass ran in this process before the TPU system",
            "at the start of the program",
        ],
    }
    assert found.keys() == expected.keys()
    for name, (begin, *parts) in expected.items():
        assert found[name].startswith(begin), found[name]
        assert all(part in found[name] for part in parts), found[name]
