"""Which network interface of this machine has a given address."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from torchstrat.errors import InvalidArgumentError

_GET_ADDRESS = 0x8915 if sys.platform == "linux" else 0xC0206921  # SIOCGIFADDR of Linux, of macOS and the BSDs


def interface_of(host: str) -> tuple[str, str]:
    """The interface that has the IPv4 address ``host`` (a name is looked up first), and the address.

    Raises `InvalidArgumentError` that lists this machine's addresses.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgumentError(f"host {host!r} has no IPv4 address: {error}. {_advice()}") from None
    wanted = [str(entry[4][0]) for entry in found]
    for interface, address in _addresses().items():
        if address in wanted:
            return interface, address
    raise InvalidArgumentError(f"host {host!r} ({', '.join(wanted)}) is no address of this machine. {_advice()}")


def _advice() -> str:
    return "Use one of " + ", ".join(f"{address} ({name})" for name, address in _addresses().items()) + "."


def _addresses() -> dict[str, str]:
    """The main IPv4 address of each interface that is up."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s16x", name.encode())
            try:
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, request)
            except OSError:  # it has none
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
