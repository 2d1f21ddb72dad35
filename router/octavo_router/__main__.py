"""`octavo router`: the entry point of the router's process."""

import argparse
import asyncio
import logging
import sys

from octavo.errors import ConfigurationError, OctavoError
from octavo.logs import setup_logging
from octavo.settings import RouterSettings, add_arguments, load
from octavo_router.wiring import run_router

log = logging.getLogger("octavo_router")


def main(argv: list[str] | None = None) -> int:
    """Run the router until a signal; the exit status."""
    parser = argparse.ArgumentParser(prog="octavo router", description=__doc__)
    add_arguments(parser, RouterSettings)
    try:
        settings = load(RouterSettings, vars(parser.parse_args(argv)))
    except OctavoError as error:
        print(f"octavo router: {error}", file=sys.stderr)
        return 2
    setup_logging("router", settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run_router(settings))
    except OctavoError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
