"""What torchstrat writes on a terminal: help of its commands, the line that says what a program waits for, and
`progress`, a bar for the loop over a dataset.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from torchstrat.core import context
from torchstrat.core.errors import InvalidArgumentError

AFTER_SECONDS = 3.0
_EVERY_SECONDS = 1.0
_LOOK_SECONDS = 0.02

_speaking = threading.Lock()
"""One line at a time: what is waited for within a wait belongs to it."""


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody reads ``stream`` as it is written."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no stream at all (pythonw), or closed
        return False


@contextlib.contextmanager
def shown(what: str, *, here: bool = True, after_seconds: float = AFTER_SECONDS) -> Iterator[None]:
    """Say on standard error what the block waits for, once it has waited for a few seconds, and for how long.

    Nothing happens where standard error is no terminal, or where another wait is shown already.

    Args:
        what: such as "restoring checkpoints/step-00000100".
        here: whether this process speaks for the job.
    """
    stream = sys.stderr
    if not (here and is_terminal(stream) and _speaking.acquire(blocking=False)):
        yield
        return
    ended = threading.Event()
    line = threading.Thread(
        target=_tell, args=(stream, what, ended, after_seconds), name="torchstrat-waiting", daemon=True
    )
    line.start()
    try:
        yield
    finally:
        ended.set()
        line.join()
        _speaking.release()


def _tell(stream: TextIO, what: str, ended: threading.Event, after_seconds: float) -> None:
    began, told = time.monotonic(), False
    with contextlib.suppress(OSError, ValueError):  # the terminal has gone: the wait goes on without
        while not ended.wait(_EVERY_SECONDS if told else after_seconds):
            stream.write(f"\rtorchstrat: {what}, {time.monotonic() - began:.0f} s")
            stream.flush()
            told = True
        if told:
            stream.write(f"\rtorchstrat: {what}, {time.monotonic() - began:.0f} s\n")
            stream.flush()


def is_listening(address: str, timeout_seconds: float = 1.0) -> bool:
    """Whether somebody accepts connections at ``host:port``. The connection is closed without a word."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
    except OSError:
        return False
    return True


def wait_for_listener(address: str, seconds: float) -> None:
    """Until somebody listens at ``host:port``.

    Raises:
        TimeoutError: nobody does, after ``seconds``.
    """
    until = time.monotonic() + seconds
    while not is_listening(address, max(0.1, min(5.0, until - time.monotonic()))):
        if time.monotonic() > until:
            raise TimeoutError(f"nobody listens at {address}")
        time.sleep(_LOOK_SECONDS)


def parser_with_examples(
    program: str, description: str, examples: Sequence[str], usage: str | None = None
) -> argparse.ArgumentParser:
    """A parser whose ``--help`` ends with ``examples``, each on a line as it is typed."""
    return argparse.ArgumentParser(
        prog=program,
        usage=usage,
        description=description,
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=_LinesAsTheyAre,
        allow_abbrev=False,
    )


class _LinesAsTheyAre(argparse.HelpFormatter):
    """Wraps paragraphs, as argparse does, and leaves indented lines whole, since people copy them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else super(_LinesAsTheyAre, self)._fill_text(line, width, indent)
            for line in text.splitlines()
        )


def named_object(name: str) -> Any:
    """The object that ``train:build`` names. Modules of the working directory are found, as ``python -m`` finds them.

    Raises `InvalidArgumentError` where the name has another form, or nothing has it.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, colon, attribute = name.partition(":")
    if not (colon and attribute and all(map(str.isidentifier, module.split(".")))):
        raise InvalidArgumentError(
            f"{name!r} must be MODULE:NAME, such as train:step; a module's name has dots between its parts, and is "
            "no path of a file."
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"{name!r} cannot be loaded from {here}: {error}.") from error


ElementT = TypeVar("ElementT")

_is_told = False
"""Whether the line about the missing package has been written."""


def progress(elements: Iterable[ElementT], description: str | None = None) -> Progress[ElementT]:
    """Show on the terminal how far a loop has come, and how fast it goes::

        for epoch in range(epochs):
            for batch in ts.progress(batches, f"epoch {epoch}"):
                strategy.run(train_step, args=(batch,))

    The bar is that of tqdm, ``pip install 'torchstrat[progress]'``; without it one line says so, and the loop runs.
    Nothing is shown where standard error is no terminal. Of several processes the chief shows the bar. On parameter
    servers, where the loop schedules functions, it counts those that were scheduled.

    Args:
        elements: a distributed or a leased dataset, a `DataLoader`, or any other iterable. They are not read ahead, and
            each ``for`` over the result begins a new pass.
        description: stands before the bar.
    """
    return Progress(elements, description)


class Progress(Generic[ElementT]):
    """What `progress` returns: the same elements."""

    def __init__(self, elements: Iterable[ElementT], description: str | None) -> None:
        self._elements, self._description = elements, description

    def __iter__(self) -> Iterator[ElementT]:
        if not (is_terminal(sys.stderr) and _is_chief(self._elements)):
            yield from self._elements
            return
        try:
            from tqdm import tqdm
        except ImportError:
            _tell_what_is_missing()
            yield from self._elements
            return
        with tqdm(total=_length(self._elements), desc=self._description, file=sys.stderr, dynamic_ncols=True) as bar:
            for element in self._elements:
                yield element
                bar.update()


def _is_chief(elements: object) -> bool:
    own = context.strategy_of(elements)
    strategies = [own] if own is not None else list(context.strategies)
    return all(strategy.is_chief for strategy in strategies)


def _length(elements: object) -> int | None:
    """Where it is known; a dataset's cardinality is negative where it is not."""
    cardinality = getattr(elements, "cardinality", None)
    if isinstance(cardinality, int):
        return cardinality if cardinality >= 0 else None
    try:
        return len(elements) if isinstance(elements, Sized) else None
    except TypeError:  # a DataLoader of an iterable dataset
        return None


def _tell_what_is_missing() -> None:
    global _is_told
    if not _is_told:
        _is_told = True
        sys.stderr.write("torchstrat: there is no progress bar without tqdm: pip install 'torchstrat[progress]'\n")
