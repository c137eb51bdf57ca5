"""Owns taking the port, before anything slow is imported or loaded.

Knows nothing of who will serve from it.
"""

from __future__ import annotations

import errno
import socket

from firstlight.errors import EnvironmentProblem

_BACKLOG = 2048


def bind_socket(host: str, port: int) -> socket.socket:
    """Takes a port before anything is loaded; 0 takes a free one. The socket already listens.

    Raises EnvironmentProblem when the address is unknown, taken or not permitted.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError, UnicodeError) as problem:
        raise EnvironmentProblem(
            f"{host}:{port} is no address of this machine ({problem}); choose another --host or "
            "--port"
        ) from problem
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as problem:
        listener.close()
        raise EnvironmentProblem(_why_not(problem, host, port)) from problem
    listener.setblocking(False)
    return listener


def _why_not(problem: OSError, host: str, port: int) -> str:
    if problem.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use by another program; stop that program or choose "
            "another --port"
        )
    if problem.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights; choose a --port from 1024 on"
    return (
        f"{host}:{port} cannot be served from: {problem.strerror}; choose another --host or --port"
    )
