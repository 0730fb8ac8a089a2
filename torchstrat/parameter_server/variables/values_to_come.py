"""Values that servers have been asked for, one after the other as they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from torchstrat.parameter_server.messages import ShardKey
from torchstrat.parameter_server.variables.server_group import ServerGroup


class ValuesToCome:
    """One call to each of several servers, whose answers hold the values of shards. Thread-safe.

    Where memory is shared, a server says that it has done what it was asked to do (applied a push) before it writes
    values, and tells from time to time how far it is; otherwise all of that comes with its answer.

    Args:
        wanted: the shards whose values each server was asked for, in the order of its answer.
        places: where these are wanted, in the same order; see `Endpoint.call`, also for None.
        values_in: the values in an answer.
    """

    def __init__(
        self,
        servers: ServerGroup,
        method: str,
        wanted: Mapping[int, Sequence[ShardKey]],
        places: Mapping[int, Sequence[torch.Tensor]] | None,
        values_in: Callable[[Any], Sequence[torch.Tensor]] = list,
    ) -> None:
        self._servers, self._method, self._values_in = servers, method, values_in
        self._where = {key: (server, n) for server, keys in wanted.items() for n, key in enumerate(keys)}
        self._places = places
        self._futures: dict[int, Future[Any]] = {}
        self._answers: dict[int, Sequence[torch.Tensor]] = {}
        # Futures keep what they are to call. That must not be this object: it would keep the places, too, until Python
        # looks for cycles.
        self._news = _News()

    def ask(self, payloads: Mapping[int, Any], on_sign: Callable[[], None] | None = None) -> None:
        """Send each server its payload. ``on_sign``: called once for each that has done what it was asked to do."""
        self._news.on_sign = on_sign
        for server, payload in payloads.items():
            places = None if self._places is None else self._places.get(server, ())
            told = partial(self._news.written, server)
            future = self._servers.send(server, self._method, payload, into=places, on_written=told)
            self._futures[server] = future
            future.add_done_callback(partial(self._news.answered, server))

    def wait_until_done(self) -> None:
        """Until every server has done what it was asked to do; the values may be on their way.

        Raises:
            ParameterServerUnavailable: one is gone, or did not answer in time.
        """
        told = self._news.count_of
        self._news.wait_for(lambda: all(f.done() or told(s) is not None for s, f in self._futures.items()))
        finished = {server: future for server, future in self._futures.items() if future.done()}
        self._servers.answers(self._method, finished)

    def is_written(self, keys: Sequence[ShardKey]) -> bool:
        """Whether `fetch` would not have to wait."""
        return all(self._is_told(key) or self._future_of(key).done() for key in keys)

    def fetch(self, keys: Sequence[ShardKey]) -> None:
        """Wait until the values of these shards are at their places.

        Raises:
            ParameterServerUnavailable: the server of one is gone, or did not answer in time.
        """
        if not self.is_written(keys):
            self._news.wait_for(lambda: self.is_written(keys))
        for key in keys:
            if self._is_told(key):
                continue
            server, number = self._where[key]
            value = self._answer_of(server)[number]
            assert self._places is not None
            place = self._places[server][number]
            if value.data_ptr() != place.data_ptr():
                place.copy_(value)

    def fetch_all(self) -> None:
        """As `fetch`, of whatever was asked for."""
        self.fetch(list(self._where))

    def _answer_of(self, server: int) -> Sequence[torch.Tensor]:
        if server not in self._answers:
            answers = self._servers.answers(self._method, {server: self._futures[server]})
            self._answers[server] = self._values_in(answers[server])
        return self._answers[server]

    def _is_told(self, key: ShardKey) -> bool:
        server, number = self._where[key]
        return number < (self._news.count_of(server) or 0)

    def _future_of(self, key: ShardKey) -> Future[Any]:
        return self._futures[self._where[key][0]]


class _News:
    """What the transport's threads have to say. ``on_sign``: called once for each server that says something."""

    def __init__(self) -> None:
        self.on_sign: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._heard_of: set[int] = set()
        self._written: dict[int, int] = {}

    def written(self, server: int, count: int) -> None:
        with self._changed:
            self._written[server] = count
            self._changed.notify_all()
        self._sign_of(server)

    def answered(self, server: int, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()
        self._sign_of(server)

    def count_of(self, server: int) -> int | None:
        """How many values this server has written; None: it has said nothing but, perhaps, its answer."""
        return self._written.get(server)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(condition)

    def _sign_of(self, server: int) -> None:
        if self.on_sign is not None and server not in self._heard_of:
            self._heard_of.add(server)  # one thread at a time has something to say of a server
            self.on_sign()
