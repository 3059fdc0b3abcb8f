"""Listening TCP sockets."""

from __future__ import annotations

import errno
import socket

from eaas.errors import ClusterError, PortInUseError

__all__ = ["bind"]


def bind(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 chooses a free port.

    Bind before loading a model, so that a port in use is reported at once.

    Raises:
        PortInUseError: Another process uses the port.
        ClusterError: The host is not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{host}:{port} is in use: choose another port or stop the process that uses it"
            ) from error
        raise ClusterError(f"cannot listen on {host}:{port}: {error}") from error
    # Accepted connections inherit it. asyncio sets it on sockets that state a protocol, which these do not.
    # Without it the second part of an answer waits up to 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
