"""A client that says and reads exactly the bytes that a test wants.

async with dialling(port) as dial:
    connection = await dial()
    await connection.say(b"GET / HTTP/1.1\\r\\n\\r\\n")
    status, headers, body = await connection.answer()
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable

GUARD_S = 20.0


class Connection:
    """One socket, as a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self.writer.transport

    async def say(self, data: bytes) -> "Connection":
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One answer with a Content-Length (or none to the end)."""
        async with asyncio.timeout(GUARD_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = head.rstrip().split("\r\n")
            headers = {name.lower(): text for name, text in (line.split(": ", 1) for line in lines)}
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif "transfer-encoding" in headers:
                body = await self.chunks()
            else:
                body = await self.reader.read()
        return int(status.split()[1]), headers, body

    async def chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    async def ended(self) -> bytes:
        """Whatever still comes until the router closes."""
        async with asyncio.timeout(GUARD_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def refusal(self, status: int, code: str | None) -> str:
        """An OpenAI error with CORS, then the end of the connection."""
        got, headers, body = await self.answer()
        error = json.loads(body)["error"]
        assert (got, error["code"]) == (status, code), error
        assert set(error) == {"message", "type", "param", "code"}
        assert headers["access-control-allow-origin"] == "*"
        assert headers["connection"] == "close"
        assert await self.ended() == b""
        return error["message"]


Dial = Callable[[], Awaitable[Connection]]


@contextlib.asynccontextmanager
async def dialling(port: int, *, receive_buffer: int = 0) -> AsyncGenerator[Dial]:
    """Opens connections to the local `port`; whatever is open at the end is reset.

    `receive_buffer`: bytes that the kernel takes in before the client reads (0 = its default).
    """
    opened: list[Connection] = []

    async def dial() -> Connection:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = receive_buffer or 1 << 16
        opened.append(Connection(*await asyncio.open_connection(sock=sock, limit=limit)))
        return opened[-1]

    try:
        yield dial
    finally:
        for connection in opened:
            connection.transport.abort()
        for connection in opened:
            with contextlib.suppress(OSError):
                await connection.writer.wait_closed()
