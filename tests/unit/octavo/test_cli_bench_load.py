"""The load of `octavo bench`: over HTTP and gRPC, and by clients in processes of their own."""

import asyncio
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main as run_cli
from octavo.cli.grpc_load import run_grpc
from octavo.cli.http_load import run_http
from octavo.cli.load_clients import Answers, _collect
from octavo.cli.measurement import RequestTiming, Run
from octavo.cli.workloads import BenchRequest, load_shapes
from octavo.errors import OctavoError
from tests.fakes.inference_server import InferenceServer


class CompletionsServer:
    """Answers POST /v1/completions with SSE frames as given, each written on its own."""

    def __init__(self, status: str, writes: list[bytes]) -> None:
        self._head = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
        self._writes = writes
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(self._head)
        for data in self._writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()


def _load(server: CompletionsServer, count: int, told: Callable[[int], None]) -> Run:
    requests = [BenchRequest((11, 12, 13), 5)] * count

    async def scenario() -> Run:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            return await run_http(
                f"http://127.0.0.1:{port}", "m", requests, {"temperature": 0.0}, told, "key"
            )

    return asyncio.run(scenario())


EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'


USAGE = (
    b'data: {"choices": [], "usage": {"completion_tokens": 5, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
)


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "usage",
    [
        (USAGE + DONE,),
        (USAGE, DONE),
        (USAGE[:19], USAGE[19:] + DONE),
        (USAGE.replace(b'": ', b'":'), DONE),
    ],
)
def test_http_load_counts_frames_and_reads_the_usage(usage: tuple[bytes, ...]) -> None:
    # Three frames: one event, two at once, one cut in the middle of its mark. The usage is none,
    # however it arrives.
    frames = [EVENT, EVENT + EVENT, EVENT[:4], EVENT[4:]]
    server = CompletionsServer("200 OK", [*frames, *usage])
    told: list[int] = []
    run = _load(server, 3, told.append)
    assert len(server.bodies) == 3
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [11, 12, 13],
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    assert b"Authorization: Bearer key\r\n" in server.heads[0]
    assert run.num_output_tokens == 15
    assert run.num_cached_tokens == 6
    assert [len(timing.gaps_s) for timing in run.timings] == [2, 2, 2]
    # The bar ends where it should although events held more than one token.
    assert sum(told) == 15


def test_http_load_raises_what_the_server_says() -> None:
    refused = CompletionsServer("429 Too Many Requests", [b'{"error": "full"}'])
    with pytest.raises(ExceptionGroup) as group:
        _load(refused, 1, lambda _: None)
    assert group.group_contains(OctavoError, match=r"429 Too Many Requests: .*full")
    cut = CompletionsServer("200 OK", [EVENT])
    with pytest.raises(ExceptionGroup) as group:
        _load(cut, 1, lambda _: None)
    assert group.group_contains(OctavoError, match="ended without usage")


def test_grpc_load_counts_ids() -> None:
    told: list[int] = []
    requests = [BenchRequest((65, 66, 67), 3)] * 4
    with InferenceServer() as server:
        run = asyncio.run(run_grpc(server.address, requests, {"temperature": 0.0}, told.append))
    assert (run.num_output_tokens, sum(told)) == (12, 12)
    assert [len(timing.gaps_s) for timing in run.timings] == [2] * 4
    assert server.servicer.requests[0].ignore_eos


def test_a_clients_process_says_what_failed() -> None:
    here, there = multiprocessing.Pipe()
    answers = Answers((RequestTiming(1, 0.0),), 0.5)
    for item in (3, 4, answers, "no such model"):
        there.send(item)
    there.close()
    told: list[int] = []
    assert _collect(here, told.append) == answers
    assert told == [3, 4]
    with pytest.raises(OctavoError, match="no such model"):
        _collect(here, told.append)
    with pytest.raises(OctavoError, match="ended before its requests did"):
        _collect(here, told.append)
    here.close()


def test_a_server_that_is_not_there_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_shapes()["llama8b"]))
    for url, protocol in (("http://127.0.0.1:1", "http"), ("127.0.0.1:1", "grpc")):
        assert run_cli(["bench", "--url", url, "--protocol", protocol, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"octavo bench: {url}: ")
        assert error.count("\n") == 1
