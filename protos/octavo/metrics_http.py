"""`GET /metrics`: a registry as its scraper asks for it, and a small server for who has no HTTP.

Must not know: any metric. Entry points: `exposition`, `serve_metrics`.
"""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from octavo.errors import ConfigurationError

# A scraper that stops in mid-request doesn't hold its thread for ever.
_CLIENT_TIMEOUT_S = 10.0


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The registry as the `Accept` header asks for it, and its media type.

    OpenMetrics, which alone carries exemplars, or Prometheus text. Names go out as they are:
    the library's own choice would turn the colons of `vllm:` names into underscores.
    """
    as_is = openmetrics.ALLOWUTF8
    asked = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    if "application/openmetrics-text" in asked:
        return openmetrics.generate_latest(registry, as_is), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry, as_is), CONTENT_TYPE_PLAIN_0_0_4


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> ThreadingHTTPServer:
    """Serve `registry` from a daemon thread until `shutdown` and `server_close`.

    Raises ConfigurationError if it can't listen there.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            body, media_type = exposition(registry, self.headers.get("Accept") or "")
            self.send_response(200)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Scrapes aren't logged."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigurationError(
            f"OCTAVO_METRICS_PORT={port}: can't listen on {host}: {error.strerror}",
            param="metrics_port",
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
