"""`strategy.extended`: what library code needs beyond `Strategy` itself."""

from torchstrat.strategies.extended.strategy_extended import StrategyExtended

__all__ = ["StrategyExtended"]
