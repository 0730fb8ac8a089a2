"""`SidecarEvaluator`: each checkpoint once, whatever happens to it, to the evaluator and to the clock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from torchstrat import CheckpointManager
from torchstrat.checkpoint.finished import clear_finished, last_step, mark_finished
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError, WrongTypeError
from torchstrat.evaluation import journal as journal_module
from torchstrat.evaluation.request import FinishRequest

ROWS = 21
INPUTS = torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3) / 8  # exact in float32, in any order
TARGETS = INPUTS.sum(1, keepdim=True)
LOADER = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)


def make_model() -> nn.Module:
    return nn.Linear(3, 1)


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().squeeze(1)


def model_of(step: int) -> nn.Linear:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(step)
        model.bias.fill_(step / 8)
    return model


def expected(step: int) -> float:
    with torch.no_grad():
        return float(squared_error(model_of(step)(INPUTS).double(), TARGETS.double()).mean())


def save(folder: Path, *steps: int, value: int | None = None) -> None:
    """As a training would: more than the model, by names."""
    for step in steps:
        model = model_of(step if value is None else value)
        optimizer = torch.optim.Adam(model.parameters())
        ts.Checkpoint(model=model, optimizer=optimizer, count=torch.tensor(step)).save(folder / f"step-{step:08d}")


class Script:
    """A clock on which each wait lets the next thing happen."""

    def __init__(self, *happens: Callable[[], Any]) -> None:
        self.happens = list(happens)
        self.seconds = 0.0
        self.waits = 0

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float, unless: FinishRequest) -> None:
        self.seconds += seconds
        self.waits += 1
        if not unless.is_set():
            assert self.happens, "it waits for something that will not come"
            self.happens.pop(0)()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "evaluation"


def evaluator(folder: Path, log_dir: Path | None = None, *happens: Callable[[], Any], **options: Any) -> Any:
    options = {"metrics": {"error": squared_error}, "tensorboard": False, "clock": Script(*happens), **options}
    return ts.SidecarEvaluator(make_model, LOADER, folder, log_dir=log_dir, **options)


def lines(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def steps(log_dir: Path) -> list[int]:
    return [line["step"] for line in lines(log_dir)]


def assert_right(log_dir: Path, *of: int) -> None:
    assert steps(log_dir) == list(of)
    for line in lines(log_dir):
        assert line["metrics"]["error"] == pytest.approx(expected(line["step"]), rel=1e-6)
        assert line["checkpoint"] == f"step-{line['step']:08d}"


# ---- what it does ----------------------------------------------------------------------------------------------------


def test_each_checkpoint_once_in_order_until_training_has_ended(folder: Path, log_dir: Path) -> None:
    def training_goes_on() -> None:
        save(folder, 10, 8)
        (folder / "step-00000009.aside").mkdir()
        (folder / ".step-00000011.writing-1").mkdir()
        (folder / "notes").mkdir()

    happens = (lambda: save(folder, 2), training_goes_on, lambda: save(folder, 12), lambda: mark_finished(folder, 12))
    evaluations = evaluator(folder, log_dir, *happens).start()
    assert_right(log_dir, 2, 8, 10, 12)
    assert [evaluation.step for evaluation in evaluations] == [2, 8, 10, 12]
    assert evaluations[0].metrics["error"] == pytest.approx(expected(2), rel=1e-6)
    assert evaluations[0].checkpoint == folder / "step-00000002"


def test_what_was_saved_just_before_the_end_mark_is_evaluated(
    folder: Path, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint and the mark may both come between two looks."""
    save(folder, 1)
    looked = os.listdir
    late = [lambda: (save(folder, 2), mark_finished(folder, 2))]

    def look(path: Any) -> list[str]:
        found = looked(path)
        if Path(path) == folder and late and steps(log_dir):
            late.pop()()
        return found

    log_dir.mkdir()
    (log_dir / "metrics.jsonl").touch()
    monkeypatch.setattr(os, "listdir", look)
    evaluator(folder, log_dir, lambda: None).start()
    assert not late
    assert_right(log_dir, 1, 2)


def test_it_starts_again_where_it_ended(folder: Path, log_dir: Path) -> None:
    save(folder, 1, 2)
    mark_finished(folder, 2)
    assert len(evaluator(folder, log_dir).start()) == 2
    assert evaluator(folder, log_dir).start() == []
    save(folder, 3)
    shutil.rmtree(folder / "step-00000001")
    assert [evaluation.step for evaluation in evaluator(folder, log_dir).start()] == [3]
    assert_right(log_dir, 1, 2, 3)


def test_it_goes_on_after_an_error_of_the_evaluation(folder: Path, log_dir: Path) -> None:
    save(folder, 1, 2)
    mark_finished(folder, 2)
    calls: list[int] = []

    def fails_once(model: nn.Module, batches: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no data today")
        return {"error": float(squared_error(model(INPUTS), TARGETS).mean())}

    with pytest.raises(OSError, match="no data today"):
        evaluator(folder, log_dir, metrics=None, evaluate_fn=fails_once).start()
    assert_right(log_dir, 1)
    evaluator(folder, log_dir, metrics=None, evaluate_fn=fails_once).start()
    assert_right(log_dir, 1, 2)


def test_a_moved_directory_is_the_same_checkpoints(folder: Path, log_dir: Path, tmp_path: Path) -> None:
    save(folder, 1)
    mark_finished(folder, 1)
    evaluator(folder, log_dir).start()
    shutil.copytree(folder, tmp_path / "copy")
    assert evaluator(tmp_path / "copy", log_dir).start() == []


def test_a_step_that_is_saved_again_is_another_checkpoint(folder: Path, log_dir: Path) -> None:
    """As by a training that went back: the same step, other values."""

    def went_back() -> None:
        save(folder, 2, value=5)

    save(folder, 1, 2)
    evaluator(folder, log_dir, went_back, lambda: mark_finished(folder, 2)).start()
    assert steps(log_dir) == [1, 2, 2]
    assert [line["metrics"]["error"] for line in lines(log_dir)] == pytest.approx(
        [expected(1), expected(2), expected(5)], rel=1e-6
    )


def test_a_step_that_is_saved_again_while_it_is_read(
    folder: Path, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the reading: what is evaluated is what is noted, and nothing is noted twice."""
    save(folder, 1)
    mark_finished(folder, 1)
    late = [lambda: save(folder, 1, value=5)]
    restore = ts.Checkpoint.restore

    def restored(self: ts.Checkpoint, path: Any) -> None:
        while late:
            late.pop()()
        restore(self, path)

    monkeypatch.setattr(ts.Checkpoint, "restore", restored)
    evaluator(folder, log_dir).start()
    assert [line["metrics"]["error"] for line in lines(log_dir)] == pytest.approx([expected(5)], rel=1e-6)
    assert evaluator(folder, log_dir).start() == []


def test_only_the_newest_if_the_user_says_so(folder: Path, log_dir: Path) -> None:
    save(folder, 1, 2, 3)
    later = (lambda: save(folder, 4, 5), lambda: mark_finished(folder, 5))
    evaluator(folder, log_dir, *later, newest_only=True).start()
    assert_right(log_dir, 3, 5)


def test_max_evaluations_counts_those_of_earlier_starts(folder: Path, log_dir: Path) -> None:
    save(folder, 1, 2, 3, 4)
    evaluator(folder, log_dir, max_evaluations=2).start()
    assert_right(log_dir, 1, 2)
    evaluator(folder, log_dir, max_evaluations=3).start()
    assert_right(log_dir, 1, 2, 3)
    assert evaluator(folder, log_dir, max_evaluations=3).start() == []


def test_a_model_and_its_name_in_the_checkpoint(folder: Path) -> None:
    ts.Checkpoint(network=model_of(4)).save(folder / "step-00000004")
    mark_finished(folder, 4)
    model = make_model()
    (evaluation,) = ts.SidecarEvaluator(
        model, [(INPUTS, TARGETS)], folder, metrics={"error": squared_error}, name="network"
    ).start()
    assert evaluation.metrics["error"] == pytest.approx(expected(4), rel=1e-6)
    assert float(model.weight.detach()[0, 0]) == 4


def test_a_function_of_the_model_and_the_data(folder: Path) -> None:
    save(folder, 3)
    mark_finished(folder, 3)
    seen: list[tuple[bool, bool, Any]] = []

    def evaluate(model: nn.Module, batches: Any) -> dict[str, Any]:
        seen.append((model.training, torch.is_grad_enabled(), batches))
        return {"weight": model.weight.mean(), "rows": sum(len(batch[0]) for batch in batches)}

    told: list[Any] = []
    (evaluation,) = evaluator(
        folder, metrics=None, evaluate_fn=evaluate, on_evaluation=lambda *both: told.append(both)
    ).start()
    assert evaluation.metrics == {"weight": 3.0, "rows": float(ROWS)}
    assert seen == [(False, False, LOADER)]
    assert [(one.step, float(model.weight.detach().mean())) for one, model in told] == [(3, 3.0)]


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_on_a_strategy(folder: Path, log_dir: Path, kind: str) -> None:
    """Batches of 8, 8 and 5 rows over three replicas, the last of which gets 2 rows, or fewer."""
    save(folder, 1, 2)
    mark_finished(folder, 2)
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    make = {"mirrored": ts.MirroredStrategy, "central": ts.CentralStorageStrategy}[kind]
    strategy = make(devices)
    try:
        evaluator(folder, log_dir, strategy=strategy).start()
    finally:
        strategy.close()
    assert_right(log_dir, 1, 2)


def test_a_replica_without_rows_counts_nothing(folder: Path, log_dir: Path) -> None:
    """A metric that is a mean is not a number there."""
    save(folder, 1)
    mark_finished(folder, 1)
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=20)  # 20 rows, and 1 row
    try:
        (evaluation,) = ts.SidecarEvaluator(
            make_model, loader, folder, metrics={"error": nn.functional.mse_loss}, strategy=strategy
        ).start()
    finally:
        strategy.close()
    assert evaluation.metrics["error"] == pytest.approx(expected(1), rel=1e-6)


# ---- when it ends ----------------------------------------------------------------------------------------------------


def test_the_end_mark_of_a_shorter_training_does_not_count(folder: Path, log_dir: Path) -> None:
    save(folder, 1)
    mark_finished(folder, 1)

    def training_goes_on() -> None:
        clear_finished(folder)
        save(folder, 2)

    evaluator(folder, log_dir, training_goes_on, lambda: mark_finished(folder, 2), until_step=2).start()
    assert_right(log_dir, 1, 2)


def test_stop_and_finish_let_it_catch_up(folder: Path, log_dir: Path) -> None:
    ended: list[int] = []

    def end() -> None:
        save(folder, 1, 2)
        ended.append(1)

    evaluator(folder, log_dir, end, stop=lambda: bool(ended)).start()
    assert_right(log_dir, 1, 2)

    def finish() -> None:
        save(folder, 3, 4)
        again.finish()

    again = evaluator(folder, log_dir, finish)
    again.start()
    assert_right(log_dir, 1, 2, 3, 4)


def test_sigterm_lets_it_catch_up(folder: Path, log_dir: Path) -> None:
    def told() -> None:
        save(folder, 1, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    evaluator(folder, log_dir, told).start()
    assert_right(log_dir, 1, 2)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_program_stays(folder: Path) -> None:
    def handler(*_: Any) -> None: ...

    save(folder, 1)
    handlers = []
    before = signal.signal(signal.SIGTERM, handler)
    try:
        evaluator(
            folder, None, stop=lambda: True, on_evaluation=lambda *_: handlers.append(signal.getsignal(15))
        ).start()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [handler]


def test_a_signal_wakes_a_real_wait() -> None:
    request = FinishRequest()
    before = signal.signal(signal.SIGTERM, lambda *_: request.set())
    sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    sender.start()
    try:
        request.wait(3600)
        request.wait(3600)  # and it stays set
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert request.is_set()


@pytest.mark.parametrize("timeout", [30, timedelta(seconds=30)])
def test_a_training_that_saves_nothing_more(folder: Path, log_dir: Path, timeout: Any) -> None:
    save(folder, 7)
    clock = Script(*[lambda: None] * 40)
    message = rf"waited 30 s for a checkpoint in {folder}, and none came after that of step 7\."
    with pytest.raises(CommunicationTimeoutError, match=message):
        evaluator(folder, log_dir, clock=clock, timeout=timeout, poll_seconds=2.0).start()
    assert clock.seconds == 30
    assert_right(log_dir, 7)


def test_a_new_checkpoint_starts_the_time_anew(folder: Path) -> None:
    quiet = [lambda: None] * 9
    clock = Script(*quiet, lambda: save(folder, 1), *quiet, lambda: save(folder, 2), *[lambda: None] * 10)
    with pytest.raises(CommunicationTimeoutError, match="step 2"):
        evaluator(folder, clock=clock, timeout=10).start()
    assert clock.seconds == 30


def test_the_time_of_an_evaluation_does_not_count(folder: Path, log_dir: Path) -> None:
    save(folder, 1)
    clock = Script(lambda: save(folder, 2), lambda: mark_finished(folder, 2))

    def slow(_model: nn.Module, _batches: Any) -> dict[str, float]:
        clock.seconds += 3600
        return {"error": 0.0}

    evaluator(folder, log_dir, clock=clock, timeout=10, metrics=None, evaluate_fn=slow).start()
    assert steps(log_dir) == [1, 2]
    assert lines(log_dir)[0]["seconds"] == 3600


def test_a_directory_that_never_comes(folder: Path) -> None:
    with pytest.raises(CommunicationTimeoutError, match=rf"in {folder}, which does not exist, and none came\."):
        evaluator(folder, None, *[lambda: None] * 5, timeout=5).start()


# ---- deletion under its hands ----------------------------------------------------------------------------------------


def delete_as_the_manager_does(checkpoint: Path) -> None:
    going = checkpoint.with_name(f".{checkpoint.name}.deleted-1")
    checkpoint.rename(going)
    shutil.rmtree(going)


class AtOpen:
    """Something happens just before the given one of all openings of files in a folder, whoever opens them."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        sys.addaudithook(self._audit)  # stays for good, and looks away without a folder

    @contextlib.contextmanager
    def before(self, number: int, folder: Path, happens: Callable[[], None]) -> Iterator[AtOpen]:
        self.seen, self.number, self.happens = 0, number, happens
        self.folder = folder
        try:
            yield self
        finally:
            self.folder = None

    @property
    def fired(self) -> bool:
        return self.seen > self.number

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event != "open" or not isinstance(arguments[0], str | os.PathLike):
            return
        if Path(os.fspath(arguments[0])).parent == self.folder:
            self.seen += 1
            if self.seen == self.number + 1:
                self.folder = None
                self.happens()


at_open = AtOpen()


@pytest.mark.parametrize("delete", [delete_as_the_manager_does, shutil.rmtree])
def test_deleted_at_each_moment_of_the_reading(tmp_path: Path, delete: Callable[[Path], None]) -> None:
    """The next one's turn comes, without a warning; and what was read before is right, or is not there."""
    evaluated: list[bool] = []
    for moment in range(1000):
        folder, log_dir = tmp_path / f"{moment}", tmp_path / f"log_{moment}"
        save(folder, 1, 2, 3)
        mark_finished(folder, 3)
        going = folder / "step-00000002"
        with at_open.before(moment, going, lambda going=going: delete(going)) as injected:
            evaluator(folder, log_dir).start()  # nor is there a wait: the next one is there already
        if not injected.fired:
            break
        assert not going.exists()
        assert_right(log_dir, *[1, 2, 3] if 2 in steps(log_dir) else [1, 3])
        evaluated.append(2 in steps(log_dir))
    assert len(evaluated) >= 4, "the manifest, the index and the tensors are files of their own"
    assert not evaluated[0]
    assert_right(log_dir, 1, 2, 3)


@pytest.mark.parametrize("moment", ["look", "evaluation", "noted"])
def test_deleted_between_reading_and_noting(
    folder: Path, log_dir: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1, 2, 3)
    mark_finished(folder, 3)
    fired: list[str] = []

    def delete(step: int) -> None:
        if step == 2:
            delete_as_the_manager_does(folder / "step-00000002")
            fired.append(moment)

    restore, add = ts.Checkpoint.restore, journal_module.Journal.add

    def restored(self: ts.Checkpoint, path: Path) -> None:
        delete(int(path.name[-1]))
        restore(self, path)

    def added(self: journal_module.Journal, evaluation: Any, fingerprint: str) -> None:
        delete(evaluation.step)
        add(self, evaluation, fingerprint)

    options: dict[str, Any] = {}
    if moment == "look":
        monkeypatch.setattr(ts.Checkpoint, "restore", restored)
    elif moment == "evaluation":
        options["on_evaluation"] = lambda evaluation, _: delete(evaluation.step)
    else:
        monkeypatch.setattr(journal_module.Journal, "add", added)
    evaluator(folder, log_dir, **options).start()
    assert fired == [moment]
    assert_right(log_dir, *[1, 3] if moment == "look" else [1, 2, 3])


def test_deleted_file_by_file_is_no_damage(folder: Path, log_dir: Path) -> None:
    """It looks damaged for a while; there is a wait before it is called that."""
    save(folder, 1, 2)
    mark_finished(folder, 2)
    going = folder / "step-00000001"
    next(going.glob("*.distcp")).unlink()
    evaluator(folder, log_dir, lambda: shutil.rmtree(going)).start()
    assert_right(log_dir, 2)


def test_copied_file_by_file_is_no_damage(folder: Path, log_dir: Path) -> None:
    save(folder, 1)
    mark_finished(folder, 1)
    (file,) = (folder / "step-00000001").glob("*.distcp")
    file.rename(folder / "later")
    evaluator(folder, log_dir, lambda: (folder / "later").rename(file)).start()
    assert_right(log_dir, 1)


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage_tensors(checkpoint: Path) -> None:
    """All of them: the evaluator reads the model alone, and may not see what is wrong elsewhere."""
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


def truncate_index(checkpoint: Path) -> None:
    index = checkpoint / ".metadata"
    index.write_bytes(index.read_bytes()[:40])


def remove_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def remove_tensors(checkpoint: Path) -> None:
    next(checkpoint.glob("*.distcp")).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_tensors, r"step-00000002/.*\.distcp is damaged"),
        (truncate_index, r"step-00000002/\.metadata"),
        (remove_index, "step-00000002 holds no complete checkpoint"),
        (remove_tensors, r"step-00000002/.*\.distcp"),
    ],
)
def test_a_damaged_one_is_left_out_with_one_warning(
    folder: Path, log_dir: Path, damage: Callable[[Path], None], named: str
) -> None:
    save(folder, 1, 2, 3)
    damage(folder / "step-00000002")
    mark_finished(folder, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluator(folder, log_dir, *[lambda: None] * 3).start()
    (warning,) = caught
    assert warning.category is RuntimeWarning
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(str(warning.message))
    assert_right(log_dir, 1, 3)


def test_a_damaged_one_that_is_saved_again_is_evaluated(folder: Path, log_dir: Path) -> None:
    save(folder, 1)
    damage_tensors(folder / "step-00000001")
    happens = (lambda: None, lambda: None, lambda: save(folder, 1), lambda: mark_finished(folder, 1))
    with pytest.warns(RuntimeWarning, match="left out"):
        evaluator(folder, log_dir, *happens).start()
    assert_right(log_dir, 1)


@pytest.mark.parametrize(
    ("model_fn", "name", "message"),
    [
        (lambda: nn.Linear(3, 2), "model", r"does not fit.*\n.*model\.weight is .*\(1, 3\) .* and .*\(2, 3\)"),
        (lambda: nn.Sequential(nn.Linear(3, 1)), "model", r"model\.0\.weight is missing"),
        (make_model, "network", r"network\.weight is missing"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error_and_no_damage(
    folder: Path, model_fn: Any, name: str, message: str
) -> None:
    save(folder, 1)
    one = ts.SidecarEvaluator(
        model_fn, LOADER, folder, metrics={"error": squared_error}, name=name, clock=Script(lambda: None)
    )
    with pytest.raises(InvalidArgumentError, match=message):
        one.start()


# ---- results on the disk ---------------------------------------------------------------------------------------------


def test_a_line_that_was_half_written_when_the_power_went(folder: Path, log_dir: Path) -> None:
    save(folder, 1, 2)
    mark_finished(folder, 2)
    evaluator(folder, log_dir).start()
    file = log_dir / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    evaluator(folder, log_dir).start()
    assert_right(log_dir, 1, 2)


def test_a_full_disk_leaves_whole_lines(folder: Path, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 1, 2)
    mark_finished(folder, 2)
    write, calls = os.write, []

    def half(descriptor: int, data: bytes) -> int:
        calls.append(data)
        return write(descriptor, data if len(calls) == 1 else data[:9])

    monkeypatch.setattr(journal_module.os, "write", half)
    with pytest.raises(InvalidArgumentError, match=r"cannot write .*metrics\.jsonl: only 9 of \d+ bytes"):
        evaluator(folder, log_dir).start()
    monkeypatch.undo()
    assert_right(log_dir, 1)
    evaluator(folder, log_dir).start()
    assert_right(log_dir, 1, 2)


def test_a_file_of_another_program_is_left_alone(folder: Path, log_dir: Path) -> None:
    log_dir.mkdir()
    text = '{"event": "step", "step": 1, "loss": 0.5}\n'
    (log_dir / "metrics.jsonl").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"metrics\.jsonl, line 1, is not a SidecarEvaluator's"):
        evaluator(folder, log_dir).start()
    assert (log_dir / "metrics.jsonl").read_text() == text


def test_two_evaluators_of_one_log_dir(folder: Path, log_dir: Path) -> None:
    save(folder, 1)
    mark_finished(folder, 1)

    def another(*_: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=f"{log_dir} is being written to by process {os.getpid()}"):
            evaluator(folder, log_dir).start()

    evaluator(folder, log_dir, on_evaluation=another).start()
    assert_right(log_dir, 1)


def test_a_log_dir_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="file"):
        evaluator(folder, tmp_path / "file").start()


def test_what_is_no_number_is_null(folder: Path, log_dir: Path) -> None:
    save(folder, 1)
    mark_finished(folder, 1)
    values = {"a": float("nan"), "b": float("inf"), "c": 1.0}
    evaluator(folder, log_dir, metrics=None, evaluate_fn=lambda *_: values).start()
    assert lines(log_dir)[0]["metrics"] == {"a": None, "b": None, "c": 1.0}


def test_tensorboard_has_the_same_numbers(folder: Path, log_dir: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    save(folder, 1, 2)
    mark_finished(folder, 2)
    evaluator(folder, log_dir, tensorboard=True).start()
    save(folder, 3)
    evaluator(folder, log_dir, tensorboard=True).start()
    events = accumulator.EventAccumulator(str(log_dir))
    events.Reload()
    points = events.Scalars("evaluation/error")
    assert [point.step for point in points] == [1, 2, 3]
    assert [point.value for point in points] == pytest.approx([expected(step) for step in (1, 2, 3)], rel=1e-6)


def test_without_tensorboard_there_is_a_warning_and_the_file(
    folder: Path, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1, 2)
    mark_finished(folder, 2)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(RuntimeWarning, match="TensorBoard is not installed") as caught:
        evaluator(folder, log_dir, tensorboard=True).start()
    assert len(caught) == 1
    assert_right(log_dir, 1, 2)


# ---- the end mark ----------------------------------------------------------------------------------------------------


def test_the_end_mark(tmp_path: Path) -> None:
    assert last_step(tmp_path / "absent") is None
    assert last_step(tmp_path) is None
    mark_finished(tmp_path, 5)
    mark_finished(tmp_path, 7)
    assert last_step(tmp_path) == 7
    assert json.loads((tmp_path / "finished.json").read_text()) == {"step": 7}
    assert [file.name for file in tmp_path.iterdir()] == ["finished.json"]
    clear_finished(tmp_path)
    clear_finished(tmp_path)
    assert last_step(tmp_path) is None


def test_the_manager_leaves_the_mark_and_the_next_save_takes_it_away(folder: Path, log_dir: Path) -> None:
    def train(*steps: int, finished: bool) -> None:
        manager = CheckpointManager(folder, max_to_keep=2)
        for step in steps:
            manager.save(ts.Checkpoint(model=model_of(step)), step)
        manager.close(finished=finished)

    train(1, 2, 3, finished=True)
    assert last_step(folder) == 3
    evaluator(folder, log_dir).start()
    train(4, finished=False)
    assert last_step(folder) is None
    train(finished=True)  # a training that had only its end before it
    assert last_step(folder) == 4
    evaluator(folder, log_dir).start()
    assert_right(log_dir, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "7"}', '{"step": true}', "null"])
def test_an_end_mark_of_somebody_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "finished.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"finished\.json"):
        last_step(tmp_path)


def test_an_end_mark_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="absent"):
        mark_finished(tmp_path / "absent", 1)


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
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    usual = {"model_fn": make_model, "data": LOADER, "checkpoint_dir": tmp_path, "metrics": {"error": squared_error}}
    with pytest.raises(error, match=message):
        ts.SidecarEvaluator(**{**usual, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model_fn": lambda: 3}, WrongTypeError, "model_fn returned int 3"),
        ({"data": [INPUTS]}, WrongTypeError, r"batches of \(inputs, targets\); got Tensor"),
        ({"data": [(INPUTS, TARGETS, TARGETS)]}, WrongTypeError, "got tuple of 3"),
        ({"data": [(INPUTS, 3)]}, WrongTypeError, "no tensor with rows in dim 0"),
        ({"data": []}, InvalidArgumentError, "has no rows"),
        ({"metrics": {"all": lambda o, t: o}}, InvalidArgumentError, r"metrics\['all'\] returned shape \(21, 1\)"),
        ({"metrics": None, "evaluate_fn": lambda *_: 3.0}, WrongTypeError, "evaluate_fn returned float 3.0"),
        ({"metrics": None, "evaluate_fn": lambda *_: {}}, WrongTypeError, "from names to numbers"),
        ({"metrics": None, "evaluate_fn": lambda *_: {"a": INPUTS}}, WrongTypeError, "not one number"),
    ],
)
def test_functions_that_return_something_else(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    save(folder, 1)
    usual = {"model_fn": make_model, "data": [(INPUTS, TARGETS)], "metrics": {"error": squared_error}}
    with pytest.raises(error, match=message):
        ts.SidecarEvaluator(checkpoint_dir=folder, **{**usual, **options}).start()


def test_metrics_may_be_means_numbers_or_one_for_each_row(folder: Path) -> None:
    save(folder, 1)
    mark_finished(folder, 1)
    metrics: dict[str, Any] = {
        "rows": squared_error,
        "mean": lambda outputs, targets: squared_error(outputs, targets).mean(),
        "number": lambda outputs, targets: float(squared_error(outputs, targets).mean()),
        "share": lambda outputs, targets: (outputs < targets).squeeze(1),
    }
    (evaluation,) = evaluator(folder, metrics=metrics).start()
    below = (model_of(1)(INPUTS) < TARGETS).double().mean()
    assert evaluation.metrics == pytest.approx(
        {**dict.fromkeys(("rows", "mean", "number"), expected(1)), "share": float(below)}, rel=1e-6
    )
