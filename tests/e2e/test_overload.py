"""Three times more than can be served: answered whole, or refused at once with a time to retry."""

import asyncio
from pathlib import Path

import grpc

from tests.bench.overload import message, offer
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
        # All within a moment: rows and queue hold a quarter of them.
        offered = asyncio.run(offer(stack.grpc_address, per_s=NUM_REQUESTS / 0.2, seconds=0.2))
        metrics = stack.wait_idle()
        router = stack.router_metrics()
    answered = [one for one in offered if one.status is None]
    refused = [one for one in offered if one.status is not None]
    wanted = message(0).max_tokens
    assert [one.num_tokens for one in answered] == [wanted] * len(answered)
    assert {one.status for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(one.retry_after_ms and one.retry_after_ms >= 100 for one in refused)
    # Whoever was refused got no token before, and none of the queue's places stayed empty.
    assert all(one.first_s is None for one in refused)
    assert len(answered) >= NUM_ROWS + MAX_QUEUED_TOKENS // 48
    assert len(refused) >= 10
    assert total(metrics, "octavo_queue_tokens") == 0
    assert total(router, "octavo_requests_in_flight") == 0
