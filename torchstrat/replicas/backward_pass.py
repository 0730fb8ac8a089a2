"""The end of a backward pass, of which autograd tells."""

from __future__ import annotations

from collections.abc import Callable

from torchstrat._torch_private import uncompiled


class EndOfPass:
    """What a backward pass calls at its end. Nothing but the pass holds it."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @uncompiled
    def __call__(self) -> None:
        self._call()


def nothing() -> object:
    """In the place of a reference to one: there is none."""
    return None
