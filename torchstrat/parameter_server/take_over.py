"""What a coordinator finds on servers whose last one was lost, and how both are kept apart.

What the new one makes under the same numbers it finds as the last one left it. That is for a program which makes again
what it had; it ends with the first checkpoint that it restores.
"""

from __future__ import annotations

from collections.abc import Collection

from torchstrat.parameter_server.messages import Dropped
from torchstrat.parameter_server.variables.remote_access import ServerGroup

_MOST_UNSEEN_FUNCTIONS = 2**20
"""How far the number of a function that a coordinator has dispatched may be above those that servers have heard of:
functions that push nothing, and the length of its queue, with room to spare."""


def retire_earlier_functions(servers: ServerGroup, next_function: int) -> int:
    """The first number for functions of this coordinator, above all of an earlier one: what those push is refused.

    One of them may be running on a worker, under a number that no server has seen yet. Were it given out again, the
    servers would take one function's pushes for repetitions of the other's.
    """
    servers.ask_all("ps.forget_below", next_function + _MOST_UNSEEN_FUNCTIONS)
    return next_function + _MOST_UNSEEN_FUNCTIONS


def release_others(servers: ServerGroup, variables: Collection[int], optimizers: Collection[int]) -> None:
    """Let servers drop all but these. What has a number of those would be taken for something new that gets it."""
    orders = {}
    for index, catalog in servers.ask_all("ps.catalog").items():
        orders[index] = Dropped(
            tuple(one["number"] for one in catalog["variables"] if one["number"] not in variables),
            tuple(one["number"] for one in catalog["optimizers"] if one["number"] not in optimizers),
        )
    servers.ask("ps.release", orders)
