"""The bare half of `octavo bench`: all cases on one start of the worker's loop.

Must not know: records, tables. Entry points: `measure_bare`, `measure_bare_in_child`.
"""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from octavo.cli.bench_bar import Bar, ignore
from octavo.cli.bench_cases import Case, Measured, warm_ups
from octavo.cli.measurement import Run
from octavo.cli.parent import die_with_parent
from octavo.errors import OctavoError
from octavo.settings import WorkerSettings

Emit = Callable[[Measured], None]
_END_TIMEOUT_S = 20.0


def measure_bare(settings: WorkerSettings, cases: Sequence[Case], emit: Emit) -> None:
    """Run all cases in this process; `emit` is called as soon as one is measured."""
    # By name: this package imports no service.
    bare_loop = importlib.import_module("octavo_worker.bare_loop")
    plan = importlib.import_module("octavo_worker.plan")
    loop = bare_loop.BareLoop(settings)
    try:
        for warm_up in warm_ups(cases):
            loop.run(warm_up.requests, plan.Sampling(**warm_up.sampling), ignore)
        for case in cases:
            runs: list[Run] = []
            for number in range(case.num_runs):
                with Bar(case, number) as advance:
                    run = loop.run(case.requests, plan.Sampling(**case.sampling), advance)
                runs.append(run)
            loop.write_profile()
            emit(Measured(case, None, tuple(runs)))
    finally:
        loop.close()


def measure_bare_in_child(settings: WorkerSettings, cases: Sequence[Case], emit: Emit) -> None:
    """The same in a process of its own: when it ends, all of the device's memory is free."""
    # Secrets are for other processes, which a bare loop has none of.
    settings = replace(settings, redis_url="", internal_token="")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(there, os.getpid(), settings, cases), name="bare")
    child.start()
    there.close()
    try:
        while True:
            item = here.recv()
            if item is None:
                break
            if isinstance(item, OctavoError):
                raise item
            emit(item)
    except EOFError:
        child.join(_END_TIMEOUT_S)
        raise OctavoError(f"the bare worker ended with status {child.exitcode}") from None
    finally:
        here.close()
        child.join(_END_TIMEOUT_S)
        child.kill()
        child.join()


def _run(
    results: Connection, parent_pid: int, settings: WorkerSettings, cases: Sequence[Case]
) -> None:
    die_with_parent(parent_pid)
    try:
        measure_bare(settings, cases, results.send)
    except OctavoError as error:
        # As text: what an error was made of may be no one else's to read.
        results.send(OctavoError(error.message))
    else:
        results.send(None)
