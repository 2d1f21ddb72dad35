"""Prompts into what is submitted: ids, their echo, and sampling with nothing left open.

All of it runs in the tokenizer's thread. Must not know: sessions, HTTP, protos.
Entry points: `check_text`, `check_size`, `encode`, `truncate`, `echo_of`, `encode_bad_words`,
`resolve_sampling`.
"""

import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo_router.fields import refuse
from octavo_router.flights import PromptEcho, ResolvedSampling
from octavo_router.params import SamplingOptions
from octavo_router.requests import (
    ChatPrompt,
    GenerateRequest,
    IdsPrompt,
    Prompt,
    RequestFields,
    TextPrompt,
)
from octavo_router.served_model import ServedModel
from octavo_router.tokenizer import Tokenizer

_SEED_PERSON = b"octavo.seed"
# Of a text that is longer than twice this many characters for each token that fits, so many are
# tokenized first, to see whether the rest can matter.
PROBED_CHARS_PER_TOKEN = 32
# Whatever a text's tokens may be, more characters are refused unseen.
MAX_CHARS_PER_TOKEN = 256
# Longest text to tokenize without generating.
MAX_TEXT_CHARS = 1 << 21


def encode(
    tokenizer: Tokenizer, prompt: Prompt, check: Callable[[str], None]
) -> npt.NDArray[np.uint32]:
    """A prompt's ids [T]. `check` gets the text before it is tokenized, and raises to refuse it.

    Raises InvalidRequestError.
    """
    match prompt:
        case IdsPrompt():
            return np.array(prompt.token_ids, dtype=np.uint32)
        case TextPrompt():
            check(prompt.text)
            return tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        case ChatPrompt():
            rendering = prompt.rendering
            return tokenizer.encode_chat(
                prompt.messages,
                add_generation_prompt=rendering.add_generation_prompt,
                continue_final_message=rendering.continue_final_message,
                template=rendering.template,
                variables=rendering.variables,
                add_special_tokens=prompt.add_special_tokens,
                check=check,
            )


def truncate(
    token_ids: npt.NDArray[np.uint32], request: GenerateRequest, model: ServedModel
) -> npt.NDArray[np.uint32]:
    """The last ids, as many as `truncate_prompt_tokens` says; -1 = what the answer leaves.

    An answer takes its max_tokens, its door's default, or at least min_tokens and 1.
    """
    limit = request.fields.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit < 0:
        sampling = request.fields.sampling
        asked = sampling.max_tokens
        num_answer = request.default_max_tokens if asked is None else asked
        num_answer = max(num_answer or 1, sampling.min_tokens)
        limit = max(model.max_total_tokens - num_answer, 1)
    return token_ids[-limit:]


def check_text(
    tokenizer: Tokenizer, param: str, fields: RequestFields, model: ServedModel, text: str
) -> None:
    """Refuse a text that is far too long, without the seconds and memory that all its tokens cost.

    `text`: what is to be tokenized: of messages, all that the template shows of them. Raises
    ContextLengthError. What is near the limit passes: `check_length` counts it exactly.
    """
    num_chars = len(text)
    limit = model.max_total_tokens
    if num_chars <= 2 * PROBED_CHARS_PER_TOKEN * limit:
        return
    if num_chars <= MAX_CHARS_PER_TOKEN * limit:
        if fields.truncate_prompt_tokens is not None:
            return
        head = text[: PROBED_CHARS_PER_TOKEN * limit]
        if len(tokenizer.encode(head, add_special_tokens=False)) < 2 * limit:
            return
    raise ContextLengthError(
        f"{param} has {num_chars} characters, far more than fit, {_what_limits(model)}: shorten it",
        param=param,
    )


def check_size(param: str, text: str) -> None:
    """Bound what is tokenized for its own sake. Raises InvalidRequestError."""
    if len(text) > MAX_TEXT_CHARS:
        refuse(param, f"at most {MAX_TEXT_CHARS} characters long", len(text))


def check_length(param: str, num_tokens: int, model: ServedModel) -> None:
    """Raise unless the prompt has a token and leaves room for one more."""
    if not num_tokens:
        raise InvalidRequestError(f"{param} has no tokens: at least one is needed", param=param)
    if num_tokens >= model.max_total_tokens:
        raise ContextLengthError(
            f"{param} has {num_tokens} tokens, {_what_limits(model)}: shorten it so that at "
            "least one more fits",
            param=param,
        )


def _what_limits(model: ServedModel) -> str:
    if model.max_total_tokens < model.max_model_len:
        return f"the cache holds {model.max_total_tokens} tokens of one request"
    return f"the model's context is {model.max_model_len} tokens"


def echo_of(
    tokenizer: Tokenizer, prompt: Prompt, token_ids: npt.NDArray[np.uint32], *, is_cut: bool
) -> PromptEcho:
    """A prompt's text as an answer repeats it.

    Text comes back as it was given; ids, and what truncation left, as all of them decode,
    special tokens by their names.
    """
    decoded = tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
    if not isinstance(prompt, TextPrompt) or is_cut:
        return PromptEcho(decoded, shows_special=True)
    # Differs where the tokenizer adds a start token, which the text doesn't show.
    return PromptEcho(prompt.text, shows_special=decoded == prompt.text)


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's ids as a text's beginning and after a space. Raises InvalidRequestError."""
    spellings: dict[tuple[int, ...], None] = {}
    for position, word in enumerate(words):
        bare = word.lstrip(" ")
        if not bare:
            refuse(f"bad_words[{position}]", "more than spaces", word)
        for text in (bare, f" {bare}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
            if token_ids:
                spellings[tuple(token_ids)] = None
    return tuple(spellings)


def resolve_sampling(
    request: GenerateRequest,
    model: ServedModel,
    num_prompt_tokens: int,
    position: int,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    end_ids: tuple[int, ...] = (),
) -> ResolvedSampling:
    """Sampling parameters of the request's prompt number `position`, with nothing left open.

    `end_ids`: the tokenizer's ids that end an answer, beside those that the worker names.
    Raises InvalidRequestError, ContextLengthError if prompt and answer don't fit.
    """
    options = request.fields.sampling
    max_tokens = _max_tokens(request, model, num_prompt_tokens)
    if options.min_tokens > max_tokens:
        refuse("min_tokens", f"at most max_tokens ({max_tokens} here)", options.min_tokens)
    eos = () if options.ignore_eos else (*model.eos_token_ids, *end_ids)
    stop_token_ids = tuple(dict.fromkeys((*options.stop_token_ids, *eos)))
    _check_drawable(options, bad_word_ids, stop_token_ids)
    return ResolvedSampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=_seed(request, position),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=options.logprobs,
        min_tokens=options.min_tokens,
        prompt_logprobs=request.fields.num_prompt_logprobs,
        rules=options.rules,
        bad_word_ids=bad_word_ids,
    )


def _check_drawable(
    options: SamplingOptions,
    bad_word_ids: tuple[tuple[int, ...], ...],
    stop_token_ids: tuple[int, ...],
) -> None:
    """Refuse rules that leave no first token to draw: the worker could only fail."""
    allowed = options.rules.allowed_token_ids
    barred = {ids[0] for ids in bad_word_ids if len(ids) == 1}
    if options.min_tokens:
        barred.update(stop_token_ids)
    if allowed and barred.issuperset(allowed):
        refuse("allowed_token_ids", "more than what bad_words and min_tokens bar", list(allowed))


def _max_tokens(request: GenerateRequest, model: ServedModel, num_prompt_tokens: int) -> int:
    """At least 1: a scored prompt draws a token too, which is then dropped."""
    room = model.max_total_tokens - num_prompt_tokens
    max_tokens = request.fields.sampling.max_tokens
    if max_tokens is None:
        # A default is never a reason to refuse: it is what is left.
        return min(room, request.default_max_tokens or room)
    if max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"{num_prompt_tokens + max_tokens}, {_what_limits(model)}; lower max_tokens to "
            f"{room} or shorten the prompt",
            param="max_tokens",
        )
    return max(max_tokens, 1)


def _seed(request: GenerateRequest, position: int) -> int:
    """The prompt's u64 seed: given, or derived so that a retry draws the same, or random.

    A given seed holds for every prompt of a list: each then draws what it would draw alone.
    """
    seed = request.fields.sampling.seed
    if seed is not None:
        return seed % 2**64
    if not request.idempotency_key:
        return secrets.randbits(64)
    parts = (request.tenant, request.idempotency_key, str(position))
    data = "".join(f"{len(part)}:{part}" for part in parts).encode()
    return int.from_bytes(blake2b(data, digest_size=8, person=_SEED_PERSON).digest(), "little")
