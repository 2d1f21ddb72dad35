"""Octavo's own client against the real processes: every test blocking, and with asyncio."""

import asyncio
import math
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import pytest
from tokenizers import Tokenizer

from octavo.client import AsyncClient, AsyncStream, Client, Delta, Generation, Usage
from octavo.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from tests.e2e.stack import Stack, free_port

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
TIMEOUT_S = 60.0

ResultT = TypeVar("ResultT")


class Api(Protocol):
    """What both clients can do, called the same way."""

    def generate(self, prompt: str | None = None, **fields: Any) -> Generation: ...
    def stream(
        self, prompt: str | None = None, **fields: Any
    ) -> tuple[list[Delta], Usage | None]: ...
    def call(self, method: str, *args: Any, **fields: Any) -> Any: ...


class Blocking:
    """`Client`."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.client = Client(address, api_key, timeout_s=TIMEOUT_S)

    def generate(self, prompt: str | None = None, **fields: Any) -> Generation:
        return self.client.generate(prompt, **fields)

    def stream(self, prompt: str | None = None, **fields: Any) -> tuple[list[Delta], Usage | None]:
        with self.client.generate(prompt, stream=True, **fields) as stream:
            return list(stream), stream.usage

    def call(self, method: str, *args: Any, **fields: Any) -> Any:
        return getattr(self.client, method)(*args, **fields)

    def close(self) -> None:
        self.client.close()


class WithAsyncio:
    """`AsyncClient`, in an event loop of its own."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self._runner = asyncio.Runner()

        async def connect() -> AsyncClient:
            return AsyncClient(address, api_key, timeout_s=TIMEOUT_S)

        self.client = self.run(connect())

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self._runner.run(work)

    def generate(self, prompt: str | None = None, **fields: Any) -> Generation:
        return self.run(self.client.generate(prompt, **fields))

    def stream(self, prompt: str | None = None, **fields: Any) -> tuple[list[Delta], Usage | None]:
        async def read() -> tuple[list[Delta], Usage | None]:
            stream: AsyncStream = await self.client.generate(prompt, stream=True, **fields)
            async with stream:
                return [delta async for delta in stream], stream.usage

        return self.run(read())

    def call(self, method: str, *args: Any, **fields: Any) -> Any:
        return self.run(getattr(self.client, method)(*args, **fields))

    def close(self) -> None:
        self.run(self.client.close())
        self._runner.close()


@pytest.fixture(scope="module", params=[Blocking, WithAsyncio])
def api(request: pytest.FixtureRequest, demo_stack: Stack) -> Iterator[Api]:
    api = request.param(demo_stack.grpc_address)
    yield api
    api.close()


def joined(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def test_models_name_the_served_model(api: Api, demo_stack: Stack) -> None:
    (model,) = api.call("models")
    assert "SmolLM2" in model.id
    assert model.max_model_len == 8192
    assert api.generate("Hello", model=model.id, max_tokens=1).usage is not None


def test_chat(api: Api) -> None:
    answer = api.generate(messages=CAPITAL, temperature=0, request_id="chat-1")
    (choice,) = answer.choices
    assert (answer.text, choice.finish_reason) == (ANSWER, "stop")
    assert answer.request_id == "chat-1"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert choice.token_ids[-1] == 2  # the ending id is counted, and not shown
    assert choice.logprobs == ()


def test_streamed_chat_equals_the_whole(api: Api) -> None:
    whole = api.generate(messages=CAPITAL, temperature=0)
    deltas, usage = api.stream(messages=CAPITAL, temperature=0)
    assert joined(deltas) == whole.text == ANSWER
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert tuple(ids) == whole.choices[0].token_ids
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert len(deltas) > 2
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_text_and_its_ids_give_the_same(api: Api) -> None:
    prompt, fields = "The quick brown fox", {"temperature": 0, "max_tokens": 12}
    of_text = api.generate(prompt, **fields)
    ids = api.call("tokenize", prompt).token_ids
    of_ids = api.generate(token_ids=ids, **fields)
    assert of_text.choices == of_ids.choices
    assert of_text.choices[0].finish_reason == "length"
    assert of_text.usage is not None
    assert (of_text.usage.prompt_tokens, of_text.usage.completion_tokens) == (len(ids), 12)


def test_second_run_hits_the_prefix_cache(api: Api) -> None:
    prompt = f"{type(api).__name__} likes a long shared prefix about paging. " * 10
    cold = api.generate(prompt, temperature=0, max_tokens=4)
    warm = api.generate(prompt, temperature=0, max_tokens=4)
    assert warm.text == cold.text
    assert cold.usage is not None
    assert warm.usage is not None
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == (warm.usage.prompt_tokens - 1) // 16 * 16


def test_logprobs(api: Api) -> None:
    answer = api.generate("Paris is", temperature=0, max_tokens=6, logprobs=3)
    (choice,) = answer.choices
    assert len(choice.logprobs) == len(choice.token_ids) == 6
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry.token_id == token_id
        assert len(entry.top) == 3
        # Greedy: the chosen one is the likeliest.
        assert entry.top[0] == (token_id, pytest.approx(entry.logprob))
        assert sum(math.exp(logprob) for _, logprob in entry.top) < 1
    deltas, _ = api.stream("Paris is", temperature=0, max_tokens=6, logprobs=0)
    chosen = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.top for entry in chosen] == [()] * 6
    expected = [entry.logprob for entry in choice.logprobs]
    assert [entry.logprob for entry in chosen] == pytest.approx(expected, abs=1e-3)


def test_three_seeded_choices_repeat_and_differ(api: Api) -> None:
    # The model's own top_p leaves hardly a choice here.
    fields = {"temperature": 1.0, "top_p": 1.0, "seed": 7, "n": 3, "max_tokens": 12}
    first = api.generate(messages=CAPITAL, **fields)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert first.usage is not None
    num_tokens = sum(len(choice.token_ids) for choice in first.choices)
    assert first.usage.completion_tokens == num_tokens
    deltas, _ = api.stream(messages=CAPITAL, **fields)
    assert [joined(deltas, index) for index in range(3)] == texts
    reasons = [(d.index, d.finish_reason) for d in deltas if d.finish_reason]
    assert sorted(index for index, _ in reasons) == [0, 1, 2]


def test_stop_string_cuts_text_and_usage(api: Api) -> None:
    whole = api.generate(messages=CAPITAL, temperature=0)
    answer = api.generate(messages=CAPITAL, temperature=0, stop="of Fra")
    assert (answer.text, answer.choices[0].finish_reason) == ("The capital ", "stop")
    assert answer.usage is not None
    assert whole.usage is not None
    assert answer.usage.completion_tokens < whole.usage.completion_tokens
    deltas, _ = api.stream(messages=CAPITAL, temperature=0, stop=["nowhere", "of Fra"])
    assert joined(deltas) == "The capital "


def test_stop_id_ends_and_ignored_eos_does_not(api: Api) -> None:
    whole = api.generate(messages=CAPITAL, temperature=0).choices[0]
    stop_id = whole.token_ids[3]
    answer = api.generate(messages=CAPITAL, temperature=0, stop_token_ids=[stop_id]).choices[0]
    assert answer.token_ids == whole.token_ids[:4]
    assert answer.finish_reason == "stop"
    longer = api.generate(messages=CAPITAL, temperature=0, ignore_eos=True, max_tokens=14)
    assert longer.choices[0].finish_reason == "length"
    assert longer.choices[0].token_ids[: len(whole.token_ids)] == whole.token_ids


def test_tokenize_and_detokenize_are_inverse(api: Api, demo_folder: Any) -> None:
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    text = "Ein Text, 一段文字, 👩‍🚀 and\n\tcode()"
    tokens = api.call("tokenize", text)
    assert list(tokens.token_ids) == tokenizer.encode(text).ids
    assert tokens.max_model_len == 8192
    assert api.call("detokenize", tokens.token_ids) == text
    rendered = api.call("detokenize", api.call("tokenize", messages=CAPITAL).token_ids)
    assert CAPITAL[0]["content"] in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1.0}, InvalidRequestError, "temperature"),
        ({"top_p": 1.5}, InvalidRequestError, "top_p"),
        ({"n": 0}, InvalidRequestError, "n"),
        ({"model": "no-such-model"}, ModelNotFoundError, "model"),
        ({"prompt": None, "token_ids": [5] * 9000, "max_tokens": 5}, InvalidRequestError, None),
        ({"prompt": None, "token_ids": [49_152]}, InvalidRequestError, None),
        ({"timeout_s": 0.05, "max_tokens": 2000, "ignore_eos": True}, DeadlineError, None),
    ],
)
def test_errors_are_octavos_own(
    fields: dict[str, Any], error: type[Exception], param: str | None, api: Api, demo_stack: Stack
) -> None:
    for run in (api.generate, api.stream):
        with pytest.raises(error) as caught:
            run(**{"prompt": "Hello", "max_tokens": 5, **fields})
        if param is not None:
            assert caught.value.param == param  # type: ignore[attr-defined]
    demo_stack.wait_idle()


def test_keys_are_checked(demo_stack: Stack, demo_folder: object) -> None:
    router = demo_stack.spawn(
        "router",
        *("--model", str(demo_folder), "--schedulers", demo_stack.schedulers[0].address),
        *("--grpc-port", "0", "--api-keys", "right:tenant-a"),
    )
    try:
        router.wait_ready()
        address = f"127.0.0.1:{router.ports['grpc_port']}"
        for kind in (Blocking, WithAsyncio):
            for key in (None, "wrong"):
                stranger = kind(address, key)
                for method, arguments in (("models", ()), ("tokenize", ("Hello",))):
                    with pytest.raises(AuthenticationError):
                        stranger.call(method, *arguments)
                with pytest.raises(AuthenticationError):
                    stranger.generate("Hello")
                stranger.close()
            friend = kind(address, "right")
            assert friend.generate(messages=CAPITAL, temperature=0).text == ANSWER
            friend.close()
    finally:
        router.stop()


@pytest.mark.parametrize("kind", [Blocking, WithAsyncio])
def test_nobody_there_is_unavailable(kind: type[Any]) -> None:
    nobody = kind(f"127.0.0.1:{free_port()}")
    with pytest.raises(UnavailableError):
        nobody.generate("Hello")
    nobody.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_leaving_a_stream_cancels_it(is_async: bool, demo_stack: Stack) -> None:
    """Leaving the `with` block ends the generation, which had thousands of tokens to go."""
    fields: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "stream": True}

    async def leave() -> None:
        async with (
            AsyncClient(demo_stack.grpc_address) as client,
            await client.generate("Once upon a time", **fields) as stream,
        ):
            async for delta in stream:
                if delta.token_ids:
                    return

    if is_async:
        asyncio.run(leave())
    else:
        with (
            Client(demo_stack.grpc_address) as client,
            client.generate("Once upon a time", **fields) as stream,
        ):
            next(delta for delta in stream if delta.token_ids)
    demo_stack.wait_idle()
