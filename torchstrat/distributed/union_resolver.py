"""Several descriptions of clusters as one; public in ``ts.cluster_resolver``."""

from __future__ import annotations

from typing import Any

from torchstrat.core.errors import ClusterConfigError, InvalidArgumentError, WrongTypeError
from torchstrat.distributed.cluster_spec import ClusterSpec
from torchstrat.distributed.resolver_interface import ClusterResolver, with_layer


class TaskOverlapError(ClusterConfigError, KeyError):
    """Two parts of a cluster have different addresses for one task."""

    def __str__(self) -> str:  # a KeyError shows the repr of its message
        return str(self.args[0])


class UnionResolver(ClusterResolver):
    """One cluster of the clusters of several resolvers; the first one says who this process is.

    Where all of them list the tasks of a job from 0 on, the lists are joined in order. Where one
    numbers them otherwise, tasks keep their numbers.

    Args:
        resolvers: At least one. They are asked again at each access.
        task_type, task_id, rpc_layer: In place of the first resolver's; can be set later, too.

    Raises:
        InvalidArgumentError: no resolver, or an unknown keyword.
        WrongTypeError: an argument is no resolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InvalidArgumentError(
                f"UnionResolver got {sorted(unknown)}; its keywords are task_type, task_id and rpc_layer."
            )
        if not resolvers:
            raise InvalidArgumentError("UnionResolver needs at least one resolver; got none.")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise WrongTypeError(
                    f"UnionResolver needs ClusterResolvers; got {type(resolver).__name__} {resolver!r:.80}."
                )
        self._resolvers = resolvers
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment: str | None = None

    @property
    def task_type(self) -> str | None:
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        return self._resolvers[0].environment if self._environment is None else self._environment

    @environment.setter
    def environment(self, environment: str | None) -> None:
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """All tasks of all resolvers.

        Raises:
            TaskOverlapError: two of them have a task of one job and number (a KeyError, and a ValueError).
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for part in parts for job in part)
        return ClusterSpec({job: _merged(job, [part[job] for part in parts if job in part]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the task asked for; without both its type and its number, the first resolver's master.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer or self._rpc_layer)
        return with_layer(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """What the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]  # type: ignore[misc]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise TaskOverlapError(
                f"job {job!r} has tasks {twice} in more than one of the resolvers of a UnionResolver; number each once."
            )
        merged |= tasks
    return merged
