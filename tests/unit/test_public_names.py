"""Public names: every one resolves, says what it is, and takes what TensorFlow's documents list."""

from __future__ import annotations

import enum
import inspect
import types
from operator import attrgetter

import pytest

import torchstrat as ts
from torchstrat import registry
from torchstrat.errors import InvalidArgumentError, WrongTypeError


def test_the_list_is_sorted_and_complete() -> None:
    assert ts.__all__ == sorted(set(ts.__all__))
    unlisted = {
        name
        for name, value in vars(ts).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in ts.__all__
    }
    assert not unlisted, "imported into the package and not exported"


@pytest.mark.parametrize("name", ts.__all__)
def test_every_name_and_every_public_method_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(ts, name)
    inherited = [getattr(base, "__doc__", None) for base in getattr(value, "__mro__", ())[1:]]
    assert value.__doc__
    assert value.__doc__ not in inherited
    is_enum = inspect.isclass(value) and issubclass(value, enum.Enum)
    for member, method in vars(value).items() if inspect.isclass(value) and not is_enum else ():
        function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if not member.startswith("_") and inspect.isfunction(function) and function.__name__ != "<lambda>":
            assert inspect.getdoc(getattr(value, member)), f"{name}.{member} has no docstring"


def test_strategies_answer_to_both_spellings() -> None:
    for name in ("distribute_dataset", "distribute_datasets_from_function", "local_results"):
        assert callable(getattr(ts.Strategy, name))
        assert callable(getattr(ts.Strategy, f"experimental_{name}"))


STRATEGIES = [
    ts.CentralStorageStrategy,
    ts.LocalSGDStrategy,
    ts.MirroredStrategy,
    ts.MultiWorkerMirroredStrategy,
    ts.OneDeviceStrategy,
    ts.ParameterServerStrategy,
    ts.TPUStrategy,
    type(ts.get_strategy()),
]
# reduce has the v1 document's default of axis everywhere.
METHODS = """
distribute_datasets_from_function(self, dataset_fn, options=None)
experimental_assign_to_logical_device(self, tensor, logical_device_id)
experimental_distribute_dataset(self, dataset, options=None)
experimental_distribute_datasets_from_function(self, dataset_fn)
experimental_distribute_values_from_function(self, value_fn)
experimental_local_results(self, value)
experimental_make_numpy_dataset(self, numpy_input, session=None)
experimental_replicate_to_logical_devices(self, tensor)
experimental_run(self, fn, input_iterator=None)
experimental_split_to_logical_devices(self, tensor, partition_dimensions)
gather(self, value, axis)
make_dataset_iterator(self, dataset)
make_input_fn_iterator(self, input_fn, replication_mode=InputReplicationMode.PER_WORKER)
reduce(self, reduce_op, value, axis=None)
run(self, fn, args=(), kwargs=None, options=None)
scope(self)
update_config_proto(self, config_proto)
""".strip().splitlines()
OTHERS = """
CentralStorageStrategy(compute_devices=None, parameter_device=None)
ParameterServerStrategy(cluster_resolver, variable_partitioner=None)
TPUStrategy(tpu_cluster_resolver=None, device_assignment=None)
ClusterCoordinator(strategy)
ClusterCoordinator.schedule(self, fn, args=(), kwargs=None)
ClusterCoordinator.create_per_worker_dataset(self, dataset_fn)
Server(cluster_spec, job_name=None, task_index=None, protocol=None)
cluster_resolver.TPUClusterResolver(tpu=None)
tpu.experimental.initialize_tpu_system(cluster_resolver=None)
partitioners.FixedShardsPartitioner(num_shards)
partitioners.MinSizePartitioner(min_shard_bytes=262144, max_shards=1)
ReplicaContext.all_reduce(self, reduce_op, value)
ReplicaContext.all_gather(self, value, axis)
StrategyExtended.reduce_to(self, reduce_op, value, destinations)
StrategyExtended.batch_reduce_to(self, reduce_op, value_destination_pairs)
StrategyExtended.colocate_vars_with(self, colocate_with_variable)
StrategyExtended.call_for_each_replica(self, fn, args=(), kwargs=None)
""".strip().splitlines()


def said(parameter: inspect.Parameter) -> str:
    default = str(parameter.default) if isinstance(parameter.default, enum.Enum) else repr(parameter.default)
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={default}"


def assert_takes(owner: object, call: str) -> None:
    """The documented arguments come first, by position and by name; what is added has a default."""
    name, _, documented = call.removesuffix(")").partition("(")
    count = len(documented.replace("()", "").split(", ")) if documented else 0
    parameters = list(inspect.signature(attrgetter(name)(owner)).parameters.values())
    own, added = parameters[:count], parameters[count:]
    assert ", ".join(map(said, own)) == documented
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in own)
    assert all(one.default is not inspect.Parameter.empty for one in added)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("call", METHODS)
def test_methods_of_strategies(call: str, strategy: type[ts.Strategy]) -> None:
    assert_takes(strategy, call)


@pytest.mark.parametrize("call", OTHERS)
def test_what_the_documents_refer_to(call: str) -> None:
    assert_takes(ts, call)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["cluster_resolver", "num_replicas_in_sync"])
def test_attributes_of_strategies(name: str, strategy: type[ts.Strategy]) -> None:
    attribute = inspect.getattr_static(strategy, name)
    assert isinstance(attribute, property)
    assert attribute.fset is None


def test_what_contexts_and_options_have() -> None:
    assert (ts.InputContext().num_input_pipelines, ts.InputContext().input_pipeline_id) == (1, 0)
    assert (ts.ValueContext().replica_id_in_sync_group, ts.ValueContext().num_replicas_in_sync) == (0, 1)
    options = ts.RunOptions()
    assert options.experimental_enable_dynamic_batch_size is True
    assert options.experimental_bucketizing_dynamic_shape is False
    assert options.experimental_xla_options is None
    assert {mode.name for mode in ts.InputReplicationMode} == {"PER_WORKER", "PER_REPLICA"}
    assert {policy.name for policy in ts.AutoShardPolicy} == {"OFF", "AUTO", "FILE", "DATA", "HINT"}
    assert [(op.name, op.value) for op in ts.ReduceOp] == [("SUM", "SUM"), ("MEAN", "MEAN")]


class Own(ts.Strategy):
    def __init__(self, parts: int = 2) -> None:
        self.parts = parts


class HandsOn(Own):
    def __init__(self, **options: int) -> None:
        super().__init__(**options)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.mark.parametrize("own", [Own, HandsOn])
def test_a_registered_strategy_is_found_and_made_by_its_name(own: type[Own]) -> None:
    for strategy in (ts.OneDeviceStrategy, own):  # a cell that runs again replaces its strategy
        registry.register("own", strategy)
        assert registry.get("own") is strategy
    assert registry.names()[-1] == "own"
    assert registry.names().count("own") == 1
    made = registry.create("own", parts=3)
    assert isinstance(made, own)
    assert made.parts == 3


def test_names_that_are_taken_and_what_is_no_strategy_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'mirrored' is torchstrat's own MirroredStrategy"):
        registry.register("mirrored", Own)
    with pytest.raises(WrongTypeError, match=r"register\('own', …\) needs a class derived from ts.Strategy; got 3"):
        registry.register("own", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="unknown strategy 'own'; there are one_device, "):
        registry.get("own")
