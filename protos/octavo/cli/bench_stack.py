"""The stack's half of `octavo bench`: all cases through HTTP or gRPC, on one start of a stack.

Must not know: how a stack starts (`stack`), how requests are sent (`load_clients`), records.
Entry point: `measure_stack`.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from octavo.cli.bench_bar import Bar, ignore
from octavo.cli.bench_cases import Case, Measured, warm_ups, with_fresh_ids
from octavo.cli.bench_options import BenchOptions
from octavo.cli.console import Console
from octavo.cli.load_clients import Answers, Job, LoadClients, OnTokens, first_cause
from octavo.cli.measurement import Run
from octavo.cli.openai_url import api_key
from octavo.cli.service_readings import read_services
from octavo.cli.stack import Endpoints, Stack
from octavo.cli.workloads import BenchRequest
from octavo.errors import OctavoError

Emit = Callable[[Measured], None]


async def measure_stack(options: BenchOptions, emit: Emit) -> None:
    """Measure all cases; `emit` is called as soon as one is measured, with a profile when it is
    written."""
    if options.url:
        with LoadClients(options.num_clients) as clients:
            try:
                await _Runs(options, clients, options.url).run(emit)
            except (OSError, ExceptionGroup) as error:
                raise OctavoError(f"{options.url}: {first_cause(error)}") from error
        return
    stack = Stack(options.stack, Console(is_quiet=not options.is_verbose))
    kept: list[Measured] = []
    # Clients first: they get ready while the model loads.
    with LoadClients(options.num_clients) as clients:
        try:
            await stack.start()
            runs = _Runs(options, clients, stack)
            await _unless_it_fails(stack, runs.run(kept.append if options.profile else emit))
        finally:
            await stack.stop()
    # The worker writes its trace when it ends.
    for measured in kept:
        emit(measured)


async def _unless_it_fails(stack: Stack, measuring: Coroutine[None, None, None]) -> None:
    """Measure while every service runs; raises what ended one."""
    tasks = [asyncio.create_task(stack.watch()), asyncio.create_task(measuring)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        watching, measured = tasks
        await (watching if watching.done() else measured)
    finally:
        for task in tasks:
            task.cancel()


class _Runs:
    """All cases through running services: a stack of ours, or those at a URL."""

    def __init__(self, options: BenchOptions, clients: LoadClients, where: Stack | str) -> None:
        self._options = options
        self._clients = clients
        self._stack = where if isinstance(where, Stack) else None
        self._doors = where.doors if isinstance(where, Stack) else [Endpoints(where, where, "")]
        self._num_sent = 0

    async def run(self, emit: Emit) -> None:
        options = self._options
        for protocol in options.protocols:
            for warm_up in warm_ups(options.cases):
                await self._send(protocol, warm_up.requests, warm_up.sampling, ignore)
        for case in options.cases:
            for protocol in options.protocols:
                runs = [await self._once(case, protocol, number) for number in range(case.num_runs)]
                measured = Measured(case, protocol, tuple(runs))
                _warn_of_cached(measured)
                emit(measured)

    async def _once(self, case: Case, protocol: str, number: int) -> Run:
        stack, requests = self._stack, case.requests
        if stack is None:
            # Others' prefix cache is theirs to switch: it must not know the prompts.
            requests = with_fresh_ids(requests, case.last_id, self._num_sent)
            self._num_sent += 1
        before = None if stack is None else await read_services(stack)
        with Bar(case, number) as advance:
            answers = await self._send(protocol, requests, case.sampling, advance)
        run = Run(answers.timings, cores={"client": round(answers.cores, 3)})
        if stack is None or before is None:
            return run
        after = await read_services(stack)
        cores = {**run.cores, **after.cores_since(before)}
        return replace(run, steps=after.steps_since(before), cores=cores)

    def _send(
        self,
        protocol: str,
        requests: Sequence[BenchRequest],
        sampling: dict[str, Any],
        on_tokens: OnTokens,
    ) -> Coroutine[Any, Any, Answers]:
        job = Job(protocol, requests, sampling, api_key(None))
        return self._clients.run(self._doors, job, on_tokens)


def _warn_of_cached(measured: Measured) -> None:
    """Cached prompts would make a later run of the same look faster than the worker is."""
    for run in measured.runs:
        if run.num_cached_tokens:
            print(
                f"octavo bench: {measured.case.name}: {run.num_cached_tokens} of "
                f"{run.num_prompt_tokens} prompt tokens were found in a prefix cache: the numbers "
                "flatter the prefill",
                file=sys.stderr,
            )
