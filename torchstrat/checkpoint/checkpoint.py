"""`Checkpoint`: save under one strategy, restore under another, on any number of servers, replicas or processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchstrat import context
from torchstrat.errors import ContextError, InvalidArgumentError
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable
from torchstrat.variable.variable import Variable

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import Stored
    from torchstrat.checkpoint.items import Item, Reads, Writes
    from torchstrat.checkpoint.processes import Processes
    from torchstrat.parameter_server.variables.server_checkpoint import ServerCheckpoint, ServersWritten

_MOST_PROBLEMS = 20


class Checkpoint:
    """Named objects that are saved and restored together::

        checkpoint = ts.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler)
        checkpoint.save("checkpoints/step-1000")
        checkpoint.restore("checkpoints/step-1000")

    Args:
        objects: modules, optimizers, `ts.Variable`, `ts.ShardedVariable`, tensors, and anything with ``state_dict()``
            and ``load_state_dict()``.

    On disk it is a folder in the format of torch.distributed.checkpoint, which reads it without torchstrat: whole
    tensors by the names that ``state_dict()`` gives them (``model.embedding.weight``), an optimizer's state by the name
    of its parameter (``optimizer.state.embedding.weight.exp_avg``), whoever held which rows. A `ShardedVariable`, also
    one within a module, is one tensor. So what one strategy saved, any other restores, on another number of servers or
    with another partitioner. Like every pickle, a checkpoint is to be restored only from where you trust it.

    Under `ParameterServerStrategy` servers write and read their own shards, and the path must mean the same folder for
    them and the coordinator. With several processes (torchrun) each one calls `save` and `restore`; rank 0 writes, all
    read.
    """

    def __init__(self, **objects: Any) -> None:
        if not objects:
            raise InvalidArgumentError("Checkpoint needs objects to save, by name: ts.Checkpoint(model=model, …).")
        self._objects = objects

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; blocks until it is on the disk. It appears at ``path`` whole, in place of one that was
        there; whatever happens before that leaves the earlier one intact.

        With parameter servers: functions may go on running; each server writes what it holds at one moment between two
        pushes. Call ``coordinator.join()`` before for one moment across all servers.

        Raises:
            InvalidArgumentError: the path cannot be written to, here or by a server, which the message names.
            ParameterServerUnavailable: a server is gone.
            ContextError: called within a replica, or in a scheduled function.
        """
        self._require_outside("save")
        from torchstrat.checkpoint.items import make_items
        from torchstrat.checkpoint.processes import all_processes

        target = _absolute(path)
        with all_processes() as processes:
            servers = self._servers()
            if servers is not None:
                servers.prepare_to_save()
            items = make_items(self._objects, servers)
            # Every process collects what is to be written: reading some variables involves all of them.
            writes = [item.writes() for item in items]

            def write() -> None:
                if processes.is_first:
                    _write(target, items, writes, servers)

            processes.attempt(write, f"saving {target}")

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Give the objects the values of a checkpoint; what else is in it is left alone.

        Everything is compared and read before anything changes. With parameter servers it first waits until no function
        runs, and until every server is there, for as long as the strategy's ``timeout``: also after
        `ParameterServerUnavailable`, when the lost server was started again. All servers then go to the state of the
        checkpoint, and the next functions run on the workers that are there. Functions that were scheduled before and
        did not end are not run again by this.

        Raises:
            InvalidArgumentError: there is no complete checkpoint, a file of it is damaged, or it does not fit: names
                that are missing or too many, other shapes or dtypes, all of them in one message.
            CommunicationTimeoutError: a server was not there in time; the message names it.
            ContextError: called within a replica, or in a scheduled function.
        """
        self._require_outside("restore")
        from torchstrat.checkpoint.items import make_items
        from torchstrat.checkpoint.processes import all_processes

        target = _absolute(path)
        with all_processes() as processes:
            servers = self._servers()
            if servers is not None:
                servers.prepare_to_restore()
            items = make_items(self._objects, servers)
            _restore(target, items, servers, processes)

    def _servers(self) -> ServerCheckpoint | None:
        from torchstrat.parameter_server.variables.server_checkpoint import server_checkpoint_of

        return server_checkpoint_of(_tensors(self._objects.values()))

    def _require_outside(self, call: str) -> None:
        here = context.get_replica_context()
        strategy = context.get_strategy()
        if (here is not None and context.has_strategy()) or getattr(strategy, "_is_worker", False):
            raise ContextError(
                f"Checkpoint.{call} was called in a replica, or in a scheduled function; call it in the program around "
                "them."
            )

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects)}>"


def _absolute(path: str | os.PathLike[str]) -> Folder:
    target = Folder(os.path.abspath(path))
    if not os.fspath(path) or not target.name:
        raise InvalidArgumentError(f"a checkpoint needs the path of a folder of its own; got {os.fspath(path)!r}.")
    return target


def _tensors(objects: Any) -> Iterator[Any]:
    """What may live on servers."""
    for value in objects:
        if isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()
            for module in value.modules():
                if isinstance(module, ShardedVariable):
                    yield from module.variables
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                yield from group["params"]
        elif isinstance(value, Variable | torch.Tensor):
            yield value


def _write(target: Folder, items: list[Item], writes: list[Writes], servers: ServerCheckpoint | None) -> None:
    from torchstrat.checkpoint.files import write_metadata, write_part
    from torchstrat.checkpoint.folder import written_whole
    from torchstrat.checkpoint.manifest import checked, write_manifest
    from torchstrat.checkpoint.stored import INDEX

    with written_whole(target) as folder:
        written: ServersWritten | None = None
        tensors = [one for of_item in writes for one in of_item.tensors]
        values = [one for of_item in writes for one in of_item.values]
        if servers is not None:
            slots = [slot for item in items for slot in item.remote_slots()]
            states = [state for item in items for state in item.remote_states()]
            written = servers.write(folder, slots, states, first_number=1)
            tensors += written.whole_tensors
            values += written.whole_values
        _refuse_twice([*[piece.path for piece, _ in tensors], *[path for path, _ in values]], tensors)
        try:
            parts = [write_part(folder, 0, tensors, values), *(written.parts if written is not None else ())]
            write_metadata(folder, parts)
            files = {name: check for part in parts for name, check in part.files.items()}
            files[INDEX] = checked(folder / INDEX)
            write_manifest(folder, files, {} if written is None else {"servers": written.applied})
        except OSError as error:
            raise InvalidArgumentError(f"the checkpoint cannot be written to {target}: {error}") from error


def _refuse_twice(paths: list[Any], tensors: list[Any]) -> None:
    from torchstrat.checkpoint.pieces import key_of

    by_key: dict[str, Any] = {}
    for path in paths:
        if by_key.setdefault(key_of(path), path) != path:
            raise InvalidArgumentError(
                f"two values of the checkpoint would both be called {key_of(path)}: {by_key[key_of(path)]} and {path}. "
                "Give their objects other names."
            )


def _restore(target: Folder, items: list[Item], servers: ServerCheckpoint | None, processes: Processes) -> None:
    from torchstrat.checkpoint.files import read
    from torchstrat.checkpoint.stored import open_checkpoint

    reads: list[Reads] = []
    values: list[Any] = []
    restoring = None

    def look() -> None:
        nonlocal restoring
        stored = open_checkpoint(target)
        reads.extend(_compared(stored, items))
        values.extend(read(stored, [want for one in reads for want in one.wants]))
        if servers is not None:
            slots = [slot for one in reads for slot in one.slots]
            states = [state for one in reads for state in one.states]
            restoring = servers.restore(stored, slots, states)

    processes.attempt(look, f"restoring {target}")
    if restoring is not None:
        restoring.adopt()
    first = 0
    for one in reads:
        one.put(values[first : first + len(one.wants)])
        first += len(one.wants)


def _compared(stored: Stored, items: list[Item]) -> list[Reads]:
    problems: list[str] = []
    reads = [item.reads(stored, problems) for item in items]
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_MOST_PROBLEMS])
        more = f"\n  and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise InvalidArgumentError(f"{stored.folder} does not fit this program; nothing was changed:{shown}{more}")
    return reads
