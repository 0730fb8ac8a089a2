"""Steps in blocks: the same bits as a step of the whole, the same state, and hooks in the same order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import torchstrat as ts
from tests.unit.optimizer_settings import SETTINGS, WHOLE, numbers
from torchstrat import optimizer_blocks
from torchstrat.optimizer_blocks import is_worth_blocks, step_in_blocks
from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer
from torchstrat.stand_ins import bare_step

Make = Callable[[Any], optim.Optimizer]

SIZE = 5003
AT_ONCE = {name for name in SETTINGS if "foreach" in name or "fused" in name} | {"SGD"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(optimizer_blocks, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(optimizer_blocks, "_FEWEST_BLOCKS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(make: Make, dtype: torch.dtype) -> optim.Optimizer:
    """Over a large parameter, a small one, and one that never has a gradient."""
    start = numbers(1, SIZE, dtype)[0]
    parameters = [nn.Parameter(start.clone()), nn.Parameter(start[:7].clone()), nn.Parameter(start.clone())]
    return make(parameters)


def stepped(optimizer: optim.Optimizer, step: Callable[[optim.Optimizer], Any], steps: range) -> optim.Optimizer:
    large, small, _ = optimizer.param_groups[0]["params"]
    for number, gradient in enumerate(numbers(8, SIZE, large.dtype)[1:]):
        if number not in steps:
            continue
        large.grad, small.grad = gradient.clone(), gradient[:7].clone()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (1 - 0.05 * number)
        step(optimizer)
    return optimizer


def in_blocks(optimizer: optim.Optimizer) -> None:
    assert step_in_blocks(optimizer)


def require_same(one: optim.Optimizer, other: optim.Optimizer) -> None:
    for mine, its in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, its)
        assert list(one.state.get(mine, {})) == list(other.state.get(its, {}))
        for name, value in one.state.get(mine, {}).items():
            expected = other.state[its][name]
            if isinstance(value, torch.Tensor):
                assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
                assert torch.equal(value, expected)
            else:
                assert value == expected
    assert set(one.state) <= set(one.param_groups[0]["params"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in AT_ONCE])
def test_bits_and_state_are_those_of_a_step_of_the_whole(name: str, dtype: torch.dtype) -> None:
    whole, blocked = made(SETTINGS[name], dtype), made(SETTINGS[name], dtype)
    require_same(stepped(blocked, in_blocks, range(7)), stepped(whole, bare_step, range(7)))
    for optimizer in (blocked, whole):
        optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
    require_same(stepped(blocked, in_blocks, range(2)), stepped(whole, bare_step, range(2)))


@pytest.mark.parametrize("name", sorted(AT_ONCE))
def test_kernels_that_do_all_at_once_are_left_alone(name: str) -> None:
    optimizer = made(SETTINGS[name], torch.float32)
    before = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    assert not is_worth_blocks(optimizer)
    assert not step_in_blocks(optimizer)
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], before))


@pytest.mark.parametrize("make", [partial(optim.SGD, momentum=0.9), optim.Adagrad, optim.RMSprop, optim.Adam])
def test_steps_of_few_kernels_are_cut_from_more_blocks_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(4096 // 4 * 3))
    parameter.grad = torch.ones_like(parameter)
    for fewest, cuts in ((2, True), (3, make is optim.Adam)):
        monkeypatch.setattr(optimizer_blocks, "_FEWEST_BLOCKS", fewest)
        optimizer = make([parameter])
        assert is_worth_blocks(optimizer) is cuts
        assert step_in_blocks(optimizer) is cuts


class Mine(optim.Adam):
    """May do anything."""


UNFIT: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor | None]]] = {
    "no gradient": lambda: (torch.zeros(SIZE), None),
    "a sparse gradient": lambda: (torch.zeros(SIZE), torch.ones(SIZE).to_sparse()),
    "an expanded gradient": lambda: (torch.zeros(SIZE), torch.ones(1).expand(SIZE)),
    "columns first": lambda: (torch.zeros(50, SIZE).t(), torch.ones(SIZE, 50)),
    "no memory": lambda: (torch.zeros(SIZE, device="meta"), torch.ones(SIZE, device="meta")),
}


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT)
def test_what_is_no_row_in_memory_is_not_cut(make: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    values, gradient = make()
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    assert not step_in_blocks(optim.Adagrad([parameter]))
    assert parameter.is_meta or not parameter.any()


@pytest.mark.parametrize("make", [*WHOLE.values(), Mine, partial(optim.Adam, differentiable=True)])
def test_optimizers_that_may_look_at_the_whole_are_stepped_whole(make: Make) -> None:
    parameter = nn.Parameter(torch.zeros(SIZE))
    parameter.grad = torch.ones(SIZE)
    assert not is_worth_blocks(make([parameter]))
    assert not step_in_blocks(make([parameter]))


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


def test_the_first_step_never_has_the_state_twice() -> None:
    """The process would keep that memory."""
    alive: list[int] = []

    def step(optimizer: optim.Optimizer) -> None:
        bare_step(optimizer)
        alive.append(sum(len(group["params"]) for group in optimizer.param_groups))

    parameter = nn.Parameter(torch.zeros(SIZE))
    parameter.grad = torch.ones(SIZE)
    optimizer = optim.Adam([parameter])
    assert step_in_blocks(optimizer, step)
    blocks = -(-SIZE // 1024)
    assert alive == [1] * blocks + [0]
    assert step_in_blocks(optimizer, step)
    assert alive == [1] * blocks + [0, blocks]


def test_state_that_is_no_row_keeps_its_parameter_whole() -> None:
    parameter = nn.Parameter(torch.zeros(100, 50))
    parameter.grad = torch.ones(100, 50)
    optimizer = optim.Adam([parameter])
    assert step_in_blocks(optimizer)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(50, 100).t()
    assert not step_in_blocks(optimizer)


def test_blocks_grow_with_the_threads_that_share_them() -> None:
    parameter = nn.Parameter(torch.zeros(2000))
    parameter.grad = torch.ones(2000)
    assert step_in_blocks(optim.Adam([parameter]))
    torch.set_num_threads(2)
    assert not step_in_blocks(optim.Adam([parameter]))


# -- where steps are made ---------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, where: str) -> list[bool]:
    """What `step_in_blocks` answers there, from now on."""
    answers: list[bool] = []

    def step(*args: Any) -> bool:
        answers.append(step_in_blocks(*args))
        return answers[-1]

    monkeypatch.setattr(f"{where}.step_in_blocks", step)
    return answers


def test_servers_step_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = counted(monkeypatch, "torchstrat.parameter_server.server.shard_optimizer")
    start, gradient = numbers(2, SIZE, torch.float32)
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


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(1, SIZE, torch.float64)[0])


@pytest.mark.parametrize("strategy", [ts.MirroredStrategy, ts.CentralStorageStrategy])
def test_hooks_of_the_users_find_the_step_before_them_or_behind_them(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that a pre-hook changes are stepped with, and a post-hook finds parameters and state stepped."""
    answers = counted(monkeypatch, "torchstrat.replicas.last_hooks")
    found: list[torch.Tensor] = []

    def train(run: Callable[[Callable[[], None]], Any], scope: Any) -> torch.Tensor:
        with scope:
            module = Watched()
            optimizer = optim.Adam(module.parameters(), lr=0.1)

        def halve(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
            module.weight.grad = module.weight.grad * 0.5

        def look(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
            found.append(optimizer.state[module.weight]["exp_avg"].clone())

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(look)

        def step() -> None:
            optimizer.zero_grad()
            (module.weight**2).sum().backward()
            optimizer.step()

        for _ in range(3):
            run(step)
        return module.weight.detach()

    expected = train(lambda step: step(), contextlib.nullcontext())
    plain = found[:]
    assert not answers
    found.clear()
    made_here = strategy(["cpu:0", "cpu:1"])
    assert torch.equal(train(made_here.run, made_here.scope()), expected)
    assert answers == [True] * 3
    assert torch.equal(found[0], plain[0])
    made_here.close()
