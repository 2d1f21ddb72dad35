"""An OpenAI-compatible server that streams what a test tells it to.

Speaks chunked HTTP/1.1, as most servers do; `OpenAiServer` listens while its `with` block runs.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Body = dict[str, Any]


@dataclass
class Reply:
    """How to answer one POST: a status with a JSON body, or events and then how they end."""

    pieces: Sequence[str] = ("Hello", " world")
    usage: tuple[int, int] | None = (7, 2)  # prompt, completion
    status: int = 200
    body: Body = field(default_factory=dict)
    # Bytes that follow the pieces in place of the finish, the usage and [DONE].
    raw_end: bytes | None = None
    # With `raw_end`: whether the answer then ends as HTTP wants it, or is cut off.
    is_cut: bool = True
    # Called before each piece.
    before_piece: Callable[[], object] = lambda: None
    # Bytes a write; events are cut wherever it falls.
    chunk_bytes: int = 1 << 20


class OpenAiServer:
    """Answers by `reply(body)`; keeps what it was asked."""

    def __init__(
        self,
        reply: Callable[[Body], Reply] | None = None,
        *,
        models: Sequence[str] = ("m",),
        api_key: str | None = None,
    ) -> None:
        self.bodies: list[Body] = []
        self.paths: list[str] = []
        self.num_hung_up = 0
        self.models = models
        self.api_key = api_key
        self.reply = reply or _hello
        server = self

        class Handler(_Handler):
            owner = server

        self._http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _hello(body: Body) -> Reply:
    return Reply()


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: clients may hang up at any time."""


class _Handler(BaseHTTPRequestHandler):
    owner: OpenAiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""

    def do_GET(self) -> None:
        if self._is_refused():
            return
        data = [{"id": name, "object": "model"} for name in self.owner.models]
        self._send_json(200, {"object": "list", "data": data})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused():
            return
        self.owner.bodies.append(body)
        self.owner.paths.append(self.path)
        reply = self.owner.reply(body)
        if reply.status != 200:
            self._send_json(reply.status, reply.body)
            return
        try:
            self._stream(reply, is_chat=self.path.endswith("/chat/completions"))
        except OSError:
            self.owner.num_hung_up += 1
            self.close_connection = True

    def _is_refused(self) -> bool:
        key = self.owner.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send_json(401, {"error": {"message": "wrong key"}})
        return True

    def _send_json(self, status: int, body: Body) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, reply: Reply, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if is_chat:
            self._write(reply, _event(_choice({"role": "assistant", "content": ""}, None)))
        for piece in reply.pieces:
            reply.before_piece()
            choice = _choice({"content": piece}, None) if is_chat else {"text": piece, "index": 0}
            self._write(reply, _event(choice))
        if reply.raw_end is not None:
            self._write(reply, reply.raw_end)
            self.wfile.write(b"" if reply.is_cut else b"0\r\n\r\n")
            self.close_connection = True
            return
        self._write(reply, _event(_choice({}, "stop") if is_chat else _finish()))
        if reply.usage:
            usage = {"prompt_tokens": reply.usage[0], "completion_tokens": reply.usage[1]}
            self._write(reply, _data({"choices": [], "usage": usage}))
        self._write(reply, b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _write(self, reply: Reply, data: bytes) -> None:
        for start in range(0, len(data), reply.chunk_bytes):
            piece = data[start : start + reply.chunk_bytes]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()


def _choice(delta: Body, reason: str | None) -> Body:
    return {"index": 0, "delta": delta, "finish_reason": reason}


def _finish() -> Body:
    return {"text": "", "index": 0, "finish_reason": "stop"}


def _event(choice: Body) -> bytes:
    return _data({"choices": [choice]})


def _data(event: Body) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()
