"""What arrives at a simulated fleet: recorded traces, chats that answer one another, floods.

A request is lengths and block hashes. `follows` makes it a turn of a conversation: it arrives
`think_s` after the request that it follows has ended. Everything random is seeded. Must not
know: cells, routers. Entry points: `recorded`, `chats`, `poisson`, `steady`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from random import Random

import numpy as np

from octavo.blocks import BlockHashRoot, chain
from octavo.cli.serve_trace import TRACE_BLOCK_TOKENS, TraceEntry, load_trace

TRACES = Path(__file__).parents[1] / "traces"
# Arrivals of the conversation trace were rounded down to this many seconds.
_LUMP_S = 3.0
_ROOT = BlockHashRoot("simulated", "1", 16, "none").digest()
CHAT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `answer_ids`: what the device draws, packed u32; empty = zeros.

    `arrival_s` counts from the start; with `follows` (an index), `think_s` after that one's end.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: tuple[bytes, ...]
    prompt_ids: bytes = b""
    answer_ids: bytes = b""
    root_hash: bytes = bytes(16)
    tenant: str = ""
    priority: int = 0
    follows: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival (turns after what they follow), and their block size."""

    name: str
    block_size: int
    requests: tuple[SimRequest, ...]


@cache
def _entries(name: str) -> tuple[TraceEntry, ...]:
    return tuple(load_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz"))


def recorded(name: str, *, speed: float, share: float = 1.0, seed: int = 0) -> Workload:
    """The first `share` of a recorded trace ("conversation", "synthetic"), `speed` times as fast.

    The conversation trace's times are lumps of 3 s: each is spread over its 3 s, order kept.
    """
    entries = _entries(name)
    entries = entries[: max(1, round(share * len(entries)))]
    if name == "conversation":
        entries = _spread(entries, Random(seed))
    requests = tuple(
        SimRequest(
            entry.arrival_s / speed,
            entry.num_prompt_tokens,
            entry.num_output_tokens,
            tuple(map(_hash_of, entry.block_ids[: entry.num_prompt_tokens // TRACE_BLOCK_TOKENS])),
        )
        for entry in entries
    )
    return Workload(name, TRACE_BLOCK_TOKENS, requests)


def chats(
    *, num_chats: int = 240, num_turns: int = 6, chats_per_s: float = 2.5, seed: int = 0
) -> Workload:
    """Short conversations: first prompts of 60 to 1,000 tokens behind one of 8 system prompts.

    Each turn's prompt is the one before, its answer, and 20 to 120 tokens more.
    """
    rng = Random(seed)
    draw = np.random.default_rng(seed)
    system = [draw.integers(0, 32_000, rng.randint(40, 400), np.uint32) for _ in range(8)]
    requests: list[SimRequest] = []
    start_s = 0.0
    for _ in range(num_chats):
        start_s += rng.expovariate(chats_per_s)
        first = round(60 * (1000 / 60) ** rng.random())
        shared = rng.choice(system)[: max(0, first - 20)]
        own = draw.integers(0, 32_000, first - shared.size, np.uint32)
        prompt = np.concatenate([shared, own])
        for turn in range(num_turns):
            answer = draw.integers(0, 32_000, rng.randint(20, 120), np.uint32)
            requests.append(
                SimRequest(
                    start_s,
                    prompt.size,
                    answer.size,
                    tuple(chain(_ROOT, prompt, CHAT_BLOCK_TOKENS)),
                    prompt.tobytes(),
                    answer.tobytes(),
                    _ROOT,
                    follows=len(requests) - 1 if turn else None,
                    think_s=rng.uniform(2.0, 12.0) if turn else 0.0,
                )
            )
            more = draw.integers(0, 32_000, rng.randint(20, 120), np.uint32)
            prompt = np.concatenate([prompt, answer, more])
    return Workload("chats", CHAT_BLOCK_TOKENS, tuple(requests))


def steady(
    tenant: str,
    *,
    per_s: float,
    duration_s: float,
    num_prompt_tokens: int,
    num_output_tokens: int,
    start_s: float = 0.0,
    seed: int = 0,
) -> list[SimRequest]:
    """Cold prompts of one tenant, a Poisson process given its count; lengths vary by a half."""
    rng = Random(seed)
    times_s = sorted(start_s + rng.uniform(0, duration_s) for _ in range(round(per_s * duration_s)))
    requests: list[SimRequest] = []
    for now in times_s:
        num_prompt = rng.randint(num_prompt_tokens // 2, num_prompt_tokens * 3 // 2)
        num_output = rng.randint(num_output_tokens // 2, num_output_tokens * 3 // 2)
        hashes = tuple(
            _digest(f"{tenant} {seed} {len(requests)} {i}")
            for i in range(num_prompt // TRACE_BLOCK_TOKENS)
        )
        requests.append(SimRequest(now, num_prompt, num_output, hashes, tenant=tenant))
    return requests


def poisson(*, per_s: float, duration_s: float, seed: int = 0) -> Workload:
    """Cold prompts and answers as long as Azure's conversations, at random times."""
    entries = load_trace(TRACES / "azure_conversation_trace.csv.gz")
    rng = Random(seed)
    requests: list[SimRequest] = []
    now = 0.0
    while (now := now + rng.expovariate(per_s)) < duration_s:
        entry = rng.choice(entries)
        requests.append(SimRequest(now, entry.num_prompt_tokens, entry.num_output_tokens, ()))
    return Workload("azure", CHAT_BLOCK_TOKENS, tuple(requests))


def together(name: str, *parts: Sequence[SimRequest]) -> Workload:
    """Several tenants' requests as one workload (none follows another)."""
    requests = sorted((r for part in parts for r in part), key=lambda r: r.arrival_s)
    return Workload(name, TRACE_BLOCK_TOKENS, tuple(requests))


def _spread(entries: Sequence[TraceEntry], rng: Random) -> tuple[TraceEntry, ...]:
    lumps: dict[float, list[TraceEntry]] = {}
    for entry in entries:
        lumps.setdefault(entry.arrival_s, []).append(entry)
    return tuple(
        replace(entry, arrival_s=start_s + offset_s)
        for start_s, lump in lumps.items()
        for entry, offset_s in zip(lump, sorted(rng.uniform(0, _LUMP_S) for _ in lump), strict=True)
    )


@cache
def _hash_of(block_id: int) -> bytes:
    return _digest(str(block_id))


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
