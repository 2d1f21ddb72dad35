"""`octavo router`: settings, event loop, exit code. Entry point: `main`."""

import argparse
import asyncio
import sys

from octavo.errors import ConfigurationError, OctavoError
from octavo.logs import setup_logging
from octavo.settings import RouterSettings, add_arguments, load
from octavo_router.wiring import run_router


def main(argv: list[str] | None = None) -> int:
    """Run the router until a signal; the exit status."""
    usage, about = "%(prog)s [OPTIONS]", "Run one router."
    parser = argparse.ArgumentParser(prog="octavo router", usage=usage, description=about)
    add_arguments(parser, RouterSettings)
    arguments = vars(parser.parse_args(argv))
    try:
        settings = load(RouterSettings, arguments)
        setup_logging("router", settings.log_level, settings.log_format)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run_router(settings))
    except OctavoError as error:
        print(f"octavo router: {error.message}", file=sys.stderr)
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
