"""Routers, schedulers and workers in one process, with every message in the test's hands.

What moves messages is this file: an attach may come late or twice, a process may be replaced
while the old one still runs (a zombie), and each process's clock is the test's. Inside a stream
order holds and nothing is lost, as TCP has it, unless a test spoils it.

Entry point: `World`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from octavo.errors import FailedPreconditionError
from octavo_router.flights import Flight, Inbox, PromptOrder, ResolvedSampling
from octavo_worker.leadership import Seat
from tests.fakes.fake_device import expected_tokens, salt_of
from tests.fakes.replay_processes import SERVED, SILENCE_S, SIZE, Router, Scheduler, Stream, Worker
from tests.fakes.simulated_cell import sampling_of

ResultT = TypeVar("ResultT")


class World:
    """Everything, and the rules that always hold (`check`)."""

    def __init__(self, num_routers: int, num_schedulers: int, num_workers: int) -> None:
        self._runner = asyncio.Runner()
        self.routers = [Router() for _ in range(num_routers)]
        self.schedulers = [Scheduler(f"s{i}") for i in range(num_schedulers)]
        # Replaced, and not aware of it.
        self.zombies: list[Scheduler] = []
        self.workers = [Worker(f"w{i}") for i in range(num_workers)]
        self.streams: list[tuple[Worker, Stream]] = []
        self._expected: dict[Flight, list[list[int]]] = {}

    def close(self) -> None:
        self._runner.close()

    def call(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call what wants a running event loop."""

        async def run() -> ResultT:
            return function(*arguments)

        coroutine: Coroutine[Any, Any, ResultT] = run()
        return self._runner.run(coroutine)

    @property
    def everybody(self) -> list[Scheduler]:
        return [*self.schedulers, *self.zombies]

    # ---- what happens

    def submit(self, router: Router, scheduler: Scheduler, prompt: list[int], **how: Any) -> Flight:
        """`how`: max_tokens, num_sequences, seed (None = greedy)."""
        seed = how.get("seed")
        ids = np.array(prompt, np.uint32)
        sampling = ResolvedSampling(
            temperature=0.0 if seed is None else 1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed or 0,
            max_tokens=how["max_tokens"],
            stop_token_ids=(),
            logprobs=None,
        )
        order = PromptOrder(
            request_id="r",
            token_ids=ids,
            model=SERVED,
            hashes=SERVED.hash_prompt(ids, None),
            hash_salt=None,
            sampling=sampling,
            num_sequences=how["num_sequences"],
            tenant="",
            deadline=None,
        )
        flight = Flight(order, Inbox())
        self._expected[flight] = [expected(flight, index) for index in range(order.num_sequences)]
        router.flights.append(flight)
        self.call(router.place, flight, scheduler)
        return flight

    def attach(self, scheduler: Scheduler, worker: Worker, expected_epoch: int) -> Stream | None:
        """Ask to lead; None if the worker refuses."""
        try:
            stream = worker.attach(scheduler, expected_epoch)
        except FailedPreconditionError:
            return None
        # The worker lets its old stream go; who led by it hears of that later.
        self.streams.append((worker, stream))
        return stream

    def open(self, worker: Worker, stream: Stream) -> bool:
        """The Steps stream of an attach begins; False if it is refused."""
        scheduler = stream.owner
        if stream in scheduler.members:
            return False
        try:
            worker.open(stream)
        except FailedPreconditionError:
            return False
        old = scheduler.leads.get(worker.name)
        if old is not None:
            scheduler.lose(old)
        scheduler.lead(worker, stream)
        return True

    def replace(self, scheduler: Scheduler) -> Scheduler:
        """A process of the same name starts; the old one may still run."""
        place = self.schedulers.index(scheduler)
        self.zombies.append(scheduler)
        self.schedulers[place] = Scheduler(scheduler.name)
        return self.schedulers[place]

    def turn(self, *, with_frames: bool = True) -> bool:
        """Everything that waits moves on by one; whether anything did.

        Without frames these wait on their sessions, as full as a turn makes them.
        """
        moved = False
        for router in self.routers:
            for stream in list(router.sessions.values()):
                moved |= bool(stream.end._outbox)
                self.call(stream.take_in)
        for scheduler in self.everybody:
            scheduler.cell.pump()
        for worker, stream in list(self.streams):
            if stream.plans:
                moved = True
                worker.receive(stream)
        for worker in self.workers:
            moved |= worker.step()
        for _, stream in list(self.streams):
            if stream.results:
                moved = True
                stream.owner.read(stream)
        for router in self.routers:
            for stream in list(router.sessions.values()):
                stream.flush()
                while with_frames and stream.frames and stream in router.sessions.values():
                    self.call(stream.deliver)
        self.check()
        return moved

    # ---- what always holds

    def check(self) -> None:
        """One leader an epoch; every answer a prefix of the undisturbed one."""
        for worker in self.workers:
            for epoch, leaders in worker.led_by.items():
                assert len(leaders) == 1, f"two leaders' steps ran in {epoch}"
        for router in self.routers:
            for flight in router.flights:
                for sequence, whole in zip(flight.sequences, self._expected[flight], strict=True):
                    received = sequence.token_ids
                    assert received == whole[: len(received)]
                    # Of one whose client left the last tokens may never be sent.
                    is_whole = received == whole or flight.is_abandoned
                    assert sequence.finish is None or is_whole

    # ---- how it ends

    def heal(self) -> None:
        """Every breach is noticed, every worker led, every flight carried; then run to the end."""
        for zombie in self.zombies:
            self._retire(zombie)
        self.zombies.clear()
        for _ in range(4000):
            # A spoiled stream shows only when it is read: then it has to be led again, too.
            self._let_go()
            for number, worker in enumerate(self.workers):
                self._lead_again(worker, self.schedulers[number % len(self.schedulers)])
            places = [scheduler for scheduler in self.schedulers if scheduler.members]
            for scheduler in self.schedulers:
                if scheduler not in places:
                    self._empty(scheduler)
            for router in self.routers:
                homeless, router.homeless = router.homeless, []
                for number, flight in enumerate(f for f in homeless if not f.is_over):
                    place = places[number % len(places)]
                    self.call(router.place, flight, place)
            if not self.turn() and not any(router.homeless for router in self.routers):
                return
        raise AssertionError("it never ended")

    def _let_go(self) -> None:
        """Who believes to lead by a stream that its worker has dropped hears of its end."""
        live = {worker.stream for worker in self.workers}
        for scheduler in self.schedulers:
            for stream in [held for held in scheduler.members if held not in live]:
                scheduler.lose(stream)

    def _retire(self, zombie: Scheduler) -> None:
        self._empty(zombie)
        for stream in list(zombie.members):
            zombie.lose(stream)
        assert not zombie.cell.requests
        for worker in self.workers:
            if worker.stream is not None and worker.stream.owner is zombie:
                worker.close()

    def _empty(self, scheduler: Scheduler) -> None:
        """Who leads nobody sends all requests away."""
        for router in self.routers:
            router.lose(scheduler)
        for session in list(scheduler.sessions):
            session.close_at_scheduler()

    def _lead_again(self, worker: Worker, scheduler: Scheduler) -> None:
        """Unless both ends agree on who leads, everybody lets go and one attaches."""
        stream = worker.stream
        seat = worker.leadership.seat
        if stream is not None and seat is Seat.LIVE and stream in stream.owner.members:
            return
        worker.close()
        worker.clock.advance(2 * SILENCE_S)
        for other in self.schedulers:
            held = other.leads.get(worker.name)
            if held is not None:
                other.lose(held)
        attached = self.attach(scheduler, worker, worker.leadership.epoch)
        assert attached is not None, "a worker that nobody leads can be led"
        assert self.open(worker, attached)


def expected(flight: Flight, index: int) -> list[int]:
    """The undisturbed answer of a flight's sequence."""
    sampling = flight.order.sampling
    seed = sampling.seed if sampling.temperature else None
    return expected_tokens(
        flight.order.token_ids.tolist(),
        sampling.max_tokens,
        vocab_size=SIZE.vocab_size,
        salt=salt_of(sampling_of(seed), index),
    )
