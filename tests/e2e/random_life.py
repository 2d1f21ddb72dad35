"""A random life of a scheduler over a real engine: arrivals, cancels, preemptions, all mixed.

A life is a cell of random settings, some dozens of requests, and its end, at which nothing may be
held. The engine outlives it, and its sealed blocks are the next life's cache. Everything follows
from the seed, the machine's speed not. Entry points: `RandomLife`, `Totals`.
"""

from dataclasses import dataclass, field

import numpy as np

from octavo.cancel_reason import CancelReason
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2
from tests.e2e.engine_link import EngineDevice, EngineLink
from tests.fakes.simulated_cell import SESSION, Answer, SimulatedCell

# All prompts' tokens are drawn from few streams, so that beginnings are shared.
_NUM_PREFIXES = 6
_LONGEST_PROMPT, _LONGEST_ANSWER = 300, 90
_CUT = ("cancelled", "deadline")


@dataclass(frozen=True)
class Asked:
    """A request as it was submitted."""

    prompt: list[int]
    max_tokens: int
    num_sequences: int
    sampling: common_pb2.SamplingParams
    ending_ids: list[int]
    min_tokens: int
    priority: int = 0
    deadline_ms: int | None = None


@dataclass
class Totals:
    """What happened in all lives."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    cached_tokens: int = 0


class RandomLife:
    """One life; `run` it, then `replay` what it answered."""

    def __init__(self, seed: int, device: EngineDevice, num_requests: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.device = device
        self.num_requests = num_requests
        self.asked: dict[int, Asked] = {}
        settings = SchedulerSettings(
            check_integrity=True,
            enable_prefix_caching=bool(rng.random() < 0.85),
            lease_steps=int(rng.choice([0, 4, 16])),
            plans_queued=int(rng.integers(1, 4)),
            min_chunk_tokens=int(rng.choice([1, 16, 64])),
            max_num_batched_tokens=int(rng.choice([0, 32, 128])),
            max_preemptions=int(rng.integers(1, 4)),
            growth_reserve=float(rng.choice([0.0, 0.0, 1.0])),
            admission_max_wait_s=float(rng.choice([0.01, 30.0])),
        )
        self.sim = _new_cell(device, settings, delay=int(rng.integers(0, 3)))

    def run(self, totals: Totals) -> None:
        """Submit and cancel until all requests came; then nothing may be left of them."""
        sim, rng = self.sim, self.rng
        while len(self.asked) < self.num_requests:
            # They come in bursts: more than there are rows, then none for a while.
            if rng.random() < 0.08:
                for _ in range(int(rng.integers(1, 16))):
                    self._submit()
            if self.asked and rng.random() < 0.06:
                handle = int(rng.choice(list(self.asked)))
                index = None if rng.random() < 0.6 else 0
                sim.cell.cancel(SESSION, handle, index, CancelReason.CLIENT)
            sim.step()
        sim.run(max_steps=100_000)
        sim.assert_all_free()
        assert self.device.runner.num_live_rows == 0
        assert self.device.runner.num_in_flight == 0
        assert not sim.rejected
        self._count(totals)

    def _submit(self) -> None:
        rng = self.rng
        asked = _random_request(rng, self.device.size.vocab_size)
        handle = _submit(self.sim, asked)
        self.asked[handle] = asked

    def _count(self, totals: Totals) -> None:
        totals.requests += len(self.asked)
        totals.steps += self.sim.num_steps
        totals.preemptions += int(self.sim.counter("preemptions_total"))
        totals.cached_tokens += int(self.sim.counter("prefix_cache_hits_total"))
        for handle, asked in self.asked.items():
            for index in range(asked.num_sequences):
                answer = self.sim.answer(handle, index)
                reason = _check(asked, answer)
                totals.finished[reason] = totals.finished.get(reason, 0) + 1
                totals.tokens += len(answer.token_ids)

    def replay(self, num: int) -> tuple[int, int]:
        """Some whole answers again, each alone and computed from nothing: (how many, differing)."""
        whole = [
            (handle, asked)
            for handle, asked in self.asked.items()
            if all(
                self.sim.answer(handle, index).finished.reason.value not in _CUT
                for index in range(asked.num_sequences)
            )
        ]
        picked = self.rng.permutation(len(whole))[:num]
        num_differing = 0
        for handle, asked in (whole[int(place)] for place in picked):
            self.device.forget()
            settings = SchedulerSettings(check_integrity=True, enable_prefix_caching=False)
            sim = _new_cell(self.device, settings)
            again = _submit(sim, asked)
            sim.run()
            num_differing += any(
                sim.answer(again, index).token_ids != self.sim.answer(handle, index).token_ids
                for index in range(asked.num_sequences)
            )
        return len(picked), num_differing


def _new_cell(device: EngineDevice, settings: SchedulerSettings, delay: int = 0) -> SimulatedCell:
    sim = SimulatedCell(device.size, num_workers=0, settings=settings)
    sim.attach(device, EngineLink(device, delay))
    return sim


def _submit(sim: SimulatedCell, asked: Asked) -> int:
    # A copy: the cell's own is completed in place.
    sampling = common_pb2.SamplingParams.FromString(asked.sampling.SerializeToString())
    return sim.submit(
        asked.prompt,
        asked.max_tokens,
        num_sequences=asked.num_sequences,
        ending_ids=asked.ending_ids,
        min_tokens=asked.min_tokens,
        prompt_logprobs=sampling.HasField("prompt_logprobs"),
        priority=asked.priority,
        deadline_ms=asked.deadline_ms,
        sampling=sampling,
    )


def _check(asked: Asked, answer: Answer) -> str:
    """Why the sequence ended; its tokens are as many as that allows, and keep to the rules."""
    assert answer.finished is not None
    reason, ids = answer.finished.reason.value, answer.token_ids
    assert answer.finished.num_tokens == len(ids) <= asked.max_tokens
    if reason == "length":
        assert len(ids) == asked.max_tokens
    elif reason == "stop":
        assert ids[-1] in asked.ending_ids
        assert len(ids) > asked.min_tokens
    else:
        assert reason in _CUT
    early = ids[asked.min_tokens : -1]
    assert not set(early) & set(asked.ending_ids)
    if asked.sampling.HasField("logprobs"):
        assert len(answer.logprobs) == len(ids)
    allowed = np.frombuffer(asked.sampling.allowed_token_ids, "<u4")
    assert not allowed.size or set(ids) <= set(allowed.tolist())
    return reason


def _random_request(rng: np.random.Generator, vocab_size: int) -> Asked:
    prefix = np.random.default_rng(int(rng.integers(_NUM_PREFIXES)))
    shared = prefix.integers(3, vocab_size, _LONGEST_PROMPT)[: int(rng.choice([0, 40, 64, 170]))]
    num_own = int(rng.choice([1, 3, 20, 60, 130])) + int(rng.integers(0, 5))
    prompt = [*shared.tolist(), *rng.integers(3, vocab_size, num_own).tolist()]
    max_tokens = int(rng.choice([1, 2, 16, 40, _LONGEST_ANSWER]))
    ending_ids: list[int] = []
    if rng.random() < 0.3:
        # More than 16 run beside the graphs.
        ending_ids = rng.choice(vocab_size, int(rng.choice([1, 4, 40])), replace=False).tolist()
    min_tokens = int(rng.integers(0, max_tokens)) if rng.random() < 0.3 else 0
    return Asked(
        prompt=prompt,
        max_tokens=max_tokens,
        num_sequences=int(rng.choice([1, 1, 1, 1, 3])),
        sampling=_random_sampling(rng, vocab_size, ending_ids),
        ending_ids=ending_ids,
        min_tokens=min_tokens,
        priority=int(rng.integers(-1, 2)),
        deadline_ms=int(rng.integers(20, 400)) if rng.random() < 0.06 else None,
    )


def _random_sampling(
    rng: np.random.Generator, vocab_size: int, ending_ids: list[int]
) -> common_pb2.SamplingParams:
    """Half are plain, as most of a service's requests; the others ask for anything."""

    def packed(ids: object) -> bytes:
        return np.array(ids, "<u4").tobytes()

    sampling = common_pb2.SamplingParams(
        temperature=0.0 if rng.random() < 0.4 else float(rng.choice([0.2, 0.8, 1.0, 1.5])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.3])),
        top_k=int(rng.choice([0, 0, 1, 40])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        seed=int(rng.integers(0, 2**63)),
        stop_token_ids=packed(ending_ids),
    )
    if rng.random() < 0.5:
        return sampling
    if rng.random() < 0.3:
        sampling.logprobs = int(rng.integers(0, 6))
    if rng.random() < 0.1:
        sampling.prompt_logprobs = int(rng.integers(0, 4))
    if rng.random() < 0.3:
        sampling.presence_penalty = float(rng.choice([-1.0, 0.5]))
        sampling.frequency_penalty = float(rng.choice([0.0, 0.7]))
        sampling.repetition_penalty = float(rng.choice([1.0, 1.3]))
    if rng.random() < 0.2:
        ids = rng.choice(vocab_size, 10, replace=False)
        sampling.logit_bias_ids = packed(ids)
        sampling.logit_bias_values = rng.uniform(-5, 5, 10).astype("<f4").tobytes()
    if rng.random() < 0.2:
        words = [rng.integers(0, vocab_size, int(size)) for size in rng.choice([1, 2, 4], 5)]
        sampling.bad_words.extend(map(packed, words))
    elif rng.random() < 0.1:
        # None of them is barred otherwise: something can always be drawn.
        others = np.setdiff1d(np.arange(vocab_size), ending_ids)
        sampling.allowed_token_ids = packed(rng.choice(others, 20, replace=False))
    return sampling
