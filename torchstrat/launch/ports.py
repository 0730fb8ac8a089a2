"""Loopback addresses that stay the same task's while its processes come and go."""

from __future__ import annotations

import socket
import sys

HOST = "127.0.0.1"


class ReservedPort:
    """A free TCP port of the loopback interface, kept from others until `close`.

    It is bound here and not listened on. With SO_REUSEADDR on both sockets Linux lets a task listen on it all the same,
    again after each restart, while nobody is given it by chance, neither as a free port nor as the near end of a
    connection. (A port that is looked up and let go can be gone at the next restart.) Other systems refuse a second
    socket, so there the port is let go at once: a task that finds it taken ends and is started again.
    """

    _HOLDS = sys.platform == "linux"

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((HOST, 0))
            self.address = f"{HOST}:{self._socket.getsockname()[1]}"
        except BaseException:
            self._socket.close()
            raise
        if not self._HOLDS:
            self._socket.close()

    def close(self) -> None:
        """Let others have it. May be called twice."""
        self._socket.close()
