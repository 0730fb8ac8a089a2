"""Every file under configs/ is composed, and says what torchstrat/app/config.py and the calls that it names allow."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

from tests.choices import chosen
from torchstrat import registry
from torchstrat.app import cli
from torchstrat.app import config as schema
from torchstrat.errors import InvalidArgumentError

hydra = pytest.importorskip("hydra")

from torchstrat.app import build, data, launch, loop, targets  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
GROUPS = ("strategy", "model", "data", "optimizer")
NEEDED = {
    "data/csv": ["data.path=rows.csv"],
    "data/npz": ["data.path=rows.npz"],
}


def compose(*overrides: str) -> schema.ExperimentConfig:
    launch.register_schema()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        composed = hydra.compose("config", overrides=list(overrides))
    config = schema.experiment_from_mapping(launch.values_of(composed, list(overrides)))
    targets.check(config)
    return config


def test_there_are_files_of_every_group():
    assert {str(path.parent) for path in FILES} == {".", *GROUPS, "cluster", "experiment", "debug"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_is_composed(file):
    choice = file.with_suffix("").as_posix()
    overrides = [choice.replace("/", "=", 1)] if "/" in choice else []
    config = compose(*overrides, *NEEDED.get(choice, []))
    group, _, name = choice.partition("/")
    if group in GROUPS:
        assert config.name_of(group) == getattr(config, group)["name"] == name


@pytest.mark.parametrize("file", [file for file in FILES if str(file.parent) in GROUPS], ids=str)
def test_files_say_every_setting_and_the_defaults_of_our_own_calls(file):
    """A default that is said twice must be said the same. Optimizers are PyTorch's, and their rates ours."""
    group, name = str(file.parent), file.stem
    call = chosen(f"{group}={name}")
    if group == "optimizer":
        return
    written, defaults = targets.arguments(group, call), targets.defaults(group, call)
    if "synchronous" in call["_target_"]:
        del written["name"]
        constructor = inspect.signature(build.on_tpu if name == "tpu" else registry.get(name)).parameters
        defaults |= {key: constructor[key].default for key in written.keys() - defaults.keys()}
        defaults = {key: value for key, value in defaults.items() if key in written}
    for key, value in written.items():
        if value != schema.MISSING:
            default = [*defaults[key]] if isinstance(defaults[key], tuple) else defaults[key]
            assert (value or None) == (default or None), key
    assert set(defaults) <= set(written)


def test_strategies_are_those_of_the_registry():
    assert {file.stem for file in FILES if str(file.parent) == "strategy"} <= set(registry.names())


def test_an_experiment_picks_one_of_each_and_can_be_overridden():
    config = compose("experiment=digits_mlp_central", "strategy=mirrored", "optimizer.lr=0.5")
    assert config.name == "digits_mlp_central"
    assert [config.name_of(group) for group in ("strategy", "model", "optimizer")] == ["mirrored", "mlp", "adam"]
    assert config.optimizer["lr"] == 0.5


@pytest.mark.parametrize("plus", ["", "+"])
def test_rules_by_name_are_given_on_the_command_line(plus):
    config = compose(
        "strategy=tpu",
        "strategy.logical_mesh_shape=[2,2]",
        f"{plus}strategy.sharding_rules={{*1.weight:[[d0,d1],null]}}",
    )
    assert config.strategy["sharding_rules"] == {"*1.weight": [["d0", "d1"], None]}
    assert config.strategy["logical_mesh_shape"] == [2, 2]


@pytest.mark.parametrize("experiment", ["digits_convnet_spatial", "digits_mlp_tensor_parallel"])
def test_experiments_for_logical_devices_run_under_every_strategy(experiment):
    assert compose(f"experiment={experiment}").name_of("strategy") == "tpu"
    for strategy in [file.stem for file in FILES if str(file.parent) == "strategy"]:
        assert compose(f"experiment={experiment}", f"strategy={strategy}").name_of("strategy") == strategy


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "debug").glob("*.yaml")])
def test_debug_runs_are_short_and_on_the_cpu(name):
    config = compose("experiment=digits_convnet", f"debug={name}")
    assert config.max_steps is not None
    assert config.max_steps <= 20
    assert config.cluster.accelerator == "cpu"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module beside the command."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class MyNet(torch.nn.Module):\n"
        "    def __init__(self, classes: int, width: int, depth: int = 1, name: str = 'x', inner=None):\n"
        "        super().__init__()\n"
        "        self.said = (classes, width, depth, name, inner)\n"
        "def rows(count: int = 10):\n"
        "    data = torch.utils.data.TensorDataset(torch.zeros(count, 3), torch.arange(count) % 4)\n"
        "    return data, data\n"
        "def one_set(): return torch.utils.data.TensorDataset(torch.zeros(5))\n"
        "number = 3\n"
        "def step(model, loss, clip: float = 1.0): return lambda batch: (model, loss, clip, batch)\n"
    )
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "wide.yaml").write_text("_target_: mine.MyNet\nwidth: 512\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


NET = "model._target_=mine.MyNet"


@pytest.mark.parametrize(
    ("overrides", "group", "expected"),
    [
        # The arguments of the call in the file are not for another.
        ([NET, "+model.width=64"], "model", {"_target_": "mine.MyNet", "width": 64}),
        (["optimizer._target_=torch.optim.NAdam"], "optimizer", {"_target_": "torch.optim.NAdam"}),
        (
            [NET, "model.width=64", "data._target_=mine.rows", "data.global_batch=5"],
            "data",
            {"_target_": "mine.rows", "global_batch": 5, "workers": 0},
        ),
        (
            ["hydra.searchpath=[file://{folder}/conf]", "model=wide", "model.depth=3"],
            "model",
            {"_target_": "mine.MyNet", "width": 512, "depth": 3},
        ),
    ],
)
def test_calls_and_groups_of_ones_own(mine, overrides, group, expected):
    config = compose(*(word.format(folder=mine) for word in overrides))
    assert getattr(config, group) == expected
    assert config.name_of(group) == (expected["_target_"].rpartition(".")[2] if group != "data" else "rows")


def test_what_the_data_says_fills_arguments_that_are_left_and_calls_may_be_arguments(mine):
    config = compose(NET, "model.width=64", "model.name=n", "data._target_=mine.rows")
    examples = data.load(config.data)
    assert examples.facts == {"input_shape": (3,), "classes": 4}
    assert build.model(config, examples).said == (4, 64, 1, "n", None)
    config = compose(NET, "model.width=1", "model.classes=2", "+model.inner._target_=torch.nn.Tanh")
    assert repr(build.model(config, data.Examples([], [])).said) == "(2, 1, 1, 'x', Tanh())"


@pytest.mark.parametrize("loss", ["torch.nn.MSELoss", "torch.nn.functional.mse_loss"])
def test_losses_and_steps_of_ones_own(mine, loss):
    config = compose(f"loss._target_={loss}", "step._target_=mine.step", "step.clip=0.5")
    given = loop.loss_of(config, data.Examples([], []))
    outputs, targets_ = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [1.0]])
    model, said_loss, clip, batch = loop.step_of(config, "model", "optimizer", given)("batch")
    assert (model, clip, batch) == ("model", 0.5, "batch")
    assert float(said_loss(outputs, targets_)) == 2.0
    assert loop.scores_of(loop.measure(given, outputs, targets_)) == {"loss": 2.0, "accuracy": None, "rows": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_and_right_answers_are_counted_in_any_dtype(dtype):
    labels = torch.arange(301) % 2
    outputs = torch.nn.functional.one_hot(torch.zeros(301, dtype=torch.int64), 2).to(dtype)
    measured = loop.measure(torch.nn.functional.cross_entropy, outputs, labels)
    scores = loop.scores_of(measured)
    assert (scores["rows"], scores["accuracy"]) == (301, pytest.approx(151 / 301, rel=1e-6))


@pytest.mark.parametrize("strategy", ["one_device", "multi_worker_mirrored", "parameter_server"])
def test_replicas_are_ignored_aloud_by_strategies_without(strategy, capsys, monkeypatch):
    monkeypatch.setattr(build.registry, "create", lambda name, **options: None)
    config = compose(f"strategy={strategy}", "strategy.replicas=2")
    targets.make("strategy", config.strategy, config=config, plan=None)
    assert f"strategy={strategy}: strategy.replicas=2 is ignored, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([NET], r"model\.width has no default, and mine\.MyNet needs it; set model\.width"),
        ([NET, "model.widht=1"], r"MyNet has width, depth, name, inner\. Did you mean model\.w"),
        (["model._target_=mine.Net"], r"cannot be imported: .*mine.* Python looks in the folder"),
        (["model._target_=mein.Net"], r"cannot be imported: ModuleNotFoundError: No module named 'mein'"),
        (["model._target_=mine.number"], r"mine\.number is 3; a function or a class is needed"),
        (["model.hiden=[3]", "model=mlp"], r"model\.hiden is not a setting: .*Mlp has hidden.* mean model\.hidden\?"),
        (["model.norn=batch"], r"Did you mean model\.norm\?"),
        (["optimizer.momentun=0.9"], r"optimizer\.momentun is not a setting.* Did you mean optimizer\.momentum"),
        (["loss._target_=torch.nn.CrossEntropyLoss", "loss.smoothing=1"], r"Did you mean loss\.label_smoothing\?"),
    ],
)
def test_mistakes_are_named_before_anything_is_started(mine, overrides, message):
    with pytest.raises(InvalidArgumentError, match=message):
        compose(*overrides)


DEFAULTS = {"strategy": "one_device", "model": "mlp", "data": "digits", "optimizer": "sgd"}


def of(choice, **settings):
    """Of a group's file, with these settings."""
    return {choice.partition("=")[0]: chosen(choice, **settings)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": {"name": "mirored"}}, r"strategy says .*mirored.* and no _target_.* Choose strategy=…"),
        ({"strategy": {}}, r"strategy says \{\}, and no _target_"),
        (of("strategy=mirrored", replicas=0), r"strategy\.replicas=0 must be greater than 0"),
        (
            of("strategy=mirrored", replicas=2, devices=["cpu:0"]),
            r"replicas=2 and .*devices=.* were both given",
        ),
        (of("strategy=one_device", gradient_reduce_op="sum"), r"belongs to losses that are sums"),
        (of("strategy=one_device", gradient_reduce_op="max"), r"choose one of mean, sum"),
        (of("strategy=parameter_server", workers=0), r"strategy\.workers=0 must be greater than 0"),
        (of("strategy=parameter_server", servers=0), r"strategy\.servers=0 must be greater than 0"),
        (of("strategy=mirrored", replicas="two"), r"strategy\.replicas=two must be a whole number"),
        (of("strategy=mirrored", replicas=1.5), r"strategy\.replicas=1\.5 must be a whole number"),
        (of("strategy=tpu", virtual_devices=-8), r"strategy\.virtual_devices=-8 must be greater than 0"),
        (of("data=csv"), r"data\.path has no default; set data\.path=…"),
        (of("data=digits", global_batch="64"), r"data\.global_batch='64' is not of type int"),
        (of("data=digits", global_batch=True), r"data\.global_batch=True is not of type int"),
        (of("data=digits", test_fraction=1), r"must lie strictly between 0 and 1"),
        ({"data": {"_target_": "mine.one_set"}}, r"mine\.one_set returned TensorDataset; return a pair of"),
        (of("model=mlp", hidden=[8, "x"]), r"models\.Mlp refused its arguments hidden=\[8, 'x'\]"),
        (of("model=convnet", channels=[6]), r"refused its arguments .*: num_channels .*divisible by num_groups"),
        (of("model=convnet", norm="layer"), r"choose one of group, batch, sync_batch"),
        (of("optimizer=sgd", lr=-1), r"torch\.optim\.SGD refused its arguments lr=-1.*: Invalid learning rate"),
        (of("optimizer=adagrad", initial_accumulator_value=-1.0), r"Invalid initial_accumulator_value"),
        ({"epoch": 3}, r"epoch: Key 'epoch' not in 'ExperimentConfig'"),
        ({"epochs": 0}, r"epochs=0 must be greater than 0"),
        ({"cluster": {"timeout_seconds": float("inf")}}, r"cluster\.timeout_seconds=inf must be a finite number"),
        ({"checkpoint": {"grace_seconds": float("inf")}}, r"checkpoint\.grace_seconds=inf must be a finite number"),
        ({"progress": "loud"}, r"choose one of auto, bar, lines, off"),
    ],
)
def test_mistakes_are_named(mine, values, message, monkeypatch):
    """By the checks that a run makes, in their order, without what it starts in between."""
    monkeypatch.setattr(build.registry, "create", lambda name, **options: None)
    choices = {group: chosen(f"{group}={name}") for group, name in DEFAULTS.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        all_checks({**choices, **values})


def all_checks(values):
    config = schema.experiment_from_mapping(values)
    targets.check(config)
    data.load(config.data)
    targets.make("strategy", config.strategy, config=config, plan=None)
    facts = {"input_shape": (1, 8, 8), "classes": 10}
    build.optimizer(config, build.model(config, data.Examples([], [], facts)).parameters())


def test_a_mapping_needs_to_say_only_what_differs():
    mirrored = chosen("strategy=mirrored", replicas=3)
    config = schema.experiment_from_mapping({"strategy": mirrored, "epochs": 2})
    assert config == schema.ExperimentConfig(strategy=mirrored, epochs=2)


def test_an_installed_package_brings_its_configs(tmp_path, monkeypatch):
    assert launch.config_folder() == CONFIGS
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    assert launch.config_folder() == tmp_path / "configs"


def test_the_command_without_its_extra_names_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchstrat", "train", "epochs=1"])
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert cli.main() == 1
    assert "pip install 'torchstrat[experiments]'" in capsys.readouterr().err


def test_the_command_is_the_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchstrat", "train", "epoch=3"])
    path = [*sys.path]
    assert cli.main() == 1
    assert sys.path == path
    said = capsys.readouterr().err
    assert "error: Could not override 'epoch'" in said
    assert "(there are name, strategy, model," in said
