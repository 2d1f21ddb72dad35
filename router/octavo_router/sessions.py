"""All schedulers this router talks to: one session each, and the way of a flight among them.

Schedulers come from settings and from the registry; one that vanishes from the registry keeps
its session while it lives. When a session is lost its flights are held while the same scheduler
is re-dialled (`redial_ms`; refused = not waited for), then go to the lost cell's successor, or
wait for any scheduler that takes requests. A flight is only to blame for a session that broke
while the scheduler had given nothing of it: these count against `max_moves`; hand-overs (MOVED),
silent schedulers and streams that ran don't. Must not know: text, HTTP.
Entry points: `Sessions.start`, `Sessions.submit`, `Sessions.wait_ready`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

import grpc.aio

from octavo.bloom import BloomFilter
from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.logs import in_trace
from octavo.metrics import RouterMetrics
from octavo.registry import Registry
from octavo.security import OPEN, Security
from octavo.serving import open_channel
from octavo.succession import successor
from octavo_router.cells import Cell, CellChoice, choose_cell
from octavo_router.flights import Flight
from octavo_router.served_model import ServedModel
from octavo_router.session import Session, may_try_elsewhere, open_session

log = logging.getLogger(__name__)
DISCOVERY_S = 1.0
DIAL_TIMEOUT_S = 5.0
# No longer at its end: at a start the model is there, and only this pause is waited for.
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5)
# So many failed dials of a new address (ten seconds) are worth a warning: while workers load their
# weights no scheduler has one, at every start.
_PATIENCE = 20
# A session that ended sooner counts as a failed dial.
_STABLE_S = 1.0
# How long a lost flight waits for a scheduler.
HOMELESS_S = 10.0
_RETRY_AFTER_MS = 1000


class Sessions:
    """The router's links. `static`: addresses from the settings."""

    def __init__(
        self,
        *,
        router_id: str,
        static: Sequence[str],
        registry: Registry,
        redial_ms: int,
        max_moves: int,
        metrics: RouterMetrics,
        security: Security = OPEN,
    ) -> None:
        self.router_id = router_id
        self._security = security
        self._static = tuple(static)
        self._registry = registry
        self._redial_s = redial_ms / 1000
        self._max_moves = max_moves
        self._metrics = metrics
        self._ready: dict[str, Session] = {}
        self._links: dict[str, asyncio.Task[None]] = {}
        # By address: flights that wait for their own scheduler's re-dial.
        self._held: dict[str, list[Flight]] = {}
        self._homeless: list[Flight] = []
        # Scheduler id -> its filter, as published and parsed.
        self._filters: dict[str, tuple[bytes, BloomFilter]] = {}
        self._became_ready = asyncio.Event()
        self._discovery: asyncio.Task[None] | None = None
        self._last_model: ServedModel | None = None

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._discover()
        self._discovery = asyncio.create_task(self._run_discovery())

    async def close(self) -> None:
        """Drop every session; flights still under way fail."""
        tasks = [*self._links.values()]
        if self._discovery is not None:
            tasks.append(self._discovery)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        error = UnavailableError("the router is shutting down; try again")
        for flight in [*self._homeless, *(f for held in self._held.values() for f in held)]:
            flight.fail(error)

    @property
    def is_ready(self) -> bool:
        """At least one scheduler takes new requests."""
        return any(session.load.takes_new for session in self._ready.values())

    def connected(self) -> list[Session]:
        """The sessions that live now."""
        return list(self._ready.values())

    @property
    def model(self) -> ServedModel | None:
        """What the schedulers serve; None until a first one was met."""
        for session in self._ready.values():
            return session.model
        return self._last_model

    async def wait_ready(self) -> ServedModel:
        """The served model. While no scheduler is connected, waits as long as a re-dial takes.

        Raises UnavailableError.
        """
        if not self._ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._redial_s):
                    await self._became_ready.wait()
        model = self.model
        if not self._ready or model is None:
            raise UnavailableError(
                "no scheduler is connected; try again shortly", retry_after_ms=_RETRY_AFTER_MS
            )
        return model

    def check_room(self, tenant: str, priority: int) -> None:
        """Refuse a new request that, as is known, no cell would take, whatever its size.

        Raises OverloadedError, with the shortest time to retry.
        """
        refusals: list[OverloadedError] = []
        for session in self._ready.values():
            if not session.load.takes_new:
                continue
            refusal = session.refusal(tenant, priority)
            if refusal is None:
                return
            refusals.append(refusal)
        if refusals:
            refusal = min(refusals, key=lambda error: error.retry_after_ms or 0)
            raise OverloadedError(refusal.message, retry_after_ms=refusal.retry_after_ms)

    def cells(self) -> list[Cell]:
        """The connected cells as they are now; safe to use in another thread."""
        return [self._cell_of(session) for session in self._ready.values()]

    def submit(self, flight: Flight, choice: CellChoice | None) -> None:
        """Send a new flight to the chosen cell, or, if that just left, to the best that is there.

        Raises UnavailableError if there is none.
        """
        session = None if choice is None else self._session_of(choice.cell_id)
        if session is None:
            session = self._best_for(flight, self._ready.values())
        if session is None:
            leaving = [s.scheduler_id for s in self._ready.values() if s.load.is_draining]
            if leaving and self._pass_to_heir(flight, leaving[0]):
                return
            raise UnavailableError(
                "no scheduler takes new requests; try again shortly",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        session.submit(flight)

    def _pass_to_heir(self, flight: Flight, leaving_id: str) -> bool:
        """A cell that hands over takes nothing new, and its heir may have no workers until then.

        What is asked meanwhile is the heir's as if the leaving cell had had it. False: no heir.
        """
        takers = self._takers()
        heir = takers.get(successor(takers, leaving_id) or "")
        if heir is None:
            return False
        flight.lost_cell, flight.lost_at = leaving_id, asyncio.get_running_loop().time()
        flight.tried_cells.clear()
        _tell(flight, "handed over", heir.scheduler_id, "handed over to %s")
        heir.submit(flight)
        return True

    def _takers(self) -> dict[str, Session]:
        """By id; schedulers without workers too: a successor may be about to get them."""
        return {s.scheduler_id: s for s in self._ready.values() if not s.load.is_draining}

    def _best_for(self, flight: Flight, sessions: Iterable[Session]) -> Session | None:
        hashes = flight.order.hashes
        cells = [self._cell_of(session) for session in sessions]
        choice = choose_cell(cells, hashes.blocks, hashes.block_size)
        return None if choice is None else self._session_of(choice.cell_id)

    def _session_of(self, cell_id: str) -> Session | None:
        return next((s for s in self._ready.values() if s.scheduler_id == cell_id), None)

    def _cell_of(self, session: Session) -> Cell:
        held = self._filters.get(session.scheduler_id)
        return Cell(
            session.scheduler_id,
            session.load.backlog_tokens,
            session.load.prefill_tokens_per_s,
            not session.load.takes_new,
            None if held is None else held[1].leading_run,
        )

    def _refused(self, session: Session, flight: Flight, error: OctavoError) -> None:
        """A cell rejected a flight: one more cell is tried if this one is only busy.

        One that a cell lost is a stream that must go on: it waits for a cell that takes it.
        """
        flight.carrier = None
        others = [s for s in self._ready.values() if s.scheduler_id not in flight.tried_cells]
        is_first = len(flight.tried_cells) == 1
        may_move = may_try_elsewhere(error)
        other = self._best_for(flight, others) if is_first and may_move else None
        if (
            other is None
            and not flight.lost_cell
            and session.load.is_draining
            and (self._pass_to_heir(flight, session.scheduler_id))
        ):
            return
        if other is None and flight.lost_cell and may_move:
            flight.tried_cells.clear()
            self._homeless.append(flight)
            return
        if other is None:
            flight.fail(error)
            return
        _tell(flight, "refused", session.scheduler_id, "refused by %s, tried elsewhere")
        other.submit(flight)

    # Discovery and links.

    async def _run_discovery(self) -> None:
        while True:
            await asyncio.sleep(DISCOVERY_S)
            self._discover()
            self._read_filters()
            self._expire_homeless()
            self._place(self._homeless)

    def _discover(self) -> None:
        """A link for each known address; links of vanished, unconnected ones end."""
        known = {*self._static, *(record.address for record in self._registry.schedulers())}
        for address in known:
            self._link(address)
        for address, task in list(self._links.items()):
            if task.done() or (address not in known and not self._is_engaged(address)):
                task.cancel()
                del self._links[address]
                self._release_held(address)

    def _read_filters(self) -> None:
        """What cells say they hold; one that doesn't parse is as good as none."""
        published = self._registry.filters()
        for scheduler_id, data in published.items():
            known = self._filters.get(scheduler_id)
            if known is not None and known[0] is data:
                continue
            try:
                self._filters[scheduler_id] = (data, BloomFilter.from_bytes(data))
            except ValueError as error:
                self._filters.pop(scheduler_id, None)
                log.warning("scheduler %s: bad filter: %s", scheduler_id, error)
        for scheduler_id in self._filters.keys() - published.keys():
            del self._filters[scheduler_id]

    def _is_engaged(self, address: str) -> bool:
        return address in self._ready or address in self._held

    def _link(self, address: str) -> None:
        if address not in self._links:
            self._links[address] = asyncio.create_task(self._keep_linked(address))

    async def _keep_linked(self, address: str) -> None:
        """Dial, serve, dial again, for ever."""
        loop = asyncio.get_running_loop()
        failures = 0
        was_connected = False
        while True:
            timeout_s = self._redial_s if address in self._held else DIAL_TIMEOUT_S
            try:
                async with open_channel(address, self._security) as channel:
                    async with asyncio.timeout(max(timeout_s, 0.01)):
                        session = await open_session(
                            channel, address, self.router_id, self._refused
                        )
                    started_at = loop.time()
                    was_connected = True
                    await self._serve(session)
                    is_stable = loop.time() - started_at >= _STABLE_S
                    failures = 0 if is_stable else failures + 1
            except (grpc.RpcError, OctavoError, TimeoutError) as error:
                level = _level_of_failure(failures, was_connected=was_connected)
                log.log(level, "scheduler %s: not connected: %s", address, _reason(error))
                failures += 1
                self._release_held(address)
            except Exception:
                log.exception("scheduler %s: the session failed", address)
                failures += 1
                self._release_held(address)
            if address not in self._held and failures:
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1])

    async def _serve(self, session: Session) -> None:
        """Run a session to its end, whatever ends it; then its flights are held."""
        address = session.address
        self._ready[address] = session
        self._last_model = session.model
        self._metrics.sessions.set(len(self._ready))
        self._became_ready.set()
        log.info("scheduler %s at %s: connected", session.scheduler_id, address)
        held = self._held.pop(address, [])
        self._place([*held, *self._homeless], preferred=session)
        moved_to: str | None = None
        # An end without a word may be a crash, and a request may have caused it.
        is_suspicious = True
        try:
            moved_to = await session.run()
            log.info("scheduler %s: session closed", session.scheduler_id)
        except (grpc.RpcError, OctavoError) as error:
            is_suspicious = isinstance(error, grpc.RpcError)
            log.warning("scheduler %s: session lost: %s", session.scheduler_id, _reason(error))
        finally:
            del self._ready[address]
            if not self._ready:
                self._became_ready.clear()
            self._metrics.sessions.set(len(self._ready))
            self._take_back(session, moved_to, is_suspicious=is_suspicious)

    # Flights between sessions.

    def _take_back(self, session: Session, moved_to: str | None, *, is_suspicious: bool) -> None:
        """A session ended: what it carried is held, or on its way to the named successor."""
        now = asyncio.get_running_loop().time()
        orphans: list[Flight] = []
        for flight in session.flights.values():
            flight.carrier = None
            if flight.is_over:
                continue
            flight.lost_cell, flight.lost_at = session.scheduler_id, now
            flight.tried_cells.clear()
            if moved_to is None and is_suspicious and _gave_nothing(flight):
                flight.num_suspicions += 1
            if flight.num_suspicions > self._max_moves:
                flight.fail(
                    OctavoError(
                        f"{flight.num_suspicions} schedulers were lost before they gave "
                        f"anything of this request (limit {self._max_moves}); it is not tried again"
                    )
                )
                continue
            self._metrics.moves.inc()
            if flight.order.trace is not None:
                event = "scheduler lost" if moved_to is None else "handed over"
                flight.order.trace.event(event, cell=session.scheduler_id)
            orphans.append(flight)
        session.flights.clear()
        if moved_to:
            self._link(moved_to)
        wait_for = session.address if moved_to is None else moved_to
        if orphans and wait_for and wait_for not in self._ready:
            self._held.setdefault(wait_for, []).extend(orphans)
        else:
            self._place([*orphans, *self._homeless], preferred=self._ready.get(moved_to or ""))

    def _release_held(self, address: str) -> None:
        """The re-dial failed: whoever waited for it goes elsewhere."""
        held = self._held.pop(address, [])
        if held:
            self._place([*self._homeless, *held])

    def _place(self, homeless: list[Flight], preferred: Session | None = None) -> None:
        """Give each flight a session; those for whom there is none wait on."""
        self._homeless = []
        takers = self._takers()
        if preferred is not None and preferred.load.is_draining:
            preferred = None
        for flight in homeless:
            if flight.is_over:
                continue
            heir = successor(takers, flight.lost_cell) or flight.lost_cell
            session = preferred or takers.get(heir)
            if session is None:
                self._homeless.append(flight)
                continue
            _tell(flight, "moved", session.scheduler_id, "moved to %s")
            session.submit(flight)

    def _expire_homeless(self) -> None:
        too_old = asyncio.get_running_loop().time() - HOMELESS_S
        for flight in self._homeless:
            if flight.lost_at <= too_old and not flight.is_over:
                flight.fail(
                    UnavailableError(
                        f"no scheduler took the request over within {HOMELESS_S:g} s; try again",
                        retry_after_ms=_RETRY_AFTER_MS,
                    )
                )


def _tell(flight: Flight, event: str, cell_id: str, text: str) -> None:
    """What happened to a flight, in the log and in its trace. `text` has a place for the cell."""
    order = flight.order
    extra = in_trace(order.trace.context if order.trace is not None else None)
    log.info(f"request %s: {text}", order.request_id, cell_id, extra=extra)
    if order.trace is not None:
        order.trace.event(event, cell=cell_id)


def _level_of_failure(failures: int, *, was_connected: bool) -> int:
    """How loud a failed dial is, `failures` in a row after the last session.

    Services of a fleet start in any order: the first dial of a new address may fail. Only one
    that goes on failing is worth a warning, once; a known scheduler's loss is, at once.
    """
    if was_connected:
        return logging.WARNING if failures == 0 else logging.DEBUG
    if failures == 0:
        return logging.INFO
    return logging.WARNING if failures == _PATIENCE else logging.DEBUG


def _gave_nothing(flight: Flight) -> bool:
    """Whether its last carrier delivered no id of it."""
    return flight.num_delivered == flight.num_delivered_before


def _reason(error: BaseException) -> str:
    """One line for the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
