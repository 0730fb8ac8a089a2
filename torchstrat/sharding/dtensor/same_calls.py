"""That the logical devices of a replica make the same calls where what carries their tensors compares none: sockets.

There a sum that one process alone asks for would be answered by what another sends for its next one. So they agree on
a call before they make it, once: what a step calls in the order of the step before has been agreed on. A process that
calls another thing says so where the others do not come, and that is found while both wait, as different calls
elsewhere are (`torchstrat.distributed.collectives.standstill`). A step that repeats the last one costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchstrat.core.communicator import Communicator
from torchstrat.distributed.collectives.agreement import agree


class SameCalls:
    """``channel``: of the logical devices of a replica, for nothing else than this."""

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._agreed: list[str] = []
        """The calls of the last step, of this one as far as it has come."""
        self._place: int | None = None
        """How many calls this step has made; None outside of steps, where each call is agreed on."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._place = 0
        try:
            yield
            if self._place < len(self._agreed):
                agree(self._channel, "the end of a step")
                del self._agreed[self._place :]
        except BaseException:
            self._agreed.clear()
            raise
        finally:
            self._place = None

    def expect(self, call: str) -> None:
        """Before each call. Raises `ReplicaDivergenceError` or `CommunicationError` where others make another one."""
        place = self._place
        if place is None:
            agree(self._channel, call)
            return
        if place >= len(self._agreed) or self._agreed[place] != call:
            agree(self._channel, call, (place,))
            self._agreed[place:] = [call]
        self._place = place + 1
