"""Where a program's numbers begin to differ from the plain loop's, by `compare` and by ``torchstrat verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchstrat.errors import InvalidArgumentError
from torchstrat.testing import compare
from torchstrat.testing.compare import main
from torchstrat.testing.training import regression


def build() -> Any:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def step(program: Any, batch: Any) -> None:
    model, optimizer = program
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def local_update(program: Any, batch: Any) -> None:
    """What replicas do differently: the first one's counts, which are not the numbers of one device."""
    model, _ = program
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)  # here


def with_closure(program: Any, batch: Any) -> None:
    model, _ = program
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    optimizer.step(lambda: nn.functional.mse_loss(model(batch[0]), batch[1]))


def fails(program: Any, batch: Any) -> None:
    if len(batch[0]) < 12:
        raise ValueError("a step of few rows")


def batches() -> list[Any]:
    return regression()


def test_a_right_program_is_right_in_process_and_on_servers() -> None:
    names = ["one_device", "mirrored x2", "central_storage x2", "parameter_server"]
    comparison = compare(build, step, batches, names)
    assert comparison.is_right, str(comparison)
    assert [finding.verdict for finding in comparison.findings] == ["right"] * 4


@pytest.mark.filterwarnings("ignore:the replicas have changed")
def test_the_variable_the_step_and_the_line_are_named() -> None:
    alone, mirrored = compare(build, local_update, batches, ["one_device", "mirrored x2"]).findings
    assert alone.verdict == "right"
    assert (mirrored.verdict, mirrored.variable, mirrored.step) == ("different", "[0].0.weight", 0)
    assert mirrored.line.endswith("parameter.sub_(gradient, alpha=0.1)  # here")
    assert "[0].0.weight after step 0; at " in str(mirrored)
    alike, *others = regression()  # equal rows first: the replicas do the same
    first = tuple(tensor[:1].expand(12, -1) for tensor in alike)
    (later,) = compare(build, local_update, [first, *others], ["mirrored x2"]).findings
    assert (later.verdict, later.step) == ("different", 1)


def test_what_is_refused_is_no_difference_and_other_errors_are_failures() -> None:
    refused = compare(build, with_closure, batches, ["parameter_server"])
    assert refused.is_right
    assert [(found.verdict, "LBFGS" in found.text) for found in refused.findings] == [("refused", True)]
    failed = compare(build, fails, batches, ["mirrored x2"])
    assert not failed.is_right
    assert "few rows" in str(failed)


def test_bad_input() -> None:
    with pytest.raises(InvalidArgumentError, match="no strategy is called mirored"):
        compare(build, step, batches, ["mirored"])
    with pytest.raises(InvalidArgumentError, match="batches is empty"):
        compare(build, step, [])


# -- the command -------------------------------------------------------------------------------------------------------

RIGHT = "right      torchrun mirrored\nright      mirrored x4\n"
DIFFERENT = "different  torchrun central_storage: [0].0.weight after step 0; at "


def words(module: str, step: str, *strategies: str) -> list[str]:
    return [*(f"{module}:{name}" for name in ("build", step, "batches")), *strategies]


def test_a_right_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(__name__, "step", "torchrun mirrored", "mirrored x4")) == 0
    assert capsys.readouterr().out == RIGHT


def test_a_function_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words(__name__, "stop"))
    assert raised.value.code == 2
    assert f"'{__name__}:stop' cannot be loaded" in capsys.readouterr().err


def test_a_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program_beside.py").write_text(Path(__file__).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert main(words("program_beside", "local_update", "torchrun central_storage")) == 1
    said = capsys.readouterr().out
    assert DIFFERENT in said
    assert "# here; is off by" in said
