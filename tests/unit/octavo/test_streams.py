"""Streams end on both sides, whenever their reader leaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from octavo.client import AsyncStream
from octavo.streams import ending, first_of

Call = grpc.aio.UnaryStreamCall[Any, Any]

NUM_LEAVERS = 10


class Endless:
    """A server whose one method streams until its client is gone."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_running = 0

    async def stream(
        self, request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        self.num_begun += 1
        self.num_running += 1
        try:
            while True:
                await asyncio.sleep(0.01)
                yield request
        finally:
            self.num_running -= 1

    async def start(self) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        method = grpc.unary_stream_rpc_method_handler(self.stream)  # type: ignore[arg-type]
        handler = grpc.method_handlers_generic_handler("test.Endless", {"Stream": method})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"


async def read_ending(call: Call) -> None:
    with ending(call):
        async for _ in call:
            pass


async def read_as_client(call: Call) -> None:
    async for _ in AsyncStream(call):
        pass


async def leave_in_the_gap(read_all: Callable[[Call], Awaitable[None]]) -> None:
    """Cancelled readers, each in the moment between its request's sending and its first read."""
    endless = Endless()
    server, address = await endless.start()
    calls: list[object] = []

    async def read(channel: grpc.aio.Channel) -> None:
        me = asyncio.current_task()
        assert me is not None
        others = asyncio.all_tasks()
        call = channel.unary_stream("/test.Endless/Stream")(b"x")
        # Held, so that nothing but the reader ends it.
        calls.append(call)
        (sending,) = asyncio.all_tasks() - others
        sending.add_done_callback(lambda _: me.cancel())
        await read_all(call)

    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        for _ in range(NUM_LEAVERS):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.ensure_future(read(channel))
        async with asyncio.timeout(20):
            while endless.num_begun < NUM_LEAVERS or endless.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await server.stop(None)


@pytest.mark.parametrize("read_all", [read_ending, read_as_client])
def test_a_reader_that_leaves_before_its_first_message_ends_its_call_on_the_server(
    read_all: Callable[[Call], Awaitable[None]],
) -> None:
    asyncio.run(leave_in_the_gap(read_all))


def test_the_first_to_end_ends_the_others() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(first_of(forever(), fails()))
    assert ended == ["forever"]
