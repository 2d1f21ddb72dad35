"""Octavo's own Python client: tokens over gRPC, without HTTP; sync and asyncio.

    with Client("127.0.0.1:8001") as client:
        answer = client.generate(messages=[{"role": "user", "content": "Hello"}])
        print(answer.text)
        with client.generate("Once upon", stream=True, max_tokens=50) as stream:
            for delta in stream:
                print(delta.text, end="")

`AsyncClient` has the same methods as coroutines. Every failure is an `OctavoError`. Must not
know: any service. Entry points: `Client`, `AsyncClient`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from octavo.client_messages import (
    Delta,
    Generation,
    GenerationBuilder,
    Model,
    Options,
    Tokens,
    Usage,
    delta_of,
    detokenize_request,
    generate_request,
    models_of,
    tokenize_request,
    tokens_of,
    usage_of,
)
from octavo.serving import CHANNEL_OPTIONS, error_from_rpc
from octavo.v1 import inference_pb2, inference_pb2_grpc

Messages = Sequence[Mapping[str, Any]]
Metadata = tuple[tuple[str, str], ...]


def _metadata(api_key: str | None) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class Stream:
    """A running generation: iterate for its Deltas. Leaving it early cancels it.

    `usage` is set when the last Delta was read.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.usage: Usage | None = None

    def __iter__(self) -> Iterator[Delta]:
        try:
            for message in self._call:
                self.usage = usage_of(message) or self.usage
                yield delta_of(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def close(self) -> None:
        """Cancel the generation if it still runs."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """A blocking client; may be used from several threads. Close it, or use it in `with`."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`timeout_s` is the default deadline of every call; None = none.

        `credentials` for a server with TLS: `grpc.ssl_channel_credentials(...)`.
        """
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Iterable[int] | None = None,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Iterable[int] | None = None,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Stream: ...
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Iterable[int] | None = None,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | Stream:
        """Generate from exactly one of `prompt`, `messages`, `token_ids`.

        Absent options take the model's defaults. With `stream` the answer comes as it is made.
        """
        request = generate_request(prompt, messages, token_ids, options)
        running = Stream(self._call(self._stub.Generate, request, timeout_s))
        if stream:
            return running
        builder = GenerationBuilder()
        for delta in running:
            builder.add(delta)
        return builder.build(running.usage)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
        model: str = "",
    ) -> Tokens:
        """The ids that `generate` would see, of exactly one of `prompt` and `messages`."""
        request = tokenize_request(prompt, messages, add_special_tokens, model)
        return tokens_of(self._unary(self._stub.Tokenize, request))

    def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        """The text of `token_ids`."""
        return self._unary(self._stub.Detokenize, detokenize_request(token_ids, model)).text

    def models(self) -> tuple[Model, ...]:
        """The models served, one per name."""
        request = inference_pb2.InferenceListModelsRequest()
        return models_of(self._unary(self._stub.ListModels, request))

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        return method(request, timeout=timeout, metadata=self._metadata)

    def _unary(self, method: Any, request: Any) -> Any:
        try:
            return self._call(method, request)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream:
    """`Stream` for asyncio: `async with`, `async for`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.usage: Usage | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for message in self._call:
                self.usage = usage_of(message) or self.usage
                yield delta_of(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        except asyncio.CancelledError:
            # Not always done by itself: see `octavo.streams.ending`.
            self._call.cancel()
            raise

    async def close(self) -> None:
        """Cancel the generation if it still runs."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncClient:
    """`Client` for asyncio. Belongs to the event loop in which it was made."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`timeout_s` is the default deadline of every call; None = none.

        `credentials` for a server with TLS: `grpc.ssl_channel_credentials(...)`.
        """
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Iterable[int] | None = None,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...
    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Iterable[int] | None = None,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream: ...
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Iterable[int] | None = None,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | AsyncStream:
        """See `Client.generate`."""
        request = generate_request(prompt, messages, token_ids, options)
        running = AsyncStream(self._call(self._stub.Generate, request, timeout_s))
        if stream:
            return running
        builder = GenerationBuilder()
        async for delta in running:
            builder.add(delta)
        return builder.build(running.usage)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
        model: str = "",
    ) -> Tokens:
        """See `Client.tokenize`."""
        request = tokenize_request(prompt, messages, add_special_tokens, model)
        return tokens_of(await self._unary(self._stub.Tokenize, request))

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        """See `Client.detokenize`."""
        request = detokenize_request(token_ids, model)
        return (await self._unary(self._stub.Detokenize, request)).text

    async def models(self) -> tuple[Model, ...]:
        """See `Client.models`."""
        request = inference_pb2.InferenceListModelsRequest()
        return models_of(await self._unary(self._stub.ListModels, request))

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        return method(request, timeout=timeout, metadata=self._metadata)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await self._call(method, request)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
