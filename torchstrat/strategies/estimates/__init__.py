"""What a program takes under each strategy, in memory and in traffic, before anything is allocated: `ts.estimate`."""

from torchstrat.strategies.estimates.estimate import Estimate, Row, estimate

__all__ = ["Estimate", "Row", "estimate"]
