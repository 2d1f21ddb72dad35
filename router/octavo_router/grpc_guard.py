"""The public gRPC door's last line of defence, as `edge` is HTTP's.

Bytes that are no message become a refusal instead of gRPC's UNKNOWN, and whatever else goes wrong
leaves as an OctavoError; prompts that errors may quote are neither logged nor sent.
Must not know: methods. Entry points: `DecodeGuard`, `answering`, `Reader`.
"""

import asyncio
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


class Reader:
    """The client of a stream, which must go on reading: `begin` and `end` enclose each message.

    Flow control holds a message back while the client takes none; after `stall_s` of that the
    RPC's task is cancelled, and with it the work.
    """

    __slots__ = ("_loop", "_stall_s", "_task", "_timer", "_waiting_since")

    def __init__(self, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stall_s = stall_s
        self._waiting_since: float | None = None
        self._timer = self._loop.call_later(stall_s, self._check)

    def begin(self) -> None:
        self._waiting_since = self._loop.time()

    def end(self) -> None:
        self._waiting_since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        since = self._waiting_since
        waited_s = 0.0 if since is None else self._loop.time() - since
        if waited_s >= self._stall_s and self._task is not None:
            log.info("a gRPC client has not read for %g s: cancelled", self._stall_s)
            self._task.cancel()
            return
        self._timer = self._loop.call_later(self._stall_s - waited_s, self._check)
