"""How the processes of a strategy talk, in TensorFlow's words: what ``tf.distribute.experimental`` calls its hints.

torchstrat's own are the arguments ``collectives`` and ``timeout`` of the strategies; these are translated into them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

import torch

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError


class CommunicationImplementation(enum.Enum):
    """By what processes talk. ``CollectiveCommunication`` is its older name."""

    AUTO = "AUTO"
    """In shared memory on one host, else by gloo or NCCL: ``collectives="auto"``."""
    RING = "RING"
    """Never in shared memory: ``collectives="process_group"``."""
    NCCL = "NCCL"
    """As RING, and an error without a GPU."""


@dataclass(frozen=True)
class CommunicationOptions:
    """``MultiWorkerMirroredStrategy(communication_options=…)``. ``CollectiveHints`` is its older name.

    Args:
        bytes_per_pack: accepted and checked; how many gradients travel together is decided here by itself.
        timeout_seconds: how long to wait for other processes; None: as long as the strategy's ``timeout`` says.
        implementation: by what they talk.

    Raises `InvalidArgumentError` for negative numbers, `WrongTypeError` for an implementation that is no member.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack={self.bytes_per_pack} must not be negative; leave it out.")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise InvalidArgumentError(
                f"timeout_seconds={self.timeout_seconds} must be more than 0; give None for the strategy's timeout."
            )
        if not isinstance(self.implementation, CommunicationImplementation):
            raise WrongTypeError(
                f"implementation must be a CommunicationImplementation; got {self.implementation!r:.80}. Write "
                "ts.experimental.CommunicationImplementation.AUTO."
            )


def in_own_words(options: CommunicationOptions | None, timeout: timedelta, collectives: str) -> tuple[timedelta, str]:
    """``timeout`` and ``collectives``, unless the options say something about them."""
    if options is None:
        return timeout, collectives
    if not isinstance(options, CommunicationOptions):
        raise WrongTypeError(
            f"communication_options must be a ts.experimental.CommunicationOptions; got {type(options).__name__} "
            f"{options!r:.80}. Write CommunicationOptions(timeout_seconds=60), or give collectives and timeout instead."
        )
    if options.implementation is CommunicationImplementation.NCCL and not torch.cuda.is_available():
        raise UnsupportedError(
            "CommunicationImplementation.NCCL needs a GPU, and this machine has none that PyTorch sees; use AUTO."
        )
    if options.timeout_seconds is not None:
        timeout = timedelta(seconds=options.timeout_seconds)
    if options.implementation is not CommunicationImplementation.AUTO:
        collectives = "process_group"
    return timeout, collectives
