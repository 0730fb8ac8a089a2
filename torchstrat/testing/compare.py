"""The same program plainly and under each strategy: where do its numbers begin to differ?

::

    def build():
        model = torch.nn.Linear(6, 3)
        return model, torch.optim.Adam(model.parameters())

    def step(program, batch):
        model, optimizer = program
        ...

    if __name__ == "__main__":  # the processes that it starts import this module
        print(compare(build, step, batches))

or the command ``torchstrat verify module:build module:step module:batches``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrat.core.errors import InvalidArgumentError, TorchstratError, WrongTypeError
from torchstrat.core.randomness import state_of
from torchstrat.core.reachable import is_library, slots_of
from torchstrat.core.terminal import named_object, parser_with_examples
from torchstrat.core.values import require_callable
from torchstrat.core.variable.variable import Variable
from torchstrat.data import rows, unmarked
from torchstrat.strategies.strategy import Strategy
from torchstrat.testing import contract
from torchstrat.testing.spawn import Workers, WorkersError
from torchstrat.testing.training import Snapshot, dtype_and_seed, read

__all__ = ["STRATEGIES", "Comparison", "Finding", "compare"]

_TORCHRUN = "torchrun "
_SERVERS = "parameter_server"
STRATEGIES = (*contract.IN_PROCESS, *(_TORCHRUN + name for name in contract.TORCHRUN), _SERVERS)
"""What can be compared: replicas in this process, one in each of two processes, and one worker with two servers."""

_FUNCTION_SECONDS = 120.0
_DRAWN = "the step draws random numbers, of which each replica has its own: leave them out, or draw them outside of it"


@dataclass(frozen=True)
class Finding:
    """What came of one strategy."""

    strategy: str
    verdict: Literal["right", "different", "refused", "failed"]
    """``refused``: an error of torchstrat's; ``failed``: any other, and a process that died or hung."""
    variable: str = ""
    """The first that differs, such as ``[0].weight``: item 0 of what ``build`` returned. Attributes of objects of the
    program's own are named, too: ``trainer.model.weight`` is ``model.weight``."""
    step: int | None = None
    """After which step it differs, counted from 0."""
    line: str = ""
    """``file:number: source`` of the first line of the step after which parameters, gradients or buffers differ."""
    text: str = ""
    """By how much it differs, or what the error says."""

    def __str__(self) -> str:
        if self.verdict == "right":
            return f"right      {self.strategy}"
        where = f"{self.variable} after step {self.step}" if self.step is not None else ""
        parts = [part for part in (where, self.line and f"at {self.line}", self.text) if part]
        return f"{self.verdict:<10} {self.strategy}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Comparison:
    """All findings; prints as a line for each strategy."""

    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        """Whether each strategy gives the plain numbers, or refuses the program by name."""
        return all(finding.verdict in ("right", "refused") for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


@dataclass
class _Recording:
    steps: list[Snapshot] = field(default_factory=list)
    """What everything is after each step."""
    lines: list[tuple[int, Snapshot]] = field(default_factory=list)
    """Of one step on the first replica: line number, and what everything is after that line."""
    draws: list[bool] = field(default_factory=list)
    """Of each step, whether it has drawn random numbers: of the process's generators, known for the plain program."""


@dataclass(frozen=True)
class _Program:
    build: Callable[[], object]
    step: Callable[[Any, Any], object]
    batches: Sequence[object]
    dtype: torch.dtype
    seed: int

    def own_batches(self) -> list[object]:
        """For one run alone, for a step may change its batch (``batch.pop("labels")``, ``x.sub_(mean)``)."""
        return copy.deepcopy(list(self.batches))

    def conditions(self) -> ExitStack:
        """The default dtype and the seeds of the generators that a program uses without making them."""
        stack = dtype_and_seed(self.dtype, self.seed)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        random.seed(self.seed)
        np.random.seed(self.seed)
        return stack


def compare(
    build: Callable[[], object],
    step: Callable[[Any, Any], object],
    batches: Sequence[object] | Callable[[], Sequence[object]],
    strategies: Sequence[str] = STRATEGIES,
    *,
    tolerance: float = 1e-10,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Comparison:
    """Run a program plainly and under each strategy, and find the first variable, step and line that differ.

    Dropout and other random numbers differ between replicas by design: leave them out; a finding says where the step
    draws some. The plain program is run twice, to see that nothing lasts from one run to the next. Blocks; starts
    processes for the strategies that need them.

    Args:
        build: Makes modules, optimizers and whatever else the step needs and returns them, in any nest of tuples,
            lists, dicts and objects of the program's own. What is in there is compared: parameters, buffers, tensors,
            ``ts.Variable``, settings of optimizers and schedulers. Called in the strategy's scope.
        step: ``step(program, batch)``: a plain training step, on what ``build`` returned.
        batches: Global batches, split over replicas on dim 0 of each tensor; or a function that makes them. Floating
            tensors are converted to ``dtype``.
        strategies: Names in `STRATEGIES`.
        tolerance: The largest difference, relative to the larger of 1 and the plain number; for variables of smaller
            dtypes at least what their rounding makes (2e-6 in float32).
        dtype: The default dtype while the program is built and run.
        seed: Of the generators of torch, NumPy and Python, before the program is built.

    Raises:
        InvalidArgumentError: an unknown strategy, no batches, nothing to compare in what ``build`` returns, or a plain
            program that gives other numbers when it is run again. What the plain program raises is not caught.
    """
    require_callable(build, "compare(build=…)")
    require_callable(step, "compare(step=…)")
    strategies = [strategies] if isinstance(strategies, str) else strategies
    unknown = sorted(set(strategies) - set(STRATEGIES))
    if unknown:
        raise InvalidArgumentError(
            f"no strategy is called {', '.join(unknown)}; there are {', '.join(map(repr, STRATEGIES))}. "
            "The shell needs the quotes around names with a space."
        )
    given = batches() if callable(batches) else batches
    if not isinstance(given, Iterable):
        raise WrongTypeError(
            "compare(batches=…) needs a list of global batches, or a function that makes one; got "
            f"{type(given).__name__} {given!r:.80}."
        )
    made = list(given)
    if not made:
        raise InvalidArgumentError("batches is empty; give at least one global batch.")
    program = _Program(build, step, [rows.map_leaves(lambda leaf: _as(leaf, dtype), one) for one in made], dtype, seed)
    with _Launcher(program) as launcher:
        plain = _run(program, None)
        _require_repeatable(plain, _run(program, None), tolerance)
        return Comparison(tuple(_find(program, plain, name, launcher, tolerance) for name in strategies))


def _require_repeatable(plain: _Recording, again: _Recording, tolerance: float) -> None:
    if not any(plain.steps):
        raise InvalidArgumentError(
            "build returned no module, optimizer, scheduler or tensor, so that there is nothing to compare; return "
            "what the step trains, in a tuple, list, dict or object."
        )
    for index, (first, second) in enumerate(zip(plain.steps, again.steps, strict=True)):
        differs = _first_difference(first, second, tolerance)
        if differs is not None:
            raise InvalidArgumentError(
                f"the plain program gives other numbers when it is run again: {differs[0]} after step {index} "
                f"{differs[1]}. Make all that the step uses and changes anew in build, and seed generators of your own "
                "there."
            )


def _as(leaf: object, dtype: torch.dtype) -> object:
    """A leaf of the graph, too, for others cannot be copied."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    values = leaf.detach()
    return (values.to(dtype) if leaf.is_floating_point() else values).requires_grad_(leaf.requires_grad)


def _find(program: _Program, plain: _Recording, name: str, launcher: _Launcher, tolerance: float) -> Finding:
    try:
        seen = launcher.record(name)
    except Exception as error:
        if isinstance(error, TorchstratError) and not isinstance(error, WorkersError):
            return Finding(name, "refused", text=f"{type(error).__name__}: {error}")
        told = traceback.format_exception_only(error)
        return Finding(name, "failed", text=" ".join(part.strip() for part in told))
    for index, (wanted, numbers) in enumerate(zip(plain.steps, seen.steps, strict=True)):
        differs = _first_difference(wanted, numbers, tolerance)
        if differs is not None:
            line = "" if name == _SERVERS else _differing_line(program, name, launcher, index, tolerance)
            drawn = f"; {_DRAWN}" if any(plain.draws[: index + 1]) else ""
            return Finding(name, "different", differs[0], index, line, differs[1] + drawn)
    return Finding(name, "right")


def _differing_line(program: _Program, name: str, launcher: _Launcher, index: int, tolerance: float) -> str:
    """The first line of the step of that index after which not everything is as in the plain program."""
    code = _code_of(program.step)
    if code is None:
        return ""
    wanted, seen = _run(program, None, index).lines, launcher.record(name, index).lines
    for (number, before), (other, after) in zip(wanted, seen, strict=False):
        if number != other or _first_difference(before, after, tolerance) is not None:
            source = linecache.getline(code.co_filename, number).strip()
            return f"{code.co_filename}:{number}: {source}"
    return ""


def _code_of(step: Callable[..., object]) -> CodeType | None:
    """Of the program's own function, behind decorators, `functools.partial` and ``__call__``."""
    while isinstance(step, functools.partial):
        step = step.func
    step = inspect.unwrap(step)
    called = step if hasattr(step, "__code__") else type(step).__call__
    code = getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _first_difference(wanted: Snapshot, seen: Snapshot, tolerance: float) -> tuple[str, str] | None:
    for name in dict.fromkeys([*wanted, *seen]):
        if (name in wanted) != (name in seen):
            return name, "is there in the plain program only" if name in wanted else "is not there in the plain program"
        kind = wanted[name].dtype
        allowed = max(tolerance, 16 * torch.finfo(kind).eps) if kind.is_floating_point or kind.is_complex else tolerance
        left, right = (one.detach().cpu().to(torch.complex128) for one in (wanted[name], seen[name]))
        if left.shape != right.shape:
            return name, f"has shape {tuple(right.shape)} for {tuple(left.shape)}"
        if not torch.allclose(right, left, allowed, allowed, equal_nan=True):
            return name, f"is off by {float((right - left).abs().nan_to_num(torch.inf).max()):.3g}"
    return None


def _run(program: _Program, strategy: Strategy | None, traced: int | None = None) -> _Recording:
    """All steps, plainly or under a synchronous strategy; every process of its launch calls this."""
    recording = _Recording()
    with program.conditions():
        with strategy.scope() if strategy is not None else nullcontext():
            built = program.build()
        given = program.own_batches()
        batches = map(unmarked, given) if strategy is None else strategy.distribute_dataset(given)
        for index, batch in enumerate(batches):
            step = _traced(program.step, recording.lines) if index == traced else program.step
            if strategy is None:
                before = _drawn()
                step(built, batch)
                recording.draws.append(_drawn() != before)
            else:
                strategy.run(_bound(step, built), args=(batch,))
            recording.steps.append(read(_watched(built)))
    return recording


def _drawn() -> tuple[object, ...]:
    """Where the process's generators are."""
    _, keys, *others = np.random.get_state()  # among them, whether the second of a pair of normal numbers is waiting
    return state_of().numpy().tobytes(), np.asarray(keys).tobytes(), others, random.getstate()


def _bound(step: Callable[[Any, Any], object], built: object) -> Callable[[object], object]:
    """The step as a function of a batch, which closes over the program as a user's does."""
    return lambda batch: step(built, batch)


def _run_on_servers(program: _Program) -> _Recording:
    """All steps on a cluster of threads with one worker and two servers, joined one by one."""
    import torchstrat as ts
    from torchstrat.testing.fake_cluster import FakeCluster

    recording = _Recording()
    with program.conditions(), FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(None, rows_only=False)
        with strategy.scope():
            built = program.build()
        coordinator = ts.ClusterCoordinator(strategy)
        step = _bound(program.step, built)
        for batch in program.own_batches():
            coordinator.schedule(lambda one: strategy.run(step, args=(one,)), args=(unmarked(batch),)).get(
                _FUNCTION_SECONDS
            )
            strategy.extended.pull()
            recording.steps.append(read(_watched(built)))
    return recording


def _run_in_process(row: contract.Row, program: _Program, traced: int | None) -> _Recording:
    strategy = row.make()
    try:
        return _run(program, strategy, traced)
    finally:
        strategy.close()


def _run_as_process(packed: bytes, name: str, traced: int | None) -> _Recording | TorchstratError:
    """In a process of a launch. Errors of ours are handed back: to a group of processes every error is a failure."""
    try:
        return _run_in_process(contract.TORCHRUN[name], cloudpickle.loads(packed), traced)
    except TorchstratError as error:
        return error


class _Launcher:
    """Runs the program wherever a strategy's name says; keeps the processes between runs."""

    def __init__(self, program: _Program) -> None:
        self._program = program
        self._workers = Workers(2)

    def __enter__(self) -> _Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def record(self, name: str, traced: int | None = None) -> _Recording:
        if name == _SERVERS:
            return _run_on_servers(self._program)
        if not name.startswith(_TORCHRUN):
            return _run_in_process(contract.IN_PROCESS[name], self._program, traced)
        row = name.removeprefix(_TORCHRUN)
        answers = self._workers.run(_run_as_process, cloudpickle.dumps(self._program), row, traced)
        for answer in answers:
            if isinstance(answer, TorchstratError):
                raise answer
        first, second = answers
        # A rank that differs from the first one shows in the steps, under its own name.
        for mine, others in zip(first.steps, second.steps, strict=True):
            differ = {key: number for key, number in others.items() if _differ(mine.get(key), number)}
            mine.update({f"{key} on rank 1": number for key, number in differ.items()})
        recording: _Recording = first
        return recording


def _differ(left: torch.Tensor | None, right: torch.Tensor) -> bool:
    if left is None or (left.shape, left.dtype) != (right.shape, right.dtype):
        return True
    return not torch.allclose(left, right, 0.0, 0.0, equal_nan=True)


def _watched(built: object) -> dict[str, object]:
    """What is compared of what ``build`` returned, by name; parameters that only an optimizer has, too."""
    found: dict[str, object] = {}
    _watch(built, "", found, {})
    known = {id(one) for value in found.values() if isinstance(value, nn.Module) for one in value.parameters()}
    stepped = {
        f"{name}.group{place}.params[{index}]".lstrip("."): tensor
        for name, value in found.items()
        if isinstance(value, Optimizer)
        for place, group in enumerate(value.param_groups)
        for index, tensor in enumerate(group["params"])
        if id(tensor) not in known
    }
    return found | stepped


def _watch(built: object, name: str, found: dict[str, object], seen: dict[int, object]) -> None:
    if id(built) in seen:
        return
    seen[id(built)] = built
    if isinstance(built, nn.Module | Optimizer | LRScheduler | torch.Tensor):
        found[name] = built
    elif isinstance(built, Variable):
        found[name] = built.read_value
    elif isinstance(built, dict):
        for key, item in built.items():
            _watch(item, f"{name}[{key}]", found, seen)
    elif isinstance(built, list | tuple):
        for index, item in enumerate(built):
            _watch(item, f"{name}[{index}]", found, seen)
    elif not isinstance(built, type | FunctionType) and not is_library(type(built).__module__):
        attributes = {key: getattr(built, key, None) for key in slots_of(type(built))} | getattr(built, "__dict__", {})
        for key, item in attributes.items():
            _watch(item, f"{name}.{key}".lstrip("."), found, seen)


def _traced(step: Callable[[Any, Any], object], lines: list[tuple[int, Snapshot]]) -> Callable[[Any, Any], object]:
    """The step, which on the first replica notes what everything is after each of its own lines."""

    def traced(built: object, batch: object) -> object:
        import torchstrat as ts

        context = ts.get_replica_context()
        if context is not None and int(context.replica_id_in_sync_group) > 0:
            return step(built, batch)
        before = sys.gettrace()
        sys.settrace(_LineTracer(_code_of(step), built, lines))
        try:
            return step(built, batch)
        finally:
            sys.settrace(before)

    return traced


class _LineTracer:
    """A trace function that looks at the program between the lines of one function."""

    def __init__(self, code: CodeType | None, built: object, lines: list[tuple[int, Snapshot]]) -> None:
        self._code, self._built, self._lines = code, built, lines
        self._previous: int | None = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> _LineTracer | None:
        if frame.f_code is not self._code:
            return None
        if event in ("line", "return"):
            if self._previous is not None:
                self._lines.append((self._previous, self._look()))
            self._previous = frame.f_lineno
        return self

    def _look(self) -> Snapshot:
        held = {
            name: value for name, value in _watched(self._built).items() if isinstance(value, nn.Module | torch.Tensor)
        }
        gradients = {
            f"{name}.{parameter}.grad": tensor.grad
            for name, value in held.items()
            for parameter, tensor in (value.named_parameters() if isinstance(value, nn.Module) else [("", value)])
            if tensor.is_leaf and tensor.grad is not None
        }
        return {**read(held), **read(gradients)}


def main(words: Sequence[str]) -> int:
    """Print a line for each strategy; 0 if all of them give the plain numbers or refuse the program by name."""
    parser = parser_with_examples(
        "torchstrat verify",
        "Run a program plainly and under each strategy, and print the first variable, step and line that differ. See "
        "torchstrat.testing.compare.",
        (
            "torchstrat verify train:build train:step train:batches",
            "torchstrat verify train:build train:step train:batches 'mirrored x2' 'central_storage x2'",
        ),
    )
    parser.add_argument("build", metavar="MODULE:BUILD", help="makes modules and optimizers, and returns them")
    parser.add_argument("step", metavar="MODULE:STEP", help="step(program, batch), on what BUILD returned")
    parser.add_argument("batches", metavar="MODULE:BATCHES", help="global batches, or a function that makes them")
    of_these = f"of: {', '.join(map(repr, STRATEGIES))}; none: all"  # with a default, or argparse takes it for required
    parser.add_argument("strategies", metavar="STRATEGY", nargs="*", default=[], help=of_these)
    options = parser.parse_args(words)
    try:
        build, step, batches = (named_object(name) for name in (options.build, options.step, options.batches))
        comparison = compare(build, step, batches, options.strategies or STRATEGIES)
    except (InvalidArgumentError, WrongTypeError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{comparison}\n")
    return 0 if comparison.is_right else 1
