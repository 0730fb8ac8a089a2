"""`CompilationLog`: which runs were compiled and why, with counters that the test turns; and the log of a strategy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import fake_tpu, own, rows_of
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.tpu.compilation import CompilationLog, Signature, describe_inputs


class Compiler:
    """Counts programs; `compile` is what one run of a step does that needs a new one."""

    def __init__(self) -> None:
        self.count = 0

    def compile(self) -> None:
        self.count += 1

    def reuse(self) -> None:
        """A run whose program is there already."""


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def log(compiler: Compiler) -> CompilationLog:
    return CompilationLog(3, lambda: compiler.count)


def signature(shape: str = "float32[8, 3]", step: str = "step (a.py:1)", active: tuple[int, ...] = (0, 1)) -> Signature:
    return Signature(step, (("args[0]", shape), ("args[1]", "int64[8]")), active)


def test_reasons(log: CompilationLog, compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchstrat.tpu")
    known, smaller, alone = signature(), signature("float32[5, 3]"), signature(active=(0,))
    runs = [
        (known, True, "it is the first", "INFO"),
        (known, True, "the first run made gradients and optimizer state, which now are inputs", "INFO"),
        (known, False, None, None),
        (smaller, True, "args[0] is float32[5, 3] now, it was float32[8, 3]", "WARNING"),
        (known, False, None, None),
        (alone, True, "replicas [0] take part now, it was [0, 1]", "WARNING"),
        (known, True, "something else in the program changed", "WARNING"),
    ]
    for one, compiles, reason, level in runs:
        caplog.clear()
        log.admit(one)
        log.execute(one, compiler.compile if compiles else compiler.reuse)
        assert [record.levelname for record in caplog.records] == ([level] if level else [])
        if reason:
            assert reason in log.entries[-1].reason
            assert reason in caplog.text
    assert [entry.run for entry in log.entries] == [0, 1, 3, 5, 6]
    assert [entry.signature for entry in log.entries] == [known, known, smaller, alone, known]


def test_the_third_compilation_of_one_signature_says_what_it_may_be(log: CompilationLog, compiler: Compiler) -> None:
    for _ in range(3):
        log.execute(signature(), compiler.compile)
    for word in ("branch in the step", "train() or eval()", "requires_grad", "between two runs"):
        assert word in log.entries[-1].reason


def test_another_step(log: CompilationLog, compiler: Compiler) -> None:
    log.execute(signature(), compiler.compile)
    log.execute(signature(step="evaluate (a.py:9)"), compiler.compile)
    assert "evaluate (a.py:9)" in log.entries[-1].reason
    # A new shape is compared with the last one of its own step.
    log.execute(signature("float32[2, 3]"), compiler.compile)
    assert log.entries[-1].reason == "args[0] is float32[2, 3] now, it was float32[8, 3]"


def test_inputs_that_come_and_go() -> None:
    first = Signature("s", (("a", "int64[1]"),), (0,))
    second = Signature("s", (("b", "int64[1]"),), (0,))
    assert second.difference_to(first) == "a is absent now, it was int64[1]; b is int64[1] now, it was absent"


def test_too_many_signatures(log: CompilationLog, compiler: Compiler) -> None:
    for rows in (1, 2, 3):
        log.admit(signature(f"float32[{rows}]"))
        log.execute(signature(f"float32[{rows}]"), compiler.compile)
    log.admit(signature("float32[1]"))  # known
    with pytest.raises(InvalidArgumentError) as raised:
        log.admit(signature("float32[4]"))
    for part in ("max_different_graphs=3", "args[0] is float32[4] now, it was float32[3]", "drop_last=True", "pad"):
        assert part in str(raised.value)
    assert compiler.count == 3


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "many"])
def test_the_most_is_a_number(most: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_different_graphs must be an int of at least 1"):
        CompilationLog(most, lambda: 0)
    with pytest.raises(InvalidArgumentError, match="max_different_graphs"), fake_tpu(max_different_graphs=most):
        pass


def test_what_is_said_about_inputs() -> None:
    x = torch.zeros(2, 3)
    found = describe_inputs([x, {"k": [x.long(), "text"]}, None], {"flag": True})
    assert dict(found) == {
        "args[0]": "float32[2, 3]",
        "args[1]['k'][0]": "int64[2, 3]",
        "args[1]['k'][1]": "'text'",
        "args[2]": "None",
        "flag": "True",
    }


# -- of a strategy --------------------------------------------------------------------------------------------------


def runtime_of(strategy: ts.TPUStrategy) -> FakeSpmdRuntime:
    runtime = strategy._system.runtime
    assert isinstance(runtime, FakeSpmdRuntime)
    return runtime


def test_the_log_of_a_strategy() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        runtime.program = (x.shape, layer.weight.grad is None)
        loss = layer(x).mean()
        loss.backward()
        return loss.detach()

    with fake_tpu(2) as strategy:
        runtime = runtime_of(strategy)
        with strategy.scope():
            layer = nn.Linear(3, 1, dtype=torch.float64)
        for counts in ((4, 4), (4, 4), (4, 4), (2, 2), (4, 4), (3, 1)):
            strategy.run(step, args=(rows_of(counts),))
        assert [one.run for one in strategy.compilations] == [0, 1, 3, 5]
        reasons = [one.reason for one in strategy.compilations]
        assert reasons[0] == "it is the first"
        assert reasons[2] == "args[0] is float64[2, 3] now, it was float64[4, 3]"
        assert reasons[3] == "replicas [0]: args[0] is float64[3, 3] now; replicas [1]: args[0] is float64[1, 3] now"
        assert "test_tpu_compilation.py:" in strategy.compilations[0].signature.step


def test_a_run_too_many_changes_nothing() -> None:
    called: list[int] = []

    def step(x: torch.Tensor) -> None:
        called.append(len(x))

    with fake_tpu(2, max_different_graphs=2) as strategy:
        for rows in (1, 2):
            strategy.run(step, args=(rows_of((rows, rows)),))
        executions = runtime_of(strategy).executions
        with pytest.raises(InvalidArgumentError, match=r"max_different_graphs=2"):
            strategy.run(step, args=(rows_of((3, 3)),))
        assert runtime_of(strategy).executions == executions
        strategy.run(step, args=(rows_of((1, 1)),))
        assert called == [1, 2, 1]


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

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    with fake_tpu(2) as strategy:
        for _ in range(2):
            strategy.run(step, args=(ts.PerReplica([torch.zeros(3), torch.zeros(3)]),), options=options)
        smaller = ts.PerReplica([torch.zeros(2), torch.zeros(2)])
        with pytest.raises(InvalidArgumentError, match=r"float32\[2\] now, it was float32\[3\]"):
            strategy.run(step, args=(smaller,), options=options)
        strategy.run(step, args=(smaller,))


def test_options_for_the_compiler_are_not_ignored() -> None:
    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match="XLA_FLAGS"):
        strategy.run(lambda: None, options=ts.RunOptions(xla_options={"a": 1}))
