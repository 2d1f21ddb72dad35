"""Request fields through the real processes: forced output, exact cuts, scores like transformers'.

A bias of 100 on one id with temperature 0 makes every token that id, so texts don't depend on
the model.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessorList
from transformers.generation import logits_process

from tests.e2e.stack import Stack
from tests.oracle import check_greedy, reference_model
from tests.sse_parser import parse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def http(demo_stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_stack.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_folder)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": PROMPT}
    return {**base, "temperature": 0, **fields}


def both_ways(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """The whole answer, after checking that the stream adds up to it."""
    body = body_of(path, **fields)
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    num_choices = len(whole["choices"])
    streamed = parse(http.post(path, json={**body, **options}).content, num_choices=num_choices)
    assert streamed.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.usage[name] == whole["usage"][name]
    for index, choice in enumerate(whole["choices"]):
        assert streamed.text(index) == text_of(whole, index)
        assert streamed.finish(index) == choice["finish_reason"]
        if choice["logprobs"] is not None and path == TEXT:
            said = streamed.text_logprobs(index)
            assert said["tokens"] == choice["logprobs"]["tokens"]
            assert said["text_offset"] == choice["logprobs"]["text_offset"]
    return whole


def text_of(body: dict[str, Any], index: int = 0) -> str:
    choice = body["choices"][index]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def one_id(tokenizer: Any, text: str) -> int:
    (token_id,) = tokenizer(text, add_special_tokens=False).input_ids
    return token_id


STOPS: list[tuple[Any, bool, str, int, str]] = [
    ("e t", False, " th", 2, "stop"),
    ("e t", True, " the t", 2, "stop"),
    ("e tx", False, " the the the the", 4, "length"),
    (" the the the", False, "", 3, "stop"),
    ("x" * 1000, False, " the the the the", 4, "length"),
    # The prompt's last word: a stop doesn't look into the prompt.
    ("is", False, " the the the the", 4, "length"),
]


@pytest.mark.parametrize("path", [pytest.param(CHAT, marks=pytest.mark.slow), TEXT])
@pytest.mark.parametrize(("stop", "is_shown", "text", "num_tokens", "reason"), STOPS)
def test_stops_over_token_borders(
    http: httpx.Client,
    tokenizer: Any,
    path: str,
    stop: Any,
    is_shown: bool,
    text: str,
    num_tokens: int,
    reason: str,
) -> None:
    the = one_id(tokenizer, " the")
    whole = both_ways(
        http,
        path,
        logit_bias={str(the): 100},
        stop=stop,
        include_stop_str_in_output=is_shown,
        max_tokens=4,
        return_token_ids=True,
    )
    assert text_of(whole) == text
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["usage"]["completion_tokens"] == num_tokens
    assert whole["choices"][0]["token_ids"] == [the] * num_tokens


def emoji_ids(tokenizer: Any) -> tuple[str, list[int]]:
    """An emoji of several tokens."""
    for text in ("🙂", "🦉", "🪐", "👩‍👩‍👧"):
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(token_ids) >= 2:
            return text, token_ids
    raise AssertionError("every emoji is one token")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("max_tokens", [1, 3, pytest.param(50, marks=pytest.mark.slow)])
def test_endless_first_halves_of_a_character(
    http: httpx.Client, tokenizer: Any, path: str, max_tokens: int
) -> None:
    _, token_ids = emoji_ids(tokenizer)
    bias = {str(token_ids[0]): 100}
    expected = tokenizer.decode([token_ids[0]] * max_tokens)
    assert "\ufffd" in expected
    whole = both_ways(http, path, logit_bias=bias, max_tokens=max_tokens)
    assert text_of(whole) == expected
    assert whole["usage"]["completion_tokens"] == max_tokens
    # What shows as U+FFFD in the end may match only once it is settled.
    stopped = both_ways(http, path, logit_bias=bias, max_tokens=max_tokens, stop=["\ufffd"])
    assert text_of(stopped) == expected.partition("\ufffd")[0]
    assert stopped["choices"][0]["finish_reason"] == "stop"


@torch.inference_mode()
def scores_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[T-1, V]: log-softmax of transformers' logits after each token but the last."""
    logits = reference_model(folder)(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("max_tokens", [0, pytest.param(1, marks=pytest.mark.slow), 5])
def test_an_echo_is_scored_as_transformers_does(
    http: httpx.Client, tokenizer: Any, demo_folder: Path, max_tokens: int
) -> None:
    prompt = PROMPT + " Paris, the city of light. Česko, 한국어 🙂!" * 2
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    for _ in ("cold", "warm"):
        whole = both_ways(http, TEXT, **fields, return_token_ids=True, skip_special_tokens=False)
        choice = whole["choices"][0]
        token_ids = choice["prompt_token_ids"] + choice["token_ids"]
        assert choice["prompt_token_ids"] == tokenizer(prompt).input_ids
        assert choice["text"].startswith(prompt)
        assert whole["usage"]["completion_tokens"] == max_tokens
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        scores = scores_of(demo_folder, token_ids)
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(token_ids)}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        for position, token_id in enumerate(token_ids[1:]):
            value = logprobs["token_logprobs"][position + 1]
            assert abs(value - float(scores[position, token_id])) < 1e-4
            best = max(logprobs["top_logprobs"][position + 1].values())
            assert abs(best - float(scores[position].max())) < 1e-4
        # Offsets are the tokens' places in the text, except inside a character.
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert choice["text"].startswith(token, offset)


def test_chat_logprobs_are_raw_and_their_bytes_the_text(
    http: httpx.Client, tokenizer: Any, demo_folder: Path
) -> None:
    emoji, token_ids = emoji_ids(tokenizer)
    likely = one_id(tokenizer, "Hello")
    # The bias changes what is drawn, not what is reported.
    whole = both_ways(
        http,
        CHAT,
        logit_bias={str(likely): -100},
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        return_token_ids=True,
    )
    content = whole["choices"][0]["logprobs"]["content"]
    joined = bytes(b for entry in content for b in entry["bytes"])
    assert joined.decode("utf-8", "replace") == text_of(whole)
    answer_ids = whole["choices"][0]["token_ids"]
    assert likely not in answer_ids
    prompt_ids = whole["prompt_token_ids"]
    scores = scores_of(demo_folder, prompt_ids + answer_ids)[len(prompt_ids) - 1 :]
    for position, (token_id, entry) in enumerate(zip(answer_ids, content, strict=True)):
        assert abs(entry["logprob"] - float(scores[position, token_id])) < 1e-4
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert len(tops) == 3
    # One character of several tokens: exact bytes, the sum is the character.
    for token_id, data in zip(token_ids, split(tokenizer, emoji, token_ids), strict=True):
        whole = both_ways(http, CHAT, logit_bias={str(token_id): 100}, max_tokens=1, logprobs=True)
        (entry,) = whole["choices"][0]["logprobs"]["content"]
        assert bytes(entry["bytes"]) == data
        assert entry["top_logprobs"] == []


def split(tokenizer: Any, text: str, token_ids: list[int]) -> list[bytes]:
    """The bytes of each token, from the byte alphabet of its vocabulary."""
    alphabet = tokenizer.convert_ids_to_tokens(token_ids)
    data, parts = text.encode(), []
    for token in alphabet:
        parts.append(data[: len(token)])
        data = data[len(token) :]
    return parts


@pytest.mark.parametrize(
    "rules",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "min_tokens": 14},
        pytest.param({"bad_words": ["Paris", "city"]}, marks=pytest.mark.slow),
        {"repetition_penalty": 1.1, "frequency_penalty": 0.4, "bad_words": ["the"]},
    ],
    ids="+".join,
)
def test_greedy_by_rules_is_transformers(
    http: httpx.Client, tokenizer: Any, demo_folder: Path, rules: dict[str, Any]
) -> None:
    whole = both_ways(http, CHAT, max_tokens=16, return_token_ids=True, **rules)
    prompt, answer = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
    processors = LogitsProcessorList()
    if "repetition_penalty" in rules:
        penalty = rules["repetition_penalty"]
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(penalty))
    if "bad_words" in rules:
        words = [
            tokenizer(spelled, add_special_tokens=False).input_ids
            for word in rules["bad_words"]
            for spelled in (word, f" {word}")
        ]
        processors.append(logits_process.NoBadWordsLogitsProcessor(words))
    ids = torch.tensor([prompt + answer])
    with torch.inference_mode():
        logits = reference_model(demo_folder)(ids[:, :-1]).logits[0, len(prompt) - 1 :]
    for position, token_id in enumerate(answer):
        row = logits[position].clone()
        seen = answer[:position]
        scored = processors(ids[:, : len(prompt) + position], row[None])[0]
        for other in set(seen):
            scored[other] -= rules.get("presence_penalty", 0.0)
            scored[other] -= rules.get("frequency_penalty", 0.0) * seen.count(other)
        if position < rules.get("min_tokens", 0):
            scored[tokenizer.eos_token_id] = -torch.inf
        assert float(scored.max() - scored[token_id]) < 1e-3, (position, token_id)
    for word in rules.get("bad_words", ()):
        assert word not in text_of(whole).split()
    assert len(answer) >= rules.get("min_tokens", 0)


def test_choices_of_a_seed(http: httpx.Client) -> None:
    fields = {"temperature": 1, "seed": 7, "n": 2, "max_tokens": 4, "prompt": ["One", "Two"]}
    whole = both_ways(http, TEXT, **fields)
    texts = [text_of(whole, index) for index in range(4)]
    assert len(set(texts)) == 4
    # The same draws in other company.
    alone = http.post(TEXT, json=body_of(TEXT, **{**fields, "prompt": "Two"})).json()
    assert [text_of(alone, index) for index in range(2)] == texts[2:]
    greedy = http.post(TEXT, json=body_of(TEXT, n=2, max_tokens=4)).json()
    assert text_of(greedy, 0) == text_of(greedy, 1)
    assert greedy["usage"]["completion_tokens"] == 8
    assert greedy["usage"]["prompt_tokens"] == len(PROMPT.split())


def test_a_continued_message_goes_on(http: httpx.Client, tokenizer: Any, demo_folder: Path) -> None:
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France"},
    ]
    whole = both_ways(
        http,
        CHAT,
        messages=turns,
        continue_final_message=True,
        max_tokens=8,
        return_token_ids=True,
    )
    expected = tokenizer.apply_chat_template(turns, continue_final_message=True, tokenize=False)
    assert whole["prompt_token_ids"] == tokenizer(expected, add_special_tokens=False).input_ids
    assert text_of(whole) == " is Paris."
    assert check_greedy(
        demo_folder, whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
    ).is_right


def test_cached_tokens_are_blocks_of_an_equal_salt(http: httpx.Client) -> None:
    fields = {"prompt": "Once upon a time " * 12, "max_tokens": 2}

    def cached(**more: Any) -> int:
        answer = http.post(TEXT, json=body_of(TEXT, **fields, **more)).json()
        count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert count % 16 == 0
        assert count < answer["usage"]["prompt_tokens"]
        return count

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0


def test_allowed_ids_are_all_that_is_drawn(http: httpx.Client, tokenizer: Any) -> None:
    allowed = [one_id(tokenizer, text) for text in (" yes", " no", "!")]
    fields = {"allowed_token_ids": allowed, "temperature": 2, "max_tokens": 12, "seed": 3}
    whole = both_ways(http, TEXT, **fields, return_token_ids=True)
    assert set(whole["choices"][0]["token_ids"]) <= set(allowed)
    assert len(set(whole["choices"][0]["token_ids"])) > 1
    assert whole["choices"][0]["finish_reason"] == "length"


def test_counts_so_far_never_fall(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body_of(CHAT, max_tokens=4, n=2, stream=True, stream_options=options)
    events = http.post(CHAT, json=body).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    whole = http.post(CHAT, json=body_of(CHAT, max_tokens=4, n=2)).json()
    assert counts[-1] == counts[-2] == whole["usage"]["completion_tokens"]
