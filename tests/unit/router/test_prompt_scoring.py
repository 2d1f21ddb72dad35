"""Echo and prompt log-probabilities: the prompt in the answer, streamed and whole."""

import asyncio
import json
import struct
from typing import Any, NoReturn

import pytest

from octavo.v1 import common_pb2, inference_pb2
from octavo_router import sse
from tests.fakes.byte_tokenizer import EOS
from tests.fakes.fake_scheduler import FakeScheduler, Plan
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
STOP = common_pb2.FINISH_REASON_STOP


def run(fake: FakeScheduler, check: Any) -> None:
    async def main() -> None:
        async with running_router(fake) as router:
            await check(router)

    asyncio.run(main())


def saying(text: str) -> Any:
    return lambda submit, _: Plan([*text.encode()][: submit.sampling.max_tokens])


async def both_ways(router: RunningRouter, body: dict[str, Any], num_choices: int = 1) -> Any:
    """The unstreamed completion, after checking that the stream adds up to the same."""
    answer = await router.http.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in an answer")

    whole = json.loads(answer.text, parse_constant=refuse)
    streamed = await router.stream(
        TEXT, {**body, "stream_options": {"include_usage": True}}, num_choices
    )
    assert streamed.usage == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        assert streamed.text(index) == choice["text"]
        assert streamed.finish(index) == choice["finish_reason"]
        if choice["logprobs"] is not None:
            assert streamed.text_logprobs(index) == choice["logprobs"]
    return whole


PROMPTS: list[tuple[Any, str]] = [
    ("a\u2028b\u0085c\r\nd\x0b\x0c", "a\u2028b\u0085c\r\nd\x0b\x0c"),
    ("hé 한 🙂", "hé 한 🙂"),
    ([104, 195, 169, EOS, 255], "hé<eos>\ufffd"),
    ("x", "x"),
]


@pytest.mark.parametrize(("prompt", "shown"), PROMPTS, ids=["separators", "scripts", "ids", "one"])
def test_an_echo_comes_before_the_text(prompt: Any, shown: str) -> None:
    fake = byte_scheduler(script=saying("wörld"))

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, {"prompt": prompt, "echo": True})
        assert whole["choices"][0]["text"] == shown + "wörld"
        num_prompt = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
        assert whole["usage"]["prompt_tokens"] == num_prompt
        assert whole["usage"]["completion_tokens"] == 6
        # Without logprobs nothing is scored.
        assert not fake.submits[0].sampling.HasField("prompt_logprobs")

    run(fake, check)


def test_a_stop_is_not_looked_for_in_the_echo() -> None:
    fake = byte_scheduler(script=saying("bcd"))

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, {"prompt": "xcd", "echo": True, "stop": ["cd", "xb"]})
        assert whole["choices"][0]["text"] == "xcdb"
        assert whole["choices"][0]["finish_reason"] == "stop"

    run(fake, check)


def test_an_echo_with_logprobs_is_one_list() -> None:
    fake = byte_scheduler(script=saying("éz"))

    async def check(router: RunningRouter) -> None:
        whole = await both_ways(router, {"prompt": "aé", "echo": True, "logprobs": 2})
        assert whole["choices"][0]["logprobs"] == {
            "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3", "bytes:\\xa9", "z"],
            "token_logprobs": [None, -0.25, -0.25, -0.5, -0.5, -0.5],
            "top_logprobs": [
                None,
                {"bytes:\\xc3": -0.25, "bytes:\\xc4": -1.25},
                {"bytes:\\xa9": -0.25, "bytes:\\xaa": -1.25},
                {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5},
                {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5},
                {"z": -0.5, "{": -1.5},
            ],
            "text_offset": [0, 1, 1, 2, 2, 3],
        }
        assert fake.submits[0].sampling.prompt_logprobs == 2

    run(fake, check)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_no_tokens_with_echo_is_scoring(logprobs: int | None) -> None:
    fake = byte_scheduler(script=lambda *_: Plan([EOS], STOP))

    async def check(router: RunningRouter) -> None:
        body = {"prompt": ["hello", "w"], "echo": True, "max_tokens": 0, "logprobs": logprobs}
        whole = await both_ways(router, body, 2)
        assert [choice["text"] for choice in whole["choices"]] == ["hello", "w"]
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["usage"]["total_tokens"] == 6
        if logprobs is not None:
            first, second = (choice["logprobs"] for choice in whole["choices"])
            assert first["tokens"] == [*"hello"]
            assert first["token_logprobs"] == [None, *[-0.25] * 4]
            assert second["token_logprobs"] == [None]
        # The wire knows no zero; what was drawn is dropped.
        assert fake.submits[0].sampling.max_tokens == 1
        assert router.outcomes() == {("completions", "length"): 2}
        assert router.value("octavo_generation_tokens_total") == 0

    run(fake, check)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs(path: str) -> None:
    fake = byte_scheduler(script=saying("ab"))

    async def check(router: RunningRouter) -> None:
        body = {"messages": HI} if path == CHAT else {"prompt": ["hi", "ho"]}
        answer = await router.http.post(path, json={**body, "prompt_logprobs": 2, "max_tokens": 1})
        whole = answer.json()
        if path == CHAT:
            holder, prompt = whole, "user:hi\nassistant:"
        else:
            holder, prompt = whole["choices"][1], "ho"
        values = holder["prompt_logprobs"]
        assert len(values) == len(prompt)
        assert values[0] is None
        char = prompt[1]
        assert values[1] == {
            str(ord(char)): {"logprob": -0.25, "rank": 1, "decoded_token": char},
            str(ord(char) + 1): {"logprob": -1.25, "rank": 2, "decoded_token": chr(ord(char) + 1)},
        }
        text = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
        assert text == "a"
        answer = await router.http.post(path, json={**body, "prompt_logprobs": 0, "max_tokens": 1})
        holder = answer.json() if path == CHAT else answer.json()["choices"][0]
        assert [len(value) for value in holder["prompt_logprobs"][1:]] == [1] * (len(prompt) - 1)

    run(fake, check)


def test_both_kinds_have_their_own_number_of_alternatives() -> None:
    fake = byte_scheduler(script=saying("a"))

    async def check(router: RunningRouter) -> None:
        body = {"prompt": "hi", "echo": True, "logprobs": 1, "prompt_logprobs": 3}
        whole = (await router.http.post(TEXT, json=body)).json()
        choice = whole["choices"][0]
        assert fake.submits[0].sampling.prompt_logprobs == 3
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1, 1]
        assert len(choice["prompt_logprobs"][1]) == 3

    run(fake, check)


def test_impossible_is_a_number_that_json_can_say() -> None:
    """-inf is what a token that was masked or filtered away has."""

    class Impossible(FakeScheduler):
        def _logprobs(self, token_id: int, value: float, count: int) -> common_pb2.TokenLogprobs:
            values = [value, *[-float("inf")] * count]
            tops = [token_id + i for i in range(count)]
            return common_pb2.TokenLogprobs(
                logprob=-float("inf"),
                rank=7,
                top_token_ids=struct.pack(f"<{count}I", *tops),
                top_logprobs=struct.pack(f"<{count}f", *values[:count]),
            )

    fake = Impossible(script=saying("ab"), vocab_size=257, eos_token_ids=(EOS,))

    async def check(router: RunningRouter) -> None:
        body = {"prompt": "hi", "echo": True, "logprobs": 2, "prompt_logprobs": 0}
        whole = await both_ways(router, {k: v for k, v in body.items() if k != "prompt_logprobs"})
        assert whole["choices"][0]["logprobs"]["token_logprobs"] == [None, *[-9999.0] * 3]
        answer = (await router.http.post(TEXT, json=body)).json()
        assert answer["choices"][0]["prompt_logprobs"][1] == {
            "105": {"logprob": -9999.0, "rank": 8, "decoded_token": "i"}
        }
        chat = {"messages": HI, "logprobs": True, "top_logprobs": 1}
        answer = (await router.http.post(CHAT, json=chat)).json()
        assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0

    run(fake, check)


def test_siblings_wait_for_the_prompts_values() -> None:
    """They come with the first sequence: another one may have its first token before."""

    class Late(FakeScheduler):
        is_held = True

        def _add_prompt_logprobs(self, frame: Any, sequence: Any) -> None:
            if not self.is_held:
                super()._add_prompt_logprobs(frame, sequence)

    async def main() -> None:
        fake = Late(script=saying("ab"), vocab_size=257, eos_token_ids=(EOS,))
        async with running_router(fake) as router:
            body = {"prompt": "hi", "echo": True, "logprobs": 0, "n": 2}
            answer = await router.http.post(TEXT, json=body)
            # A scheduler that never sends them is at fault, not the client.
            assert answer.status_code == 500
            assert "log-probabilities of the prompt" in answer.json()["error"]["message"]
            streamed = await router.stream(TEXT, body, 2)
            assert streamed.error is not None
            fake.is_held = False
            whole = await both_ways(router, body, 2)
            for choice in whole["choices"]:
                assert choice["text"] == "hiab"
                assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, -0.5]

    asyncio.run(main())


@pytest.mark.parametrize("start", [0, 2, 2**31])
def test_values_of_no_token_end_their_request_only(start: int) -> None:
    class Wrong(FakeScheduler):
        def _add_prompt_logprobs(self, frame: Any, sequence: Any) -> None:
            batch = frame.prompt_logprobs.add(handle=sequence.submit.handle, start=start)
            batch.entries.extend([self._logprobs(97, -0.25, 0)] * 2)
            # Nobody asked for these.
            frame.prompt_logprobs.add(handle=99, start=1)

    async def main() -> None:
        fake = Wrong(script=saying("ab"), vocab_size=257, eos_token_ids=(EOS,))
        async with running_router(fake) as router:
            body = {"prompt": "hi!", "echo": True, "logprobs": 0}
            for _ in range(2):
                answer = await router.http.post(TEXT, json=body)
                assert answer.status_code == 500
                assert "log-probabilities" in answer.json()["error"]["message"]
            assert fake.num_sessions == 1
            await until(lambda: len(fake.cancels) == 2)

    asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_values_that_come_again_after_a_move_count_once(num_tokens: int) -> None:
    async def main() -> None:
        fake = byte_scheduler(script=saying("x" * 40), interval_s=0.003)
        async with running_router(fake) as router:
            body = {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 40}
            task = asyncio.create_task(router.http.post(TEXT, json=body))
            await until(lambda: bool(fake.submits))
            await until(
                lambda: any(
                    sequence.num_sent >= num_tokens
                    for session in fake._sessions
                    for sequence in session.sequences.values()
                )
            )
            fake.drop_sessions()
            choice = (await task).json()["choices"][0]
            assert choice["text"] == "hello" + "x" * 40
            assert choice["logprobs"]["token_logprobs"] == [None, *[-0.25] * 4, *[-0.5] * 40]
            assert len(fake.submits) == 2

    asyncio.run(main())


def test_over_grpc_the_prompt_comes_once_per_choice() -> None:
    fake = byte_scheduler(script=saying("abc"))

    async def check(router: RunningRouter) -> None:
        request = inference_pb2.InferenceGenerateRequest(
            text="hé", n=2, echo=True, logprobs=1, max_tokens=3
        )
        messages = [message async for message in router.inference.Generate(request)]
        for index in range(2):
            parts = [m for m in messages if m.index == index]
            assert [part.HasField("prompt") for part in parts] == [True] + [False] * (
                len(parts) - 1
            )
            prompt = parts[0].prompt
            assert (prompt.text, list(prompt.token_ids)) == ("hé", [*"hé".encode()])
            assert [item.HasField("logprob") for item in prompt.logprobs] == [False, True, True]
            assert [top.token_id for top in prompt.logprobs[1].top] == [0xC3]
            assert "".join(part.text for part in parts) == "abc"
        request = inference_pb2.InferenceGenerateRequest(text="hi", echo=True, max_tokens=0)
        messages = [message async for message in router.inference.Generate(request)]
        assert messages[0].prompt.text == "hi"
        assert not messages[0].prompt.logprobs
        assert messages[-1].usage.completion_tokens == 0
        request = inference_pb2.InferenceGenerateRequest(text="hi", prompt_logprobs=0)
        messages = [message async for message in router.inference.Generate(request)]
        assert messages[0].prompt.text == ""
        assert len(messages[0].prompt.logprobs) == 2

    run(fake, check)


@pytest.mark.parametrize(
    "options",
    [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}, {"logprobs": 2, "stream": True}],
    ids=["echo", "prompt_logprobs", "stream"],
)
def test_others_get_the_event_loop_between_large_choices(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """All choices in one go would hold every stream and probe up for seconds."""
    # Frames of this answer are small ones.
    monkeypatch.setattr(sse, "LARGE_FRAME_BYTES", 100)

    async def check(router: RunningRouter) -> None:
        tokenizer: Any = router.service.pipeline.tokenizer
        token_bytes = tokenizer.token_bytes
        num_turns = 0
        seen: set[int] = set()

        def noting(token_id: int) -> bytes:
            seen.add(num_turns)
            return token_bytes(token_id)

        async def count_turns() -> NoReturn:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(tokenizer, "token_bytes", noting)
        counting = asyncio.create_task(count_turns())
        body = {"prompt": ["x" * 50, "y" * 50], "n": 4, "max_tokens": 2, **options}
        answer = await router.http.post(TEXT, json=body)
        counting.cancel()
        assert answer.status_code == 200
        # Two prompts are rendered once each, whatever shares them; echoes and answers by choice.
        assert len(seen) >= (2 if "prompt_logprobs" in options else 8)
        if "prompt_logprobs" in options:
            choices = answer.json()["choices"]
            first, second = choices[0]["prompt_logprobs"], choices[4]["prompt_logprobs"]
            assert first != second
            assert [c["prompt_logprobs"] for c in choices] == [first] * 4 + [second] * 4

    run(byte_scheduler(), check)
