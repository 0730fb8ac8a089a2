"""What a program takes under each strategy, in memory and in traffic, before anything is allocated: `ts.estimate`."""

from torchstrat.strategies.estimates.estimate import estimate
from torchstrat.strategies.estimates.rows import Estimate, Row

__all__ = ["Estimate", "Row", "estimate"]
