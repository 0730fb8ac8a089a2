"""Of what kind optimizers are, and their steps in parts, by ranks or in blocks that fit into a cache: the bits and the
state of a step of the whole."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

import torchstrat as ts
from tests.support.parameter_servers import PerTensor
from tests.support.replicas import cpus
from torchstrat import Ftrl
from torchstrat.core import _torch_private, optimizers
from torchstrat.core.optimizers import (
    UNKNOWN,
    Gradients,
    Kind,
    Tier,
    bare_step,
    is_listed,
    is_worth_blocks,
    step_in_blocks,
    tier_of,
)
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer
from torchstrat.parameter_server.variables.optimizer_state import Kinds, check_word
from torchstrat.replicas.central.state import Work, portions

Make = Callable[[Any], optim.Optimizer]

SIZE = 5003
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
PLAIN: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    optim.Adam: {"lr": 0.05},
    optim.AdamW: {"lr": 0.05, "maximize": True},
    optim.Adagrad: {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
    optim.RMSprop: {"lr": 0.01, "momentum": 0.5, "centered": True},
    optim.Adadelta: {"lr": 0.5},
    optim.Adamax: {"lr": 0.05},
    optim.NAdam: {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1},
    optim.RAdam: {"lr": 0.05},
    optim.ASGD: {"lr": 0.05, "t0": 2},
    optim.Rprop: {"lr": 0.05},
    Ftrl: {"lr": 0.1, "lr_power": -0.4, "l1": 0.01, "l2": 0.1, "l2_shrinkage": 0.1, "beta": 0.2},
}
FUSED = {optim.SGD: {"dampening": 0.1}, optim.Adam: {"amsgrad": True}, optim.AdamW: {}, optim.Adagrad: {}}
FOREACH = {
    optim.SGD: {"nesterov": True},
    optim.Adam: {"amsgrad": True},
    optim.Adagrad: {"initial_accumulator_value": 0.3},
}
SETTINGS: dict[str, Make] = {
    **{cls.__name__: partial(cls, **options) for cls, options in PLAIN.items()},
    **{f"{cls.__name__} fused": partial(cls, **PLAIN[cls], **options, fused=True) for cls, options in FUSED.items()},
    **{
        f"{cls.__name__} foreach": partial(cls, **PLAIN[cls], **FOREACH.get(cls, {}), foreach=True)
        for cls in PLAIN
        if cls not in (Ftrl, optim.AdamW)
    },
    "SGD alone": partial(optim.SGD, lr=0.1),
    "Adam tensor rate": lambda p: optim.Adam(p, lr=torch.tensor(0.05)),
}
"""The optimizers that step each element for itself."""
AT_ONCE = {name for name in SETTINGS if "foreach" in name or "fused" in name} | {"SGD alone"}


class Mine(optim.Adam):
    """May do anything."""


def numbers(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """``count`` rows of numbers of many magnitudes, the same at every call."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(-3, 1, SIZE, dtype=torch.float64)
    return list((torch.randn(count, SIZE, generator=generator, dtype=torch.float64) * scales).to(dtype))


def parameter_of(values: torch.Tensor, gradient: torch.Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    return parameter


def ones(*shape: int) -> nn.Parameter:
    return parameter_of(torch.zeros(shape), torch.ones(shape))


# -- which optimizers, and who steps what ------------------------------------------------------------------------------


def test_which_optimizers_may_be_stepped_in_parts() -> None:
    tried = {type(make([ones(1)])) for make in SETTINGS.values()}
    assert tried == {cls for cls, kind in optimizers._KINDS.items() if kind.tier is Tier.ELEMENTS}
    assert all(tier_of(make([ones(1)])) is Tier.ELEMENTS for make in SETTINGS.values())
    assert tier_of(optim.Adafactor([ones(2, 2)])) is Tier.PARAMETERS
    for unknown in (Mine, optim.LBFGS, partial(optim.SGD, differentiable=True)):
        assert tier_of(unknown([ones(2)])) is Tier.ALL


WORK = st.builds(Work, st.integers(0, 1_100_000), st.sampled_from([4, 8]), st.booleans())


@settings(max_examples=200)
@given(st.lists(WORK, max_size=9), st.integers(1, 7))
def test_every_element_is_stepped_by_one_rank(works: list[Work], ranks: int) -> None:
    shares = portions(works, ranks)
    assert len(shares) == ranks
    assert all(share == sorted(share) for share in shares)
    for number, work in enumerate(works):
        pieces = sorted((part.start, part.stop) for share in shares for part in share if part.number == number)
        assert (pieces[0][0], pieces[-1][1]) == (0, work.numel)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(pieces))
        assert work.may_be_cut or len(pieces) == 1


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_portions_are_even(ranks: int) -> None:
    of_an_mlp = [Work(numel, 4, True) for numel in (802_816, 1024, 1_048_576, 10)]
    loads = [sum((part.stop - part.start) * 4 for part in share) for share in portions(of_an_mlp, ranks)]
    assert max(loads) - min(loads) <= 2 * 256 * 4 + 40


@DTYPES
@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS)
def test_parts_of_ranks_are_stepped_to_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    cuts = [0, *(share[0].stop for share in portions([Work(SIZE, dtype.itemsize, True)], 3))]
    assert (len(cuts), cuts[-1]) == (4, SIZE)
    assert torch.equal(stepped_between(make, dtype, cuts), stepped_between(make, dtype, [0, SIZE]))


def test_the_comparison_notices_who_looks_at_the_whole() -> None:
    make = partial(optim.Adafactor, lr=0.1)
    parts, whole = (stepped_between(make, torch.float32, cuts) for cuts in ([0, 256, SIZE], [0, SIZE]))
    assert not torch.equal(parts, whole)


def stepped_between(make: Make, dtype: torch.dtype, cuts: list[int]) -> torch.Tensor:
    """A parameter after seven steps of its parts between ``cuts``."""
    start, *gradients = numbers(8, dtype)
    parts = [nn.Parameter(start[low:high].clone()) for low, high in itertools.pairwise(cuts)]
    optimizer = make(parts)
    for number, gradient in enumerate(gradients):
        for part, low, high in zip(parts, cuts, cuts[1:], strict=False):
            part.grad = gradient[low:high].clone()
        change_rate(optimizer, number)
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


def change_rate(optimizer: optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (1 - 0.05 * number)


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(optimizers, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(optimizers, "_FEWEST_BLOCKS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


in_small_blocks = pytest.mark.usefixtures("small_blocks")


def made(make: Make, dtype: torch.dtype) -> optim.Optimizer:
    """Over a large parameter, a small one, and one that never has a gradient."""
    start = numbers(1, dtype)[0]
    return make([nn.Parameter(start.clone()), nn.Parameter(start[:7].clone()), nn.Parameter(start.clone())])


def stepped(optimizer: optim.Optimizer, step: Callable[[optim.Optimizer], Any], steps: range) -> optim.Optimizer:
    large, small, _ = optimizer.param_groups[0]["params"]
    for number, gradient in enumerate(numbers(8, large.dtype)[1:]):
        if number in steps:
            large.grad, small.grad = gradient.clone(), gradient[:7].clone()
            change_rate(optimizer, number)
            step(optimizer)
    return optimizer


def in_blocks(optimizer: optim.Optimizer) -> None:
    assert step_in_blocks(optimizer)


def require_same(one: optim.Optimizer, other: optim.Optimizer) -> None:
    for mine, its in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, its)
        assert list(one.state.get(mine, {})) == list(other.state.get(its, {}))
        for name, value in one.state.get(mine, {}).items():
            torch.testing.assert_close(value, other.state[its][name], rtol=0, atol=0)
    assert set(one.state) <= set(one.param_groups[0]["params"])


@in_small_blocks
@DTYPES
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in AT_ONCE])
def test_bits_and_state_of_blocks_are_those_of_a_step_of_the_whole(name: str, dtype: torch.dtype) -> None:
    whole, blocked = made(SETTINGS[name], dtype), made(SETTINGS[name], dtype)
    require_same(stepped(blocked, in_blocks, range(7)), stepped(whole, bare_step, range(7)))
    for optimizer in (blocked, whole):
        optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
    require_same(stepped(blocked, in_blocks, range(2)), stepped(whole, bare_step, range(2)))


NOT_CUT: dict[str, tuple[Make, Callable[[], nn.Parameter]]] = {
    **{name: (SETTINGS[name], partial(ones, SIZE)) for name in sorted(AT_ONCE)},
    **{
        f"{make}": (make, partial(ones, SIZE))
        for make in (optim.Adafactor, Mine, partial(optim.Adam, differentiable=True))
    },
    **{
        name: (optim.Adagrad, partial(lambda values, gradient: parameter_of(values, gradient), *tensors))
        for name, tensors in {
            "no gradient": (torch.zeros(SIZE), None),
            "a sparse gradient": (torch.zeros(SIZE), torch.ones(SIZE).to_sparse()),
            "an expanded gradient": (torch.zeros(SIZE), torch.ones(1).expand(SIZE)),
            "columns first": (torch.zeros(50, SIZE).t(), torch.ones(SIZE, 50)),
            "no memory": (torch.zeros(SIZE, device="meta"), torch.ones(SIZE, device="meta")),
        }.items()
    },
}


@in_small_blocks
@pytest.mark.parametrize("name", NOT_CUT)
def test_what_is_stepped_whole(name: str) -> None:
    """Kernels that do all at once, optimizers that may look at the whole, and what is no row in memory."""
    make, parameter = NOT_CUT[name][0], NOT_CUT[name][1]()
    optimizer = make([parameter])
    assert make is optim.Adagrad or not is_worth_blocks(optimizer)
    assert not step_in_blocks(optimizer)
    assert parameter.is_meta or not parameter.any()


@in_small_blocks
@pytest.mark.parametrize("make", [partial(optim.SGD, momentum=0.9), optim.Adagrad, optim.RMSprop, optim.Adam])
def test_steps_of_few_kernels_are_cut_from_more_blocks_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for fewest, cuts in ((2, True), (3, make is optim.Adam)):
        monkeypatch.setattr(optimizers, "_FEWEST_BLOCKS", fewest)
        optimizer = make([ones(4096 // 4 * 3)])
        assert is_worth_blocks(optimizer) is cuts
        assert step_in_blocks(optimizer) is cuts


@in_small_blocks
@pytest.mark.parametrize("loaded", [False, True])
def test_state_that_appears_later(loaded: bool) -> None:
    """A scheduler switches momentum on. ``loaded``: from a checkpoint that has an entry for it, which is empty."""
    whole, blocked = (made(partial(optim.SGD, lr=0.1), torch.float32) for _ in range(2))
    for optimizer, step in ((whole, bare_step), (blocked, in_blocks)):
        stepped(optimizer, bare_step, range(2))
        for parameter in optimizer.param_groups[0]["params"][: 2 if loaded else 0]:
            optimizer.state[parameter]["momentum_buffer"] = None
        optimizer.param_groups[0]["momentum"] = 0.9
        stepped(optimizer, step, range(2, 5))
    assert "momentum_buffer" in whole.state[whole.param_groups[0]["params"][0]]
    require_same(blocked, whole)


@in_small_blocks
def test_the_first_step_never_has_the_state_twice() -> None:
    """The process would keep that memory."""
    alive: list[int] = []

    def step(optimizer: optim.Optimizer) -> None:
        bare_step(optimizer)
        alive.append(sum(len(group["params"]) for group in optimizer.param_groups))

    optimizer = optim.Adam([ones(SIZE)])
    assert step_in_blocks(optimizer, step)
    blocks = -(-SIZE // 1024)
    assert alive == [1] * blocks + [0]
    assert step_in_blocks(optimizer, step)
    assert alive == [1] * blocks + [0, blocks]


@in_small_blocks
def test_state_that_is_no_row_and_more_threads_keep_a_parameter_whole() -> None:
    parameter = ones(100, 50)
    optimizer = optim.Adam([parameter])
    assert step_in_blocks(optimizer)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(50, 100).t()
    assert not step_in_blocks(optimizer)
    assert step_in_blocks(optim.Adam([ones(2000)]))
    torch.set_num_threads(2)
    assert not step_in_blocks(optim.Adam([ones(2000)])), "blocks grow with the threads that share them"


# -- where steps are made in blocks ------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, where: str) -> list[bool]:
    """What `step_in_blocks` answers there, from now on."""
    answers: list[bool] = []

    def step(*args: Any) -> bool:
        answers.append(step_in_blocks(*args))
        return answers[-1]

    monkeypatch.setattr(f"{where}.step_in_blocks", step)
    return answers


@in_small_blocks
def test_servers_step_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = counted(monkeypatch, "torchstrat.parameter_server.server.shard_optimizer")
    start, gradient = numbers(2, torch.float32)
    shard, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = optim.Adam([plain], lr=0.1)
    on_server = ShardOptimizer.of(optimizer)
    answers.clear()  # it is tried out when it is made
    state: Any = {}
    for _ in range(3):
        shard.grad, plain.grad = gradient.clone(), gradient.clone()
        state = on_server.step(on_server.options, [[shard]], {shard: state})[shard]
        optimizer.step()
    assert answers == [True] * 3
    assert torch.equal(shard, plain)
    assert all(torch.equal(state[name], value) for name, value in optimizer.state[plain].items())


@in_small_blocks
@pytest.mark.parametrize("strategy", [ts.MirroredStrategy, ts.CentralStorageStrategy])
def test_hooks_of_users_find_the_step_before_or_behind_them(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that a pre-hook changes are stepped with, and a post-hook finds parameters and state stepped."""
    answers = counted(monkeypatch, "torchstrat.replicas.optimizer_step")

    def train(run: Callable[[Callable[[], None]], Any], scope: Any) -> list[torch.Tensor]:
        """The parameter after three steps, and a state that the post-hook has found."""
        found: list[torch.Tensor] = []
        with scope:
            module = nn.ParameterDict({"weight": nn.Parameter(numbers(1, torch.float64)[0])})
            optimizer = optim.Adam(module.parameters(), lr=0.1)

        def halve(*_: Any) -> None:
            module["weight"].grad = module["weight"].grad * 0.5

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(
            lambda optimizer, *_: found.append(optimizer.state[module["weight"]]["exp_avg"].clone())
        )

        def step() -> None:
            optimizer.zero_grad()
            (module["weight"] ** 2).sum().backward()
            optimizer.step()

        for _ in range(3):
            run(step)
        return [module["weight"].detach(), found[0]]

    expected = train(lambda step: step(), contextlib.nullcontext())
    assert not answers
    made_here = strategy(cpus(2))
    assert all(map(torch.equal, train(made_here.run, made_here.scope()), expected))
    assert answers == [True] * 3
    made_here.close()


# -- of what kind an optimizer is: as it is listed, or as the user says, which a trial checks --------------------------


LISTED = {one for one in vars(torch.optim).values() if isinstance(one, type) and is_listed(one)}
WHOLE = {torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS}
SPLITTABLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{cls.__name__: cls for cls in sorted(LISTED - WHOLE, key=lambda cls: cls.__name__)},
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad, started": partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "Adam fused": partial(torch.optim.Adam, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "RMSprop, centered": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Ftrl": Ftrl,
}


class RowNorm(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad / grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


class FactorsLargeTensors(PerTensor):
    """Element by element for small tensors alone, as factored optimizers do."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        scale = grad.square().mean().sqrt() if min(p.shape) >= 128 else grad.abs()
        p.sub_(grad / scale, alpha=group["lr"])


class NormedGroups(PerTensor):
    """Whole tensors in those groups that say so."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad / (grad.norm() if group["normed"] else 1.0), alpha=group["lr"])


class ByLayout(PerTensor):
    """Sums squares by rows for sparse gradients, by elements for dense ones."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            state.setdefault("rows", p.new_zeros(len(p))).index_add_(0, rows, values.square().flatten(1).mean(1))
            scale = state["rows"][rows].sqrt().reshape(-1, *(1 for _ in p.shape[1:]))
            p.index_add_(0, rows, -group["lr"] * values / scale)
        else:
            state.setdefault("sum", torch.zeros_like(p)).add_(grad.square())
            p.sub_(grad / state["sum"].sqrt(), alpha=group["lr"])


class Sometimes(PerTensor):
    """Looks at the whole from the tenth step on."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["k"] = state.get("k", 0) + 1
        p.sub_(grad / (grad.norm() if state["k"] > 9 else 1.0), alpha=group["lr"])


class CountsInGroup(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(grad, alpha=group["lr"] / group["k"])


class CountsOnItself(PerTensor):
    count = 0

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        p.sub_(grad, alpha=group["lr"] / self.count)


class CountsBeside(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.state["all"]["k"] = self.state["all"].get("k", 0) + 1  # type: ignore[index]
        p.sub_(grad, alpha=group["lr"])


class Raises(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise ArithmeticError("never works")


class Random(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad + torch.randn_like(p), alpha=group["lr"])


class OfTorch(torch.optim.Adam):
    """A subclass is another class."""


class Searching(torch.optim.LBFGS): ...


def over(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


def kind_of(cls: Callable[..., torch.optim.Optimizer], *shapes: tuple[int, ...], **settings: Any) -> Kind:
    """Of a class of which the user says that it steps element by element, or row by row."""
    optimizer = cls(over((2, 2)), **settings)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    return Kinds([type(optimizer)]).of(optimizer)


def test_every_optimizer_of_torch_is_listed() -> None:
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    unlisted = {cls for cls in classes if issubclass(cls, torch.optim.Optimizer)} - LISTED
    assert unlisted == {torch.optim.Optimizer}, "decide what kind these are of, in torchstrat/core/optimizers.py"


@pytest.mark.parametrize("name", SPLITTABLE)
def test_listed_optimizers_are_cut_and_the_trial_agrees(name: str) -> None:
    """So that neither has learned it from the other."""
    assert Kinds().of(SPLITTABLE[name](over((2, 2)))).may_cut_rows
    optimizer = SPLITTABLE[name](over((40, 7), (9,)))
    gradients = {check_word(optimizer, shape) for shape in [(40, 7), (9,), (6, 4, 3, 3), (6, 5)]}
    assert (Gradients.SPARSE in gradients) == (name == "SparseAdam")


@pytest.mark.parametrize("cls", sorted(WHOLE - {torch.optim.LBFGS}, key=str), ids=lambda cls: cls.__name__)
def test_listed_optimizers_of_whole_tensors_are_not(cls: type[torch.optim.Optimizer]) -> None:
    optimizer = cls(over((2, 2)))  # type: ignore[call-arg]
    assert Kinds().of(optimizer).tier is Tier.PARAMETERS
    with pytest.raises(UnsupportedError, match="came to values that are up to"):
        check_word(optimizer, (40, 7))


@pytest.mark.parametrize("cls", [RowNorm, ByLayout, CountsOnItself, OfTorch])
def test_any_other_class_stays_whole(cls: type[torch.optim.Optimizer]) -> None:
    assert Kinds().of(cls(over((20, 3)))) == UNKNOWN  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("cls", "shape", "gradients"),
    [
        (RowNorm, (20, 3), Gradients.ALIKE),
        (FactorsLargeTensors, (100, 100), Gradients.ALIKE),
        (ByLayout, (20, 3), Gradients.BY_LAYOUT),
        (OfTorch, (20, 3), Gradients.ALIKE),
        (partial(NormedGroups, normed=False), (20, 3), Gradients.ALIKE),
    ],
)
def test_what_the_user_says_of_a_class(cls: Any, shape: tuple[int, ...], gradients: Gradients) -> None:
    assert kind_of(cls, shape) == Kind(Tier.ROWS, gradients)


APART = "elementwise_optimizers names .*{}, .* apart.* Leave it out"
LOST = r"{}, which keeps state in {}\. .* Leave it out"
REFUSED: list[tuple[Any, tuple[int, ...], str]] = [
    (FactorsLargeTensors, (1_000_000, 256), APART),
    (Sometimes, (20, 3), APART),
    (Sometimes, (20,), APART),
    (Random, (20, 3), APART),
    (CountsInGroup, (20, 3), LOST.format("{}", r"self.param_groups\[0\]\['k'\]")),
    (CountsOnItself, (20, 3), LOST.format("{}", "self.count")),
    (CountsBeside, (20, 3), LOST.format("{}", r"self.state\['all'\]")),
    (Searching, (20, 3), r"{}\.step needs a closure.*MirroredStrategy"),
    (partial(OfTorch, capturable=True), (20, 3), "{} has capturable=True"),
    (partial(OfTorch, differentiable=True), (20, 3), "{} has differentiable=True"),
    (Raises, (20, 3), r"trial step of .*{}.* failed with ArithmeticError: never works"),
]


@pytest.mark.parametrize(("cls", "shape", "says"), REFUSED)
def test_what_the_user_says_is_refuted(cls: Any, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says.format(getattr(cls, "func", cls).__name__)):
        kind_of(cls, shape)


def test_one_group_of_whole_tensors_is_enough() -> None:
    first, second = over((20, 3), (20, 3))
    groups = [{"params": [first], "normed": False}, {"params": [second], "normed": True}]
    with pytest.raises(UnsupportedError, match="NormedGroups"):
        Kinds([NormedGroups]).of(NormedGroups(groups))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (torch.optim.SGD, WrongTypeError, "must be a list of classes"),
        ("MyOptimizer", WrongTypeError, "must be a list of classes"),
        ([torch.nn.Linear], WrongTypeError, "derived from torch.optim.Optimizer"),
        ([torch.optim.Adafactor], InvalidArgumentError, "names Adafactor, whose steps look at each parameter"),
    ],
)
def test_what_cannot_be_said(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Kinds(given)


def test_the_optimizer_and_the_random_state_stay_as_they_are() -> None:
    optimizer = CountsOnItself(over((20, 3)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for named in (CountsOnItself, Random):
        with pytest.raises(UnsupportedError):
            Kinds([named]).of(optimizer if named is CountsOnItself else Random(over((20, 3))))
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}
    assert optimizer.count == 0
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(20, 3))


def test_an_answer_is_found_once_per_class_and_hyperparameters() -> None:
    steps = []

    class Noted(PerTensor):
        def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
            steps.append(1)

    def asks(*shapes: tuple[int, ...], **settings: Any) -> bool:
        before = len(steps)
        Kinds([Noted]).of(Noted(over(*shapes), **settings))
        return len(steps) > before

    assert [asks((20, 3)), asks((20, 3)), asks((20, 3))] == [True, False, False]
    assert [asks((20, 3), extra=1), asks((20, 3), (20, 4))] == [True, True]


def test_a_state_is_loaded_into_the_groups_that_a_wrapper_has_too() -> None:
    """As replicas without rows load it: schedulers set the rate of the wrapper, the wrapped one steps by it."""
    module = nn.Linear(2, 1)
    wrapped = optim.Adam(module.parameters(), lr=0.1)
    groups, group, state = wrapped.param_groups, wrapped.param_groups[0], wrapped.state
    other = optim.Adam(copy.deepcopy(module).parameters(), lr=0.2)
    step_once(other)
    optimizers.load_in_place(wrapped, other.state_dict())
    assert wrapped.param_groups is groups
    assert wrapped.param_groups[0] is group
    assert wrapped.state is state
    assert group["lr"] == 0.2
    assert group["params"] == list(module.parameters())
    assert [float(state[p]["step"]) for p in module.parameters()] == [1, 1]


def step_once(optimizer: optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_compiled_step_that_raises_does_not_have_later_ones_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(torch.optim.SGD):
        is_broken = True

        def step(self, closure: Any = None) -> None:
            if self.is_broken:
                raise KeyError("in the step")

    def next_function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    graphs: list[object] = []
    before = _torch_private.before_step(lambda _, args, kwargs: (args, kwargs))
    monkeypatch.setitem(_torch_private.optimizer_pre_hooks, -1, before)
    monkeypatch.setitem(_torch_private.optimizer_post_hooks, -1, _torch_private.after_step(lambda *_: None))
    optimizer = Raising([nn.Parameter(torch.ones(2))])
    compiled = torch.compile(
        lambda x: (optimizer.step(), next_function(x))[1],
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyError):
            compiled(torch.ones(2))
        optimizer.is_broken = False
        optimizer.step()
        assert next_function(torch.zeros(2)).tolist() == [1, 1]
        assert not graphs
        compiled(torch.ones(2))
    assert graphs, "what follows the step is compiled"
