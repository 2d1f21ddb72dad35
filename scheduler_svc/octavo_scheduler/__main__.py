"""`octavo scheduler`: settings, event loop, exit code. Entry point: `main`."""

import argparse
import asyncio
import sys
from collections.abc import Callable

from octavo.errors import OctavoError
from octavo.logs import setup_logging
from octavo.settings import SchedulerSettings, add_arguments, load
from octavo_scheduler.service import SchedulerProcess


def main(argv: list[str] | None = None) -> int:
    """Run a scheduler until a signal ends it; 0 then, 2 for a mistake at start."""
    usage, about = "%(prog)s [OPTIONS]", "Run one scheduler."
    parser = argparse.ArgumentParser(prog="octavo scheduler", usage=usage, description=about)
    add_arguments(parser, SchedulerSettings)
    arguments = vars(parser.parse_args(argv))
    try:
        settings = load(SchedulerSettings, arguments)
        setup_logging("scheduler", settings.log_level, settings.log_format)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_run(settings))
    except OctavoError as error:
        print(f"octavo scheduler: {error.message}", file=sys.stderr)
        return 2


async def _run(settings: SchedulerSettings) -> int:
    return await SchedulerProcess(settings).run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
