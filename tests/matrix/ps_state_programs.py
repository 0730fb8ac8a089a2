"""What the cells of the table of state on parameter servers train, plainly and with functions on workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import torchstrat as ts
from tests.matrix import on_servers
from tests.matrix.table import assert_close

SECONDS = 60
ROUNDS = 5
EDITED = (0, 3)
"""The rounds before which the coordinator edits, and in which functions do."""


class Net(nn.Module):
    """Has state of every kind, and all of it matters to what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale = 1.0
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("holes", torch.tensor([0.5, float("nan")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.replaced = self.replaced + x.mean().detach()
        if self.training:
            self.mean.lerp_(x.mean(dim=0).detach(), 0.1)
            self.holes[0] += 0.02
        x = (x - self.mean) * self.scale * (1.5 if self.training else 1.0) + self.holes[0] + 0.01 * self.replaced
        shift = torch.tensor(0.1)  # of the default dtype
        return self.last(torch.tanh(self.first(x))) + shift * (1 + 0.01 * self.calls)  # type: ignore[no-any-return]


class Parts:
    """A plain class: functions that close over such a one are found again, and not packed anew each time."""

    def __init__(self, model: Net, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


Edit = Callable[[Parts], None]


class Program(NamedTuple):
    """One row in one column."""

    in_function: Edit | None = None
    edits_gradients: bool = False
    """The edit comes between backward and step, else at the function's end."""
    is_put_back: bool = False
    """What the function sets holds until it ends, by agreement."""
    is_a_copy: bool = False
    """What the function sets is its worker's own, by agreement."""
    raises: bool = False
    """In a function of its own, which raises at its end and makes no step."""
    outside: Edit | None = None
    """On the coordinator."""
    reads_first: bool = False
    leaves_gradients: bool = False
    """Functions without a step, for the next one to step with."""
    at_once: bool = False
    """As many functions at once as there are workers. All have read, and stepped, when the first writes."""
    is_last: bool = False
    """Of what several functions write at once the last stays, by agreement."""
    summed: str = ""
    """A buffer that the program has set to be a sum."""
    has_tensor_rate: bool = False


def build(program: Program) -> Parts:
    torch.manual_seed(0)
    model = Net().double()
    rate: Any = torch.tensor(0.1, dtype=torch.float64) if program.has_tensor_rate else 0.1
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters()), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.0 if program.at_once else 0.9)
    return Parts(model, optimizer)


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(ROUNDS)]


def step_of(
    parts: Parts, program: Program, meet: Callable[[], None] = lambda: None
) -> Callable[..., torch.Tensor | None]:
    """``meet`` returns when all functions that run at once have called it."""
    edit, edits_gradients = program.in_function, program.edits_gradients
    at_once, leaves_gradients = program.at_once, program.leaves_gradients

    def step(batch: torch.Tensor, edits: bool, raises: bool = False, steps: bool = True) -> torch.Tensor | None:
        model, optimizer = parts.model, parts.optimizer
        if steps and not leaves_gradients:
            optimizer.zero_grad()
        if at_once:  # commutes with itself: several at once come to what they come to one after the other
            output, loss = batch, torch.stack([p.sum() for p in model.parameters()]).sum()
        else:
            output = model(batch)
            loss = output.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if edits and edits_gradients and edit is not None:
            edit(parts)
        if steps and not raises:
            optimizer.step()
        if leaves_gradients and steps:
            optimizer.zero_grad()
        if at_once:
            meet()  # a step brings values of servers: what another function has written by then would be seen
        if edits and not edits_gradients and edit is not None:
            edit(parts)
        if raises:
            raise ZeroDivisionError
        return None if at_once else seen_by(parts, output)

    return step


def seen_by(parts: Parts, output: torch.Tensor) -> torch.Tensor:
    """What a function sees at its end."""
    model, optimizer = parts.model, parts.optimizer
    sizes = [torch.get_default_dtype().itemsize, int(model.training), int(model.last.training)]
    flags = [int(p.requires_grad) for p in model.parameters()]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    numbers = [*sizes, *flags, *rates, model.scale, float(model.calls), float(model.replaced)]
    return torch.cat([output.detach().reshape(-1), torch.tensor(numbers, dtype=torch.float64)])


def numbers_of(parts: Parts, returned: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the program has in the end, and what functions have returned."""
    model, optimizer, scheduler = parts.model, parts.optimizer, parts.scheduler
    found = {f"round {index}": value for index, value in enumerate(returned)}
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    for place, of_one in state["state"].items():
        found |= {f"{name} {place}": value.clone() for name, value in of_one.items() if isinstance(value, torch.Tensor)}
    found |= {f"rate {n}": torch.as_tensor(float(group["lr"])) for n, group in enumerate(state["param_groups"])}
    found["epoch"] = torch.tensor(scheduler.last_epoch)
    return found


def _edit_outside(parts: Parts, program: Program, index: int) -> None:
    if program.outside is not None and index in EDITED:
        if program.reads_first:
            parts.model.state_dict(), parts.optimizer.state_dict()
        program.outside(parts)


# -- plainly ----------------------------------------------------------------------------------------------------------


def plain(program: Program, workers: int) -> dict[str, torch.Tensor]:
    parts, returned = build(program), []
    step = step_of(parts, program)
    attributes = [parts.model.scale] * workers
    for index, batch in enumerate(batches()):
        edits = program.in_function is not None and index in EDITED
        _edit_outside(parts, program, index)
        worker = index % workers
        if program.is_a_copy:
            parts.model.scale = attributes[worker]
        before = settings_of(parts)
        if edits and program.raises:
            with suppress(ZeroDivisionError):
                step(batch, edits=True, raises=True)
            if program.is_put_back:
                before()
        if program.leaves_gradients:
            step(batch, edits=False, steps=False)
        for turn in range(workers if program.at_once else 1):
            found = step(batch, edits=edits and not program.raises and not (program.is_last and turn))
            if found is not None:
                returned.append(found)
        if program.is_put_back:
            before()
        attributes[worker] = parts.model.scale
        parts.scheduler.step()
    if program.is_a_copy:
        parts.model.scale = 1.0
    return numbers_of(parts, returned)


def settings_of(parts: Parts) -> Callable[[], None]:
    """Puts back what functions do not set for others."""
    modes = [(one, one.training) for one in parts.model.modules()]
    flags = [(one, one.requires_grad) for one in parts.model.parameters()]
    groups = [(group, dict(group), float(group["lr"])) for group in parts.optimizer.param_groups]
    dtype = torch.get_default_dtype()

    def put_back() -> None:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for group, values, rate in groups:
            group.update(values)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
        torch.set_default_dtype(dtype)

    return put_back


# -- on servers -------------------------------------------------------------------------------------------------------


class Turns:
    """Runs a function on one worker while all others are in a function that only reaches the same, and ends later."""

    def __init__(self, coordinator: Any, variables: list[Any], workers: int, function: Callable[..., Any]) -> None:
        self._coordinator, self._workers, self._calls = coordinator, workers, 0
        begun, self._released = variables
        released = self._released

        def in_turn(worker: int | None, begin_at: int, end_at: int, *args: Any) -> torch.Tensor | None:
            begun.assign_add(1)
            while int(begun.read_value()) < begin_at:  # so each worker has one
                time.sleep(0.001)
            if worker is None or coordinator.get_current_worker_index() == worker:
                return function(*args)  # type: ignore[no-any-return]
            while int(released.read_value()) < end_at:
                time.sleep(0.001)
            return None

        self._in_turn = in_turn

    def run(self, worker: int | None, *args: Any) -> torch.Tensor | None:
        """``worker`` None: on every worker, at once."""
        self._calls += 1
        numbers = (worker, self._calls * self._workers, self._calls)
        values = [self._coordinator.schedule(self._in_turn, args=(*numbers, *args)) for _ in range(self._workers)]
        while worker is not None and not any(map(_has_ended, values)):
            pass
        self._released.assign_add(1)
        self._coordinator.join(timeout=SECONDS)
        return next((found for value in values if (found := value.get(timeout=SECONDS)) is not None), None)


def _has_ended(value: Any) -> bool:
    try:
        value.get(timeout=0.001)
    except ts.errors.CommunicationTimeoutError:
        return False
    except Exception:  # the function's own, which `join` raises
        return True
    return True


def _meeting(came: Any, workers: int) -> Callable[[], None]:
    """For functions of which ``workers`` run at once, and the next ones when these have ended."""

    def meet() -> None:
        came.assign_add(1)
        count = int(came.read_value())
        all_of_these = -(-count // workers) * workers
        while int(came.read_value()) < all_of_these:
            time.sleep(0.001)

    return meet


def numbers_on_servers(program: Program, new_strategy: Callable[[], Any], workers: int) -> dict[str, torch.Tensor]:
    strategy = new_strategy()
    try:
        with strategy.scope():
            parts = build(program)
            *counts, stepped = [ts.Variable(torch.tensor(0), name=name) for name in ("begun", "released", "stepped")]
        coordinator = ts.ClusterCoordinator(strategy)
        if program.summed:
            strategy.extended.set_aggregation(parts.model, program.summed, "sum")
        turns, returned = Turns(coordinator, counts, workers, step_of(parts, program, _meeting(stepped, workers))), []
        for index, batch in enumerate(batches()):
            edits = program.in_function is not None and index in EDITED
            _edit_outside(parts, program, index)
            worker = index % workers
            if edits and program.raises:
                with suppress(ZeroDivisionError):
                    turns.run(worker, batch, True, True)
            if program.leaves_gradients:
                turns.run(worker, batch, False, False, False)
            edits = edits and not program.raises
            found = turns.run(None if program.at_once else worker, batch, edits)
            if found is not None:
                returned.append(found)
            parts.scheduler.step()
        return numbers_of(parts, returned)
    finally:
        strategy.close()


def check(program: Program, new_strategy: Callable[[], Any], workers: int) -> None:
    """Raises AssertionError where servers come to other numbers than a plain loop."""
    dtype = torch.get_default_dtype()
    try:
        wanted = plain(program, workers)
        torch.set_default_dtype(dtype)
        seen = numbers_on_servers(program, new_strategy, workers)
    finally:
        torch.set_default_dtype(dtype)
    assert_close(seen, wanted)
    extra = set(seen) - set(wanted)
    assert not extra, f"nobody else has {sorted(extra)}"


# -- random numbers ---------------------------------------------------------------------------------------------------


def draws(new_strategy: Callable[[], Any], column: str) -> list[torch.Tensor]:
    """What five functions draw; something is done to generators before, or in, the fourth."""
    torch.manual_seed(7)
    strategy, found = new_strategy(), []
    try:
        with strategy.scope():
            nn.Linear(1, 1)
        coordinator = ts.ClusterCoordinator(strategy)
        for index in range(ROUNDS):
            if column == "set" and index == 3:
                torch.manual_seed(99)
            if column == "draws" and index == 3:
                torch.rand(5)

            def function(index: int = index) -> torch.Tensor:
                drawn = torch.rand(3)
                if column == "in a function" and index == 2:
                    torch.manual_seed(5)
                    torch.rand(2)
                return drawn

            found.append(coordinator.schedule(function).get(timeout=SECONDS))
    finally:
        strategy.close()
    return found


def check_draws(new_strategy: Callable[[], Any], column: str) -> None:
    """Raises AssertionError where a function draws something else than in a job in which nothing is done, or what
    another one draws."""
    wanted, seen = draws(new_strategy, ""), draws(new_strategy, column)
    assert_close({str(n): v for n, v in enumerate(seen)}, {str(n): v for n, v in enumerate(wanted)})
    assert len({tuple(v.tolist()) for v in wanted}) == ROUNDS, "two functions have drawn the same"


# -- in a program of its own ------------------------------------------------------------------------------------------


def main() -> None:
    from tests.matrix.ps_state import check_in_processes

    on_servers.answer(partial(on_servers.on_one_cluster, "ps_state", check_in_processes))


if __name__ == "__main__":
    main()
