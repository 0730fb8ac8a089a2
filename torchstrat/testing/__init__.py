"""What shows that a strategy keeps its promises. Shipped, so that a backend of your own can be held to them.

`spawn` and `Workers` run functions in a group of real processes; `torchstrat.testing.contract` is the table of
training cases with the strategies they run under; `torchstrat.testing.divergence` holds the steps that must fail.

`compare` runs a program of your own plainly and under each strategy, and finds the first variable, step and line that
differ; so does the command ``torchstrat verify``.

For programs with a `ClusterCoordinator`: `Cluster` (``LocalCluster`` is an older name of the same class) is one of real
processes on this machine, `torchstrat.testing.fake_cluster.FakeCluster` one of threads, with faults on command.

For pytest, `torchstrat.testing.pytest_plugin` has the fixtures ``cluster``, ``torchrun`` and ``fault_plan``.

For programs that annotate tensors for a TPU: `fake_tpu_strategy` needs neither a TPU nor torch_xla.

Imports from `core`, `data`, `distributed`, `launch`, `parameter_server`, `replicas`, `sharding`, `strategies` and
`torchstrat`.
"""

from torchstrat.launch import Cluster, LocalCluster
from torchstrat.testing.compare import Comparison, Finding, compare
from torchstrat.testing.fake_tpu import fake_tpu_strategy
from torchstrat.testing.spawn import Failure, Workers, WorkersError, spawn

__all__ = [
    "Cluster",
    "Comparison",
    "Failure",
    "Finding",
    "LocalCluster",
    "Workers",
    "WorkersError",
    "compare",
    "fake_tpu_strategy",
    "spawn",
]
