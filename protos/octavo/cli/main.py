"""Dispatch: `octavo COMMAND ...` loads the command's module and calls its `main(argv)`."""

import importlib
import os
import sys
from typing import NamedTuple

import octavo
from octavo.cli.parent import DIE_WITH_PARENT, die_with_parent
from octavo.errors import OctavoError


class Command(NamedTuple):
    """Where a command lives, the extra that brings its dependencies, and what it does."""

    module: str
    extra: str
    summary: str


COMMANDS = {
    "serve": Command("octavo.cli.serve", "serve", "run everything on this machine"),
    "chat": Command("octavo.cli.chat", "client", "talk to a model in the terminal"),
    "top": Command("octavo.cli.top", "client", "watch running cells in the terminal"),
    "bench": Command("octavo.cli.bench", "serve", "measure a worker, or a whole stack"),
    "bench simulate": Command("octavo.cli.simulate", "serve", "how fleets route, in virtual time"),
    "bench ablation": Command("octavo.cli.ablation", "serve", "what each idea is worth"),
    "bench kernels": Command("octavo.cli.bench_kernels", "serve", "each kernel against the card"),
    "bench serve": Command("octavo.cli.bench_serve", "client", "measure and compare servers"),
    "plan": Command("octavo.cli.plan", "worker", "what fits on a card, and settings for it"),
    "health": Command("octavo.cli.health", "client", "ask a service whether it is ready"),
    "fetch": Command("octavo.cli.fetch", "router", "get a model before services start"),
    "router": Command("octavo_router.__main__", "router", "run a router (HTTP and gRPC)"),
    "scheduler": Command("octavo_scheduler.__main__", "scheduler", "run a scheduler"),
    "worker": Command("octavo_worker.__main__", "worker", "run a worker"),
}
_USAGE_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (default: the command line) names; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else _USAGE_ERROR
    if arguments[0] in ("-V", "--version", "version"):
        print(f"octavo {octavo.__version__}")
        return 0
    # A command's own command comes first: `bench serve` is not `bench` of a model "serve".
    num_words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:num_words]), arguments[num_words:]
    command = COMMANDS.get(name)
    if command is None:
        print(f"octavo: no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return _USAGE_ERROR
    parent = os.environ.pop(DIE_WITH_PARENT, None)
    if parent is not None:
        die_with_parent(int(parent))
    return _run(name, command, rest)


def _run(name: str, command: Command, arguments: list[str]) -> int:
    try:
        run = importlib.import_module(command.module).main
    except ModuleNotFoundError as error:
        # Our own broken imports must show as what they are.
        if (error.name or "").startswith("octavo"):
            raise
        print(
            f"octavo {name} needs the package {error.name}: pip install 'octavo[{command.extra}]'",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    try:
        return int(run(arguments) or 0)
    except OctavoError as error:
        print(f"octavo {name}: {error.message}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 1
    commands = "\n".join(f"  {name:<{width}} {item.summary}" for name, item in COMMANDS.items())
    return (
        "usage: octavo COMMAND [OPTIONS]\n\n"
        f"{commands}\n\n"
        "`octavo COMMAND --help` lists a command's options; a service's option NAME is also\n"
        "the environment variable OCTAVO_NAME."
    )
