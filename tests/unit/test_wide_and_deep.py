"""The wide-and-deep model, how click predictions are scored, and that clicks are learnt."""

import itertools
import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.choices import chosen
from torchstrat import config as schema
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import build, data
from torchstrat.experiments.loop import run_title
from torchstrat.experiments.objectives import make_train_step, objective_of
from torchstrat.experiments.scores import ClassMeter, ClickMeter, roc_auc
from torchstrat.experiments.wide_and_deep import WideAndDeep

SMALL = chosen("model=wide_and_deep", embedding_width=3, hidden=[8])


def settings(**changes):
    choices = {"strategy": chosen("strategy=one_device"), "model": SMALL, "optimizer": chosen("optimizer=adagrad")}
    return schema.ExperimentConfig(**{**choices, **changes})


def batch(rows: int, table_rows: int = 20):
    generator = torch.Generator().manual_seed(0)
    integers = torch.rand(rows, 13, generator=generator)
    return integers, torch.randint(table_rows, (rows, 26), generator=generator)


class TestModel:
    def test_logits_are_those_of_the_formula(self):
        torch.manual_seed(0)
        model = WideAndDeep(20, embedding_width=3, hidden=[8])
        torch.nn.init.normal_(model.wide_categories.weight)
        integers, table_rows = batch(4)
        with torch.no_grad():
            found = model((integers, table_rows))
            wide = model.wide_categories.weight[table_rows].sum(dim=(1, 2)) + model.wide_integers(integers)[:, 0]
            embedded = model.embedding.weight[table_rows].reshape(4, 26 * 3)
            deep = model.deep(torch.cat([integers, embedded], dim=1))[:, 0]
        assert found.shape == (4,)
        torch.testing.assert_close(found, wide + deep)

    @pytest.mark.parametrize("sparse", [True, False])
    def test_a_step_changes_only_the_rows_of_the_batch(self, sparse):
        model = WideAndDeep(50, embedding_width=3, hidden=[8], sparse_gradients=sparse)
        before = model.embedding.weight.detach().clone()
        optimizer = build.optimizer(settings(), model.parameters())
        inputs = batch(2, table_rows=20)
        make_train_step(model, optimizer, functional.binary_cross_entropy_with_logits)(
            (inputs, torch.tensor([0.0, 1.0]))
        )
        assert model.embedding.weight.grad.is_sparse == sparse
        changed = (model.embedding.weight != before).any(dim=1).nonzero()[:, 0]
        assert changed.tolist() == inputs[1].unique().tolist()

    def test_models_and_data_that_do_not_fit_each_other(self, tmp_path):
        clicks = data.load(chosen("data=synthetic_clicks", rows=50, folder=str(tmp_path)))
        with pytest.raises(InvalidArgumentError, match=r"model=mlp needs input_shape, classes.*model=wide_and_deep"):
            build.model(settings(model=chosen("model=mlp")), clicks)
        assert isinstance(build.model(settings(), clicks), WideAndDeep)
        (tmp_path / "rows.csv").write_text("1,0\n2,1\n" * 5)
        rows = data.load(chosen("data=csv", path=str(tmp_path / "rows.csv")))
        with pytest.raises(
            InvalidArgumentError, match=r"model=wide_and_deep needs category_rows.* for click logs: use data=click_logs"
        ):
            build.model(settings(), rows)


def auc_by_comparing_all_pairs(scores, labels) -> float:
    pairs = [
        (score > other) + 0.5 * (score == other)
        for score, label in zip(scores, labels, strict=True)
        for other, other_label in zip(scores, labels, strict=True)
        if label and not other_label
    ]
    return sum(pairs) / len(pairs)


class TestAuc:
    @pytest.mark.parametrize(
        ("scores", "labels", "auc"),
        [
            ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
            ([1, 2, 3, 4], [1, 1, 0, 0], 0.0),
            ([5, 5, 5, 5], [0, 1, 0, 1], 0.5),
            ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
            ([-math.inf, math.inf], [0, 1], 1.0),
        ],
    )
    def test_known_values(self, scores, labels, auc):
        assert roc_auc(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)) == auc

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("values", [3, 1000])
    def test_it_is_the_share_of_pairs_in_order(self, seed, values):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(values, (60,), generator=generator).float()
        labels = (torch.rand(60, generator=generator) < 0.3).float()
        expected = auc_by_comparing_all_pairs(scores.tolist(), labels.tolist())
        assert roc_auc(scores, labels) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("label", [0.0, 1.0])
    def test_there_is_none_without_a_pair(self, label):
        assert roc_auc(torch.rand(5), torch.full((5,), label)) is None


def test_click_scores():
    meter = ClickMeter()
    meter.add(meter.measure(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])))
    meter.add(meter.measure(torch.tensor([-3.0]), torch.tensor([0.0])))
    scores = meter.scores()
    assert scores.loss == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.e) + math.log1p(math.exp(-3))) / 3)
    assert (scores.accuracy, scores.rows, scores.auc) == (pytest.approx(2 / 3), 3, 1.0)


def test_class_scores_have_no_auc():
    meter = ClassMeter()
    meter.add(meter.measure(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])))
    scores = meter.scores()
    assert scores.loss == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.e)) / 2)
    assert (scores.accuracy, scores.rows, scores.auc) == (0.5, 2, None)


@pytest.mark.parametrize("meter_type", [ClickMeter, ClassMeter])
def test_replicas_score_together_what_one_device_scores(meter_type):
    """Seven rows over four replicas in batches of five: uneven, and some replicas without a row."""
    outputs = torch.randn(7, generator=torch.Generator().manual_seed(0))
    of_classes = torch.stack([outputs, -outputs], dim=1)
    rows = list(zip(outputs if meter_type is ClickMeter else of_classes, [0, 1, 0, 1, 0, 1, 0], strict=True))
    found = []
    for strategy in (ts.OneDeviceStrategy("cpu:0"), ts.MirroredStrategy([f"cpu:{index}" for index in range(4)])):
        with closing(strategy):
            meter = meter_type()
            for distributed in strategy.distribute_dataset(DataLoader(rows, batch_size=5)):
                measured = strategy.run(lambda batch, meter=meter: meter.measure(*batch), args=(distributed,))
                meter.add(meter.combine(strategy, measured))
            found.append(meter.scores())
    assert found[0].rows == 7
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert (found[0].accuracy, found[0].rows, found[0].auc) == (found[1].accuracy, found[1].rows, found[1].auc)


def train(strategy, examples, steps: int) -> tuple[dict, ClickMeter]:
    torch.manual_seed(0)
    objective = objective_of(settings(), examples)
    with strategy.scope():
        model = build.model(settings(), examples)
        optimizer = build.optimizer(settings(optimizer=chosen("optimizer=adagrad", lr=0.1)), model.parameters())
    train_step = make_train_step(model, optimizer, objective.loss)
    loader = examples.train_loader(64, seed=0, workers=0)
    for distributed in itertools.islice(strategy.distribute_dataset(loader), steps):
        strategy.run(train_step, args=(distributed,))
    meter = objective.meter()
    with torch.no_grad():
        for inputs, labels in examples.test_loader(64):
            meter.add(meter.measure(model(inputs), labels))
    return {name: value.clone() for name, value in model.state_dict().items()}, meter


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    return data.load(chosen("data=synthetic_clicks", rows=4000, category_rows=4096, folder=str(folder)))


def test_clicks_are_learnt(examples):
    with closing(ts.OneDeviceStrategy("cpu:0")) as strategy:
        _, meter = train(strategy, examples, steps=50)
    scores = meter.scores()
    labels = torch.cat([labels for _, labels in examples.test_loader(1000)])
    rate = float(labels.mean())
    trivial = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))  # always to predict the held-out click rate
    assert scores.loss < trivial - 0.005
    assert scores.auc > 0.6


@pytest.mark.parametrize("kind", [ts.MirroredStrategy, ts.CentralStorageStrategy])
def test_two_replicas_learn_what_one_device_learns(examples, kind):
    """Sparse gradients of both tables included, and Adagrad's state by row."""
    with closing(ts.OneDeviceStrategy("cpu:0")) as strategy:
        expected, _ = train(strategy, examples, steps=10)
    with closing(kind(["cpu:0", "cpu:1"])) as strategy:
        found, _ = train(strategy, examples, steps=10)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def test_synthetic_clicks_are_called_so(examples):
    assert run_title(settings(), examples, "×1") == "one_device ×1, synthetic clicks"
    assert run_title(settings(), replace(examples, note=""), "×1") == "one_device ×1"
