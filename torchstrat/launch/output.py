"""What several processes print, made readable: whole lines, each with the name of its task before it."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
from typing import IO

_CHUNK_BYTES = 65536
_PIPE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 65536
"""A line that is longer is shown in pieces, so that a program that never ends its lines does not fill the memory."""


class Console:
    """Where lines go: this process's standard output and error, as they are when something is written. Thread-safe.

    Never raises: a reader who left (``… | head``) must not stop those who write.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, text: str, *, to_stderr: bool) -> None:
        """Write whole lines."""
        stream = sys.stderr if to_stderr else sys.stdout
        with self._lock, contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()

    def report(self, message: str) -> None:
        """A line of the launcher's own, on standard error."""
        self.write(f"[torchstrat] {message}\n", to_stderr=True)


class PrefixedOutput:
    """Carries the output of one process to a console, in a thread of its own.

    Args:
        stdout, stderr: The reading ends of its pipes; they are closed here, by `finish`.
        name: Goes before each line, in brackets.
        console: Where the lines go.
    """

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes], name: str, console: Console) -> None:
        self._prefix = f"[{name}] "
        self._console = console
        self._streams: dict[IO[bytes], bool] = {stdout: False, stderr: True}  # whether it is stderr
        self._part = {False: b"", True: b""}  # the line that has not ended yet, of stdout and stderr
        self._process_ended, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name=f"output of {name}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Show what is left, once the process has ended; then no thread and no pipe remains.

        The end of the pipes is not waited for: a child of the process may hold them open for ever.
        """
        os.close(self._wake)
        self._thread.join()
        os.close(self._process_ended)

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process_ended, selectors.EVENT_READ, None)
            for stream, to_stderr in self._streams.items():
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, to_stderr)
            ended = False
            while not ended:
                for key, _ in selector.select():
                    if key.data is None:
                        ended = True
                    elif not self._read(key.fd, to_stderr=key.data):
                        selector.unregister(key.fileobj)
        for stream, to_stderr in self._streams.items():
            # What the process wrote is in the pipe by now, and a pipe holds 1 MiB at most. Without a bound a child that
            # it left behind could keep us here.
            for _ in range(_PIPE_BYTES // _CHUNK_BYTES + 1):
                if not self._read(stream.fileno(), to_stderr=to_stderr):
                    break
            stream.close()
            if self._part[to_stderr]:
                self._show([self._part[to_stderr]], to_stderr=to_stderr)

    def _read(self, descriptor: int, *, to_stderr: bool) -> bool:
        """Show the whole lines of what is there; False when there is nothing."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        *lines, part = (self._part[to_stderr] + chunk).split(b"\n")
        if len(part) > _LONGEST_LINE_BYTES:
            lines.append(part)
            part = b""
        self._part[to_stderr] = part
        self._show(lines, to_stderr=to_stderr)
        return bool(chunk)

    def _show(self, lines: list[bytes], *, to_stderr: bool) -> None:
        if lines:
            text = "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)
            self._console.write(text, to_stderr=to_stderr)
