"""Three times more than can be served: answered whole, or refused at once with a time to retry."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.bench.overload import offer
from tests.bench.overload_doors import OUTPUT_TOKENS, PROMPT_TOKENS, GrpcDoor, HttpDoor, Offered
from tests.e2e.stack import Stack, total

NUM_ROWS, NUM_REQUESTS, MAX_QUEUED_TOKENS = 4, 60, 480


def test_every_request_is_answered_or_refused_with_a_time_to_retry(
    tiny_folder: Path, tmp_path: Path
) -> None:
    options = {
        "worker_flags": ("--max-num-seqs", str(NUM_ROWS)),
        "scheduler_flags": ("--max-queue-tokens", str(MAX_QUEUED_TOKENS)),
    }
    with Stack(tmp_path, model=tiny_folder, **options) as stack:
        for door in (partial(GrpcDoor, stack.grpc_address), partial(HttpDoor, stack.url)):
            # All within a moment: rows and queue hold a quarter of them.
            offered = asyncio.run(offer(door, per_s=NUM_REQUESTS / 0.2, seconds=0.2))
            metrics = stack.wait_idle()
            check(offered)
            assert total(metrics, "octavo_queue_tokens") == 0
            assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0


def check(offered: Sequence[Offered]) -> None:
    answered = [one for one in offered if not one.is_refused]
    refused = [one for one in offered if one.is_refused]
    assert [one.num_tokens for one in answered] == [OUTPUT_TOKENS] * len(answered)
    told = [one.retry_after_ms for one in refused if not one.is_late]
    assert all(wait_ms and wait_ms >= 100 for wait_ms in told)
    # Whoever was refused got no token before, and none of the queue's places stayed empty.
    assert all(one.first_s is None for one in refused)
    assert len(answered) >= NUM_ROWS + MAX_QUEUED_TOKENS // PROMPT_TOKENS
    assert len(refused) >= 10
