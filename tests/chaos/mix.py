"""Disturb a fleet under load, round after round, and hold every answer to the undisturbed ones.

    mix = Mix(fleet, calls)
    outcome = mix.run([[FAULTS["worker killed"]], [FAULTS["redis full"], FAULTS["router killed"]]])

In a round every stream is under way when the faults strike, and has ended before they are healed;
its client has the next one under way by then. A scheduler, or a way to one, is struck when the
fleet is settled; the rest also while schedulers still share the workers anew. Afterwards: each
stream ended once and well, with the ids of the undisturbed run, none missing, none twice; no block
or row is held; Redis saw no more commands than time explains. Pauses are told, not judged.
Entry points: `Mix`, `mixed_rounds`.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.chaos.answers import check_answer
from tests.chaos.attempts import Attempt
from tests.chaos.faults import FAULTS, Fault, Struck
from tests.chaos.fleet import Fleet
from tests.chaos.pauses import Pauses
from tests.chaos.traffic import Call, Client, Door, Progress

_IDLE_S = 1.0
# Of commands at rest, in a run: records change more often, and come-backs cost some.
_COMMANDS_FACTOR, _COMMANDS_EXTRA = 3, 500


class Round(NamedTuple):
    """Faults that were there together, from the first's strike until they were healed."""

    faults: Sequence[Fault]
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        return " + ".join(fault.name for fault in self.faults) or "nothing"


@dataclass(frozen=True)
class Outcome:
    """A run that was right: what it took."""

    rounds: list[Round]
    clients: list[Client]
    duration_s: float
    num_commands: int

    @property
    def num_faults(self) -> int:
        return sum(len(one.faults) for one in self.rounds)

    @property
    def num_answers(self) -> int:
        return sum(len(client.answers) for client in self.clients)

    @property
    def num_tokens(self) -> int:
        return sum(a.completion_tokens for client in self.clients for a in client.answers)

    @property
    def num_retries(self) -> int:
        """Of calls whose router broke the connection or turned them away."""
        return sum(len(broken) for client in self.clients for broken in client.broken)

    def __str__(self) -> str:
        return (
            f"{self.num_faults} faults, {self.num_answers} answers in {self.duration_s:.1f} s, "
            f"{self.num_retries} retries, {self.num_commands} Redis commands"
        )

    def pauses(self) -> Pauses:
        """Of each stream, the longest pause in each round."""
        pauses = Pauses()
        streams = [client for client in self.clients if client.call.door is not Door.WHOLE]
        for one in self.rounds:
            pauses.add(one.name, [client.pause_s(one.start_s, one.end_s) for client in streams])
        return pauses


class Mix:
    """Runs on an idle fleet, and leaves one that serves; the first time it is settled."""

    def __init__(self, fleet: Fleet, calls: Sequence[Call]) -> None:
        self.fleet = fleet
        self.calls = calls
        self.undisturbed: list[Attempt] = []
        for client in fleet.traffic.run(calls):
            (answer,) = client.answers
            check_answer(fleet.model, client.call, answer, answer)
            self.undisturbed.append(answer)
        fleet.wait_idle()
        before = self._num_commands()
        time.sleep(_IDLE_S)
        self._commands_per_s = (self._num_commands() - before) / _IDLE_S

    def run(self, rounds: Sequence[Sequence[Fault]]) -> Outcome:
        """Fails when anything is lost."""
        done: list[Round] = []
        self._wait_ready_for(rounds[0])
        # Counted anew whenever Redis starts anew.
        self.fleet.redis.command("CONFIG", "RESETSTAT")

        def script(progress: Progress) -> None:
            for number, faults in enumerate(rounds, 1):
                progress.wait_begun()
                start_s = time.monotonic()
                try:
                    for fault in faults:
                        fault.strike(self.fleet)
                    progress.wait_answered()
                finally:
                    self.fleet.heal()
                if number < len(rounds):
                    self._wait_ready_for(rounds[number])
                done.append(Round(faults, start_s, time.monotonic()))

        started_s = time.monotonic()
        clients = self.fleet.traffic.run(self.calls, script)
        outcome = Outcome(done, clients, time.monotonic() - started_s, self._num_commands())
        self.fleet.wait_served()
        self._check(outcome)
        return outcome

    def _wait_ready_for(self, faults: Sequence[Fault]) -> None:
        self.fleet.wait_served()
        if any(fault.struck in (Struck.SCHEDULER, Struck.LINK) for fault in faults):
            self.fleet.wait_settled()

    def _check(self, outcome: Outcome) -> None:
        may_break = {fault.struck for one in outcome.rounds for fault in one.faults}
        for client, before in zip(outcome.clients, self.undisturbed, strict=True):
            for answer, broken in zip(client.answers, client.broken, strict=True):
                assert not answer.error, f"{answer.error}\n{self.fleet.logs()}"
                check_answer(self.fleet.model, client.call, before, answer, broken)
                assert not broken or Struck.ROUTER in may_break, "a connection broke"
        most = _COMMANDS_FACTOR * self._commands_per_s * outcome.duration_s + _COMMANDS_EXTRA
        assert outcome.num_commands <= most, "Redis is asked in steps"
        self.fleet.wait_idle()
        assert not self.fleet.num_tracebacks(), self.fleet.logs()

    def _num_commands(self) -> int:
        return sum(self.fleet.redis.call_counts().values())


def mixed_rounds(seed: int, num_faults: int) -> list[list[Fault]]:
    """Rounds of faults of every kind in random order, so many in all; Redis fails beside others."""
    rng = random.Random(seed)
    redis = _endless([f for f in FAULTS.values() if f.struck is Struck.REDIS], rng)
    others = _endless([f for f in FAULTS.values() if f.struck is not Struck.REDIS], rng)
    rounds: list[list[Fault]] = []
    while num_faults:
        faults = [next(others)]
        if num_faults > 1 and rng.random() < 0.5:
            faults.insert(0, next(redis))
        num_faults -= len(faults)
        rounds.append(faults)
    return rounds


def _endless(faults: Sequence[Fault], rng: random.Random) -> Iterator[Fault]:
    """All of them in random order, again and again."""
    while True:
        yield from rng.sample(faults, len(faults))
