"""The strategies of `tests.support.replicas`, under the name that tests of gradients import them by."""

from tests.support.replicas import STRATEGIES, opened

__all__ = ["STRATEGIES", "opened"]
