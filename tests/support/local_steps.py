"""Local SGD by hand, and the same training under a strategy, in this process or in processes of a launch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.matrix.gradient_updates import Lookahead
from torchstrat.errors import ContextError

Batch = tuple[torch.Tensor, torch.Tensor]
OPTIMIZERS: Mapping[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "wrapped": lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
}
KIND = "sgd with momentum"
ROWS = 4
"""Of each replica in each step."""


class Net(nn.Sequential):
    """With buffers that are averaged, and one that is not, a frozen average of weights and a frozen number, and a layer
    that is frozen but for the step."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self[0].requires_grad_(False)
        self[3].average = copy.deepcopy(self[3]).requires_grad_(False)
        self[3].frozen = nn.Parameter(torch.full((2,), 0.1), requires_grad=False)
        self.double()


class Job(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def objects(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"model": self.model, "optimizer": self.optimizer}


def build(kind: str) -> Job:
    torch.manual_seed(0)
    model = Net()
    return Job(model, OPTIMIZERS[kind](model.parameters()))


def batches(steps: int, replicas: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    shapes = (ROWS * replicas, 3), (ROWS * replicas, 2)
    return [
        (
            torch.randn(shapes[0], generator=generator, dtype=torch.float64),
            torch.randn(shapes[1], generator=generator, dtype=torch.float64),
        )
        for _ in range(steps)
    ]


def step_of(job: Job) -> Callable[[Batch], torch.Tensor]:
    def step(batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        first, last = job.model[0], job.model[3]  # type: ignore[index]
        first.requires_grad_(True)
        job.optimizer.zero_grad()
        loss = nn.functional.mse_loss(job.model(inputs), targets)
        loss.backward()
        job.optimizer.step()
        first.requires_grad_(False)
        for average, parameter in zip(last.average.parameters(), last.parameters(), strict=False):
            average.data.lerp_(parameter.detach(), 0.3)
        return loss.detach()

    return step


def close(seen: Any, wanted: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(seen, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def values(model: nn.Module) -> list[float]:
    """All that it has."""
    tensors = [*model.parameters(), *model.buffers()]
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist()  # type: ignore[no-any-return]


class Simulation:
    """A model for each replica, and one loop over all of them."""

    def __init__(self, kind: str, replicas: int, period: int) -> None:
        first = build(kind)
        models = [first.model, *(copy.deepcopy(first.model) for _ in range(1, replicas))]
        self.jobs = [Job(model, OPTIMIZERS[kind](model.parameters())) for model in models]
        self.period, self.steps = period, 0

    def train(self, data: Sequence[Batch]) -> list[list[float]]:
        """The losses: of each step those of all replicas."""
        losses = []
        for inputs, targets in data:
            shares = zip(inputs.chunk(len(self.jobs)), targets.chunk(len(self.jobs)), strict=True)
            losses.append([float(step_of(job)(share)) for job, share in zip(self.jobs, shares, strict=True)])
            self.steps += 1
            if self.steps % self.period == 0:
                self.average()
        return losses

    def average(self, *kinds: str) -> None:
        with torch.no_grad():
            for kind in kinds or ("parameters", "buffers"):
                for each in zip(*(getattr(job.model, kind)() for job in self.jobs), strict=True):
                    mean = torch.stack([one.double() for one in each]).mean(dim=0)
                    for one in each:
                        one.copy_(mean)

    def values(self) -> list[list[float]]:
        return [values(job.model) for job in self.jobs]


# -- what a program does between two runs ------------------------------------------------------------------------------


def _load_weights(job: Job) -> None:
    job.model.load_state_dict({name: value * 2 for name, value in job.model.state_dict().items()})


def _edit_through_data(job: Job) -> None:
    job.model[0].weight.data.mul_(0.5)  # type: ignore[index]


def _reset_momentum(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["momentum_buffer"].zero_()


def _load_state(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


def _set_rate(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.01


def _step(job: Job) -> None:
    job.optimizer.step()


CHANGES: Mapping[str, Callable[[Job], None]] = {
    "weights loaded": _load_weights,
    "edited through .data": _edit_through_data,
    "momentum reset": _reset_momentum,
    "state loaded": _load_state,
    "rate set": _set_rate,
    "stepped": _step,
}


def changed_by_hand(name: str) -> tuple[list[list[float]], list[list[float]]]:
    """Two steps, a change, and three steps: the losses of these and what replicas have. The program sees the first
    replica's, and every replica gets that, but only what was changed."""
    simulation = Simulation(KIND, 2, 3)
    simulation.train(batches(2, 2))
    first, other = simulation.jobs
    tensors = [[*job.model.parameters(), *job.model.buffers()] for job in simulation.jobs]
    before, state = [one.clone() for one in tensors[0]], copy.deepcopy(first.optimizer.state_dict())
    CHANGES[name](first)
    with torch.no_grad():
        for old, new, theirs in zip(before, *tensors, strict=True):
            if not torch.equal(old, new):
                theirs.copy_(new)
    after = first.optimizer.state_dict()
    if name == "state loaded" or str(state["state"]) != str(after["state"]):
        other.optimizer.load_state_dict(copy.deepcopy(after))
    other.optimizer.param_groups[0]["lr"] = first.optimizer.param_groups[0]["lr"]
    return simulation.train(batches(3, 2)), simulation.values()


def rates_by_hand() -> tuple[list[list[float]], list[list[float]]]:
    """Each replica sets a rate of its own in the first of four steps; the first one's is everyone's when a round ends,
    after three."""
    simulation = Simulation(KIND, 2, 3)
    for replica, job in enumerate(simulation.jobs):
        job.optimizer.param_groups[0]["lr"] = 0.02 * (replica + 1)
    losses = simulation.train(batches(3, 2))
    simulation.jobs[1].optimizer.param_groups[0]["lr"] = 0.02
    return losses + simulation.train(batches(4, 2)[3:]), simulation.values()


def rates_of_a_wrapper(train: Callable[[int, int], Any], jobs: Sequence[Job]) -> Any:
    """Of an optimizer that another one wraps the state is changed, and then the rate of what wraps it.

    ``train``: with the batches from the first number to the second."""
    train(0, 2)
    for job in jobs:
        _reset_momentum(Job(job.model, job.optimizer.base))
    train(2, 3)
    for job in jobs:
        _set_rate(job)
    return train(3, 5)


class Training:
    """The same under a strategy, which every process calls alike."""

    def __init__(self, strategy: Any, kind: str) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.job = build(kind)
        self.step = step_of(self.job)

    def train(self, data: Sequence[Batch]) -> list[list[float]]:
        """Of each step the losses of the replicas in this process."""
        runs = [self.strategy.run(self.step, (batch,)) for batch in self.strategy.distribute_dataset(list(data))]
        return [[float(loss) for loss in self.strategy.local_results(result)] for result in runs]

    def train_at_rates(self) -> list[list[float]]:
        """As `rates_by_hand`."""

        def set_rate() -> None:
            context = ts.get_replica_context()
            assert context is not None
            self.job.optimizer.param_groups[0]["lr"] = 0.02 * (context.replica_id_in_sync_group + 1)

        self.strategy.run(set_rate)
        return self.train(batches(4, 2))

    def values(self) -> list[list[float]]:
        """What the replicas of this process have."""
        found = self.strategy.run(lambda: torch.tensor(values(self.job.model), dtype=torch.float64))
        return [one.tolist() for one in self.strategy.local_results(found)]


def local_sgd(replicas: int | None, period: int = 3, **options: Any) -> Any:
    """``replicas``: in this process; None: as it was launched."""
    devices = None if replicas is None else [f"cpu:{index}" for index in range(replicas)]
    return ts.LocalSGDStrategy(devices, period=period, **options)


class FailsAtFirst(ts.policy.LocalUpdate):
    """Ends rounds of exactly two steps, and raises there until it is told not to."""

    fails = True
    rounds = 0

    def ends_round(self, steps: int) -> bool:
        return steps == 2

    def end_round(self, replica: ts.policy.Replica) -> None:
        if self.fails:
            raise ValueError("not yet")
        self.rounds += 1


class FailsAtFirstStrategy(ts.Strategy):
    def __init__(self, devices: list[str] | None) -> None:
        self.policy = FailsAtFirst()
        ts.policy.place(self, self.policy, devices)


def rounds_after_a_failure(devices: list[str] | None) -> int:
    """How many a process has ended two runs after the one in which the end of a round raised."""
    strategy = FailsAtFirstStrategy(devices)
    try:
        mine = Training(strategy, KIND)
        first, second, *others = batches(4, 2)
        mine.train([first])
        with pytest.raises(ValueError, match="not yet"):
            mine.train([second])
        strategy.policy.fails = False
        mine.train(others)
        return strategy.policy.rounds
    finally:
        strategy.close()


def fail_and_end_by_hand(replicas: int | None) -> tuple[list[list[float]], list[list[float]]]:
    """What the replicas of a process have after a run that all have stepped in, and that raised; and after a round that
    is ended once the program has doubled all that the model has."""
    strategy = local_sgd(replicas, 100)
    try:
        mine = Training(strategy, KIND)
        first, second = batches(2, 2)
        with pytest.raises(ContextError):
            strategy.run(strategy.end_round)
        mine.train([first])

        def failing(batch: Batch) -> None:
            mine.step(batch)
            ts.get_replica_context().all_reduce("sum", torch.zeros(()))  # type: ignore[union-attr]
            raise ValueError("for once")

        with pytest.raises(ValueError, match="for once"):
            strategy.run(failing, (next(iter(strategy.distribute_dataset([second]))),))
        found = mine.values()
        for tensor in mine.job.model.state_dict().values():
            tensor.mul_(2)
        strategy.end_round()
        return found, mine.values()
    finally:
        strategy.close()


def failed_and_ended_by_hand() -> tuple[list[list[float]], list[list[float]]]:
    """The same: what each has stepped is its own, and what the program has made of the first one's is everyone's."""
    simulation = Simulation(KIND, 2, 100)
    simulation.train(batches(2, 2))
    own = simulation.values()
    return own, [[2 * value for value in own[0]]] * 2
