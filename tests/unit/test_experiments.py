"""From settings to devices and models, and what a run writes down. Whole runs are in tests/launch/test_train.py."""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchstrat as ts
from tests.choices import chosen
from tests.support.programs import read_metrics
from torchstrat.app import build, data, targets
from torchstrat.app import config as schema
from torchstrat.app.launch import HandOver
from torchstrat.app.report import FolderReport, Progress, programs_of, told
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError, WrongTypeError
from torchstrat.testing.fake_tpu import fake_tpu_strategy

ALONE = None
LAUNCHED = ProcessPlan(0, 2, 0, 2, "env://", False, "rank 0 of 2")
CPU = {"accelerator": "cpu"}


@pytest.fixture
def options_of(monkeypatch):
    """What the registry is asked for, for a strategy's settings."""
    created = []
    monkeypatch.setattr(build.registry, "create", lambda name, **options: created.append((name, options)))

    def options_of(strategy, plan=ALONE, model=None, **cluster):
        model, cluster = model or chosen("model=convnet"), schema.ClusterConfig(**cluster)
        build.strategy(schema.ExperimentConfig(strategy=strategy, model=model, cluster=cluster), plan)
        ((name, options),) = created
        assert name == strategy["name"]
        created.clear()
        return options

    return options_of


def build_model(call, input_shape, classes=10):
    return targets.make("model", call, input_shape=input_shape, classes=classes)


@pytest.fixture(params=[0, 2])
def gpus(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    return request.param


@pytest.mark.parametrize(
    ("settings", "plan", "cluster", "on_cpus", "on_gpus"),
    [
        # By default all GPUs, or two virtual replicas.
        ({}, ALONE, {}, ["cpu:0", "cpu:1"], None),
        ({"replicas": 3}, ALONE, {}, ["cpu:0", "cpu:1", "cpu:2"], ["cuda:0", "cuda:1", "cuda:2"]),
        ({}, ALONE, CPU, ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
        ({}, LAUNCHED, CPU, ["cpu:0"], ["cpu:0"]),
        ({"devices": ["cpu:3"]}, ALONE, {}, ["cpu:3"], ["cpu:3"]),
        # Under a launcher a process is a replica.
        ({}, LAUNCHED, {}, None, None),
        ({"replicas": 1}, LAUNCHED, {}, None, None),
    ],
)
@pytest.mark.parametrize(("kind", "key"), [("mirrored", "devices"), ("central_storage", "compute_devices")])
def test_devices(options_of, gpus, kind, key, settings, plan, cluster, on_cpus, on_gpus):
    settings = {key if name == "devices" else name: value for name, value in settings.items()}
    options = options_of(chosen(f"strategy={kind}", **settings), plan, **cluster)
    assert options[key] == (on_gpus if gpus else on_cpus)


def test_one_device_timeout_and_how_processes_talk(options_of, gpus):
    one, central = chosen("strategy=one_device"), "strategy=central_storage"
    assert "device" not in options_of(one)
    assert options_of(one, accelerator="cpu")["device"] == "cpu:0"
    assert options_of(one, timeout_seconds=1.5)["timeout"].total_seconds() == 1.5
    assert options_of(chosen(central, collectives="process_group"))["collectives"] == "process_group"
    assert options_of(chosen(central, gradients="owner"))["gradients"] == "owner"


def test_a_strategy_that_picks_its_device_cannot_be_kept_off_gpus(options_of, gpus):
    multi_worker = chosen("strategy=multi_worker_mirrored")
    if gpus:
        with pytest.raises(InvalidArgumentError, match="CUDA_VISIBLE_DEVICES="):
            options_of(multi_worker, accelerator="cpu")
    else:
        assert set(options_of(multi_worker, accelerator="cpu")) == {"gradient_reduce_op", "timeout", "collectives"}


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
    ("choice", "settings", "plan", "cluster", "message"),
    [
        ("mirrored", {}, ALONE, {"name": "torchrun"}, "was started without it"),
        ("mirrored", {}, LAUNCHED, {"name": "local"}, "as one of a group"),
        ("mirrored", {"replicas": 2}, LAUNCHED, {}, r"strategy\.replicas=2, but under a launcher"),
        ("central_storage", {"replicas": 2}, LAUNCHED, {}, r"strategy\.replicas=2, but under a launcher"),
        (
            "tpu",
            {"replicas": 5, "logical_devices": 2},
            ALONE,
            {},
            r"replicas=5 with 2 .* do not fit on 8 devices; use at most 4",
        ),
        ("tpu", {}, LAUNCHED, {}, "from one process, and a launcher started 2;"),
    ],
)
def test_what_does_not_go_together(options_of, tpu, choice, settings, plan, cluster, message):
    with pytest.raises(InvalidArgumentError, match=message):
        options_of(chosen(f"strategy={choice}", **settings), plan, **cluster)
    assert plan is ALONE or not tpu, "two processes must not fight for the devices"


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
    assert build_model(config, shape, classes=5)(torch.zeros(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((64,), r"needs images \(channels, height, width\); this data has inputs of shape \(64,\)"), ((1, 3, 8), "3×8")],
)
def test_a_convnet_needs_images_that_are_large_enough(shape, message):
    with pytest.raises(InvalidArgumentError, match=message):
        build_model(chosen("model=convnet"), shape, classes=5)


def test_group_norm_does_not_look_at_other_rows():
    model, rows = build_model(chosen("model=convnet", norm="group"), (1, 8, 8), classes=3), torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model(rows)[:2], model(rows[:2]))


STEP = {"step": 1, "epoch": 1, "loss": 0.5, "rows": 64, "examples_per_second": 1000.0}
EVALUATION = {"step": 1, "epoch": 1, "train_loss": 0.5, "loss": 0.25, "accuracy": 0.75, "rows": 8}
RESULT = {"strategy": "mirrored", "accuracy": 0.75, "loss": 0.25, "examples_per_second": 1000.0}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "failed"])
def test_a_folder_holds_what_was_reported_until_then(tmp_path, finished):
    config = schema.ExperimentConfig(progress="off", tensorboard=False)
    report = FolderReport(tmp_path, config, {"epochs": 1}, total_steps=1, title="a run")
    report.tell("step", **STEP)
    assert read_metrics(tmp_path, "step") == [STEP], "while the run goes on"
    report.tell("evaluation", **EVALUATION)
    if finished:
        report.parameters("parameters", {"weight": torch.ones(2)})
        report.tell("result", **RESULT)
    report.close()
    assert (tmp_path / "config.yaml").read_text() == "epochs: 1\n"
    assert read_metrics(tmp_path, "evaluation") == [EVALUATION]
    assert len(read_metrics(tmp_path, "result")) == finished
    assert (tmp_path / "curves.png").exists() == finished
    if finished:
        assert torch.equal(torch.load(tmp_path / "parameters.pt", weights_only=True)["weight"], torch.ones(2))


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


@pytest.fixture
def tpu(monkeypatch):
    """Eight devices, and how many were asked for; the runtime would be started for the rest of the process."""
    asked = []
    topology = ts.tpu.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=places([2, 2, 1, 2]))
    monkeypatch.setattr(
        build, "initialize_tpu_system", lambda *, virtual_devices: asked.append(virtual_devices) or topology
    )
    return asked


@pytest.mark.parametrize(
    ("settings", "size", "mesh"),
    [
        ({}, (8, 1), [1]),  # by default every device is a replica
        ({"logical_devices": 2}, (4, 2), [2]),
        ({"replicas": 3, "logical_devices": 2}, (3, 2), [2]),
        ({"replicas": 1}, (1, 1), [1]),
        ({"logical_mesh_shape": [2, 2]}, (2, 4), [2, 2]),
        ({"logical_mesh_shape": [4], "logical_devices": 4, "replicas": 1}, (1, 4), [4]),
    ],
)
@pytest.mark.parametrize("virtual", [None, 8])
@pytest.mark.parametrize("plan", [ALONE, replace(LAUNCHED, size=1)])
def test_replicas_and_logical_devices_of_a_tpu(options_of, tpu, settings, size, mesh, virtual, plan):
    options = options_of(chosen("strategy=tpu", virtual_devices=virtual, **settings), plan, accelerator="cpu")
    assignment = options["device_assignment"]
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == size
    assert options["logical_mesh_shape"] == mesh
    assert not options["sharding_rules"]
    assert tpu == [virtual]


@pytest.mark.parametrize(
    ("settings", "second", "rules"),
    [
        ({"logical_devices": 2}, ["d0"], {"1.weight": [["d0"], None], "1.bias": [["d0"]], "3.weight": [None, ["d0"]]}),
        ({"logical_mesh_shape": [2, 2]}, ["d0", "d1"], None),
        ({"logical_devices": 2, "sharding_rules": {"*": None}}, None, {"*": None}),
    ],
)
def test_the_models_rules_hold_unless_others_are_given(options_of, tpu, settings, second, rules):
    model = chosen("model=mlp", hidden=[8], tensor_parallel=True)
    found = options_of(chosen("strategy=tpu", **settings), model=model)["sharding_rules"]
    assert rules in (None, found)
    assert second is None or found["3.weight"] == [None, second]


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


def bands(*shapes):
    """Images are cut into bands, as long as they divide."""
    return [((3, *shape), parts and [1, 1, parts, 1]) for *shape, parts in shapes]


def outputs(parts):
    """Every second layer has its outputs cut."""
    return [((3, 12), [1, parts]), ((3, 16), None), ((3, 8), [1, parts]), ((3, 10), None)]


@pytest.mark.parametrize(
    ("config", "logical_devices", "cuts"),
    [
        *((SPATIAL, n, bands((1, 8, 8, n), (4, 8, 8, n), (8, 4, 4, n), (8, 2, 2, None))) for n in (1, 2)),
        (SPATIAL, 8, bands((1, 8, 8, 8), (4, 8, 8, 8), (8, 8, 8, None), (8, 4, 4, None), (8, 2, 2, None))),
        *((TENSOR_PARALLEL, n, outputs(n)) for n in (1, 2, 4)),
    ],
)
def test_activations_are_cut_and_the_numbers_are_the_same(config, logical_devices, cuts):
    rows = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found, cuts_found = annotated(config, fake_tpu_strategy(1, logical_devices), rows)
    assert cuts_found == cuts
    torch.manual_seed(0)
    plain = build_model({**config, **{name: False for name in config if name.endswith("_parallel")}}, (1, 8, 8))
    assert torch.equal(found, plain(rows))


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
    for other in (chosen("model=mlp"), SPATIAL):
        assert build.rules(schema.ExperimentConfig(model=other), [2], None) is None


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


# -- data --------------------------------------------------------------------------------------------------------------


def write_csv(folder, rows=6, text=None):
    path = folder / "rows.csv"
    lines = [f"{row}.5,{-row},{row * row},{row % 3}" for row in range(rows)]
    path.write_text(text if text is not None else "\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def write_npz(folder, **arrays):
    np.savez(folder / "rows.npz", **arrays)
    return str(folder / "rows.npz")


def facts_of(examples):
    return len(examples.train), len(examples.test), examples.facts["input_shape"], examples.facts["classes"]


def test_digits_are_those_of_scikit_learn_split_without_losing_a_row(monkeypatch):
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    expected = torch.tensor(np.column_stack([bunch.data / 16, bunch.target]), dtype=torch.float32)
    for _ in range(2):
        examples = data.load(chosen("data=digits"))
        assert facts_of(examples) == (1438, 359, (1, 8, 8), 10)
        inputs, labels = (torch.cat([part.tensors[i] for part in (examples.train, examples.test)]) for i in range(2))
        assert inputs.dtype == torch.float32
        rows = torch.cat([inputs.flatten(1), labels[:, None]], dim=1)
        assert sorted(rows.tolist()) == sorted(expected.tolist())
        monkeypatch.setattr(data.importlib.util, "find_spec", lambda _: None)  # a release that keeps its file elsewhere


def test_the_split_is_drawn_by_its_seed_alone(tmp_path):
    path = write_csv(tmp_path, rows=20)
    torch.manual_seed(1)
    one = data.load(chosen("data=csv", path=path))
    torch.manual_seed(2)
    np.random.seed(3)
    two, other = (data.load(chosen("data=csv", path=path, **seed)) for seed in ({}, {"split_seed": 1}))
    assert torch.equal(one.train.tensors[0], two.train.tensors[0])
    assert not torch.equal(one.train.tensors[0], other.train.tensors[0])


def test_the_order_of_examples_is_drawn_anew_each_epoch_and_is_the_seeds(tmp_path):
    def two_epochs(seed):
        loader = data.load(chosen("data=csv", path=write_csv(tmp_path, rows=20))).train_loader(4, seed, workers=0)
        return [[inputs.tolist() for inputs, _ in loader] for _ in range(2)]

    first, second = two_epochs(seed=5)
    assert first != second
    assert two_epochs(seed=5) == [first, second]
    assert two_epochs(seed=6) != [first, second]


def test_csv_with_a_header_and_with_held_out_rows_of_its_own(tmp_path):
    examples = data.load(chosen("data=csv", path=write_csv(tmp_path), test_fraction=0.5, standardize=False))
    assert facts_of(examples) == (3, 3, (3,), 3)
    inputs = torch.cat([examples.train.tensors[0], examples.test.tensors[0]])
    assert sorted(inputs[:, 0].tolist()) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    (tmp_path / "test").mkdir()
    both = chosen("data=csv", path=write_csv(tmp_path), test_path=write_csv(tmp_path / "test", rows=4))
    assert facts_of(data.load(both))[:2] == (6, 4)


def test_csv_without_a_header_label_first_other_delimiter_and_images(tmp_path):
    path = write_csv(tmp_path, text="1;1;2;3;4\n0;5;6;7;8\n")
    settings = {"label_column": 0, "delimiter": ";", "image_shape": [1, 2, 2], "standardize": False}
    examples = data.load(chosen("data=csv", path=path, test_fraction=0.5, **settings))
    assert examples.facts["input_shape"] == (1, 2, 2)
    images = {int(label): image.tolist() for part in (examples.train, examples.test) for image, label in part}
    assert images == {1: [[[1.0, 2.0], [3.0, 4.0]]], 0: [[[5.0, 6.0], [7.0, 8.0]]]}


def test_csv_with_a_byte_order_mark_and_without_a_header_has_its_first_row(tmp_path):
    path = write_csv(tmp_path, text="\ufeff1,0\n2,1\n3,0\n")
    examples = data.load(chosen("data=csv", path=path, test_fraction=0.4, standardize=False))
    assert sorted(float(row) for part in (examples.train, examples.test) for row, _ in part) == [1, 2, 3]


def test_standardizing_uses_the_training_rows_and_survives_constant_features(tmp_path):
    path = write_csv(tmp_path, text="".join(f"{row},7,{row % 2}\n" for row in range(10)))
    train = data.load(chosen("data=csv", path=path, test_fraction=0.3)).train.tensors[0]
    torch.testing.assert_close(train[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(train[:, 0].std(correction=0), torch.tensor(1.0))
    assert train[:, 1].tolist() == [0.0] * 7


FOUR = {"image": np.zeros((4, 2)), "digit": [0, 1, 2, 3], "image_test": np.zeros((2, 2)), "digit_test": [4, 0]}


@pytest.mark.parametrize(
    ("arrays", "settings", "facts"),
    [
        ({"x": np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2), "y": np.arange(10) % 3}, {}, (8, 2, (1, 2, 2), 3)),
        ({"x": np.arange(40).reshape(10, 4), "y": np.arange(10) % 3}, {"image_shape": [1, 2, 2]}, (8, 2, (1, 2, 2), 3)),
        (FOUR, {"inputs": "image", "labels": "digit"}, (4, 2, (2,), 5)),  # held-out rows and names of its own
    ],
)
def test_npz(tmp_path, arrays, settings, facts):
    assert facts_of(data.load(chosen("data=npz", path=write_npz(tmp_path, **arrays), **settings))) == facts


CSV = "data=csv"
NPZ = "data=npz"


@pytest.mark.parametrize(
    ("kind", "content", "settings", "message"),
    [
        (CSV, "", {}, r"rows\.csv has no rows of numbers\."),
        (CSV, "a,b\n", {}, r"rows\.csv has no rows of numbers"),
        (CSV, "1\n2\n", {}, r"has 1 column\(s\), with ',' as data\.delimiter"),
        (CSV, "1,2\nx,3\n", {}, r"data\.csv refused its arguments path=.*rows\.csv.*'x'"),
        (CSV, "1,2\n3\n", {}, r"refused its arguments path=.*columns"),
        (CSV, "1 2\n3 4\n", {}, "delimiter=.,., .*could not convert"),
        (CSV, "1,2\n3,4\n", {"label_column": 2}, r"has 2 column\(s\), .* and data\.label_column=2 has to be there"),
        (CSV, "1,0.5\n3,1\n", {}, r"the label of row 0 is 0\.5; class labels are the integers"),
        (CSV, "1,-1\n3,1\n", {}, r"the label of row 0 is -1"),
        (CSV, "1,0\nnan,1\n", {}, r"row 1 has a value that is not finite"),
        (CSV, "1,0\n3,1\n", {"image_shape": [1, 2, 2]}, r"image_shape=\[1, 2, 2\], .* cannot reshape array of size 2"),
        (CSV, "1,0\n", {}, r"has 1 rows; data\.test_fraction=0\.2 holds out 0"),
        *((kind, None, {}, r"refused its arguments path=.*No such file .*rows") for kind in (CSV, NPZ)),
        *((kind, "", {"path": "."}, r"refused its arguments path=.* Is a directory") for kind in (CSV, NPZ)),
        (NPZ, {"a": np.zeros(3)}, {}, r"has no array \['x', 'y'\]; it has a\. Set data\.inputs"),
        (NPZ, {"x": np.zeros((3, 2))}, {}, r"has no array \['y'\]; it has x"),
        (NPZ, {"x": np.zeros((3, 2)), "y": np.zeros(2)}, {}, r"inputs have shape \(3, 2\), labels \(2,\)"),
        (NPZ, {"x": np.zeros(3), "y": np.zeros(3)}, {}, r"\(rows, …\) and \(rows,\) with equal rows are needed"),
        (NPZ, {"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, {}, r"could not convert string to float"),
        (NPZ, {"x": np.zeros((3, 2)), "y": np.array([0, 1, 0.5])}, {}, r"the label of row 2 is 0\.5"),
        (
            NPZ,
            {"x": np.ones((9, 4)), "y": np.zeros(9)},
            {"image_shape": [3]},
            r"=\[3\], .* cannot reshape array of size",
        ),
        # It would run code.
        (NPZ, {"x": np.array([{"a": 1}], dtype=object), "y": np.zeros(1)}, {}, "is not a NumPy archive"),
        (NPZ, "", {}, "is not a NumPy archive"),
        (NPZ, "not an archive", {}, "is not a NumPy archive .*use data=csv"),
        (NPZ, "PK\x03\x04 cut off", {}, "is not a NumPy archive"),
        (NPZ, np.zeros(3), {}, r"numpy\.savez\(file, x=inputs, y=labels\) writes"),
    ],
)
def test_malformed_files(tmp_path, monkeypatch, kind, content, settings, message):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, dict):
        np.savez("rows", **content)
        (tmp_path / "rows.npz").rename("rows.csv")
    elif isinstance(content, np.ndarray):
        with open("rows.csv", "wb") as file:
            np.save(file, content)
    elif content is not None:
        write_csv(tmp_path, text=content)
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        data.load(chosen(kind, **{"path": "rows.csv", **settings}))
    assert "\n" not in str(raised.value)


# -- handed over to the launcher ---------------------------------------------------------------------------------------


SOON = timedelta(seconds=0.2)
LATER = timedelta(seconds=30)


@pytest.fixture
def ranks():
    """Three ranks of one launch. In a real one each has its own client of the launcher's store."""
    store = dist.HashStore()
    return [HandOver(store, rank, size=3) for rank in range(3)]


def test_runs_arrive_in_order_and_then_the_end_until_which_the_leader_stays(ranks):
    leader, *followers = ranks
    runs = [{"folder": "a", "overrides": ["x=1"]}, {"folder": "b", "overrides": []}, 3]
    for run in runs:
        leader.publish(run)
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(leader.wait_until_read, LATER)
        for follower in followers:
            assert not staying.done()
            assert [follower.receive(SOON) for _ in runs] == runs
        staying.result(timeout=30)
    with pytest.raises(CommunicationTimeoutError, match=r"rank 1 waited 0 s for rank 0 to hand over run 3"):
        ranks[1].receive(SOON)


def test_outcomes_belong_to_their_run(ranks):
    leader, *followers = ranks

    def start():
        leader.publish({})
        for follower in followers:
            follower.receive(SOON)

    start()
    leader.report_outcome(succeeded=False)
    followers[0].report_outcome(succeeded=False)
    assert followers[1].failed(0, SOON)
    assert not leader.everyone_failed(SOON)  # rank 2 is still at it, and may be waiting for the others
    followers[1].report_outcome(succeeded=False)
    assert leader.everyone_failed(SOON)
    start()
    assert not followers[0].failed(0, SOON)
    leader.report_outcome(succeeded=True)
    assert not followers[0].failed(0, SOON)
    assert not leader.everyone_failed(SOON)
