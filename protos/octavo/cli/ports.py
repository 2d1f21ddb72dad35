"""TCP ports: free ones, and whether one is taken."""

import errno
import socket

from octavo.errors import ConfigurationError


def free_ports(count: int) -> list[int]:
    """`count` different ports of the loopback interface that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def check_port_is_free(host: str, port: int, setting: str) -> None:
    """Raise ConfigurationError, naming the flag, if `host:port` can't be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            flag = f"--{setting.replace('_', '-')}"
            if error.errno == errno.EADDRINUSE:
                text = f"port {port} on {host} is taken; stop what listens there, or choose another"
            else:
                text = f"can't listen on {host}:{port} ({error.strerror}); choose another"
            raise ConfigurationError(f"{text}: {flag} {port + 10}", param=setting) from error
