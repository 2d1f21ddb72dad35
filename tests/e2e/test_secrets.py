"""Secrets stay where they belong: prompts, answers and keys appear in no process's log, whatever
happens to their request; keys and passwords in no answer, no error and on no command line."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from tokenizers import Tokenizer

from octavo.serving import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.edge import AUTHORIZATION, CHAT, KEY, TEXT, full_logs, http_client, raw_request
from tests.e2e.stack import Stack
from tests.fakes.raw_http import dialling

# No word of ours has these in it.
MARKER = "zqxjkvprompt"
WRONG_KEY = "zqxjkvwrongkey"
CHAT_BODY = {
    "messages": [{"role": "user", "content": MARKER}, {"role": "system", "content": MARKER}]
}
BAD = [
    {"prompt": MARKER, "temperature": MARKER},
    {"prompt": [MARKER, 5]},
    {"prompt": MARKER * 300},
    {"prompt": MARKER, "stop": [MARKER] * 99},
    {"prompt": MARKER, "model": MARKER},
    {"prompt": MARKER, MARKER: {MARKER: MARKER}, "user": MARKER},
    {"messages": [{"role": MARKER, "content": MARKER}]},
    {"messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]},
]


def forms(marker: str, folder: Path) -> list[str]:
    """How a text could stand in a log: itself, escaped, encoded, or as its ids."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(marker).ids
    listed = ", ".join(map(str, ids[:6]))
    return [marker, marker.encode().hex(), listed, listed.replace(" ", "")]


async def drive(stack: Stack, headers: dict[str, str]) -> list[str]:
    """Good, bad, cut and stolen requests over both doors; the texts that came back."""
    port = stack.routers[0].ports["port"]
    answers: list[str] = []
    async with (
        http_client(stack) as client,
        dialling(port) as dial,
        open_channel(stack.grpc_address) as channel,
    ):
        # Of known length: the more text comes back, the surer it would be found.
        length = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        text = {"prompt": MARKER, **length}
        for path, body in ((TEXT, text), (CHAT, {**CHAT_BODY, **length})):
            answer = await client.post(path, json=body, headers=headers)
            choice = answer.json()["choices"][0]
            answers.append(choice.get("text") or choice["message"]["content"])
            await client.post(path, json={**body, "stream": True, "stop": [MARKER]})
        for body in BAD:
            for path in (TEXT, CHAT, "/tokenize"):
                await client.post(path, json=body)
        await client.post(TEXT, content=json.dumps(text).encode()[:-1])
        await client.get(f"/{MARKER}?{MARKER}={MARKER}")
        async with httpx.AsyncClient(base_url=stack.url) as thief:
            for value in (WRONG_KEY, f"Bearer {WRONG_KEY}", f"Bearer {KEY}{WRONG_KEY}"):
                await thief.post(TEXT, json=text, headers={"authorization": value})
        connection = await (await dial()).say(raw_request({**text, "max_tokens": 1000}))
        await asyncio.sleep(0.05)
        connection.transport.abort()
        connection = await (await dial()).say(f"{MARKER} {KEY}\r\n\r\n".encode())
        await connection.answer()
        stub = inference_pb2_grpc.InferenceStub(channel)
        await ask_grpc(stub, inference_pb2.InferenceGenerateRequest(text=MARKER, max_tokens=5))
        await ask_grpc(stub, inference_pb2.InferenceGenerateRequest(text=MARKER, temperature=9))
    return answers


async def ask_grpc(stub: inference_pb2_grpc.InferenceStub, request: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in stub.Generate(request, metadata=list(AUTHORIZATION.items()), timeout=20):
            pass


def test_no_log_holds_prompts_answers_or_keys(edge_stack: Stack, tiny_folder: Path) -> None:
    answers = asyncio.run(drive(edge_stack, {"X-Request-Id": "seen-in-logs"}))
    edge_stack.wait_idle()
    logs = full_logs(edge_stack)
    assert " DEBUG " in logs
    secrets = [KEY, WRONG_KEY, *forms(MARKER, tiny_folder)]
    for answer in answers:
        assert len(answer) >= 40
        secrets += [answer, answer[:20], *forms(answer, tiny_folder)]
    found = [secret for secret in secrets if re.search(re.escape(secret), logs, re.IGNORECASE)]
    assert not found


def test_no_answer_and_no_command_line_holds_a_key(edge_stack: Stack) -> None:
    paths = ("/version", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs", "/v1/models")

    async def ask() -> list[httpx.Response]:
        async with http_client(edge_stack) as client:
            found = [await client.get(path) for path in (*paths, "/nope", "/v1/models/nope")]
            found.append(await client.post(TEXT, json={"prompt": 5}))
        async with httpx.AsyncClient(base_url=edge_stack.url) as thief:
            headers = {"authorization": f"Bearer {WRONG_KEY}"}
            found.append(await thief.get("/v1/models", headers=headers))
        return found

    for answer in asyncio.run(ask()):
        shown = answer.text + str(answer.headers)
        assert KEY not in shown, answer.url
        assert WRONG_KEY not in shown, answer.url
    services = [*edge_stack.workers, *edge_stack.schedulers, *edge_stack.routers]
    for service in services:
        assert KEY.encode() not in Path(f"/proc/{service.process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("OCTAVO_REDIS_URL", f"redis://me:{MARKER}@host:bad", "can't be read"),
        ("OCTAVO_INTERNAL_TOKEN", f"{MARKER}\x01", "must be printable"),
    ],
)
def test_a_wrong_secret_is_refused_without_being_shown(
    variable: str, value: str, problem: str
) -> None:
    environ = {**os.environ, variable: value, "OCTAVO_LOG_LEVEL": "debug"}
    command = [sys.executable, "-m", "octavo", "scheduler", "--port", "0"]
    ended = subprocess.run(
        command, check=False, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert problem in ended.stderr
    assert variable in ended.stderr
    assert MARKER not in ended.stderr + ended.stdout
