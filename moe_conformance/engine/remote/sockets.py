"""TCP sockets between driver and agents: no delay, and a lost machine is detected within seconds."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
import time

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_RETRY_S = 0.1
# A machine that is switched off closes no connection. It counts as lost after 10 + 3 x 5 s without a reply.
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3


def tune(end: socket.socket) -> None:
    """Disables Nagle's algorithm, and enables keep-alive so that a lost machine ends an idle connection."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, _IDLE_S),
            (socket.TCP_KEEPINTVL, _INTERVAL_S),
            (socket.TCP_KEEPCNT, _PROBES),
        ):
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_silence(end: socket.socket) -> None:
    """Ends the connection also where sent data stays unacknowledged, during which keep-alive does nothing.

    Only for small messages: it would also end a connection whose receiver is alive but does not read for that long.
    """
    if sys.platform == "linux":
        silence_ms = 1000 * (_IDLE_S + _PROBES * _INTERVAL_S)
        with contextlib.suppress(OSError):  # a sandboxed kernel may lack it
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)


def connect(address: str, port: int, patience_s: float) -> socket.socket:
    """Connects, and retries while nothing listens there yet.

    Raises:
        OSError: nobody did within `patience_s`.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            end = socket.create_connection((address, port), timeout=max(_RETRY_S, until - time.monotonic()))
        except OSError:
            if time.monotonic() + _RETRY_S >= until:
                raise
            time.sleep(_RETRY_S)
        else:
            end.settimeout(None)
            tune(end)
            return end


def resolve(host: str) -> str:
    """Returns the numeric address of a host, IPv4 if it has one.

    Raises:
        OSError: there is no such host.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_loopback(address: str) -> bool:
    """Returns True if a numeric address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this IPv4 address; None if it is not known."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
