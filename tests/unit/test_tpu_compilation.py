"""Which runs of a TPU strategy were compiled and why: programs are those that the test says there are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.support.tpu import fake_tpu, own, rows_of
from torchstrat.errors import InvalidArgumentError
from torchstrat.testing.fake_tpu import runtime_of

PROGRAM: list[object] = [None]


def step(x: Any, **more: Any) -> None:
    runtime_of(ts.get_strategy()).program = PROGRAM[0]  # type: ignore[arg-type]


def evaluate(x: Any) -> None:
    step(x)


def run(strategy: ts.TPUStrategy, program: object, fn: Any, *args: Any, **kwargs: Any) -> str | None:
    """Why this run was compiled, if it was; one of a ``program`` that has run before is not."""
    PROGRAM[0] = program
    before = len(strategy.compilations)
    strategy.run(fn, args=args, kwargs=kwargs)
    new = strategy.compilations[before:]
    return new[0].reason if new else None


def test_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchstrat.tpu")
    settled = "the first run made gradients and optimizer state, which now are inputs"
    changed = (
        "shapes are as before, so something else in the program changed: a Python number or branch in the step, "
        "train() or eval(), requires_grad, or what the loop did with tensors of the devices between two runs"
    )
    runs: list[tuple[Any, tuple[int, int], int, str | None, str]] = [
        (step, (4, 4), 1, "it is the first", "INFO"),
        (step, (4, 4), 2, settled, "INFO"),
        (step, (4, 4), 2, None, ""),
        (step, (2, 2), 3, "args[0] is float64[2, 3] now, it was float64[4, 3]", "WARNING"),
        (step, (4, 4), 2, None, ""),
        (
            *(step, (4, 0), 4),
            "args[0] is float64[4, 3] now, it was float64[2, 3]; replicas [0] take part now, it was [0, 1]",
            "WARNING",
        ),
        (step, (4, 4), 5, changed, "WARNING"),
        (
            *(step, (3, 1), 6),
            "replicas [0]: args[0] is float64[3, 3] now; replicas [1]: args[0] is float64[1, 3] now",
            "WARNING",
        ),
        (evaluate, (4, 4), 7, "a step that was not run before, ", "INFO"),
        # A new shape is compared with the last one of its own step.
        (evaluate, (5, 5), 8, "args[0] is float64[5, 3] now, it was float64[4, 3]", "WARNING"),
        (step, (4, 4), 9, changed, "WARNING"),
    ]
    with fake_tpu(2) as strategy:
        for fn, counts, program, expected, level in runs:
            caplog.clear()
            reason = run(strategy, program, fn, rows_of(counts))
            assert [record.levelname for record in caplog.records] == ([level] if level else [])
            if expected is None:
                assert reason is None
                continue
            assert reason is not None
            place = f"{fn.__name__} ({__file__}:{fn.__code__.co_firstlineno})"
            assert reason == expected + (place if expected.endswith(" ") else "")
            assert reason in caplog.text
            assert place == strategy.compilations[-1].signature.step
        assert [one.run for one in strategy.compilations] == [0, 1, 3, 5, 6, 7, 8, 9, 10]


def test_what_is_said_about_inputs() -> None:
    x = torch.zeros(2, 3)
    with fake_tpu(1) as strategy:
        run(strategy, 1, step, {"k": [x.long(), "text"], "n": None}, flag=x, other=True)
        assert dict(strategy.compilations[0].signature.inputs) == {
            "args[0]['k'][0]": "int64[2, 3]",
            "args[0]['k'][1]": "'text'",
            "args[0]['n']": "None",
            "flag": "float32[2, 3]",
            "other": "True",
        }
        run(strategy, 2, step, 0, a=x)
        reason = run(strategy, 3, step, 0, b=x)
        assert reason == "a is absent now, it was float32[2, 3]; b is float32[2, 3] now, it was absent"


def test_numbers_are_inputs_of_one_program() -> None:
    with fake_tpu(2, max_different_graphs=1) as strategy:
        scaled = lambda x, n, rate: x * n * rate  # noqa: E731
        for number in (0, 1, 7):
            result = strategy.run(scaled, args=(own(1.0, 2.0), number, number / 2))
        assert [float(one) for one in result.values] == [24.5, 49.0]
        with pytest.raises(InvalidArgumentError, match=r"args\[1\] is True now, it was int"):
            strategy.run(scaled, args=(own(1.0, 2.0), True, 0.5))


def test_a_run_too_many_changes_nothing() -> None:
    called: list[int] = []
    with fake_tpu(2, max_different_graphs=3) as strategy:
        fn = lambda x: called.append(len(x))  # noqa: E731
        for rows in (1, 2, 3, 1):
            run(strategy, rows, fn, rows_of((rows, rows)))
        executions = runtime_of(strategy).executions
        with pytest.raises(InvalidArgumentError) as raised:
            strategy.run(fn, args=(rows_of((4, 4)),))
        for part in ("max_different_graphs=3", "args[0] is float64[4, 3] now, it was float64[1, 3]", "drop_last=True"):
            assert part in str(raised.value)
        assert runtime_of(strategy).executions == executions
        strategy.run(fn, args=(rows_of((1, 1)),))
        assert called == [1, 2, 3, 1, 1]


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "many"])
def test_the_most_is_a_number(most: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_different_graphs must be an int of at least 1"):
        fake_tpu(max_different_graphs=most).__enter__()


def test_a_run_is_one_program_and_nobody_waits_for_it() -> None:
    with fake_tpu(2) as strategy:
        runtime = runtime_of(strategy)
        strategy.run(lambda x: x.sum(), args=(own([1.0], [2.0, 3.0]),))
        assert runtime.traced == 1  # although there were two passes
        assert runtime.waits == 0
        before = runtime.executions
        strategy.run(lambda x: x.sum(), args=(own(1.0, 2.0),))
        assert runtime.executions - before == 2  # what the loop did before, then the step


def test_options_that_allow_one_shape_only() -> None:
    options = ts.RunOptions(enable_dynamic_batch_size=False)
    with fake_tpu(2) as strategy:
        for _ in range(2):
            strategy.run(step, args=(own(torch.zeros(3), torch.zeros(3)),), options=options)
        smaller = own(torch.zeros(2), torch.zeros(2))
        with pytest.raises(InvalidArgumentError, match=r"float32\[2\] now, it was float32\[3\]"):
            strategy.run(step, args=(smaller,), options=options)
        strategy.run(step, args=(smaller,))
