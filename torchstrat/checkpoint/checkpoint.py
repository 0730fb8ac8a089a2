"""`Checkpoint`: save under one strategy, restore under another, on any number of servers, replicas or processes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchstrat.checkpoint.pieces import OWN
from torchstrat.checkpoint.remote import Servers, servers_of
from torchstrat.core import context, terminal
from torchstrat.core.context import home_of
from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.variable.tensor_like import TensorInShards
from torchstrat.core.variable.variable import Variable

if TYPE_CHECKING:
    from torchstrat.checkpoint.items import Item, Reads
    from torchstrat.checkpoint.job_state import Processes
    from torchstrat.checkpoint.pieces import Selection, SkippedKeys
    from torchstrat.checkpoint.writing import SaveHandle, State

logger = logging.getLogger("torchstrat.checkpoint")


@short_tracebacks
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

    Random numbers go on where they were: those of PyTorch (on the CPU, on GPUs, of each replica, of scheduled
    functions), of Python's ``random`` and of ``numpy.random``. They are in it under the name ``torchstrat``.

    Under `ParameterServerStrategy` servers write and read their own shards, and the path must mean the same folder for
    them and the coordinator. With several processes (torchrun) each one calls `save` and `restore`, in the same order.
    """

    def __init__(self, *unnamed: object, **objects: object) -> None:
        if unnamed:
            raise WrongTypeError(
                f"Checkpoint got {type(unnamed[0]).__name__} without a name, and saves objects by name; write "
                "ts.Checkpoint(model=model, optimizer=optimizer)."
            )
        if not objects:
            raise InvalidArgumentError("Checkpoint needs objects to save, by name: ts.Checkpoint(model=model, …).")
        if OWN in objects:
            raise InvalidArgumentError(
                "Checkpoint(torchstrat=…): under this name a checkpoint has the random numbers and counters of the job "
                "itself; give the object another one."
            )
        for name, value in objects.items():
            if isinstance(value, type):
                raise WrongTypeError(
                    f"Checkpoint({name}=…) got the class {value.__qualname__}, and saves objects; give the one that "
                    f"the program uses: {name} = {value.__name__}(…), then ts.Checkpoint({name}={name})."
                )
        self._objects = objects
        self._last: SaveHandle | None = None  # of the last asynchronous save

    @property
    def objects(self) -> Mapping[str, object]:
        """What it saves, by name."""
        return self._objects

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> SaveHandle:
        """Write a checkpoint. It appears at ``path`` whole, in place of one that was there; whatever happens before
        leaves that intact.

        Everything in it is of one moment. With parameter servers no function is in it half: the coordinator lets those
        that run come to their end, starts none, lets all servers mark what they hold, and goes on at once, before
        anything is written. What waits in the queue stays there. Servers then write block by block; what functions
        change before it is written, rows of a table or whole variables, is copied first. With several processes
        (torchrun) those that hold a value share the writing.

        Args:
            path: a folder of its own. Servers and other processes must see the same under this name.
            asynchronous: return when the moment is taken, and write in the background. What lives in this process is
                copied first, which takes as much memory as it does; parameter servers copy what changes, as above. A
                program that ends waits for the writing.

        Returns:
            A handle; of a blocking save one that is done. An asynchronous save raises its error at ``result()``, or
            else at the next ``save`` of this object, once, which then has not begun.

        One save or restore at a time: another one, of any `Checkpoint` in this process, waits for its end.

        Every process has to call it, with the same path and the same names of objects.

        Raises:
            ReplicaDivergenceError: another process has called it with another path, or objects of other names.
            InvalidArgumentError: the path cannot be written to, here or by a server, which the message names.
            ParameterServerUnavailable: a server is gone.
            CommunicationTimeoutError: functions ran for longer than the strategy's ``timeout``; the message names them
                and their workers.
            TorchstratError: it failed on another process, whose rank the message names; or a server gave it up for lack
                of memory.
            ContextError: called within a replica, or in a scheduled function.
        """
        self._require_outside("save")
        target = _absolute(path)
        # Imported here: torch.distributed.checkpoint takes a while to load.
        from torchstrat.checkpoint.job_state import all_processes, names_of
        from torchstrat.checkpoint.writing import SaveHandle, here_and_now, in_background, take, turns, write

        outcome: Future[Path] = Future()
        handle, what = SaveHandle(target, outcome), f"saving {target}"
        taken: list[State] = []
        turns.take(what)
        try:
            with contextlib.ExitStack() as stack:
                call = f"Checkpoint.save of {names_of(self._objects)} to {target}"
                processes = stack.enter_context(all_processes(call, self._objects))
                processes.attempt(self._raise_earlier, what)
                # Every process collects what is to be written: reading some variables involves all of them.
                processes.attempt(lambda: taken.append(take(self._objects, self._servers(), copies=asynchronous)), what)
                stack.callback(taken[0].close)
                if asynchronous:
                    processes.go_on_in_background()
                open_until_written = stack.pop_all()
        except BaseException:
            turns.give()
            raise

        def finish() -> None:
            with open_until_written, terminal.shown(what, here=processes.is_first and not asynchronous):
                write(target, taken[0], processes)

        if asynchronous:
            self._last = handle
            in_background(target, outcome, finish)
        else:
            here_and_now(target, outcome, finish)
        return handle

    def _raise_earlier(self) -> None:
        """What became of the last asynchronous save, if it has failed and nobody has asked."""
        if self._last is not None:
            self._last.raise_untold()

    def restore(
        self, path: str | os.PathLike[str], *, only: str | Iterable[str] | None = None, strict: bool = True
    ) -> SkippedKeys:
        """Give the objects the values of a checkpoint; what else is in it is left alone. Waits for a save that is under
        way.

        ``path`` may also be a plain file, of ``torch.save`` or safetensors: of a dict of ``state_dict()``s by the names
        of the objects, as `consolidate` writes it, or of the ``state_dict()`` of the one module that there is.

        Everything is compared and read before anything changes. Objects that are no modules, optimizers or tensors come
        first: where the ``load_state_dict()`` of one raises, on any process, variables and optimizers are as they were
        on all. On parameter servers variables come first. A note at the exception names what was restored.

        With parameter servers it first waits until no function runs, and until every server is there, for as long as
        the strategy's ``timeout``: also after `ParameterServerUnavailable`, when the lost server was started again. All
        servers then go to the state of the checkpoint, and the next functions run on the workers that are there.
        Functions that were scheduled before and did not end are not run again by this.

        Every process has to call it, with the same arguments.

        Args:
            only: restore what has these names or is below them, and leave everything else as it is: a name of this
                object's (``"model"``), and behind it, with dots, names of its ``state_dict()`` (``"model.table"``: all
                of that layer). Of an optimizer ``"optimizer.state.table.weight"``, the state of one parameter;
                ``"optimizer.state"``; ``"optimizer.param_groups"``. Schedulers, datasets and other objects are restored
                as a whole. The state of parameters that are not named stays, also that of parameters whose values are
                restored: name both. Random numbers and counters of the job stay, unless ``"torchstrat"`` is named; so
                does the position in the data, unless the dataset is.
            strict: False: skip what is on one side only, or of another shape or dtype, and return the names. The state
                of an optimizer stays for parameters of which the checkpoint knows nothing, or of which it has another
                shape; options of parameter groups stay where the groups have other parameters.

        Returns:
            The names of what was skipped, as ``load_state_dict(strict=False)`` does: ``missing_keys``,
            ``unexpected_keys``, and ``mismatched_keys`` for other shapes and dtypes. If strict, all are empty.

        Raises:
            InvalidArgumentError: there is no complete checkpoint, a file of it is damaged, or it does not fit: names
                that are missing or too many, other shapes or dtypes, all of them in one message; or ``only`` has a name
                that no object has, or the checkpoint does not have, with those that are near it.
            ReplicaDivergenceError: another process has called it with other arguments, or has objects of other names.
            CommunicationTimeoutError: a server was not there in time; the message names it.
            ContextError: called within a replica, or in a scheduled function.
        """
        self._require_outside("restore")
        from torchstrat.checkpoint.job_state import all_processes, names_of
        from torchstrat.checkpoint.optimizer_item import make_items
        from torchstrat.checkpoint.pieces import Selection
        from torchstrat.checkpoint.writing import turns

        target = _absolute(path)
        selection = Selection.of(only, strict, self._objects)
        if selection.only is not None:  # before it waits for anybody
            selection.require_among([*(name for item in make_items(self._objects, None) for name in item.names()), OWN])
        call = f"Checkpoint.restore({selection}) of {names_of(self._objects)} from {target}"
        servers = self._servers()

        def restore(takes_back: bool) -> SkippedKeys:
            with turns.held(f"restoring {target}"), all_processes(call, self._objects) as processes:
                with terminal.shown(f"restoring {target}", here=processes.is_first):
                    if servers is not None:
                        servers.prepare_to_restore()
                    items = make_items(self._objects, servers)
                    return _restore(target, self._objects, items, servers, processes, selection, takes_back)

        if servers is None:
            skipped = restore(True)
        else:
            skipped = servers.restoring(self._objects, restore, whole=selection.only is None)
        logger.debug("%s is restored from %s.", self, target)
        return skipped

    def _servers(self) -> Servers | None:
        return servers_of(_tensors(self._objects.values()))

    def _require_outside(self, call: str) -> None:
        here = context.get_replica_context()
        strategy = context.get_strategy()
        if (here is not None and context.has_strategy()) or home_of(strategy).is_worker:
            raise ContextError(
                f"Checkpoint.{call} was called in a replica, or in a scheduled function; call it in the program around "
                "them."
            )

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects)}>"


def _absolute(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise WrongTypeError(
            f"a checkpoint needs the path of a folder; got {path!r}. A CheckpointManager's .checkpoints are pairs of a "
            "step and a path, and .latest is None where there is none; manager.restore(checkpoint) takes the newest."
        )
    target = Path(os.path.abspath(path))
    if not os.fspath(path) or not target.name or "\0" in os.fspath(path):
        raise InvalidArgumentError(f"a checkpoint needs the path of a folder of its own; got {os.fspath(path)!r}.")
    return target


def _tensors(objects: Iterable[object]) -> Iterator[object]:
    """What may live on servers."""
    for value in objects:
        if isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()
            for module in value.modules():
                if isinstance(module, TensorInShards):
                    yield from module.variables
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                yield from group["params"]
        elif isinstance(value, Variable | torch.Tensor):
            yield value


def _restore(
    target: Path,
    objects: dict[str, object],
    items: list[Item],
    servers: Servers | None,
    processes: Processes,
    selection: Selection,
    takes_back: bool,
) -> SkippedKeys:
    from torchstrat.checkpoint import job_state
    from torchstrat.checkpoint.files import read
    from torchstrat.checkpoint.items import StatefulItem
    from torchstrat.checkpoint.pieces import Comparison
    from torchstrat.checkpoint.stored import PlainFile, open_checkpoint
    from torchstrat.replicas.engine import add_note

    reads: list[Reads] = []
    values: list[object] = []
    comparison = Comparison(selection)
    restoring = None

    def look() -> None:
        nonlocal restoring
        stored = open_checkpoint(target)
        if isinstance(stored, PlainFile):
            stored = stored.named(items)
        reads.extend(item.reads(stored, comparison) for item in items)
        reads.append(job_state.reads(stored, objects, servers, processes.rank, selection, comparison))
        comparison.require_fit(stored.folder, stored.paths)
        values.extend(read(stored, [want for one in reads for want in one.wants]))
        for one, of_it in _by_item(reads, values):
            for key, problem in one.problems(of_it).items():
                comparison.differs(key, problem)
        comparison.require_fit(stored.folder, stored.paths)
        if servers is not None:
            slots = [slot for one in reads for slot in one.slots]
            states = [state for one in reads for state in one.states]
            whole = selection.only is None
            restoring = servers.restore(stored, slots, states, whole=whole, takes_back=takes_back)

    processes.attempt(look, f"restoring {target}")
    if restoring is not None:
        restoring.adopt()
    *parts, of_job = zip(
        [*(item.name for item in items), "the job's random numbers"], _by_item(reads, values), strict=True
    )
    own = [part for part, item in zip(parts, items, strict=True) if isinstance(item, StatefulItem)]
    variables = [part for part, item in zip(parts, items, strict=True) if not isinstance(item, StatefulItem)]
    done: list[str] = []

    def put(parts: Iterable[tuple[str, tuple[Reads, list[object]]]]) -> None:
        for name, (one, of_it) in parts:
            one.put(of_it)
            done.append(name)

    try:
        if restoring is None:  # what a program's own classes refuse, they refuse before a variable has changed
            processes.attempt(lambda: put(own), f"restoring {target}")
            put([*variables, of_job])
        else:
            put([*variables, *own, of_job])
    except Exception as error:
        left = [name for name, (one, _) in (*parts, of_job) if name not in done and (one.wants or one.slots)]
        add_note(error, f"Of {target} restored are: {', '.join(done) or 'none'}; not, or not whole: {', '.join(left)}.")
        raise
    return comparison.skipped()


def _by_item(reads: list[Reads], values: list[object]) -> Iterator[tuple[Reads, list[object]]]:
    first = 0
    for one in reads:
        yield one, values[first : first + len(one.wants)]
        first += len(one.wants)
