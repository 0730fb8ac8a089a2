"""Rules about gradients switched off one by one, and the cells that have to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.matrix.table import PlantedFault
from torchstrat.core import gradients, variables
from torchstrat.replicas import gradient_reducer, gradient_synchronizer, optimizer_step
from torchstrat.replicas.in_process import gradients as in_process_gradients
from torchstrat.replicas.per_process import step_policies
from torchstrat.replicas.state import DifferingEdits

Place = tuple[Any, str]


@contextmanager
def put(instead: Any, *places: Place) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def nothing(*arguments: Any, **options: Any) -> None:
    return None


def no(*arguments: Any, **options: Any) -> bool:
    return False


def one_flag(self: Any, active: bool) -> None:
    self._no_sync = int(active)


def never_over(self: Any) -> Any:
    if self._ready is None:
        self._open_pass()
    return self._ready


def almost_nothing(self: Any, tensor: torch.Tensor) -> tuple[float, float]:
    before, after = _factors_of(self, tensor)
    return before or 1e-300, after


_factors_of = gradient_reducer.GradientReducer._factors_of
_BUCKETS = gradient_synchronizer.GradientSynchronizer


def _both(row: str, column: str, *places: str) -> tuple[str, ...]:
    return tuple(f"{row} | {column} | {place}" for place in places or ("mirrored x2", "torchrun mirrored"))


def _fault(name: str, plant: Callable[[], AbstractContextManager[object]], *cells: str) -> PlantedFault:
    return PlantedFault(name, plant, cells)


FAULTS = (
    _fault(
        "hooks of the user's own come first",
        partial(put, nothing, (gradients, "_put_first")),
        *_both("accumulated", "hooks that update by hand", "torchrun mirrored"),
    ),
    _fault(
        "hooks after accumulation see one replica's gradient",
        partial(put, nothing, (gradients, "hooks_after_accumulation")),
        *_both("one backward", "hooks that update by hand", "mirrored x2"),
    ),
    _fault(
        "hooks on a gradient see one replica's",
        partial(put, nothing, (gradients, "hooks_on_gradient")),
        *_both("one backward", "tensor hooks that clamp", "torchrun central_storage"),
    ),
    _fault(
        "shared memory is not looked for",
        partial(put, no, (gradient_reducer, "share_memory"), (gradient_synchronizer, "share_memory")),
        *_both("shared memory", "foreach"),
    ),
    _fault(
        "combined gradients have no graphs",
        partial(put, no, (gradient_synchronizer, "has_graph")),
        *_both("create_graph", "foreach", "torchrun multi_worker_mirrored"),
    ),
    _fault(
        "a step within a step is one of its own",
        partial(put, no, (optimizer_step.StepInProgress, "is_around")),
        *_both("one backward", "nested super().step()", "mirrored x2"),
    ),
    _fault(
        "what step(closure) does to gradients stays with the first replica",
        partial(put, nothing, (in_process_gradients.InProcessGradients, "spread_central")),
        *_both("one backward", "sam-like", "central_storage x2"),
    ),
    _fault(
        "what step(closure) does to gradients stays with the owner",
        partial(put, nothing, (step_policies._LeadersGradients, "_level")),
        *_both("one backward", "sam-like", "torchrun central_storage"),
    ),
    _fault(
        "a pass that raised goes on for ever",
        partial(put, never_over, (_BUCKETS, "_ready_in_pass")),
        *_both("a backward that raised", "clip by norm"),
    ),
    _fault(
        "no_sync does not nest",
        partial(put, one_flag, (_BUCKETS, "set_no_sync")),
        *_both("no_sync nested", "foreach"),
    ),
    _fault(
        "a weight of 0 is multiplied with",
        partial(put, almost_nothing, (gradient_reducer.GradientReducer, "_factors_of")),
        *_both("nan under weight 0", "foreach", "torchrun multi_worker_mirrored"),
    ),
    _fault(
        "what the compiler makes counts as the program's",
        partial(put, no, (variables, "is_compiler_at_work")),
        *_both("one backward", "compiled optimizer", "mirrored x2"),
    ),
    _fault(
        "what is assigned by hand is clipped as it is",
        partial(put, nothing, (optimizer_step, "put_clipping_hook")),
        *_both("autograd.grad", "clip by norm", "torchrun mirrored"),
    ),
    _fault(
        "different edits are not told of",
        partial(put, nothing, (DifferingEdits, "report")),
        *_both("autograd.grad", "update by hand, each with its own", "torchrun central_storage"),
    ),
)
