"""Everything at once at random: every text stays right, and nothing leaks.

Small pools, few rows, late results, leases, shared prefixes, siblings, priorities, cancels,
deadlines, prompt reports, workers that die and come back with their cache: whatever happens, a
sequence's tokens are a prefix of the undisturbed text, whole unless somebody cut it, each ends
once, and a prompt is reported once, whole before its first token.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from octavo.cancel_reason import CancelReason
from octavo.settings import SchedulerSettings
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import Resume
from tests.fakes.fake_device import FakeDevice, FakeSize, expected_tokens, salt_of
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of, sampling_of

NUM_REQUESTS = 60


@dataclass
class Expected:
    """A request and its undisturbed texts; `delivered` of each before it was submitted here."""

    texts: list[list[int]]
    delivered: int
    # (position, log-probability) of its prompt, if it asks for them.
    report: list[tuple[int, float]]


class Fuzz:
    """One random life of a cell."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        block_size = int(rng.choice([4, 16]))
        self.sizes = [
            FakeSize(
                num_blocks=int(rng.integers(10, 60)) * 16 // block_size,
                max_num_seqs=int(rng.integers(1, 12)),
                max_num_batched_tokens=int(rng.integers(8, 200)),
                block_size=block_size,
                max_model_len=1024,
            )
            for _ in range(int(rng.integers(1, 4)))
        ]
        settings = SchedulerSettings(
            check_integrity=True,
            lease_steps=int(rng.choice([0, 4, 16])),
            plans_queued=int(rng.integers(1, 4)),
            min_chunk_tokens=int(rng.choice([1, 8, 64])),
            max_preemptions=int(rng.integers(0, 4)),
            max_moves=1000,
            admission_max_wait_s=float(rng.choice([0.01, 30.0])),
            growth_reserve=float(rng.choice([0.0, 0.5, 1.0])),
            affinity_budget_ms=float(rng.choice([0.0, 2000.0])),
        )
        self.sim = SimulatedCell(self.sizes[0], num_workers=0, settings=settings)
        for size in self.sizes:
            self.attach(FakeDevice(size))
        self.dead: list[FakeDevice] = []
        self.expected: dict[int, Expected] = {}
        self.cut: set[int] = set()

    def attach(self, device: FakeDevice) -> None:
        self.sim.links[self.sim.attach(device)].delay = int(self.rng.integers(0, 4))

    def submit(self) -> None:
        rng = self.rng
        # A third share one long prefix, so that hits, waits and evictions happen.
        prefix = prompt_of(70, seed=7) if rng.random() < 0.3 else []
        prompt = prefix + prompt_of(int(rng.integers(1, 60)), seed=int(rng.integers(0, 20)))
        max_tokens = int(rng.integers(1, 50))
        num_sequences = int(rng.choice([1, 1, 1, 3]))
        seed = None if num_sequences == 1 else int(rng.integers(0, 1000))
        salts = [salt_of(sampling_of(seed), index) for index in range(num_sequences)]
        first = expected_tokens(prompt, max_tokens, salt=salts[0])
        ending_ids = [first[int(rng.integers(0, max_tokens))]] if rng.random() < 0.3 else []
        texts = [
            expected_tokens(prompt, max_tokens, salt=salt, ending_ids=ending_ids) for salt in salts
        ]
        delivered = 0
        if rng.random() < 0.15:
            delivered = int(rng.integers(0, min(map(len, texts))))
        resumes = [
            Resume(index, np.array(text[:delivered], np.uint32).tobytes(), False)
            for index, text in enumerate(texts)
            if delivered
        ]
        wants_report = rng.random() < 0.2
        handle = self.sim.submit(
            prompt,
            max_tokens,
            num_sequences=num_sequences,
            seed=seed,
            ending_ids=ending_ids,
            priority=int(rng.integers(-1, 2)),
            deadline_ms=int(rng.integers(5, 400)) if rng.random() < 0.1 else None,
            resumes=resumes,
            prompt_logprobs=wants_report,
            presence_penalty=float(rng.choice([0.0, 0.5])),
        )
        values = np.array([-token / 1e6 for token in prompt[1:]], np.float32).tolist()
        report = list(enumerate(values, 1)) if wants_report and not delivered else []
        self.expected[handle] = Expected(texts, delivered, report)

    def disturb(self) -> None:
        rng, sim = self.rng, self.sim
        if rng.random() < 0.05 and self.expected:
            handle = int(rng.choice(list(self.expected)))
            self.cut.add(handle)
            index = None if rng.random() < 0.5 else 0
            sim.cell.cancel(SESSION, handle, index, CancelReason.CLIENT)
        if rng.random() < 0.02 and len(sim.links) > 1:
            member = list(sim.links)[int(rng.integers(0, len(sim.links)))]
            self.dead.append(sim.kill(member, rng.choice(list(Loss))))  # type: ignore[arg-type]
        if rng.random() < 0.1 and self.dead:
            self.attach(self.dead.pop())

    def check(self) -> None:
        for handle, expected in self.expected.items():
            if handle in self.sim.rejected:
                continue
            report = self.sim.prompts.get(handle, [])
            assert report == expected.report[: len(report)]
            if self.sim.answer(handle, 0).token_ids:
                assert report == expected.report
            for index, text in enumerate(expected.texts):
                answer = self.sim.answer(handle, index)
                assert answer.finished is not None
                got = text[: expected.delivered] + answer.token_ids
                assert got == text[: len(got)]
                assert answer.finished.num_tokens == len(got)
                if answer.finished.reason.value in ("stop", "length"):
                    assert got == text
                else:
                    assert answer.finished.reason.value in ("cancelled", "deadline")
                    assert answer.finished.reason.value == "deadline" or handle in self.cut


@pytest.mark.parametrize("seed", range(40))
def test_random_lives(seed: int) -> None:
    fuzz = Fuzz(seed)
    sim = fuzz.sim
    while len(fuzz.expected) < NUM_REQUESTS:
        for _ in range(int(fuzz.rng.integers(0, 3))):
            fuzz.submit()
        fuzz.disturb()
        sim.step()
    for device in fuzz.dead:
        fuzz.attach(device)
    sim.run(max_steps=20_000)
    fuzz.check()
    assert len(sim.rejected) < NUM_REQUESTS / 2
    sim.assert_all_free()
