"""Writes states behind: one pipeline for whatever changed and for all leases due.

Every state is kept here as its owner last set it, so a Redis that comes back empty is filled
again: a renewal that finds nothing makes its state unwritten. Must not know: records, readers.
Entry points: `StateWriter.set`, `StateWriter.run_forever`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.redis_link import RedisLink, execute
from octavo.redis_state import Outcome, State

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """A state and how far it is written."""

    state: State
    unwritten_since: float | None
    # Refused in a row: a newer owner's state is there. Tried again at every renewal.
    num_refusals: int = 0
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class _Sent:
    entry: _Entry
    state: State
    is_withdrawal: bool


class StateWriter:
    """Keeps the states of one process in Redis."""

    def __init__(self, link: RedisLink, *, write_s: float, renew_s: float) -> None:
        self._link = link
        self._write_s = write_s
        self._renew_s = renew_s
        self._entries: dict[str, _Entry] = {}
        self._changed = asyncio.Event()
        self._renewed_at = -math.inf
        self._complaint = ""

    def set(self, state: State) -> None:
        """Make `state` what Redis shall hold under its key."""
        entry = self._entries.get(state.key)
        if entry is None:
            entry = self._entries[state.key] = _Entry(state, None)
        elif entry.state == state and not entry.is_withdrawn:
            return
        entry.state = state
        entry.is_withdrawn = False
        self._mark_unwritten(entry)

    def withdraw(self, key: str) -> None:
        """Take back what was set under `key`, if anything was."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_withdrawn = True
            self._mark_unwritten(entry)

    def lag_s(self) -> float:
        """Age of the oldest unwritten state, in s; 0 = all written. From any thread."""
        times = [entry.unwritten_since for entry in list(self._entries.values())]
        since = min((at for at in times if at is not None), default=None)
        return 0.0 if since is None else time.monotonic() - since

    async def run_forever(self) -> None:
        """Write and renew; ends only by cancellation."""
        while True:
            await self._wait_until_due()
            # Whatever else changes meanwhile goes out in the same pipeline.
            await asyncio.sleep(self._write_s)
            self._changed.clear()
            if not await self._link.call(partial(self._flush, entries=self._due())):
                for entry in self._entries.values():
                    self._mark_unwritten(entry)

    async def withdraw_all(self) -> None:
        """Take back everything; one attempt."""
        entries = list(self._entries.values())
        for entry in entries:
            entry.is_withdrawn = True
        if entries:
            await self._link.call(partial(self._flush, entries=entries))

    async def _wait_until_due(self) -> None:
        if not self._entries:
            await self._changed.wait()
            return
        wait_s = self._renewed_at + self._renew_s - self._write_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await self._changed.wait()
        except TimeoutError:
            return

    def _due(self) -> list[_Entry]:
        """Everything when leases are due, else what is unwritten."""
        now = time.monotonic()
        if now >= self._renewed_at + self._renew_s:
            self._renewed_at = now
            return list(self._entries.values())
        return [entry for entry in self._entries.values() if entry.unwritten_since is not None]

    async def _flush(self, client: Any, *, entries: Iterable[_Entry]) -> None:
        sent = [_Sent(entry, entry.state, entry.is_withdrawn) for entry in entries]
        if not sent:
            return
        sent_at = time.monotonic()
        pipeline = client.pipeline(transaction=False)
        for item in sent:
            if item.is_withdrawal:
                item.state.queue_withdrawal(pipeline)
            elif item.entry.unwritten_since is not None or item.entry.num_refusals:
                item.state.queue_write(pipeline)
            else:
                item.state.queue_renewal(pipeline)
        results = await execute(pipeline)
        for item, result in zip(sent, results, strict=True):
            self._settle(item, result, sent_at)
        self._complain(results)

    def _settle(self, sent: _Sent, result: Any, sent_at: float) -> None:
        entry = sent.entry
        if isinstance(result, Exception):
            # Not written: the next renewal tries again.
            if entry.unwritten_since is None and not entry.num_refusals:
                entry.unwritten_since = sent_at
            return
        if sent.is_withdrawal:
            if entry.is_withdrawn:
                self._entries.pop(entry.state.key, None)
            return
        outcome = sent.state.outcome(result)
        if outcome is Outcome.REFUSED:
            entry.num_refusals += 1
            entry.unwritten_since = None
            # The first may be a worker's new boot that its leader saw before its record.
            if entry.num_refusals == 2:
                logger.warning("%s is held by a newer process; ours isn't shown", entry.state.key)
            return
        entry.num_refusals = 0
        if outcome is Outcome.ABSENT:
            self._mark_unwritten(entry)
        else:
            entry.unwritten_since = None if entry.state is sent.state else sent_at

    def _mark_unwritten(self, entry: _Entry) -> None:
        if entry.num_refusals and not entry.is_withdrawn:
            return
        if entry.unwritten_since is None:
            entry.unwritten_since = time.monotonic()
        self._changed.set()

    def _complain(self, results: Iterable[object]) -> None:
        """Log what Redis refuses to do, once for each new reason."""
        reasons = {str(result) for result in results if isinstance(result, Exception)}
        complaint = min(reasons, default="")
        if complaint and complaint != self._complaint:
            logger.warning("Redis refuses to write, going on without it: %s", complaint)
        self._complaint = complaint
