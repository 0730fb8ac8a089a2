"""`ts.Variable`: where it lives, what reading gives, and what becomes of the values that replicas assign."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from torchstrat.errors import ReplicaDivergenceError, StrategyMixingError

SUM, MEAN = ts.VariableAggregation.SUM, ts.VariableAggregation.MEAN
FIRST, NONE = ts.VariableAggregation.ONLY_FIRST_REPLICA, ts.VariableAggregation.NONE
ON_READ = ts.VariableSynchronization.ON_READ


def mirrored(replicas: int = 2) -> ts.Strategy:
    return ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


def central(replicas: int = 2) -> ts.Strategy:
    return ts.CentralStorageStrategy([f"cpu:{index}" for index in range(replicas)], parameter_device="cpu:7")


@pytest.fixture(params=[mirrored, central])
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def in_mirrored() -> Iterator[ts.Strategy]:
    made = mirrored()
    yield made
    made.close()


@pytest.fixture
def in_central() -> Iterator[ts.Strategy]:
    made = central()
    yield made
    made.close()


def variable(strategy: ts.Strategy, initial: Any = 10.0, **arguments: Any) -> ts.Variable:
    with strategy.scope():
        return ts.Variable(initial, **arguments)


def number() -> torch.Tensor:
    """1.0 on replica 0, 2.0 on replica 1: a tensor of each replica's own."""
    context = ts.get_replica_context()
    assert context is not None
    return torch.tensor(context.replica_id_in_sync_group + 1.0)


def copies(strategy: ts.Strategy, variable: ts.Variable) -> list[Any]:
    return [one.tolist() for one in strategy.local_results(variable)]


# -- creation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initial", "arguments", "dtype", "shape"),
    [
        (1.5, {}, torch.float32, ()),
        (3, {}, torch.int64, ()),
        ([1, 2], {"dtype": torch.float64}, torch.float64, (2,)),
        (np.zeros((2, 1)), {}, torch.float64, (2, 1)),
        (torch.ones(3, requires_grad=True), {"dtype": torch.float16}, torch.float16, (3,)),
        (lambda: torch.zeros(2), {"shape": (None,)}, torch.float32, (2,)),
    ],
)
def test_initial_values(
    strategy: ts.Strategy, initial: Any, arguments: dict[str, Any], dtype: torch.dtype, shape: Any
) -> None:
    made = variable(strategy, initial, **arguments)
    assert (made.dtype, tuple(made.shape), made.name, made.trainable) == (dtype, shape, "Variable", False)
    assert not made.read_value().requires_grad


def test_the_initial_tensor_is_not_shared() -> None:
    start = torch.zeros(2)
    made = ts.Variable(start)
    made.assign_add([1.0, 2.0])
    assert start.tolist() == [0, 0]
    made.read_value().fill_(9)
    assert made.numpy().tolist() == [1, 2]


def test_components_live_where_the_strategy_puts_them(in_central: ts.Strategy, in_mirrored: ts.Strategy) -> None:
    one, two = variable(in_central), variable(in_mirrored)
    assert in_central.local_results(one) == (one,)
    assert in_central.extended.device_of(one) == "cpu:7"
    components = in_mirrored.local_results(two)
    assert [in_mirrored.extended.device_of(component) for component in components] == ["cpu:0", "cpu:1"]
    components[1].assign(3.0)
    assert copies(in_mirrored, two) == [10, 3]
    assert repr(one) == ("<Variable 'Variable' shape=(), dtype=torch.float32, aggregation=NONE on cpu:7: tensor(10.)>")
    assert repr(two).endswith("on cpu:0, cpu:1: {0: tensor(10.), 1: tensor(3.)}>")


def test_created_in_a_replica_it_is_one_variable(strategy: ts.Strategy) -> None:
    made: list[ts.Variable] = []

    def step() -> torch.Tensor:
        made.append(ts.Variable(number(), aggregation=SUM, name="in step"))
        made[-1].assign_add(number())
        return made[-1].read_value()

    assert [float(value) for value in strategy.local_results(strategy.run(step))] == [4, 4]
    assert made[0] is made[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"initial": None}, ValueError, "needs an initial_value"),
        ({"aggregation": "sum"}, ValueError, "ts.VariableAggregation.SUM"),
        ({"synchronization": 3}, ValueError, "ts.VariableSynchronization"),
        ({"initial": [1.0, 2.0], "shape": (3,)}, ValueError, r"shape=\(3,\)"),
        ({"initial": 1.5, "dtype": torch.int32}, TypeError, "int32 cannot hold"),
        ({"initial": "text"}, TypeError, "got str 'text'"),
        ({"initial": [[1], [2, 3]]}, ValueError, "cannot make a tensor"),
        ({"initial": ts.PerReplica([1.0, 2.0])}, TypeError, "all replicas start from the same"),
    ],
)
def test_wrong_arguments(
    strategy: ts.Strategy, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        variable(strategy, **arguments)


@pytest.mark.parametrize(
    "refused", [{"synchronization": ts.VariableSynchronization.NONE}, {"initial": 1, "aggregation": MEAN}]
)
def test_kinds_that_only_mirrored_variables_refuse(
    in_mirrored: ts.Strategy, in_central: ts.Strategy, refused: dict[str, Any]
) -> None:
    for strategy in (in_mirrored, mirrored(1)):
        with pytest.raises(ValueError, match="mirrored"):
            variable(strategy, **refused)
    variable(in_central, **refused)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_reads_like_a_tensor() -> None:
    v = ts.Variable([1.0, 2.0, 4.0])
    plain = torch.tensor([1.0, 2.0, 4.0])
    for one, other in (
        (v + 1, plain + 1),
        (1 - v, 1 - plain),
        (v / v, plain / plain),
        (plain * v, plain * plain),
        (-v, -plain),
        (torch.stack([v, plain]), torch.stack([plain, plain])),  # type: ignore[list-item]
        (v.cumsum(0), plain.cumsum(0)),
        (v == plain, plain == plain),
        (v != 2, plain != 2),
        (v[1:], plain[1:]),
        (torch.as_tensor(np.asarray(v)), plain),
    ):
        assert torch.equal(one, other)
    assert (len(v), [float(one) for one in v], v.tolist()) == (3, [1, 2, 4], [1, 2, 4])
    count = ts.Variable(2)
    assert ([10, 20, 30][count], int(count), bool(count), f"{count:d}") == (30, 2, True, "2")
    assert (2 in count, 4 in v, 3 in v, count in v) == (True, True, False, True)
    assert complex(ts.Variable(1 + 2j)) == 1 + 2j
    assert len({v, v}) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v.add_(1),
        lambda v: torch.add(torch.ones(2), 1, out=v),
        lambda v: torch.nn.init.zeros_(v),
        lambda v: v.__setitem__(0, 1.0),
        lambda v: v.__iadd__(1.0),
    ],
)
def test_in_place_operations_are_refused(edit: Callable[[ts.Variable], Any]) -> None:
    v = ts.Variable([1.0, 2.0])
    with pytest.raises(NotImplementedError, match="use assign"):
        edit(v)
    assert v.tolist() == [1, 2]


def test_an_assignment_leaves_graphs_and_views_alone() -> None:
    v, w = ts.Variable(2.0), torch.tensor(3.0, requires_grad=True)
    loss, view = w * v, v.view(1)
    v.assign(100.0)
    loss.backward()
    assert w.grad == 2
    assert view.tolist() == [2]


def test_an_assignment_in_inference_mode_can_be_followed_by_another() -> None:
    v = ts.Variable(1.0)
    with torch.inference_mode():
        _ = v + 1
        v.assign_add(torch.tensor(1.0))
    v.assign_add(1.0)
    assert v == 3


def test_copies_and_pickles(in_mirrored: ts.Strategy) -> None:
    v = variable(in_mirrored, 1.0, aggregation=SUM)
    twin = copy.deepcopy({"v": v})["v"]
    in_mirrored.run(lambda: twin.assign_add(number()))
    assert (float(v), float(twin)) == (1, 4)
    file = io.BytesIO()
    torch.save({"v": v}, file)
    file.seek(0)
    assert torch.load(file)["v"] == torch.tensor(1.0)


# -- assigning: what comes of each method, aggregation and strategy is recorded in tests/conformance ------------------


def test_replicas_assign_once_and_see_it_at_once(strategy: ts.Strategy) -> None:
    v = variable(strategy, aggregation=SUM)
    returned, seen = strategy.run(lambda: (v.assign_sub(number()), v.read_value()))
    assert [float(one) for one in strategy.local_results(seen)] == [7, 7]
    assert copies(strategy, v) == [7] * len(strategy.local_results(v))
    is_central = isinstance(strategy, ts.CentralStorageStrategy)
    assert (returned is v) if is_central else (returned.values == strategy.local_results(v))


@pytest.mark.parametrize(
    ("initial", "aggregation", "message"),
    [(10.0, NONE, "2 replicas would each assign to the one copy"), (10, MEAN, "a mean of integers is none")],
)
def test_what_the_one_copy_refuses(in_central: ts.Strategy, initial: Any, aggregation: Any, message: str) -> None:
    v = variable(in_central, initial, aggregation=aggregation)
    with pytest.raises(ValueError, match=message):
        in_central.run(lambda: v.assign(number().to(v.dtype)))
    assert v == 10
    if aggregation is MEAN:
        in_central.run(lambda: v.assign(5))  # one value: nothing to average
        assert v == 5


@pytest.mark.parametrize("value", [torch.tensor([2.0]), np.array([2.0])])
def test_one_value_for_all_replicas(strategy: ts.Strategy, value: Any) -> None:
    for aggregation in (MEAN, FIRST):
        v = variable(strategy, [1.0], aggregation=aggregation)
        strategy.run(lambda v=v: v.assign_add(value))
        assert v.tolist() == [3]
    v = variable(strategy, [1.0], aggregation=SUM)
    with pytest.raises(ValueError, match="adding up a value that is the same everywhere is ambiguous"):
        strategy.run(lambda: v.assign_add(value))
    with pytest.raises(ValueError, match=r"a float of Python, .* once or once per replica is ambiguous"):
        strategy.run(lambda: v.assign_add(float(number())))
    assert v.tolist() == [1]
    v = variable(strategy, 0.0, aggregation=MEAN)
    strategy.run(lambda: v.assign(float(number())))
    assert v == 1.5, "Python numbers that differ"


def test_outside_of_run_values_are_applied_as_they_are(strategy: ts.Strategy) -> None:
    v = variable(strategy, aggregation=SUM)
    assert v.assign(7.0) is v
    strategy.run(lambda: ts.get_replica_context().merge_call(lambda _: v.assign_sub(2.0)))  # type: ignore[union-attr]
    assert copies(strategy, v) == [5.0] * len(strategy.local_results(v))
    v.assign(ts.PerReplica([torch.tensor(1.0), torch.tensor(2.0)]))
    assert copies(strategy, v) == ([1.0] if isinstance(strategy, ts.CentralStorageStrategy) else [1.0, 2.0])


def test_scatter_add_adds_up_what_is_for_one_row(strategy: ts.Strategy) -> None:
    table = variable(strategy, torch.zeros(3, 2), aggregation=SUM)

    def step() -> None:
        row = int(number())
        table.scatter_add(torch.sparse_coo_tensor([[row, row]], torch.ones(2, 2), (3, 2), check_invariants=True))

    strategy.run(step)
    assert table.tolist() == [[0, 0], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("method", "value", "error", "message"),
    [
        ("assign", torch.tensor(1.0), ValueError, r"assign got shape \(\) for a variable of shape \(2,\)"),
        ("assign_add", torch.ones(3), ValueError, "does not broadcast"),
        ("assign_add", torch.ones(1, 2), ValueError, "does not broadcast"),
        ("assign", torch.ones(2, dtype=torch.float64), ValueError, r"convert it with .to\(torch.float32\)"),
        ("assign", [1j, 2j], TypeError, "cannot hold"),
        ("assign", None, TypeError, "got NoneType"),
        ("assign_add", torch.ones(2).to_sparse(), TypeError, "Use scatter_add"),
        ("scatter_add", torch.ones(2), TypeError, "sparse COO"),
    ],
)
def test_wrong_values(strategy: ts.Strategy, method: str, value: Any, error: type[Exception], message: str) -> None:
    v = variable(strategy, [1.0, 2.0], aggregation=FIRST)
    with pytest.raises(error, match=message):
        getattr(v, method)(value)
    with pytest.raises(error, match=message):
        strategy.run(lambda: getattr(v, method)(value))
    assert copies(strategy, v) == [[1, 2]] * len(strategy.local_results(v))


def test_a_declared_shape_with_unknown_sizes() -> None:
    v = ts.Variable(torch.zeros(2), shape=(None,))
    v.assign([1.0, 2.0, 3.0])
    assert tuple(v.shape) == (3,)
    with pytest.raises(ValueError, match=r"shape \(None,\)"):
        v.assign([[1.0]])


def test_replicas_that_assign_to_different_variables(strategy: ts.Strategy) -> None:
    one, two = (variable(strategy, name=name, aggregation=SUM) for name in ("one", "two"))
    with pytest.raises(ReplicaDivergenceError, match="different variables"):
        strategy.run(lambda: (one if number() == 1 else two).assign_add(number()))
    assert (float(one), float(two)) == (10, 10)


def test_in_the_scope_of_another_strategy(strategy: ts.Strategy) -> None:
    v, plain = variable(strategy, aggregation=SUM), ts.Variable(1.0)
    other = ts.OneDeviceStrategy("cpu:0")
    with other.scope(), pytest.raises(StrategyMixingError, match="assign_add"):
        v.assign_add(1.0)
    with other.scope():
        plain.assign_add(1.0)  # an ordinary variable belongs to nobody
    assert (float(v), float(plain)) == (10, 2)


def test_with_one_replica_any_aggregation_is_a_plain_assignment() -> None:
    for strategy in (ts.OneDeviceStrategy("cpu:0"), mirrored(1), central(1)):
        for aggregation in ts.VariableAggregation:
            v = variable(strategy, aggregation=aggregation)
            strategy.run(lambda v=v: v.assign_add(2.0))
            assert v == 12
        strategy.close()
    with pytest.raises(TypeError, match="PerReplica"):
        v.assign(ts.PerReplica([1.0]))


# -- ON_READ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("aggregation", "combined"), [(SUM, 5.0), (MEAN, 2.5), (FIRST, 2.0)])
def test_on_read(in_mirrored: ts.Strategy, aggregation: ts.VariableAggregation, combined: float) -> None:
    v = variable(in_mirrored, 1.0, aggregation=aggregation, synchronization=ON_READ)
    in_mirrored.run(lambda: v.assign_add(number()))
    assert (copies(in_mirrored, v), float(v)) == ([2, 3], combined)
    v.assign(8.0)
    assert float(v) == 8


@pytest.mark.parametrize("whole", [5, -5, 0, 1])
def test_whole_numbers_that_do_not_divide_are_shared_out(in_mirrored: ts.Strategy, whole: int) -> None:
    v = variable(in_mirrored, 0, aggregation=SUM, synchronization=ON_READ)
    v.assign(whole)
    assert int(v) == whole


def test_on_read_that_has_no_single_value(in_mirrored: ts.Strategy) -> None:
    v = variable(in_mirrored, synchronization=ON_READ)
    with pytest.raises(ValueError, match="has no single value"):
        v.read_value()
    assert "{0: tensor(10.), 1: tensor(10.)}" in repr(v)
    total = variable(in_mirrored, aggregation=SUM, synchronization=ON_READ)
    with pytest.raises(ValueError, match="its components add up"):
        total.assign_add(1.0)


# -- with the rest of a strategy ------------------------------------------------------------------------------------


def test_reduce_and_gather_of_variables(strategy: ts.Strategy) -> None:
    v = variable(strategy, [3.0])
    assert strategy.reduce("mean", v) is v
    with pytest.raises(ValueError, match="same for all"):
        strategy.reduce("sum", v)
    assert strategy.reduce("sum", v, axis=0) == 6
    assert strategy.gather(v, axis=0).tolist() == [3] * len(strategy.local_results(v))


def test_reduce_of_components_that_differ(in_mirrored: ts.Strategy) -> None:
    on_read = variable(in_mirrored, 3.0, aggregation=SUM, synchronization=ON_READ)
    assert in_mirrored.reduce("sum", on_read) == 6
    v = variable(in_mirrored, [3.0])
    returned = in_mirrored.run(lambda: v.assign(number().reshape(1)))
    assert in_mirrored.reduce("sum", returned).tolist() == [3]


def test_a_step_that_uses_a_variable_is_not_warned_about(strategy: ts.Strategy) -> None:
    v = variable(strategy, aggregation=SUM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(lambda: v.assign_add(number()))
    assert v == 13
