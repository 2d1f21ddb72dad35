"""The HTTP API beside answers: models, tokenize, probes, headers, request ids."""

import asyncio
import json

import pytest

from tests.fakes.byte_tokenizer import EOS
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router
from tests.unit.router.http_answers import CHAT, HI, TEXT, run, saying, text_of


def test_models_and_names() -> None:
    fake = byte_scheduler(max_model_len=512)

    async def check(router: RunningRouter) -> None:
        listed = (await router.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["org/main", "alias"]
        assert listed["data"][0]["max_model_len"] == 512
        assert (await router.http.get("/v1/models/org/main")).json()["id"] == "org/main"
        answer = await router.http.get("/v1/models/other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        for given, said in [("alias", "alias"), (None, "org/main"), ("", "org/main")]:
            body = (await router.http.post(TEXT, json={"prompt": "x", "model": given})).json()
            assert body["model"] == said
        answer = await router.http.post(TEXT, json={"prompt": "x", "model": "gpt"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")

    run(fake, check, served_model_name=("org/main", "alias"))


def test_tokenize_and_detokenize() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        answer = await router.http.post("/tokenize", json={"prompt": "aé"})
        assert answer.json() == {"count": 3, "max_model_len": 2048, "tokens": [97, 195, 169]}
        answer = await router.http.post("/tokenize", json={"messages": HI})
        assert bytes(answer.json()["tokens"]) == b"user:hi\nassistant:"
        answer = await router.http.post("/detokenize", json={"tokens": [97, 195, 169, EOS]})
        assert answer.json() == {"prompt": "aé<eos>"}
        assert (await router.http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": HI}),
            ("/tokenize", {"prompt": 5}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": "a"}),
            ("/detokenize", {"tokens": [257]}),
            ("/detokenize", {"tokens": [True]}),
        ]:
            assert (await router.http.post(path, json=body)).status_code == 400

    run(fake, check)


def test_probes_and_version() -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        for path in ("/livez", "/readyz", "/health"):
            answer = await router.http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert (await router.http.get("/version")).json()["version"]
        metrics = (await router.http.get("/metrics")).text
        assert "octavo_requests_in_flight 0.0" in metrics
        assert "octavo_router_sessions 1.0" in metrics
        router.service.is_draining = True
        assert (await router.http.get("/livez")).status_code == 200
        assert (await router.http.get("/readyz")).status_code == 503
        answer = await router.http.post(TEXT, json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    run(fake, check)


def test_not_ready_without_a_scheduler() -> None:
    async def main() -> None:
        async with running_router(redial_ms=1) as router:
            assert (await router.http.get("/health")).status_code == 503
            assert (await router.http.get("/livez")).status_code == 200
            answer = await router.http.post(CHAT, json={"messages": HI})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "unavailable"
            # Text work needs no scheduler.
            answer = await router.http.post("/tokenize", json={"prompt": "a"})
            assert answer.json() == {"count": 1, "max_model_len": None, "tokens": [97]}

    asyncio.run(main())


def test_stream_headers() -> None:
    fake = byte_scheduler(script=saying("x"))

    async def check(router: RunningRouter) -> None:
        answer = await router.http.post(CHAT, json={"messages": HI, "stream": True})
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        assert answer.headers["x-request-id"].startswith("req-")

    run(fake, check)


def test_one_event_per_write() -> None:
    """As chunks of the transfer encoding show: each holds one event."""
    fake = byte_scheduler(script=saying("abc"), interval_s=0.002)

    async def check(router: RunningRouter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        events: list[bytes] = []
        while size := int(await reader.readline(), 16):
            events.append(await reader.readexactly(size))
            await reader.readline()
        assert all(e.endswith(b"\n\n") and e.count(b"\n\n") == 1 for e in events)
        assert len(events) == 6  # role, a, b, c, finish, [DONE]
        writer.close()
        await writer.wait_closed()

    run(fake, check)


def test_equal_request_ids_are_strangers() -> None:
    fake = byte_scheduler(interval_s=0.002)

    async def check(router: RunningRouter) -> None:
        async def ask(prompt: str) -> str:
            answer = await router.http.post(
                TEXT, json={"prompt": prompt, "max_tokens": 8}, headers={"X-Request-Id": "same"}
            )
            assert answer.headers["x-request-id"] == "same"
            return text_of(answer.json())

        alone = [await ask("a"), await ask("b")]
        assert list(await asyncio.gather(ask("a"), ask("b"))) == alone

    run(fake, check)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [(b"a b\tc", "abc"), (b"x" * 10_000, "x" * 128), ("ü-1".encode(), "-1"), (b"", None)],
)
def test_request_ids_are_cleaned(given: bytes, echoed: str | None) -> None:
    fake = byte_scheduler()

    async def check(router: RunningRouter) -> None:
        answer = await router.http.post(
            TEXT, json={"prompt": "x"}, headers=[(b"x-request-id", given)]
        )
        said = answer.headers["x-request-id"]
        assert said == echoed if echoed is not None else said.startswith("req-")
        assert fake.submits[0].request_id == said

    run(fake, check)
