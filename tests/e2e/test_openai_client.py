"""The official OpenAI client against the real processes, with only URL and key changed."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.stack import Stack

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_stack.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_name_the_served_model(client: openai.OpenAI, model: str) -> None:
    assert "SmolLM2" in model
    assert client.models.retrieve(model).id == model


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_streamed_chat_equals_the_whole(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=CAPITAL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [delta.role for delta in deltas].count("assistant") == 1
    reasons = [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ]
    assert reasons == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_of_text_and_of_ids_agree(client: openai.OpenAI, model: str) -> None:
    fields = {"model": model, "temperature": 0, "max_tokens": 12}
    prompts = ["The quick brown fox", "1 2 3 4 5 6"]
    both = client.completions.create(prompt=prompts, **fields)
    assert [choice.index for choice in both.choices] == [0, 1]
    alone = [client.completions.create(prompt=p, **fields).choices[0].text for p in prompts]
    assert [choice.text for choice in both.choices] == alone
    assert both.usage is not None
    assert both.usage.completion_tokens == 24


def test_streamed_completion_equals_the_whole(client: openai.OpenAI, model: str) -> None:
    fields = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**fields).choices[0]
    chunks = list(client.completions.create(stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_second_run_hits_the_prefix_cache(client: openai.OpenAI, model: str) -> None:
    prompt = "A long shared prefix about paged attention. " * 12
    fields = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 4}
    cold = client.completions.create(**fields)
    warm = client.completions.create(**fields)
    assert warm.choices[0].text == cold.choices[0].text
    assert cold.usage is not None
    assert warm.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert warm.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    expected = (warm.usage.prompt_tokens - 1) // 16 * 16
    assert warm.usage.prompt_tokens_details.cached_tokens == expected


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert joined.decode().startswith(ANSWER)
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert entry.logprob <= 0


def test_completion_logprobs_are_parallel_lists(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="Paris is", temperature=0, max_tokens=6, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert [len(values or []) for values in lists] == [6, 6, 6, 6]


def test_three_seeded_choices_repeat_and_differ(client: openai.OpenAI, model: str) -> None:
    # The model's own top_p leaves hardly a choice here.
    fields = {"model": model, "messages": CAPITAL, "temperature": 1.0, "top_p": 1.0}
    fields |= {"seed": 7, "n": 3}
    first = client.chat.completions.create(max_tokens=24, **fields)
    second = client.chat.completions.create(max_tokens=24, **fields)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(max_tokens=24, stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_stop_string_cuts_text_and_usage(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0)
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, stop=["of Fra"]
    )
    assert answer.choices[0].message.content == "The capital "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert whole.usage is not None
    assert answer.usage.completion_tokens < whole.usage.completion_tokens


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=CAPITAL, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=CAPITAL)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 9000, max_tokens=5)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=[49_152], max_tokens=5)


def test_wrong_key_is_an_authentication_error(demo_stack: Stack, demo_folder: object) -> None:
    router = demo_stack.spawn(
        "router",
        *("--model", str(demo_folder), "--schedulers", demo_stack.schedulers[0].address),
        *("--grpc-port", "0", "--api-keys", "right:tenant-a"),
    )
    try:
        router.wait_ready()
        url = f"http://{router.address}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=url, api_key="right", max_retries=5) as client:
            answer = client.chat.completions.create(model="", messages=CAPITAL, temperature=0)
            assert answer.choices[0].message.content == ANSWER
    finally:
        router.stop()
