"""How gradients come about, and what is done with them before a step and in it: one program for each pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.matrix.gradient_faults import FAULTS
from tests.matrix.gradient_updates import COLUMNS, Column
from tests.matrix.places import TPU, launch_of, opened
from tests.matrix.table import RIGHT, Cell, Expected, Table, assert_close, documented, refused
from torchstrat.errors import ContextError, UnsupportedError

PLACES = (
    *("mirrored x2", "central_storage x2", "torchrun mirrored", "torchrun multi_worker_mirrored"),
    *("torchrun central_storage", "torchrun central_storage on sockets", TPU),
)
Batch = tuple[torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two biases that are added up have gradients in one piece of memory."""

    def __init__(self, *, embeds: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(6, 5, sparse=True) if embeds else nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.abs().mul(10).long() % 6).mean(dim=1) if isinstance(self.first, nn.Embedding) else None
        return self.last(torch.tanh(self.first(x) if hidden is None else hidden))


class Sums(nn.Module):
    """PyTorch lets the gradients of ``one`` and ``other`` have the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.one.unsqueeze(0) + self.other.unsqueeze(0)
        return self.last(x * both)


class Shifted(Net):
    """The gradient of a sum is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift.sum()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError("this pass fails")


def mean_loss(forward: Forward, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (forward(x) - y).square().mean()


# -- rows: each makes the gradients of one batch -----------------------------------------------------------------------


def one_backward(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    mean_loss(forward, x, y).backward()


def several(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    (mean_loss(forward, x, y) / 2).backward()
    (mean_loss(forward, -x, y) / 3).backward()


def create_graph(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    mean_loss(forward, x, y).backward(create_graph=True)
    (0.1 * sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)).backward()


def autograd_grad(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(mean_loss(forward, x, y), parameters), strict=True):
        p.grad = gradient


def into_flat_buffer(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=next(model.parameters()).dtype)
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    mean_loss(forward, x, y).backward()


def nan_without_weight(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    """Rows that are not numbers do not count; a replica may well have no others, and a loss of nan."""
    valid = x.isfinite().all(dim=1)
    context = ts.get_replica_context()
    if ts.has_strategy() and context is not None:
        context.set_weight(int(valid.sum()))
    if valid.any():
        x, y = x[valid], y[valid]
    mean_loss(forward, x, y).backward()


def after_one_that_raised(model: nn.Module, forward: Forward, x: torch.Tensor, y: torch.Tensor) -> None:
    before = [p.grad for p in model.parameters()]
    try:
        model.last(_Raises.apply(torch.tanh(model.first(x)))).sum().backward()
    except ArithmeticError:
        for p, gradient in zip(model.parameters(), before, strict=True):
            p.grad = gradient
    mean_loss(forward, x, y).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.tanh_()  # which needs the combined one


@dataclass(frozen=True)
class Row:
    """Where gradients come from."""

    name: str
    backward: Callable[[nn.Module, Forward, torch.Tensor, torch.Tensor], None] = one_backward
    model: Callable[[], nn.Module] = Net
    over: int = 1
    """How many runs make one update."""
    blocks: int = 0
    """How many `no_sync` blocks are around each of the runs but the last."""
    traits: frozenset[str] = field(default_factory=frozenset)
    """What rules below go by."""


ROWS = (
    Row("one backward"),
    Row("several", several, traits=frozenset({"several"})),
    Row("accumulated", over=2, traits=frozenset({"several"})),
    Row("no_sync nested", over=2, blocks=2, traits=frozenset({"several", "no_sync"})),
    Row("create_graph", create_graph, traits=frozenset({"several", "graph"})),
    Row("autograd.grad", autograd_grad, traits=frozenset({"by hand"})),
    Row("autograd.grad, expanded", autograd_grad, model=Shifted, traits=frozenset({"by hand", "expanded"})),
    Row("sparse", model=partial(Net, embeds=True), traits=frozenset({"sparse"})),
    Row("shared memory", model=Sums, traits=frozenset({"shared"})),
    Row("views of one flat buffer", into_flat_buffer, traits=frozenset({"flat"})),
    Row("nan under weight 0", nan_without_weight, traits=frozenset({"nan"})),
    Row("a backward that raised", after_one_that_raised, traits=frozenset({"raises"})),
)


# -- cells -------------------------------------------------------------------------------------------------------------


def why_left_out(row: Row, column: Column) -> str:
    """Why a pair has no cell; "" where it has."""
    for trait, other, reason in LEFT_OUT:
        if trait in row.traits and other in column.traits:
            return reason
    if "own gradients" in column.traits and "by hand" not in row.traits:
        return "it updates by hand with what torch.autograd.grad gave, and looks at no .grad"
    return ""


LEFT_OUT = (
    ("by hand", "accumulates", "torch.autograd.grad accumulates nothing, so such hooks are not called"),
    ("graph", "changes in backward", "PyTorch refuses it: the second pass needs the values that the first has changed"),
    ("graph", "compiled", "PyTorch refuses it: AOT's backward passes cannot be differentiated again"),
    ("graph", "reentrant", "PyTorch refuses it: reentrant checkpoints cannot be differentiated twice"),
    ("graph", "half", "a penalty on bfloat16 gradients has no digits to compare"),
    ("expanded", "in place", "PyTorch refuses it: the elements of such gradients are one in memory"),
    ("expanded", "contiguous", "PyTorch itself takes such gradients for contiguous there, and reads beyond them"),
    ("by hand", "reentrant", "PyTorch refuses it: reentrant checkpoints do not go with torch.autograd.grad"),
    ("sparse", "dense only", "PyTorch refuses it: not for sparse gradients"),
    ("shared", "in place", "PyTorch itself does to such gradients twice what it does in place"),
    ("shared", "accumulates twice", "PyTorch itself adds to such gradients twice"),
    ("flat", "frees", 'a freed gradient is no view of the buffer any more: the row "one backward" has it'),
    ("raises", "changes in backward", "hooks have stepped before the pass raises, in a plain program too"),
    ("raises", "closure", "what a step does when its closure has raised is the optimizer's affair"),
    ("nan", "half", "the row is about weights, and float64 shows them"),
)


_IN_ONE_PROGRAM = "on a TPU one program is recorded for all replicas"


def expected_on_tpu(row: Row, column: Column) -> Expected:
    if "nan" in row.traits:
        return refused(ContextError, r"int\(tensor\) in a step needs a value", _IN_ONE_PROGRAM)
    if "raises" in row.traits or column.name in ("module backward hooks", "checkpointed, reentrant"):
        return refused(UnsupportedError, "torch.autograd.Function that cannot run for all replicas", _IN_ONE_PROGRAM)
    if column.name == "checkpointed":
        return refused(UnsupportedError, "computed again by torch.utils.checkpoint.*global_view=True", _IN_ONE_PROGRAM)
    if "sparse" in row.traits and column.name.startswith("sam-like"):
        return refused(UnsupportedError, "sparse tensor.*sparse=False", "TPUs have none")
    return RIGHT


def expected(column: Column) -> Expected:
    if "own gradients" in column.traits:
        return documented("what the first replica did counts", warns="each in another way.*all_reduce.*p.grad = g")
    return RIGHT


def batches(row: Row, dtype: torch.dtype) -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    counts = (8, 8, 8, 8) if "nan" in row.traits else (8, 6, 8, 7)
    found = [
        (torch.randn(count, 6, generator=draw, dtype=dtype), torch.randn(count, 3, generator=draw, dtype=dtype))
        for count in counts
    ]
    if "nan" in row.traits:
        found[1][0][4:] = torch.nan
        found[2][0][:5] = torch.nan
    return found


@dataclass(frozen=True)
class Program:
    """A pair's program, as its user would write it."""

    row: Row
    column: Column

    def build(self) -> tuple[nn.Module, Callable[[Batch], torch.Tensor], Callable[[Batch], torch.Tensor]]:
        """The model, a run that updates it, and one that only accumulates."""
        torch.manual_seed(0)
        model = self.row.model()
        forward, update = self.column.make(model)

        def compute(batch: Batch) -> None:
            self.row.backward(model, forward, *batch)

        def step(batch: Batch) -> torch.Tensor:
            update(lambda: compute(batch))
            return batch[0].new_zeros(())

        def accumulate(batch: Batch) -> torch.Tensor:
            compute(batch)
            return batch[0].new_zeros(())

        return model, step, accumulate

    def plain(self, moved_by: int | None = None) -> dict[str, torch.Tensor]:
        """Its numbers without a strategy; ``moved_by``: a seed, to move every weight by one ulp first."""
        model, step, accumulate = self.build()
        if moved_by is not None:
            move_by_one_ulp(model, moved_by)
        for index, batch in enumerate(batches(self.row, self.column.dtype)):
            self.is_accumulating(index) and accumulate(batch)
            self.is_accumulating(index) or step(batch)
        return numbers(model)

    def under(self, strategy: Any) -> dict[str, torch.Tensor]:
        with strategy.scope():
            model, step, accumulate = self.build()
        for index, batch in enumerate(strategy.distribute_dataset(batches(self.row, self.column.dtype))):
            with ExitStack() as stack:
                run = step
                if self.is_accumulating(index):
                    run = accumulate
                    for _ in range(self.row.blocks):
                        stack.enter_context(strategy.no_sync())
                    if self.row.blocks > 1:  # the inner one is over, the outer one goes on
                        with strategy.no_sync():
                            pass
                strategy.run(run, args=(batch,))
                is_looked_at = self.row.blocks and self.is_accumulating(index) and "hooks" not in self.column.name
                # A TPU's program combines them at once: the documents say so, and the sums are the same.
                if is_looked_at and not isinstance(strategy, ts.TPUStrategy):
                    require_own_gradients(strategy, next(model.parameters()))
        return numbers(model)

    def is_accumulating(self, index: int) -> bool:
        return (index + 1) % self.row.over != 0


def require_own_gradients(strategy: Any, parameter: torch.Tensor) -> None:
    """Under `no_sync` each replica has its own."""
    own = strategy.gather(strategy.run(lambda: parameter.grad.unsqueeze(0)), axis=0)
    assert not torch.equal(own[0], own[1]), "gradients were combined under no_sync"


def move_by_one_ulp(model: nn.Module, seed: int) -> None:
    """Of bfloat16, in which the column computes."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + (torch.randint(0, 2, p.shape, generator=draw) * 2 - 1) * 2.0**-8)


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(dtype)
    return stack


def check(row: Row, column: Column, place: str) -> None:
    program = Program(row, column)
    with default_dtype(column.dtype), column.around() if column.around else nullcontext():
        wanted = program.plain()
        tolerance = 1e-10
        if column.dtype is not torch.float64:
            moved = [program.plain(moved_by=seed) for seed in range(5)]
            tolerance = 3 * max(float((one[n] - wanted[n]).abs().max()) for one in moved for n in wanted)
        with opened(place) as strategy:
            seen = program.under(strategy)
    if "own gradients" in column.traits and place != TPU:  # which combines what a step assigns to .grad
        return  # what comes of it is the first replica's; the warning is what counts
    assert all(number.isfinite().all() for number in wanted.values()), "the plain program has no numbers"
    assert_close(seen, wanted, tolerance)


def make_cells() -> Iterator[Cell]:
    for row, column, place in itertools.product(ROWS, COLUMNS, PLACES):
        if not why_left_out(row, column):
            verdict = expected_on_tpu(row, column) if place == TPU else expected(column)
            yield Cell(row.name, column.name, place, partial(check, row, column, place), verdict)


TABLE = Table(
    "gradients",
    "Which gradients does an update use, whatever they come from and whatever looks at them on the way?",
    make_cells,
    always=(
        "accumulated | hooks that a step registers | torchrun central_storage on sockets",
        "autograd.grad | clip by norm | torchrun central_storage on sockets",
        "autograd.grad, expanded | module backward hooks | torchrun multi_worker_mirrored",
        "nan under weight 0 | fused | torchrun multi_worker_mirrored",
        "no_sync nested | hooks that a step registers | torchrun central_storage",
        "no_sync nested | hooks that clip | central_storage x2",
        "no_sync nested | hooks that update by hand | mirrored x2",
        "one backward | wrapper | torchrun central_storage",
        "views of one flat buffer | fused | torchrun central_storage",
    ),
    faults=FAULTS,
    alike=launch_of,
)
