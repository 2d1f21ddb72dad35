"""The load of `octavo bench`: one or more processes that send requests and time the answers.

One process reads some ten thousand frames a second without delaying the next; a fast model behind
several routers sends more. So requests are dealt to processes, each of which keeps to one router,
is told what to send, and starts when all are ready. Must not know: workloads, records. Entry point:
`LoadClients`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from octavo.cli.client_processes import ClientProcesses
from octavo.cli.event_loop import loop_factory
from octavo.cli.grpc_load import run_grpc
from octavo.cli.http_load import run_http
from octavo.cli.measurement import RequestTiming
from octavo.cli.parent import die_with_parent
from octavo.cli.stack import Endpoints
from octavo.cli.workloads import BenchRequest
from octavo.errors import OctavoError

OnTokens = Callable[[int], None]
_TELL_S = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    """What is sent, all at once; with a key if the router wants one."""

    protocol: str
    requests: Sequence[BenchRequest]
    sampling: dict[str, Any]
    api_key: str | None = None


class Answers(NamedTuple):
    """The requests' times; `cores`: CPU seconds per second of the busiest client."""

    timings: tuple[RequestTiming, ...]
    cores: float


class LoadClients(ClientProcesses):
    """Clients, in a `with` block; one alone runs in this process."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(num_clients if num_clients > 1 else 0, _serve)

    async def run(self, doors: Sequence[Endpoints], job: Job, on_tokens: OnTokens) -> Answers:
        """Send all of `job`'s requests now, each client to one of the routers `doors`, in turn.
        Raises what failed first, as OctavoError where it failed in another process."""
        if not self.connections:
            return await _send(doors[0], job, on_tokens)
        # As few clients as requests; a client without any has nothing to say.
        connections = self.connections[: len(job.requests)]
        for number, connection in enumerate(connections):
            part = replace(job, requests=job.requests[number :: len(connections)])
            connection.send((doors[number % len(doors)], part))
        for connection in connections:
            await asyncio.to_thread(connection.recv)
        for connection in connections:
            connection.send(None)
        parts = await asyncio.gather(
            *(asyncio.to_thread(_collect, connection, on_tokens) for connection in connections)
        )
        # Back in the order of the requests.
        timings: list[RequestTiming | None] = [None] * len(job.requests)
        for number, part in enumerate(parts):
            timings[number :: len(connections)] = part.timings
        found = tuple(timing for timing in timings if timing is not None)
        return Answers(found, max(part.cores for part in parts))


async def _send(door: Endpoints, job: Job, on_tokens: OnTokens) -> Answers:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    what = (job.requests, job.sampling, on_tokens, job.api_key)
    if job.protocol == "grpc":
        run = await run_grpc(door.grpc_address.removeprefix("http://"), *what)
    else:
        run = await run_http(door.url.rstrip("/"), door.model, *what)
    elapsed_s = time.perf_counter() - began_s
    return Answers(run.timings, (time.process_time() - cpu_s) / elapsed_s)


def _collect(connection: Connection, on_tokens: OnTokens) -> Answers:
    """A client's answers, when it has them."""
    while True:
        try:
            item = connection.recv()
        except EOFError:
            raise OctavoError("a client's process ended before its requests did") from None
        if isinstance(item, int):
            on_tokens(item)
        elif isinstance(item, Answers):
            return item
        else:
            raise OctavoError(item)


# In a client's process --------------------------------------------------------------------


def _serve(connection: Connection, parent_pid: int) -> None:
    """Run jobs until the other side hangs up."""
    die_with_parent(parent_pid)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        while True:
            try:
                door, job = connection.recv()
                connection.send(None)
                connection.recv()
            except (EOFError, OSError):
                return
            told = _Told(connection)
            try:
                answers = runner.run(_send(door, job, told))
            except Exception as error:
                connection.send(str(first_cause(error)))
            else:
                told.tell()
                connection.send(answers)


class _Told:
    """Tells the other side of new tokens, a few times a second."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_new = 0
        self._told_s = time.perf_counter()

    def __call__(self, count: int) -> None:
        self._num_new += count
        if time.perf_counter() - self._told_s > _TELL_S:
            self.tell()

    def tell(self) -> None:
        self._connection.send(self._num_new)
        self._num_new, self._told_s = 0, time.perf_counter()


def first_cause(error: BaseException) -> BaseException:
    """The first error of a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
