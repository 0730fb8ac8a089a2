"""``scripts/train.py strategy=tpu`` and the documents' example as users start them, on eight virtual devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.tpu.hlo import COMPILES_QUICKLY, DUMP_FLAGS, DumpFolder
from torchstrat.app.report import read_metrics

for module in ("hydra", "sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(module)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
DEADLINE_SECONDS = 220  # below that of the test, so that what the process said is shown
STEPS = 4
SHORT = [
    "debug=steps",
    "curves=true",
    f"max_steps={STEPS}",
    f"snapshot_after_steps={STEPS}",
    "data.test_fraction=0.1",
    "data.global_batch=60",
    "hydra.run.dir=run",
]
"""Held out are 180 rows, three whole batches: no program is compiled for a smaller one."""

TENSOR_PARALLEL = ["experiment=digits_mlp_tensor_parallel"]
ON_DEVICES = ["strategy.virtual_devices=8", "strategy.replicas=4", "strategy.logical_devices=2"]


def started(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run in a shell of a user: the suite asks for virtual devices in its environment, users need not."""
    taken = ("TORCHELASTIC_", "HYDRA_", "PJRT_", "XLA_", "CPU_NUM_DEVICES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def trained(folder: Path, *overrides: str, **variables: str) -> tuple[Path, str]:
    finished = started(folder, str(TRAIN), *SHORT, *overrides, **variables)
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return folder / "run", finished.stderr


def distance(one: Path, other: Path) -> float:
    """The largest difference of a parameter, a running mean or a running variance."""
    first, second = (torch.load(run / f"parameters_after_step_{STEPS}.pt", weights_only=True) for run in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


class Comparison(NamedTuple):
    """``plain``: the strategy whose replicas have one logical device, and see the same statistics; ``percent``: of the
    parameters on each device, at most; ``activations``: what instructions of ``opcode`` compute forward on one device,
    from the 15 rows of its replica; ``gathered``: of activations, between logical devices, forward and backward.
    """

    overrides: list[str]
    plain: list[str]
    tolerance: float
    percent: int
    opcode: str
    activations: list[str]
    gathered: set[str]


COMPARISONS = {
    "spatial": Comparison(
        ["experiment=digits_convnet_spatial"],
        ["strategy=mirrored", "strategy.replicas=4"],
        tolerance=1e-6,
        percent=100,
        opcode="convolution",
        activations=["f32[15,16,4,8]", "f32[15,32,4,8]", "f32[15,32,2,4]"],  # half as high as the images
        # The last pooling leaves bands of one row, put together for the last layer.
        gathered={"f32[1,1,15,32,1,2]"},
    ),
    "tensor_parallel": Comparison(
        TENSOR_PARALLEL,
        ["strategy=one_device"],
        tolerance=2e-5,  # Adam divides by a gradient's size: where it is nearly 0, rounding is as large as the step
        percent=51,
        opcode="dot",
        activations=["f32[15,128]", "f32[15,256]", "f32[15,64]", "f32[15,10]"],  # every second half as wide
        gathered=set(),
    ),
    "transformer": Comparison(
        ["experiment=digits_transformer_tensor_parallel", "model.blocks=1"],
        ["strategy=one_device"],
        tolerance=2e-5,
        percent=60,
        opcode="dot",
        activations=["f32[15,10]"],  # the head, which is not cut; the block's have all tokens in one dimension
        # XLA multiplies batches of matrices that have one dimension, and cannot cut the heads within that.
        gathered={"f32[1,15,2,8,16]", "f32[1,15,2,16,8]"},
    ),
}


@pytest.mark.soak  # compared with plain training in test_training.py too, without the application
@pytest.mark.deadline(2 * DEADLINE_SECONDS + 20)
@pytest.mark.parametrize("name", COMPARISONS)
def test_replicas_of_two_logical_devices_give_the_numbers_of_one(tmp_path: Path, name: str) -> None:
    comparison = COMPARISONS[name]
    dumping = f"{COMPILES_QUICKLY} {DUMP_FLAGS} --xla_dump_to={tmp_path / 'dumps'}"
    run, said = trained(tmp_path / "tpu", *comparison.overrides, *ON_DEVICES, XLA_FLAGS=dumping)
    plain, _ = trained(tmp_path / "plain", *comparison.overrides, *comparison.plain)
    assert distance(run, plain) <= comparison.tolerance
    losses, plain_losses = ([record["loss"] for record in read_metrics(folder, "step")] for folder in (run, plain))
    assert len(losses) == STEPS
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    (evaluated,), (plainly,) = read_metrics(run, "evaluation"), read_metrics(plain, "evaluation")
    assert evaluated["rows"] == plainly["rows"] == 180
    assert evaluated["loss"] == pytest.approx(plainly["loss"], rel=1e-4)
    assert evaluated["accuracy"] == pytest.approx(plainly["accuracy"], abs=1 / 180)  # a tie may fall to either side

    (result,), (programs,) = read_metrics(run, "result"), read_metrics(run, "programs")
    assert (result["strategy"], result["replicas"], result["logical_devices"]) == ("tpu", 4, 2)
    assert (programs["devices"], programs["replicas"], programs["logical_devices"]) == (8, 4, 2)
    assert len(programs["compilations"]) == 3, "two for the training step, one for evaluation"
    assert programs["compilations"][0] == "run 0: it is the first"
    for line in ("8 devices, 4 replicas × 2 logical devices, 3 compilations", *programs["compilations"]):
        assert f"tpu 4×2: {line}" in said
    held = re.search(r"tpu 4×2: each device holds .* \((\d+)%\)", said)
    assert held is not None
    assert comparison.percent / 2 <= int(held[1]) <= comparison.percent
    assert (run / "sharding.png").read_bytes().startswith(b"\x89PNG")
    assert not read_metrics(plain, "programs")
    assert not (plain / "sharding.png").exists()

    step = DumpFolder(tmp_path / "dumps").training_step()
    assert step.num_partitions == 8
    forward = [shape for shape in map(str, step.shapes_of(comparison.opcode)) if shape.startswith("f32[15,")]
    assert forward[: len(comparison.activations)] == comparison.activations
    sent = {
        opcode: {str(shape) for one in step.collectives(opcode) for shape in one.operands}
        for opcode in ("all-gather", "all-to-all", "collective-permute")
    }
    assert sent["all-gather"] == comparison.gathered
    if name == "spatial":
        edges = {"f32[15,1,1,8]", "f32[15,16,1,8]", "f32[15,32,1,4]"}
        assert edges <= sent["collective-permute"], "a row at each edge, every layer"
    else:
        assert not sent["all-to-all"] | sent["collective-permute"]


@pytest.mark.soak  # the same errors in a program of its own, test_bad_input.py, and in one process, tests/unit
@pytest.mark.parametrize(
    ("overrides", "variables", "message"),
    [
        (
            ["strategy.virtual_devices=8"],
            {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
            r"virtual_devices=8 needs CPU_NUM_DEVICES=8, and the environment says CPU_NUM_DEVICES=4",
        ),
        ([], {}, r"no TPU was found .* virtual"),
        (
            ["strategy.virtual_devices=8", "strategy.logical_devices=2", "+strategy.sharding_rules={weight:[d1]}"],
            {},
            r"sharding rule 'weight': entry 0 names the axis 'd1'; there is 'd0' \(size 2\)",
        ),
    ],
    ids=["environment", "no_tpu", "rules"],
)
def test_mistakes_are_one_line(tmp_path: Path, overrides: list[str], variables: dict[str, str], message: str) -> None:
    if not overrides and any(Path("/dev").glob("accel*")):
        pytest.skip("there is a TPU")
    finished = started(tmp_path, str(TRAIN), *TENSOR_PARALLEL, *SHORT, *overrides, **variables)
    assert finished.returncode == 1
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(message, line), line
    assert "Traceback" not in finished.stderr


@pytest.mark.soak  # the same error as one line in one process
def test_several_processes_are_an_error_on_all_of_them(tmp_path: Path) -> None:
    """Before any of them starts the runtime: two would fight for the devices."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = started(tmp_path, *launcher, str(TRAIN), *TENSOR_PARALLEL, *SHORT, *ON_DEVICES)
    assert finished.returncode != 0
    assert "error: strategy=tpu drives all devices from one process, and a launcher started 2;" in finished.stderr


def test_the_example_of_the_documents_trains_and_explains(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorials" / "tpu.md").read_text(encoding="utf-8")
    (example,) = re.findall(r":caption: train_tpu.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    finished = started(tmp_path, "train.py", XLA_FLAGS=COMPILES_QUICKLY)
    assert finished.returncode == 0, finished.stderr
    assert len(re.findall(r"^epoch \d: [\d.]+$", finished.stdout, re.MULTILINE)) == 2
    assert "(d0, –)" in finished.stdout
    assert "each device holds 1.1 KiB of 2.3 KiB (50%)" in finished.stdout
    assert [int(run) for run in re.findall(r"^run (\d+): ", finished.stdout, re.MULTILINE)] == [0, 1, 3]
