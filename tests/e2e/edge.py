"""The stack that the edge's tests share, and the two ways to talk to it: httpx and raw bytes.

Its limits are small, so that a test reaches them soon: see `start_edge_stack`.
"""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.stack import Stack
from tests.sse_parser import parse

KEY = "k1-secret-of-the-edge"
AUTHORIZATION = {"authorization": f"Bearer {KEY}"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 1 << 20
READ_TIMEOUT_S = 3.0
WRITE_STALL_S = 1.0
MAX_NUM_SEQS = 8
CONTROL = {"prompt": "the cat sat on the", "max_tokens": 120, "temperature": 0, "ignore_eos": True}


def start_edge_stack(folder: Path, model: Path) -> Stack:
    """Few rows and small chunks: requests queue, and a long prompt takes many steps."""
    return Stack(
        folder,
        model=model,
        worker_flags=("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "128"),
        scheduler_flags=("--check-integrity", "true"),
        router_flags=(
            *("--max-body-bytes", str(MAX_BODY_BYTES)),
            *("--read-timeout-s", str(READ_TIMEOUT_S)),
            *("--write-stall-s", str(WRITE_STALL_S)),
        ),
        environ={"OCTAVO_API_KEYS": KEY, "OCTAVO_LOG_LEVEL": "debug"},
    )


def http_client(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, timeout=60, headers=AUTHORIZATION)


async def control(client: httpx.AsyncClient) -> tuple[str, int]:
    """One whole stream, strictly parsed; its text and its prompt's tokens."""
    body = {**CONTROL, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(TEXT, json=body, headers=AUTHORIZATION)
    assert answer.status_code == 200, answer.text
    stream = parse(answer.content)
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == CONTROL["max_tokens"]
    return stream.text(), stream.usage["prompt_tokens"]


def raw_request(
    body: Any, *, path: str = TEXT, version: str = "1.1", headers: str = "", key: str = KEY
) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: x",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*lines, headers]).rstrip().encode() + b"\r\n\r\n" + data


def resident_mib(process_id: int) -> float:
    """Memory of a process that is in RAM."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def full_logs(stack: Stack) -> str:
    """Every line that every process of the stack wrote."""
    services = (*stack.workers, *stack.schedulers, *stack.routers)
    return "\n".join(service.log() for service in services)
