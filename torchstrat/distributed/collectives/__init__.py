"""How the processes of one job talk: the `Communicator` protocol and its implementations.

`process_group` calls torch.distributed, `shm` goes through memory that processes of one host share; `agreement` keeps
ranks from mixing up calls, and `notes` say who was waited for.

Imports from `core` and `distributed`.
"""

from torchstrat.core.engine import Communicator, Work

__all__ = ["Communicator", "Work"]
