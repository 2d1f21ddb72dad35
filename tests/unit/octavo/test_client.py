"""octavo.client against a tiny real gRPC server: what is sent, what comes back, what is raised."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from octavo.client import AsyncClient, Client
from octavo.client_messages import Generation, Logprob, Model, Tokens, Usage
from octavo.errors import (
    DeadlineError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
)
from tests.fakes.inference_server import InferenceServer

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with InferenceServer() as server:
        yield server


class Blocking:
    """AsyncClient with Client's face, so that one suite checks both."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self._arguments = (address, api_key)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            async with AsyncClient(*self._arguments) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(call())

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._run(name, *args, **kwargs)

    def __enter__(self) -> "Blocking":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


BOTH = pytest.mark.parametrize("client_class", [Client, Blocking])


@BOTH
def test_generates_from_text_messages_and_ids(client_class: Any, server: InferenceServer) -> None:
    with client_class(server.address) as client:
        assert client.generate("abc").text == "abc"
        assert client.generate(messages=CHAT).text == "user:hi;"
        answer: Generation = client.generate(token_ids=(104, 105))
    assert answer.text == "hi"
    assert answer.usage == Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=1)
    assert answer.request_id == "r-1"
    (choice,) = answer.choices
    assert (choice.index, choice.token_ids, choice.finish_reason) == (0, (104, 105), "stop")


@BOTH
def test_choices_are_put_together_by_index(client_class: Any, server: InferenceServer) -> None:
    with client_class(server.address) as client:
        answer = client.generate("ab", n=3, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == ["ab"] * 3
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "length"]
    assert answer.choices[2].logprobs == (
        Logprob(97, -0.5, ((97, -0.5),)),
        Logprob(98, -0.5, ((98, -0.5),)),
    )


@BOTH
def test_options_are_sent_as_given_and_absent_ones_stay_absent(
    client_class: Any, server: InferenceServer
) -> None:
    with client_class(server.address) as client:
        client.generate("a", temperature=0.0, stop="x", top_k=-1, seed=0, ignore_eos=False)
        client.generate("a", stop=["x", "y"], stop_token_ids=[1], idempotency_key="k", model="m")
    first, second = server.servicer.requests
    set_fields = {descriptor.name for descriptor, _ in first.ListFields()}
    assert set_fields == {"text", "temperature", "stop", "top_k", "seed", "ignore_eos"}
    assert (first.temperature, list(first.stop), first.top_k) == (0.0, ["x"], -1)
    assert (list(second.stop), list(second.stop_token_ids)) == (["x", "y"], [1])
    assert (second.idempotency_key, second.model) == ("k", "m")


@BOTH
def test_the_api_key_is_a_bearer_token(client_class: Any, server: InferenceServer) -> None:
    with client_class(server.address, "secret") as client:
        client.models()
    assert server.servicer.metadata["authorization"] == "Bearer secret"
    with client_class(server.address) as client:
        client.models()
    assert "authorization" not in server.servicer.metadata


@BOTH
def test_tokenize_detokenize_models(client_class: Any, server: InferenceServer) -> None:
    with client_class(server.address) as client:
        assert client.tokenize("ab") == Tokens((97, 98), 100)
        assert client.tokenize("ab", add_special_tokens=False).token_ids == (97, 98)
        assert len(client.tokenize(messages=CHAT).token_ids) == len("user:hi;")
        assert client.detokenize((104, 105)) == "hi"
        assert client.models() == (Model("a", 100, 7), Model("b", 100, 7))
    default, bare, chat = server.servicer.requests[:3]
    assert (default.add_special_tokens, bare.add_special_tokens) == (True, False)
    assert not chat.HasField("add_special_tokens")


@BOTH
def test_failures_are_octavo_errors(client_class: Any, server: InferenceServer) -> None:
    with client_class(server.address) as client:
        with pytest.raises(InvalidRequestError, match="temperature 3") as refused:
            client.generate("a", user="refuse")
        with pytest.raises(OverloadedError, match="queue is full") as overloaded:
            client.generate("a", user="overload")
        with pytest.raises(DeadlineError):
            client.generate("a", user="endless", timeout_s=0.2)
    assert refused.value.param == "temperature"
    assert overloaded.value.retry_after_ms == 1500


@BOTH
def test_what_no_message_can_hold_is_refused_before_it_is_sent(
    client_class: Any, server: InferenceServer
) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("exactly one", {}),
        ("exactly one", {"prompt": "a", "token_ids": [1]}),
        ("no such option: max_token", {"prompt": "a", "max_token": 3}),
        ("not a valid request", {"prompt": "a", "max_tokens": -1}),
        ("not a valid request", {"prompt": "a", "temperature": "hot"}),
        ("not a valid request", {"token_ids": [1 << 32]}),
        ("not a valid request", {"messages": [{"role": "user", "text": "a"}]}),
        ("not a valid request", {"messages": [{"role": "user", "content": 1}]}),
    ]
    with client_class(server.address) as client:
        for message, arguments in cases:
            with pytest.raises(InvalidRequestError, match=message):
                client.generate(**arguments)
        with pytest.raises(InvalidRequestError, match="exactly one"):
            client.tokenize()
        with pytest.raises(InvalidRequestError, match="not a valid request"):
            client.tokenize(messages=[{"role": "user", "content": 1}])
        with pytest.raises(InvalidRequestError, match="not a valid id"):
            client.detokenize([-1])
    assert server.servicer.requests == []


@BOTH
def test_no_server(client_class: Any) -> None:
    with client_class("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.models()


def test_streams_deltas_in_order(server: InferenceServer) -> None:
    with Client(server.address) as client, client.generate("abc", stream=True) as stream:
        assert stream.usage is None
        deltas = list(stream)
    assert [delta.text for delta in deltas] == ["a", "b", "c", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop", None]
    assert stream.usage == Usage(3, 3, 1)


def test_leaving_a_stream_cancels_it(server: InferenceServer) -> None:
    with Client(server.address) as client:
        with client.generate("a", user="endless", stream=True) as stream:
            assert next(iter(stream)).text == "x"
        assert server.servicer.was_cancelled.wait(10)


def test_a_stream_raises_what_the_call_fails_with(server: InferenceServer) -> None:
    with Client(server.address) as client:
        stream = client.generate("a", user="overload", stream=True)
        with pytest.raises(OverloadedError):
            list(stream)


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_async_stream_and_its_cancellation(server: InferenceServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            async with await client.generate("abc", stream=True) as stream:
                texts = [delta.text async for delta in stream]
            assert texts == ["a", "b", "c", ""]
            assert stream.usage == Usage(3, 3, 1)
            async with await client.generate("a", user="endless", stream=True) as stream:
                async for _ in stream:
                    break
            assert await asyncio.to_thread(server.servicer.was_cancelled.wait, 10)

    _run(scenario())


def test_async_calls_run_side_by_side(server: InferenceServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            answers = await asyncio.gather(*(client.generate(text) for text in "abcdefgh"))
        assert [answer.text for answer in answers] == list("abcdefgh")

    _run(scenario())


def test_errors_have_one_base(server: InferenceServer) -> None:
    with Client(server.address) as client, pytest.raises(OctavoError):
        client.generate("a", user="refuse")
