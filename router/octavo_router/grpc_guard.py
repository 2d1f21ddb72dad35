"""The public gRPC door's last line of defence, as `edge` is HTTP's.

Bytes that are no message become a refusal instead of gRPC's UNKNOWN, and whatever else goes wrong
leaves as an OctavoError; prompts that errors may quote are neither logged nor sent.
Must not know: methods. Entry points: `DecodeGuard`, `answering`.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from octavo.errors import InvalidRequestError, OctavoError
from octavo.serving import abort
from octavo_router.edge import FAILURE, trace_of

log = logging.getLogger(__name__)


class DecodeGuard(grpc.aio.ServerInterceptor):
    """Hands None to methods whose request can't be decoded; `answering` refuses it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        decode = handler.request_deserializer

        def decode_or_none(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError:
                return None

        return handler._replace(request_deserializer=decode_or_none)


@contextlib.asynccontextmanager
async def answering(
    request: Any, context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncGenerator[None]:
    """Encloses a method: every error ends the RPC with its code."""
    try:
        if request is None:
            raise InvalidRequestError("the bytes aren't a request of this method")
        yield
    except OctavoError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.error("a request failed: %s", trace_of(error))
        await abort(context, OctavoError(FAILURE))
