"""Authentication of messages: nothing is unpickled before it is known to come from a process that knows the secret.

The secret is shared by the processes of one cluster. Whoever knows it can make every one of them run code, so it is
neither logged nor put into a message, and it never travels: processes prove to each other that they know it.

A sealed message is::

    mac (32) | magic (4) kind (1) counter (8) in_reply_to (8) attachments (4) | lengths (2) sender receiver | body

with the mac HMAC-SHA256 over all that follows it. The key is derived from the cluster's secret under a label of its
own, so that what the control connections of the cluster sign can never pass for a message.

What the fields are for:

- ``sender`` and ``receiver`` are incarnations, random and fresh at each start of a process. A message recorded for one
  process is refused by every other one, also by that process's next life.
- ``counter`` grows by one from message to message of a sender, for each receiver and kind. The receiver refuses what it
  has seen (`ReplayWindow`).
- ``kind`` and ``in_reply_to`` keep a reply from passing for a request, or for the reply to another request.
- ``attachments`` counts the tensors that travel beside the message. Their *contents* are not covered by the mac:
  whoever can change packets between two hosts can change numbers in tensors, but not make anybody unpickle anything.

This is authentication, not encryption: messages can be read on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from torchstrat.core.errors import AuthenticationError, ClusterConfigError, InvalidArgumentError

SECRET_VARIABLE = "TORCHSTRAT_SECRET"
SECRET_FILE_VARIABLE = "TORCHSTRAT_SECRET_FILE"

MINIMAL_SECRET_BYTES = 32
"""A stranger who dials a process sees an HMAC of the secret and can try guesses at home: words would be found."""

_REMEDY = (
    f"Every process of a cluster needs the same secret of at least {MINIMAL_SECRET_BYTES} characters in "
    f"{SECRET_VARIABLE}, or in a file named by {SECRET_FILE_VARIABLE}. `torchstrat launch` makes one and hands it out; "
    "by hand: `openssl rand -hex 32`."
)


def load_secret(environ: Mapping[str, str] | None = None, *, secret: str | bytes | None = None) -> bytes:
    """The cluster's secret: ``secret`` if it is given, else what the environment says.

    A file must not be readable or writable by everybody on the machine. Its group may read it: that is how Kubernetes
    mounts secrets for processes that are not root.

    Args:
        environ: Read in place of `os.environ`.
        secret: In place of the environment's. White space around it does not count.

    Raises:
        ClusterConfigError: there is no secret, or it is too short, or the two variables disagree, or the file cannot
            be read, or everybody can.
    """
    if secret is not None:
        return _long_enough(secret.encode() if isinstance(secret, str) else secret, "the secret that was given")
    environ = os.environ if environ is None else environ
    direct, file = environ.get(SECRET_VARIABLE), environ.get(SECRET_FILE_VARIABLE)
    if not direct and not file:
        raise ClusterConfigError(
            f"there is no cluster secret: neither {SECRET_VARIABLE} nor {SECRET_FILE_VARIABLE} is set. {_REMEDY}"
        )
    found = _long_enough(direct.encode(), SECRET_VARIABLE) if direct else None
    if file:
        from_file = _long_enough(_read(Path(file)), f"the file {file!r} named by {SECRET_FILE_VARIABLE}")
        if found is not None and found != from_file:
            raise ClusterConfigError(
                f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE}={file!r} are both set and hold different secrets; unset "
                "one of them."
            )
        found = from_file
    assert found is not None
    return found


def new_secret() -> str:
    """A fresh secret, fit for `SECRET_VARIABLE`: 256 random bits as hexadecimal digits."""
    return secrets.token_hex(32)


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A key (32 bytes) for one purpose, such as ``control`` or ``rpc``.

    Different purposes have unrelated keys, so that nothing recorded on one kind of connection means anything on
    another. HMAC as a pseudorandom function, the expansion step of RFC 5869.
    """
    return hmac.digest(secret, b"torchstrat key for " + purpose.encode(), hashlib.sha256)


def _long_enough(secret: bytes, source: str) -> bytes:
    secret = secret.strip()
    if len(secret) < MINIMAL_SECRET_BYTES:
        raise ClusterConfigError(f"{source} holds {len(secret)} characters, which is too short for a secret. {_REMEDY}")
    return secret


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ClusterConfigError(
                    f"{SECRET_FILE_VARIABLE}={str(path)!r} can be read or written by everybody on this machine (mode "
                    f"{stat.S_IMODE(mode):04o}). Restrict it: `chmod 600 {path}`, or `defaultMode: 0440` where "
                    "Kubernetes mounts it; and make a new secret if others may have read this one."
                )
            return file.read()
    except OSError as error:
        raise ClusterConfigError(
            f"{SECRET_FILE_VARIABLE}={str(path)!r} cannot be read: {error.strerror or error}. {_REMEDY}"
        ) from None


WINDOW = 65_536
"""How far a message may lag behind the newest of its sender and still be told from a repetition."""

_MAC_BYTES = 32
_MAGIC = b"tsm1"
_HEAD = struct.Struct("!4sBQQIBB")
_LABEL = b"torchstrat: messages between the processes of a cluster, version 1"


class Kind(IntEnum):
    """What a message is. Requests and replies of one sender travel by different connections and overtake each other,
    so each kind has counters of its own."""

    REQUEST = 1
    REPLY = 2


@dataclass(frozen=True)
class Opened:
    """A message that is authentic and new. ``in_reply_to`` is the counter of the request that a reply answers."""

    kind: Kind
    sender: str
    counter: int
    in_reply_to: int
    body: bytes


class ReplayWindow:
    """Which counters of one sender have been seen, in at most `WINDOW` bits.

    All counters below ``_base`` count as seen; bit i of ``_mask`` says whether ``_base + i`` has been. Messages that
    arrive in order keep the mask empty, one that never arrives makes it grow until the window has passed over it.
    """

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._base = 0
        self._mask = 0

    def accept(self, counter: int) -> bool:
        """Whether ``counter`` is new; from now on it is not."""
        offset = counter - self._base
        if offset < 0 or (offset < self._size and self._mask >> offset & 1):
            return False
        if offset >= self._size:
            self._slide(offset - self._size + 1)
            offset = self._size - 1
        self._mask |= 1 << offset
        seen_from_base_on = (~self._mask & (self._mask + 1)).bit_length() - 1
        self._slide(seen_from_base_on)
        return True

    def _slide(self, distance: int) -> None:
        self._base += distance
        self._mask = self._mask >> distance if distance <= self._size else 0


class Sealer:
    """One process's end of the sealed conversation. Thread-safe; keeps one `ReplayWindow` per sender and kind.

    Only processes that know the secret can make it keep anything.
    """

    def __init__(self, secret: bytes, incarnation: str) -> None:
        if not secret:
            raise InvalidArgumentError(
                f"the cluster's secret is empty; give at least {MINIMAL_SECRET_BYTES} characters."
            )
        self._key = hmac.digest(secret, _LABEL, "sha256")
        self._incarnation = _name(incarnation)
        self._lock = threading.Lock()
        self._next: dict[tuple[str, Kind], int] = {}
        self._windows: dict[tuple[bytes, Kind], ReplayWindow] = {}

    def seal(
        self, kind: Kind, receiver: str, body: bytes, *, attachments: int = 0, in_reply_to: int = 0
    ) -> tuple[int, bytes]:
        """The message's counter, and what to send."""
        with self._lock:
            counter = self._next.get((receiver, kind), 0)
            self._next[receiver, kind] = counter + 1
        names = self._incarnation, _name(receiver)
        head = _HEAD.pack(_MAGIC, kind, counter, in_reply_to, attachments, len(names[0]), len(names[1]))
        content = b"".join((head, *names, body))
        return counter, hmac.digest(self._key, content, "sha256") + content

    def open(self, sealed: bytes, *, attachments: int = 0) -> Opened:
        """Check a message that came with ``attachments`` tensors. Raises `AuthenticationError`, and then has looked at
        nothing that the message says."""
        content = memoryview(sealed)[_MAC_BYTES:]
        if not hmac.compare_digest(sealed[:_MAC_BYTES], hmac.digest(self._key, content, "sha256")):
            raise AuthenticationError(
                f"a message of {len(sealed)} bytes is not sealed with this cluster's secret, or was changed on its "
                "way; give all processes of the cluster the same secret."
            )
        # From here on another process that knows the secret has written it, but maybe not now, or not to us.
        magic, kind, counter, in_reply_to, count, sender_length, receiver_length = _HEAD.unpack_from(content)
        names, body = content[_HEAD.size :], content[_HEAD.size + sender_length + receiver_length :]
        sender, receiver = bytes(names[:sender_length]), bytes(names[sender_length:][:receiver_length])
        if magic != _MAGIC:
            raise AuthenticationError(f"a message of {sender.decode()} has another format than {_MAGIC.decode()}.")
        if receiver != self._incarnation:
            raise AuthenticationError(
                f"a message of {sender.decode()} for {receiver.decode()} reached {self._incarnation.decode()}: it was "
                "meant for a process that ran here before, or was recorded and sent again."
            )
        if count != attachments:
            raise AuthenticationError(
                f"a message of {sender.decode()} came with {attachments} tensors, but was sent with {count}."
            )
        with self._lock:
            new = self._windows.setdefault((sender, Kind(kind)), ReplayWindow()).accept(counter)
        if not new:
            raise AuthenticationError(f"message {counter} of {sender.decode()} arrived twice; it was sent again.")
        return Opened(Kind(kind), sender.decode(), counter, in_reply_to, bytes(body))


def _name(incarnation: str) -> bytes:
    encoded = incarnation.encode()
    if not 0 < len(encoded) < 256:
        raise InvalidArgumentError(f"incarnation {incarnation!r} needs 1 to 255 bytes.")
    return encoded
