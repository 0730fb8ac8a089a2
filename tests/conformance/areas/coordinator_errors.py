"""How the errors of scheduled functions are reported, and what happens to the functions behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.clusters import bad, coordinated, counter_of, one
from tests.conformance.harness import Case, Difference, outcome
from tests.support.gates import close_gate, pass_gate
from torchstrat import RemoteValue


def divide_by_zero() -> torch.Tensor:
    return torch.tensor(1) // torch.tensor(0)


def reported_by_done(case: Case) -> dict[str, Any]:
    coordinator = coordinated(case)
    outcome(coordinator.schedule(bad).get)
    return {"done": outcome(coordinator.done), "second_done": outcome(coordinator.done)}


def join_after(fn: Callable[[], Any]) -> Callable[[Case], dict[str, Any]]:
    def operation(case: Case) -> dict[str, Any]:
        coordinator = coordinated(case)
        coordinator.schedule(fn)
        return {"join": outcome(coordinator.join)}

    return operation


def _ending(value: RemoteValue) -> str:
    ended = outcome(value.get)
    return type(ended).__name__ if isinstance(ended, Exception) else "ok"


def pending_cancelled(case: Case) -> dict[str, Any]:
    """Two functions occupy the workers; the next one fails; thirty stand behind it."""
    coordinator = coordinated(case)
    counter, increment = counter_of(coordinator)
    gate = close_gate("slow")

    def slow() -> None:
        pass_gate("slow")

    running = [coordinator.schedule(slow) for _ in range(2)]
    coordinator.schedule(bad)
    later = [coordinator.schedule(increment) for _ in range(30)]
    gate.set()
    joined = outcome(coordinator.join)
    endings = [_ending(value) for value in later]
    assert {_ending(value) for value in running} <= {"ok", "CancelledError"}
    return {
        "join": joined,
        "later_outcomes_all_ok_or_CancelledError": set(endings) <= {"ok", "CancelledError"},
        "counter_at_least_ok_results": counter.read_value().item() >= endings.count("ok"),
        "after": coordinator.schedule(one).fetch(),
    }


def _division(case: Case) -> None:
    """`join` raises what PyTorch raises for an integer division by zero: a RuntimeError."""
    error = join_after(divide_by_zero)(case)["join"]
    assert type(error) is RuntimeError, repr(error)
    assert str(error) == str(outcome(divide_by_zero))


OPS: dict[str, Callable[[Case], Any]] = {
    "error_reported_by_done": reported_by_done,
    "integer_division_by_zero": join_after(divide_by_zero),
    "pending_cancelled_after_error": pending_cancelled,
}
DIFFERS: dict[str, Difference] = {
    "coordinator_errors/integer_division_by_zero/001": Difference(20, _division),
}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {
    "slow_results": "is which of the running functions TensorFlow happened to cancel; here they always finish",
}
