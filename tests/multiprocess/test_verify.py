"""``torchstrat verify`` on a program of its user's, with replicas in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from torch import nn

def build():
    model = nn.Linear(6, 3)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

def step(program, batch):
    program["optimizer"].zero_grad()
    nn.functional.mse_loss(program["model"](batch[0]), batch[1]).backward()
    program["optimizer"].step()

def own_rows(program, batch):
    loss = nn.functional.mse_loss(program["model"](batch[0]), batch[1])
    weight = program["model"].weight
    (gradient,) = torch.autograd.grad(loss, [weight])
    with torch.no_grad():
        weight -= gradient

def batches():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(7, 6, generator=generator), torch.randn(7, 3, generator=generator)) for _ in range(3)]
"""


def verify(folder, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-c", "import sys; from torchstrat.cli import main; sys.exit(main())", "verify", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_program_that_is_right_everywhere(tmp_path):
    done = verify(tmp_path, "program:build", "program:step", "program:batches", "torchrun mirrored", "mirrored x4")
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["right      torchrun mirrored", "right      mirrored x4"],
    )


def test_a_program_that_differs(tmp_path):
    done = verify(tmp_path, "program:build", "program:own_rows", "program:batches", "torchrun central_storage")
    assert done.returncode == 1
    assert "different  torchrun central_storage: [model].weight after step 0" in done.stdout
    assert "weight -= gradient; is off by" in done.stdout


def test_what_cannot_be_loaded(tmp_path):
    done = verify(tmp_path, "program:build", "program:stop", "program:batches")
    assert done.returncode == 2
    assert "'program:stop' cannot be loaded" in done.stderr
