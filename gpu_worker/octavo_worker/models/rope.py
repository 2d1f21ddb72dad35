"""Rotary position embeddings: the configuration's many spellings, and the cos/sin table.

A table is computed once, on the CPU and in float32, with the operations of transformers in the
same order, so that both agree to the bit; the attention factor is multiplied in. Scalings:
default, linear, llama3, yarn (arXiv 2309.00071), longrope (arXiv 2402.13753). Must not know:
layers, backends. Entry points: `RopeConfig.from_fields`, `cos_sin_table`.

longrope has two sets of frequencies: for sequences up to the original length, and for longer ones.
transformers chooses anew in each forward pass, so that a sequence that grows past the border has
keys of both kinds. A paged cache shares keys between sequences of all lengths: here the table's
length, which is the worker's max_model_len, chooses once for all of them.

Shapes: P positions, R rotated dims (first dims of a head, R <= D), F = R/2 frequencies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigurationError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}
_TABLE_CHUNK = 16_384  # positions computed at a time: bounds the float32 temporaries


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One scaling with its parameters; those of other scalings keep their defaults.

    `attention_factor` None: derived from `factor` (longrope), with `mscale` and `mscale_all_dim`
    (yarn). `short_factors`, `long_factors`: the divisors of the F frequencies (longrope).
    """

    rope_type: str
    theta: float
    rotary_dim: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @classmethod
    def from_fields(
        cls, fields: Mapping[str, Any], *, head_dim: int, can_be_partial: bool = False
    ) -> "RopeConfig":
        """Read `rope_scaling` (older files; wins, as in transformers) or `rope_parameters`.

        `fields` is config.json over the family's defaults; `rope_theta` may stand inside the
        scaling or beside it. Raises ConfigurationError for a scaling that isn't computed here,
        and for a parameter that is missing or no number.
        """
        scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            raise ConfigurationError(f"config.json: rope_scaling={scaling!r} is no object")
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        rope_type = _OLD_NAMES.get(rope_type, rope_type)
        if rope_type not in ROPE_TYPES or any(isinstance(v, Mapping) for v in scaling.values()):
            raise ConfigurationError(
                f"config.json: rope scaling {dict(scaling)!r} isn't supported; "
                f"supported types, one for all layers: {', '.join(ROPE_TYPES)}"
            )
        read = _Reader(rope_type, scaling)
        partial = scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1
        rotary_dim = _rotary_dim(partial, head_dim, can_be_partial=can_be_partial)
        max_position = int(fields["max_position_embeddings"])
        theta = scaling.get("rope_theta")
        original = fields.get("original_max_position_embeddings")  # beside the scaling: wins
        if original is None:
            original = read.number("original_max_position_embeddings", max_position)
        rope = cls(
            rope_type=rope_type,
            theta=float(fields["rope_theta"] if theta is None else theta),
            rotary_dim=rotary_dim,
            original_max_position=int(original),
            factor=1.0 if rope_type in ("default", "longrope") else read.number("factor"),
        )
        if rope_type == "longrope":
            return replace(
                rope,
                factor=read.number("factor", max_position / rope.original_max_position),
                attention_factor=read.optional("attention_factor"),
                short_factors=read.numbers("short_factor", rotary_dim // 2),
                long_factors=read.numbers("long_factor", rotary_dim // 2),
            )
        if rope_type == "llama3":
            return replace(
                rope,
                low_freq_factor=read.number("low_freq_factor"),
                high_freq_factor=read.number("high_freq_factor"),
            )
        if rope_type == "yarn":
            return replace(
                rope,
                beta_fast=read.number("beta_fast", 0.0) or 32.0,
                beta_slow=read.number("beta_slow", 0.0) or 1.0,
                truncate=bool(scaling.get("truncate", True)),
                attention_factor=read.optional("attention_factor"),
                mscale=read.optional("mscale"),
                mscale_all_dim=read.optional("mscale_all_dim"),
            )
        return rope

    def max_position(self, max_position_embeddings: int) -> int:
        """Longest sequence that the embedding is made for.

        Files of linear and yarn models name either the length before the scaling or the one
        after it as `max_position_embeddings`; the larger reading holds.
        """
        if self.rope_type in ("linear", "yarn"):
            return max(max_position_embeddings, int(self.original_max_position * self.factor))
        return max_position_embeddings


def _rotary_dim(partial: Any, head_dim: int, *, can_be_partial: bool) -> int:
    """R: the share of a head's dims that carries positions."""
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise ConfigurationError(
            f"config.json: partial_rotary_factor={partial!r} must be a number above 0, at most 1"
        )
    if partial != 1 and not can_be_partial:
        raise ConfigurationError(
            f"config.json: partial_rotary_factor={partial} isn't supported by this architecture"
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigurationError(
            f"config.json: partial_rotary_factor={partial} rotates {rotary_dim} of a head's "
            f"{head_dim} dims; the number must be even"
        )
    return rotary_dim


class _Reader:
    """Numbers of one scaling object, or a ConfigurationError that names the field."""

    def __init__(self, rope_type: str, scaling: Mapping[str, Any]) -> None:
        self._rope_type = rope_type
        self._scaling = scaling

    def optional(self, name: str) -> float | None:
        value = self._scaling.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigurationError(
                f"config.json: rope scaling {self._rope_type}: {name}={value!r} is no number >= 0"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional(name)
        value = default if value is None else value
        if value is None:
            raise ConfigurationError(
                f"config.json: rope scaling {self._rope_type} needs the field {name}"
            )
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """`count` numbers > 0: one for each pair of rotated dims."""
        values: Any = self._scaling.get(name)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(isinstance(value, int | float) and value > 0 for value in values)
        ):
            raise ConfigurationError(
                f"config.json: rope scaling {self._rope_type}: {name}={values!r:.80} must be "
                f"{count} numbers > 0, one for each pair of rotated dims"
            )
        return tuple(values)


class InverseFrequencies(NamedTuple):
    """float32 [F], and the factor on cos and sin."""

    values: Tensor
    attention_factor: float


def _plain(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return 1.0 / (rope.theta**exponents)


def _llama3(rope: RopeConfig) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between them."""
    plain = _plain(rope)
    context, factor = rope.original_max_position, rope.factor
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > context / low, plain / factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    ramp = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, ramp, scaled)


def _yarn(rope: RopeConfig) -> InverseFrequencies:
    """Fast dims keep their frequency, slow ones are interpolated, a ramp between them."""
    dim, theta, factor = rope.rotary_dim, rope.theta, rope.factor

    def dim_of(num_rotations: float) -> float:
        turns = rope.original_max_position / (num_rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    values = 1.0 / (factor * frequencies) * (1 - kept) + 1.0 / frequencies * kept
    return InverseFrequencies(values, _yarn_attention_factor(rope))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeConfig, num_positions: int) -> InverseFrequencies:
    """Each frequency divided by its own factor, one for short and one for long sequences."""
    is_long = num_positions > rope.original_max_position
    factors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
    exponents = torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = 1.0
        if rope.factor > 1:
            growth = math.log(rope.factor) / math.log(rope.original_max_position)
            attention_factor = math.sqrt(1 + growth)
    return InverseFrequencies(1.0 / (factors * rope.theta**exponents), attention_factor)


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> InverseFrequencies:
    """The angle per position of each pair of dims, in a table of `num_positions`."""
    match rope.rope_type:
        case "longrope":
            return _longrope(rope, num_positions)
        case "yarn":
            return _yarn(rope)
        case "llama3":
            return InverseFrequencies(_llama3(rope), 1.0)
        case "linear":
            return InverseFrequencies(_plain(rope) / rope.factor, 1.0)
        case _:
            return InverseFrequencies(_plain(rope), 1.0)


def cos_sin_table(rope: RopeConfig, num_positions: int) -> Tensor:
    """float32 [P, 2, F] on the CPU: cos, then sin, of position x inverse frequency."""
    values, attention_factor = inverse_frequencies(rope, num_positions)
    table = torch.empty(num_positions, 2, values.numel(), dtype=torch.float32)
    for start in range(0, num_positions, _TABLE_CHUNK):
        stop = min(start + _TABLE_CHUNK, num_positions)
        angles = torch.arange(start, stop, dtype=torch.float32)[:, None] * values
        table[start:stop, 0] = angles.cos() * attention_factor
        table[start:stop, 1] = angles.sin() * attention_factor
    return table


def identity_table(rope: RopeConfig, num_positions: int) -> Tensor:
    """float32 [P, 2, F] that rotates by nothing, for layers without positions."""
    table = torch.zeros(num_positions, 2, rope.rotary_dim // 2, dtype=torch.float32)
    table[:, 0] = 1.0
    return table
