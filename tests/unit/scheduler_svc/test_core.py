"""The cell with fake devices whose texts depend on every KV slot they read."""

import pytest

from tests.fakes.fake_device import FakeSize, expected_tokens, salt_of
from tests.fakes.simulated_cell import SimulatedCell, prompt_of, sampling_of
from tests.unit.scheduler_svc.core_cases import crowd, finish_reason, finished, settings

BLOCK = 16


def test_one_request_alone() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(37)
    handle = sim.submit(prompt, 50)
    sim.run()
    assert sim.answer(handle).token_ids == expected_tokens(prompt, 50)
    assert finish_reason(sim, handle) == "length"
    assert finished(sim, handle).num_tokens == 50
    sim.assert_all_free()


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("lease_steps", [0, 8])
def test_crowd(delay: int, lease_steps: int) -> None:
    sim = SimulatedCell(settings=settings(lease_steps=lease_steps))
    for link in sim.links.values():
        link.delay = delay
    prompts = crowd(40)
    handles = [sim.submit(prompt, 20 + i) for i, prompt in enumerate(prompts)]
    sim.run()
    for i, handle in enumerate(handles):
        assert sim.answer(handle).token_ids == expected_tokens(prompts[i], 20 + i)
    sim.assert_all_free()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 80])
@pytest.mark.parametrize("max_batched", [2, 15, 16, 64])
def test_prompt_lengths_around_the_block_size_cold_and_warm(length: int, max_batched: int) -> None:
    size = FakeSize(max_num_batched_tokens=max_batched)
    sim = SimulatedCell(size, settings=settings(min_chunk_tokens=1))
    prompt = prompt_of(length)
    for round_ in range(3):
        handle = sim.submit(prompt, 40)
        sim.run()
        answer = sim.answer(handle)
        assert answer.token_ids == expected_tokens(prompt, 40)
        assert answer.started is not None
        cached = (length - 1) // BLOCK * BLOCK if round_ else 0
        assert answer.started.num_cached_tokens == cached
    sim.assert_all_free()


def test_an_answer_that_becomes_a_prompt_hits_blocks_sealed_in_decode() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(20)
    first = sim.submit(prompt, 60)
    sim.run()
    longer = prompt + sim.answer(first).token_ids
    second = sim.submit(longer, 10)
    sim.run()
    assert sim.answer(second).token_ids == expected_tokens(longer, 10)
    started = sim.answer(second).started
    assert started is not None
    assert started.num_cached_tokens == (len(longer) - 1) // BLOCK * BLOCK


def test_prefix_caching_off_never_hits() -> None:
    sim = SimulatedCell(settings=settings(enable_prefix_caching=False))
    prompt = prompt_of(64)
    for _ in range(2):
        handle = sim.submit(prompt, 40)
        sim.run()
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 40)
    assert sim.counter("prefix_cache_hits_total") == 0
    assert all(not link.device.sealed for link in sim.links.values())


def test_equal_prompts_at_once_compute_the_prefix_once() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(100)
    handles = [sim.submit(prompt, 12) for _ in range(8)]
    sim.run()
    for handle in handles:
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 12)
    computed = sum(
        len(chunk.token_ids) // 4
        for link in sim.links.values()
        for plan in link.sent
        for chunk in plan.chunks
    )
    assert computed == 100 + 7 * (100 - 96)


def test_siblings_hit_the_first_ones_prefix_and_differ() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(50)
    handle = sim.submit(prompt, 30, num_sequences=3, seed=7)
    sim.run()
    texts = [sim.answer(handle, index).token_ids for index in range(3)]
    sampling = sampling_of(7)
    assert texts == [expected_tokens(prompt, 30, salt=salt_of(sampling, i)) for i in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    cached = [sim.answer(handle, index).started.num_cached_tokens for index in range(3)]  # type: ignore[union-attr]
    assert cached == [0, 48, 48]
    sim.assert_all_free()


def test_ending_ids_and_min_tokens() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(30)
    text = expected_tokens(prompt, 40)
    ending = [text[3], text[9]]
    early = sim.submit(prompt, 40, ending_ids=ending)
    late = sim.submit(prompt, 40, ending_ids=ending, min_tokens=4)
    sim.run()
    assert sim.answer(early).token_ids == text[:4]
    assert sim.answer(late).token_ids == text[:10]
    assert [finish_reason(sim, handle) for handle in (early, late)] == ["stop", "stop"]
    sim.assert_all_free()


def test_logprobs_stay_with_their_tokens() -> None:
    sim = SimulatedCell()
    handles = [sim.submit(prompt, 20, logprobs=i % 2 == 0) for i, prompt in enumerate(crowd(10))]
    sim.run()
    for i, handle in enumerate(handles):
        answer = sim.answer(handle)
        expected = [-token / 1e6 for token in answer.token_ids] if i % 2 == 0 else []
        assert answer.logprobs == pytest.approx(expected)
