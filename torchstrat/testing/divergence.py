"""Steps in which one replica goes its own way: they must end in an error that names it, and change nothing.

`observe` runs one under a strategy and tells what came of it; `check` says whether that is good enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import torchstrat as ts
from torchstrat.core.errors import ReplicaError, TorchstratError
from torchstrat.testing.training import Batch, Mlp, Snapshot, read, regression, squared_error

REPLICA = 1
"""The replica that diverges, in the middle of the second step."""


class StepFailedError(Exception):
    """What the diverging replica raises; a class of the user's own, which no library can know."""


Act = Callable[[str, Callable[[], object]], Any]
"""``act(call, make_call)``: makes the call, or not."""


@dataclass(frozen=True)
class Divergence:
    """One way to disagree."""

    name: str
    call: str
    """The call that replica 1 leaves out, as `diverging_step` names it; in errors, what the message has to contain."""
    mentions: tuple[str, ...]
    """The message has to contain one of these: the call by its name."""
    raises: bool = False
    """Whether replica 1 raises `StepFailedError` there, instead of leaving the call out."""


CASES = (
    Divergence("skips_backward", "backward", ("backward", "gradient", "step")),
    Divergence("skips_step", "step", ("step",)),
    Divergence("skips_all_reduce", "all_reduce", ("all_reduce",)),
    Divergence("skips_merge_call", "merge_call", ("merge_call",)),
    Divergence("raises_before_backward", "backward", (), raises=True),
    Divergence("raises_before_step", "step", (), raises=True),
    Divergence("raises_before_all_reduce", "all_reduce", (), raises=True),
)


@dataclass(frozen=True)
class Observed:
    """What one process saw of a diverging step. Picklable."""

    error: str | None
    """The message, or None if the step went through here."""
    error_classes: tuple[str, ...]
    before: Snapshot
    """The model as it was when the diverging step began, and after it had failed."""
    after: Snapshot


def observe(divergence: Divergence, strategy: ts.Strategy) -> Observed:
    """Train one good step, then one in which replica 1 diverges. Collective where the strategy is."""
    torch.manual_seed(20)
    with strategy.scope():
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    diverges = {"now": False}

    def step(batch: Batch) -> torch.Tensor:
        context = ts.get_replica_context()
        assert context is not None
        mine = diverges["now"] and context.replica_id_in_sync_group == REPLICA

        def act(call: str, make_call: Callable[[], object]) -> Any:
            if mine and call == divergence.call:
                if divergence.raises:
                    raise StepFailedError(f"replica {REPLICA} gives up before {call}")
                return None
            return make_call()

        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        act("all_reduce", lambda: context.all_reduce("sum", losses.detach().sum()))
        act("backward", losses.mean().backward)
        act("merge_call", lambda: context.merge_call(lambda strategy: None))
        act("step", optimizer.step)
        return losses.detach()

    batches = iter(strategy.distribute_dataset(regression((8, 8))))
    strategy.run(step, args=(next(batches),))
    before = read({"model": model})
    diverges["now"] = True
    error: Exception | None = None
    try:
        strategy.run(step, args=(next(batches),))
    except (TorchstratError, StepFailedError) as raised:
        error = raised
    classes = tuple(base.__name__ for base in type(error).__mro__) if error is not None else ()
    return Observed(str(error) if error is not None else None, classes, before, read({"model": model}))


def check(divergence: Divergence, observed: list[Observed]) -> None:
    """Raise `AssertionError` unless the divergence was reported well; ``observed`` are those of all processes."""
    for rank, seen in enumerate(observed):
        for name, value in seen.before.items():
            assert torch.equal(value, seen.after[name]), f"rank {rank}: {name} was changed by a step that failed"
    errors = [seen for seen in observed if seen.error is not None]
    assert errors, f"{divergence.name}: no process reported anything"
    if divergence.raises:
        assert any(StepFailedError.__name__ in seen.error_classes for seen in errors), (
            "the user's own error was replaced"
        )
        errors = [seen for seen in errors if StepFailedError.__name__ not in seen.error_classes]
    for seen in errors:
        text = str(seen.error)
        assert TorchstratError.__name__ in seen.error_classes, f"{seen.error_classes}: {text}"
        assert f"replica {REPLICA}" in text or f"rank {REPLICA}" in text, f"the message does not name the one: {text}"
        assert not divergence.mentions or any(call in text for call in divergence.mentions), (
            f"the message names none of the calls {list(divergence.mentions)}: {text}"
        )
    if len(observed) == 1 and not divergence.raises:
        assert ReplicaError.__name__ in observed[0].error_classes, observed[0].error_classes
