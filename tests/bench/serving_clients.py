"""Processes that send a served model its load, over HTTP streams, and follow every answer.

Each process gets its share of a phase: a closed loop of clients that ask again when they were
answered, or arrivals at given times, which nothing holds up. A phase is reported when it is
over; arrivals' streams go on into the next one, closed ones are broken off.

Must not know: rates, lengths' origin, statistics. Entry points: `ClosedLoop`, `Arrivals`,
`ServingClients`.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

from octavo.cli.client_processes import ClientProcesses
from octavo.cli.event_loop import loop_factory
from octavo.cli.parent import die_with_parent
from octavo.cli.serve_client import Outcome, Server, fill
from octavo.cli.serve_load import Arrival, PromptMaker
from octavo.cli.serve_run import allow_many_connections
from tests.bench.serving_windows import Stream


class ClosedLoop(NamedTuple):
    """`num_clients` that send `requests` (without times): all, or until `end_s` (perf_counter)."""

    num_clients: int
    requests: Sequence[Arrival]
    end_s: float


class Arrivals(NamedTuple):
    """Requests due at `start_s` + `due_s`; reported at `report_s` (of perf_counter)."""

    requests: Sequence[Arrival]
    start_s: float
    report_s: float


Phase = ClosedLoop | Arrivals


class ServingClients(ClientProcesses):
    """Client processes of one server; in a `with` block."""

    def __init__(self, num_processes: int) -> None:
        super().__init__(num_processes, _serve)

    async def connect(self, server: Server, prompts: PromptMaker) -> None:
        """Say where requests go; returns when all processes run."""
        for connection in self.connections:
            connection.send((server, prompts))
        await self._answers()

    async def prepare(self, requests: Sequence[Arrival]) -> None:
        """Make the bodies of requests to come, so that nothing has to wait for them."""
        for number, connection in enumerate(self.connections):
            connection.send(list(requests[number :: self.num_processes]))
        await self._answers()

    async def run(self, phase: Phase) -> list[Stream]:
        """Run a phase; every stream that wasn't over when it began, as it is at its end."""
        for number, connection in enumerate(self.connections):
            requests = phase.requests[number :: self.num_processes]
            part = phase._replace(requests=requests)
            if isinstance(part, ClosedLoop):
                share = len(range(number, part.num_clients, self.num_processes))
                part = part._replace(num_clients=share)
            connection.send(part)
        return [stream for streams in await self._answers() for stream in streams]

    async def _answers(self) -> list[list[Stream]]:
        return await asyncio.gather(
            *(asyncio.to_thread(connection.recv) for connection in self.connections)
        )


# In a client's process --------------------------------------------------------------------


def _serve(connection: Connection, parent_pid: int) -> None:
    """Run phases until the other side hangs up."""
    die_with_parent(parent_pid)
    allow_many_connections()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            server, prompts = connection.recv()
            connection.send([])
            runner.run(_Client(server, prompts).serve(connection))
        except (EOFError, OSError):
            return


@dataclass
class _Client:
    """One process's streams."""

    server: Server
    prompts: PromptMaker
    bodies: dict[int, str] = field(default_factory=dict[int, str])
    running: dict[asyncio.Task[None], Outcome] = field(default_factory=dict)
    over: list[Outcome] = field(default_factory=list[Outcome])

    async def serve(self, connection: Connection) -> None:
        while True:
            order = await asyncio.to_thread(connection.recv)
            if isinstance(order, ClosedLoop):
                await self._closed(order)
            elif isinstance(order, Arrivals):
                await self._open(order)
            else:
                self.bodies |= {arrival.index: self._body(arrival) for arrival in order}
            connection.send(self._report())

    async def _closed(self, phase: ClosedLoop) -> None:
        source = iter(phase.requests)
        loops = [asyncio.create_task(self._ask(source)) for _ in range(phase.num_clients)]
        if not loops:
            return
        await asyncio.wait(loops, timeout=max(0.0, phase.end_s - time.perf_counter()))
        for task in (*loops, *self.running):
            task.cancel()
        await asyncio.gather(*loops, *self.running, return_exceptions=True)

    async def _ask(self, source: Iterator[Arrival]) -> None:
        for arrival in source:
            await asyncio.wait([self._start(arrival, None)])

    async def _open(self, phase: Arrivals) -> None:
        for arrival in phase.requests:
            assert arrival.due_s is not None, "an open loop has times"
            due_s = phase.start_s + arrival.due_s
            # Also without a wait, others must come to read what arrived.
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            self._start(arrival, due_s)
        await asyncio.sleep(max(0.0, phase.report_s - time.perf_counter()))

    def _start(self, arrival: Arrival, due_s: float | None) -> asyncio.Task[None]:
        body = self.bodies.pop(arrival.index, None) or self._body(arrival)
        outcome = Outcome.begun(arrival.num_prompt_tokens, due_s)
        task = asyncio.create_task(fill(outcome, self.server, body))
        self.running[task] = outcome
        task.add_done_callback(lambda task: self.over.append(self.running.pop(task)))
        return task

    def _body(self, arrival: Arrival) -> str:
        return self.server.body(self.prompts.prompt(arrival), arrival.num_output_tokens, None)

    def _report(self) -> list[Stream]:
        over, self.over = self.over, []
        return [
            *(Stream.of(outcome, is_over=True) for outcome in over),
            *(Stream.of(outcome, is_over=False) for outcome in self.running.values()),
        ]
