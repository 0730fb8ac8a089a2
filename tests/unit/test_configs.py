"""Every file under configs/ is composed, and says what torchstrat/config.py allows."""

from pathlib import Path

import pytest

from torchstrat import config as schema
from torchstrat.errors import InvalidArgumentError

hydra = pytest.importorskip("hydra")
from omegaconf import OmegaConf  # noqa: E402

from torchstrat.experiments.launch import register_schema  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
NEEDED = {
    "data/csv": ["data.path=rows.csv"],
    "data/npz": ["data.path=rows.npz"],
    "data/click_logs": ["data.path=log.tsv"],
}


def compose(*overrides: str) -> schema.ExperimentConfig:
    register_schema()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        composed = hydra.compose("config", overrides=list(overrides))
    return schema.experiment_from_mapping(OmegaConf.to_container(composed, resolve=True))


def test_there_are_files_of_every_group():
    groups = {str(path.parent) for path in FILES}
    assert groups == {".", *schema.GROUPS, "experiment", "debug"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_is_composed(file):
    choice = file.with_suffix("").as_posix()
    overrides = [choice.replace("/", "=", 1)] if "/" in choice else []
    config = compose(*overrides, *NEEDED.get(choice, []))
    group, _, name = choice.partition("/")
    if group in schema.GROUPS:
        chosen = getattr(config, group)
        assert type(chosen) is schema.GROUPS[group][name]
        assert chosen.name == name


@pytest.mark.parametrize("group", schema.GROUPS)
def test_every_choice_of_the_schema_has_a_file(group):
    assert {path.stem for path in (CONFIGS / group).glob("*.yaml")} == set(schema.GROUPS[group])


@pytest.mark.parametrize("group", schema.GROUPS)
def test_files_and_schema_agree_on_the_defaults(group):
    """A default that is said twice must be said the same."""
    for name, kind in schema.GROUPS[group].items():
        from_file = getattr(compose(f"{group}={name}", *NEEDED.get(f"{group}/{name}", [])), group)
        from_schema = kind()
        if hasattr(from_schema, "path"):
            from_schema.path = from_file.path
        assert from_file == from_schema


def test_strategies_are_those_of_the_registry():
    registry = pytest.importorskip("torchstrat.registry")
    assert set(schema.GROUPS["strategy"]) <= set(registry.names())


def test_an_experiment_picks_one_of_each_and_can_be_overridden():
    config = compose("experiment=digits_mlp_central", "strategy=mirrored", "optimizer.lr=0.5")
    assert config.name == "digits_mlp_central"
    assert (config.strategy.name, config.model.name, config.optimizer.name) == ("mirrored", "mlp", "adam")
    assert config.optimizer.lr == 0.5


def test_recsys_runs_on_a_log_that_the_user_names_as_well():
    assert compose("experiment=recsys").data == schema.SyntheticClicksConfig(global_batch=256)
    config = compose("experiment=recsys", "data=click_logs", "data.path=log.tsv", "strategy=parameter_server")
    assert config.data == schema.ClickLogsConfig(path="log.tsv", global_batch=256)
    assert (config.model.name, config.optimizer.name) == ("wide_and_deep", "adagrad")
    assert config.strategy == schema.ParameterServerConfig(workers=2, servers=2)


def test_rules_by_name_are_given_on_the_command_line():
    config = compose(
        "strategy=tpu", "strategy.logical_mesh_shape=[2,2]", "+strategy.sharding_rules={*1.weight:[[d0,d1],null]}"
    )
    assert config.strategy == schema.TpuConfig(
        logical_mesh_shape=[2, 2], sharding_rules={"*1.weight": [["d0", "d1"], None]}
    )


@pytest.mark.parametrize("experiment", ["digits_convnet_spatial", "digits_mlp_tensor_parallel"])
def test_experiments_for_logical_devices_run_under_every_strategy(experiment):
    assert compose(f"experiment={experiment}").strategy.name == "tpu"
    for strategy in schema.GROUPS["strategy"]:
        assert compose(f"experiment={experiment}", f"strategy={strategy}").strategy.name == strategy


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "debug").glob("*.yaml")])
def test_debug_runs_are_short_and_on_the_cpu(name):
    config = compose("experiment=digits_convnet", f"debug={name}")
    assert config.max_steps is not None
    assert config.max_steps <= 20
    assert config.cluster.accelerator == "cpu"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": {"name": "mirored"}}, r"strategy\.name=mirored is not known; choose one of one_device, mirrored"),
        ({"strategy": {}}, r"strategy\.name=None is not known"),
        ({"strategy": {"name": "mirrored", "replicas": 0}}, r"strategy\.replicas=0 must be greater than 0"),
        (
            {"strategy": {"name": "mirrored", "replicas": 2, "devices": ["cpu:0", "cpu:1"]}},
            r"strategy\.replicas=2 and strategy\.devices=.* were both given",
        ),
        ({"strategy": {"name": "one_device", "gradient_reduce_op": "sum"}}, r"belongs to losses that are sums"),
        ({"strategy": {"name": "one_device", "gradient_reduce_op": "max"}}, r"choose one of mean, sum"),
        ({"data": {"name": "csv"}}, r"data\.path has no default; set data\.path=…"),
        ({"data": {"name": "digits", "global_batch": "64"}}, r"data\.global_batch='64' is not of type int"),
        ({"data": {"name": "digits", "global_batch": True}}, r"data\.global_batch=True is not of type int"),
        ({"data": {"name": "digits", "test_fraction": 1}}, r"must lie strictly between 0 and 1"),
        ({"model": {"name": "mlp", "hidden": [8, "x"]}}, r"model\.hidden=\[8, 'x'\] is not of type list\[int\]"),
        ({"model": {"name": "convnet", "channels": [6]}}, r"cannot be split into model\.groups=4 groups"),
        ({"model": {"name": "convnet", "norm": "layer"}}, r"choose one of group, batch, sync_batch"),
        ({"model": {"name": "wide_and_deep", "embedding_width": 0}}, r"embedding_width=0 must be greater than 0"),
        (
            {"model": {"name": "wide_and_deep"}, "optimizer": {"name": "adam"}},
            r"optimizer=adam cannot use the sparse gradients .* use optimizer=adagrad .* model\.sparse_gradients=false",
        ),
        (
            {"model": {"name": "wide_and_deep"}, "optimizer": {"name": "adagrad", "weight_decay": 0.1}},
            r"optimizer\.weight_decay=0\.1 shrinks every row",
        ),
        ({"optimizer": {"name": "adagrad", "initial_accumulator_value": -1.0}}, r"must not be negative"),
        ({"data": {"name": "click_logs"}}, r"data\.path has no default; set data\.path=…"),
        ({"data": {"name": "click_logs", "path": "x", "category_rows": 0}}, r"category_rows=0 must be greater than 0"),
        ({"data": {"name": "synthetic_clicks", "seed": -1}}, r"data\.seed=-1 must not be negative"),
        ({"strategy": {"name": "parameter_server", "workers": 0}}, r"strategy\.workers=0 must be greater than 0"),
        ({"strategy": {"name": "parameter_server", "servers": 0}}, r"strategy\.servers=0 must be greater than 0"),
        ({"strategy": {"name": "tpu", "logical_devices": 0}}, r"strategy\.logical_devices=0 must be greater than 0"),
        ({"strategy": {"name": "tpu", "virtual_devices": -8}}, r"strategy\.virtual_devices=-8 must be greater than 0"),
        (
            {"strategy": {"name": "tpu", "logical_devices": 2, "logical_mesh_shape": [2, 2]}},
            r"logical_mesh_shape=\[2, 2\] has 4 places for strategy\.logical_devices=2; these must agree",
        ),
        ({"strategy": {"name": "tpu", "logical_mesh_shape": []}}, r"logical_mesh_shape=\[\] must be positive sizes"),
        ({"strategy": {"name": "tpu", "sharding_rules": [["w", None]]}}, r"sharding_rules=\[.*\] is not of type dict"),
        (
            {"strategy": {"name": "tpu"}, "model": {"name": "wide_and_deep"}, "optimizer": {"name": "adagrad"}},
            r"strategy=tpu has no sparse gradients, .* model\.sparse_gradients=false",
        ),
        ({"epoch": 3}, r"epoch is not a setting; there are name, strategy"),
        ({"epochs": 0}, r"epochs=0 must be greater than 0"),
        ({"progress": "loud"}, r"choose one of auto, bar, lines, off"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(InvalidArgumentError, match=message):
        schema.experiment_from_mapping(values)


def test_a_mapping_needs_to_say_only_what_differs():
    config = schema.experiment_from_mapping({"strategy": {"name": "mirrored", "replicas": 3}, "epochs": 2})
    assert config == schema.ExperimentConfig(strategy=schema.MirroredConfig(replicas=3), epochs=2)
