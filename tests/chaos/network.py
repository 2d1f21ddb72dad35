"""The network between a fleet's processes: every gRPC link can be cut, or fall silent.

Each process dials through an HTTP CONNECT proxy of its own (gRPC's `grpc_proxy` variable), so a
link is known by who dialled and which port. Nothing in the processes knows of it.
Entry points: `Network`, `Link`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self

_START_TIMEOUT_S = 20.0


class Link(NamedTuple):
    """Who dialled, and the port that it dialled."""

    source: str
    port: int


class Network:
    """`with Network(names) as network:` runs the proxies in a thread of their own."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._sources = tuple(sources)
        self._ports: dict[str, int] = {}
        self._cut: set[Link] = set()
        self._silent: set[Link] = set()
        self._num_bytes: Counter[Link] = Counter()
        self._writers: dict[Link, set[asyncio.StreamWriter]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._is_ready = threading.Event()
        self._is_over = asyncio.Event()

    def environ_of(self, source: str) -> dict[str, str]:
        """What makes that process dial through here."""
        return {"grpc_proxy": f"http://127.0.0.1:{self._ports[source]}"}

    def cut(self, link: Link) -> None:
        """Its connections break, and new ones are refused."""
        self._loop.call_soon_threadsafe(self._cut_now, link)

    def silence(self, link: Link) -> None:
        """Its connections stay open, and nothing passes; nor over new ones."""
        self._silent.add(link)

    def heal(self) -> None:
        """All links are as new; what was held back on silent ones is lost with them."""
        silent, self._silent = self._silent, set()
        self._cut = set()
        for link in silent:
            self._loop.call_soon_threadsafe(self._drop, link)
        self._num_bytes.clear()

    def busiest(self, sources: Iterable[str], ports: Iterable[int]) -> Link:
        """The link that carried most since the last `heal`."""
        links = [Link(source, port) for source in sources for port in ports]
        return max(links, key=lambda link: self._num_bytes[link])

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(_START_TIMEOUT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(_START_TIMEOUT_S)
        self._loop.close()

    # ---- in the thread

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        servers: list[asyncio.Server] = []
        for source in self._sources:

            def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str = source
            ) -> None:
                task = asyncio.create_task(self._carry(source, reader, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            servers.append(server)
            self._ports[source] = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._is_over.wait()
        for server in servers:
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(
        self, source: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection from its CONNECT to its end."""
        both = [writer]
        link = None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            link = Link(source, int(head.split(b" ", 2)[1].rsplit(b":", 1)[1]))
            self._writers.setdefault(link, set()).add(writer)
            if link in self._cut:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", link.port)
            both.append(far_writer)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            ways = [
                asyncio.create_task(self._pump(link, reader, far_writer)),
                asyncio.create_task(self._pump(link, far_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass  # nobody listens there: nobody does here
        finally:
            if link is not None:
                self._writers[link].discard(writer)
            for one in both:
                one.close()

    async def _pump(
        self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        while chunk := await source.read(1 << 16):
            if link in self._silent:
                continue
            self._num_bytes[link] += len(chunk)
            sink.write(chunk)
            await sink.drain()

    def _cut_now(self, link: Link) -> None:
        self._cut.add(link)
        self._drop(link)

    def _drop(self, link: Link) -> None:
        for writer in self._writers.get(link, ()):
            writer.transport.abort()
