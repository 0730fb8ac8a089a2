"""`SidecarEvaluator`: each checkpoint once, whatever happens to it, to the evaluator and to the clock."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from tests.support.checkpoints import data_file
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError, WrongTypeError

ROWS = 21
INPUTS = torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3) / 8  # exact in float32, in any order
TARGETS = INPUTS.sum(1, keepdim=True)
LOADER = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)

Act = Callable[[], Any]


def make_model() -> nn.Module:
    return nn.Linear(3, 1)


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().squeeze(1)


def model_of(step: int) -> nn.Linear:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, step)
    nn.init.constant_(model.bias, step / 8)
    return model


def expected(step: int) -> Any:
    with torch.no_grad():
        error = squared_error(model_of(step)(INPUTS).double(), TARGETS.double()).mean()
    return pytest.approx(float(error), rel=1e-6)


def nothing() -> None:
    """Between two looks."""


class Script:
    """A clock on which each wait lets the next thing happen."""

    def __init__(self, *happens: Act) -> None:
        self.happens = list(happens)
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float, unless: Any) -> None:
        self.seconds += seconds
        if not unless.is_set():
            assert self.happens, "it waits for something that will not come"
            self.happens.pop(0)()


class Training:
    """What a training leaves, and evaluations of it."""

    def __init__(self, folder: Path, log_dir: Path) -> None:
        self.folder, self.log_dir = folder, log_dir

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, *steps: int, value: int | None = None) -> None:
        """More than the model, by names."""
        for step in steps:
            model = model_of(step if value is None else value)
            optimizer = torch.optim.Adam(model.parameters())
            ts.Checkpoint(model=model, optimizer=optimizer, count=torch.tensor(step)).save(self.path(step))

    def end(self, step: int) -> None:
        (self.folder / "finished.json").write_text(json.dumps({"step": step}))

    def delete(self, step: int) -> None:
        """As the manager does."""
        going = self.path(step).with_name(f".{self.path(step).name}.deleted-1")
        self.path(step).rename(going)
        shutil.rmtree(going)

    def evaluator(self, *happens: Act, **options: Any) -> ts.SidecarEvaluator:
        usual = {"model_fn": make_model, "data": LOADER, "checkpoint_dir": self.folder, "log_dir": self.log_dir}
        more = {"metrics": {"error": squared_error}, "tensorboard": False, "clock": Script(*happens)}
        return ts.SidecarEvaluator(**{**usual, **more, **options})

    def evaluated(self, *happens: Act, **options: Any) -> list[int]:
        """By one start."""
        return [evaluation.step for evaluation in self.evaluator(*happens, **options).start()]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.log_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def errors(self) -> list[float]:
        return [line["metrics"]["error"] for line in self.lines]

    def assert_noted(self, *steps: int) -> None:
        assert [line["step"] for line in self.lines] == list(steps)
        assert [line["checkpoint"] for line in self.lines] == [f"step-{step:08d}" for step in steps]
        assert self.errors == [expected(step) for step in steps]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "checkpoints", tmp_path / "evaluation")


@pytest.fixture
def ended(training: Training) -> Training:
    """With checkpoints of steps 1, 2 and 3."""
    training.save(1, 2, 3)
    training.end(3)
    return training


# ---- what it does ----------------------------------------------------------------------------------------------------


def test_each_checkpoint_once_in_order_until_training_has_ended(training: Training) -> None:
    def training_goes_on() -> None:
        training.save(10, 8)
        for name in ("step-00000009.aside", ".step-00000011.writing-1", "notes"):
            (training.folder / name).mkdir()

    happens = (lambda: training.save(2), training_goes_on, lambda: training.save(12), lambda: training.end(12))
    evaluations = training.evaluator(*happens).start()
    training.assert_noted(2, 8, 10, 12)
    assert [evaluation.step for evaluation in evaluations] == [2, 8, 10, 12]
    assert evaluations[0].metrics["error"] == expected(2)
    assert evaluations[0].checkpoint == training.path(2)


def test_what_was_saved_just_before_the_end_mark_is_evaluated(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint and the mark may both come between two looks."""
    training.save(1)
    training.log_dir.mkdir()
    (training.log_dir / "metrics.jsonl").touch()
    looked, late = os.listdir, [lambda: (training.save(2), training.end(2))]

    def look(path: Any) -> list[str]:
        found = looked(path)
        if Path(path) == training.folder and late and training.lines:
            late.pop()()
        return found

    monkeypatch.setattr(os, "listdir", look)
    assert training.evaluated(nothing) == [1, 2]
    assert not late


def test_it_starts_again_where_it_ended(ended: Training, tmp_path: Path) -> None:
    assert ended.evaluated() == [1, 2, 3]
    assert ended.evaluated() == []
    shutil.copytree(ended.folder, tmp_path / "copy")
    assert Training(tmp_path / "copy", ended.log_dir).evaluated() == [], "a moved directory"
    ended.save(4)
    shutil.rmtree(ended.path(1))
    assert ended.evaluated() == [4]
    ended.assert_noted(1, 2, 3, 4)


def test_a_step_that_is_saved_again_is_another_checkpoint(training: Training) -> None:
    """As by a training that went back: the same step, other values."""
    training.save(1, 2)
    assert training.evaluated(lambda: training.save(2, value=5), lambda: training.end(2)) == [1, 2, 2]
    assert training.errors == [expected(1), expected(2), expected(5)]


def test_a_step_that_is_saved_again_while_it_is_read(training: Training) -> None:
    """Between the look and the reading: what is evaluated is what is noted, and nothing is noted twice."""
    training.save(1)
    training.end(1)
    late, restore = [lambda: training.save(1, value=5)], ts.Checkpoint.restore

    def restored(self: ts.Checkpoint, path: Any) -> None:
        while late:
            late.pop()()
        restore(self, path)

    with mock.patch.object(ts.Checkpoint, "restore", restored):
        assert training.evaluated() == [1]
    assert training.errors == [expected(5)]
    assert training.evaluated() == []


def test_only_the_newest_if_the_user_says_so(ended: Training) -> None:
    (ended.folder / "finished.json").unlink()
    assert ended.evaluated(lambda: ended.save(4, 5), lambda: ended.end(5), newest_only=True) == [3, 5]


def test_names_that_no_manager_gives(ended: Training) -> None:
    for name in ("step-7", "step-000000042", "step-0000000\N{ARABIC-INDIC DIGIT NINE}"):
        shutil.copytree(ended.path(3), ended.folder / name)
    assert [step for step, _ in ts.CheckpointManager(ended.folder).checkpoints] == [1, 2, 3]
    assert ended.evaluated() == [1, 2, 3]


def test_max_evaluations_counts_those_of_earlier_starts(training: Training) -> None:
    training.save(1, 2, 3, 4)
    assert [training.evaluated(max_evaluations=most) for most in (2, 3, 3)] == [[1, 2], [3], []]


def test_a_model_and_its_name_in_the_checkpoint(training: Training) -> None:
    ts.Checkpoint(network=model_of(4)).save(training.path(4))
    training.end(4)
    model = make_model()
    [evaluation] = training.evaluator(model_fn=model, log_dir=None, name="network").start()
    assert evaluation.metrics["error"] == expected(4)
    assert float(model.weight.detach()[0, 0]) == 4


def test_a_function_of_the_model_and_the_data(training: Training) -> None:
    training.save(3)
    training.end(3)
    seen: list[Any] = []

    def evaluate(model: nn.Module, batches: Any) -> dict[str, Any]:
        seen.append((model.training, torch.is_grad_enabled(), batches))
        values = {"weight": model.weight.mean(), "rows": sum(len(batch[0]) for batch in batches)}
        return {**values, "nan": float("nan"), "inf": float("inf")}

    told: list[Any] = []
    [evaluation] = training.evaluator(
        metrics=None, evaluate_fn=evaluate, on_evaluation=lambda *both: told.append(both)
    ).start()
    assert {**evaluation.metrics, "nan": 0.0} == {"weight": 3.0, "rows": float(ROWS), "nan": 0.0, "inf": float("inf")}
    assert training.lines[0]["metrics"] == {"weight": 3.0, "rows": float(ROWS), "nan": None, "inf": None}
    assert seen == [(False, False, LOADER)]
    assert [(one.step, float(model.weight.detach().mean())) for one, model in told] == [(3, 3.0)]


@pytest.mark.parametrize(
    ("kind", "batch_size", "metric"),
    [(ts.MirroredStrategy, 20, nn.functional.mse_loss), (ts.CentralStorageStrategy, 8, squared_error)],
)
def test_on_a_strategy(kind: Any, batch_size: int, metric: Any, ended: Training) -> None:
    """The last of the batches has no rows, or fewer, for some of the replicas; of none a mean is not a number."""
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=batch_size)
    with contextlib.closing(kind(["cpu:0", "cpu:1", "cpu:2"])) as strategy:
        ended.evaluated(data=loader, metrics={"error": metric}, strategy=strategy)
    ended.assert_noted(1, 2, 3)


def test_metrics_have_the_digits_of_what_is_returned(training: Training) -> None:
    training.save(1)
    training.end(1)
    metrics: dict[str, Any] = {
        "number": lambda outputs, targets: 0.1,
        "counts": lambda outputs, targets: torch.full((len(targets),), 2**24 + 1),
        "float32": lambda outputs, targets: torch.full((len(targets),), 2.0**24) + torch.eye(len(targets))[0],
    }
    [evaluation] = training.evaluator(metrics=metrics).start()
    assert evaluation.metrics == {"number": pytest.approx(0.1, rel=1e-15), "counts": 2**24 + 1, "float32": 2**24}


def test_metrics_may_be_means_numbers_or_one_for_each_row(training: Training) -> None:
    training.save(1)
    training.end(1)
    metrics: dict[str, Any] = {
        "rows": squared_error,
        "mean": lambda outputs, targets: squared_error(outputs, targets).mean(),
        "number": lambda outputs, targets: float(squared_error(outputs, targets).mean()),
        "share": lambda outputs, targets: (outputs < targets).squeeze(1),
    }
    [evaluation] = training.evaluator(metrics=metrics).start()
    below = float((model_of(1)(INPUTS) < TARGETS).double().mean())
    means = dict.fromkeys(("rows", "mean", "number"), expected(1))
    assert evaluation.metrics == {**means, "share": pytest.approx(below, rel=1e-6)}


# ---- when it ends ----------------------------------------------------------------------------------------------------


def test_the_end_mark_of_a_shorter_training_does_not_count(training: Training) -> None:
    training.save(1)
    training.end(1)
    assert training.evaluated(lambda: training.save(2), lambda: training.end(2), until_step=2) == [1, 2]


@pytest.mark.parametrize("how", ["stop", "finish", "SIGTERM"])
def test_who_is_told_to_end_catches_up(how: str, training: Training) -> None:
    told: list[bool] = []

    def end() -> None:
        training.save(1, 2)
        told.append(True)
        if how == "finish":
            evaluator.finish()
        elif how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    evaluator = training.evaluator(end, stop=(lambda: bool(told)) if how == "stop" else None)
    evaluator.start()
    training.assert_noted(1, 2)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_program_stays(training: Training) -> None:
    def handler(*_: Any) -> None: ...

    training.save(1)
    handlers: list[Any] = []
    before = signal.signal(signal.SIGTERM, handler)
    try:
        training.evaluated(stop=lambda: True, on_evaluation=lambda *_: handlers.append(signal.getsignal(15)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [handler]


def test_a_signal_wakes_a_real_wait(training: Training) -> None:
    senders: list[threading.Timer] = []

    def looks() -> bool:
        if not senders:  # by now it hears signals
            senders.append(threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)))
            senders[0].start()
        return False

    assert training.evaluated(clock=None, poll_seconds=3600, stop=looks) == []
    senders[0].join()


@pytest.mark.parametrize("timeout", [30, timedelta(seconds=30)])
def test_a_training_that_saves_nothing_more(timeout: Any, training: Training) -> None:
    """Each new checkpoint starts the time anew."""
    quiet = [nothing] * 14
    clock = Script(*quiet, lambda: training.save(1), *quiet, lambda: training.save(7), *quiet, nothing)
    message = rf"waited 30 s for a checkpoint in {training.folder}, and none came after that of step 7\."
    with pytest.raises(CommunicationTimeoutError, match=message):
        training.evaluated(clock=clock, timeout=timeout, poll_seconds=2.0)
    assert clock.seconds == 90
    training.assert_noted(1, 7)


def test_the_time_of_an_evaluation_does_not_count(training: Training) -> None:
    training.save(1)
    clock = Script(lambda: training.save(2), lambda: training.end(2))

    def slow(_model: nn.Module, _batches: Any) -> dict[str, float]:
        clock.seconds += 3600
        return {"error": 0.0}

    assert training.evaluated(clock=clock, timeout=10, metrics=None, evaluate_fn=slow) == [1, 2]
    assert training.lines[0]["seconds"] == 3600


def test_a_directory_that_never_comes(training: Training) -> None:
    message = rf"in {training.folder}, which does not exist, and none came\."
    with pytest.raises(CommunicationTimeoutError, match=message):
        training.evaluated(*[nothing] * 5, timeout=5)


# ---- deletion under its hands ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def before_opening(number: int, folder: Path, happens: Act) -> Iterator[list[int]]:
    """Something happens before this one of all openings of files in a folder, whoever opens them. What is left of
    the number, then; empty once it has happened."""
    left = list(range(number + 1))

    def telling(really: Callable[..., Any]) -> Callable[..., Any]:
        def opens(path: Any, *args: Any, **options: Any) -> Any:
            if left and isinstance(path, str | os.PathLike) and Path(path).parent == folder:
                left.pop()
                if not left:
                    happens()
            return really(path, *args, **options)

        return opens

    with contextlib.ExitStack() as stack:  # an audit hook would see them, too, and all others until the process ends
        for name in ("builtins.open", "io.open", "os.open"):
            stack.enter_context(mock.patch(name, telling(pkgutil.resolve_name(name))))
        yield left


@pytest.mark.parametrize("delete", [Training.delete, lambda training, step: shutil.rmtree(training.path(step))])
def test_deleted_at_each_moment_of_the_reading(tmp_path: Path, delete: Callable[[Training, int], None]) -> None:
    """The next one's turn comes, without a warning; and what was read before is right, or is not there."""
    evaluated: list[bool] = []
    for moment in range(1000):
        training = Training(tmp_path / f"{moment}", tmp_path / f"log_{moment}")
        training.save(1, 2, 3)
        training.end(3)
        with before_opening(moment, training.path(2), lambda training=training: delete(training, 2)) as left:
            steps = training.evaluated()  # nor is there a wait: the next one is there already
        training.assert_noted(*steps)
        if left:
            break
        assert not training.path(2).exists()
        assert steps in ([1, 2, 3], [1, 3])
        evaluated.append(2 in steps)
    assert len(evaluated) >= 4, "the manifest, the index and the tensors are files of their own"
    assert not evaluated[0]
    assert steps == [1, 2, 3]


def test_deleted_between_evaluating_and_noting(ended: Training) -> None:
    ended.evaluated(on_evaluation=lambda evaluation, _: ended.delete(evaluation.step))
    ended.assert_noted(1, 2, 3)


@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "deleted"])
def test_what_comes_or_goes_file_by_file_is_no_damage(is_copied: bool, ended: Training) -> None:
    """It looks damaged for a while; there is a wait before it is called that."""
    file, later = data_file(ended.path(1)), ended.folder / "later"
    file.rename(later)
    happens = (lambda: later.rename(file)) if is_copied else (lambda: shutil.rmtree(ended.path(1)))
    assert ended.evaluated(happens) == ([1, 2, 3] if is_copied else [2, 3])


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage_tensors(checkpoint: Path) -> None:
    """All of them: the evaluator reads the model alone, and may not see what is wrong elsewhere."""
    file = data_file(checkpoint)
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_tensors, r"step-00000002/.*\.distcp is damaged"),
        (lambda checkpoint: os.truncate(checkpoint / ".metadata", 40), r"step-00000002/\.metadata"),
        (lambda checkpoint: (checkpoint / ".metadata").unlink(), "step-00000002 holds no complete checkpoint"),
        (lambda checkpoint: data_file(checkpoint).unlink(), r"step-00000002/.*\.distcp"),
    ],
    ids=["tensors", "half an index", "no index", "no tensors"],
)
def test_a_damaged_one_is_left_out_with_one_warning_until_it_is_saved_again(
    damage: Callable[[Path], None], named: str, ended: Training
) -> None:
    damage(ended.path(2))
    (ended.folder / "finished.json").unlink()
    saved_again = lambda: (shutil.rmtree(ended.path(2)), ended.save(2))  # noqa: E731
    happens = (nothing, nothing, saved_again, lambda: ended.end(3))
    with pytest.warns(RuntimeWarning, match=named) as caught:
        assert ended.evaluated(*happens) == [1, 3, 2]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("model_fn", "name", "message"),
    [
        (lambda: nn.Linear(3, 2), "model", r"does not fit.*\n.*model\.weight is .*\(1, 3\) .* and .*\(2, 3\)"),
        (lambda: nn.Sequential(nn.Linear(3, 1)), "model", r"model\.0\.weight is missing"),
        (make_model, "network", r"network\.weight is missing"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error_and_no_damage(
    model_fn: Any, name: str, message: str, ended: Training
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ended.evaluated(nothing, model_fn=model_fn, name=name)


# ---- results on the disk ---------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_lines(ended: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, []

    def half(descriptor: int, data: bytes) -> int:
        calls.append(data)
        return write(descriptor, data if len(calls) == 1 else data[:9])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(InvalidArgumentError, match=r"cannot write .*metrics\.jsonl: only 9 of \d+ bytes"):
            ended.evaluated()
    ended.assert_noted(1)
    assert ended.evaluated() == [2, 3]


def test_two_evaluators_of_one_log_dir(ended: Training) -> None:
    def another(*_: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=f"{ended.log_dir} is being written to by process {os.getpid()}"):
            ended.evaluated()

    assert ended.evaluated(on_evaluation=another) == [1, 2, 3]


def test_tensorboard_has_the_same_numbers(ended: Training) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ended.evaluated(tensorboard=True)
    ended.save(4)
    ended.evaluated(tensorboard=True)
    events = accumulator.EventAccumulator(str(ended.log_dir))
    events.Reload()
    points = events.Scalars("evaluation/error")
    assert [(point.step, point.value) for point in points] == [(step, expected(step)) for step in (1, 2, 3, 4)]


def test_without_tensorboard_there_is_a_warning_and_the_file(ended: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(RuntimeWarning, match="TensorBoard is not installed") as caught:
        ended.evaluated(tensorboard=True)
    assert len(caught) == 1
    ended.assert_noted(1, 2, 3)


# ---- the end mark ----------------------------------------------------------------------------------------------------


def test_the_manager_leaves_the_mark_and_the_next_save_takes_it_away(training: Training) -> None:
    def train(*steps: int, finished: bool) -> str | None:
        """The mark, then."""
        manager, mark = ts.CheckpointManager(training.folder, max_to_keep=2), training.folder / "finished.json"
        for step in steps:
            manager.save(ts.Checkpoint(model=model_of(step)), step)
        manager.close(finished=finished)
        assert not list(training.folder.glob(".finished*"))
        return mark.read_text() if mark.exists() else None

    assert train(1, 2, 3, finished=True) == '{"step": 3}'
    training.evaluated()
    assert train(4, finished=False) is None
    assert train(5, finished=True) == '{"step": 5}'
    assert train(finished=True) == '{"step": 5}'  # a training that had only its end before it
    training.evaluated()
    training.assert_noted(2, 3, 4, 5)
    (training.folder / "finished.json").unlink()
    with (
        pytest.raises(InvalidArgumentError, match=r"the end of training cannot be marked in .*: full"),
        mock.patch("os.fsync", side_effect=OSError("full")),
    ):
        train(finished=True)
    assert not list(training.folder.glob("*finished*"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "7"}', '{"step": true}', "null"])
def test_an_end_mark_of_somebody_else(text: str, ended: Training) -> None:
    (ended.folder / "finished.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"finished\.json"):
        ended.evaluated()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metrics": None}, InvalidArgumentError, "needs either evaluate_fn=.* got neither"),
        ({"evaluate_fn": lambda *_: {}}, InvalidArgumentError, "got both"),
        ({"metrics": {}}, InvalidArgumentError, "no metric in it"),
        ({"data": iter([1])}, WrongTypeError, "can be gone through once"),
        ({"model_fn": "net"}, WrongTypeError, "model_fn='net'"),
        ({"checkpoint_dir": ""}, InvalidArgumentError, "checkpoint_dir=''"),
        ({"checkpoint_dir": __file__}, InvalidArgumentError, r"checkpoint_dir='.*\.py'"),
        ({"max_evaluations": 0}, InvalidArgumentError, "max_evaluations=0 must be greater than 0"),
        ({"poll_seconds": -1}, InvalidArgumentError, "poll_seconds=-1"),
        ({"timeout": 0}, InvalidArgumentError, "timeout=0"),
        ({"timeout": timedelta(0)}, InvalidArgumentError, "timeout=0"),
    ],
)
def test_arguments_that_mean_nothing(
    options: dict[str, Any], error: type[Exception], message: str, training: Training
) -> None:
    with pytest.raises(error, match=message):
        training.evaluator(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model_fn": lambda: 3}, WrongTypeError, "model_fn returned int 3"),
        ({"data": [INPUTS]}, WrongTypeError, r"batches of \(inputs, targets\); got Tensor"),
        ({"data": [(INPUTS, TARGETS, TARGETS)]}, WrongTypeError, "got tuple of 3"),
        ({"data": [(INPUTS, 3)]}, WrongTypeError, "no tensor with rows in dim 0"),
        ({"data": []}, InvalidArgumentError, "has no rows"),
        ({"metrics": {"all": lambda o, t: o}}, InvalidArgumentError, r"metrics\['all'\] returned shape \(8, 1\)"),
        ({"metrics": None, "evaluate_fn": lambda *_: 3.0}, WrongTypeError, "evaluate_fn returned float 3.0"),
        ({"metrics": None, "evaluate_fn": lambda *_: {}}, WrongTypeError, "from names to numbers"),
        ({"metrics": None, "evaluate_fn": lambda *_: {"a": INPUTS}}, WrongTypeError, "not one number"),
    ],
)
def test_functions_that_return_something_else(
    options: dict[str, Any], error: type[Exception], message: str, ended: Training
) -> None:
    with pytest.raises(error, match=message):
        ended.evaluated(**options)
