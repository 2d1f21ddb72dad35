"""The HTTP door: routes, bodies to requests, errors to OpenAI's shape.

The hot path leaves FastAPI early: a route answers with an `EventStream`, which writes its frames
itself. FastAPI is here for routing and the API document. Must not know: schedulers, protos.
Entry point: `create_app`.
"""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

import octavo
from octavo.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    OctavoError,
)
from octavo.metrics_http import exposition
from octavo_router.edge import FAILURE, OPEN_PATHS, Edge, error_headers
from octavo_router.fields import Fields, as_token_ids, refuse
from octavo_router.http_body import read_object
from octavo_router.http_generate import answer_chat, answer_completion
from octavo_router.openai_schema import (
    ChatCompletion,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
    describe,
    request_body,
)
from octavo_router.outcomes import RequestRecord
from octavo_router.prompts import MAX_TEXT_CHARS
from octavo_router.requests import Endpoint, Prompt, TextPrompt, parse_chat_prompt
from octavo_router.service import MAX_MODEL_NAME_CHARS, Service
from octavo_router.status_page import OPEN_PATHS as STATUS_PATHS
from octavo_router.status_page import add_status_page
from octavo_router.unsupported import refuse_unsupported

MAX_DETOKENIZE_IDS = 1 << 20
_GENERATION_PATHS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
}


def create_app(service: Service) -> ASGIApp:
    """The whole HTTP application."""
    # What its page loads comes from here: many clusters reach no other host.
    app = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs/files",
        title="Octavo",
        version=octavo.__version__,
        openapi_tags=[{"name": name} for name in ("generation", "models", "text", "probes")],
        redirect_slashes=False,
    )
    _add_error_handlers(app)
    _add_probe_routes(app, service)
    _add_model_routes(app, service)
    _add_text_routes(app, service)
    _add_generation_routes(app, service)
    describe(app)
    on_refused = partial(_count_refused, service)
    open_paths = OPEN_PATHS
    if service.settings.ui:
        add_status_page(app, service)
        open_paths |= STATUS_PATHS
    return Edge(app, service.keys, on_refused, open_paths, lambda: service.is_draining)


def _count_refused(service: Service, path: str) -> None:
    """A request that the edge refused for its key never reached its endpoint."""
    endpoint = _GENERATION_PATHS.get(path)
    if endpoint is not None:
        RequestRecord(service.metrics, endpoint).end("rejected")


def _add_error_handlers(app: FastAPI) -> None:
    async def on_octavo_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, OctavoError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:200]
        match error.status_code:
            case 404:
                return error_response(NotFoundError(f"no route {path!a}; see /docs"))
            case 405:
                answer = error_response(
                    MethodNotAllowedError(f"{path!a} doesn't take {request.method}; see /docs")
                )
                answer.headers.update(error.headers or {})
                return answer
            case _:
                return error_response(InvalidRequestError(str(error.detail)[:200]))

    async def on_validation_error(_: Request, error: Exception) -> Response:
        return error_response(InvalidRequestError(str(error)[:200]))

    async def on_failure(_: Request, error: Exception) -> Response:  # noqa: ARG001
        # The edge logs it.
        return error_response(OctavoError(FAILURE))

    app.add_exception_handler(OctavoError, on_octavo_error)
    app.add_exception_handler(Exception, on_failure)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def error_response(error: OctavoError) -> Response:
    return JSONResponse(error.openai_body(), error.kind.http_status, headers=error_headers(error))


def _add_probe_routes(app: FastAPI, service: Service) -> None:
    @app.get("/livez", tags=["probes"])
    async def livez() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    async def readyz() -> Response:
        """A scheduler is connected and takes requests (200), or not (503)."""
        is_ready = service.is_ready
        body = {"status": "ok" if is_ready else "unavailable"}
        return JSONResponse(body, 200 if is_ready else 503)

    app.get("/readyz", tags=["probes"])(readyz)
    app.get("/health", tags=["probes"])(readyz)

    @app.get("/metrics", tags=["probes"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics (with exemplars) if `Accept` asks for it."""
        accept = request.headers.get("accept", "")
        body, media_type = exposition(service.registry, accept)
        return Response(body, media_type=media_type)

    @app.get("/version", tags=["probes"])
    async def version() -> dict[str, str]:
        """The router's version."""
        return {"version": octavo.__version__}


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def card(name: str) -> ModelCard:
        model = service.sessions.model
        return ModelCard(
            id=name,
            created=service.created_s,
            max_model_len=None if model is None else model.max_model_len,
        )

    @app.get("/v1/models", tags=["models"])
    async def list_models() -> ModelList:
        """The served names."""
        return ModelList(data=[card(name) for name in service.model_names])

    @app.get("/v1/models/{model:path}", tags=["models"])
    async def retrieve_model(model: str) -> ModelCard:
        """One served name."""
        if not model:
            raise NotFoundError("no model named; see /v1/models")
        return card(service.served_name(model))


def _add_text_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", tags=["text"], openapi_extra=request_body("TokenizeRequest"))
    async def tokenize(request: Request) -> Tokenized:
        """Text or messages to ids, exactly as a generation would see them."""
        body = await read_object(request, service.settings.max_body_bytes)
        token_ids = await service.pipeline.tokenize(_text_to_tokenize(service, body))
        model = service.sessions.model
        return Tokenized(
            count=len(token_ids),
            max_model_len=None if model is None else model.max_model_len,
            tokens=token_ids.tolist(),
        )

    @app.post("/detokenize", tags=["text"], openapi_extra=request_body("DetokenizeRequest"))
    async def detokenize(request: Request) -> Detokenized:
        """Ids to text, special tokens included."""
        body = await read_object(request, service.settings.max_body_bytes)
        service.served_name(Fields(body).string("model", MAX_MODEL_NAME_CHARS))
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            refuse("tokens", "a list of token ids", tokens)
        if len(tokens) > MAX_DETOKENIZE_IDS:
            refuse("tokens", f"at most {MAX_DETOKENIZE_IDS} ids", len(tokens))
        token_ids = as_token_ids("tokens", tokens, service.vocab_size)
        return Detokenized(prompt=await service.pipeline.detokenize(token_ids))


def _text_to_tokenize(service: Service, body: dict[str, Any]) -> Prompt:
    fields = Fields(body)
    service.served_name(fields.string("model", MAX_MODEL_NAME_CHARS))
    refuse_unsupported(body, {})
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if body.get("messages") is not None:
        return parse_chat_prompt(body, service.rules)
    text = fields.string("prompt", MAX_TEXT_CHARS) or ""
    return TextPrompt(text, fields.boolean("add_special_tokens") is not False)


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        tags=["generation"],
        response_model=ChatCompletion,
        openapi_extra=request_body("ChatRequest", has_stream=True),
    )
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await answer_chat(service, request)

    @app.post(
        "/v1/completions",
        tags=["generation"],
        response_model=Completion,
        openapi_extra=request_body("CompletionRequest", has_stream=True),
    )
    async def completions(request: Request) -> Response:
        """Continue a text, or each of a list."""
        return await answer_completion(service, request)
