"""Every training case under every strategy with one replica per process: two processes as torchrun starts them."""

from __future__ import annotations

import gc
import os
import random
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.programs import wait_for
from tests.support.replicas import (
    BUFFERS,
    COMPILER,
    EVERY_LINE,
    buffer_after_two_runs,
    buffer_of_an_evaluated_module_after_a_failure,
    check_processes,
    own_buffers_after_a_failure,
    replica,
    run_case,
)
from torchstrat.errors import CommunicationError, NotSendableError, ReplicaDivergenceError, UnsupportedError
from torchstrat.testing import Workers, WorkersError, contract, divergence
from torchstrat.testing.cases_optimizers import FreeOfSchedules
from torchstrat.testing.training import Batch, Mlp, Training, one_device, plain_step, regression, squared_error

PROCESSES = 2
DIVERGENCE_SECONDS = (3, 40)
"""The strategy's timeout; the second where a machine is so busy that the first ends a call in which nobody diverges."""
every_row = pytest.mark.parametrize("row", contract.TORCHRUN)


ROWS = tuple(contract.TORCHRUN)
assert ROWS == ("mirrored", "multi_worker_mirrored", "central_storage", "central_storage on sockets")


def _rows_of(number: int, case: contract.Case) -> tuple[str, ...]:
    """Where a case runs always: what goes through all lines once under either strategy, over memory that processes
    share in one of them and over sockets in the other; any other under one of the launches."""
    if case.needs_compiler:  # "compiled" compiles as well, without inductor; and replicas of one process with it
        return ()
    if case.name in EVERY_LINE:
        return ROWS[number % 2], ROWS[3 - number % 2]
    return (ROWS[number % 4],)


CELLS = [
    pytest.param(
        case.name,
        row,
        id=f"{case.name}-{row}",
        marks=[
            *([] if row in _rows_of(number, case) else [pytest.mark.soak]),
            *(COMPILER if case.needs_compiler else ()),
        ],
    )
    for row in ROWS
    for number, case in enumerate(contract.CASES.values())
]
SOCKETS = ("multi_worker_mirrored", "central_storage on sockets")
SLOW = {(case, row) for case in divergence.CASES if case.raises and case.call != "backward" for row in SOCKETS}
DIVERGENCES = [
    # Of who raises the others learn through sockets after seconds, wherever that is: once.
    pytest.param(number, row, id=f"{case.name}-{row}", marks=[pytest.mark.soak] if (case, row) in SLOW else [])
    for number, case in enumerate(divergence.CASES)
    for row in contract.TORCHRUN
]


def run_cases(case_names: list[str], row_name: str) -> list[contract.Snapshot]:
    return [run_case(name, row_name) for name in case_names]


@pytest.mark.parametrize(("case", "row"), CELLS)
def test_numbers_of_one_device(case: str, row: str, two_processes: Workers) -> None:
    check_processes(case, two_processes.run(run_case, case, row, timeout_seconds=240))


@every_row
def test_one_strategy_after_the_other(row: str, two_processes: Workers) -> None:
    """Closing a strategy leaves nothing that the next one in the same processes would meet."""
    names = ["sgd_momentum", "batch_norm", "sgd_momentum"]
    for name, snapshots in zip(names, zip(*two_processes.run(run_cases, names, row), strict=True), strict=True):
        check_processes(name, list(snapshots))


def observe(divergence_index: int, row_name: str, seconds: int) -> divergence.Observed:
    first = contract.TORCHRUN[row_name].make()
    try:
        first.gather(torch.zeros(1), 0)  # on a busy machine one process may be seconds behind the other
        strategy = contract.TORCHRUN[row_name].make(timeout=timedelta(seconds=seconds))
    finally:
        first.close()
    try:
        return divergence.observe(divergence.CASES[divergence_index], strategy)
    finally:
        strategy.close()


@pytest.mark.parametrize(("index", "row"), DIVERGENCES)
def test_divergence_is_reported_after_the_timeout(index: int, row: str, two_processes: Workers) -> None:
    short, long = DIVERGENCE_SECONDS
    try:
        observed = two_processes.run(observe, index, row, short)
    except WorkersError as error:
        if f"waited {short:.1f} s in taking over" not in str(error):
            raise
        observed = two_processes.run(observe, index, row, long)
    divergence.check(divergence.CASES[index], observed)


PATIENT_SECONDS = 60
"""The strategy's timeout, where nobody has to wait for it."""


def close_while_another_stays(is_over: Path) -> float:
    """How long the first rank takes to be rid of a strategy in which it has called what the other never comes to, and
    of the error that told it so. The other keeps its strategy open until then."""
    strategy = contract.TORCHRUN["multi_worker_mirrored"].make(timeout=timedelta(seconds=PATIENT_SECONDS))

    def step() -> None:
        if replica() == 1:
            raise ValueError("no more")
        ts.get_replica_context().all_reduce("sum", torch.ones(2))

    errors: list[Exception] = []
    try:
        strategy.run(step)
    except (CommunicationError, ValueError) as error:
        errors.append(error)
    if not strategy.is_chief:
        wait_for(is_over.exists, "the other rank", 2 * PATIENT_SECONDS)
    began = time.monotonic()
    strategy.close()
    del strategy
    gc.collect()
    assert errors
    errors.clear()
    gc.collect()
    took = time.monotonic() - began
    is_over.touch()
    return took


class _Queue(nn.Linear):
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("rows", torch.ones(1, 2))

    @torch.no_grad()
    def edit(self) -> None:
        self.rows.mul_(2)
        self.weight.mul_(2)

    def grow(self) -> None:
        self.rows.data = torch.cat([self.rows, torch.zeros(2, 2)])
        self.weight.data = torch.cat([self.weight.data, torch.zeros(2, 2)])


def fail_after_growing(row: str) -> bool:
    strategy = contract.TORCHRUN[row].make()
    with strategy.scope():
        queue = _Queue()
    strategy.run(queue.edit)
    before = [value.tolist() for value in queue.state_dict().values()]

    def step() -> None:
        queue.edit()
        queue.grow()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(step)
    strategy.close()
    return before == [value.tolist() for value in queue.state_dict().values()]


@pytest.mark.parametrize("row", ["mirrored", "central_storage on sockets"])
def test_what_a_step_that_raises_has_made_larger_is_as_it_was(row: str, two_processes: Workers) -> None:
    assert two_processes.run(fail_after_growing, row) == [True, True]


class _HoldsItself(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.itself = [self]


def look_up_beside_a_dropped_model() -> tuple[list[list[float]], list[list[float]]]:
    """Each rank looks a row up; for one of them there is another model still, which Python has not collected."""
    strategy = contract.TORCHRUN["central_storage"].make()
    with strategy.scope():
        dropped = _HoldsItself()
    with strategy.scope():
        table = nn.Embedding(4, 2, max_norm=0.1)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.0)

    def step() -> None:
        table(torch.tensor([replica()])).sum().backward()
        optimizer.step()

    strategy.run(lambda: None)
    plain = table.weight.detach().clone()
    torch.nn.functional.embedding(torch.tensor([0, 1]), plain, max_norm=0.1)
    gc.disable()
    try:
        del dropped
        if strategy.is_chief:
            gc.collect()
        strategy.run(step)
    finally:
        gc.enable()
    strategy.close()
    return table.weight.tolist(), plain.tolist()


def test_tables_are_told_apart_where_one_rank_still_has_a_dropped_model(two_processes: Workers) -> None:
    for found, plain in two_processes.run(look_up_beside_a_dropped_model):
        assert found == plain


def test_a_call_that_another_never_comes_to_does_not_hold_up_who_closes(two_processes: Workers, tmp_path: Path) -> None:
    assert two_processes.run(close_while_another_stays, tmp_path / "over")[0] < PATIENT_SECONDS / 3


def run_hooked_half_way(row_name: str) -> tuple[list[float], list[float]]:
    """Each rank uses a layer of its own. What a hook on the first rank's sees that comes between two runs, and the
    gradients that there are in the end."""
    strategy = contract.TORCHRUN[row_name].make()
    try:
        with strategy.scope():
            layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(PROCESSES)])
        seen: list[float] = []

        def step() -> None:
            layers.zero_grad()
            layers[replica()](torch.full((1, 2), 6.0)).sum().backward()

        strategy.run(step)
        layers[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        strategy.run(step)
        return seen, [float(layer.weight.grad.sum()) for layer in layers]
    finally:
        strategy.close()


@every_row
def test_a_hook_that_comes_between_runs(row: str, two_processes: Workers) -> None:
    """A rank that does without a gradient meets those whose hooks look at it, though nobody did in earlier runs."""
    seen, gradients = zip(*two_processes.run(run_hooked_half_way, row), strict=True)
    assert seen == ([6.0], [])
    assert gradients == ([6.0, 6.0],) * PROCESSES


def moved_in_step(when: str) -> Training:
    """The step evaluates where its optimizer puts the weights, or only scales what the optimizer keeps."""
    model = Mlp()
    optimizer = FreeOfSchedules(model.parameters(), {"lr": 0.1})

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        if when == "before the step":
            optimizer.move(0.25)
        squared_error(model(batch[0]), batch[1]).mean().backward()
        optimizer.step()
        if when == "after the step":
            optimizer.move(0.5)
        losses = squared_error(model(batch[0]), batch[1]).detach()
        if when == "after the step":
            optimizer.move(-1.0)  # where they were
        if when == "scales what is kept":
            for kept in optimizer.state.values():
                kept["fast"].mul_(0.9)
        return losses

    return Training(step, {"model": model})


def run_moved_in_step(when: str, row_name: str) -> contract.Snapshot | str:
    case = contract.Case("moved_in_step", partial(moved_in_step, when))
    try:
        return contract.run_row(case, contract.TORCHRUN[row_name])
    except UnsupportedError as error:
        return str(error)


@every_row
@pytest.mark.parametrize("when", ["before the step", "after the step", "scales what is kept"])
def test_an_optimizer_that_moves_weights_within_a_step(row: str, when: str, two_processes: Workers) -> None:
    """By its state, which under central storage rank 0 alone has, of a class of the program's own."""
    results = two_processes.run(run_moved_in_step, when, row)
    if row.startswith("central") and when != "scales what is kept":
        assert all("as FreeOfSchedules's optimizer.move() does" in one and "between runs" in one for one in results)
        return
    case = contract.Case("moved_in_step", partial(moved_in_step, when))
    contract.check_agreement(case, results)
    contract.check(case, results[0], one_device(case, 1))


def keep_a_local_class(row_name: str) -> str:
    """The optimizer keeps what cannot be pickled, and the last batch is of one rank alone."""

    class Local:
        pass

    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["kept"] = Local()
            super().step()

    def build() -> Training:
        model = Mlp()
        return Training(plain_step(model, Keeping(model.parameters(), lr=0.1)), {"model": model})

    try:
        contract.run_row(contract.Case("kept", build, partial(regression, (4, 1))), contract.TORCHRUN[row_name])
    except (NotSendableError, CommunicationError) as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("row", ["mirrored", "multi_worker_mirrored"])
def test_what_cannot_be_pickled_is_named(row: str, two_processes: Workers) -> None:
    says = r"part of that cannot be pickled \(.*keep_a_local_class.<locals>.Local.*top level of a module"
    first, second = two_processes.run(keep_a_local_class, row)
    assert re.search(says, first)
    assert "replica 0 raised NotSendableError" in second


def draw_in_steps(row_name: str) -> list[list[float]]:
    """What each run has drawn from every generator but PyTorch's, the last from one that this rank has seeded for
    itself; the second rank has no rows in two runs."""
    random.seed(1)
    np.random.seed(1)
    own = torch.Generator().manual_seed(1)
    pythons, apart = random.Random(1), random.Random(10 + int(os.environ["RANK"]))
    numpys = {"of NumPy": np.random.default_rng(1)}
    optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.noise = torch.Generator().manual_seed(2)
    hidden = random.Random(3)

    class Mixing:
        def draw(self) -> float:
            return hidden.random()

    mixing = Mixing()

    def step(batch: torch.Tensor) -> torch.Tensor:
        drawn = [random.random(), np.random.rand(), torch.rand((), generator=own), pythons.random()]
        drawn += [torch.rand((), generator=optimizer.noise), mixing.draw()]
        drawn += [numpys["of NumPy"].random(), np.random.normal(), random.gauss(0.0, 1.0), apart.random()]
        return torch.tensor([float(one) for one in drawn])

    strategy = contract.TORCHRUN[row_name].make()
    try:
        seen = []
        for rows in (2, 1, 1, 2):
            (batch,) = strategy.distribute_dataset([torch.zeros(rows, 1)])
            drawn = strategy.local_results(strategy.run(step, args=(batch,)))
            seen.append(drawn[0].tolist() if drawn else [])
        return seen
    finally:
        strategy.close()


@every_row
def test_a_rank_without_rows_follows_what_the_others_draw(row: str, two_processes: Workers) -> None:
    """Every rank draws the same numbers from generators that are no stream of the replicas'."""
    first, second = two_processes.run(draw_in_steps, row)
    assert [len(drawn) for drawn in second] == [10, 0, 0, 10]
    for number in (0, 3):
        assert first[number][:-1] == second[number][:-1]
    apart = random.Random(11)
    assert [second[0][-1], second[3][-1]] == pytest.approx([apart.random(), apart.random()])


def decayed(p: nn.Parameter) -> None:
    p.grad += 0.1 * p.detach()


def replaced(p: nn.Parameter) -> None:
    p.grad = p.grad.clip(-0.1, 0.1)


def edit_parts(row_name: str, op: str) -> tuple[list[str], dict[str, float]]:
    """What a run under no_sync leaves is edited, and then used in every way: what is said of it, and the gradients
    where nothing is."""
    strategy = contract.TORCHRUN[row_name].make(gradient_reduce_op=op)
    told, made = [], {}
    try:
        with strategy.scope():
            layer = nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        p = layer.weight

        def step() -> None:
            layer(torch.full((1, 2), 1.0 + replica())).sum().backward()

        def run_again() -> None:
            with suppress(UnsupportedError):
                strategy.run(optimizer.step)
            strategy.run(optimizer.step)

        uses = {
            "a run": lambda: strategy.run(optimizer.step),
            "another run": run_again,
            "a step": optimizer.step,
            "a backward pass": lambda: (p.sum() * 0.0).backward(),
            "clipping": lambda: nn.utils.clip_grad_norm_([p], 1e9),
        }
        edits = {
            "decayed": lambda: decayed(p),
            "sign": lambda: p.grad.sign_(),
            "replaced": lambda: replaced(p),
            "zeroed": lambda: p.grad.zero_(),
            "as it was": lambda: None,
        }
        for edited, edit in edits.items():
            for used, use in uses.items():
                optimizer.zero_grad()
                with strategy.no_sync():
                    strategy.run(step)
                edit()
                case = f"{edited}, {used}"
                try:
                    use()
                    made[case] = float(p.grad.sum())
                except UnsupportedError as error:
                    told.append(case if "of Linear.weight (1, 2) was changed" in str(error) else str(error))
        return told, made
    finally:
        strategy.close()


@pytest.mark.parametrize("op", ["mean", "sum"])
@every_row
def test_edits_of_what_a_run_has_left_uncombined_are_refused(row: str, op: str, two_processes: Workers) -> None:
    """As where all replicas are in one process: an edit acts on one replica's part."""
    uses = ("a run", "another run", "a step", "a backward pass", "clipping")
    combined = {"mean": 3.0, "sum": 6.0}[op]
    for told, made in two_processes.run(edit_parts, row, op):
        assert told == [f"{edit}, {use}" for edit in ("decayed", "sign", "replaced") for use in uses]
        assert made == {f"{edit}, {use}": g for edit, g in (("zeroed", 0.0), ("as it was", combined)) for use in uses}


class NoRoom(torch.Tensor):
    """Of which there is no copy: it takes too much memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:
            raise MemoryError
        return super().__torch_function__(func, types, args, kwargs or {})


def begin_without_room(row: str) -> tuple[str, list[float], bool]:
    """The second rank has none for what a run keeps of buffers; then both train on their own, in plain PyTorch."""
    strategy, rank = contract.TORCHRUN[row].make(), int(os.environ["RANK"])
    try:
        with strategy.scope():
            model = nn.Linear(2, 1)
            model.register_buffer("large", torch.zeros(2).as_subclass(NoRoom) if rank else torch.zeros(2))
        outside = torch.random.get_rng_state()
        message = ""
        try:
            strategy.run(lambda: model(torch.rand(1, 2)).sum().backward())
        except (CommunicationError, MemoryError) as error:
            message = str(error) or "MemoryError"
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert model.weight.grad is not None
        return message, model.weight.grad[0].tolist(), bool(torch.random.get_rng_state().equal(outside))
    finally:
        strategy.close()


@every_row
def test_a_run_that_fails_before_its_step_begins_ends_everywhere(row: str, two_processes: Workers) -> None:
    (told, *first), (_, *second) = two_processes.run(begin_without_room, row)
    assert "replica 1 raised MemoryError" in told
    assert (first, second) == ([[1.0, 1.0], True], [[2.0, 2.0], True])


def edit_by_a_few_ulps() -> tuple[dict[str, torch.Tensor], list[str]]:
    """Each rank edits parameters of all kinds a little differently, around their version counters."""
    draw = torch.Generator().manual_seed(1)
    strategy = contract.TORCHRUN["mirrored"].make()
    kinds = nn.ParameterDict()
    with strategy.scope():
        for parameter_class in (nn.Parameter, type("Own", (nn.Parameter,), {})):
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
                for shape in ((), (3,), (64, 64), (1000, 333)):
                    name = f"{parameter_class.__name__} {shape} {dtype}".replace(".", " ")
                    kinds[name] = parameter_class(torch.rand(shape, generator=draw).to(dtype) + 1)
        module = nn.ModuleList([kinds, nn.Linear(0, 4), nn.Linear(6, 4)])
        module[2].weight.data = module[2].weight.data.t()  # which has no row in memory to look at
    told = []
    for name, parameter in kinds.items():

        def step(one: torch.Tensor = parameter) -> None:
            one.data.mul_(1 + (4 + 4 * replica()) * torch.finfo(one.dtype).eps)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(step)
        told += [name] * any("the replicas have changed" in str(one.message) for one in caught)
    strategy.close()
    return {name: value.detach().clone() for name, value in kinds.items()}, told


def _new_layer(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 2)


def _pruned(model: nn.Sequential) -> None:
    nn.utils.prune.l1_unstructured(model[0], "weight", 1)


def change_without_rows(row: str, change: Callable[[nn.Sequential], None]) -> str:
    strategy = contract.TORCHRUN[row].make()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    (batch,) = strategy.distribute_dataset([torch.zeros(1, 1)])
    try:
        strategy.run(lambda rows: change(model), args=(batch,))
    except ReplicaDivergenceError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


@pytest.mark.parametrize(("change", "name"), [(_new_layer, "Sequential a new '1'"), (_pruned, "Linear other hooks")])
@pytest.mark.parametrize("row", ["mirrored", "central_storage"])
def test_what_a_rank_without_rows_cannot_make_is_refused_by_all(
    row: str, change: Callable[[nn.Sequential], None], name: str, two_processes: Workers
) -> None:
    for message in two_processes.run(change_without_rows, row, change):
        assert f"a step has given {name}" in message
        assert "replica 1 had no rows" in message


def test_edits_that_no_counter_sees_are_noticed_and_the_first_ones_count(two_processes: Workers) -> None:
    (first, told), (second, _) = two_processes.run(edit_by_a_few_ulps)
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
    assert told == list(first)[:1], "it is said once"


def make_buffers_one(row: str) -> tuple[dict[str, object], list[float]]:
    strategy = contract.TORCHRUN[row].make()
    try:
        made = {name: buffer_after_two_runs(strategy, name) for name in BUFFERS}
        failed = buffer_of_an_evaluated_module_after_a_failure(strategy)
        return made, [failed, *own_buffers_after_a_failure(strategy)]
    finally:
        strategy.close()


@pytest.mark.parametrize("row", ["mirrored", "central_storage"])
def test_a_buffer_becomes_one(row: str, two_processes: Workers) -> None:
    wanted = {name: row[-1] for name, row in BUFFERS.items()}
    assert two_processes.run(make_buffers_one, row) == [(wanted, [1.0, 2.0]), (wanted, [1.0, 4.0])]


def run_after_a_refused_scope(row: str) -> list[float]:
    strategy, rank = contract.TORCHRUN[row].make(), int(os.environ["RANK"])
    torch.manual_seed(rank)
    try:
        with pytest.raises(ReplicaDivergenceError, match="rank 0's initial values"), strategy.scope():
            kept, other = nn.Linear(2, 1), nn.Linear(2, 2 + rank)
        del other
        (found,) = strategy.local_results(strategy.run(lambda: kept(torch.ones(1, 2)).flatten().tolist()))
        return found  # type: ignore[no-any-return]
    finally:
        strategy.close()


@every_row
def test_what_a_refused_scope_has_made_has_rank_0s_values_in_the_next_run(row: str, two_processes: Workers) -> None:
    first, second = two_processes.run(run_after_a_refused_scope, row)
    assert first == second
