"""Functions on workers with types: what ``schedule`` gives is fetched as what the function returned."""

from typing import Any

import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import torchstrat as ts

strategy = ts.ParameterServerStrategy(ts.cluster_resolver.TFConfigClusterResolver())
coordinator = ts.ClusterCoordinator(strategy)
assert_type(coordinator, ts.ClusterCoordinator)
assert_type(coordinator.strategy, ts.ParameterServerStrategy)


def loss() -> torch.Tensor:
    return torch.zeros(())


def rows() -> int:
    return 32


def both() -> tuple[torch.Tensor, int]:
    return loss(), rows()


pending = coordinator.schedule(loss)
assert_type(pending, ts.RemoteValue[torch.Tensor])
assert_type(pending.get(timeout=10.0), torch.Tensor)
assert_type(pending.fetch(), NDArray[Any])
assert_type(coordinator.schedule(rows).fetch(), int)
assert_type(coordinator.fetch(coordinator.schedule(rows)), int)
assert_type(coordinator.fetch(pending), NDArray[Any])
assert_type(coordinator.schedule(both).get(), tuple[torch.Tensor, int])
coordinator.join()
