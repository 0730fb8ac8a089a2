"""`TPUStrategy.run`: what steps are given, may do and draw, and what comes back; on the fake of the CPU."""

from __future__ import annotations

import copy
import re
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from tests.support.tpu import fake_tpu, here, mirrored, own, rows_of, seen
from torchstrat import RunOptions
from torchstrat.errors import ContextError, OutOfRangeError
from torchstrat.testing.fake_tpu import batch_of_replicas, runtime_of

Pair = namedtuple("Pair", ["left", "right"])
X, ROWS, WIDE = own(1.0, 2.0), own([1.0, 2.0], [3.0, 4.0]), own(*torch.arange(24.0).reshape(2, 3, 4))


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    with fake_tpu(2) as made:
        yield made


def each(*values: Any) -> Any:
    return "of each replica", [*values]


def opened(result: Any) -> Any:
    """Values of each replica as `each` writes them, in the same structure."""
    if isinstance(result, ts.PerReplica):
        return each(*seen(result))
    if isinstance(result, dict):
        return {key: opened(value) for key, value in result.items()}
    if isinstance(result, Pair):
        return Pair(*map(opened, result))
    return type(result)(map(opened, result)) if isinstance(result, list | tuple) else result


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    y = (x * torch.ones(2, requires_grad=True)).detach_()
    assert not y.requires_grad
    return y + x.data * 2


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


RETURNED: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {}


def _returns(name: str, expected: Any, step: Callable[..., Any], *args: Any) -> None:
    RETURNED[name] = expected, step, args


_returns("a tensor of each replica", each(2.0, 4.0), lambda x: x * 2, X)
_returns("a fresh tensor that is equal everywhere", each([1, 1], [1, 1]), lambda: torch.ones(2))
_returns(
    "a nest",
    {"list": [each(1, 2), None], "pair": Pair(each(2, 3), ("a", 5))},
    lambda x: {"list": [x, None], "pair": Pair(x + 1, ("a", 5))},
    own(1, 2),
)
_returns(
    "components in a nest",
    (each(3, 7), each([2, 3], [4, 5]), each(20, 30)),
    lambda a, nest, pair: (a.sum(), nest[0]["deep"][0] + 1, pair.left * pair.right),
    *(ROWS, [{"deep": (ROWS, 1)}], Pair(ts.PerReplica([2, 3]), 10)),
)
_returns("a shape", [2, 1, torch.int64, 1, 2], lambda x: [x.ndim, len(x), x.dtype, *x.shape], own([[1, 2]], [[3, 4]]))
_returns("numbers", each(1.5, 2.5), lambda x: x, ts.PerReplica([1.5, 2.5]))
_returns("bools", each(True, False), lambda x: x, ts.PerReplica([True, False]))
_returns("numbers of NumPy", each(1.0, 2.0), lambda x: x, ts.PerReplica([np.float64(1), np.float64(2)]))
_returns("arrays", each([1, 1], [0, 0]), lambda x: x, ts.PerReplica([np.ones(2), np.zeros(2)]))
_returns("equal texts", "a", lambda x: x, ts.PerReplica(["a", "a"]))
_returns("equal Python numbers", 3, lambda x: x, ts.PerReplica([3, 3]))
_returns("None twice", None, lambda x: x, ts.PerReplica([None, None]))
_returns("numbers of two kinds", each(2.0, 1.5), lambda x: torch.ones(()) + x, ts.PerReplica([1, 0.5]))
_returns("arrays of two kinds", each([2.0], [1.5]), lambda x: x + 1, ts.PerReplica([np.array([1]), np.array([0.5])]))
_returns("a mirrored value", each([2, 3], [2, 3]), lambda x: x + 1, ts.Mirrored([torch.tensor([1.0, 2.0])] * 2))
_returns("a replica's number", each(0, 1), lambda: torch.as_tensor(here().replica_id_in_sync_group))
_returns("a row by number", each(5, 6), lambda x: x[here().replica_id_in_sync_group], torch.tensor([5.0, 6.0]))
_returns("numbers of replicas and devices", [2, 1], lambda: [here().num_replicas_in_sync, len(here().devices)])
_returns(
    "other strides",
    each([[1, 3], [2, 4]], [[13, 15], [14, 16]]),
    lambda x: (x * 1).as_strided((2, 2), (1, 2), 1),
    WIDE,
)
_returns(
    "strides of a copy",
    each([0, 4, 8, 1], [12, 16, 20, 13]),
    lambda x: x.t().contiguous().as_strided((4,), (1,)),
    WIDE,
)
_returns("data and detach_", each([3, 6], [9, 12]), without_gradient, ROWS)
_returns("inference mode", each([2, 4], [6, 8]), in_inference_mode, ROWS)


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_run_returns(strategy: ts.TPUStrategy, name: str) -> None:
    expected, step, args = RETURNED[name]
    assert opened(strategy.run(step, args=args)) == expected
    with torch.inference_mode():
        assert opened(strategy.run(step, args=args)) == expected


def test_values_of_each_replica_are_shown_and_combined(strategy: ts.TPUStrategy) -> None:
    result = strategy.run(lambda x: (x * 2, x > 1, torch.ones(2), torch.stack([x + 1, x + 2])), args=(X,))
    assert repr(result[0]) == "PerReplica:{\n  0: tensor(2.),\n  1: tensor(4.)\n}"
    assert (float(strategy.reduce("sum", result[0])), float(strategy.reduce("mean", result[0]))) == (6.0, 3.0)
    assert [bool(one) for one in strategy.local_results(result[1])] == [False, True]
    assert strategy.gather(result[2], axis=0).tolist() == [1, 1, 1, 1]
    again = strategy.run(lambda x: x * 2, args=(result[3],))
    assert strategy.gather(again, axis=0).tolist() == [4, 6, 6, 8]
    assert int(strategy.reduce("sum", strategy.run(lambda x: x, args=(own(1, 2),)))) == 3
    for size in (3, 5000):  # large ones are not reduced in the program
        large = strategy.run(lambda x, size=size: x.expand(size) + 0, args=(own(1.0, 5.0),))
        assert set(strategy.reduce("mean", large).tolist()) == {3.0}
        assert strategy.reduce("sum", large).shape == (size,)
        assert float(strategy.reduce("sum", large, axis=0)) == 6.0 * size


def test_what_all_replicas_share_is_not_wrapped(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        layer = nn.BatchNorm1d(2)
    same, array = object(), np.ones(2)
    for value in (torch.ones(2), layer.weight, layer.running_mean, None, 3, "text", same, array):
        assert strategy.run(lambda value: value, args=(value,)) is value
    assert strategy.run(lambda: layer.weight) is layer.weight
    assert strategy.run(lambda: layer.running_mean) is layer.running_mean
    assert strategy.run(lambda x: x, args=(ts.PerReplica([same, same]),)) is same


def test_one_replica_gives_bare_values() -> None:
    with fake_tpu(1) as strategy:
        result = strategy.run(lambda x: {"x": x + 1, "id": here().replica_id_in_sync_group}, args=(torch.ones(2),))
        assert isinstance(result["x"], torch.Tensor)
        assert (result["x"].tolist(), result["id"]) == ([2, 2], 0)
        assert strategy.run(lambda x: x + 1, args=(own(1.0),)).item() == 2.0


def test_results_do_not_change_with_what_they_were_made_of(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        layer = nn.Linear(1, 1)
    before = strategy.run(lambda: layer.weight * 1)
    shared = strategy.run(lambda: layer.weight.detach())
    first = layer.weight.detach().item()
    with torch.no_grad():
        layer.weight.add_(1)
    assert [one.item() for one in (*before.values, *shared.values)] == [first] * 4


def test_complex_numbers_by_their_parts(strategy: ts.TPUStrategy) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x + 1)
        return (z / z.conj()).abs() + (z + 1).angle() + z.mean().real

    def of_size(x: torch.Tensor, size: float) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        z = torch.complex(x, x + 1) * size
        values = [z.abs() / size, ((2 + 1j) / z).real * size]
        return [*(one.detach() for one in values), torch.autograd.grad(values[1].sum(), x)[0]]

    def of_any_size(x: torch.Tensor, size: float) -> list[torch.Tensor]:
        return of_size(x, size)[:2]  # PyTorch's own gradients of the largest are 0

    for found, x in zip(strategy.run(step, args=(WIDE,)).values, WIDE.values, strict=True):
        torch.testing.assert_close(found, step(x))
    for call, size in ((of_size, 1e16), (of_size, 1e-10), (of_size, 1e-16), (of_any_size, 1e30), (of_any_size, 1e-30)):
        each = strategy.run(lambda x, call=call, size=size: call(x, size), args=(WIDE,))
        for index, x in enumerate(WIDE.values):
            torch.testing.assert_close([one.values[index] for one in each], call(x, size))


# -- calls in the wrong place ---------------------------------------------------------------------------------------


def test_after_close(strategy: ts.TPUStrategy) -> None:
    strategy.close()
    with pytest.raises(ContextError, match="has been closed"):
        strategy.run(lambda: None)
    with pytest.raises(ContextError, match="has been closed"), strategy.scope():
        pass


def test_one_run_at_a_time(strategy: ts.TPUStrategy) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def waits() -> None:
        inside.set()
        assert go_on.wait(30)

    other = threading.Thread(target=strategy.run, args=(waits,))
    other.start()
    try:
        assert inside.wait(30)
        with pytest.raises(ContextError, match="while another run of it goes on, in another thread"):
            strategy.run(lambda: None)
    finally:
        go_on.set()
        other.join()
    assert strategy.run(lambda: 2) == 2


def test_copies(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(ContextError, match=r"cannot be copied by copy\.copy"):
        copy.copy(strategy)
    with strategy.scope():
        model = nn.Linear(1, 1)
    twin = copy.deepcopy(strategy)
    try:
        assert type(twin) is ts.TPUStrategy
        assert twin is not strategy
        assert twin.num_replicas_in_sync == 2
        assert twin.device_assignment.core_assignment.tolist() == strategy.device_assignment.core_assignment.tolist()
        assert twin.compilations == ()
        with pytest.warns(UserWarning, match="TPUStrategy.scope.. has not seen"):
            twin.run(lambda: model(torch.ones(1)).sum())
    finally:
        twin.close()


def test_variables_of_elsewhere_are_adopted_with_a_warning(strategy: ts.TPUStrategy) -> None:
    model = nn.Linear(3, 1)
    with pytest.warns(UserWarning, match=r"TPUStrategy\.scope\(\) has not seen: a Linear made outside of it"):
        strategy.run(lambda x: model(x).sum().backward(), args=(own([[1.0, 0, 0]], [[3.0, 0, 0]]),))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2, 0, 0]]


def test_an_optimizer_of_another_thread_that_is_in_its_step_when_a_run_begins(strategy: ts.TPUStrategy) -> None:
    """The hooks that see when an optimizer steps are PyTorch's global ones."""
    begun, over = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            begun.set()
            assert over.wait(60)

    def train() -> None:
        try:
            Slow([nn.Parameter(torch.zeros(1))], lr=0.1).step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)

    def step(x: torch.Tensor) -> torch.Tensor:
        over.set()  # the other one ends, and its hooks are called, while this step is watched
        thread.join(60)
        return x + 1

    strategy.run(step, args=(X,))
    assert not failures


# == datasets: batches on their way to the devices, and those that do not divide =====================================


def loader(rows: int = 10, batch: int = 4) -> DataLoader[Any]:
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    return DataLoader(TensorDataset(x, torch.arange(rows)), batch_size=batch)


def seen_batches(strategy: ts.Strategy, dataset: Any) -> list[Any]:
    """Of each batch, what each replica that had rows saw."""
    found: list[Any] = []
    for batch in dataset:
        result = strategy.run(lambda batch: (batch[0] * 1, batch[1] * 1), args=(batch,))
        columns = [[one.tolist() for one in strategy.local_results(leaf)] for leaf in result]
        found.append(list(zip(*columns, strict=True)))
    return found


@pytest.mark.parametrize(("rows", "batch"), [(8, 4), (10, 4), (9, 3), (5, 4)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_see_what_they_see_on_other_strategies(rows: int, batch: int, replicas: int) -> None:
    with mirrored(replicas) as other:
        dataset = other.distribute_dataset(loader(rows, batch))
        expected, spec = seen_batches(other, dataset), repr(dataset.element_spec)
    with fake_tpu(replicas) as strategy:
        dataset = strategy.distribute_dataset(loader(rows, batch))
        assert (seen_batches(strategy, dataset), repr(dataset.element_spec)) == (expected, spec)


def test_even_batches_are_placed_once_and_uneven_ones_are_not(strategy: ts.TPUStrategy) -> None:
    batches = list(strategy.distribute_dataset(loader(11, 4)))  # 4, 4 and 3 rows
    assert runtime_of(strategy).placed == 4  # two leaves of two batches
    assert [batch[0].batch_info.rows for batch in batches] == [(2, 2), (2, 2), (2, 1)]
    strategy.run(lambda batch: batch[0].sum(), args=(batches[0],))
    assert seen(batches[1][1]) == [[4, 5], [6, 7]]
    with fake_tpu(1) as alone:
        assert all(isinstance(leaf, torch.Tensor) for batch in alone.distribute_dataset(loader(4, 2)) for leaf in batch)


def test_a_mean_over_uneven_batches_counts_rows(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        weight = torch.nn.Linear(2, 1, bias=False)
    for batch in strategy.distribute_dataset(loader(11, 4)):
        weight.zero_grad()
        strategy.run(lambda batch: weight(batch[0]).mean().backward(), args=(batch,))
    last = torch.arange(22.0).reshape(11, 2)[8:]
    torch.testing.assert_close(weight.weight.grad, last.mean(dim=0, keepdim=True))


def test_one_after_the_other(strategy: ts.TPUStrategy) -> None:
    iterator = iter(strategy.distribute_dataset(loader(8, 4)))
    assert len(strategy.local_results(iterator.get_next())) == 2
    assert iterator.get_next_as_optional().has_value()
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


def test_datasets_and_values_from_functions(strategy: ts.TPUStrategy) -> None:
    contexts: list[Any] = []

    def make(context: Any) -> Any:
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return loader(8, context.get_per_replica_batch_size(4))

    found = seen_batches(strategy, strategy.distribute_datasets_from_function(make))
    assert contexts == [(1, 0, 2)]
    assert [[y for _, y in batch] for batch in found] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    values = strategy.distribute_values_from_function(lambda context: torch.tensor(context.replica_id_in_sync_group))
    assert seen(strategy.run(lambda x: x + 1, args=(values,))) == [1, 2]


def test_no_rows_of_many_dimensions(strategy: ts.TPUStrategy) -> None:
    batch = batch_of_replicas([torch.ones(2, 1, 2, 2, 2), torch.ones(0, 1, 2, 2, 2)], run_empty=True)
    assert [len(one) for one in strategy.local_results(strategy.run(lambda x: x + 1, args=(batch,)))] == [2, 0]


def test_dicts_and_arrays(strategy: ts.TPUStrategy) -> None:
    (batch,) = strategy.distribute_dataset([{"x": torch.arange(4.0), "n": torch.arange(4).numpy()}])
    result = strategy.run(lambda batch: batch["x"] + batch["n"], args=(batch,))
    assert seen(result) == [[0, 2], [4, 6]]


# == edits in place: whose the edited tensor is ======================================================================

PAIRS = own([1.0, 2.0], [5.0, 6.0])


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_variable_takes_what_the_first_replica_makes_of_it_and_a_buffer_the_mean(as_lists: bool) -> None:
    def step(x: torch.Tensor) -> None:
        with torch.no_grad():
            if as_lists:
                torch._foreach_add_([layer.weight, layer.floating], [x, x[0] * 2])
            else:
                layer.weight.add_(x)
                layer.floating.add_(x[0] * 2)
            layer.weight.data.mul_(2)
            layer.weight[0, 0] = x[0] * 10
        layer.floating.mul_(0.5)
        layer.counts.add_(x[0].long())

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1)
            nn.init.zeros_(layer.weight)
            layer.register_buffer("floating", torch.tensor(2.0))
            layer.register_buffer("counts", torch.tensor(10))
        differ = r"buffer '(floating|counts)' of Linear differs|the replicas have changed Linear\.weight"
        with pytest.warns(UserWarning, match=differ) as said:
            strategy.run(step, args=(PAIRS,))
        assert len({re.search(differ, str(one.message))[0] for one in said}) == len(said) == 3  # type: ignore[index]
        assert layer.weight.tolist() == [[10.0, 4.0]]
        assert float(layer.floating) == 4.0
        assert int(layer.counts) == 11  # integers have no mean: the first replica's


def _edited_as_lists(b: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every form of arguments that edits of lists have."""
    a = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    torch._foreach_add_(a, b, alpha=0.5)
    torch._foreach_sub_(a, 0.25)
    torch._foreach_mul_(a, [2.0, 0.5])
    torch._foreach_div_(a, torch.tensor(2.0))
    torch._foreach_lerp_(a, b, 0.25)
    torch._foreach_lerp_(a, b, weights=[torch.full((2,), 0.5)] * 2)
    torch._foreach_addcmul_(a, b, b, value=0.5)
    torch._foreach_addcdiv_(a, b, b, [0.25, 0.5])
    torch._foreach_addcmul_(a, b, b, torch.tensor([2.0, 3.0]))
    torch._foreach_maximum_(a, b)
    torch._foreach_minimum_(a, [50.0, 40.0])
    torch._foreach_pow_(a, 2)
    torch._foreach_sqrt_(a)
    rest = [torch.ones(2), torch.ones(2)]
    torch._foreach_copy_(rest, b)
    torch._foreach_zero_(rest[1:])
    return [*a, *rest]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # functorch's, of lerp_ and the like
def test_edits_of_lists_are_edits_of_each() -> None:
    with fake_tpu(2) as strategy:
        result = strategy.run(lambda x: torch.stack(_edited_as_lists([x, x + 1])), args=(PAIRS,))
        for found, x in zip(result.values, PAIRS.values, strict=True):
            torch.testing.assert_close(found, torch.stack(_edited_as_lists([x, x + 1])))
        with pytest.raises(RuntimeError, match=r"same (number of tensors|length)"):
            strategy.run(lambda: torch._foreach_add_([torch.ones(2)], [torch.ones(2)] * 2))


def test_gradients_that_a_step_writes_are_combined() -> None:
    def step(x: torch.Tensor) -> None:
        if weight.grad is None:
            weight.grad = x * 1
        else:
            weight.grad.copy_(x * 1)

    with fake_tpu(2) as strategy:
        with strategy.scope():
            holder = nn.ParameterList([torch.zeros(2)])
        weight = holder[0]
        for _ in range(2):
            strategy.run(step, args=(PAIRS,))
            assert weight.grad is not None
            assert weight.grad.tolist() == [3.0, 4.0]


def totals(x: torch.Tensor) -> Any:
    total, count, product, quotient = torch.zeros(()), torch.zeros(()), torch.ones(()), torch.ones(())
    for row in x:
        total += row
        count -= 1
        product *= row
        quotient /= row
    return total, count, product, quotient


def aliases_and_buffers(x: torch.Tensor) -> Any:
    total = torch.zeros(2)
    alias = total
    total.add_(x)
    buffer = torch.zeros(3, 2)
    buffer[1] = x
    buffer[2, 0] += x[1]
    return alias, buffer


def flags(x: torch.Tensor) -> Any:
    seen = torch.zeros(2, dtype=torch.bool)
    seen |= x > 2
    seen ^= x > 3
    return seen, torch.ones(2, dtype=torch.bool).logical_and_(x > 2)


def own_tensors(x: torch.Tensor) -> Any:
    y = x * 1
    y.add_(1).mul_(x)
    y[0] = 7
    y[1] += x[0]
    return y, x.mul_(3)


@pytest.mark.parametrize("step", [totals, aliases_and_buffers, flags, own_tensors])
def test_what_a_step_has_made_or_was_given_is_the_replicas_own(step: Any) -> None:
    before = [one.clone() for one in PAIRS.values]
    with fake_tpu(2) as strategy:
        result = strategy.run(step, args=(PAIRS,))
    assert [one.tolist() for one in PAIRS.values] == [one.tolist() for one in before]
    for index, x in enumerate(before):
        found = [one.values[index] for one in (result if isinstance(result, tuple) else (result,))]
        assert [one.tolist() for one in found] == [one.tolist() for one in step(x)]


def test_a_layer_that_is_made_when_it_is_first_called() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.LazyLinear(2)
        strategy.run(lambda x: layer(x).sum().backward(), args=(own([[1.0, 2.0]], [[3.0, 4.0]]),))
        assert layer.weight.shape == (2, 2)
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[2, 3], [2, 3]]
        assert strategy.run(lambda: here().num_replicas_in_sync) == 2


# == random numbers: whose they are ==================================================================================

given = torch.Generator()


def results(step: Callable[[], object], replicas: int = 2) -> list[torch.Tensor]:
    with fake_tpu(replicas) as strategy:
        torch.manual_seed(0)
        return list(strategy.local_results(strategy.run(step)))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(mine, wanted) for mine, wanted in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(8),
        lambda: torch.empty(8).normal_(),
        lambda: torch.zeros(8).uniform_(),
        lambda: (torch.zeros(8) + 1).exponential_(),
        lambda: torch.empty(64).bernoulli_(0.5),
        lambda: nn.init.normal_(torch.empty(8)),
        lambda: nn.init.xavier_uniform_(torch.empty(3, 3)),
        lambda: nn.init.normal_(tensor=torch.empty(8)),
        lambda: torch.rand(8, generator=torch.default_generator),
        lambda: torch.empty(8).normal_(generator=torch.default_generator),
        lambda: nn.functional.dropout(torch.ones(64)),
        lambda: torch.randn_like(torch.zeros(8)),
        lambda: torch.randint(0, 1000, (8,)),
    ],
)
def test_each_replica_draws_its_own_and_the_same_from_the_same_seed(draw: Callable[[], torch.Tensor]) -> None:
    """By other numbers in the next run, and with another seed; the program's generator stays where it is."""

    def runs(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        found = [one for _ in range(2) for one in strategy.local_results(strategy.run(draw))]
        own = torch.rand(2)
        torch.manual_seed(seed)
        assert torch.equal(own, torch.rand(2))
        return found

    with fake_tpu(2) as strategy:
        first, again, other = runs(3), runs(3), runs(4)
    assert same(first, again)
    drawn = [*first, *other]
    assert not any(torch.equal(drawn[one], drawn[two]) for one in range(8) for two in range(one))


def test_first_values_of_a_variable_are_one_for_all() -> None:
    def step() -> None:
        nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.bias.uniform_(5, 6)

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 3)
        for draw in (step, lambda: nn.init.normal_(layer.weight.data).sum()):
            before = layer.weight.detach().clone()
            strategy.run(draw)
            assert not torch.equal(before, layer.weight)
            assert torch.equal(*strategy.run(lambda: layer.weight * 1).values)
        assert all(5 <= one <= 6 for one in layer.bias.tolist())


def test_a_generator_of_the_steps_own_is_each_replicas() -> None:
    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        made = torch.rand(2, generator=generator)
        filled = torch.empty(2).normal_(generator=generator)
        return [made, filled, torch.randperm(5, generator=generator)]

    first, second = results(step)
    assert same(first, step())
    assert same(second, step())


def test_from_a_generator_that_was_given_the_replicas_draw_in_turns() -> None:
    given.manual_seed(5)
    seen = results(lambda: torch.rand(2, generator=given))
    given.manual_seed(5)
    assert torch.equal(torch.cat(seen), torch.cat([torch.rand(2, generator=given) for _ in range(2)]))


def test_a_seed_in_a_step_is_every_replicas_seed() -> None:
    def step() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.cat([torch.rand(4), torch.empty(4).normal_()])

    with fake_tpu(2) as strategy:
        torch.manual_seed(7)
        before = torch.default_generator.get_state()
        runs = [strategy.local_results(strategy.run(step)) for _ in range(2)]
        assert all(torch.equal(runs[0][0], one) for run in runs for one in run)
        filled = strategy.run(lambda x: (torch.manual_seed(3), nn.init.normal_(x * 1))[1], args=(PAIRS,))
        assert torch.equal(*filled.values)
        # It is a seed of the replicas' streams: outside the generator is where it was.
        torch.manual_seed(7)
        wanted = torch.rand(3)
        torch.default_generator.set_state(before)
        strategy.run(step)
        assert torch.equal(torch.rand(3), wanted)


def test_a_seed_that_was_put_aside_finds_its_stream_where_it_was() -> None:
    def drawn(strategy: ts.Strategy) -> list[float]:
        return [float(one) for one in strategy.local_results(strategy.run(lambda: torch.rand(())))]

    with fake_tpu(2) as strategy:
        torch.manual_seed(7)
        first, second = drawn(strategy), drawn(strategy)
        torch.manual_seed(7)
        assert drawn(strategy) == first
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            drawn(strategy)
        assert drawn(strategy) == second


def test_with_a_global_view_a_generator_and_a_seed_are_those_of_one_device() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        return [torch.rand(3), torch.rand(3, generator=generator), torch.empty(3).normal_(generator=generator)]

    with fake_tpu(2) as strategy:
        runs = [strategy.run(step, options=RunOptions(global_view=True)) for _ in range(2)]
    assert same(*runs)
    assert same(runs[0][1:], step()[1:])


# == a step that sees the batches of all replicas as one =============================================================

GLOBAL = ts.RunOptions(global_view=True)


class LastOutput(nn.Module):
    """The last output of an LSTM over three numbers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def training(make: Callable[[], nn.Module], batches: list[Any], run: Callable[[Any, Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [run(step, batch) for batch in batches]
    return [*losses, *(one.detach() for one in model.state_dict().values())]


@pytest.mark.parametrize("make", [LastOutput, normalised])
@pytest.mark.parametrize("counts", [[(2, 2), (2, 2)], [(4, 4), (3, 1), (2, 0)]])
def test_numbers_of_plain_training(make: Callable[[], nn.Module], counts: list[tuple[int, int]]) -> None:
    batches = [rows_of(one, seed=seed) for seed, one in enumerate(counts)]
    plain = training(lambda: make().double(), [torch.cat(one.values) for one in batches], lambda step, x: step(x))
    with fake_tpu(2) as strategy:

        def made() -> nn.Module:
            with strategy.scope():
                return make().double()

        found = training(made, batches, lambda step, x: strategy.run(step, args=(x,), options=GLOBAL))
    for mine, wanted in zip(found, plain, strict=True):
        assert type(mine) in (torch.Tensor, nn.Parameter)
        torch.testing.assert_close(mine, wanted)


def test_inputs_are_joined() -> None:
    """Those of an earlier run too, and whatever is said of logical devices."""

    def step(x: torch.Tensor, shared: torch.Tensor, more: Any, *, flag: bool) -> Any:
        return strategy.split_to_logical_devices(x, [1, 2]) * 2, shared, more["numbers"], flag

    with fake_tpu(2, 2) as strategy:
        shared, rows = torch.ones(3), rows_of((2, 1), columns=4)
        numbers = strategy.run(lambda x: x * 2, args=(own([1], [2]),))
        x, same, joined, flag = strategy.run(
            step, args=(rows, shared, {"numbers": numbers}), kwargs={"flag": True}, options=GLOBAL
        )
        assert torch.equal(x, 2 * torch.cat(rows.values))
        assert same is shared
        assert joined.tolist() == [2, 4]
        assert flag is True


def test_replicas_without_rows_add_none() -> None:
    calls: list[int] = []
    with fake_tpu(2) as strategy:
        strategy.run(lambda x: calls.append(len(x)), args=(rows_of((2, 0)),), options=GLOBAL)
        strategy.run(lambda x: calls.append(len(x)), args=(rows_of((0, 0)),), options=GLOBAL)
    assert calls == [2]


def test_options_are_told_apart_and_other_strategies_take_no_notice() -> None:
    assert ts.RunOptions() != GLOBAL
    assert hash(ts.RunOptions()) != hash(GLOBAL)
    assert "global_view=True" in repr(GLOBAL)
    assert "global_view" not in repr(ts.RunOptions())
    with mirrored() as strategy:
        assert seen(strategy.run(lambda x: x.sum(), args=(own([1.0], [2.0]),), options=GLOBAL)) == [1, 2]


@pytest.mark.parametrize(("replicas", "rank"), [(1, 2), (1, 6), (2, 2), (2, 6)])
def test_what_runs_in_the_background_copies_and_records_nothing(
    replicas: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_xla makes zeros of a tensor that another thread moves, by `Tensor.to` or by an operation that is recorded,
    while a program starts."""
    moving: set[str] = set()

    def noting(move: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            moving.add(threading.current_thread().name)
            return move(*args, **kwargs)

        return noted

    batches = [torch.full((2 * replicas, *[1] * (rank - 1)), float(index)) for index in range(4)]
    with fake_tpu(replicas, 2) as strategy:
        iterator = iter(strategy.distribute_dataset([{"x": batch, "n": None} for batch in batches]))
        for name in ("to", "reshape"):
            monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
        placed = [next(iterator)["x"] for _ in batches]
        monkeypatch.undo()
        assert "torchstrat-prefetch" not in moving
        sums = [strategy.reduce("sum", strategy.run(torch.sum, args=(batch,))) for batch in placed]
        assert [float(one) for one in sums] == [2.0 * replicas * index for index in range(4)]
        assert runtime_of(strategy).placed >= 4
