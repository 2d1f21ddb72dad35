"""The random numbers against Random123's known answers and our golden vectors.

The vectors bind every backend, version and language: a moved stream must go on with the same
draws. Exponentials may differ in their last bits between libraries' logarithms.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import philox
from octavo.philox import MAX_UNIFORM, exponentials, philox4x32, uniforms, words

GOLDEN = json.loads((Path(__file__).parent / "golden" / "philox.json").read_text("utf-8"))
draws = st.tuples(
    st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 127), st.integers(0, 31)
)


def draw_arguments(case: dict[str, Any]) -> tuple[int, int, int, int, int]:
    return (
        int(case["seed"], 16),
        case["vocab_size"],
        case["position"],
        case["sequence_index"],
        case["round"],
    )


def as_hex(values: np.ndarray) -> list[str]:
    """Integers, or the bits of float32 values, in eight digits."""
    bits = values.view(np.uint32) if values.dtype == np.float32 else values
    return [f"{int(value):08x}" for value in bits]


@pytest.mark.parametrize("case", GOLDEN["known_answers"])
def test_known_answers_of_random123(case: dict[str, list[str]]) -> None:
    counter = tuple(int(word, 16) for word in case["counter"])
    key = tuple(int(word, 16) for word in case["key"])
    lanes = philox4x32(counter, key)  # type: ignore[arg-type]
    assert [as_hex(lane) for lane in lanes] == [[word] for word in case["words"]]


@pytest.mark.parametrize("case", GOLDEN["draws"])
def test_golden_draws(case: dict[str, Any]) -> None:
    arguments = draw_arguments(case)
    assert as_hex(words(*arguments)) == case["words"]
    assert as_hex(uniforms(*arguments)) == case["uniforms"]
    wanted = np.array([float(text) for text in case["exponentials"]])
    np.testing.assert_allclose(exponentials(*arguments), wanted, rtol=3e-7)


@pytest.mark.parametrize("case", GOLDEN["uniform_edges"])
def test_uniforms_round_alike_at_the_edges(
    case: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    word = np.array([int(case["word"], 16)], dtype=np.uint64)
    monkeypatch.setattr(philox, "words", lambda *_: word)
    uniform = uniforms(0, 1, 0, 0, 0)
    assert as_hex(uniform) == [case["uniform"]]
    assert 0 < uniform[0] <= MAX_UNIFORM < 1
    assert np.isfinite(exponentials(0, 1, 0, 0, 0)[0])
    assert exponentials(0, 1, 0, 0, 0)[0] > 0


@given(draws, st.integers(1, 70), st.integers(1, 70))
def test_a_tokens_word_depends_on_nothing_but_its_draw(
    draw: tuple[int, int, int, int], one_size: int, other_size: int
) -> None:
    seed, position, index, draw_round = draw
    one = words(seed, one_size, position, index, draw_round)
    other = words(seed, other_size, position, index, draw_round)
    shared = min(one_size, other_size)
    assert one.shape == (one_size,)
    assert (one[:shared] == other[:shared]).all()


@given(draws, st.integers(0, 63), st.integers(0, 30))
def test_seed_position_sibling_and_round_each_count(
    draw: tuple[int, int, int, int], seed_bit: int, position_bit: int
) -> None:
    seed, position, index, draw_round = draw
    variants = [
        (seed, position, index, draw_round),
        (seed ^ (1 << seed_bit), position, index, draw_round),
        (seed, position ^ (1 << position_bit), index, draw_round),
        (seed, position, index + 1, draw_round),
        (seed, position, index, draw_round + 1),
    ]
    seen = {words(s, 8, p, i, r).tobytes() for s, p, i, r in variants}
    assert len(seen) == len(variants)


def test_the_numbers_look_uniform_and_exponential() -> None:
    uniform = np.concatenate([uniforms(7, 50_000, position, 0, 0) for position in range(4)])
    shares = np.histogram(uniform, bins=20, range=(0, 1))[0] / len(uniform)
    # Deterministic: five standard deviations around 1/20.
    assert np.abs(shares - 0.05).max() < 5 * (0.05 * 0.95 / len(uniform)) ** 0.5
    exponential = np.concatenate([exponentials(7, 50_000, position, 0, 0) for position in range(4)])
    assert abs(exponential.mean() - 1) < 5 / len(exponential) ** 0.5
    assert abs((exponential > 1).mean() - np.exp(-1)) < 5 * 0.5 / len(exponential) ** 0.5
