"""Variables on a worker that are not there, or not as they are on the servers, in everything that is done with them:
the numbers of plain PyTorch, whoever asks, on whichever thread, or an error; never zeros or old values."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.matrix.tensor_operations import Operation, operations
from tests.support.parameter_servers import ROWS, on_servers, states_are_close
from torchstrat.errors import UnsupportedError

# -- every attribute of torch.Tensor -----------------------------------------------------------------------------------

SIDE = 4
START = torch.linspace(-1.3, 1.7, SIDE * SIDE, dtype=torch.float64).reshape(SIDE, SIDE)

AT_ONCE = 8
"""How many attributes a function tries, on tensors of their own: sending it takes as long as several of them."""


def usual_arguments() -> list[tuple[Any, ...]]:
    return [(), (0,), (START.flip(0),), (torch.tensor([0, 2]),), (1, 0)]


def more_arguments() -> list[tuple[Any, ...]]:
    ids, mask = torch.tensor([0, 2]), START > 0
    some = [(0.5,), (mask,), (0, ids), (0, ids, START[:2]), (torch.float32,), ((SIDE * SIDE,),), (mask, 2.0)]
    return [*some, (START, START.t()), (0, START), (slice(1, 3), START[:2]), ("cpu",), (lambda value: None,)]


def attributes() -> list[Operation]:
    """No global: before a function is sent, what its module holds is looked through."""
    places = ("torch.Tensor", "of_another")
    return [one for one in operations() if one.place in places and not one.name.startswith("register_")]


NOT_COMPARED = {
    *("data_ptr", "const_data_ptr"),
    *("new_empty", "new_empty_strided", "resize_", "resize_as_", "new"),  # memory that nobody has written
    *("__hash__", "__repr__", "__format__", "__dir__", "__reduce__", "__reduce_ex__", "_cdata"),  # of the object
    *("__deepcopy__", "backward", "grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *("untyped_storage", "storage", "_typed_storage", "storage_type", "__dlpack__", "__dlpack_device__"),
}
RAISES_ALONE = {"data_ptr", "const_data_ptr"}
"""Plain parameters answer there. So they do where they get another shape, which the error says that variables keep."""


class Box(nn.Module):
    """What is in a plain list is not seen to be reached by a function that reaches the module."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.hidden = [make() for _ in range(count)]

    def tensors(self) -> list[torch.Tensor]:
        return [next(iter((*one.parameters(), *one.buffers()))) for one in self.hidden]


def table() -> nn.Module:
    return nn.Embedding(SIDE, SIDE, _weight=START.clone())


def compare(box: Box, some: list[Operation], given: list[tuple[Any, ...]], modes: list[bool]) -> tuple[list[str], int]:
    """What is wrong with these attributes of the tensors in the box, each of which has one attribute and one list of
    arguments, and how many calls were as on a plain tensor."""
    wrong, same = [], 0
    for tensor, (operation, arguments) in zip(box.tensors(), itertools.product(some, given), strict=False):
        for grad in modes:
            plain = nn.Parameter(START.clone()) if isinstance(tensor, nn.Parameter) else START.clone()
            seen, wanted = call(tensor, operation, arguments, grad), call(plain, operation, arguments, grad)
            says = complaint(operation.name, seen, wanted)
            same += not says and not isinstance(wanted, Exception)
            wrong += (
                [f"{operation.key}{arguments!r:.60}, {'with' if grad else 'without'} gradients: {says}"] if says else []
            )
            tensor.grad = None
            with torch.no_grad():
                if tensor.shape != START.shape or not tensor.is_contiguous():
                    tensor.set_(START.clone())
                tensor.copy_(START)
                tensor.requires_grad_(isinstance(tensor, nn.Parameter))
    return wrong, same


def call(tensor: torch.Tensor, operation: Operation, arguments: tuple[Any, ...], grad: bool) -> Any:
    """What it gives, then the values that the tensor has, and its gradient from what it gave; or what it raises."""
    given = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    torch.default_generator.manual_seed(7)
    try:
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat = pytree.tree_leaves(operation(tensor, *given))
        others = [one for one in flat if isinstance(one, torch.Tensor) and one.grad_fn is not None]
        if others:
            sum((one.to_dense().abs() ** 2).sum() for one in others).backward()
        gradient = tensor.grad
        found = [*flat, tensor, None if gradient is None else gradient.to_dense()]
        return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in found]
    except Exception as error:
        return error


def complaint(name: str, seen: Any, wanted: Any) -> str:
    if isinstance(seen, Exception):
        alone = not isinstance(wanted, Exception) and name not in RAISES_ALONE and "keep their" not in str(seen)
        return f"raises {type(seen).__name__}: {seen!s:.150}" if alone else ""
    if isinstance(wanted, Exception):
        return f"gives {seen!r:.80}, where a plain one raises {type(wanted).__name__}: {wanted!s:.80}"
    if name in NOT_COMPARED:
        return ""
    if len(seen) != len(wanted):
        return f"gives {seen!r:.80}, not {wanted!r:.80}"
    comparable = int | float | complex | str | bool | torch.dtype | torch.Size | torch.device | torch.layout
    for one, other in zip(seen, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            try:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15, equal_nan=True)
            except (AssertionError, TypeError) as error:
                return str(error)
        elif (one is None) != (other is None) or (isinstance(other, comparable) and one != other and other == other):
            return f"gives {one!r:.80}, not {other!r:.80}"
    return ""


def check_all(make: Callable[[], nn.Module], given: list[tuple[Any, ...]], modes: list[bool], every: int = 1) -> int:
    """Raises AssertionError where a call on what ``make`` makes is not as on a plain tensor. How many are, if each is
    tried, or one ``every`` so many."""
    same, wrong = 0, []
    partitioned = 2 if make is table else None
    tried = attributes()[::every]
    with on_servers(lambda: Box(make, len(given) * AT_ONCE), partitioned) as program:
        for first in range(0, len(tried), AT_ONCE):  # a function for some: at its beginning nothing is there
            some = tried[first : first + AT_ONCE]
            of_some, count = program.run(partial(compare, some=some, given=given, modes=modes), program.made)
            wrong += of_some
            same += count
    assert not wrong, "\n".join(wrong)
    return same


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", START.clone())


def layer() -> nn.Module:
    module = nn.Linear(SIDE, SIDE, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(START)
    return module


STAND_INS = {"table": table, "parameter": layer, "buffer": Buffer}


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    ("kind", "every"),
    # A buffer and a table are asked as a parameter is, but for gradients and rows: one attribute in six, all in soak.
    [
        *(("parameter", 1), ("table", 6), ("buffer", 6)),
        *(pytest.param(kind, 1, marks=pytest.mark.soak) for kind in ("table", "buffer")),
    ],
)
def test_every_attribute_of_tensors(kind: str, every: int) -> None:
    assert check_all(STAND_INS[kind], usual_arguments(), [True], every) > 600 // every


@pytest.mark.soak
@pytest.mark.deadline(600)
@pytest.mark.parametrize("kind", STAND_INS)
def test_every_attribute_of_tensors_with_more_arguments(kind: str) -> None:
    assert check_all(STAND_INS[kind], more_arguments(), [True, False]) > 1000


NOT_REPLACED = {"sparse_values_without_sizes"}
"""By the constructor of one dtype."""


@pytest.mark.parametrize("make", [layer, Buffer])
def test_what_makes_a_tensor_of_one_that_is_not_there_brings_it(make: Callable[[], nn.Module]) -> None:
    others = [one for one in attributes() if one.place == "of_another" and one.name not in NOT_REPLACED]

    def check(box: Box) -> list[str]:
        found = {}
        for one, tensor in zip(others, box.tensors(), strict=True):
            assert type(tensor).__name__.startswith("Pending")
            kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
            plain = START.clone() if kind is torch.Tensor else kind(START.clone())
            found[one.key] = complaint(one.key, call(tensor, one, (), True), call(plain, one, (), True))
        return [f"{key}: {says}" for key, says in found.items() if says]

    with on_servers(lambda: Box(make, len(others))) as program:
        assert not program.run(check, program.made)


# -- lookups, wherever they are made -----------------------------------------------------------------------------------

WIDTH = 4


class LooksUp(nn.Module):
    """Two tables, one of which is looked up where ``way`` says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.places = nn.Embedding(ROWS, WIDTH), nn.Embedding(3, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.double()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(hidden + self.places(torch.arange(3))))

    def train_step(self, way: str, number: int) -> torch.Tensor:
        ids = torch.randint(0, ROWS, (8, 3), generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        loss = self.head(WAYS[way](self, self.items(ids)).mean(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def in_a_thread(model: LooksUp, hidden: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model.block(hidden)))
    thread.start()
    thread.join()
    return found[0]


def in_a_hook(model: LooksUp, hidden: torch.Tensor) -> torch.Tensor:
    hidden.register_hook(lambda gradient: gradient * model.places(torch.arange(3)).detach())
    return model.block(hidden)


class ScaledByTable(torch.autograd.Function):
    """Looks up in its backward alone."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
        ctx.table = table
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.table(torch.arange(3)), None


def whole_by(name: str) -> Callable[[LooksUp, torch.Tensor], torch.Tensor]:
    return lambda model, hidden: model.block(hidden) @ getattr(model.places.weight, name) @ model.places.weight


WAYS: dict[str, Callable[[LooksUp, torch.Tensor], torch.Tensor]] = {
    "a checkpointed block": lambda model, hidden: checkpoint(model.block, hidden, use_reentrant=False),
    "a reentrant checkpointed block": lambda model, hidden: checkpoint(model.block, hidden, use_reentrant=True),
    "a thread": in_a_thread,
    "a hook": in_a_hook,
    "a backward": lambda model, hidden: model.block(ScaledByTable.apply(hidden, model.places)),
    "vmap": lambda model, hidden: hidden + torch.func.vmap(model.places)(torch.arange(3)),
    **{f"whole, by {name}": whole_by(name) for name in ("T", "mT", "H", "mH", "data")},
    "whole, of a torch.ops": lambda model, hidden: hidden + torch.ops.aten.mul(model.places.weight, 2),
}
WAYS["whole, by data"] = lambda model, hidden: model.block(hidden) @ model.places.weight.data.T @ model.places.weight


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_one_device(way: str) -> None:
    plain = LooksUp()
    wanted = [plain.train_step(way, number).item() for number in range(3)]
    with on_servers(LooksUp, 2) as program:
        found = [program.run(LooksUp.train_step, program.made, way, number).item() for number in range(3)]
        assert found == pytest.approx(wanted, abs=1e-10)
        states_are_close(program.made.state_dict(), plain.state_dict(), 1e-10)


# -- whole tables in a function ----------------------------------------------------------------------------------------


def write_array(weight: torch.Tensor) -> None:
    weight.detach().numpy()[2] = 1.0


def assign_data(weight: torch.Tensor) -> None:
    weight.data = weight.data.flip(0)


def assign_rows(weight: torch.Tensor) -> None:
    weight[torch.tensor([1, 3])] = 2.0


def write_after_refusal(weight: torch.Tensor) -> None:
    weight.add_(1.0)
    with contextlib.suppress(UnsupportedError):  # on a worker
        weight.t_().t_()
    weight.mul_(2.0)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "data": lambda weight: weight.data.mul_(0.5),
    "data assigned": assign_data,
    "another memory": lambda weight: weight.set_(torch.full_like(weight, 0.25)),
    "after what is refused": write_after_refusal,
    "a view": lambda weight: weight[1:3].zero_(),
    "transposed": lambda weight: weight.T.add_(1.0),
    "rows": assign_rows,
    "chunks": lambda weight: [one.mul_(0.5) for one in weight.chunk(2)],
    "single rows": lambda weight: torch._foreach_mul_(list(weight.unbind()), 0.5),
    "a flat view": lambda weight: weight.view(-1)[3:9].fill_(0.25),
    "another's data": lambda weight: nn.Parameter(weight.data).data.mul_(0.5),
    "an array": write_array,
    "nn.init": nn.init.ones_,
    "out": lambda weight: torch.mul(weight, 2.0, out=weight),
}


@pytest.mark.parametrize("way", WRITES)
def test_what_functions_write_to_a_whole_table_is_seen_by_its_lookups_and_reaches_the_servers(way: str) -> None:
    def write(model: LooksUp) -> torch.Tensor:
        with torch.no_grad():
            WRITES[way](model.items.weight)
        return model.items(torch.tensor([3, 1, 2])).detach()

    plain = LooksUp()
    wanted = write(plain)
    with on_servers(LooksUp, 2) as program:
        assert torch.equal(program.run(write, program.made), wanted)
        states_are_close(program.made.state_dict(), plain.state_dict(), 0.0)
        again = program.run(lambda model: model.items(torch.tensor([3, 1, 2])).detach(), program.made)
        assert torch.equal(again, wanted)


def give(model: LooksUp, name: str, by: str, is_copied: bool) -> None:
    value = model.layer.weight.detach()
    value = value.clone() if is_copied else value
    parameter = model.get_parameter(name)
    if by == "set_":
        with torch.no_grad():
            parameter.set_(value)
    else:
        parameter.data = value


class Square(LooksUp):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(WIDTH, WIDTH, dtype=torch.float64)
        self.more = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


def sums(model: Square) -> list[float]:
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def step_all(model: Square) -> list[float]:
    model.optimizer.zero_grad()
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    model.optimizer.step()
    return sums(model)


@pytest.mark.parametrize("by", ["data", "set_"])
@pytest.mark.parametrize("name", ["places.weight", "more.weight"])
def test_no_variable_shares_memory_with_another(name: str, by: str) -> None:
    plain = Square()
    give(plain, name, by, True)
    with on_servers(Square, 2) as program:
        program.coordinator.schedule(give, args=(program.made, name, by, False))
        with pytest.raises(UnsupportedError, match=r"share its memory with weight of.*data\.clone"):
            program.coordinator.join(timeout=60)
        program.run(give, program.made, name, by, True)
        assert program.run(step_all, program.made) == pytest.approx(step_all(plain), abs=1e-12)
        assert program.run(sums, program.made) == pytest.approx(sums(plain), abs=1e-12)
        states_are_close(program.made.state_dict(), plain.state_dict(), 1e-12)


def test_a_table_has_another_shape_or_a_pointer_nowhere() -> None:
    def refuse(model: LooksUp) -> list[str]:
        said = []
        for use in (lambda weight: weight.t_(), lambda weight: weight.data_ptr(), lambda weight: weight.unsqueeze_(0)):
            with pytest.raises(UnsupportedError) as caught, torch.no_grad():
                use(model.items.weight)
            said.append(str(caught.value))
        return said

    with on_servers(LooksUp, 2) as program:
        assert all("table weight of" in one for one in program.run(refuse, program.made))
        states_are_close(program.made.state_dict(), LooksUp().state_dict(), 0.0)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.hidden = table(), layer(), [layer()]

    def tensors(self) -> list[torch.Tensor]:
        return [self.layer.weight, self.table.weight, self.hidden[0].weight]


LISTS = sorted(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))


def write_to_all(model: Both, name: str) -> int:
    """How many ways to call it there are."""
    start, accepted = 0.1 * START.abs() + 0.1, 0
    for more in ((), (0.5,), ([0.5] * 3,), ([start] * 3,), ([start] * 3, 0.5), ([start] * 3, [start] * 3)):
        tensors = model.tensors()
        with torch.no_grad():
            torch._foreach_copy_(tensors, [start * (n + 1) for n in range(3)])
            try:
                getattr(torch, name)(tensors, *more)
            except (TypeError, RuntimeError):
                continue
        accepted += 1
        break
    return accepted


@pytest.mark.parametrize("name", LISTS)
def test_arithmetic_over_lists_of_parameters_is_seen(name: str) -> None:
    """A dense one, a table and one that the function is not seen to reach."""

    plain = Both()
    ways = write_to_all(plain, name)
    with on_servers(Both, 2) as program:
        assert program.run(write_to_all, program.made, name) == ways
        for one, other in ((program.made, plain), (program.made.hidden[0], plain.hidden[0])):
            states_are_close(one.state_dict(), other.state_dict(), 1e-12)


# -- gradients of tables that nothing but autograd has handed over -----------------------------------------------------


def by_autograd_grad(model: LooksUp) -> torch.Tensor:
    loss = model.items(torch.tensor([[1, 2, 2]])).square().sum() + model.places.weight.sum()
    items, places = torch.autograd.grad(loss, [model.items.weight, model.places.weight])
    model.items.weight.grad, model.places.weight.grad = items.clamp_(-0.5, 0.5), places
    return torch.stack([items.norm(), torch.isfinite(items).sum(), items.mean()])


def by_hook(model: LooksUp) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.mean())
        return torch.where(gradient > 0, gradient, -gradient)

    model.items.weight.register_hook(hook)
    model.items(torch.tensor([[1, 2, 2]])).square().sum().backward()
    return seen[0]


def added_to_all(model: LooksUp) -> torch.Tensor:
    (model.items(torch.tensor([[1, 2, 2]])).square().sum() + model.layer.weight.sum()).backward()
    torch._foreach_add_([model.layer.weight.grad, model.items.weight.grad], 0.25)  # the first is no gradient by rows
    return model.layer.weight.grad


def unscaled(model: LooksUp) -> torch.Tensor:
    (model.items(torch.tensor([[1, 2, 2]])).square().sum() + model.layer.weight.sum()).backward()
    found, half = torch.zeros(1, dtype=torch.float32), torch.full((1,), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_([model.layer.weight.grad, model.items.weight.grad], found, half)
    return found


def sent_home(model: LooksUp) -> torch.Tensor:
    model.items(torch.tensor([[1, 2, 2]])).square().sum().backward()
    gradient = model.items.weight.grad
    assert gradient is not None
    return gradient


GRADIENTS = [by_autograd_grad, by_hook, added_to_all, unscaled, sent_home]


@pytest.mark.parametrize("way", GRADIENTS)
def test_gradients_are_those_of_one_device(way: Callable[[LooksUp], torch.Tensor]) -> None:
    def step(model: LooksUp) -> torch.Tensor:
        found = way(model)
        model.optimizer.step()
        return found

    plain = LooksUp()
    wanted = step(plain)
    with on_servers(LooksUp, 2) as program:
        torch.testing.assert_close(program.run(step, program.made), wanted, rtol=1e-12, atol=1e-12)
        states_are_close(program.made.state_dict(), plain.state_dict(), 1e-12)
