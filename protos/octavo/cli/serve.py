"""`octavo serve [MODEL]`: everything on this machine, one log, one address to talk to.

Must not know: how services work. Entry point: `main`.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from octavo.cli.console import Console
from octavo.cli.stack import Endpoints, Stack, StackOptions
from octavo.errors import ConfigurationError, OctavoError
from octavo.hub import DEMO_MODEL, resolve_model
from octavo.setting import environment_name
from octavo.settings import RouterSettings, SchedulerSettings, WorkerSettings, add_arguments, load

_SERVICES = (RouterSettings, SchedulerSettings, WorkerSettings)
# Settings that `serve` chooses for its children.
_CHOSEN_HERE = (
    *("model", "workers", "schedulers", "metrics_port"),
    *("router_id", "scheduler_id", "worker_id"),
)
_QUESTION = "What is the capital of France?"


def main(argv: list[str] | None = None) -> int:
    """Run the stack until it is told to stop (status 0) or can't be kept running (1)."""
    options = parse_options(argv)
    return asyncio.run(_serve(options, Console(is_json=options.router.log_format == "json")))


def parse_options(argv: Sequence[str] | None) -> StackOptions:
    """Flags, environment and defaults. Raises ConfigurationError naming what is wrong."""
    parser = argparse.ArgumentParser(
        prog="octavo serve",
        description="Run router, scheduler, workers and an embedded Valkey on this machine.",
        epilog="--host and --port are the HTTP API's. All else takes free local ports, and so does "
        "gRPC here unless --grpc-port is given.",
    )
    add_stack_arguments(parser)
    return stack_options(parser.parse_args(argv))


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `stack_options` reads."""
    # Settings are many: argparse's own would bury a mistake's message under all their names.
    parser.usage = "%(prog)s [MODEL] [OPTIONS]"
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help=f"Hugging Face id, folder, or '{DEMO_MODEL}' [{DEMO_MODEL}]",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes [1]")
    add_arguments(parser, *_SERVICES, exclude=_CHOSEN_HERE)


def stack_options(arguments: argparse.Namespace) -> StackOptions:
    """The stack that parsed arguments ask for."""
    if arguments.workers < 1:
        raise ConfigurationError(f"--workers {arguments.workers}: must be at least 1")
    given = {name: value for name, value in vars(arguments).items() if name not in _CHOSEN_HERE}
    # Beside the HTTP port nothing needs a port that people remember.
    if given["grpc_port"] is None and environment_name("grpc_port") not in os.environ:
        given["grpc_port"] = "0"
    return StackOptions(
        model=arguments.model,
        num_workers=arguments.workers,
        router=load(RouterSettings, given),
        scheduler=replace(load(SchedulerSettings, given), host="127.0.0.1"),
        worker=replace(load(WorkerSettings, given), host="127.0.0.1"),
    )


async def _serve(options: StackOptions, console: Console) -> int:
    stop = asyncio.Event()
    killed = asyncio.Event()

    def on_signal() -> None:
        (killed if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stack = Stack(options, console)
    status = await _run_until(stop, stack, console, options)
    console.say("draining; press Ctrl-C again to end at once")
    draining = asyncio.create_task(stack.stop())
    twice = asyncio.create_task(killed.wait())
    await asyncio.wait([draining, twice], return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        console.say("ending at once")
        draining.cancel()
        await stack.kill()
        return 130
    twice.cancel()
    await draining
    console.say("stopped")
    return status


async def _run_until(
    stop: asyncio.Event, stack: Stack, console: Console, options: StackOptions
) -> int:
    """Start and watch `stack` until `stop` is set; returns the exit status."""

    async def start_and_watch() -> None:
        # Once, here: the services would fetch or convert it all at the same time.
        await asyncio.to_thread(resolve_model, options.model, options.router.revision)
        endpoints = await stack.start()
        needs_key = bool(options.router.api_keys)
        print(ready_text(endpoints, needs_key=needs_key, has_page=options.router.ui), flush=True)
        await stack.watch()

    running = asyncio.create_task(start_and_watch())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in (running, stopping):
        task.cancel()
    try:
        await running
    except asyncio.CancelledError:
        return 0
    except ConfigurationError as error:
        console.say(error.message, is_bad=True)
        return 2
    except OctavoError as error:
        console.say(error.message, is_bad=True)
        return 1
    return 0


def ready_text(endpoints: Endpoints, *, needs_key: bool, has_page: bool = True) -> str:
    """The closing block: the API's address and a command that works."""
    body = {
        "model": endpoints.model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
    }
    key = '-H "Authorization: Bearer $OCTAVO_API_KEY" ' if needs_key else ""
    curl = (
        f"curl -s {endpoints.url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    page = f"  page  {endpoints.url}/ui\n" if has_page else ""
    # As it was called here: a venv's commands are often on no path.
    program = shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "octavo" else "octavo"
    return (
        f"\nOctavo serves {endpoints.model}: press Ctrl-C to stop\n\n"
        f"  HTTP  {endpoints.url}/v1   (OpenAI API; its documentation: {endpoints.url}/docs)\n"
        f"{page}"
        f"  gRPC  {endpoints.grpc_address}\n"
        f"  chat  {program} chat --url {endpoints.url}\n\n"
        f"{curl}\n"
    )
