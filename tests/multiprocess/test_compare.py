"""Where a program's numbers begin to differ from the plain loop's, by `compare` and by ``torchstrat verify``."""

from __future__ import annotations

import functools
import random
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.testing import compare
from torchstrat.testing.compare import STRATEGIES, main
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
    failed = compare(build, fails, batches, ["mirrored x2", "torchrun mirrored"])
    assert [(found.verdict, "few rows" in found.text) for found in failed.findings] == [("failed", True)] * 2
    assert not failed.is_right


def with_a_note() -> Any:
    return torch.zeros(1), *build()


def not_a_number_on_one(program: Any, batch: Any) -> None:
    note, *trained = program
    step(trained, batch)
    if ts.get_replica_context().replica_id_in_sync_group == 1:
        note.fill_(torch.nan)


def test_what_is_no_number_on_one_rank_alone_differs() -> None:
    (found,) = compare(with_a_note, not_a_number_on_one, batches, "torchrun mirrored").findings
    assert (found.verdict, found.variable, found.step) == ("different", "[0] on rank 1", 0), str(found)


# -- programs of all forms ---------------------------------------------------------------------------------------------


def drawn_without_torch() -> Any:
    model, optimizer = build()
    with torch.no_grad():
        model[0].bias.fill_(random.random() + float(np.random.rand()))
    return model, optimizer


def in_float32() -> Any:
    model = build()[0].float()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def in_complex64() -> Any:
    model = torch.nn.Linear(6, 3, dtype=torch.complex64)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def of_complex_numbers(program: Any, batch: Any) -> None:
    model, optimizer = program
    optimizer.zero_grad()
    model(batch[0].to(torch.complex64)).abs().square().mean().backward()
    optimizer.step()


def takes_apart(program: Any, batch: Any) -> None:
    """Leaves the batch without labels, and the inputs changed."""
    labels = batch.pop("y")
    step(program, (batch["x"].sub_(0.5), labels))


def by_name() -> list[Any]:
    return [{"x": x, "y": y} for x, y in regression()]


def in_single(program: Any, batch: Any) -> None:
    step(program, [part.float() for part in batch])


@pytest.mark.parametrize(
    "program",
    [
        (drawn_without_torch, step, batches),
        (build, takes_apart, by_name),
        (in_float32, in_single, batches),
        (in_complex64, of_complex_numbers, batches),
    ],
    ids=["built of other generators", "changes its batch", "of float32", "of complex64"],
)
def test_a_right_program_is_right(program: tuple[Any, Any, Any]) -> None:
    assert str(compare(*program, "mirrored x2")) == "right      mirrored x2"


@dataclass
class Trainer:
    model: Any
    optimizer: Any

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(batch[0]), batch[1], reduction="sum").backward()  # summed
        self.optimizer.step()


def trainer() -> Trainer:
    return Trainer(*build())


def of_trainer(program: Any, batch: Any) -> None:
    program.step(batch)  # summed


def without_its_model() -> Any:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.05)


def of_optimizer(program: Any, batch: Any) -> None:
    parameters = program.param_groups[0]["params"]
    sum(one.sum() for one in parameters).mul(batch[0].sum()).backward()  # summed
    program.step()


def summed(program: Any, batch: Any) -> None:
    model, optimizer = program
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum").backward()  # summed
    optimizer.step()


@functools.wraps(summed)
def decorated(*arguments: Any) -> None:
    summed(*arguments)


class Called:
    def __call__(self, program: Any, batch: Any) -> None:
        model, optimizer = program
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum").backward()  # summed
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*sum")
@pytest.mark.parametrize(
    ("make", "its_step", "variable"),
    [
        (trainer, of_trainer, "model.0.weight"),
        (without_its_model, of_optimizer, "group0.params[0]"),
        (build, decorated, "[0].0.weight"),
        (build, functools.partial(summed), "[0].0.weight"),
        (build, Called(), "[0].0.weight"),
    ],
    ids=["object", "optimizer alone", "decorated", "partial", "called"],
)
def test_a_wrong_program_is_found_in_whatever_form(make: Any, its_step: Callable[..., None], variable: str) -> None:
    (found,) = compare(make, its_step, batches, ["mirrored x2"]).findings
    assert (found.verdict, found.variable, found.line.endswith("# summed")) == ("different", variable, True), found


def noisy(program: Any, batch: Any) -> None:
    step(program, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def build_with_half_a_pair() -> Any:
    np.random.standard_normal()
    return build()


def with_its_other_half(program: Any, batch: Any) -> None:
    step(program, (batch[0] + np.random.standard_normal(), batch[1]))


def test_a_finding_says_that_the_step_draws() -> None:
    for make, drawing in ((build, noisy), (build_with_half_a_pair, with_its_other_half)):
        assert "the step draws random numbers" in str(compare(make, drawing, batches, ["mirrored x2"]))
    assert "draws" not in str(compare(build, summed, batches, ["mirrored x2"]))


def test_what_lasts_from_run_to_run_and_what_holds_nothing_is_refused() -> None:
    kept = build()
    with pytest.raises(InvalidArgumentError, match=r"when it is run again: \[0\]\.0\.weight after step 0"):
        compare(lambda: kept, in_single, batches, ["mirrored x2"])
    with pytest.raises(InvalidArgumentError, match="nothing to compare"):
        compare(lambda: None, lambda _, batch: step(kept, [part.float() for part in batch]), batches, ["mirrored x2"])


def test_bad_input() -> None:
    with pytest.raises(InvalidArgumentError, match="no strategy is called mirored"):
        compare(build, step, batches, ["mirored"])
    with pytest.raises(InvalidArgumentError, match="batches is empty"):
        compare(build, step, [])
    with pytest.raises(WrongTypeError, match="list of global batches, or a function that makes one; got int 5"):
        compare(build, step, 5)  # type: ignore[arg-type]


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


def test_the_examples_are_of_strategies_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    examples = re.findall("(?m)^  torchstrat verify (.*)$", capsys.readouterr().out)
    assert len(examples) == 2
    assert {name for example in examples for name in shlex.split(example)[3:]} <= {*STRATEGIES}


def test_words_in_the_wrong_order_are_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([f"{__name__}:{name}" for name in ("RIGHT", "step", "batches")])
    assert raised.value.code == 2
    assert "compare(build=…) needs a function; got str" in capsys.readouterr().err


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
