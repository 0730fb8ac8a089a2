"""Training with one worker gives the numbers of one device, whatever the shards, the model and the step.

For optimizers see tests/unit/test_ps_rows.py, for state that programs edit tests/matrix/ps_state.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.gates import close_gate, pass_gate
from tests.support.parameter_servers import (
    CLASSES,
    ROWS,
    WAIT,
    Parts,
    PerTensor,
    Program,
    Tables,
    on_servers,
    states_are_close,
)
from torchstrat.errors import NotSendableError, TorchstratError, UnsupportedError

STEPS = 6


class UsedAsMatrix(Parts):
    """A table that is also used as a matrix is held whole."""

    make_optimizer = partial(torch.optim.Adam, amsgrad=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).mean(1) @ self.table.weight.t()[:, :CLASSES]


class Scaled(Tables):
    """Its gradient scaler skips a step, and goes on with a smaller scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)

    def go_back(self, loss: torch.Tensor, number: int) -> None:
        self.scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("shards", [None, 1, 2, 5])
@pytest.mark.parametrize("parts", [Tables, UsedAsMatrix, Scaled])
def test_numbers_are_those_of_one_device(parts: type[Parts], shards: int | None) -> None:
    plain = parts()
    wanted = [plain.train_step(number).item() for number in range(STEPS)]
    with on_servers(parts, shards, rows_only=True) as program:
        values = [program.coordinator.schedule(parts.train_step, (program.made, n)) for n in range(STEPS)]
        assert program.coordinator.fetch(values) == pytest.approx(wanted, abs=1e-9, nan_ok=True)
        states_are_close(program.made.state_dict(), plain.state_dict())


# -- what the step does with the gradient of a table that goes by rows ------------------------------------------------

Parameters = list[nn.Parameter]
NOISE = torch.linspace(-1, 1, 80, dtype=torch.float64).reshape(ROWS, 4)


def hold_and_change(parameters: Parameters) -> torch.Tensor:
    """What has another gradient in its place since is changed through the one that was held before."""
    gradients = [parameter.grad for parameter in parameters]
    for gradient in gradients:
        gradient.masked_fill_(gradient.isnan(), 0.0)
        gradient.mul_(0.5)
    torch._foreach_mul_(gradients, 0.5)
    return gradients[0].norm()


def every_norm(parameters: Parameters) -> torch.Tensor:
    gradient = parameters[0].grad
    norms = [torch.linalg.vector_norm(gradient, order) for order in (0, 0.5, 1, 2, float("inf"), -1, float("-inf"))]
    return torch.stack([*norms, torch.linalg.vector_norm(gradient, dim=1).sum(), *torch._foreach_norm([gradient])])


def through_aliases(parameters: Parameters) -> torch.Tensor:
    for parameter in parameters:
        parameter.grad.data.clamp_(-0.02, 0.03)
        parameter.grad.detach().mul_(0.5)
        parameter.grad.detach().add_(0.01)
    return parameters[0].grad.sum()


def forms(parameters: Parameters) -> torch.Tensor:
    gradient = parameters[0].grad
    seen = [gradient.is_sparse, gradient.layout == torch.sparse_coo, (gradient * 2).is_sparse]
    return torch.tensor([*map(float, seen), *gradient.data.abs().sum()[None].tolist()])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row": lambda gradient: gradient[2],
    "a column": lambda gradient: gradient[:, 1],
    "an element": lambda gradient: gradient[2, 1],
    "select": lambda gradient: gradient.select(0, 2),
    "torch.select": lambda gradient: torch.select(gradient, 1, 0),
    "unbind": lambda gradient: gradient.unbind()[2],
    "a loop": lambda gradient: list(gradient)[2],
    "unsqueeze": lambda gradient: gradient.unsqueeze(0),
    "atleast_3d": lambda gradient: torch.atleast_3d(gradient),
}
"""Of which a sparse tensor gives copies, and says nothing."""


def write_to(view: Callable[[torch.Tensor], torch.Tensor], parameters: Parameters) -> torch.Tensor:
    view(parameters[0].grad).mul_(3)
    return parameters[0].grad.sum()


def of_each_row(parameters: Parameters) -> torch.Tensor:
    gradient = parameters[0].grad
    squares = gradient.pow(2).sum(1) + 1
    return torch.cat([squares.sqrt(), (gradient.sum(1, keepdim=True) > 0).double()[:, 0], torch.cat([gradient] * 2)[2]])


def with_others(parameters: Parameters) -> torch.Tensor:
    """Functions that are written in Python, and such as get it twice."""
    gradient = parameters[0].grad
    found = [nn.functional.mse_loss(gradient, NOISE), torch.einsum("ij,ij->", gradient, NOISE), gradient.pow(-2).min()]
    found += [torch.addcmul(NOISE, gradient, gradient).sum(), torch.tensor(float(torch.equal(gradient, gradient)))]
    return torch.stack([one.double() for one in found])


WAYS: dict[str, Callable[[Parameters], torch.Tensor]] = {
    "nothing": lambda parameters: parameters[0].grad.sum(),
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, 2.0),
    "clip_grad_norm_ of inf": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, float("inf")),
    "clip_grad_norm_ of 1": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, 1.0),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.05) or parameters[0].grad.sum(),
    "clamp that does not keep 0": lambda parameters: (parameters[0].grad.clamp_(min=0.01), parameters[0].grad.sum())[1],
    "norms": every_norm,
    "add_": lambda parameters: (parameters[0].grad.add_(NOISE), parameters[0].grad.abs().max())[1],
    "held": hold_and_change,
    "aliases": through_aliases,
    "forms": forms,
    "flattened": lambda parameters: torch.cat([parameter.grad.flatten() for parameter in parameters]).std(),
    "isfinite": lambda parameters: torch.isfinite(parameters[0].grad).all(),
    "mean": lambda parameters: parameters[0].grad.mean(),
    "rows": lambda parameters: parameters[0].grad[3:7].clone(),
    **{f"{name} written to": partial(write_to, view) for name, view in VIEWS.items()},
    "of each row": of_each_row,
    "with others": with_others,
    "numpy": lambda parameters: torch.from_numpy(parameters[0].grad.numpy()).sum(),
}


class LooksAtGradients(nn.Module):
    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(ROWS, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
        self.optimizer = make_optimizer(self.parameters(), lr=0.1)

    def train_step(self, way: str, lookups: int, *ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad()
        loss = sum(self.head(self.table(torch.tensor(ids) + more)).square().mean() for more in range(lookups))
        loss.backward()
        seen = WAYS[way](list(self.parameters()))
        self.optimizer.step()
        return loss.detach(), seen.detach()


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_device(way: str, lookups: int) -> None:
    calls = [(way, lookups, *ids) for ids in ((1, 2, 2), (5, 1, 17), (4, 4, 4))]
    plain = LooksAtGradients()
    expected = [plain.train_step(*call) for call in calls]
    with on_servers(LooksAtGradients, 2) as program:
        seen = [program.run(LooksAtGradients.train_step, program.made, *call) for call in calls]
    torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-10)


def test_a_gradient_that_has_become_dense_is_one_of_rows_still() -> None:
    """With ``rows_only`` (the default) rows without any gradient do not move, whatever the step asks of the others."""
    with on_servers(partial(LooksAtGradients, torch.optim.Adam), 2, rows_only=True) as program:
        table = program.made.table
        seen = [table.state_dict()["weight"].clone()]
        for ids in ((1, 2), (3, 4), (3, 4)):
            program.run(LooksAtGradients.train_step, program.made, "isfinite", 1, *ids)
            seen.append(table.state_dict()["weight"].clone())
    moved = [(one != other).any(1).nonzero().flatten().tolist() for one, other in itertools.pairwise(seen)]
    assert moved == [[1, 2], [3, 4], [3, 4]]


# -- what travels -----------------------------------------------------------------------------------------------------


def travelled(shards: int | None) -> tuple[int, int]:
    """How many numbers of a table came from the servers, and went to them, for one step on four rows."""

    def make() -> tuple[nn.Embedding, torch.optim.Optimizer]:
        table = nn.Embedding(10_000, 8)
        return table, torch.optim.Adam(table.parameters(), 0.1)

    def step(table: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
        table(torch.tensor([[3, 9_999, 3], [17, 5_000, 9_999]])).sum().backward()
        optimizer.step()

    with on_servers(make, shards, rows_only=True) as program:
        record = program.cluster.network.record
        reads, pushes = [record("ps.read"), record("ps.read_rows")], record("ps.push")
        program.run(step, *program.made)
        down = [value for messages in reads for one in messages if one.kind == "result" for value in one.value]
        down += [value for one in pushes if one.kind == "result" for value in one.value.values]
        steps = [step for one in pushes if one.kind == "call" for step in one.value.steps]
        up = [part[-1] for step in steps for part in (*step.dense, *step.rows)]
    return sum(value.numel() for value in down), sum(value.numel() for value in up)


def test_only_the_rows_of_the_batch_travel() -> None:
    assert travelled(3) == (4 * 8, 4 * 8)
    assert travelled(None) == (2 * 80_000, 80_000), "the control: without a partitioner the whole table does"


# -- settings and values ----------------------------------------------------------------------------------------------


def test_learning_rates_are_those_of_the_call_that_scheduled() -> None:
    with on_servers(Tables) as program:
        optimizer = program.made.optimizer

        def rate() -> float:
            return optimizer.param_groups[0]["lr"]

        gate, values = close_gate("rates"), []
        program.coordinator.schedule(pass_gate, args=("rates",))
        for number in range(40):
            optimizer.param_groups[0]["lr"] = number // 3
            values.append(program.coordinator.schedule(rate))
        gate.set()
        assert program.coordinator.fetch(values) == [number // 3 for number in range(40)]


def test_max_norm_shortens_the_rows_on_the_servers() -> None:
    def make() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(ROWS, 4, max_norm=0.5)

    ids = torch.tensor([[1, 3, 3], [7, 19, 0]])
    reference = make()
    wanted = reference(ids).detach()
    with on_servers(make, 3) as program:
        torch.testing.assert_close(program.run(lambda table: table(ids).detach(), program.made), wanted)
        states_are_close(program.made.state_dict(), reference.state_dict(), 1e-6)


def test_max_norm_shortens_what_was_written_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a worker's reading of rows and its shortening them others step them, or the coordinator."""

    def make() -> nn.Embedding:
        return nn.Embedding.from_pretrained(torch.ones(ROWS, 4, dtype=torch.float64), freeze=False, max_norm=1.0)

    ids = torch.tensor([0, 7, ROWS - 1])
    written = torch.tensor([[6.0, 1.0, 1.0, 1.0]] * 3, dtype=torch.float64)
    reference, norm_of, calls = make(), torch.linalg.vector_norm, iter(range(100))
    with torch.no_grad():
        reference.weight[ids] = written
        reference(ids)
    with on_servers(make, 3) as program:
        table = program.made

        def measure(*args: Any, **kwargs: Any) -> torch.Tensor:
            if next(calls) == 0:
                with torch.no_grad():
                    table.weight[ids] = written
            return norm_of(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, "vector_norm", measure)
        program.run(lambda table: table(ids).detach(), table)
        states_are_close(table.state_dict(), reference.state_dict(), 1e-12)
    assert next(calls) > 0


def test_a_buffer_that_is_replaced_twice_may_have_the_address_of_the_first() -> None:
    def make() -> nn.BatchNorm1d:
        return nn.BatchNorm1d(1, momentum=None)

    def count(model: nn.BatchNorm1d) -> None:
        model.num_batches_tracked = model.num_batches_tracked + 1

    with on_servers(make) as program:
        model = program.made
        model.num_batches_tracked = torch.tensor(1)
        program.run(count, model)
        program.run(lambda: 0)
        first = id(model.num_batches_tracked)
        for value in range(100, 200):
            model.num_batches_tracked = torch.tensor(value)
            if id(model.num_batches_tracked) == first:
                break
        program.run(count, model)
        assert model.state_dict()["num_batches_tracked"] == value + 1


def test_what_functions_draw_leaves_the_random_state_alone() -> None:
    with on_servers(Tables) as program:
        before = torch.get_rng_state()
        program.run(lambda: torch.rand(2))
        assert torch.equal(torch.get_rng_state(), before)


def refused(program: Program, function: Callable[[], Any], error: type[Exception], says: str) -> None:
    program.coordinator.schedule(function)
    with pytest.raises(error, match=says):
        program.coordinator.join(timeout=WAIT)


def test_what_functions_cannot_do_with_tables_and_optimizers() -> None:
    with on_servers(Tables, 3) as program:
        model, optimizer, sgd = program.made, program.made.optimizer, torch.optim.SGD
        for error in (ValueError, IndexError):
            refused(program, lambda: model.table(torch.tensor([1, ROWS])), error, f"id {ROWS} .*rows 0 to {ROWS - 1}")
        refused(program, lambda: model.table(torch.tensor([True] * ROWS)), TypeError, "are torch.bool; torch.int64")
        refused(program, lambda: optimizer.step(lambda: 1.0), NotImplementedError, "without a closure")
        refused(program, lambda: sgd(model.parameters(), 0.1).step(), ValueError, r"strategy\.scope")


# -- optimizers of classes that may do anything: one object, on the one server that has their variables ----------------


ONES = torch.ones(3)


class CountsInGroup(PerTensor):
    """Its step divides the rate by how many there have been, which it keeps in ``param_groups``."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] / group["k"])


class HalvesInPlace(PerTensor):
    """Changes in place what is in ``param_groups``: a tensor and a list."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=float(group["rate"]) * group["rates"][0])
        group["rate"].mul_(0.5)
        group["rates"][0] *= 0.5


class Lists(PerTensor):
    """State in a list beside the parameters, all of which each step changes."""

    velocities: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        self.velocities = self.velocities or tuple(map(torch.zeros_like, every))
        for p, velocity in zip(every, self.velocities, strict=True):
            velocity.mul_(0.5).add_(0 if p.grad is None else p.grad)
            p.sub_(velocity)


class Average(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(grad, 0.25))


class Shrinks(PerTensor):
    """Makes another shape of its parameter."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.data = p.data[:2]


def parameters(count: int = 1, start: float = 0.0) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.full((3,), start)) for _ in range(count)])


class Job:
    """A program whose functions step vectors with the gradients that they are given."""

    def __init__(self, program: Any) -> None:
        self.program, self.strategy = program, program.strategy
        self.parameters, self.optimizer = program.made
        self.group, self.lists = self.optimizer.param_groups[0], [self.parameters]

    def step(self, *gradients: torch.Tensor | None) -> None:
        def function(lists: list[nn.ParameterList], optimizer: Any) -> None:
            for parameter, gradient in zip([one for of_list in lists for one in of_list], gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

        self.program.run(function, self.lists, self.optimizer)

    def values(self) -> list[float]:
        """Of each vector, all of whose elements are equal."""
        found = [value for one in self.lists for value in one.state_dict().values()]
        assert all(bool((value == value[0]).all()) for value in found)
        return [float(value[0]) for value in found]


@contextmanager
def stepping(cls: type[PerTensor], count: int = 1, start: float = 0.0, **settings: Any) -> Iterator[Job]:
    def make() -> tuple[nn.ParameterList, PerTensor]:
        made = parameters(count, start)
        return made, cls(made.parameters(), lr=1.0, **settings)

    with on_servers(make) as program:
        yield Job(program)


def test_what_the_program_sets_what_steps_set_and_what_was_told() -> None:
    """Steps without a gradient are steps, too."""
    with stepping(CountsInGroup, 2) as job:
        for count, gradients in enumerate(((None, None), (None, ONES)), start=1):
            job.step(*gradients)
            assert job.optimizer.state_dict()["param_groups"][0]["k"] == count
        assert job.values() == [0.0, -0.5]
        job.group["k"] = 1  # as it was told once, in functions that were scheduled then: no wish
        job.group["lr"] = 3.0  # as a scheduler does
        job.step(ONES, ONES)
        assert job.values() == [-1.0, -1.5]
        job.group["k"] = 7
        job.step(ONES, ONES)
        assert job.values() == [-1.375, -1.875]
        state = job.optimizer.state_dict()
        state["param_groups"][0]["k"] = 1
        job.optimizer.load_state_dict(state)
        job.step(ONES, ONES)
        assert job.values() == [-2.875, -3.375]


def test_the_program_and_steps_set_the_same() -> None:
    with stepping(CountsInGroup, k=0) as job:
        job.step(ONES)
        job.group["k"] = 7
        with pytest.raises(UnsupportedError, match=r"param_groups\[0\]\['k'\] of .* to 7, and its steps.* set it to 1"):
            job.step(ONES)
        assert job.values() == [-1.0]


def test_what_steps_have_set_is_there_after_join() -> None:
    """And what the program sets then it has set, also to what steps have set before."""
    with stepping(CountsInGroup) as job:
        for count in (1, 2, 3):
            job.step(ONES)
            job.program.coordinator.join()
            assert (job.group["k"], job.optimizer.steps) == (count, count)
        job.group["k"] = job.optimizer.steps = 1
        job.step(ONES)
        job.program.coordinator.join()
        assert (job.group["k"], job.optimizer.steps) == (2, 2)
        assert job.values() == pytest.approx([-1 - 1 / 2 - 1 / 3 - 1 / 2])


@pytest.mark.parametrize("is_told", [False, True])
def test_what_steps_change_in_place_in_a_group_stays_changed(is_told: bool) -> None:
    with stepping(HalvesInPlace, rate=torch.tensor(1.0), rates=[1.0]) as job:
        for _ in range(3):
            job.step(ONES)
            if is_told:
                job.program.coordinator.join()
        assert job.values() == [-1.3125]
        job.program.coordinator.join()
        job.group["rates"] = [1.0]
        job.step(ONES)
        assert job.values() == [-1.4375]


@pytest.mark.parametrize("cls", [CountsInGroup, Lists])
def test_groups_that_come_later(cls: type[PerTensor]) -> None:
    with stepping(cls) as job:
        job.step(ONES)
        with job.strategy.scope():
            job.lists.append(later := parameters())
            job.optimizer.add_param_group({"params": later.parameters(), "lr": 2.0})
        if cls is Lists:  # its list is shorter, as in a plain program
            with pytest.raises(TorchstratError, match=r"Lists.step raised ValueError: zip.* already"):
                job.step(None, ONES)
        else:
            job.step(ONES, ONES)
            assert job.values() == [-1.5, -2.0]


def test_a_step_that_makes_another_shape() -> None:
    with (
        stepping(Shrinks) as job,
        pytest.raises(TorchstratError, match=r"torch.float32 of shape \(2,\) of .* keep both"),
    ):
        job.step(ONES)


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        (torch.zeros(3, device="meta"), "Average keeps a tensor .* on the meta device"),
        (threading.Lock(), r"Average cannot be sent .*: self\.mine cannot be pickled"),
    ],
    ids=["meta", "lock"],
)
def test_what_cannot_be_sent(attribute: Any, says: str) -> None:
    def make() -> Average:
        made = Average(parameters().parameters())
        made.mine = attribute
        return made

    with pytest.raises(NotSendableError, match=says), on_servers(make):
        pass


# -- where its variables lie ------------------------------------------------------------------------------------------


def test_variables_lie_together_and_the_others_are_spread() -> None:
    def make() -> tuple[list[nn.Parameter], Any]:
        tensors = [nn.Parameter(torch.zeros(4, 2)) for _ in range(8)]
        # The second and the third share a parameter, so all of theirs are together.
        optimizers = [CountsInGroup(tensors[:2]), Lists([tensors[2], tensors[4]]), Lists([tensors[4], tensors[3]])]
        spread = [torch.optim.SGD(tensors[5:6]), Average(tensors[7:])]
        return tensors, [*optimizers, *spread, torch.optim.Adafactor(tensors[6:7])]

    with on_servers(make, shards=2, elementwise_optimizers=[Average]) as program:
        places = program.places(*program.made[0])
    assert places[0] == places[1]
    assert places[2] == places[3] == places[4]
    assert {places[0], places[2]} == {"ps:0", "ps:1"}
    assert {*places[5:8:2]} <= {"ps:0, ps:1", "ps:1, ps:0"}
    assert places[6] in ("ps:0", "ps:1")


# -- on workers -------------------------------------------------------------------------------------------------------


class InTwoParts(PerTensor):
    """As SAM: a step away, and the step from there."""

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.copy_(self.state[p]["old"]).sub_(grad)


@pytest.mark.parametrize("then_steps", [True, False])
def test_state_that_a_function_makes_by_itself(then_steps: bool) -> None:
    def make() -> tuple[nn.Module, InTwoParts]:
        model = nn.Linear(2, 1)
        return model, InTwoParts(model.parameters())

    def step(model: nn.Module, optimizer: InTwoParts) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.first_step()
        if then_steps:
            optimizer.step()

    with on_servers(make) as program:
        before = {name: value.clone() for name, value in program.made[0].state_dict().items()}
        with pytest.raises(UnsupportedError, match=r"put state into InTwoParts\.state outside of its step\(\)"):
            program.run(step, *program.made)
        states_are_close(program.made[0].state_dict(), before, 0.0)
