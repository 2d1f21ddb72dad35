"""The sampler against the written rule (octavo.philox), and against the distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import philox
from octavo_worker.sampling import SamplingTensors, log_exponentials, philox_words, sample

torch.set_num_threads(1)


def params(
    rows: list[dict[str, float]], *, all_greedy: bool = False, any_filter: bool = True
) -> SamplingTensors:
    """One row a dict; what a dict leaves out is off."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    seeds = np.array([row.get("seed", 0) for row in rows], np.uint64)
    return SamplingTensors(
        temperature=column("temperature", 1.0, torch.float32),
        top_p=column("top_p", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=torch.from_numpy(seeds.view(np.int64)),
        position=column("position", 0, torch.int64),
        sequence_index=column("sequence_index", 0, torch.int32),
        all_greedy=all_greedy,
        any_filter=any_filter,
    )


def reference(logits: np.ndarray, row: dict[str, float]) -> int:
    """The rule of octavo.philox, word for word, for one row."""
    temperature = row.get("temperature", 1.0)
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / np.float32(temperature)
    weights = np.exp(scaled - scaled.max())
    allowed = np.ones(len(logits), bool)
    for draw_round in range(len(logits) + 1):
        e = philox.exponentials(
            int(row.get("seed", 0)),
            len(logits),
            int(row.get("position", 0)),
            int(row.get("sequence_index", 0)),
            draw_round,
        )
        race = np.where(allowed, scaled - np.log(e), -np.inf)
        token = int(race.argmax())
        likelier = logits > logits[token]
        mass, total = weights[likelier].sum(), weights.sum()
        top_k, top_p = row.get("top_k", 0), row.get("top_p", 1.0)
        if (
            (mass < np.float32(top_p) * total or top_p >= 1)
            and (top_k == 0 or likelier.sum() < top_k)
            and weights[token] >= row.get("min_p", 0.0)
        ):
            return token
        allowed = likelier
    raise AssertionError("no token accepted")


def test_words_and_exponentials_are_the_specs() -> None:
    cases = [(0, 0, 0), (1, 5, 1), (2**63 + 5, 2**31, 2), (2**64 - 1, 8191, 3)]
    seeds = torch.from_numpy(np.array([seed for seed, _, _ in cases], np.uint64).view(np.int64))
    positions = torch.tensor([position for _, position, _ in cases])
    indices = torch.tensor([index for _, _, index in cases], dtype=torch.int32)
    for draw_round in (0, 1, 7):
        words = philox_words(seeds, positions, indices, draw_round, 1003)
        for row, (seed, position, index) in enumerate(cases):
            expected = philox.words(seed, 1003, position, index, draw_round)
            np.testing.assert_array_equal(words[row].numpy(), expected.astype(np.int64))
    expected = np.log(philox.exponentials(2**64 - 1, 1003, 8191, 3, 7))
    np.testing.assert_allclose(log_exponentials(words[3:4])[0].numpy(), expected, rtol=1e-5)


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "min_p": st.sampled_from([0.0, 0.05, 0.6, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 10_000),
        "sequence_index": st.integers(0, 7),
    }
)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(ROW, min_size=1, max_size=6), logits_seed=st.integers(0, 1000))
def test_rows_of_any_mix_follow_the_rule(rows: list[dict[str, float]], logits_seed: int) -> None:
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn((len(rows), 61), generator=generator) * 3
    expected = [reference(logits[i].numpy(), row) for i, row in enumerate(rows)]
    assert sample(logits, params(rows)).tolist() == expected


def test_greedy_ignores_filters_and_seed() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 5.5]])
    rows = [{"temperature": 0.0, "top_p": 0.1, "seed": 3.0}] * 2
    assert sample(logits, params(rows, all_greedy=True)).tolist() == [1, 2]
    assert sample(logits, params(rows)).tolist() == [1, 2]


def test_extreme_temperatures_and_logits_end() -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0], [0.0, 0.0, 0.0], [torch.nan, 1.0, 0.0]])
    rows = [
        {"temperature": 1e-30, "top_p": 0.5},
        {"temperature": 1e30, "top_k": 1},
        {"temperature": 1.0, "min_p": 0.5, "top_p": 0.2},
    ]
    tokens = sample(logits, params(rows)).tolist()
    assert tokens[0] == 0
    assert all(0 <= token < 3 for token in tokens)


def test_masked_logits_are_never_drawn_and_do_no_harm() -> None:
    logits = torch.randn((64, 40), generator=torch.Generator().manual_seed(2))
    logits[:, ::2] = -torch.inf
    for row in ({}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 1e-35}):
        rows = [{**row, "seed": float(seed)} for seed in range(64)]
        tokens = sample(logits, params(rows))
        assert bool((tokens % 2 == 1).all())
        assert tokens.tolist() == [reference(logits[i].numpy(), r) for i, r in enumerate(rows)]


@pytest.mark.parametrize("top_p", [0.39, 0.41, 0.69, 0.71, 0.89, 0.91])
def test_the_nucleus_ends_within_two_percent_of_top_p(top_p: float) -> None:
    """Borders lie at 0.4, 0.7 and 0.9: a bound loosened or tightened by 0.02 lets one pass."""
    masses = torch.tensor([0.4, 0.3, 0.2, 0.1])
    above = torch.tensor([0.0, 0.4, 0.7, 0.9])
    rows = [{"top_p": top_p, "seed": float(seed)} for seed in range(400)]
    tokens = sample(masses.log().expand(400, 4).contiguous(), params(rows))
    assert sorted(set(tokens.tolist())) == torch.nonzero(above < top_p).flatten().tolist()


@pytest.mark.parametrize(
    "row", [{}, {"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}, {"temperature": 0.7, "top_p": 0.8}]
)
def test_draws_have_the_filtered_distribution(row: dict[str, float]) -> None:
    """Chi-square over 20,000 draws; the seeds are fixed, so the outcome is too."""
    num_draws, vocab = 20_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    weights = (logits / row.get("temperature", 1.0)).softmax(dim=0)
    above = torch.stack([weights[logits > logit].sum() for logit in logits])
    count = torch.stack([(logits > logit).sum() for logit in logits])
    kept = above < row.get("top_p", 1.1)
    kept &= (count < row["top_k"]) if "top_k" in row else True
    kept &= weights >= row.get("min_p", 0.0) * weights.max()
    expected = (weights * kept / weights[kept].sum() * num_draws).numpy()
    rows = [{**row, "seed": float(seed), "position": seed % 97} for seed in range(num_draws)]
    tokens = sample(logits.expand(num_draws, vocab).contiguous(), params(rows)).numpy()
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[expected == 0].sum() == 0
    used = expected > 0
    chi_square = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    # Far beyond the 99.9th percentile of chi-square with 11 degrees of freedom (31.3).
    assert chi_square < 40


def test_siblings_and_positions_differ() -> None:
    logits = torch.zeros((4, 5000))
    rows = [
        {"seed": 5},
        {"seed": 5, "sequence_index": 1},
        {"seed": 5, "position": 1},
        {"seed": 6},
    ]
    tokens = sample(logits, params([*map(dict, rows)], any_filter=False)).tolist()
    assert len(set(tokens)) == 4
