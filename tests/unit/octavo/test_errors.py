"""The table of errors: what each is to gRPC, to HTTP and to OpenAI's clients."""

import json

import grpc
import pytest

from octavo import errors
from octavo.errors import OctavoError, from_grpc_code

# Name: gRPC code, HTTP status, OpenAI's type and code. Clients rely on every cell of it.
TABLE = {
    "OctavoError": ("INTERNAL", 500, "server_error", "internal_error"),
    "InvalidRequestError": ("INVALID_ARGUMENT", 400, "invalid_request_error", None),
    "ContextLengthError": (
        *("INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded"),
    ),
    "AuthenticationError": ("UNAUTHENTICATED", 401, "invalid_request_error", "invalid_api_key"),
    "ModelNotFoundError": ("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
    "NotFoundError": ("NOT_FOUND", 404, "invalid_request_error", "not_found"),
    "MethodNotAllowedError": (
        *("UNIMPLEMENTED", 405, "invalid_request_error", "method_not_allowed"),
    ),
    "RequestTooLargeError": ("INVALID_ARGUMENT", 413, "invalid_request_error", "request_too_large"),
    "UrlTooLongError": ("INVALID_ARGUMENT", 414, "invalid_request_error", "url_too_long"),
    "HeadersTooLargeError": (
        "INVALID_ARGUMENT",
        431,
        "invalid_request_error",
        "headers_too_large",
    ),
    "RequestTimeoutError": ("INVALID_ARGUMENT", 408, "invalid_request_error", "request_timeout"),
    "OverloadedError": ("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "overloaded"),
    "RateLimitError": ("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded"),
    "UnavailableError": ("UNAVAILABLE", 503, "server_error", "unavailable"),
    "DeadlineError": ("DEADLINE_EXCEEDED", 504, "server_error", "deadline_exceeded"),
    "CancelledError": ("CANCELLED", 499, "invalid_request_error", "cancelled"),
    "FailedPreconditionError": ("FAILED_PRECONDITION", 409, "server_error", "failed_precondition"),
    "ConfigurationError": ("FAILED_PRECONDITION", 500, "server_error", "configuration"),
}
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, OctavoError)
}


def grpc_code(error: type[OctavoError]) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == error.kind.grpc_code)


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(CLASSES)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_true(name: str) -> None:
    kind = CLASSES[name].kind
    seen = (grpc_code(CLASSES[name]).name, kind.http_status, kind.type, kind.code)
    assert seen == TABLE[name]


@pytest.mark.parametrize("name", TABLE)
def test_the_body_is_what_openais_clients_parse(name: str) -> None:
    error = CLASSES[name]("what was wrong: 7 > 5", param="n", retry_after_ms=20)
    kind = error.kind
    assert json.loads(json.dumps(error.openai_body())) == {
        "error": {
            "message": "what was wrong: 7 > 5",
            "type": kind.type,
            "param": "n",
            "code": kind.code,
        }
    }
    assert str(error) == "what was wrong: 7 > 5"
    assert error.retry_after_ms == 20
    assert CLASSES[name]("x").openai_body()["error"]["param"] is None


@pytest.mark.parametrize("name", TABLE)
def test_an_error_keeps_its_kind_over_grpc(name: str) -> None:
    """Several errors share a code; the peer sees the general one, with the same code."""
    error = CLASSES[name]
    arrived = from_grpc_code(error.kind.grpc_code, "why", param="n", retry_after_ms=5)
    assert arrived.kind.grpc_code in (error.kind.grpc_code, OctavoError.kind.grpc_code)
    assert (arrived.message, arrived.param, arrived.retry_after_ms) == ("why", "n", 5)
    # A client that may retry, or must not, still knows it.
    assert (arrived.kind.http_status >= 500) == (error.kind.http_status >= 500) or name in {
        "MethodNotAllowedError",
        "ConfigurationError",
    }


@pytest.mark.parametrize("code", [0, 2, 6, 7, 10, 11, 13, 15, 17, 999])
def test_codes_that_nobody_sends_become_internal_errors(code: int) -> None:
    arrived = from_grpc_code(code, "why")
    assert type(arrived) is OctavoError
    assert arrived.kind.http_status == 500


def test_an_absent_param_arrives_as_none() -> None:
    assert from_grpc_code(3, "why", param="").param is None
