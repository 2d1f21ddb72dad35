"""Behind nginx as it comes, with buffering on and HTTP/1.0 upstream: tokens arrive as they are."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.edge import AUTHORIZATION
from tests.e2e.stack import Stack, as_json, free_port, total
from tests.programs import find_program

CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {upstream}; }}
  }}
}}
"""
NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def proxied(edge_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an nginx in front of the stack's router."""
    nginx = find_program("nginx", "nginx-light")
    folder = tmp_path_factory.mktemp("nginx")
    port = free_port()
    settings = CONFIGURATION.format(folder=folder, port=port, upstream=edge_stack.url)
    (folder / "nginx.conf").write_text(settings)
    process = subprocess.Popen([nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process, folder)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def wait_for(url: str, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "error.log").read_text()
        with suppress(OSError), urllib.request.urlopen(f"{url}/livez", timeout=5) as answer:
            assert answer.status == 200
            return
        time.sleep(0.05)
    raise AssertionError("nginx doesn't answer")


def test_the_first_token_comes_while_the_last_is_far(proxied: str, edge_stack: Stack) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", **AUTHORIZATION}
    post = urllib.request.Request(f"{proxied}/v1/completions", as_json(body), headers)
    with urllib.request.urlopen(post, timeout=60) as answer:
        first = answer.readline()
        num_running = total(edge_stack.scheduler_metrics(), "octavo_num_requests_running")
        rest = answer.read()
    assert first.startswith(b"data: ")
    assert num_running == 1
    events = [line[6:] for line in (first + rest).split(b"\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(chunks) > NUM_TOKENS // 20
