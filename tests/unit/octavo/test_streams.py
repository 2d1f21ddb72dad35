"""Streams end on both sides, whenever their reader leaves."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from octavo.streams import ending, first_of

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


async def leave_in_the_gap() -> None:
    """Cancelled readers, each in the moment between its request's sending and its first read."""
    endless = Endless()
    server, address = await endless.start()
    calls: list[object] = []

    async def read(channel: grpc.aio.Channel) -> None:
        me = asyncio.current_task()
        assert me is not None
        others = asyncio.all_tasks()
        with ending(channel.unary_stream("/test.Endless/Stream")(b"x")) as call:
            # Held, so that nothing but `ending` ends it.
            calls.append(call)
            (sending,) = asyncio.all_tasks() - others
            sending.add_done_callback(lambda _: me.cancel())
            async for _ in call:
                pass

    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        for _ in range(NUM_LEAVERS):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.ensure_future(read(channel))
        async with asyncio.timeout(20):
            while endless.num_begun < NUM_LEAVERS or endless.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await server.stop(None)


def test_a_reader_that_leaves_before_its_first_message_ends_its_call_on_the_server() -> None:
    asyncio.run(leave_in_the_gap())


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
