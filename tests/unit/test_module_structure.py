"""What the program adds to a module, removes from it or replaces after it was placed on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchstrat as ts
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster


class Job:
    def __init__(self, cluster: FakeCluster) -> None:
        self.strategy = strategy = cluster.strategy()
        self.coordinator = ts.ClusterCoordinator(strategy)
        torch.manual_seed(0)
        with strategy.scope():
            self.model = model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            self.other = other = nn.Linear(3, 1)

        def output() -> torch.Tensor:
            return model(torch.eye(3)).detach()

        def of_other() -> torch.Tensor:
            return other(torch.eye(3)).detach()

        self.output, self.of_other = output, of_other

    def on_worker(self) -> torch.Tensor:
        found: torch.Tensor = self.coordinator.schedule(self.output).get()
        return found

    def is_followed(self) -> bool:
        """Whether workers compute with what the coordinator has, several times."""
        here = self.model(torch.eye(3)).detach()
        return all(torch.equal(self.on_worker(), here) for _ in range(3))


@pytest.fixture
def job() -> Iterator[Job]:
    with FakeCluster(workers=2, ps=2) as cluster:
        made = Job(cluster)
        assert made.is_followed()
        yield made
        made.strategy.close()


def _prune(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.5)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another head": lambda model: model.__setitem__(2, nn.Linear(4, 5)),
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.full((4, 3), 0.5))),
    "more children": lambda model: model.append(nn.ReLU()).append(nn.Linear(2, 2)),
    "a child less": lambda model: model.__delitem__(-1),
    "a bias less": lambda model: setattr(model[0], "bias", None),
    "pruned": _prune,
    "a hook": lambda model: model[1].register_forward_hook(lambda module, args, output: output * 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_in_a_later_scope_is_followed(change: Callable[[nn.Sequential], None], job: Job) -> None:
    before = job.on_worker()
    with job.strategy.scope():
        change(job.model)
    assert job.is_followed()
    after = job.on_worker()
    assert before.shape != after.shape or not torch.equal(before, after)
    assert job.coordinator.schedule(job.of_other).get().shape == (3, 1)
    with job.strategy.scope():
        change(job.model)  # and once more
    assert job.is_followed()
    if change is _prune:
        with job.strategy.scope():
            prune.remove(job.model[0], "weight")
        assert job.is_followed()
        with torch.no_grad():
            job.model[0].weight.mul_(2)
        assert job.is_followed()


def test_hooks_are_followed_and_those_on_parameters_refused_by_name(job: Job) -> None:
    """Outside of scopes, and until they are removed."""
    before = job.on_worker()
    handle = job.model[2].register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(job.on_worker(), before + 1)
    handle.remove()
    assert torch.equal(job.on_worker(), before)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        with pytest.raises(UnsupportedError, match="hook was registered on a parameter"):
            getattr(job.model[0].weight, name)(lambda gradient: None)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_from_before_the_parameter_was_placed_is_refused(name: str) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()

        def make() -> None:
            with strategy.scope():
                layer = nn.Linear(2, 1)
                getattr(layer.weight, name)(lambda gradient: None)

        with pytest.raises(UnsupportedError, match=r"Linear.weight has a gradient hook"):
            make()


def test_another_class_is_followed() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        job = Job(cluster)
        before = [job.on_worker() for _ in range(3)][-1]  # nothing changes any more
        job.model[2].__class__ = Doubled
        assert torch.equal(job.on_worker(), before * 2)
        assert job.is_followed()


class Grown(nn.Linear):
    """What is here of these, it uses."""

    scale: Any
    more: Any
    gain = 1.0

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("offset", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.scale * self.gain
        y = y if self.offset is None else y + self.offset
        return y if self.more is None else self.more(y)


def _register_child(layer: Grown) -> None:
    layer.more = nn.Linear(4, 4)


def _register_parameter(layer: Grown) -> None:
    del layer.scale
    layer.scale = nn.Parameter(torch.full((4,), 0.5))


def _delete_attribute(layer: Grown) -> None:
    del layer.gain


def _fill_buffer(layer: Grown) -> None:
    layer.offset = torch.ones(4)


@pytest.mark.parametrize("change", [_register_child, _register_parameter, _delete_attribute, _fill_buffer])
def test_what_is_registered_or_deleted_takes_the_place_of_an_attribute(
    change: Callable[[Grown], None], job: Job
) -> None:
    with job.strategy.scope():
        layer = job.model[0] = Grown()
        layer.scale, layer.more, layer.gain = 2.0, None, 3.0
    assert job.is_followed()
    before = job.on_worker()
    with job.strategy.scope():
        change(layer)
    assert job.is_followed()
    assert not torch.equal(job.on_worker(), before)
    if change is _delete_attribute:
        layer.gain = 3.0  # the same as before
        assert torch.equal(job.on_worker(), before)
        assert job.is_followed()


def test_a_head_that_took_the_place_of_another_trains(job: Job) -> None:
    model = job.model
    with job.strategy.scope():
        model[2] = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plain.load_state_dict(model.state_dict())
    own = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(module: nn.Module, by: Any) -> None:
        by.zero_grad()
        module(torch.eye(3)).square().mean().backward()
        by.step()

    for _ in range(3):
        step(plain, own)
        job.coordinator.schedule(step, args=(model, optimizer)).get()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.clone(), plain.state_dict()[name])


def test_nothing_is_taken_out_of_an_optimizer(job: Job) -> None:
    with job.strategy.scope():
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    all_of_it, group["params"] = group["params"], group["params"][1:]
    with pytest.raises(UnsupportedError, match=r"removed from param_groups of SGD.*requires_grad_\(False\)"):
        job.coordinator.schedule(lambda: optimizer.step())
    group["params"] = all_of_it
    assert job.is_followed()
