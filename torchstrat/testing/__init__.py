"""What shows that a strategy keeps its promises. Shipped, so that a backend of your own can be held to them.

`spawn` and `Workers` run functions in a group of real processes; `torchstrat.testing.contract` is the table of
training cases with the strategies they run under; `torchstrat.testing.divergence` holds the steps that must fail.
"""

from torchstrat.testing.spawn import Failure, Workers, WorkersError, spawn

__all__ = ["Failure", "Workers", "WorkersError", "spawn"]
