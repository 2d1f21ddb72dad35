"""Sampling defaults that a model's authors recommend, from its generation_config.json.

The rule. A request's own value always wins; a value of generation_config.json counts only if it
is present and legal; else OpenAI's defaults hold (temperature 1, nothing filtered).
`do_sample: false` written out means greedy, as in transformers (temperature 0); absent or true,
the file's temperature counts, since most published files leave it out. A length limit in the file
(max_new_tokens, max_length) is ignored: the request and the context decide.
Must not know: requests. Entry point: `load_generation_defaults`.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo_router.tokenizer_files import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Used where a request is silent. Ranges and meanings as in SamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """The defaults of a model folder; OpenAI's if it has no generation_config.json."""
    config = read_json(folder / "generation_config.json")
    temperature = _number(config, "temperature", 0.0, 100.0, 1.0)
    if config.get("do_sample") is False:
        temperature = 0.0
    return GenerationDefaults(
        temperature=temperature,
        top_p=_number(config, "top_p", 1e-6, 1.0, 1.0),
        top_k=max(0, int(_number(config, "top_k", -1, 2**31 - 1, 0))),
        min_p=_number(config, "min_p", 0.0, 1.0, 0.0),
        repetition_penalty=_number(config, "repetition_penalty", 0.01, 100.0, 1.0),
    )


def _number(config: dict[str, Any], name: str, least: float, most: float, default: float) -> float:
    """The file's value if it is a finite number in [least, most], else the default."""
    value = config.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and least <= value <= most:
        return float(value)
    logger.warning(
        "generation_config.json: %s is %r, not in [%s, %s]; using %s",
        name,
        value,
        least,
        most,
        default,
    )
    return default
