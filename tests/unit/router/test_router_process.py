"""`octavo router` as a process: ready line, drain, exit codes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.client import AsyncClient
from octavo.errors import OctavoError
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_process import until
from tests.sse_parser import parse
from tests.unit.router.trained_tokenizers import qwen_style

BODY = {"prompt": "hi", "max_tokens": 100, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = qwen_style(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text("{}")
    return folder


@contextlib.contextmanager
def router(
    model: Path, folder: Path, *flags: str, **environ: str
) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "octavo_router", "--model", str(model)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--grpc-port", "0", *flags],
        env={**os.environ, "OCTAVO_READY_FILE": str(folder / "ready.json"), **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def ports_of(folder: Path) -> dict[str, Any]:
    ready = folder / "ready.json"
    await until(ready.exists)
    return json.loads(ready.read_text())


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = await asyncio.to_thread(process.communicate, timeout=30)
    return process.returncode, stderr


def test_a_running_stream_survives_sigterm(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeScheduler(interval_s=0.005, vocab_size=256, eos_token_ids=())
        async with fake:
            with router(model, tmp_path, "--schedulers", fake.address) as process:
                port = (await ports_of(tmp_path))["port"]
                url = f"http://127.0.0.1:{port}"
                async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                    await until(lambda: fake.num_sessions == 1)
                    data = b""
                    async with client.stream("POST", "/v1/completions", json=BODY) as answer:
                        assert answer.status_code == 200
                        async for part in answer.aiter_raw():
                            if not data:
                                process.send_signal(signal.SIGTERM)
                            data += part
                stream = parse(data)
                assert stream.finish() == "length"
                code, stderr = await ended(process)
                assert code == 0
                assert stderr.count("ready: router http on 127.0.0.1:") == 1
                assert f"http on 127.0.0.1:{port} grpc on 127.0.0.1:" in stderr
                assert "hi" not in stderr.replace("this", "")
                assert fake.num_live == 0
                assert not fake.cancels

    asyncio.run(main())


def test_while_streams_finish_new_requests_are_refused_in_words(
    model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        fake = FakeScheduler(interval_s=0.005, vocab_size=256, eos_token_ids=())
        fake.hold_at = 50
        async with fake:
            with router(model, tmp_path, "--schedulers", fake.address) as process:
                url = f"http://127.0.0.1:{(await ports_of(tmp_path))['port']}"
                async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                    await until(lambda: fake.num_sessions == 1)
                    running = asyncio.create_task(client.post("/v1/completions", json=BODY))
                    await until(lambda: bool(fake.num_live))
                    process.send_signal(signal.SIGTERM)
                    answer = await client.get("/readyz")
                    while answer.status_code != 503:
                        answer = await client.get("/readyz")
                    assert answer.headers["connection"] == "close"
                    # Not only for a moment: as long as the stream runs.
                    await asyncio.sleep(1.0)
                    answer = await client.post("/v1/completions", json=BODY)
                    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
                    assert answer.json()["error"]["code"] == "unavailable"
                    fake.hold_at = None
                    assert parse((await running).content).finish() == "length"
                code, _ = await ended(process)
                assert code == 0
                assert len(fake.submits) == 1

    asyncio.run(main())


def test_while_grpc_streams_finish_new_calls_are_refused_in_words(
    model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        fake = FakeScheduler(interval_s=0.005, vocab_size=256, eos_token_ids=())
        fake.hold_at = 50
        async with fake:
            with router(model, tmp_path, "--schedulers", fake.address) as process:
                ports = await ports_of(tmp_path)
                await until(lambda: fake.num_sessions == 1)
                async with AsyncClient(f"127.0.0.1:{ports['grpc_port']}") as client:
                    running = asyncio.create_task(client.generate("hi", max_tokens=100))
                    await until(lambda: bool(fake.num_live))
                    process.send_signal(signal.SIGTERM)
                    # As long as the stream runs, however late they come.
                    for pause_s in (0.1, 1.0):
                        await asyncio.sleep(pause_s)
                        with pytest.raises(OctavoError, match="the router is shutting down"):
                            await client.generate("hi", max_tokens=100)
                    fake.hold_at = None
                    assert len((await running).choices[0].token_ids) == 100
                code, _ = await ended(process)
                assert code == 0
                assert len(fake.submits) == 1

    asyncio.run(main())


def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeScheduler(interval_s=0.05, vocab_size=256, eos_token_ids=())
        async with fake:
            with router(model, tmp_path, "--schedulers", fake.address) as process:
                port = (await ports_of(tmp_path))["port"]
                await until(lambda: fake.num_sessions == 1)
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                data = json.dumps({**BODY, "max_tokens": 1000}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
                writer.write(head.encode() + b"\r\n\r\n" + data)
                await until(lambda: bool(fake.submits))
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                code, _ = await ended(process)
                assert code == 130
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ([], {"OCTAVO_REQUEST_TIMEOUT_S": "soon"}, "OCTAVO_REQUEST_TIMEOUT_S"),
        ([], {"OCTAVO_API_KEYS": "a b"}, "OCTAVO_API_KEYS"),
        (["--model", "/nowhere"], {}, "/nowhere"),
        (["--host", "192.0.2.1"], {}, "OCTAVO_HOST"),
    ],
)
def test_mistakes_end_the_start(
    model: Path, tmp_path: Path, flags: list[str], environ: dict[str, str], said: str
) -> None:
    async def main() -> None:
        with router(model, tmp_path, *flags, **environ) as process:
            code, stderr = await ended(process)
            assert code != 0
            assert said in stderr
            assert "Traceback" not in stderr
            assert "a b" not in stderr

    asyncio.run(main())


@pytest.mark.parametrize("flag", ["true", "false"])
def test_vllm_names_are_a_setting(flag: str, model: Path, tmp_path: Path) -> None:
    async def main() -> str:
        flags = ("--vllm-metrics", flag, "--served-model-name", "public,other")
        with router(model, tmp_path, *flags):
            port = (await ports_of(tmp_path))["port"]
            async with httpx.AsyncClient(timeout=20) as client:
                return (await client.get(f"http://127.0.0.1:{port}/metrics")).text

    text = asyncio.run(main())
    assert "octavo_prompt_tokens_total 0.0" in text
    assert ('vllm:prompt_tokens_total{model_name="public"} 0.0' in text) is (flag == "true")
    assert ("vllm:" in text) is (flag == "true")
