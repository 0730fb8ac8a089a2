"""From settings to devices and models, and what a run writes down. Whole runs are in tests/launch/test_train.py."""

import io
import json
from dataclasses import replace

import pytest
import torch

import torchstrat as ts
from tests.choices import chosen
from torchstrat import config as schema
from torchstrat.cluster import ProcessPlan
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.experiments import build, targets
from torchstrat.experiments.metrics_file import read_metrics
from torchstrat.experiments.report import FolderReport, Progress, programs_of, told
from torchstrat.testing.fake_tpu import fake_tpu_strategy

ALONE = None
LAUNCHED = ProcessPlan(0, 2, 0, 2, "env://", False, "rank 0 of 2")


@pytest.fixture
def created(monkeypatch):
    """What the registry would have been asked for."""
    calls = []
    monkeypatch.setattr(build.registry, "create", lambda name, **options: calls.append((name, options)))
    return calls


def options_of(created, strategy, plan=ALONE, **cluster):
    config = schema.ExperimentConfig(
        strategy=strategy, model=chosen("model=convnet"), cluster=schema.ClusterConfig(**cluster)
    )
    build.strategy(config, plan)
    name, options = created.pop()
    assert name == strategy["name"]
    return options


def build_model(call, input_shape, classes=10):
    return targets.make("model", call, input_shape=input_shape, classes=classes)


@pytest.fixture(params=[0, 2])
def gpus(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    return request.param


@pytest.mark.parametrize(
    ("kind", "key"), [("strategy=mirrored", "devices"), ("strategy=central_storage", "compute_devices")]
)
class TestDevices:
    def test_by_default_all_gpus_or_two_virtual_replicas(self, created, gpus, kind, key):
        assert options_of(created, chosen(kind))[key] == (None if gpus else ["cpu:0", "cpu:1"])

    def test_so_many_replicas(self, created, gpus, kind, key):
        kind_of_device = "cuda" if gpus else "cpu"
        assert options_of(created, chosen(kind, replicas=3))[key] == [f"{kind_of_device}:{index}" for index in range(3)]

    def test_cpu_only(self, created, gpus, kind, key):
        assert options_of(created, chosen(kind), accelerator="cpu")[key] == ["cpu:0", "cpu:1"]
        assert options_of(created, chosen(kind), LAUNCHED, accelerator="cpu")[key] == ["cpu:0"]

    def test_named_devices_win(self, created, gpus, kind, key):
        assert options_of(created, chosen(kind, **{key: ["cpu:3"]}))[key] == ["cpu:3"]

    def test_under_a_launcher_a_process_is_a_replica(self, created, gpus, kind, key):
        assert options_of(created, chosen(kind), LAUNCHED)[key] is None
        assert options_of(created, chosen(kind, replicas=1), LAUNCHED)[key] is None
        with pytest.raises(InvalidArgumentError, match=r"strategy\.replicas=2, but under a launcher"):
            options_of(created, chosen(kind, replicas=2), LAUNCHED)


def test_one_device_and_timeout(created, gpus):
    assert "device" not in options_of(created, chosen("strategy=one_device"))
    assert options_of(created, chosen("strategy=one_device"), accelerator="cpu")["device"] == "cpu:0"
    assert options_of(created, chosen("strategy=one_device"), timeout_seconds=1.5)["timeout"].total_seconds() == 1.5


def test_a_strategy_that_picks_its_device_cannot_be_kept_off_gpus(created, gpus):
    if gpus:
        with pytest.raises(InvalidArgumentError, match="CUDA_VISIBLE_DEVICES="):
            options_of(created, chosen("strategy=multi_worker_mirrored"), accelerator="cpu")
    else:
        assert set(options_of(created, chosen("strategy=multi_worker_mirrored"), accelerator="cpu")) == {
            "gradient_reduce_op",
            "timeout",
            "collectives",
        }


def test_how_processes_talk(created):
    central = chosen("strategy=central_storage", collectives="process_group")
    assert options_of(created, central)["collectives"] == "process_group"
    assert options_of(created, chosen("strategy=central_storage", gradients="owner"))["gradients"] == "owner"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logical_devices": 0}, "logical_devices_per_replica=0; the least is 1"),
        ({"logical_devices": 2, "logical_mesh_shape": [2, 2]}, r"logical_mesh_shape=\[2, 2\]"),
        ({"logical_devices": 2, "sharding_rules": [["w", None]]}, "refused its arguments|sharding_rules"),
        ({"collectives": "sockets"}, "collectives='sockets' is not known; choose one of"),
        ({"workers": 2}, "was given workers, which MirroredStrategy does not have; it takes devices, "),
    ],
)
def test_what_the_strategy_itself_refuses(settings, message):
    config = schema.ExperimentConfig(strategy=chosen("strategy=mirrored", **settings), model=chosen("model=mlp"))
    with pytest.raises((InvalidArgumentError, WrongTypeError), match=message):
        build.strategy(config, ALONE)


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [("torchrun", ALONE, "was started without it"), ("local", LAUNCHED, "as one of a group")],
)
def test_the_launcher_that_was_insisted_on(created, name, plan, message):
    with pytest.raises(InvalidArgumentError, match=message):
        options_of(created, chosen("strategy=mirrored"), plan, name=name)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (chosen("model=mlp"), (64,)),
        (chosen("model=mlp", hidden=[]), (1, 8, 8)),
        (chosen("model=convnet"), (1, 8, 8)),
        (chosen("model=convnet", channels=[4], norm="batch"), (3, 5, 7)),
        (chosen("model=convnet", channels=[4, 8], groups=2), (3, 9, 7)),
    ],
)
def test_models_map_inputs_to_logits(config, shape):
    model = build_model(config, shape, classes=5)
    assert model(torch.zeros(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((64,), r"needs images \(channels, height, width\); this data has inputs of shape \(64,\)"), ((1, 3, 8), "3×8")],
)
def test_a_convnet_needs_images_that_are_large_enough(shape, message):
    with pytest.raises(InvalidArgumentError, match=message):
        build_model(chosen("model=convnet"), shape, classes=5)


def test_group_norm_does_not_look_at_other_rows():
    model = build_model(chosen("model=convnet", norm="group"), (1, 8, 8), classes=3)
    rows = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model(rows)[:2], model(rows[:2]))


STEP = {"step": 1, "epoch": 1, "loss": 0.5, "rows": 64, "examples_per_second": 1000.0}
EVALUATION = {"step": 1, "epoch": 1, "train_loss": 0.5, "loss": 0.25, "accuracy": 0.75, "rows": 8}
RESULT = {"strategy": "mirrored", "accuracy": 0.75, "loss": 0.25, "examples_per_second": 1000.0}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "failed"])
def test_a_folder_holds_what_was_reported_until_then(tmp_path, finished):
    config = schema.ExperimentConfig(progress="off", tensorboard=False)
    report = FolderReport(tmp_path, config, {"epochs": 1}, total_steps=1, title="a run")
    report.tell("step", **STEP)
    report.tell("evaluation", **EVALUATION)
    if finished:
        report.parameters("parameters", {"weight": torch.ones(2)})
        report.tell("result", **RESULT)
    report.close()
    assert (tmp_path / "config.yaml").read_text() == "epochs: 1\n"
    assert read_metrics(tmp_path, "step") == [STEP]
    assert read_metrics(tmp_path, "evaluation") == [EVALUATION]
    assert len(read_metrics(tmp_path, "result")) == finished
    assert (tmp_path / "curves.png").exists() == finished
    if finished:
        assert torch.equal(torch.load(tmp_path / "parameters.pt", weights_only=True)["weight"], torch.ones(2))


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path):
    report = FolderReport(tmp_path, schema.ExperimentConfig(progress="off", tensorboard=False), {}, 1, "a run")
    report.tell("step", **STEP)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    report.close()
    assert json.loads(line) == {"event": "step", **STEP}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("kind", "stream", "is_bar", "says"),
    [
        ("auto", Terminal(), True, "loss=0.5000"),
        ("auto", io.StringIO(), False, "epoch   1  loss 0.5000  accuracy 0.7500  1,000 examples/s"),
        ("lines", Terminal(), False, "epoch   1"),
        ("bar", io.StringIO(), True, "examples/s=1,000"),
        ("off", Terminal(), False, ""),
    ],
)
def test_progress(kind, stream, is_bar, says):
    progress = Progress(stream, kind, total_steps=1, title="a run")
    progress.step(STEP)
    progress.evaluation(EVALUATION)
    progress.close()
    assert says in stream.getvalue()
    assert ("1/1" in stream.getvalue()) == is_bar
    assert bool(stream.getvalue()) == bool(says)


@pytest.mark.parametrize(
    ("mesh_shape", "logical_devices", "block"),
    [
        ([2, 2, 1, 2], 1, [1, 1, 1, 1]),
        ([2, 2, 1, 2], 2, [1, 1, 1, 2]),
        ([2, 2, 1, 2], 4, [2, 1, 1, 2]),
        ([2, 2, 1, 2], 8, [2, 2, 1, 2]),
        ([4, 4, 1, 2], 8, [2, 2, 1, 2]),  # a square of chips, not a row
        ([4, 4, 4, 1], 8, [2, 2, 2, 1]),
        ([4, 2, 1, 1], 4, [2, 2, 1, 1]),
        ([1, 1, 1, 1], 1, [1, 1, 1, 1]),
        ([3, 1, 1, 2], 3, [3, 1, 1, 1]),
    ],
)
def test_a_replica_is_a_compact_block_of_cores(mesh_shape, logical_devices, block):
    assert build.computation_shape(mesh_shape, logical_devices) == block
    topology = ts.tpu.Topology(mesh_shape=mesh_shape, device_coordinates=places(mesh_shape))
    cores = mesh_shape[0] * mesh_shape[1] * mesh_shape[2] * mesh_shape[3]
    assignment = ts.tpu.DeviceAssignment.build(topology, block, num_replicas=cores // logical_devices)
    assert sorted(assignment.device_indices().reshape(-1).tolist()) == list(range(cores))


def places(mesh_shape):
    x, y, z, core = (torch.arange(size) for size in mesh_shape)
    return torch.cartesian_prod(x, y, z, core).reshape(1, -1, 4).numpy()


@pytest.mark.parametrize("logical_devices", [3, 5, 16])
def test_a_replica_that_does_not_fill_the_mesh(logical_devices):
    with pytest.raises(InvalidArgumentError, match=rf"logical_devices={logical_devices}: .* use one of 1, 2, 4, 8\."):
        build.computation_shape([2, 2, 1, 2], logical_devices)


class TestTpuOptions:
    @pytest.fixture(autouse=True)
    def system(self, monkeypatch):
        """The runtime would be started for the rest of the process."""
        asked = []

        def initialize(*, virtual_devices):
            asked.append(virtual_devices)
            return ts.tpu.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=places([2, 2, 1, 2]))

        monkeypatch.setattr(build, "initialize_tpu_system", initialize)
        return asked

    @staticmethod
    def size(options):
        assignment = options["device_assignment"]
        return assignment.num_replicas, assignment.num_cores_per_replica

    def test_by_default_every_device_is_a_replica(self, created, gpus, system):
        options = options_of(created, chosen("strategy=tpu"), accelerator="cpu")
        assert self.size(options) == (8, 1)
        assert options["logical_mesh_shape"] == [1]
        assert not options["sharding_rules"]
        assert system == [None]

    @pytest.mark.parametrize(
        ("settings", "size", "mesh"),
        [
            ({"logical_devices": 2}, (4, 2), [2]),
            ({"replicas": 3, "logical_devices": 2}, (3, 2), [2]),
            ({"replicas": 1}, (1, 1), [1]),
            ({"logical_mesh_shape": [2, 2]}, (2, 4), [2, 2]),
            ({"logical_mesh_shape": [4], "logical_devices": 4, "replicas": 1}, (1, 4), [4]),
        ],
    )
    def test_replicas_and_logical_devices(self, created, system, settings, size, mesh):
        options = options_of(created, chosen("strategy=tpu", virtual_devices=8, **settings))
        assert self.size(options) == size
        assert options["logical_mesh_shape"] == mesh
        assert system == [8]

    def test_too_many_replicas(self, created):
        with pytest.raises(InvalidArgumentError, match=r"replicas=5 with 2 .* do not fit on 8 devices; use at most 4"):
            options_of(created, chosen("strategy=tpu", replicas=5, logical_devices=2))

    def test_processes_that_a_launcher_started(self, created, system):
        options_of(created, chosen("strategy=tpu"), replace(LAUNCHED, size=1))
        with pytest.raises(InvalidArgumentError, match="from one process, and a launcher started 2;"):
            options_of(created, chosen("strategy=tpu"), LAUNCHED)
        assert len(system) == 1, "two processes must not fight for the devices"

    def test_the_models_rules_hold_unless_others_are_given(self, created):
        model = chosen("model=mlp", hidden=[8], tensor_parallel=True)

        def rules(**settings):
            build.strategy(schema.ExperimentConfig(strategy=chosen("strategy=tpu", **settings), model=model), ALONE)
            return created.pop()[1]["sharding_rules"]

        assert rules(logical_devices=2) == {"1.weight": [["d0"], None], "1.bias": [["d0"]], "3.weight": [None, ["d0"]]}
        assert rules(logical_mesh_shape=[2, 2])["3.weight"] == [None, ["d0", "d1"]]
        assert rules(logical_devices=2, sharding_rules={"*": None}) == {"*": None}


SPATIAL = chosen("model=convnet", channels=[4, 8, 8], norm="batch", spatially_parallel=True)
TENSOR_PARALLEL = chosen("model=mlp", hidden=[12, 16, 8], tensor_parallel=True)


def annotated(config, strategy, rows):
    """The model's outputs for a batch, and how its tensors were cut on the way: shape → parts of each dimension."""
    cuts = []
    split, replicate = strategy.split_to_logical_devices, strategy.replicate_to_logical_devices
    strategy.split_to_logical_devices = lambda x, parts: cuts.append((tuple(x.shape), parts)) or split(x, parts)
    strategy.replicate_to_logical_devices = lambda x: cuts.append((tuple(x.shape), None)) or replicate(x)
    torch.manual_seed(0)
    with strategy.scope():
        model = build_model(config, (1, 8, 8))
        return model(rows), cuts


@pytest.mark.parametrize(
    ("logical_devices", "cuts"),
    [
        (1, [((3, 1, 8, 8), 1), ((3, 4, 8, 8), 1), ((3, 8, 4, 4), 1), ((3, 8, 2, 2), None)]),
        (2, [((3, 1, 8, 8), 2), ((3, 4, 8, 8), 2), ((3, 8, 4, 4), 2), ((3, 8, 2, 2), None)]),
        (8, [((3, 1, 8, 8), 8), ((3, 4, 8, 8), 8), ((3, 8, 8, 8), None), ((3, 8, 4, 4), None), ((3, 8, 2, 2), None)]),
    ],
)
def test_images_are_cut_into_bands_as_long_as_they_divide(logical_devices, cuts):
    rows = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    outputs, found = annotated(SPATIAL, fake_tpu_strategy(1, logical_devices), rows)
    assert found == [(shape, parts and [1, 1, parts, 1]) for shape, parts in cuts]
    torch.manual_seed(0)
    plain = build_model({**SPATIAL, "spatially_parallel": False}, (1, 8, 8))
    assert torch.equal(outputs, plain(rows))


@pytest.mark.parametrize("logical_devices", [1, 2, 4])
def test_every_second_layer_has_its_outputs_cut(logical_devices):
    rows = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    outputs, found = annotated(TENSOR_PARALLEL, fake_tpu_strategy(1, logical_devices), rows)
    parts = [1, logical_devices]
    assert found == [((3, 12), parts), ((3, 16), None), ((3, 8), parts), ((3, 10), None)]
    torch.manual_seed(0)
    plain = build_model({**TENSOR_PARALLEL, "tensor_parallel": False}, (1, 8, 8))
    assert torch.equal(outputs, plain(rows))


@pytest.mark.parametrize(("config", "size"), [(SPATIAL, r"dimension 2 has size 8"), (TENSOR_PARALLEL, r"has size 8")])
def test_what_does_not_divide_is_an_error(config, size):
    with pytest.raises(InvalidArgumentError, match=size):
        annotated(config, fake_tpu_strategy(1, 3), torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("hidden", [[], [8], [8, 8], [8, 16, 24, 32]])
def test_rules_are_for_layers_that_there_are_and_match_the_activations(hidden):
    config = chosen("model=mlp", hidden=hidden, tensor_parallel=True)
    parameters = dict(build_model(config, (64,)).named_parameters())
    rules = build.rules(schema.ExperimentConfig(model=config), [2], None)
    assert rules is not None
    assert all(len(rule) == parameters[name].ndim for name, rule in rules.items())
    linear = sorted({int(name.split(".")[0]) for name in parameters})
    pairs = [*zip(linear[::2], linear[1::2], strict=False)]
    assert {name for name, rule in rules.items() if rule[0]} == {
        f"{first}.{kind}" for first, _ in pairs for kind in ("weight", "bias")
    }
    assert {name for name, rule in rules.items() if not rule[0]} == {f"{second}.weight" for _, second in pairs}


@pytest.mark.parametrize("config", [chosen("model=mlp"), SPATIAL])
def test_other_models_need_no_rules(config):
    assert build.rules(schema.ExperimentConfig(model=config), [2], None) is None


def test_logical_devices_of_any_strategy():
    assert fake_tpu_strategy(2, 4).num_logical_devices == 4
    strategy = ts.OneDeviceStrategy("cpu:0")
    assert strategy.num_logical_devices == 1
    assert programs_of(strategy) is None
    strategy.close()


def test_what_a_run_was_compiled_to_is_told(tmp_path, capsys):
    strategy = fake_tpu_strategy(3, 2, sharding_rules={"weight": (None, "d0")})
    with strategy.scope():
        layer = torch.nn.Linear(4, 4)
    sharding = ts.explain_sharding(layer, strategy=strategy)
    programs = programs_of(strategy)
    assert programs == {
        "event": "programs", "devices": 6, "replicas": 3, "logical_devices": 2, "compilations": []
    }  # fmt: skip
    record = {**programs, "devices": 8, "compilations": ["run 0: it is the first"]}
    config = schema.ExperimentConfig(progress="off", tensorboard=False)
    report = FolderReport(tmp_path, config, {}, 1, "a run")
    report.tell(**record)
    for line in told(record):
        report.say(line)
    report.sharding(sharding)
    report.close()
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [
        "a run: 8 devices, 3 replicas × 2 logical devices, 2 idle, 1 compilation",
        "a run: run 0: it is the first",
    ]
    assert read_metrics(tmp_path, "programs") == [{key: record[key] for key in record if key != "event"}]
    assert (tmp_path / "sharding.png").read_bytes().startswith(b"\x89PNG")
