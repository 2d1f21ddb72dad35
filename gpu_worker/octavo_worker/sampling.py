"""Drawing tokens: the rule of `octavo.philox`, over all rows at once, in plain torch.

No sort: an exponential race over the allowed tokens, then one pass for the mass of the tokens
that are strictly likelier than the drawn one; a refused draw raises the pivot and the row
races again. A draw depends on nothing but the row's logits and parameters.

Must not know: rows, plans. Entry points: `SamplingTensors`, `sample`.

S rows, V vocabulary.
"""

from dataclasses import dataclass

import torch

from octavo.philox import MAX_UNIFORM

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Below it logit / temperature could overflow; the race is long decided. The kernels' bound too.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of the rows that draw in a step, on the worker's device."""

    temperature: torch.Tensor  # fp32 [S], 0 = greedy
    top_p: torch.Tensor  # fp32 [S], 1 = off
    top_k: torch.Tensor  # int32 [S], 0 = off
    min_p: torch.Tensor  # fp32 [S], 0 = off
    seed: torch.Tensor  # int64 [S], the bit pattern of a u64
    position: torch.Tensor  # int64 [S], index in the sequence of the token drawn
    sequence_index: torch.Tensor  # int32 [S]
    # What the host knows of the rows: no random numbers needed; no filter set anywhere.
    all_greedy: bool
    any_filter: bool

    def select(self, rows: torch.Tensor) -> "SamplingTensors":
        """The parameters of `rows` (int64 [S']), flags kept."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
            sequence_index=self.sequence_index[rows],
            all_greedy=self.all_greedy,
            any_filter=self.any_filter,
        )


def philox_words(
    seed: torch.Tensor,
    position: torch.Tensor,
    sequence_index: torch.Tensor,
    draw_round: int,
    vocab_size: int,
) -> torch.Tensor:
    """32-bit words as int64 [S, vocab_size], one for every row and token."""
    groups = (vocab_size + 3) // 4
    c0 = torch.arange(groups, device=seed.device).expand(seed.shape[0], groups)
    c1 = (position.to(torch.int64) & _MASK)[:, None]
    c2 = sequence_index.to(torch.int64)[:, None]
    c3: torch.Tensor | int = draw_round
    k0 = (seed & _MASK)[:, None]
    k1 = ((seed >> 32) & _MASK)[:, None]
    for _ in range(_ROUNDS):
        # int64 products wrap, but their 64 bits are those of the unsigned product.
        product0 = c0 * _M0
        product1 = c2 * _M1
        c0, c2 = ((product1 >> 32) & _MASK) ^ c1 ^ k0, ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    shape = (seed.shape[0], groups)
    lanes = [lane.expand(shape) for lane in (c0, c1, c2, torch.as_tensor(c3))]
    return torch.stack(lanes, dim=-1).flatten(1)[:, :vocab_size]


def log_exponentials(words: torch.Tensor) -> torch.Tensor:
    """log of the standard exponential variables that `words` stand for, fp32."""
    uniform = (words.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=float(MAX_UNIFORM))
    return torch.log1p(uniform.neg_()).neg_().log_()


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Token ids int64 [S] drawn from `logits` fp32 [S, V]."""
    tokens = logits.argmax(dim=-1)
    if params.all_greedy:
        return tokens
    pending = torch.nonzero(params.temperature > 0).flatten()
    pivot = torch.full((pending.shape[0],), -torch.inf, device=logits.device)
    draw_round = 0
    while pending.shape[0] > 0:
        rows = logits[pending]
        drawn, is_accepted = _race(rows, pivot, params.select(pending), draw_round)
        tokens[pending] = drawn
        pivot = rows.gather(1, drawn[:, None]).flatten()[~is_accepted]
        pending = pending[~is_accepted]
        draw_round += 1
    return tokens


def _race(
    logits: torch.Tensor, pivot: torch.Tensor, params: SamplingTensors, draw_round: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One round: (drawn ids int64 [S], whether the filters accept them bool [S])."""
    words = philox_words(
        params.seed, params.position, params.sequence_index, draw_round, logits.shape[1]
    )
    # In the order of the written rule: one rounding more or less could decide a race.
    scaled = logits / params.temperature.clamp(min=_MIN_TEMPERATURE)[:, None]
    race = scaled - log_exponentials(words)
    if draw_round > 0:
        race = race.masked_fill(logits <= pivot[:, None], -torch.inf)
    drawn = race.argmax(dim=-1)
    if not params.any_filter:
        return drawn, torch.ones_like(drawn, dtype=torch.bool)
    return drawn, _is_accepted(logits, scaled, drawn, params)


def _is_accepted(
    logits: torch.Tensor, scaled: torch.Tensor, drawn: torch.Tensor, params: SamplingTensors
) -> torch.Tensor:
    """bool [S]: mass above < top_p, count above < top_k, p >= min_p * max p.

    Bad rows (NaN, +inf, nothing finite) are accepted: another round would not help, they fail
    anyway.
    """
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()  # the likeliest token weighs 1
    total = weights.sum(dim=-1)
    is_likelier = logits > logits.gather(1, drawn[:, None])
    mass = weights.masked_fill(~is_likelier, 0.0).sum(dim=-1)
    count = is_likelier.sum(dim=-1)
    weight = weights.gather(1, drawn[:, None]).flatten()
    # Rounding may bring the mass to 1, so that 1 must mean off.
    is_in = (mass < params.top_p * total) | (params.top_p >= 1.0)
    is_in &= (count < params.top_k) | (params.top_k == 0)
    is_in &= weight >= params.min_p
    return is_in | ~total.isfinite()
