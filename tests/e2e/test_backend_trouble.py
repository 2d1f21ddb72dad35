"""What clients are told when the back end is over-full, or gone, before and within an answer."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from octavo.serving import error_from_rpc, open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.edge import TEXT
from tests.e2e.stack import Stack, total
from tests.fakes.raw_http import dialling
from tests.fakes.router_process import until
from tests.sse_parser import Stream, parse

MAX_NUM_SEQS = 2
MAX_QUEUE_TOKENS = 200
RUNNING = "octavo_num_requests_running"
BODY: dict[str, Any] = {"prompt": [7] * 60, "temperature": 0, "ignore_eos": True, "max_tokens": 100}


@pytest.fixture(scope="module")
def stack(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Of the tests here the last one kills it."""
    with Stack(
        tmp_path_factory.mktemp("trouble"),
        model=tiny_folder,
        worker_flags=("--max-num-seqs", str(MAX_NUM_SEQS)),
        scheduler_flags=("--max-queue-tokens", str(MAX_QUEUE_TOKENS)),
    ) as stack:
        yield stack


def check_retry(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["access-control-allow-origin"] == "*"


async def refused_by_grpc(stub: inference_pb2_grpc.InferenceStub) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(inference_pb2.InferenceGenerateRequest(text="x"), timeout=20).read()
    return error_from_rpc(caught.value)


def test_too_much_work_is_refused_at_once_and_the_rest_is_done(stack: Stack) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            reference = (await client.post(TEXT, json=BODY)).json()["choices"][0]["text"]
            # Two run, three wait, and there is no place for more.
            bodies = [{**BODY, "stream": bool(number % 2)} for number in range(12)]
            answers = await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))
            done = [answer for answer in answers if answer.status_code == 200]
            refused = [answer for answer in answers if answer.status_code != 200]
            assert len(done) >= MAX_NUM_SEQS
            assert len(refused) >= 12 - MAX_NUM_SEQS - MAX_QUEUE_TOKENS // 60 - 1
            for answer in refused:
                check_retry(answer, 429, "overloaded")
            for answer in done:
                if "event-stream" in answer.headers["content-type"]:
                    assert parse(answer.content).text() == reference
                else:
                    assert answer.json()["choices"][0]["text"] == reference
            # A refused list leaves none of its prompts behind.
            body = {**BODY, "prompt": [BODY["prompt"]] * 40}
            check_retry(await client.post(TEXT, json=body), 429, "overloaded")

    asyncio.run(main())
    stack.wait_idle()
    assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0


def test_when_the_last_scheduler_and_worker_die(stack: Stack) -> None:
    """A stream under way ends with an error event and [DONE]; what comes later is a 503."""

    async def read_stream(connection: Any) -> Stream:
        status, _, body = await connection.answer()
        assert status == 200
        return parse(body, num_choices=None)

    async def main() -> None:
        port = stack.routers[0].ports["port"]
        async with (
            httpx.AsyncClient(base_url=stack.url, timeout=60) as client,
            dialling(port) as dial,
            open_channel(stack.grpc_address) as channel,
        ):
            connection = await dial()
            long = {**BODY, "max_tokens": 1900}
            streaming = asyncio.create_task(read_stream(connection))
            request = client.build_request("POST", TEXT, json={**long, "stream": True})
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n"
            await connection.say(f"{head}\r\n".encode() + request.content)
            whole = asyncio.create_task(client.post(TEXT, json=long))
            await until(lambda: stack.scheduler_metrics()[RUNNING] == MAX_NUM_SEQS)
            await asyncio.sleep(0.2)
            for service in (*stack.workers, *stack.schedulers):
                service.kill(signal.SIGKILL)
            await asyncio.sleep(0.5)
            for stream in (True, False):
                answer = await client.post(TEXT, json={**BODY, "stream": stream})
                check_retry(answer, 503, "unavailable")
            error = await refused_by_grpc(inference_pb2_grpc.InferenceStub(channel))
            assert type(error).__name__ == "UnavailableError"
            assert error.retry_after_ms > 0
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/livez")).status_code == 200
            check_retry(await whole, 503, "unavailable")
            stream = await streaming
            assert stream.error is not None
            assert stream.error["code"] == "unavailable"
            assert stream.text()
            assert stream.finish() is None
        assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0

    asyncio.run(main())
