"""What a role does, as seen by the process that hosts it. Roles: ``ps`` holds variables, ``worker`` runs functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torchstrat.parameter_server.endpoint import Endpoint, Handler
from torchstrat.parameter_server.tasks import Peer


class Service(Protocol):
    """One role. The host calls these methods one at a time, from its own thread."""

    def handlers(self) -> Mapping[str, Handler]:
        """What it answers; asked once, before any coordinator is known."""

    def attach(self, endpoint: Endpoint) -> None:
        """This process's end of the cluster's messages; called once, before it serves."""

    def status(self) -> Mapping[str, Any]:
        """Plain data about what it holds, for a coordinator that has just arrived (part of the greeting)."""

    def coordinator_arrived(self, coordinator: Peer) -> None:
        """A coordinator, the first or a later one, may be called from now on."""

    def coordinator_left(self, *, finished: bool) -> None:
        """The coordinator said good-bye (``finished``), or was lost and may come back."""

    def drain(self, timeout_seconds: float) -> None:
        """SIGTERM: finish or hand back what is being worked on, tell the coordinator, return within the time."""

    def close(self) -> None:
        """The process is about to end."""
