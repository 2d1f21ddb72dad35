"""What errors over HTTP look like; for tests of the router."""

import json
from typing import Any, NoReturn

from tests.fakes.router_process import byte_scheduler
from tests.unit.router import http_answers


def strict(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


def check_error(answer: Any, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The answer's error, of that status and about that field."""
    assert answer.status_code == status, answer.text
    error = strict(answer.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert 0 < len(error["message"]) < 500
    return error


def run(check: Any, **settings: Any) -> None:
    """`check(router, scheduler)` against a scheduler of bytes."""

    fake = byte_scheduler()
    http_answers.run(fake, lambda router: check(router, fake), **settings)
