"""Processes that outlive a test: what is to die are forks of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fork_servers import clusters_share_a_fork_server, kept_fork_server  # noqa: F401
from torchstrat.testing import Workers


@pytest.fixture(scope="session")
def three_processes() -> Iterator[Workers]:
    """A group of three for `programs.play`. Functions must not start anything in the processes themselves."""
    with Workers(3, timeout_seconds=300) as workers:
        workers.run(import_what_forks_need)
        yield workers


def import_what_forks_need() -> None:
    """The first optimizer of a process imports torch's compiler, which takes seconds."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
