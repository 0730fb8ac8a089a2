"""The secret that the processes of one cluster share: where it comes from, and what is derived from it.

Whoever knows it can make every process of the cluster run code, so it is neither logged nor put into a message, and it
never travels: processes prove to each other that they know it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from torchstrat.errors import ClusterConfigError

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
