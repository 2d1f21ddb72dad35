"""Clients of a fleet that is being disturbed: many streams at once, and what came of each.

A `Call` is one request in the API's terms, through any door. `Traffic.run` starts a client for
each. Without a script each makes its call once; with one, again and again until the script, which
runs in a thread and disturbs the fleet, is over. A client whose router breaks its connection, or
turns it away, asks the next router with the same Idempotency-Key, as clients do that want an
answer; how often, its answer says. Entry points: `Call`, `Traffic`, `Progress`.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx

from octavo.serving import open_channel
from octavo.v1 import inference_pb2_grpc
from tests.chaos.attempts import Attempt, BrokenError, over_grpc, over_http

TIMEOUT_S = 120.0
# A gap between two pieces that is no more than this is none.
GAP_S = 0.05
_RETRY_S = 0.05


class Door(Enum):
    """How a call reaches a router."""

    GRPC = "grpc"
    SSE = "sse"
    WHOLE = "whole"  # HTTP, the answer in one piece


@dataclass(frozen=True)
class Call:
    """One request. `fields`: max_tokens, temperature, seed, stop, ... by their API names."""

    prompt_ids: Sequence[int]
    fields: dict[str, Any]
    door: Door = Door.GRPC
    key: str = ""

    @property
    def num_choices(self) -> int:
        return self.fields.get("n", 1)

    @property
    def is_greedy(self) -> bool:
        return not self.fields.get("temperature", 0.0)


@dataclass
class Client:
    """One call's client: its answers, and when it had to wait for more of them.

    `broken`: for each answer, the attempts whose connection broke before it.
    """

    call: Call
    answers: list[Attempt] = field(default_factory=list)
    broken: list[list[Attempt]] = field(default_factory=list)
    # Start and end of each time without a piece.
    gaps: list[tuple[float, float]] = field(default_factory=list)
    last_piece_s: float = 0.0
    num_pieces: int = 0

    def tick(self) -> None:
        """A piece arrived."""
        now = time.monotonic()
        if self.num_pieces and now - self.last_piece_s > GAP_S:
            self.gaps.append((self.last_piece_s, now))
        self.last_piece_s = now
        self.num_pieces += 1

    def pause_s(self, start: float, end: float) -> float:
        """The longest time without a piece that touches start .. end; 0.0 = none to speak of."""
        return max((b - a for a, b in self.gaps if a < end and b > start), default=0.0)


class Progress:
    """What a script sees of the clients, from its thread."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self.is_broken = threading.Event()

    def wait_begun(self, num_pieces: int = 5) -> None:
        """Until each stream under way has so many pieces."""
        counts = [client.num_pieces for client in self._clients]
        self._wait(
            lambda: all(
                client.call.door is Door.WHOLE or client.num_pieces >= count + num_pieces
                for client, count in zip(self._clients, counts, strict=True)
            )
        )

    def wait_answered(self) -> None:
        """Until each call that is under way now has its answer."""
        counts = [len(client.answers) for client in self._clients]
        self._wait(
            lambda: all(
                len(client.answers) > count
                for client, count in zip(self._clients, counts, strict=True)
            )
        )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.is_broken.is_set():
                raise AssertionError("a client failed")
            assert time.monotonic() < deadline, "clients are stuck"
            time.sleep(0.02)


class Traffic:
    """Runs calls over all routers in turn. Addresses: HTTP URLs and gRPC addresses."""

    def __init__(self, urls: Sequence[str], grpc_addresses: Sequence[str]) -> None:
        self._urls = urls
        self._grpc_addresses = grpc_addresses

    def run(
        self, calls: Sequence[Call], script: Callable[[Progress], None] | None = None
    ) -> list[Client]:
        """All calls at once, once or as long as `script` runs. Raises the script's error."""
        return asyncio.run(self._run([Client(call) for call in calls], script))

    async def _run(
        self, clients: list[Client], script: Callable[[Progress], None] | None
    ) -> list[Client]:
        progress = Progress(clients)
        is_over = asyncio.Event()

        async def run_script() -> None:
            try:
                if script is not None:
                    await asyncio.to_thread(script, progress)
            finally:
                is_over.set()

        async with self._doors() as attempt:
            scripted = asyncio.create_task(run_script())

            async def run_client(number: int, client: Client) -> None:
                while True:
                    await self._ask(attempt, number, client)
                    if is_over.is_set() or script is None:
                        return

            try:
                async with asyncio.TaskGroup() as group:
                    for number, client in enumerate(clients):
                        group.create_task(run_client(number, client))
            except BaseException:
                progress.is_broken.set()
                raise
            finally:
                await scripted
        return clients

    async def _ask(self, attempt: "_Ask", number: int, client: Client) -> None:
        """One call to its answer, however many routers it takes."""
        broken: list[Attempt] = []
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                answer = await attempt(client, number)
            except BrokenError as error:
                if time.monotonic() > deadline:
                    raise
                broken.append(error.attempt)
                number += 1
                await asyncio.sleep(_RETRY_S)
            else:
                client.answers.append(answer)
                client.broken.append(broken)
                return

    @asynccontextmanager
    async def _doors(self) -> AsyncGenerator["_Ask"]:
        channels = [open_channel(address) for address in self._grpc_addresses]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:

            async def attempt(client: Client, number: int) -> Attempt:
                call = client.call
                if call.door is Door.GRPC:
                    stub = stubs[number % len(stubs)]
                    return await over_grpc(stub, call, client.tick)
                url = self._urls[number % len(self._urls)]
                is_streamed = call.door is Door.SSE
                return await over_http(http, url, call, client.tick, is_streamed=is_streamed)

            try:
                yield attempt
            finally:
                for channel in channels:
                    await channel.close()


_Ask = Callable[[Client, int], Coroutine[Any, Any, Attempt]]
