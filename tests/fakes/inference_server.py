"""A tiny `octavo.v1.Inference` server: byte tokens, and an echo for an answer."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class EchoInference(inference_pb2_grpc.InferenceServicer):
    """Answers a prompt with itself, a byte at a time; a word in `user` asks for a failure.

    Keeps what it received: `requests`, `metadata` of the last call, and `was_cancelled`.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: dict[str, str | bytes] = {}
        self.was_cancelled = threading.Event()

    def Generate(  # noqa: N802
        self, request: Any, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.InferenceGenerateResponse]:
        self._note(request, context)
        if request.user == "refuse":
            context.set_trailing_metadata((("octavo-param", "temperature"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature 3: must be at most 2")
        if request.user == "overload":
            context.set_trailing_metadata((("octavo-retry-after-ms", "1500"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        if request.user == "endless":
            context.add_callback(self.was_cancelled.set)
            while context.is_active():
                yield inference_pb2.InferenceGenerateResponse(text="x", token_ids=[120])
        yield from _echo(request)

    def Tokenize(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._note(request, context)
        return inference_pb2.InferenceTokenizeResponse(
            token_ids=_ids_of(request), max_model_len=100
        )

    def Detokenize(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._note(request, context)
        text = bytes(request.token_ids).decode()
        return inference_pb2.InferenceDetokenizeResponse(text=text)

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._note(request, context)
        models = [
            inference_pb2.ServedModel(id=name, max_model_len=100, created_s=7) for name in "ab"
        ]
        return inference_pb2.InferenceListModelsResponse(models=models)

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())


def _ids_of(request: Any) -> list[int]:
    kind = request.WhichOneof("input")
    if kind == "token_ids":
        return list(request.token_ids.token_ids)
    if kind == "chat":
        text = "".join(f"{item.role}:{item.content};" for item in request.chat.messages)
    else:
        text = request.text
    return list(text.encode())


def _echo(request: Any) -> Iterator[inference_pb2.InferenceGenerateResponse]:
    """The choices take turns; each ends with its reason, the stream with the usage."""
    ids = _ids_of(request)
    n = request.n or 1
    for position, token_id in enumerate(ids):
        for index in range(n):
            message = inference_pb2.InferenceGenerateResponse(
                index=index, text=chr(token_id), token_ids=[token_id], request_id="r-1"
            )
            if request.HasField("logprobs"):
                logprob = message.logprobs.add(token_id=token_id, logprob=-0.5)
                logprob.top.add(token_id=token_id, logprob=-0.5)
            if position == len(ids) - 1:
                message.finish_reason = (
                    common_pb2.FINISH_REASON_LENGTH if index else common_pb2.FINISH_REASON_STOP
                )
            yield message
    usage = inference_pb2.GenerateUsage(
        prompt_tokens=len(ids), completion_tokens=n * len(ids), cached_tokens=1
    )
    yield inference_pb2.InferenceGenerateResponse(usage=usage, request_id="r-1")


class InferenceServer:
    """Serves an EchoInference on a free port while the `with` block runs."""

    def __init__(self) -> None:
        self.servicer = EchoInference()
        self._server = grpc.server(ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServicer_to_server(self.servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(None).wait()
