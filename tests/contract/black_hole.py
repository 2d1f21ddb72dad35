"""A TCP proxy that can stop passing bytes on, as a network does that drops packets silently, or
pass them on late."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class BlackHole:
    """`is_open` decides for every chunk whether it is passed on; sockets stay open either way."""

    def __init__(self) -> None:
        self.is_open = True
        # Of each chunk, on its way to the server.
        self.delay_s = 0.0
        self.num_connections = 0
        self.port = 0

    @asynccontextmanager
    async def running(self, target_port: int) -> AsyncGenerator["BlackHole"]:
        """Listen on a free port and pass on to `target_port` of this machine."""
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
            except OSError:
                # Nobody listens there: nobody does here.
                writer.close()
                return
            tasks.add(asyncio.create_task(self._pump(reader, far_writer, is_late=True)))
            tasks.add(asyncio.create_task(self._pump(far_reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_late: bool = False
    ) -> None:
        try:
            while chunk := await source.read(1 << 16):
                if is_late and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.is_open:
                    sink.write(chunk)
                    await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
            with suppress(ConnectionError):
                await sink.wait_closed()
