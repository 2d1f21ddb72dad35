"""Leadership, sessions and replay under every order of events that hypothesis can think of.

Messages late, lost with their stream, doubled or swapped on a spoiled one; streams that break
for one end long before the other; attaches that come late or twice; clocks that jump; processes
that pause, die, or live on after they were replaced. Whatever happens: never two leaders' steps
in one epoch, never a token twice or missing, never a result credited to another sequence; and
once the world is whole again, every request ends.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.cancel_reason import CancelReason
from tests.fakes.replay_processes import SIZE, Stream, Worker
from tests.fakes.replay_world import World
from tests.fakes.simulated_cell import prompt_of

NUM_ROUTERS, NUM_SCHEDULERS, NUM_WORKERS = 2, 2, 2
ROUTERS = st.integers(0, NUM_ROUTERS - 1)
SCHEDULERS = st.integers(0, NUM_SCHEDULERS - 1)
WORKERS = st.integers(0, NUM_WORKERS - 1)
ANY = st.integers(0, 1000)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 100),
            # Prompts of a family share their beginning, and so blocks.
            "family": st.integers(0, 2),
            "max_tokens": st.integers(8, 60),
            "num_sequences": st.integers(1, 2),
            "seed": st.none() | st.integers(1, 9),
        }
    ),
    min_size=2,
    max_size=4,
)


class ReplayMachine(RuleBasedStateMachine):
    """Rules pick processes and streams by number; one that doesn't fit does nothing."""

    @initialize(requests=REQUESTS)
    def start(self, requests: list[dict[str, Any]]) -> None:
        self.world = World(NUM_ROUTERS, NUM_SCHEDULERS, NUM_WORKERS)
        self.attached: list[tuple[Worker, Stream]] = []
        for number, worker in enumerate(self.world.workers):
            stream = self.world.attach(self.world.schedulers[number % NUM_SCHEDULERS], worker, 0)
            assert stream is not None
            assert self.world.open(worker, stream)
        for router in range(NUM_ROUTERS):
            self.submit(router, router % NUM_SCHEDULERS, requests)

    # ---- work

    @rule(router=ROUTERS, scheduler=SCHEDULERS, requests=REQUESTS)
    def submit(self, router: int, scheduler: int, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            prompt = prompt_of(request["length"], request["family"])
            how = {key: request[key] for key in ("max_tokens", "num_sequences", "seed")}
            self.world.submit(
                self.world.routers[router], self.world.schedulers[scheduler], prompt, **how
            )

    @rule(turns=st.integers(1, 12))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @rule(router=ROUTERS, number=ANY)
    def leave(self, router: int, number: int) -> None:
        flights = [f for f in self.world.routers[router].flights if not f.is_over]
        if flights:
            flights[number % len(flights)].abandon(CancelReason.CLIENT)

    # ---- one message at a time

    @rule(what=st.sampled_from(["plan", "step", "result", "frame"]), number=ANY)
    def move_one(self, what: str, number: int) -> None:
        """One message, or one step, while everything else stands still."""
        world = self.world
        plans = [(worker, stream) for worker, stream in world.streams if stream.plans]
        results = [stream for _, stream in world.streams if stream.results]
        sessions = [s for router in world.routers for s in router.sessions.values()]
        if what == "plan" and plans:
            worker, stream = plans[number % len(plans)]
            worker.receive(stream)
        elif what == "step":
            world.workers[number % NUM_WORKERS].step()
        elif what == "result" and results:
            stream = results[number % len(results)]
            stream.owner.read(stream)
        elif what == "frame" and sessions:
            session = sessions[number % len(sessions)]
            if number % 2:
                session.flush()
            world.call(session.deliver)

    @rule(
        number=ANY,
        how=st.sampled_from(["lose", "double", "swap"]),
        what=st.sampled_from(["plans", "results", "frames"]),
    )
    def spoil(self, number: int, how: str, what: str) -> None:
        """What no TCP stream does: a message is lost, doubled, or overtaken."""
        ends: list[Any] = [stream for _, stream in self.world.streams]
        if what == "frames":
            self.world.turn(with_frames=False)
            self.world.turn(with_frames=False)
            ends = [s for router in self.world.routers for s in router.sessions.values()]
        waiting = [wire for wire in (getattr(end, what) for end in ends) if len(wire) > 1]
        if not waiting:
            return
        wire = waiting[number % len(waiting)]
        if how == "lose":
            del wire[0]
        elif how == "double":
            wire.insert(1, wire[0])
        else:
            wire[0], wire[1] = wire[1], wire[0]

    # ---- failures

    @rule(worker=WORKERS)
    def break_at_worker(self, worker: int) -> None:
        self.world.workers[worker].close()

    @rule(number=ANY)
    def break_at_scheduler(self, number: int) -> None:
        held = [(s, stream) for s in self.world.everybody for stream in s.members]
        if held:
            scheduler, stream = held[number % len(held)]
            scheduler.lose(stream)

    @rule(worker=WORKERS)
    def kill_worker(self, worker: int) -> None:
        self.world.workers[worker].boot()

    @rule(scheduler=SCHEDULERS)
    def replace_scheduler(self, scheduler: int) -> None:
        """Killed, or paused and taken for dead: the old process may act for ever."""
        self.world.replace(self.world.schedulers[scheduler])

    @rule(router=ROUTERS, number=ANY, both=st.booleans(), turns=st.integers(0, 6))
    def break_session(self, router: int, number: int, both: bool, turns: int) -> None:
        """The router hears that a session is over; the scheduler may hear it, too."""
        self.run(turns)
        sessions = list(self.world.routers[router].sessions.values())
        if sessions:
            session = sessions[number % len(sessions)]
            if both:
                session.close_at_scheduler()
            self.world.routers[router].lose(session.scheduler)

    @rule(router=ROUTERS, scheduler=SCHEDULERS)
    def submit_again(self, router: int, scheduler: int) -> None:
        homeless, self.world.routers[router].homeless = self.world.routers[router].homeless, []
        for flight in homeless:
            if not flight.is_over:
                place = self.world.routers[router].place
                self.world.call(place, flight, self.world.schedulers[scheduler])

    @rule(worker=WORKERS, seconds=st.sampled_from([0.5, 2.9, 3.1, 100.0]))
    def let_time_pass_at_worker(self, worker: int, seconds: float) -> None:
        self.world.workers[worker].clock.advance(seconds)

    @rule(number=ANY, seconds=st.sampled_from([0.5, 6.0, 100.0]))
    def let_time_pass_at_scheduler(self, number: int, seconds: float) -> None:
        everybody = self.world.everybody
        everybody[number % len(everybody)].clock.advance(seconds)

    @rule(number=ANY, worker=WORKERS, age=st.integers(0, 1), times=st.integers(1, 2))
    def attach(self, number: int, worker: int, age: int, times: int) -> None:
        """Any scheduler asks to lead, perhaps by an old epoch, perhaps twice."""
        everybody = self.world.everybody
        target = self.world.workers[worker]
        epoch = max(target.leadership.epoch - age, 0)
        for _ in range(times):
            stream = self.world.attach(everybody[number % len(everybody)], target, epoch)
            if stream is not None:
                self.attached.append((target, stream))

    @rule(number=ANY)
    def open_stream(self, number: int) -> None:
        """Of any attach so far, also one that was superseded long ago."""
        if self.attached:
            self.world.open(*self.attached[number % len(self.attached)])

    # ---- what holds

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self._end()
            finally:
                self.world.close()

    def _end(self) -> None:
        """The world is made whole again; then every request ends, and nothing is held."""
        self.world.heal()
        self.world.check()
        for router in self.world.routers:
            for flight in router.flights:
                assert flight.is_over
                # One that was begun on worker after worker that died is given up, and said so.
                error = flight.inbox.error
                assert error is None or "it is not tried again" in error.message
        for scheduler in self.world.schedulers:
            for session in list(scheduler.sessions):
                session.close_at_scheduler()
        while self.world.turn():
            pass
        for scheduler in self.world.schedulers:
            assert not scheduler.cell.requests
            assert scheduler.cell.members.num_used_blocks == 0


assert SIZE.num_blocks < 4 * 2 * (160 // SIZE.block_size), "requests must compete for blocks"

ReplayMachine.TestCase.settings = settings(
    max_examples=40,
    # The same examples everywhere; other seeds are for looking.
    derandomize=True,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestReplay = ReplayMachine.TestCase
