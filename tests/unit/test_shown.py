"""What notebooks and interpreters show of our objects, and what is said of numbers that are one per replica."""

from __future__ import annotations

import copy
import html.parser
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import cpus, replica
from torchstrat.core import notebook_html
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.testing import Cluster, fake_tpu_strategy
from torchstrat.testing.fake_cluster import FakeCluster

VOID = ("br",)


class Outline(html.parser.HTMLParser):
    """The cells of all tables, in order; checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("td", "th", "caption"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(cpus(2))
    yield made
    made.close()


def loss(strategy: ts.Strategy) -> Any:
    return strategy.run(lambda: torch.tensor(1.0) + replica())


def cells(shown: Any) -> list[str]:
    return Outline(shown._repr_html_()).cells


# ---- HTML ------------------------------------------------------------------------------------------------------------


def test_a_table_escapes_what_it_shows_and_leaves_out_what_is_too_much() -> None:
    rows = [("<script>", number) for number in range(50)]
    outline = Outline(notebook_html.table("a <b>caption</b>", ("<i>", "&"), rows))
    assert not {"script", "i", "b"} & set(outline.tags)
    assert outline.cells[:5] == ["a <b>caption</b>", "<i>", "&", "<script>", "0"]
    assert outline.cells[-4:] == ["… 31 more …", "", "<script>", "49"]
    assert len(Outline(notebook_html.table("", (), [("x" * 10_000,)])).cells[-1]) == 300
    assert Outline(notebook_html.facts("f", [("a", 1), ("b", None), ("c", "")])).cells == ["f", "a", "1"]


def test_per_replica_values(strategy: ts.Strategy) -> None:
    assert cells(loss(strategy)) == ["PerReplica", "replica", "value", "0", "tensor(1.)", "1", "tensor(2.)"]
    batch = next(iter(strategy.distribute_dataset([torch.ones(3)])))
    assert cells(batch)[1:7] == ["replica", "rows", "value", "0", "2", "tensor([1., 1.])"]


STRATEGIES: dict[str, Callable[[], ts.Strategy]] = {
    "<OneDeviceStrategy with 1 replica on cpu:0>": lambda: ts.OneDeviceStrategy("cpu:0"),
    "<MirroredStrategy with 12 replicas on cpu:0, cpu:1, … cpu:11 (12 in all)>": lambda: ts.MirroredStrategy(cpus(12)),
    "<CentralStorageStrategy with 2 replicas on cpu:0, cpu:1>": lambda: ts.CentralStorageStrategy(cpus(2)),
    "<DefaultStrategy>": ts.get_strategy,
}


@pytest.mark.parametrize("shown", STRATEGIES)
def test_strategies(shown: str) -> None:
    strategy = STRATEGIES[shown]()
    assert repr(strategy) == shown
    assert cells(strategy)[:2] == [shown, "replicas"]
    strategy.close()
    assert shown == "<DefaultStrategy>" or cells(strategy)[-2:] == ["state", "closed"]


def test_clusters_strategies_on_servers_and_their_datasets() -> None:
    assert cells(Cluster(ps=3, workers=4))[0] == "Cluster(ps=3, workers=4, not started)"
    with FakeCluster(workers=2, ps=1) as cluster:
        strategy = cluster.strategy()
        assert cells(strategy)[0] == "<ParameterServerStrategy of 2 worker, 1 ps>"
        assert cells(strategy)[1:5] == ["worker", "worker0:1, worker1:1", "ps", "ps0:1"]
        coordinator = ts.ClusterCoordinator(strategy)
        shown = coordinator.schedule(lambda: ts.get_strategy()._repr_html_()).get(timeout=60)
        assert Outline(shown).cells[0] == "<ParameterServerStrategy on a worker>"
        assert "create_per_worker_dataset" in repr(strategy.distribute_dataset([torch.ones(2)]))


def test_datasets_are_shown_without_reading_them(strategy: ts.Strategy) -> None:
    read = []

    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return torch.ones(2)

    dataset = strategy.distribute_dataset(torch.utils.data.DataLoader(Rows(), batch_size=2))
    assert repr(dataset) == f"<DistributedDataset of {strategy!r}, 3 steps>"
    expected = ["DistributedDataset", "strategy", repr(strategy), "global batches in a pass", "3"]
    assert cells(dataset)[:5] == expected
    assert not read
    iterator = iter(dataset)
    next(iterator), next(iterator)
    assert cells(dataset)[-2:] == ["position", "2 steps into a pass"]
    assert repr(strategy.distribute_dataset(iter([torch.ones(2)]))).endswith("an unknown number of steps>")


def test_explanations() -> None:
    strategy = fake_tpu_strategy(replicas=2, logical_devices=2)
    with strategy.scope():
        model = nn.Linear(4, 4)
    explanation = ts.explain_sharding(model, strategy=strategy)
    outline = Outline(explanation._repr_html_())
    assert outline.cells[:3] == [f"In all, {explanation.totals()}.", "tensor", "dtype"]
    assert "weight" in outline.cells
    assert "pre" in outline.tags
    strategy.close()


# ---- one number per replica: what the table of mistakes has not ------------------------------------------------------

MISTAKES: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "bool": bool,
    "complex": complex,
    "round": round,
    "total": lambda value: sum([value]),
    "product": lambda value: value * 2,
    "quotient": lambda value: 1 / value,
    "best": lambda value: min(1.0, value),
    "negation": lambda value: -value,
    "absolute": abs,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_number_of_several_names_reduce_and_local_results(mistake: str, strategy: ts.Strategy) -> None:
    with pytest.raises(WrongTypeError, match=r"strategy\.reduce.*local_results"):
        MISTAKES[mistake](loss(strategy))


@pytest.mark.parametrize("name", ["detach", "mean", "cpu"])
def test_so_do_attributes_of_tensors(name: str, strategy: ts.Strategy) -> None:
    value = loss(strategy)
    assert not hasattr(value, name)
    what = r"one value per replica .2 in this process.*strategy.reduce.*local_results"
    with pytest.raises(AttributeError, match=rf"\.{name} was asked of a PerReplica value.*{what}"):
        getattr(value, name)


def test_with_one_replica_run_returns_the_number_and_what_is_per_replica_says_so_too() -> None:
    strategy = ts.MirroredStrategy(cpus(1))
    assert float(loss(strategy)) == 1.0
    value = strategy.distribute_values_from_function(lambda context: 1.0)
    assert isinstance(value, ts.PerReplica)
    with pytest.raises(WrongTypeError, match=r"one value per replica .1 in this process.*strategy\.reduce"):
        float(value)
    strategy.close()


def test_what_any_object_can_do_stays(strategy: ts.Strategy) -> None:
    value = loss(strategy)
    assert f"{value}" == str(value)
    assert value in [value]
    assert value != ts.PerReplica([1, 2])
    assert len({value, value}) == 1
    one = ts.PerReplica([1, 2])
    for twin in (copy.copy(value), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert isinstance(twin, ts.PerReplica)
    with pytest.raises(TypeError, match="PerReplica"):
        list(value)
    assert not isinstance(value, Iterable)


# ---- bare parameters -------------------------------------------------------------------------------------------------


def test_a_bare_parameter_is_said_to_be_one_and_not_to_be_made_outside() -> None:
    strategy = ts.CentralStorageStrategy(cpus(2))
    with strategy.scope():
        bare = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="a bare parameter of shape .3,., in no module and no optimizer") as warned:
        strategy.run(lambda: bare.sum().backward())
    (message,) = [str(one.message) for one in warned]
    assert "made outside" not in message
    assert bare.grad is not None
    assert bare.grad.tolist() == [1, 1, 1], "it is a variable like others all the same"
    strategy.close()


def test_a_bare_parameter_on_servers_is_an_error_that_says_so() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            bare = nn.Parameter(torch.ones(3))
        with pytest.raises(InvalidArgumentError, match=r"a bare parameter .*, each in a module or an optim"):
            ts.ClusterCoordinator(strategy).schedule(lambda: bare.sum())
