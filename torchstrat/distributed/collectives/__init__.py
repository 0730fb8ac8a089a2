"""How the processes of one job talk: the `Communicator` protocol and its implementations."""

from torchstrat.core.communicator import Communicator, Work

__all__ = ["Communicator", "Work"]
