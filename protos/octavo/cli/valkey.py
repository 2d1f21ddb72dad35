"""The embedded Valkey of `octavo serve`: started, watched, started again when it ends.

Redis only remembers, so nothing here ends the stack: without a server everything goes on, and
services write their state again when it is back. Must not know: services. Entry point:
`ValkeyKeeper`.
"""

import asyncio
import time

from octavo.cli.console import Console
from octavo.embedded_valkey import EmbeddedValkey
from octavo.errors import ConfigurationError

_POLL_S = 0.25
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 10.0
# A server that ran this long was well: its end starts a new count.
_HEALTHY_S = 60.0


class ValkeyKeeper:
    """Keeps one server running from `start` to `stop`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._valkey: EmbeddedValkey | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """The server's URL, the same for its whole life; "" if it can't be started."""
        try:
            valkey = EmbeddedValkey()
            await asyncio.to_thread(valkey.start)
        except (ConfigurationError, OSError) as error:
            self._console.say(f"WARNING going on without Redis: {error}")
            return ""
        self._valkey = valkey
        self._say_ready(valkey)
        self._watch = asyncio.create_task(self._keep(valkey))
        return valkey.url

    async def stop(self) -> None:
        """End the server; harmless if there is none."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        valkey, self._valkey = self._valkey, None
        if valkey is not None:
            await asyncio.to_thread(valkey.stop)

    async def _keep(self, valkey: EmbeddedValkey) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            started = time.monotonic()
            while valkey.is_running():  # noqa: ASYNC110 - a process's end has no event
                await asyncio.sleep(_POLL_S)
            if time.monotonic() - started >= _HEALTHY_S:
                delay_s = _FIRST_DELAY_S
            self._console.say(
                f"valkey ended; going on without Redis, again in {delay_s:.1f} s", is_bad=True
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            # Shielded: `stop` must not miss a server that is just being made.
            restart = asyncio.ensure_future(asyncio.to_thread(valkey.restart))
            try:
                await asyncio.shield(restart)
            except asyncio.CancelledError:
                await asyncio.wait([restart])
                raise
            except (ConfigurationError, OSError) as error:
                self._console.say(f"WARNING valkey doesn't start again: {error}")
            else:
                self._say_ready(valkey)

    def _say_ready(self, valkey: EmbeddedValkey) -> None:
        self._console.log("valkey", f"ready: valkey on {valkey.url}")
