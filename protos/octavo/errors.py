"""One tree of errors and one table from them to gRPC codes and HTTP answers.

An error says what was wrong, the value, the limit and what to do. Whatever a user can cause
raises an `OctavoError`; `assert` is for our own invariants. Must not know: grpc, HTTP servers.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A row of the table: gRPC code number, HTTP status, OpenAI's `type` and `code`."""

    grpc_code: int
    http_status: int
    type: str
    code: str | None


class OctavoError(Exception):
    """Base: an internal error. `param` names the request field to blame, if one is."""

    kind = ErrorKind(13, 500, "server_error", "internal_error")

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    def openai_body(self) -> dict[str, Any]:
        """The JSON body that OpenAI's clients parse."""
        kind = self.kind
        error = {"message": self.message, "type": kind.type, "param": self.param, "code": kind.code}
        return {"error": error}


class InvalidRequestError(OctavoError):
    """The request can't be served as it is: a value, a type or a size is wrong."""

    kind = ErrorKind(3, 400, "invalid_request_error", None)


class ContextLengthError(InvalidRequestError):
    """Prompt and answer don't fit into the model's context or the cache."""

    kind = ErrorKind(3, 400, "invalid_request_error", "context_length_exceeded")


class AuthenticationError(OctavoError):
    """No key, or a wrong one."""

    kind = ErrorKind(16, 401, "invalid_request_error", "invalid_api_key")


class ModelNotFoundError(OctavoError):
    """The named model isn't served here."""

    kind = ErrorKind(5, 404, "invalid_request_error", "model_not_found")


class NotFoundError(OctavoError):
    """No such route."""

    kind = ErrorKind(5, 404, "invalid_request_error", "not_found")


class MethodNotAllowedError(OctavoError):
    """The route exists, the method doesn't."""

    kind = ErrorKind(12, 405, "invalid_request_error", "method_not_allowed")


class RequestTooLargeError(OctavoError):
    """The body exceeds the limit."""

    kind = ErrorKind(3, 413, "invalid_request_error", "request_too_large")


class UrlTooLongError(OctavoError):
    """The URL exceeds the limit."""

    kind = ErrorKind(3, 414, "invalid_request_error", "url_too_long")


class HeadersTooLargeError(OctavoError):
    """The headers exceed the limit."""

    kind = ErrorKind(3, 431, "invalid_request_error", "headers_too_large")


class RequestTimeoutError(OctavoError):
    """The client took too long to send its request."""

    kind = ErrorKind(3, 408, "invalid_request_error", "request_timeout")


class OverloadedError(OctavoError):
    """The queue is full; `retry_after_ms` says when to come back."""

    kind = ErrorKind(8, 429, "rate_limit_error", "overloaded")


class RateLimitError(OctavoError):
    """The tenant's quota is used up; `retry_after_ms` None = the request never fits into it."""

    kind = ErrorKind(8, 429, "rate_limit_error", "rate_limit_exceeded")


class UnavailableError(OctavoError):
    """No worker or scheduler can serve now (starting, draining, lost)."""

    kind = ErrorKind(14, 503, "server_error", "unavailable")


class DeadlineError(OctavoError):
    """The request's deadline passed."""

    kind = ErrorKind(4, 504, "server_error", "deadline_exceeded")


class CancelledError(OctavoError):
    """The client cancelled."""

    kind = ErrorKind(1, 499, "invalid_request_error", "cancelled")


class FailedPreconditionError(OctavoError):
    """A handshake's precondition doesn't hold (leader, epoch, wire version, model)."""

    kind = ErrorKind(9, 409, "server_error", "failed_precondition")


class ConfigurationError(OctavoError):
    """A setting is wrong; the process must not start."""

    kind = ErrorKind(9, 500, "server_error", "configuration")


_BY_GRPC_CODE: dict[int, type[OctavoError]] = {
    1: CancelledError,
    3: InvalidRequestError,
    4: DeadlineError,
    5: ModelNotFoundError,
    8: OverloadedError,
    9: FailedPreconditionError,
    14: UnavailableError,
    16: AuthenticationError,
}


def from_grpc_code(
    code: int, message: str, *, param: str | None = None, retry_after_ms: int | None = None
) -> OctavoError:
    """The error that a peer's code stands for; unknown codes become the base error."""
    error = _BY_GRPC_CODE.get(code, OctavoError)
    return error(message, param=param or None, retry_after_ms=retry_after_ms)
