"""How deep a body may be nested: a fixed bound, whatever stack is left where the body is read."""

import asyncio
import json

import pytest

from octavo.errors import InvalidRequestError
from octavo_router.http_body import MAX_DEPTH, parse_object
from tests.fakes.router_process import byte_scheduler, running_router

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Fields whose errors show the value, that are compared, walked, rendered or ignored.
FIELDS = ("temperature", "stop", "logit_bias", "best_of", "tools", "messages", "user", "metadata")


def nested(opening: str, closing: str, depth: int) -> str:
    """A value of so many levels, the innermost empty."""
    return opening * (depth - 1) + closing[0] + closing[-1] + closing[-1] * (depth - 1)


LISTS, OBJECTS, MIXED = ("[", "[]"), ('{"a":', "{}"), ('[{"b":2},1,', "[]")


@pytest.mark.parametrize("shape", [LISTS, OBJECTS, MIXED], ids=["lists", "objects", "mixed"])
def test_the_bound_is_exact(shape: tuple[str, str]) -> None:
    def body(depth: int) -> bytes:
        return b'{"x": %s, "y": [1, "[[{{"]}' % nested(*shape, depth - 1).encode()

    for depth in (2, 3, MAX_DEPTH - 1, MAX_DEPTH):
        assert json.loads(body(depth)) == parse_object(body(depth))
    for depth in (MAX_DEPTH + 1, 2 * MAX_DEPTH, 300):
        with pytest.raises(InvalidRequestError, match=f"at most {MAX_DEPTH} levels"):
            parse_object(body(depth))


def test_many_brackets_are_no_depth() -> None:
    body = {"prompt": [[1]] * 500, "text": "[{" * 500, "messages": [{"parts": [{}]}] * 500}
    assert parse_object(json.dumps(body).encode()) == body


def test_no_depth_is_a_failure() -> None:
    """Some parse, but with too little stack left to repeat them in an error."""

    async def main() -> None:
        async with running_router(byte_scheduler()) as router:
            for path in (CHAT, TEXT):
                for field in FIELDS:
                    for depth in range(900, 1000, 5):
                        body = f'{{"{field}": {nested(*LISTS, depth)}}}'
                        answer = await router.http.post(path, content=body)
                        assert answer.status_code == 400, (field, depth)
                        assert "nested too deeply" in answer.json()["error"]["message"]

    asyncio.run(main())
