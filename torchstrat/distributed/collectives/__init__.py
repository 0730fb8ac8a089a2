"""How the processes of one job talk: the `Communicator` protocol and its implementations.

`process_group` calls torch.distributed, `shm` goes through memory that processes of one host share; `agreement` keeps
ranks from mixing up calls, and `standstill` says who was waited for.

Imports from `core` and `distributed`.
"""

from torchstrat.core.communicator import Communicator, Work

__all__ = ["Communicator", "Work"]
