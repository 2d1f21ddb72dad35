"""Connections between rank 0 and the others: messages in order, and word of a death at once.

Both sides prove that they know the ranks' key before anything else is read; what rank 0 sends is
unpickled by the others, so nobody else may speak to them. Must not know: what is said. Entry
points: `Door`, `dial`, `Link`, `wait_hang_up`.

    follower                                    leader
        <- nonce                                            32 bytes
        rank, nonce, HMAC("follower", rank, leader's) ->    4 + 32 + 32 bytes
        <- HMAC("leader", follower's nonce)                 32 bytes
"""

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Sequence

_NONCE_BYTES = 32
_RANK = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_HANDSHAKE_S = 10.0
# A machine that vanishes says no goodbye: after these seconds without a sign it is gone.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
# Linux tells of a closed peer by itself; elsewhere it counts as a hang-up.
_HANG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Link:
    """One end of a connection between rank 0 and `rank`. One thread sends, one receives."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.rank = rank
        self._connection = connection
        self._reader = connection.makefile("rb")

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Raises OSError if the other side is gone."""
        self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message; None: the other side is gone."""
        try:
            head = self._reader.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            message = self._reader.read(length)
        except OSError:
            return None
        return message if len(message) == length else None

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


def wait_hang_up(links: Sequence[Link]) -> Link:
    """Wait until the other side of one of `links` is gone, whatever it sent before."""
    poll = select.poll()
    for link in links:
        poll.register(link.fileno(), _HANG_UP)
    ended = {fd for fd, _ in poll.poll()}
    return next(link for link in links if link.fileno() in ended)


class Door:
    """Where rank 0 waits for the others: on the loopback, or on all of its addresses."""

    def __init__(self, key: bytes, *, on_loopback: bool) -> None:
        self._key = key
        if on_loopback:
            self._socket = socket.create_server(("127.0.0.1", 0))
        elif socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._socket = socket.create_server(("", 0))
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout_s: float) -> Link | None:
        """The next rank; None if none came in time, or somebody else did."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        try:
            return Link(connection, self._welcome(connection))
        except (OSError, ValueError):
            connection.close()
            return None

    def _welcome(self, connection: socket.socket) -> int:
        connection.settimeout(_HANDSHAKE_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        rank = _read(connection, _RANK.size)
        theirs = _read(connection, _NONCE_BYTES)
        _require(_read(connection, _NONCE_BYTES), _sign(self._key, b"follower", rank + nonce))
        connection.sendall(_sign(self._key, b"leader", theirs))
        return _RANK.unpack(rank)[0]

    def close(self) -> None:
        self._socket.close()


def dial(host: str, port: int, key: bytes, rank: int) -> Link:
    """Rank `rank`'s link to rank 0. Raises OSError or ValueError (it isn't rank 0)."""
    connection = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    try:
        theirs = _read(connection, _NONCE_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        number = _RANK.pack(rank)
        connection.sendall(number + nonce + _sign(key, b"follower", number + theirs))
        _require(_read(connection, _NONCE_BYTES), _sign(key, b"leader", nonce))
    except BaseException:
        connection.close()
        raise
    return Link(connection, rank=0)


def _sign(key: bytes, role: bytes, text: bytes) -> bytes:
    return hmac.digest(key, role + text, "sha256")


def _require(got: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(got, expected):
        raise ValueError("the other side doesn't know the ranks' key")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ValueError("the other side hung up in the handshake")
        data += part
    return data
